"""Applying an update behind one gate: a step whose gradient is not finite changes nothing at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.kernels.adamw import adamw_
from paceline.kernels.sgd import sgd_
from paceline.machine.device import PLANNED
from paceline.optim.ema import EMA
from paceline.optim.flat import FlatLayout
from paceline.optim.gradients import FlatGradients, Gradients, MakeAllReduce, Shards
from paceline.optim.low_bit import library_of
from paceline.optim.optimizer import ParameterGroup, build_optimizer
from paceline.optim.rounding import COMPENSATION, update_in_fp32
from paceline.optim.state import optimizer_numbers, optimizer_tensors, prime, put_numbers
from paceline.recipe.parts import EmaPart, OptimizerPart
from paceline.recipe.parts.optimizer import LOW_BIT

Names = Mapping[nn.Parameter, str]


class Updates(ABC):
    """An optimizer and its learning rates, indexed by the updates *applied*, so a skipped one advances nothing."""

    parameters: Sequence[nn.Parameter]
    """Those that are trained, in the order of their groups."""
    capturable: str | None
    """Why ``apply`` cannot be captured in a CUDA graph; None: it can."""
    _ema: EMA | None = None
    execution: Mapping[str, str] = MappingProxyType({})
    """Who carries the updates out, where it is not torch or paceline."""

    @abstractmethod
    def apply(self, gradients: Gradients, factor: Tensor, finite: Tensor) -> None:
        """One update with the gradients times ``factor`` if ``finite``; nothing otherwise. Both are device scalars.

        The weights' average moves with them, where one is kept.
        """

    def rehearse(self) -> None:  # noqa: B027 - where the host reads the gate there is nothing to launch
        """Launch what ``apply`` does, so that nothing changes; kernels are compiled by then, and states are there."""

    @property
    @abstractmethod
    def applied(self) -> int:
        """Updates applied so far; waits for the device."""

    @applied.setter
    @abstractmethod
    def applied(self, count: int) -> None: ...

    @abstractmethod
    def prime(self) -> None:
        """Allocate the states as the first update would; weights may move, so load them after."""

    @abstractmethod
    def tensors(self, names: Names) -> dict[str, Tensor]:
        """``parameter.key`` -> the states that are tensors, not copies; none, or zeros, before the first update.

        Keys are torch's: ``exp_avg``, ``exp_avg_sq`` and ``step`` of Adam, ``momentum_buffer`` of SGD.
        """

    @abstractmethod
    def numbers(self, names: Names) -> dict[str, float]:
        """``parameter.key`` -> the states that are plain numbers."""

    @abstractmethod
    def put_numbers(self, names: Names, numbers: Mapping[str, float]) -> None:
        """The inverse of ``numbers``."""

    @property
    def ema(self) -> EMA | None:
        """The moving average of the weights, where one is kept."""
        return self._ema

    def keep(self, ema: EMA | EmaPart) -> None:
        """Keep a moving average of the weights from now on: one that is there, or as the recipe has it."""
        self._ema = ema if isinstance(ema, EMA) else self._average(ema)

    def _average(self, part: EmaPart) -> EMA:
        return EMA(self.parameters, **part.model_dump())

    def _move_average(self, made: Tensor) -> None:
        """The end of ``apply``, where one is kept."""
        if self._ema is not None:
            self._ema.update(made)

    def averages(self, names: Names) -> dict[str, Tensor]:
        """Parameter's name -> its average, not a copy, held as the parameter is: whole or as a shard; where one is
        kept."""
        if self.ema is None:
            return {}
        return {names[parameter]: view for parameter, view in zip(self.ema.parameters, self.ema.shadow, strict=True)}


class OptimizerUpdates(Updates):
    """Updates by a torch optimizer; how it is gated is left open.

    Args:
        optimizer: whose states these are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]

    def prime(self) -> None:
        prime(self._optimizer)

    def tensors(self, names: Names) -> dict[str, Tensor]:
        return optimizer_tensors(self._optimizer, names)

    def numbers(self, names: Names) -> dict[str, float]:
        return optimizer_numbers(self._optimizer, names)

    def put_numbers(self, names: Names, numbers: Mapping[str, float]) -> None:
        put_numbers(self._optimizer, names, numbers)


