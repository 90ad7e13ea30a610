"""Ranks and collectives: every rank runs this same file, knows its number, and exchanges tensors with the others.

    torchrun --standalone --nproc-per-node 2 docs/examples/collectives.py

A collective is called by all ranks, in the same order, with tensors of one shape. A rank that leaves one out, for an
``if rank == 0`` around it, makes all others wait until the time-out.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor


def exchanged(own: Tensor) -> dict[str, list[float]]:
    """What this rank holds after each collective.

    Args:
        own: [1], the number that this rank brings.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    summed, sent = own.clone(), own.clone()
    dist.all_reduce(summed)  # DDP's gradients: everybody ends with the sum
    led = own.clone()
    dist.reduce(led, dst=0)  # a metric that is printed once: rank 0 ends with the sum, the others' is of no use
    dist.broadcast(sent, src=0)  # the weights, once at the start: everybody ends with those of rank 0

    gathered = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(gathered, own)  # FSDP's weights: everybody ends with all pieces

    # FSDP's gradients: everybody brings all pieces and ends with its own piece of the sum
    piece = torch.empty_like(own)
    dist.reduce_scatter(piece, [own * number for number in range(1, ranks + 1)])

    found = {"own": own, "all_reduce": summed, "broadcast": sent, "reduce_scatter": piece}
    found |= {"all_gather": torch.cat(gathered), "reduce": led if rank == 0 else led[:0]}
    return {"rank": [rank], **{name: tensor.tolist() for name, tensor in found.items()}}


def main() -> None:
    dist.init_process_group()
    rank, device = dist.get_rank(), "cpu"
    if torch.cuda.is_available():
        device = f"cuda:{dist.get_node_local_rank()}"
        torch.cuda.set_device(device)
    found = exchanged(torch.tensor([rank + 1.0], device=device))
    dist.barrier()  # nothing is exchanged: nobody goes on before everybody is here, as when rank 0 has written a file
    # one write: torchrun's ranks do not buffer, and print writes the end of a line apart
    sys.stdout.write("  ".join(f"{name} {values}" for name, values in found.items()) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
