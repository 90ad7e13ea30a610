"""Fused QKV: query, key and value of an attention layer in one matrix product instead of three.

The weights stay three parameters, joined at each pass: names, optimizer and checkpoints do not notice. One wide product
fills a GPU better than three narrow ones, and the input's gradient is one product instead of three and two sums.

Where nothing comes between products and attention (no rotary positions, no norm of queries and keys), attention takes
the joined product as it is, and its gradient is one tensor. Whether that is so is seen in a pass that is not compiled.

Shapes: T positions of a packed row, H heads, D head size.
Source: NVIDIA's MLPerf BERT, which keeps the weights joined (``fused_bias_mha``).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.kernels.launch import only_noted
from paceline.seams import Build, LayoutKind

SETTING = "techniques.fused_qkv"

TRIPLES = (("q_lin", "k_lin", "v_lin"), ("query", "key", "value"), ("q_proj", "k_proj", "v_proj"))
"""How transformers' encoders name the three. Names only find candidates: at each pass the layers must be given the
same tensor, or each computes its own product."""


NOTE = "qkv_reaches_attention"
"""Attribute of a joined attention module: in its last training pass that was not compiled, attention was given exactly
what the joined product is made of. A compiled pass goes by it."""


def apply_fused_qkv(model: nn.Module) -> int:
    """Join query, key and value of each attention layer of ``model``, in place; returns how many were joined.

    A layer is left alone when its three products differ in input width, bias, number format or in whether they are
    trained, when they are not plain ``nn.Linear``, when it attends to another sequence, or when its forward pass calls
    its parent's.
    """
    found = [(module, names) for module in model.modules() if (names := triple(module))]
    for module, names in found:
        # on the instance, so that the class and every other model of it are left alone
        module.forward = types.MethodType(_joined_forward(names), module)
        setattr(module, NOTE, False)
    return len(found)


def apply(build: Build, setting: bool | Literal["auto"]) -> Build:
    """Join the attention layers of the build's model; with packed batches, one sample is passed through it.

    Raises:
        RecipeError: ``setting`` is true and there is nothing to join.
    """
    if setting is False:
        return build.carried_out(fused_qkv="off")
    joined = apply_fused_qkv(build.model)
    if joined:
        if build.layout_kind is LayoutKind.PACKED:
            _take_notes(build)
        return build.carried_out(fused_qkv=f"{joined} layers")
    reason = "no attention layer of this model computes query, key and value from one input in three products"
    if any(triple(module, adapted=True) for module in build.model.modules()):
        reason = "adapters stand beside query, key or value, and what is joined has no place for them"
    if setting is True:
        raise RecipeError(f"{SETTING} = true", reason, f"--set {SETTING}=auto")
    return build.decided(SETTING, False, reason).carried_out(fused_qkv=f"off: {reason}")


@final
class SharedProjection:
    """Linear layers of one input width over one tensor, for one pass: the first call computes all of them.

    Args:
        linears: all with a bias, or none.
    """

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self._linears = linears
        self._input: Tensor | None = None
        self._outputs: Sequence[Tensor] = ()
        self.product: Tensor | None = None
        """[..., sum of out]: all outputs side by side, once they are computed."""

    def project(self, index: int, hidden: Tensor) -> Tensor:
        """[..., in] -> [..., out of layer ``index``]."""
        if self._input is None:
            self._input, self.product = hidden, self._all(hidden)
            self._outputs = torch.split(self.product, [linear.out_features for linear in self._linears], dim=-1)
        if hidden is self._input:
            return self._outputs[index]
        linear = self._linears[index]
        return F.linear(hidden, linear.weight, linear.bias)

    def _all(self, hidden: Tensor) -> Tensor:
        weights: list[Tensor] = [linear.weight for linear in self._linears]
        biases: list[Tensor] = [linear.bias for linear in self._linears if linear.bias is not None]
        return F.linear(hidden, torch.cat(weights), torch.cat(biases) if biases else None)


@final
class StandIn:
    """``self`` of an attention module's forward for one pass: the module, but for its three products.

    It lives as long as the pass, so that no tensor outlives it; and since nothing that outlives the pass is changed,
    compilers and recomputation see a plain function.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._stands_for = module
        self._shared = SharedProjection([getattr(module, name) for name in names])
        for index, name in enumerate(names):
            setattr(self, name, partial(self._shared.project, index))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stands_for, name)

    def joined(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
        """The product that the three are views of, for an attention function that is given this as its module.

        Args:
            query, key, value: [1, H, T, D], as they reach attention.

        Returns:
            [1, T, 3, H, D]; None where the three are anything else than its parts, or where that is not known.
        """
        product, (_, heads, _, size) = self._shared.product, query.shape
        if product is None or product.shape[-1] != 3 * heads * size:
            return None
        # a compiler has no addresses to compare, nor has a tensor without data
        blind = torch.compiler.is_compiling() or query.is_meta
        if blind and not getattr(self._stands_for, NOTE):
            return None
        parts = product.unflatten(-1, (3, heads, size))
        return parts if blind or self._unchanged(parts, (query, key, value)) else None

    def _unchanged(self, parts: Tensor, states: Sequence[Tensor]) -> bool:
        """Whether the states are the parts themselves, not copies; in training it is noted."""
        made = (part.transpose(1, 2) for part in parts.unbind(2))
        same = all(place(state) == place(part) for state, part in zip(states, made, strict=True))
        # evaluation leaves out what training may do in between, such as dropout of the queries
        if self._stands_for.training and getattr(self._stands_for, NOTE) != same:
            setattr(self._stands_for, NOTE, same)
        return same


def place(tensor: Tensor) -> tuple[Any, ...]:
    """Where its numbers stand; also of a tensor that holds none, which ``is_set_to`` refuses to tell."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


@functools.cache
def _joined_forward(names: tuple[str, ...]) -> Callable[..., Any]:
    """One method for all layers with these names, so that a compiler sees equal layers as equal."""

    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(module).forward(StandIn(module, names), *args, **kwargs)

    return forward


def _take_notes(build: Build) -> None:
    """Pass one sample through the model, so that every joined layer has its note before anything is compiled."""
    with _attention_as_in_training(build.model), torch.no_grad():
        gpus = [build.device] if build.device.type == "cuda" else []
        # nobody looks at the logits, and kernels would be compiled for this one after the other
        with torch.random.fork_rng(devices=gpus), only_noted(build.device):
            build.forward(build.model, build.layout.collate(np.zeros(1, np.int64)))


@contextlib.contextmanager
def _attention_as_in_training(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode but for its joined layers, so that no running statistics change; modes come back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    for module, _ in modes:
        if hasattr(module, NOTE):
            module.train()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def triple(module: nn.Module, *, adapted: bool = False) -> tuple[str, ...] | None:
    """Names of the layer's three products, where they can be joined.

    Args:
        adapted: also those that have adapters beside them (LoRA), which cannot.
    """
    if getattr(module, "is_cross_attention", False) or "forward" in vars(module) or _calls_its_parents(module):
        return None
    for names in TRIPLES:
        children = [getattr(module, name, None) for name in names]
        inner = [getattr(child, "base_layer", child) if adapted else child for child in children]
        linears = [child for child in inner if type(child) is nn.Linear]
        if len(linears) == 3 and _joinable(linears):
            return names
    return None


def _calls_its_parents(module: nn.Module) -> bool:
    """Whether its forward pass calls ``super()``, which wants the module itself and no stand-in."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "super" in code.co_names


def _joinable(linears: Sequence[nn.Linear]) -> bool:
    alike = {
        (linear.in_features, linear.bias is None, linear.weight.dtype, linear.weight.requires_grad)
        for linear in linears
    }
    biases = {linear.bias.requires_grad for linear in linears if linear.bias is not None}
    untouched = all("forward" not in vars(linear) for linear in linears)
    return len(alike) == 1 and len(biases) <= 1 and untouched
