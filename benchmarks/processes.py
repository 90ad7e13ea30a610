"""How measured processes are started; ``paceline.bench.process`` watches them from outside."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.bench.process import Line, Outcome, run

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent

__all__ = ["HERE", "ROOT", "Line", "Outcome", "contender_command", "environment", "run"]


def contender_command(script: str, *arguments: str, processes: int = 1) -> list[str]:
    """How a contender is started: -P keeps this folder, and with it paceline's source, off its path.

    Several processes are started by torchrun; they get -P by ``environment``.
    """
    launcher: list[str] = []
    if processes > 1:
        # the address, because looking up this machine's name may fail or take long
        launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        launcher += ["--nproc-per-node", str(processes)]
    return [sys.executable, "-P", *launcher, str(HERE / "contenders" / script), *arguments]


def environment(cache: Path | None = None, *, ours: bool = False, processes: int = 1) -> dict[str, str]:
    """The variables of a measured process.

    Args:
        cache: folder for everything that is compiled, encoded or trained once; None: the user's own.
        ours: paceline, which finds its source; else a contender, which finds what contenders share.
        processes: that torchrun starts.
    """
    path = [str(ROOT / "src"), str(ROOT)] if ours else [str(HERE / "contenders")]
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *inherited]), "PYTHONUNBUFFERED": "1"}
    found.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1")
    if not ours:
        found["TOKENIZERS_PARALLELISM"] = "false"  # they read tokens, and warn of forks otherwise
        if processes == 1:  # or the Trainer would take every GPU by DataParallel
            found["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    if processes > 1:
        found["PYTHONSAFEPATH"] = "1"
        # as paceline shares out CPUs to its ranks; torchrun would give each of them one
        found.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    if cache is not None:
        folders = {
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "TRITON_CACHE_DIR": "triton",
            "CUDA_CACHE_PATH": "cuda",
            "PACELINE_CACHE": "paceline",
        }
        found.update({name: str(cache / folder) for name, folder in folders.items()})
    return found
