"""Before the first step: data and model from a recipe, put into a build.

Everything here that runs in Python runs on one thread, and what does not (a tokenizer's own threads, the driver that
wakes a GPU) runs beside it: texts are encoded while the code of the model is imported and its weights are read.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from paceline.contract.errors import ModelError, RecipeError
from paceline.contract.files import cache_folder
from paceline.contract.records import Decision
from paceline.contract.stopwatch import Stopwatch
from paceline.data.builtin import PREFIX
from paceline.data.dataset import Dataset, Tokens
from paceline.data.encode import KeepGoing, wanted
from paceline.data.prepare import Outline, outline
from paceline.data.sources import locate_files
from paceline.distributed.links import shared_link_rate
from paceline.engine.statistics import running_statistics
from paceline.engine.token_ids import unused_tokens
from paceline.kernels.launch import wake_compiler
from paceline.machine.facts import Facts
from paceline.models.adapters import base_of
from paceline.models.config import checkpoint_labels, import_readers, max_positions, modality, read_config
from paceline.models.group_norm import apply_group_norm
from paceline.models.images import ImageSettings, image_settings, normalised_by, own_processor, preferred_size
from paceline.models.load import import_class, load_model, seeded
from paceline.models.processor import Processor
from paceline.models.saved import SavedModel
from paceline.models.structure import (
    blocks,
    final_linear,
    linear_layers,
    parameter_counts,
    set_trained,
    trained_head,
)
from paceline.models.tokenizers import Pretrained, WordPieceTrainer, cuts_on_the_left, tokenizer_source
from paceline.optim.schedule import lr_decision
from paceline.prepare.assemble import assemble_build
from paceline.prepare.beside import Beside
from paceline.prepare.labels import check_scores, check_threshold, weights_of, weights_told
from paceline.recipe import Recipe
from paceline.recipe.choose import bucket_decision, choose_strategy
from paceline.recipe.entries import value_of
from paceline.recipe.parts import ModelPart
from paceline.recipe.rules import check_kind
from paceline.seams import Build, Mesh, World
from paceline.tasks import task_for
from paceline.techniques import sync_batch_norm
from paceline.techniques.compile import wake_tracer
from paceline.techniques.lora import apply_lora, require_peft

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """Data and model, ready to be assembled."""

    recipe: Recipe
    decisions: tuple[Decision, ...]
    dataset: Dataset
    tokenizer: Any
    build: Build
    saved: SavedModel
    num_parameters: int
    """The model's weights on all ranks, in single numbers."""
    num_trained: int
    """Those among them that are trained."""
    bucket_mib: int | None = None
    """MiB of gradients in one all-reduce, where the recipe leaves that open. It is not written into the recipe, for a
    run may go on over other links."""


