"""The moving average by itself and behind each kind of update: what moves it, what does not, and the way back."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.contract.errors import CheckpointError, UserError
from paceline.optim.ema import EMA, first_in_average
from paceline.optim.updates import DeviceGated, FlatAdam, HostGated, Updates
from paceline.recipe.parts import EmaPart
from tests.unit.engine.test_updates import CPU, GPU, built, step

PAGE = Path(__file__).resolve().parents[3] / "docs" / "techniques" / "ema.md"


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)).to(dtype)


def move(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def values(tensors: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize(("device", "kind"), [(CPU, HostGated), (GPU, FlatAdam)])
def test_a_skipped_step_moves_nothing_and_counts_for_nothing(device: torch.device, kind: type) -> None:
    module = net()
    updates, gradients = built(module, device=device)
    assert type(updates) is kind
    updates.keep(EmaPart(decay=0.5, every=2))
    assert updates.ema is not None
    for made in (True, True, True, True):
        step(module, updates, gradients, finite=made)
    before, weights = values(updates.ema.shadow), values(module.parameters())
    step(module, updates, gradients, finite=False)
    assert updates.ema.updates == 4
    assert all(map(torch.equal, before, updates.ema.shadow))
    assert all(map(torch.equal, weights, module.parameters()))
    step(module, updates, gradients)
    assert all(map(torch.equal, before, updates.ema.shadow)), "the fifth applied step is none of every second one"
    step(module, updates, gradients)
    assert not any(map(torch.equal, before, updates.ema.shadow)), "the sixth is"


def test_every_kind_of_update_keeps_the_same_average() -> None:
    found = []
    for device in (CPU, GPU):
        module = net()
        updates, gradients = built(module, device=device)
        updates.keep(EmaPart(decay=0.8, warmup=True))
        for _ in range(6):
            step(module, updates, gradients)
        assert updates.ema is not None
        found.append({name: average.clone() for name, average in updates.averages(_names(module)).items()})
    one, other = found
    assert one.keys() == dict(module.named_parameters()).keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)


def test_weights_in_flat_buffers_take_one_operation_a_group() -> None:
    module = net()
    updates, gradients = built(module, device=GPU)
    updates.keep(EmaPart(decay=0.5))
    step(module, updates, gradients)
    with torch.profiler.profile() as profile:
        step(module, updates, gradients)
    count = sum(event.count for event in profile.key_averages() if event.key == "aten::lerp_")
    assert count == len(updates._weight_decays) < len(list(module.parameters()))  # type: ignore[attr-defined]


def test_a_rehearsed_update_changes_nothing() -> None:
    for device in (CPU, GPU):
        module = net()
        updates, gradients = built(module, device=device)
        updates.keep(EmaPart(decay=0.5))
        for _ in range(2):
            step(module, updates, gradients)
        assert updates.ema is not None
        before = values(updates.ema.shadow)
        updates.rehearse()
        assert updates.ema.updates == 2
        assert all(map(torch.equal, before, updates.ema.shadow))


def _names(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def test_until_the_first_average_it_is_the_weights_themselves() -> None:
    model = net()
    ema = EMA(model, 0.9, every=3)
    for updates in range(1, 7):
        move(model)
        before = values(ema.shadow)
        ema.update()
        if updates <= 3:
            assert all(map(torch.equal, ema.shadow, values(ema.parameters))), updates
        elif updates < 6:
            assert all(map(torch.equal, ema.shadow, before)), updates
        else:
            for average, last, weight in zip(ema.shadow, before, ema.parameters, strict=True):
                torch.testing.assert_close(average, 0.9 * last + 0.1 * weight.detach())


def test_bf16_weights_have_an_average_in_fp32_and_come_back_with_their_bits() -> None:
    model = net(torch.bfloat16)
    ema = EMA(model, 0.99)
    exact = [parameter.detach().double() for parameter in ema.parameters]
    for index in range(30):
        move(model)
        ema.update()
        share = 1.0 if index == 0 else 0.01
        exact = [(1 - share) * e + share * p.detach().double() for e, p in zip(exact, ema.parameters, strict=True)]
    for average, expected in zip(ema.shadow, exact, strict=True):
        assert average.dtype is torch.float32
        torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-6)
    weights, averages = values(ema.parameters), values(ema.shadow)
    with ema.averaged():
        assert all(torch.equal(p, a.bfloat16()) for p, a in zip(ema.parameters, averages, strict=True))
    assert all(map(torch.equal, weights, values(ema.parameters)))
    assert all(map(torch.equal, averages, ema.shadow)), "the average was rounded"


def test_weights_are_swapped_where_they_are_and_come_back_also_after_an_error() -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    ema = EMA(model, 0.5)
    assert len(ema.parameters) == 5, "what is not trained has no average"
    for _ in range(3):
        move(model)
        ema.update()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    weights, averages = values(ema.parameters), values(ema.shadow)
    with ema.averaged():
        assert all(map(torch.equal, averages, values(ema.parameters)))
        for call in (ema.update, ema.register, ema.apply_shadow, ema.state_dict, ema.copy_to_weights):
            with pytest.raises(UserError, match=r"in the weights' place(.|\n)*restore"):
                call()
    with pytest.raises(KeyError), ema.averaged():
        raise KeyError
    assert all(map(torch.equal, weights, values(ema.parameters)))
    assert all(map(torch.equal, averages, ema.shadow))
    with pytest.raises(UserError, match="apply_shadow"):
        ema.restore()
    ema.copy_to_weights()
    assert all(map(torch.equal, averages, values(ema.parameters)))
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


def test_a_saved_average_goes_on_to_the_bit() -> None:
    model, other = net(), net()
    one = EMA(model, 0.9, warmup=True, every=2)
    for _ in range(3):
        move(model)
        one.update()
    two = EMA(other, 0.9, warmup=True, every=2)
    saved = one.state_dict()
    assert saved["updates"] == 3
    assert saved["shadow"].keys() == dict(model.named_parameters()).keys()
    two.load_state_dict({"shadow": {name: each.clone() for name, each in saved["shadow"].items()}, "updates": 3})
    other.load_state_dict(model.state_dict())
    for _ in range(4):
        move(model)
        other.load_state_dict(model.state_dict())
        one.update()
        two.update()
    assert all(map(torch.equal, one.shadow, two.shadow))
    with pytest.raises(CheckpointError, match="the average in the checkpoint"):
        two.load_state_dict({"shadow": {"0.weight": torch.zeros(1)}, "updates": 1})
    two.register()
    assert two.updates == 0
    assert all(map(torch.equal, two.shadow, values(two.parameters)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decay": 1.0}, "between 0 and 1"),
        ({"decay": 0.0}, "between 0 and 1"),
        ({"decay": 0.9, "every": 0}, "every=1"),
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EMA(net(), **settings)
    with pytest.raises(UserError, match="no parameter is trained"):
        EMA(net().requires_grad_(False), 0.9)


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    example, documents = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    model = nn.Linear(3, 2)
    seen: list[Tensor] = []
    names: dict[str, Any] = {
        "torch": torch,
        "F": F,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1.0),
        "loader": [{"x": torch.randn(4, 3), "label": torch.tensor([0, 1, 0, 1])} for _ in range(4)],
        "evaluate": lambda found: seen.append(found.weight.detach().clone()),
        "path": tmp_path / "saved",
    }
    exec(compile(example, str(PAGE), "exec"), names)
    assert not torch.equal(seen[0], model.weight)
    saved = torch.load(tmp_path / "saved", weights_only=True)
    assert torch.equal(saved["ema"]["shadow"]["weight"], seen[0])
    exec(compile(documents, str(PAGE), "exec"), names)


def test_fused_updates_of_torch_keep_an_average_too() -> None:
    """Those of FSDP's shards."""
    import numpy as np

    from paceline.optim.gradients import FlatGradients
    from paceline.optim.optimizer import build_optimizer
    from paceline.recipe.parts import OptimizerPart
    from tests.unit.engine.test_updates import groups

    module, part = net(), OptimizerPart(type="adamw")
    found = groups(module, part)
    updates: Updates = DeviceGated(build_optimizer(found, part, fused=True), np.full((9, len(found)), 0.1), CPU)
    updates.keep(EmaPart(decay=0.5))
    gradients = FlatGradients(list(module.parameters()))
    step(module, updates, gradients)
    step(module, updates, gradients)
    assert updates.ema is not None
    before = values(updates.ema.shadow)
    step(module, updates, gradients, finite=False)
    assert all(map(torch.equal, before, updates.ema.shadow))
    step(module, updates, gradients)
    assert not any(map(torch.equal, before, updates.ema.shadow))
    assert updates.ema.updates == updates.applied == 3


