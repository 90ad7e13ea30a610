"""A sharded model on 2 and 4 gloo processes: its memory, its checkpoints in other numbers of ranks, and mishaps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.contract.errors import RecipeError, UserError
from paceline.optim.flat import ALIGNMENT
from paceline.optim.state import without_wrappers
from paceline.prepare.assemble import Assembled
from paceline.seams import Alone, Build, Mesh, World
from paceline.strategies import strategy_for
from paceline.strategies.fsdp.shard import abandon, apply_fsdp, load_whole, mesh_of, whole
from tests.parity import driving, reference
from tests.parity.test_fsdp import TOTAL, Case, built, model_of, sharded, shares
from tests.testing.distributed import run_distributed

# -- memory ------------------------------------------------------------------------------------------------------------


def states(run: Assembled) -> dict[str, int]:
    """Bytes of what this rank keeps between steps: memory that is there, not what tensors say of themselves."""
    updates: Any = run.engine._step.updates  # type: ignore[attr-defined]
    parameters = list(run.build.model.parameters())
    names = {parameter: name for name, parameter in run.build.model.named_parameters()}
    found = {
        "weights": [_local(parameter) for parameter in parameters],
        "gradients": [_local(parameter.grad) for parameter in parameters if parameter.grad is not None],
        "states": [_local(tensor) for tensor in updates.tensors(names).values() if tensor.ndim],
    }
    return {
        what: sum(
            {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values()
        )
        for what, tensors in found.items()
    }


def _local(tensor: Any) -> Tensor:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def bytes_after_a_step(world: World) -> tuple[dict[str, int], dict[str, int]]:
    case = Case(dtype=torch.float32)
    one, other = driving.assembled(model_of(case), case.recipe(), TOTAL), sharded(world, case)
    for run, rank, size in ((one, 0, 1), (other, world.rank, world.size)):
        ids, counted = shares(case, rank, size, 1)[0]
        run.engine.accumulate_batches([run.build.layout.collate(each) for each in ids], counted)
        run.engine.update()
    return states(one), states(other)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_keeps_its_share_of_weights_gradients_and_states(ranks: int) -> None:
    found = run_distributed(bytes_after_a_step, ranks)
    for rank, (one, shard) in enumerate(found):
        for what, size in shard.items():
            # in a flat buffer each begins at a multiple of some bytes: a twentieth of this small model
            aligned = len(list(model_of(Case()).parameters())) * ALIGNMENT * 4 if what == "gradients" else 0
            assert size <= 1.1 * one[what] / ranks + aligned, f"rank {rank} keeps {size} of {one[what]} bytes of {what}"
    assert sum(shard["weights"] for _, shard in found) >= found[0][0]["weights"], "not all of it is kept"


# -- checkpoints -------------------------------------------------------------------------------------------------------

State = tuple[dict[str, dict[str, Tensor]], dict[str, Any]]


def saved(run: Assembled) -> State:
    """The engine's state in one piece."""
    engine: Any = run.engine
    pieces = {"model": engine._named(), "optimizer": engine._step.updates.tensors(engine._names())}
    # on every rank, where ``state`` gives the first one alone what it collects
    return {stem: {name: t.clone() for name, t in whole(named)} for stem, named in pieces.items()}, engine.state()[1]


def trained(world: World, case: Case, first: int, last: int, state: State | None) -> State:
    """Steps ``first`` to ``last``, on shards or, alone, without; from a state that any number of ranks has saved."""
    alone = driving.assembled(model_of(case), case.recipe(), TOTAL) if world.size == 1 else None
    run = alone or sharded(world, case)
    if state is not None:
        run.engine.load(*state)
    for step, (ids, counted) in list(enumerate(shares(case, world.rank, world.size, last)))[first:]:
        run.engine.accumulate_batches([run.build.layout.collate(each) for each in ids], counted, step=step)
        run.engine.update()
    return saved(run)


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
def test_saved_by_four_goes_on_with_two_and_then_alone(optimizer: str) -> None:
    case = Case(optimizer=optimizer)
    expected = trained(Alone(), case, 0, 5, None)
    by_four = run_distributed(trained, 4, case, 0, 2, None)
    assert_same(by_four[0], by_four[3], 0)
    by_two = run_distributed(trained, 2, case, 2, 4, by_four[0])
    found = trained(Alone(), case, 4, 5, by_two[1])
    assert_same(expected, found, 1e-12)
    # and back into shards of which some are empty: three classes on four ranks
    again = run_distributed(trained, 4, case, 5, 5, found)
    assert_same(found, again[2], 0)


