"""What ``paceline predict`` is typed or piped instead of a file, and how the answer is printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.errors import DataError, UserError, excerpt

STDIN = "-"
"""A source, or a text, that is read from standard input: a text a line, or two with a tab between."""

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

    ``-``, as the source or as the text, reads a text a line; with ``--pair -`` a line is two texts with a tab between.

    Raises:
        UserError: nothing to label, two sources at once, or not as many second texts as first ones.
        DataError: from iteration; a line of pairs without a tab, or with several.
    """
    if data is None and list(texts) == [STDIN]:
        data, texts = STDIN, ()
    two_a_line = data == STDIN and list(pairs) == [STDIN]
    if two_a_line:
        pairs = ()
    if not texts and not pairs and data != STDIN:
        if data is None:
            fix = '--text "...", or a file: paceline predict RUN new.csv -o out.csv; - reads lines from standard input'
            raise UserError("nothing to label", "there is neither a text nor a file", fix)
        return None
    if data == STDIN and pairs and not texts:
        why = "the first texts come from standard input, so the second ones have to as well"
        raise UserError(f"- with --pair {excerpt(pairs[0])}", why, "--pair - reads both from each line, a tab between")
    if data is not None and (texts or pairs):
        raise UserError(f"{data} with --text", "they are two sources of rows", "leave one of them out")
    if STDIN in texts or STDIN in pairs:
        why = "- stands for standard input, and these texts are typed"
        raise UserError("- among other texts", why, "--text - alone, or --text - --pair - for pairs")
    if named := [each for each in settings if each.partition("=")[0].strip() in ("data.text", "data.pair")]:
        raise UserError(f"--set {named[0]}: has no effect", "what is typed has no columns", "leave it out")
    if pairs and len(pairs) != len(texts):
        why = f"--text is there {len(texts)} times and --pair {len(pairs)} times"
        raise UserError("--pair: the second text of each --text", why, '--text "..." --pair "...", as often as needed')
    if pairs:
        both = [{"text": text, "pair": pair} for text, pair in zip(texts, pairs, strict=True)]
        return Typed(both, [*settings, "data.text=text", "data.pair=pair"])
    if two_a_line:
        return Typed(_pairs(lines), [*settings, "data.text=text", "data.pair=pair"])
    alone = texts or (line.rstrip("\r\n") for line in lines)
    return Typed(({"text": text} for text in alone), [*settings, "data.text=text"])


def _pairs(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    for number, line in enumerate(lines, 1):
        texts = line.rstrip("\r\n").split("\t")
        if len(texts) != 2:
            raise DataError(
                f"{len(texts) - 1} tabs where one stands between two texts",
                file="standard input",
                line=number,
                found=line.rstrip("\r\n"),
                why="--pair - takes two texts a line",
                fix="write TEXT<tab>TEXT; where texts hold tabs: a .jsonl file",
            )
        yield {"text": texts[0], "pair": texts[1]}


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
