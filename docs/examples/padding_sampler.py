"""What a sampler that pads does to seven samples, and what dealing them by tokens does.

    torchrun --standalone --nproc-per-node 2 docs/examples/padding_sampler.py

``DistributedSampler`` gives all ranks the same number of samples. Where they do not divide, it repeats some, or with
``drop_last`` leaves some out; and DDP takes the mean of the ranks' means. Here the loss of sample n is n.
"""

import sys
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from paceline.data.order import OrderState, ShuffledOrder

TOKENS = np.array([512, 20, 300, 40, 256, 60, 128])


def padded_share(rank: int, ranks: int) -> list[int]:
    """The samples of this rank, as the usual sampler gives them."""
    return list(DistributedSampler(TOKENS, num_replicas=ranks, rank=rank, shuffle=False))  # type: ignore[arg-type]


def split_share(rank: int, ranks: int) -> list[int]:
    """The samples of this rank, as paceline deals the batch: counts equal within one, tokens as even as they can be."""
    order = ShuffledOrder(np.arange(7), micro_batch_size=7, shuffle=False, lengths=TOKENS)
    plan = order.plan(OrderState(seed=0, epoch=0, step=0, batch_size=7), rank, ranks)
    return [int(sample) for part in plan.microbatches for sample in part]


def mean_of_means(share: Sequence[int]) -> float:
    """DDP's loss: every rank's mean counts the same."""
    mean = torch.tensor(share, dtype=torch.float64).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def sum_over_count(share: Sequence[int]) -> float:
    """Ours: the sum of all losses over the number of all labels."""
    sums = torch.tensor([sum(share), len(share)], dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).item()


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    padded, split = padded_share(rank, ranks), split_share(rank, ranks)
    for name, share, loss in (("padded", padded, mean_of_means(padded)), ("split", split, sum_over_count(split))):
        tokens = int(TOKENS[share].sum())
        # one write: torchrun's ranks do not buffer, and print writes the end of a line apart
        sys.stdout.write(f"rank {rank}  {name:6}  samples {share}  tokens {tokens}  loss {loss:.4f}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
