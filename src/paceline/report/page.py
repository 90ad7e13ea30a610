"""Templates of this room, made into pages that are inert whatever is in the data."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.contract.errors import UserError
from paceline.contract.files import write_atomically
from paceline.observe.formats import duration, figure, moment, printable, share, size

if TYPE_CHECKING:
    from jinja2 import Environment


def page_of(template: str, content: Mapping[str, Any]) -> str:
    """The template with this content: one HTML file that stands alone.

    Styles and charts are inline, there is no script, and a content security policy forbids requests.
    """
    return _environment().get_template(template).render(content)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined  # of no use before a run's end

    environment = Environment(
        loader=PackageLoader("paceline.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # control characters and direction overrides from data are shown, not obeyed
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters |= {"duration": duration, "moment": moment, "size": size, "figure": figure, "share": share}
    return environment


def write_found(folder: Path, name: str, plain: Mapping[str, Any], page: str) -> None:
    """What a command has found, as JSON in the file ``name``, and its report.html; earlier ones are replaced.

    Raises:
        DiskFullError: no room.
        UserError: the folder cannot be written to.
    """
    try:
        write_atomically(folder / name, (json.dumps(plain, indent=2) + "\n").encode())
        write_atomically(folder / "report.html", page.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UserError(f"--out {folder}: cannot be written to", str(error), "name another folder") from error


def styles() -> str:
    """The style sheet's colours and shapes in light, for a picture that stands alone."""
    text = files("paceline.report").joinpath("report.css").read_text(encoding="utf-8")
    dark = text.index("@media (prefers-color-scheme: dark)")
    rules = text[:dark] + text[text.index("* { box-sizing") : text.index("@media (max-width")]
    kept = (":root", "svg", ".grid", ".line", "rect", "circle", "path", ".p")
    return "".join(rule for rule in re.findall(r"[^{}]+\{[^{}]*\}", rules) if rule.strip().startswith(kept))


def standalone(figure: str) -> str:
    """Return the picture within a ``<figure>`` as a file has it: with the style sheet's colours on white."""
    found = re.search(r"<svg .*</svg>", figure, re.DOTALL)
    assert found is not None
    picture = found[0].replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    head, _, rest = picture.partition(">")
    own = "svg { background: #fff; font-family: sans-serif; }"
    return f"{head}><style>{styles()}{own}</style>{rest}\n"
