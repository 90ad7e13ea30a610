"""Fusion: two kernels of our own in a block's training pass, for bias and GELU and for the end of each half.

What a post-norm encoder does between its matrix products is two lines: ``gelu(linear(x))`` and
``layer_norm(residual + dropout(linear(x)))``. They are found in the graph that torch traces of a block, whatever the
model calls its modules, and each becomes one kernel forward and one backward; the linear layer leaves its bias to the
kernel, which adds up the bias's gradient on its way. See ``kernels/residual_norm.py`` and ``kernels/bias_gelu.py``.

The rewritten graph is compiled, or run as it is: then nothing but the tracing is paid for. Whatever the patterns do not
cover stays as it was traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from paceline.kernels import bias_gelu, residual_norm
from paceline.kernels.launch import HAS_TRITON
from paceline.machine.device import PLANNED, capability, is_gpu

LINEAR = (torch._C._nn.linear, F.linear)
GELU = (torch._C._nn.gelu, F.gelu)
NORM = (F.layer_norm, torch.layer_norm)
ADD = (operator.add, torch.add)
"""Not in place: whoever else holds the tensor sees that it changes."""

HALF = (torch.bfloat16, torch.float16)
"""Formats of the products."""

Serves = Callable[[Tensor], bool]
"""Whether the kernels run where this tensor is."""

NARROW = "paceline_narrow"
"""Attribute of a block's result: the same in the format of matrix products, and the version of the result then."""


@dataclass(frozen=True)
class Found:
    """What was replaced in a graph."""

    norms: int = 0
    gelus: int = 0

    def __add__(self, other: Found) -> Found:
        return Found(self.norms + other.norms, self.gelus + other.gelus)

    def __str__(self) -> str:
        norms, gelus = ("" if count == 1 else "s" for count in (self.norms, self.gelus))
        return f"{self.norms} norm{norms} and {self.gelus} GELU{gelus}"


@final
class Tally:
    """What was replaced in the blocks traced so far."""

    def __init__(self) -> None:
        self.found: list[Found] = []
        """One a graph: several for blocks that differ, or that are traced again."""

    def __str__(self) -> str:
        return "; ".join(f"{kind} a block" for kind in dict.fromkeys(self.found)) or "no block traced"


def serves(tensor: Tensor) -> bool:
    """Whether the kernels run on the tensor's device."""
    return (
        (HAS_TRITON or tensor.device.type == PLANNED)
        and is_gpu(tensor.device)
        and torch.version.hip is None
        and capability(tensor.device) >= (8, 0)
    )