class DocumentsEMA:
    """The plain EMA of the tutorials: ``register`` takes the weights, and each ``update`` moves the average."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay, self.shadow = model, decay, dict[str, Tensor]()

    def register(self) -> None:
        self.shadow = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def update(self) -> None:
        for name, weight in self.model.named_parameters():
            self.shadow[name] = (1 - self.decay) * weight.detach() + self.decay * self.shadow[name]


@pytest.mark.parametrize("every", [1, 3])
def test_from_the_start_the_first_update_averages_with_what_register_took(every: int) -> None:
    module = net()
    ema, plain, replacing = EMA(module, 0.9, every=every, from_start=True), DocumentsEMA(module, 0.9), EMA(module, 0.9)
    for average in (ema, plain):
        average.register()
    for number in range(1, 8):
        move(module)
        ema.update()
        replacing.update()
        if number % every == 0:
            plain.update()
        for shadow, expected in zip(ema.shadow, plain.shadow.values(), strict=True):
            torch.testing.assert_close(shadow, expected, rtol=1e-6, atol=1e-7)
    assert not any(map(torch.equal, ema.shadow, replacing.shadow))


def test_from_the_start_a_warmed_up_average_begins_with_a_tenth_of_the_first_weights() -> None:
    weight = nn.Parameter(torch.ones(1))
    ema = EMA([weight], decay=0.99, warmup=True, from_start=True)
    with torch.no_grad():
        weight.zero_()
    ema.update()
    assert ema.shadow[0].item() == pytest.approx(0.1)


def test_an_average_that_keeps_its_first_weights_is_told_and_the_share_is_true() -> None:
    """A weight that is 1 until the first update and 0 after it: what is left of it in the average."""
    told = first_in_average(EmaPart(decay=0.99), 31)
    assert told is not None
    weight = nn.Parameter(torch.ones(1))
    ema = EMA([weight], decay=0.99)
    ema.update()
    with torch.no_grad():
        weight.zero_()
    for _ in range(30):
        ema.update()
    assert f"after 31 updates, {ema.shadow[0].item():.0%} of the average" in told
    for soon in (EmaPart(decay=0.99, warmup=True), EmaPart(decay=0.9)):
        assert first_in_average(soon, 31) is None
    assert first_in_average(EmaPart(decay=0.9, every=4), 31), "averages count, not updates"


def test_what_is_left_of_the_weights_before_the_first_step_is_true_too() -> None:
    told = first_in_average(EmaPart(decay=0.99, from_start=True), 31)
    assert told is not None
    weight = nn.Parameter(torch.ones(1))
    ema = EMA([weight], decay=0.99, from_start=True)
    with torch.no_grad():
        weight.zero_()
    for _ in range(31):
        ema.update()
    assert f"after 31 updates, {ema.shadow[0].item():.0%} of the average is still the weights before the first" in told
