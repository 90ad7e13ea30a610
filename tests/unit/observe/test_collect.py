import json

import pytest

from paceline.contract.errors import RunFolderError
from paceline.observe.collect import collect
from paceline.observe.metrics_file import MetricsFile, record_to_json


def write(folder, records):
    file = MetricsFile(folder / "metrics.jsonl")
    for record in records:
        file.observe(record)
    file.close()


def test_a_whole_run_is_read_back(records, tmp_path):
    write(tmp_path, records.run())
    (tmp_path / "summary.json").write_bytes(record_to_json(records.summary()))
    (tmp_path / "recipe.yaml").write_text("name: reviews\n")
    (tmp_path / "manifest.json").write_text('{"python": "3.12"}')
    run = collect(tmp_path)
    assert [record.step for record in run.steps] == list(range(1, 21))
    assert run.summary == records.summary()
    assert run.recipe == "name: reviews\n"
    assert run.manifest == {"python": "3.12"}
    assert run.started.label_names == ("no", "yes")
    assert len(run.evaluations) == len(run.checkpoints) == 2


def test_memory_is_read_back_whole_and_is_missing_from_an_older_summary(records, tmp_path):
    write(tmp_path, records.run())
    for memory in (records.memory(), records.memory(plan=None, problem="no step was made")):
        (tmp_path / "summary.json").write_bytes(record_to_json(records.summary(memory=memory)))
        found = collect(tmp_path).summary.memory
        assert found == memory
        assert list((found.plan or records.plan()).parts) == list(records.plan().parts), "largest first"
    older = json.loads(record_to_json(records.summary()))
    del older["memory"]
    (tmp_path / "summary.json").write_text(json.dumps(older))
    assert collect(tmp_path).summary == records.summary()


def test_what_was_done_again_after_a_resume_counts_once(records, tmp_path):
    write(tmp_path, [records.started(), *(records.step(n) for n in range(1, 8)), records.evaluation(6)])
    again = [records.started(first_step=5), records.step(6, loss=9.0), records.evaluation(6, loss=8.0)]
    write(tmp_path, again)
    run = collect(tmp_path)
    assert [(record.step, record.loss) for record in run.steps][-2:] == [(5, 0.5), (6, 9.0)]
    assert [record.loss for record in run.evaluations] == [8.0]
    assert run.started.first_step == 5


def test_the_summary_of_the_stopped_run_does_not_speak_for_the_resumed_one(records, tmp_path):
    (tmp_path / "summary.json").write_bytes(record_to_json(records.summary(status="preempted", steps=5)))
    write(tmp_path, [records.started(first_step=5), records.step(6)])
    assert collect(tmp_path).summary is None


def test_a_run_that_has_just_started_has_nothing_yet(records, tmp_path):
    write(tmp_path, [])
    run = collect(tmp_path)
    assert (run.started, run.steps, run.summary, run.recipe, run.manifest) == (None, (), None, "", {})


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="not a run folder"):
        collect(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"name": "x"})])
def test_a_damaged_summary_is_named(records, tmp_path, content):
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(RunFolderError, match=r"summary\.json"):
        collect(tmp_path)
