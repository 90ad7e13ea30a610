"""``paceline trace``: a window of a run's steps, where its time went, and the switch that wins it back."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.contract.errors import PacelineError, UserError
from paceline.contract.interpreter import python
from paceline.recipe import Recipe
from paceline.recipe.trust import NONE, Trust, require_trust, switches
from paceline.recipe.windows import problem_of, step_windows
from paceline.run_folder import RunFolder

DEFAULT_STEPS = ("last-epoch:-10",)
"""Where neither recipe nor command names any."""

LONG = 10**9
"""Steps of an epoch that is longer than any, for windows of a run whose length is not known yet."""

Run = Callable[[Sequence[str]], int]
"""Runs the words of a ``paceline`` command in a process of its own; returns its exit code."""


class TryFailed(PacelineError):
    """The second run did not come to its end; it has said why."""


def trace_settings(
    recipe: Recipe, steps: Sequence[str], kind: str | None, graph: str | None, memory: bool
) -> list[str]:
    """What a command's options change in a recipe, as ``--set`` takes it.

    Raises:
        UserError: one of ``steps`` is no window; among those of a list it would be taken for something else.
    """
    for text in steps:
        if problem := problem_of(text):
            raise UserError(f"--steps: {problem}")
    windows = steps or recipe.trace.steps or DEFAULT_STEPS
    found = [f"trace.steps=[{', '.join(windows)}]"]
    found += [f"trace.{name}={value}" for name, value in (("kind", kind), ("graph", graph)) if value]
    return [*found, "trace.memory=true"] if memory else found


def show(folder: Path, say: Callable[[str], None]) -> None:
    """Say what the windows of a run tell, one after the other; those that cannot be read stop none of the others.

    Raises:
        UserError: the folder is no run's, or nothing was traced in it; at the end, where a window could not be read.
    """
    from paceline.tracing.outcome import window_told

    windows, unreadable = _windows(_folder_of(folder)), []
    for number, window in enumerate(windows):
        try:
            text = window_told(window)
        except UserError as error:
            unreadable.append(window.name)
            text = f"{window.name}: {error}"
        say(f"\n{text}" if number else text)
    if unreadable:
        what = f"{folder}: {len(unreadable)} of {len(windows)} windows cannot be read"
        raise UserError(what, f"what is wrong stands above, under {', '.join(unreadable)}")


def nsys_command(words: Sequence[str], out: Path, recipe: Recipe) -> list[str]:
    """The words that run a ``paceline`` command under Nsight Systems; its report goes beside the run folder.

    Args:
        words: of the command, from ``paceline`` on.
        out: the run folder.
        recipe: with its windows.
    """
    # as many reports as windows, of which those that overlap are one; where the last epoch begins is not known yet
    windows = len(step_windows(recipe.trace.steps, 2 * LONG, LONG))
    end = "stop" if windows == 1 else f"repeat:{windows}"
    graphs = ["--cuda-graph-trace=node"] if recipe.trace.graph == "keep" else []
    return [
        *("nsys", "profile", "--trace=cuda,nvtx,osrt", "--sample=none", *graphs),
        *("--capture-range=cudaProfilerApi", f"--capture-range-end={end}", f"--output={out}"),
        *words,
    ]


def under_nsys(words: Sequence[str], out: Path, recipe: Recipe, say: Callable[[str], None], *, only_print: bool) -> int:
    """Print the command that traces a run with Nsight Systems, and run it where nsys is; returns the exit code."""
    command = nsys_command(["paceline", *words], out, recipe)
    say(shlex.join(command))
    if only_print:
        return 0
    if shutil.which("nsys") is None:
        say("nsys is not on this machine: install Nsight Systems, or copy the line to where it is")
        return 0
    return subprocess.run(nsys_command(python("-m", "paceline", *words), out, recipe), check=False).returncode


def tried(folder: Path, say: Callable[[str], None], run: Run | None = None, trust: Trust = NONE) -> str:
    """Make the first window's steps once more with the verdict's switch on, and compare.

    Args:
        folder: of a run with a traced window.
        run: runs a command; None: in a process of its own.
        trust: what of the folder's recipe may run code.

    Returns:
        Measured gain beside the predicted one, as lines.

    Raises:
        UserError: nothing was traced, or the run cannot be made again from its folder.
        TryFailed: the second run failed.
    """
    from paceline.tracing.outcome import outcome
    from paceline.tracing.telling import compared

    folder = _folder_of(folder)
    window, before, found = outcome(_windows(folder)[0])
    if found.switch is None:
        return "nothing to try: the verdict names no setting"
    recipe = RunFolder.view(folder).read_recipe()
    require_trust(recipe, folder, trust)
    if recipe.data.source == "memory":
        raise UserError("--try: the rows were in memory", "the run is made again from its folder", "--data FILE")
    facts = window.facts
    setting = found.switch.text
    out = _beside(folder)
    words = ["train", str(folder / "recipe.yaml"), "--out", str(out), *switches(recipe).split()]
    for change in (
        setting,
        f"trace.steps=[{facts.first_step - 1}:{facts.last_step}]",
        # what comes after the window is of no use here
        f"loop.max_steps={facts.last_step}",
    ):
        words += ["--set", change]
    if facts.world_size > 1:
        words += ["--processes" if facts.device == "cpu" else "--gpus", str(facts.world_size)]
    say(f"trying {setting}: {shlex.join(['paceline', *words])}")
    code = (run or train_first)(words)
    if code:
        raise TryFailed(f"the run with {setting} ended with exit code {code}; see what it said above")
    _, after, _ = outcome(_windows(out)[0])
    return compared(before, after, found)


def _folder_of(folder: Path) -> Path:
    """A run's folder with something traced in it."""
    path = RunFolder.view(folder).path
    if not _windows(path):
        fix = f"paceline trace {folder / 'recipe.yaml'} --steps last-epoch:-10"
        raise UserError(f"{folder}: nothing was traced", "the run has no window of steps", fix)
    return path


def _windows(folder: Path) -> list[Path]:
    from paceline.tracing.window import windows_in

    return windows_in(folder)


def _beside(folder: Path) -> Path:
    """A folder of that name which is not there yet."""
    for count in range(1, 1000):
        path = folder.with_name(f"{folder.name}-tried" if count == 1 else f"{folder.name}-tried-{count}")
        if not path.exists():
            return path
    raise UserError(f"{folder}-tried: taken, and so are 999 like it", fix="remove some of them")


def train_first(words: Sequence[str]) -> int:
    """Train in a process of its own, as the run that is tried beside it will be; returns the exit code."""
    return subprocess.run(python("-m", "paceline", *words), check=False).returncode
