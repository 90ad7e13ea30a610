"""Does paceline learn what the Hugging Face Trainer learns? The same fine-tune, several seeds each, side by side.

    python benchmarks/imdb_accuracy.py --model MINILM_FOLDER --data imdb.jsonl.gz --out results/ --seeds 5

Both get the same splits, tokens, model and settings; every run is a process of its own. Writes one JSON line a run to
``results/records.jsonl`` and prints the table. Throughput is not compared here: with ``--parallel`` above 1 the runs
share the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workloads import write_dataset

from paceline.bench.start import SOURCE, environment, script_command
from paceline.machine.facts import this_machine
from paceline.prepare.preparation import encoded
from paceline.recipe import Recipe

CONTENDERS_FOLDER = Path(__file__).resolve().with_name("contenders")
CONTENDERS = ("hf_trainer", "paceline")

MARGIN = 0.003
"""Mean accuracies may differ by this much."""


def recipe(arguments: argparse.Namespace) -> Recipe:
    """The fine-tune; the same words are translated for the contender in ``write_workload``."""
    return Recipe.parse(
        {
            "name": "imdb-accuracy",
            "model": {"source": str(Path(arguments.model).resolve())},
            "data": {
                "source": str(Path(arguments.data).resolve()),
                "split": None,
                "splits": {"train": None, "validation": arguments.held_out[0], "test": arguments.held_out[1]},
                "max_length": 512,
            },
            "optimizer": {"lr": 5e-5, "weight_decay": 0.01, "clip_norm": 1.0},
            "schedule": {"type": "linear", "warmup": 0.06},
            "techniques": {"precision": arguments.precision},
            "loop": {
                "epochs": arguments.epochs,
                "batch_size": 32,
                "evaluate_every": "never",
                "checkpoint_every": "never",
                "save_best": False,
            },
            "observe": {"console": "plain", "log_every": 500, "memory_plan": False},
        }
    )


def write_workload(folder: Path, chosen: Recipe) -> None:
    """What a contender needs, in arrays and JSON."""
    dataset, _ = encoded(chosen)
    write_dataset(folder, dataset)
    shutil.copytree(str(chosen.model.source), folder / "model", dirs_exist_ok=True)
    loop = chosen.loop
    steps = -(-len(dataset.splits["train"]) // loop.batch_size) * loop.epochs
    spec = {
        "num_labels": len(dataset.label_names),
        "epochs": loop.epochs,
        "batch_size": loop.batch_size,
        "lr": chosen.optimizer.lr,
        "weight_decay": chosen.optimizer.decay,
        "clip_norm": chosen.optimizer.clip_norm,
        "warmup_steps": round(chosen.schedule.warmup * steps),
        "precision": chosen.techniques.precision,
        "workers": 2,
    }
    (folder / "spec.json").write_text(json.dumps(spec, indent=2))


def run_paceline(out: Path, chosen: Recipe, seed: int) -> dict[str, object]:
    folder = out / "runs" / f"paceline-{seed}"
    written = out / f"recipe-{seed}.yaml"
    written.write_text(chosen.with_settings([f"seed={seed}"]).to_yaml())
    command = [sys.executable, "-m", "paceline", "train", str(written), "--out", str(folder)]
    _run(command, environment(sources=(SOURCE,)), out / f"p{seed}.log")
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "contender": "paceline",
        "seed": seed,
        "steps": summary["steps"],
        "train_seconds": round(summary["seconds"]["train"], 2),
        "test_accuracy": summary["final"]["test"]["accuracy"],
        "test_loss": summary["final"]["test"]["loss"],
        "validation_accuracy": summary["final"]["validation"]["accuracy"],
        "path": summary["execution"],
    }


def run_trainer(out: Path, workload: Path, seed: int) -> dict[str, object]:
    command = script_command(CONTENDERS_FOLDER / "hf_trainer.py", str(workload), str(seed))
    printed = _run(command, environment(sources=(CONTENDERS_FOLDER,)), out / f"h{seed}.log")
    found = next(line for line in reversed(printed.splitlines()) if line.startswith('{"contender"'))
    return dict(json.loads(found))


def _run(command: list[str], variables: dict[str, str], log: Path) -> str:
    done = subprocess.run(command, text=True, capture_output=True, env=variables)
    log.write_text(done.stdout + done.stderr)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def table(records: list[dict[str, object]]) -> str:
    """Mean, spread and the verdict."""
    lines = ["| contender | n | test accuracy, mean | std | min | max |", "|---|---|---|---|---|---|"]
    means = {}
    for name in CONTENDERS:
        values = [float(str(r["test_accuracy"])) for r in records if r["contender"] == name]
        if not values:
            continue
        means[name] = statistics.fmean(values)
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        cells = (100 * x for x in (means[name], spread, min(values), max(values)))
        lines.append(f"| {name} | {len(values)} | " + " | ".join(f"{c:.2f} %" for c in cells) + " |")
    if len(means) < len(CONTENDERS):
        return "\n".join(lines)
    difference = means["paceline"] - means["hf_trainer"]
    verdict = "within" if abs(difference) <= MARGIN else "NOT within"
    lines.append(f"\npaceline - hf_trainer: {100 * difference:+.2f} points, {verdict} {100 * MARGIN:.1f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--held-out", type=int, nargs=2, default=(5000, 10000), metavar=("VALIDATION", "TEST"))
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time; accuracy does not mind")
    parser.add_argument("--only", choices=CONTENDERS, help="one of the two, beside what is known of the other")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    chosen = recipe(arguments)
    workload = arguments.out / "workload"
    write_workload(workload, chosen)
    started = time.time()
    with ThreadPoolExecutor(arguments.parallel) as pool:
        jobs = []
        for seed in range(arguments.seeds):
            if arguments.only != "paceline":
                jobs.append(pool.submit(run_trainer, arguments.out, workload, seed))
            if arguments.only != "hf_trainer":
                jobs.append(pool.submit(run_paceline, arguments.out, chosen, seed))
        records = [job.result() for job in jobs]
    machine = this_machine().plain()
    with (arguments.out / "records.jsonl").open("w") as file:
        head = {"command": sys.argv, "machine": machine, "recipe": chosen.resolved(), "seconds": time.time() - started}
        for record in (head, *records):
            file.write(json.dumps(record, default=str) + "\n")
    print(table(records))


if __name__ == "__main__":
    main()
