"""Every family that transformers can classify with, beside a plain loop: equal, or refused by name.

A family whose losses, weights or predictions differ fails. One that is refused has to be in ``REFUSED`` with words of
the reason. docs/models.md lists both: ``python -m tests.parity.test_families`` writes its table, and each test holds
its family's row to what it finds.
"""

from __future__ import annotations

import copy
import csv
import dataclasses
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import paceline
from paceline.contract.errors import UserError
from paceline.models.load import quiet
from paceline.recipe import Recipe
from tests.parity.tiny_families import (
    LABELS,
    SECONDS,
    TEXTS,
    image_families,
    text_families,
    write_image_model,
    write_text_model,
)

EPOCHS, RATE, MAX_LENGTH = 4, 1e-3, 64
LOSS, WEIGHTS, PROBABILITIES = 1e-5, 1e-4, 1e-5
OPTIMIZER = {"lr": RATE, "weight_decay": 0.5, "eps": 1e-3}
"""With an eps that large a gradient's rounding stays a weight's: Adam divides what is nearly nothing by itself."""

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
WIDE = "equal; results depend on the width of the batch, which the run says"

COMMON = ("albert", "bart", "bert", "deberta-v2", "distilbert", "gpt2", "llama", "modernbert", "roberta", "t5", "xlnet")
"""Those that `make test` looks at, one of each kind of attention, positions and head; `make test-full` looks at all."""

COMMON_IN_PAIRS = ("bert", "gpt2", "modernbert", "roberta")
"""Also with two texts a row: with token types, without, and with separators that are no tokens of a single text."""

COMMON_IMAGES = ("dinov2", "vit")

REFUSED_IMAGES: Mapping[str, str] = {"perceiver": "comes without a tokenizer"}
"""Of families that are in both mappings, which are taken for models of texts."""

REFUSED: Mapping[str, str] = {
    "openai-gpt": "its tokenizer has no padding token",
    "reformer": "has to be a multiple of least common multiple chunk_length",
    "tapas": "its forward pass fails with",
    "imagegpt": "its image processor (ImageGPTImageProcessorPil) cannot be used",
    "siglip2": "pixel_attention_mask",
    "shieldgemma2": "num_crops",
    "pp_lcnet": "holds no logits",
    "textnet": "the images are of different sizes",
}
"""Family -> words of the refusal."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What was found of a family: the largest differences, or the words of a refusal."""

    loss: float = 0.0
    weights: float = 0.0
    probabilities: float = 0.0
    furthest: str = ""
    """The weight that differs most."""
    refused: str = ""
    layout: str = ""
    wide: bool = False
    """Whether the run said that results depend on the width of a batch; then predictions are compared in one batch."""
    own: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """How far loss, weights and probabilities of the plain loop itself move by rounding alone, when its pixels do by
    a rounding or its samples stand in reverse: what nobody can do better."""

    @property
    def is_equal(self) -> bool:
        bounds = (max(bound, 10 * own) for bound, own in zip((LOSS, WEIGHTS, PROBABILITIES), self.own, strict=True))
        found = (self.loss, self.weights, self.probabilities)
        return all(one <= bound for one, bound in zip(found, bounds, strict=True))


@pytest.mark.parametrize(
    ("family", "pairs"),
    [
        pytest.param(name, pairs, id=f"{name}-{'pairs' if pairs else 'singles'}", marks=marks)
        for name in text_families()
        for pairs, common in ((False, COMMON), (True, COMMON_IN_PAIRS))
        for marks in [() if name in common else (pytest.mark.slow,)]
    ],
)
def test_a_text_family_trains_and_predicts_as_in_a_plain_loop(family: str, pairs: bool, tmp_path: Path) -> None:
    try:
        with quiet():
            write_text_model(family, tmp_path / "model")
    except ImportError as error:
        pytest.skip(f"transformers itself cannot build it here: {str(error).strip().splitlines()[0]}")
    found = compared(tmp_path / "model", tmp_path, pairs=pairs)
    if family in REFUSED:
        assert REFUSED[family] in found.refused, found
        return
    assert not found.refused, f"refused, but not listed in REFUSED: {found.refused}"
    assert found.is_equal, f"{family} differs from transformers: {found}"
    assert told(family, "texts").startswith("equal"), "docs/models.md says otherwise"
    assert not found.wide or told(family, "texts") == WIDE, "docs/models.md does not say that the width matters"


