"""Every way of splitting a run over GPUs beside plain DDP: the same losses, how fast, in how much memory?

    python benchmarks/splits.py --gpus 2 --predict h100-80gb --out splits.jsonl   # needs no GPU
    python benchmarks/splits.py --gpus 2 --out splits.jsonl [--rounds 3] [--only PATTERN] [--deadline SECONDS]
    python benchmarks/splits.py --processes 2 --size tiny --out splits.jsonl   # gloo on a CPU: that all of this runs

Two questions, each a fresh process of ``paceline train`` on random texts. *equal*: twelve fp32 steps without dropout;
told is the largest difference of a loss to that of the first way, as a share of it. *fast*: the run as it chooses by
itself; told are samples a second over the second half of the steps, the allocator's peak of the fullest GPU, and how
far from it the prediction was that had been made before. One JSON line a run, at once; the same command again goes on
where it stopped. A way that fails is a line that says why. The table is printed last, and written beside the records.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.bench.cells import in_turns
from paceline.bench.records import Record, Records
from paceline.bench.spread import Spread
from paceline.bench.start import SOURCE, environment, train
from paceline.contract.errors import PacelineError
from paceline.machine.facts import Gpu, this_machine
from paceline.machine.gpus import facts_with, gpu_for
from paceline.memory.predict import Predictor
from paceline.recipe import Recipe
from paceline.recipe.choose import choose

OFFLOADED = "parallel.offload=optimizer"
DEEPSPEED = "parallel.strategy=deepspeed"
DISK = "{scratch}"
"""Stands for the folder that a run may fill."""

ONE_PROCESS = "parallel.strategy=dp"
"""The strategy that takes all GPUs without ranks."""

WAYS: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "ddp": (1, ()),
    "dp": (2, (ONE_PROCESS,)),
    "fsdp": (2, ("parallel.strategy=fsdp",)),
    "deepspeed 2": (1, (DEEPSPEED, "parallel.stage=2")),
    "deepspeed 2, offload": (1, (DEEPSPEED, "parallel.stage=2", OFFLOADED)),
    "deepspeed 3": (1, (DEEPSPEED, "parallel.stage=3")),
    "deepspeed 3, offload": (1, (DEEPSPEED, "parallel.stage=3", "parallel.offload=parameters")),
    "deepspeed 3, disk": (1, (DEEPSPEED, "parallel.stage=3", OFFLOADED, f"parallel.offload_folder={DISK}")),
    "tensor 2": (2, ("parallel.tensor=2",)),
    # four micro-batches a step: with one, every stage would wait for all others
    "pipeline 2": (2, ("parallel.pipeline=2", "loop.micro_batch_size=8")),
}
"""Name -> the least number of GPUs, and settings. What is left of the GPUs is data parallel around it."""

SIZES: Mapping[str, tuple[Mapping[str, Any], int, int]] = {
    "tiny": ({"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 128}, 64, 12),
    "distilbert": ({}, 256, 60),
}
"""Name -> changes of DistilBERT's configuration, tokens kept of a text, steps of *fast*."""

EQUAL_STEPS = 12


def recipe_of(question: str, size: str, settings: Sequence[str]) -> Record:
    """The recipe of one run, as YAML has it."""
    config, length, steps = SIZES[size]
    drops = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    plain: Record = {
        "model": {"config": {"model_type": "distilbert", **config, **(drops if question == "equal" else {})}},
        "data": {
            "source": "builtin:random",
            "random": {"samples": 2048, "length": [10, length - 4], "vocabulary": 30522 if size != "tiny" else 1000},
            "max_length": length,
            "splits": {"validation": 0, "test": 0},
        },
        "loop": {
            "batch_size": 32,
            "drop_last": True,
            "max_steps": EQUAL_STEPS if question == "equal" else steps,
            "save_best": False,
            "evaluate_every": "never",
            "checkpoint_every": "never",
        },
        "observe": {"console": "off", "report": False, "memory_plan": False},
    }
    if question == "equal":
        # with the usual epsilon AdamW turns the rounding of tiny gradients into steps of the learning rate's size
        plain["optimizer"] = {"lr": 2e-4, "eps": 1e-4}
        off = ("packing", "compile", "fusion", "capture", "early_pooling", "fused_qkv", "embedding_gradient")
        plain["techniques"] = {"precision": "fp32", **dict.fromkeys(off, False)}
    return plain


