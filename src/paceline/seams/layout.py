"""How samples become batches on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from paceline.seams.batch import Batch, Ids, Size


class Layout(ABC):
    """How samples become batches on the device."""

    @abstractmethod
    def collate(self, ids: Ids, draw: int | None = None, *, slots: int | None = None) -> Batch:
        """The micro-batch of these samples, in the order of ``ids``.

        Args:
            draw: seed of random augmentation; None: none, as in every evaluation.
            slots: positions to make it as wide as, at most ``widens_by`` more than it has by itself.
        """

    @abstractmethod
    def over(self, inputs: Any, labels: NDArray[Any]) -> Layout:
        """The same layout of other samples of the same kind, read on the host."""

    widens_by: int = 0
    """Positions of filler that a micro-batch can be given to be shaped like another rank's; those of a width that is
    asked for have all their shapes by their samples' number and that width."""

    reads_ahead: bool = False
    """Whether ``expect`` has any use."""

    def expect(self, ids: Sequence[Ids]) -> None:  # noqa: B027 - a hint that most layouts have no use for
        """Told which micro-batches come next, so that a layout which reads from the host can read ahead."""

    def close(self) -> None:  # noqa: B027
        """Release threads and pinned memory."""

    @abstractmethod
    def size(self, ids: Ids) -> Size:
        """Its size, without building it."""

    @abstractmethod
    def sorted(self, ids: Ids) -> Ids:
        """The ids in an order that wastes little; for evaluation, where order changes nothing."""

    def batches(self, ids: Ids, batch_size: int) -> list[Ids]:
        """The ids cut into the batches of an evaluation: in the order of ``sorted``, at most ``batch_size`` each."""
        ordered = self.sorted(ids)
        return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
