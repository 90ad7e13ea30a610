"""``paceline plan``: what a user sees, what a program reads, and how each mistake is answered."""

from __future__ import annotations

import io
import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.contract.errors import ModelError, RecipeError, UserError
from paceline.contract.records import Decision, MemoryPlan
from paceline.machine.facts import Gpu
from paceline.machine.gpus import gpu_for
from paceline.memory.predict import PlanFailed
from paceline.recipe import Recipe
from paceline.verbs import plan as planning
from paceline.verbs.plan import Plan, planned
from paceline.verbs.plan_shown import draw, shown
from tests.e2e.commands import Paceline, in_process
from tests.unit.memory.plans import GIB, HERE, PARAMETERS, bert_large, memory_plan, recipe

RECIPE = "name: reviews\nmodel: {source: bert-large-uncased}\ndata: {source: reviews.csv}\nloop: {batch_size: 32}\n"

PACKING = Decision(setting="techniques.packing", value="true", reason="packed and padded gradients are equal")

Memory = Callable[[Recipe], MemoryPlan]


def made(
    gpu: str | Gpu,
    *settings: str,
    memory: Memory | None = None,
    on_gpus: Callable[[int], int] | None = None,
) -> Plan:
    """The plan of BERT-large; or of a run whose memory is ``memory``, and on several GPUs the total ``on_gpus``."""
    gpu = gpu_for(gpu) if isinstance(gpu, str) else gpu

    def trace(chosen: Recipe, gpus: int) -> MemoryPlan:
        if on_gpus is not None and gpus > 1:
            return memory_plan(on_gpus(gpus))
        return memory(chosen) if memory else bert_large(chosen, gpu)

    return planned(recipe(*settings), gpu, HERE, trace)


def changed(gpu: str, *settings: str, **changes: Any) -> Plan:
    return made(gpu, *settings, memory=lambda chosen: replace(bert_large(chosen, gpu_for(gpu)), **changes))


def section(text: str, title: str) -> list[str]:
    """The lines below the title that begins so."""
    found = [block.splitlines() for block in text.split("\n\n") if block.strip("\n").startswith(title)]
    assert len(found) == 1, f"{len(found)} sections {title!r} in\n{text}"
    return [line for line in found[0] if line.startswith("  ")]


# -- what a user sees --------------------------------------------------------------------------------------------------

DOES_NOT_FIT = """\
reviews on Tesla V100-SXM2-32GB
  model        bert-large-uncased: 335 M parameters, all trained
  micro-batch  32 of the global batch of 32 samples, 16,384 token positions
  step         fp32, adamw

alive at the peak, in the backward pass
  activations          27.20 GiB   84.5%
    linear layers      20.40 GiB   63.4%
    attention           6.80 GiB   21.1%
  optimizer states      2.50 GiB    7.8%
  parameters            1.25 GiB    3.9%
  gradients             1.25 GiB    3.9%
  allocated            32.19 GiB  100.0%
  by phase          at most: model 1.25 GiB, backward 32.19 GiB, evaluation 11.39 GiB

does not fit, by 1.74 GiB
  allocated      32.19 GiB  by tensors, at the peak
  reserved       32.19 GiB  by torch, which keeps what was freed
  context         0.29 GiB  by the driver, code of kernels included
  total          32.48 GiB  as nvidia-smi will show it
  GPU            32.00 GiB  30.75 GiB counted on: CUDA gives programs up to 2 % less, a plan may be 2 % too low

largest micro-batch that fits
  samples  29 of 32, 14,848 positions, take 29.93 GiB; 32 do not fit
  set      --set loop.micro_batch_size=29

what would make it fit, the cheapest first
  1.  --set techniques.precision=fp16
      saves 10.06 GiB: 22.42 GiB in all, fits, 8.32 GiB to spare
      faster: matrix products at up to 8 times the rate, by the data sheet; result: up to rounding
  2.  --set loop.micro_batch_size=16
      saves 13.60 GiB: 18.88 GiB in all, fits, 11.86 GiB to spare
      about 5% slower: 2 micro-batches a step, each reads the weights; result: up to rounding
  3.  --set techniques.recompute=true
      saves 20.80 GiB: 11.68 GiB in all, fits, 19.06 GiB to spare
      up to 33% slower: one forward pass more; result: bit-exact

what train would choose there
  chosen  device = cuda: Tesla V100-SXM2-32GB is usable
          techniques.precision = fp32: Tesla V100-SXM2-32GB (compute capability 7.0) does not compute in bf16
          loop.micro_batch_size = 32: the whole batch in one forward pass
          loop.evaluation_batch_size = 128: enough to keep a GPU busy: without gradients the activations are not kept
          techniques.fusion = false: its kernels are for autocast: products in bf16 or fp16 beside sums in fp32
          techniques.capture = true: replayed steps cost the host next to nothing
          techniques.packing = true: packed and padded gradients are equal

the textbook, and what is taken for granted
  formula  4.99 GiB by the textbook formula: 16 bytes a trained parameter (weights 4, gradients 4, states 8); leaves \
out activations, temporary buffers, kernels' workspaces, what ranks exchange and the CUDA context
  assumed  512 tokens in every text
           attention by efficient
"""


