"""Packed texts give the logits, the loss and every gradient of padded ones; models that would not are found out."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.compare import rounding, spread, trial
from paceline.contract.errors import ModelError, RecipeError
from paceline.data.dataset import Tokens
from paceline.data.layout import PackedLayout, PaddedLayout
from paceline.recipe.parts import TaskPart
from paceline.seams import Batch, Build, Forward, Packed
from paceline.tasks import task_for
from paceline.techniques import packing
from paceline.techniques.packing import apply_packing, difference, first_position, pooled
from tests.parity import reference

# older releases of transformers script parts of DeBERTa when it is imported
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
PLACES = {"vocab_size": 120, "max_position_embeddings": 64, "pad_token_id": 0}
DROPS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WINDOWED = {
    **SIZES,
    **PLACES,
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    **dict.fromkeys(("cls_token_id", "sep_token_id", "bos_token_id", "eos_token_id"), 1),
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "distilbert": (
        "distilbert",
        {**PLACES, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "seq_classif_dropout": 0.0}
        | dict.fromkeys(("dropout", "attention_dropout"), 0.0),
    ),
    "bert": ("bert", {**SIZES, **PLACES, **DROPS}),
    "roberta": ("roberta", {**SIZES, **PLACES, **DROPS, "pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta": ("xlm-roberta", {**SIZES, **PLACES, **DROPS, "pad_token_id": 1, "type_vocab_size": 1}),
    "electra": ("electra", {**SIZES, **PLACES, **DROPS, "embedding_size": 24}),
    "modernbert": ("modernbert", {**WINDOWED, "classifier_pooling": "cls"}),
    "modernbert-mean": ("modernbert", {**WINDOWED, "classifier_pooling": "mean"}),
    "deberta-v2": ("deberta-v2", {**SIZES, **PLACES, **DROPS, "relative_attention": True, "pos_att_type": ["c2p"]}),
    "mpnet": ("mpnet", {**SIZES, **PLACES, **DROPS, "pad_token_id": 1}),
}
PACKABLE = [name for name in FAMILIES if name not in ("deberta-v2", "mpnet")]
LENGTHS = (5, 31, 2, 17, 1, 40, 23, 9)
IDS = np.array([6, 1, 4, 0, 5, 3, 2, 7])
CPU = torch.device("cpu")


def model_of(family: str, num_labels: int = 3) -> Any:
    """Weights away from zero, so that no gradient vanishes by chance."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    kind, settings = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        config = AutoConfig.for_model(kind, num_labels=num_labels, **settings)
        model = AutoModelForSequenceClassification.from_config(config)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def labels_of(kind: str) -> np.ndarray:
    rng = np.random.default_rng(1)
    if kind == "classification":
        return rng.integers(0, 3, len(LENGTHS))
    shape = (len(LENGTHS), 3) if kind == "multi_label" else len(LENGTHS)
    return (rng.integers(0, 2, shape) if kind == "multi_label" else rng.normal(size=shape)).astype(np.float32)


