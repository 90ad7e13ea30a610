"""Autocast on a device that stands in for a GPU, beside that of CUDA, whose kernels every build of torch has.

Forward passes of fake ``cuda`` tensors run without CUDA, casts included, as long as nothing is differentiated: what
reaches the operators beneath, and in which formats, is the truth that the stand-in is held to.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from paceline.machine.facts import Gpu
from paceline.memory.stand_in import stand_in
from tests.unit.memory.apart import live_bytes, main

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
aten = torch.ops.aten


@final
class Make:
    """Makes tensors of given formats in turn on a device: ``make(2, 3)``, or ``make.ids(4)`` for integers."""

    def __init__(self, device: str, formats: Sequence[torch.dtype]) -> None:
        self._device, self._formats = device, itertools.cycle(formats)

    def __call__(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=next(self._formats), device=self._device)

    def ids(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.long, device=self._device)


Call = Callable[[Make], Any]


def _each(names: str, *shapes: tuple[int, ...], of: Any = torch, **options: Any) -> dict[str, Call]:
    """Functions that take nothing but tensors of these shapes."""
    return {
        name: lambda make, name=name: getattr(of, name)(*(make(*shape) for shape in shapes), **options)
        for name in names.split()
    }


def _convolutions() -> Iterator[tuple[str, Call]]:
    for dims in (1, 2, 3):
        image, weight = (1, 2, *[4] * dims), (2, 2, *[3] * dims)
        for name, bias in ((f"conv{dims}d", True), (f"conv_transpose{dims}d", False)):
            call = getattr(F, name)
            yield (
                name if bias or dims == 1 else f"{name}.input",
                lambda m, call=call, image=image, weight=weight, bias=bias: (
                    call(m(*image), m(*weight), m(2)) if bias else call(m(*image), m(*weight))
                ),
            )


def _upsampling() -> Iterator[tuple[str, Call]]:
    kinds = {"bicubic2d": 2, "bilinear2d": 2, "linear1d": 1, "trilinear3d": 3}
    nearest = {f"{kind}{dims}d": dims for dims in (1, 2, 3) for kind in ("nearest", "nearest_exact")}
    for name, dims in {**kinds, "bicubic2d_aa": 2, "bilinear2d_aa": 2, **nearest}.items():
        full = f"{'_' if name.endswith('aa') or 'exact' in name else ''}upsample_{name}"
        aligned = () if name in nearest else (False,)
        yield (
            full,
            lambda m, full=full, dims=dims, aligned=aligned: getattr(aten, full)(
                m(1, 2, *[4] * dims), [8] * dims, *aligned
            ),
        )


def _convolution(make: Make) -> tuple[Any, ...]:
    return make(1, 2, 4, 4), make(2, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1


IN_TABLE: dict[str, Call] = {
    **dict(_convolutions()),
    **dict(_upsampling()),
    **_each("acos asin cosh erfinv exp expm1 log log10 log1p log2 reciprocal rsqrt sinh tan", (2, 3)),
    **_each("mm matmul linear einsum chain_matmul", (4, 4), (4, 4)),
    **_each("bmm", (2, 4, 4), (2, 4, 4)),
    **_each("mv", (4, 4), (4,)),
    **_each("addmm addmv addr", (4, 4), (4, 4), (4, 4)),
    **_each("baddbmm", *[(2, 4, 4)] * 3),
    **_each("addcdiv addcmul", *[(4,)] * 3),
    **_each("atan2 dot vdot dist", (4,), (4,)),
    **_each("sum prod", (2, 3)),
    **_each("cdist cosine_similarity", (2, 3), (2, 3)),
    **_each("huber_loss l1_loss mse_loss smooth_l1_loss soft_margin_loss poisson_nll_loss", (4,), (4,), of=F),
    **_each("hinge_embedding_loss binary_cross_entropy_with_logits", (4,), (4,), of=F),
    **_each("kl_div", (4,), (4,), of=F, reduction="sum"),
    **_each("margin_ranking_loss", *[(4,)] * 3, of=F),
    **_each("triplet_margin_loss", *[(2, 3)] * 3, of=F),
    **_each("cosine_embedding_loss", (2, 3), (2, 3), (2,), of=F),
    **_each("linear", (2, 3, 4), (4, 4), (4,), of=F),
    **_each("pdist softplus", (3, 3), of=F),
    **_each("prelu", (2, 3, 4), (3,), of=F),
    **_each("bilinear", (2, 3), (2, 3), (4, 3, 3), of=F),
    **_each("nuclear_norm linalg_vector_norm linalg_matrix_norm.str_ord", (3, 3), of=aten),
    **_each("scaled_dot_product_attention _scaled_dot_product_flash_attention", *[(1, 2, 16, 8)] * 3, of=aten),
    "_convolution": lambda m: aten._convolution(*_convolution(m), True, False, True, True),
    "_convolution.deprecated": lambda m: aten._convolution.deprecated(*_convolution(m), True, False, True),
    "convolution": lambda m: aten.convolution(*_convolution(m)),
    "conv_tbc": lambda m: torch.conv_tbc(m(4, 1, 2), m(3, 2, 2), m(2)),
    "addmv": lambda m: torch.addmv(m(4), m(4, 4), m(4)),
    "addr": lambda m: torch.addr(m(4, 4), m(4), m(4)),
    "addbmm": lambda m: torch.addbmm(m(4, 4), m(2, 4, 4), m(2, 4, 4)),
    "einsum": lambda m: aten.einsum("ij,jk->ik", [m(4, 4), m(4, 4)]),
    "linalg_multi_dot": lambda m: torch.linalg.multi_dot([m(4, 4), m(4, 4), m(4, 4)]),
    "linalg_vecdot": lambda m: torch.linalg.vecdot(m(2, 4), m(2, 4)),
    "linalg_matrix_norm": lambda m: aten.linalg_matrix_norm(m(3, 3), 1),
    "linalg_matrix_norm.str_ord": lambda m: aten.linalg_matrix_norm.str_ord(m(3, 3)),
    "lstm_cell": lambda m: torch.lstm_cell(m(2, 4), [m(2, 4), m(2, 4)], m(16, 4), m(16, 4), m(16), m(16)),
    "_thnn_fused_lstm_cell": lambda m: aten._thnn_fused_lstm_cell(m(2, 16), m(2, 16), m(2, 4), m(16), m(16)),
    "rnn_tanh_cell": lambda m: torch.rnn_tanh_cell(m(2, 4), m(2, 4), m(4, 4), m(4, 4), m(4), m(4)),
    "rnn_relu_cell": lambda m: torch.rnn_relu_cell(m(2, 4), m(2, 4), m(4, 4), m(4, 4), m(4), m(4)),
    "sum.dim_IntList": lambda m: m(2, 3).sum(-1),
    "prod.dim_int": lambda m: m(2, 3).prod(-1),
    "cumsum": lambda m: m(2, 3).cumsum(-1),
    "cumprod": lambda m: m(2, 3).cumprod(-1),
    "softmax.int": lambda m: m(2, 3).softmax(-1),
    "log_softmax.int": lambda m: m(2, 3).log_softmax(-1),
    "logsumexp": lambda m: m(2, 3).logsumexp(-1),
    "cross": lambda m: aten.cross(m(2, 3), m(2, 3), 1),
    "tensordot": lambda m: torch.tensordot(m(3, 4), m(4, 3), 1),
    "index_put": lambda m: torch.index_put(m(4), [m.ids(2)], m(2)),
    "scatter_add": lambda m: torch.scatter_add(m(4), 0, m.ids(2), m(2)),
    "frobenius_norm.dim": lambda m: aten.frobenius_norm.dim(m(2, 3), [1]),
    "nuclear_norm.dim": lambda m: aten.nuclear_norm.dim(m(3, 3), [0, 1]),
    "norm.Scalar": lambda m: aten.norm.Scalar(m(4)),
    "norm.ScalarOpt_dim": lambda m: aten.norm.ScalarOpt_dim(m(4, 4), 2, [1]),
    "group_norm": lambda m: F.group_norm(m(2, 4, 3), 2, m(4), m(4)),
    "layer_norm": lambda m: F.layer_norm(m(2, 4), (4,), m(4), m(4)),
    "native_layer_norm": lambda m: aten.native_layer_norm(m(2, 4), [4], m(4), m(4), 1e-5),
    "rms_norm": lambda m: F.rms_norm(m(2, 4), (4,), m(4)),
    "multi_margin_loss": lambda m: F.multi_margin_loss(m(2, 3), m.ids(2)),
    "multilabel_margin_loss": lambda m: F.multilabel_margin_loss(m(2, 3), m.ids(2, 3)),
    "nll_loss": lambda m: F.nll_loss(m(2, 3), m.ids(2)),
    "nll_loss2d": lambda m: F.nll_loss(m(2, 3, 4, 4), m.ids(2, 4, 4)),
    "pow.Scalar": lambda m: torch.pow(2.0, m(4)),
    "pow.Tensor_Scalar": lambda m: m(4).pow(2),
    "pow.Tensor_Tensor": lambda m: m(4).pow(m(4)),
    "renorm": lambda m: torch.renorm(m(2, 3), 2, 0, 1.0),
}
"""Operators of CUDA's table, with a call that reaches them."""