def assert_same(one: State, other: State, tolerance: float) -> None:
    for stem, named in one[0].items():
        assert named.keys() == other[0][stem].keys(), f"{stem} has other names"
        for name, tensor in named.items():
            torch.testing.assert_close(other[0][stem][name], tensor, rtol=0, atol=tolerance, msg=f"{stem}: {name}")
    assert one[1]["applied"] == other[1]["applied"]


def cut_and_joined(world: World, shape: tuple[int, ...]) -> tuple[list[int], bool]:
    """Whole tensors into shards and out again."""
    layer = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(shape))})
    apply_fsdp(layer, [], mesh_of(torch.device("cpu"), world.size, world.size))
    there = torch.arange(float(np.prod(shape))).view(shape)
    load_whole(dict(layer.named_parameters()), {"weight": there})
    back = dict(whole(layer.named_parameters()))["weight"]
    return list(_local(layer["weight"]).shape), torch.equal(back, there)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8])
def test_lengths_that_ranks_do_not_divide(length: int) -> None:
    found = run_distributed(cut_and_joined, 4, (length, 3))
    assert all(is_equal for _, is_equal in found), "what was put in is not what comes out"
    assert sum(shape[0] for shape, _ in found) == length


def written(world: World, folder: Path) -> list[list[float]]:
    """Train a little, write the model by rank 0, and return the logits of the rank's own model."""
    case = Case(dtype=torch.float32)
    run = sharded(world, case)
    ids, counted = shares(case, world.rank, world.size, 1)[0]
    run.engine.accumulate_batches([run.build.layout.collate(each) for each in ids], counted)
    run.engine.update()
    weights = run.engine.whole()
    assert bool(weights) == world.is_first
    if world.is_first:
        run.build.model.save_pretrained(folder, state_dict=weights)
    return run.engine.infer(run.build.layout.collate(np.arange(4))).tolist()


