"""Reading ahead: the same arrays as without, two at a time, errors where they are waited for, no thread left."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from paceline.data.dataset import Images, Tokens
from paceline.data.layout import ImageLayout, PackedLayout, PaddedLayout
from paceline.data.transfer import Arrays, ReadAhead, Shapes, to_device
from paceline.seams import Ids, Layout

CPU = torch.device("cpu")
IDS = [np.arange(start, start + 4) for start in range(0, 40, 4)]


class Source:
    """Squares of the ids; notes what was gathered where, and can be held up or fail."""

    def __init__(self) -> None:
        self.gathered: list[tuple[list[int], str]] = []
        self.allocated = 0
        self.go_on = threading.Event()
        self.go_on.set()
        self.broken: Exception | None = None

    def shapes(self, ids: Ids) -> Shapes:
        self.allocated += 1
        assert threading.current_thread() is threading.main_thread(), "memory is the calling thread's business"
        return {"squares": ((len(ids),), torch.int64)}

    def fill(self, ids: Ids, arrays: Arrays) -> None:
        assert self.go_on.wait(10), "nobody lets the worker go on"
        self.gathered.append((ids.tolist(), threading.current_thread().name))
        if self.broken is not None:
            raise self.broken
        arrays["squares"][...] = ids**2


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def ahead(source: Source) -> Iterator[ReadAhead]:
    made = ReadAhead(source.shapes, source.fill, CPU, threaded=True)
    yield made
    source.go_on.set()
    made.close()


def in_worker(source: Source) -> list[list[int]]:
    return [ids for ids, thread in source.gathered if thread.startswith("paceline-read-ahead")]


def test_expected_batches_come_from_the_worker_and_are_right(source: Source, ahead: ReadAhead) -> None:
    ahead.expect(IDS)
    for ids in IDS:
        assert ahead.take(ids)["squares"].tolist() == (ids**2).tolist()
    assert in_worker(source) == [ids.tolist() for ids in IDS], "each once, in order, none on the caller's thread"
    assert len(source.gathered) == len(IDS)


def test_equal_ids_will_do(source: Source, ahead: ReadAhead) -> None:
    ahead.expect(IDS[:1])
    assert ahead.take(IDS[0].copy())["squares"].tolist() == [0, 1, 4, 9]
    assert len(source.gathered) == 1


def test_no_more_than_two_are_held(source: Source, ahead: ReadAhead) -> None:
    ahead.expect(IDS)
    assert source.allocated == 2
    ahead.take(IDS[0])
    assert source.allocated == 3


def test_what_was_not_expected_is_gathered_at_once_and_disturbs_nothing(source: Source, ahead: ReadAhead) -> None:
    ahead.expect(IDS[:2])
    assert ahead.take(IDS[7])["squares"].tolist() == (IDS[7] ** 2).tolist()
    ahead.take(IDS[0])
    ahead.take(IDS[1])
    assert sorted(in_worker(source)) == [IDS[0].tolist(), IDS[1].tolist()]
    assert len(source.gathered) == 3


def test_expecting_anew_keeps_what_is_still_wanted(source: Source, ahead: ReadAhead) -> None:
    ahead.expect(IDS[:3])
    ahead.expect(IDS[1:4])
    for ids in IDS[1:4]:
        assert ahead.take(ids)["squares"].tolist() == (ids**2).tolist()
    assert in_worker(source).count(IDS[1].tolist()) == 1


def test_batches_that_are_passed_over_are_dropped(source: Source, ahead: ReadAhead) -> None:
    ahead.expect(IDS[:3])
    assert ahead.take(IDS[1])["squares"].tolist() == (IDS[1] ** 2).tolist()
    assert ahead.take(IDS[2])["squares"].tolist() == (IDS[2] ** 2).tolist()
    assert ahead.take(IDS[0])["squares"].tolist() == (IDS[0] ** 2).tolist()
    assert source.gathered[-1] == (IDS[0].tolist(), "MainThread")


def test_an_error_in_the_worker_surfaces_where_its_batch_is_taken(source: Source, ahead: ReadAhead) -> None:
    source.broken = OSError("the disk went away")
    ahead.expect(IDS[:1])
    with pytest.raises(OSError, match="the disk went away"):
        ahead.take(IDS[0])
    source.broken = None
    assert ahead.take(IDS[0])["squares"].tolist() == [0, 1, 4, 9], "and the next try may work"


def test_the_caller_does_not_wait_while_the_worker_works(source: Source, ahead: ReadAhead) -> None:
    source.go_on.clear()
    ahead.expect(IDS[:2])
    assert source.gathered == []
    source.go_on.set()
    assert ahead.take(IDS[0])["squares"].tolist() == [0, 1, 4, 9]


def test_close_ends_the_thread_and_reading_goes_on_without(source: Source) -> None:
    ahead = ReadAhead(source.shapes, source.fill, CPU, threaded=True)
    ahead.expect(IDS)
    ahead.close()
    ahead.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("paceline-read-ahead")]
    ahead.expect(IDS)
    assert ahead.take(IDS[5])["squares"].tolist() == (IDS[5] ** 2).tolist()
    assert source.gathered[-1] == (IDS[5].tolist(), "MainThread")


def test_no_thread_where_none_is_wanted(source: Source) -> None:
    ahead = ReadAhead(source.shapes, source.fill, CPU, threaded=False)
    ahead.expect(IDS)
    assert source.allocated == 0
    assert ahead.take(IDS[0])["squares"].tolist() == [0, 1, 4, 9]


def layouts() -> list[Layout]:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 20, 40)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    tokens = Tokens(generator.integers(1, 99, offsets[-1]).astype(np.uint16), offsets, 0)
    images = Images(generator.integers(0, 256, (40, 4, 4, 1), dtype=np.uint8))
    labels = np.arange(40)
    return [
        PaddedLayout(tokens, labels, CPU, token_types=False),
        PackedLayout(tokens, labels, CPU, token_types=False, first_position=0, bucket=64, resident=False),
        ImageLayout(images, labels, CPU, mean=(0.5,), deviation=(0.5,)),
    ]


@pytest.mark.parametrize("layout", layouts(), ids=lambda layout: type(layout).__name__)
def test_a_layout_on_the_cpu_takes_the_hint_without_a_thread(layout: Layout) -> None:
    threads = threading.active_count()
    layout.expect(IDS)
    assert threading.active_count() == threads, "it would take cores from the model"
    assert layout.collate(IDS[1]).labels.tolist() == IDS[1].tolist()
    layout.close()


def test_to_device_copies() -> None:
    array = np.arange(3)
    array.setflags(write=False)
    sent = to_device(array, CPU)
    sent += 1
    assert array.tolist() == [0, 1, 2]
