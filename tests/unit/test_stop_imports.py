"""A signal while a module is imported: the import ends whole, and the stop comes right after it."""

from __future__ import annotations

import importlib
import signal
import sys
import time
import weakref
from pathlib import Path

import pytest

from paceline.contract.errors import Preempted
from paceline.contract.stop import Stop

MODULE = """
import signal
try:
    signal.raise_signal(signal.Signals({number}))
except BaseException:  # as some packages do around what they can do without
    pass
whole = True
"""


def import_and_wait(name: str) -> None:
    importlib.import_module(name)
    time.sleep(5)


@pytest.mark.parametrize("number", Stop.SIGNALS, ids=lambda number: number.name)
def test_a_stop_during_an_import_is_honoured_after_it(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"stopped_{number.name.lower()}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(number=int(number)))
    monkeypatch.syspath_prepend(tmp_path)
    began = time.monotonic()
    with pytest.raises(Preempted, match=f"stopped by {number.name}"), Stop("start it again"):
        import_and_wait(name)
    assert sys.modules.pop(name).whole, "the module was left half imported"
    assert time.monotonic() < began + 5, "the stop was lost in the import"


def test_a_block_that_ends_with_the_import_is_stopped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stopped_last.py").write_text(MODULE.format(number=int(signal.SIGTERM)))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Preempted, match="stopped by SIGTERM"), Stop("start it again"):
        importlib.import_module("stopped_last")
    sys.modules.pop("stopped_last")


def test_a_stop_that_python_drops_asks_again(capfd: pytest.CaptureFixture[str]) -> None:
    """What is raised in a callback of a weak reference, or in __del__, Python prints and forgets."""

    class Thing:
        pass

    def drop(things: list[Thing]) -> None:
        things.clear()
        time.sleep(10)

    things = [Thing()]
    reference = weakref.ref(things[0], lambda _: signal.raise_signal(signal.SIGTERM))
    began = time.monotonic()
    with pytest.raises(Preempted, match="stopped by SIGTERM; start it again"), Stop("start it again"):
        drop(things)
    assert time.monotonic() < began + 5
    assert reference() is None
    assert capfd.readouterr().err == ""
