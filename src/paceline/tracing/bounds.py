"""What may hold a step up, one function a bound: what it takes of a step, and what wins it back.

Each prediction is reckoned from the pieces of the time line that would go away, never from a table of speed-ups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.machine.gpus import peak_rates
from paceline.observe.formats import moment
from paceline.tracing.case import WORTH, Case, Late, Switch
from paceline.tracing.cut import BACKWARD, DATA, EXPOSED, FORWARD, TO_DEVICE
from paceline.tracing.kinds import ATTENTION, COPY, MATMUL, OPTIMIZER, POINTWISE

HALF = 0.5
"""Share of a step from which on one kind of kernel is what the step is about."""

POOR_MFU = 0.2
"""Share of the peak below which matrix products are too small for the GPU: good ones reach half of it and more."""

TF32_SHARE = 0.5
"""TF32's rate beside that of bf16, on every GPU that has both (NVIDIA's data sheets of A100, H100 and later)."""

ATTENTION_POWER = 1.5
"""Attention without padding takes the share of tokens to this power: its work goes by the squares of lengths, which are
the square of the share where all texts are as long, and the share itself where rows are full or empty."""

BYTES_SHARE = 0.5
"""Bytes of a number in bf16 beside fp32: what memory and links are done with in half the time."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """Something that takes its share of a step; seconds are those of a mean step."""

    bound: str
    lost: float
    """What it takes."""
    won: float = 0.0
    """What the switch is predicted to win back; 0 without one."""
    switch: Switch | None = None
    told: str
    """What is the matter, in a few words."""
    evidence: tuple[str, ...] = ()
    advice: str = ""
    """What to look at where no switch helps, or beside it."""
    rank: int | None = None


def recompiles(case: Case) -> Found | None:
    """The compiler works in the middle of the run."""
    there = max((facts.recompiles for facts in case.all_facts), key=len)
    seconds = case.mean(lambda budget: budget.compiling)
    if not there and not seconds:
        return None
    if not seconds:
        # compiled by something that leaves no trace of it: what those steps take beyond the others
        seconds = _beyond_others(case, {each.step for facts in case.all_facts for each in facts.recompiles})
    num_steps, slots = len(case.facts.steps), {step.slots for step in case.facts.steps}
    reason = f": {there[0].reason}" if there and there[0].reason else ""
    evidence = [f"{len(there)} recompiles in {num_steps} steps{reason}"] if there else []
    if len(slots) > num_steps / 2:
        evidence.append(f"{len(slots)} different shapes in {num_steps} steps")
    return Found(
        bound="recompiles",
        lost=seconds,
        won=seconds,
        switch=case.switch("techniques.compile", False),
        told=f"the compiler takes {moment(seconds)} of a step",
        evidence=tuple(evidence),
        advice="shapes that come again are compiled once: data.pad_to_multiple_of=64 makes there be fewer",
    )


def _beyond_others(case: Case, steps: set[int]) -> float:
    walls = {step: case.wall(step) for step in case.steps}
    others = sorted(wall for step, wall in walls.items() if step not in steps)
    if not others:
        return case.gap
    usual = others[len(others) // 2]
    return max(sum(wall - usual for step, wall in walls.items() if step in steps) / len(walls), 0.0)


def input_(case: Case) -> Found | None:
    """The device waits for its batches."""
    waited, copied = case.category(DATA), case.category(TO_DEVICE)
    lost = waited + copied
    return Found(
        bound="input",
        lost=lost,
        won=lost,
        switch=case.switch("data.resident", True) if case.facts.on_gpu else None,
        told=f"a step waits {moment(waited)} for data" + (f" and {moment(copied)} for its copy" if copied else ""),
        advice="look at what makes a batch: data.augment, the disk, other programs on this machine's processors",
    )


def launch(case: Case) -> Found | None:
    """The device waits for the host to launch its kernels."""
    facts, gap = case.facts, case.gap
    if not facts.on_gpu:
        return Found(
            bound="launch",
            lost=gap,
            told=f"{moment(gap)} of a step are spent beside its passes and its update",
            advice="look at what the loop does around forward, backward and update",
        )
    # a replayed step leaves the host what is in no captured part; if that is short, it is hidden behind the device
    remains = max(case.host_beside_passes - (case.seconds - gap), 0.0)
    won, switch = max(gap - remains, 0.0), case.switch("techniques.capture", True)
    if facts.graphs != "none" or switch is None:
        won, switch = _larger_pieces(case)
    return Found(
        bound="launch",
        lost=gap,
        won=won,
        switch=switch,
        told=f"for {moment(gap)} of a step the GPU has nothing to do: the host has not launched it yet",
        evidence=(f"the GPU's kernels run for {moment(case.seconds - gap)} of the {moment(case.seconds)} of a step",),
        advice="larger micro-batches make longer kernels; look at what else the host does in a step",
    )


def _larger_pieces(case: Case) -> tuple[float, Switch | None]:
    settings = case.facts.settings
    size, batch = settings.get("loop.micro_batch_size"), settings.get("loop.batch_size")
    if not (isinstance(size, int) and isinstance(batch, int)) or size * case.facts.world_size >= batch:
        return 0.0, None
    # half as many launches, each kernel twice as long
    return (case.gap - case.gap_beside_parts) / 2, case.switch("loop.micro_batch_size", 2 * size)


def memory_bandwidth(case: Case) -> Found | None:
    """Kernels read and write what the next one reads and writes again."""
    if not case.facts.on_gpu:
        return None
    won, spent = case.mean(lambda budget: budget.fusible), case.kind(POINTWISE)
    switch = case.switch("techniques.compile", True) or case.switch("techniques.fusion", True)
    return Found(
        bound="memory bandwidth",
        lost=won,
        won=won if switch else 0.0,
        switch=switch,
        told=f"kernels that only read and write memory take {moment(spent)} of a step",
        evidence=(f"{moment(won)} of them go to neighbours that could be one kernel, and read their data once",),
        advice="fewer bytes: a narrower techniques.precision, a fused attention",
    )


def compute(case: Case) -> Found | None:
    """Matrix products run in a number format that is slow on this GPU."""
    facts = case.facts
    rates, precision = peak_rates(facts.device), facts.settings.get("techniques.precision")
    if not facts.on_gpu or rates is None or not rates.bf16_flops or precision not in ("fp32", "tf32"):
        return None
    if precision == "fp32" and not rates.fp32_flops:
        return None
    share = TF32_SHARE if precision == "tf32" else (rates.fp32_flops or 0.0) / rates.bf16_flops
    products = case.kind(MATMUL, ATTENTION)
    lost = products * (1 - share)
    return Found(
        bound="compute",
        lost=lost,
        won=lost + case.kind(POINTWISE) * (1 - BYTES_SHARE),
        switch=case.switch("techniques.precision", "bf16"),
        told=f"matrix products in {precision} take {moment(products)} of a step",
        evidence=(f"this GPU is {1 / share:.3g} times as fast in bf16, by its data sheet",),
        advice="bf16 changes the result: compare the metrics of both",
    )


def communication(case: Case) -> Found | None:
    """The links between ranks are slower than the backward pass that could hide them."""
    if case.facts.world_size < 2:
        return None
    exposed = case.category(EXPOSED)
    under_way = case.communication(lambda budget: budget.communication)
    reducing = case.communication(lambda budget: budget.reducing)
    last = case.communication(lambda budget: budget.longest_exposed)
    switch = case.switch("parallel.reduce_dtype", "bf16")
    # what was hidden stays so; the last all-reduce begins when nothing is left to hide it
    shorter = under_way - reducing * (1 - BYTES_SHARE)
    hidden = under_way - exposed
    after = max(shorter - hidden, min(last, exposed) * BYTES_SHARE)
    return Found(
        bound="communication",
        lost=exposed,
        won=max(exposed - after, 0.0) if switch else 0.0,
        switch=switch,
        told=f"the all-reduce takes {moment(exposed)} of a step that nothing hides",
        evidence=(f"it is under way for {moment(under_way)}, {moment(max(hidden, 0.0))} of them beside other kernels",),
        advice="look at the links (nvidia-smi topo -m); with a larger loop.batch_size it comes less often",
    )


def padding(case: Case) -> Found | None:
    """Positions are computed that hold no token."""
    steps = [step for facts in case.all_facts for step in facts.steps]
    slots, tokens = sum(step.slots for step in steps), sum(step.tokens for step in steps)
    if not slots:
        return None
    share = max(1 - tokens / slots, 0.0)
    passes = case.category(FORWARD) + case.category(BACKWARD)
    attention = min(case.kind(ATTENTION), passes)
    lost = passes - (1 - share) * (passes - attention) - (1 - share) ** ATTENTION_POWER * attention
    _, _, refused = str(case.facts.execution.get("layout", "")).partition(": ")
    switch = None if refused else case.switch("techniques.packing", True)
    evidence = f"{tokens:,} tokens in {slots:,} positions; forward and backward take {moment(passes)} of a step"
    return Found(
        bound="padding",
        lost=lost,
        won=lost if switch else 0.0,
        switch=switch,
        told=f"{share:.0%} of the positions that are computed are padding",
        evidence=(evidence, f"rows are padded, as {refused}") if refused else (evidence,),
        advice="batches of texts of like lengths; a smaller data.max_length",
    )


def straggler(case: Case) -> Found | None:
    """The ranks wait for one of them."""
    late = case.late
    if late is None:
        return None
    where = f"waiting for its host in {late.where}" if late.is_gap else f"in {late.where}"
    evidence = [
        f"rank {late.rank} takes {moment(late.own)} of its own in a step, the others at most {moment(late.others)}",
        f"it spends {moment(late.more)} more than they {where}",
    ]
    slots = {facts.rank: sum(step.slots for step in facts.steps) for facts in case.all_facts}
    most = max(number for rank, number in slots.items() if rank != late.rank)
    if most and slots[late.rank] > (1 + WORTH) * most:
        evidence.append(f"it computes {slots[late.rank] / most - 1:.0%} more positions than any other")
    return Found(
        bound="straggler",
        lost=late.seconds,
        told=f"the others wait {moment(late.seconds)} of a step for rank {late.rank}",
        evidence=tuple(evidence),
        advice=_advice(late, on_gpu=case.facts.on_gpu),
        rank=late.rank,
    )


def _advice(late: Late, *, on_gpu: bool) -> str:
    if late.where in (DATA, TO_DEVICE):
        return f"look at what rank {late.rank} reads, and from where: its disk, its share of the processors"
    if late.is_gap or not on_gpu:
        return f"look at rank {late.rank}'s processor: other programs on it, its clock, code that only it runs"
    return f"look at rank {late.rank}'s device: nvidia-smi tells its clocks, its temperature and who else uses it"


def little_use_of_the_gpu(case: Case) -> Found | None:
    """What no other bound explains: matrix products too small for the GPU, or hardly any of them."""
    if not case.facts.on_gpu:
        return None
    products, moved = case.kind(MATMUL, ATTENTION), case.kind(POINTWISE, OPTIMIZER, COPY)
    flops, peak = case.flops(), case.facts.peak_flops
    if products >= HALF * case.seconds and flops and peak and flops / (peak * products) < POOR_MFU:
        won, switch = _larger_pieces(case)
        return Found(
            bound="compute",
            lost=products,
            won=won,
            switch=switch,
            told=f"matrix products take {moment(products)} of a step at {flops / (peak * products):.0%} of the peak",
            advice="larger micro-batches, widths that are multiples of 64, a narrower techniques.precision",
        )
    if moved >= HALF * case.seconds:
        return Found(
            bound="memory bandwidth",
            lost=moved,
            told=f"kernels that only read and write memory take {moment(moved)} of a step",
            advice="fewer bytes: a narrower techniques.precision; a larger batch updates less often",
        )
    return None


EVERY: tuple[Callable[[Case], Found | None], ...] = (
    *(recompiles, straggler, input_, launch, communication, padding, compute, memory_bandwidth),
)
"""What can bound a step. Where several take as much, the first one counts."""
