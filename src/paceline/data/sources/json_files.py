"""JSON: one object a line, or a file that is one array of objects."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.contract.errors import DataError
from paceline.data.bad_rows import BadRows, cell_text
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


def read_json(path: Path, name: str, bad: BadRows, encoding: str = "auto") -> Source:
    """Rows of a file that is an array of objects, or an object with one such array; a row's line is its number, from 1.

    Beside that array an object may hold single values, such as a version. The file is held in memory as a whole.

    Raises:
        DataError: no JSON, another structure; bytes that do not decode. Elements that are no object go to ``bad``.
    """
    lines = Lines(path, name, encoding)
    whole = lines.whole()
    if not whole.strip():
        raise DataError("the file is empty", file=name, fix=_EXAMPLE)
    try:
        value = json.loads(whole, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _no_array(error, whole, name) from None
    return Source(name=name, rows=_elements(_array(value, name), name, bad), notices=lines.notices)


_EXAMPLE = 'write an array: [{"text": "...", "label": "..."}, ...], or one object a line into a .jsonl file'


def _array(value: Any, name: str) -> list[Any]:
    if isinstance(value, list):
        if value:
            return value
        raise DataError("the file is empty", file=name, why="it holds an array without elements", fix=_EXAMPLE)
    if isinstance(value, dict):
        compound = {key: held for key, held in value.items() if isinstance(held, list | dict)}
        rows = next(iter(compound.values())) if len(compound) == 1 else None
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            return rows
        arrays = [key for key, held in compound.items() if isinstance(held, list) and held and type(held[0]) is dict]
        found = ", ".join(f"{key!r}: {_kind(held)}" for key, held in list(value.items())[:10]) or "nothing"
        fix = (
            f"jq -c '.[\"{arrays[0]}\"][]' {shlex.quote(name)} > {arrays[0]}.jsonl takes one of them"
            if arrays
            else _EXAMPLE
        )
        raise DataError(
            "an object where an array of rows is needed",
            file=name,
            why=f"it holds {found}; read is an array of objects, or an object with one such array",
            fix=fix,
        )
    raise DataError(f"found {_kind(value)} where an array of rows is needed", file=name, fix=_EXAMPLE)


def _kind(value: object) -> str:
    if isinstance(value, list):
        of = f" of {_plural(value[0])}" if value else ""
        return f"an array{of} ({len(value):,})"
    return "an object" if isinstance(value, dict) else f"a {KINDS.get(type(value), 'value')}"


def _plural(value: object) -> str:
    kind = {**KINDS, dict: "object", list: "array"}.get(type(value), "value")
    return f"{kind}s"


def _elements(array: list[Any], name: str, bad: BadRows) -> Iterator[Row]:
    for number, values in enumerate(array, start=1):
        if type(values) is dict:
            yield Row(name, number, values)
            continue
        error = DataError(
            "the element is no object",
            file=name,
            line=number,
            found=json.dumps(values, ensure_ascii=False),
            why=f"found {_kind(values)}; the number is that of the element",
            fix='write {"text": "...", "label": "..."}',
        )
        bad.report(error, cell_text(values))


def _no_array(error: ValueError | RecursionError, text: str, name: str) -> DataError:
    if isinstance(error, KeyTwiceError):
        return DataError(
            "a key is given twice in one object",
            file=name,
            column=str(error),
            why="only one of the values could be kept",
            fix="name each key once",
        )
    if not isinstance(error, json.JSONDecodeError):
        return DataError("the file is not JSON", file=name, why=too_large(error), fix=_EXAMPLE)
    if error.msg == "Extra data" and text.lstrip().startswith("{"):
        lines = re.sub(r"\.json(\.gz)?$", r".jsonl\1", name, flags=re.IGNORECASE)
        return DataError(
            "several JSON values, one after the other",
            file=name,
            line=error.lineno,
            why="it seems to be JSON lines, one object a line",
            fix=f"rename it: mv {name} {lines}" if error.lineno == 2 else f"jq -c . {name} > rows.jsonl",
        )
    return DataError(
        "the file is not JSON",
        file=name,
        line=error.lineno,
        found=text[max(0, error.pos - 20) : error.pos + 20],
        why=f"{error.msg} at character {error.colno:,} of the line",
        fix="copy or download it again, if it is cut off; else correct it there",
    )