WITHOUT_TRUTH = {
    *("cudnn_convolution", "cudnn_convolution_transpose", "gru_cell", "_thnn_fused_gru_cell", "grid_sampler"),
    "binary_cross_entropy",
}
"""Those that a build without CUDA cannot run on fake tensors, or that CUDA refuses."""

BESIDE_TABLE: dict[str, Call] = {
    "add": lambda m: m(4) + m(4),
    "gelu": lambda m: F.gelu(m(4)),
    "mean": lambda m: m(4).mean(),
    "cat": lambda m: torch.cat([m(2), m(2)]),
    "embedding": lambda m: F.embedding(m.ids(3), m(5, 4)),
    "batch_norm": lambda m: F.batch_norm(m(2, 3, 4), None, None, m(3), m(3), training=True),
    "cross_entropy": lambda m: F.cross_entropy(m(2, 3), m.ids(2)),
    "sum in fp64": lambda m: m(4).sum(dtype=FP64),
    "sum of integers": lambda m: m.ids(4).sum(),
    "softmax in fp16": lambda m: m(2, 3).softmax(-1, dtype=FP16),
    "softmax by keyword": lambda m: torch.softmax(input=m(2, 3), dim=-1),
    "matmul as @": lambda m: m(3, 3) @ m(3, 3),
    "linear without bias": lambda m: F.linear(m(2, 3, 4), m(4, 4)),
    "a product in place": lambda m: m(4, 4).addmm_(m(4, 4), m(4, 4)),
    "several heads": lambda m: F.multi_head_attention_forward(
        *(m(4, 2, 8) for _ in range(3)), 8, 2, m(24, 8), m(24), None, None, False, 0.0, m(8, 8), m(8)
    ),
}
"""What is in no table, or reaches one by another way."""

