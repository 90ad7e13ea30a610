"""A rank's time line cut into categories, a piece at a time, without a gap.

On a GPU the device's time line is cut. It works behind the host, so a step ends when the last of what was launched in
it has ended. At any moment the first of these that holds says what the moment is spent on:

1. A kernel runs: the span in which the host launched it, from whichever thread (a backward pass has its own).
2. Only kernels of a collective run: exposed communication. Beside other kernels it costs nothing.
3. Only copies run: host to device, or what they were launched in.
4. Nothing runs: what the host is at. It waits for data, for other ranks, evaluates or saves; anything else is a host
   gap: the device has nothing to do because the host has not launched it yet.

On a CPU host and device are one: the spans cut the time line, an inner one before those around it, and what a step does
in none of them is host gap.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from paceline.tracing.chrome import Floats, Ints, Operators, Trace, sums
from paceline.tracing.kinds import (
    COMMUNICATION,
    COPY,
    KINDS,
    OPTIMIZER,
    POINTWISE,
    is_copy_in,
    is_copy_out,
    is_reduction,
    kind_of,
)
from paceline.tracing.places import PLACES, STEP, UPDATE, WHOLE, Host

CATEGORIES = (
    *("data wait", "host to device", "forward", "backward", "exposed communication"),
    *(UPDATE, "evaluation", "checkpoint", "host gap", "other"),
)
DATA, TO_DEVICE, FORWARD, BACKWARD, EXPOSED, _, EVALUATION, CHECKPOINT, GAP, REST = CATEGORIES

_LATER = (UPDATE, EVALUATION, CHECKPOINT)
_LAUNCHED = (TO_DEVICE, TO_DEVICE, FORWARD, BACKWARD, EXPOSED, *_LATER, REST, REST)
"""What a kernel is spent on, by the place of its launch, in the order of ``PLACES``."""
_IDLE = (DATA, DATA, GAP, GAP, EXPOSED, GAP, EVALUATION, CHECKPOINT, GAP, GAP)
"""What a GPU's idle moment is spent on, by the host's place."""
_ON_CPU = (DATA, TO_DEVICE, FORWARD, BACKWARD, EXPOSED, *_LATER, GAP, REST)
"""What a moment of a CPU is spent on, by the host's place."""

_KERNELS, _COLLECTIVES, _COPIES = range(3)
"""What a device does, in the order in which it takes a moment."""

Bools = NDArray[np.bool_]


