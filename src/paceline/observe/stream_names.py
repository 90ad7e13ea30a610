"""Names of a GPU's streams, told to whatever listens to NVTX: Nsight Systems shows them beside the streams' kernels.

Source: NVTX v3, ``nvToolsExtCudaRt.h``. Its functions are in a library of NVIDIA's package nvidia-nvtx, which torch's
builds for CUDA 13 bring along.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

LIBRARY = "libnvtx3interop.so.1"


def name_streams(names: Mapping[int, str]) -> bool:
    """Tell the names of streams.

    Where the library is missing streams keep their numbers: names are for people who look at a trace, and no run fails
    of them.

    Args:
        names: handle of a stream (``cudaStream_t`` as a number) -> name.

    Returns:
        Whether there was a library to tell them to; it says nothing about who listens.
    """
    library = _library() if names else None
    if library is None:
        return False
    for handle, name in names.items():
        library.nvtxNameCudaStreamA(ctypes.c_void_p(handle), name.encode("ascii", "replace"))
    return True


@cache
def _library() -> Any:
    # a package of several distributions, so that it has no module of its own
    spec = importlib.util.find_spec("nvidia")
    for place in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(place).glob(f"*/lib/{LIBRARY}")):
            try:
                return ctypes.CDLL(str(file))
            except OSError:
                continue
    return None
