"""A saved model at work: measured on labelled data, or labelling rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.contract.errors import DataError, ModelError, RecipeError, RunFolderError, UserError, nearest
from paceline.contract.records import EvaluationRecord
from paceline.contract.spans import activity
from paceline.data.dataset import Dataset
from paceline.data.overflow import Overflow
from paceline.data.prepare import Given, prepare_to_evaluate, prepare_to_predict
from paceline.distributed.agree import agree
from paceline.distributed.group import joined
from paceline.engine.evaluate import Infer, evaluate, inference
from paceline.engine.numerics import numerics
from paceline.engine.token_ids import unused_tokens
from paceline.machine.cluster import Place
from paceline.machine.facts import this_machine
from paceline.memory.exhausted import Situation, explained
from paceline.models.pretrained import load_pretrained, names_a_model
from paceline.models.saved import LoadedModel, load_saved
from paceline.models.structure import blocks
from paceline.prepare.assemble import assemble_build, over
from paceline.recipe import Recipe
from paceline.recipe.choose import choose
from paceline.recipe.entries import written
from paceline.recipe.parts import DataPart
from paceline.recipe.parts.data import OVERFLOW
from paceline.recipe.techniques import CATALOGUE, settings_for_inference
from paceline.recipe.trust import NONE, Trust, require_trust
from paceline.run.predictions import PredictionFile, Predictions
from paceline.run_folder import RunFolder, has_checkpoint, way_on
from paceline.seams import Alone, Build, Ids, Mesh, Task, World
from paceline.tasks import task_for
from paceline.techniques.tta import require_kin

WINDOW = 4096
"""Rows that are held at a time when labelling: enough to sort by length, few enough for any memory."""

_MOST_SCORES = 2**24
"""Probabilities that are held at a time: a model of very many classes has smaller windows."""

_READ_AS = (
    *("text", "pair", "label", "label_separator", "decimal"),
    *("encoding", "delimiter", "quote", "image_bits", "on_bad_row", "bad_rows_allowed"),
)
_READING = tuple(f"data.{name}" for name in _READ_AS)
_CARRIED_OUT = (
    *("device", "loop.evaluation_batch_size"),
    *(entry.setting for entry in CATALOGUE if entry.inference == "open"),
)
"""Settings that can change when a trained model is used."""

_ONLY_TRAINING = ("device=auto", "data.resident=false", "optimizer.loss_scale={}", *settings_for_inference())
"""What a recipe says of steps and of another machine has no bearing here."""

Tell = Callable[[str], None]
"""Receives guesses and warnings that a person should read."""


def evaluate_saved(
    folder: Path,
    data: str | None,
    rows: object | None,
    split: str,
    settings: Sequence[str],
    tell: Tell,
    trust: Trust,
    place: Place,
    timeout_seconds: float,
) -> EvaluationRecord:
    """See ``paceline.evaluate``."""
    run, recipe, loaded = _open(folder, settings, tell, trust, own_data=data is None and rows is None)
    numeric = numerics(recipe.techniques.precision, deterministic=recipe.deterministic, device=recipe.device)
    device = torch.device(recipe.device)
    with joined(place, device=device, timeout_seconds=timeout_seconds) as world, numeric:
        agree(world, "the recipe", recipe.resolved())
        if run is not None and data is None and rows is None:
            with world.alone_first("reading and encoding the data"):
                dataset, ids = _own_split(recipe, run, split)
        else:
            dataset = prepare_to_evaluate(_data_part(recipe, data, settings), _given(recipe, loaded), rows=rows)
            ids = dataset.splits["all"]
            for notice in dataset.notices if world.is_first else ():
                tell(notice)
        agree(world, "the data", {"fingerprint": dataset.fingerprint, "the split": split})
        unused_tokens(recipe, loaded.model, dataset, loaded.tokenizer)  # raises where one of them is used
        with explained(partial(_situation, recipe)):
            build = _build(recipe, loaded, dataset, tell if world.is_first else _unsaid, world)
            with contextlib.closing(build):
                size = recipe.loop.evaluated_together
                record = evaluate(inference(build), build, split, ids, size, step=0, epoch=0, world=world)
        for notice in record.notices if world.is_first else ():
            tell(f"{data or split}: {notice}")
        return record


def predict_rows(
    folder: Path,
    data: str | None,
    out: Path | Predictions,
    rows: object | None,
    settings: Sequence[str],
    tell: Tell,
    advance: Callable[[int], None],
    trust: Trust = NONE,
    *,
    safe_csv: bool = False,
) -> int:
    """See ``paceline.predict``; ``advance`` is told how many rows more are labelled."""
    file = out if isinstance(out, Predictions) else PredictionFile(out, source=data, safe=safe_csv)
    _, recipe, loaded = _open(folder, settings, tell, trust, own_data=False)
    part, size = _data_part(recipe, data, settings), recipe.loop.evaluated_together
    build = None
    numeric = numerics(recipe.techniques.precision, deterministic=recipe.deterministic, device=recipe.device)
    with numeric, file, contextlib.ExitStack() as stack:
        window = max(1, min(WINDOW, _MOST_SCORES // max(1, len(loaded.saved.label_names))))
        for dataset, table in prepare_to_predict(part, _given(recipe, loaded), window, rows=rows, tell=tell):
            with explained(partial(_situation, recipe)):
                unused_tokens(recipe, loaded.model, dataset, loaded.tokenizer)  # raises where one of them is used
                if build is None:
                    build = _build(recipe, loaded, dataset, tell)
                    stack.callback(build.close)
                else:
                    build = over(recipe, build, dataset)
                found = probabilities(inference(build), build, dataset.splits["all"], size, advance)
            labelled = table.rows or [{"file": dataset.origins.of(i)} for i in range(len(dataset))]
            file.add(labelled, found, dataset.origins.lines)
        saved = loaded.saved
        return file.finish(saved.kind, saved.label_names, saved.thresholds if build is None else build.task.thresholds)


@activity("predicting")
def probabilities(
    infer: Infer, build: Build, ids: Ids, batch_size: int, advance: Callable[[int], None]
) -> NDArray[np.float32]:
    """Probabilities [n, C] of samples, in the order of ``ids``; computed in one that wastes little."""
    found: dict[int, Any] = {}
    for chosen in build.layout.batches(ids, batch_size):
        scores = build.task.probabilities(infer(build.layout.collate(chosen))).cpu().numpy()
        found |= dict(zip(chosen.tolist(), scores, strict=True))
        advance(len(chosen))
    return np.stack([found[i] for i in ids.tolist()])


def _open(
    folder: Path, settings: Sequence[str], tell: Tell, trust: Trust, *, own_data: bool
) -> tuple[RunFolder | None, Recipe, LoadedModel]:
    """A run, or a model without one: its recipe, as it is used here, and what was trained."""
    _refuse_idle(settings, own_data)
    # a bare name may be a run's, and only a run has data of its own
    is_run = own_data and len(folder.parts) == 1 and not folder.exists()
    if not is_run and not (folder / "recipe.yaml").is_file() and names_a_model(folder):
        return None, *_open_model(folder, settings, trust, own_data)
    run = RunFolder.view(folder)
    saved = run.read_recipe()
    require_trust(saved, folder, trust)
    # a model that was packed is compared anew, on this machine; one that was not to be packed is not
    packing = [] if saved.techniques.packing is False else ["techniques.packing=auto"]
    recipe, _ = choose(saved.with_settings([*_ONLY_TRAINING, *packing, *settings]), this_machine())
    part = recipe.model
    if not run.model.exists() and not run.summary.exists():
        raise RunFolderError(
            f"{folder}: has no trained model yet",
            "the run did not come to its end",
            way_on(folder),
        )
    if not run.summary.exists() and has_checkpoint(folder):
        tell(f"{folder / 'model'}: the run has not ended since it was saved, and may be ahead of it; {way_on(folder)}")
    loaded = load_saved(run.model, factory=part.factory, trust_remote_code=part.trust_remote_code)
    if _asks_for_pairs(settings) and not loaded.saved.pairs:
        what, fix = f"a second text for {folder}", "leave the second text out"
        raise UserError(what, "its model was trained on single texts, and would not see it", fix)
    return run, _with_windows(recipe, loaded), _judged(loaded, settings)


def _open_model(folder: Path, settings: Sequence[str], trust: Trust, own_data: bool) -> tuple[Recipe, LoadedModel]:
    """A model that no run folder is around: everything is as it is by default."""
    if own_data:
        raise UserError(f"{folder}: has no data of its own", "it is a model, and no run", "--data FILE")
    recipe, _ = choose(
        Recipe.parse({"model": {"source": str(folder)}}).with_settings([*_ONLY_TRAINING, *settings]), this_machine()
    )
    try:
        loaded = load_pretrained(folder, pairs=_asks_for_pairs(settings), trust_remote_code=trust.remote_code)
        kept = loaded.saved.overflow or {}
        recipe = recipe.with_settings(f"data.{name}={written(kept[name])}" for name in OVERFLOW if name in kept)
        return _with_windows(recipe, loaded), _judged(loaded, settings)
    except ModelError as error:
        if folder.exists():
            raise
        why = "; ".join(filter(None, (error.what, error.why)))
        raise RunFolderError(f"{folder}: neither a run folder nor a model", why, error.fix) from None


def _with_windows(recipe: Recipe, loaded: LoadedModel) -> Recipe:
    """The recipe with texts in windows, where ``techniques.tta`` asks for them.

    Raises:
        RecipeError: it names a view that this model's samples do not have.
    """
    require_kin(recipe.techniques.tta, are_images=loaded.saved.modality == "image")
    if "windows" not in recipe.techniques.tta:
        return recipe
    if recipe.data.overflow == "windows":
        raise RecipeError(
            "techniques.tta = windows: has no effect",
            "the model was trained on windows, and is used so in any case (data.overflow = windows)",
            "leave it out",
        )
    if loaded.tokenizer is None:
        raise RecipeError(
            "techniques.tta = windows: no effect on bare tokens",
            "which of them are special, and belong into each window, is not known without a tokenizer",
            "leave it out",
        )
    plain = DataPart()
    settings = [f"data.{name}={written(getattr(plain, name))}" for name in OVERFLOW]
    return recipe.with_settings([*settings, "data.overflow=windows"])


def _as_trained(recipe: Recipe, run: RunFolder) -> Recipe:
    """The recipe with texts cut as the run cut them."""
    trained = run.read_recipe().data
    return recipe.with_settings(f"data.{name}={written(getattr(trained, name))}" for name in OVERFLOW)


def _judged(loaded: LoadedModel, settings: Sequence[str]) -> LoadedModel:
    """The model with its own thresholds, unless one is set now.

    Raises:
        RecipeError: they would have to be found anew.
    """
    wish = _set_to(settings, "task.threshold")
    if wish is None:
        return loaded
    if wish == "tuned":
        why, fix = (
            "a threshold is found at the end of a training",
            "leave it out: the model's own is used where it has one",
        )
        raise RecipeError("task.threshold = tuned: nothing is tuned here", why, fix)
    return replace(loaded, saved=replace(loaded.saved, thresholds=()))


def _asks_for_pairs(settings: Sequence[str]) -> bool:
    return _set_to(settings, "data.pair") not in (None, "", "null", "auto")


def _set_to(settings: Sequence[str], name: str) -> str | None:
    """What ``key=value`` changes set a field to; None where they do not name it."""
    values = [value.strip() for key, _, value in (s.partition("=") for s in settings) if key.strip() == name]
    return values[-1] if values else None


def _refuse_idle(settings: Sequence[str], own_data: bool) -> None:
    """A setting without effect is an error, and so is one that would make other splits than the run's own."""
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if key not in (*_READING, *_CARRIED_OUT) and not key.startswith("data.random."):
            known = ", ".join((*_READING, *_CARRIED_OUT))
            raise RecipeError(
                f"--set {setting}: has no effect", "the model is trained already", f"settings that count here: {known}"
            )
        if own_data and key.startswith("data."):
            fix = "--data FILE reads other data, with this setting"
            raise RecipeError(
                f"--set {setting}: not with the run's own data", "they are read as the run read them", fix
            )


