"""``paceline train``: from labelled data and a pretrained model to a trained, evaluated, saved model."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from paceline.contract.errors import CheckpointError, RecipeError
from paceline.contract.exclusive import exclusive
from paceline.contract.plain import plain
from paceline.contract.python_fixes import python_fixes
from paceline.contract.stop import NOT_BEGUN, Stop
from paceline.contract.stopwatch import Stopwatch
from paceline.machine.cluster import TIMEOUT_SECONDS, Place, find_place
from paceline.machine.facts import Facts, this_machine
from paceline.recipe import Recipe, merge
from paceline.recipe.choose import choose
from paceline.recipe.techniques import opened
from paceline.recipe.trust import NONE, Trust, is_of_a_run, require_trust
from paceline.run_folder import RunFolder, way_to_more

if TYPE_CHECKING:
    from paceline.contract.records import RunRecord
    from paceline.run.checkpoint.store import Checkpoint
    from paceline.seams import Mesh, World


_SHARED = "resume where every rank sees the same run folder: on storage that all machines share, or on one machine"


@python_fixes()
@exclusive("paceline.train", trains=True)
def train(
    recipe: Recipe | Mapping[str, Any] | str | Path,
    data: object | None = None,
    *,
    settings: Sequence[str] = (),
    out: str | Path | None = None,
    gpus: int | Literal["all"] | None = None,
    processes: int | None = None,
    started: float | None = None,
    place: Place | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> RunRecord:
    """Fine-tune, evaluate and save a model as a recipe says.

    Args:
        recipe: the whole run; or what makes it: nested plain data, or the path of a YAML file.
        data: in place of ``recipe.data.source``: rows in memory (a DataFrame, a datasets.Dataset, a dict of columns,
            texts and labels as a tuple, a list of dicts, ...; by split as a dict of these), or another source as text.
        settings: ``key=value`` changes of the recipe, as ``--set`` takes them on the command line.
        out: the run folder; None: ``runs/<name>-<time>``. Where torchrun, or a scheduler that has requeued the job,
            starts the ranks again, the run that they had begun there goes on.
        gpus: train on this many GPUs of this machine, or all of them, a process each; ``--gpus`` on the command line.
        processes: train with this many processes on the CPU; ``--processes`` on the command line.
        started: when the run began, on the clock of ``time.perf_counter``; None: now. The command line gives the start
            of its process, so that the interpreter's seconds are counted too.
        place: who this process is among the ranks of the run; None: as the environment says, else alone.
        timeout_seconds: how long ranks wait for one another.

    Returns:
        What became of it; the same is in ``summary.json``.

    Raises:
        UserError: bad data, an impossible setting, a full disk; with exit code 2 on the command line. Another thread
            of this process trains.
        Preempted: SIGTERM, SIGUSR1, SIGUSR2, SIGHUP or Ctrl-C; a checkpoint is saved and ``resume`` goes on.

    Example:
        >>> recipe = {"model": {"source": "distilbert-base-uncased"}, "data": {"source": "reviews.csv"}}
        >>> paceline.train(recipe).final["test"]["accuracy"]
    """
    recipe, data = _settled(recipe, data, settings)
    if gpus is not None or processes is not None:
        from paceline.verbs.launch.from_python import train_on_ranks

        ranks: dict[str, Any] = {"gpus": gpus, "processes": processes}
        return train_on_ranks(recipe, data, **ranks, out=out, timeout_seconds=timeout_seconds)
    watch, place = Stopwatch(started), place or find_place(os.environ)
    if data is None and recipe.data.source == "memory":
        raise RecipeError(
            "data.source: missing", "no rows were given either", "--data FILE, or train(recipe, data=rows)"
        )
    with contextlib.ExitStack() as stack:
        with Stop(NOT_BEGUN):
            facts = _facts_beside_imports(watch)
            from paceline.contract.records import RunRecord
            from paceline.observe.metrics_file import record_from_plain
            from paceline.run.job import Request
            from paceline.run.run import run
            from paceline.verbs.restarted import ended_run, say, way_of

            with watch.phase("start"):
                chosen, decisions = choose(recipe, facts, place.world_size)
                mesh = stack.enter_context(_joined(place, chosen, timeout_seconds, resumes=False, folder=out))
                world = mesh.whole
                way = world.share(way_of(out, os.environ, sys.argv) if world.is_first else None)
            checkpoint = None
            if out is not None and way == "done":
                ended = world.share(plain(ended_run(Path(out))) if world.is_first else None)
                return cast("RunRecord", record_from_plain(RunRecord, ended))
            if out is not None and way == "go on":
                folder, checkpoint = _held(out, chosen, mesh, watch, stack)
                if world.is_first:
                    say(f"{folder.path}: started again, and goes on after step {checkpoint.step}")
            else:
                with watch.phase("start"):
                    folder = stack.enter_context(_shared(world, lambda: _made(out, recipe.name, anew=way == "anew")))
        if checkpoint is not None:
            _take_up(checkpoint, watch)
        return run(
            Request(
                recipe=chosen,
                decisions=decisions,
                facts=facts,
                folder=folder,
                rows=data,
                watch=watch,
                mesh=mesh,
                checkpoint=checkpoint,
            )
        )


def _settled(recipe: object, data: object, settings: Sequence[str]) -> tuple[Recipe, object]:
    """A recipe out of what makes one, and rows; a source in place of rows is the recipe's."""
    if isinstance(recipe, str | Path):
        path, recipe = Path(recipe), Recipe.load(recipe, settings)
        if is_of_a_run(path):
            require_trust(recipe, path, NONE)
    elif isinstance(recipe, Mapping):
        recipe = Recipe.parse(merge(recipe, settings))
    elif isinstance(recipe, Recipe) and settings:
        recipe = recipe.with_settings(settings)
    if not isinstance(recipe, Recipe):
        what = f"train: a recipe of type {type(recipe).__name__}"
        raise RecipeError(what, "it is a Recipe, a dict of settings or the path of a YAML file", 'train("recipe.yaml")')
    if isinstance(data, str | Path):
        part = recipe.data.model_copy(update={"source": str(data), "validation": None, "test": None})
        return recipe.model_copy(update={"data": part}), None
    return recipe, data


