import io
import math
import re

import pytest
from rich.console import Console

from paceline.contract.records import MetricsRecord, Notice
from paceline.observe.console import Bar, Plain, Silence, console_observer
from paceline.observe.summary_facts import summary_facts


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Latin(io.StringIO):
    encoding = "ascii"


class Gone(io.StringIO):
    def write(self, text):
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def _terminal(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def observed(observer, records):
    for record in records:
        observer.observe(record)
    observer.close()


def plain(records, log_every=10, **streams):
    stream = streams.get("stream") or io.StringIO()
    observed(console_observer("plain", log_every, stream), records)
    return stream.getvalue()


def bar_output(records, width, clock=None, **settings):
    stream = Terminal()
    console = Console(file=stream, width=width, force_terminal=True, **settings)
    observed(Bar(console, clock or iter(range(10_000)).__next__), records)
    return stream.getvalue()


def test_the_mode_fits_the_stream(monkeypatch):
    assert isinstance(console_observer("off", 10, Terminal()), Silence)
    assert isinstance(console_observer("auto", 10, Terminal()), Bar)
    assert isinstance(console_observer("auto", 10, io.StringIO()), Plain)
    assert isinstance(console_observer("plain", 10, Terminal()), Plain)
    assert isinstance(console_observer("bar", 10, io.StringIO()), Plain)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(console_observer("auto", 10, Terminal()), Plain)


def test_silence_writes_nothing(records, capsys):
    observed(console_observer("off", 1), records.run())
    assert capsys.readouterr() == ("", "")


def test_plain_lines_tell_the_whole_run(records):
    lines = plain(records.run()).splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert [line.split()[1] for line in steps] == ["1/20", "10/20", "20/20"], "the first step, every tenth, the last"
    for fact in ("epoch 1/2", "loss 0.5000", "lr 5.00e-05/1.00e-03", "80 samples/s", "800 tokens/s", "padding 20.0%"):
        assert fact in steps[1], steps[1]
    assert "left 1.00 s + 1 evaluation" in steps[1], "of the test split, whose time is not known"
    assert "peak 3 GiB" in steps[1]
    text = "\n".join(lines)
    assert "592 k of 67 M parameters trained" in text
    assert "100 train, 20 test, 2 labels" in text
    assert "techniques.precision = bf16: this GPU computes in [bold]bf16[/bold]" in text
    assert "accuracy 0.8750  train accuracy 0.7500" in text
    assert "reviews: finished" in text
    assert "1 skipped" in text
    assert "10.0 s: 60.0% train, 30.0% evaluate, 10.0% other" in text
    assert "runs/reviews/report.html" in text


def test_running_loss_and_accuracy_take_the_place_of_the_step_lines(records):
    started = records.started(recipe={"observe": {"metrics_every": 5}})
    means = {"loss": 0.25, "accuracy": 0.8125}

    def with_means():
        yield started
        for number in range(1, 13):
            yield records.step(number)
            if number % 5 == 0:
                yield MetricsRecord(step=number, epoch=(number - 1) // 10, steps=5, metrics=means)

    steps = [line for line in plain(with_means(), log_every=1).splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in steps] == ["5/20", "10/20"]
    assert all("loss 0.2500  accuracy 0.8125  lr 5.00e-05/1.00e-03" in line for line in steps), steps
    text = bar_output(with_means(), 200, color_system=None)
    assert "accuracy 0.8125" in text
    assert "loss 0.5000" in text, "before there are means"


def test_each_ranks_own_loss_stands_on_the_step_line(records):
    text = plain([records.started(), records.step(1, rank_losses=(0.5, 0.25, math.nan))])
    assert "loss 0.5000  lr 5.00e-05/1.00e-03  loss of each rank 0.5000 0.2500 NaN" in text
    assert "of each rank" not in plain(records.run())


def test_the_first_update_and_the_path_are_a_few_words(records):
    path = {"layout": "packed", "capture": "off: recompute keeps random numbers on the host"}
    text = plain([records.started(), records.summary(first_update_seconds=2.0, execution=path)])
    assert "10.0 s, 2.00 s to the first update: 60.0% train" in text
    assert "execution   layout packed, capture off\n" in text, "reasons are for the report"
    assert "execution" not in plain([records.started(), records.summary()])


def test_memory_is_told_beside_what_was_predicted(records):
    def told(**fields):
        text = plain([records.started(), records.summary(**fields)])
        return text.partition("  memory      ")[2].partition("\n  time ")[0].splitlines()

    line = "5.86 GiB at the peak (predicted 5.91), 6.35 reserved, 7.62 on the GPU (predicted 7.26)"
    assert told(memory=records.memory(), peak_bytes=1) == [line]
    missing = records.memory(plan=None, problem="it was\nstill being made")
    taken = "5.86 GiB at the peak, 6.35 reserved, 7.62 on the GPU"
    assert told(memory=missing) == [taken, "              not predicted: it was\\nstill being made"]
    assert told(memory=records.memory(plan=None)) == [taken], "nobody asked for a plan"
    assert told(peak_bytes=3 * 2**30) == ["3 GiB at the peak"], "a summary from before there were plans"
    assert told() == [], "a CPU"


def test_evaluation_lines_are_aligned(records):
    runs = [records.started(total_steps=1000), records.evaluation(10), records.evaluation(1000, split="test")]
    first, second = plain(runs).splitlines()[-2:]
    assert first.index("loss") == second.index("loss")
    assert first.index("accuracy") == second.index("accuracy")


def test_plain_is_plain_even_where_colour_is_forced(records, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    stream = Terminal()
    assert "\x1b" not in plain(records.run(), stream=stream)
    assert "reviews" in stream.getvalue()


def test_a_report_that_was_not_asked_for_is_not_announced(records):
    text = plain([records.started(recipe={"observe": {"report": False}}), records.summary()])
    assert "report.html" not in text


@pytest.mark.parametrize("width", [120, 30])
def test_text_from_the_data_can_neither_steer_the_terminal_nor_be_read_as_markup(records, width):
    evil = "\x1b[2J[red]x[/red]\x07\u202e"
    run = [
        records.started(name=evil, samples={evil: 3}),
        records.evaluation(split=evil, metrics={evil: 0.5}),
        Notice(message=f"{evil}\nstep 20/20", level="warning"),
        records.summary(final={evil: {evil: 0.1}}),
    ]
    for text in (plain(run), bar_output(run, width, color_system=None)):
        assert "\x1b[2J" not in text
        assert "\x07" not in text
        assert "\u202e" not in text
        assert "\nstep 20/20" not in text, "a line of a notice could pass for one of ours"
    assert "\\x1b[2J[red]x[/red]\\x07\\u202e" in plain(run)


def test_a_name_that_the_encoding_lacks_does_not_stop_the_run(records):
    stream = Latin()
    observed(console_observer("plain", 10, stream), [records.started(name="评论")])
    assert "\\u8bc4\\u8bba" in stream.getvalue()


def test_a_reader_that_left_does_not_stop_the_run(records):
    observed(console_observer("plain", 1, Gone()), records.run())


@pytest.mark.parametrize("width", [160, 80, 40, 12])
def test_no_line_of_the_bar_is_wider_than_the_terminal(records, width):
    steps = [records.started(), *(records.step(number) for number in range(1, 6))]
    console = Console(file=Terminal(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    with console.capture() as captured:
        observed(Bar(console, iter(range(100)).__next__), steps)
    frame = re.split(r"\x1b\[\?25l", captured.get())[1]
    for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame).replace("\r", "\n").splitlines():
        assert len(line) <= width, line
    if width >= 40:
        for fact in ("step  5/20", "epoch 1/2", "loss 0.5000", "80 samples/s", "padding 20.0%", "left 1.50 s"):
            assert fact in frame, fact


def test_the_bar_is_not_redrawn_more_than_ten_times_a_second(records):
    class Clock:
        now = 0.0

        def __call__(self):
            return self.now

    clock = Clock()
    stream = Terminal()
    bar = Bar(Console(file=stream, width=80, force_terminal=True), clock)
    bar.observe(records.started(total_steps=100_000))
    stream.truncate(0)
    for number in range(1, 1001):
        clock.now += 0.001
        bar.observe(records.step(number))
    drawn = stream.getvalue().count("samples/s") + 1
    bar.close()
    assert 8 <= drawn <= 11, "1,000 steps in a second"


def test_no_color_is_honoured(records, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    text = bar_output(records.run(), 100)
    assert not re.search(r"\x1b\[[0-9;]*(3[0-9]|9[0-7])", text)
    assert "test" in text


def test_a_resumed_bar_starts_where_the_run_was(records):
    text = bar_output([records.started(first_step=10), records.step(11)], 100, color_system=None)
    assert "resumed after step 10" in text
    assert "55%" in text


def test_the_terminal_is_given_back_when_the_run_fails(records):
    stream = Terminal()
    bar = console_observer("bar", 10, stream)
    bar.observe(records.started())
    bar.observe(records.step(1))
    bar.close()
    bar.close()
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l"), "the cursor stayed hidden"


def test_closing_before_the_start_is_harmless():
    stream = Terminal()
    console_observer("bar", 10, stream).close()
    console_observer("plain", 10, stream).close()


def test_the_header_says_what_is_trained_on_what(records):
    recipe = {"model": {"source": "org/bert"}, "data": {"source": "reviews.csv"}}
    lines = plain([records.started(recipe=recipe)]).splitlines()
    assert "  model       org/bert: 592 k of 67 M parameters trained" in lines
    assert "  data        reviews.csv: 100 train, 20 test, 2 labels" in lines
    recipe = {"model": {"config": {"model_type": "vit"}}, "data": {"source": "memory"}}
    text = plain([records.started(recipe=recipe)])
    assert "vit with random weights: " in text
    assert "rows in memory: " in text


def test_folders_are_named_from_where_the_person_stands(records, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    inside, outside = str(tmp_path / "my runs/x"), str(tmp_path.parent / "y")
    text = plain([records.started(folder=inside), records.summary(folder=inside)])
    assert "reviews in my runs/x\n" in text
    assert "  next        paceline predict 'my runs/x' INPUT -o labelled.csv\n" in text
    assert f"  folder      {outside}\n" in plain([records.summary(folder=outside)])


def test_an_evaluation_that_does_not_fit_goes_on_below_its_figures(records):
    lines = bar_output([records.started(), records.evaluation(10)], width=60).splitlines()
    at = next(index for index, line in enumerate(lines) if "validation" in line)
    below = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", lines[at + 1])
    assert below.startswith(" " * 13), "a continued line looks like a new one"


def test_a_model_that_is_not_the_best_steps_is_said_to_be_another(records):
    assert ("best", "step 20") in summary_facts(records.summary(saved_step=20), has_report=True)
    last = summary_facts(records.summary(best_step=10, saved_step=20), has_report=True)
    assert ("best", "step 10; saved is the model of step 20") in last