DIFFERENT = {"scaled_dot_product_attention", "norm.Scalar", "norm.ScalarOpt_dim"}
"""Whose operators beneath are not CUDA's: attention is chosen from a table; on norms see below."""
if torch.version.cuda:
    # there the first is cuDNN's, which keeps the same, and the second one kernel, which keeps less
    DIFFERENT |= {"batch_norm", "rms_norm"}
    WITHOUT_TRUTH.add("_cudnn_rnn")

HALF_SOFTMAX = {"softmax.int", "log_softmax.int", "softmax by keyword", "several heads"}

FORMATS = {
    "fp32": [FP32],
    "bf16": [BF16],
    "fp32, then bf16": [FP32, BF16],
    "bf16, then fp32": [BF16, FP32],
    "fp64": [FP64],
}


@final
class _Below(TorchDispatchMode):
    """Notes which operators are reached beneath autocast, with formats and shapes of what they take and give, and when
    casts are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not str(func).startswith("prim."):  # questions, such as where a tensor is
            self.seen.append(f"{func}: {_formats((args, kwargs))} -> {_formats(out)}")
        if func is torch.ops.aten._to_copy.default:
            weakref.finalize(out, self.seen.append, f"freed: {_formats(out)}")
        return out


def _formats(tree: Any) -> str:
    found = [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return ", ".join(f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" for leaf in found)


@contextmanager
def _autocast(device: str, dtype: torch.dtype) -> Iterator[None]:
    """As ``torch.autocast``, which switches itself off for ``cuda`` where no GPU is."""
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_enabled(device, False)


def _seen(device: str, call: Call, formats: Sequence[torch.dtype], dtype: torch.dtype) -> tuple[str, list[str]]:
    """Formats of a call's results, and the operators beneath, in their order."""
    with torch.no_grad(), _autocast(device, dtype), _Below() as below:
        out = call(Make(device, formats))
    return _formats(out), below.seen