def _situation(recipe: Recipe) -> Situation:
    """What is told when the memory is full."""
    size = recipe.loop.evaluated_together
    return Situation(recipe=recipe, resume="the same command again", largest=size, evaluated=size)


def _data_part(recipe: Recipe, source: str | None, settings: Sequence[str]) -> DataPart:
    """The run's columns and sizes for another source; splits are the run's own affair, as is how its files are written.

    Encoding, delimiter and quote hold where they are set for this source, or where they fit it.
    """
    from paceline.data.sources import fitting

    changed = {"source": source or "memory", "validation": None, "test": None, "split": None}
    part = recipe.data.model_copy(update=changed)
    found = fitting(part)
    return part.model_copy(
        update={name: fit for name, fit in found.items() if _set_to(settings, f"data.{name}") is None}
    )


def _given(recipe: Recipe, loaded: LoadedModel) -> Given:
    saved, image = loaded.saved, loaded.saved.image
    return Given(
        tokenizer=loaded.tokenizer,
        max_length=saved.max_length,
        overflow=Overflow.of(recipe.data),
        label_names=saved.label_names,
        kind=saved.kind,
        modality=saved.modality,
        pairs=saved.pairs,
        image_shape=(image.height, image.width, image.channels) if image else None,
        picture=loaded.processor,
    )


