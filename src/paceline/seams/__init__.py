"""The interfaces that rooms are built to. Torch, and of ours only the contract."""

from paceline.seams.batch import Batch, Ids, Mixed, Packed, Size
from paceline.seams.build import Build, Forward, LayoutKind
from paceline.seams.engine import Accumulated, Capturing, Engine, Mix, Retrying, StepInput, Tensors, Update, Weighed
from paceline.seams.layout import Layout
from paceline.seams.task import Meter, Task
from paceline.seams.world import Alone, Link, Mesh, World

__all__ = [
    "Accumulated",
    "Alone",
    "Batch",
    "Build",
    "Capturing",
    "Engine",
    "Forward",
    "Ids",
    "Layout",
    "LayoutKind",
    "Link",
    "Mesh",
    "Meter",
    "Mix",
    "Mixed",
    "Packed",
    "Retrying",
    "Size",
    "StepInput",
    "Task",
    "Tensors",
    "Update",
    "Weighed",
    "World",
]
