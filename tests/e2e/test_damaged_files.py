"""Every file that paceline reads back, damaged in every way: an answer or an error that teaches, never a traceback."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.verbs.predict import predict
from paceline.verbs.train import resume, train
from tests.e2e.commands import Paceline
from tests.e2e.whole_runs import recipe


def flipped(at: float) -> Callable[[bytes], bytes]:
    """One bit is another; ``at`` is the place as a share of the file."""

    def damage(content: bytes) -> bytes:
        place = min(len(content) - 1, int(len(content) * at))
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    return damage


def laughs() -> bytes:
    """YAML of 400 bytes that stands for 9 ** 9 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9)]
    return "\n".join(lines).encode()


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "first bit": flipped(0.0),
    "a bit in the middle": flipped(0.5),
    "last bit": flipped(1.0),
    "cut in half": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "nested": lambda content: b"[" * 100_000,
    "a long number": lambda content: b'{"seed": ' + b"9" * 5000 + b"}",
    "aliases of aliases": lambda content: laughs(),
    "missing": lambda content: None,
}
IRREGULAR: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device": lambda path: path.symlink_to("/dev/zero"),
}
"""What may stand in a file's place: opening it waits for ever, fails, or never ends."""

KINDS = (
    "cache/*/flat.npy",
    "cache/*/meta.json",
    "cache/*/meta.sha256",
    "cache/*/offsets.npy",
    "cache/*/split_train.npy",
    "run/.lock",
    "run/checkpoints/step-00000012/COMMITTED",
    "run/checkpoints/step-00000012/manifest.json",
    "run/checkpoints/step-00000012/model.safetensors",
    "run/checkpoints/step-00000012/optimizer.safetensors",
    "run/checkpoints/step-00000012/state.json",
    "run/manifest.json",
    "run/metrics.jsonl",
    "run/model/config.json",
    "run/model/model.safetensors",
    "run/model/paceline.json",
    "run/model/tokenizer.json",
    "run/model/tokenizer_config.json",
    "run/recipe.yaml",
    "run/report.html",
    "run/summary.json",
)
VERBS: dict[str, tuple[str, ...]] = {
    "evaluate": ("evaluate", "run"),
    "predict": ("predict", "run", "two.csv", "-o", "labelled.csv"),
    "report": ("report", "run"),
    "resume": ("train", "run", "--resume", "--set", "loop.max_steps=13", "--set", "observe.report=false"),
}


@dataclass(frozen=True)
class Finished:
    """A folder with a finished run, its cache and texts, and what comes of them where nothing is damaged."""

    folder: Path
    longer: bytes
    """The weights of the run made one step longer."""
    labelled: bytes
    """The texts with their predictions."""


@pytest.fixture(scope="module")
def finished(pretrained: Path, reviews: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder, whole = tmp_path_factory.mktemp("finished"), tmp_path_factory.mktemp("whole") / "place"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", str(folder / "cache"))
        chosen = recipe(
            pretrained,
            reviews,
            # gone on with from the checkpoint before, the steps are the same though the run is longer
            schedule={"type": "constant", "warmup": 3},
            loop={"checkpoint_every": 4, "keep_last": 2, "save_best": False},
            observe={"console": "off", "report": True},
        )
        train(chosen, out=folder / "run")
        (folder / "two.csv").write_text("text\na wonderful film\na dull evening\n")
        shutil.copytree(folder, whole)
        predict(whole / "run", whole / "two.csv", whole / "labelled.csv")
        resume(whole / "run", ["loop.max_steps=13", "observe.report=false"])
    return Finished(folder, weights(whole), (whole / "labelled.csv").read_bytes())


def test_every_kind_of_file_is_there(finished: Finished) -> None:
    """A file that a run begins to write has to be damaged here too."""
    patterns = [*KINDS, "cache/*/*.npy", "run/checkpoints/step-00000010/*", "run/checkpoints/step-00000008/*"]
    known = set(itertools.chain(*(finished.folder.glob(pattern) for pattern in patterns)))
    assert all(any(finished.folder.glob(kind)) for kind in KINDS), "a file of the list is no longer written"
    files = {path for path in finished.folder.rglob("*") if path.is_file()} - {finished.folder / "two.csv"}
    assert not files - known, "nothing is known of what becomes of these when they are damaged"


SOME = {("run/model/model.safetensors", "a bit in the middle"), ("run/metrics.jsonl", "one byte short")}
"""Tried in the fast tests, beside a few that take turns."""


def each() -> list[object]:
    found = []
    for at, (kind, damage) in enumerate(itertools.product(KINDS, [*DAMAGES, *IRREGULAR])):
        is_fast = at % (3 * len(DAMAGES) + 1) == 0 or (kind, damage) in SOME
        found.append(pytest.param(kind, damage, marks=() if is_fast else pytest.mark.slow, id=f"{kind}: {damage}"))
    return found


@pytest.mark.parametrize(("kind", "damage"), each())
def test_no_verb_stumbles_over_a_damaged_file(
    kind: str, damage: str, finished: Finished, paceline: Paceline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 0 or 2, and where it is 0, what comes out is what comes out of the whole file."""
    for verb, arguments in VERBS.items():
        if verb == "report" and not kind.startswith("run/"):
            continue
        place = tmp_path / verb
        shutil.copytree(finished.folder, place)
        monkeypatch.chdir(place)
        monkeypatch.setenv("PACELINE_CACHE", str(place / "cache"))
        (path,) = place.glob(kind)
        plant(path, damage)
        done = paceline(*arguments)
        assert done.code in (0, 2), f"{verb}: {done}"
        assert done.code == 0 or "paceline: " in done.err, f"{verb}: {done}"
        if done.code == 0 and verb == "predict":
            assert (place / "labelled.csv").read_bytes() == finished.labelled, f"{kind}: other labels, without a word"
        if done.code == 0 and verb == "resume" and kind != "run/recipe.yaml":
            assert weights(place) == finished.longer, f"{kind}: other weights, without a word"


def plant(path: Path, damage: str) -> None:
    content = None if damage in IRREGULAR else DAMAGES[damage](path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    elif damage in IRREGULAR:
        IRREGULAR[damage](path)


def weights(place: Path) -> bytes:
    return (place / "run/model/model.safetensors").read_bytes()
