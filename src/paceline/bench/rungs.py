"""The ladders as data: which rungs there are, in which order, and what each changes against the one before.

The order is that of the acceleration tutorials, and then past it. Horovod and Apex are no rungs: DDP and torch's own
mixed precision have replaced them.
"""

from __future__ import annotations

import fnmatch
import importlib.util
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from paceline.contract.errors import UserError, nearest
from paceline.machine.facts import Facts

DISTRIBUTIONS = {"PIL": "pillow"}
"""Package -> what it is installed as, where that has another name."""

OURS = "paceline"
"""The contender that is paceline's own command line; every other is a script of ``contenders/``."""

ALL_DEVICES = -1
"""As Lightning names them."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One way to do the same work."""

    name: str
    contender: str
    change: str
    """What it changes against the rung before, in words."""
    settings: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Settings of the contender's script; for paceline, those of the recipe."""
    instead: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What stood in place of the settings that a rung of paceline's adds, for those above it where it cannot run."""
    packages: tuple[str, ...] = ()
    """That have to be installed beside paceline's own."""
    gpus: int = 0
    """That it takes at least; a rung of several takes all there are."""
    compiles: bool = False
    """Whether it needs a C++ compiler."""
    by_design: bool = False
    """Whether it learns something else on purpose: its quality is shown, and it is not held against the others."""
    launched: bool = False
    """Whether torchrun starts it, a process a GPU."""
    own_order: bool = False
    """Whether it draws an order of its own; only its last losses and its quality are compared."""


def _plain(name: str, change: str, *, by_design: bool = False, gpus: int = 0, **settings: Any) -> Rung:
    usual = {"pad": "longest", "precision": "fp32", "compile": False, "train": "all", "data_parallel": False}
    own = {**usual, **settings}
    return Rung(name=name, contender="plain_loop", change=change, settings=own, by_design=by_design, gpus=gpus)


def _lightning(name: str, change: str, *packages: str, gpus: int = 0, compiles: bool = False, **settings: Any) -> Rung:
    usual = {"precision": "32-true", "compile": False, "strategy": "auto", "devices": ALL_DEVICES if gpus > 1 else 1}
    return Rung(
        name=name,
        contender="lightning_trainer",
        change=change,
        settings={**usual, **settings},
        packages=("lightning", *packages),
        gpus=gpus,
        compiles=compiles,
    )


def _fabric(name: str, change: str, *packages: str, gpus: int = 0, **settings: Any) -> Rung:
    usual = {"precision": "32-true", "strategy": "auto", "devices": ALL_DEVICES if gpus > 1 else 1}
    return Rung(
        name=name,
        contender="fabric_loop",
        change=change,
        settings={**usual, **settings},
        packages=("lightning", *packages),
        gpus=gpus,
    )


def _images(name: str, change: str, *, gpus: int = 0, compiles: bool = False, **settings: Any) -> Rung:
    usual = {
        "precision": "fp32",
        "channels_last": False,
        "compile": False,
        "parallel": "none",
        "sync_batch_norm": False,
    }
    return Rung(
        name=name,
        contender="images_loop",
        change=change,
        settings={**usual, **settings},
        packages=("PIL",),
        gpus=gpus,
        compiles=compiles,
        launched=settings.get("parallel") == "ddp",
    )


def _accelerate(name: str, change: str, *packages: str, gpus: int = 0, **settings: Any) -> Rung:
    usual = {"precision": "no", "accumulation": 1, "recompute": False, "eight_bit": False}
    return Rung(
        name=name,
        contender="accelerate_loop",
        change=change,
        settings={**usual, **settings},
        packages=("accelerate", *packages),
        gpus=gpus,
    )


def _trainer(name: str, change: str, *, gpus: int = 0, compiles: bool = False, **settings: Any) -> Rung:
    usual = {"precision": "fp32", "compile": False, "grouped": False}
    own = {**usual, **settings}
    return Rung(
        name=name,
        contender="hf_trainer",
        change=change,
        settings=own,
        packages=("accelerate",),
        gpus=gpus,
        compiles=compiles,
        own_order=own["grouped"],
    )


OFF: Mapping[str, Any] = {
    "techniques.packing": False,
    "techniques.early_pooling": False,
    "techniques.channels_last": False,
    "techniques.fully_connected": False,
    "techniques.precision": "fp32",
    "techniques.fused_qkv": False,
    "techniques.fusion": False,
    "techniques.embedding_gradient": False,
    "techniques.compile": False,
    "techniques.capture": False,
    "data.resident": False,
}
"""paceline with every technique that does not change the result turned off."""