def run(question: str, size: str, settings: Sequence[str], where: Sequence[str], seconds: float) -> Record:
    """What is known of one fresh process at its end."""
    with tempfile.TemporaryDirectory() as scratch:
        recipe, out, disk = (Path(scratch) / name for name in ("recipe.yaml", "run", "disk"))
        disk.mkdir()
        recipe.write_text(json.dumps(recipe_of(question, size, settings)))  # JSON is YAML
        options = [*where, *(part for setting in settings for part in ("--set", setting.replace(DISK, str(disk))))]
        trained = train(
            recipe,
            out,
            options,
            environment=environment(sources=(SOURCE,), all_gpus=True),
            log=Path(scratch) / "log.txt",
            limit_seconds=seconds,
        )
    outcome, summary = trained.outcome, trained.summary
    if outcome.status == "timeout":
        return {"error": f"not over after {seconds:.0f} s"}
    if outcome.status != "ok" or summary is None:
        return {"error": outcome.error.strip()[-1500:]}
    return {
        "losses": [line.fields["loss"] for line in trained.steps],
        # where two ways part, and where a slow one waits
        "gradient_norms": [line.fields["gradient_norm"] for line in trained.steps],
        "step_seconds": [line.fields["seconds"] for line in trained.steps],
        "samples_per_second": trained.samples_per_second(len(trained.steps) // 2),
        "execution": summary["execution"],
        "memory": summary["memory"],
    }


def predict(size: str, settings: Sequence[str], gpu: Gpu, count: int, predictor: Predictor) -> Record:
    """What a GPU's allocator will have handed out at most, by ``paceline plan``."""
    here = [setting.replace(DISK, tempfile.gettempdir()) for setting in settings]
    recipe = Recipe.parse(recipe_of("fast", size, settings)).with_settings([*here, "device=cuda"])
    try:
        chosen, _ = choose(recipe, facts_with([gpu] * count, this_machine()), count)
        return {"allocated": predictor.plan(chosen, gpu, world_size=count).allocated, "gpu": gpu.name}
    except PacelineError as error:
        return {"error": str(error)}


def table(records: Sequence[Record], count: int) -> str:
    """A line a way: median and range over the rounds."""
    lines = [
        "| way | losses apart | samples/s | peak, MiB | predicted |",
        "|---|---|---|---|---|",
    ]
    base = _last(records, "equal", next(iter(WAYS)))
    for way, (least, _) in WAYS.items():
        if count < least:
            lines.append(f"| {way} | needs {least} GPUs |  |  |  |")
            continue
        equal, fast = _last(records, "equal", way), [r for r in _of(records, "fast", way) if "error" not in r]
        if equal is None or base is None or "error" in equal or "error" in base:
            apart = _why(equal)
        else:
            pairs = zip(equal["losses"], base["losses"], strict=True)
            apart = f"{max(abs(a - b) / abs(b) for a, b in pairs):.1e}"
        if not fast:
            lines.append(f"| {way} | {apart} | {_why(_last(records, 'fast', way))} |  |  |")
            continue
        rates = Spread.of(fast, "samples_per_second")
        assert rates is not None
        memory = fast[-1]["memory"] or {}
        peak = f"{memory['allocated'] / 2**20:,.0f}" if memory else ""
        plan = _last(records, "planned", way) or {"error": "not predicted"}
        near = f"{plan['allocated'] / memory['allocated'] - 1:+.1%}" if memory and "error" not in plan else _why(plan)
        spread = f" ({rates.low:,.0f} to {rates.high:,.0f}, n={rates.n})" if rates.n > 1 else ""
        lines.append(f"| {way} | {apart} | {rates.median:,.0f}{spread} | {peak} | {near} |")
    return "\n".join(lines) + "\n"


def _why(record: Record | None) -> str:
    """Why there is no figure, in a line."""
    said = (record or {}).get("error", "not run").splitlines()
    return next((line.strip().removeprefix("why: ") for line in said if "why:" in line), said[-1])


def _of(records: Sequence[Record], question: str, way: str) -> list[Record]:
    return [r for r in records if (r["question"], r["way"]) == (question, way)]


def _last(records: Sequence[Record], question: str, way: str) -> Record | None:
    return next(reversed(_of(records, question, way)), None)


def _turns(rounds: int) -> Iterator[tuple[str, int, str]]:
    yield from (("equal", 0, way) for way in WAYS)
    yield from (("fast", number, way) for way, number in in_turns(list(WAYS), rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpus", type=int)
    where.add_argument("--processes", type=int, help="on a CPU, with gloo")
    parser.add_argument("--predict", metavar="GPU", help="only predict the memory, on so many of these")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=SIZES, default="distilbert")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="ways to run beside ddp")
    parser.add_argument("--limit", type=float, default=180, metavar="SECONDS", help="of one run")
    parser.add_argument("--deadline", type=float, default=3600, metavar="SECONDS", help="start no run after them")
    asked = parser.parse_args()
    ends, first = time.monotonic() + asked.deadline, next(iter(WAYS))
    count = asked.gpus or asked.processes
    started = ["--gpus", str(count)] if asked.gpus else ["--processes", str(count)] if count > 1 else []
    device = [] if asked.gpus else ["device=cpu"]
    facts = this_machine()
    about = {
        "count": count,
        "size": asked.size,
        "device": facts.gpus[0].name if asked.gpus and facts.gpus else "cpu",
        "versions": {name: facts.versions.get(name) for name in ("torch", "transformers", "deepspeed")},
    }
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    records = Records(asked.out, key=("count", "size", "question", "round", "way"))
    if asked.predict:
        gpu = gpu_for(asked.predict)
        with Predictor() as predictor:
            for way, (least, settings) in WAYS.items():
                if count >= least and "error" in (records.get(count, asked.size, "planned", 0, way) or {"error": ""}):
                    found = predict(asked.size, settings, gpu, count, predictor)
                    records.add({"question": "planned", "round": 0, "way": way, **about, **found})
                    print(f"planned {way}: {found}", file=sys.stderr, flush=True)
        return
    for turn in _turns(asked.rounds):
        question, number, way = turn
        least, settings = WAYS[way]
        chosen = way == first or fnmatch.fnmatch(way, asked.only)
        left = ends - time.monotonic()
        before = records.get(count, asked.size, *turn)
        done = before is not None and "error" not in before
        if done or count < least or not chosen or left < 10:
            continue
        ranks = [] if ONE_PROCESS in settings else started
        found = run(question, asked.size, [*settings, *device], ranks, min(asked.limit, left))
        records.add({"question": question, "round": number, "way": way, **about, **found})
        told = found.get("error") or f"{found['samples_per_second']:,.0f} samples/s"
        print(f"{question} {number} {way}: {told}", file=sys.stderr, flush=True)
    text = table([r for r in records if (r["count"], r["size"]) == (count, asked.size)], count)
    asked.out.with_suffix(".md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
