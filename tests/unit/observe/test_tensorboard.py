import threading
import warnings
from pathlib import Path

import pytest

from paceline.contract.errors import DiskFullError, RecipeError
from paceline.observe import tensorboard


def test_a_missing_package_is_an_error_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"pip install 'paceline\[tensorboard\]'"):
        tensorboard.TensorBoard(tmp_path)


def test_curves_are_written_and_a_resume_purges_later_steps(records, tmp_path):
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that tensorboard imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = tensorboard.TensorBoard(tmp_path)
    for record in records.run():
        first.observe(record)
    first.close()
    second = tensorboard.TensorBoard(tmp_path, first_step=10)
    second.observe(records.started(first_step=10))
    second.observe(records.step(11, loss=7.0))
    second.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    loss = {event.step: event.value for event in events.Scalars("train/loss")}
    assert sorted(loss) == list(range(1, 12)), "steps after the resume point stayed"
    assert loss[11] == 7.0
    assert [event.step for event in events.Scalars("learning rate/head")] == list(range(1, 12))
    assert events.Scalars("validation/accuracy")[0].value == 0.875


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file without room is Linux's /dev/full")
def test_a_full_disk_is_an_error_of_the_caller_and_no_thread_is_left(monkeypatch, records, tmp_path):
    pytest.importorskip("tensorboard")
    threads = threading.active_count()
    curves = tensorboard.TensorBoard(tmp_path)
    assert threading.active_count() == threads, "what fails on a thread is told by a traceback"
    curves._file.close()
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(curves, "_file", full)
        with pytest.raises(DiskFullError):
            curves.observe(records.step(1))