@final
class Cut:
    """The time line of a rank, cut: arrays with a row a step, in seconds.

    Args:
        trace: of the rank.
        steps: their numbers.
        on_gpu: whether the steps were made on a device of its own.
    """

    bounds: Floats
    """When each step begins, and the last one ends, on the device that makes them, [N + 1]."""
    seconds: Floats
    """By category, [N, categories]; a row adds up to the step's."""
    gaps: Floats
    """The host gap by the host's place meanwhile, [N, places]."""
    host: Floats
    """What the host spent at each place while it was at a step, which may be before the device was, [N, places]."""
    communication: Floats
    """While which a collective was under way, hidden behind kernels or not."""
    reducing: Floats
    """The part of it that carries gradients."""
    longest_exposed: Floats
    """The seconds for which one collective was exposed, at the most."""
    compiling: Floats
    """While which torch's compiler had the host, and the device nothing to do."""
    fusible: Floats
    """That would go away if every run of neighbouring pointwise kernels were its longest one."""
    kinds: Mapping[str, Floats]
    """Seconds of kernels and copies, or of operators on a CPU, by kind; what runs side by side counts twice."""

    def __init__(self, trace: Trace, steps: range, *, on_gpu: bool) -> None:
        self._trace, self._host, self._num = trace, Host(trace.spans), len(steps)
        host_begins, host_end = self._host.step_bounds(steps)
        begins = np.array([*host_begins, host_end])
        self.host = self._host.seconds(begins)
        self.bounds = _device_bounds(trace, begins) if on_gpu else begins
        self._cut_into_moments(on_gpu=on_gpu)
        if on_gpu:
            self._cut_device()
        else:
            self._cut_host()

    def _cut_into_moments(self, *, on_gpu: bool) -> None:
        work = self._trace.work
        edges = [self.bounds, self._host.begins, *self._trace.compiling]
        if on_gpu:
            edges += [work.begin, work.end]
        moments = np.unique(np.concatenate(edges))
        self._moments = moments[(moments >= self.bounds[0]) & (moments <= self.bounds[-1])]
        self._lengths = np.diff(self._moments)
        self._step = np.clip(np.searchsorted(self.bounds, self._moments[:-1], side="right") - 1, 0, self._num - 1)
        self._at = self._host.at(self._moments[:-1])

    def _cut_device(self) -> None:
        work = self._trace.work
        place = self._places_of_work()
        layer, category = self._layers(place)
        spent = np.full(len(self._lengths), -1, dtype=np.int64)
        for one in (_KERNELS, _COLLECTIVES, _COPIES):
            for code in range(len(CATEGORIES)):
                chosen = (layer == one) & (category == code)
                if chosen.any():
                    spent[(spent < 0) & self._covered(work.begin[chosen], work.end[chosen])] = code
        idle = spent < 0
        spent[idle] = _codes(_IDLE)[self._at[idle]]
        self.compiling = self._sum(idle & self._covered(*self._trace.compiling))
        self._enter(spent, idle)
        self._communication(spent, layer == _COLLECTIVES)
        self._kernels(place)

    def _cut_host(self) -> None:
        self.compiling = self._sum(self._covered(*self._trace.compiling))
        self._enter(_codes(_ON_CPU)[self._at], np.ones(len(self._at), dtype=bool))
        self.communication = self.reducing = self.longest_exposed = self.seconds[:, CATEGORIES.index(EXPOSED)]
        self.fusible = np.zeros(self._num)
        operators = self._trace.operators
        kinds = _kinds(self._trace.names)[operators.name]
        self.kinds = self._by_kind(kinds, operators.begin, self_seconds(operators))

    def _enter(self, spent: Ints, idle: Bools) -> None:
        self.seconds = self._table(spent, len(CATEGORIES))
        at_gap = np.where(idle & (spent == CATEGORIES.index(GAP)), self._at, len(PLACES))
        self.gaps = self._table(at_gap, len(PLACES) + 1)[:, :-1]

    def _places_of_work(self) -> Ints:
        """Where the host launched what the device did.

        Spans do not come again when a graph is replayed. Such a graph holds an update, or else passes: from the first
        kernel on that is backward by its name, it is the backward pass.
        """
        work, names = self._trace.work, self._trace.names
        place = self._host.at(work.launched)
        replayed = (work.replay >= 0) & (place == PLACES.index(STEP))
        for replay in np.unique(work.replay[replayed]):
            own = np.flatnonzero(replayed & (work.replay == replay))
            called = [names[name] for name in work.name[own].tolist()]
            back = next((at for at, name in enumerate(called) if "backward" in name.lower()), None)
            updates = back is None and any(kind_of(name) == OPTIMIZER for name in called)
            place[own] = PLACES.index(UPDATE if updates else FORWARD)
            if back is not None:
                place[own[back:]] = PLACES.index(BACKWARD)
        return place

    def _layers(self, place: Ints) -> tuple[Ints, Ints]:
        """The layer (kernel, collective or copy) and the category of each thing that the device did."""
        names, of = self._trace.names, self._trace.work.name
        inward, outward = (
            np.array([test(name) for name in names], dtype=bool)[of] for test in (is_copy_in, is_copy_out)
        )
        layer = np.full(len(of), _KERNELS)
        layer[_kinds(names)[of] == KINDS.index(COMMUNICATION)] = _COLLECTIVES
        layer[inward | outward] = _COPIES
        category = _codes(_LAUNCHED)[place]
        partial = ~np.isin(place, [PLACES.index(name) for name in WHOLE])
        category[partial & (layer == _COLLECTIVES)] = CATEGORIES.index(EXPOSED)
        category[partial & outward] = CATEGORIES.index(REST)
        category[partial & inward] = CATEGORIES.index(TO_DEVICE)
        return layer, category

    def _communication(self, spent: Ints, is_collective: Bools) -> None:
        work = self._trace.work
        reduces = is_collective & np.array([is_reduction(name) for name in self._trace.names], dtype=bool)[work.name]
        self.communication = self._sum(self._covered(work.begin[is_collective], work.end[is_collective]))
        self.reducing = self._sum(self._covered(work.begin[reduces], work.end[reduces]))
        begin, end = work.begin[is_collective], work.end[is_collective]
        exposed = np.cumsum([0.0, *(self._lengths * (spent == CATEGORIES.index(EXPOSED)))])
        alone = np.interp(end, self._moments, exposed) - np.interp(begin, self._moments, exposed)
        self.longest_exposed = np.zeros(self._num)
        step = np.clip(np.searchsorted(self.bounds, begin, side="right") - 1, 0, self._num - 1)
        np.maximum.at(self.longest_exposed, step, alone)

    def _kernels(self, place: Ints) -> None:
        work = self._trace.work
        kinds, seconds = _kinds(self._trace.names)[work.name], work.end - work.begin
        pointwise, copies = KINDS.index(POINTWISE), KINDS.index(COPY)
        kinds[(place == PLACES.index(UPDATE)) & np.isin(kinds, [pointwise, copies])] = KINDS.index(OPTIMIZER)
        self.kinds = self._by_kind(kinds, work.begin, seconds)
        step = np.searchsorted(self.bounds, work.begin, side="right") - 1
        passes = np.isin(place, [PLACES.index(FORWARD), PLACES.index(BACKWARD)])
        can_fuse = passes & (kinds == pointwise) & (step >= 0) & (step < self._num)
        self.fusible = np.zeros(self._num)
        for stream in np.unique(work.stream[can_fuse]):
            there = work.stream == stream
            won = _won_by_fusing(step[there] * len(PLACES) + place[there], seconds[there], can_fuse[there])
            self.fusible += sums(step[there][can_fuse[there]], won, self._num)

    def _by_kind(self, kinds: Ints, begin: Floats, seconds: Floats) -> dict[str, Floats]:
        step = np.searchsorted(self.bounds, begin, side="right") - 1
        inside = (step >= 0) & (step < self._num)
        code = step[inside] * len(KINDS) + kinds[inside]
        table = sums(code, seconds[inside], self._num * len(KINDS)).reshape(-1, len(KINDS))
        return {kind: table[:, index] for index, kind in enumerate(KINDS)}

    def _covered(self, begin: Floats, end: Floats) -> Bools:
        """Which pieces between two moments lie within one of these intervals."""
        size = len(self._moments) + 1
        begun, ended = np.searchsorted(self._moments, begin), np.searchsorted(self._moments, end)
        change = np.bincount(begun, minlength=size) - np.bincount(ended, minlength=size)
        return np.cumsum(change)[: len(self._lengths)] > 0

    def _sum(self, chosen: Bools) -> Floats:
        return sums(self._step, self._lengths * chosen, self._num)

    def _table(self, codes: Ints, num_codes: int) -> Floats:
        return sums(self._step * num_codes + codes, self._lengths, self._num * num_codes).reshape(self._num, num_codes)


