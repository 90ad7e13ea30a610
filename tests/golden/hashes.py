"""Whole runs against hashes written down, so that a change that must not alter results is seen not to.

    python -m tests.golden.hashes [--check | --write] [--only PATTERN]

Trains every row of ``tests/golden/rows.py`` on the CPU and prints, of each, SHA-256 digests of

- weights: all tensors of the newest checkpoint and of the saved model, with names, dtypes and shapes;
- optimizer: all tensors of the checkpoint's optimizer states;
- metrics: losses, gradient norms, learning rates and counts of all steps, all evaluations, how the run ended;

and how its steps were carried out. ``--check`` compares them with the record in ``hashes-torch-<version>.json``, and
``--write`` writes them there: for a change that is meant to alter results, or for a new torch. Only the command line
and the functions of ``paceline`` are used, and files that docs/ describes, so that everything below them may move.

Bits are those of one thread and of instructions that every x86-64 machine with AVX2 has: torch, oneDNN and MKL are told
so before they load. Their kernels still differ by the maker of the CPU. Other machines have records of their own.

Exit code 0: as recorded; 1: not; 2: a run failed; 3: there is no record for this machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tests.golden.ranks import RowError, run
from tests.golden.rows import ROWS, write_data

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
}
"""Set before torch is loaded, for all ranks. Without one of those that pin instructions AVX-512 gives other bits."""

SAME, OTHER, FAILED, NO_RECORD = range(4)
"""Exit codes."""

PARTS = ("weights", "optimizer", "metrics", "path")

STEP = ["step", "epoch", "loss", "gradient_norm", "learning_rates", "samples", "tokens", "slots"]
STEP += ["correct", "counted", "skipped"]
EVALUATION = ["split", "step", "epoch", "loss", "metrics", "samples", "confusion", "train_metrics"]
SUMMARY = ["status", "steps", "applied_steps", "epochs", "padding_share", "best_step", "final"]
"""What counts of metrics.jsonl and summary.json: all but times, memory, names and texts."""

Found = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare with the record")
    what.add_argument("--write", action="store_true", help="write the record")
    parser.add_argument("--only", default="*", help="pattern of rows, such as 'fsdp*'")
    chosen = parser.parse_args()
    names = [name for name in ROWS if fnmatchcase(name, chosen.only)]
    if not names:
        parser.error(f"--only {chosen.only}: no row has such a name; there are {', '.join(ROWS)}")
    record = read_record()
    if chosen.check and record is None:
        print(
            f"no record for {machine()}: {record_file().name} has none; --write adds one, from a state to compare with"
        )
        return NO_RECORD
    begun = time.perf_counter()
    try:
        found = results(names)
    except RowError as error:
        print(error)
        return FAILED
    print(f"{len(found)} rows in {time.perf_counter() - begun:.0f} s, {machine()}")
    problems = unlike_each_other(found)
    if chosen.check:
        assert record is not None
        problems += unlike_the_record(found, record["rows"])
        if problems and record["made_with"] != made_with():
            problems.append(f"(recorded with {record['made_with']}; this is {made_with()})")
        if set(record["rows"]) != set(ROWS):
            problems.append(f"not in both the table and the record: {sorted(set(record['rows']) ^ set(ROWS))}")
    elif chosen.write:
        write_record(found)
    print("\n".join(problems) or ("all as recorded" if chosen.check else "rows that have to agree do"))
    return OTHER if problems else SAME


def results(names: Iterable[str]) -> dict[str, Found]:
    """Name -> digests, loss and path of each row; printed as they come.

    Raises:
        RowError: a run failed.
    """
    found: dict[str, Found] = {}
    with tempfile.TemporaryDirectory(prefix="golden-") as made:
        place = Path(made)
        os.environ["PACELINE_CACHE"] = str(place / "cache")
        write_data(place)
        for number, name in enumerate(names):
            begun, folder = time.perf_counter(), place / f"run-{number}"
            try:
                run(ROWS[name], place, folder)
            except RowError as error:
                raise RowError(f"{name}: {error}") from error
            found[name] = of_own_loop(folder) if ROWS[name].own_loop else of_run(folder)
            digests = "  ".join(found[name][part][:12] for part in PARTS[:3])
            print(f"{name:40} {digests}  {time.perf_counter() - begun:5.1f} s", flush=True)
    return found


def of_run(folder: Path) -> Found:
    """Digests of a run folder, as docs/checkpoints.md describes it."""
    newest = max((folder / "checkpoints").glob("step-*"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    steps = [{name: line[name] for name in STEP} for line in lines if line["kind"] == "step"]
    told = {
        "steps": steps,
        "evaluations": [{name: line[name] for name in EVALUATION} for line in lines if line["kind"] == "evaluation"],
        "summary": {name: summary[name] for name in SUMMARY},
        "used": [
            file.read_text("utf-8") for name in ("evaluated.json", "predicted.csv") if (file := folder / name).exists()
        ],
    }
    return {
        "weights": digest_of_tensors(newest / "model.safetensors", folder / "model" / "model.safetensors"),
        "optimizer": digest_of_tensors(newest / "optimizer.safetensors"),
        "metrics": digest(told),
        "path": summary["execution"],
        "last_loss": steps[-1]["loss"],
    }


def of_own_loop(folder: Path) -> Found:
    steps = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return {
        "weights": digest_of_tensors(folder / "model.safetensors"),
        "optimizer": digest_of_tensors(folder / "optimizer.safetensors"),
        "metrics": digest(steps),
        "path": {},
        "last_loss": steps[-1]["loss"],
    }


def digest_of_tensors(*files: Path) -> str:
    """SHA-256 of all tensors in safetensors files, in order of their names; not of what else is in the files."""
    from safetensors import deserialize

    total = hashlib.sha256()
    for file in files:
        for name, tensor in sorted(deserialize(file.read_bytes())):  # type: ignore[no-untyped-call]
            total.update(f"{name} {tensor['dtype']} {tensor['shape']}\n".encode())
            total.update(tensor["data"])
    return total.hexdigest()


def digest(plain: Any) -> str:
    """SHA-256 of plain data; JSON writes every float so that it is read back as the same."""
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def unlike_each_other(found: Mapping[str, Found]) -> list[str]:
    """A line for each row that should give what another one gives, and does not."""
    lines = []
    for name in found:
        other = ROWS[name].same_as
        if other is None or other not in found:
            continue
        if parts := [part for part in PARTS[:3] if found[name][part] != found[other][part]]:
            lines.append(f"{name}: {' and '.join(parts)} not as those of {other}")
    return lines


def unlike_the_record(found: Mapping[str, Found], recorded: Mapping[str, Found]) -> list[str]:
    """A line for each row, and how its last loss has moved, for a first look at how much is different."""
    lines = []
    for name in found.keys() & recorded.keys():
        here, there = found[name], recorded[name]
        if parts := [part for part in PARTS if here[part] != there[part]]:
            line = f"{name}: {' and '.join(parts)} not as recorded; last loss {here['last_loss']}"
            line += "" if here["last_loss"] == there["last_loss"] else f", recorded {there['last_loss']}"
            lines.append(line)
            if "path" in parts:
                lines.append(f"  path {here['path']}, recorded {there['path']}")
    return lines


def torch_version() -> str:
    """Without what says where the build comes from, such as ``+cpu``."""
    import torch

    return str(torch.__version__).partition("+")[0]


def machine() -> str:
    """What bits depend on: the key of a record."""
    import torch

    # MKL and oneDNN choose among kernels by the maker, also of the same instructions
    return f"torch {torch_version()}, {torch.backends.cpu.get_cpu_capability()}, {_of_the_cpu('vendor_id')}"


def _of_the_cpu(what: str) -> str:
    """What Linux says of the first processor, such as its ``model name``."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(what)), platform.processor())


def made_with() -> dict[str, str]:
    """What bits may depend on too: told where they differ from the record."""
    from importlib.metadata import version

    return {
        "cpu": _of_the_cpu("model name"),
        **{name: version(name) for name in ("transformers", "tokenizers", "numpy")},
    }


def record_file() -> Path:
    return Path(__file__).with_name(f"hashes-torch-{torch_version().rpartition('.')[0]}.json")


def read_record() -> Found | None:
    return _records().get(machine())


def write_record(found: Mapping[str, Found]) -> None:
    """Into the record of this machine; rows that were not run stay, rows that are no more go."""
    records = _records()
    kept = records.get(machine(), {}).get("rows", {})
    rows = {name: found.get(name) or kept[name] for name in ROWS if name in found or name in kept}
    records[machine()] = {"environment": ENVIRONMENT, "made_with": made_with(), "rows": rows}
    record_file().write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")


def _records() -> dict[str, Found]:
    file = record_file()
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    sys.exit(main())
