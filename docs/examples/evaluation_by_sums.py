"""An evaluation on several ranks that gives what one process gives, from four numbers a rank.

    torchrun --standalone --nproc-per-node 2 docs/examples/evaluation_by_sums.py

Each rank counts on its own samples, counts are added up, and only then is anything divided. The mean of the ranks' own
results is another number as soon as shares are uneven, and for F1 even where they are equal.
"""

import torch
import torch.distributed as dist
from torch import Tensor

LABELS = torch.tensor([1, 0, 1, 1, 0, 1, 0])
PREDICTED = torch.tensor([1, 1, 1, 0, 0, 1, 1])


def counts(labels: Tensor, predicted: Tensor) -> Tensor:
    """[4] int64: samples, right ones, positives found, and positives found or missed or wrongly claimed."""
    right, found, either = labels == predicted, labels & predicted, labels | predicted
    return torch.stack([torch.tensor(len(labels)), right.sum(), found.sum(), either.sum()])


def metrics(counted: Tensor) -> dict[str, float]:
    """Accuracy, and F1 = 2 found / (2 found + missed + wrongly claimed)."""
    samples, right, found, either = counted.tolist()
    return {"accuracy": right / max(1, samples), "f1": 2 * found / max(1, found + either)}


def compared() -> dict[str, dict[str, float]]:
    """The metrics of all samples, three ways; the same on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # nothing is repeated to make shares equal: the last ranks have a sample less, or none
    mine = counts(LABELS[rank::ranks], PREDICTED[rank::ranks])

    means = torch.tensor(list(metrics(mine).values()), dtype=torch.float64)
    dist.all_reduce(means)
    accuracy, f1 = (means / ranks).tolist()

    dist.all_reduce(mine)
    return {
        "one process": metrics(counts(LABELS, PREDICTED)),
        "sums": metrics(mine),
        "mean of ranks": {"accuracy": accuracy, "f1": f1},
    }


def main() -> None:
    dist.init_process_group("gloo")
    for name, found in compared().items():
        if dist.get_rank() == 0:
            values = "  ".join(f"{metric} {value:.4f}" for metric, value in found.items())
            print(f"{name:13}  {values}", flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
