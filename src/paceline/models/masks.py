"""Attention masks of transformers, made without looking at what they mask.

transformers leaves out a mask that masks nothing, so that attention can take a kernel that knows no masks
(``masking_utils.py``). On a GPU its questions are in the way:

- *Is any token masked?* The host waits for the answer, in every step, and what waits cannot be captured in a CUDA
  graph. It is not asked of masks that are traced; and where nothing is ever masked, our batches have no mask.
- *Is there padding though there is no mask?* The host waits for that, too.
- *Is it being traced?* Versions up to 5.17 at least ask that of a mask that is not there, too, and take a capture for
  a trace. Attention then falls back to plain products in fp32: a vision transformer's captured steps took 2 GiB more
  than its eager ones, and BERT's 1.7 times as long. Later versions ask whether there is a mask first.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

WARNING = "warn_if_padding_and_no_attention_mask"
"""A method of transformers' models."""


@contextlib.contextmanager
def unread_masks() -> Iterator[None]:
    """Inside, a mask that is there counts as traced, so that it is taken as it is; one that is not there does not."""
    # not imported here: without it no model of transformers is there
    module: Any = sys.modules.get("transformers.masking_utils")
    is_tracing = getattr(module, "is_tracing", None)
    if is_tracing is None:
        yield
        return

    def is_taken_as_it_is(tensor: Any = None) -> bool:
        # masks of padding are bool; numbers of packed sequences, which pass here too, are not
        return tensor is not None and (tensor.dtype == torch.bool or bool(is_tracing(tensor)))

    models: Any = sys.modules.get("transformers.modeling_utils")
    kind = getattr(models, "PreTrainedModel", None)
    warns = getattr(kind, WARNING, None)
    module.is_tracing = is_taken_as_it_is
    if warns is not None:
        setattr(kind, WARNING, _nothing_to_warn_of)
    try:
        yield
    finally:
        module.is_tracing = is_tracing
        if warns is not None:
            setattr(kind, WARNING, warns)


def _nothing_to_warn_of(*_: object, **__: object) -> None:
    """Where our batches have no mask nothing is padded, which is known without looking."""
