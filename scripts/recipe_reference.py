"""Writes the tables of docs/recipes.md from the recipe's JSON schema: ``python scripts/recipe_reference.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from paceline.verbs.schema import recipe_schema

PAGE = Path(__file__).resolve().parents[1] / "docs" / "recipes.md"
BEGIN, END = "<!-- fields: written by scripts/recipe_reference.py -->", "<!-- end of fields -->"

Schema = Mapping[str, Any]


def page(text: str) -> str:
    """``text`` of the page with its tables written anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.partition(END)[2]}"


def tables() -> str:
    """A section a part, a line a field, in the order of the recipe."""
    schema = recipe_schema()
    top, sections = [], []
    for name, field in schema["properties"].items():
        part = _part(field, schema)
        if part is None:
            top.append(_row(name, field))
        else:
            rows = [_row(*found) for found in _fields(name, part, schema)]
            sections.append(_section(name, _first_sentence(part.get("description", "")), rows))
    return "\n".join([_section("top level", "", top), *sections])


def missing_words() -> list[str]:
    """Fields that nothing is said about."""
    schema = recipe_schema()
    return [path for path, field in _fields("", schema, schema) if not _words(field)]


def _fields(prefix: str, part: Schema, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Every field with its dotted path; of a group of fields that may be null, the group too."""
    for key, field in part["properties"].items():
        path = f"{prefix}.{key}" if prefix else key
        inner = _part(field, schema)
        if inner is None or _options(field) or field.get("type") == "array":
            yield path, field
        if field.get("type") == "array" and inner is not None:
            path += "[]"
        # a group's schedule has the fields of the recipe's own
        if inner is not None and not path.endswith("[].schedule"):
            yield from _fields(path, inner, schema)


def _part(field: Schema, schema: Schema) -> Schema | None:
    """The group of fields that a field holds, if it does."""
    options = [field, *_options(field), *field.get("allOf", ()), field.get("items", {})]
    reference = next((option["$ref"] for option in options if "$ref" in option), None)
    return schema["$defs"][reference.rpartition("/")[2]] if reference else None


def _options(field: Schema) -> list[Schema]:
    """What a field takes, where that is of several kinds."""
    return field.get("anyOf") or field.get("oneOf") or []


def _section(title: str, words: str, rows: list[str]) -> str:
    head = [f"### {title}", ""] + [words, ""] * bool(words)
    return "\n".join([*head, "| field | takes | default | |", "|---|---|---|---|", *rows, ""])


def _row(path: str, field: Schema) -> str:
    execution = " *Execution.*" if field.get("execution") else ""
    cells = [f"`{path}`", _takes(field), _default(field), _words(field) + execution]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _words(field: Schema) -> str:
    described = "" if "$ref" in field else field.get("description", "")
    return described.replace("*", r"\*")


def _takes(field: Schema) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if options := _options(field):
        found = [_takes(option) for option in options if option.get("type") != "null"]
        null = ["null"] * any(option.get("type") == "null" for option in options)
        return " or ".join([*dict.fromkeys(found), *null])
    if "$ref" in field:
        return "the fields below"
    if field["type"] == "array":
        if "prefixItems" in field:
            return f"[{', '.join(_takes(item) for item in field['prefixItems'])}]"
        inner = field.get("items", {})
        return "list of the fields below" if "$ref" in inner else f"list of {_takes(inner)}"
    names = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true, false"}
    return names.get(field["type"], "settings") + _bounds(field)


def _bounds(field: Schema) -> str:
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    found = [f"{word} {_number(field[key])}" for key, word in words.items() if key in field]
    return f" {' '.join(found)}" if found else ""


def _number(value: float) -> str:
    return f"{value:,}" if value < 2**31 else "2^32"


def _default(field: Schema) -> str:
    if "default" not in field:
        return "required"
    value = field["default"]
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower().replace('none', 'null')}`"
    return f"`{value}`" if value != [] else "`[]`"


def _first_sentence(text: str) -> str:
    return text.partition("\n")[0].replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
