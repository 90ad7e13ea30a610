"""The run in the terminal: a live bar, plain lines for logs, or nothing."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Literal, TextIO, cast, final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.contract.records import (
    EvaluationRecord,
    MetricsRecord,
    Notice,
    Observer,
    Record,
    RunRecord,
    RunStarted,
    StepRecord,
    TraceRecord,
)
from paceline.contract.streams import Screen
from paceline.observe.data_facts import data_facts
from paceline.observe.formats import (
    amount,
    duration,
    figure,
    learning_rates,
    printable,
    rate,
    share,
    size,
)
from paceline.observe.pace import Evaluations, Pace
from paceline.observe.summary_facts import Facts, near, summary_facts

REDRAW_SECONDS = 0.1
"""The bar is not drawn more often than this."""


def console_observer(
    mode: Literal["auto", "bar", "plain", "off"], log_every: int, stream: TextIO | None = None
) -> Observer:
    """The observer for a stream (standard output when None).

    ``auto`` and ``bar`` draw a live bar on a terminal that can move its cursor, and write plain lines elsewhere.
    ``plain`` writes a line every ``log_every`` steps and never an escape sequence. A stream that stops taking output
    (a closed pipe, a terminal that hung up) does not stop the run: metrics.jsonl holds everything.
    """
    if mode == "off":
        return Silence()
    screen = cast(TextIO, Screen(stream or sys.stdout))
    console = Console(file=screen, highlight=False, markup=False, emoji=False)
    if mode != "plain" and console.is_terminal and not console.is_dumb_terminal:
        return Bar(console)
    return Plain(screen, log_every, "observe.console = bar needs a terminal: plain lines" if mode == "bar" else "")


@final
class Silence(Observer):
    """Says nothing."""

    def observe(self, record: Record) -> None:
        pass

    def close(self) -> None:
        pass


@final
class Plain(Observer):
    """One line a fact: for logs, pipes and terminals without a cursor."""

    def __init__(self, stream: TextIO, log_every: int, remark: str = "") -> None:
        self._stream, self._log_every, self._remark = stream, log_every, remark
        self._run = _Run()

    def observe(self, record: Record) -> None:
        match record:
            case RunStarted():
                self._run = _Run.of(record)
                self._rows(_headline(record), _header(record))
                if self._remark:
                    self._say(f"  {'note':<11} {self._remark}")
            case StepRecord():
                self._run.add(record)
                first, last = self._run.first_step + 1, self._run.pace.total_steps
                if self._run.metrics_every:
                    return
                if record.step % self._log_every == 0 or record.step in (first, last):
                    self._say(_line(_position(self._run, record) + _progress(self._run, record)))
            case MetricsRecord():
                step = self._run.take(record)
                self._say(_line(_position(self._run, step) + _progress(self._run, step)))
            case EvaluationRecord():
                self._run.pace.add_evaluation(record)
                self._say(_line(_evaluation(self._run, record)))
            case Notice():
                for line in _notice(record):
                    self._say(line)
            case TraceRecord():
                for line in _trace(record):
                    self._say(line)
            case RunRecord():
                self._rows(
                    f"{printable(record.name)}: {record.status}", summary_facts(record, has_report=self._run.has_report)
                )

    def close(self) -> None:
        self._stream.flush()

    def _rows(self, title: str, rows: Facts) -> None:
        self._say(title)
        for label, value in rows:
            self._say(f"  {label:<11} {value}")

    def _say(self, line: str) -> None:
        self._stream.write(line.rstrip() + "\n")
        self._stream.flush()


@final
class Bar(Observer):
    """A live bar below the lines that stay. ``clock`` gives seconds."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        # drawn by hand: no thread of ours runs beside the training, and the rate is bounded here
        # what others print goes above the bar, but not what the shell sends to a file
        self._live = Live(
            console=console,
            auto_refresh=False,
            redirect_stdout=Screen(sys.stdout).isatty(),
            redirect_stderr=Screen(sys.stderr).isatty(),
        )
        self._run = _Run()
        self._drawn_at = -math.inf

    def observe(self, record: Record) -> None:
        match record:
            case RunStarted():
                self._run = _Run.of(record)
                self._console.print(Text(_headline(record), "bold"), _grid(_header(record)))
                self._live.start()
            case MetricsRecord():
                self._run.take(record)
            case StepRecord():
                self._run.add(record)
                now = self._clock()
                due = now - self._drawn_at >= REDRAW_SECONDS
                if due or record.step == self._run.pace.total_steps:
                    self._drawn_at = now
                    self._live.update(_BarLines(self._run, record), refresh=True)
            case EvaluationRecord():
                self._run.pace.add_evaluation(record)
                parts = [_styled([fact]) for fact in _evaluation(self._run, record)]
                lines = _wrapped(parts, self._console.width, indent=len(parts[0]) + 2)
                self._console.print(*lines, sep="\n")
            case Notice():
                style = "yellow" if record.level == "warning" else "dim"
                self._console.print(Text("\n".join(_notice(record)), style))
            case TraceRecord():
                self._console.print(Text("\n".join(_trace(record))))
            case RunRecord():
                self._live.stop()
                title = Text(f"{printable(record.name)}: {record.status}", "bold")
                style = "green" if record.status == "finished" else "yellow"
                rows = _grid(summary_facts(record, has_report=self._run.has_report))
                self._console.print(Panel(rows, title=title, title_align="left", border_style=style, expand=False))

    def close(self) -> None:
        self._live.stop()


