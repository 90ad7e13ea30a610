"""Fixes of errors as Python has them: ``--set data.label=stars`` becomes ``settings=["data.label=stars"]``.

Errors are raised with the fix that the command line takes. It is written again in one place, where an error leaves a
function of the package that a program called.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator

from paceline.contract.errors import UserError

_WORD = r"(?:'[^']*'|\"[^\"]*\"|[^\s'\";)]|;(?=\S))+"
_OPTION = (
    rf"--set[ =](?=\S+=){_WORD}|--(?:data|out|model|gpus|processes)[ =]{_WORD}|--trust-(?:references|remote-code)\b"
)
_COMMAND = r"`?\b(?:paceline|torchrun|srun) (?:[a-z]+|-)\b[^;,\n]*"
_OPTIONS = re.compile(rf"(?P<command>{_COMMAND})|(?P<options>(?:{_OPTION})(?: (?:{_OPTION}))*)")
"""A command, which stays as it is, or options that stand side by side."""

_is_command_line = False


@contextlib.contextmanager
def command_line() -> Iterator[None]:
    """Keep the fixes of errors as the command line takes them, while one of its commands runs."""
    global _is_command_line
    before, _is_command_line = _is_command_line, True
    try:
        yield
    finally:
        _is_command_line = before


@contextlib.contextmanager
def python_fixes() -> Iterator[None]:
    """Write the fix of a user's error that leaves the block as Python has it, unless a command is being run."""
    try:
        yield
    except UserError as error:
        if not _is_command_line:
            error.respell(in_python)
        raise


def in_python(text: str) -> str:
    """Return a fix with the command line's options as arguments of ``paceline.train`` and its neighbours.

    Whole commands stay, for they can be typed in any case.
    """
    return _OPTIONS.sub(lambda match: match["command"] or _arguments(match["options"]), text)


def _arguments(options: str) -> str:
    settings: list[str] = []
    others: list[str] = []
    rest = ""
    for name, word in re.findall(rf"--([a-z-]+)(?:[ =]({_WORD}))?", options):
        # a comma after a word is the sentence's; right after "=" it is the value
        rest = "," * (word.endswith(",") and not word.endswith("=,"))
        value = "".join(shlex.split(word.removesuffix(rest))) if word else ""
        if name == "set":
            settings.append(value)
        elif name == "model":
            settings.append(f"model.source={value}")
        elif name.startswith("trust"):
            others.append(f"{name.replace('-', '_')}=True")
        else:
            is_number = name in ("gpus", "processes") and value.isdecimal()
            others.append(f"{name}={value if is_number else json.dumps(value, ensure_ascii=False)}")
    listed = [f"settings={json.dumps(settings, ensure_ascii=False)}"] if settings else []
    return ", ".join(others + listed) + rest