def test_the_model_is_written_as_any_other(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    logits = run_distributed(written, 2, tmp_path)
    assert logits[0] == logits[1]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(model).__name__ == "DistilBertForSequenceClassification"
    assert model.config.architectures == ["DistilBertForSequenceClassification"]
    texts, _ = reference.samples()
    with torch.no_grad():
        found = model.eval()(**reference.padded(texts[:4])).logits
    torch.testing.assert_close(found, torch.tensor(logits[0]), rtol=1e-5, atol=1e-6)


def other_weights(world: World) -> tuple[list[float], list[float]]:
    """Logits after an evaluation, then with other weights; and what a model that always had them gives."""
    case = Case()
    run, doubled = sharded(world, case), {n: t * 2 for n, t in without_wrappers(model_of(case).state_dict()).items()}
    batch = run.build.layout.collate(np.arange(3))
    run.engine.infer(batch)
    load_whole(run.engine._named(), doubled)
    plain = model_of(case).eval()
    plain.load_state_dict(doubled)
    with torch.no_grad():
        expected = plain(**batch.inputs).logits
    return run.engine.infer(batch).flatten().tolist(), expected.flatten().tolist()


def test_an_evaluation_sees_weights_loaded_after_another() -> None:
    for found, expected in run_distributed(other_weights, 2):
        assert found == pytest.approx(expected, rel=1e-12)


# -- mishaps -----------------------------------------------------------------------------------------------------------


def broken_off(world: World, where: str) -> bool:
    """A step after what was broken off or never summed: equal to one that had nothing before it?"""
    case = replace(Case(), parallel=(("reduce_dtype", "bf16"),)) if where == "sums in bf16" else Case()
    planted: list[str] = []

    def breaks(_module: nn.Module, _inputs: Any) -> None:
        if planted:
            raise ArithmeticError(planted.pop())

    weights = []
    for mishap in (False, True):
        model = model_of(case)
        model.distilbert.transformer.layer[1].ffn.register_forward_pre_hook(breaks)
        run = sharded(world, case, model)
        ids, counted = shares(case, world.rank, world.size, 1)[0]
        batches = [run.build.layout.collate(each) for each in ids]
        if mishap and where == "forward":
            planted.append("planted")
            with pytest.raises(ArithmeticError, match="planted"):
                run.engine.accumulate_batches(batches, counted)
            abandon(model)
        elif mishap:
            run.engine.warm_up_on(batches[0], counted)
        run.engine.accumulate_batches(batches, counted)
        run.engine.update()
        weights.append({name: tensor.clone() for name, tensor in whole(run.engine._named())})
    return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize("where", ["forward", "warm-up", "sums in bf16"])
def test_what_was_broken_off_leaves_no_gradient_behind(where: str) -> None:
    assert run_distributed(broken_off, 2, where) == [True, True]


def rounded(world: World) -> tuple[float, float]:
    """How far the gradients that were summed in bf16 are from those in fp32, of their norm; and the numbers' format."""
    gradients = []
    for reduce_dtype in ("fp32", "bf16"):
        case = Case(dtype=torch.float32, parallel=(("reduce_dtype", reduce_dtype),), micro_batch_size=2)
        run = sharded(world, case)
        ids, counted = shares(case, world.rank, world.size, 1)[0]
        run.engine.accumulate_batches([run.build.layout.collate(each) for each in ids], counted)
        found = whole((name, p.grad) for name, p in run.build.model.named_parameters() if p.grad is not None)
        gradients.append(torch.cat([tensor.flatten() for _, tensor in found]))
    assert gradients[1].dtype == torch.float32
    return ((gradients[0] - gradients[1]).norm() / gradients[0].norm()).item()


def test_sums_in_bf16_are_rounded_and_no_worse() -> None:
    for distance in run_distributed(rounded, 2):
        assert 1e-5 < distance < 2**-8


def prepared(world: World, model: nn.Module, **part: Any) -> Build:
    case = Case(parallel=tuple(part.items()))
    return strategy_for(case.sharded(), Mesh.over(world)).prepare(built(Case(), model))


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def refused(world: World) -> list[str]:
    messages = []
    with pytest.raises(RecipeError) as found:
        prepared(world, model_of(Case()), shard_size=3)
    messages.append(str(found.value))
    model = model_of(Case())
    model.temperature = nn.Parameter(torch.ones(()))
    with pytest.raises(RecipeError) as found:
        prepared(world, model)
    assert not is_sharded(model), "it is left half sharded"
    messages.append(str(found.value))
    model = model_of(Case())
    model.distilbert.embeddings.to(torch.bfloat16)
    with pytest.raises(RecipeError, match="several number formats"):
        prepared(world, model)
    for tied in ("transformer.layer.1.attention.q_lin", "embeddings.LayerNorm"):
        model = model_of(Case())
        first = model.distilbert.transformer.layer[0]
        other = model.distilbert.get_submodule(tied)
        other.weight = first.attention.q_lin.weight if "q_lin" in tied else first.sa_layer_norm.weight
        with pytest.raises(RecipeError) as found:
            prepared(world, model)
        messages.append(str(found.value))
    run = sharded(world, Case())
    assert is_sharded(run.build.model)
    ids, counted = shares(Case(), world.rank, world.size, 1)[0]
    run.engine.accumulate_batches([run.build.layout.collate(each) for each in ids], counted)
    next(iter(run.engine._step.updates._shards.values())).grad = None  # type: ignore[attr-defined]
    with pytest.raises(UserError) as gone:
        run.engine.update()
    messages.append(str(gone.value))
    return messages


def test_what_cannot_be_sharded_says_so() -> None:
    for messages in run_distributed(refused, 2):
        assert "parallel.shard_size = 3" in messages[0]
        assert "2 ranks" in messages[0]
        assert "temperature" in messages[1]
        assert "(1,)" in messages[1]
        assert "layer.0.attention.q_lin.weight and distilbert.transformer.layer.1.attention.q_lin.weight" in messages[2]
        assert "distilbert.embeddings.LayerNorm.weight and distilbert.transformer.layer.0.sa_layer_norm" in messages[3]
        assert "no longer the engine's" in messages[4]


class Twice(nn.Module):
    """A block that is passed through twice, as models do that share one block over all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.block(self.block(hidden).tanh()))


def shared(world: World) -> float:
    torch.manual_seed(0)
    model, one = Twice(), Twice()
    one.load_state_dict(model.state_dict())
    apply_fsdp(model, [model.block, model.block], mesh_of(torch.device("cpu"), world.size, world.size))
    model(torch.ones(2, 4)).sum().backward()
    one(torch.ones(2, 4)).sum().backward()
    found = whole((name, parameter.grad) for name, parameter in model.named_parameters())
    return max((tensor - world.size * one.get_parameter(name).grad).abs().max().item() for name, tensor in found)


def test_a_block_that_is_used_twice_has_the_sum_of_both() -> None:
    assert run_distributed(shared, 2) == pytest.approx([0, 0], abs=1e-6)
