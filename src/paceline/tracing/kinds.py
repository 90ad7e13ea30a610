"""Kinds of kernels and operators, by their names: what a step's seconds are spent in."""

from __future__ import annotations

import functools
import re

MATMUL, ATTENTION, POINTWISE, OPTIMIZER = "matmul", "attention", "norm and pointwise", "optimizer"
COMMUNICATION, COPY, OTHER = "communication", "copy", "other"

KINDS = (MATMUL, ATTENTION, POINTWISE, OPTIMIZER, COMMUNICATION, COPY, OTHER)

# The first that matches counts: attention is made of matrix products, and matrix products end in reductions. Libraries
# by their own names: cuBLAS (nvjet, gemm, xmma), cuDNN (cudnn, wgrad, dgrad), CUTLASS, NCCL, MKL-DNN; kernels of
# inductor by its prefixes (poi: pointwise, red and per: reductions, tem: templates); ours by their own names.
_NAMES = (
    (COMMUNICATION, r"nccl|c10d::|gloo:|all_?reduce|all_?gather|reduce_scatter"),
    (ATTENTION, r"flash|fmha|sdpa|attention|_attend_|_differentiate_"),
    (OPTIMIZER, r"adam|multi_tensor_apply|foreach|fused_sgd|lamb|^descend"),
    (COPY, r"^memcpy|^memset|aten::(copy_|_to_copy|to|clone|cat|contiguous)$|catarray|direct_copy|copy_kernel"),
    (
        MATMUL,
        r"gemm|gemv|nvjet|cutlass|xmma|cublas|wgrad|dgrad|conv|splitk|triton_tem|mkldnn|"
        r"aten::(mm|bmm|addmm|baddbmm|matmul|linear|addmv|mv|dot)$|_mm_|matmul",
    ),
    (
        POINTWISE,
        r"elementwise|norm|gelu|relu|silu|tanh|dropout|softmax|reduc|triton_(poi|red|per|fused)|index|embedding|gather|"
        r"scatter|fill|arange|random|bernoulli|nll_loss|cross_entropy|scan|sort|unrolled|residual|bias|^_(sum|join|images)_kernel|^aten::",
    ),
)
_PATTERNS = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _NAMES)


@functools.lru_cache(maxsize=100_000)
def kind_of(name: str) -> str:
    """The kind of a kernel, copy or operator with this name."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)


def is_copy_in(name: str) -> bool:
    """Whether it is a copy from the host to the device."""
    return name.startswith("Memcpy HtoD")


def is_copy_out(name: str) -> bool:
    """Whether it is a copy from the device to the host."""
    return name.startswith("Memcpy DtoH")


def is_reduction(name: str) -> bool:
    """Whether a communication kernel carries gradients: what sums, not what gathers weights."""
    return "reduce" in name.lower()
