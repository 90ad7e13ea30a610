"""The axes of a mesh are groups of their own, and what must reach every rank does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.distributed.group import joined
from paceline.machine.cluster import Place
from paceline.seams import Alone, Mesh
from tests.testing.distributed import run_processes


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


def handed_on(rank: int, meeting: str) -> list[float]:
    """What the second of two stages receives on two links, of which it asks the later one first."""
    torch.set_num_threads(1)
    place = Place(
        rank=rank, world_size=4, local_rank=rank, local_world_size=4, started="environment", init_method=meeting
    )
    with joined(place, device=torch.device("cpu"), timeout_seconds=30) as world:
        pipe = Mesh.over(world, pipe=2).pipe
        one, other = pipe.links(2)
        if pipe.rank == 0:
            sent = [one.start_send(torch.full((2, 3), 10.0 * rank + n), 1) for n in (1, 2)]
            sent.append(other.start_send(torch.full((3, 2), 10.0 * rank + 3).T, 1))
            for wait in sent:
                wait()
            return []
        found = [link.receive_(torch.zeros(2, 3), 0) for link in (other, one, one)]
        assert all(len(tensor.unique()) == 1 for tensor in found)
        return [tensor[0, 0].item() for tensor in found]


def test_links_keep_the_order_of_two_ranks_and_do_not_wait_for_each_other(tmp_path: Any) -> None:
    ended = run_processes(handed_on, 4, f"file://{tmp_path}/meeting", timeout_seconds=60)
    assert ended == [[], [3.0, 1.0, 2.0], [], [23.0, 21.0, 22.0]]


def test_one_rank_is_a_mesh_of_ones() -> None:
    mesh = Mesh.over(Alone())
    assert (mesh.whole.size, mesh.data.size, mesh.tensor.size, mesh.pipe.size) == (1, 1, 1, 1)
