"""What transformers' own code raises in a forward pass: a model that does not take these inputs, not a bug of ours."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import torch
from torch import nn

from paceline.contract.errors import ModelError, in_a_line
from paceline.machine.device import PLANNED
from paceline.seams import Batch

_RAISED = (
    ValueError,
    RuntimeError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
    NotImplementedError,
)


@contextlib.contextmanager
def takes_inputs(model: nn.Module, batch: Batch, device: torch.device) -> Iterator[None]:
    """Around a forward pass: an error that began in a model of transformers names the model and its inputs.

    A device without memory passes through, as do errors of paceline's and of a user's own module; and all of a plan's,
    which is made without numbers.

    Raises:
        ModelError: the model cannot take these inputs.
    """
    try:
        yield
    except _RAISED as error:
        if device.type == PLANNED or isinstance(error, torch.OutOfMemoryError) or not _began_in_transformers(error):
            raise
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.inputs.items())
        raise ModelError(
            f"{type(model).__name__}: its forward pass fails with {shapes}",
            in_a_line(error),
            "choose another model or other data; if it is about lengths, --set data.pad_to_multiple_of=64",
        ) from error


def _began_in_transformers(error: BaseException) -> bool:
    """Whether the last frame outside torch is of a model of transformers."""
    files = [frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__)]
    own = [name for name in files if "/torch/" not in name]
    return bool(own) and "/transformers/" in own[-1]
