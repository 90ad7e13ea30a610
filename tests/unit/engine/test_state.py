import pytest
import torch
from torch import nn

from paceline.contract.errors import CheckpointError
from paceline.optim.state import copy_into, optimizer_numbers, optimizer_tensors, prime, put_numbers, without_wrappers


def test_wrappers_prefixes_are_taken_off_anywhere_in_a_name() -> None:
    compiled = {"_orig_mod.body.weight": 1, "head._orig_mod.bias": 2, "a.module.b": 3, "my_module.c": 4}
    assert without_wrappers(compiled) == {"body.weight": 1, "head.bias": 2, "a.module.b": 3, "my_module.c": 4}
    parallel = {"module._orig_mod.body.weight": 1, "module.module.b": 2}
    assert without_wrappers(parallel) == {"body.weight": 1, "module.b": 2}


def test_loading_copies_in_place() -> None:
    current = torch.zeros(3)
    pointer = current.data_ptr()
    copy_into({"w": current}, {"module.w": torch.ones(3)}, "model")
    assert current.data_ptr() == pointer
    assert current.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("saved", [{}, {"w": torch.ones(4)}, {"w": torch.ones(3), "v": torch.ones(1)}])
def test_another_models_tensors_are_refused_before_anything_is_copied(saved) -> None:
    current = torch.zeros(3)
    with pytest.raises(CheckpointError, match="not this run's"):
        copy_into({"w": current}, saved, "model")
    assert current.sum() == 0


@pytest.mark.parametrize("names", [("module.w", "module.v"), ("w", "module.v"), ("module._orig_mod.w", "module.v")])
def test_a_model_with_a_submodule_called_module_takes_its_own_state_back(names) -> None:
    current = {name: torch.zeros(2) for name in names}
    copy_into(current, {name: torch.ones(2) for name in names}, "model")
    assert all(tensor.sum() == 2 for tensor in current.values())


def test_states_that_are_plain_numbers_come_back() -> None:
    weight = nn.Parameter(torch.ones(2))
    one, other = (torch.optim.SGD([weight], lr=0.1) for _ in range(2))
    one.state[weight], other.state[weight] = {"step": 7, "state1": torch.ones(2)}, {"step": 1, "state1": torch.ones(2)}
    numbers = optimizer_numbers(one, {weight: "w"})
    assert numbers == {"w.step": 7}
    put_numbers(other, {weight: "w"}, numbers)
    assert other.state[weight]["step"] == 7


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_primed_optimizer_has_every_state_a_stepped_one_has(kind) -> None:
    settings = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    stepped, primed = nn.Linear(2, 2), nn.Linear(2, 2)
    found = []
    for module, optimizer in (
        (stepped, kind(stepped.parameters(), lr=0.1, **settings)),
        (primed, kind(primed.parameters(), lr=0.1, **settings)),
    ):
        if module is stepped:
            module(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        else:
            prime(optimizer)
        found.append(sorted(optimizer_tensors(optimizer, {p: n for n, p in module.named_parameters()})))
    assert found[0] == found[1] != []
