"""paceline's step in somebody else's loop, where a loss that is a mean is recognised by its autograd graph."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, final

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.contract.errors import UserError, excerpt
from paceline.contract.exclusive import refuse_beside_training
from paceline.engine.runner import Eager
from paceline.engine.step import Step
from paceline.engine.torch_engine import TorchEngine
from paceline.optim.ema import EMA
from paceline.optim.gradients import FlatGradients
from paceline.optim.scaling import Dynamic, Unscaled
from paceline.optim.updates import HostGated
from paceline.recipe.parts import LossScalePart
from paceline.seams import Accumulated, Ids, Tensors, Update

_TRANSPARENT = frozenset({"AliasBackward0", "CloneBackward0", "NegBackward0", "SqueezeBackward0", "ToCopyBackward0"})
_MEAN, _SUM = 1, 2
"""What torch's losses save as their ``reduction``."""


def is_mean(loss: Tensor, denominator: float) -> bool:
    """Whether a scalar loss is a mean of its samples' losses, or their sum divided by ``denominator``.

    A mean that is multiplied by a number above 1, such as its count, is none. Where the graph does not tell, as that of
    a compiled model, the answer is False.
    """
    means, sums = list[float](), list[float]()
    is_known = loss.grad_fn is not None
    for kind, scale in _terms(loss.grad_fn, 1.0) if is_known else ():
        is_known = is_known and kind != "unknown"
        (means if kind == "mean" else sums).append(abs(scale))
    if not is_known or any(scale > 1 for scale in means):
        return False
    if means:  # a sum beside a mean is a penalty, or a term of smoothed labels that torch divides itself
        return all(scale * denominator <= 1 for scale in sums)
    return all(math.isclose(scale * denominator, 1, rel_tol=1e-3) for scale in sums)


def _terms(node: Any, scale: float) -> Iterator[tuple[str, float]]:
    """Kind (``mean``, ``sum``, ``unknown``) and factor of every term that a loss is the sum of."""
    name = node.name()
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    factor = _number(getattr(node, "_saved_other", None))
    reduction = getattr(node, "_saved_reduction", None)
    if name.startswith(("AddBackward", "SubBackward")) or name in _TRANSPARENT:
        for parent in parents:
            yield from _terms(parent, scale)
    elif name.startswith(("MulBackward", "DivBackward")) and factor and len(parents) == 1:
        yield from _terms(parents[0], scale * factor if name.startswith("Mul") else scale / factor)
    elif name.startswith("MeanBackward") or reduction == _MEAN:
        yield "mean", scale
    elif name.startswith("SumBackward") or reduction == _SUM:
        yield "sum", scale
    else:
        yield "unknown", scale


