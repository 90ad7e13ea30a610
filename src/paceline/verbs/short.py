"""The few settings that people type in full words: each option stands for one ``--set``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated

import typer

from paceline.errors import RecipeError, UserError

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


def meant(option: str, verb: str) -> UserError | None:
    """The error for an option that is called otherwise here; None where nothing is known of it."""
    from paceline.recipe.meant import of_option

    name = option.lstrip("-")
    if name == "model" and verb in ("evaluate", "predict"):
        why = "the model, or the run that trained it, is named without an option"
        data = "--data FILE" if verb == "evaluate" else "new.csv -o out.csv"
        return UserError("--model: no such option", why, f"paceline {verb} NAME {data}")
    told = of_option(name)
    if told is None:
        if "." not in name:
            return None
        return UserError(f"{option}: no such option", "a setting is set by its name", f"--set {name}=VALUE")
    key = told.fix.removeprefix("--set ").removesuffix("=VALUE")
    ours = next((f"{short} VALUE" for short, setting in SETTINGS.items() if setting == key), told.fix)
    return UserError(f"{option}: no such option", told.in_full, ours or "leave it out")


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()