@final
class HostGated(OptimizerUpdates):
    """Reads the gate on the host: free on a CPU, one wait a step elsewhere. Works with every optimizer.

    Args:
        optimizer: any torch optimizer.
        rates: [steps, groups], or None to leave the optimizer's own learning rates alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rates: NDArray[np.float64] | None) -> None:
        super().__init__(optimizer)
        self._rates, self._applied = rates, 0
        self.capturable = f"{type(optimizer).__name__} reads its gate on the host"
        self.execution = library_of(optimizer)

    def apply(self, gradients: Gradients, factor: Tensor, finite: Tensor) -> None:
        # a tensor that holds nothing says neither yes nor no
        if finite.device.type != PLANNED and not finite:
            return
        gradients.scale(factor)
        if self._rates is not None:
            for group, rate in zip(self._optimizer.param_groups, self._rates[self._applied], strict=True):
                if isinstance(group["lr"], Tensor):  # torchao's compiled update reads it from there
                    group["lr"].fill_(float(rate))
                else:
                    group["lr"] = float(rate)
        self._optimizer.step()
        self._applied += 1
        self._move_average(finite)

    @property
    def applied(self) -> int:
        return self._applied

    @applied.setter
    def applied(self, count: int) -> None:
        self._applied = count


@final
class DeviceGated(OptimizerUpdates):
    """Gate, clip factor and learning rate all stay on the device; for torch's fused optimizers.

    Args:
        optimizer: built with ``fused=True``, and with ``capturable=True`` where it knows that.
        rates: [steps, groups].
        device: where the parameters are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rates: NDArray[np.float64], device: torch.device) -> None:
        super().__init__(optimizer)
        self.capturable = None
        if not all(group.get("capturable", True) for group in optimizer.param_groups):
            self.capturable = f"{type(optimizer).__name__} was made without capturable=True"
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        self._applied = torch.zeros(1, dtype=torch.int64, device=device)
        self._current = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self._current, strict=True):
            group["lr"] = rate
        # the fused kernels divide by grad_scale and do nothing where found_inf is 1
        fused: Any = optimizer
        self._scale = fused.grad_scale = torch.ones((), device=device)
        self._skips = fused.found_inf = torch.zeros((), device=device)

    def apply(self, gradients: Gradients, factor: Tensor, finite: Tensor) -> None:
        self._launch(factor, finite)
        self._applied += finite
        self._move_average(finite)

    def rehearse(self) -> None:
        one = torch.ones((), device=self._applied.device)
        self._launch(one, one.isnan())
        self._move_average(one.isnan())

    def _launch(self, factor: Tensor, finite: Tensor) -> None:
        row = self._rates.index_select(0, self._applied.clamp(max=len(self._rates) - 1))[0]
        torch._foreach_copy_(self._current, list(row.unbind()))
        self._scale.copy_(factor.reciprocal())
        self._skips.copy_(~finite)
        self._optimizer.step()

    @property
    def applied(self) -> int:
        return int(self._applied)

    @applied.setter
    def applied(self, count: int) -> None:
        self._applied.fill_(count)


class FlatUpdates(Updates):
    """An optimizer on flat buffers, one operation a group; nothing leaves the device. Moves the weights into them.

    One counter on the device is the row of the learning rates, and the step of optimizers that count.

    Args:
        layout: of the trained parameters, group after group; one number format a group.
        gradients: of the same layout.
        weight_decays: one a group.
        part: what else the optimizer is told.
        rates: [steps, groups].
    """

    def __init__(
        self,
        layout: FlatLayout,
        gradients: FlatGradients,
        weight_decays: Sequence[float],
        part: OptimizerPart,
        rates: NDArray[np.float64],
    ) -> None:
        self.parameters, self.capturable, self._layout = layout.parameters, None, layout
        self._part, self._weight_decays = part, tuple(weight_decays)
        self._weights, self._gradients = layout.move_in(), gradients.flat
        beside = (COMPENSATION,) if part.rounding == "kahan" else ()
        self._states = {key: layout.allocate() for key in (*self._keys(part), *beside)}
        device = layout.parameters[0].device
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        self._step = torch.zeros((), device=device)
        self._primed = False

    def apply(self, gradients: Gradients, factor: Tensor, finite: Tensor) -> None:
        self._primed = True
        row = self._rates.index_select(0, self._step.long().clamp(max=len(self._rates) - 1).view(1))[0]
        # ahead of the kernels: Adam's count from 1; they look at nothing where found_inf is 1
        self._step += finite
        self._launch(row, factor.reciprocal(), (~finite).float())
        self._move_average(finite)

    def rehearse(self) -> None:
        one = torch.ones((), device=self._step.device)
        self._launch(self._rates[0], one, one)
        self._move_average(one.isnan())

    def _launch(self, row: Tensor, grad_scale: Tensor, found_inf: Tensor) -> None:
        flats = (self._weights, self._gradients, *self._states.values())
        for index, decay in enumerate(self._weight_decays):
            tensors = [list(flat.groups[index]) for flat in flats]
            settings: dict[str, Any] = {
                "lr": row[index],
                "grad_scale": grad_scale,
                "found_inf": found_inf,
                "decay": decay,
            }
            if self._part.rounding == "nearest":
                self._update(tensors, **settings)
                continue
            update_in_fp32(
                tensors,
                partial(self._update, **settings),
                rounding=self._part.rounding,
                step=self._step,
                skipped=found_inf.bool(),
            )

    def _average(self, part: EmaPart) -> EMA:
        flat = self._layout, self._weights
        return EMA(self.parameters, **part.model_dump(), flat=flat)

    @staticmethod
    @abstractmethod
    def _keys(part: OptimizerPart) -> Sequence[str]:
        """torch's names of the states, a buffer each."""

    @abstractmethod
    def _update(
        self, tensors: Sequence[list[Tensor]], lr: Tensor, grad_scale: Tensor, found_inf: Tensor, decay: float
    ) -> None:
        """Update one group: its weights, gradients and states, each a list of the same shapes."""

    @property
    def applied(self) -> int:
        return int(self._step)

    @applied.setter
    def applied(self, count: int) -> None:
        self._step.fill_(count)

    def prime(self) -> None:
        self._primed = True

    def tensors(self, names: Names) -> dict[str, Tensor]:
        if not self._primed:
            return {}
        return {
            f"{names[parameter]}.{key}": view
            for key, flat in self._states.items()
            for parameter, view in zip(self.parameters, flat.views, strict=True)
        }

    def numbers(self, names: Names) -> dict[str, float]:
        return {}

    def put_numbers(self, names: Names, numbers: Mapping[str, float]) -> None:
        pass