def _number(value: object) -> float | None:
    """A factor that is the same for all samples; None for a tensor of several."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def adopt(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_sum: Callable[[nn.Module, Any], Tensor | tuple[Tensor, Any]],
    *,
    clip_norm: float | None = None,
    loss_scaling: bool | Mapping[str, float] = False,
    ema: EMA | None = None,
) -> AdoptedEngine:
    """An engine for a loop of your own: ``accumulate`` and ``update`` in place of forward, backward and step.

    Your learning-rate scheduler, your data and your generator state stay yours. Call ``zero_grad`` no more.

    Args:
        model: any module; it stays on its device.
        optimizer: over the model's parameters.
        loss_sum: (model, batch) -> the *sum* of the batch's losses, or (sum, anything to get back).
        clip_norm: largest gradient norm.
        loss_scaling: for fp16 autocast inside ``loss_sum``; with other numbers than ``torch.amp.GradScaler``'s
            defaults, ``{"init_scale": 2.0**10, "growth_interval": 500}``.
        ema: a moving average of the model's weights; ``update()`` moves it, and ``state()`` has it.

    Returns:
        An engine. ``accumulate(batches, denominator)`` takes the micro-batches of one update and the number of
        labels in all of them; ``update()`` applies it.

    Raises:
        UserError: the optimizer or ``ema`` holds parameters that are not the model's, or the model is wrapped for
            several processes (DistributedDataParallel, FSDP), or this process is one rank of several.

    Example:
        >>> engine = paceline.adopt(model, optimizer, lambda model, b: model(**b).loss * len(b["labels"]))
        >>> for batch in loader:
        ...     engine.accumulate([batch], denominator=len(batch["labels"]))
        ...     engine.update()
    """
    _refuse_parallel(model)
    _refuse_process_group()
    owned = {id(parameter) for parameter in model.parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(id(parameter) not in owned for parameter in held):
        raise UserError(
            "paceline.adopt(model, optimizer, ...)",
            "the optimizer holds parameters that are not the model's",
            "make the optimizer from model.parameters(), after moving the model to its device",
        )
    if ema is not None and any(id(parameter) not in owned for parameter in ema.parameters):
        raise UserError(
            "paceline.adopt(..., ema=ema)",
            "it averages parameters that are not the model's",
            "make it from the model, after moving that to its device",
        )
    updates = HostGated(optimizer, None)
    if ema is not None:
        updates.keep(ema)
    scale = Unscaled() if loss_scaling is False else Dynamic(held[0].device, _loss_scale(loss_scaling))

    objective = _Objective(model, loss_sum)

    def logits(batch: Any) -> Tensor:
        return getattr(output := model(**batch), "logits", output)  # type: ignore[no-any-return]

    step = Step(objective, FlatGradients(updates.parameters), scale, updates, clip_norm)
    runner = Eager("the loop is not paceline's")
    engine = TorchEngine(model, step, logits, runner, _no_samples, seed=None, degrade=_give_up)
    return AdoptedEngine(engine, objective)


@final
class _Objective:
    """The loop's own loss: a scalar for each micro-batch, and in the first update of several labels surely no mean."""

    def __init__(self, model: nn.Module, loss_sum: Callable[[nn.Module, Any], Tensor | tuple[Tensor, Any]]) -> None:
        self._model, self._loss_sum = model, loss_sum
        self._denominator = 1.0
        self._is_known, self._is_mean = False, False

    def __call__(self, batch: Any) -> tuple[Tensor, Any]:
        result = self._loss_sum(self._model, batch)
        loss, extra = result if isinstance(result, tuple) else (result, None)
        _require_scalar(loss)
        if not self._is_known:
            self._is_mean = is_mean(loss, self._denominator)
        return loss, extra

    def begin(self, denominator: float) -> None:
        self._denominator = denominator

    def require_sums(self, num_batches: int) -> None:
        """Refuse means, once there are more labels than micro-batches."""
        if self._is_known or _is_on_a_gpu(self._denominator) or self._denominator <= 1:
            return
        self._is_known = True
        if self._is_mean and self._denominator > num_batches:
            labels = f"{self._denominator:,.10g} labels"
            raise UserError(
                "paceline.adopt(..., loss_sum): gives a mean of the batch's losses",
                f"accumulate divides by the {labels} of the update, so that gradients would be too small by as much",
                'give their sum: reduction="sum", or the mean times the number of labels in the batch',
            )


@final
class AdoptedEngine:
    """paceline's step in your loop: you make the micro-batches."""

    def __init__(self, engine: TorchEngine, objective: _Objective) -> None:
        self._engine, self._objective = engine, objective

    def accumulate(self, batches: Iterable[Any], denominator: float) -> Accumulated:
        """Forward and backward of every micro-batch of one update; gradients add up.

        Args:
            batches: what ``loss_sum`` takes, one a micro-batch.
            denominator: number of labels in all of them.

        Raises:
            UserError: ``batches`` is a single batch, or empty; the denominator is not above 0; ``loss_sum`` gives
                no scalar that depends on the weights, or a mean. Another thread of this process trains, and draws
                from the same generator.
        """
        refuse_beside_training("engine.accumulate(...)")
        _refuse_single_batch(batches)
        if not _is_on_a_gpu(denominator) and not 0 < denominator < math.inf:
            raise UserError(
                f"engine.accumulate(..., denominator={denominator})",
                "every loss is divided by it",
                "give the number of labels in all micro-batches of the update",
            )
        self._objective.begin(denominator)
        accumulated = self._engine.accumulate_batches(batches, denominator)
        self._objective.require_sums(len(accumulated.extras))
        return accumulated

    def update(self) -> Update:
        """Clip, change the weights, forget the gradients.

        Raises:
            UserError: nothing was accumulated since the last update, or someone took a gradient away.
        """
        return self._engine.update()

    def infer(self, batch: Any) -> Tensor:
        """``model(**batch)`` in evaluation mode, without gradients: its logits."""
        return self._engine.infer(batch)

    def state(self) -> tuple[Tensors, dict[str, Any]]:
        """Everything that the rest of the training depends on: tensors, and plain data for JSON."""
        return self._engine.state()

    def load(self, tensors: Tensors, state: Mapping[str, Any] | None = None) -> None:
        """Take up a saved state by copying in place; without ``state`` the weights alone.

        Raises:
            CheckpointError: names or shapes differ from this engine's.
        """
        self._engine.load(tensors, state)

    @property
    def execution(self) -> Mapping[str, str]:
        """How steps are carried out."""
        return self._engine.execution

    def close(self) -> None:
        """Take the gradients from the model."""
        self._engine.close()


