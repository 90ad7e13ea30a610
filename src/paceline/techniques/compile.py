"""Compile: each block's training pass as fused kernels; n equal blocks are one compilation.

Blocks, not the model: a compiler that sees one layer is done in seconds, and equal layers share what it makes. Lengths
are dynamic from the first call, so a packed row of another length runs the same code. Evaluation runs the code as
written, so that no second compilation is paid for.

Source: torch.compile's documentation; PyTorch recipe "Reducing torch.compile cold start with regional compilation".
"""

from __future__ import annotations

import functools
import importlib
import logging
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

from paceline.contract.errors import RecipeError
from paceline.contract.signals import DeafChildren
from paceline.machine.device import PLANNED
from paceline.seams import Build
from paceline.techniques.channels_last import has_convolutions
from paceline.techniques.fusion import Seam, Serves, Tally, apply_fusion, give_narrow, serves

log = logging.getLogger(__name__)

SETTING = "techniques.compile"

COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")
"""Packages whose exceptions say that a model could not be compiled, not that it is wrong."""

OPTIONS: dict[str, Any] = {
    # CUDA graphs are the engine's: two owners of static memory lose gradients (pytorch#96693)
    "triton.cudagraphs": False,
    # sums over a row's positions that ride on a pass over its width: the default cut leaves torch a long second sum,
    # 0.52 ms of a 14.7 ms step against 0.27 with a cut that is tried out
    "triton.mix_order_reduction_autotune_split_size": True,
    # and whether they do must not depend on the row's length: each side of such a bound is compiled for itself, in the
    # middle of the run (torch 2.11 even does so at every call, since a guard of it can never hold)
    "triton.mix_order_reduction_non_strict_mode": True,
}
"""Options of torch's Inductor, for all that is compiled."""


