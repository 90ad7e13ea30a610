"""Attention masks of transformers while a CUDA graph is recorded: none where nothing is masked.

transformers leaves out a mask that masks nothing, so that attention can take a kernel that knows no masks. While a
stream is recorded, versions up to 5.17 at least make one all the same: they ask whether the padding mask is *traced*,
and take a recording for a trace also where there is no padding mask. Attention then falls back to plain products in
fp32: a vision transformer's recorded steps took 2 GiB more than its launched ones, and BERT's 1.7 times as long. Later
versions ask whether there is a mask first (``masking_utils.py``), which is what is done here.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def none_where_nothing_is_masked() -> Iterator[None]:
    """Inside, a mask that is not there is not taken for a traced one."""
    # not imported here: without it no model of transformers is there
    module: Any = sys.modules.get("transformers.masking_utils")
    is_tracing = getattr(module, "is_tracing", None)
    if is_tracing is None:
        yield
        return

    def of_a_mask(tensor: Any = None) -> bool:
        return tensor is not None and bool(is_tracing(tensor))

    module.is_tracing = of_a_mask
    try:
        yield
    finally:
        module.is_tracing = is_tracing