def _no_samples(ids: Ids, draw: int | None = None, *, slots: int | None = None) -> NoReturn:
    raise TypeError("micro-batches are made by the loop that adopted the engine")


def _refuse_single_batch(batches: object) -> None:
    """Refuse what ``for`` would take apart into its keys, rows, letters or fields."""
    is_batch = isinstance(batches, Mapping | Tensor | str | bytes) or hasattr(batches, "_fields")
    if isinstance(batches, list | tuple) and all(isinstance(each, Tensor) for each in batches):
        # micro-batches that are bare tensors are alike; inputs and labels of one batch are not
        is_batch = is_batch or len({(each.dtype, each.ndim) for each in batches}) > 1
    if is_batch or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise UserError(
            f"engine.accumulate(...) of a {type(batches).__name__}",
            "it takes the micro-batches of one update, and this is a single batch",
            "engine.accumulate([batch], denominator=...)",
        )


def _require_scalar(loss: object) -> None:
    if not isinstance(loss, Tensor):
        found = f"a {type(loss).__name__}"
    elif loss.numel() != 1:
        found = f"a tensor of shape {list(loss.shape)}"
    elif not loss.requires_grad:
        found = "a number that depends on no weight"
    else:
        return
    raise UserError(
        f"paceline.adopt(..., loss_sum): gives {found}",
        "it is differentiated: one number, computed from the model's output without detach() or item()",
        'return the sum of the losses: reduction="sum", or losses.sum()',
    )


def _is_on_a_gpu(number: object) -> bool:
    """Whether looking at a number would wait for the device."""
    return isinstance(number, Tensor) and number.device.type != "cpu"


def _give_up(error: Exception) -> NoReturn:
    """Nothing about the model is ours to do in a plainer way."""
    raise error


def _loss_scale(settings: bool | Mapping[str, float]) -> LossScalePart:
    """The part of a recipe with the same settings; True: its defaults.

    Raises:
        UserError: a setting that GradScaler has not, or a value that it refuses.
    """
    if settings is True:
        return LossScalePart()
    try:
        return LossScalePart.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"paceline.adopt(..., loss_scaling={excerpt(str(settings))})"
        place = ".".join(map(str, first["loc"]))
        why = f"{place}: {first['msg']}" if place else "it is true, or a dict"
        raise UserError(what, why, f"True, or a dict of {', '.join(LossScalePart.model_fields)}") from None


def _refuse_parallel(model: nn.Module) -> None:
    """Wrappers that sum gradients from hooks on ``backward()``, which the engine does not call.

    What was never imported cannot wrap anything: the sharded kinds are heavy to import.
    """
    wrappers: list[type] = [DistributedDataParallel]
    if fsdp := sys.modules.get("torch.distributed.fsdp"):
        wrappers += [fsdp.FullyShardedDataParallel, fsdp.FSDPModule]
    for module in model.modules():
        if kind := next((wrapper for wrapper in wrappers if isinstance(module, wrapper)), None):
            raise UserError(
                f"paceline.adopt(model, ...) with a model wrapped in {kind.__name__}",
                "its hooks sum gradients when backward() runs, and the engine does not call backward()",
                "give adopt() the module itself and train it in one process",
            )


def _refuse_process_group() -> None:
    """Refuse an open process group of several ranks: each would train a model of its own, and none would notice."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    raise UserError(
        f"paceline.adopt(...) in rank {dist.get_rank()} of {dist.get_world_size()} of an open process group",
        "the engine sums no gradients over ranks, so each rank would train a model of its own",
        f"train in one process, or leave the loop to paceline: paceline.train(RECIPE, gpus={dist.get_world_size()})",
    )
