"""EMA: an exponential moving average of the weights, kept beside them.

After each update ``shadow = decay * shadow + (1 - decay) * weights``. The average moves less from step to step than the
weights do, and often scores better on held-out samples.

Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992;
``torch.optim.swa_utils.AveragedModel`` with ``get_ema_multi_avg_fn``, whose numbers these are. The warm-up of the decay
is that of TensorFlow's ``ExponentialMovingAverage``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from paceline.contract.errors import UserError
from paceline.optim.flat import Flat, FlatLayout
from paceline.optim.state import copy_into
from paceline.recipe.parts.optimizer import EmaPart

TOO_MUCH: Final = 0.1
"""The share of an average that may still be the first weights when a run ends."""


def first_in_average(recipe: EmaPart, updates: int) -> str | None:
    """What a run is told whose average would still be the weights of its beginning; None: it is not.

    Without ``warmup`` the first average is the weights themselves, and ``decay`` to the power of the averages after it
    is what they keep of it.

    Args:
        updates: of the whole run.
    """
    averages = updates // recipe.every
    kept = 0.0 if recipe.warmup else recipe.decay ** (averages if recipe.from_start else max(averages - 1, 0))
    if kept < TOO_MUCH:
        return None
    first = "before the first" if recipe.from_start else "of the first"
    return (
        f"optimizer.ema = {recipe}: after {updates:,} updates, {kept:.0%} of the average is still the weights {first}"
        "; with warmup: true they are soon forgotten, and so they are with a smaller decay"
    )


@final
class EMA:
    """A moving average of a model's trained weights, for any loop.

    It lies in one flat buffer a number format, in fp32 where the weights are in bf16. Nothing in ``update`` waits for
    the device, and every tensor stays where it is, so that it can be captured in a CUDA graph. Weights that are not
    trained have no average, and buffers, such as running statistics, stay the model's own: as with AveragedModel's
    ``use_buffers=False``.

    Args:
        model: a module on its device, or parameters.
        decay: what the average keeps of itself at each update, between 0 and 1.
        warmup: the decay is at most (1 + n) / (10 + n) after n averages, so that the first steps are soon forgotten.
        every: updates from one average to the next. Until the first one the average is the weights themselves.
        from_start: the average begins with the weights that ``register`` took, and each average moves it, the first
            too. Else the first average is the weights after it, as in torch's AveragedModel.
        flat: where the weights lie in flat buffers, how, and those buffers: one operation then takes all of them.

    Raises:
        UserError: the decay or ``every`` is out of range, or nothing is trained.

    Example:
        >>> ema = EMA(model, decay=0.999)
        >>> for batch in loader:
        ...     loss_of(model, batch).backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     ema.update()
        >>> with ema.averaged():  # or apply_shadow() and restore()
        ...     evaluate(model)
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Parameter],
        decay: float,
        *,
        warmup: bool = False,
        every: int = 1,
        from_start: bool = False,
        flat: tuple[FlatLayout, Flat] | None = None,
    ) -> None:
        if not 0 < decay < 1:
            raise UserError(f"EMA(decay={decay})", "a decay lies between 0 and 1", "decay=0.999, for example")
        if every < 1:
            raise UserError(f"EMA(every={every})", "an average is taken every update at most", "every=1")
        named = model.named_parameters() if isinstance(model, nn.Module) else enumerate(model)
        self._names = {parameter: str(name) for name, parameter in named if parameter.requires_grad}
        if not self._names:
            raise UserError("EMA(model, ...)", "no parameter is trained", "parameter.requires_grad_(True)")
        layout, weights = flat or (FlatLayout([tuple(self._names)]), None)
        self.parameters = layout.parameters
        """Those that are averaged."""
        shadow = layout.allocate(torch.float32)
        self.shadow = shadow.views
        """The average of each of ``parameters``."""
        self._pairs = (
            list(zip(self.shadow, self.parameters, strict=True))
            if weights is None
            else [pair for both in zip(shadow.groups, weights.groups, strict=True) for pair in zip(*both, strict=True)]
        )
        """Averages and weights in as few tensors as there can be."""
        device = self.parameters[0].device
        self._warmup, self._every, self._from_start = warmup, every, from_start
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self._least = torch.full((), 1 - decay, dtype=torch.float64, device=device)
        self._updates = torch.zeros((), dtype=torch.int64, device=device)
        self._kept: list[Tensor | None] | None = None
        """While the average is in the weights' place: what is not in the average's."""
        self.register()

    @torch.no_grad()
    def register(self) -> None:
        """Begin again with the weights as they are; ``__init__`` has called it once."""
        self._refuse_swapped("register")
        for shadow, weights in self._pairs:
            shadow.copy_(weights)
        self._updates.zero_()

    @torch.no_grad()
    def update(self, made: Tensor | None = None) -> None:
        """Take in the weights; to be called after each update of theirs.

        Args:
            made: bool scalar: whether there was an update; a skipped one counts for nothing. None: there was.

        Raises:
            UserError: the average is in the weights' place.
        """
        self._refuse_swapped("update")
        on_host = made is None or made.device.type == "cpu"
        made = self._one.bool() if made is None else made.to(self._updates.device)
        self._updates += made
        share = self._share(made)
        if on_host and share.device.type == "cpu" and not share:
            return  # there it is known that nothing would move
        for shadow, weights in self._pairs:
            if shadow.dtype == weights.dtype:
                shadow.lerp_(weights, share.to(shadow.dtype))
            else:  # lerp_ takes one number format; in this way bf16 weights are not copied to fp32
                part = share.to(shadow.dtype)
                shadow.mul_(1 - part).addcmul_(weights, part)

    def _share(self, made: Tensor) -> Tensor:
        """What the weights get of the average, fp64: 0 where it is not to move, 1 where it becomes the weights."""
        taken = self._updates // self._every
        least = (9 / (9 + taken.double())).maximum(self._least) if self._warmup else self._least
        share = least if self._from_start else torch.where(taken <= 1, self._one, least)
        if self._every > 1:
            is_due = self._updates % self._every == 0
            made = made & (is_due if self._from_start else is_due | (taken == 0))
        return share * made

    def rehearse(self) -> None:
        """Launch what ``update`` does, so that nothing changes."""
        self.update(torch.zeros_like(self._updates, dtype=torch.bool))

    @torch.no_grad()
    def apply_shadow(self) -> None:
        """Put the average in the weights' place, until ``restore``; nothing moves to another address.

        Weights of the average's number format wait in its place, so that it takes no memory. Others are copied.
        """
        self._refuse_swapped("apply_shadow")
        self._kept = [_exchanged(*both) for both in zip(self.parameters, self.shadow, strict=True)]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights back."""
        if self._kept is None:
            raise UserError("EMA.restore()", "the weights are in their place", "call apply_shadow() before it")
        for parameter, shadow, kept in zip(self.parameters, self.shadow, self._kept, strict=True):
            if kept is None:
                _exchanged(parameter, shadow)
            else:
                parameter.copy_(kept)
        self._kept = None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the average is in the weights' place."""
        self.apply_shadow()
        try:
            yield
        finally:
            self.restore()

    @torch.no_grad()
    def copy_to_weights(self) -> None:
        """The weights become the average, for good."""
        self._refuse_swapped("copy_to_weights")
        for parameter, shadow in zip(self.parameters, self.shadow, strict=True):
            parameter.copy_(shadow)

    @property
    def updates(self) -> int:
        """Updates of the weights so far; waits for the device."""
        return int(self._updates)

    @updates.setter
    def updates(self, count: int) -> None:
        self._updates.fill_(count)

    def state_dict(self) -> dict[str, Any]:
        """``shadow``, the average by the parameters' names (their numbers where only parameters were given), not
        copies; and ``updates``."""
        self._refuse_swapped("state_dict")
        return {"shadow": self._named(), "updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state in place.

        Raises:
            CheckpointError: names or shapes differ.
        """
        self._refuse_swapped("load_state_dict")
        copy_into(self._named(), state["shadow"], "average")
        self.updates = state["updates"]

    def _named(self) -> dict[str, Tensor]:
        return {self._names[parameter]: view for parameter, view in zip(self.parameters, self.shadow, strict=True)}

    def _refuse_swapped(self, call: str) -> None:
        if self._kept is not None:
            raise UserError(f"EMA.{call}()", "the average is in the weights' place", "call restore() before it")


def _exchanged(parameter: Tensor, shadow: Tensor) -> Tensor | None:
    """Put the average in a weight's place, and the weight in the average's where it fits there; else it is returned."""
    weight = parameter.clone()
    parameter.copy_(shadow)
    if shadow.dtype != weight.dtype:
        return weight
    shadow.copy_(weight)
    return None
