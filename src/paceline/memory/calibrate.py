"""A GPU's constants, measured on it: runs of a few steps by ``train`` itself, and matrix products."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.contract.errors import UserError
from paceline.contract.files import write_atomically
from paceline.contract.interpreter import python
from paceline.machine.facts import Facts, Gpu
from paceline.memory.constants import Constants, measured_file
from paceline.memory.expandable import ask_for_it
from paceline.memory.measure import taken_by_others
from paceline.recipe import Recipe

LIMIT_SECONDS: Final = 300.0
"""How long one program may take; a first start on a slow disk takes a minute."""

OTHERS_BYTES: Final = 64 * 2**20
"""What a GPU that nobody uses may show all the same."""

Program = Callable[..., str]
"""What a program prints, given its arguments after ``python -m``."""

RUN: Final = {
    "name": "calibrate",
    "model": {"config": {"model_type": "distilbert", "vocab_size": 30522}},
    "data": {"source": "builtin:random", "random": {"samples": 256, "length": [16, 256], "vocabulary": 30000}},
    "loop": {"batch_size": 32, "epochs": 1, "max_steps": 6, "save_best": False, "checkpoint_every": "never"},
    "observe": {"report": False, "memory_plan": False, "console": "plain"},
}
"""Packed, captured and fused where the GPU can: the kernels of most runs are loaded."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured. Sizes in bytes."""

    gpu: str
    constants: Constants
    flops_per_second: float
    """Measured with one large matrix product in bf16."""
    file: Path
    """Where the constants are kept; plans read them from there."""


def calibrate(
    here: Facts, *, program: Program | None = None, progress: Callable[[str], None] = lambda _: None
) -> Calibration:
    """Measure the first GPU, two of them for what NCCL takes, and keep the constants for plans.

    Args:
        here: this machine.
        program: runs a program, for tests.
        progress: told what is going on.

    Raises:
        UserError: there is no GPU, somebody else is on it, or a program failed.
    """
    if here.cuda_problem:
        raise UserError("there is no GPU to measure on", here.cuda_problem, "values for an H200 come with paceline")
    gpu, program = here.gpus[0], program or _said
    _refuse_others(here.gpus[:2])
    progress("matrix products")
    products = json.loads(program("paceline.memory.products").splitlines()[-1])
    with tempfile.TemporaryDirectory() as place:
        progress("a run on one GPU")
        context = _beside_torch(program, Path(place), 1)
        communicator = None
        if len(here.gpus) > 1:
            progress("a run on two GPUs")
            communicator = max(_beside_torch(program, Path(place), 2) - context, 0)
    entry: dict[str, Any] = {
        "source": f"measured by paceline calibrate with torch {here.versions.get('torch')}, driver {gpu.driver}",
        "context": context,
        "workspaces": products["workspaces"],
        "flops_per_second": products["flops_per_second"],
        **({} if communicator is None else {"communicator": communicator}),
    }
    file = measured_file()
    known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    write_atomically(file, (json.dumps({**known, gpu.name: entry}, indent=2) + "\n").encode())
    constants = Constants(
        source=entry["source"],
        context=context,
        communicator=communicator,
        workspaces=tuple(products["workspaces"]),
    )
    return Calibration(gpu=gpu.name, constants=constants, flops_per_second=products["flops_per_second"], file=file)


def _refuse_others(gpus: tuple[Gpu, ...]) -> None:
    for gpu in gpus:
        taken = taken_by_others(gpu)
        if taken is not None and taken > OTHERS_BYTES:
            why = f"{taken / 2**20:,.0f} MiB of {gpu.name} are in use, which would be counted as the driver's"
            raise UserError("another program is on the GPU", why, "end it first; nvidia-smi shows which it is")


def _beside_torch(program: Program, place: Path, gpus: int) -> int:
    """Bytes of the fullest GPU that a run takes without torch's allocator."""
    recipe, folder = place / "recipe.yaml", place / f"run-{gpus}"
    recipe.write_text(Recipe.parse(RUN).to_yaml(), encoding="utf-8")
    ranks = ["--gpus", str(gpus)] if gpus > 1 else []
    program("paceline", "train", str(recipe), "--out", str(folder), *ranks)
    memory: Mapping[str, int] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["memory"]
    return memory["total"] - memory["reserved"]


def _said(*arguments: str) -> str:
    environment = dict(os.environ)
    ask_for_it(environment)
    command = python("-m", *arguments)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=LIMIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        why = f"it did not end in {LIMIT_SECONDS:.0f} s"
        raise UserError(f"{arguments[0]} failed", why, "paceline doctor says what this machine has") from None
    if done.returncode:
        why = "\n".join(done.stderr.strip().splitlines()[-5:]) or f"exit code {done.returncode}"
        raise UserError(f"{arguments[0]} failed", why, "paceline doctor says what this machine has")
    return done.stdout
