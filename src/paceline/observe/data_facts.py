"""What the training samples look like, in rows for people: alike on the console and in the report."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.contract.records import Cut, DataRecord, TextLengths
from paceline.observe.formats import printable, share

MOST_LABELS = 8
"""Labels that a row names."""

_BLOCKS = "▁▂▃▄▅▆▇█"


def data_facts(record: DataRecord) -> list[tuple[str, str]]:
    """Label and value of each row."""
    rows = [("labels", _labels(record))] if record.labels else []
    if record.lengths is None:
        return rows
    rows += [("tokens", _tokens(record.lengths)), ("cut", _cuts(record.lengths))]
    if record.vocabulary_size is not None:
        most = "" if record.max_positions is None else f"; the model takes {record.max_positions:,} of a text"
        rows.append(("vocabulary", f"{record.vocabulary_size:,} tokens{most}"))
    return rows


def sparkline(counts: Sequence[int]) -> str:
    """A block a count, the highest for the largest; a blank for none."""
    most = max(counts, default=0)
    return "".join(_BLOCKS[(count * (len(_BLOCKS) - 1) + most - 1) // most] if count else " " for count in counts)


def _labels(record: DataRecord) -> str:
    named = list(record.labels.items())[:MOST_LABELS]
    told = ", ".join(f"{printable(name)} {count:,}" for name, count in named)
    more = max(record.num_labels, len(record.labels)) - len(named)
    return f"{told}, and {more:,} more" if more else told


def _tokens(lengths: TextLengths) -> str:
    spread = f"median {lengths.median:,}, 95% of texts up to {lengths.p95:,}, longest {lengths.longest:,}"
    return f"{spread}  0 {sparkline(lengths.histogram)} {lengths.histogram_end:,}"


def _cuts(lengths: TextLengths) -> str:
    if not lengths.cut.texts:
        return f"nothing, at data.max_length = {lengths.max_length:,}"
    at = f"at data.max_length = {lengths.max_length:,}"
    if lengths.overflow == "windows":
        told = f"{share(lengths.cut.texts)} of texts have windows, up to {lengths.windows:,}, {at}"
        if lengths.windows == lengths.max_windows:
            return f"what is behind data.max_windows = {lengths.max_windows:,}: {told}"
        return f"nothing: {told}"
    now = f"{share(lengths.cut.texts)} of texts, {share(lengths.cut.tokens)} of all tokens"
    others = "; ".join(_other(cut) for cut in lengths.others)
    return f"{now}, {at}, data.overflow = {lengths.overflow}" + (f" ({others})" if others else "")


def _other(cut: Cut) -> str:
    taken = f"{share(cut.texts)} and {share(cut.tokens)}" if cut.texts else "nothing"
    return f"{cut.max_length:,}: {taken}"
