"""Explanations of recipes that pydantic refuses: its first problem as an error with a reason and a fix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from paceline.contract.errors import RecipeError, close_words, excerpt, nearest
from paceline.contract.redaction import redacted
from paceline.recipe.entries import written
from paceline.recipe.parts.part import SettingError
from paceline.recipe.suggestions import leaves, suggest_keys, suggest_value, typed
from paceline.recipe.terms import find_term, plain

AWAITED = "Input should be "
"""Most messages of pydantic's begin so."""


def explain_problem(model: type[BaseModel], error: ValidationError) -> RecipeError:
    """Return the first problem of a pydantic error with its reason and fix."""
    problems = error.errors(include_url=False)
    # a misspelt key also makes the right one missing: it is the cause, whatever comes first
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    # pydantic names the member of a union in the location; only what the user wrote is of use
    keys = [str(part) for part in problem["loc"]]
    path, known = _written_path(model, keys)
    dotted = ".".join(path)
    if problem["type"] == "extra_forbidden":
        unknown = [one for one in problems if one["type"] == "extra_forbidden"]
        return _explain_unknown(model, path, [*known], unknown)
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        named = "model.source" if dotted == "model" else dotted
        reset = "" if named == "model.source" else _reset(model, path)
        return RecipeError(f"{dotted}: missing", fix=reset or f"--set {named}=NAME")
    part, field = _field_at(model, path)
    if problem["type"] == "value_error":
        settings = _settings_of(problem["ctx"]["error"], dotted)
        in_a_list = any(key.isdigit() for key in path)  # whose members --set cannot name
        fix = "; ".join(settings) if in_a_list else typed(settings)
        return RecipeError(f"{dotted}: {message}" if dotted else message, fix=fix or _reset(model, path))
    what = f"{dotted} = {excerpt(str(problem['input']))}"
    is_choice = problem["type"] in ("literal_error", "string_pattern_mismatch")
    if is_choice and (suggestion := suggest_value(dotted, problem["input"])) is not None:
        return RecipeError(what, suggestion.in_full, suggestion.fix)
    if explained := _explain_kind(problem, dotted, part):
        return RecipeError(what, *explained)
    if problem["type"] == "string_pattern_mismatch" and field is not None and field.description:
        values = re.findall(r"(?<=[(|])\w+(?=[|)])", problem["ctx"]["pattern"])
        near = close_words(str(problem["input"]), values)
        fix = typed([f"{dotted}={one}" for one in near]) or _reset(model, path)
        return RecipeError(what, f"it is {field.description}", fix)
    # where values of several kinds may stand, each has its own problem with this one
    kinds = [one for one in problems if _written_path(model, [*map(str, one["loc"])])[0] == path]
    awaited = dict.fromkeys(_awaited(one) for one in kinds if one["msg"].startswith(AWAITED))
    message = AWAITED + ", or ".join(awaited) if awaited else message
    values = [value for one in kinds for value in re.findall("'([^']*)'", str(one.get("ctx", {}).get("expected", "")))]
    fix = typed([f"{dotted}={one}" for one in close_words(str(problem["input"]), values)]) or _reset(model, path)
    return RecipeError(what, message[0].lower() + message[1:], fix)


def _settings_of(error: ValueError, dotted: str) -> list[str]:
    """Return the settings with which an error says that it can be mended, by their whole paths."""
    settings = error.settings if isinstance(error, SettingError) else ()
    return [f"{dotted}{one}".lstrip(".") if one.startswith(".") else one for one in settings]


def _reset(model: type[BaseModel], path: Sequence[str]) -> str:
    """Return the fix that sets a field, else the innermost group that can be, to its default; empty without one."""
    for end in range(len(path), 0, -1):
        _, field = _field_at(model, path[:end])
        default = field.default if field is not None else ...
        if not path[end - 1].isdigit() and (default is None or isinstance(default, int | float | str | tuple)):
            return typed([f"{'.'.join(path[:end])}={written(default)}"])
    return ""


