"""The memory of a plain PyTorch loop: traced with tensors that hold nothing, entered as it runs, and as torch sees it.

The loop is hand-written and knows nothing of paceline; the model is a BERT of four layers with eager attention and
without dropout, so that no kernel is one of a GPU alone. Three ways to its memory:

- on the stand-in, in a process of its own, as ``plan`` traces;
- on this CPU, with the ledger watching real tensors;
- on this CPU without any of ours, from what torch's own allocator tells its profiler.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from paceline.machine.facts import Gpu
from paceline.memory.ledger import Ledger
from paceline.memory.stand_in import stand_in
from tests.unit.memory.apart import answer, live_bytes, run

LENGTH, SAMPLES, STEPS = 128, 4, 2
HIDDEN, LAYERS = 128, 4


@dataclass(frozen=True)
class Loop:
    """A plain training loop."""

    optimizer: str = "adamw"
    accumulation: int = 1
    recompute: bool = False

    def run(self, device: torch.device) -> Iterator[None]:
        """Yields after each step."""
        model = bert(device).train()
        if self.recompute:
            for layer in model.bert.encoder.layer:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        parameters = list(model.parameters())
        if self.optimizer == "adamw":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=False, fused=False)
        else:
            optimizer = torch.optim.SGD(parameters, lr=1e-4, foreach=False)
        for _ in range(STEPS):
            for _ in range(self.accumulation):
                ids = torch.zeros(SAMPLES, LENGTH, dtype=torch.long, device=device)
                labels = torch.zeros(SAMPLES, dtype=torch.long, device=device)
                loss = model(input_ids=ids, labels=labels).loss
                loss.backward()
                del loss
            optimizer.step()
            optimizer.zero_grad()
            yield


LOOPS = {
    "AdamW": Loop(),
    "AdamW, accumulation 2": Loop(accumulation=2),
    "AdamW, recomputed": Loop(recompute=True),
    "SGD": Loop(optimizer="sgd"),
    "SGD, accumulation 2": Loop(optimizer="sgd", accumulation=2),
    "SGD, recomputed, accumulation 2": Loop(optimizer="sgd", recompute=True, accumulation=2),
}


def bert(device: torch.device) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=1000,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=4 * HIDDEN,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    with device:
        return BertForSequenceClassification(config)


Peak = tuple[int, str]
"""Most bytes alive, and the operator that allocated the last of them."""


def peaks(loop: Loop, device: torch.device, ledger: Ledger) -> list[Peak]:
    """Of each step, the first with the model's making, inside the ledger."""
    start, before, found = len(ledger.events), live_bytes(ledger), []
    for _ in loop.run(device):
        found.append(_peak(ledger, start, before))
        start, before = len(ledger.events), live_bytes(ledger)
    return found


def _peak(ledger: Ledger, start: int, alive: int) -> Peak:
    most, operator = 0, ""
    for event in ledger.events[start:]:
        assert event is not None
        made = ledger.allocations[max(event, ~event)]
        alive += made.num_bytes if event >= 0 else -made.num_bytes
        if alive > most:
            most, operator = alive, made.operator
    return most, operator


def profiled(loop: Loop) -> int:
    """Most bytes that torch's CPU allocator had given out at once."""
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        for _ in loop.run(torch.device("cpu")):
            pass
        gc.collect()
    results = found.profiler.kineto_results
    told = [e for e in _all(results.experimental_event_tree()) if e.tag == _EventType.Allocation]
    alive = most = 0
    for event in sorted(told, key=lambda event: event.start_time_ns):
        alive += event.extra_fields.alloc_size
        most = max(most, alive)
    return most


def _all(events: Sequence[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all(event.children)


@contextmanager
def uncollected() -> Iterator[None]:
    """What is in cycles is freed at the same moments everywhere: before and after."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    found: dict[str, list[list[Any]]] = run(__name__, "planned", cache=tmp_path_factory.mktemp("cache"))
    return found


BOTH_AT_ONCE = ("AdamW, accumulation 2", "SGD", "SGD, accumulation 2")
"""Parts of these are in the other loops: `make test-full` looks at each alone."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in BOTH_AT_ONCE else name for name in LOOPS]
)
def test_traced_and_entered_peaks_are_the_same(name: str, planned: dict[str, list[list[Any]]]) -> None:
    loop = LOOPS[name]
    with uncollected(), torch.autograd.set_multithreading_enabled(False), Ledger("cpu") as ledger:
        real = peaks(loop, torch.device("cpu"), ledger)
    traced = [(most, operator) for most, operator in planned[name]]
    # AdamW counts its steps in a number a parameter, which is on the host also when the weights are on a GPU
    counters = 4 * _num_parameters() if loop.optimizer == "adamw" else 0
    for step, ((ours, our_operator), (truth, operator)) in enumerate(zip(traced, real, strict=True), start=1):
        assert 0 <= truth - ours <= counters, f"step {step}: {ours:,} bytes traced, {truth:,} entered"
        assert our_operator == operator, f"step {step}: the peak is elsewhere"


@pytest.mark.slow
def test_the_traced_peak_is_that_of_torchs_own_allocator(planned: dict[str, list[list[Any]]], tmp_path: Path) -> None:
    truth = run(__name__, "profiled", cache=tmp_path)
    apart = {name: max(most for most, _ in planned[name]) / truth[name] - 1 for name in LOOPS}
    # kernels of a CPU allocate a little for themselves, which no operator shows
    assert all(-0.005 < share <= 0 for share in apart.values()), apart


def test_what_is_compared_is_what_is_known_of_it(planned: dict[str, list[list[Any]]]) -> None:
    """Two ledgers that see nothing, or the same too little, would agree as well."""
    weights = 4 * sum(p.numel() for p in bert(torch.device("meta")).parameters())
    first, second = (most for most, _ in planned["AdamW"])
    assert second - first == 2 * weights, "the second step has AdamW's states beside what the first had"
    accumulated, plain = (planned[name][1][0] for name in ("SGD, accumulation 2", "SGD"))
    assert 0 < accumulated - plain <= weights, "gradients of one micro-batch are there while another's are made"
    assert planned["AdamW, recomputed"][1][0] < second


def _num_parameters() -> int:
    return len(list(bert(torch.device("meta")).parameters()))


def main(way: str) -> None:
    if way == "profiled":
        answer({name: profiled(loop) for name, loop in LOOPS.items()})
    found = {}
    gpu = Gpu(name="NVIDIA H200", memory_bytes=143771 * 2**20, compute_capability=(9, 0))
    with stand_in(gpu) as (device, ledger):
        for name, loop in LOOPS.items():
            with uncollected():
                found[name] = peaks(loop, device, ledger)
    answer(found)


if __name__ == "__main__":
    main(sys.argv[1])