def _apart(dtype: torch.dtype, formats: dict[str, list[torch.dtype]], calls: dict[str, Call]) -> dict[str, str]:
    """Calls that the stand-in makes otherwise than CUDA, with both."""
    found = {}
    for (label, inputs), (name, call) in itertools.product(formats.items(), calls.items()):
        with CUDA:
            truth = _seen("cuda", call, inputs, dtype)
        ours = _seen(DEVICE.type, call, inputs, dtype)
        if truth != ours:
            found[f"{name} of {label} under {dtype}"] = f"CUDA {truth}\nstand-in {ours}"
    return found


def check_every_operator_of_cudas_table_is_in_the_stand_ins() -> None:
    key = torch._C._dispatch_get_registrations_for_dispatch_key
    theirs, ours = set(key("AutocastCUDA")), set(key("AutocastPrivateUse1"))
    assert theirs, "this build of torch has no table of CUDA's"
    assert theirs <= ours, f"without a cast: {sorted(theirs - ours)}"
    names = {name.removeprefix("aten::") for name in theirs if name.startswith("aten::")}
    tried = set(IN_TABLE) | WITHOUT_TRUTH
    assert names == tried, f"calls are missing, or of no use: {sorted(names ^ tried)}"


def check_the_operators_beneath_and_their_formats_are_cudas() -> None:
    calls = {name: call for name, call in {**IN_TABLE, **BESIDE_TABLE}.items() if name not in DIFFERENT}
    found = _apart(BF16, FORMATS, calls)
    not_half = {name: call for name, call in calls.items() if name not in HALF_SOFTMAX}
    found |= _apart(FP16, {"fp32": [FP32], "fp16": [FP16]}, not_half)
    assert not found, f"{len(found)} differ: {found}"


def check_attention_gives_the_format_that_cuda_gives() -> None:
    call = IN_TABLE["scaled_dot_product_attention"]
    for inputs in FORMATS.values():
        with CUDA:
            truth = _seen("cuda", call, inputs, BF16)[0]
        assert _seen(DEVICE.type, call, inputs, BF16)[0] == truth, inputs


def check_old_norms_sum_in_fp32_without_a_copy() -> None:
    found = _apart(BF16, FORMATS, {name: IN_TABLE[name] for name in ("norm.Scalar", "norm.ScalarOpt_dim")})
    assert not found, found


def check_softmax_of_fp16_makes_no_copy() -> None:
    calls = {name: call for name, call in {**IN_TABLE, **BESIDE_TABLE}.items() if name in HALF_SOFTMAX}
    found = _apart(FP16, {"fp16": [FP16], "fp32": [FP32]}, calls)
    assert not found, found


def check_what_cuda_refuses_is_refused() -> None:
    def message(device: str) -> str:
        try:
            with torch.no_grad(), _autocast(device, BF16):
                F.binary_cross_entropy(torch.empty(4, device=device), torch.empty(4, device=device))
        except RuntimeError as error:
            return str(error)
        return ""

    with CUDA:
        truth = message("cuda")
    assert truth
    assert message(DEVICE.type) == truth


def _casts(work: Callable[[], Any], **options: Any) -> int:
    """How many weights of 64 x 64 are written in bf16 by ``work`` under one autocast."""
    before = len(LEDGER.allocations)
    with torch.autocast(DEVICE.type, BF16, **options):
        result = work()
    del result
    return _casts_since(before)