@python_fixes()
@exclusive("paceline.resume", trains=True)
def resume(
    folder: str | Path,
    settings: Sequence[str] = (),
    data: object | None = None,
    *,
    started: float | None = None,
    place: Place | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    trust_remote_code: bool = False,
    trust_references: bool = False,
) -> RunRecord:
    """Go on with an interrupted run at the exact sample where its newest whole checkpoint left off.

    The number of ranks may be another than before: the global batch and the order of samples stay.

    Args:
        folder: the run folder.
        settings: ``key=value`` changes, named on purpose.
        data: the same rows in memory, for a run that was started with some.
        started, place, timeout_seconds: as in ``train``.
        trust_remote_code, trust_references: as in ``evaluate``; what ``settings`` name is allowed by that.

    Raises:
        UserError: the folder's recipe would run code that nobody has allowed.
        CheckpointError: no checkpoint, none that is whole, or a run that would learn something else than before.
        RunFolderError: no run is there, or it is still going on.
    """
    watch, place = Stopwatch(started), place or find_place(os.environ)
    trust = Trust(remote_code=trust_remote_code, references=trust_references)
    asked = recipe_to_resume(folder, settings, trust)
    with contextlib.ExitStack() as stack:
        with Stop(NOT_BEGUN):
            facts = _facts_beside_imports(watch)
            from paceline.run.job import Request
            from paceline.run.run import run

            with watch.phase("start"):
                recipe, decisions = choose(asked, facts, place.world_size)
                mesh = stack.enter_context(_joined(place, recipe, timeout_seconds, resumes=True, folder=folder))
            held, checkpoint = _held(folder, recipe, mesh, watch, stack)
        _take_up(checkpoint, watch)
        named = frozenset(setting.partition("=")[0].strip() for setting in settings)
        return run(
            Request(
                recipe=recipe,
                decisions=decisions,
                facts=facts,
                folder=held,
                rows=data,
                watch=watch,
                mesh=mesh,
                checkpoint=checkpoint,
                named=named,
            )
        )


