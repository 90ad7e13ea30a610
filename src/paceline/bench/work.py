"""The work that every rung does: one CSV to learn from, one to be tested on, one model to begin with; of images, two
folders.

All of it is plain files: contenders read them without paceline, paceline reads them as any user's.
"""

from __future__ import annotations

import csv
import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.contract.errors import RecipeError, RunFolderError
from paceline.contract.files import disk_errors, write_atomically
from paceline.recipe import Recipe
from paceline.recipe.tasks import task_entry

if TYPE_CHECKING:
    from paceline.data.dataset import Dataset
    from paceline.data.table import Table
    from paceline.seams import Ids

FEWEST_STEPS = 2
"""One warms up, one is timed."""

PEER_OPTIMIZERS, PEER_SCHEDULES = ("adam", "adamw", "sgd"), ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class Source:
    """All rows of a recipe, written down."""

    modality: str
    """What the model reads: a key of ``LADDERS``."""
    train_rows: int
    heldout_rows: int
    split: str
    """Which split the held-out rows are."""
    labels: dict[str, int]
    """Names in the order of the model's outputs."""
    max_length: int
    mean: tuple[float, ...] = ()
    """By which images are normalised, a number a channel; empty for texts."""
    std: tuple[float, ...] = ()

    def file(self, split: str) -> str:
        """Name of the CSV, or of the folder of images, of ``train`` or ``heldout``."""
        return split if self.modality == "image" else f"{split}.csv"


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much of the work a cell does."""

    steps: int
    train_rows: int
    heldout_rows: int
    warm_up: int
    """Steps before the window in which the rate is measured."""


def write_source(recipe: Recipe, folder: Path) -> Source:
    """Rows in the recipe's splits, in an order drawn from its seed, so that any beginning is a random sample; and the
    model with its new head, and its tokenizer. Written once: a second call reads what the first has written.

    Raises:
        RecipeError: rows that no ladder is for, or none to be tested on.
        RunFolderError: what an earlier call has written is not whole.
        UserError: what ``train`` would say of data and model.
    """
    told = folder / "source.json"
    if told.exists():
        return _read_source(told)
    import numpy as np

    from paceline.data.sources import read
    from paceline.models.config import max_positions, read_config
    from paceline.models.images import image_settings, normalised_by, preferred_size
    from paceline.models.load import quiet
    from paceline.models.tokenizers import cutting_on
    from paceline.prepare.preparation import encoded, model_for, shape_decisions, size_of_vocabulary

    recipe = recipe.with_settings(["model.train=all"])
    config = read_config(recipe.model)
    size = preferred_size(recipe.model, config) if recipe.model.source else None
    shapes = shape_decisions(recipe, max_positions(config), size)
    recipe = recipe.with_settings(f"{each.setting}={each.value}" for each in shapes)
    table = read(recipe.data, task=recipe.task.type)
    _refuse(recipe, table)
    dataset, tokenizer = encoded(recipe)
    split = next((name for name in ("test", "validation") if len(dataset.splits.get(name, ()))), "")
    if not split:
        why = "a rung that is fast and learns nothing would not be seen"
        raise RecipeError("data.splits: no rows are held out", why, "--set data.splits.test=0.2")
    folder.mkdir(parents=True, exist_ok=True)
    random, counts = np.random.default_rng(recipe.seed), {}
    for name, ids in (("train", dataset.splits["train"]), ("heldout", dataset.splits[split])):
        counts[name] = len(ids)
        _write_rows(dataset, table, random.permutation(ids), folder / f"all_{name}")
    model: Any = model_for(recipe, config, dataset, size_of_vocabulary(recipe, dataset, tokenizer))
    with quiet(), disk_errors(folder / "model" / "config.json"):
        model.save_pretrained(folder / "model")
        if tokenizer is not None:
            with cutting_on(tokenizer, "right"):  # peers cut with it, and data.overflow is head
                tokenizer.save_pretrained(folder / "model")
    images = None
    if dataset.image_shape:
        images = normalised_by(image_settings(recipe.model, dataset.image_shape), recipe.data.normalise)
    found = Source(
        modality="text" if images is None else "image",
        train_rows=counts["train"],
        heldout_rows=counts["heldout"],
        split=split,
        labels={name: index for index, name in enumerate(dataset.label_names)},
        max_length=recipe.data.max_length,
        mean=images.mean if images else (),
        std=images.std if images else (),
    )
    write_atomically(told, json.dumps(asdict(found), indent=2, ensure_ascii=False).encode())
    return found


def _read_source(path: Path) -> Source:
    try:
        return Source(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        why = "it says which rows and labels the files beside it hold"
        raise RunFolderError(f"{path}: not whole", why, "choose another --out") from None


def _write_rows(dataset: Dataset, table: Table, order: Ids, path: Path) -> None:
    """A CSV of texts, or a folder of pictures, called ``path``."""
    from paceline.bench.pictures import write_pictures

    if table.texts is None:
        write_pictures(dataset, order, path)
    else:
        labels = [dataset.label_names[int(label)] for label in dataset.labels[order]]
        rows = list(zip((table.texts[at] for at in order), labels, strict=True))
        _write_csv(path.with_suffix(".csv"), rows)


def _refuse(recipe: Recipe, table: Table) -> None:
    """Rows that no contender has a script for."""
    kind = "texts" if table.texts is not None else "images" if table.images is not None else "bare tokens"
    kind = "pairs of texts" if table.pairs is not None else kind
    if kind not in ("texts", "images") or table.kind is None or not task_entry(table.kind).benched:
        why = "the ladder's contenders classify single texts or images, each with one label"
        fix = "bench a recipe of such samples, for example recipes/bench_small.yaml"
        raise RecipeError(f"data.source = {recipe.data.source}: {kind}, {table.kind}", why, fix)


def whole(recipe: Recipe, source: Source) -> Extent:
    """All that the recipe says.

    Raises:
        RecipeError: that is fewer steps than can be timed.
    """
    per_epoch = steps_per_epoch(recipe, source.train_rows)
    steps = per_epoch * recipe.loop.epochs
    if recipe.loop.max_steps is not None:
        steps = min(steps, recipe.loop.max_steps)
    if steps < FEWEST_STEPS:
        why = f"{source.train_rows:,} rows in batches of {recipe.loop.batch_size} make {steps}, and the first warms up"
        raise RecipeError(f"the run has fewer than {FEWEST_STEPS} steps", why, "--batch-size 8, or more rows")
    return cut_to(recipe, source, steps)


def cut_to(recipe: Recipe, source: Source, steps: int, heldout_rows: int | None = None) -> Extent:
    """No more rows than these steps take; each at most once where they are less than an epoch."""
    steps = max(FEWEST_STEPS, steps)
    rows = source.train_rows
    if steps < steps_per_epoch(recipe, rows):
        rows = steps * recipe.loop.batch_size
    heldout = source.heldout_rows if heldout_rows is None else min(heldout_rows, source.heldout_rows)
    return Extent(steps=steps, train_rows=rows, heldout_rows=heldout, warm_up=min(10, max(1, steps // 4)))


def steps_per_epoch(recipe: Recipe, rows: int) -> int:
    """Steps that ``rows`` make."""
    whole_batches, rest = divmod(rows, recipe.loop.batch_size)
    return whole_batches + (1 if rest and not recipe.loop.drop_last else 0)


def write_rows(folder: Path, extent: Extent) -> None:
    """``train.csv`` and ``heldout.csv``, or folders of these names: as many of the first rows as are used."""
    for name, count in (("train", extent.train_rows), ("heldout", extent.heldout_rows)):
        if (folder / f"all_{name}").is_dir():
            from paceline.bench.pictures import link_pictures

            link_pictures(folder / f"all_{name}", folder / name, count)
            continue
        csv.field_size_limit(2**31 - 1)
        with (folder / f"all_{name}.csv").open(encoding="utf-8", newline="") as file:
            rows = [(row["text"], row["label"]) for row in itertools.islice(csv.DictReader(file), count)]
        _write_csv(folder / f"{name}.csv", rows)


def job(recipe: Recipe, source: Source, extent: Extent, folder: Path, *, workers: int) -> dict[str, Any]:
    """What a contender is told, but for its settings, seed and place to save; see ``contenders/job.py``."""
    from paceline.optim.schedule import lr_factor

    part, schedule, augment = recipe.optimizer, recipe.schedule, recipe.data.augment
    warmup = schedule.warmup
    images = {"mean": list(source.mean), "std": list(source.std), "crop": augment.crop, "flip": augment.flip}
    return {
        **({"images": images} if source.modality == "image" else {}),
        "train": str(folder / source.file("train")),
        "heldout": str(folder / source.file("heldout")),
        "model": str(folder / "model"),
        "labels": source.labels,
        "steps": extent.steps,
        "warm_up": extent.warm_up,
        "batch_size": recipe.loop.batch_size,
        "shuffle": recipe.loop.shuffle,
        "drop_last": recipe.loop.drop_last,
        "max_length": source.max_length,
        "workers": workers,
        "optimizer": {
            "type": part.type,
            "lr": part.lr * lr_factor(part, recipe.loop.batch_size),
            "weight_decay": part.decay,
            "betas": list(part.betas),
            "eps": part.eps,
            "momentum": part.momentum,
            "nesterov": part.nesterov,
            "clip_norm": part.clip_norm,
        },
        "schedule": {
            "type": schedule.type,
            "warmup": round(warmup * extent.steps) if 0 < warmup < 1 else int(warmup),
            "floor": schedule.floor,
        },
    }


def peers_lack(recipe: Recipe) -> str | None:
    """What of the recipe the contenders' scripts cannot do, and the setting that they can; None: they can do it all."""
    part, task, augment = recipe.optimizer, recipe.task, recipe.data.augment
    plain = type(part)(type=part.type)
    checks = (
        (part.type not in PEER_OPTIMIZERS, f"optimizer.type = {part.type}", "adamw"),
        (part.groups != (), "optimizer.groups", "[]"),
        (part.ema is not None, "optimizer.ema", "null"),
        (part.layer_decay is not None, "optimizer.layer_decay", "null"),
        (part.decay_all and part.decay > 0, "optimizer.decay_all = true", "false"),
        (part.rounding != plain.rounding, f"optimizer.rounding = {part.rounding}", "nearest"),
        (recipe.schedule.type not in PEER_SCHEDULES, f"schedule.type = {recipe.schedule.type}", "linear"),
        (task.loss != type(task)().loss, f"task.loss = {task.loss}", str(type(task)().loss)),
        (bool(task.class_weights), "task.class_weights", "null"),
        (task.label_smoothing > 0, "task.label_smoothing", "0"),
        (recipe.loop.sampler is not None, f"loop.sampler = {recipe.loop.sampler}", "null"),
        (recipe.data.overflow != "head", f"data.overflow = {recipe.data.overflow}", "head"),
        (recipe.model.train == "lora", "model.train = lora", "all"),
        (recipe.model.factory is not None, "model.factory", "null"),
        (recipe.model.group_norm is not None, "model.group_norm", "null"),
        (augment.cutout > 0, "data.augment.cutout", "0"),
        (augment.mixes, "data.augment.mixup or cutmix", "0"),
    )
    for lacks, what, instead in checks:
        if lacks:
            return f"the contenders' scripts have no {what}; --set {what.partition(' ')[0]}={instead}"
    return None


