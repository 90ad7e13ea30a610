"""The recipe: a whole run as frozen data, in and out of YAML."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from paceline.contract.errors import RecipeError, excerpt
from paceline.contract.redaction import without_credentials
from paceline.recipe.bounds import BoundedLoader, require_bounded
from paceline.recipe.explain import explain_problem, setting_paths
from paceline.recipe.parts import (
    EXECUTION,
    DataPart,
    LoopPart,
    ModelPart,
    ObservePart,
    OptimizerPart,
    ParallelPart,
    Part,
    SchedulePart,
    TaskPart,
    TechniquesPart,
    TracePart,
)


def _all_auto(value: object) -> object:
    return {} if value == "auto" else value


class Recipe(Part):
    """One fine-tuning run.

    Raises:
        RecipeError: from ``parse``, ``load`` and ``with_settings``, when a key is unknown or a value impossible.
    """

    name: str = Field(
        "run",
        pattern=r"^[A-Za-z0-9][\w.-]*$",
        description="what the run folder is named after: letters, digits, _ . -",
    )
    model: ModelPart
    data: DataPart = DataPart()
    task: TaskPart = TaskPart()
    optimizer: OptimizerPart = OptimizerPart()
    schedule: SchedulePart = SchedulePart()
    techniques: Annotated[
        TechniquesPart, BeforeValidator(_all_auto, json_schema_input_type=TechniquesPart | Literal["auto"])
    ] = Field(TechniquesPart(), description="One setting a technique; auto: each as it is by default.")
    parallel: ParallelPart = ParallelPart()
    loop: LoopPart = LoopPart()
    observe: ObservePart = ObservePart()
    trace: TracePart = TracePart()
    seed: int = Field(0, ge=0, lt=2**32, description="Of new weights, order and dropout.")
    deterministic: bool = Field(False, description="Two runs on one machine give the same bits; may be slower.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", json_schema_extra=EXECUTION, description="auto: a GPU if one can be used."
    )

    @property
    def saves(self) -> Literal["weights", "ema", "best"]:
        """What the saved model is made of: the trained weights, their average, or whichever scores better."""
        if self.loop.save != "auto":
            return self.loop.save
        return "weights" if self.optimizer.ema is None else "ema"

    @classmethod
    def parse(cls, settings: Mapping[str, Any]) -> Self:
        """A recipe from nested plain data, as YAML gives it."""
        require_bounded(settings)
        try:
            recipe = cls.model_validate(_without_gone(settings))
        except ValidationError as error:
            raise explain_problem(cls, error) from None
        _refuse_credentials(recipe)
        return recipe

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


_GONE = {"techniques.cudnn_benchmark": False, "model.whitening": False, "data.augment.alternating_flip": False}
"""Settings of earlier releases, and the value that runs wrote out where they were off."""


def _without_gone(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings without those that are gone and were off."""
    kept = _copy(settings)
    for path, off in _GONE.items():
        *parents, last = path.split(".")
        node: Any = kept
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict) and node.get(last, not off) is off:
            del node[last]
    return kept


def _refuse_credentials(recipe: Recipe) -> None:
    """A run writes its recipe into its folder, its checkpoints and its report, and needs it whole to go on."""
    for path, value in flatten(recipe.plain()):
        shown = without_credentials(str(value))
        if shown != str(value):
            raise RecipeError(
                f"{path} = {shown}: holds a secret",
                "a run keeps its recipe, where others may read it",
                "give tokens in the environment (HF_TOKEN), and download what is behind a password first",
            )


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; only plain data, no tags are honoured.

    Raises:
        RecipeError: the file is missing, is not YAML, or holds no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such recipe", fix="a recipe file that is there, or --model and --data") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: cannot be read", why=str(error)) from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> dict[str, Any]:
    """The mapping in YAML text; ``name`` is for the message.

    Raises:
        RecipeError: it is not YAML, or holds no mapping.
    """
    try:
        found = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        problem, note = getattr(error, "problem", None) or str(error), getattr(error, "note", None)
        raise _not_plain_yaml(f"{name}{place}", problem, note) from None
    if found is None:
        raise RecipeError(f"{name}: the recipe is empty", "it names neither model nor data", _EXAMPLE)
    if not isinstance(found, dict):
        raise RecipeError(f"{name}: a recipe is a mapping", f"found {excerpt(str(found))}", _EXAMPLE)
    return found