def made(model: Any, kind: str = "classification", *, pairs: bool = False, lengths: tuple[int, ...] = LENGTHS) -> Any:
    """A padded build of this model, and the packed layout of the same samples, with filler in its rows."""
    rng = np.random.default_rng(2)
    second = np.array([max(1, length // 2) for length in lengths], dtype=np.int32) if pairs else None
    pad = getattr(getattr(model, "config", None), "pad_token_id", 0)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = Tokens(rng.integers(5, 120, sum(lengths)).astype(np.uint16), offsets, pad, second)
    labels = labels_of(kind)
    padded = PaddedLayout(tokens, labels, CPU, token_types=pairs)
    packed = PackedLayout(
        tokens, labels, CPU, token_types=pairs, first_position=first_position(model), bucket=64, resident=False
    )
    names = ("a", "b", "c") if kind != "regression" else ("value",)
    task = task_for(kind, names, TaskPart())
    return Build(model=model, forward=plainly, layout=padded, task=task, device=CPU), packed


def plainly(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch.inputs).logits


def results(build: Build, forward: Forward, batch: Batch) -> dict[str, Tensor]:
    """Logits, loss and every gradient; parameters without one are left out."""
    build.model.zero_grad(set_to_none=True)
    logits = forward(build.model, batch)
    loss = build.task.loss_sum(logits, batch)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in build.model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), "loss": loss.detach(), **gradients}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys(), "packed, other parameters have gradients"
    norm = torch.stack([value.norm() for value in expected.values()]).norm()
    apart = {name: float((found[name] - expected[name]).norm() / norm) for name in expected}
    wrong = {name: f"{value:.1e}" for name, value in apart.items() if not value <= tolerance}
    assert not wrong, f"packed and padded differ: {wrong}"


def both_ways(build: Build, packed: PackedLayout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Padded as the model came, then packed."""
    expected = results(build, plainly, build.layout.collate(IDS))
    return results(build, apply_packing(build.model), packed.collate(IDS)), expected


@pytest.mark.parametrize("family", PACKABLE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_is_padded(family: str, dtype: torch.dtype) -> None:
    build, packed = made(model_of(family).to(dtype))
    found, expected = both_ways(build, packed)
    # every task computes its loss in fp32, and the gradient starts from there: only the logits are fp64 throughout
    assert_equal(found, expected, 2e-6 if dtype == torch.float32 else 1e-7)
    if dtype == torch.float64:
        torch.testing.assert_close(found["logits"], expected["logits"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("family", PACKABLE)
def test_every_gradient_in_fp64(family: str) -> None:
    build, packed = made(model_of(family).double())
    pull = torch.linspace(-1, 1, 3 * len(IDS), dtype=torch.float64).view(-1, 3)
    found = {}
    for way, batch in (("padded", build.layout.collate(IDS)), ("packed", packed.collate(IDS))):
        forward = plainly if way == "padded" else apply_packing(build.model)
        (forward(build.model, batch) * pull).sum().backward()
        found[way] = {name: p.grad.clone() for name, p in build.model.named_parameters() if p.grad is not None}
        build.model.zero_grad(set_to_none=True)
    assert_equal(found["packed"], found["padded"], 1e-14)


@pytest.mark.parametrize("kind", ["multi_label", "regression"])
@pytest.mark.parametrize("family", ["distilbert", "bert", "modernbert-mean"])
def test_packed_is_padded_in_every_task(family: str, kind: str) -> None:
    build, packed = made(model_of(family, 1 if kind == "regression" else 3), kind)
    assert_equal(*both_ways(build, packed), 2e-6)


@pytest.mark.parametrize("family", ["bert", "electra"])
def test_pairs_keep_their_token_types(family: str) -> None:
    build, packed = made(model_of(family), pairs=True)
    assert int(packed.collate(IDS).inputs["token_type_ids"].sum()) > 0
    assert_equal(*both_ways(build, packed), 2e-6)


@pytest.mark.parametrize("family", PACKABLE)
def test_plain_attention_on_a_packed_row_differs_clearly(family: str) -> None:
    """The control: without our attention texts see one another, no error is raised, and these tests notice."""
    build, packed = made(model_of(family))
    forward, batch = apply_packing(build.model), packed.collate(IDS)
    right = results(build, forward, batch)
    build.model.set_attn_implementation("sdpa")
    mixed = results(build, forward, batch)
    assert (mixed["logits"] - right["logits"]).abs().max() > 1e-3
    with pytest.raises(AssertionError, match="packed and padded differ"):
        assert_equal(mixed, right, 1e-4)


def test_twenty_steps_stay_with_the_padded_loop_written_by_hand() -> None:
    by_hand, model = reference.tiny_model(dropout=0.0), reference.tiny_model(dropout=0.0)
    expected = reference.train_by_hand(by_hand, make_optimizer=adamw)
    texts, labels = reference.samples()
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts])])
    tokens = Tokens(np.concatenate(texts), offsets.astype(np.int64), pad_id=0)
    layout = PackedLayout(tokens, labels, CPU, token_types=False, first_position=0, bucket=64, resident=False)
    forward, optimizer = apply_packing(model.train()), adamw(model)
    losses = []
    for step, ids in enumerate(reference.batches(8)):
        optimizer.param_groups[0]["lr"] = 1e-3 * reference.linear_schedule(step, reference.STEPS, 2)
        batch = layout.collate(ids)
        loss = nn.functional.cross_entropy(forward(model, batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    for (name, one), other in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        # Adam divides by the gradient's size, so the rounding of a gradient near zero is felt in full
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


@pytest.mark.parametrize("family", ["bert", "modernbert-mean"])
def test_a_packed_model_takes_padded_batches_too_and_is_saved_plain(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    build, packed = made(model_of(family))
    padded = build.layout.collate(IDS)
    before = plainly(build.model.eval(), padded)
    alone = build.model(input_ids=padded.inputs["input_ids"][5:6]).logits  # the longest: nothing is masked
    forward = apply_packing(build.model)
    assert torch.equal(forward(build.model, padded), before), "a padded batch is not computed as it was"
    assert torch.allclose(build.model(input_ids=padded.inputs["input_ids"][5:6]).logits, alone, atol=1e-6)
    build.model.save_pretrained(tmp_path)
    assert "paceline" not in (tmp_path / "config.json").read_text()
    assert not any(key.startswith("_attn") for key in json.loads((tmp_path / "config.json").read_text()))
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(plainly(loaded, padded), before)
    torch.testing.assert_close(forward(build.model, packed.collate(IDS)), before, rtol=0, atol=1e-5)


def test_an_evaluation_goes_either_way() -> None:
    build, packed = made(model_of("bert"))
    done = packing.apply(build, packed, IDS)
    done.model.eval()
    with torch.no_grad():
        ways = [done.forward(done.model, layout.collate(IDS)) for layout in (build.layout, packed)]
    torch.testing.assert_close(*ways, rtol=0, atol=1e-5)


def test_dropout_in_the_attention_draws_from_torchs_generator() -> None:
    model = reference.tiny_model(dropout=0.0)
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.dropout.p = 0.3
    build, packed = made(model.train(), lengths=(5, 31, 2, 17, 1, 30, 23, 9))
    forward, batch = apply_packing(model), packed.collate(IDS)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(results(build, forward, batch)["logits"])
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


# -- the self-check ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PACKABLE)
def test_a_model_that_can_be_packed_is_packed_and_says_so(family: str) -> None:
    build, packed = made(model_of(family))
    done = packing.apply(build, packed, IDS, required=True)
    assert done.layout is packed
    assert dict(done.execution) == {"layout": "packed", "attention": "loop"}
    assert [(decision.setting, decision.value) for decision in done.decisions] == [("techniques.packing", "true")]


class Other(nn.Module):
    """A user's own network."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(120, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.table(input_ids)


def foreign(family: str) -> Any:
    return Other() if family == "other" else model_of(family)


def seeing_the_row(family: str) -> Any:
    """Subtracts the mean over all positions of a row: in a packed row texts see one another."""
    model = model_of(family)
    model.base_model.embeddings.register_forward_hook(lambda module, arguments, out: out - out.mean(1, keepdim=True))
    return model


def losing_a_gradient(family: str) -> Any:
    """The same logits packed, but nothing flows back into the embeddings' layer norm."""
    model = model_of(family)
    cut = lambda module, arguments, out: out.detach() if len(out) == 1 else out  # noqa: E731
    model.base_model.embeddings.LayerNorm.register_forward_hook(cut)
    return model


def stumbling(family: str) -> Any:
    model = model_of(family)

    def refuse(module: nn.Module, arguments: Any) -> None:
        assert len(arguments[0]) > 1, "one row only"

    model.base_model.encoder.register_forward_pre_hook(refuse)
    return model


@pytest.mark.parametrize(
    ("make", "family", "reason"),
    [
        (foreign, "deberta-v2", "DebertaV2ForSequenceClassification: its attention does not go through"),
        (foreign, "mpnet", "MPNetForSequenceClassification: its attention does not go through"),
        (foreign, "other", "Other: not a model of transformers"),
        (seeing_the_row, "bert", "packed logits differ from padded ones by"),
        (losing_a_gradient, "bert", "packed and padded gradients of bert.embeddings.* differ by"),
        (stumbling, "bert", "a packed row fails with AssertionError: one row only"),
    ],
)
def test_a_model_that_cannot_be_packed_stays_padded_with_a_reason(make: Any, family: str, reason: str) -> None:
    build, packed = made(make(family))
    done = packing.apply(build, packed, IDS)
    assert (done.layout, done.forward) == (build.layout, build.forward)
    assert done.execution == {"layout": "padded"}
    (decision,) = done.decisions
    assert decision.value == "false"
    with pytest.raises(RecipeError, match=f"(?s)techniques.packing = true.*{reason}"):
        packing.apply(build, packed, IDS, required=True)
    assert getattr(getattr(done.model, "config", None), "_attn_implementation", "") != packing.NAME


FEW, MORE = range(2), range(2, 8)
"""Seeds of models. What held for the first two has held for all; `make test-full` tries the others too."""


def magnifying(seed: int) -> Any:
    """A BERT of width 32 whose attention is saturated: rounding comes out hundreds of times as large as it went in."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    _, settings = FAMILIES["bert"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        larger = {"num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": 512}
        config = AutoConfig.for_model("bert", num_labels=3, initializer_range=1.0, **settings | larger)
        return AutoModelForSequenceClassification.from_config(config)


@pytest.mark.parametrize("seeds", [FEW, pytest.param(MORE, marks=pytest.mark.slow)], ids=str)
def test_rounding_is_told_from_a_fault_however_much_a_model_magnifies_it(
    seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_again = 0
    beyond = rounding.beyond

    def counted(name: str, expected: Any, found: Any, *others: Any) -> str | None:
        nonlocal looked_again
        looked_again += expected[0].dtype == torch.float64
        return beyond(name, expected, found, *others)

    monkeypatch.setattr(rounding, "beyond", counted)
    lengths = (50, 310, 20, 170, 10, 400, 230, 90)
    for seed in seeds:
        build, packed = made(magnifying(seed), lengths=lengths)
        assert difference(build, packed, IDS) is None, f"seed {seed}"
    assert looked_again, "no model magnified its rounding, so that nothing was tried"


def with_positions_off_by_one(packed: Batch) -> Batch:
    return inputs_of(packed, position_ids=packed.inputs["position_ids"] + 1)


def with_another_token_type(packed: Batch) -> Batch:
    types = torch.zeros_like(packed.inputs["input_ids"])
    types[0, int(packed.packed.first[0])] = 1  # of one token
    return inputs_of(packed, token_type_ids=types)


@dataclass(frozen=True)
class Elsewhere(Packed):
    """A packed row whose samples are not read at the first position of a sequence."""

    at: Tensor
    """int64 [S]"""

    @property
    def first(self) -> Tensor:
        return self.at


def bounded(batch: Batch, bounds: Tensor, at: Tensor) -> Batch:
    longest = int(bounds.diff().max())
    return replace(batch, packed=Elsewhere(bounds.int(), batch.packed.sequence, longest, at))


def with_neighbours_in_sight(packed: Batch) -> Batch:
    """The first two texts are one sequence to attention, and the head reads each one's first position as before."""
    return bounded(packed, packed.packed.cu_seqlens[[0, *range(2, len(packed.packed.cu_seqlens))]], packed.packed.first)


def with_half_a_text_out_of_sight(packed: Batch) -> Batch:
    """The second half of the longest text is a sequence of its own."""
    bounds = packed.packed.cu_seqlens
    at = int(bounds.diff().argmax()) + 1
    cut = torch.cat([bounds[:at], bounds[at : at + 1] - bounds.diff().max() // 2, bounds[at:]])
    return bounded(packed, cut, packed.packed.first)


def with_the_second_position_pooled(packed: Batch) -> Batch:
    first = packed.packed.first.clone()
    first[-1] += 1
    return bounded(packed, packed.packed.cu_seqlens, first)


def inputs_of(batch: Batch, **changed: Tensor) -> Batch:
    return replace(batch, inputs={**batch.inputs, **changed})


class Faulty:
    """A packed layout with one mistake in its batches."""

    def __init__(self, layout: PackedLayout, plant: Any) -> None:
        self._layout, self._plant = layout, plant

    def collate(self, ids: np.ndarray) -> Batch:
        return self._plant(self._layout.collate(ids))

    def size(self, ids: np.ndarray) -> Any:
        return self._layout.size(ids)


PLANTS = (
    with_positions_off_by_one,
    with_another_token_type,
    with_neighbours_in_sight,
    with_half_a_text_out_of_sight,
    with_the_second_position_pooled,
)


def assert_found(plant: Any, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is found where ten times as much passes for rounding, in models of all these seeds."""
    monkeypatch.setattr(trial, "CHECKED_SAMPLES", 4)  # two texts made one are no longer than the model's positions
    monkeypatch.setattr(rounding, "TOLERANCES", {key: 10 * value for key, value in rounding.TOLERANCES.items()})
    monkeypatch.setattr(rounding, "ROUGH", 10 * rounding.ROUGH)
    monkeypatch.setattr(rounding, "EXACT", 10 * rounding.EXACT)
    for seed in seeds:
        for model in (fresh(seed), magnifying(seed)):
            build, packed = made(model)
            assert difference(build, packed, IDS) is None, f"seed {seed}: without a fault"
            found = difference(build, Faulty(packed, plant), IDS)
            assert found is not None, f"seed {seed}: the fault was taken for rounding"
            assert "differ" in found, found


@pytest.mark.parametrize("plant", PLANTS)
def test_a_fault_is_far_from_what_passes_for_rounding(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(plant, FEW, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_a_fault_is_far_from_rounding_in_more_models(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_found(plant, MORE, monkeypatch)


def fresh(seed: int) -> Any:
    """A BERT as pretraining begins."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model("bert", num_labels=3, **FAMILIES["bert"][1])
        return AutoModelForSequenceClassification.from_config(config)


def test_packing_by_hand_refuses_what_it_cannot_pack() -> None:
    with pytest.raises(ModelError, match="does not go through transformers' registry"):
        apply_packing(model_of("deberta-v2"))


def test_a_decoder_is_not_packed() -> None:
    """Its attention goes through the registry, and looks back only."""
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(vocab_size=120, n_positions=64, n_embd=32, n_layer=1, n_head=2, num_labels=3, pad_token_id=0)
    build, packed = made(GPT2ForSequenceClassification(config))
    assert "GPT2" in str(difference(build, packed, IDS))


@pytest.mark.parametrize("trained", ["head", "none"])
def test_a_frozen_backbone_is_packed(trained: str) -> None:
    model = model_of("bert")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained == "head" and name.startswith("classifier"))
    build, packed = made(model)
    assert difference(build, packed, IDS) is None
    if trained == "head":
        assert_equal(*both_ways(build, packed), 2e-6)


def test_parameters_without_a_gradient_are_no_difference() -> None:
    model = model_of("roberta")
    model.spare = nn.Parameter(torch.ones(3))
    build, packed = made(model)
    assert difference(build, packed, IDS) is None
    assert "spare" not in both_ways(build, packed)[0]


@pytest.mark.parametrize(("family", "usable"), [("bert", 64), ("roberta", 62), ("modernbert", None)])
def test_texts_longer_than_the_models_positions_are_named(family: str, usable: int | None) -> None:
    """RoBERTa's first two positions are never used. Rotary positions have no end."""
    build, packed = made(model_of(family), lengths=(5, 31, 65, 17, 1, 40, 23, 9))
    found = difference(build, packed, IDS)
    if usable is None:
        assert found is None
    else:
        assert str(found).endswith(f"a text has 65 tokens, and the model has positions for {usable}")


def test_the_longest_text_that_fits_is_packed() -> None:
    build, packed = made(model_of("roberta"), lengths=(5, 31, 62, 17, 1, 40, 23, 9))
    assert difference(build, packed, IDS) is None


@pytest.mark.parametrize("family", ["bert", "deberta-v2", "modernbert-mean"])
def test_the_check_leaves_everything_as_it_was(family: str) -> None:
    model = model_of(family).train()
    build, packed = made(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attention, state = model.config._attn_implementation, torch.get_rng_state()
    difference(build, packed, IDS)
    assert all(module.training for module in model.modules())
    assert model.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), state), "random numbers were drawn"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])] == []
    assert not any(module._forward_hooks for module in model.modules())


