"""The few settings that people type in full words: each option stands for one ``--set``."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Annotated

import typer

from paceline.contract.errors import RecipeError, UserError

SETTINGS = {
    "--epochs": "loop.epochs",
    "--lr": "optimizer.lr",
    "--batch-size": "loop.batch_size",
    "--max-length": "data.max_length",
    "--seed": "seed",
}
"""Option -> the setting that it stands for."""

# texts, as what --set takes: the recipe says what a value can be, in one place
Epochs = Annotated[str | None, typer.Option("--epochs", metavar="N", help="Passes over the data: loop.epochs.")]
Rate = Annotated[str | None, typer.Option("--lr", metavar="RATE", help="Largest learning rate: optimizer.lr.")]
BatchSize = Annotated[
    str | None,
    typer.Option("--batch-size", metavar="N", help="Samples an update, of all GPUs together: loop.batch_size."),
]
MaxLength = Annotated[
    str | None, typer.Option("--max-length", metavar="N", help="Tokens kept of a text: data.max_length.")
]
Seed = Annotated[str | None, typer.Option("--seed", metavar="N", help="Of new weights, order and dropout: seed.")]


def all_settings(
    settings: Sequence[str] | None,
    *,
    epochs: str | None,
    lr: str | None,
    batch_size: str | None,
    max_length: str | None,
    seed: str | None,
) -> list[str]:
    """What ``--set`` gave, followed by what these options stand for.

    Raises:
        RecipeError: an option, and ``--set`` of what it stands for.
    """
    given = dict(zip(SETTINGS, (epochs, lr, batch_size, max_length, seed), strict=True))
    asked = list(settings or ())
    named = {_key(setting): setting for setting in asked}
    for option, value in given.items():
        key = SETTINGS[option]
        if value is not None and key in named:
            why = f"{option} stands for --set {key}, so it is set twice"
            raise RecipeError(f"{option} {value} with --set {named[key]}", why, "leave one of them out")
    return [*asked, *(f"{SETTINGS[option]}={value}" for option, value in given.items() if value is not None)]


def without(arguments: Sequence[str], change: str) -> list[str]:
    """A command's arguments without what sets the same as ``change``, such as ``loop.batch_size=8``, by either name.

    So that the change can be added to them and nothing is said twice.
    """
    key = _key(change)
    kept, rest = [], iter(arguments)
    for word in rest:
        name, equals, value = word.partition("=")
        if name != "--set" and SETTINGS.get(name) != key:
            kept.append(word)
            continue
        words = [word] if equals else [word, *itertools.islice(rest, 1)]
        if name == "--set" and _key(value if equals else words[-1]) != key:
            kept += words
    return kept


def explain_option(option: str, verb: str, arguments: Sequence[str], known: Collection[str]) -> UserError | None:
    """Return the error for an option that is called otherwise here; None where nothing is known of it.

    Args:
        option: as it was typed, with its dashes and without a value.
        verb: the command.
        arguments: all that was typed after ``paceline``, for the option's value.
        known: options of the command.
    """
    from paceline.recipe.suggestions import suggest_option, typed

    name, what = option.lstrip("-"), f"{option}: no such option"
    if name == "model" and verb in ("evaluate", "predict"):
        why = "the model, or the run that trained it, is named without an option"
        data = "--data FILE" if verb == "evaluate" else "new.csv -o out.csv"
        return UserError(what, why, f"paceline {verb} NAME {data}")
    value = _value_of(option, arguments)
    suggestion = suggest_option(name, "VALUE" if value is None else value)
    if suggestion is None:
        if "." not in name or "--set" not in known:
            return None
        setting = f"{name}={'VALUE' if value is None else value}"
        return UserError(what, "a setting is set by its name", typed([setting]))
    ours = {setting: short for short, setting in SETTINGS.items() if short in known}
    words = []
    for setting in suggestion.settings:
        path, _, text = setting.partition("=")
        words.append(f"{ours[path]} {text}" if path in ours else typed([setting]))
    fix = " ".join(words) or suggestion.command
    if fix.startswith("--") and fix.partition(" ")[0] not in known:
        fix = ""  # true of another command
    return UserError(what, suggestion.in_full, fix or "leave it out")


def _value_of(option: str, arguments: Sequence[str]) -> str | None:
    """Return the value that stands behind an option or is joined to it; None where there is none."""
    for word, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        if name == option and equals:
            return value
        if name == option and following and not following.startswith("-"):
            return following
    return None


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()
