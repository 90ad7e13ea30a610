"""The axes of a mesh are groups of their own, and what must reach every rank does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.distributed.group import joined
from paceline.machine.cluster import Place
from paceline.seams import Alone, Mesh
from paceline.testing.distributed import run_processes


def seen(rank: int, meeting: str, tensor: int, pipe: int) -> dict[str, Any]:
    """What one of four ranks finds along each axis."""
    torch.set_num_threads(1)
    place = Place(
        rank=rank, world_size=4, local_rank=rank, local_world_size=4, started="environment", init_method=meeting
    )
    found: dict[str, Any] = {}
    with joined(place, device=torch.device("cpu"), timeout_seconds=30) as world:
        mesh = Mesh.over(world, tensor=tensor, pipe=pipe)
        for name in ("data", "tensor", "pipe"):
            axis = getattr(mesh, name)
            sent = [torch.full((3,), float(rank)), torch.full((2,), rank)]
            axis.broadcast_(sent)
            wait = axis.start_all_reduce(begun := torch.tensor([1.0 + rank]))
            wait()
            found[name] = {
                "rank": axis.rank,
                "ranks": axis.gather(rank),
                "sum": axis.all_reduce(torch.tensor([1.0 + rank])).item(),
                "begun": begun.item(),
                "first": [tensor.tolist() for tensor in sent],
                "shared": axis.share(rank),
                # rank 3 alone asks, and all hear of it, so that all stop together; an axis of one rank asks nobody
                "any": axis.any(rank == 3) if not isinstance(axis, Alone) else None,
            }
        assert mesh.whole.size == 4
    return found


@pytest.mark.parametrize(
    ("tensor", "pipe", "groups"),
    [
        (2, 1, {"data": [[0, 2], [1, 3]], "tensor": [[0, 1], [2, 3]], "pipe": [[0], [1], [2], [3]]}),
        (2, 2, {"data": [[0], [1], [2], [3]], "tensor": [[0, 1], [2, 3]], "pipe": [[0, 2], [1, 3]]}),
        (1, 1, {"data": [[0, 1, 2, 3]], "tensor": [[0], [1], [2], [3]], "pipe": [[0], [1], [2], [3]]}),
    ],
)
def test_each_axis_is_a_world_of_its_own(tmp_path: Any, tensor: int, pipe: int, groups: dict[str, Any]) -> None:
    ended = run_processes(seen, 4, f"file://{tmp_path}/meeting", tensor, pipe, timeout_seconds=60)
    for axis, sets in groups.items():
        for ranks in sets:
            for at, rank in enumerate(ranks):
                one = {**ended[rank][axis]}
                if len(ranks) == 1:  # it knows nothing of the other ranks' numbers
                    assert (one["rank"], one["ranks"], one["sum"]) == (0, [rank], 1.0 + rank)
                    continue
                total = sum(1.0 + each for each in ranks)
                first = [[float(ranks[0])] * 3, [ranks[0]] * 2]
                assert one == {
                    "rank": at,
                    "ranks": ranks,
                    "sum": total,
                    "begun": total,
                    "first": first,
                    "shared": ranks[0],
                    "any": True,
                }


def test_one_rank_is_a_mesh_of_ones() -> None:
    mesh = Mesh.over(Alone())
    assert (mesh.whole.size, mesh.data.size, mesh.tensor.size, mesh.pipe.size) == (1, 1, 1, 1)
