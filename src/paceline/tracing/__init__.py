"""What a traced window says of a run: where its seconds went, what bounds it, and the switch that wins it back.

    window = read_window(Path("runs/imdb/trace/steps-91-100"))
    budgets = budget(window)
    print(told(verdict(window, budgets), budgets))

Needs neither torch nor a GPU: a trace is read wherever it was copied to.
"""

from paceline.tracing.budgets import Budget, Budgets, budget
from paceline.tracing.case import SETTINGS, Switch
from paceline.tracing.cut import CATEGORIES
from paceline.tracing.judge import Verdict, verdict
from paceline.tracing.telling import compared, measured_gain, told
from paceline.tracing.window import Window, read_facts, read_window, windows_in

__all__ = [
    "CATEGORIES",
    "SETTINGS",
    "Budget",
    "Budgets",
    "Switch",
    "Verdict",
    "Window",
    "budget",
    "compared",
    "measured_gain",
    "read_facts",
    "read_window",
    "told",
    "verdict",
    "windows_in",
]