def prepare_run(
    recipe: Recipe,
    decisions: tuple[Decision, ...],
    *,
    facts: Facts,
    watch: Stopwatch,
    rows: object | None = None,
    quarantine: Path | None = None,
    mesh: Mesh = Mesh(),  # noqa: B008 - it has no state
) -> Prepared:
    """Read, split and encode the data; load or build the model; put both into a build.

    Args:
        recipe: checked against this machine.
        decisions: those taken so far; the ones about sizes of samples and those of assembling are added.
        facts: of this machine, whose GPUs decide how ranks share the model.
        watch: told how long data and model take.
        rows: data in memory in place of the recipe's source.
        quarantine: takes rows that cannot be used, where the recipe says to skip them.
        mesh: of whose ranks the first on each machine downloads and encodes, for the others to read.
    """
    world = mesh.whole
    _refuse_what_cannot_be(recipe)
    told: list[str] = []  # of the model
    with Beside(watch) as beside:
        awake = beside.start("model", partial(_wake, _gpu_here())) if recipe.device == "cuda" else None
        with watch.importing():
            import_readers(recipe.model)
        with watch.phase("model"), world.alone_first("reading the model's configuration"):
            recipe, shapes, config, processor = _configured(recipe, rows)
        _while_waiting(recipe, config, watch, world)
        with contextlib.ExitStack() as turn:
            with watch.phase("data"):
                turn.enter_context(world.alone_first("reading and encoding the data"))
                known, source = _outlined(recipe, config, rows, quarantine, processor)
            encoding = beside.start("data", known.finish)
            with watch.importing():
                import_class(recipe.model, config)
            with watch.phase("model"):
                model, counts = _counted_model(recipe, config, known, told)
                _refuse_vain_wishes(decisions, model)
                recipe, decisions = choose_strategy(recipe, decisions, facts, world.size, *counts)
            _wake_tracer(recipe, watch)
            with watch.phase("data"):
                dataset = encoding.result()
                tokenizer = _matched(source, dataset, recipe, model, told)
        with watch.phase("model"):
            buckets = _buckets(recipe, facts, world)
            _see_awake(awake, recipe)
            build, images = _built(recipe, model, dataset, processor, mesh)
    return Prepared(
        recipe.with_settings(f"{decision.setting}={decision.value}" for decision in build.decisions),
        (*decisions, *buckets, *shapes, *build.decisions, *_scaled_rate(recipe), *weights_told(recipe.task, dataset)),
        dataset,
        tokenizer,
        replace(build, notices=(*filter(None, told), *build.notices)),
        _saved_model(recipe, dataset, images, model),
        *counts,
        bucket_mib=next((int(found.value) for found in buckets), None),
    )


def _refuse_vain_wishes(decisions: tuple[Decision, ...], model: nn.Module) -> None:
    """Refuse what one process left off, where it could do nothing on several either."""
    if any(decision.setting == sync_batch_norm.SETTING for decision in decisions):
        sync_batch_norm.batch_norms(model)


def _counted_model(
    recipe: Recipe, config: PretrainedConfig | None, known: Outline, told: list[str]
) -> tuple[nn.Module, tuple[int, int]]:
    """The model, and its parameters and those that are trained, before ranks share them."""
    tokens = size_of_vocabulary(recipe, known, known.tokenizer)
    model = model_for(recipe, config, known, tokens, tell=told.append)
    # only counted: a list of them would outlive shards that take their place, see ``importing``
    return model, parameter_counts(model)


def _built(
    recipe: Recipe, model: nn.Module, dataset: Dataset, processor: Processor | None, mesh: Mesh
) -> tuple[Build, ImageSettings | None]:
    """The build, and how pixels become floats in it."""
    images = _image_settings(recipe, dataset, processor)
    return build_for(recipe, model, dataset, torch.device(recipe.device), images, mesh=mesh), images


def _refuse_what_cannot_be(recipe: Recipe) -> None:
    """Refuse adapters without their library, and windows and views that a run cannot learn from."""
    if recipe.model.train == "lora":
        require_peft()
    if "windows" in recipe.techniques.tta:
        raise RecipeError(
            "techniques.tta = windows: a run has no use for it",
            "it is for evaluate and predict, of models trained on something else than windows",
            "--set data.overflow=windows, which trains on them; or --tta windows of evaluate and predict",
        )
    if recipe.model.train != "features":
        return
    if recipe.data.overflow == "windows":
        raise RecipeError(
            "data.overflow = windows: cannot work with model.train = features",
            "the last layer is fitted to one row of features a text, and a text of several windows has as many",
            "--set data.overflow=head+tail, or --set model.train=head, which is trained in steps",
        )
    if recipe.techniques.tta:
        raise RecipeError(
            f"techniques.tta = {', '.join(recipe.techniques.tta)}: cannot work with model.train = features",
            "the last layer is fitted to features of one view",
            "leave it out here; evaluate and predict have --tta",
        )


