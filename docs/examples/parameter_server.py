"""The same sum by a parameter server: every rank sends to one, which adds up and sends the sum back.

    torchrun --standalone --nproc-per-node 2 docs/examples/parameter_server.py

It is what data parallelism was before the ring. The server receives n - 1 tensors and sends n - 1, through one link:
twice the ranks take twice the time. In a ring each rank sends less than two, however many there are.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor


def server_all_reduce(tensor: Tensor) -> int:
    """Add up a contiguous tensor of one shape over all ranks, in place.

    Returns:
        How many tensors went through this rank's link.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return 2
    received = torch.empty_like(tensor)
    for worker in range(1, ranks):
        dist.recv(received, worker)
        tensor.add_(received)
    for worker in range(1, ranks):
        dist.send(tensor, worker)
    return 2 * (ranks - 1)


def main() -> None:
    dist.init_process_group()
    rank, device = dist.get_rank(), "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{dist.get_node_local_rank()}"
        torch.cuda.set_device(device)
    tensor = torch.randn(1_000_003, generator=torch.Generator().manual_seed(rank)).to(device)
    expected = tensor.clone()
    dist.all_reduce(expected)
    passed = server_all_reduce(tensor)
    torch.testing.assert_close(tensor, expected)
    if rank == 0:
        sys.stdout.write(f"{dist.get_world_size()} ranks: {passed} tensors went through the server's link\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
