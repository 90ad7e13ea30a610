"""Spans stand in torch.profiler's trace."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from paceline.contract.spans import listening, mark, span
from paceline.observe.profiler_ranges import ProfilerRanges

# torch 2.11 says so whenever a profiler starts; our own windows must not
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")


def test_spans_are_annotations_around_what_they_launched() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as found, listening(ProfilerRanges()):
        with span("step", step=3), span("forward", step=3):
            torch.ones(4).cumsum(0)
        mark("captured")
    named = {event.name: event for event in found.events()}
    step, forward, work = (named[name] for name in ("paceline: step 3", "paceline: forward 3", "aten::cumsum"))
    assert step.time_range.start <= forward.time_range.start <= work.time_range.start
    assert work.time_range.end <= forward.time_range.end <= step.time_range.end
    assert "paceline: captured" in named