def our_recipe(recipe: Recipe, source: Source, extent: Extent, folder: Path) -> Recipe:
    """The same work for paceline: the same files, nothing evaluated or kept on the way, the last weights saved."""
    plain = recipe.plain()
    plain["model"] = {"source": str(folder / "model"), "train": "all"}
    data = plain.get("data", {})
    passed_on = ("overflow", "head", "stride", "aggregate", "max_windows", "pad_to_multiple_of", "resident", "augment")
    kept = {name: data[name] for name in passed_on if name in data}
    plain["data"] = {
        **kept,
        "source": str(folder / source.file("train")),
        "test": str(folder / source.file("heldout")),
        "splits": {"validation": 0, "test": 0},
    }
    if source.modality == "image":
        plain["data"]["normalise"] = {"mean": list(source.mean), "std": list(source.std)}
    else:
        named = {"text": "text", "label": "label", "pair": None, "split": None}
        plain["data"] |= {**named, "max_length": source.max_length}
    plain["loop"] = {
        **plain.get("loop", {}),
        "epochs": -(-extent.steps // steps_per_epoch(recipe, extent.train_rows)),
        "max_steps": extent.steps,
        "evaluate_every": "never",
        "checkpoint_every": "never",
        "save_best": False,
        "early_stopping": None,
    }
    observe = plain.get("observe", {})
    plain["observe"] = {**observe, "baseline": None}
    return Recipe.parse(plain)


def _write_csv(path: Path, rows: list[tuple[str, str]]) -> None:
    unfinished = path.with_suffix(".part")
    with disk_errors(path), unfinished.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows(rows)
    unfinished.replace(path)
