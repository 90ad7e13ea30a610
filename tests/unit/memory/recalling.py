"""Operators whose results are recalled, beside torch's own answers on the same kind of tensors."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from paceline.machine.facts import Gpu
from paceline.memory.expandable import DEFAULT
from paceline.memory.stand_in import stand_in
from tests.unit.memory.apart import live_bytes, main

Call = Callable[[Tensor, Tensor], Any]

CALLS: dict[str, Call] = {
    "a product": lambda x, w: x @ w,
    "a view": lambda x, w: x.view(-1),
    "a transposed view": lambda x, w: x.t(),
    "a slice": lambda x, w: x[1:3, 2:],
    "pieces": lambda x, w: x.split(2),
    "rows": lambda x, w: x.unbind(0),
    "a copy that need not be": lambda x, w: x.contiguous(),
    "a copy that must be": lambda x, w: x.t().contiguous(),
    "another format": lambda x, w: x.to(torch.bfloat16),
    "the same format": lambda x, w: x.to(torch.float32),
    "in place": lambda x, w: x.add_(1),
    "a product with a transposed weight": lambda x, w: F.linear(x, w.t()),
    "two results": lambda x, w: torch.max(x, 1),
    "a norm": lambda x, w: torch.native_layer_norm(x, [4], None, None, 1e-5),
    "lists": lambda x, w: torch._foreach_mul([x, x], [1.0, 2.0]),
    "a list in place": lambda x, w: torch._foreach_mul_([x, w], 2.0),
    "from where the storage begins": lambda x, w: x.as_strided((2, 2), (1, 1), 3),
    "from where the tensor begins": lambda x, w: x.as_strided((2, 2), (1, 1)),
    "another device": lambda x, w: torch.empty_like(x, device="meta"),
    "expanded": lambda x, w: x[:1].expand(5, 4),
    "written elsewhere": lambda x, w: torch.mul(x, 2, out=torch.empty_like(x)),
    "nothing": lambda x, w: x[:0] @ w,
}


def _told(out: Any, x: Tensor, w: Tensor) -> list[Any]:
    """All that a plan can know of results: what they look like, and whose memory they have."""
    given = {x.untyped_storage()._cdata: "x", w.untyped_storage()._cdata: "w"}
    told = []
    for each in out if isinstance(out, (tuple, list)) else [out]:
        if each is None:
            told.append(None)
            continue
        assert type(each) is FakeTensor
        whose = given.get(each.untyped_storage()._cdata, "its own")
        place = (tuple(each.shape), each.stride(), each.storage_offset(), each.untyped_storage().nbytes())
        told.append((each.dtype, each.device, *place, whose, each is x, each.requires_grad))
    return told


def _inputs(offset: int, *, trained: bool) -> tuple[Tensor, Tensor]:
    whole = torch.empty(100, device=DEVICE)
    x, w = whole[offset : offset + 16].view(4, 4), torch.empty(4, 4, device=DEVICE)
    return (x.detach().requires_grad_(), w.requires_grad_()) if trained else (x, w)


def check_what_is_recalled_is_what_torch_answers() -> None:
    for name, call in CALLS.items():
        places = [0, 7, 40, 40]  # of the tensor in its storage: the first asks torch, the others recall
        found = [_told(call(*given), *given) for given in (_inputs(offset, trained=False) for offset in places)]
        truth = []
        for offset in places:
            given = _inputs(offset, trained=False)
            LEDGER._compute, recalls = lambda func, args, kwargs: func(*args, **kwargs), LEDGER._compute
            try:
                truth.append(_told(call(*given), *given))
            finally:
                LEDGER._compute = recalls
        assert found == truth, f"{name}:\n{found}\n{truth}"


def check_gradients_pass_what_is_recalled() -> None:
    for _ in range(2):
        x, w = _inputs(7, trained=True)
        F.gelu(x[1:].t().reshape(4, 3).t() @ w).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        assert (x.grad.shape, w.grad.shape) == (x.shape, w.shape)


def check_equal_numbers_of_other_kinds_are_told_apart() -> None:
    ids = torch.empty(4, dtype=torch.long, device=DEVICE)
    kinds = [(ids * factor).dtype for factor in (1, 1.0, True, 1, 1.0, True)]
    assert kinds == [torch.long, torch.float32, torch.long] * 2, kinds


def check_the_default_format_is_asked_for_again() -> None:
    ids = torch.empty(4, dtype=torch.long, device=DEVICE)
    before = (ids / 2).dtype
    torch.set_default_dtype(torch.float64)
    try:
        assert (ids / 2).dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def check_what_changes_its_argument_is_never_recalled() -> None:
    for _ in range(3):
        x = torch.empty(2, 3, device=DEVICE)
        x.t_()
        assert x.shape == (3, 2)
        x.resize_(5, 5)
        assert (x.shape, x.untyped_storage().nbytes()) == ((5, 5), 100)
        x.data = torch.empty(7, device=DEVICE)
        assert x.shape == (7,)


def check_each_call_is_worked_out_once() -> None:
    asked = []

    @torch.library.custom_op("paceline_test::asked", mutates_args=())
    def work(x: Tensor, by: int) -> Tensor:
        return x.clone()

    @work.register_fake
    def _(x: Tensor, by: int) -> Tensor:
        asked.append((tuple(x.shape), by))
        return torch.empty_like(x)

    x = torch.empty(3, device=DEVICE)
    made = [work(x, by).untyped_storage()._cdata for by in (1, 2, 1, 2)]
    made += [work(x[:2], 1).untyped_storage()._cdata]
    assert asked == [((3,), 1), ((3,), 2), ((2,), 1)], asked


def check_results_that_are_recalled_have_memory_of_their_own() -> None:
    x, w = _inputs(0, trained=False)
    first, second = x @ w, x @ w
    assert first.untyped_storage()._cdata != second.untyped_storage()._cdata
    before = live_bytes(LEDGER)
    del second
    assert live_bytes(LEDGER) == before - 64


def check_a_models_copy_is_of_the_same_mode() -> None:
    """A copied mode let go of storages a second time, which corrupted memory."""
    model = nn.Sequential(nn.Linear(4, 4, device=DEVICE), nn.LayerNorm(4, device=DEVICE))
    for _ in range(3):
        other = copy.deepcopy(model)
        weights: list[Any] = [*model.parameters(), *other.parameters()]
        assert len({id(weight.fake_mode) for weight in weights}) == 1
        assert len({weight.untyped_storage()._cdata for weight in weights}) == len(weights)
        del other, weights
        gc.collect()


def check_generators_of_the_host_are_torchs() -> None:
    assert torch.Generator().device.type == "cpu"
    assert type(torch.Generator("cpu")) is type(torch.default_generator)
    mine = torch.Generator(DEVICE)
    assert (mine.manual_seed(3).device, mine.initial_seed()) == (DEVICE, 3)
    assert torch.randint(9, (5, 2), generator=mine, device=mine.device).shape == (5, 2)


def check_what_is_made_on_a_stream_is_entered_as_such() -> None:
    gpu = torch.get_device_module(DEVICE)
    stream, graph = gpu.Stream(), gpu.CUDAGraph()
    with gpu.stream(stream):
        torch.empty(3, device=DEVICE)
    with gpu.graph(graph, "graphs", stream, capture_error_mode="thread_local"):
        torch.empty(4, device=DEVICE)
    torch.empty(5, device=DEVICE)
    newest = LEDGER.allocations[-3:]
    assert [(made.num_bytes // 4, made.pool, made.stream) for made in newest] == [
        (3, DEFAULT, stream), (4, "graphs", stream), (5, DEFAULT, 0)
    ]  # fmt: skip


def check_a_process_has_one_stand_in() -> None:
    with pytest.raises(RuntimeError, match="fork before the trace"), stand_in(GPU):
        pass


GPU = Gpu(name="NVIDIA H200", memory_bytes=143771 * 2**20, compute_capability=(9, 0))

if __name__ == "__main__":
    with stand_in(GPU) as (DEVICE, LEDGER):
        main(globals())
