"""Checks in a process of their own: what a plan registers with torch stays registered, and outlives a test.

A script is a module whose functions ``check_...`` assert something; run as a program, it makes them all, one after the
other, and prints what failed. A test runs one script and fails with all that did.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

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
    print(json.dumps(value))
    sys.stdout.flush()
    os._exit(0)


def run(script: str, *arguments: str, cache: Path, seconds: float = 110) -> Any:
    """What a script answers, which is run as a program.

    Args:
        script: dotted name of its module.
        cache: folder that takes the place of the person's own cache.
    """
    environment = {**os.environ, "PACELINE_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", script, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"{script} ended with {done.returncode}:\n{done.stderr[-3000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def assert_holds(script: str, cache: Path, seconds: float = 110) -> None:
    """Every check of a script holds."""
    failed = run(script, cache=cache, seconds=seconds)
    assert not failed, "\n".join(failed.values())
