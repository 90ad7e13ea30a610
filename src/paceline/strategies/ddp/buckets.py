"""All-reduce of flat gradients: a stretch at a time, beside the backward pass, in one order on all ranks.

An all-reduce is never captured. NCCL wants all ranks to capture a collective or none, and to replay the graphs
that came of it together; ranks have micro-batches of different shapes, and each captures its own when it likes. So a
captured backward pass only notes in its graph, by an event, when a stretch is complete, and its all-reduce begins
behind that event. Whatever a rank captures, compiles or gives up, the collectives of all ranks are the same, in the
same order.

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

from paceline.contract.spans import span
from paceline.machine.device import is_gpu, named_stream
from paceline.optim.flat import Flat
from paceline.optim.gradients import AllReduce, Put
from paceline.seams import Alone, World

BUCKET_BYTES = 25 * 2**20
"""Large enough for three quarters of a link's rate on an H200, small enough that most collectives end before the
backward pass does; ``recipe.choose`` has larger ones over fast links."""


@dataclass(frozen=True)
class Reduction:
    """How the gradients of all ranks are summed."""

    world: World = field(default_factory=Alone)
    order: Sequence[nn.Parameter] = ()
    """The model's parameters in the order of its forward pass; none: the layout's order. It decides which collectives
    begin first, and must be the same on all ranks."""
    cuts: Collection[nn.Parameter] = ()
    """Parameters that a bucket begins with, in forward order: what comes before them has an all-reduce of its own."""
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
        """Captured in graphs where the stretch is complete."""

    def start_all_reduce(self, world: World) -> Callable[[], None]:
        """Begin its all-reduce behind what the current stream has to do; what is returned makes the current stream
        wait."""
        if self._sent is not self.stretch:
            self._sent.copy_(self.stretch)
        return partial(self._end_all_reduce, world.start_all_reduce(self._sent))

    def _end_all_reduce(self, wait: Callable[[], None]) -> None:
        wait()
        if self._sent is not self.stretch:
            self.stretch.copy_(self._sent)


@final
class BucketAllReduce(AllReduce):
    """The all-reduce of a step's gradients.

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
        self._under_way = False

    @property
    def under_way(self) -> bool:
        return self._under_way

    def backward(self, loss: Tensor, put: Put) -> None:
        """Differentiate, and begin each bucket's all-reduce as soon as its gradients and those before it allow.

        While a graph is captured nothing is begun: ``finish`` does it at every replay.
        """
        capturing = _is_capturing(self._device)
        found: list[Tensor | None] = [None] * len(self._parameters)
        missing = [len(bucket.members) for bucket in self.buckets]
        self._started.clear()
        self._under_way = not capturing
        done = 0

        def complete(gradients: Sequence[Tensor | None], *, all_are_there: bool = False) -> None:
            nonlocal done
            # one order on all ranks, though gradients may arise in any
            while done < len(missing) and (all_are_there or not missing[done]):
                bucket = self.buckets[done]
                put([self._views[i] for i in bucket.members], [gradients[i] for i in bucket.members])
                if capturing:
                    bucket.complete.record()
                else:
                    self._started.append(bucket.start_all_reduce(self._world))
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
        """Have the device wait for the collectives; begin them first where the backward pass was a replay."""
        self._under_way = True
        for bucket in self.buckets[len(self._started) :]:
            with _on(self._side, self._device):
                self._side.wait_event(bucket.complete)
                self._started.append(bucket.start_all_reduce(self._world))
        with span("communicate"):
            for wait in self._started:
                wait()
        self._started.clear()
        self._under_way = False


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


def _is_capturing(device: torch.device) -> bool:
    return is_gpu(device) and torch.get_device_module(device).is_current_stream_capturing()


def _event(device: torch.device) -> Any:
    """An event that becomes a node of the graph it is captured in; on a CPU nothing is captured."""
    return torch.get_device_module(device).Event(external=True) if is_gpu(device) else None


def _stream(device: torch.device) -> Any:
    return named_stream(device, "all-reduce") if is_gpu(device) else None


def _on(stream: Any, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.get_device_module(device).stream(stream)  # type: ignore[no-any-return]
