"""What is secret in the environment and on the command line is in no file of a run, and in no line that it prints."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import yaml

from tests.e2e.commands import Paceline
from tests.e2e.whole_runs import Disturb, recipe

SECRETS = {
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrSt",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "OPENAI_API_KEY": "sk-abcdefghijklmnopqrstuvwx",
    "DATABASE_URL": "postgres://somebody:tr0ub4dor@db/reviews",
    "HTTPS_PROXY": "http://somebody:c0rrect-horse@127.0.0.1:9",
    "MY_PASSWORD": "battery-staple-42",
}
PLAIN = {"tr0ub4dor", "c0rrect-horse", *(value for value in SECRETS.values() if "://" not in value)}


def assert_nowhere(folder: Path, *said: str) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10, "the run left hardly anything: this test saw nothing"
    for secret in PLAIN:
        told = [str(path.relative_to(folder)) for path in files if secret.encode() in path.read_bytes()]
        assert not told, f"{secret} is in {told}"
        assert not any(secret in text for text in said), f"{secret} is printed"


@pytest.fixture
def secretive(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("secretive")
def test_the_environments_secrets_are_in_no_file(
    pretrained: Path, reviews: Path, paceline: Paceline, tmp_path: Path, disturb: Disturb
) -> None:
    """Stopped, resumed, traced, reported: every file that a run can leave."""
    chosen = recipe(
        pretrained,
        reviews,
        loop={"checkpoint_every": 4, "checkpoint_mirror": str(tmp_path / "mirror")},
        observe={"console": "plain", "report": True, "tensorboard": True},
        trace={"steps": ["5:6"]},
    )
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(chosen.plain()))
    disturb.signals[7] = signal.SIGTERM
    stopped = paceline("train", "recipe.yaml", "--out", "run")
    assert stopped.code == 75, stopped
    done = paceline("train", "run", "--resume")
    assert done.code == 0, done
    predicted = paceline("predict", "run", reviews, "-o", "run/labelled.csv")
    assert predicted.code == 0, predicted
    said = [text for each in (stopped, done, predicted) for text in (each.out, each.err)]
    assert_nowhere(tmp_path / "run", *said)
    assert_nowhere(tmp_path / "mirror", *said)
    assert os.environ["HF_TOKEN"] == SECRETS["HF_TOKEN"], "it was there all the time"


@pytest.mark.parametrize(
    "words",
    [
        ("--set", "data.source=https://somebody:tr0ub4dor@host/reviews.csv"),
        ("--model", "https://somebody:c0rrect-horse@host/model"),
        ("--set", "loop.checkpoint_mirror=s3://somebody:battery-staple-42@bucket/runs"),
        ("--set", "name=hf_AbCdEfGhIjKlMnOpQrSt"),
        ("--set", "password=battery-staple-42"),
        ("--token", "hf_AbCdEfGhIjKlMnOpQrSt"),
    ],
)
def test_a_secret_that_is_typed_is_not_repeated(words: tuple[str, str], paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: {source: m}\ndata: {source: d.csv}\n")
    done = paceline("train", "recipe.yaml", *words, "--out", "run")
    assert done.code == 2, done
    assert not any(secret in done.out + done.err for secret in PLAIN), done.err
    assert not (tmp_path / "run").exists()
