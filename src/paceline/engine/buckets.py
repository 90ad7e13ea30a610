"""Sums over ranks of flat gradients: a stretch at a time, beside the backward pass, in one order on all ranks.

Sums are always launched, never recorded. NCCL wants all ranks to record a collective or none, and to replay the graphs
that came of it together; ranks have micro-batches of different shapes, and each records its own when it likes. So a
recorded backward pass only notes in its graph, by an event, when a stretch is complete, and its sum is launched behind
that event. Whatever a rank records, compiles or gives up, the sums of all ranks are the same, in the same order.

Source: buckets beside the backward pass: Li et al., PyTorch Distributed, VLDB 2020; NCCL user guide, "Using NCCL with
CUDA Graphs"; events as nodes of a graph: CUDA C++ Programming Guide, cudaEventRecordExternal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.device import is_card, named_stream
from paceline.engine.flat import Flat
from paceline.seams import Alone, World
from paceline.spans import span

BUCKET_BYTES = 25 * 2**20
"""Large enough for three quarters of a link's rate on an H200, small enough that most sums end before the backward pass
does; ``recipe.choose`` has larger ones over fast links."""

Put = Callable[[Sequence[Tensor], Sequence[Tensor | None]], None]
"""Writes or adds gradients to the views that stand for them; None: there is none."""


@dataclass(frozen=True)
class Reduction:
    """How the gradients of all ranks are summed."""

    world: World = field(default_factory=Alone)
    order: Sequence[nn.Parameter] = ()
    """The model's parameters in the order of its forward pass; none: the layout's order. It decides which sums begin
    first, and must be the same on all ranks."""
    cuts: Collection[nn.Parameter] = ()
    """Parameters that a bucket begins with, in forward order: what comes before them is summed apart."""
    bucket_bytes: int = BUCKET_BYTES
    dtype: torch.dtype | None = None
    """Sum in this number format, such as bf16: half the bytes, and each rank's share is rounded to it."""


@final
class Bucket:
    """A stretch of a flat buffer that is summed in one go.

    Args:
        members: which parameters of the layout are in it.
        stretch: 1-d view of the buffer.
        dtype: number format to sum in; None: the buffer's own.
    """

    def __init__(self, members: Sequence[int], stretch: Tensor, dtype: torch.dtype | None) -> None:
        self.members, self.stretch = tuple(members), stretch
        self._sent = stretch if dtype in (None, stretch.dtype) else torch.empty_like(stretch, dtype=dtype)
        self.complete: Any = _event(stretch.device)
        """Recorded in graphs where the stretch is complete."""

    def start_sum(self, world: World) -> Callable[[], None]:
        """Begin its sum behind what the current stream has to do; what is returned makes the current stream wait."""
        if self._sent is not self.stretch:
            self._sent.copy_(self.stretch)
        return partial(self._end_sum, world.start_sum_(self._sent))

    def _end_sum(self, wait: Callable[[], None]) -> None:
        wait()
        if self._sent is not self.stretch:
            self.stretch.copy_(self._sent)


