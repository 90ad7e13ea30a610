"""A model whose blocks are cut over ranks is trained as one process trains it: losses, gradients and weights."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.contract.errors import ModelError, RecipeError
from paceline.data.dataset import Dataset, Images
from paceline.data.order import OrderState, ShuffledOrder
from paceline.models.structure import blocks
from paceline.prepare.assemble import Assembled, assemble, assemble_build
from paceline.recipe import Recipe
from paceline.seams import Alone, Mesh, World
from paceline.strategies.tensor import strategy
from paceline.strategies.tensor.cut import cuts_of
from paceline.strategies.tensor.layers import RowLinear
from paceline.tasks import task_for
from tests.parity import driving, reference
from tests.parity.tiny_families import configuration
from tests.testing.distributed import run_distributed

STEPS = 10
TOLERANCE = 1e-6
RATES = {"sgd": 0.02, "adamw": 1e-3}


@dataclass(frozen=True)
class Case:
    """What is trained, and how; the same on all ranks and in one process."""

    family: str = "distilbert"
    settings: tuple[tuple[str, Any], ...] = ()
    techniques: tuple[tuple[str, Any], ...] = ()
    batch_size: int = 10
    micro_batch_size: int | None = 3
    clip_norm: float | None = 0.5
    optimizer: str = "sgd"
    train: str = "all"

    def recipe(self, tensor: int = 1) -> Recipe:
        plain = driving.recipe(
            techniques={**driving.PLAIN, **dict(self.techniques)},
            # Adam divides by the size of a gradient, which blows up the rounding of those that are nothing else
            optimizer={"clip_norm": self.clip_norm, "type": self.optimizer, "lr": RATES[self.optimizer]},
            loop={"batch_size": self.batch_size, "micro_batch_size": self.micro_batch_size, "max_steps": STEPS},
        )
        return Recipe.parse({**plain.plain(), "parallel": {"tensor": tensor}})


@dataclass(frozen=True)
class Outcome:
    """Of a few steps."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Of the last step, as this rank holds them."""
    weights: dict[str, Tensor]
    """Whole, on the first rank."""
    held: dict[str, Tensor]
    """As this rank holds them."""
    cut: list[str]
    execution: dict[str, str]