def test_weights_stored_in_half_precision_are_checked_in_full() -> None:
    build, packed = made(model_of("bert").bfloat16())
    assert difference(build, packed, IDS) is None
    assert build.model.dtype == torch.bfloat16


def test_gradients_that_are_not_numbers_are_no_agreement() -> None:
    model = model_of("bert")
    model.classifier.weight.data[0, 0] = torch.nan
    build, packed = made(model)
    assert "packed logits differ" in str(difference(build, packed, IDS))


def test_the_checked_samples_are_of_very_different_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.compare.trial.CHECKED_SAMPLES", 4)
    _, packed = made(model_of("bert"))
    assert [LENGTHS[i] for i in spread(packed, IDS)] == [1, 5, 23, 40]
    assert [LENGTHS[i] for i in spread(packed, IDS[:2])] == [23, 31]
    assert list(spread(packed, IDS[:1])) == [6]


# -- its parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "first"), [("distilbert", 0), ("bert", 0), ("roberta", 2), ("xlm-roberta", 2), ("modernbert", 0)]
)
def test_the_first_position_is_asked_of_the_embeddings(family: str, first: int) -> None:
    assert first_position(model_of(family)) == first


def test_a_mean_leaves_the_filler_out() -> None:
    _, packed = made(model_of("bert"))
    batch = packed.collate(IDS)
    hidden = torch.randn(batch.inputs["input_ids"].shape[1], 4, dtype=torch.float64)
    bounds = batch.packed.cu_seqlens.tolist()
    spans = [(bounds[p], bounds[p + 1]) for p in batch.packed.sequence.tolist()]
    assert [end - start for start, end in spans] == [LENGTHS[i] for i in IDS]
    expected = torch.stack([hidden[start:end].mean(0) for start, end in spans])
    torch.testing.assert_close(pooled(hidden, batch.packed, mean=True), expected)
    assert torch.equal(pooled(hidden, batch.packed, mean=False), torch.stack([hidden[start] for start, _ in spans]))
