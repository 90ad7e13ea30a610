"""AdamW with states of few bits, from whichever package is installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tests.gpu.test_step import made, step

pytestmark = [
    pytest.mark.skipif(
        not any(importlib.util.find_spec(name) for name in ("bitsandbytes", "torchao")),
        reason="neither bitsandbytes nor torchao is installed",
    ),
    # both packages, and the compiler that torchao's update goes through, warn about themselves
    pytest.mark.filterwarnings("default"),
]

LIBRARIES = {"adamw8bit": ("bitsandbytes", "torchao"), "adamw4bit": ("torchao",), "adamwfp8": ("torchao",)}
PAIRS = [(kind, library) for kind, libraries in LIBRARIES.items() for library in libraries]


def settings(kind: str, library: str) -> dict[str, str]:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if kind == "adamwfp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    return {"type": kind, "low_bit": library}


@pytest.mark.parametrize(("kind", "library"), PAIRS)
def test_it_trains_and_its_state_goes_on_where_it_was(kind: str, library: str) -> None:
    part = settings(kind, library)
    one, _, _ = made("bf16", **part)
    assert library in one.engine.execution["optimizer"]
    losses = [step(one, index).item() for index in range(6)]
    assert losses[-1] < losses[0] + 0.1
    tensors, scalars = one.engine.state()
    assert scalars["applied"] == 6
    saved = {stem: {name: t.clone().cpu() for name, t in named.items()} for stem, named in tensors.items()}
    expected = [step(one, index).item() for index in range(6, 9)]
    other, _, _ = made("bf16", **part)
    other.engine.load(saved, scalars)
    assert [step(other, index).item() for index in range(6, 9)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("kind", "library"), PAIRS)
def test_an_overflowing_step_changes_nothing(kind: str, library: str) -> None:
    run, model, _ = made("fp16", **settings(kind, library))
    for index in range(3):
        step(run, index)
    before = {name: tensor.clone() for name, tensor in run.engine.state()[0]["optimizer"].items()}
    weights = {name: tensor.clone() for name, tensor in run.engine.whole().items()}
    hook = model[4].bias.register_hook(lambda gradient: gradient * float("inf"))
    step(run, 3)
    hook.remove()
    after = run.engine.state()[0]["optimizer"]
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert [name for name in weights if not torch.equal(weights[name], run.engine.whole()[name])] == []
