"""Tasks: what is learned and how it is measured."""

from paceline.tasks.choose import best_metric, task_for
from paceline.tasks.classification import Classification
from paceline.tasks.multi_label import MultiLabel
from paceline.tasks.regression import Regression

__all__ = ["Classification", "MultiLabel", "Regression", "best_metric", "task_for"]
