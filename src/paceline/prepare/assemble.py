"""A run put together, top to bottom: what each technique does and why it comes where it does."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.contract.errors import ModelError, RecipeError
from paceline.contract.files import compiled_folder
from paceline.contract.records import Decision
from paceline.contract.spans import activity
from paceline.data.dataset import Dataset, Tokens
from paceline.data.layout import WindowedLayout
from paceline.engine.capture import Phase
from paceline.engine.compared import compared_samples, width_notice
from paceline.engine.compile_cache import is_kept
from paceline.engine.layouts import Normalisation, image_layout, packed_layout, padded_layout, resident
from paceline.engine.statistics import kept_from_filler, running_statistics
from paceline.engine.step import Objective
from paceline.engine.takes_inputs import takes_inputs
from paceline.engine.text_ends import check_text_ends
from paceline.engine.token_ids import check_token_ids
from paceline.engine.unreached import unreached_notice, unreached_weights
from paceline.engine.worth import compile_pays, flops_of_image, flops_per_text
from paceline.kernels.launch import are_noted
from paceline.machine.device import PLANNED, gpu_name, is_gpu
from paceline.models.masks import unread_masks
from paceline.optim.layer_decay import rate_factors
from paceline.optim.muon import hidden_weights
from paceline.optim.optimizer import ParameterGroup, parameter_groups
from paceline.optim.schedule import lr_factor, rate_table
from paceline.recipe import Recipe
from paceline.seams import Alone, Batch, Build, Engine, Forward, Ids, Layout, LayoutKind, Mesh, Task, World
from paceline.strategies import strategy_for
from paceline.strategies.strategy import Strategy, Training
from paceline.techniques import (
    channels_last,
    compile,
    early_pooling,
    embedding_gradient,
    fully_connected,
    fused_qkv,
    overflow,
    packing,
    precision,
    recompute,
    sync_batch_norm,
    tta,
)

_OTHER_MODEL = "choose another model, or wrap it in a factory whose forward returns logits"


@dataclass(frozen=True)
class Assembled:
    """What the loop drives."""

    build: Build
    engine: Engine
    strategy: Strategy
    groups: Sequence[ParameterGroup]
    rates: NDArray[np.float64]
    """[steps, groups]: learning rate of each applied update."""


@activity("placing and checking")
def assemble_build(
    recipe: Recipe,
    model: nn.Module,
    dataset: Dataset,
    task: Task,
    device: torch.device,
    *,
    blocks: Sequence[nn.Module],
    normalisation: Normalisation,
    mesh: Mesh = Mesh(),  # noqa: B008 - it has no state
) -> Build:
    """Model, data and techniques, without an optimizer; enough to evaluate and to predict.

    Raises:
        RecipeError: a technique was asked for that this model cannot have.
        ModelError: the data have a token that the model has no embedding for, or a text that it takes beside no other.
    """
    switches = recipe.techniques
    # until all else is put together, each window of a text is a sample: what is compared stays small
    whole, dataset = dataset, dataset.each_window()
    sync_batch_norm.refuse_torchs(model, mesh.whole.size)
    if recipe.parallel.sync_batch_norm:
        sync_batch_norm.batch_norms(model)  # refused before anything is tried, traced or compiled
    build = _plain_build(recipe, model, dataset, task, device, normalisation)
    build = replace(build, blocks=tuple(blocks))
    found = next(iter(dataset.splits.values()))
    texts = dataset.inputs if isinstance(dataset.inputs, Tokens) else None
    ids = np.resize(found[:2], 2) if texts is None else compared_samples(texts, found)
    if "train" in dataset.splits and recipe.optimizer.decays and (unread := unreached_weights(build, ids[:2])):
        build = replace(build, undecayed=frozenset(unread), notices=(*build.notices, unreached_notice(unread)))
    # both compare themselves with the plain forward pass in full precision, so they come before all that changes it
    if _packs(recipe, dataset):
        build = _packed(recipe, build, dataset, ids)
    if texts is not None and build.layout_kind is LayoutKind.PADDED:
        build = replace(build, notices=(*build.notices, *_of_width(recipe, build, dataset, texts)))
    build = early_pooling.apply(build, switches.early_pooling, ids)
    strategy = strategy_for(recipe, mesh)
    # compared with the whole model in the same way, and then every technique finds the layers that this rank has
    build = strategy.cut(build)
    # memory order before anything holds views of the weights
    if switches.channels_last is not False:
        build = channels_last.apply(build, switches.channels_last)
    build = fully_connected.apply(build, switches.fully_connected, dataset.image_shape)
    # autocast wraps the whole forward pass; recomputed blocks restore the autocast state they were first run under
    build = precision.apply(build, switches.precision)
    if switches.fused_qkv is not False:
        build = fused_qkv.apply(build, switches.fused_qkv)
    compiles, reckoned = _compiles(recipe, build, dataset)
    build = replace(build, decisions=(*build.decisions, *reckoned))
    compiled = compiles and compile.takes_embeddings(build)
    build = embedding_gradient.apply(build, switches.embedding_gradient, compiled=compiled)
    # recompute takes hold of single blocks, and compile takes those in whole, recomputation included
    if switches.recompute:
        build = recompute.apply(build)
    # both take hold of a block's graph: our kernels are put in before it is compiled, or run as it is
    build = compile.apply(build, switches.compile if compiles else False, fusion=switches.fusion is True)
    build = _of_windows(recipe, build, whole)
    if switches.tta:
        build = tta.apply(build, switches.tta)
    # after every pass that a rank makes by itself, and every copy of the model
    if recipe.parallel.sync_batch_norm:
        build = sync_batch_norm.apply(build, mesh.data)
    # last: what is shared is whatever a block's forward pass has become by now
    return strategy.prepare(build)


def _plain_build(
    recipe: Recipe, model: nn.Module, dataset: Dataset, task: Task, device: torch.device, normalisation: Normalisation
) -> Build:
    """Model and data on the device, before any technique."""
    check_token_ids(recipe, model, dataset)
    if device.type != PLANNED:  # made there, and tensors that hold nothing cannot be moved
        model = model.to(device)
    if dataset.is_images and recipe.techniques.packing is True:
        raise RecipeError("techniques.packing = true", "it packs texts, and the data are images", "leave it out")
    kept, decisions = resident(recipe, dataset, device)
    if dataset.is_images:
        layout: Layout = image_layout(recipe, model, dataset, device, normalisation)
    else:
        layout = padded_layout(recipe, model, dataset, device, on_host=_packs(recipe, dataset))
    build = Build(
        model=model,
        forward=forward_for(model, device),
        layout=layout,
        layout_kind=LayoutKind.IMAGES if dataset.is_images else LayoutKind.PADDED,
        task=task,
        device=device,
        decisions=decisions,
        execution={"layout": "images" if dataset.is_images else "padded", "data": "on the device" if kept else "host"},
        own_forwards={name: own for name, each in model.named_modules() if (own := vars(each).get("forward"))},
    )
    check_text_ends(model, build.forward, layout, dataset, device)
    return build


def _packs(recipe: Recipe, dataset: Dataset) -> bool:
    """Whether texts are to be packed, as far as the recipe goes."""
    return not dataset.is_images and recipe.techniques.packing is not False


def _packed(recipe: Recipe, build: Build, dataset: Dataset, ids: Ids) -> Build:
    """The build with packed texts, or, of a model that cannot have them, with padded ones on the device.

    Args:
        ids: the samples by which both are compared.
    """
    switches, plain = recipe.techniques, build.layout
    packed = packed_layout(
        recipe, build.model, dataset, build.device, first_position=packing.first_position(build.model)
    )
    number_format = precision.PRODUCTS.get(switches.precision, torch.float32)
    build = packing.apply(build, packed, ids, required=switches.packing is True, dtype=number_format)
    if build.layout is plain:
        build = replace(build, layout=padded_layout(recipe, build.model, dataset, build.device))
    return build


def _of_windows(recipe: Recipe, build: Build, dataset: Dataset) -> Build:
    """The build whose samples are texts again, where they have windows."""
    texts = dataset.inputs
    if not isinstance(texts, Tokens) or texts.windows is None:
        return build
    how: str | overflow.Join = recipe.data.aggregate
    if "windows" in recipe.techniques.tta:
        how = tta.of_windows(build.task, overflow.mean)
        counts = texts.num_windows
        told = (
            f"techniques.tta = windows: a text is computed {counts.mean():.1f} times on average, {counts.max()} at most"
        )
        build = replace(build, notices=(*build.notices, told))
    return overflow.apply(build, WindowedLayout(build.layout, texts, build.device), how)


def _of_width(recipe: Recipe, build: Build, dataset: Dataset, texts: Tokens) -> tuple[str, ...]:
    narrow = padded_layout(recipe, build.model, dataset, build.device, on_host=True, bucket=1)
    with contextlib.closing(narrow):
        notice = width_notice(build, narrow, texts)
    return () if notice is None else (notice,)


@activity("making the optimizer")
def assemble(
    recipe: Recipe,
    build: Build,
    total_steps: int,
    *,
    capturing: Phase = contextlib.nullcontext,
    mesh: Mesh = Mesh(),  # noqa: B008 - it has no state
    bucket_mib: int | None = None,
    factors: NDArray[np.float64] | None = None,
) -> Assembled:
    """The build with its optimizer and learning rates, in an engine.

    Args:
        capturing: counts the seconds of capturing graphs.
        mesh: the ranks that share each batch; all of them get rank 0's weights and buffers.
        bucket_mib: of gradients summed in one go, where the recipe does not say; None: as much as suits any link.
        factors: [steps]: what every group's rate is multiplied by, in place of its schedule and of ``lr_scaling``.
    """
    part = recipe.optimizer
    groups = parameter_groups(
        list(build.model.named_parameters()),
        part,
        recipe.schedule,
        build.undecayed,
        _factors(build, part.layer_decay),
        hidden_weights(build.model) if part.type == "muon" else frozenset(),
    )
    if factors is None:
        scaling = lr_factor(part, recipe.loop.batch_size)
        rates = rate_table([g.lr for g in groups], [g.schedule for g in groups], total_steps, scaling)
    else:
        rates = np.outer(factors, [g.lr for g in groups])
    training = Training(
        recipe=recipe,
        objective=objective_for(build, mesh.data),
        groups=groups,
        rates=rates,
        capturing=capturing,
        bucket_mib=bucket_mib,
    )
    strategy = strategy_for(recipe, mesh)
    return Assembled(build, strategy.engine(build, training), strategy, groups, rates)


def _factors(build: Build, decay: float | None) -> Mapping[str, float]:
    """What each parameter's rate is multiplied by, by its name; those that are not named: by 1.

    Raises:
        RecipeError: the model has no blocks by which to tell.
    """
    if decay is None:
        return {}
    if not build.blocks:
        raise RecipeError(
            f"optimizer.layer_decay = {decay}",
            f"no repeated blocks were found in {type(build.model).__name__}, so there is no depth to go by",
            "leave it out; optimizer.groups gives parameters rates of their own by name",
        )
    return rate_factors(build.model, build.blocks, decay)


def over(recipe: Recipe, build: Build, dataset: Dataset) -> Build:
    """The build of a model that is only used, over other samples.

    Raises:
        ModelError: they have a token that the model has no embedding for, or a text that it takes beside no other.
    """
    each = dataset.each_window()
    check_token_ids(recipe, build.model, each)
    build = replace(build, layout=build.layout.over(dataset.inputs, dataset.labels))
    layout = build.layout.of_windows if isinstance(build.layout, WindowedLayout) else build.layout
    check_text_ends(build.model, build.forward, layout, each, build.device)
    return build


def objective_for(build: Build, world: World = Alone()) -> Objective:  # noqa: B008 - it has no state
    """Batch -> (loss sum, number of right predictions): what the step differentiates."""
    # one rank alone never runs a micro-batch of nothing but filler
    statistics = running_statistics(build.model) if world.size > 1 else []

    def objective(batch: Batch) -> tuple[Tensor, Tensor]:
        with kept_from_filler(statistics, batch.weights) if statistics else contextlib.nullcontext():
            logits = build.forward(build.model, batch)
        if are_noted():  # nothing has been written to them, and a loss may refuse what is there
            logits = logits.nan_to_num(0.0, 0.0, 0.0).clamp(-1, 1)
        return _of_both(build.task.loss_sum, logits, batch), _of_both(build.task.correct, logits.detach(), batch)

    return objective


def _of_both(summed: Callable[[Tensor, Batch], Tensor], logits: Tensor, batch: Batch) -> Tensor:
    """A sum over the samples; of mixed ones with their own labels and with their partners', each by its share."""
    own, mixed = summed(logits, batch), batch.mixed
    if mixed is None:
        return own
    return own * mixed.share + summed(logits, replace(batch, labels=mixed.labels)) * (1 - mixed.share)


