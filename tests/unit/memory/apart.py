"""Checks in a process of their own: what a plan registers with torch stays registered, and outlives a test.

A script is a module whose functions ``check_...`` assert something; run as a program, it makes them all, one after the
other, and prints what failed. A test runs one script and fails with all that did.
"""

from __future__ import annotations

import functools
import gc
import json
import multiprocessing
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from paceline.memory.ledger import Ledger
from tests.testing.distributed import run_processes

ROOT = Path(__file__).resolve().parents[3]

Check = Callable[..., None]


def known(bug: str) -> Callable[[Check], Check]:
    """A check that fails today because of a bug; it is an error when it holds, so that the mark is taken off."""

    def mark(check: Check) -> Check:
        @functools.wraps(check)
        def inverted(*args: Any) -> None:
            try:
                check(*args)
            except AssertionError:
                return
            raise AssertionError(f"{check.__name__} holds by now: take @known({bug!r}) off")

        return inverted

    return mark


def live_bytes(ledger: Ledger) -> int:
    """Add up the bytes of all storages that are alive now."""
    numbers = [number for number in ledger.events if number is not None]
    return sum((1 if number >= 0 else -1) * ledger.allocations[max(number, ~number)].num_bytes for number in numbers)


def checks(script: Mapping[str, Any]) -> dict[str, Check]:
    """The checks of a script, which gives its globals."""
    return {name: check for name, check in script.items() if name.startswith("check_")}


def main(script: Mapping[str, Any], *args: Any) -> NoReturn:
    """Make the checks of a script, which gives its globals, with these arguments, and end the process."""
    failed = {}
    for name, check in checks(script).items():
        try:
            check(*args)
        except BaseException:
            failed[name] = traceback.format_exc()
    answer(failed)


def answer(value: Any) -> NoReturn:
    """Hand ``value`` to the test, and end the process: with the stand-in registered, torch may not survive an exit."""
    if multiprocessing.parent_process() is not None:
        raise _Answer(value)
    print(json.dumps(value))
    sys.stdout.flush()
    os._exit(0)


class _Answer(BaseException):
    """What a script answers to a test, as its only argument."""


def run(script: str, *arguments: str, cache: Path, seconds: float = 110) -> Any:
    """What a script answers, which is run as a program, in a process forked from one that has imported torch.

    Args:
        script: dotted name of its module.
        cache: folder that takes the place of the person's own cache.
    """
    (value,) = run_processes(_as_program, 1, script, arguments, str(cache), timeout_seconds=seconds)
    return json.loads(value)


def _as_program(rank: int, script: str, arguments: Sequence[str], cache: str) -> str:
    warnings.simplefilter("ignore")
    os.environ.update({"PACELINE_CACHE": cache, "CUDA_VISIBLE_DEVICES": ""})
    os.chdir(ROOT)
    gc.freeze()  # a check collects what it left in cycles, and need not look through all that was here before it
    sys.argv[1:] = arguments
    try:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    except _Answer as found:
        return json.dumps(found.args[0])
    raise AssertionError(f"{script} ended without an answer")


def assert_holds(script: str, cache: Path, seconds: float = 110) -> None:
    """Every check of a script holds."""
    failed = run(script, cache=cache, seconds=seconds)
    assert not failed, "\n".join(failed.values())