@dataclass(frozen=True)
class Seam:
    """Between blocks the narrow copy of a norm's result travels beside the wide one, as its attribute.

    The next block's products want it, and its gradient comes back by itself, to be added where it is needed. A tensor
    is cast, as autocast would have done, that comes without one, has been changed since, or whose gradient is watched.
    """

    takes: tuple[int, torch.dtype] | None = None
    """Which input is wanted in another format too, as one input more behind all others."""
    gives: tuple[int, ...] = ()
    """Which outputs have a narrow copy, behind all outputs."""

    def call(self, function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """The rewritten graph with the inputs and outputs of the graph as it was traced."""
        if self.takes is not None:
            index, dtype = self.takes
            inputs = [*inputs, _narrowed(inputs[index], dtype)]
        outputs = function(*inputs)
        if not self.gives:
            return outputs
        own = outputs[: -len(self.gives)]
        for index, narrow in zip(self.gives, outputs[-len(self.gives) :], strict=True):
            setattr(own[index], NARROW, (narrow, own[index]._version))
        return own


def _narrowed(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in another format: the copy that came with it, if it is still the same."""
    narrow, version = getattr(tensor, NARROW, (None, 0))
    if narrow is None:
        return tensor.to(dtype)
    same = version == tensor._version and narrow.dtype == dtype and narrow.requires_grad == tensor.requires_grad
    # a hook is to see, and may change, the whole gradient
    watched = tensor._backward_hooks or tensor.retains_grad
    return narrow if same and not watched else tensor.to(dtype)


def apply_fusion(module: fx.GraphModule, *, serves: Serves = serves) -> tuple[fx.GraphModule, Found, Seam]:
    """Replace what the two kernels do, in a copy of a graph as torch's tracer hands it to a backend.

    Only where the number formats are those of autocast: products in bf16 or fp16; residual, norm and weights in fp32.
    In graphs within the graph, such as a recomputed block's, too; they have no seam.

    Args:
        module: its nodes carry ``example_value``.
        serves: whether the kernels run where a tensor is.

    Returns:
        The copy; how many of each were replaced; what it takes and gives beyond the inputs and outputs traced.
    """
    graph, found, gives = _rewritten(module, serves, leaves=True)
    takes = _take_narrow(graph) if gives else None
    output = graph.output_node()
    own: Any = output.args[0]
    output.args = ((*own, *(narrow for _, narrow in gives)),)
    copy = fx.GraphModule(module, graph)
    found += _rewrite_inner(copy, serves)
    return copy, found, Seam(takes, tuple(index for index, _ in gives))


def give_narrow(module: fx.GraphModule, *, serves: Serves = serves) -> tuple[fx.GraphModule, Seam]:
    """What comes before the blocks, with a narrow copy for the first block beside its result: one pass, if compiled.

    Only under autocast, and of results that are a norm, or a norm with dropout.

    Args:
        module: as of ``apply_fusion``.
        serves: whether a seam is wanted where a tensor is.
    """
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(module.graph, {}))
    own: Any = output.args[0]
    gives = []
    for index, node in enumerate(own):
        inner = node.args[0] if _is_call(node, (F.dropout,)) and node.args else node
        wide = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if not (_is_call(inner, NORM) and isinstance(wide, Tensor) and wide.dtype == torch.float32 and serves(wide)):
            continue
        kind = wide.device.type
        if torch.is_autocast_enabled(kind) and (dtype := torch.get_autocast_dtype(kind)) in HALF:
            with graph.inserting_before(output):
                gives.append((index, graph.call_method("to", (node, dtype))))
    output.args = ((*own, *(narrow for _, narrow in gives)),)
    return fx.GraphModule(module, graph), Seam(gives=tuple(index for index, _ in gives))


def _rewrite_inner(module: fx.GraphModule, serves: Serves) -> Found:
    """The same in the graphs that nodes of the module's graph refer to."""
    found = Found()
    for name in dict.fromkeys(node.target for node in module.graph.nodes if node.op == "get_attr"):
        inner = getattr(module, name, None)
        if isinstance(inner, fx.GraphModule):
            graph, here, _ = _rewritten(inner, serves, leaves=False)
            copy = fx.GraphModule(inner, graph)
            found += here + _rewrite_inner(copy, serves)
            setattr(module, name, copy)
    return found


def _rewritten(
    module: fx.GraphModule, serves: Serves, *, leaves: bool
) -> tuple[fx.Graph, Found, list[tuple[int, fx.Node]]]:
    """A copy of the graph with the kernels in it, what they replaced, and the narrow copies of outputs.

    Args:
        leaves: whether a norm's result that is an output is wanted in the products' format too.
    """
    graph, norms, gelus = fx.Graph(), 0, 0
    output = graph.output(graph.graph_copy(module.graph, {}))
    gives: list[tuple[int, fx.Node]] = []
    for node in list(graph.nodes):
        if _is_call(node, NORM):
            places = [index for index, made in enumerate(output.args[0]) if made is node] if leaves else []
            narrow = _fuse_norm(graph, node, serves, leaves=bool(places))
            norms += narrow is not None
            gives += [(index, narrow) for index in places if narrow is not None]
        elif _is_call(node, GELU):
            gelus += _fuse_gelu(graph, node, serves)
    return graph, Found(norms, gelus), gives


def _take_narrow(graph: fx.Graph) -> tuple[int, torch.dtype] | None:
    """An input that products take, and that autocast would cast for each of them, as one input more."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(inputs):
        for dtype in HALF if _dtype(node) == torch.float32 else ():
            takers = _products_of(node, dtype)
            if takers:
                with graph.inserting_after(inputs[-1]):
                    copy = graph.placeholder("narrow")
                wide = node.meta["example_value"]
                # of the very sizes: a compiler that is handed a tensor of its own takes equal sizes for one variable
                copy.meta["example_value"] = wide.detach().to(dtype).requires_grad_(wide.requires_grad)
                for taker in takers:
                    taker.replace_input_with(node, copy)
                return index, dtype
    return None


def _fuse_norm(graph: fx.Graph, node: fx.Node, serves: Serves, *, leaves: bool) -> fx.Node | None:
    """The node of the result in the products' format; None where the pattern is another."""
    found, shape, weight, shift, eps = _arguments(node, ("input", "normalized_shape", "weight", "bias", "eps"), 1e-5)
    if not _is_call(found, ADD) or len(found.users) != 1 or len(found.args) != 2 or found.kwargs:
        return None
    for inner, residual in (found.args, found.args[::-1]):
        dropout, product = _without_dropout(inner)
        if dropout is None or not _is_biased_linear(product, serves) or not isinstance(residual, fx.Node):
            continue
        width = _shape(node)[-1:]
        same = _are_equal(_shape(product), _shape(node)) and _are_equal(_shape(residual), _shape(node))
        wide = all(_dtype(part) == torch.float32 for part in (node, found, residual, weight, shift))
        # known before the sum is computed, where the kernel will stand: the residual may be changed in place after it
        known = all(part.op in ("placeholder", "get_attr") for part in (weight, shift) if isinstance(part, fx.Node))
        if not (same and wide and known and isinstance(eps, float) and _are_equal(tuple(shape), width)):
            continue
        if not (isinstance(width[0], int) and width[0] <= residual_norm.WIDEST):
            continue
        takers = _products_of(node, _dtype(product))
        bias = _take_bias(product)
        with graph.inserting_before(found):
            arguments = (product, bias, residual, weight, shift, dropout, eps, bool(takers) or leaves)
            both = graph.call_function(residual_norm.OPERATOR, arguments)
            wide_out, narrow_out = (graph.call_function(operator.getitem, (both, index)) for index in (0, 1))
        # for the nodes that come after
        wide_out.meta, narrow_out.meta = node.meta.copy(), product.meta.copy()
        for taker in takers:  # autocast would make it narrow anyway
            taker.replace_input_with(node, narrow_out)
        node.replace_all_uses_with(wide_out)
        # one by one: to torch's removal of dead code, a method that changes a tensor in place is dead
        for done in (node, found, *([inner] if inner is not product else [])):
            graph.erase_node(done)
        return narrow_out
    return None


def _fuse_gelu(graph: fx.Graph, node: fx.Node, serves: Serves) -> bool:
    product, approximate = _arguments(node, ("input", "approximate"), "none")
    if approximate != "none" or not _is_biased_linear(product, serves) or len(product.users) != 1:
        return False
    if _dtype(node) != _dtype(product):
        return False
    bias = _take_bias(product)
    with graph.inserting_before(node):
        made = graph.call_function(bias_gelu.OPERATOR, (product, bias))
    made.meta = node.meta.copy()
    node.replace_all_uses_with(made)
    graph.erase_node(node)
    return True


def _take_bias(product: fx.Node) -> Any:
    """The linear layer's bias, which it computes without from now on."""
    *others, bias = product.args
    product.args = tuple(others)
    return bias


def _without_dropout(node: Any) -> tuple[float | None, Any]:
    """The dropout that ``node`` is, and what it is of; None where somebody else wants the value in between too."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None, None
    if not _is_call(node, (F.dropout,)):
        return 0.0, node
    inner, p, training, _ = _arguments(node, ("input", "p", "training", "inplace"), 0.5, True, False)
    if not isinstance(inner, fx.Node) or len(inner.users) != 1 or not isinstance(training, bool):
        return None, None
    if not isinstance(p, (int, float)) or not 0 <= p < 1:
        return None, None
    return float(p) if training else 0.0, inner


def _is_biased_linear(node: Any, serves: Serves) -> bool:
    """A product in bf16 or fp16, with an fp32 bias, on a device with the kernels."""
    if not _is_call(node, LINEAR) or len(node.args) != 3 or node.kwargs or not isinstance(node.args[2], fx.Node):
        return False
    return _dtype(node) in HALF and _dtype(node.args[2]) == torch.float32 and serves(node.meta["example_value"])


def _products_of(node: fx.Node, dtype: torch.dtype | None) -> list[fx.Node]:
    """Linear layers that take the node's value, and of which autocast makes products in ``dtype``."""
    return [
        user for user in node.users if _is_call(user, LINEAR) and user.args[:1] == (node,) and _dtype(user) == dtype
    ]


def _arguments(node: fx.Node, names: tuple[str, ...], *defaults: Any) -> tuple[Any, ...]:
    """The call's arguments in the order of ``names``, however they were given; the last have ``defaults``."""
    missing = len(names) - len(defaults)
    filled = {**dict(zip(names[missing:], defaults, strict=True)), **dict(zip(names, node.args, strict=False))}
    filled |= {name: value for name, value in node.kwargs.items() if name in names}
    return tuple(filled.get(name) for name in names)


def _is_call(node: Any, targets: tuple[Any, ...]) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, Tensor) else None


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("example_value")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _are_equal(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two shapes are known to be equal; where they only may be, nothing is assumed of later calls."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(one) == len(other) and all(statically_known_true(a == b) for a, b in zip(one, other, strict=True))