@pytest.mark.parametrize(
    "family",
    [name if name in COMMON_IMAGES else pytest.param(name, marks=pytest.mark.slow) for name in image_families()],
)
def test_an_image_family_trains_and_predicts_as_in_a_plain_loop(family: str, tmp_path: Path) -> None:
    try:
        with quiet():
            write_image_model(family, tmp_path / "model")
    except ImportError as error:
        pytest.skip(f"transformers itself cannot build it here: {str(error).strip().splitlines()[0]}")
    found = compared_images(tmp_path / "model", tmp_path)
    if reason := REFUSED_IMAGES.get(family) or REFUSED.get(family):
        assert reason in found.refused, found
        return
    assert not found.refused, f"refused, but not listed in REFUSED: {found.refused}"
    assert found.is_equal, f"{family} differs from transformers: {found}"
    assert told(family, "images") == "equal", "docs/models.md says otherwise"


def told(family: str, reads: str) -> str:
    """What docs/models.md says of a family."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()]
    (found,) = [row[2] for row in cells if row[:2] == [f"`{family}`", reads]]
    return found


def test_the_table_has_every_family_once() -> None:
    for reads, families in (("texts", text_families()), ("images", image_families())):
        assert [told(family, reads) for family in families], "a family is missing, or there twice"


def found_of(family: str, reads: str, folder: Path) -> str:
    """A family's row in the table, made anew."""
    write = write_text_model if reads == "texts" else write_image_model
    try:
        with quiet():
            write(family, folder / "model")
    except ImportError as error:
        needed = str(error).strip().splitlines()[0].partition(" requires the ")[2].partition(" library")[0]
        return f"not tried: transformers needs {needed} to build it"
    outcomes = []
    for pairs in (False, True) if reads == "texts" else (False,):
        part = folder / str(pairs)
        part.mkdir()
        compare = compared if reads == "texts" else compared_images
        outcomes.append(compare(folder / "model", part, **({"pairs": pairs} if reads == "texts" else {})))
    if refused := [each.refused for each in outcomes if each.refused]:
        lines = [line.strip() for line in refused[0].replace(str(folder), "").partition(" | ")[0].splitlines()]
        why = next((line for line in lines if line.startswith("why: ")), lines[0])
        return f"refused: {why.removeprefix('why: ')}"
    if not all(each.is_equal for each in outcomes):
        return "DIFFERENT"
    return WIDE if any(each.wide for each in outcomes) else "equal"


def main() -> None:
    """Write the table in docs/models.md."""
    import tempfile

    rows = ["| family | reads | training and predictions |", "|---|---|---|"]
    for reads, families in (("texts", text_families()), ("images", image_families())):
        for family in families:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(f"| `{family}` | {reads} | {found_of(family, reads, Path(folder))} |")
            print(rows[-1], flush=True)
    before, _, rest = PAGE.read_text().partition("<!-- families -->\n")
    after = rest.partition("<!-- end of families -->\n")[2]
    table = "\n".join(rows)
    PAGE.write_text(f"{before}<!-- families -->\n{table}\n<!-- end of families -->\n{after}")


def compared_images(model: Path, folder: Path) -> Outcome:
    """The same for pictures of several sizes in a folder a class."""
    paths, labels = write_pictures(folder / "pictures")
    try:
        losses, weights = images_by_hand(model, paths, labels)
        again, moved = images_by_hand(model, paths, labels, by=2**-23)
    except Exception as error:  # as for texts
        with pytest.raises(UserError) as refusal:
            paceline.train(_image_recipe(model, folder), out=folder / "run")
        return Outcome(refused=f"{refusal.value} | transformers itself: {type(error).__name__}: {error}")
    try:
        record = paceline.train(_image_recipe(model, folder), out=folder / "run")
    except UserError as error:
        return Outcome(refused=str(error))
    steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    ours = [line["loss"] for line in steps if line["kind"] == "step"]
    saved = _loaded_images(folder / "run" / "model").state_dict()
    distances = {
        name: float((saved[name] - value).abs().max())
        for name, value in weights.items()
        if value.numel() and value.is_floating_point()
    }
    furthest = max(distances, key=distances.__getitem__)
    own = max(float((moved[name] - weights[name]).abs().max()) for name in distances)
    paceline.predict(folder / "run", str(folder / "pictures"), out=folder / "predicted.csv")
    with (folder / "predicted.csv").open(newline="") as file:
        rows = {row["file"]: row for row in csv.DictReader(file)}
    piped = images_by_pipeline(folder / "run" / "model", paths)
    predicted = np.array(
        [
            [float(next(row for file, row in rows.items() if file.endswith(path.name))[f"probability of {name}"])
             for name in ("dark", "light")]
            for path in paths
        ]
    )  # fmt: skip
    return Outcome(
        loss=float(np.abs(np.subtract(ours, losses)).max()),
        weights=distances[furthest],
        furthest=furthest,
        probabilities=float(np.abs(predicted - piped).max()),
        layout=str(record.execution),
        own=(float(np.abs(np.subtract(again, losses)).max()), own, 0.0),
    )


