"""``paceline doctor``: what this machine has, what is missing, and the command that adds it."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from paceline.contract.errors import RecipeError, UserError, in_a_line
from paceline.contract.files import cache_folder
from paceline.contract.streams import Screen
from paceline.machine.cluster import find_place
from paceline.machine.disk import require_operator
from paceline.machine.facts import Facts, ask, this_machine
from paceline.machine.gpus import peak_rates
from paceline.machine.jobs import idle_tasks
from paceline.recipe.techniques import ENTRIES, OWN_SETTINGS, entry_of, users_of

GIB = 2**30

LITTLE_ROOM_BYTES = 5 * GIB
"""Less free room than a pretrained model, its checkpoints and an encoded data set usually take."""

GPU_PACKAGES = ("bitsandbytes", "torchao")
"""Extras that serve machines with a GPU alone."""

INSTALLS = {package: entry.install for entry in ENTRIES if entry.install for package in entry.packages}
"""Extras that take more than plain pip, by the package that they bring."""

_BY = {"paceline": "paceline's launcher", "environment": "variables"}
"""Who numbered a rank, where the word alone does not say it."""

SUPPORTED_PYTHON = ((3, 11), (3, 13))


@dataclass(frozen=True)
class Finding:
    """One line of the examination; ``fix`` is a command, given when ``state`` is not fine."""

    topic: str
    text: str
    state: Literal["fine", "note", "missing"] = "fine"
    fix: str = ""


def doctor() -> Facts:
    """Print what this machine has and lacks, and return the facts.

    Loads torch to see whether it works with the GPU; whatever is broken is printed, never raised.
    """
    facts = this_machine()
    findings = [*machine(facts), *gpus(facts), *links(facts), *packages(facts), *disks(facts)]
    findings += [*torch_works(facts), *rooms()]
    screen = Screen(sys.stdout)
    screen.write(shown(findings))
    screen.flush()
    return facts


def shown(findings: Iterable[Finding]) -> str:
    """The findings as text, a line each, with the fixes below the lines that need one; a summary ends it."""
    findings = list(findings)
    width = max(len(finding.topic) for finding in findings)
    marks = {"fine": " ", "note": "-", "missing": "!"}
    lines = []
    for finding in findings:
        head, *rest = finding.text.splitlines() or [""]
        lines.append(f"{marks[finding.state]} {finding.topic:<{width}}  {head}")
        lines += [f"  {'':<{width}}  {line}" for line in rest]
        if finding.fix:
            lines.append(f"  {'':<{width}}  fix: {finding.fix}")
    num_missing = sum(finding.state == "missing" for finding in findings)
    lines.append(f"{num_missing} to mend (marked !)" if num_missing else "nothing is missing")
    return "\n".join(lines) + "\n"


def machine(facts: Facts) -> list[Finding]:
    """Python, the processor and main memory."""
    version = tuple(int(part) for part in re.findall(r"\d+", facts.python)[:2])
    first, last = SUPPORTED_PYTHON
    supported = first <= version <= last
    names = [".".join(map(str, bound)) for bound in SUPPORTED_PYTHON]
    memory = f"{facts.memory_bytes / GIB:.1f} GiB" if facts.memory_bytes else "unknown"
    found = [
        Finding("system", facts.platform),
        Finding(
            "python",
            facts.python if supported else f"{facts.python}: paceline is tested with {names[0]} to {names[1]}",
            "fine" if supported else "missing",
            "" if supported else f"make a new environment: python{names[1]} -m venv .venv",
        ),
        Finding("processor", f"{facts.cpu_model or 'unknown'}, {facts.cpu_count} usable"),
        Finding("memory", memory),
    ]
    return [*found, *joins(facts)]


def joins(facts: Facts) -> list[Finding]:
    """How a run that is started here would join others: as which rank, or alone."""
    inside = f"inside Slurm job {os.environ.get('SLURM_JOB_ID', '')}".rstrip() if facts.in_slurm else ""
    try:
        place = find_place(os.environ)
    except UserError as error:
        return [Finding("cluster", "; ".join(filter(None, (inside, error.what, error.why))), "missing", error.fix)]
    if not place.is_rank:
        alone = Finding("cluster", f"{inside}: a run started here is one process")
        if idle := idle_tasks(os.environ):
            alone = replace(alone, text=f"{alone.text} of {idle}", state="note", fix="srun paceline train ...")
        return [alone] if inside else []
    meeting = place.init_method or ""
    if meeting == "env://":
        meeting = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    rank = f"rank {place.rank} of {place.world_size}, by {_BY.get(place.started, place.started)}"
    return [Finding("cluster", f"{inside}{': ' * bool(inside)}{rank}, meeting at {meeting.removeprefix('tcp://')}")]


def gpus(facts: Facts) -> list[Finding]:
    """Each GPU with the rates that are known of it, and why none can be used."""
    found = []
    for index, gpu in enumerate(facts.gpus):
        parts = [gpu.name]
        if gpu.memory_bytes:
            parts.append(f"{gpu.memory_bytes / GIB:.0f} GiB")
        if gpu.compute_capability:
            parts.append("compute capability {}.{}".format(*gpu.compute_capability))
        if rates := peak_rates(gpu.name):
            flops, kind = (rates.bf16_flops, "bf16") if rates.bf16_flops else (rates.fp16_flops, "fp16")
            parts.append(f"{flops / 1e12:.0f} TFLOP/s {kind}, {rates.memory_bytes_per_second / 1e12:.2f} TB/s at best")
        parts.append(f"driver {gpu.driver}" if gpu.driver else "driver unknown")
        found.append(Finding(f"GPU {index}", ", ".join(parts)))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None:
        found.append(Finding("GPU setting", f"CUDA_VISIBLE_DEVICES={hidden}", "note"))
    if not facts.gpus:
        found.append(Finding("GPU", f"{facts.cuda_problem}; runs use the CPU", "note"))
    elif facts.cuda_problem:
        found.append(Finding("GPU", facts.cuda_problem, "missing", _cuda_fix(facts)))
    return found


def links(facts: Facts) -> list[Finding]:
    """How several GPUs are connected, as nvidia-smi draws it."""
    if len(facts.gpus) < 2:
        return []
    answer = ask(["nvidia-smi", "topo", "-m"])
    if answer is None:
        return [Finding("links", "unknown: nvidia-smi topo gives no answer", "note")]
    plain = re.sub(r"\x1b\[[0-9;]*m", "", answer)  # the header is underlined for terminals
    matrix = plain.partition("\n\n")[0].strip("\n").expandtabs(8)
    return [Finding("links", matrix)]


def packages(facts: Facts) -> list[Finding]:
    """Every requirement that is not met, and every extra that is not complete."""
    from packaging.requirements import Requirement

    have = ", ".join(f"{name} {facts.versions[name]}" for name in ("torch", "transformers") if facts.versions.get(name))
    found = [Finding("packages", have or "neither torch nor transformers is installed")]
    try:
        requirements = importlib.metadata.requires("paceline") or []
    except importlib.metadata.PackageNotFoundError:
        unknown = "paceline runs from its source without being installed, so what it needs was not compared"
        return [*found, Finding("packages", unknown, "note")]
    lacking: dict[str, list[str]] = {}
    for text in requirements:
        requirement = Requirement(text)
        extras = re.findall(r"extra == ['\"]([\w-]+)['\"]", str(requirement.marker or ""))
        useless = requirement.name in GPU_PACKAGES and not facts.gpus
        if extras == ["dev"] or requirement.name == "paceline" or useless:
            continue
        if not _met(requirement.name, str(requirement.specifier)):
            lacking.setdefault(extras[0] if extras else "", []).append(f"{requirement.name}{requirement.specifier}")
    for extra, names in sorted(lacking.items()):
        plain = f"pip install 'paceline[{extra}]'"
        fix = INSTALLS.get(extra, plain) if extra else "pip install " + " ".join(f"'{name}'" for name in names)
        text = f"optional, not installed: {', '.join(names)}" if extra else f"required: {', '.join(names)}"
        found.append(Finding(extra or "packages", text, "note" if extra else "missing", fix))
    return found


def disks(facts: Facts) -> list[Finding]:
    """Whether DeepSpeed, where it is installed, can move states to a disk."""
    users = users_of(OWN_SETTINGS["offload_folder"])
    if not all(facts.versions.get(package) for user in users for package in entry_of(user).packages):
        return []
    try:
        require_operator("parallel.offload_folder", on_gpu=facts.cuda_problem is None)
    except RecipeError as error:
        return [Finding("disk", f"{error.what} is refused: {error.why}", "note", error.fix)]
    return [Finding("disk", "parallel.offload_folder: there is what DeepSpeed's operator is compiled with")]


def torch_works(facts: Facts) -> list[Finding]:
    """Whether torch loads, and computes on the GPU where there is one."""
    if facts.versions.get("torch") is None:
        return []
    try:
        import torch

        text = f"torch {torch.__version__} loads, {torch.get_num_threads()} threads"
        if facts.cuda_problem is None:
            ones = torch.ones(16, 16, device="cuda")
            right = int((ones @ ones).sum()) == 16**3
            text += f", CUDA {torch.version.cuda}; {torch.cuda.get_device_name()} computes"
            if not right:
                return [Finding("torch", f"{text} wrong numbers", "missing", "nvidia-smi -q, or try another machine")]
    except Exception as error:  # a diagnosis: any way of being broken is the finding
        return [Finding("torch", f"does not work: {in_a_line(error)}", "missing", _cuda_fix(facts))]
    return [Finding("torch", text)]


def rooms() -> list[Finding]:
    """Free disk space where runs, encoded data and downloaded models go."""
    hub = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    found = []
    for topic, folder in (("runs", Path.cwd()), ("cache", cache_folder()), ("models", Path(hub))):
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        little = free < LITTLE_ROOM_BYTES
        text = f"{folder}: {free / GIB:.1f} GiB free"
        fixes = {"runs": "--out DIR", "cache": "export PACELINE_CACHE=DIR", "models": "export HF_HOME=DIR"}
        fix = f"free some space, or choose another disk: {fixes[topic]}" if little else ""
        found.append(Finding(f"{topic} disk", text, "missing" if little else "fine", fix))
    return found


def _met(name: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    try:
        return SpecifierSet(specifier).contains(importlib.metadata.version(name), prereleases=True)
    except importlib.metadata.PackageNotFoundError:
        return False


def _cuda_fix(facts: Facts) -> str:
    """The command that gives this machine a torch that works with its driver."""
    if facts.torch_cuda is None:
        return "pip install --force-reinstall torch"
    return f"update the driver, or install a torch built for an older CUDA than {facts.torch_cuda}"
