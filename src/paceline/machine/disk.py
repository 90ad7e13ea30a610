"""Whether this machine can move shards to a disk: DeepSpeed does so by an operator that is compiled here, once."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from paceline.contract.errors import RecipeError

LIBAIO = "apt-get install libaio-dev, or dnf install libaio-devel"
COMPILER = "apt-get install g++, or dnf install gcc-c++"
CUDA_TOOLKIT = "install CUDA's toolkit of torch's version, and export CUDA_HOME=FOLDER"
CUDA = Path("/usr/local/cuda")
"""Where torch looks for the toolkit last."""

ELSEWHERE = (
    "a folder of a local disk, as --set parallel.offload_folder=/mnt/nvme; or --set parallel.offload_folder=null"
)

_PROGRAM = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_submit(context, 0, 0) != 0; }\n"


def require_disk(folder: str, *, on_gpu: bool) -> None:
    """Refuse a folder that shards cannot be moved to from here.

    Args:
        folder: ``parallel.offload_folder``.
        on_gpu: DeepSpeed then builds its operator with CUDA's headers.

    Raises:
        RecipeError: the folder cannot be written to past the page cache, or there is no compiler, no libaio, or on a
            GPU no CUDA toolkit.
    """
    what = f"parallel.offload_folder = {folder}"
    try:
        with tempfile.NamedTemporaryFile(prefix="paceline-", dir=folder) as file:
            # libaio waits for nothing only where the page cache is passed by
            os.close(os.open(file.name, os.O_WRONLY | os.O_DIRECT))
    except OSError as error:
        raise RecipeError(what, f"no file can be written there with O_DIRECT: {error.strerror}", ELSEWHERE) from None
    require_operator(what, on_gpu=on_gpu)


def require_operator(what: str, *, on_gpu: bool) -> None:
    """Refuse ``what`` where DeepSpeed's operator for disks cannot be compiled.

    Raises:
        RecipeError: there is no compiler, no libaio, or on a GPU no CUDA toolkit.
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    needs = "DeepSpeed reaches disks by its operator async_io, which is compiled when it is first used"
    if shutil.which(compiler[0]) is None:
        raise RecipeError(what, f"{needs}, and there is no C++ compiler ({compiler[0]})", COMPILER)
    if on_gpu and "CUDA_HOME" not in os.environ and not (shutil.which("nvcc") or CUDA.exists()):
        raise RecipeError(what, f"{needs}, on a GPU with CUDA's headers, and there are none", CUDA_TOOLKIT)
    if not _links(compiler):
        raise RecipeError(what, f"{needs} against libaio, and no program with libaio.h can be linked here", LIBAIO)


def _links(compiler: list[str]) -> bool:
    flags = [part for name in ("CFLAGS", "LDFLAGS") for part in shlex.split(os.environ.get(name, ""))]
    with tempfile.TemporaryDirectory() as folder:
        command = [*compiler, "-x", "c++", "-", *flags, "-laio", "-o", f"{folder}/program"]
        return (
            subprocess.run(
                command, input=_PROGRAM, text=True, errors="replace", capture_output=True, check=False
            ).returncode
            == 0
        )
