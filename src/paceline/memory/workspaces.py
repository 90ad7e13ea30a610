"""What operators allocate for themselves while they run, which no tensor that they return shows.

Of our own kernels this is read off their code. Of FlashAttention-2's backward pass it is the gradient of the queries,
added up in fp32, and a sum a row (flash_api.cpp, mha_bwd and mha_varlen_bwd: ``dq_accum``, ``softmax_d``); of sums over
rows, partial sums. What others take is small or not known, and part of what a GPU's constants were fitted to.

Shapes: T positions of a packed row, P sequences in it; S samples, L length; H heads, D head size; N width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from paceline.kernels import bias_gelu, residual_norm
from paceline.machine.device import gpu_name
from paceline.machine.gpus import model_named

FP32 = 4
USUAL_PROCESSORS = 108
"""Multiprocessors of a GPU that is not known: an A100's."""
MOST_THREADS, WARP, FEWEST, MOST_A_THREAD = 512, 32, 16, 256
"""How torch sums: threads of a block, of a warp; values that a thread adds up at least, where blocks share a sum, and
at most, where they do not."""
RESIDENT_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536}
"""Threads that a multiprocessor can hold, by compute capability (CUDA C++ Programming Guide, technical specifications);
else 2,048."""
SUMMED_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)


def workspace_bytes(operator: str, args: Sequence[Any]) -> int:
    """Bytes that an operator holds beside its results until it returns; 0 where that is not known.

    Args:
        operator: its name, such as ``aten.mm.default``.
        args: positional arguments of the call.
    """
    found = WORKSPACES.get(operator)
    return 0 if found is None else FP32 * found(args)


def _row_sums(log_sums: Any) -> int:
    """A sum a head and position, as many as of the softmax's logarithms."""
    return int(log_sums.numel())


def _flash_packed(args: Sequence[Any]) -> int:
    q, cu_seqlens = args[1], args[8]
    positions, heads, size = q.shape
    # every sequence begins at a multiple of 128
    return int((positions + 128 * (cu_seqlens.shape[0] - 1)) * heads * (_rounded(size, 32) + 1))


def _flash_dense(args: Sequence[Any]) -> int:
    samples, heads, length, size = args[1].shape
    return int(samples * _rounded(length, 128) * heads * (_rounded(size, 32) + 1))


def _norm_partials(args: Sequence[Any]) -> int:
    """A row of partial sums of bias, weight and shift a program."""
    x = args[2]
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    return int(min(rows, residual_norm.BACKWARD["programs"] * _processors(x)) * 3 * width)


def _gelu_partials(args: Sequence[Any]) -> int:
    """A row of partial sums of the bias for each of the tiles that stand on one another."""
    x, settings = args[1], bias_gelu.BACKWARD
    rows, across = x.numel() // x.shape[-1], -(-x.shape[-1] // settings["columns"])
    return int(min(-(-rows // settings["rows"]), -(-settings["programs"] * _processors(x) // across)) * x.shape[-1])


def _summed_rows(args: Sequence[Any]) -> int:
    """Partial sums of a sum over rows [T, N] -> [N], such as a bias' gradient.

    torch splits long ones among many blocks, and each keeps a value for every thread and every one of the results
    (Reduce.cuh, ``setReduceConfig`` and ``global_memory_size``): 120 MiB for 10,240 rows of 1,536 bf16 on an H200.
    """
    x, dims = args[0], args[1] if len(args) > 1 else None
    rows, width = _rows_summed(x, dims)
    if not rows:
        return 0
    vector = next(size for size in (4, 2, 1) if width % size == 0)
    across, threads = width // vector, MOST_THREADS // vector
    height = min(_power_of_2(min(rows, threads)), threads // min(_power_of_2(min(across, threads)), WARP))
    columns = min(_power_of_2(min(across, threads)), threads // height)
    grid, each = -(-across // columns), -(-rows // height)
    resident = _processors(x) * (_resident_threads(x) // (columns * height))
    if each < MOST_A_THREAD or grid > resident:
        return 0
    blocks = max(min(-(-resident // grid), -(-each // FEWEST)), -(-each // MOST_A_THREAD))
    return width * blocks * columns * vector if blocks > 1 else 0


def _rows_summed(x: Any, dims: Any) -> tuple[int, int]:
    """T and N of a sum over all dimensions but the last, of values that lie one after the other; else (0, 0)."""
    if not dims or x.dim() < 2 or not x.numel() or not x.is_contiguous() or x.dtype not in SUMMED_IN_FP32:
        return 0, 0
    if sorted(dim % x.dim() for dim in dims) != list(range(x.dim() - 1)):
        return 0, 0
    return x.numel() // x.shape[-1], x.shape[-1]


def _power_of_2(number: int) -> int:
    """The last that is not above it."""
    return 1 << (number.bit_length() - 1)


def _processors(tensor: Any) -> int:
    known = model_named(gpu_name(tensor.device))
    return (known.multiprocessors if known else None) or USUAL_PROCESSORS


def _resident_threads(tensor: Any) -> int:
    known = model_named(gpu_name(tensor.device))
    return RESIDENT_THREADS.get((known.compute_capability if known else None) or (9, 0), 2048)


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


WORKSPACES: Final[Mapping[str, Callable[[Sequence[Any]], int]]] = {
    "paceline.short_attention_backward.default": lambda args: _row_sums(args[5]),
    "paceline.short_attention_joined_backward.default": lambda args: _row_sums(args[3]),
    "paceline.flash_varlen_backward.default": _flash_packed,
    "aten._scaled_dot_product_flash_attention_backward.default": _flash_dense,
    "paceline.residual_norm_backward.default": _norm_partials,
    "paceline.bias_gelu_backward.default": _gelu_partials,
    "aten.sum.dim_IntList": _summed_rows,
}
"""Operator -> number of fp32 values."""
