"""The techniques with a field of their own."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from paceline.contract.errors import close_words, nearest
from paceline.recipe.parts.part import EXECUTION, Part, SettingError, Switch
from paceline.recipe.techniques import entry_of


def _technique(name: str) -> Any:
    """The field of a technique, as the catalogue has it."""
    entry = entry_of(name)
    return Field(entry.default, json_schema_extra=EXECUTION if entry.execution else None, description=entry.description)


VIEWS = ("flip", "crop5", "scales", "windows")
"""What ``tta`` may name."""


def _split(value: object) -> object:
    """``flip,crop5`` as a list has it, for who types it."""
    return tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else value


class TechniquesPart(Part):
    """One field a technique; see ``paceline techniques``."""

    packing: Switch = _technique("packing")
    early_pooling: Switch = _technique("early_pooling")
    channels_last: Switch = _technique("channels_last")
    fully_connected: Switch = _technique("fully_connected")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "pure_bf16"] = _technique("precision")
    fused_qkv: Switch = _technique("fused_qkv")
    fusion: Switch = _technique("fusion")
    embedding_gradient: Switch = _technique("embedding_gradient")
    recompute: bool = _technique("recompute")
    compile: Switch = _technique("compile")
    capture: Switch = _technique("capture")
    tta: Annotated[tuple[str, ...], BeforeValidator(_split)] = _technique("tta")

    @field_validator("tta")
    @classmethod
    def _known_views(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in VIEWS:
                near = close_words(name, VIEWS)
                why = f"{name}: no view has this name; {nearest(name, VIEWS)}"
                raise SettingError(why, f"techniques.tta=[{near[0] if near else VIEWS[0]}]")
            if value.count(name) > 1:
                raise SettingError(
                    f"{name} stands in it twice; name it once", f"techniques.tta=[{','.join(dict.fromkeys(value))}]"
                )
        return value
