"""``paceline train``: from labelled data and a pretrained model to a trained, evaluated, saved model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import CheckpointError, RecipeError
from paceline.facts import this_machine
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.run_folder import RunFolder
from paceline.stopwatch import Stopwatch

if TYPE_CHECKING:
    from paceline.records import RunRecord


def train(recipe: Recipe, data: object | None = None, *, out: str | Path | None = None) -> RunRecord:
    """Fine-tune, evaluate and save a model as a recipe says.

    Args:
        recipe: the whole run.
        data: rows in memory in place of ``recipe.data.source``: a pandas DataFrame, a datasets.Dataset or a list of
            dicts.
        out: the run folder; None: ``runs/<name>-<time>``.

    Returns:
        What became of it; the same is in ``summary.json``.

    Raises:
        UserError: bad data, an impossible setting, a full disk; with exit code 2 on the command line.
        Preempted: SIGTERM, SIGUSR1 or Ctrl-C; a checkpoint is saved and ``resume`` goes on.

    Example:
        >>> recipe = paceline.Recipe.parse({"model": {"source": "distilbert-base-uncased"},
        ...                                 "data": {"source": "reviews.csv"}})
        >>> paceline.train(recipe).final["test"]["accuracy"]
    """
    watch = Stopwatch()
    if data is None and recipe.data.source == "memory":
        raise RecipeError(
            "data.source: missing", "no rows were given either", "--data FILE, or train(recipe, data=rows)"
        )
    facts = this_machine()
    chosen, decisions = choose(recipe, facts)
    with watch.phase("import"):
        from paceline.run import Request, run
    with RunFolder.create(out) if out else RunFolder.create_named(recipe.name) as folder:
        return run(Request(recipe=chosen, decisions=decisions, facts=facts, folder=folder, rows=data, watch=watch))


def resume(folder: str | Path, settings: Sequence[str] = (), data: object | None = None) -> RunRecord:
    """Go on with an interrupted run at the exact sample where its newest whole checkpoint left off.

    Args:
        folder: the run folder.
        settings: ``key=value`` changes, named on purpose.
        data: the same rows in memory, for a run that was started with some.

    Raises:
        CheckpointError: no checkpoint, none that is whole, or a run that would learn something else than before.
        RunFolderError: no run is there, or it is still going on.
    """
    watch = Stopwatch()
    with RunFolder.open(folder) as held:
        if not settings and held.summary.exists():
            raise CheckpointError(
                f"{folder}: the run is finished", "nothing is left to resume", "--set loop.epochs=MORE trains on"
            )
        facts = this_machine()
        recipe, decisions = choose(held.read_recipe().with_settings(settings), facts)
        with watch.phase("import"):
            from paceline.checkpoint.store import CheckpointStore
            from paceline.run import Request, run
        with watch.phase("checkpoint"):
            checkpoint = CheckpointStore(held.checkpoints, recipe.loop.keep_last).newest()
        watch.add(checkpoint.state["seconds"])
        named = frozenset(setting.partition("=")[0].strip() for setting in settings)
        return run(
            Request(
                recipe=recipe,
                decisions=decisions,
                facts=facts,
                folder=held,
                rows=data,
                watch=watch,
                checkpoint=checkpoint,
                named=named,
            )
        )
