"""How long storages live, in a ledger: checks that hold of real tensors on a CPU as of tensors that hold nothing.

Sizes are in elements of fp32. ``test_ledger.py`` makes these checks on a CPU, and runs this as a program for the
stand-in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.machine.facts import Gpu
from paceline.memory.expandable import DEFAULT
from paceline.memory.ledger import Ledger
from paceline.memory.stand_in import stand_in
from tests.unit.memory.apart import known, live_bytes, main

N = 1000


@dataclass(frozen=True)
class Place:
    """Where a check is made: inside the ledger of a device."""

    device: torch.device
    ledger: Ledger

    def empty(self, *shape: int) -> Tensor:
        """fp32, [N] unless said."""
        return torch.empty(*shape or (N,), device=self.device)

    def weight(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(self.empty(*shape))

    @contextmanager
    def entered(self) -> Iterator[list[str]]:
        """What happened inside, once it is over: ``+ mm 1000``, ``- mm 1000``, ``empty``."""
        start, found = len(self.ledger.events), list[str]()
        yield found
        found += [self._line(event) for event in self.ledger.events[start:]]

    def _line(self, event: int | None) -> str:
        if event is None:
            return "empty"
        made = self.ledger.allocations[max(event, ~event)]
        return f"{'+' if event >= 0 else '-'} {(made.operator or '.added').split('.')[1]} {made.num_bytes // 4}"


def check_views_share_a_storage(at: Place) -> None:
    with at.entered() as found:
        x = at.empty(10, 100)
        views = [x.view(-1), x.t(), x[2:], x.detach(), *x.split(5), *x.unbind(0), x.as_strided((5,), (2,))]
        x.add_(1)
        x.view(-1)[:7].mul_(2)
        del views
    assert found == ["+ empty 1000"], found


def check_a_storage_lives_as_long_as_its_last_view(at: Place) -> None:
    with at.entered() as found:
        x = at.empty()
        last = x[999:]
        del x
        before = live_bytes(at.ledger)
        del last
        assert live_bytes(at.ledger) == before - 4 * N
    assert found == ["+ empty 1000", "- empty 1000"], found


def check_a_local_is_freed_when_its_function_ends(at: Place) -> None:
    def work() -> Tensor:
        first = at.empty()
        return first.mul(2)

    with at.entered() as found:
        kept = work()
        then = at.empty(3)
    assert found == ["+ empty 1000", "+ mul 1000", "- empty 1000", "+ empty 3"], found
    del kept, then


def check_a_rebound_name_lets_go_after_the_new_value_is_there(at: Place) -> None:
    with at.entered() as found:
        x = at.empty()
        x = x + 1
        x = x.relu()
    assert found == ["+ empty 1000", "+ add 1000", "- empty 1000", "+ relu 1000", "- add 1000"], found
    del x


def check_every_result_of_an_operator_is_entered(at: Place) -> None:
    x = at.empty(10, 100)
    with at.entered() as found:
        a, b = x.topk(3)
        more = torch._foreach_mul([x, x.view(-1)], 2.0)
    # ids have 8 bytes
    assert found == ["+ topk 30", "+ topk 60", "+ _foreach_mul 1000", "+ _foreach_mul 1000"], found
    del a, b, more


def check_nothing_is_entered_for_no_bytes(at: Place) -> None:
    with at.entered() as found:
        torch.empty(0, 5, device=at.device).view(-1).add_(1)
    assert found == [], found


def check_other_devices_are_left_out(at: Place) -> None:
    with at.entered() as found:
        torch.empty(N, device="meta").add(1)
    assert found == [], found


def check_what_autograd_saves_lives_until_the_backward_pass_has_used_it(at: Place) -> None:
    weight = at.weight(10, 10)
    with at.entered() as found:
        hidden = weight * 2
        out = hidden.sin()
        del hidden
        loss = out.sum()
        del out
    # sin keeps its input, sum keeps nothing
    assert found == ["+ mul 100", "+ sin 100", "+ sum 1", "- sin 100"], found
    with at.entered() as found:
        loss.backward()
    assert "- mul 100" in found, found
    assert weight.grad is not None
    weight.grad = None
    del loss


def check_of_a_backward_pass_only_gradients_of_weights_are_left(at: Place) -> None:
    first, second = at.weight(20, 10), at.weight(5, 20)
    before, x = live_bytes(at.ledger), at.empty(7, 10)
    loss = F.linear(F.relu(F.linear(x, first)), second).sum()
    assert live_bytes(at.ledger) == before + 4 * (70 + 140 + 1), "the input, what relu gave, the loss"
    loss.backward()
    del loss, x
    assert live_bytes(at.ledger) == before + first.nbytes + second.nbytes
    first.grad = second.grad = None
    assert live_bytes(at.ledger) == before


def check_what_is_recomputed_is_not_kept(at: Place) -> None:
    weight, x = at.weight(10, 10), at.empty(50, 10).requires_grad_()

    def block(x: Tensor) -> Tensor:
        return F.gelu(F.linear(F.gelu(F.linear(x, weight)), weight))

    def kept(forward: Callable[[Tensor], Tensor]) -> int:
        before = live_bytes(at.ledger)
        out = forward(x)
        held = live_bytes(at.ledger) - before
        out.sum().backward()
        x.grad = weight.grad = None
        return held

    plain = kept(block)
    recomputed = kept(lambda x: checkpoint(block, x, use_reentrant=False))
    assert plain == 4 * 4 * 500, plain
    assert recomputed == 4 * 500, recomputed


def check_a_backward_pass_is_a_phase_of_its_own_in_the_forward_phase_alone(at: Place) -> None:
    weight = at.weight(10, 10)

    def work(x: Tensor) -> Tensor:
        return checkpoint(lambda x: x.sin().cos(), x, use_reentrant=False)

    for around, inside in (("forward", "backward"), ("update", "update")):
        start = len(at.ledger.allocations)
        with at.ledger.during(around):
            loss, gradient = work(weight).sum(), at.empty(1).view(())
            forward = len(at.ledger.allocations)
            loss.backward(gradient)
        assert {one.phase for one in at.ledger.allocations[start:forward]} == {around}
        assert {one.phase for one in at.ledger.allocations[forward:]} == {inside}, "recomputed or not"
        weight.grad = None


def check_a_backward_pass_has_a_thread_of_its_own_where_nothing_is_captured(at: Place) -> None:
    weight = at.weight(10, 10)
    for pool, beside in ((DEFAULT, True), ("graphs", False)):
        start = len(at.ledger.allocations)
        with at.ledger.into(pool):
            loss, gradient = weight.sin().sum(), at.empty(1).view(())
            forward = len(at.ledger.allocations)
            loss.backward(gradient)
        assert {one.beside for one in at.ledger.allocations[start:forward]} == {False}
        assert {one.beside for one in at.ledger.allocations[forward:]} == {beside}, pool
        weight.grad = None


def check_gradients_of_chosen_rows_are_added_up_in_the_zeros_made_for_them(at: Place) -> None:
    weight, rows = at.weight(100, 10), torch.zeros(3, dtype=torch.long, device=at.device)
    ways: dict[str, Any] = {
        "index_select": lambda: weight.index_select(0, rows),
        "indexing": lambda: weight[rows],
        "gather": lambda: weight.gather(0, rows[:, None].expand(3, 10)),
        "amax": lambda: weight.max(0).values,
    }
    for name, way in ways.items():
        loss, gradient = way().sum(), at.empty(1).view(())
        start = len(at.ledger.allocations)
        loss.backward(gradient)
        whole = [one.operator for one in at.ledger.allocations[start:] if one.num_bytes == 4 * weight.numel()]
        assert len(whole) == 1, f"{name}: {whole}"
        weight.grad = None


def check_phases_and_pools_nest_and_end_with_an_error(at: Place) -> None:
    def seen() -> tuple[str, Any]:
        made = at.empty()
        last = at.ledger.allocations[-1]
        del made
        return last.phase, last.pool

    outside = seen()
    try:
        with at.ledger.during("one"), at.ledger.into("graphs"):
            assert seen() == ("one", "graphs")
            with at.ledger.during("two"), at.ledger.into((0, 7)):
                assert seen() == ("two", (0, 7))
            assert seen() == ("one", "graphs")
            raise KeyError
    except KeyError:
        pass
    assert seen() == outside == ("", (0, 0))


def check_the_first_name_stays_and_a_view_names_its_storage(at: Place) -> None:
    x, y, other = at.empty(), at.empty(), torch.empty(3, device="meta")
    number = at.ledger.events[-1]
    assert number is not None
    at.ledger.name("parameters", [x[5:6], other])
    at.ledger.name("gradients", [x, y])
    assert [one.name for one in at.ledger.allocations[number - 1 : number + 1]] == ["parameters", "gradients"]
    assert "" not in {one.name for one in at.ledger.allocations[number - 1 :]}


def check_a_cache_is_emptied_in_order(at: Place) -> None:
    with at.entered() as found:
        x = at.empty()
        at.ledger.empty_cache()
        del x
        at.ledger.empty_cache()
    assert found == ["+ empty 1000", "empty", "- empty 1000", "empty"], found


def check_what_is_added_is_never_freed(at: Place) -> None:
    with at.entered() as found:
        at.ledger.add(12, "workspaces")
    assert found == ["+ added 3"], found
    assert at.ledger.allocations[-1].name == "workspaces"


def check_every_storage_is_made_once_and_freed_at_most_once(at: Place) -> None:
    # addresses come again: what was freed must not be taken for what is alive
    before, kept = live_bytes(at.ledger), []
    for index in range(300):
        x = at.empty(index + 1).mul(2)
        if index % 7 == 0:
            kept.append(x.view(-1))
    made = [event for event in at.ledger.events if event is not None and event >= 0]
    freed = [~event for event in at.ledger.events if event is not None and event < 0]
    assert made == list(range(len(at.ledger.allocations))), "in the order of their numbers"
    assert len(set(freed)) == len(freed)
    alive = sum(view.nbytes for view in [*kept, x])
    assert live_bytes(at.ledger) == before + alive, "what Python still holds"
    assert sum(4 * (index + 1) for index in range(300) if index % 7 == 0) == sum(v.nbytes for v in kept)


def check_an_operator_that_fails_changes_nothing(at: Place) -> None:
    x = at.empty(10, 10)
    with at.entered() as found:
        try:
            x.view(3, 7)
        except RuntimeError:
            pass
        else:
            raise AssertionError("no error")
    assert found == [], found
    assert (x + 1).shape == (10, 10)


def check_a_workspace_is_beside_the_results_and_gone_after(at: Place) -> None:
    def four_times(operator: str, args: Any) -> int:
        return 4 * args[0].nbytes if operator == "aten.sin.default" else 0

    x = at.empty()
    with patch("paceline.memory.ledger.workspace_bytes", four_times), at.entered() as found:
        with at.ledger.during("forward"):
            out = x.sin().cos()
        x.sin()  # nobody asked for what is outside of all phases
    assert found[:4] == ["+ sin 1000", "+ sin 4000", "- sin 4000", "+ cos 1000"], found
    assert found[4:] == ["- sin 1000", "+ sin 1000", "- sin 1000"], found
    inside = [one for one in at.ledger.allocations if one.num_bytes == 16 * N]
    assert [one.name for one in inside] == ["workspaces"], inside
    del out


def check_a_storage_that_is_given_back_and_taken_again(at: Place) -> None:
    with at.entered() as found:
        x = at.empty()
        storage, before = x.untyped_storage(), live_bytes(at.ledger)
        storage.resize_(0)
        assert live_bytes(at.ledger) == before - 4 * N
        storage.resize_(8 * N)
        storage.resize_(8 * N)
        assert live_bytes(at.ledger) == before + 4 * N
        del x, storage
        assert live_bytes(at.ledger) == before - 4 * N
    alive = 0
    for line in found:
        sign, _, size = line.split()
        alive += int(size) if sign == "+" else -int(size)
        assert alive >= 0, found
    assert alive == 0, found


def check_a_tensor_that_grows_is_entered_anew(at: Place) -> None:
    x = at.empty(10)
    before = live_bytes(at.ledger)
    x.resize_(N)
    assert live_bytes(at.ledger) == before + 4 * (N - 10)


def check_compiled_code_is_compiled_and_its_results_are_entered(at: Place) -> None:
    graphs = list[torch.fx.GraphModule]()

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    def work(x: Tensor) -> Tensor:
        return (x * 2).sin() + 1

    x = at.empty()
    try:
        with at.entered() as found:
            out = torch.compile(work, backend=backend, fullgraph=True)(x)
    finally:
        torch._dynamo.reset()
    assert len(graphs) == 1, "it was run as it is"
    assert [line for line in found if line.startswith("+")] == ["+ mul 1000", "+ sin 1000", "+ add 1000"], found
    assert out.shape == (N,)


@known("ledger.py: under any dispatch mode autograd adds out of place, which costs a tensor for a moment")
def check_gradients_that_meet_are_added_in_the_memory_of_the_first(at: Place) -> None:
    with at.entered() as found:
        three_gradients_meet(at.empty(N).requires_grad_(), address=lambda _: 0)
    assert not [line for line in found if line == f"+ add {N}"], found


def three_gradients_meet(leaf: Tensor, address: Callable[[Tensor], int]) -> tuple[list[int], int]:
    """Addresses of three gradients of one tensor, which nobody else holds, and of their sum. Of ``leaf`` [N]."""
    made, sums = list[int](), list[int]()

    class Branch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            found = gradient.expand(N).clone()
            made.append(address(found))
            return found

    class Meeting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            sums.append(address(gradient))
            return gradient

    met = Meeting.apply(leaf)
    sum(Branch.apply(met) for _ in range(3)).backward()
    return made, sums[0]


if __name__ == "__main__":
    gpu = Gpu(name="NVIDIA H200", memory_bytes=143771 * 2**20, compute_capability=(9, 0))
    with stand_in(gpu) as (planned, entries):
        main(globals(), Place(planned, entries))