def _while_waiting(recipe: Recipe, config: PretrainedConfig | None, watch: Stopwatch, world: World) -> None:
    """What a rank gets done that waits for another's turn."""
    if world.local_rank == 0:
        return
    with watch.importing():
        import_class(recipe.model, config)
    _wake_tracer(recipe, watch)


def _see_awake(awake: Future[None] | None, recipe: Recipe) -> None:
    """Wait until the driver is ready, and count from here: the peak is this run's, not the process's."""
    if awake is None:
        return
    awake.result()
    # it may come before the first step
    torch.cuda.reset_peak_memory_stats(torch.device(recipe.device))


def _configured(
    recipe: Recipe, rows: object | None
) -> tuple[Recipe, list[Decision], PretrainedConfig | None, Processor | None]:
    """The recipe with the sizes of samples that the model decides, those decisions, and what they were read from."""
    locate_files(recipe.data, rows)  # a file that is missing is sooner found than a model
    return settle_shapes(recipe)


def settle_shapes(
    recipe: Recipe,
) -> tuple[Recipe, list[Decision], PretrainedConfig | None, Processor | None]:
    """Return the recipe with what the model decides of its samples, those decisions, and what they were read from.

    Raises:
        ModelError: the model's configuration cannot be read.
        RecipeError: a size that the model does not have.
    """
    part = recipe.model
    config = read_config(part)
    processor = own_processor(part, config, recipe.data.image_size)
    size = preferred_size(part, config) if part.source and processor is None else None
    shapes = shape_decisions(recipe, max_positions(config), size)
    if modality(part, config) == "text" and not recipe.data.source.startswith(PREFIX):
        shapes += _overflow_decisions(recipe)
    return (
        recipe.with_settings(f"{decision.setting}={decision.value}" for decision in shapes),
        shapes,
        config,
        processor,
    )


def _buckets(recipe: Recipe, facts: Facts, world: World) -> tuple[Decision, ...]:
    """How much of the gradients ranks sum in one go, where that is left open and there are several.

    Asked where no rank waits for another's turn, for all of them answer.
    """
    if world.size == 1:
        return ()
    over_gpus = recipe.device == "cuda" and recipe.parallel.backend in ("auto", "nccl")
    found = bucket_decision(recipe, partial(shared_link_rate, world, facts, over_gpus=over_gpus))
    return () if found is None else (found,)


def _scaled_rate(recipe: Recipe) -> tuple[Decision, ...]:
    """The learning rate that the batch size makes of the recipe's."""
    if recipe.model.train == "features":
        return ()
    scaled = lr_decision(recipe.optimizer, recipe.loop.batch_size)
    return () if scaled is None else (scaled,)


def _saved_model(recipe: Recipe, dataset: Dataset, images: ImageSettings | None, model: nn.Module) -> SavedModel:
    """What is saved beside the weights."""
    part = recipe.model
    adapters = part.train == "lora" and not part.lora.merge
    return SavedModel(
        label_names=dataset.label_names,
        kind=dataset.kind,
        modality="image" if images else "text",
        max_length=None if images else recipe.data.max_length,
        overflow=recipe.data.kept_of_long_texts(),
        pairs=isinstance(dataset.inputs, Tokens) and dataset.inputs.pairs,
        image=images,
        factory=part.factory,
        base=base_of(model, part.source or "", part.revision) if adapters else None,
        group_norm=part.group_norm,
        class_weights=weights_of(recipe.task, dataset),
    )


def _image_settings(recipe: Recipe, dataset: Dataset, processor: Processor | None = None) -> ImageSettings | None:
    """How pixels become floats; None of texts."""
    if not dataset.image_shape:
        return None
    found = image_settings(recipe.model, dataset.image_shape, processor)
    return normalised_by(found, recipe.data.normalise)


def _gpu_here() -> torch.device:
    """The GPU of the calling thread; another thread begins on the first, where a context would cost 600 MiB."""
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_initialized() else 0)


