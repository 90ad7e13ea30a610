"""What is due at the bound between two steps, found from the progress alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

from paceline.contract.records import EvaluationRecord
from paceline.recipe.parts import LoopPart
from paceline.run.progress import Progress, TrainSums, metric_value


@final
@dataclass(frozen=True)
class Due:
    """The cadences of a run, and what ends it.

    Args:
        part: the recipe's ``loop``.
        total_steps: of the run, unless early stopping ends it.
        metric: such as ``accuracy`` or ``-loss``, by which the best step is told.
    """

    part: LoopPart
    total_steps: int
    metric: str

    def stopped_early(self, at: Progress) -> bool:
        """Whether early stopping ends the run here."""
        patience = self.part.early_stopping
        return bool(patience and at.evaluations_without_gain >= patience.patience)

    def ended(self, at: Progress) -> bool:
        """Whether no step is left to do."""
        return at.step >= self.total_steps or self.stopped_early(at)

    def evaluation(self, at: Progress) -> bool:
        """Whether the validation split is to be measured here, and has not been."""
        is_done = bool(at.evaluations) and at.evaluations[-1].step == at.step
        return self._falls(self.part.evaluate_every, at) and not is_done

    def checkpoint(self, at: Progress) -> bool:
        """Whether a checkpoint is to be saved here."""
        return self._falls(self.part.checkpoint_every, at)

    def checkpoint_by_clock(self, seconds: float) -> bool:
        """Whether so long after the last checkpoint one is to be saved."""
        minutes = self.part.checkpoint_minutes
        return minutes is not None and seconds >= 60 * minutes

    def judged(self, at: Progress, found: EvaluationRecord) -> tuple[Progress, bool]:
        """The progress after an evaluation, and whether that is the best so far.

        NaN is neither better nor worse than a figure: such an evaluation is never the best, and early stopping does not
        count it.
        """
        value, best, stopping = metric_value(found, self.metric), at.best, self.part.early_stopping
        is_known = math.isfinite(value)
        is_best = is_known and (best is None or value > best)
        gained = is_known and (best is None or value > best + (stopping.min_delta if stopping else 0.0))
        after = replace(
            at,
            sums=TrainSums(),
            best=value if is_best else best,
            best_step=at.step if is_best else at.best_step,
            evaluations_without_gain=0 if gained else at.evaluations_without_gain + is_known,
            evaluations=(*at.evaluations, found),
        )
        return after, is_best

    def notice(self, found: EvaluationRecord) -> str:
        """A sentence on an evaluation that cannot be compared with others; empty of one that can."""
        if math.isfinite(metric_value(found, self.metric)):
            return ""
        unused = "no such evaluation is the best, and early stopping does not count it"
        return f"loop.best_metric = {self.metric} is NaN: {unused}"

    def _falls(self, cadence: str | int, at: Progress) -> bool:
        """Whether what happens at a cadence happens at this step bound; at the end it does in any case."""
        if at.step == 0 or cadence == "never":
            return False
        return self.ended(at) or (at.order.step == 0 if cadence == "epoch" else at.step % int(cadence) == 0)