def _own_split(recipe: Recipe, run: RunFolder, split: str) -> tuple[Dataset, Ids]:
    from paceline.prepare.preparation import encoded

    if recipe.data.source == "memory":
        raise DataError(f"{run.path}: was trained on rows in memory", fix="give --data FILE, or rows= from Python")
    as_trained = _as_trained(recipe, run)
    dataset, _ = encoded(as_trained)
    if run.manifest.exists() and dataset.fingerprint != run.read_manifest()["starts"][-1].get("data_fingerprint"):
        # split anew: a sample of this test split may be one that the run was trained on
        raise DataError(
            "the data have changed since the run",
            file=recipe.data.source,
            why="its splits cannot be made again",
            fix="put them back, or --data FILE measures on other data",
        )
    if split not in dataset.splits:
        fix = " or ".join(f"--split {name}" for name in dataset.splits)
        raise UserError(f"--split {split}: the run has no such split", nearest(split, dataset.splits), fix)
    if as_trained.data != recipe.data:  # the same splits of the same texts, cut otherwise
        dataset, _ = encoded(recipe)
    return dataset, dataset.splits[split]


def _unsaid(message: str) -> None:
    """Where the first rank says the same."""


def _build(
    recipe: Recipe,
    loaded: LoadedModel,
    dataset: Dataset,
    tell: Tell,
    world: World = Alone(),  # noqa: B008 - it has no state
) -> Build:
    saved = loaded.saved
    device = torch.device(recipe.device)
    weights = saved.class_weights if recipe.task.class_weights else ()
    task: Task = task_for(saved.kind, saved.label_names, recipe.task, class_weights=weights, device=device)
    if saved.thresholds:
        task = task.judged_by(saved.thresholds)
    normalisation = (saved.image.mean, saved.image.std) if saved.image else ((), ())
    found = [block for _, block in blocks(loaded.model)]
    build = assemble_build(
        recipe, loaded.model, dataset, task, device, blocks=found, normalisation=normalisation, mesh=Mesh.over(world)
    )
    for notice in build.notices:
        tell(notice)
    return build
