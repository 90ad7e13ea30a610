"""A model whose blocks are stages on several ranks is trained as one process trains it: losses, norms and weights."""

from __future__ import annotations

import contextlib
import itertools
import re
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.contract.errors import RecipeError
from paceline.data.order import OrderState, ShuffledOrder
from paceline.models.structure import blocks
from paceline.prepare.assemble import Assembled, assemble, assemble_build
from paceline.recipe import Recipe
from paceline.seams import Mesh, World
from paceline.strategies.pipeline import strategy
from paceline.tasks import task_for
from tests.parity import reference
from tests.parity.test_tensor import STEPS, TOLERANCE, Case, data_of, model_of
from tests.parity.tiny_families import text_families
from tests.testing.distributed import run_distributed

DEEP = (("num_hidden_layers", 4),)
"""Of BERT: a block for each of four stages."""


@dataclass(frozen=True)
class Cut:
    """How many stages, in which order."""

    stages: int = 2
    schedule: str = "1f1b"


@dataclass(frozen=True)
class Outcome:
    """Of a few steps."""

    losses: list[float]
    correct: list[float]
    norms: list[float]
    logits: Tensor
    """[8, C]: of an evaluation behind them, on every rank."""
    weights: dict[str, Tensor]
    """Whole, on the first rank."""
    held: dict[str, int]
    """Bytes behind each weight on this rank."""
    execution: dict[str, str]


def recipe_of(case: Case, cut: Cut) -> Recipe:
    parallel = {"pipeline": cut.stages, "schedule": cut.schedule} if cut.stages > 1 else {}
    return Recipe.parse({**case.recipe().plain(), "parallel": parallel})


def assembled(case: Case, cut: Cut, mesh: Mesh, seed: int = 5, model: nn.Module | None = None) -> Assembled:
    chosen, data = recipe_of(case, cut), data_of(case)
    model = model_of(case, seed) if model is None else model
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
    losses, norms, correct = [], [], []
    for step in range(first + steps):
        if step >= first:
            plan = order.plan(at, mesh.data.rank, mesh.data.size)
            batches = [run.build.layout.collate(ids) for ids in plan.microbatches]
            done = run.engine.accumulate_batches(batches, len(plan.samples), step=step)
            norms.append(run.engine.update().norm.item())
            losses.append(mesh.data.all_reduce(done.loss.clone()).item())
            correct.append(mesh.data.all_reduce(torch.stack(list(done.extras)).sum()).item())
        at = order.after(at)
    logits = run.engine.infer(run.build.layout.collate(np.arange(8))).clone()
    whole = {name: tensor.clone() for name, tensor in run.engine.whole().items()}
    held = {name: p.untyped_storage().nbytes() for name, p in run.build.model.named_parameters()}
    return Outcome(losses, correct, norms, logits, whole, held, dict(run.build.execution))


def together(world: World, case: Case, cut: Cut) -> Outcome:
    mesh = Mesh.over(world, pipe=cut.stages)
    return train(case, assembled(case, cut, mesh, seed=5 + world.rank), mesh)  # ranks begin with other weights


def alone(case: Case) -> Outcome:
    return train(case, assembled(case, Cut(1), Mesh()), Mesh())


def assert_same(found: list[Outcome], expected: Outcome, tolerance: float = TOLERANCE) -> None:
    first = found[0]
    assert first.weights.keys() == expected.weights.keys()
    for one in found:
        assert one.losses == pytest.approx(expected.losses, rel=tolerance)
        assert one.correct == expected.correct
        assert one.norms == pytest.approx(expected.norms, rel=10 * tolerance)
        assert one.norms == first.norms, "ranks clip by different norms"
        assert torch.equal(one.logits, first.logits), "ranks have different logits"
    assert torch.allclose(first.logits, expected.logits, rtol=1e-4, atol=1e-5)
    for name, weight in expected.weights.items():
        away = float((first.weights[name] - weight).abs().max())
        assert away < tolerance, f"{name} is {away:.1e} from one process's"


