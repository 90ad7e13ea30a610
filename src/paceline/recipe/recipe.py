"""The recipe: a whole run as frozen data, in and out of YAML."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationError

from paceline.errors import RecipeError, excerpt, nearest
from paceline.recipe.parts import (
    EXECUTION,
    DataPart,
    LoopPart,
    ModelPart,
    ObservePart,
    OptimizerPart,
    Part,
    SchedulePart,
    TaskPart,
    TechniquesPart,
)


class Recipe(Part):
    """One fine-tuning run.

    Raises:
        RecipeError: from ``parse``, ``load`` and ``with_settings``, when a key is unknown or a value impossible.
    """

    name: str = Field("run", pattern=r"^[A-Za-z0-9][\w.-]*$", description="Used for the run folder.")
    model: ModelPart
    data: DataPart = DataPart()
    task: TaskPart = TaskPart()
    optimizer: OptimizerPart = OptimizerPart()
    schedule: SchedulePart = SchedulePart()
    techniques: TechniquesPart = TechniquesPart()
    loop: LoopPart = LoopPart()
    observe: ObservePart = ObservePart()
    seed: int = Field(0, ge=0, lt=2**32)
    deterministic: bool = Field(False, description="Two runs on one machine give the same bits; may be slower.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", json_schema_extra=EXECUTION)

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """A recipe from nested plain data, as YAML gives it."""
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            raise _teach(cls, error) from None

    @classmethod
    def load(cls, path: str | Path, settings: Iterable[str] = ()) -> Self:
        """A recipe from a YAML file, changed by ``settings`` such as ``optimizer.lr=3e-5``."""
        return cls.parse(merge(read_yaml(path), settings))

    def with_settings(self, settings: Iterable[str]) -> Self:
        """A copy changed by dotted settings, ``("optimizer.lr=3e-5", ...)``."""
        return self.parse(merge(self.plain(), settings))

    def plain(self) -> dict[str, Any]:
        """Nested plain data that ``parse`` takes back; only what was set differs from the defaults."""
        return self.model_dump(mode="json", exclude_unset=True)

    def resolved(self) -> dict[str, Any]:
        """Nested plain data with every default written out."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The resolved recipe as YAML that runs again as it is."""
        return yaml.safe_dump(self.resolved(), sort_keys=False, allow_unicode=True, width=110)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; only plain data, no tags are honoured.

    Raises:
        RecipeError: the file is missing, is not YAML, or holds no mapping.
    """
    path = Path(path)
    try:
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe", fix="paceline train RECIPE.yaml, or --model and --data") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read", why=str(error)) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise RecipeError(f"{path}{place}: not YAML", why=getattr(error, "problem", None) or str(error)) from None
    if not isinstance(found, dict):
        raise RecipeError(f"{path}: a recipe is a mapping", why=f"found {type(found).__name__}")
    return found


def merge(settings: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """``settings`` with each dotted ``a.b=value`` put in; values are read as YAML."""
    merged = _copy(settings)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"--set {excerpt(change)}", "a setting is written key=value", "--set optimizer.lr=3e-5")
        try:
            value = yaml.load(text, Loader=_Loader)
        except yaml.YAMLError:
            value = text
        *parents, last = key.strip().split(".")
        node = merged
        for parent in parents:
            child = node.get(parent)
            node[parent] = node = child if isinstance(child, dict) else {}
        node[last] = value
    return merged


def is_execution(path: str) -> bool:
    """Whether the field at a dotted ``path`` only changes how a run is carried out."""
    model: type[BaseModel] = Recipe
    for key in path.split("."):
        field = model.model_fields.get(key)
        if field is None:
            return False
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get("execution"):
            return True
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    return False


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested plain data with its dotted path."""
    for key, value in settings.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and path != "model.config":
            yield from flatten(value, f"{path}.")
        else:
            yield path, value


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 3e-5 as a number, as YAML 1.2 does, and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _copy(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in settings.items()}


def _teach(model: type[BaseModel], error: ValidationError) -> RecipeError:
    """The first problem of a pydantic error in our three parts."""
    problem = error.errors(include_url=False)[0]
    # pydantic names the member of a union in the location; only what the user wrote is of use
    keys = [str(part) for part in problem["loc"]]
    path, known = _written_path(model, keys)
    dotted = ".".join(path)
    if problem["type"] == "extra_forbidden":
        close = difflib.get_close_matches(path[-1], list(known), n=1, cutoff=0.5)
        fix = f"{'.'.join([*path[:-1], close[0]])}" if close else ""
        return RecipeError(f"{dotted} = {problem['input']!r}: unknown key", nearest(path[-1], known), fix)
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return RecipeError(f"{dotted}: missing", fix=f"set {dotted}, for example with --set {dotted}=VALUE")
    if problem["type"] == "value_error":
        return RecipeError(f"{dotted}: {message}" if dotted else message)
    return RecipeError(f"{dotted} = {excerpt(str(problem['input']))}", message[0].lower() + message[1:])


def _written_path(model: type[BaseModel], keys: list[str]) -> tuple[list[str], Iterable[str]]:
    path: list[str] = []
    known: Iterable[str] = model.model_fields
    current: type[BaseModel] | None = model
    for key in keys:
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
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None
