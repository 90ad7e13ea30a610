"""What stands in for torch's compiler on a GPU that is not there.

Which tensors a compiled forward pass keeps for its backward pass is decided before any kernel is written: both passes
are traced together and cut where least has to be kept (min-cut). That cut is torch's own here. The two halves then run
operator by operator, and what a fused kernel never writes down is not counted: results of elementwise operators that
only elementwise operators and sums read. The compiler writes some of those down after all, where many read them.

Source: torch/_functorch/partitioners.py; He and Yu, Transcending Runtime-Memory Tradeoffs in Checkpointing by being
Fusion Aware, MLSys 2023.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.machine.device import PLANNED
from paceline.memory.ledger import Ledger

_ELEMENTWISE = frozenset(
    {
        torch.ops.prims.convert_element_type.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.clone.default,
    }
)
"""As good as elementwise; torch gives them no tag."""

_REDUCTIONS = frozenset(
    {
        torch.ops.aten.sum.dim_IntList,
        torch.ops.aten.mean.dim,
        torch.ops.aten.var_mean.correction,
        torch.ops.aten.amax.default,
    }
)

_CONVOLUTIONS = frozenset({torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default})


def register_compiler() -> None:
    """Make the stand-in known to ``torch.compile`` as the backend ``planned``; its parts are loaded when it is used."""
    torch._dynamo.register_backend(_compile, name=PLANNED)


def _compile(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    _random_states()
    importlib.import_module("torch._inductor.lowering")  # the cut asks what can be fused, without importing it
    backend = aot_autograd(
        fw_compiler=_fused,
        bw_compiler=_fused,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    return backend(module, inputs)


def _fused(module: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """The graph as it is, but for what its fused kernels would keep in registers."""
    ledger = torch.get_device_module(PLANNED).ledger
    # around convolutions batch statistics end a kernel, and what they read is written down more often than not: with
    # nothing left out a ResNet's plan is nearer what it takes
    convolves = any(node.target in _CONVOLUTIONS for node in module.graph.nodes)
    in_registers = set() if convolves else _in_registers(module.graph)

    def run(given: list[Any]) -> Any:
        # what a pass is given is its own to let go of, as of compiled code; an interpreter would keep what it returned
        return _Fused(module, in_registers, ledger).boxed_run(given)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


@final
class _Fused(torch.fx.Interpreter):
    def __init__(self, module: torch.fx.GraphModule, in_registers: set[torch.fx.Node], ledger: Ledger) -> None:
        super().__init__(module)
        self._in_registers, self._ledger = in_registers, ledger

    def run_node(self, n: torch.fx.Node) -> Any:
        with contextlib.ExitStack() as around:
            if n in self._in_registers:
                around.enter_context(self._ledger.unseen())
            if n.target in _REDUCTIONS:
                around.enter_context(self._ledger.compiled())
            return super().run_node(n)


def _in_registers(graph: torch.fx.Graph) -> set[torch.fx.Node]:
    """Elementwise results that whoever reads them computes on the way, as the compiler's lowering decides it."""
    from torch._inductor import config

    found: set[torch.fx.Node] = set()
    behind: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    for node in graph.nodes:
        behind[node] = set()
        for read in node.all_input_nodes:
            inside = read in found or _is_view(read)
            behind[node] |= behind[read] if inside and behind[read] else {read}
        reads = len(behind[node])
        often = len(node.users) > 1 and reads > config.realize_reads_threshold
        inlined = _is_elementwise(node) and all(map(_is_fused_into, node.users)) and not often
        if inlined or (_is_view(node) and node.args[0] in found):
            found.add(node)
    return found


def _is_fused_into(user: torch.fx.Node) -> bool:
    """Whether who reads this reads it where it was computed."""
    if _is_view(user):
        return all(_is_fused_into(behind) for behind in user.users)
    return _is_elementwise(user) or user.target in _REDUCTIONS


def _is_elementwise(node: torch.fx.Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target in _ELEMENTWISE


def _is_view(node: torch.fx.Node) -> bool:
    return bool(getattr(node.target, "is_view", False)) or node.target is torch.ops.aten.view.default


def _random_states() -> None:
    """Recomputed dropout keeps its random state in the graph, by operators that know torch's own devices alone."""
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    def saved(mode: FakeTensorMode, op: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        with mode:
            return torch.empty(16, dtype=torch.uint8, device="cpu"), op(*args, **kwargs)

    def restored(mode: FakeTensorMode, _: Tensor, op: Any, *args: Any, **kwargs: Any) -> Any:
        with mode:
            return op(*args, **kwargs)

    run_and_save_rng_state.python_key_table[FakeTensorMode] = saved
    run_with_rng_state.python_key_table[FakeTensorMode] = restored