def _made(out: str | Path | None, name: str, *, anew: bool) -> RunFolder:
    return RunFolder.create(out, anew=anew) if out else RunFolder.create_named(name)


def _held(
    folder: str | Path, recipe: Recipe, mesh: Mesh, watch: Stopwatch, stack: contextlib.ExitStack
) -> tuple[RunFolder, Checkpoint]:
    """The folder of a run that goes on, and where it does. The ranks have joined, so that the others hear of it when
    another run is in there."""
    with watch.phase("start"):
        held = stack.enter_context(RunFolder.open(folder)) if mesh.whole.is_first else RunFolder.view(folder)
    with watch.phase("checkpoint"):
        return held, _newest(held, recipe.loop.keep_last, mesh.whole)


def _take_up(checkpoint: Checkpoint, watch: Stopwatch) -> None:
    from paceline.run.checkpoint.resumable import require_resumable

    require_resumable(checkpoint)
    watch.add(checkpoint.state["seconds"])


def _newest(folder: RunFolder, keep_last: int, world: World) -> Checkpoint:
    """The newest checkpoint, which has to be the same for every rank."""
    from paceline.distributed.agree import agree
    from paceline.run.checkpoint.store import CheckpointStore

    found = CheckpointStore(folder.checkpoints, keep_last).newest()
    agree(world, "the checkpoint", {"step": found.step, "digest": found.digest[:16]}, _SHARED)
    return found


def recipe_to_resume(folder: str | Path, settings: Sequence[str] = (), trust: Trust = NONE) -> Recipe:
    """A run's own recipe and the changes to it; what was switched on for the machine it began on is left open.

    Raises:
        CheckpointError: the run is finished, and no setting makes it longer.
        RunFolderError: no run is there.
        RecipeError: a setting that is none.
        UserError: it would run code that ``trust`` does not allow.
    """
    seen = RunFolder.view(folder)
    if not settings and seen.summary.exists():
        early = '"status": "stopped early"' in seen.summary.read_text(encoding="utf-8", errors="replace")
        fix = way_to_more(seen.read_recipe(), stopped_early=early)
        raise CheckpointError(f"{folder}: the run is finished", "nothing is left to resume", fix)
    recipe = _open_again(seen.read_recipe()).with_settings(settings)
    require_trust(recipe, folder, trust, settings)
    return recipe


@contextlib.contextmanager
def _joined(
    place: Place, recipe: Recipe, timeout_seconds: float, *, resumes: bool, folder: str | Path | None
) -> Iterator[Mesh]:
    """The ranks of the run, once all are here and were given the same command and recipe."""
    import torch

    from paceline.distributed.agree import agree
    from paceline.distributed.group import joined
    from paceline.seams import Mesh

    backend = None if recipe.parallel.backend == "auto" else recipe.parallel.backend
    device = torch.device(recipe.device)
    with joined(place, backend=backend, device=device, timeout_seconds=timeout_seconds) as world:
        agree(world, "the command", {"--resume": resumes, "the run folder": str(folder) if folder else None})
        agree(world, "the recipe", recipe.resolved())
        yield Mesh.over(world, tensor=recipe.parallel.tensor, pipe=recipe.parallel.pipeline)


@contextlib.contextmanager
def _shared(world: World, make: Callable[[], RunFolder]) -> Iterator[RunFolder]:
    """The run folder: rank 0 makes and holds it, the others follow."""
    if world.is_first:
        with make() as folder:
            world.share(str(folder.path))
            yield folder
    else:
        yield RunFolder.follow(world.share(None))


def _open_again(recipe: Recipe) -> Recipe:
    """A run's own recipe with what was switched on for its machine left open: this one may be another."""
    settings = list(opened(recipe))
    if recipe.data.resident is True:
        settings.append("data.resident=auto")
    return recipe.with_settings(settings)


def _facts_beside_imports(watch: Stopwatch) -> Facts:
    """This machine's facts; while the driver's tool takes its second to answer, torch and the run are imported."""
    with ThreadPoolExecutor(1, "paceline-facts") as beside, watch.importing():
        asking = beside.submit(this_machine)
        import paceline.run.run  # noqa: F401

        return asking.result()
