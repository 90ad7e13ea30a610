"""Models of several families see what their tokenizers give, and nobody is silent where a text's neighbours count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.data.dataset import Dataset, Origins
from paceline.data.encode import encode_texts, padding_id
from paceline.engine.assemble import assemble_build
from paceline.engine.compared import compared_samples
from paceline.models.load import load_model
from paceline.recipe import Recipe
from paceline.recipe.parts import ModelPart
from paceline.seams import Build
from paceline.tasks import task_for
from tests.made_tokenizers import ALL, PAIRS, TEXTS, bert, gpt2, roberta, word_level, xlnet
from tests.parity.driving import PLAIN

LENGTH = 24
LABELS = np.arange(len(TEXTS)) % 2


def tiny(kind: str, vocabulary: int, **settings: Any) -> Any:
    """A model with weights far from 0, so that whatever is read shows."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    sizes: dict[str, dict[str, Any]] = {
        "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128},
        "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
        "roberta": {"max_position_embeddings": 64, "pad_token_id": 1, "type_vocab_size": 1},
        "llama": {"num_key_value_heads": 2},
        "big_bird": {"block_size": 1, "num_random_blocks": 1, "max_position_embeddings": 128, "use_cache": False},
        "fnet": {"max_position_embeddings": 128},
        "bert": {},
    }
    common = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    own = sizes[kind] if kind in ("gpt2", "xlnet") else {**common, **sizes[kind]}
    model_type = kind
    config = AutoConfig.for_model(model_type, vocab_size=vocabulary, num_labels=2, **{**own, **settings})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def built(model: Any, tokenizer: Any, texts: list[str], pairs: list[str] | None, **techniques: Any) -> Build:
    count = len(texts)
    dataset = Dataset(
        inputs=encode_texts(tokenizer, texts, pairs, LENGTH),
        labels=np.arange(count) % 2,
        kind="classification",
        label_names=("0", "1"),
        splits={"train": np.arange(count)},
        origins=Origins(("made",), np.zeros(count, np.int32), np.zeros(count, np.int64)),
        fingerprint="made",
    )
    settings = {
        "model": {"source": "given"},
        "data": {"source": "made"},
        "techniques": {**PLAIN, **techniques},
        "loop": {"batch_size": 2},
        "device": "cpu",
    }
    recipe = Recipe.parse(settings)
    task = task_for("classification", ("0", "1"), recipe.task)
    return assemble_build(recipe, model, dataset, task, torch.device("cpu"), blocks=(), normalisation=((), ()))


CASES = {
    "gpt2": ("gpt2", gpt2),
    "gpt2, whose tokenizer gives types": ("gpt2", lambda: gpt2(model_input_names=ALL)),
    "xlnet": ("xlnet", xlnet),
    "xlnet, whose tokenizer gives types": ("xlnet", lambda: xlnet(model_input_names=ALL)),
    "roberta": ("roberta", roberta),
    "bert, whose tokenizer gives none": ("bert", roberta),
    "bert": ("bert", bert),
    "llama": ("llama", lambda: gpt2(padding_side="left")),
}


