"""A run whose folder is lost goes on from its mirror, with the bits of one that never lost it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.contract.errors import Preempted, RecipeError, UserError
from paceline.recipe import Recipe
from paceline.run.checkpoint.remote import Remote
from paceline.verbs.restore import restore
from paceline.verbs.train import resume, train
from tests.e2e.commands import Paceline
from tests.e2e.ranks import on_ranks
from tests.e2e.whole_runs import Disturb, assert_same, outcome, recipe
from tests.testing.ports import free_port


def mirrored(model: Path, data: Path, place: object, **loop: Any) -> Recipe:
    return recipe(model, data, name="kept", loop={"checkpoint_every": 3, "checkpoint_mirror": str(place), **loop})


def test_a_run_whose_folder_is_gone_goes_on_from_its_mirror(
    pretrained: Path, reviews: Path, paceline: Paceline, tmp_path: Path, disturb: Disturb
) -> None:
    import signal

    whole = outcome(train(recipe(pretrained, reviews, name="kept"), out=tmp_path / "undisturbed"))
    disturb.signals[8] = signal.SIGTERM
    with pytest.raises(Preempted, match="after step 8 of 12"):
        train(mirrored(pretrained, reviews, tmp_path / "mirror"), out=tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    done = paceline("restore", tmp_path / "mirror" / "run", "--out", "again")
    assert (done.code, done.out) == (0, "restored again, step 8; paceline train again --resume goes on\n"), done
    # its mirror is that of a run called run, and holds nothing of one called again
    done = paceline("train", "again", "--resume")
    assert done.code == 2
    assert "holds nothing of this run" in done.err
    (tmp_path / "again").rename(tmp_path / "run")
    assert_same(outcome(resume(tmp_path / "run")), whole)
    left = sorted(path.name for path in (tmp_path / "mirror" / "run" / "checkpoints").iterdir())
    assert left == sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert not [path for path in (tmp_path / "mirror").rglob("*") if ".partial" in path.name]


def test_a_mirror_that_cannot_be_written_costs_the_run_nothing(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Remote, "send", full)
    monkeypatch.setattr("paceline.run.ending.END_SECONDS", 0.2)
    whole = outcome(train(recipe(pretrained, reviews, name="kept"), out=tmp_path / "undisturbed"))
    record = train(mirrored(pretrained, reviews, tmp_path / "mirror"), out=tmp_path / "run")
    assert_same(outcome(record), whole)
    told = [notice for notice in record.notices if str(tmp_path / "mirror") in notice]
    assert "No space left on device" in told[0]
    assert "the next start copies it" in told[-1]


def test_what_cannot_be_a_mirror_is_told_before_anything_is_read(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.run.run._prepared", lambda *_: pytest.fail("data were read"))
    with pytest.raises(RecipeError, match="s3://BUCKET/FOLDER, or a path"):
        train(mirrored(pretrained, tmp_path / "data.csv", "nonsense://bucket"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "url", ["s3://AKIAABCDEFGHIJKLMNOP:hunter2@bucket/runs", "https://h/x?X-Amz-Signature=hunter2"]
)
def test_a_mirror_with_credentials_is_refused_without_telling_them(url: str) -> None:
    with pytest.raises(UserError) as error:
        mirrored(Path("m"), Path("d.csv"), url)
    assert "hunter2" not in str(error.value)


def test_a_path_is_kept_as_it_is_from_everywhere(
    pretrained: Path, reviews: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(mirrored(pretrained, reviews, "mirror", checkpoint_every=12), out="run")
    kept = yaml.safe_load((tmp_path / "run/recipe.yaml").read_text())["loop"]["checkpoint_mirror"]
    assert kept == str(tmp_path / "mirror")
    assert restore(str(tmp_path / "mirror" / "run"), tmp_path / "back") == (tmp_path / "back", 12)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An S3 server of this machine with a bucket; the variables with which it is reached."""
    server_program = shutil.which("moto_server")
    if server_program is None or find_spec("s3fs") is None:
        pytest.skip("needs moto_server on the PATH (pip install moto[server], in an environment of its own) and s3fs")
    port, secret = free_port(), "hunter2hunter2"
    variables = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": "somebody",
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "OMP_NUM_THREADS": "1",
    }
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen([server_program, "-H", "127.0.0.1", "-p", str(port)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                ask = urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")
                urllib.request.urlopen(ask, timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline, (tmp_path / "server.log").read_text()
                time.sleep(0.1)
        yield variables
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_bucket(pretrained: Path, reviews: Path, tmp_path: Path, bucket: dict[str, str]) -> None:
    """In processes of their own: credentials come from the environment, and are in no file."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(mirrored(pretrained, reviews, "s3://bucket/runs").plain()))

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        asked = [sys.executable, "-m", "paceline", *arguments]
        return subprocess.run(asked, cwd=tmp_path, env=bucket, capture_output=True, text=True, check=False, timeout=200)

    done = command("train", "recipe.yaml", "--out", "run")
    assert done.returncode == 0, done.stderr
    assert "s3://" not in done.stderr, done.stderr
    for path in (path for path in (tmp_path / "run").rglob("*") if path.is_file()):
        assert bucket["AWS_SECRET_ACCESS_KEY"].encode() not in path.read_bytes(), path
    weights = (tmp_path / "run/model/model.safetensors").read_bytes()
    shutil.rmtree(tmp_path / "run")
    done = command("restore", "s3://bucket/runs/run")
    assert (done.returncode, done.stdout.partition(";")[0]) == (0, "restored runs/run, step 12"), done.stderr
    done = command("train", "runs/run", "--resume")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/run/model/model.safetensors").read_bytes() == weights
    assert json.loads((tmp_path / "runs/run/summary.json").read_text())["steps"] == 12


def test_of_several_ranks_the_first_copies_and_all_hear_of_a_refusal(
    pretrained: Path, reviews: Path, tmp_path: Path
) -> None:
    chosen = mirrored(pretrained, reviews, tmp_path / "mirror")
    ends = on_ranks(2, f"file://{tmp_path}/first", chosen, tmp_path / "run")
    assert [end.error for end in ends] == [None, None]
    assert restore(str(tmp_path / "mirror" / "run"), tmp_path / "back") == (tmp_path / "back", 12)
    shutil.rmtree(tmp_path / "run")
    # often within the same second as the first
    told = [str(end.error) for end in on_ranks(2, f"file://{tmp_path}/second", chosen, tmp_path / "run")]
    assert "holds another run of this name" in told[0], told
    assert "None" not in told, told
    assert restore(str(tmp_path / "mirror" / "run"), tmp_path / "again") == (tmp_path / "again", 12)
