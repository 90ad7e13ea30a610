"""The stages of a model that one rank has, and what goes between them.

Every rank runs the model's own forward pass. What comes before its first block is run on every rank, so that masks and
positions are there: it has weights on the first stage alone, and stands for zeros on the others. Blocks of earlier
stages pass on what they are given. The first block of a stage is given what the stage before sent, and behind the
last one the pass is broken off. So no code of a model is rewritten, and a batch of any shape goes through.

A stage that is not the last hands back zeros in place of logits. Their gradient is that of its hidden states, which the
next stage sends: so losses, loss scales and gradients are made as on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from paceline.machine.device import PLANNED
from paceline.seams import Batch, Forward, Link, World
from paceline.strategies.pipeline.find import Chain

Sent = Callable[[], None]
"""Waits until a message has gone."""

NUMBER_FORMATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What goes between stages, by the number that announces it."""


@dataclass(frozen=True)
class Stage:
    """A stretch of the model's blocks."""

    index: int
    first: int
    """Its first block."""
    end: int
    """The block behind its last."""
    is_last: bool
    trained: tuple[nn.Parameter, ...] = ()
    """Its trained weights, where this rank has it."""


@dataclass(frozen=True)
class Links:
    """Ways of messages, one for each direction and purpose: on each, two ranks send and receive in one order.

    With several stages a rank, the last rank sends to the first too, on ways of their own: of two ranks, each sends
    activations to the other.
    """

    activations: tuple[Link, Link]
    gradients: tuple[Link, Link]
    results: Link

    @classmethod
    def of(cls, pipe: World) -> Links:
        """Opens them. A collective."""
        one, two, three, four, five = pipe.links(5)
        return cls((one, two), (three, four), five)