@final
class FlatAdam(FlatUpdates):
    """Adam or AdamW."""

    @staticmethod
    def _keys(part: OptimizerPart) -> Sequence[str]:
        return "exp_avg", "exp_avg_sq"

    def _update(
        self, tensors: Sequence[list[Tensor]], lr: Tensor, grad_scale: Tensor, found_inf: Tensor, decay: float
    ) -> None:
        part = self._part
        adamw_(*tensors, self._step, lr, grad_scale, found_inf, *part.betas, part.eps, decay, part.type == "adamw")

    def tensors(self, names: Names) -> dict[str, Tensor]:
        steps = {f"{names[parameter]}.step": self._step for parameter in self.parameters} if self._primed else {}
        return {**super().tensors(names), **steps}


@final
class FlatSgd(FlatUpdates):
    """SGD, with the states of its momentum if it has one."""

    @staticmethod
    def _keys(part: OptimizerPart) -> Sequence[str]:
        return ("momentum_buffer",) if part.momentum else ()

    def _update(
        self, tensors: Sequence[list[Tensor]], lr: Tensor, grad_scale: Tensor, found_inf: Tensor, decay: float
    ) -> None:
        weights, gradients, *momenta = tensors
        part, buffers = self._part, momenta[0] if momenta else []
        sgd_(weights, gradients, buffers, lr, grad_scale, found_inf, part.momentum, decay, part.nesterov)


def build_updates(
    groups: Sequence[ParameterGroup],
    part: OptimizerPart,
    rates: NDArray[np.float64],
    device: torch.device,
    others: Iterable[Tensor] = (),
    all_reduce: MakeAllReduce | None = None,
    shards: Shards | None = None,
) -> tuple[Updates, Gradients]:
    """The recipe's optimizer behind its gate, and the gradients it works on.

    Args:
        groups: what ``parameter_groups`` found; their parameters are on ``device``.
        rates: [steps, groups].
        others: the model's other tensors; a weight that shares its memory with one stays where it is.
        all_reduce: makes the all-reduce of gradients; None: there is one rank.
        shards: which of the parameters are shards of one rank; None: each is whole.

    Raises:
        RecipeError: as ``low_bit_optimizer``.
    """
    parameters = [parameter for group in groups for parameter in group.parameters]
    # on a CPU reading the gate on the host is free, and the plain optimizer gives the bits of a hand-written loop
    if (device.type == "cpu" and part.rounding == "nearest") or part.type in (*LOW_BIT, "muon"):
        plain = build_optimizer(groups, part, fused=False)
        return HostGated(plain, rates), FlatGradients(parameters, all_reduce=all_reduce, shards=shards)
    # one operation takes tensors of one number format
    uniform = [
        (index, [p for p in group.parameters if p.dtype == dtype])
        for index, group in enumerate(groups)
        for dtype in dict.fromkeys(p.dtype for p in group.parameters)
    ]
    columns = [index for index, _ in uniform]
    layout = FlatLayout([members for _, members in uniform], others)
    gradients = FlatGradients(layout.parameters, layout, all_reduce, shards)
    decays = [groups[index].weight_decay for index in columns]
    kind = FlatSgd if part.type == "sgd" else FlatAdam
    return kind(layout, gradients, decays, part, rates[:, columns]), gradients