@pytest.mark.parametrize("pairs", [None, PAIRS], ids=["single", "pairs"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_tokenizers_output(case: str, pairs: list[str] | None) -> None:
    kind, make = CASES[case]
    tokenizer = make()
    model = tiny(kind, len(tokenizer))
    model.config.pad_token_id = padding_id(tokenizer)
    given = tokenizer(TEXTS, pairs, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        expected = model(**given).logits
        build = built(model, tokenizer, TEXTS, pairs)
        model.eval()
        found = build.forward(model, build.layout.collate(np.arange(len(TEXTS))))
        alone = build.forward(model, build.layout.collate(np.array([1])))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(alone, expected[1:2], rtol=1e-4, atol=1e-5)
    assert build.notices == ()


@pytest.mark.parametrize("place", ["among the samples that are compared", "among samples that are not"])
def test_packed_equals_padded_where_a_text_names_the_padding(place: str) -> None:
    many = [*TEXTS[:3], *["we laughed"] * 20] if place == "among samples that are not" else list(TEXTS)
    texts = [*many, "a <pad> film <pad> was fine </s>"]
    tokenizer = roberta()
    model = tiny("roberta", len(tokenizer))
    build = built(model, tokenizer, texts, None, packing=True)
    given = tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        batch = build.layout.collate(np.arange(len(texts)))
        assert batch.packed is not None
        found = build.forward(model.eval(), batch)
        torch.testing.assert_close(found, tiny("roberta", len(tokenizer))(**given).logits, rtol=1e-4, atol=1e-5)


def test_the_samples_compared_hold_the_longest_the_shortest_and_special_tokens() -> None:
    texts = [*["we cried we cried"] * 400, "a <mask> film was fine", "dull", *["a film"] * 400, "bad " * 20, "a <pad>"]
    tokens = encode_texts(roberta(), texts, None, LENGTH)
    chosen = compared_samples(tokens, np.arange(300)).tolist()
    assert {400, 401, 802, 803} <= set(chosen), "mask, shortest, longest, pad"
    assert len(chosen) <= 8
    only = encode_texts(roberta(), ["dull"], None, LENGTH)
    assert compared_samples(only, np.arange(1)).tolist() == [0, 0], "two texts at least"


def fnet_tokenizer() -> Any:
    return word_level("<s> $A </s>", "<s> $A </s> $B:1 </s>:1", model_input_names=["input_ids", "token_type_ids"])


@pytest.mark.parametrize("kind", ["fnet", "big_bird"])
def test_a_model_that_reads_its_batchs_width_is_told_of(kind: str) -> None:
    tokenizer = fnet_tokenizer() if kind == "fnet" else bert()
    model = tiny(kind, len(tokenizer)).train()
    state = torch.get_rng_state()
    before = [(name, type(module), module.training) for name, module in model.named_modules()]
    [notice] = built(model, tokenizer, TEXTS, None, packing="auto").notices
    assert "depends on the width" in notice
    assert "evaluation_batch_size=1" in notice
    assert torch.equal(torch.get_rng_state(), state)
    assert [(name, type(module), module.training) for name, module in model.named_modules()] == before
    if kind == "big_bird":
        assert model.bert.attention_type == "block_sparse"


def test_a_width_that_never_changes_is_not_told_of() -> None:
    tokenizer = fnet_tokenizer()
    assert built(tiny("fnet", len(tokenizer)), tokenizer, ["a film", "we cried"], None).notices == ()


def saved_llama(folder: Any, **settings: Any) -> ModelPart:
    model = tiny("llama", len(gpt2()), **settings)
    model.save_pretrained(folder)
    return ModelPart(source=str(folder))


def test_the_end_of_text_is_trained_where_it_stands_in_for_the_padding(tmp_path: Any) -> None:
    from transformers import AutoConfig

    tokenizer = gpt2()
    pad = padding_id(tokenizer)
    part = saved_llama(tmp_path, pad_token_id=None)
    model: Any = load_model(
        part,
        AutoConfig.from_pretrained(tmp_path),
        num_labels=2,
        label_names=["0", "1"],
        kind="classification",
        vocabulary_size=len(tokenizer),
        pad_id=pad,
    )
    assert model.config.pad_token_id == pad, "the head looks for it"
    given = tokenizer(["bad <|endoftext|> sound", "dull"], padding=True, return_tensors="pt")
    model(**given).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[pad].norm() > 0


@pytest.mark.parametrize(
    ("kind", "make", "pairs"),
    [("xlnet", xlnet, False), ("gpt2", gpt2, True), ("roberta", roberta, True)],
    ids=["xlnet", "pairs of gpt2", "pairs of roberta"],
)
def test_a_saved_model_predicts_as_transformers_does(kind: str, make: Any, pairs: bool, tmp_path: Any) -> None:
    import json

    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    import paceline as library

    tokenizer = make()
    tiny(kind, len(tokenizer)).save_pretrained(tmp_path / "source")
    tokenizer.save_pretrained(tmp_path / "source")
    rows = [
        {"text": f"{text} bad{' film' * i}", "label": "no" if i % 2 else "yes", **({"other": other} if pairs else {})}
        for i in range(8)
        for text, other in zip(TEXTS, PAIRS, strict=True)
    ]
    settings = {
        "model": {"source": str(tmp_path / "source")},
        "data": {"max_length": LENGTH, "pair": "other" if pairs else None},
        "loop": {"epochs": 1, "batch_size": 8},
        "observe": {"console": "off", "report": False},
        "device": "cpu",
    }
    library.train(library.Recipe.parse(settings), rows, out=tmp_path / "run")
    library.predict(tmp_path / "run", None, tmp_path / "out.jsonl", rows=rows)
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "model").eval()
    theirs = AutoTokenizer.from_pretrained(tmp_path / "source")
    theirs.pad_token = theirs.pad_token or theirs.eos_token
    texts, others = [row["text"] for row in rows], [row["other"] for row in rows] if pairs else None
    given = theirs(texts, others, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    with torch.no_grad():
        expected = model(**given).logits.softmax(-1)
    for row, probabilities in zip(found, expected, strict=True):
        for index, name in model.config.id2label.items():
            assert row[f"probability of {name}"] == pytest.approx(float(probabilities[index]), abs=2e-4)