FAMILIES = ["bert", "distilbert", "roberta", "xlm-roberta", "electra", "modernbert", "vit", "gpt2", "llama", "mixtral"]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_train_as_one_process(family: str) -> None:
    case = Case(family)
    found = run_distributed(together, 2, case, Cut())
    assert_same(found, alone(case))
    for name in found[0].held:
        assert min(one.held[name] for one in found) == 4, f"{name} is kept by both"


def trained_or_refused(world: World, case: Case, cut: Cut) -> Outcome | str:
    try:
        return together(world, case, cut)
    except RecipeError as refused:
        return str(refused)


@pytest.mark.slow
@pytest.mark.parametrize("family", text_families())
def test_every_family_trains_in_stages_or_is_refused(family: str) -> None:
    case = Case(family)
    try:
        expected = alone(case)
    except Exception as error:
        pytest.skip(f"not trained in one process either: {type(error).__name__}")
    found = run_distributed(trained_or_refused, 2, case, Cut())
    if isinstance(found[0], str):
        assert all(isinstance(one, str) and "parallel.pipeline" in one for one in found), found
    else:
        assert_same(found, expected, 1e-5)


SCHEDULES = ("gpipe", "1f1b", "interleaved")
MICRO_BATCHES = (None, 3, 1)
EACH_ONCE = tuple(zip(SCHEDULES, MICRO_BATCHES, strict=True))
"""Of the pairs of both; `make test-full` tries them all."""


@pytest.mark.parametrize(
    ("schedule", "micro_batch_size"),
    [
        pair if pair in EACH_ONCE else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.product(SCHEDULES, MICRO_BATCHES)
    ],
)
def test_every_schedule_trains_as_one_process(schedule: str, micro_batch_size: int | None) -> None:
    # of ten samples in threes the last is one; with all in one pass it is the naive model parallel
    case = Case("bert", DEEP, micro_batch_size=micro_batch_size)
    assert_same(run_distributed(together, 2, case, Cut(schedule=schedule)), alone(case))


def test_four_stages_train_as_one_process() -> None:
    case = Case("bert", DEEP, micro_batch_size=2)
    assert_same(run_distributed(together, 4, case, Cut(4)), alone(case))


@pytest.mark.parametrize(
    ("schedule", "batch_size"), [pytest.param("gpipe", 10, marks=pytest.mark.slow), ("1f1b", 10), ("1f1b", 3)]
)
def test_four_ranks_are_two_shares_of_the_batch_by_two_stages(schedule: str, batch_size: int) -> None:
    # 64 samples by tens leave an uneven tail, by threes a step of one, of which one share has none
    case = Case("bert", batch_size=batch_size)
    found = run_distributed(together, 4, case, Cut(schedule=schedule))
    assert_same(found, alone(case))
    ddp = run_distributed(together, 2, case, Cut(1))
    assert_same(found, ddp[0])


