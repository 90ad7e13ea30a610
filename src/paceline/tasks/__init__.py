"""Tasks: what is learned and how it is measured, a room each.

This package needs no torch, and neither do the ``rows`` of its rooms.
"""

from paceline.tasks.choose import best_metric, task_for

__all__ = ["best_metric", "task_for"]
