"""Records to a Markdown table: medians, spread, number of runs; start-up and compiling in columns of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.spread import Spread

Record = Mapping[str, Any]
OURS = "paceline"
"""Contenders whose names begin so are ours; the others are peers."""

GIB = 2**30
DISAGREEMENT = 0.05
"""A rate told and a rate seen that differ by more are both shown."""


class Row:
    """The records of one contender on one piece of work."""

    def __init__(self, contender: str, records: Sequence[Record]) -> None:
        self.contender = contender
        good = [record for record in records if record["status"] == "ok"]
        self.warm = [record for record in good if not record["cold"]]
        self.cold = [record for record in good if record["cold"]]
        self.newest: Record = (self.warm or self.cold or [{}])[-1]

    @property
    def rate(self) -> float | None:
        """Median steady samples a second; of the cold runs where there is no warm one."""
        return self.median("samples_per_second")

    def median(self, key: str) -> float | None:
        """Of the warm runs, of the cold ones where there is none; None without a figure."""
        found = Spread.of(self.warm or self.cold, key)
        return found.median if found else None


def _spread(records: Sequence[Record], key: str, form: str, scale: float = 1.0) -> str:
    """``median (smallest..largest)``; the median alone of a single one."""
    found = Spread.of(records, key, scale)
    if found is None:
        return ""
    middle = format(found.median, form)
    return middle if found.n == 1 else f"{middle} ({found.low:{form}}..{found.high:{form}})"


@dataclass(frozen=True)
class Beside:
    """What a row is compared with."""

    peer: float | None
    """The best peer's rate on the same piece of work."""
    one: Row
    """The same contender on one process."""


def _of_linear(row: Row, one: Row) -> str:
    """The rate over that of one process times their number: of tokens where both counted them, else of samples."""
    processes = row.newest.get("processes", 1)
    if processes == 1:
        return ""
    for key in ("tokens_per_second", "samples_per_second"):
        rate, alone = row.median(key), one.median(key)
        if rate and alone:
            return f"{rate / (processes * alone):.3f}"
    return ""


Column = tuple[str, Callable[[Row, Beside], str]]

_COLUMNS: tuple[Column, ...] = (
    ("contender", lambda row, _: row.contender),
    ("n warm (cold)", lambda row, _: f"{len(row.warm)} ({len(row.cold)})"),
    ("samples/s", lambda row, _: _spread(row.warm or row.cold, "samples_per_second", ",.0f")),
    ("x best peer", lambda row, than: f"{row.rate / than.peer:.2f}" if row.rate and than.peer else ""),
    ("x of linear", lambda row, than: _of_linear(row, than.one)),
    ("tokens/s", lambda row, _: _spread(row.warm or row.cold, "tokens_per_second", ",.0f").partition(" ")[0]),
    ("MFU", lambda row, _: _spread(row.warm or row.cold, "mfu", ".1%").partition(" ")[0]),
    (
        "MFU as of whole passes",
        lambda row, _: _spread(row.warm or row.cold, "mfu_of_whole_passes", ".1%").partition(" ")[0],
    ),
    ("TFLOP/s", lambda row, _: _spread(row.warm or row.cold, "flops_per_second", ".3g", 1e-12)),
    ("first update, cold, s", lambda row, _: _spread(row.cold, "first_update_seconds", ".1f")),
    ("first update, warm, s", lambda row, _: _spread(row.warm, "first_update_seconds", ".1f")),
    ("one-time, cold, s", lambda row, _: _spread(row.cold, "one_time_seconds", ".1f")),
    ("one-time, warm, s", lambda row, _: _spread(row.warm, "one_time_seconds", ".1f")),
    ("whole process, cold, s", lambda row, _: _spread(row.cold, "total_seconds", ".1f")),
    ("whole process, warm, s", lambda row, _: _spread(row.warm, "total_seconds", ".1f")),
    ("peak allocated, GiB", lambda row, _: _spread(row.warm or row.cold, "peak_allocated_bytes", ".2f", 1 / GIB)),
    ("peak reserved, GiB", lambda row, _: _spread(row.warm or row.cold, "peak_reserved_bytes", ".2f", 1 / GIB)),
    ("loss at the end", lambda row, _: _spread(row.warm or row.cold, "loss", ".3f").partition(" ")[0]),
)