def write_pictures(folder: Path) -> tuple[list[Path], list[str]]:
    """Ten pictures of five sizes, higher and wider than they are wide and high, in a folder a class."""
    from PIL import Image

    rng, paths, labels = np.random.default_rng(3), list[Path](), list[str]()
    for index in range(10):
        label = ("dark", "light")[index % 2]
        height, width = 70 + 13 * (index % 5), 110 - 9 * (index % 5)
        coarse = rng.integers(0, 160, (8, 8, 3), dtype=np.uint8) + np.uint8(90 * (index % 2))
        path = folder / label / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(path)
        paths.append(path)
        labels.append(label)
    return paths, labels


def images_by_hand(
    model: Path, paths: Sequence[Path], labels: Sequence[str], *, by: float = 0.0
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a plain loop over what the model's own processor gives, moved ``by`` a share."""
    from PIL import Image
    from transformers import AutoImageProcessor

    processor, module = AutoImageProcessor.from_pretrained(model), _loaded_images(model)
    pictures = [Image.open(path).convert("RGB") for path in paths]
    pixels = processor(pictures, return_tensors="pt")
    pixels["pixel_values"] = pixels["pixel_values"] * (1 + by)
    numbers = torch.tensor([module.config.label2id[label] for label in labels])
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIMIZER)
    losses = []
    module.train()
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(**pixels).logits, numbers)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, copy.deepcopy(module.state_dict())


def images_by_pipeline(model: Path, paths: Sequence[Path]) -> np.ndarray:
    """Probabilities [n, 2] of transformers' own pipeline over the saved model."""
    from transformers import pipeline

    with warnings.catch_warnings(action="ignore"):
        classify = pipeline("image-classification", model=str(model), device="cpu")
        found = [classify(str(path), top_k=None, function_to_apply="softmax") for path in paths]
    return np.array(
        [[score["score"] for name in ("dark", "light") for score in one if score["label"] == name] for one in found]
    )


def _image_recipe(model: Path, folder: Path) -> Recipe:
    return _recipe(model, {"source": str(folder / "pictures")})


def _loaded_images(folder: Path) -> Any:
    from transformers import AutoModelForImageClassification

    with quiet():
        return AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32)


def compared(model: Path, folder: Path, *, pairs: bool) -> Outcome:
    """Train the classifier in ``model`` by hand and with paceline, and lay the two beside each other."""
    seconds = SECONDS if pairs else None
    try:
        losses, weights, alone, together = by_hand(model, seconds)
    except Exception as error:  # whatever a model raises for inputs that it does not take: then we have to say so, too
        with pytest.raises(UserError) as refusal:
            by_paceline(model, folder, seconds)
        return Outcome(refused=f"{refusal.value} | transformers itself: {type(error).__name__}: {error}")
    try:
        run, layout = by_paceline(model, folder, seconds)
    except UserError as error:
        return Outcome(refused=str(error))
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ours = [record["loss"] for record in steps if record["kind"] == "step"]
    saved = load_file(run / "model" / "model.safetensors")  # as written: some classes change rows when they are loaded
    distances = {
        name: float((saved[name] - value).abs().max())
        for name, value in weights.items()
        if value.numel() and name in saved  # of weights that are tied one is written
    }
    furthest = max(distances, key=distances.__getitem__)
    predicted = predictions(run, folder, seconds)
    notices = json.loads((run / "summary.json").read_text())["notices"]
    wide = any("depends on the width" in notice for notice in notices)
    expected = [together] if wide else [alone, by_pipeline(run / "model", seconds)]
    outcome = Outcome(
        loss=float(np.abs(np.subtract(ours, losses)).max()),
        weights=distances[furthest],
        furthest=furthest,
        probabilities=max(float(np.abs(predicted - each).max()) for each in expected),
        layout=layout,
        wide=wide,
    )
    if outcome.is_equal:
        return outcome
    # experts that are chosen by a hair magnify rounding: how far does the plain loop itself move by it?
    again, moved, reversed_alone, _ = by_hand(model, seconds, in_reverse=True)
    own = (
        float(np.abs(np.subtract(again, losses)).max()),
        max(float((moved[name] - weights[name]).abs().max()) for name in distances),
        float(np.abs(reversed_alone[::-1] - alone).max()),
    )
    return dataclasses.replace(outcome, own=own)


