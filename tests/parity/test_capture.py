"""What capture rests on: a step never moves a tensor that outlives it. On a GPU: tests/gpu/test_capture.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.engine.graph import Graph, GraphInput
from paceline.engine.runner import Eager
from paceline.prepare.assemble import Assembled
from tests.parity.driving import assembled, recipe, train
from tests.parity.reference import tiny_model


def addresses(run: Assembled) -> Iterator[tuple[str, int]]:
    """Where everything is that a captured step reads or writes and keeps."""
    for name, parameter in run.build.model.named_parameters():
        yield name, parameter.data_ptr()
        assert parameter.grad is not None
        yield f"{name}.grad", parameter.grad.data_ptr()
    for name, buffer in run.build.model.named_buffers():
        yield name, buffer.data_ptr()
    for stem, tensors in run.engine.state()[0].items():
        for name, tensor in tensors.items():
            yield f"{stem}/{name}", tensor.data_ptr()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_no_step_moves_a_tensor(kind: str) -> None:
    chosen = recipe(optimizer={"type": kind, "decay_all": False}, loop={"micro_batch_size": 3})
    run = assembled(tiny_model(), chosen)
    train(run, chosen, steps=2)
    before = dict(addresses(run))
    train(run, chosen, steps=3)
    assert [name for name, place in addresses(run) if before[name] != place] == []


def test_loading_a_state_moves_nothing() -> None:
    chosen = recipe()
    run = assembled(tiny_model(), chosen)
    train(run, chosen, steps=2)
    before = dict(addresses(run))
    tensors, scalars = run.engine.state()
    run.engine.load({stem: {n: t.clone() for n, t in named.items()} for stem, named in tensors.items()}, scalars)
    assert dict(addresses(run)) == before


def test_a_warm_up_leaves_no_trace() -> None:
    chosen = recipe()
    one, other = (assembled(tiny_model(dropout=0.2), chosen) for _ in range(2))
    other.engine.warm_up_on(other.build.layout.collate(torch.arange(5).numpy()), 5)
    assert train(one, chosen) == train(other, chosen)


def test_without_a_gpu_a_function_runs_as_it_is() -> None:
    runner = Eager("the device is a CPU")
    assert runner.run(lambda a, b, option: (a + b, option), (1, 2), "last") == (3, "last")
    assert runner.execution == "eager: the device is a CPU"


class Doubling:
    """In place of a graph: writes twice what it reads."""

    def __init__(self, reads: torch.Tensor, writes: torch.Tensor) -> None:
        self.reads, self.writes = reads, writes

    def replay(self) -> None:
        self.writes.copy_(2 * self.reads)


@pytest.mark.parametrize("changes", [False, True])
def test_what_is_there_already_is_not_copied_again(changes: bool) -> None:
    place, written = GraphInput(torch.zeros(2), changes), torch.zeros(2)
    graph = Graph(Doubling(place.ours, written), [place, None], {"out": written})
    given = torch.ones(2)
    first = graph.replay([given, "last"])["out"]
    copied = place.ours._version
    assert graph.replay([given, "last"])["out"].tolist() == [2, 2]
    assert (place.ours._version > copied) == changes, "copied again" if not changes else "what the graph changes stayed"
    given.add_(1)
    assert graph.replay([given, "last"])["out"].tolist() == [4, 4], "a change in place was not seen"
    assert graph.replay([torch.full((2,), 3.0), "last"])["out"].tolist() == [6, 6]
    assert graph.replay([given, "last"])["out"].tolist() == [4, 4], "another tensor came between"
    assert first.tolist() == [2, 2], "the next replay has overwritten what was given out"


def test_tensors_of_inference_mode_are_copied_each_time() -> None:
    place, written = GraphInput(torch.zeros(2), changes=False), torch.zeros(2)
    graph = Graph(Doubling(place.ours, written), [place], written)
    with torch.inference_mode():
        given = torch.ones(2)
        assert graph.replay([given]).tolist() == [2, 2]
        given.add_(1)
        assert graph.replay([given]).tolist() == [4, 4]