def model_of(case: Case, seed: int = 5) -> nn.Module:
    import transformers

    config = configuration(case.family, num_labels=reference.CLASSES, **dict(case.settings))
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0
    kind = (
        transformers.AutoModelForImageClassification
        if case.family in IMAGES
        else transformers.AutoModelForSequenceClassification
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = kind.from_config(config).float()
        with torch.no_grad():
            for parameter in model.parameters():  # biases begin as zeros, and two of them added look like one
                parameter.add_(torch.randn_like(parameter), alpha=0.02)
    for parameter in model.base_model.parameters():
        parameter.requires_grad_(case.train == "all")
    return model


IMAGES = ("vit", "resnet")


def data_of(case: Case) -> Dataset:
    data = driving.dataset()
    if case.family not in IMAGES:
        return data
    pixels = np.random.default_rng(1).integers(0, 256, (reference.SAMPLES, 32, 32, 3), dtype=np.uint8)
    return replace(data, inputs=Images(pixels))


def assembled(case: Case, mesh: Mesh, seed: int = 5) -> Assembled:
    chosen, model, data = case.recipe(mesh.tensor.size), model_of(case, seed), data_of(case)
    build = assemble_build(
        chosen,
        model,
        data,
        task_for(data.kind, data.label_names, chosen.task),
        torch.device("cpu"),
        blocks=[block for _, block in blocks(model)],
        normalisation=((0.5,) * 3, (0.5,) * 3),
        mesh=mesh,
    )
    return assemble(chosen, build, STEPS, mesh=mesh)


def train(case: Case, run: Assembled, mesh: Mesh, steps: int = STEPS, first: int = 0) -> Outcome:
    data, chosen = data_of(case), case.recipe()
    size = chosen.loop.micro_batch_size or chosen.loop.batch_size
    lengths = getattr(data.inputs, "lengths", None)
    order = ShuffledOrder(np.arange(reference.SAMPLES), micro_batch_size=size, lengths=lengths)
    at = OrderState(seed=0, epoch=0, step=0, batch_size=chosen.loop.batch_size)
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for step in range(first + steps):
        if step >= first:
            plan = order.plan(at, mesh.data.rank, mesh.data.size)
            batches = [run.build.layout.collate(ids) for ids in plan.microbatches]
            done = run.engine.accumulate_batches(batches, len(plan.samples), step=step)
            named = run.build.model.named_parameters()
            gradients = {name: p.grad.clone() for name, p in named if p.grad is not None}
            norms.append(run.engine.update().norm.item())
            losses.append(mesh.data.all_reduce(done.loss.clone()).item())
        at = order.after(at)
    whole = {name: tensor.clone() for name, tensor in run.engine.whole().items()}
    held = {name: p.detach().clone() for name, p in run.build.model.named_parameters()}
    return Outcome(losses, norms, gradients, whole, held, sorted(cuts_of(run.build.model)), dict(run.build.execution))


def together(world: World, case: Case, tensor: int = 2) -> Outcome:
    mesh = Mesh.over(world, tensor=tensor)
    return train(case, assembled(case, mesh, seed=5 + world.rank), mesh)  # ranks begin with other weights


def alone(case: Case) -> Outcome:
    return train(case, assembled(case, Mesh()), Mesh())


def assert_same(found: list[Outcome], expected: Outcome, tolerance: float = TOLERANCE) -> None:
    first = found[0]
    assert first.weights.keys() == expected.weights.keys()
    for one in found:
        assert one.losses == pytest.approx(expected.losses, rel=tolerance)
        assert one.norms == pytest.approx(expected.norms, rel=10 * tolerance)
        assert one.cut == first.cut
        assert one.cut, "nothing was cut"
        for name, gradient in one.gradients.items():
            if name not in one.cut:
                assert torch.equal(gradient, first.gradients[name]), f"ranks differ in the gradient of {name}"
                assert torch.equal(one.held[name], first.held[name]), f"ranks differ in {name}"
    for name, weight in expected.weights.items():
        away = float((first.weights[name] - weight).abs().max())
        assert away < tolerance, f"{name} is {away:.1e} from one process's"


FAMILIES = ["bert", "distilbert", "roberta", "xlm-roberta", "electra", "modernbert", "vit"]


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("electra", "xlm-roberta") else name for name in FAMILIES],
)
def test_two_ranks_that_share_blocks_train_as_one_process(family: str) -> None:
    case = Case(family)
    assert_same(run_distributed(together, 2, case), alone(case))


WAYS = {
    "packed": Case(techniques=(("packing", True),)),
    "recomputed": Case("bert", techniques=(("recompute", True),)),
    "recomputed, one block many times": Case("albert", techniques=(("recompute", True),)),
    "one micro-batch, no clipping": Case(micro_batch_size=None, clip_norm=None),
    "frozen blocks": Case("bert", train="head"),
    "a decoder": Case("llama", settings=(("num_key_value_heads", 2),)),
}


# a block that is passed many times is recomputed as often: the harder of the two
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow) if way == "recomputed" else way for way in WAYS]
)
def test_sharing_goes_with(way: str) -> None:
    case = WAYS[way]
    found = run_distributed(together, 2, case)
    assert_same(found, alone(case))
    assert (way != "packed") or found[0].execution["layout"] == "packed"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(), marks=pytest.mark.slow),
        pytest.param(Case("bert", optimizer="adamw", clip_norm=None), marks=pytest.mark.slow),
        Case(batch_size=3),
    ],
)
def test_four_ranks_are_two_shares_of_the_batch_by_two_of_each_block(case: Case) -> None:
    # of ten samples in threes the ranks have unequally many; 64 samples by tens, or threes, leave an uneven tail
    assert_same(run_distributed(together, 4, case), alone(case), 1e-5 if case.optimizer == "adamw" else TOLERANCE)