def _wake(gpu: torch.device, _: KeepGoing) -> None:
    """Have the driver make ready for this process, and Triton's compiler: seconds, and hardly any of them Python's."""
    torch.zeros(1, device=gpu)
    wake_compiler(gpu.index)


def _wake_tracer(recipe: Recipe, watch: Stopwatch) -> None:
    """Where blocks will be traced, as far as is known before there is a build: while texts are encoded.

    Only beside a GPU, whose host has processors for both; on two it would take as much from the encoding as it saves.
    """
    compiles = recipe.techniques.compile is True
    if recipe.device == "cuda" and (compiles or recipe.techniques.fusion is True):
        with watch.phase("compile"):
            wake_tracer(compiles=compiles)


def model_for(
    recipe: Recipe,
    config: PretrainedConfig | None,
    known: Outline | Dataset,
    vocabulary_size: int | None,
    *,
    weights: bool = True,
    tell: Callable[[str], None] = log.warning,
) -> nn.Module:
    """The recipe's model with a head for these data, on the CPU, and those of its weights trainable that are to be.

    Args:
        config: what ``read_config`` gave for it.
        vocabulary_size: number of token ids that the data are, or will be, encoded in; None for images.
        weights, tell: as ``load_model`` has them.

    Raises:
        ModelError: as ``load_model``; a model without the parts that ``model.train`` names.
    """
    check_kind(known.kind, partial(value_of, recipe))
    part, task = recipe.model, task_for(known.kind, known.label_names, recipe.task)
    if part.train == "lora":
        require_peft()
    model = load_model(
        part,
        config,
        num_labels=task.num_outputs,
        label_names=known.label_names,
        kind=known.kind,
        vocabulary_size=vocabulary_size,
        pad_id=known.pad_id,
        image_shape=known.image_shape,
        seed=recipe.seed,
        weights=weights,
        tell=tell,
    )
    if part.group_norm is not None:
        count = len(apply_group_norm(model, part.group_norm))
        told = f"{count} batch norms are group norms now, and paceline loads the saved model with them"
        tell(f"model.group_norm: {told}; plain transformers would make batch norms of them")
    if part.train == "lora":
        _adapt(model, part, recipe.seed)
        return model
    set_trained(model, part.train)
    if part.train == "features":
        final_linear(model, task.num_outputs).requires_grad_()  # the one that is fitted
    return model


def _adapt(model: nn.Module, part: ModelPart, seed: int) -> None:
    """Put the adapters of ``model.lora`` into a model, drawn from ``seed``."""
    if not part.lora.merge and running_statistics(model):
        raise ModelError(
            f"model.train = lora: {type(model).__name__} has batch normalisations",
            "their running statistics follow the batches, and would not be in the saved adapters",
            "--set model.lora.merge=true",
        )
    settings = part.lora.model_dump(include={"rank", "alpha", "dropout", "dora"})
    with seeded(seed):
        apply_lora(model, linear_layers(model, part.lora.targets), trained_head(model, part.train), **settings)


def build_for(
    recipe: Recipe,
    model: nn.Module,
    dataset: Dataset,
    device: torch.device,
    images: ImageSettings | None = None,
    *,
    mesh: Mesh = Mesh(),  # noqa: B008 - it has no state
) -> Build:
    """``assemble_build`` for a model that is to be trained on these data; arguments and errors are its.

    Args:
        images: how pixels become floats; None: as without the model's own processor, for who asks for sizes alone.
    """
    if images is None:
        images = _image_settings(recipe, dataset)
    check_threshold(recipe.task, dataset)
    weights = weights_of(recipe.task, dataset)
    task = task_for(dataset.kind, dataset.label_names, recipe.task, class_weights=weights, device=device)
    check_scores(recipe.task, dataset, task)
    return assemble_build(
        recipe,
        model,
        dataset,
        task,
        device,
        blocks=[block for _, block in blocks(model)],
        normalisation=(images.mean, images.std) if images else ((), ()),
        mesh=mesh,
    )