def render(suite: str, records: Sequence[Record]) -> str:
    """The page: a table for each piece of work, then what did not come to a figure."""
    parts = [f"# {suite}\n"]
    shown = [record for record in records if record["status"] != "skipped"]
    parts += [_table(work, shown) for work in dict.fromkeys(record["work"] for record in shown)]
    parts += _notes(records)
    parts.append(_where(records))
    return "\n".join(parts)


def _table(work: str, records: Sequence[Record]) -> str:
    here = [record for record in records if record["work"] == work]
    rows = [_row(contender, work, here) for contender in dict.fromkeys(r["contender"] for r in here)]
    work_of_one = here[0].get("work_of_one", work)
    ones = [_row(row.contender, work_of_one, records) for row in rows]
    peers = [row.rate for row in rows if row.rate and not row.contender.startswith(OURS)]
    best = max(peers, default=None)
    beside = [Beside(best, one) for one in ones]
    cells = [(title, [show(row, than) for row, than in zip(rows, beside, strict=True)]) for title, show in _COLUMNS]
    shown = [(title, column) for title, column in cells if any(column)]
    lines = ["| " + " | ".join(title for title, _ in shown) + " |", "|" + "---|" * len(shown)]
    lines += ["| " + " | ".join(column[at] for _, column in shown) + " |" for at in range(len(rows))]
    phases = [_phases(row) for row in rows if row.newest.get("phases")]
    return "\n".join([f"## {work}\n", *lines, "", *phases])


def _row(contender: str, work: str, records: Sequence[Record]) -> Row:
    return Row(contender, [r for r in records if (r["work"], r["contender"]) == (work, contender)])


def _phases(row: Row) -> str:
    """What the newest run of ours says of itself: where the seconds went, the path taken, the scores."""
    newest = row.newest
    path, final = newest.get("path") or {}, newest.get("final") or {}
    told = {
        "seconds of the newest run": [f"{name} {s:.1f}" for name, s in newest["phases"].items() if s >= 0.05],
        "its path": [f"{stage}: {way}" for stage, way in path.items()],
        "its scores": [f"{split} {name} {value:.4f}" for split, all_ in final.items() for name, value in all_.items()],
    }
    return "".join(f"- {row.contender}, {what}: {', '.join(parts)}.\n" for what, parts in told.items() if parts)


def _notes(records: Sequence[Record]) -> list[str]:
    """Whatever makes a figure less than it seems, and cells without one."""
    notes = []
    for record in records:
        name = f"{record['work']}/{record['contender']}"
        if record["status"] == "skipped":
            notes.append(f"- {name}: skipped: {record['error']}")
            continue
        name += f", {'cold' if record['cold'] else 'warm'} {record['round']}"
        if record["status"] != "ok":
            last = (record.get("error") or "").strip().splitlines()[-1:]
            notes.append(f"- {name}: {record['status']}" + (f": {last[0][:300]}" if last else ""))
        seen, told = record.get("seen_samples_per_second"), record.get("samples_per_second")
        if seen and abs(seen / told - 1) > DISAGREEMENT and record["steady_seconds"] >= 1:
            notes.append(f"- {name}: {told:,.0f} samples/s by its own account, {seen:,.0f} seen from outside")
        if record.get("same_batches") is False:
            notes.append(f"- {name}: its batches were not those of the workload")
    for work in dict.fromkeys(record["work"] for record in records):
        sizes = {r["num_parameters"] for r in records if r["work"] == work and r.get("num_parameters")}
        if len(sizes) > 1:
            notes.append(f"- {work}: models of different size: {', '.join(f'{n:,}' for n in sorted(sizes))} parameters")
    return [*dict.fromkeys(notes), ""] if notes else []


def _where(records: Sequence[Record]) -> str:
    """Machines, versions and commits; more than one is worth knowing."""
    lines = []
    for machine in {str(r["machine"]): r["machine"] for r in records}.values():
        memory = f"{machine['memory_bytes'] / GIB:.0f} GiB" if machine["memory_bytes"] else "unknown memory"
        number = f"{machine['cards']} x " if machine.get("cards", 1) > 1 else ""
        gpu = f"{number}{machine['card']}, driver {machine['driver']}, " if machine["card"] else ""
        lines.append(f"Machine: {gpu}{machine['cpu']}, {machine['cpus']} CPUs, {memory}, Python {machine['python']}.")
    versions = sorted({f"{name} {version}" for record in records for name, version in record["versions"].items()})
    lines.append(f"Versions: {', '.join(versions)}.")
    lines += [f"Commit: {commit}." for commit in dict.fromkeys(r["commit"] for r in records) if commit]
    return "\n".join(lines) + "\n"
