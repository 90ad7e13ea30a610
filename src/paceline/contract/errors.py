"""The errors a person can cause, each of which teaches.

A message has three parts: *what* was set or found (a path and its value), *why* it cannot work, and the smallest
change that works (*fix*). The command line prints the three parts without a traceback and exits with ``exit_code``;
every other exception is a bug of ours, shows its traceback and exits with 1.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence

INTERRUPTED = 130
"""Exit code after Ctrl-C where there was nothing to save: 128 + SIGINT, as shells count."""


class PacelineError(Exception):
    """Base of all errors that paceline raises on purpose."""

    exit_code = 1


class UserError(PacelineError):
    """Something the user can change: bad input, an impossible setting, a full disk.

    Args:
        what: what was set or found, as ``path = value`` where there is one.
        why: why it cannot work; may be empty where ``what`` says it all.
        fix: the smallest change that works: a command, a setting, a line to edit.
    """

    exit_code = 2

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        self.what, self.why, self.fix = what, why, fix
        super().__init__(self._message())

    def respell(self, spell: Callable[[str], str]) -> None:
        """Change how reason and fix are spelled, and with them the message."""
        self.why, self.fix = spell(self.why), spell(self.fix)
        self.args = (self._message(),)

    def _message(self) -> str:
        lines = [self.what] + [f"  why: {self.why}"] * bool(self.why) + [f"  fix: {self.fix}"] * bool(self.fix)
        return "\n".join(lines)


class RecipeError(UserError):
    """A recipe, a ``--set`` or a combination of settings that cannot run."""


class DataError(UserError):
    """Data that cannot be used. ``file``, ``line`` and ``column`` say where, when they are known."""

    def __init__(
        self,
        problem: str,
        *,
        file: str = "",
        line: int | None = None,
        column: str | None = None,
        found: str | None = None,
        why: str = "",
        fix: str = "",
    ) -> None:
        self.file, self.line, self.column, self.problem = file, line, column, problem
        place = ":".join(part for part in (file, str(line) if line is not None else "") if part)
        where = ", ".join(part for part in (place, f"column {column!r}" if column is not None else "") if part)
        shown = f" (found {excerpt(found)})" if found is not None else ""
        super().__init__(f"{where}: {problem}{shown}" if where else f"{problem}{shown}", why, fix)


class ModelError(UserError):
    """A model or tokenizer that cannot be loaded, built or trained as asked."""


class TraceError(ModelError):
    """A model whose step cannot be traced without a GPU: it asks for numbers, and a plan has sizes alone."""


class RunFolderError(UserError):
    """A run folder that is missing, in use, or not what it should be."""


class CheckpointError(UserError):
    """No usable checkpoint, or one that does not fit this run."""


class DiskFullError(UserError):
    """Not enough room on the disk; says the bytes needed and free."""


class MemoryFullError(UserError):
    """Not enough memory on the device; what was saved of the run stays, and it can be resumed with other settings.

    ``phase`` says what was going on; ``settings`` are the changes offered, as ``--set`` takes them, the cheapest first.
    """

    def __init__(
        self, what: str, why: str = "", fix: str = "", *, phase: str = "", settings: Sequence[str] = ()
    ) -> None:
        self.phase, self.settings = phase, tuple(settings)
        super().__init__(what, why, fix)


class NonFiniteError(UserError):
    """The loss or the gradient stopped being a finite number.

    The update of that step was not applied, so the weights are still finite. ``sample_ids`` are row numbers of the
    training split's source, as the order gave them to the step.
    """

    def __init__(self, what: str, why: str, fix: str, *, step: int, epoch: int, sample_ids: Sequence[int]) -> None:
        self.step, self.epoch, self.sample_ids = step, epoch, tuple(sample_ids)
        super().__init__(what, why, fix)


class Preempted(PacelineError):
    """The run was asked to stop (SIGTERM, Ctrl-C), has saved a checkpoint, and can be resumed."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h: try again later


def in_a_line(error: BaseException) -> str:
    """The kind of an error that nobody raised on purpose, and the first line of what it says."""
    return f"{type(error).__name__}: {first_line(error)}"


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def excerpt(text: str, limit: int = 60) -> str:
    """``text`` quoted on one line, at most ``limit`` characters of it.

    Letters of every script stay as they are; controls, direction overrides and what cannot be seen are escaped.
    """
    shown = text[:limit]
    return repr(shown) + (f" … ({len(text):,} characters)" if len(text) > limit else "")


NEAR = 0.75
"""How alike two words are when one may be a misspelling of the other: 1 for the same letters, 0 for no common one.

``lable`` and ``label`` are 0.8 alike. ``amp`` and ``name``, 0.57, are two words.
"""

SHOWN = 20
"""Known words that a message lists."""


def close_words(word: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return the known words of which ``word`` is most likely a misspelling or the beginning, the closest first.

    Case and separators do not count, so that ``Batch-Size`` is ``batch_size``. The digits have to be the same in some
    order, since ``fp8`` is no misspelling of ``fp16``. A wrong word is worse than none.
    """
    bare = _without_separators(word)
    spelt = {_without_separators(one): one for one in sorted(known, reverse=True)}
    alike = [one for one in spelt if _digits(one) == _digits(bare)]
    begun = [one for one in spelt if len(bare) >= 4 and one.startswith(bare)]
    near = begun if bare not in spelt and len(begun) <= most else []
    near = near or difflib.get_close_matches(bare, alike, n=most, cutoff=NEAR)
    # letters that changed places are less alike the shorter a word is
    near = near or [one for one in alike if len(bare) >= 3 and sorted(one) == sorted(bare)]
    return [spelt[one] for one in near[:most]]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a clause that names the closest known word, or those that are known where none is near."""
    known = sorted(known)
    for near in close_words(word, known):
        return f"did you mean {near!r}?"
    more = f", and {len(known) - SHOWN:,} more" if len(known) > SHOWN else ""
    return f"known: {', '.join(known[:SHOWN])}{more}"


def _without_separators(word: str) -> str:
    return re.sub(r"[-_\s]", "", word.casefold()) or word


def _digits(word: str) -> list[str]:
    return sorted(re.findall(r"\d", word))
