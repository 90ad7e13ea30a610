"""What all parts of a recipe are made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

EXECUTION: dict[str, Any] = {"execution": True}
"""Marks a field that changes how a run is carried out, not what it learns."""

AS_TYPED: dict[str, Any] = {"as_typed": True}
"""Marks a field that holds punctuation: ``--set`` takes it as typed, since YAML reads ``#``, ``~`` or ``-`` as others.

Such a field also needs ``field_validator(..., mode="before")(read_punctuation)``.
"""

Reference = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
"""``package.module:function``, imported from the current folder or the environment."""

Columns = str | tuple[str, ...]

Beta = Annotated[float, Field(ge=0, lt=1)]
"""Share that a running mean keeps of itself at each step."""

Switch = Literal["auto"] | bool
"""``auto``: on where it is safe and pays, which is recorded with the reason."""


class SettingError(ValueError):
    """A value, or a combination of settings, that cannot be; with the settings that mend it.

    Args:
        problem: why it cannot be.
        settings: ``PATH=VALUE``, the smallest change that works; a path that begins with a dot is of the part itself.
    """

    def __init__(self, problem: str, *settings: str) -> None:
        self.settings = settings
        super().__init__(problem)


LARGEST = 1e30
"""The largest rate or decay: far beyond it an update is no number in fp32; where exactly depends on the optimizer."""


def within_fp32(value: float | None) -> float | None:
    """The value; refused where no optimizer can use it."""
    if value is not None and value > LARGEST:
        raise ValueError(f"{value:g} is more than any optimizer can use, at most {LARGEST:g}")
    return value


def share_or_count(value: float | None) -> float | None:
    """The value; refused where it is neither a share below 1 nor a count."""
    if value is not None and value % 1 and not 0 < value < 1:
        raise ValueError(f"{value:g} is neither a share below 1 nor a whole number")
    return value


def read_punctuation(value: object) -> object:
    r"""Return the text of a field marked ``AS_TYPED``, with ``\t`` and ``\n`` as the characters that they spell.

    Raises:
        ValueError: YAML made something else of the character, or nothing.
    """
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise ValueError(
            f'found {value!r}, no character; YAML needs quotes around it: "#", "|", "-" or " ", for example'
        )
    return value.replace("\\t", "\t").replace("\\n", "\n")


class Part(BaseModel):
    """A frozen group of settings that refuses keys it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)
