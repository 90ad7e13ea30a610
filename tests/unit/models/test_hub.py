"""Downloads from a stand-in for the Hub, in processes of their own, and one message for each thing that goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.contract.errors import ModelError
from paceline.models.hub import CONFIG_FILES, WEIGHT_FILES, fetch, require_files
from tests.testing.hub import LoopbackHub
from tests.testing.tiny import write_tiny_model

ASK = """
import sys, time
from huggingface_hub import constants
from paceline.contract.errors import ModelError
from paceline.models.hub import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, fetch

constants.DOWNLOAD_CHUNK_SIZE = 1000  # what has arrived is kept in pieces of this size
time.sleep = lambda seconds: None  # between attempts
for source in sys.argv[1:]:
    name, _, revision = source.partition("@")
    try:
        folder = fetch(name, CONFIG_FILES + TOKENIZER_FILES + WEIGHT_FILES, revision=revision or None)
        print("folder", folder)
    except ModelError as error:
        print("error", " | ".join(str(error).splitlines()))
"""

LOAD = """
import sys
from paceline.models.config import read_config
from paceline.models.load import load_model
from paceline.models.tokenizers import tokenizer_source
from paceline.recipe.parts import ModelPart

part = ModelPart(source=sys.argv[1], trust_remote_code=TRUST)
config = read_config(part)
tokenizer = tokenizer_source(part, config, None).get([])
model = load_model(part, config, num_labels=3, label_names="abc", kind="classification",
                   vocabulary_size=len(tokenizer), pad_id=tokenizer.pad_token_id)
print(type(model).__name__, model.classifier.out_features, model.config.name_or_path, tokenizer.model_max_length)
"""


def ask(environment: dict[str, str], *sources: str, script: str = ASK) -> list[str]:
    """One line an answer; the process sees no Hub but the one in ``environment``."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", script, *sources], env=inherited | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "hf_" not in done.stdout + done.stderr, "a token was shown"
    return done.stdout.splitlines()


TRUSTING = LOAD.replace("TRUST", "True")
LOAD = LOAD.replace("TRUST", "False")

FIX_OF_ITS_ERROR = f"""
from paceline.contract.errors import ModelError
try:
    exec({LOAD!r})
except ModelError as e: print(e.fix)
"""