@final
class _Run:
    """What the start of the run said, and how it goes since."""

    def __init__(self, first_step: int = 0, total_steps: int = 0, steps_per_epoch: int = 1) -> None:
        self.first_step = first_step
        self.num_epochs = math.ceil(total_steps / max(steps_per_epoch, 1))
        self.pace = Pace(first_step, total_steps)
        self.has_report, self.metrics_every = True, 0
        self.metrics: Facts = []
        """The newest running loss and accuracy, where they are told."""

    @classmethod
    def of(cls, started: RunStarted) -> _Run:
        run = cls(started.first_step, started.total_steps, started.steps_per_epoch)
        run.pace = Pace(started.first_step, started.total_steps, Evaluations.of(started))
        observe = started.recipe.get("observe", {})
        run.has_report, run.metrics_every = bool(observe.get("report", True)), observe.get("metrics_every") or 0
        return run

    def add(self, record: StepRecord) -> None:
        """Take a step into account."""
        self.step = record
        self.pace.add(record)

    def take(self, record: MetricsRecord) -> StepRecord:
        """Take the running means into account; returns their last step."""
        self.metrics = [(name, figure(value)) for name, value in record.metrics.items()]
        return self.step


@final
class _BarLines:
    """The bar and the facts below it, laid out for whatever width the terminal has when it is drawn."""

    def __init__(self, run: _Run, record: StepRecord) -> None:
        self._total, self._step = run.pace.total_steps, record.step
        self._position = _position(run, record)
        facts = _progress(run, record)
        self._left = [fact for fact in facts if fact[0] == "left"]
        self._facts = [fact for fact in facts if fact[0] != "left"]

    def __rich_console__(self, console: Console, _: object) -> list[RenderableType]:
        width = console.width
        done = Text(f"{100 * self._step // max(self._total, 1):3d}%", "bold")
        head = [done, *(_styled([fact]) for fact in self._position + self._left)]
        lines = _wrapped([_styled([fact]) for fact in self._facts], width)
        room = width - sum(part.cell_len + 2 for part in head)
        row = Table.grid(padding=(0, 2))
        if room < 10:
            # a narrow terminal: the bar has a line of its own
            row.add_row(self._bar(width))
            return [row, *_wrapped(head, width), *lines]
        row.add_row(self._bar(min(room, 40)), Text("  ").join(head))
        return [row, *lines]

    def _bar(self, width: int) -> ProgressBar:
        return ProgressBar(total=max(self._total, 1), completed=self._step, width=width)


def _headline(record: RunStarted) -> str:
    resumed = f", resumed after step {record.first_step:,}" if record.first_step else ""
    return f"{printable(record.name)} in {near(record.folder)}{resumed}"


def _header(record: RunStarted) -> Facts:
    trained, parameters = record.num_trained_parameters, record.num_parameters
    of = f"{amount(trained)} of {amount(parameters)}" if trained != parameters else amount(parameters)
    samples = ", ".join(f"{count:,} {printable(split)}" for split, count in record.samples.items())
    classes = f", {len(record.label_names)} labels" if len(record.label_names) > 1 else ""
    model, data = _origins(record)
    rows = [
        ("model", f"{model}{of} parameters trained"),
        ("data", f"{data}{samples}{classes}"),
        *(data_facts(record.data) if record.data else ()),
        ("steps", f"{record.total_steps:,}, {record.steps_per_epoch:,} an epoch" if record.total_steps else "none"),
        ("device", printable(record.device)),
    ]
    for index, decision in enumerate(record.decisions):
        chosen = f"{printable(decision.setting)} = {printable(decision.value)}: {printable(decision.reason)}"
        rows.append(("chosen" if index == 0 else "", chosen))
    return rows


