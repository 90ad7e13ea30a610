"""Capture: a step's functions as CUDA graphs that are replayed, or run eagerly where that cannot be.

A graph holds the kernels of a function and the addresses they work on. Replaying it costs the host one call in place
of a thousand launches. What is captured may wait for nothing on the host, and every tensor it touches must stay where
it is. Source: CUDA C++ Programming Guide, CUDA Graphs; torch.cuda.CUDAGraph's documentation.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree

from paceline.contract.spans import mark
from paceline.engine.graph import Graph, GraphInput, GraphKey, copied, key_of
from paceline.engine.runner import Runner
from paceline.machine.device import PLANNED, named_stream

log = logging.getLogger(__name__)

MOST_FAILURES = 2
"""Captures that may fail before everything runs eagerly: one bad shape is not the others' fault."""

WOULD_COMPILE = "Detected recompile"
"""How torch's message begins when something would be compiled inside of a capture."""

Phase = Callable[[], contextlib.AbstractContextManager[None]]
"""Counts the seconds inside."""

Agree = Callable[[bool], bool]
"""Whether the flag is set on any rank; called by all of them at the same places."""


def alone(flag: bool) -> bool:
    """For functions in which ranks do not meet: each captures when it likes."""
    return flag


@final
class Captured(Runner):
    """One CUDA graph for each function, its options and the shapes of its inputs; all in one memory pool.

    The first call with new shapes runs eagerly, so that every kernel is loaded and every state allocated; the second
    captures and replays. Shapes that come once are never captured. When a capture fails, everything runs eagerly from
    then on.

    Eager calls take their memory from the graphs' pool as well, on the stream of the captures: else the largest step
    would have its memory twice. What an eager call leaves there (a cache of the model's, a state) may lie where graphs
    captured earlier put their intermediate results, so that they are captured anew.

    Neither waits for the GPU, which has the steps before to do meanwhile (measured with torch 2.11), unless memory may
    be missing: for inputs larger than any so far, or on a GPU with less free than this process has taken at most, what
    is only cached elsewhere is handed back first.

    Args:
        device: the GPU.
        phase: counts the seconds of capturing.
        most: shapes beyond this many are not captured: each graph keeps memory of its own.
        agree: where ranks meet inside what is captured. They then call ``run`` with the same shapes, and a graph is
            kept, or dropped, by all of them or none: NCCL wants all ranks to replay what they have captured together.
        idle: capture on a GPU that has nothing left to do, as where an all-reduce is part of what is captured:
            NCCL has been shown to capture so.
    """

    def __init__(
        self,
        device: torch.device,
        phase: Phase = contextlib.nullcontext,
        most: int = 200,
        agree: Agree = alone,
        *,
        idle: bool = False,
    ) -> None:
        self._device, self._phase, self._most, self._agree = device, phase, most, agree
        self._idle = idle
        self._cuda: Any = torch.get_device_module(device)
        self._pool, self._stream = self._cuda.MemPool(), named_stream(device, "capture")
        self._seen: set[Hashable] = set()
        self._largest: Counter[Hashable] = Counter()
        """Elements of the largest inputs that a function, with its options, has had memory for."""
        self._graphs: dict[Hashable, Graph] = {}
        self._failed: dict[Hashable, str] = {}
        """Why, of each that could not be captured."""
        self._compiled_late: set[Hashable] = set()
        """Keys for which something would have been compiled during their capture; they ran eagerly once more."""
        self._problem: str | None = None
        self._is_eager = False
        self._anchor: Any = None
        """A graph that is never replayed; see ``_hold_pool``."""
        self._value, self._scalar = math.nan, torch.empty(0)
        """What ``scalar`` made last: most steps divide by the same."""

    def run(self, function: Callable[..., Any], inputs: Sequence[Any], *options: Hashable, capture: bool = True) -> Any:
        leaves, structure = _pytree.tree_flatten(list(inputs))
        key = key_of(function, options, structure, leaves)
        if not capture:
            return self._run_in_pool(lambda: function(*inputs, *options))
        captured = None if self._is_eager else self._graphs.get(key)
        if captured is None and key in self._seen and self._may_capture(key):
            captured = self._capture(key, function, leaves, structure, options)
        if captured is not None:
            return captured.replay(leaves)
        run = self._run_in_pool if key in self._seen or self._fits(key, leaves) else self.run_eagerly
        found = run(lambda: function(*inputs, *options))
        self._seen.add(key)
        self._had_memory(key, leaves)
        return found

    def prepare(self, function: Callable[..., Any], inputs: Sequence[Any], *options: Hashable) -> None:
        leaves, structure = _pytree.tree_flatten(list(inputs))
        key = key_of(function, options, structure, leaves)
        if self._may_capture(key):
            self._capture(key, function, leaves, structure, options)

    def scalar(self, value: float) -> Tensor | float:
        if value != self._value:
            self._value, self._scalar = value, torch.full((), value, device=self._device)
        return self._scalar

    def probe(self, function: Callable[[], Any]) -> None:
        if self._device.type == PLANNED:
            return  # nothing is waited for, and the sizes are known

        def watched() -> None:
            with _waits_are_errors(self._cuda):
                function()

        waits = False
        try:
            self.run_eagerly(watched)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            waits = True
        if self._agree(waits):
            self._problem = "the model waits for the device in its forward or backward pass"

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        before, self._is_eager = self._is_eager, True
        # looked at once for all eager calls: it takes the host milliseconds, and who watches would see them in each
        # step
        blocks = self._live() if self._graphs else set()
        try:
            yield
        finally:
            self._is_eager = before
        # not after an exception: the other ranks are not asked then
        self._forget_if_grown(blocks)

    @property
    def replays(self) -> bool:
        return bool(self._graphs)

    @property
    def execution(self) -> str:
        if self._problem:
            return f"eager: {self._problem}"
        count = len(self._graphs)
        full = ", the most there may be: other shapes run eagerly" if count == self._most else ""
        return f"captured: {count} graph{'s' if count != 1 else ''}{full}" if count else "eager: no shape came twice"

    def close(self) -> None:
        # replays that the GPU has still to do read the pool's memory on the caller's stream; torch, before it unmaps
        # segments that can be expanded, waits for the stream of their allocation alone
        self._cuda.synchronize(self._device)
        self._graphs.clear()
        self._seen.clear()
        self._largest.clear()
        # torch hands back what a pool has cached only with the pool, which nothing but itself may use by then
        if self._pool.use_count() == (1 if self._anchor is None else 2):
            self._anchor, self._pool = None, self._cuda.MemPool()

    def _fits(self, key: GraphKey, leaves: Sequence[Any]) -> bool:
        """Whether there is memory for inputs of this size in any case; if not, it is to be made now."""
        if key[:2] not in self._largest or _elements(leaves) > self._largest[key[:2]] or self._device.type == PLANNED:
            return False
        free, _ = self._cuda.mem_get_info(self._device)
        return bool(free > self._cuda.max_memory_reserved(self._device))

    def _had_memory(self, key: GraphKey, leaves: Sequence[Any]) -> None:
        self._largest[key[:2]] = max(_elements(leaves), self._largest[key[:2]])

    def run_eagerly(self, function: Callable[[], Any]) -> Any:
        # what is only cached elsewhere torch would not hand back for want of memory in this pool
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        return self._run_in_pool(function)

    def _run_in_pool(self, function: Callable[[], Any]) -> Any:
        """What it returns is copied out of the pool."""
        looks = bool(self._graphs) and not self._is_eager
        before = self._live() if looks else set()
        caller = self._cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        # a backward pass in a thread of its own would not know of the pool
        with (
            self._cuda.use_mem_pool(self._pool),
            self._cuda.stream(self._stream),
            torch.autograd.set_multithreading_enabled(False),
        ):
            outputs = function()
        caller.wait_stream(self._stream)
        outputs = copied(outputs)
        if looks:
            self._forget_if_grown(before)
        return outputs

    def _forget_if_grown(self, before: set[int]) -> None:
        """Drop the graphs where eager calls have left something in the pool, on any rank."""
        if not self._graphs:
            return
        grown = not self._live() <= before
        if grown:
            gc.collect()  # what a circle of references holds is no state
            grown = not self._live() <= before
        if self._agree(grown):
            self._graphs.clear()

    def _live(self) -> set[int]:
        """Addresses of the pool's blocks that are in use."""
        blocks = (block for segment in self._pool.snapshot() for block in _blocks(segment))
        return {address for address, state in blocks if state == "active_allocated"}

    def _may_capture(self, key: GraphKey) -> bool:
        if self._is_eager or self._problem or key in self._failed:
            return False
        return len(self._graphs) < self._most

    def _capture(
        self,
        key: GraphKey,
        function: Callable[..., Any],
        leaves: Sequence[Any],
        structure: Any,
        options: Sequence[Hashable],
    ) -> Graph | None:
        self._hold_pool()
        ours = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        before = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in ours]
        graph, outputs, problem = self._cuda.CUDAGraph(), None, ""
        begin = self._begun if self._fits(key, leaves) and not self._idle else self._cuda.graph
        with self._phase():
            try:
                with (
                    _empty_without_a_warning(),
                    begin(graph, self._pool.id, self._stream, capture_error_mode="thread_local"),
                    # cuDNN's kernels are found, and kept, by each thread for itself: in the one that launched
                    torch.autograd.set_multithreading_enabled(False),
                    _nothing_compiled(),
                ):
                    outputs = function(*_pytree.tree_unflatten(ours, structure), *options)
            except RuntimeError as error:
                log.debug("capture failed", exc_info=True)
                problem = f"capture failed: {str(error).splitlines()[0]}"
            if self._agree(bool(problem)):
                late = self._agree(WOULD_COMPILE in problem)
                self._break_off(key, problem or "capture failed on another rank", late=late)
                return None
        places = [
            GraphInput(leaf, changes=leaf._version != version) if isinstance(leaf, Tensor) else None
            for leaf, version in zip(ours, before, strict=True)
        ]
        captured = Graph(graph, places, outputs)
        self._graphs[key] = captured
        self._had_memory(key, leaves)
        mark("shape captured")
        return captured

    @contextlib.contextmanager
    def _begun(self, graph: Any, pool: Any, stream: Any, *, capture_error_mode: str) -> Iterator[None]:
        """As ``torch.cuda.graph``, which waits for the GPU and hands back what is cached before it begins.

        What is done when a capture begins and ends, as to the seed that graphs read, has its place among the steps:
        without it, replays that the GPU has still to do would draw the numbers of a later seed.
        """
        caller = self._cuda.current_stream(self._device)
        stream.wait_stream(caller)
        with self._cuda.stream(stream):
            graph.capture_begin(pool, capture_error_mode=capture_error_mode)
            try:
                yield
            finally:
                graph.capture_end()
        caller.wait_stream(stream)

    def _hold_pool(self) -> None:
        """Keep the pool open when all graphs are dropped.

        torch (2.11 to 2.13) lets the host's part of a pool go with its last graph, and then fails to capture into it
        (``use_count > 0`` in CachingHostAllocator.h).
        """
        if self._anchor is not None:
            return
        graph, tick = self._cuda.CUDAGraph(), torch.zeros(1, device=self._device)
        self._cuda.synchronize(self._device)
        with self._cuda.graph(graph, self._pool.id, self._stream, capture_error_mode="thread_local"):
            tick.zero_()  # an empty graph is warned of
        self._anchor = graph, tick

    def _break_off(self, key: GraphKey, problem: str, *, late: bool) -> None:
        """This key runs eagerly from now on, the others are captured anew; after some failures nothing is any more.

        Args:
            late: something would have been compiled: that is done by running the key eagerly once more, the first time.
        """
        self._cuda.synchronize(self._device)
        # where the end of a capture fails, torch 2.11 leaves the pool taken: nothing else could have memory of it
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(self._cuda.current_device(), self._pool.id)
        if late and key not in self._compiled_late:
            self._compiled_late.add(key)
            self._seen.discard(key)
        else:
            self._failed[key] = problem
        if len(self._failed) >= MOST_FAILURES:
            self._problem = next(iter(self._failed.values()))  # those behind it may be consequences
        self._graphs.clear()
        # a capture that breaks off leaves torch's generator in the belief that it is still being captured; a state
        # with the same numbers, which no graph knows, takes its place
        generator: Any = self._cuda.default_generators[self._cuda.current_device()]
        generator.graphsafe_set_state(generator.clone_state())


@contextlib.contextmanager
def _empty_without_a_warning() -> Iterator[None]:
    """A capture that breaks off before its first kernel has an error of its own."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        yield


def _nothing_compiled() -> contextlib.AbstractContextManager[Any]:
    """What torch would compile inside raises a RuntimeError: compilers read what is on the GPU."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()  # nothing is compiled in this process, and it takes a second to import
    raising: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("fail_on_recompile")
    return raising


def _elements(leaves: Sequence[Any]) -> int:
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def _blocks(segment: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Address and state of each."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield address, block["state"]
        address += block["size"]


@contextlib.contextmanager
def _waits_are_errors(cuda: Any) -> Iterator[None]:
    """Anything inside that waits for the device raises a RuntimeError."""
    before = cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        cuda.set_sync_debug_mode(before)