_EXAMPLE = "write model: {source: NAME} and data: {source: FILE}; or paceline train --model NAME --data FILE"


def _not_plain_yaml(place: str, problem: str, fix: str | None) -> RecipeError:
    tag = re.search(r"for the tag '(.*)'", problem)
    if tag:
        what = tag[1].replace("tag:yaml.org,2002:", "!!")
        return RecipeError(
            f"{place}: the tag {what} is not read", "a recipe is plain data; nothing in it is run", "remove the tag"
        )
    if fix is None:
        fix = "indent with blanks" if "\\t" in problem else "write `key: value`, brackets and quotes in pairs"
    return RecipeError(f"{place}: not YAML", problem, fix)


def merge(settings: Mapping[str, Any], changes: Iterable[str]) -> dict[str, Any]:
    """``settings`` with each dotted ``a.b=value`` put in; values are read as YAML."""
    merged = _copy(settings)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key.strip():
            raise RecipeError(f"--set {excerpt(change)}", "a setting is written key=value", "--set optimizer.lr=3e-5")
        value = _read_value(key.strip(), text)
        *parents, last = key.strip().split(".")
        node = merged
        for parent in parents:
            child = node.get(parent)
            node[parent] = node = child if isinstance(child, dict) else {}
        node[last] = value
    return merged


def _read_value(key: str, text: str) -> Any:
    """Read the value that ``text`` spells for the setting ``key``: YAML, or punctuation as it is typed."""
    is_quoted = len(text) > 1 and text[0] in "'\"" and text[0] == text[-1]
    if _is_marked(key, "as_typed") and not is_quoted:
        return None if text == "null" else text
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        return text


def is_execution(path: str) -> bool:
    """Whether the field at a dotted ``path`` only changes how a run is carried out."""
    return _is_marked(path, "execution")


def _is_marked(path: str, mark: str) -> bool:
    """Whether the field at a dotted ``path``, or a group that it is in, has ``mark`` in its JSON schema."""
    model: type[BaseModel] = Recipe
    for key in path.split("."):
        field = model.model_fields.get(key)
        if field is None:
            return False
        extra = field.json_schema_extra
        if isinstance(extra, dict) and extra.get(mark):
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


class _Loader(BoundedLoader):
    """Loader that reads 3e-5, 10:20, off and no as YAML 1.2 does.

    It refuses a key given twice, and punctuation without quotes that would be a comment or null.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is no key", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} given twice", key_node.start_mark)
            seen.add(key)
            if key in _punctuation_fields() and value_node.tag == _NULL and value_node.value in ("", "~"):
                problem = f"{key} has no value: # begins a comment here, and ~ is null"
                note = f'write the character in quotes, {key}: "#"; or {key}: null'
                raise yaml.constructor.ConstructorError(None, None, problem, value_node.start_mark, note)
        return super().construct_mapping(node, deep)


# YAML 1.1 also reads on, off, yes and no as booleans: `console: off` and `label: no` would not be what they say;
# and 10:20 as ten minutes and twenty seconds
_BOOLEAN, _INTEGER, _NULL = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:int", "tag:yaml.org,2002:null"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_BOOLEAN, _INTEGER)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_BOOLEAN, re.compile(r"^(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(
    _INTEGER, re.compile(r"^[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|0|[1-9][\d_]*)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*)(\.\d*)?[eE][-+]?\d+$"),
    list("-+0123456789"),
)


def _copy(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) if isinstance(value, Mapping) else value for key, value in settings.items()}


@functools.cache
def _punctuation_fields() -> frozenset[str]:
    """Names of the fields marked ``AS_TYPED``, without their groups."""
    return frozenset(path.rpartition(".")[2] for path in setting_paths(Recipe) if _is_marked(path, "as_typed"))
