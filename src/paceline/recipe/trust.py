"""Whose code may run: a person grants it on the command line, a run folder never does.

A recipe file is a person's own: what it names is run. The recipe inside a run folder may have come with the folder
from anybody, as its weights and checkpoints did, so that whatever of it would run code has to be allowed anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from paceline.contract.errors import UserError
from paceline.contract.references import library_of
from paceline.recipe.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Trust:
    """What the person who gave the command allows to run."""

    remote_code: bool = False
    """Python files that came with the model: ``--trust-remote-code``."""
    references: bool = False
    """Functions that the recipe names, ``package.module:function``: ``--trust-references``."""


NONE = Trust()


def references(recipe: Recipe) -> dict[str, str]:
    """Setting -> function of a person's own that it names; not models of an installed library."""
    schedules = {"schedule.type": recipe.schedule.type}
    for index, group in enumerate(recipe.optimizer.groups):
        if group.schedule is not None:
            schedules[f"optimizer.groups[{index}].schedule.type"] = group.schedule.type
    factory = recipe.model.factory or ""
    factory = "" if library_of(factory) else factory
    named = {"model.factory": factory, "task.loss": recipe.task.loss or "", **schedules}
    found = {setting: value for setting, value in named.items() if ":" in value}
    metrics = [name for name in recipe.task.metrics or () if ":" in name]
    return {**found, **({"task.metrics": ", ".join(metrics)} if metrics else {})}


def switches(recipe: Recipe) -> str:
    """What a command on this recipe's run folder has to allow, as it is typed; empty where it runs nothing."""
    wanted = {"--trust-remote-code": recipe.model.trust_remote_code, "--trust-references": bool(references(recipe))}
    return "".join(f" {switch}" for switch, is_wanted in wanted.items() if is_wanted)


def require_trust(recipe: Recipe, folder: str | Path, trust: Trust, settings: Iterable[str] = ()) -> None:
    """Refuse a run folder's recipe that would run code which nobody has allowed now.

    Args:
        recipe: the folder's, with ``settings`` in it.
        folder: for the message.
        trust: what the person allows.
        settings: ``key=value`` changes of the command line, which are the person's own words.

    Raises:
        UserError: names what wanted to run, and the switch that allows it.
    """
    own = {setting.partition("=")[0].strip() for setting in settings}
    if recipe.model.trust_remote_code and not trust.remote_code and "model.trust_remote_code" not in own:
        raise UserError(
            f"{folder}: its recipe lets Python code that came with the model run (model.trust_remote_code)",
            "a run folder may be somebody else's, and what is in it allows nothing",
            f"read that code ({recipe.model.source or folder}), then add --trust-remote-code",
        )
    for setting, value in references(recipe).items():
        if not trust.references and setting.partition("[")[0] not in own:
            raise UserError(
                f"{folder}: its recipe names a function to run: {setting} = {value}",
                "a run folder may be somebody else's, and what is in it allows nothing",
                "read that function, then add --trust-references",
            )


def is_of_a_run(path: Path) -> bool:
    """Whether a recipe file lies in a run folder, where whoever made the run has put it."""
    return path.name == "recipe.yaml" and any(any(path.parent.glob(name)) for name in _OF_A_RUN)


_OF_A_RUN = ("manifest.json", "summary.json", "metrics.jsonl", "model/paceline.json", "checkpoints/*/COMMITTED")
"""What paceline leaves beside a recipe; a folder named ``model`` may be anybody's."""
