"""Options that several commands have, in groups: a command takes a group as one argument, typer sees each option."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo

from paceline.contract.errors import UserError
from paceline.verbs.short import BatchSize, Epochs, MaxLength, Rate, Seed, all_settings

if TYPE_CHECKING:
    from paceline.recipe.trust import Trust

RecipeFile = Annotated[
    Path | None, typer.Argument(metavar="RECIPE", help="Recipe (YAML), also a run's own.", show_default=False)
]
Out = Annotated[Path | None, typer.Option(help="Run folder [default: runs/<name>-<time>].")]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; repeatable.")]
Views = Annotated[
    str | None,
    typer.Option("--tta", metavar="NAMES", help="Average views of a sample: flip,crop5,scales; of texts, windows."),
]
Trained = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Run folder, or a trained model: folder or OWNER/NAME.", show_default=False),
]


def with_views(settings: Sequence[str] | None, tta: str | None) -> Sequence[str]:
    """The changes of settings, and ``--tta`` as one of them.

    Raises:
        RecipeError: it is set twice.
    """
    changes = settings or ()
    if tta is None:
        return changes
    from paceline.contract.errors import RecipeError

    if any(change.partition("=")[0].strip() == "techniques.tta" for change in changes):
        raise RecipeError(f"--tta {tta}: techniques.tta is set twice", "--set names it too", "leave one of them out")
    return [*changes, f"techniques.tta=[{tta}]"]


class SingleOptions(TyperCommand):
    """A command that refuses an option with two values, of which only the last would count."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words that were typed.

        Raises:
            UserError: an option that takes one value has several.
        """
        for option in self.params:
            names = getattr(option, "opts", [])
            if getattr(option, "is_flag", True) or option.multiple or not names[0].startswith("-"):
                continue
            values = dict.fromkeys(_values_of(names, args))
            if len(values) > 1:
                name = max(names, key=len)
                shown = " and ".join(f"{name} {shlex.quote(value)}" for value in values)
                raise UserError(f"{shown}: given twice", "the last one would win, and the first be lost", _ONE[name])
        return super().parse_args(ctx, args)


_ONE = defaultdict(
    lambda: "leave one of them out",
    {
        "--data": "leave one of them out; a folder with both files is read as one set of data, and --set"
        " data.validation=FILE names a file for validation"
    },
)


def _values_of(names: Sequence[str], args: Sequence[str]) -> Iterator[str]:
    """Values that an option has among the words of a command line."""
    for at, word in enumerate(args):
        if word == "--":
            return
        name, equals, value = word.partition("=")
        if name in names and equals:
            yield value
        elif word in names and at + 1 < len(args):
            yield args[at + 1]


@dataclass(frozen=True, kw_only=True)
class Options:
    """A group: each field is an option, ``Annotated`` as typer takes it, with a default."""

    def given(self) -> dict[str, object]:
        """What was set, by the names that are typed."""
        return {
            _typed_name(parameter): value
            for parameter in _parameters(type(self))
            if (value := getattr(self, parameter.name)) != parameter.default
        }

    def words(self) -> list[str]:
        """What was set, as it is typed; not for switches, which have no value."""
        return [
            word
            for name, value in self.given().items()
            for each in (value if isinstance(value, list) else [value])
            for word in (name, str(each))
        ]


@dataclass(frozen=True, kw_only=True)
class Source(Options):
    """What a run begins with, in place of a recipe's or without one."""

    model: Annotated[str | None, typer.Option(help="Hub name or folder of a pretrained model.")] = None
    data: Annotated[str | None, typer.Option(help="File or folder, hub:NAME or builtin:NAME.")] = None


@dataclass(frozen=True, kw_only=True)
class Changes(Options):
    """Changes of a recipe's settings."""

    settings: Settings = None
    epochs: Epochs = None
    lr: Rate = None
    batch_size: BatchSize = None
    max_length: MaxLength = None
    seed: Seed = None

    def in_full(self) -> list[str]:
        """All of them as ``--set`` takes them; what is called otherwise elsewhere as it is here, with a notice.

        Raises:
            RecipeError: one is set twice.
        """
        from paceline.machine.cluster import LAUNCHER, rank_in
        from paceline.recipe.suggestions import translate_settings
        from paceline.verbs.notices import tell

        settings, notices = translate_settings(all_settings(**vars(self)))
        # ranks that a launcher started repeat what it was given, and it has told already
        if LAUNCHER not in os.environ and rank_in(os.environ) == 0:
            for notice in notices:
                tell(notice)
        return settings


@dataclass(frozen=True, kw_only=True)
class Trusting(Options):
    """What may run that is not paceline's."""

    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that came with the model.")
    ] = False
    trust_references: Annotated[
        bool, typer.Option("--trust-references", help="Run functions that a run folder's recipe names.")
    ] = False

    def trust(self) -> Trust:
        """The same as recipes take it."""
        from paceline.recipe.trust import Trust

        return Trust(remote_code=self.trust_remote_code, references=self.trust_references)


def unfolded(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it: the options of a group where the command has the group.

    ``Annotated[Group, "text"]`` gives each option of the group this text for its help.
    """
    groups: dict[str, type[Options]] = {}
    taken: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        group, *helps = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if isinstance(group, type) and issubclass(group, Options):
            groups[name] = group
            taken += _with_help(_parameters(group), helps)
        else:
            taken.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def _parameters(group: type[Options]) -> tuple[inspect.Parameter, ...]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return tuple(
        inspect.Parameter(field.name, kind, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    )


def _with_help(parameters: Sequence[inspect.Parameter], helps: Sequence[str]) -> Iterator[inspect.Parameter]:
    for parameter in parameters:
        for text in helps:
            info = copy.copy(_option(parameter))
            info.help = text
            parameter = parameter.replace(annotation=Annotated[get_args(parameter.annotation)[0], info])
        yield parameter


def _option(parameter: inspect.Parameter) -> OptionInfo:
    return next(each for each in get_args(parameter.annotation)[1:] if isinstance(each, OptionInfo))


def _typed_name(parameter: inspect.Parameter) -> str:
    """``--max-length``: in an annotation an option's own name stands where a default would."""
    name = _option(parameter).default
    return name if isinstance(name, str) else f"--{parameter.name.replace('_', '-')}"
