"""What ``paceline predict`` is typed or piped instead of a file, and how the answer is printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.errors import UserError

STDIN = "-"
"""A source that is read from standard input, a text a line."""

MOST_LABELS = 5
"""That are printed of a row, the most probable first; a file has all."""


class Typed(NamedTuple):
    """Rows that no file holds, and the settings that they are read with."""

    rows: object
    settings: list[str]


def typed(
    data: str | None, texts: Sequence[str], pairs: Sequence[str], settings: Sequence[str], lines: Iterable[str]
) -> Typed | None:
    """The rows of ``--text`` and ``--pair``, or of standard input; None where ``data`` is a source of its own.

    Raises:
        UserError: nothing to label, two sources at once, or not as many second texts as first ones.
    """
    if not texts and not pairs and data != STDIN:
        if data is None:
            fix = '--text "...", or a file: paceline predict RUN new.csv -o out.csv; - reads lines from standard input'
            raise UserError("nothing to label", "there is neither a text nor a file", fix)
        return None
    if data is not None and (texts or pairs):
        raise UserError(f"{data} with --text", "they are two sources of rows", "leave one of them out")
    if named := [each for each in settings if each.partition("=")[0].strip() in ("data.text", "data.pair")]:
        raise UserError(f"--set {named[0]}: has no effect", "what is typed has no columns", "leave it out")
    if pairs and len(pairs) != len(texts):
        why = f"--text is there {len(texts)} times and --pair {len(pairs)} times"
        raise UserError("--pair: the second text of each --text", why, '--text "..." --pair "...", as often as needed')
    if pairs:
        both = [{"text": text, "pair": pair} for text, pair in zip(texts, pairs, strict=True)]
        return Typed(both, [*settings, "data.text=text", "data.pair=pair"])
    alone = texts or (line.rstrip("\r\n") for line in lines)
    return Typed(({"text": text} for text in alone), [*settings, "data.text=text"])


def shown(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line a row: the prediction, the probabilities and the text, with tabs between."""
    from paceline.observe.formats import printable

    prefix = "probability of "
    for row in rows:
        scores = sorted(
            ((row[name], name.removeprefix(prefix)) for name in row if name.startswith(prefix)), reverse=True
        )
        told = [f"{name} {score:.4f}" for score, name in scores[:MOST_LABELS]] + ["..."] * (len(scores) > MOST_LABELS)
        texts = [row[name] for name in ("text", "pair") if name in row]
        cells = [_label(row["prediction"]), *([", ".join(told)] if told else []), *texts]
        yield "\t".join(map(printable, cells))


def _label(found: object) -> str:
    if isinstance(found, list):
        return ", ".join(found) or "(none)"
    return f"{found:.6g}" if isinstance(found, float) else str(found)