def _ours(changes: Sequence[tuple[str, str, int, Mapping[str, Any]]]) -> tuple[Rung, ...]:
    """Rungs of paceline: everything off, then one setting more at each, then all left to ``auto``, last on all GPUs.

    Args:
        changes: name, words, GPUs needed, settings.
    """
    rungs, settings = [], dict(OFF)
    off = "paceline's loop and engine, every technique off"
    rungs.append(Rung(name="paceline_off", contender=OURS, change=off, settings=settings))
    for name, words, gpus, more in changes:
        settings, before = {**settings, **more}, settings
        compiles = "techniques.compile" in more
        rungs.append(
            Rung(
                name=f"paceline_{name}",
                contender=OURS,
                change=words,
                settings=settings,
                instead={key: before[key] for key in more},
                gpus=gpus,
                compiles=compiles,
            )
        )
    rungs.append(Rung(name="paceline", contender=OURS, change="what paceline chooses by itself"))
    rungs.append(Rung(name="paceline_ddp", contender=OURS, change="the same on all GPUs, by DDP", gpus=2))
    return tuple(rungs)


def _deepspeed(stage: str) -> Rung:
    name = f"deepspeed_{stage}"
    words = f"DeepSpeed, ZeRO stage {stage.replace('_', ' with ')}"
    strategy = f"deepspeed_stage_{stage}"
    return _lightning(name, words, "deepspeed", gpus=1, precision="bf16-mixed", strategy=strategy, devices=ALL_DEVICES)


TEXT: tuple[Rung, ...] = (
    _plain("plain", "the tutorials' loop: fp32, every text padded to the maximum", pad="max"),
    _plain("plain_dynamic", "padded to the longest text of the batch"),
    Rung(
        name="features_svm",
        contender="features_svm",
        change="the model is only read: an SVM on its features",
        by_design=True,
    ),
    _plain("head_only", "only the head is trained", train="head", by_design=True),
    _lightning("lightning", "all layers again, the loop by Lightning's Trainer"),
    _lightning("lightning_fp16", "mixed precision, 16-mixed", gpus=1, precision="16-mixed"),
    _lightning("lightning_bf16", "mixed precision, bf16-mixed", precision="bf16-mixed"),
    _lightning("lightning_compile", "torch.compile", precision="bf16-mixed", compile=True, compiles=True),
    _plain("data_parallel", "the plain loop on all GPUs by DataParallel", data_parallel=True, gpus=2),
    _lightning("ddp", "Lightning on all GPUs by DDP, bf16", gpus=2, precision="bf16-mixed", strategy="ddp"),
    _deepspeed("2"),
    _deepspeed("2_offload"),
    _deepspeed("3"),
    _deepspeed("3_offload"),
    _lightning(
        "fsdp", "weights, gradients and states sharded by FSDP", gpus=2, precision="bf16-mixed", strategy="fsdp"
    ),
    _fabric("fabric", "the plain loop in Lightning Fabric"),
    _fabric(
        "fabric_deepspeed_2",
        "Fabric on all GPUs: DeepSpeed, ZeRO stage 2, 16-mixed",
        "deepspeed",
        gpus=2,
        precision="16-mixed",
        strategy="deepspeed_stage_2",
    ),
    _accelerate("accelerate", "the plain loop with Accelerate"),
    _accelerate("accelerate_accumulation", "4 micro-batches a step", accumulation=4),
    _accelerate("accelerate_recompute", "activations computed again", accumulation=4, recompute=True),
    _accelerate("accelerate_fp16", "fp16", gpus=1, accumulation=4, recompute=True, precision="fp16"),
    _accelerate(
        "accelerate_8bit",
        "AdamW with states of 8 bits",
        "bitsandbytes",
        gpus=1,
        accumulation=4,
        recompute=True,
        precision="fp16",
        eight_bit=True,
    ),
    _trainer("trainer", "the loop by Hugging Face's Trainer"),
    _trainer("trainer_grouped", "batches of texts of like length", grouped=True),
    _trainer("trainer_bf16", "bf16", gpus=1, grouped=True, precision="bf16"),
    _trainer("trainer_compile", "torch.compile", gpus=1, compiles=True, grouped=True, precision="bf16", compile=True),
    *_ours(
        (
            ("packing", "texts one after the other, no padding", 0, {"techniques.packing": True}),
            ("early_pooling", "the last block only where the head reads", 0, {"techniques.early_pooling": True}),
            ("bf16", "bf16", 1, {"techniques.precision": "bf16"}),
            ("fused_qkv", "query, key and value in one product", 0, {"techniques.fused_qkv": True}),
            ("fusion", "kernels of our own for what surrounds the products", 1, {"techniques.fusion": True}),
            ("resident", "all samples on the GPU", 1, {"data.resident": True}),
            ("capture", "steps captured as CUDA graphs", 1, {"techniques.capture": True}),
            ("compile", "torch.compile", 0, {"techniques.compile": True}),
        )
    ),
)

