"""What stands in for torch's compiler on a card that is not there.

Which tensors a compiled forward pass keeps for its backward pass is decided before any kernel is written: both passes
are traced together and cut where least has to be kept (min-cut). That cut is torch's own here. The two halves then run
operator by operator, so that what a fused kernel never writes down is counted for a moment: a plan of a compiled run is
a little high, and its band wider.

Source: torch/_functorch/partitioners.py; He and Yu, Transcending Runtime-Memory Tradeoffs in Checkpointing by being
Fusion Aware, MLSys 2023.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.device import PLANNED


def register_compiler() -> None:
    """Make the stand-in known to ``torch.compile`` as the backend ``planned``; its parts are loaded when it is used."""
    torch._dynamo.register_backend(_compile, name=PLANNED)


def _compile(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    _random_states()
    importlib.import_module("torch._inductor.lowering")  # the cut asks what can be fused, without importing it
    backend = aot_autograd(
        # run as it is; what a pass is given is its own to let go of, as compiled code does
        fw_compiler=boxed_nop,
        bw_compiler=boxed_nop,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    return backend(module, inputs)


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