def _explain_unknown(
    model: type[BaseModel], path: Sequence[str], known: Sequence[str], unknown: Sequence[ErrorDetails]
) -> RecipeError:
    """Explain an unknown key: by its meaning, else by its spelling, else by its place."""
    near = close_words(path[-1], known)
    term = find_term(path[-1])
    # the same but for case and separators, or for a letter where the word elsewhere is no setting: groups and group
    is_sure = any(plain(path[-1]) == plain(one) for one in near) or f"{path[-1]}s" in near
    if not (near and (is_sure or term is None)) and (suggested := _suggest(model, unknown)) is not None:
        return suggested
    value = unknown[0]["input"]
    # whatever it is, somebody may have called it password
    what = redacted(f"{'.'.join(path)} = {value!r}: unknown key")
    if not near:
        return RecipeError(what, nearest(path[-1], known), "leave it out; docs/recipes.md lists every field")
    dotted = ".".join([*path[:-1], *near])
    settings = [redacted(f"{dotted}{inner}={written(leaf)}") for inner, leaf in leaves(value)]
    in_a_list = any(part.isdigit() for part in path)  # whose members --set cannot name
    return RecipeError(what, nearest(path[-1], known), dotted if in_a_list else typed(settings))


def _explain_kind(problem: ErrorDetails, dotted: str, part: type[BaseModel] | None) -> tuple[str, str] | None:
    """Return reason and fix of a value of the wrong kind; None where more than the kind is wrong."""
    value = written(problem["input"])
    match problem["type"]:
        case "model_type" | "model_attributes_type" if part is not None:
            keys = [*part.model_fields]
            example = f"{dotted}.{'source' if 'source' in keys else keys[0]}={value}"
            return f"it is a group of settings: {', '.join(keys)}", f"for example {typed([example])}"
        case "tuple_type":
            return "it is a list", typed([f"{dotted}=[{value}]"])
        case "string_type":
            return "it is a text", typed([f'{dotted}="{value}"'])
    return None


def _suggest(model: type[BaseModel], unknown: Sequence[ErrorDetails]) -> RecipeError | None:
    """Return the error for keys that are known elsewhere, or in another part."""
    paths: dict[str, list[str]] = {}
    for path in setting_paths(model):
        paths.setdefault(path.rpartition(".")[2], []).append(path)
    keys = [(".".join(_written_path(model, [*map(str, one["loc"])])[0]), one["input"]) for one in unknown]
    return suggest_keys(keys, paths)


def setting_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every setting by its dotted path; those of groups in a list have none."""
    for name, field in model.model_fields.items():
        part = None if get_origin(field.annotation) is tuple else _part_of(field.annotation)
        if part is None:
            yield f"{prefix}{name}"
        else:
            yield from setting_paths(part, f"{prefix}{name}.")


def _awaited(problem: ErrorDetails) -> str:
    """What should stand there, such as ``'auto'``, ``true or false`` or ``greater than 0``."""
    if problem["type"].startswith("bool"):
        return "true or false"
    return problem["msg"].removeprefix(AWAITED).partition(", unable to")[0]


def _field_at(model: type[BaseModel], path: Iterable[str]) -> tuple[type[BaseModel] | None, FieldInfo | None]:
    """The part and the field at a path; list indices in it are passed over."""
    part: type[BaseModel] | None = model
    field: FieldInfo | None = None
    for key in path:
        if part is not None and key in part.model_fields:
            field = part.model_fields[key]
            part = _part_of(field.annotation)
    return part, field


def _written_path(model: type[BaseModel], keys: list[str]) -> tuple[list[str], Iterable[str]]:
    path: list[str] = []
    known: Iterable[str] = model.model_fields
    current: type[BaseModel] | None = model
    for key in keys:
        if key.startswith("("):
            continue  # a member of a union that tells its members apart by itself
        if current is not None and (key in current.model_fields or key == keys[-1]):
            known = current.model_fields
            path.append(key)
            field = current.model_fields.get(key)
            current = _part_of(field.annotation) if field else None
        elif key.isdigit():
            path.append(key)
    return path, known


def _part_of(annotation: Any) -> type[BaseModel] | None:
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        candidate = getattr(candidate, "__origin__", candidate)  # of what is annotated with more than its type
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
