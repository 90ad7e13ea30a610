"""Weights and states of a model of which each rank of a pipeline has some stages: whole, out and in, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from paceline.optim.state import Splitting
from paceline.seams import Mesh
from paceline.strategies.pipeline.stage import Links


@final
class StagedTensors(Splitting):
    """Tensors of which each rank of a pipeline has those of its own stages.

    Args:
        ranks: of the pipeline, by the name of a parameter or buffer; states of the optimizer are where their parameter
            is.
        mesh: of the run; its first rank has what is collected.
        links: of the pipeline.
    """

    def __init__(self, ranks: Mapping[str, int], mesh: Mesh, links: Links) -> None:
        self._ranks, self._mesh, self._link = ranks, mesh, links.results

    def own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # what nobody knows is everybody's, so that it is missed or refused
        rank = self._mesh.pipe.rank
        return {name: tensor for name, tensor in tensors.items() if self._rank_of(name) in (rank, None)}

    @torch.no_grad()
    def collected(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        pipe, own = self._mesh.pipe, self.own(tensors)
        described = {name: [list(one.shape), str(one.dtype).rpartition(".")[2]] for name, one in own.items()}
        of_all = pipe.gather(described)
        if self._mesh.data.rank > 0:
            return {}
        if pipe.rank > 0:
            for wait in [self._link.start_send(tensor, 0) for tensor in own.values()]:
                wait()
            return {}
        found = dict(own)
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        for rank in range(1, pipe.size):
            for name, (shape, dtype) in of_all[rank].items():
                buffer = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                found[name] = self._link.receive_(buffer, rank).cpu()
        # in the order of the model, and behind it what only other ranks have named
        return {name: found[name] for name in [*tensors, *(name for name in found if name not in tensors)]}

    def put(self, current: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        for name, tensor in current.items():
            tensor.copy_(saved[name])

    def _rank_of(self, name: str) -> int | None:
        found = self._ranks.get(name)
        return self._ranks.get(name.rpartition(".")[0]) if found is None else found
