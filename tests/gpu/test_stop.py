"""The command is asked to stop while it compiles, or captures, for a GPU: a signal to every process of it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from paceline.testing.tiny import tiny_bert_config, write_tiny_model
from tests.e2e.test_stop_in_every_phase import asked, await_file, started, write_recipe

ROWS = [f"film {number} is {'good' if number % 2 else 'bad'},{number % 2}" for number in range(80)]


def members(group: int) -> list[int]:
    """Processes of a group that are still there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if os.getpgid(int(entry.name)) == group and state != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("where", "seconds"),
    [
        ("paceline.engine.torch_engine.TorchEngine.warm_up_on", 0.0),
        ("paceline.engine.torch_engine.TorchEngine.warm_up_on", 1e9),
        ("paceline.engine.capture.Captured._capture", 1e9),
    ],
    ids=["compiling", "compiling hangs", "capturing hangs"],
)
def test_a_signal_to_all_of_the_group(where: str, seconds: float, tmp_path: Path) -> None:
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *ROWS, ""]))
    model = write_tiny_model(tmp_path / "model", tiny_bert_config())
    write_recipe(tmp_path, model, tmp_path / "texts.csv")
    words = ["recipe.yaml", "--out", "run", "--set", "device=cuda", "--set", "techniques.compile=true"]
    with started(tmp_path, *words, where=where, seconds=seconds) as process:
        await_file(process, tmp_path / "hangs")
        time.sleep(1)
        assert "so nothing is lost: start it again" in asked(process)
        deadline = time.monotonic() + 60
        while members(process.pid):
            assert time.monotonic() < deadline, "processes that compile outlive the run"
            time.sleep(0.1)