def static_options() -> dict[str, Any]:
    """Options of torch's Inductor for a network of convolutions that is compiled for one size of images.

    With many small layers it waits for launches, and its kernels leave much of a GPU idle: those that do not need one
    another become one (a step of ResNet-18 at 32 pixels: 1.27 -> 1.18 ms), and both gradients of a convolution are
    computed at a time.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    from paceline.kernels.convolution_gradients import put_side_by_side

    @final
    class SideBySide(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            put_side_by_side(graph)

        def uuid(self) -> str:
            return "paceline.convolution_gradients, 1"  # part of the key that kept kernels are found by

    return {**OPTIONS, "combo_kernels": True, "post_grad_custom_post_pass": SideBySide()}


Call = Callable[..., Any]


def apply_compile(
    blocks: Sequence[nn.Module],
    embeddings: Sequence[nn.Module] = (),
    *,
    backend: str | Call = "inductor",
    fusion: bool = False,
    serves: Serves = serves,
) -> Tally:
    """Compile the training pass of each module in place, at its first training call; names of weights stay as they are.

    Equal blocks are compiled once. Sizes of inputs may change from call to call. Passes without gradients, or with the
    module in evaluation mode, run as written.

    Args:
        blocks: the model's repeated blocks.
        embeddings: what comes before them, see ``embeddings_of``.
        backend: as of ``torch.compile``; with ``fusion`` ``inductor``, a function, or ``eager``, which traces only.
        fusion: put our own kernels into the blocks' traced graphs first.
        serves: whether those kernels run where a tensor is.

    Returns:
        What fusion finds, filled in as graphs are traced.

    Raises, at a module's first training call:
        Exception: of torch's compilers, when it cannot be compiled as one graph; see ``reason_of``.
    """
    tally = Tally()

    def fused_block(graph: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, Seam]:
        graph, found, seam = apply_fusion(graph, serves=serves)
        tally.found.append(found)
        return graph, seam

    for group, rewrite in ((blocks, fused_block), (embeddings, partial(give_narrow, serves=serves))):
        compiled = _compiled_call(_Fusing(backend, rewrite) if fusion else backend, dynamic=None)
        for module in group:
            found = tally if fusion and group is blocks else None
            _install(module, TrainingPass(module.forward, compiled, module, static=False, tally=found))
    return tally


def apply_compile_whole(model: nn.Module, *, static: bool, backend: str | Call = "inductor") -> None:
    """Compile the model's training pass as one graph; for models whose blocks differ in shape, such as ResNets.

    Args:
        model: is changed in place.
        static: one compilation for the largest batch, tuned to its sizes; smaller batches (the tail of an epoch) run
            as written, which is quicker than compiling for them. Otherwise sizes are dynamic.
        backend: as of ``torch.compile``.
    """
    compiled = _compiled_call(backend, dynamic=False if static else None)
    _install(model, TrainingPass(model.forward, compiled, model, static=static))


@final
class TrainingPass:
    """A module's ``forward``: compiled in training, as written elsewhere.

    Args:
        plain: the forward pass as written.
        compiled: called with ``plain`` and its arguments.
        module: whose mode tells whether this is training.
        static: compile for the largest batch only.
        tally: of what fusion finds in it and its equals.
    """

    def __init__(
        self, plain: Call, compiled: Call, module: nn.Module, *, static: bool, tally: Tally | None = None
    ) -> None:
        self.tally = tally
        self.plain, self._compiled, self._module, self._static = plain, compiled, module, static
        self.in_evaluation = False
        """Whether it is compiled in evaluation mode too, where gradients are asked for."""
        self._largest = 0
        self._worked = self._broken = False
        functools.update_wrapper(self, plain)  # the signature stays to be read

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not ((self._module.training or self.in_evaluation) and torch.is_grad_enabled()):
            return self.plain(*args, **kwargs)
        tensors = [leaf for leaf in _pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not self._static:
            _mark_dynamic(tensors)
        elif not self._is_largest(tensors):
            return self.plain(*args, **kwargs)
        if self._broken:
            return self.plain(*args, **kwargs)
        try:
            result = self._compiled(self.plain, *args, **kwargs)
        except Exception as error:
            reason = reason_of(error)
            if not self._worked or reason is None:
                raise
            # it is found before anything is computed, and a run does not end over speed
            log.warning("%s is no longer compiled: %s", type(self._module).__name__, reason)
            self._broken = True
            return self.plain(*args, **kwargs)
        self._worked = True
        return result

    @property
    def is_compiled(self) -> bool:
        """Whether a pass was compiled, and none has failed since."""
        return self._worked and not self._broken

    def forget_largest(self) -> None:
        """Take the next batch for the largest."""
        self._largest = 0

    def _is_largest(self, tensors: Sequence[Tensor]) -> bool:
        rows = tensors[0].shape[0] if tensors else 0
        self._largest = max(self._largest, rows)
        return rows == self._largest


def apply(build: Build, setting: bool | Literal["auto"], *, fusion: bool = False) -> Build:
    """Compile the build's blocks and embeddings, or the whole model where its blocks are convolutions.

    Nothing is compiled yet: that is done by the first training pass, whose failure ``fall_back`` answers.

    Args:
        setting: false: nothing is compiled; blocks are traced all the same where ``fusion`` wants it.
        fusion: see ``techniques/fusion.py``; models of convolutions have no use for it.
    """
    by_blocks = bool(build.blocks) and not any(has_convolutions(block) for block in build.blocks)
    execution = {"compile": "off"}
    if fusion and not by_blocks:
        execution["fusion"] = "off: the model has no blocks of linear layers"
    # what stands in for the compiler where there is no GPU to compile for
    backend: str | Call = torch._dynamo.lookup_backend(PLANNED) if build.device.type == PLANNED else "inductor"
    if by_blocks and (setting or fusion):
        embeddings = embeddings_of(build.model, build.blocks) if setting else []
        apply_compile(build.blocks, embeddings, backend=backend if setting else "eager", fusion=fusion)
        if setting:
            execution["compile"] = f"each of {len(build.blocks)} blocks{' and the embeddings' if embeddings else ''}"
    elif setting:
        # convolution stages differ in shape, so that block by block would be many compilations; image sizes are fixed
        apply_compile_whole(build.model, static=has_convolutions(build.model), backend=backend)
        execution["compile"] = "the whole model"
    return build.carried_out(**execution)


def takes_embeddings(build: Build) -> bool:
    """Whether ``apply`` compiles the embeddings too: with the whole model, or where they do more than look up."""
    by_blocks = bool(build.blocks) and not any(has_convolutions(block) for block in build.blocks)
    return not by_blocks or bool(embeddings_of(build.model, build.blocks))


def fall_back(build: Build, setting: bool | Literal["auto"], error: BaseException) -> Build:
    """The build with every forward pass as written again, after compiling or tracing failed with ``error``.

    Whoever holds the model sees the change: it is made in place.

    Raises:
        RecipeError: compiling was asked for (``setting`` is true).
    """
    reason = reason_of(error) or f"{type(error).__name__}: {error}"
    lost = {"fusion": f"off: {reason}"} if fused(build.model) else {}
    undo(build.model)
    if lost and build.execution.get("compile") == "off":  # traced for the sake of fusion alone
        return build.decided("techniques.fusion", False, f"tracing failed: {reason}").carried_out(**lost)
    if setting is True:
        fix = f"--set {SETTING}=false, or auto, which goes on without"
        raise RecipeError(f"{SETTING} = true", f"this model cannot be compiled: {reason}", fix) from error
    told = build.decided(SETTING, False, f"compiling failed: {reason}")
    return told.carried_out(**lost, compile=f"off: {reason}")


def fused(model: nn.Module) -> dict[str, str]:
    """For the path: what fusion has found so far; nothing where it was not asked for."""
    passes = (vars(module).get("forward") for module in model.modules())
    tally = next((found.tally for found in passes if isinstance(found, TrainingPass) and found.tally), None)
    return {"fusion": str(tally)} if tally else {}


def forget_largest(model: nn.Module) -> None:
    """Compile for the batches that come, after they were made smaller for want of memory."""
    for module in _compiled(model):
        vars(module)["forward"].forget_largest()


def compile_in_evaluation(model: nn.Module) -> None:
    """Compile passes with gradients in evaluation mode too: without dropout they can be compared with plain ones."""
    for module in _compiled(model):
        vars(module)["forward"].in_evaluation = True


def compiled_passes(model: nn.Module) -> int:
    """Number of modules whose training pass was made by the compiler."""
    return sum(vars(module)["forward"].is_compiled for module in _compiled(model))


def undo(model: nn.Module) -> int:
    """Take every compiled training pass out of ``model``; returns how many there were."""
    found = _compiled(model)
    for module in found:
        plain = vars(module)["forward"].plain
        del module.forward
        if module.forward != plain:  # another technique had replaced it on the instance
            module.forward = plain
    return len(found)


def reason_of(error: BaseException) -> str | None:
    """One line on why compiling failed; None when ``error`` did not come from torch's compilers."""
    current: BaseException | None = error
    while current is not None:
        if any(kind.__module__.startswith(COMPILERS) for kind in type(current).__mro__):
            # what a backend raised stands in the second line of the message, and is there as it was
            raised = getattr(current, "inner_exception", current)
            first = next((line.strip() for line in str(raised).splitlines() if line.strip()), "")
            return f"{type(raised).__name__}: {first}"
        current = current.__cause__ or current.__context__
    return None


