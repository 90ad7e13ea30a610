"""A model that a user's own function builds."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from paceline.contract.errors import ModelError, PacelineError
from paceline.contract.references import described, importable, library_of, resolve

_PRECISIONS = {
    torch.float16: "; --set techniques.precision=fp16 computes in it, with loss scaling, on a GPU",
    torch.bfloat16: "; --set techniques.precision=bf16 computes in it, and pure_bf16 has weights of bf16 too",
}
"""Number format of weights -> the setting with which it is used."""


def build(reference: str, num_labels: int) -> nn.Module:
    """The module that ``reference``, a ``package.module:function``, returns for ``num_labels=N``.

    A function that has ``num_classes`` in its place is called with that, as torchvision's and timm's are.

    Raises:
        RecipeError: it cannot be imported.
        ModelError: it failed when called, returned something else, or a model that cannot be trained here: wrapped for
            several GPUs, compiled, with weights that are not 32-bit, or with layers that have no shape yet.
    """
    what = f"model.factory = {reference}"
    function = resolve(reference, "model.factory")
    argument = _argument(function, reference)
    try:
        with importable(reference), _refuse_wrapping(what):
            model = function(**{argument: num_labels})
    except PacelineError:
        raise
    except Exception as error:
        fix = f"define it as: def {reference.partition(':')[2]}(num_labels): ..." * isinstance(error, TypeError)
        raise ModelError(f"{what}: failed when called with {argument}={num_labels}", described(error), fix) from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"{what}: returned {type(model).__name__}", "an nn.Module is needed", "return the model")
    _require_plain(model, what)
    for name, module in model.named_modules():
        if any(is_lazy(held) for held in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            raise ModelError(
                f"{what}: {name or 'the model'} is a {type(module).__name__} without a shape",
                "it takes its shape from the first batch, and weights are counted and moved before there is one",
                "call the model once on a made-up batch in the factory, or give the layer its in_features",
            )
    return model


def _argument(function: Callable[..., Any], reference: str) -> str:
    """Return what the function calls the number of labels."""
    if library_of(reference):
        return "num_classes"
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a builtin that does not tell
        return "num_labels"
    return "num_classes" if "num_classes" in parameters and "num_labels" not in parameters else "num_labels"


@contextlib.contextmanager
def _refuse_wrapping(what: str) -> Iterator[None]:
    """Refuse DataParallel and DDP when they are constructed: DDP's constructor waits for ranks that build later."""

    def refuse(module: nn.Module, *arguments: object, **settings: object) -> NoReturn:
        raise _wrapped(what, type(module))

    constructors = {wrapper: wrapper.__init__ for wrapper in (nn.DataParallel, DistributedDataParallel)}
    for wrapper in constructors:
        wrapper.__init__ = refuse  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        for wrapper, constructor in constructors.items():
            wrapper.__init__ = constructor  # type: ignore[method-assign]


def _require_plain(model: nn.Module, what: str) -> None:
    """Refuse a model on which the factory has done what a setting does.

    Raises:
        ModelError: it is wrapped or compiled, or its weights are not 32-bit.
    """
    if fsdp := sys.modules.get("torch.distributed.fsdp"):
        for module in model.modules():
            if isinstance(module, (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)):
                raise _wrapped(what, type(module))
    if hasattr(model, "_orig_mod"):
        why = "a compiled module hides its blocks and their names"
        raise ModelError(f"{what}: returned a compiled model", why, "return the model; --set techniques.compile=true")
    for name, weight in model.named_parameters():
        if weight.is_floating_point() and weight.dtype != torch.float32:
            kind = str(weight.dtype).removeprefix("torch.")
            why = (
                "paceline trains 32-bit weights, since narrow ones lose small updates, and chooses what it computes in"
            )
            fix = f"return model.float(){_PRECISIONS.get(weight.dtype, '')}"
            raise ModelError(f"{what}: its weights are {kind} ({name})", why, fix)


def _wrapped(what: str, wrapper: type) -> ModelError:
    why = "paceline starts the processes, splits the batch and sums the gradients itself"
    fix = "return the model without it: --gpus N starts a process for each GPU"
    if issubclass(wrapper, nn.DataParallel):
        fix += "; --set parallel.strategy=dp is DataParallel"
    elif not issubclass(wrapper, DistributedDataParallel):
        fix += "; --set parallel.strategy=fsdp shards the model"
    return ModelError(f"{what}: wraps the model in {wrapper.__name__}", why, fix)
