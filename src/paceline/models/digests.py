"""Whether the weights of a saved model are still those that were saved: safetensors itself has no checksum."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.contract.errors import ModelError
from paceline.contract.files import digest


def weight_digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every safetensors file at the top of ``folder``, by name."""
    return {path.name: digest(path) for path in sorted(folder.glob("*.safetensors"))}


def check_digests(folder: Path, saved: Mapping[str, str], note: str) -> None:
    """Refuse weights that are not what was saved: a flipped bit loads as any other number.

    Args:
        saved: from ``weight_digests``; files that it does not name are not looked at.
        note: the file that holds it.

    Raises:
        ModelError: names the file.
    """
    for path in sorted(folder.glob("*.safetensors")):
        if path.name in saved and digest(path) != saved[path.name]:
            raise ModelError(
                f"{path}: is not what was saved",
                f"its SHA-256 is not the one in {note}: a failing disk, a broken copy, or somebody changed it",
                f"use a copy that is whole; for weights that you changed yourself, take 'weights' out of {note}",
            )