def _device_bounds(trace: Trace, begins: Floats) -> Floats:
    """The beginning of the first step, and the end of each: nothing of it is left to do, and the next has begun."""
    bounds, work = [float(begins[0])], trace.work
    order = np.argsort(work.launched, kind="stable")
    launched, done = work.launched[order], np.maximum.accumulate(work.end[order])
    for following in begins[1:].tolist():
        before = int(np.searchsorted(launched, following))
        bounds.append(max(following, bounds[-1], float(done[before - 1]) if before else following))
    return np.array(bounds)


def _won_by_fusing(group: Ints, seconds: Floats, can_fuse: Bools) -> Floats:
    """The seconds that each kernel of a stream that can be fused wins when it is fused with its neighbours.

    Fused, a run reads and writes its data once, which takes as long as its longest kernel: that one wins nothing.
    A run ends at a kernel that cannot be fused, and where ``group`` changes.
    """
    starts = ~can_fuse | (np.diff(group, prepend=group[:1]) != 0)
    _, run = np.unique(np.cumsum(starts)[can_fuse], return_inverse=True)
    own = seconds[can_fuse]
    longest = np.zeros(len(own))
    np.maximum.at(longest, run, own)
    whole = sums(run, own, len(own))
    # the gain of a run, shared out to its kernels by their lengths
    return own * (1 - longest[run] / np.maximum(whole[run], 1e-12))


def self_seconds(operators: Operators) -> Floats:
    """Seconds of each operator that none of those inside it has."""
    own = operators.end - operators.begin
    begin, end, thread = operators.begin.tolist(), operators.end.tolist(), operators.thread.tolist()
    around: list[int] = []
    for index in range(len(begin)):
        while around and (thread[around[-1]] != thread[index] or end[around[-1]] <= begin[index]):
            around.pop()
        if around:
            own[around[-1]] -= min(end[index], end[around[-1]]) - begin[index]
        around.append(index)
    return np.maximum(own, 0.0)


def _codes(categories: Sequence[str]) -> Ints:
    return np.array([CATEGORIES.index(name) for name in categories])


def _kinds(names: Sequence[str]) -> Ints:
    """The kind of each name, as its place in ``KINDS``."""
    return np.array([KINDS.index(kind_of(name)) for name in names], dtype=np.int64)
