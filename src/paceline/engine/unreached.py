"""Trained weights that the loss does not depend on, such as the pooler of a model whose head reads something else.

torch gives them no gradient, and its optimizers leave such weights as they are. Ours have room for every gradient, so
that they stay zero, and only weight decay would still move them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from torch import Tensor, nn

from paceline.device import PLANNED
from paceline.engine.compared import as_it_is
from paceline.seams import Build, Ids
from paceline.techniques.packing import exactly


def unreached_weights(build: Build, ids: Ids) -> tuple[str, ...]:
    """Names of the trained weights that get no gradient, in the order of the model; () where the pass fails.

    Training may pass by what evaluation uses (LayerDrop), or use what evaluation passes by: a weight has to be
    without a gradient in both. The model, its gradients and torch's random numbers stay as they are.

    Args:
        build: with the plain forward pass, before anything compiles or shards it.
        ids: samples to look at; two are enough.
    """
    trained = {name: p for name, p in build.model.named_parameters() if p.requires_grad}
    if build.device.type == PLANNED:
        return ()  # decay changes neither memory nor shapes
    found = set(trained)
    try:
        with exactly(build.device), _untouched(build.model):
            for training in (False, True):
                if found:
                    found -= _reached(build, trained, ids, training=training)
    except Exception:  # the first step says what is wrong
        return ()
    return tuple(name for name in trained if name in found)


def unreached_notice(names: tuple[str, ...]) -> str:
    """What to tell of them."""
    several = len(names) > 1
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"{len(names)} weight{'s' if several else ''} of this model {'are' if several else 'is'} not used by the loss "
        f"({shown}); {'they keep their values' if several else 'it keeps its value'}, as in any PyTorch loop"
    )


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Mode, attributes and running statistics are what they were on the way out."""
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with as_it_is(model):
            yield
    finally:
        for buffer, before in buffers:
            buffer.copy_(before)


def _reached(build: Build, trained: dict[str, nn.Parameter], ids: Ids, *, training: bool) -> set[str]:
    batch = build.layout.collate(ids)
    build.model.train(training)
    loss = build.task.loss_sum(build.forward(build.model, batch), batch)
    reached = _in_graph(loss, trained)
    # a function that differentiates by itself, such as recomputation of the older kind, hides its weights
    return reached if len(reached) == len(trained) else reached | _with_gradient(loss, trained)


def _in_graph(loss: Tensor, trained: dict[str, nn.Parameter]) -> set[str]:
    """Weights that are leaves of the loss's graph."""
    names = {id(parameter): name for name, parameter in trained.items()}
    left, seen, reached = [loss.grad_fn], set(), set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None and id(leaf) in names:
            reached.add(names[id(leaf)])
        left += [following for following, _ in node.next_functions]
    return reached


def _with_gradient(loss: Tensor, trained: dict[str, nn.Parameter]) -> set[str]:
    """Weights that a backward pass gives a gradient, each of which is dropped at once."""
    reached: set[str] = set()
    before = {name: parameter.grad for name, parameter in trained.items()}

    def drop(name: str, parameter: Tensor) -> None:
        reached.add(name)
        parameter.grad = None

    with contextlib.ExitStack() as hooks:
        for name, parameter in trained.items():
            parameter.grad = None
            hooks.callback(parameter.register_post_accumulate_grad_hook(partial(drop, name)).remove)
        loss.backward()
    for name, parameter in trained.items():
        parameter.grad = before[name]
    return reached