def test_four_ranks_share_four_heads() -> None:
    found = run_distributed(together, 4, Case("bert"), 4)
    assert_same(found, alone(Case("bert")))
    assert {tuple(one.held["bert.encoder.layer.0.attention.self.query.weight"].shape) for one in found} == {(8, 32)}


DROPOUT = {
    "bert": (("hidden_dropout_prob", 0.2), ("attention_probs_dropout_prob", 0.2)),
    "modernbert": (("attention_dropout", 0.2), ("mlp_dropout", 0.2), ("embedding_dropout", 0.2)),
}


def masks_and_training(world: World, case: Case) -> tuple[Outcome, list[Tensor]]:
    """Training, and what dropout left of each block's attention in the last pass."""
    mesh, seen = Mesh.over(world, tensor=2), []
    run = assembled(case, mesh)
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        ones = torch.ones_like(query)
        state = torch.get_rng_state()
        seen.append(attend(query * 0, key * 0, ones, **given).detach().flatten())
        torch.set_rng_state(state)
        return attend(query, key, value, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        done = train(case, run, mesh)
    return done, [mask for mask in seen if mask.min() != mask.max()][:4]


@pytest.mark.parametrize(
    ("family", "recompute"),
    [
        ("bert", False),
        ("modernbert", True),
        pytest.param("bert", True, marks=pytest.mark.slow),
        pytest.param("modernbert", False, marks=pytest.mark.slow),
    ],
)
def test_with_dropout_ranks_stay_equal_and_their_heads_have_masks_of_their_own(family: str, recompute: bool) -> None:
    case = Case(family, DROPOUT[family], techniques=(("recompute", recompute),))
    found = run_distributed(masks_and_training, 4, case)
    (first, masks), (second, others), (third, _), _ = found
    for (one, _), (other, _) in (found[:2], found[2:]):
        for name in one.held:
            if name not in one.cut:
                assert torch.equal(one.gradients[name], other.gradients[name]), f"ranks differ in {name}'s gradient"
                assert torch.equal(one.held[name], other.held[name]), f"ranks differ in {name}"
    assert masks
    assert not any(torch.equal(mask, other) for mask, other in zip(masks, others, strict=True)), "heads share a mask"
    for name, weight in first.held.items():  # ranks with other samples have the same weights all the same
        assert torch.equal(weight, third.held[name]), name
    assert first.losses == second.losses
    assert alone(case).losses != pytest.approx(first.losses, rel=1e-4), "nothing was dropped"


SEEDS = 50


def drawn(world: World, case: Case) -> tuple[Tensor, Tensor]:
    """Losses [seeds] of one batch, and gradients [seeds, width] of a norm below all blocks."""
    mesh = Mesh.over(world, tensor=2) if world.size > 1 else Mesh()
    run = assembled(case, mesh)
    batch, norm = run.build.layout.collate(np.arange(8)), run.build.model.bert.embeddings.LayerNorm.weight
    losses, gradients = [], []
    with mock.patch("gc.collect"):  # each way back would take as long as twenty passes
        for seed in range(SEEDS):
            go_back = run.engine.mark()
            losses.append(run.engine.accumulate_batches([batch], 8, step=seed).loss.clone())
            gradients.append(norm.grad.clone())
            go_back()
    return torch.stack(losses), torch.stack(gradients)


def test_dropout_within_shared_blocks_has_the_expectation_of_one_process() -> None:
    """Each rank draws its own masks inside of blocks, so that no single step is one process's."""
    case = Case("bert", DROPOUT["bert"])
    shared, own = run_distributed(drawn, 2, case)[0], drawn(Alone(), case)
    for what, one, other in zip(("losses", "gradients"), shared, own, strict=True):
        assert not torch.equal(one, other), f"{what}: nothing was dropped"
        error = ((one.var(0) + other.var(0)) / SEEDS).sum().sqrt()
        distance = (one.mean(0) - other.mean(0)).norm()
        assert 0 < distance < 3 * error, f"the means of {what} differ by {distance:.1e}, standard error {error:.1e}"


def one_rank_overflows(world: World) -> tuple[bool, bool, list[str]]:
    """Whether the update was made where one rank's shards of gradients are infinite, and after it; what changed."""
    mesh = Mesh.over(world, tensor=2)
    run = assembled(Case("bert", optimizer="adamw"), mesh)
    before = {name: p.detach().clone() for name, p in run.build.model.named_parameters()}
    batches = [run.build.layout.collate(np.arange(first, first + 3)) for first in (0, 3)]
    run.engine.accumulate_batches(batches, 6)
    if world.rank == 1:
        cut = run.build.model.get_parameter(sorted(cuts_of(run.build.model))[0])
        assert cut.grad is not None
        cut.grad.fill_(torch.inf)
    made = bool(run.engine.update().finite)
    changed = [name for name, p in run.build.model.named_parameters() if not torch.equal(p, before[name])]
    run.engine.accumulate_batches(batches, 6)
    return made, bool(run.engine.update().finite), changed


def test_all_ranks_skip_an_update_that_is_not_finite_in_the_shards_of_one() -> None:
    for made, later, changed in run_distributed(one_rank_overflows, 2):
        assert not made
        assert not changed
        assert later


@pytest.mark.parametrize("family", [pytest.param("bert", marks=pytest.mark.slow), "albert"])
def test_recomputed_blocks_draw_the_same_masks_again(family: str) -> None:
    # ALBERT passes one block many times, and recomputes it as often before it is passed again
    drops = DROPOUT["bert"]
    kept, recomputed = (
        run_distributed(together, 2, Case(family, drops, techniques=(("recompute", recompute),)))[0]
        for recompute in (False, True)
    )
    assert recomputed.losses == pytest.approx(kept.losses, rel=1e-6)


def held_after_training(world: World) -> list[int]:
    mesh, case = Mesh.over(world, tensor=2), Case("modernbert", techniques=(("recompute", True),))
    run = assembled(case, mesh)
    train(case, run, mesh, 1)
    cut = [module for module in run.build.model.modules() if isinstance(module, RowLinear)]
    return [len(layer._inside._entered) + len(layer._inside._before) for layer in cut]


def test_recomputed_blocks_hold_nothing_behind_their_pass() -> None:
    # the last product of this block is not needed again: recomputation could stop inside of the MLP
    for held in run_distributed(held_after_training, 2):
        assert held == [0] * 4


# -- in and out --------------------------------------------------------------------------------------------------------


def saved_halfway(world: World, case: Case, tensor: int) -> Any:
    mesh = Mesh.over(world, tensor=tensor)
    run = assembled(case, mesh)
    train(case, run, mesh, STEPS // 2)
    return run.engine.state()


def gone_on(world: World, case: Case, tensor: int, saved: Any) -> Outcome:
    mesh = Mesh.over(world, tensor=tensor)
    run = assembled(case, mesh, seed=99)
    run.engine.load(*saved)
    return train(case, run, mesh, STEPS // 2, STEPS // 2)


@pytest.mark.parametrize(("ranks", "tensor", "later"), [(2, 2, 1), (2, 1, 2)])
def test_a_run_goes_on_with_its_blocks_shared_otherwise(ranks: int, tensor: int, later: int) -> None:
    case = Case("modernbert", optimizer="adamw", clip_norm=None)
    first, second = run_distributed(saved_halfway, ranks, case, tensor)
    if tensor > 1:
        assert not second[0]["model"], "the others hold whole tensors as well"
    expected = alone(case)
    plain = model_of(case).state_dict()
    assert {name: tensor.shape for name, tensor in first[0]["model"].items()} == {k: v.shape for k, v in plain.items()}
    for found in run_distributed(gone_on, 2, case, later, first):
        assert found.losses == pytest.approx(expected.losses[STEPS // 2 :], rel=1e-5)


def test_what_ranks_keep_is_put_together_again_to_the_bit() -> None:
    case = Case("modernbert")
    saved = run_distributed(saved_halfway, 2, case, 2)[0]
    again = run_distributed(loaded, 2, case, saved)[0]
    for stem, tensors in saved[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, again[0][stem][name]), name


def loaded(world: World, case: Case, saved: Any) -> Any:
    run = assembled(case, Mesh.over(world, tensor=2), seed=99)
    run.engine.load(*saved)
    return run.engine.state()


def drifted(world: World) -> str:
    run = assembled(Case(), Mesh.over(world, tensor=2))
    norm = next(module for module in run.build.model.modules() if isinstance(module, nn.LayerNorm))
    with torch.no_grad():
        norm.weight[3] += 1e-6 * world.rank
    with pytest.raises(ModelError) as caught:
        run.engine.state()
    return str(caught.value)


def test_ranks_that_have_come_to_differ_save_no_checkpoint() -> None:
    for told in run_distributed(drifted, 2):
        assert "ranks have come to differ" in told


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(world: World, case: Case) -> str:
    with pytest.raises(RecipeError) as caught:
        assembled(case, Mesh.over(world, tensor=world.size))
    return str(caught.value)


@pytest.mark.parametrize(
    ("case", "ranks", "words"),
    [
        (Case("bert", (("num_attention_heads", 2),)), 4, "2 attention heads.*no multiple of 4.*parallel.tensor=2"),
        (Case("bert", (("intermediate_size", 63),)), 2, "63 columns of its MLP.*parallel.tensor=1"),
        (Case("llama", (("num_key_value_heads", 1),)), 2, "1 attention heads.*parallel.tensor=1"),
        (Case("gpt2"), 2, "GPT2Block.*not an attention and an MLP of plain linear layers"),
        (Case("resnet"), 2, "ResNet.*not an attention and an MLP"),
    ],
)
def test_blocks_that_cannot_be_cut_are_refused(case: Case, ranks: int, words: str) -> None:
    for told in run_distributed(refused, ranks, case):
        assert re.search(words, told, re.DOTALL), told


def cut_wrongly(world: World) -> str:
    """The two halves of a gated MLP cut as if they were one."""
    from paceline.strategies.tensor import cut, find

    def as_one(*given: Any) -> Any:
        return [replace(pair, parts=1) if pair.heads is None else pair for pair in find.pairs_of(*given) or ()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut, "pairs_of", as_one)
        return refused(world, Case("modernbert"))


def test_a_cut_that_computes_something_else_is_refused() -> None:
    for told in run_distributed(cut_wrongly, 2):
        assert "it is another model" in told


def cut_without_room(world: World) -> tuple[str, ...]:
    """The last rank is out of memory while the whole model computes."""
    full = mock.Mock(side_effect=torch.OutOfMemoryError("no room"))
    with mock.patch.object(strategy, "trial_of", full) if world.rank else contextlib.nullcontext():
        return assembled(Case(), Mesh.over(world, tensor=world.size)).build.notices


def test_a_comparison_without_room_is_told_and_no_rank_waits() -> None:
    for notices in run_distributed(cut_without_room, 2):
        assert strategy.NOT_COMPARED in notices


def test_one_process_has_nothing_to_share_and_is_left_as_it_is() -> None:
    assert assembled(Case(), Mesh.over(Alone())).build.model.state_dict().keys() == model_of(Case()).state_dict().keys()
