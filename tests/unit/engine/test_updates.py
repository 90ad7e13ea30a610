"""Which updates a recipe gets, and that every kind keeps the same names in a checkpoint."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from torch import nn

from paceline.contract.errors import CheckpointError
from paceline.optim.gradients import FlatGradients, Gradients
from paceline.optim.optimizer import ParameterGroup, build_optimizer, parameter_groups
from paceline.optim.state import copy_into
from paceline.optim.updates import DeviceGated, FlatAdam, FlatSgd, HostGated, Updates, build_updates
from paceline.recipe.parts import GroupPart, OptimizerPart, SchedulePart

CPU = torch.device("cpu")
# anything but a CPU gets what a GPU gets; the tensors are on the CPU all the same
GPU = torch.device("meta")


def groups(model: nn.Module, part: OptimizerPart) -> list[ParameterGroup]:
    return parameter_groups(list(model.named_parameters()), part, SchedulePart())


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def built(module: nn.Module, kind: str = "adamw", device: torch.device = GPU) -> tuple[Updates, Gradients]:
    part = OptimizerPart(type=kind, groups=(GroupPart(match="2.*"),))
    found = groups(module, part)
    return build_updates(found, part, np.full((9, len(found)), 0.1), device)


def names(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def step(module: nn.Module, updates: Updates, gradients: Gradients, finite: bool = True) -> None:
    gradients.add(module(torch.ones(3, 4)).square().sum(), first=True, last=True)
    updates.apply(gradients, torch.tensor(0.5), torch.tensor(finite))


@pytest.mark.parametrize(
    ("kind", "device", "expected"),
    [
        ("adamw", CPU, HostGated),
        ("sgd", CPU, HostGated),
        ("adamw", GPU, FlatAdam),
        ("adam", GPU, FlatAdam),
        ("sgd", GPU, FlatSgd),
    ],
)
def test_the_updates_of_a_recipe(kind: str, device: torch.device, expected: type) -> None:
    updates, gradients = built(module := model(), kind, device)
    assert type(updates) is expected
    assert type(gradients) is FlatGradients
    assert {id(p) for p in updates.parameters} == {id(p) for p in module.parameters()}


def test_what_can_be_captured_and_why_not() -> None:
    module = model()
    host, _ = built(module, device=CPU)
    assert host.capturable == "AdamW reads its gate on the host"
    assert built(module)[0].capturable is None
    rates = np.full((2, 1), 0.1)
    plain = torch.optim.AdamW(module.parameters(), fused=True)
    assert DeviceGated(plain, rates, CPU).capturable == "AdamW was made without capturable=True"
    for kind in ("adam", "adamw", "sgd"):
        part = OptimizerPart(type=kind, decay_all=True)
        fused = build_optimizer(groups(module, part), part, fused=True)
        assert DeviceGated(fused, rates, CPU).capturable is None


def test_states_have_torchs_names_and_shapes_and_none_before_the_first_update() -> None:
    found = {}
    for device in (CPU, GPU):
        module = model()
        updates, gradients = built(module, device=device)
        assert updates.tensors(names(module)) == {}
        step(module, updates, gradients)
        found[device] = {name: tensor.shape for name, tensor in updates.tensors(names(module)).items()}
        assert updates.numbers(names(module)) == {}
    assert found[CPU] == found[GPU]
    assert {name.rpartition(".")[2] for name in found[CPU]} == {"exp_avg", "exp_avg_sq", "step"}
    assert len(found[CPU]) == 3 * 6


@pytest.mark.parametrize("device", [CPU, GPU])
def test_primed_updates_have_every_state_that_a_first_update_leaves(device: torch.device) -> None:
    one, other = model(), model()
    stepped, gradients = built(one, device=device)
    step(one, stepped, gradients)
    primed, _ = built(other, device=device)
    primed.prime()
    assert sorted(primed.tensors(names(other))) == sorted(stepped.tensors(names(one)))


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_a_rehearsal_makes_the_states_and_changes_nothing(kind: str) -> None:
    module, part = model(), OptimizerPart(type=kind)
    found = groups(module, part)
    updates = DeviceGated(build_optimizer(found, part, fused=True), np.full((9, len(found)), 0.1), CPU)
    gradients = FlatGradients(list(module.parameters()))
    gradients.zero()
    for steps in range(3):
        before = [parameter.clone() for parameter in module.parameters()]
        states = {name: state.clone() for name, state in updates.tensors(names(module)).items()}
        updates.rehearse()
        assert all(map(torch.equal, before, module.parameters()))
        rehearsed = updates.tensors(names(module))
        assert len(rehearsed) == (1 if kind == "sgd" else 3) * len(before)
        for name, state in rehearsed.items():
            assert torch.equal(state, states.get(name, torch.zeros_like(state))), name
        assert updates.applied == steps
        step(module, updates, gradients)


@pytest.mark.parametrize("kind", ["adam", "adamw", "sgd"])
def test_a_rehearsed_update_leaves_no_tensor_that_was_not_there(kind: str) -> None:
    """Else what was captured before it is dropped: it may use the memory that the tensor has taken."""
    module, part = model(), OptimizerPart(type=kind)
    found = groups(module, part)
    updates = DeviceGated(build_optimizer(found, part, fused=True), np.full((9, len(found)), 0.1), CPU)
    gradients = FlatGradients(list(module.parameters()))
    gradients.add(module(torch.ones(3, 4)).square().sum(), first=True, last=True)
    updates.rehearse()
    factor, finite = torch.tensor(0.5), torch.tensor(True)
    before = alive()
    updates.apply(gradients, factor, finite)
    left = {place: shape for place, shape in alive().items() if place not in before}
    assert not left, f"tensors of {list(left.values())}"


def alive() -> dict[int, torch.Size]:
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, nn.Parameter)]
    return {tensor.untyped_storage().data_ptr(): tensor.shape for tensor in tensors}


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize(("old", "new"), [(CPU, GPU), (GPU, CPU), (GPU, GPU)])
def test_a_run_goes_on_from_what_the_other_kind_saved(old: torch.device, new: torch.device, kind: str) -> None:
    """torch's own layout, as in checkpoints from before there were flat buffers, and the other way round."""
    one, other = model(), model()
    updates, gradients = built(one, kind, old)
    for _ in range(3):
        step(one, updates, gradients)
    saved = {name: tensor.clone() for name, tensor in updates.tensors(names(one)).items()}
    assert all(float(tensor) == 3 for name, tensor in saved.items() if name.endswith(".step"))
    other_updates, other_gradients = built(other, kind, new)
    other_updates.prime()
    copy_into(other_updates.tensors(names(other)), saved, "optimizer")
    copy_into(other.state_dict(), one.state_dict(), "model")
    other_updates.put_numbers(names(other), updates.numbers(names(one)))
    other_updates.applied = updates.applied
    for _ in range(2):
        step(one, updates, gradients)
        step(other, other_updates, other_gradients)
    assert other_updates.applied == updates.applied == 5
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", [CPU, GPU])
def test_each_group_has_its_own_rate_and_a_skipped_update_uses_none_up(device: torch.device) -> None:
    module = model()
    part = OptimizerPart(type="sgd", momentum=0.0, nesterov=False, decay_all=True, groups=(GroupPart(match="2.*"),))
    updates, gradients = build_updates(groups(module, part), part, np.array([[1.0, 0.0], [0.0, 1.0]]), device)

    def moved(finite: bool) -> list[bool]:
        before = [parameter.clone() for parameter in module.parameters()]
        step(module, updates, gradients, finite)
        return [not torch.equal(old, now) for old, now in zip(before, module.parameters(), strict=True)]

    assert moved(finite=False) == [False] * 6
    assert moved(finite=True) == [False] * 4 + [True] * 2, "the first row: a rate for the matched group alone"
    assert moved(finite=False) == [False] * 6
    assert moved(finite=True) == [True] * 4 + [False] * 2
    assert updates.applied == 2