def _casts_since(number: int) -> int:
    made = LEDGER.allocations[number:]
    return sum(one.num_bytes == 64 * 64 * 2 and "copy" in one.operator for one in made)


def _weight(side: int = 64) -> nn.Parameter:
    return nn.Parameter(torch.empty(side, side, device=DEVICE))


def check_a_weight_is_cast_once_in_one_autocast() -> None:
    weight, x = _weight(), torch.empty(2, 64, device=DEVICE)
    assert _casts(lambda: [F.linear(x, weight) for _ in range(3)]) == 1
    assert _casts(lambda: [F.linear(x, weight) for _ in range(3)]) == 1, "and anew in the next one"
    assert _casts(lambda: [F.linear(x, weight) for _ in range(3)], cache_enabled=False) == 3
    assert _casts(lambda: F.linear(x, weight), enabled=False) == 0

    def nested() -> None:
        for _ in range(2):
            with torch.autocast(DEVICE.type, BF16):
                F.linear(x, weight)
        F.linear(x, weight)

    assert _casts(nested) == 1, "the outermost decides"


def check_what_is_no_weight_is_cast_every_time() -> None:
    leaf, x = torch.empty(64, 64, device=DEVICE), torch.empty(2, 64, device=DEVICE)
    assert _casts(lambda: [F.linear(x, leaf) for _ in range(2)]) == 2, "it needs no gradient"
    inner = _weight() * 2
    assert _casts(lambda: [F.linear(x, inner) for _ in range(2)]) == 2, "it is no leaf"


def check_a_leaf_that_is_a_view_is_cast_every_time() -> None:
    view, x = torch.empty(2, 64, 64, device=DEVICE)[0].requires_grad_(), torch.empty(2, 64, device=DEVICE)
    assert view._is_view()
    assert view.is_leaf
    assert _casts(lambda: [F.linear(x, view) for _ in range(2)]) == 2


def check_a_weight_of_flat_buffers_is_cast_once() -> None:
    weight, x = _weight(), torch.empty(2, 64, device=DEVICE)
    weight.data = torch.empty(3 * 64 * 64, device=DEVICE)[:4096].view(64, 64)
    assert _casts(lambda: [F.linear(x, weight) for _ in range(2)]) == 1


def check_kept_casts_go_with_autocast_and_with_nothing_else() -> None:
    weight, x = _weight(), torch.empty(2, 64, device=DEVICE)
    before = live_bytes(LEDGER)
    with torch.autocast(DEVICE.type, BF16):
        F.linear(x, weight)
        assert live_bytes(LEDGER) == before + 64 * 64 * 2, "the cast stays though no result does"
    assert live_bytes(LEDGER) == before, "and goes at the end"
    with torch.autocast(DEVICE.type, BF16):
        out = F.linear(x, weight)
        out.sum().backward()
    del out
    assert live_bytes(LEDGER) == before + 64 * 64 * 4, "the gradient alone is left"
    assert weight.grad is not None
    assert weight.grad.dtype == FP32


def check_recomputed_blocks_cast_again() -> None:
    weight, x = _weight(), torch.empty(2, 64, device=DEVICE, requires_grad=True)
    before = len(LEDGER.allocations)
    with torch.autocast(DEVICE.type, BF16):
        out = checkpoint(lambda x: F.linear(x, weight), x, use_reentrant=False)
    assert _casts_since(before) == 1
    out.sum().backward()
    assert _casts_since(before) == 2, "the forward pass's cast was let go of when its autocast ended"


def check_host_tensors_are_left_alone() -> None:
    with torch.autocast(DEVICE.type, BF16):
        assert torch.mm(torch.empty(2, 2), torch.empty(2, 2)).dtype == FP32
        assert torch.empty(4, dtype=BF16).exp().dtype == BF16


GPU = Gpu(name="NVIDIA H200", memory_bytes=143771 * 2**20, compute_capability=(9, 0))
CUDA = FakeTensorMode(allow_non_fake_inputs=True)

if __name__ == "__main__":
    with stand_in(GPU) as (DEVICE, LEDGER):
        main(globals())