@final
class Stages:
    """What one rank of a pipeline has of a model.

    Args:
        model: that is cut.
        own: this rank's stages, in the model's order.
        chain: of the model's blocks.
        pipe: the ranks of the pipeline.
        links: between them.
        num_outputs: shape of one sample's logits.
    """

    def __init__(
        self,
        model: nn.Module,
        own: Sequence[Stage],
        chain: Chain,
        pipe: World,
        links: Links,
        *,
        num_outputs: Sequence[int],
    ) -> None:
        self.model, self.own, self.chain, self.pipe, self.links = model, tuple(own), chain, pipe, links
        self._num_outputs = tuple(num_outputs)
        self._announced: dict[tuple[str, bool], torch.dtype] = {}
        self._current: Stage | None = None
        self._is_open = self._infers = False
        self._on_their_way: list[Sent] = []

    @contextlib.contextmanager
    def at(self, stage: Stage) -> Iterator[None]:
        """Inside, forward passes are those of one stage."""
        self._current = stage
        try:
            yield
        finally:
            self._current = None

    def flush(self) -> None:
        """Wait for what is still on its way to other ranks."""
        for sent in self._on_their_way:
            sent()
        self._on_their_way.clear()

    # -- around the model ---------------------------------------------------------------------------------------------

    def set_gates(self, blocks: Sequence[nn.Module]) -> Callable[[], None]:
        """Let this rank's passes through its own blocks only; what is returned takes the gates away."""
        self._is_open = True
        self._announced.clear()  # blocks may compute in another number format by now
        before = [(block, block.__dict__.get("forward")) for block in blocks]
        for index, block in enumerate(blocks):
            block.forward = _Gate(self, index, block.forward)

        def remove() -> None:
            self._is_open = False
            for block, forward in before:
                if forward is None:
                    del block.forward
                else:
                    block.forward = forward

        return remove

    def staged(self, plain: Forward) -> Forward:
        """A forward pass of this rank's stages in place of ``plain``, one of the whole model.

        In training it is that of the stage that is ``at``, else of one after the other; then all ranks have the logits.
        """

        def forward(model: nn.Module, batch: Batch) -> Tensor:
            if model is not self.model or not self._is_open:
                return plain(model, batch)
            if self._current is not None:
                return self._passed(plain, batch, self._current)
            self._infers = True
            try:
                for stage in self.own:
                    with self.at(stage):
                        logits = self._passed(plain, batch, stage)
                return self.tell(logits)
            finally:
                self._infers = False

        return forward

    def _passed(self, plain: Forward, batch: Batch, stage: Stage) -> Tensor:
        try:
            return plain(self.model, batch)
        except _BrokenOff as broken:
            hidden = broken.hidden
        shape = (_num_sequences(batch), *self._num_outputs)
        if hidden.requires_grad:
            return _Leave.apply(hidden, self, stage, shape)  # type: ignore[no-untyped-call,no-any-return]
        self._on_their_way.append(self.send(hidden, stage))
        return hidden.new_zeros(shape, dtype=torch.float32)

    def tell(self, tensor: Tensor) -> Tensor:
        """The last rank's tensor, on every rank; the others give one of its shape. A collective of the pipeline."""
        link, last = self.links.results, self.pipe.size - 1
        if self.pipe.rank < last:
            found = self._receive(link, last, tensor, "result")
        else:
            found = tensor
            self._announce(link, range(last), tensor, "result")
            self._on_their_way += [link.start_send(tensor, rank) for rank in range(last)]
        self.flush()
        return found

    # -- between stages -----------------------------------------------------------------------------------------------

    def send(self, hidden: Tensor, stage: Stage) -> Sent:
        """Begin to send what a stage made to the next."""
        rank = self.pipe.rank
        link, to = self.links.activations[rank == self.pipe.size - 1], (rank + 1) % self.pipe.size
        self._announce(link, [to], hidden, f"stage {stage.index + 1}")
        return link.start_send(hidden.detach(), to)

    def receive(self, like: Tensor, stage: Stage) -> Tensor:
        """What the stage before sent, of the shape of ``like``."""
        rank = self.pipe.rank
        link, source = self.links.activations[rank == 0], (rank - 1) % self.pipe.size
        received = self._receive(link, source, like, f"stage {stage.index}")
        if not torch.is_grad_enabled():
            return received
        return _Enter.apply(received, stage.trained[0], self)  # type: ignore[no-untyped-call,no-any-return]

    def _receive(self, link: Link, source: int, like: Tensor, what: str) -> Tensor:
        """A tensor of the shape of ``like``, in the number format that its sender has announced."""
        key = what, self._infers
        if key not in self._announced:
            number = torch.zeros(1, dtype=torch.int64, device=like.device)
            # in a plan nothing comes, and a number cannot be asked for
            found = None if like.device.type == PLANNED else NUMBER_FORMATS[int(link.receive_(number, source))]
            self._announced[key] = found or like.dtype
        return link.receive_(torch.empty(like.shape, dtype=self._announced[key], device=like.device), source)

    def _announce(self, link: Link, to: Iterable[int], tensor: Tensor, what: str) -> None:
        """Tell the receivers of a tensor its number format, once: what they have of the model may not show it."""
        key = what, self._infers
        assert self._announced.get(key, tensor.dtype) == tensor.dtype  # each pass computes in the same formats
        if key not in self._announced:
            self._announced[key] = tensor.dtype
            number = torch.tensor([NUMBER_FORMATS.index(tensor.dtype)], device=tensor.device)
            self._on_their_way += [link.start_send(number, rank) for rank in to]

    def send_gradient(self, gradient: Tensor) -> None:
        """Begin to send the gradient of what the stage before sent."""
        rank = self.pipe.rank
        link = self.links.gradients[rank == 0]
        self._on_their_way.append(link.start_send(gradient, (rank - 1) % self.pipe.size))

    def receive_gradient(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The gradient of what this rank has sent to the next stage."""
        rank = self.pipe.rank
        wraps = rank == self.pipe.size - 1
        buffer = torch.empty(shape, dtype=dtype, device=device)
        return self.links.gradients[wraps].receive_(buffer, (rank + 1) % self.pipe.size)


def give_up(model: nn.Module, owners: Mapping[str, int], kept: Sequence[int]) -> None:
    """Let go of the weights of other stages: under their names zeros remain, which take no memory.

    Args:
        owners: by name, the stage of each parameter.
        kept: stages.
    """
    given_up: dict[nn.Parameter, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is None or owners[f"{path}.{key}" if path else key] in kept:
                continue
            if any(parameter is one for one in given_up.values()):
                continue  # under its second name
            if parameter not in given_up:
                zeros = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
                given_up[parameter] = nn.Parameter(zeros, parameter.requires_grad)
            module._parameters[key] = given_up[parameter]


class _BrokenOff(BaseException):
    """Ends a forward pass behind a stage's last block; no code of a model is to catch it.

    Args:
        hidden: states that the stage has made.
    """

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@final
class _Gate:
    """In place of a block's forward pass."""

    def __init__(self, stages: Stages, index: int, inner: Callable[..., Any]) -> None:
        self._stages, self._index, self._inner = stages, index, inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stages, stage, chain = self._stages, self._stages._current, self._stages.chain
        if stage is None or not stages._is_open:
            return self._inner(*args, **kwargs)
        if self._index < stage.first:
            return chain.outputs[self._index].like(_hidden_of(args, kwargs, chain))
        if self._index == stage.first and stage.index > 0:
            hidden = stages.receive(_hidden_of(args, kwargs, chain), stage)
            if isinstance(chain.slot, str):
                kwargs[chain.slot] = hidden
            else:
                args = (*args[: chain.slot], hidden, *args[chain.slot + 1 :])
        output = self._inner(*args, **kwargs)
        if self._index == stage.end - 1 and not stage.is_last:
            raise _BrokenOff(chain.outputs[self._index].hidden(output))
        return output


def _hidden_of(args: Sequence[Any], kwargs: Mapping[str, Any], chain: Chain) -> Tensor:
    hidden: Tensor = kwargs[chain.slot] if isinstance(chain.slot, str) else args[chain.slot]
    return hidden


def _num_sequences(batch: Batch) -> int:
    """Rows of the model's logits."""
    return batch.num_samples if batch.windows is None else len(batch.windows)


@final
class _Enter(torch.autograd.Function):
    """Forward what was received; backward, its gradient is sent to where it came from.

    The trained weight has no part in it but that autograd comes here on its way to it.
    """

    @staticmethod
    def forward(ctx: Any, received: Tensor, anchor: Tensor, stages: Stages) -> Tensor:
        ctx.stages = stages
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.stages.send_gradient(gradient)
        return None, None, None


@final
class _Leave(torch.autograd.Function):
    """Forward, hidden states are sent to the next stage, and zeros stand for logits; backward, their gradient comes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, stages: Stages, stage: Stage, shape: Sequence[int]) -> Tensor:
        ctx.stages, ctx.like = stages, (hidden.shape, hidden.dtype, hidden.device)
        ctx.sent = stages.send(hidden, stage)
        return hidden.new_zeros(shape, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        found = ctx.stages.receive_gradient(*ctx.like)
        ctx.sent()  # what has come back has arrived
        return found, None, None, None
