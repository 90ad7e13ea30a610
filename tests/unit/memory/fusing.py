"""What compiled code writes down, and what its fused kernels keep in registers: of graphs on the stand-in."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.machine.device import PLANNED
from paceline.machine.facts import Gpu
from paceline.memory.stand_in import stand_in
from tests.unit.memory.apart import live_bytes, main

N = 1000


def entered(work: Callable[..., Tensor], *given: Tensor, backward: bool = False) -> list[str]:
    """Operators of the storages that a compiled call made, without those that give numbers of a row."""
    start = len(LEDGER.allocations)
    try:
        out = torch.compile(work, backend=PLANNED, fullgraph=True)(*given)
        if backward:
            start = len(LEDGER.allocations)
            out.sum().backward()
    finally:
        torch._dynamo.reset()
    made = LEDGER.allocations[start:]
    return [one.operator.split(".")[1] for one in made if one.num_bytes > 4 * N and one.name != "workspaces"]


def empty(*shape: int) -> Tensor:
    return torch.empty(*shape, device=DEVICE)


def check_a_chain_that_a_product_reads_is_written_once() -> None:
    found = entered(lambda x, w: (x.sin().cos() * 2) @ w, empty(N, 8), empty(8, 8))
    assert found == ["mul", "mm"], found


def check_what_a_sum_reads_is_not_written() -> None:
    found = entered(lambda x: x - x.exp().sum(1, keepdim=True), empty(N, 8))
    assert found == ["sub"], found


def check_a_view_hides_no_reader() -> None:
    found = entered(lambda x, w: (x.sin().view(N, 8) @ w).cos(), empty(8 * N), empty(8, 8))
    assert found == ["sin", "mm", "cos"], found


def check_a_view_of_what_is_not_written_is_not_written_either() -> None:
    found = entered(lambda x: x.sin().view(N, 8).cos(), empty(8 * N))
    assert found == ["cos"], found


def check_what_is_computed_from_much_and_read_twice_is_written() -> None:
    given = [empty(N, 8) for _ in range(5)]
    found = entered(lambda a, b, c, d, e: ((s := a * b + c * d + e).sin(), s.exp().sum())[0] + s, *given)
    assert found == ["add", "add"], found


def check_convolutions_leave_their_graphs_as_they_are() -> None:
    found = entered(lambda x, w: F.conv2d(x.sin().cos(), w), empty(4, 8, 16, 16), empty(8, 8, 1, 1))
    assert found == ["sin", "cos", "convolution"], found


def check_a_pass_lets_go_of_what_it_was_given_and_of_its_results() -> None:
    weight = nn.Parameter(empty(8, N))
    before = live_bytes(LEDGER)
    found = entered(lambda x: F.gelu(x @ weight), empty(N, 8), backward=True)
    assert "mm" in found, found
    assert live_bytes(LEDGER) == before + weight.nbytes, "there is more than the gradient"


if __name__ == "__main__":
    with stand_in(Gpu(name="NVIDIA H200", memory_bytes=143771 * 2**20, compute_capability=(9, 0))) as (DEVICE, LEDGER):
        main(globals())
