"""Kernels that were compiled side by side are the ones that are launched after it; where they are noted, none runs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._dynamo  # SymPy comes with it, which adds a filter of warnings where it is first imported

from paceline.kernels.bias_gelu import bias_gelu
from paceline.kernels.launch import compiled_together, only_noted
from paceline.kernels.residual_norm import residual_norm
from paceline.kernels.short_attention import short_attention_joined

triton = pytest.importorskip("triton", reason="the kernels are Triton's")

GPU = torch.device("cuda")


def passes() -> list[torch.Tensor]:
    """A forward and a backward pass through three of our operators, in a number format that no other test has here."""
    torch.manual_seed(0)
    rows, heads, dim = 96, 5, 32
    width = heads * dim
    qkv = torch.randn(rows, 3, heads, dim, device=GPU, dtype=torch.float16, requires_grad=True)
    wide = torch.randn(rows, width, device=GPU, requires_grad=True)
    parts = [torch.randn(width, device=GPU, requires_grad=True) for _ in range(4)]
    bounds = torch.tensor([0, 40, rows], device=GPU, dtype=torch.int32)
    attended = short_attention_joined(qkv, bounds, 64, dropout=0.25).flatten(1)
    out, narrow = residual_norm(attended, parts[0], wide, parts[1], parts[2], dropout=0.25, eps=1e-5, narrow=True)
    loss = out.square().sum() + bias_gelu(narrow, parts[3]).float().sum()
    return [loss, *torch.autograd.grad(loss, [qkv, wide, *parts])]


def test_nothing_is_left_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    loaded: list[str] = []

    def note(*_: Any, fn: Any, **__: Any) -> None:
        compiled.append(fn.name)

    def note_load(module: Any, function: Any, name: str, *_: Any) -> None:
        loaded.append(name)

    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    monkeypatch.setattr(triton.knobs.runtime, "kernel_load_start_hook", note_load)
    filters = list(warnings.filters)
    with compiled_together(GPU):
        passes()
    assert list(warnings.filters) == filters, "Triton's changes of them were left behind by its threads"
    # attention has three kernels, the others two each
    assert len([name for name in compiled if "nothing" not in name]) == 7, compiled
    assert len(loaded) == 7, loaded
    compiled.clear()
    loaded.clear()
    found = passes()
    assert not compiled
    assert not loaded, "what launches a kernel was built when it was launched"
    assert all(value.isfinite().all() for value in found)
    for value, again in zip(found, passes(), strict=True):
        torch.testing.assert_close(value, again, rtol=0, atol=0)


def test_what_is_only_noted_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *_, fn, **__: compiled.append(fn.name))
    wide = torch.randn(8, 1120, device=GPU, dtype=torch.float16)  # a width that no other test has here
    with only_noted(GPU) as noted:
        assert bias_gelu(wide, torch.zeros(1120, device=GPU)).shape == wide.shape
    assert len(noted) == 1
    assert not compiled