def size_of_vocabulary(recipe: Recipe, known: Outline | Dataset, tokenizer: Any) -> int | None:
    """Number of token ids that texts are encoded in, or random ones are drawn from; None for images."""
    if known.image_shape is not None:
        return None
    return recipe.data.random.vocabulary if tokenizer is None else len(tokenizer)


def encoded(recipe: Recipe) -> tuple[Dataset, Any]:
    """The data set of a recipe whose sizes are settled, and the tokenizer it was encoded with (None without one)."""
    config = read_config(recipe.model)
    processor = own_processor(recipe.model, config, recipe.data.image_size)
    known, source = _outlined(recipe, config, None, None, processor)
    dataset = known.finish(wanted)
    return dataset, _settled(source, dataset)


def _outlined(
    recipe: Recipe,
    config: PretrainedConfig | None,
    rows: object | None,
    quarantine: Path | None,
    processor: Processor | None,
) -> tuple[Outline, Pretrained | WordPieceTrainer | None]:
    """What is known of the data before they are encoded, and where their tokenizer comes from; None: they need none."""
    part, cache = recipe.model, cache_folder()
    reads = modality(part, config)
    needs_no_tokenizer = reads == "image" or recipe.data.source == "builtin:random"
    source = None if needs_no_tokenizer else tokenizer_source(part, config, cache)

    def begin(cache: Path | None) -> Outline:
        return outline(
            recipe.data,
            recipe.task,
            tokenizer=source,
            modality=reads,
            cache=cache,
            rows=rows,
            quarantine=quarantine,
            head=checkpoint_labels(part, config),
            picture=processor,
        )

    known = begin(cache)
    if source is None or known.image_shape:
        return known, None
    if known.cached is None:
        return known, source
    tokenizer = source.settle(known.cached.fingerprint)
    if tokenizer is None:
        # the encoded data were cached, but the vocabulary trained on them is gone: train it again
        return begin(None), source
    return replace(known, tokenizer=tokenizer), source


def _matched(
    source: Pretrained | WordPieceTrainer | None, dataset: Dataset, recipe: Recipe, model: nn.Module, told: list[str]
) -> Any:
    """Return ``_settled``'s tokenizer, and add to ``told`` where it and the model's embeddings are not of one size."""
    tokenizer = _settled(source, dataset)
    told += [*(source.notices if source else ()), unused_tokens(recipe, model, dataset, tokenizer)]
    return tokenizer


def _settled(source: Pretrained | WordPieceTrainer | None, dataset: Dataset) -> Any:
    """The tokenizer that the data set was encoded with, kept for the next time."""
    return None if source is None else source.settle(dataset.fingerprint)


def _overflow_decisions(recipe: Recipe) -> list[Decision]:
    """What is kept of long texts, where the recipe leaves it to the tokenizer."""
    if "overflow" in recipe.data.model_fields_set or not cuts_on_the_left(recipe.model):
        return []
    reason = "the tokenizer cuts texts on the left (truncation_side); --set data.overflow=head keeps their beginning"
    return [Decision(setting="data.overflow", value="tail", reason=reason)]


def shape_decisions(recipe: Recipe, positions: int | None, image_size: int | None) -> list[Decision]:
    """Sizes of samples that the model decides where the recipe leaves them open."""
    data = recipe.data
    if positions is not None and data.max_length > positions:
        if "max_length" in data.model_fields_set:
            raise RecipeError(
                f"data.max_length = {data.max_length}",
                f"the model has positions for {positions} tokens",
                f"--set data.max_length={positions}",
            )
        reason = "the model has no more positions"
        return [Decision(setting="data.max_length", value=str(positions), reason=reason)]
    if image_size is not None and data.image_size is None:
        reason = "the size that the model was trained on"
        return [Decision(setting="data.image_size", value=str(image_size), reason=reason)]
    return []
