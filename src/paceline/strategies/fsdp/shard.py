"""FSDP: every rank keeps a shard of each weight, its gradient and its states; weights are whole while they are used.

torch's FSDP2, ``fully_shard``: the weights of a block are gathered before its forward pass and again before its
backward pass, and its gradients are summed and scattered behind it. What computes is the block as it was, on whole
weights, so that other techniques need not know. Losses are divided by the label count of the global batch, so gradients
are summed over ranks, never averaged.

What is sharded leaves and enters as whole tensors under plain names: a checkpoint of any number of ranks is one of
every other, and no format of torch's own is written. This room calls torch.distributed itself, as ``fully_shard`` does.

Source: Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023; Rajbhandari et al.,
ZeRO, SC 2020 (stage 3); torch's documentation of ``torch.distributed.fsdp.fully_shard``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.machine.device import PLANNED, is_gpu
from paceline.seams import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SETTING = "parallel.strategy"
UNIT_BYTES = 64 * 2**20
"""Weights that are worth a collective of their own; smaller neighbours are gathered together."""


def apply_fsdp(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    mesh: DeviceMesh,
    *,
    reduce_dtype: torch.dtype | None = None,
    offload: bool = False,
) -> None:
    """Shard the blocks of ``model``, then what is left of it, in place; names of weights stay as they are.

    Afterwards every rank's ``parameters()`` are DTensors, and ``backward()`` leaves in their ``.grad`` the sum over all
    ranks. All that is to hold the weights themselves comes after, and all that takes hold of a block's forward pass
    (recompute, compile) before.

    Args:
        model: equal on all ranks; on the device of the mesh.
        blocks: the model's repeated blocks, in the order in which they run: each is gathered by itself, or with its
            neighbours where they are small.
        mesh: of all ranks; with two axes, the first counts copies and the second the shards of each.
        reduce_dtype: number format of the sum of gradients; None: that of the weights.
        offload: shards, their gradients and states stay in main memory.

    Raises:
        RecipeError: a weight that torch cannot shard.
    """
    # loaded late: it takes a good part of a second, and most runs have no use for it
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    blocks = list(dict.fromkeys(blocks))
    _refuse_uncuttable(model, blocks)
    if len({parameter.dtype for parameter in model.parameters() if parameter.requires_grad}) > 1:
        what = f"{SETTING} = fsdp: weights of several number formats"
        why = "a collective gathers one, and batch normalisation keeps fp32 beside techniques.precision = pure_bf16"
        raise RecipeError(what, why, "--set techniques.precision=bf16, or --set parallel.strategy=ddp")
    # memory order is lost when a weight is cut; what wants channels last says so at every pass
    for parameter in model.parameters():
        parameter.data = parameter.data.contiguous()
    settings: dict[str, Any] = {
        "mesh": mesh,
        # autocast rounds what it multiplies, as without sharding; weights gathered in bf16 would round norms, biases
        # and embeddings too
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False),
        # what holds nothing cannot be pinned
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != PLANNED) if offload else OffloadPolicy(),
        # also of the root, whose default is to stay whole: after an evaluation it would not see loaded weights
        "reshard_after_forward": True,
    }
    for unit in neighbours(blocks):
        fully_shard(unit, **settings)
    fully_shard(model, **settings)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # a factor of 1 is a plain sum, which every backend has; torch would take a reduction of NCCL's own
            module.set_force_sum_reduction_for_comms(True)


def neighbours(blocks: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """The blocks in order, cut after each that brings its unit to ``UNIT_BYTES``."""
    unit: list[nn.Module] = []
    size = 0
    for block in blocks:
        unit.append(block)
        size += sum(parameter.nbytes for parameter in block.parameters())
        if size >= UNIT_BYTES:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def mesh_of(device: torch.device, world_size: int, shard_size: int) -> DeviceMesh:
    """The ranks of the open process group: those of one copy are neighbours, so that they share a machine."""
    from torch.distributed.device_mesh import init_device_mesh

    whole = shard_size == world_size
    shape = (world_size,) if whole else (world_size // shard_size, shard_size)
    with _real_numbers() if device.type == PLANNED else contextlib.nullcontext():
        return init_device_mesh(device.type, shape, mesh_dim_names=("shard",) if whole else ("copy", "shard"))


def _real_numbers() -> contextlib.AbstractContextManager[Any]:
    """A mesh reads its own table of ranks, also where a plan's tensors hold nothing."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def _refuse_uncuttable(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    inside = [set(block.parameters()) for block in blocks]
    fix = f"--set {SETTING}=ddp"
    for parameter, called in names.items():
        if parameter.ndim == 0:
            why = f"the model's weight {called[0]} is a single number without a dimension, which cannot be cut"
            raise RecipeError(f"{SETTING} = fsdp", why, f"give it the shape (1,), or {fix}")
        owners = [block for block, members in zip(blocks, inside, strict=True) if parameter in members]
        in_blocks = sum(1 for block in owners for held in _held(block) if held is parameter)
        if len(owners) > 1 or (owners and in_blocks < len(called)):
            why = f"a block shares its weight with another part of the model: {' and '.join(called[:2])} are one"
            raise RecipeError(f"{SETTING} = fsdp", why, fix)


