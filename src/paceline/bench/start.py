"""How a measured process is started: its command, its variables; of paceline's own runs also what they leave."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.bench.process import Line, Outcome, run
from paceline.contract.interpreter import python

SOURCE = Path(__file__).resolve().parents[2]
"""Where paceline is imported from in this process."""

OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Variables that would make a rank of a measured process."""

CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "PACELINE_CACHE": "paceline",
}
"""Variable -> folder of what is compiled, encoded or trained once."""


def environment(
    cache: Path | None = None, *, sources: Sequence[Path] = (), processes: int = 1, all_gpus: bool = False
) -> dict[str, str]:
    """The variables of a measured process: nothing is downloaded.

    Args:
        cache: the folder of ``CACHES``; None: the user's own.
        sources: folders that Python looks into first.
        processes: that torchrun starts.
        all_gpus: it sees all of them, as several processes do; else the first alone, or the Trainer would take every
            one by DataParallel.
    """
    found = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    found |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if path := [*map(str, sources), *inherited]:
        found["PYTHONPATH"] = os.pathsep.join(path)
    if processes > 1:
        found["PYTHONSAFEPATH"] = "1"  # -P reaches torchrun, not the ranks
        # as paceline shares out CPUs to its ranks; torchrun would give each of them one
        found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    elif not all_gpus:
        found["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return found | ({} if cache is None else {name: str(cache / folder) for name, folder in CACHES.items()})


def script_command(script: Path, *arguments: str, processes: int = 1) -> list[str]:
    """How a contender is started; -P: a folder's own files do not take the place of packages."""
    launcher: list[str] = []
    if processes > 1:
        # the address, because looking up this machine's name may fail or take long
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launcher += ["--nproc-per-node", str(processes)]
    return python(*launcher, str(script), *arguments)


def set_options(settings: Mapping[str, Any]) -> list[str]:
    """``--set`` options of paceline's command line."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]


@dataclass(frozen=True)
class Trained:
    """A run of ``paceline train``."""

    command: list[str]
    outcome: Outcome
    summary: dict[str, Any] | None
    """summary.json; None where it left none, or none that is whole."""
    steps: tuple[Line, ...]
    """Its records of steps, and when they were seen."""

    def samples_per_second(self, begin: int, end: int | None = None) -> float | None:
        """The rate of these steps by the run's own clock; None where there are none."""
        inside = [line.fields for line in self.steps[begin:end]]
        seconds = sum(step["seconds"] for step in inside)
        return sum(step["samples"] for step in inside) / seconds if seconds > 0 else None


def train(
    recipe: str | Path,
    out: Path,
    options: Sequence[str],
    *,
    environment: Mapping[str, str],
    log: Path,
    limit_seconds: float,
    folder: Path | None = None,
) -> Trained:
    """Carry out the real command line in a process of its own, watched from outside.

    Args:
        recipe: a file.
        out: the run's folder; what was there goes.
        options: further words of the command.
        environment, log, limit_seconds, folder: as ``process.run`` has them.
    """
    shutil.rmtree(out, ignore_errors=True)
    command = python("-m", "paceline", "train", str(recipe), *options, "--out", str(out))
    follow = out / "metrics.jsonl"
    outcome = run(command, environment=environment, log=log, limit_seconds=limit_seconds, follow=follow, folder=folder)
    steps = tuple(line for line in outcome.lines if line.fields.get("kind") == "step")
    return Trained(command, outcome, _summary(out / "summary.json"), steps)


def _summary(path: Path) -> dict[str, Any] | None:
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return told if isinstance(told, dict) else None


def drop_large(out: Path) -> None:
    """Remove the weights of a run folder; they were of use for being saved alone."""
    for large in ("model", "checkpoints"):
        shutil.rmtree(out / large, ignore_errors=True)
