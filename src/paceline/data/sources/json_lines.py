"""JSON lines: one object a line, as a stream of rows."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.contract.errors import DataError
from paceline.data.bad_rows import BadRows
from paceline.data.sources.lines import Lines, filtered
from paceline.data.sources.rows import Row, Source


def read_json_lines(path: Path, name: str, bad: BadRows, encoding: str = "auto") -> Source:
    """Rows of a file with one JSON object a line; blank lines are skipped, each row names its own columns.

    Lines that are no JSON or no object, that name a key twice, and bad encoding go to ``bad``.
    """
    lines = Lines(path, name, encoding)
    return Source(name=name, rows=_rows(lines, bad), notices=lines.notices)


def _rows(lines: Lines, bad: BadRows) -> Iterator[Row]:
    decode = json.JSONDecoder(object_pairs_hook=unique).decode
    with lines:
        for line in lines:
            problem = lines.take_problem()
            if problem is None and (not line or line.isspace()):
                continue
            if problem is None:
                try:
                    values = decode(line)
                    if type(values) is dict:
                        yield Row(lines.name, lines.number, values)
                        continue
                    problem = _no_object(values, lines, line)
                except (ValueError, RecursionError) as error:
                    problem = _no_json(error, lines, line)
            bad.report(problem, line)


class KeyTwiceError(ValueError):
    """An object names a key twice; the standard reader would keep the last and lose the first."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        raise KeyTwiceError(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return values


def _no_object(values: object, lines: Lines, line: str) -> DataError:
    whole_file = isinstance(values, list) and lines.number == 1
    return DataError(
        "the line is no JSON object",
        file=lines.name,
        line=lines.number,
        found=line.strip(),
        why="the file is one JSON array" if whole_file else f"found a {KINDS.get(type(values), 'value')}",
        fix=f"jq -c '.[]' {shlex.quote(lines.name)} > rows.jsonl"
        if whole_file
        else 'write {"text": "...", "label": "..."}',
    )


KINDS: dict[type, str] = {
    list: "list",
    str: "string",
    int: "number",
    float: "number",
    bool: "boolean",
    type(None): "null",
}


def too_large(error: ValueError | RecursionError) -> str:
    """Return why Python reads no value that JSON allows."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return f"an integer of over {sys.get_int_max_str_digits():,} digits"


_LINE_ENDS = r"tr '\r' '\n'"
_FINAL_COMMA = "sed 's/,[[:space:]]*$//'"


def _no_json(error: ValueError | RecursionError, lines: Lines, line: str) -> DataError:
    if isinstance(error, KeyTwiceError):
        return DataError(
            "a key is given twice",
            file=lines.name,
            line=lines.number,
            column=str(error),
            found=line.strip(),
            why="only one of the values could be kept",
            fix="name each key once",
        )
    why, fix = too_large(error), "write one whole JSON object a line"
    if isinstance(error, json.JSONDecodeError):
        why = f"{error.msg.removesuffix(' at')} at character {error.colno:,}"
        if error.pos >= len(line.rstrip()) or error.msg.startswith("Unterminated string"):
            why += "; the line is cut off"
            if not line.endswith("\n"):
                fix = "the file ends here: copy or download it again, or remove this line"
        name = shlex.quote(lines.name)
        if lines.number == 1 and line.lstrip().startswith("["):
            fix = f"the file seems to be one JSON array: jq -c '.[]' {name} > rows.jsonl"
        elif line.strip() in ("{", "}") or (lines.number > 1 and line.startswith((" ", "\t"))):
            fix = f"the file seems to have objects over several lines: jq -c . {name} > rows.jsonl"
        elif error.msg == "Extra data" and line[error.pos :].strip() == ",":
            fix = f"remove the comma at the end of each line: {filtered(lines.name, _FINAL_COMMA)}"
        elif "\r" in line.strip():
            fix = f"lines end in LF or CRLF: {filtered(lines.name, _LINE_ENDS)}"
    return DataError(
        "the line is not JSON", file=lines.name, line=lines.number, found=line.rstrip("\r\n"), why=why, fix=fix
    )
