"""Of several failed ranks the one is named that the others follow from."""

from __future__ import annotations

import pytest

from paceline.verbs.launch.causes import Failure, blamed, described, first_cause

GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"
NCCL = "torch.distributed.DistBackendError: NCCL error: ncclRemoteError: A call failed possibly due to a network error"
STORE = "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed."


FULL = Failure(rank=0, at=1, code=2, message="out of memory", is_own=True)


def told(rank: int, at: float, message: str, code: int = 1, lost: tuple[int, ...] = ()) -> Failure:
    return Failure(rank=rank, at=at, code=code, message=message, is_bug=code == 1, lost=lost)


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([told(0, 1.0, "ValueError: a"), told(1, 2.0, "ValueError: b")], 0),
        ([told(0, 2.0, "ValueError: a"), told(1, 1.0, "ValueError: b")], 1),
        *([([told(0, 1.0, lost), told(1, 2.0, "ValueError: b")], 1) for lost in (GLOO, NCCL, STORE)]),
        ([told(0, 1.0, "rank 1 has not reached 'x'", 2, lost=(1,)), Failure(rank=1, at=1.1, code=137, tail="")], 1),
        # what is in nobody's message
        ([told(0, 1.0, GLOO), Failure(rank=1, at=1.1, code=139, tail="")], 1),
        ([Failure(rank=0, at=1.0, code=1), Failure(rank=1, at=1.1, code=1, tail="ValueError: b")], 1),
        ([Failure(rank=0, at=1.0, code=134), Failure(rank=1, at=1.1, code=1, tail="ValueError: b")], 1),
        ([Failure(rank=0, at=1.0, code=1), Failure(rank=1, at=1.1, code=1, tail=GLOO)], 0),
        ([Failure(rank=0, at=1.0, code=139), Failure(rank=1, at=1.1, code=1, tail="ValueError: b")], 0),
        # a network that broke is a cause, when there is no other
        ([told(0, 1.0, GLOO), told(1, 0.9, GLOO)], 1),
    ],
)
def test_the_first_cause(failures: list[Failure], rank: int) -> None:
    assert first_cause(failures).rank == rank


@pytest.mark.parametrize(
    ("cause", "others", "expected"),
    [
        (told(1, 1, "a.csv:3: empty\n  fix: it", 2), [], "paceline: rank 1: a.csv:3: empty\n  fix: it"),
        (told(1, 1, "a.csv:3: empty", 2), [told(2, 2, "a.csv:3: empty", 2)], "paceline: a.csv:3: empty"),
        (told(0, 1, "a.csv:3: empty", 2), [], "paceline: a.csv:3: empty"),
        (FULL, [], "paceline: rank 0: out of memory"),
        (
            told(1, 1, "Traceback\nValueError: b"),
            [],
            "Traceback\nValueError: b\npaceline: rank 1 failed first; the others were ended",
        ),
        (Failure(rank=2, at=1, code=3), [], "paceline: rank 2 failed first: exit code 3; the others were ended"),
        (Failure(rank=2, at=1, code=200), [], "paceline: rank 2 failed first: exit code 200; the others were ended"),
        (
            Failure(rank=2, at=1, code=137),
            [],
            "paceline: rank 2 failed first: ended by SIGKILL (the kernel sends it when memory runs out); "
            "the others were ended",
        ),
        (Failure(rank=2, at=1, code=143), [], "paceline: stopped by SIGTERM"),
        (told(0, 1, "interrupted", 130), [], "paceline: interrupted"),
    ],
)
def test_what_is_said_of_it(cause: Failure, others: list[Failure], expected: str) -> None:
    assert described(cause, [cause, *others], 4, passed_on={15}) == expected


def test_a_stopped_process_is_blamed_for_those_that_waited_for_it() -> None:
    silent = told(1, 1, "rank 0 hangs: the store of the ranks has given no answer within 5 s", 2, lost=(0,))
    cause = blamed(first_cause([silent]), {0: 4242})
    assert (cause.rank, cause.code) == (0, 2)
    said = described(cause, [silent], 2, passed_on=())
    assert said.startswith("paceline: rank 0 hangs: its process 4242 is stopped (SIGSTOP, or a debugger)\n"), said
    assert "network" not in said
    late = blamed(told(0, 1, "rank 1 has not reached 'x'", 2, lost=(1,)), {1: 4242})
    assert described(late, [late], 2, passed_on=()).startswith("paceline: rank 1 hangs: its process 4242 is stopped")
    bug = told(1, 1, "ValueError: b")
    assert blamed(bug, {0: 4242}) is bug, "it has failed of something else"
    assert blamed(silent, {}) is silent


def test_a_rank_alone_is_not_first_of_any() -> None:
    assert described(Failure(rank=0, at=1, code=3), [], 1, passed_on=()) == "paceline: rank 0 failed: exit code 3"
