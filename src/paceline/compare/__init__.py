"""What says "equal up to rounding": the same computed in two ways on a copy of a model, and compared.

::

    with exactly(build.device):
        trial = trial_of(build.model)
        expected = results(trial, build.forward, build.task, batch)
        found = results(trial, another_forward, build.task, batch)
        reason = beyond_rounding("Net", expected, found, in_fp64, ways=("short", "plain"))  # None: equal
"""

from paceline.compare.rounding import Results, apart, beyond, beyond_rounding, tolerance_of
from paceline.compare.trial import CHECKED_SAMPLES, exactly, results, spread, trial_of

__all__ = [
    "CHECKED_SAMPLES",
    "Results",
    "apart",
    "beyond",
    "beyond_rounding",
    "exactly",
    "results",
    "spread",
    "tolerance_of",
    "trial_of",
]