WAYS = {
    "packed": Case(techniques=(("packing", True),)),
    "packed, pooled early": Case("bert", techniques=(("packing", True), ("early_pooling", True))),
    "packed, query, key and value joined": Case("bert", techniques=(("packing", True), ("fused_qkv", True))),
    "recomputed": Case("bert", techniques=(("recompute", True),)),
    "autocast": Case("bert", techniques=(("precision", "bf16"),)),
    "weights in bf16": Case("modernbert", techniques=(("precision", "pure_bf16"), ("packing", True))),
    "no clipping": Case(clip_norm=None),
    "AdamW": Case("bert", optimizer="adamw", clip_norm=None),
    "steps of three samples": Case(batch_size=3, micro_batch_size=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_stages_go_with(way: str) -> None:
    case = WAYS[way]
    found = run_distributed(together, 2, case, Cut())
    assert_same(found, alone(case), 1e-5 if case.optimizer == "adamw" else TOLERANCE)
    packed = ("packing", True) in case.techniques
    assert found[0].execution["layout"] == ("packed" if packed else "padded")
    assert found[0].execution["early_pooling"] == ("the last block" if way == "packed, pooled early" else "off")


def one_stage_overflows(world: World) -> tuple[bool, bool, list[str]]:
    """Whether the update was made where one stage's gradients are infinite, and after it; which weights changed."""
    case, mesh = Case("bert", optimizer="adamw"), Mesh.over(world, pipe=2)
    run = assembled(case, Cut(), mesh)
    before = {name: p.detach().clone() for name, p in run.build.model.named_parameters()}
    batches = [run.build.layout.collate(np.arange(first, first + 3)) for first in (0, 3)]
    run.engine.accumulate_batches(batches, 6)
    if world.rank == 1:
        next(p.grad for p in run.build.model.parameters() if p.grad is not None).fill_(torch.inf)
    skipped = run.engine.update().finite.item()
    changed = [name for name, p in run.build.model.named_parameters() if not torch.equal(p, before[name])]
    run.engine.accumulate_batches(batches, 6)
    return bool(skipped), bool(run.engine.update().finite.item()), changed


def test_all_stages_skip_an_update_that_is_not_finite_on_one() -> None:
    for made, later, changed in run_distributed(one_stage_overflows, 2):
        assert not made
        assert not changed
        assert later


DROPOUT = (("hidden_dropout_prob", 0.2), ("attention_probs_dropout_prob", 0.2))


def masks(world: World, case: Case) -> tuple[list[float], list[Tensor]]:
    """Losses, and the random numbers behind each dropout of the first block that this rank passes."""
    mesh, seen = Mesh.over(world, pipe=2), []
    run = assembled(case, Cut(), mesh)
    drop = torch.nn.functional.dropout

    def watched(hidden: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if training and p:
            seen.append(torch.get_rng_state().clone())
        return drop(hidden, p, training, inplace)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", watched)
        done = train(case, run, mesh, 2)
    return done.losses, seen[:8]


def test_stages_draw_dropout_of_their_own_and_recompute_the_same() -> None:
    case = Case("bert", DROPOUT)
    (losses, first), (_, second) = run_distributed(masks, 2, case)
    assert first
    assert second
    assert not any(torch.equal(one, other) for one in first for other in second), "stages draw the same masks"
    recomputed = run_distributed(masks, 2, replace(case, techniques=(("recompute", True),)))
    assert recomputed[0][0] == pytest.approx(losses, rel=1e-6)
    assert alone(case).losses[:2] != pytest.approx(losses, rel=1e-4), "nothing was dropped"


# -- in and out --------------------------------------------------------------------------------------------------------


def saved_halfway(world: World, case: Case, cut: Cut) -> Any:
    mesh = Mesh.over(world, pipe=cut.stages)
    run = assembled(case, cut, mesh)
    train(case, run, mesh, STEPS // 2)
    return run.engine.state()


def gone_on(world: World, case: Case, cut: Cut, saved: Any) -> Outcome:
    mesh = Mesh.over(world, pipe=cut.stages)
    run = assembled(case, cut, mesh, seed=99)
    run.engine.load(*saved)
    return train(case, run, mesh, STEPS // 2, STEPS // 2)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Cut(), Cut(1)),
        pytest.param(Cut(1), Cut(), marks=pytest.mark.slow),
        (Cut(), Cut(schedule="interleaved")),
    ],
)
def test_a_run_goes_on_over_other_stages(before: Cut, after: Cut) -> None:
    case = Case("bert", DEEP, optimizer="adamw", clip_norm=None)
    first, second = run_distributed(saved_halfway, 2, case, before)
    if before.stages > 1:
        assert not second[0]["model"], "the others hold whole models as well"
    plain = model_of(case).state_dict()
    assert {name: tensor.shape for name, tensor in first[0]["model"].items()} == {k: v.shape for k, v in plain.items()}
    for found in run_distributed(gone_on, 2, case, after, first):
        assert found.losses == pytest.approx(alone(case).losses[STEPS // 2 :], rel=1e-5)


def loaded(world: World, case: Case, saved: Any) -> Any:
    run = assembled(case, Cut(), Mesh.over(world, pipe=2), seed=99)
    run.engine.load(*saved)
    return run.engine.state()


def test_what_stages_keep_is_put_together_again_to_the_bit() -> None:
    case = Case("modernbert", optimizer="adamw")
    saved = run_distributed(saved_halfway, 2, case, Cut())[0]
    again = run_distributed(loaded, 2, case, saved)[0]
    assert saved[0]["optimizer"]
    for stem, tensors in saved[0].items():
        assert tensors.keys() == again[0][stem].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, again[0][stem][name]), name


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(world: World, case: Case, cut: Cut, factory: Any = None) -> str:
    with pytest.raises(RecipeError) as caught:
        assembled(case, cut, Mesh.over(world, pipe=world.size), model=factory and factory(case))
    return str(caught.value)


def tied(case: Case) -> nn.Module:
    model: Any = model_of(case)
    layers = model.bert.encoder.layer
    layers[1].output.dense.weight = layers[0].output.dense.weight
    return model


def normed_between(case: Case) -> nn.Module:
    """Something with weights between two blocks."""
    model: Any = model_of(case)
    between = nn.LayerNorm(32)
    model.bert.encoder.layer[1].register_forward_pre_hook(lambda _, args: (between(args[0]), *args[1:]))
    model.bert.between = between
    return model


@pytest.mark.parametrize(
    ("case", "cut", "ranks", "words"),
    [
        (Case("bert"), Cut(4), 4, "has 2 blocks, and each of 4 stages.*parallel.pipeline=2"),
        (Case("bert"), Cut(2, "interleaved"), 2, "has 2 blocks, and each of 4 stages.*parallel.schedule=1f1b"),
        (Case("bert", (("num_hidden_layers", 3),)), Cut(4), 4, "has 3 blocks.*parallel.pipeline=2"),
        (Case("albert"), Cut(), 2, "has 1 block, .*parallel.pipeline=1"),
        (Case("flaubert"), Cut(), 2, "a LayerNorm is run between two blocks"),
        (Case("lilt"), Cut(), 2, "hands on more than its hidden states"),
        (Case("mpnet"), Cut(), 2, "in 2 stages it is another model"),  # each block is given one bias of all
        (Case("resnet"), Cut(), 2, "batch norms.*running statistics"),
        (Case("bert", train="head"), Cut(), 2, "stage 1 of 2 has nothing to train"),
    ],
)
def test_models_that_have_no_stages_are_refused(case: Case, cut: Cut, ranks: int, words: str) -> None:
    for told in run_distributed(refused, ranks, case, cut):
        assert re.search(words, told, re.DOTALL), told


@pytest.mark.parametrize(
    ("factory", "words"),
    [(tied, "are one weight, of stages 1 and 2"), (normed_between, "LayerNorm is run between two blocks")],
)
def test_weights_of_two_stages_and_between_them_are_refused(factory: Any, words: str) -> None:
    for told in run_distributed(refused, 2, Case("bert"), Cut(), factory):
        assert re.search(words, told, re.DOTALL), told


def staged_wrongly(world: World) -> str:
    """The second stage begins a block late."""
    from paceline.strategies.pipeline import stage

    right = stage._Gate.__call__

    def wrong(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = right(self, *args, **kwargs)
        return output * 1.001 if isinstance(output, Tensor) else output

    with mock.patch.object(stage._Gate, "__call__", wrong):
        return refused(world, Case("bert"), Cut())


def test_stages_that_compute_something_else_are_refused() -> None:
    for told in run_distributed(staged_wrongly, 2):
        assert "in 2 stages it is another model" in told


def cut_without_room(world: World) -> tuple[str, ...]:
    """The last rank is out of memory while the whole model computes."""
    full = mock.Mock(return_value=None)
    with mock.patch.object(strategy, "_plain_results", full) if world.rank else contextlib.nullcontext():
        return assembled(Case("bert"), Cut(), Mesh.over(world, pipe=2)).build.notices


def test_a_comparison_without_room_is_told_and_no_rank_waits() -> None:
    for notices in run_distributed(cut_without_room, 2):
        assert strategy.NOT_COMPARED in notices


def notices(world: World, case: Case) -> tuple[str, ...]:
    return assembled(case, Cut(), Mesh.over(world, pipe=2)).build.notices


def test_one_micro_batch_is_told_to_keep_one_stage_busy_at_a_time() -> None:
    naive = run_distributed(notices, 2, Case("bert", micro_batch_size=None))[0]
    assert any("has 1 micro-batch, so one stage computes while the others wait" in told for told in naive)
    assert not any("micro-batch" in told for told in run_distributed(notices, 2, Case("bert"))[0])