def embeddings_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Outermost modules before the blocks that look up embeddings and do more: add, normalise, drop out.

    Found by structure: they hold ``nn.Embedding``, hold no block and stand in none. A bare ``nn.Embedding`` is not
    among them, since there is nothing to fuse.
    """
    members = set(blocks)

    def search(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            if child in members:
                continue
            if any(inner in members for inner in child.modules()):
                yield from search(child)
            elif not isinstance(child, nn.Embedding) and any(isinstance(m, nn.Embedding) for m in child.modules()):
                yield child

    return list(search(model))


@functools.cache
def wake_tracer(*, compiles: bool = False) -> None:
    """Import torch's tracer, and have it trace something: seconds, in which other threads may read and encode.

    For its first frame it loads and looks up what it keeps for all others.

    Args:
        compiles: import what compiles its graphs, too.
    """
    if compiles:
        start_workers()
    rows = torch.ones(2, 1)
    torch._dynamo.mark_dynamic(rows, 0)
    torch.compile(_product, backend="eager")(rows)


def start_workers() -> None:
    """Import the compiler, and start what works for it on a GPU: processes that outlast a signal to all of the run."""
    with DeafChildren():
        importlib.import_module("torch._inductor.compile_fx")
        importlib.import_module("torch._inductor.async_compile").AsyncCompile.warm_pool()


def _product(rows: Tensor) -> Tensor:
    """Traced to wake the tracer, so that no code that others compile keeps a trace of it."""
    return rows @ rows.mT


def _compiled(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(vars(module).get("forward"), TrainingPass)]


def _forward(forward: Call, /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


@final
class _Fusing:
    """A backend of ``torch.compile`` that has the graph rewritten before the backend proper sees it."""

    def __init__(
        self, backend: str | Call, rewrite: Callable[[torch.fx.GraphModule], tuple[torch.fx.GraphModule, Seam]]
    ) -> None:
        self._backend, self._rewrite = backend, rewrite

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Call:
        module, seam = self._rewrite(module)
        taken = [node for node in module.graph.nodes if node.op == "placeholder"][len(inputs) :]
        compiled = self._compiled(module, [*inputs, *(node.meta["example_value"] for node in taken)])
        return lambda *given: seam.call(compiled, given)

    def _compiled(self, module: torch.fx.GraphModule, inputs: list[Any]) -> Call:
        if not isinstance(self._backend, str):
            return cast(Call, self._backend(module, inputs))
        if self._backend == "eager":
            return _with_random_state(module).forward
        from torch._inductor.compile_fx import compile_fx

        return cast(Call, compile_fx(module, inputs, config_patches=dict(OPTIONS)))


def _with_random_state(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Recomputation as it was written, in a graph that is run as it is.

    As torch traces it, it leaves random states to a compiler: dropout would draw other numbers in the backward pass.
    """
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            node.target = checkpoint
            node.kwargs = {**node.kwargs, "use_reentrant": False, "preserve_rng_state": True}
    module.recompile()
    return module


def _compiled_call(backend: str | Call, *, dynamic: bool | None) -> Call:
    """``_forward``, compiled; one for all modules of a group, so that equal ones share their graph.

    torch keeps at most eight graphs a code object: each call has its own, so that many runs in one process do not
    use up one another's, and it is freed with the model.
    """
    own = types.FunctionType(_forward.__code__.replace(), globals(), _forward.__name__)
    options = (static_options() if dynamic is False else dict(OPTIONS)) if backend == "inductor" else None
    return torch.compile(own, fullgraph=True, dynamic=dynamic, backend=backend, options=options)


def _mark_dynamic(tensors: Sequence[Tensor]) -> None:
    """Let every size be a variable of its own; those that meet a weight's become constants while tracing.

    ``dynamic=True`` takes equal sizes for one variable, so that a first row as long as the model is wide would be
    compiled for that length alone.
    """
    for tensor in tensors:
        for dim, size in enumerate(tensor.shape):
            if size > 1:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)


def _install(module: nn.Module, forward: TrainingPass) -> None:
    # on the instance, so that hooks, names of weights and every other model of the class are left alone
    module.forward = forward
