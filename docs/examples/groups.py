"""Operators, groups and asynchronous calls: the rest of ``reduce(tensor, dst, op, group, async_op)``.

torchrun --standalone --nproc-per-node 2 docs/examples/groups.py
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor

OPERATORS = {op: getattr(dist.ReduceOp, op) for op in ("SUM", "PRODUCT", "MIN", "MAX")}
"""Ways in which reduce, all_reduce and reduce_scatter join tensors. AVG, the mean, is NCCL's alone: divide the sum."""


def reduced(own: Tensor) -> dict[str, list[float]]:
    """Return what rank 0 holds after a reduce with each operator; of other ranks nothing."""
    results = {}
    for name, operator in OPERATORS.items():
        value = own.clone()
        dist.reduce(value, dst=0, op=operator)
        results[name] = value.tolist() if dist.get_rank() == 0 else []
    return results


def summed_in_pairs(own: Tensor) -> list[float]:
    """Return the sum over this rank and its neighbour: ranks 0 and 1, 2 and 3, and so on."""
    ranks = range(dist.get_world_size())
    # every rank makes every group, in the same order, also those that it is not in
    groups = [dist.new_group(list(ranks[first : first + 2])) for first in ranks[::2]]
    value = own.clone()
    dist.all_reduce(value, group=groups[dist.get_rank() // 2])
    return value.tolist()


def summed_beside_work(own: Tensor) -> list[float]:
    """Return the sum over all ranks, and a number that was computed while they added it up."""
    value = own.clone()
    work = dist.all_reduce(value, async_op=True)  # returns at once: so DDP sums beside the backward pass
    other = own.square()  # anything that leaves ``value`` alone
    work.wait()
    return [*value.tolist(), *other.tolist()]


def main() -> None:
    dist.init_process_group()  # backend: nccl on GPUs, gloo on CPUs
    device = f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu"
    own = torch.tensor([dist.get_rank() + 1.0], device=device)
    results = {"reduce": reduced(own), "pair": summed_in_pairs(own), "async_op": summed_beside_work(own)}
    # one write: torchrun's ranks do not buffer, and print writes the end of a line apart
    sys.stdout.write("  ".join(f"{name} {values}" for name, values in results.items()) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