def test_a_run_that_does_not_fit() -> None:
    assumed = ("512 tokens in every text", "attention by efficient")
    assert shown(changed("v100-32gb", assumed=assumed, decisions=(PACKING,))).rstrip("\n") == DOES_NOT_FIT.rstrip("\n")


def test_a_run_that_fits() -> None:
    found = made("h200")
    text = shown(found)
    assert section(text, "fits, with 112.47 GiB to spare")[3].split()[:2] == ["total", "22.42"]
    assert section(text, "largest micro-batch that fits") == [
        "  samples  32 of 32, 16,384 positions, take 22.42 GiB: the whole batch"
    ]
    assert "what would make it fit" not in text
    assert not found.changes
    assert not found.largest_settings


def test_a_small_micro_batch_that_fits_is_told_the_larger_that_would() -> None:
    found = made("v100-32gb", "loop.micro_batch_size=8")
    assert found.fits
    told = section(shown(found), "largest micro-batch that fits")
    assert told[0] == "  samples  29 of 32, 14,848 positions, take 29.93 GiB; 32 do not fit"
    assert found.largest_settings == ("loop.micro_batch_size=29",)


@pytest.mark.parametrize(
    ("gpu", "settings", "told"),
    [
        ("h200", (), "205 of 100,000, take 128.46 GiB: all training samples"),
        ("h200", ("loop.micro_batch_size=8",), "205 of 100,000, take 128.46 GiB: all training samples"),
        ("v100-32gb", (), "48 of 100,000, take 30.33 GiB; 51 do not fit"),
    ],
)
def test_no_micro_batch_has_more_samples_than_there_are(gpu: str, settings: tuple[str, ...], told: str) -> None:
    """205 of training, 0.625 GiB each, in batches of 100,000."""

    def memory(chosen: Recipe) -> MemoryPlan:
        samples = min(chosen.loop.micro_batch_size or 100_000, 205)
        return memory_plan(samples * 5 * GIB // 8 + GIB // 3, samples=samples, slots=samples)

    found = made(gpu, "loop.batch_size=100000", *settings, memory=memory)
    assert section(shown(found), "largest micro-batch")[0] == f"  samples  {told}"
    assert found.largest is not None
    assert found.largest.plan is not None
    assert found.largest.samples == found.largest.plan.samples
    changed = [made.change.speed for made in found.changes if "loop.micro_batch_size=26" in made.change.settings]
    assert ["8 micro-batches a step" in speed for speed in changed] == ([] if found.fits else [True])


def test_not_even_one_sample() -> None:
    text = shown(made("v100-16gb", memory=lambda _: memory_plan(40 * GIB)))
    assert section(text, "largest micro-batch") == ["  samples  none: not even 1 of 32 at a time"]
    assert section(text, "what would make it fit") == [
        "    none is enough: a GPU with more memory, shorter texts or smaller images, or a smaller model"
    ]


def test_four_percent_of_the_gpu_are_not_counted_on() -> None:
    """CUDA sees up to 2 % less than nvidia-smi reports, whose figure the table has; a plan may be 2 % too low."""
    gpu = Gpu(name="a GPU", memory_bytes=102 * GIB)
    fits = made(gpu, memory=lambda _: memory_plan(98 * GIB))
    assert (fits.fits, fits.spare_bytes) == (True, 0)
    tight = made(gpu, memory=lambda _: memory_plan(98 * GIB + 1))
    assert (tight.fits, tight.spare_bytes) == (False, -1)


def test_evaluations_that_are_in_the_way_shrink_with_the_micro_batch() -> None:
    """7.69 GiB hold steps of two samples, but not evaluations of 128."""
    found = made(Gpu(name="a GPU", memory_bytes=8 * GIB, compute_capability=(7, 0)))
    assert found.largest is not None
    assert found.largest.samples == 2
    assert found.largest_settings == ("loop.micro_batch_size=2", "loop.evaluation_batch_size=2")
    assert found.largest.plan is not None
    assert found.usable_bytes is not None
    assert found.largest.plan.total <= found.usable_bytes


def test_a_run_of_less_than_one_gib_is_told_in_mib() -> None:
    parts = {"parameters": 30 * 2**20, "gradients": 10 * 2**20}
    small = memory_plan(0, parts=parts, allocated=40 * 2**20, reserved=44 * 2**20, context=300 * 2**20)
    text = shown(made("v100-32gb", memory=lambda _: small))
    assert section(text, "alive at the peak")[0] == "  parameters     30.00 MiB   75.0%"
    on_gpu = section(text, "fits, with 30.41 GiB to spare")
    assert on_gpu[3] == "  total         344.00 MiB  as nvidia-smi will show it"
    assert on_gpu[4].startswith("  GPU            32.00 GiB  30.75 GiB counted on")


def test_notices_of_the_data_are_shown_and_in_the_object() -> None:
    notices = ("2 texts occur more than once with different labels (5 rows)", "a class\x1b[2J that is called like nan")
    found = changed("v100-32gb", notices=notices)
    assert section(shown(found), "notices of the data") == [
        "    2 texts occur more than once with different labels (5 rows)",
        r"    a class\x1b[2J that is called like nan",
    ]
    told = found.plain()
    assert told["notices"] == list(notices)
    assert "notices" not in told["memory"], "once is enough"
    assert "notices" not in shown(made("v100-32gb")), "there are none"


def test_a_gpu_whose_memory_is_not_known_is_no_limit() -> None:
    found = made(Gpu(name="a slice of a GPU"))
    assert (found.fits, found.spare_bytes, found.largest, found.changes) == (None, None, None, ())
    text = shown(found)
    assert "whether it fits is not known: the memory of this GPU is not" in text
    assert "largest" not in text
    assert found.plain()["fits"] is None


def test_images_have_no_positions_and_small_parts_are_one_line() -> None:
    parts = {"activations": 998 * GIB // 100, "parameters": 2 * GIB // 100, "data": 9 * GIB // 1000}
    parts |= {"rounding": 8 * GIB // 1000, "buffers": 2}
    allocated = sum(parts.values())
    text = shown(
        changed(
            "h200",
            samples=32,
            slots=32,
            parts=parts,
            allocated=allocated,
            reserved=allocated,
            activations={"convolutions": 998 * GIB // 100},
        )
    )
    assert "position" not in text
    anatomy = section(text, "alive at the peak")
    assert [line.split()[0] for line in anatomy] == [
        *("activations", "convolutions", "parameters", "all", "allocated", "by")
    ], "what is less than a thousandth is told together"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ({"config": {"model_type": "bert"}}, "bert with random weights"),
        ({"factory": "nets:small"}, "nets:small"),
        ({"source": "models/a\x1b[2Jb"}, r"models/a\x1b[2Jb"),
    ],
)
def test_models_by_what_a_recipe_says(model: dict[str, Any], name: str) -> None:
    """And nothing in a name acts on the terminal."""
    asked = Recipe.parse({"model": model, "data": {"source": "reviews.csv"}})
    gpu = gpu_for("h200")
    found = planned(asked, gpu, HERE, lambda chosen, _: bert_large(chosen, gpu))
    assert section(shown(found), "run on")[0] == f"  model        {name}: 335 M parameters, all trained"


def test_frozen_parameters_are_counted() -> None:
    text = shown(changed("h200", num_trained=PARAMETERS // 10))
    assert "33.5 M of 335 M trained" in text
    assert "a frozen one" in text


def test_a_terminal_is_drawn_the_same_words_in_colour() -> None:
    found = made("v100-32gb")
    screen = io.StringIO()
    draw(found, Console(file=screen, force_terminal=True, width=72, color_system="standard"))
    drawn = screen.getvalue()
    assert "\x1b[1;31mdoes not fit" in drawn, "red"
    plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
    assert max(map(len, plain.splitlines())) <= 72
    assert plain.split() == shown(found).split()


# -- what a program reads ----------------------------------------------------------------------------------------------

KEYS = {
    "": "name model gpus strategy precision optimizer batch_size micro_batch_size memory usable_bytes fits spare_bytes"
    " largest_micro_batch changes formula decisions",
    "memory": "gpu capacity allocated reserved context parts activations moment phases samples slots num_parameters"
    " num_trained assumed execution path total",
    "largest_micro_batch": "samples slots total too_large settings",
    "changes": "settings gpus slowdown speed preserves saving_bytes total fits",
    "formula": "weights_bytes gradients_bytes states_bytes label total_bytes",
}


def test_the_object_has_these_keys_and_adds_up() -> None:
    found = json.loads(json.dumps(made("v100-32gb").plain()))
    for name, keys in KEYS.items():
        read = found[name][0] if name == "changes" else found[name] if name else found
        assert set(keys.split()) <= set(read), f"programs read these of {name or 'the whole'}"
    memory = found["memory"]
    assert memory["total"] == memory["reserved"] + memory["context"]
    assert sum(memory["parts"].values()) == memory["allocated"]
    assert found["spare_bytes"] == found["usable_bytes"] - memory["total"] < 0
    assert found["fits"] is False
    assert found["largest_micro_batch"]["samples"] == 29
    assert found["largest_micro_batch"]["settings"] == ["loop.micro_batch_size=29"]
    assert found["decisions"][0].keys() == {"setting", "value", "reason"}
    assert len(found["changes"]) == 4, "all of them, not the three that a person is shown"
    for change in found["changes"]:
        assert change["total"] == memory["total"] - change["saving_bytes"]


@pytest.mark.parametrize(("strategy", "micro"), [("ddp", 8), ("dp", 32)])
def test_a_program_reads_how_the_step_is_made(strategy: str, micro: int) -> None:
    """Of 32 samples each of four ranks has 8, or one process all: its micro-batch, beside the memory of the same."""
    settings = (f"parallel.strategy={strategy}", "techniques.precision=bf16", "optimizer.type=sgd")
    memory = memory_plan(GIB, samples=micro, slots=micro * 512)
    found = planned(recipe(*settings), gpu_for("h200"), HERE, lambda *_: memory, gpus=4).plain()
    assert (found["strategy"], found["precision"], found["optimizer"]) == (strategy, "bf16", "sgd")
    assert found["micro_batch_size"] == found["memory"]["samples"] == micro
    assert made("h200").plain()["strategy"] is None, "one GPU shares nothing"


def test_the_formula_is_that_of_the_run() -> None:
    eight_bit = made("h200", "techniques.precision=fp32", "optimizer.type=adamw8bit").formula
    assert eight_bit.states_bytes == 2 * PARAMETERS
    plain = made("h200", "optimizer.type=sgd", "optimizer.momentum=0", "optimizer.nesterov=false").formula
    assert plain.states_bytes == 0


# -- how it is worked out ----------------------------------------------------------------------------------------------


def test_nothing_is_traced_twice_and_a_run_that_fits_once() -> None:
    for gpu, most in (("h200", 1), ("v100-32gb", 9)):
        gpu, traced = gpu_for(gpu), list[str]()

        def trace(chosen: Recipe, gpus: int, gpu: Gpu = gpu, traced: list[str] = traced) -> MemoryPlan:
            traced.append(f"{gpus} {chosen.to_yaml()}")
            return bert_large(chosen, gpu)

        planned(recipe(), gpu, HERE, trace)
        assert len(traced) == len(set(traced)) <= most, f"{len(traced)} traces, {len(set(traced))} different"


def test_every_trace_is_of_what_train_would_choose() -> None:
    """Beside recompute steps are not captured, and in fp16 more is chosen: so settings are changed before choosing."""
    gpu, seen = gpu_for("v100-32gb"), list[Recipe]()

    def trace(chosen: Recipe, _: int) -> MemoryPlan:
        seen.append(chosen)
        return bert_large(chosen, gpu)

    planned(recipe(), gpu, HERE, trace)
    recomputed = [chosen for chosen in seen if chosen.techniques.recompute]
    assert recomputed
    assert all(chosen.techniques.capture is False for chosen in recomputed)
    assert all(chosen.device == "cuda" for chosen in seen)


def test_sizes_that_a_trace_refuses_end_no_search() -> None:
    """Batch normalisation cannot train on one sample."""
    gpu = gpu_for("v100-16gb")

    def memory(chosen: Recipe) -> MemoryPlan:
        if (chosen.loop.micro_batch_size or 32) < 3:
            raise RecipeError("loop.micro_batch_size", "batch normalisation cannot train on a sample by itself")
        return memory_plan(5 * GIB + (chosen.loop.micro_batch_size or 32) * 3 * GIB, gpu=gpu.name)

    found = made(gpu, memory=memory)
    assert found.largest is not None
    assert found.largest.samples == 3


def test_ranks_share_the_batch() -> None:
    gpu, asked = gpu_for("v100-16gb"), list[int]()

    def trace(chosen: Recipe, gpus: int) -> MemoryPlan:
        micro = min(chosen.loop.micro_batch_size or 32, 32 // gpus)
        asked.append(gpus)
        decision = Decision(setting="parallel.strategy", value="fsdp", reason="it fits no GPU whole")
        return memory_plan(micro * GIB, samples=micro, slots=micro * 512, decisions=(decision,))

    found = planned(recipe(), gpu, HERE, trace, gpus=4)
    assert found.largest is not None
    assert (found.largest.samples, asked) == (8, [4]), "a GPU's share of 32 is 8"
    assert shown(found).startswith("reviews on one of 4 x Tesla V100-SXM2-32GB\n")
    assert "a GPU's share of the batch" in shown(found)
    assert found.formula.weights_bytes == PARAMETERS * 4 // 4, "fsdp's shards"


def test_the_formula_of_copies_in_shards_is_that_of_a_copy() -> None:
    settings = ("parallel.strategy=fsdp", "parallel.shard_size=2")
    found = planned(recipe(*settings), gpu_for("h200"), HERE, lambda *_: memory_plan(GIB), gpus=4)
    assert found.formula.gradients_bytes == PARAMETERS * 4 // 2, "two copies, each in two shards"


def test_dp_is_one_process_that_has_all_gpus() -> None:
    asked = list[tuple[str, int]]()

    def trace(chosen: Recipe, gpus: int) -> MemoryPlan:
        asked.append((chosen.parallel.strategy, gpus))
        fits = chosen.parallel.strategy == "fsdp"
        return memory_plan(10 * GIB if fits else 40 * GIB, samples=32, slots=32 * 512)

    gpu, settings = gpu_for("v100-16gb"), "parallel.strategy=dp"
    found = planned(recipe(settings), gpu, HERE, trace, gpus=2)
    assert asked[0] == ("dp", 2)
    assert ("fsdp", 2) in asked, "a process a GPU"
    assert shown(found).startswith("reviews on the first of 2 x Tesla V100-SXM2-32GB\n")
    assert "--gpus 2 --set parallel.strategy=fsdp" in shown(found)
    whole = planned(recipe(settings), gpu, HERE, lambda *_: memory_plan(10 * GIB, samples=32, slots=99), gpus=2)
    assert whole.largest is not None
    assert whole.largest.samples == 32, "the process's micro-batch, not a GPU's share"
    assert "the whole batch" in shown(whole)
    with pytest.raises(RecipeError, match="--gpus 2"):
        planned(recipe(settings), gpu, HERE, trace)


def test_more_gpus_are_typed_as_a_flag() -> None:
    found = made("v100-16gb", memory=lambda _: memory_plan(40 * GIB), on_gpus=lambda gpus: 40 * GIB // gpus)
    told = section(shown(found), "what would make it fit")
    assert told[0] == "  1.  --gpus 4 --set parallel.strategy=fsdp"
    assert "saves 30.00 GiB: 10.00 GiB in all, fits" in told[1]
    assert found.plain()["changes"][0]["gpus"] == 4


# -- mistakes ----------------------------------------------------------------------------------------------------------


class Stub:
    """In place of the predictor: answers, or raises, at once."""

    answer: Callable[[Recipe, Gpu], MemoryPlan] = staticmethod(bert_large)
    asked: list[dict[str, Any]]

    def __enter__(self) -> Stub:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def start(self) -> None:
        pass

    def plan(self, chosen: Recipe, gpu: Gpu, **options: Any) -> MemoryPlan:
        type(self).asked.append(options)
        return type(self).answer(chosen, gpu)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[Stub]:
    monkeypatch.setattr(Stub, "asked", [], raising=False)
    monkeypatch.setattr(planning, "Predictor", Stub)
    monkeypatch.setattr(planning, "this_machine", lambda: HERE)
    return Stub


@pytest.fixture
def paceline(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Paceline:
    return in_process(monkeypatch, capsys)


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    path = tmp_path / "reviews.yaml"
    path.write_text(RECIPE)
    return path


def test_the_command_prints_the_plan(stub: type[Stub], paceline: Paceline, reviews: Path) -> None:
    done = paceline("plan", reviews, "--gpu", "v100-32gb")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("reviews on Tesla V100-SXM2-32GB\n")
    assert "\x1b" not in done.out, "no colours in a pipe"
    assert done.out.endswith("\n")
    assert not done.out.endswith("\n\n")
    assert stub.asked[0] == {"read_data": False, "world_size": 1}


def test_json_is_alone_on_standard_output(stub: type[Stub], paceline: Paceline, reviews: Path) -> None:
    done = paceline("plan", reviews, "--gpu", "40GiB", "--json", "--read-data", "--set", "loop.batch_size=4")
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert (found["batch_size"], found["memory"]["capacity"]) == (4, 40 * GIB)
    assert stub.asked[0]["read_data"] is True


def test_model_and_data_as_train_has_them(stub: type[Stub], paceline: Paceline) -> None:
    done = paceline("plan", "--model", "bert-base-uncased", "--data", "notes.csv", "--gpu", "h200")
    assert (done.code, done.out.splitlines()[0]) == (0, "notes on NVIDIA H200")


def test_without_a_flag_the_first_gpu_of_this_machine(
    stub: type[Stub], paceline: Paceline, reviews: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = tuple(Gpu(name=name, memory_bytes=24 * GIB, compute_capability=(8, 6)) for name in ("first", "second"))
    monkeypatch.setattr(planning, "this_machine", lambda: replace(HERE, gpus=gpus))
    assert paceline("plan", reviews).out.startswith("reviews on first\n")
    assert paceline("plan", reviews, "--gpu", "h200").out.startswith("reviews on NVIDIA H200\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["RECIPE", "--gpus", "all"], ["--gpu: missing", "no NVIDIA GPU", "--gpu 24GiB"]),
        (["RECIPE", "--gpus", "all", "--gpu", "h200"], ["--gpus all with --gpu h200", "--gpu h200 --gpus 8"]),
        (["RECIPE"], ["--gpu: missing", "no NVIDIA GPU", "--gpu 24GiB"]),
        (["RECIPE", "--gpu", "h2000"], ["unknown GPU", "h200"]),
        (["RECIPE", "--gpu", "24"], ["needs its unit", "24GiB"]),
        (["RECIPE", "--gpu", "0GiB"], ["every GPU has memory"]),
        (["RECIPE", "--gpu", "v100-32gb", "--set", "techniques.precision=bf16"], ["compute capability 8.0", "fp16"]),
        (["RECIPE", "--gpu", "h200", "--set", "device=cpu"], ["device = cpu", "a GPU's memory", "--set device=auto"]),
        (["RECIPE", "--gpu", "h200", "--set", "loop.batchsize=3"], ["unknown key", "batch_size"]),
        (["RECIPE", "--gpu", "h200", "--set", "loop.micro_batch_size=64"], ["micro_batch_size = 64"]),
        (["--gpu", "h200"], ["--model and --data: missing", "paceline plan --model", "paceline plan RECIPE.yaml"]),
        (["absent.yaml", "--gpu", "h200"], ["absent.yaml: no such recipe"]),
        (["FOLDER", "--gpu", "h200"], ["is a folder", "paceline plan RECIPE.yaml", "--model NAME --data"]),
        (["rows.csv", "--gpu", "h200"], ["--model: missing", "paceline plan --model", "--data rows.csv"]),
    ],
)
def test_a_mistake_is_answered_before_anything_is_traced(
    stub: type[Stub], paceline: Paceline, reviews: Path, arguments: list[str], words: list[str]
) -> None:
    named = {"RECIPE": str(reviews), "FOLDER": str(reviews.parent)}
    done = paceline("plan", *(named.get(argument, argument) for argument in arguments), "--json")
    assert (done.code, done.out) == (2, ""), done.err
    assert all(word in done.err for word in words), done.err
    assert "Traceback" not in done.err
    assert not stub.asked


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ModelError("model.source = x: config.json cannot be read", "it is no JSON", "download it again"), 2),
        (RecipeError("data.image_size: not set", "nothing says how large images are", "--read-data"), 2),
        (ModelError("the model's step cannot be traced", "aten.nonzero asks for numbers", "train on a GPU"), 2),
        (UserError("2 GPUs", "not traced yet", "plan one"), 2),
        (PlanFailed("Traceback of the tracing process"), 1),
    ],
)
def test_what_the_tracing_process_says_is_passed_on(
    stub: type[Stub],
    paceline: Paceline,
    reviews: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: UserError,
    code: int,
) -> None:
    def fail(chosen: Recipe, gpu: Gpu) -> MemoryPlan:
        raise error

    monkeypatch.setattr(stub, "answer", staticmethod(fail))
    done = paceline("plan", reviews, "--gpu", "h200", "--gpus", "2", "--json")
    assert (done.code, done.out) == (code, "")
    assert done.err == f"paceline: {error}\n"
    assert stub.asked == [{"read_data": False, "world_size": 2}]


def test_from_python_it_is_the_same(stub: type[Stub]) -> None:
    import paceline as library

    told: list[str] = []
    found = library.plan(recipe(), gpu="v100-32gb", progress=told.append)
    assert found.changes == made("v100-32gb").changes
    assert told[0] == "tracing the step"
    assert "tracing the step --set techniques.recompute=true" in told
    assert len(told) == len(stub.asked)


def test_a_machine_without_a_gpu_is_told_what_is_wrong_with_it(stub: type[Stub]) -> None:
    with pytest.raises(UserError, match="no NVIDIA GPU is visible"):
        planning.plan(recipe())
    assert not stub.asked


def test_what_is_tried_in_any_case_is_traced_beside_the_search_and_once() -> None:
    """With two threads the plan is that of one, every run is traced once, and both threads had work."""
    gpu, threads = gpu_for("v100-32gb"), dict[str, int]()
    asked: list[str] = []

    def trace(chosen: Recipe, gpus: int) -> MemoryPlan:
        name = threading.current_thread().name.partition("_")[0]
        threads[name] = threads.get(name, 0) + 1
        asked.append(repr((chosen, gpus)))
        time.sleep(0.01)
        return bert_large(chosen, gpu)

    assert planned(recipe(), gpu, HERE, trace, beside=trace) == made("v100-32gb")
    assert len(set(asked)) == len(asked)
    assert threads.keys() == {"MainThread", "paceline-trace"}, threads


def test_what_is_refused_beside_the_search_is_not_offered() -> None:
    gpu = gpu_for("v100-32gb")

    def trace(chosen: Recipe, gpus: int) -> MemoryPlan:
        if chosen.techniques.recompute is True:
            raise RecipeError("techniques.recompute", "not with this model", "leave it out")
        return bert_large(chosen, gpu)

    found = planned(recipe(), gpu, HERE, trace, beside=trace)
    assert found == planned(recipe(), gpu, HERE, trace)
    assert not any("techniques.recompute=true" in made.change.settings for made in found.changes)
