"""``paceline train``: from labelled data and a pretrained model to a trained, evaluated, saved model."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import CheckpointError, RecipeError
from paceline.facts import Facts, this_machine
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.run_folder import RunFolder
from paceline.stopwatch import Stopwatch

if TYPE_CHECKING:
    from paceline.records import RunRecord


def train(
    recipe: Recipe, data: object | None = None, *, out: str | Path | None = None, started: float | None = None
) -> RunRecord:
    """Fine-tune, evaluate and save a model as a recipe says.

    Args:
        recipe: the whole run.
        data: rows in memory in place of ``recipe.data.source``: a pandas DataFrame, a datasets.Dataset or a list of
            dicts.
        out: the run folder; None: ``runs/<name>-<time>``.
        started: when the run began, on the clock of ``time.perf_counter``; None: now. The command line gives the start
            of its process, so that the interpreter's seconds are counted too.

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
    watch = Stopwatch(started)
    if data is None and recipe.data.source == "memory":
        raise RecipeError(
            "data.source: missing", "no rows were given either", "--data FILE, or train(recipe, data=rows)"
        )
    facts = _facts_beside_imports(watch)
    from paceline.run import Request, run

    with watch.phase("start"):
        chosen, decisions = choose(recipe, facts)
        place = RunFolder.create(out) if out else RunFolder.create_named(recipe.name)
    with place as folder:
        return run(Request(recipe=chosen, decisions=decisions, facts=facts, folder=folder, rows=data, watch=watch))


def resume(
    folder: str | Path, settings: Sequence[str] = (), data: object | None = None, *, started: float | None = None
) -> RunRecord:
    """Go on with an interrupted run at the exact sample where its newest whole checkpoint left off.

    Args:
        folder: the run folder.
        settings: ``key=value`` changes, named on purpose.
        data: the same rows in memory, for a run that was started with some.
        started: as in ``train``.

    Raises:
        CheckpointError: no checkpoint, none that is whole, or a run that would learn something else than before.
        RunFolderError: no run is there, or it is still going on.
    """
    watch = Stopwatch(started)
    with RunFolder.open(folder) as held:
        if not settings and held.summary.exists():
            raise CheckpointError(
                f"{folder}: the run is finished", "nothing is left to resume", "--set loop.epochs=MORE trains on"
            )
        asked = _open_again(held.read_recipe()).with_settings(settings)
        facts = _facts_beside_imports(watch)
        recipe, decisions = choose(asked, facts)
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


def _open_again(recipe: Recipe) -> Recipe:
    """A run's own recipe with what was switched on for its machine left open: this one may be another."""
    names = ("packing", "channels_last", "fused_qkv", "compile", "capture")
    opened = [f"techniques.{name}=auto" for name in names if getattr(recipe.techniques, name) is True]
    if recipe.data.resident is True:
        opened.append("data.resident=auto")
    return recipe.with_settings(opened)


def _facts_beside_imports(watch: Stopwatch) -> Facts:
    """This machine's facts; while the driver's tool takes its second to answer, torch and the run are imported."""
    with ThreadPoolExecutor(1, "paceline-facts") as beside, watch.importing():
        asking = beside.submit(this_machine)
        import paceline.run  # noqa: F401

        return asking.result()