def by_hand(
    model: Path, seconds: Sequence[str] | None, *, in_reverse: bool = False
) -> tuple[list[float], dict[str, torch.Tensor], np.ndarray, np.ndarray]:
    """Losses and final weights of a plain loop in which a step is the whole data set; then probabilities [n, 2], of
    each sample alone, and of all in one batch."""
    tokenizer, module = _tokenizer(model), _loaded(model)
    if tokenizer.pad_token is None:  # as users of decoders do
        tokenizer.pad_token = tokenizer.eos_token
    for config in (module.config, module.config.get_text_config()):
        config.pad_token_id = tokenizer.pad_token_id
    order = slice(None, None, -1 if in_reverse else 1)
    texts, seconds = TEXTS[order], seconds[order] if seconds else None
    encoded = tokenizer(
        list(texts),
        list(seconds) if seconds else None,
        padding=True,
        truncation=True,
        max_length=MAX_LENGTH,
        return_tensors="pt",
    )
    labels = torch.tensor([module.config.label2id[label] for label in LABELS[order]])
    optimizer = torch.optim.AdamW(module.parameters(), **OPTIMIZER)
    losses = []
    module.train()
    for _ in range(EPOCHS):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(**encoded).logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    module.eval()
    alone = []
    with torch.no_grad():
        for i, text in enumerate(texts):
            one = tokenizer(text, seconds[i] if seconds else None, return_tensors="pt")
            alone.append(module(**one).logits.softmax(-1)[0].numpy())
        together = module(**encoded).logits.softmax(-1).numpy()
    return losses, copy.deepcopy(module.state_dict()), np.stack(alone), together


def by_paceline(model: Path, folder: Path, seconds: Sequence[str] | None) -> tuple[Path, str]:
    """The run folder, and how its samples were laid out."""
    _write(folder / "train.csv", seconds, LABELS)
    texts = {"source": str(folder / "train.csv"), "max_length": MAX_LENGTH, "pair": "second" if seconds else None}
    record = paceline.train(_recipe(model, texts), out=folder / "run")
    return folder / "run", str(record.execution)


def _recipe(model: Path, data: Mapping[str, Any]) -> Recipe:
    """A step is the whole data set, so that the order of samples plays no part."""
    plain = {
        "model": {"source": str(model)},
        "data": {**data, "splits": {"validation": 0, "test": 0}},
        "optimizer": {**OPTIMIZER, "decay_all": True},
        "schedule": {"type": "constant", "warmup": 0},
        "techniques": {"precision": "fp32"},
        "loop": {"epochs": EPOCHS, "batch_size": len(TEXTS), "evaluate_every": "never", "save_best": False,
                 "checkpoint_every": "never"},
        "observe": {"console": "off", "report": False},
        "device": "cpu",
    }  # fmt: skip
    return Recipe.parse(plain)


def predictions(run: Path, folder: Path, seconds: Sequence[str] | None) -> np.ndarray:
    """Probabilities [n, 2] that ``paceline predict`` writes, rows of all lengths in one batch."""
    _write(folder / "new.csv", seconds, None)
    paceline.predict(run, str(folder / "new.csv"), out=folder / "predicted.csv")
    with (folder / "predicted.csv").open(newline="") as file:
        return np.array(
            [[float(row[f"probability of {name}"]) for name in ("good", "poor")] for row in csv.DictReader(file)]
        )


def by_pipeline(model: Path, seconds: Sequence[str] | None) -> np.ndarray:
    """Probabilities [n, 2] of transformers' own pipeline over the saved model."""
    from transformers import pipeline

    with warnings.catch_warnings(action="ignore"):
        classify = pipeline(
            "text-classification", model=_loaded(model).eval(), tokenizer=_tokenizer(model), device="cpu"
        )
        rows: list[Any] = (
            list(TEXTS)
            if seconds is None
            else [{"text": text, "text_pair": second} for text, second in zip(TEXTS, seconds, strict=True)]
        )
        found = [classify(row, top_k=None, function_to_apply="softmax") for row in rows]
    found = [one[0] if isinstance(one[0], list) else one for one in found]
    return np.array(
        [[score["score"] for name in ("good", "poor") for score in one if score["label"] == name] for one in found]
    )


def _loaded(folder: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    with quiet():
        return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def _write(path: Path, seconds: Sequence[str] | None, labels: Sequence[str] | None) -> None:
    columns = {"text": TEXTS, "second": seconds, "label": labels}
    given = {name: values for name, values in columns.items() if values is not None}
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(given)
        rows.writerows(zip(*given.values(), strict=True))


if __name__ == "__main__":
    main()