def test_another_runs_states_are_refused() -> None:
    module = model()
    updates, gradients = built(module)
    step(module, updates, gradients)
    saved = {name: tensor.clone() for name, tensor in updates.tensors(names(module)).items()}
    saved.pop("0.weight.exp_avg")
    with pytest.raises(CheckpointError, match=r"0\.weight\.exp_avg"):
        copy_into(updates.tensors(names(module)), saved, "optimizer")


@pytest.mark.parametrize("device", [CPU, GPU])
def test_momentum_has_torchs_name(device: torch.device) -> None:
    module = model()
    updates, gradients = built(module, "sgd", device)
    step(module, updates, gradients)
    assert sorted(updates.tensors(names(module))) == sorted(f"{n}.momentum_buffer" for n in names(module).values())


def test_mixed_number_formats_are_updated_apart() -> None:
    module = model()
    module[0].double()
    reference = model()
    reference[0].double()
    part = OptimizerPart(lr=0.1, decay_all=True)
    updates, gradients = build_updates(groups(module, part), part, np.full((4, 1), 0.1), GPU)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1, weight_decay=0.01)
    for _ in range(3):
        for one in (module, reference):
            loss = one[2](one[1](one[0](torch.ones(3, 4, dtype=torch.float64)).float())).square().sum()
            if one is module:
                gradients.add(loss, first=True, last=True)
                updates.apply(gradients, torch.ones(()), torch.tensor(True))
            else:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
