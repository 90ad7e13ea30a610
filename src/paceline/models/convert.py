"""Turn pickled weights into safetensors: ``python -m paceline.models.convert FOLDER``.

This is the one place in paceline that opens a pickle, and only when a person asks for it by name. It does so with
torch's restricted reader (``weights_only=True``), which builds tensors and plain containers and refuses all else.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.contract.errors import ModelError, UserError
from paceline.contract.files import disk_errors, require_room
from paceline.models.hub import refuse_lfs_note

_ENDINGS = (".bin", ".pt", ".pth")
_INDEX = "pytorch_model.bin.index.json"


def convert(folder: str | Path) -> list[Path]:
    """Write safetensors beside the pickled weights at the top of ``folder``, which stay as they are.

    ``pytorch_model.bin``, or a lone .bin, .pt or .pth file, becomes ``model.safetensors``; shards with their index
    become shards with an index. A training checkpoint that keeps its weights under ``state_dict``, ``model`` or
    ``model_state_dict`` is unwrapped.

    Returns:
        The files written.

    Raises:
        ModelError: no weights, several candidates, or a file that holds more than tensors.
        DiskFullError: no room.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder", fix="give the folder that holds the weights")
    if (folder / _INDEX).is_file():
        return _convert_shards(folder)
    named = folder / "pytorch_model.bin"
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.suffix in _ENDINGS and path.is_file() and path.name != "training_args.bin"
    ]
    if not found:
        raise ModelError(
            f"{folder}: no weights to convert",
            f"no file ends in {', '.join(_ENDINGS)}",
            "give the folder that holds the weights",
        )
    if len(found) > 1 and named not in found:
        raise ModelError(
            f"{folder}: several files may be the weights", ", ".join(path.name for path in found), "leave one of them"
        )
    return [_convert_file(named if named in found else found[0], folder / "model.safetensors")]


def main(arguments: list[str]) -> int:
    """The command line: converts one folder, prints what was written, and returns the exit status."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m paceline.models.convert FOLDER", file=sys.stderr)  # noqa: T201
        return 2
    try:
        written = convert(arguments[0])
    except UserError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return error.exit_code
    for path in written:
        print(path)  # noqa: T201
    return 0


def _convert_shards(folder: Path) -> list[Path]:
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        stems = {shard: shard.replace("pytorch_model", "model") for shard in sorted(set(index["weight_map"].values()))}
        names = {shard: f"{stem.removesuffix('.bin')}.safetensors" for shard, stem in stems.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ModelError(
            f"{folder / _INDEX}: damaged", "it does not say which weights are in which file", "download it again"
        ) from None
    for shard in names:
        if Path(shard).name != shard:
            raise ModelError(f"{folder / _INDEX}: names a file outside the folder", shard)
    written = [_convert_file(folder / shard, folder / name) for shard, name in names.items()]
    index["weight_map"] = {tensor: names[shard] for tensor, shard in index["weight_map"].items()}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return [*written, path]


def _convert_file(source: Path, target: Path) -> Path:
    if source.is_file():
        refuse_lfs_note(source)
    try:
        with warnings.catch_warnings(action="ignore"):  # about pickles that torch did not write
            content = torch.load(source, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ModelError(f"{source}: missing", "the index names it", "download it too") from None
    except (UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{source}: cannot be read as tensors",
            _reason(error),
            "it holds more than weights, or is damaged: ask its authors for safetensors",
        ) from None
    tensors = _tensors(content, source)
    with disk_errors(target, source.stat().st_size):
        require_room(target.parent, sum(t.numel() * t.element_size() for t in tensors.values()), target.name)
        save_file(tensors, target, metadata={"format": "pt"})
        target.chmod(source.stat().st_mode & 0o777)
    return target


def _reason(error: Exception) -> str:
    """Why torch reads no tensors, without its advice to read the file as a pickle, which can run any code."""
    text = str(error)
    if asked := re.search(r"GLOBAL ([\w.]+) was not", text):
        return f"it asks for {asked[1]}, which is code"
    if isinstance(error, RuntimeError) and "weights_only" not in text:
        return text.strip().splitlines()[0]
    return "no pickle of tensors and plain containers is in it"


def _tensors(content: Any, source: Path) -> dict[str, torch.Tensor]:
    """The weights, each with memory of its own: safetensors refuses two names for one."""
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        found = next((k for k, v in content.items() if not isinstance(v, torch.Tensor)), "") if isinstance(
            content, Mapping
        ) else type(content).__name__  # fmt: skip
        raise ModelError(f"{source}: is not a state_dict", f"found {found}", "save model.state_dict() and nothing else")
    return {str(name): value.detach().clone(memory_format=torch.contiguous_format) for name, value in content.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
