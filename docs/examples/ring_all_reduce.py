"""An all-reduce written out: every rank ends with the sum of all ranks' tensors, and talks to its two neighbours alone.

    torchrun --nproc-per-node 2 docs/examples/ring_all_reduce.py

The ranks stand in a ring, and each cuts its tensor into as many chunks as there are ranks. In every round each rank
sends one chunk to the right while it receives another from the left. After 2 (n - 1) rounds all is done, and each rank
has sent 2 (n - 1) / n of a tensor: hardly more on a hundred ranks than on ten.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor) -> None:
    """Add up a contiguous tensor of one shape over all ranks, in place."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chunks = tensor.view(-1).tensor_split(ranks)

    # reduce-scatter: a chunk that is passed on carries the sum of all ranks that it has visited
    for turn in range(ranks - 1):
        received = pass_on(chunks[(rank - turn) % ranks], chunks[(rank - turn - 1) % ranks])
        chunks[(rank - turn - 1) % ranks].add_(received)

    # all-gather: chunk rank + 1 is whole here now; whole chunks go round once more
    for turn in range(ranks - 1):
        received = pass_on(chunks[(rank + 1 - turn) % ranks], chunks[(rank - turn) % ranks])
        chunks[(rank - turn) % ranks].copy_(received)


def pass_on(outgoing: Tensor, expected: Tensor) -> Tensor:
    """Send ``outgoing`` to the right; returns what comes from the left, which is shaped like ``expected``."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(expected)
    # both at once: if all ranks sent first and received then, each would wait for the next one for ever
    send = dist.P2POp(dist.isend, outgoing, (rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % ranks)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return received


def main() -> None:
    dist.init_process_group()
    rank, device = dist.get_rank(), "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{dist.get_node_local_rank()}"
        torch.cuda.set_device(device)
    tensor = torch.randn(1_000_003, generator=torch.Generator().manual_seed(rank)).to(device)
    expected = tensor.clone()
    dist.all_reduce(expected)
    ring_all_reduce(tensor)
    torch.testing.assert_close(tensor, expected)
    if rank == 0:
        print(f"{dist.get_world_size()} ranks: the ring gives what all_reduce gives")  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
