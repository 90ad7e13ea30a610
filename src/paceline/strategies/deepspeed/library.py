"""DeepSpeed the library: loaded late, quietly, without compiling anything, and told what a run wants of it.

What of it is private to it, or has to be got round, stands in this file and in ``states.py`` alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import warnings
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.contract.errors import RecipeError, in_a_line
from paceline.distributed.backends import group_of_one
from paceline.machine.device import is_gpu
from paceline.recipe.parts import ParallelPart
from paceline.recipe.techniques import entry_of
from paceline.seams import World

STAGE, SHARDED = 2, 3
"""The stage of a recipe that names none, and the one that shards weights too."""

PERSISTENT = 100_000
"""Numbers of a weight up to which stage 3 keeps it whole on every rank: DeepSpeed's own default."""

BUCKET = 500_000_000
"""Numbers of gradients that are reduced in one go, at most: DeepSpeed's own default. The buffer for it is there from
the start, so a smaller model has one of its own size."""

READ = 50_000_000
"""Numbers of weights that are read from a disk and updated in one go, at most. DeepSpeed has four buffers for so many;
by itself it takes a billion, and needs as much main memory as without a disk."""

NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""How torch looks for GPUs; DeepSpeed sets it for the whole process while it is loaded."""

ARCHITECTURES = "TORCH_CUDA_ARCH_LIST"
"""What GPUs torch's extensions are compiled for, where a machine says so."""

_LEFT = ("_WORLD_GROUP", "_ZERO_PARAM_INTRA_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP")
"""Process groups that DeepSpeed keeps for the life of a process, which may have several runs."""


def stage_of(part: ParallelPart) -> int:
    """The ZeRO stage of a run: what is asked for; else the one that the wished offload needs."""
    return part.stage or (SHARDED if part.offload == "parameters" else STAGE)


def configuration(part: ParallelPart, clip_norm: float | None, num_trained: int) -> dict[str, Any]:
    """What DeepSpeed's engine is told.

    Args:
        part: of the recipe.
        num_trained: trained weights in single numbers.
        clip_norm: largest global gradient norm; None: gradients are not clipped.
    """
    zero: dict[str, Any] = {"stage": stage_of(part), "reduce_bucket_size": min(num_trained, BUCKET)}
    if zero["stage"] == SHARDED:
        zero["stage3_param_persistence_threshold"] = PERSISTENT
    if part.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if part.offload_folder is not None:
        zero["offload_optimizer"] |= {"device": "nvme", "nvme_path": part.offload_folder}
        zero["sub_group_size"] = READ
    if part.offload == "parameters":
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    return {
        # it only reckons with these: samples are split by us, and each step says itself which micro-batch is its last
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip_norm or 0.0,
        "zero_optimization": zero,
        # any optimizer of torch's does, and none has to be compiled for an update in main memory
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }


def library(device: torch.device) -> Any:
    """The package ``deepspeed``, ready to be used on a device.

    Raises:
        RecipeError: it is not installed.
    """
    # a run on the CPU may see GPUs
    with _variable("DS_ACCELERATOR", device.type), _variable(NVML, os.environ.get(NVML)), _quiet():
        try:
            import deepspeed
        except ImportError as error:
            entry = entry_of("deepspeed")
            why = f"it needs the package deepspeed, which cannot be imported: {error}"
            raise RecipeError(f"{entry.setting} = {entry.name}", why, entry.install) from None
        deepspeed.utils.logger.setLevel(logging.ERROR)
    return deepspeed


def initialized(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], device: torch.device, world: World
) -> tuple[Any, Callable[[], None]]:
    """DeepSpeed's engine around a model, over the run's ranks, and what closes it. A collective.

    Args:
        model: equal on all ranks, on ``device``.
        optimizer: of its trained parameters, which DeepSpeed replaces by shards.
    """
    found = library(device)
    found.comm.comm.cdb = None
    away = config["zero_optimization"].get("offload_optimizer", {})
    for name in _LEFT:
        setattr(found.utils.groups, name, None)
    # said of DeepSpeed's calls, which nobody here can change
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    index = torch.get_device_module(device).current_device() if is_gpu(device) else world.local_rank
    with contextlib.ExitStack() as stack:
        if world.size == 1:
            stack.enter_context(group_of_one(device))
        if "nvme_path" in away:
            _built(away["nvme_path"])
            # DeepSpeed's files are named alike in every run, and it leaves them; each rank knows its own alone
            away["nvme_path"] = stack.enter_context(TemporaryDirectory(prefix="paceline-", dir=away["nvme_path"]))
        # stage 3 puts a function of its own in the place of torch's, which no later run of this process is to get
        stack.callback(setattr, functional, "linear", functional.linear)
        # stage 3 looks there again and again
        stack.enter_context(_variable("LOCAL_RANK", str(index)))
        with _quiet(), _nothing_compiled(found):
            engine, *_ = found.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        stack.callback(engine.destroy)
        if "nvme_path" in away:
            _zeroed_gradients(engine.optimizer.optimizer_swapper)
        return engine, stack.pop_all().close


def _built(folder: str) -> None:
    """Have DeepSpeed's operator for disks compiled, which takes minutes; what is compiled already is loaded."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        with _variable(ARCHITECTURES, _without_suffixes(os.environ.get(ARCHITECTURES))):
            AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # whatever a compiler says, or what is asked of CUDA's toolkit
        why = f"DeepSpeed's operator async_io cannot be built: {in_a_line(error)}"
        raise RecipeError(f"parallel.offload_folder = {folder}", why, "--set parallel.offload_folder=null") from None


def _without_suffixes(architectures: str | None) -> str | None:
    """``9.0a;10.0`` -> ``9.0;10.0``: DeepSpeed reads numbers alone, and what it builds for disks has no kernels."""
    return None if architectures is None else re.sub(r"(?<=\d)[a-z]+", "", architectures)


def _zeroed_gradients(swapper: Any) -> None:
    """Have DeepSpeed read gradients into zeros: a weight without one would get what was in the buffer before."""
    read = swapper._swap_in_gradients

    def zeroed(aio_handle: Any, parameter: Tensor, dest_buffer: Tensor) -> None:
        dest_buffer.zero_()
        read(aio_handle=aio_handle, parameter=parameter, dest_buffer=dest_buffer)

    swapper._swap_in_gradients = zeroed


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside, nobody hears of what DeepSpeed does while it is loaded and set up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _variable(name: str, value: str | None) -> Iterator[None]:
    """Inside, DeepSpeed finds in the environment what it takes from nowhere else; behind it all is as before.

    Args:
        value: None: none is put there, and what DeepSpeed puts there goes again.
    """
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextlib.contextmanager
def _nothing_compiled(found: Any) -> Iterator[None]:
    """Inside, DeepSpeed takes gloo as it is, where it would compile collectives of its own for a minute."""
    # torch's backend asks this table before it builds; there is no setting for it
    table, name = found.ops.__compatible_ops__, "deepspeed_shm_comm"
    before = table.get(name)
    table[name] = False
    try:
        yield
    finally:
        if before is None:
            table.pop(name)
        else:
            table[name] = before
