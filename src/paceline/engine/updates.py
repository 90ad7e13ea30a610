"""Applying an update behind one gate: a step whose gradient is not finite changes nothing at all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.engine.gradients import Gradients


class Updates(ABC):
    """An optimizer and its learning rates, indexed by the updates *applied*, so a skipped one advances nothing."""

    optimizer: torch.optim.Optimizer

    @abstractmethod
    def apply(self, gradients: Gradients, factor: Tensor, finite: Tensor) -> None:
        """One update with the gradients times ``factor`` if ``finite``; nothing otherwise. Both are device scalars."""

    @property
    @abstractmethod
    def applied(self) -> int:
        """Updates applied so far; waits for the device."""

    @applied.setter
    @abstractmethod
    def applied(self, count: int) -> None: ...


@final
class HostGated(Updates):
    """Reads the gate on the host: free on a CPU, one wait a step elsewhere. Works with every optimizer.

    Args:
        optimizer: any torch optimizer.
        rates: [steps, groups], or None to leave the optimizer's own learning rates alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rates: NDArray[np.float64] | None) -> None:
        self.optimizer, self._rates, self._applied = optimizer, rates, 0

    def apply(self, gradients: Gradients, factor: Tensor, finite: Tensor) -> None:
        if not finite:
            return
        gradients.scale(factor)
        if self._rates is not None:
            for group, rate in zip(self.optimizer.param_groups, self._rates[self._applied], strict=True):
                if isinstance(group["lr"], Tensor):  # torchao's compiled update reads it from there
                    group["lr"].fill_(float(rate))
                else:
                    group["lr"] = float(rate)
        self.optimizer.step()
        self._applied += 1

    @property
    def applied(self) -> int:
        return self._applied

    @applied.setter
    def applied(self, count: int) -> None:
        self._applied = count


@final
class DeviceGated(Updates):
    """Gate, clip factor and learning rate all stay on the device; for torch's fused optimizers.

    Args:
        optimizer: built with ``fused=True``.
        rates: [steps, groups].
        device: where the parameters are.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rates: NDArray[np.float64], device: torch.device) -> None:
        self.optimizer: Any = optimizer
        self._rates = torch.tensor(rates, dtype=torch.float32, device=device)
        self._applied = torch.zeros(1, dtype=torch.int64, device=device)
        self._current = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self._current, strict=True):
            group["lr"] = rate

    def apply(self, gradients: Gradients, factor: Tensor, finite: Tensor) -> None:
        row = self._rates.index_select(0, self._applied.clamp(max=len(self._rates) - 1))[0]
        torch._foreach_copy_(self._current, list(row.unbind()))
        # the fused kernels divide by grad_scale and do nothing where found_inf is 1
        self.optimizer.grad_scale = factor.reciprocal()
        self.optimizer.found_inf = (~finite).float()
        self.optimizer.step()
        self._applied += finite

    @property
    def applied(self) -> int:
        return int(self._applied)

    @applied.setter
    def applied(self, count: int) -> None:
        self._applied.fill_(count)