def forward_for(model: nn.Module, device: torch.device) -> Forward:
    """How this model is called: by keyword where it names our inputs, else with its one input.

    On a GPU no mask is looked at: eager passes are those that are captured.

    Raises:
        ModelError: from the forward pass, when the model's inputs are not ours.
    """
    parameters = inspect.signature(model.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        known = {name: value for name, value in batch.inputs.items() if takes_any or name in parameters}
        if not known and not (parameters and len(batch.inputs) == 1):
            raise ModelError(
                f"{type(model).__name__}: its forward takes {', '.join(parameters) or 'nothing'}",
                f"the data give it {', '.join(batch.inputs)}",
                "name the forward's parameters as the data's inputs are named",
            )
        with unread_masks() if is_gpu(device) else contextlib.nullcontext(), takes_inputs(model, batch, device):
            output = model(**known) if known else model(*batch.inputs.values())
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor):
            given = f"its forward gives a {type(output).__name__}"
            raise ModelError(
                f"{type(model).__name__}: cannot classify", f"{given}, which holds no logits", _OTHER_MODEL
            )
        return logits

    return forward


def _compiles(recipe: Recipe, build: Build, dataset: Dataset) -> tuple[bool, tuple[Decision, ...]]:
    """Whether training passes are compiled, and the decision where it was open."""
    wish, trained = recipe.techniques.compile, dataset.splits.get("train")
    if wish != "auto" or build.device.type == "cpu" or trained is None:
        return wish is True, ()
    if isinstance(dataset.inputs, Tokens):
        flops, whole = flops_per_text(build.blocks, dataset.inputs.lengths[trained]), False
    else:
        counted, whole = flops_of_image(build.model, dataset.inputs.shape), True
        if counted is None:
            why = "the operations of this model cannot be counted without data"
            return False, (Decision(setting=compile.SETTING, value="false", reason=why),)
        flops = counted
    loop = recipe.loop
    samples = min(len(trained) * loop.epochs, (loop.max_steps or sys.maxsize) * loop.batch_size)
    pays, reason = compile_pays(
        flops,
        samples,
        gpu_name(build.device),
        cached=is_kept(build, compiled_folder()),
        whole_model=whole,
        # what the kernels are for: blocks that end in a norm of a sum (their norms have a bias, those of others none)
        fused=recipe.techniques.fusion is True
        and any(isinstance(m, nn.LayerNorm) and m.bias is not None for block in build.blocks for m in block.modules()),
    )
    return pays, (Decision(setting=compile.SETTING, value=str(pays).lower(), reason=reason),)
