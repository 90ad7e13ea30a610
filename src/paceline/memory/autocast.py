"""CUDA's autocast on a device that stands in for a GPU.

torch keeps one table of casts for each kind of device, written in C++, and has none for other people's devices. Which
operators are in CUDA's table this build of torch tells itself; what is done to each is one of four things, and the few
lists here say which. The casts of weights are kept until autocast ends, as CUDA's are, since they are memory too. Casts
are made and freed in CUDA's order: where blocks lie follows from it, and so does what is reserved.

Source: torch/docs, Automatic Mixed Precision, "CUDA Op-Specific Behavior"; ATen/autocast_mode.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import torch
from torch import Tensor

KEY: Final = "AutocastPrivateUse1"

NARROW: Final = frozenset(
    {
        *("_convolution", "_convolution.deprecated", "convolution", "cudnn_convolution", "cudnn_convolution_transpose"),
        *("conv1d", "conv2d", "conv3d", "conv_tbc"),
        *("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
        *("mm", "addmm", "mv", "addmv", "addr", "bmm", "baddbmm", "addbmm", "matmul", "linear", "einsum"),
        *("chain_matmul", "linalg_multi_dot", "linalg_vecdot", "prelu"),
        *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention"),
        *("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell"),
    }
)
"""Computed in the narrow format."""
WIDE_RESULT: Final = frozenset(
    {
        *("sum", "sum.dim_IntList", "prod", "prod.dim_int", "cumsum", "cumprod", "softmax.int", "log_softmax.int"),
        *("linalg_vector_norm", "linalg_matrix_norm", "linalg_matrix_norm.str_ord"),
    }
)
"""Sum up in fp32, unless told a format."""
WIDEST: Final = frozenset(
    {
        *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "tensordot"),
        *("grid_sampler", "index_put", "scatter_add"),
    }
)
"""Take their inputs in the widest format among them. All others take them in fp32."""
HALF_TO_WIDE: Final = {
    "softmax.int": torch.ops.aten._softmax.default,
    "log_softmax.int": torch.ops.aten._log_softmax.default,
}
"""Read fp16 and write fp32 in one kernel, by these."""
SUMS_WIDE: Final = {
    "norm.Scalar": torch.ops.aten.norm.ScalarOpt_dtype,
    "norm.ScalarOpt_dim": torch.ops.aten.norm.ScalarOpt_dim_dtype,
}
"""Are told to sum up in fp32, by these; no copy is made."""
REFUSED: Final = frozenset({"binary_cross_entropy"})
"""Raise an error."""


def register(device_type: str) -> Sequence[torch.library.Library]:
    """Give ``device_type``, torch's PrivateUse1 under its name, the casts of CUDA; for as long as the libraries live.

    ``torch.clear_autocast_cache`` clears the kept casts too from now on.
    """
    casts = _Casts(device_type)
    rest = torch.library.Library("_", "IMPL", KEY)
    rest.fallback(torch.library.fallthrough_kernel)
    aten = torch.library.Library("aten", "IMPL", KEY)
    for full in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA"):
        namespace, _, name = full.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten":
            aten.impl(name, casts.around(name, getattr(getattr(torch.ops.aten, packet), overload or "default")))
    clear = torch.clear_autocast_cache

    def clear_all() -> None:
        casts.kept.clear()
        clear()

    torch.clear_autocast_cache = clear_all
    return rest, aten


@final
class _Casts:
    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._own = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, KEY))
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}
        """Id of a weight -> the weight itself and its cast."""

    def around(self, name: str, op: Any) -> Callable[..., Any]:
        """The operator behind its casts."""
        prepare, half, refused = self._preparation(name, op), HALF_TO_WIDE.get(name), name in REFUSED
        theirs = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if refused:
                return op.redispatch(theirs, *args, **kwargs)  # says why
            with torch._C._ExcludeDispatchKeyGuard(self._own):
                given, named = prepare(args, kwargs)
                widened = torch.float32 in (*given[1:], *named.values())
                if half is not None and widened and given and given[0].dtype == torch.float16:
                    return half(given[0], named.get("dim", *given[1:2]), True)
                result = op(*given, **named)
                casts = [*given]
                del given
                while casts:  # C++ lets go first of what it made last, which is the first of them
                    del casts[0]
                return result

        if name in SUMS_WIDE:
            return self._summing(op, SUMS_WIDE[name])
        return kernel

    def _summing(self, op: Any, wide: Any) -> Callable[..., Any]:
        _, *rest = op._schema.arguments

        def kernel(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            given = {each.name: each.default_value for each in rest}
            given |= dict(zip(given, args, strict=False)) | kwargs
            narrow = x.is_floating_point() and x.dtype != torch.float64
            with torch._C._ExcludeDispatchKeyGuard(self._own):
                return wide(x, **given, dtype=torch.float32 if narrow else x.dtype)

        return kernel

    def _preparation(self, name: str, op: Any) -> Callable[[Any, Mapping[str, Any]], tuple[Any, Mapping[str, Any]]]:
        names = [argument.name for argument in op._schema.arguments]
        if name in WIDE_RESULT and "dtype" in names:
            return lambda args, kwargs: self._with_wide_result(args, kwargs, names.index("dtype"))
        if name in NARROW:
            return lambda args, kwargs: self._all(args, kwargs, torch.get_autocast_dtype(self._device_type))
        if name in WIDEST:
            return lambda args, kwargs: self._all(args, kwargs, _widest((args, tuple(kwargs.values()))))
        return lambda args, kwargs: self._all(args, kwargs, torch.float32)

    def _with_wide_result(self, args: Any, kwargs: Mapping[str, Any], at: int) -> tuple[Any, Mapping[str, Any]]:
        given = args[at] if len(args) > at else kwargs.get("dtype")
        if given is not None or args[0].dtype not in (torch.bfloat16, torch.float16):
            return args, kwargs
        if len(args) > at:
            return (*args[:at], torch.float32, *args[at + 1 :]), kwargs
        return args, {**kwargs, "dtype": torch.float32}

    def _all(self, args: Any, kwargs: Mapping[str, Any], dtype: torch.dtype) -> tuple[Any, Mapping[str, Any]]:
        # arguments of a C++ call, which g++ evaluates from the last to the first
        named = {name: self._cast(value, dtype) for name, value in reversed([*kwargs.items()])}
        return tuple(self._cast(value, dtype) for value in reversed(args))[::-1], named

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._cast(each, dtype) for each in value)
        if not isinstance(value, Tensor) or value.device.type != self._device_type or not value.is_floating_point():
            return value
        if value.dtype in (dtype, torch.float64):
            return value
        # as cached_cast does: a weight is cast once, however many products it is in
        is_weight = value.dtype == torch.float32 and value.is_leaf and value.requires_grad and not value._is_view()
        if dtype == torch.float32 or not is_weight or not torch.is_autocast_cache_enabled():
            return value.to(dtype)
        if id(value) not in self.kept:
            self.kept[id(value)] = (value, value.to(dtype))
        return self.kept[id(value)][1]


def _widest(values: Any) -> torch.dtype:
    found = [value.dtype for value in torch.utils._pytree.tree_leaves(values) if isinstance(value, Tensor)]
    return torch.float32 if torch.float32 in found else next((d for d in found if d.is_floating_point), torch.float32)
