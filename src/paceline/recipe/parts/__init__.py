"""The parts of a recipe: frozen, torch-free, validated.

Every field is either *result-defining* (the default: changing it changes what is learned, so a resumed run refuses
it) or *execution* (marked ``EXECUTION``: how fast and where; it may change on resume and is recorded).
"""

from paceline.recipe.parts.data import AugmentPart, DataPart, NormalisePart, RandomPart, SplitsPart
from paceline.recipe.parts.loop import EarlyStoppingPart, LoopPart
from paceline.recipe.parts.model import LoraPart, ModelPart
from paceline.recipe.parts.observe import ObservePart, TracePart
from paceline.recipe.parts.optimizer import EmaPart, GroupPart, LossScalePart, OptimizerPart, SchedulePart
from paceline.recipe.parts.parallel import ParallelPart
from paceline.recipe.parts.part import EXECUTION, Part, Reference, Switch
from paceline.recipe.parts.task import TaskPart
from paceline.recipe.parts.techniques import TechniquesPart

__all__ = [
    "EXECUTION",
    "AugmentPart",
    "DataPart",
    "EarlyStoppingPart",
    "EmaPart",
    "GroupPart",
    "LoopPart",
    "LoraPart",
    "LossScalePart",
    "ModelPart",
    "NormalisePart",
    "ObservePart",
    "OptimizerPart",
    "ParallelPart",
    "Part",
    "RandomPart",
    "Reference",
    "SchedulePart",
    "SplitsPart",
    "Switch",
    "TaskPart",
    "TechniquesPart",
    "TracePart",
]