@final
class BucketSums:
    """The sums of a step's gradients over ranks.

    Args:
        parameters: of the layout.
        flat: their gradients.
        reduction: how they are summed.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], flat: Flat, reduction: Reduction) -> None:
        self._parameters, self._views, self._world = tuple(parameters), flat.views, reduction.world
        self.buckets = cut(self._parameters, flat, reduction)
        self._bucket_of = {member: index for index, bucket in enumerate(self.buckets) for member in bucket.members}
        self._device = flat.buffers[0].device
        self._side = _stream(self._device)
        self._started: list[Callable[[], None]] = []

    def backward(self, loss: Tensor, put: Put) -> None:
        """Differentiate, and begin each bucket's sum as soon as its gradients and the sums before it allow.

        While a graph is recorded nothing is begun: ``finish`` does it at every replay.
        """
        recording = _is_recorded(self._device)
        found: list[Tensor | None] = [None] * len(self._parameters)
        missing = [len(bucket.members) for bucket in self.buckets]
        self._started.clear()
        done = 0

        def complete(gradients: Sequence[Tensor | None], *, all_are_there: bool = False) -> None:
            nonlocal done
            # one order on all ranks, though gradients may arise in any
            while done < len(missing) and (all_are_there or not missing[done]):
                bucket = self.buckets[done]
                put([self._views[i] for i in bucket.members], [gradients[i] for i in bucket.members])
                if recording:
                    bucket.complete.record()
                else:
                    self._started.append(bucket.start_sum(self._world))
                done += 1

        def arrived(member: int, gradient: Tensor | None) -> None:
            found[member] = gradient
            missing[self._bucket_of[member]] -= 1
            complete(found)

        with _hooked(self._parameters, arrived):
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        # parameters that took no part have called nothing
        complete(gradients, all_are_there=True)

    def finish(self) -> None:
        """Have the device wait for the sums; begin them first where the backward pass was a replay."""
        for bucket in self.buckets[len(self._started) :]:
            with _on(self._side, self._device):
                self._side.wait_event(bucket.complete)
                self._started.append(bucket.start_sum(self._world))
        with span("communicate"):
            for wait in self._started:
                wait()
        self._started.clear()


def cut(parameters: Sequence[nn.Parameter], flat: Flat, reduction: Reduction) -> tuple[Bucket, ...]:
    """Buckets that cover the buffers of ``flat``, those first whose gradients are complete first.

    The backward pass goes through the model from its end. A bucket holds neighbours of the buffer that are neighbours
    in the model too; it ends where it is full, or where the buffer begins at the model's front again, as it does for
    each group of the optimizer.
    """
    place_in_model = {parameter: place for place, parameter in enumerate(reduction.order or parameters)}
    places = [place_in_model[parameter] for parameter in parameters]
    cuts = [place_in_model[parameter] for parameter in reduction.cuts]
    sections = [sum(place >= cut for cut in cuts) for place in places]
    buckets = []
    for buffer in flat.buffers:
        inside = [i for i, view in enumerate(flat.views) if (view.dtype, view.device) == (buffer.dtype, buffer.device)]
        inside.sort(key=lambda i: flat.views[i].storage_offset())
        end: Any = buffer.numel()
        sizes = [view.nbytes for view in flat.views]
        for members in _runs(inside, places, sections, sizes, reduction.bucket_bytes):
            start = flat.views[members[0]].storage_offset()
            buckets.append(Bucket(members, buffer[start:end], reduction.dtype))
            end = start
    return tuple(sorted(buckets, key=lambda bucket: -min(places[i] for i in bucket.members)))


def _runs(
    inside: Sequence[int], places: Sequence[int], sections: Sequence[int], sizes: Sequence[int], most: int
) -> Iterator[list[int]]:
    """``inside`` cut into runs, the last one first: each goes forward in the model, stays in one of its sections and is
    at most ``most`` bytes."""
    run: list[int] = []
    for member in reversed(inside):
        full = sum(sizes[i] for i in run) + sizes[member] > most
        if run and (full or places[member] > places[run[0]] or sections[member] != sections[run[0]]):
            yield run
            run = []
        run.insert(0, member)
    if run:
        yield run


@contextlib.contextmanager
def _hooked(parameters: Sequence[nn.Parameter], call: Callable[[int, Tensor | None], None]) -> Iterator[None]:
    """Inside, ``call`` is told the place and whole gradient of each parameter as soon as it is there."""
    # only hooks of tensors are called by torch.autograd.grad, and nothing stays behind on a user's model
    handles = [parameter.register_hook(partial(call, place)) for place, parameter in enumerate(parameters)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_recorded(device: torch.device) -> bool:
    return is_card(device) and torch.get_device_module(device).is_current_stream_capturing()


def _event(device: torch.device) -> Any:
    """An event that becomes a node of the graph it is recorded in; on a CPU nothing is recorded."""
    return torch.get_device_module(device).Event(external=True) if is_card(device) else None


def _stream(device: torch.device) -> Any:
    return named_stream(device, "sums") if is_card(device) else None


def _on(stream: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.get_device_module(device).stream(stream)  # type: ignore[no-any-return]
