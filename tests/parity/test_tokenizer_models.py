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
from paceline.errors import ModelError
from paceline.models.load import load_model
from paceline.recipe import Recipe
from paceline.recipe.parts import ModelPart
from paceline.seams import Build
from paceline.tasks import task_for
from tests.made_tokenizers import ALL, PAIRS, TEXTS, WORDS, bert, funnel, gpt2, roberta, word_level, xlnet
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
        "bart": {
            "d_model": 16,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "bos_token_id": 0,
            "decoder_start_token_id": 2,
            "max_position_embeddings": 64,
        },
        "funnel": {
            "block_sizes": [2, 2],
            "num_decoder_layers": 1,
            "d_model": 16,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 32,
        },
    }
    common = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    own = sizes[kind] if kind in ("gpt2", "xlnet", "funnel", "bart") else {**common, **sizes[kind]}
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
        origins=Origins(("made",), np.zeros(count, np.int32), np.arange(1, count + 1)),
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


def of_width(build: Build) -> list[str]:
    """What is told of the width of batches."""
    return [notice for notice in build.notices if "depends on the width" in notice]


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
    assert of_width(build) == []


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
    [notice] = of_width(built(model, tokenizer, TEXTS, None, packing="auto"))
    assert "depends on the width" in notice
    assert "evaluation_batch_size=1" in notice
    assert torch.equal(torch.get_rng_state(), state)
    assert [(name, type(module), module.training) for name, module in model.named_modules()] == before
    if kind == "big_bird":
        assert model.bert.attention_type == "block_sparse"


@pytest.mark.parametrize("added", range(4))
def test_a_model_that_joins_neighbours_is_told_of_whatever_the_lengths_are(added: int) -> None:
    """Funnel pools two tokens, and two of these: lengths that four divides are read alike in every width."""
    tokenizer = funnel()
    model = tiny("funnel", len(tokenizer))
    texts = [" ".join(WORDS[:count]) for count in range(2 + added, 9 + added)]
    [notice] = of_width(built(model, tokenizer, texts, None))
    assert "depends on the width" in notice


@pytest.mark.parametrize("alone", [True, False])
def test_a_pass_that_fails_is_told_of(alone: bool) -> None:
    tokenizer = bert()
    model = tiny("bert", len(tokenizer))

    def refuse(_: Any, __: Any, inputs: Any) -> None:
        if (len(inputs["input_ids"]) == 1) == alone:
            raise ValueError(f"{len(inputs['input_ids'])} rows are not what it takes\nsecond line")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    [notice] = of_width(built(model, tokenizer, ["a film", "we cried", "dull", "we laughed , we cried"], None))
    assert "depends on the width that its batch is padded to is not known" in notice
    assert notice.endswith("rows are not what it takes")
    assert ("a pass of one text of 3 tokens fails: ValueError: 1 rows" in notice) == alone


@pytest.mark.parametrize(
    ("texts", "end", "words"),
    [
        (["a film", "bad </s> sound", "dull"], 2, ["made:2: the text has 2 end tokens (id 2), where most texts have 1",
                                                  "take out of the text", "such as </s>"]),
        (["a film", "<mask> bad sound"], 4, ["made:2: the text has 1 end token (id 4), where most texts have 0",
                                             "--set model.config.eos_token_id=2, the token that ends every text here"]),
        (["a film", "dull"], 4, ["made:1: the text has 0 end tokens (id 4), and no text has any", "eos_token_id=2"]),
    ],
)  # fmt: skip
def test_a_text_with_another_number_of_ends_is_named(texts: list[str], end: int, words: list[str]) -> None:
    """transformers raises for the batch that it happens to be in, and does not say which text it is."""
    tokenizer = roberta()
    model = tiny("bart", len(tokenizer), eos_token_id=end, pad_token_id=1)
    with pytest.raises(ModelError) as found:
        built(model, tokenizer, texts, None)
    assert all(word in str(found.value) for word in words), found.value
    assert model.training is False


def test_models_that_read_no_end_take_any_number_of_them() -> None:
    tokenizer = roberta()
    assert of_width(built(tiny("roberta", len(tokenizer)), tokenizer, ["a film", "bad </s> sound"], None)) == []
    model = tiny("bart", len(tokenizer), eos_token_id=2, pad_token_id=1)
    assert of_width(built(model, tokenizer, ["a </s> film", "bad </s> sound was fine"], None)) == []


def test_a_width_that_never_changes_is_not_told_of() -> None:
    tokenizer = fnet_tokenizer()
    assert of_width(built(tiny("fnet", len(tokenizer)), tokenizer, ["a film", "we cried"], None)) == []


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