def _held(block: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for _, parameter in block.named_parameters(remove_duplicate=False))


def forget_gradients(model: nn.Module) -> None:
    """Drop gradients of micro-batches that were never summed; between a forward and its backward pass, too."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            # torch has no public way to the gradients that it keeps whole; up to 2.11 a module has one group at most
            groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
            for weight in (weight for group in groups if group is not None for weight in group.fsdp_params):
                weight.unsharded_accumulated_grad = None
                if hasattr(weight, "_unsharded_param"):
                    weight._unsharded_param.grad = None


def join_streams(model: nn.Module, device: torch.device) -> None:
    """Have the current stream wait for what FSDP has begun on streams of its own: a capture must end where it began.

    Args:
        device: that computes.
    """
    if not is_gpu(device):
        return
    root: Any = model
    streams = root._get_fsdp_state()._comm_ctx  # torch has no public way to them
    own = [streams.all_gather_copy_in_stream, streams.all_gather_stream, streams.reduce_scatter_stream]
    mesh: Any = next(parameter for parameter in model.parameters() if _is_cut(parameter))
    if mesh.device_mesh.ndim > 1:  # copies of shards are summed on one more, which no capture knows otherwise
        own.append(streams.all_reduce_stream)
    current = torch.get_device_module(device).current_stream(device)
    for stream in own:
        current.wait_stream(stream)


def abandon(model: nn.Module) -> None:
    """Forget a forward or backward pass that an exception broke off on all ranks, so that the next one begins anew."""
    forget_gradients(model)
    root: Any = model
    # older versions of torch have no such call: there the next pass finds weights that are whole already, and goes on
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()


def whole(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each named tensor in one piece, one at a time; those in one piece already as they are.

    A collective: all ranks walk through the same names to the end. A rank holds one whole tensor at a time, on the
    device that computes, unless it keeps what it is given.

    Args:
        tensors: weights and buffers by name (``state_dict()``), or an optimizer's states.
    """
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        yield name, _gathered(tensor) if _is_cut(tensor) else tensor


@torch.no_grad()
def load_whole(current: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy whole tensors into those of the same name, in place; of what is sharded each rank takes its share.

    No collective: every rank reads ``saved``, one tensor at a time where that is a file.

    Args:
        current: weights and states; names and whole shapes are known to be those of ``saved``.
    """
    for name, tensor in current.items():
        if _is_cut(tensor):
            local: Any = tensor
            local.to_local().copy_(_share_of(local, saved[name]))
        else:
            tensor.copy_(saved[name])


def collected(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """The tensors whole, on the first rank alone; what was sharded is in main memory then. A collective: ``whole``."""
    found = {}
    for name, tensor in whole(tensors):
        if world.is_first:
            found[name] = tensor.cpu() if _is_cut(tensors[name]) else tensor
    return found


def _is_cut(tensor: Tensor) -> bool:
    # what was never imported cannot be in use
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _gathered(tensor: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    mesh = tensor.device_mesh
    # shards in main memory travel by way of the device, whose ranks are connected
    local = tensor.detach().to_local().to(mesh.device_type)
    placed = DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return placed.full_tensor()


def _share_of(tensor: Any, saved: Tensor) -> Tensor:
    """This rank's piece, cut as ``fully_shard`` cuts: in equal pieces of the first dimension, the last ones shorter or
    empty."""
    placements: Sequence[Any] = tensor.placements
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            parts = saved.chunk(tensor.device_mesh.size(axis), placement.dim)
            rank = tensor.device_mesh.get_local_rank(axis)
            saved = parts[rank] if rank < len(parts) else saved.narrow(placement.dim, 0, 0)
    return saved