IMAGES: tuple[Rung, ...] = (
    _images("plain", "the tutorials' loop: fp32, one device"),
    _images("data_parallel", "all GPUs by DataParallel", gpus=2, parallel="data_parallel"),
    _images("ddp", "all GPUs by DDP, a process each", gpus=2, parallel="ddp"),
    _images("sync_batch_norm", "batch norms over all of them", gpus=2, parallel="ddp", sync_batch_norm=True),
    _images("bf16", "one device again, mixed precision, bf16", gpus=1, precision="bf16"),
    _images("fp16", "mixed precision, fp16 with a GradScaler", gpus=1, precision="fp16"),
    _images("channels_last", "bf16, channels last in memory", gpus=1, precision="bf16", channels_last=True),
    _images("compile", "torch.compile", gpus=1, compiles=True, precision="bf16", channels_last=True, compile=True),
    *_ours(
        (
            ("bf16", "bf16", 1, {"techniques.precision": "bf16"}),
            ("channels_last", "channels last in memory", 0, {"techniques.channels_last": True}),
            ("fully_connected", "convolutions of one pixel as products", 0, {"techniques.fully_connected": True}),
            ("resident", "all samples on the GPU", 1, {"data.resident": True}),
            ("capture", "steps captured as CUDA graphs", 1, {"techniques.capture": True}),
            ("compile", "torch.compile", 0, {"techniques.compile": True}),
        )
    ),
)

LADDERS: Mapping[str, tuple[Rung, ...]] = {"text": TEXT, "image": IMAGES}
"""By what the model reads."""

EVERY = tuple(rung for ladder in LADDERS.values() for rung in ladder)


def chosen(ladder: Sequence[Rung], names: Sequence[str]) -> tuple[Rung, ...]:
    """The rungs of these names, in the ladder's order; ``*`` and ``?`` stand for letters; no names: all of them.

    Raises:
        UserError: a name that no rung and no contender has.
    """
    if not names:
        return tuple(ladder)
    wanted: set[str] = set()
    for name in names:
        found = {rung.name for rung in ladder if fnmatch.fnmatchcase(rung.name, name)}
        found = found or {rung.name for rung in ladder if rung.contender == name}
        if not found:
            known = {rung.name for rung in ladder} | {rung.contender for rung in ladder}
            fix = f"{nearest(name, known)} paceline bench RECIPE --list shows all"
            raise UserError(f"--rungs {name}: no such rung", "neither a rung nor a contender is called so", fix)
        wanted |= found
    return tuple(rung for rung in ladder if rung.name in wanted)


def without(ladder: Sequence[Rung], unable: Collection[str]) -> tuple[Rung, ...]:
    """The ladder in which rungs of paceline's go without what the rungs below them that cannot run would have added."""
    found, missing = [], dict[str, Any]()
    for rung in ladder:
        if rung.contender == OURS and rung.settings:
            if rung.name in unable:
                missing |= rung.instead
            else:
                rung = replace(rung, settings={**rung.settings, **missing})
        found.append(rung)
    return tuple(found)


def obstacle(
    rung: Rung,
    facts: Facts,
    *,
    installed: Callable[[str], bool] = lambda package: importlib.util.find_spec(package) is not None,
    compiler: Callable[[], bool] = lambda: any(map(shutil.which, ("c++", "g++", "clang++"))),
) -> tuple[str, str] | None:
    """Why this machine cannot carry the rung out: (``absent`` or ``not here``, the reason); None: it can."""
    num_gpus = 0 if facts.cuda_problem else len(facts.gpus)
    if rung.gpus > num_gpus:
        needed = "a GPU" if rung.gpus == 1 else f"{rung.gpus} GPUs"
        there = "none" if num_gpus == 0 else str(num_gpus)
        return "not here", f"it needs {needed}, and this machine has {there}"
    if missing := [package for package in rung.packages if not installed(package)]:
        return "absent", f"pip install {' '.join(DISTRIBUTIONS.get(name, name) for name in missing)}"
    if rung.compiles and not compiler():
        return "not here", "it needs a C++ compiler, such as g++"
    return None