def _origins(record: RunStarted) -> tuple[str, str]:
    """Where model and data come from, each followed by a colon; empty where the recipe does not say."""
    model, data = record.recipe.get("model", {}), record.recipe.get("data", {})
    name = model.get("source") or model.get("factory")
    if not name and model.get("config"):
        name = f"{model['config'].get('model_type')} with random weights"
    source = "rows in memory" if data.get("source") == "memory" else data.get("source")
    return (f"{printable(str(name))}: " if name else ""), (f"{printable(str(source))}: " if source else "")


def _position(run: _Run, record: StepRecord) -> Facts:
    total = f"{run.pace.total_steps:,}"
    return [
        ("step", f"{record.step:>{len(total)},}/{total}"),
        ("epoch", f"{record.epoch + 1}/{max(run.num_epochs, record.epoch + 1)}"),
    ]


def _progress(run: _Run, record: StepRecord) -> Facts:
    pace = run.pace
    facts = [*(run.metrics or [("loss", figure(pace.loss))]), ("lr", learning_rates(record.learning_rates))]
    if record.rank_losses is not None:
        facts.append(("loss of each rank", " ".join(map(figure, record.rank_losses))))
    if pace.samples_per_second is not None:
        facts.append(("", f"{rate(pace.samples_per_second)} samples/s"))
    if pace.tokens_per_second is not None:
        facts.append(("", f"{rate(pace.tokens_per_second)} tokens/s"))
    if pace.padding_share is not None:
        facts.append(("padding", share(pace.padding_share)))
    if record.peak_bytes is not None:
        facts.append(("peak", size(record.peak_bytes)))
    if pace.num_skipped:
        facts.append(("skipped", f"{pace.num_skipped:,}"))
    if pace.seconds_left is not None and record.step < pace.total_steps:
        count = pace.evaluations_not_counted
        more = f" + {count:,} evaluation{'s' * (count > 1)}" if count else ""
        facts.append(("left", f"{duration(pace.seconds_left)}{more}"))
    return facts


def _evaluation(run: _Run, record: EvaluationRecord) -> Facts:
    total = f"{run.pace.total_steps:,}"
    facts = [(f"{printable(record.split):<10}", f"step {record.step:>{len(total)},}")]
    facts += [("", record.of)] if record.scores else []
    facts += [("loss", _aligned(record.loss))]
    facts += [(printable(name), _aligned(value)) for name, value in record.metrics.items() if name != "loss"]
    for of, scores in record.scores.items():
        if of != record.of:
            facts.append((of, " ".join(f"{printable(name)} {_aligned(value)}" for name, value in scores.items())))
    trained = " ".join(f"{printable(name)} {_aligned(value)}" for name, value in record.train_metrics.items())
    facts += [("train", trained)] if trained else []
    # a pass that took no time to speak of need not be spoken of
    return [*facts, ("in", duration(record.seconds))] if record.seconds >= 1 else facts


def _notice(record: Notice) -> list[str]:
    # later lines are indented, so that no text from the data can pass for a line of ours
    first, *rest = record.message.splitlines() or [""]
    return [f"{printable(record.level)}: {printable(first)}", *(f"    {printable(line)}" for line in rest)]


def _trace(record: TraceRecord) -> list[str]:
    # names of kernels may come from the user's code: one line of ours stays one line
    return [printable(line) for line in record.told.splitlines()]


def _aligned(value: float) -> str:
    return f"{figure(value):>6}"


def _line(facts: Facts) -> str:
    return "  ".join(f"{label} {value}" if label else value for label, value in facts)


def _styled(facts: Facts) -> Text:
    parts = [Text.assemble((f"{label} " if label else "", "dim"), value) for label, value in facts]
    return Text("  ").join(parts)


def _grid(rows: Facts) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(Text(label), Text(value, overflow="fold"))
    return grid


def _wrapped(parts: list[Text], width: int, indent: int = 0) -> list[Text]:
    """``parts`` side by side on as many lines as they need, the later ones indented; a part is not broken here."""
    lines: list[Text] = []
    for part in parts:
        if lines and lines[-1].cell_len + 2 + part.cell_len <= width:
            lines[-1] = lines[-1] + Text("  ") + part
        else:
            fits = lines and indent + part.cell_len <= width
            lines.append(Text(" " * indent) + part if fits else part)
    return lines