CODE = """
from transformers import BertConfig, BertForSequenceClassification

print("code was run")

class OwnConfig(BertConfig):
    model_type = "own"

class OwnModel(BertForSequenceClassification):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("hub") / "tiny")
    (folder / "README.md").write_text("not needed")
    (folder / "pytorch_model.bin").write_bytes(b"not needed")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    return folder


def test_a_download_brings_what_is_needed_once_and_serves_from_the_cache_offline(model: Path, tmp_path: Path) -> None:
    with LoopbackHub({"acme/tiny": model}) as hub:
        (answer,) = ask(hub.environment(tmp_path), "acme/tiny")
        folder = Path(answer.removeprefix("folder "))
        assert {path.name for path in folder.rglob("*")} == {
            "config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
        }
        assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
        assert folder.name == hub.commit("acme/tiny")
        hub.requests.clear()
        again = ask(hub.environment(tmp_path), "acme/tiny", f"acme/tiny@{hub.commit('acme/tiny')}")
        assert again == [answer, answer]
        assert not any("/resolve/" in request.path for request in hub.requests), "a cached file was asked for again"
        hub.requests.clear()
        here, other = ask(hub.environment(tmp_path, offline=True), "acme/tiny", "acme/other")
        assert here == answer
        assert "acme/other: not in the cache | " in other
        assert "HF_HUB_OFFLINE is set" in other
        assert hub.requests == []
        gone = hub.environment(tmp_path)
    cached, absent = ask(gone, "acme/tiny", "acme/other")
    assert cached == answer, "without a network the cache must serve"
    assert "acme/other: not in the cache, and 127.0.0.1 cannot be reached" in absent
    assert "hf download acme/other --local-dir FOLDER" in absent


@pytest.mark.slow
def test_a_model_is_loaded_from_the_hub_by_name(model: Path, tmp_path: Path) -> None:
    with LoopbackHub({"acme/tiny": model}) as hub:
        assert ask(hub.environment(tmp_path), "acme/tiny", script=LOAD) == [
            "BertForSequenceClassification 3 acme/tiny 64"
        ]


def test_a_cut_download_is_resumed_where_it_broke(model: Path, tmp_path: Path) -> None:
    with LoopbackHub({"acme/tiny": model}, cut_after=9_500, cuts=2) as hub:
        (answer,) = ask(hub.environment(tmp_path), "acme/tiny")
        content = (Path(answer.removeprefix("folder ")) / "model.safetensors").read_bytes()
        assert content == (model / "model.safetensors").read_bytes()
        resumed = [request.range for request in hub.requests if request.range]
        assert resumed
        assert all(int(wanted.removeprefix("bytes=").rstrip("-")) >= 9_000 for wanted in resumed if wanted)


def test_a_download_that_stays_cut_says_so_and_the_next_one_succeeds(model: Path, tmp_path: Path) -> None:
    with LoopbackHub({"acme/tiny": model}, cut_after=900, cuts=-1) as hub:
        (answer,) = ask(hub.environment(tmp_path), "acme/tiny")
    assert "the download from 127.0.0.1 was cut" in answer
    assert "run the same command again" in answer
    with LoopbackHub({"acme/tiny": model}) as hub:
        (answer,) = ask(hub.environment(tmp_path), "acme/tiny")
    assert answer.startswith("folder")


def test_without_a_token(model: Path, tmp_path: Path) -> None:
    names = dict.fromkeys(("acme/tiny", "acme/private", "acme/gated"), model)
    with LoopbackHub(names, token="hf_good", private=["acme/private"], gated=["acme/gated"]) as hub:
        private, gated, typed, typo, revision, name = ask(
            hub.environment(tmp_path),
            "acme/private",
            "acme/gated",
            "acme/tyni",
            "distilbert-base-uncase",
            "acme/tiny@v9",
            "not a name",
        )
    assert "acme/private: no such model on 127.0.0.1, or a private one and no token was sent" in private
    assert "set HF_TOKEN" in private
    assert "gated, and no token was sent" in gated
    assert "https://huggingface.co/acme/gated" in gated
    assert "no such model" in typed
    assert "did you mean 'distilbert-base-uncased'?" in typo
    assert "model.revision = v9: acme/tiny has no such branch, tag or commit" in revision
    assert "neither a folder nor a Hub name" in name


def test_with_a_token(model: Path, tmp_path: Path) -> None:
    names = dict.fromkeys(("acme/tiny", "acme/private", "acme/gated"), model)
    with LoopbackHub(names, token="hf_good", private=["acme/private"], gated=["acme/gated"]) as hub:
        good = hub.environment(tmp_path / "good", token="hf_good")
        private, gated, absent = ask(good, "acme/private", "acme/gated", "acme/none")
        (bad,) = ask(hub.environment(tmp_path / "bad", token="hf_bad"), "acme/tiny")
        (odd,) = ask(hub.environment(tmp_path / "odd", token="hf_sn☃wman"), "acme/tiny")
    assert private.startswith("folder")
    assert "gated, and the account of your token has no access" in gated
    assert "the token that was sent may not read it, or there is none of that name" in absent
    assert "the token was refused" in bad
    assert "HF_TOKEN holds characters a token never has" in odd


def test_weights_that_are_only_pickled_on_the_hub(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "pytorch_model.bin"):
        (folder / name).write_bytes((model / name).read_bytes())
    script = FIX_OF_ITS_ERROR
    with LoopbackHub({"acme/old": folder}) as hub:
        (fix,) = ask(hub.environment(tmp_path), "acme/old", script=script)
        assert not any(request.path.endswith(".bin") for request in hub.requests), "the pickle was downloaded"
    assert fix.split(", then ") == [
        "hf download acme/old --local-dir FOLDER",
        "paceline convert FOLDER",
        "--set model.source=FOLDER",
    ]


@pytest.mark.slow
def test_code_that_comes_with_a_model_is_run_only_when_the_recipe_says_so(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "own"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (folder / name).write_bytes((model / name).read_bytes())
    settings = json.loads((model / "config.json").read_text())
    settings["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForSequenceClassification": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "own"}))
    (folder / "own.py").write_text(CODE)
    with LoopbackHub({"acme/own": folder}) as hub:
        script = FIX_OF_ITS_ERROR
        (fix,) = ask(hub.environment(tmp_path / "off"), "acme/own", script=script)
        assert "model.trust_remote_code=true" in fix
        assert not any(request.path.endswith(".py") for request in hub.requests)
        printed = ask(hub.environment(tmp_path / "on"), "acme/own", script=TRUSTING)
    assert printed == ["code was run", "OwnModel 3 acme/own 64"]


def test_a_pipe_among_a_models_files_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model-00001-of-00002.safetensors")
    os.mkfifo(tmp_path / "somebody.elses")
    with pytest.raises(ModelError, match=r"00002.safetensors: is no regular file"):
        fetch(str(tmp_path), WEIGHT_FILES)
    assert fetch(str(tmp_path), CONFIG_FILES) == tmp_path, "what is not read is of no concern"


def test_a_folder_whose_name_is_not_utf_8_is_refused_by_that(tmp_path: Path) -> None:
    """Safetensors would call its files damaged, and paceline advise to download them again."""
    folder = tmp_path / os.fsdecode(b"mod\xe8le")
    folder.mkdir()
    with pytest.raises(ModelError, match=r"le: is not UTF-8(.|\n)*rename the folder"):
        require_files(folder, ("*.safetensors",))
