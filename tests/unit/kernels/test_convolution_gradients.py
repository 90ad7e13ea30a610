"""Both gradients of a convolution at a time. On two streams of a GPU: tests/gpu/test_compile.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import symbolic_trace

from paceline.kernels.convolution_gradients import convolution_gradients, put_side_by_side

BOTH = torch.ops.aten.convolution_backward.default


def inputs(memory: torch.memory_format, groups: int = 1) -> tuple[Tensor, Tensor, Tensor, Any]:
    generator = torch.Generator().manual_seed(0)
    images, weight = (torch.randn(*s, generator=generator) for s in ((2, 4, 7, 6), (8, 4 // groups, 3, 3)))
    options = ([2, 1], [1, 1], [1, 1], False, [0, 0], groups)
    grad = torch.randn(torch.ops.aten.convolution(images, weight, None, *options).shape, generator=generator)
    grad, images, weight = (tensor.contiguous(memory_format=memory) for tensor in (grad, images, weight))
    return grad, images, weight, options


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_they_are_those_of_torch(memory: torch.memory_format, groups: int) -> None:
    *tensors, options = inputs(memory, groups)
    expected = BOTH(*tensors, None, *options, [True, True, False])[:2]
    for found, one in zip(convolution_gradients(*tensors, *options), expected, strict=True):
        assert torch.equal(found, one)
        assert found.stride() == one.stride()


def test_the_operator_can_be_traced_without_data() -> None:
    *tensors, options = inputs(torch.channels_last)
    torch.library.opcheck(torch.ops.paceline.convolution_gradients.default, (*tensors, *options))


def both(grad: Tensor, images: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    found = BOTH(grad, images, weight, None, [2, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False])
    return found[0], found[1]


def one_alone(grad: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    return BOTH(grad, images, weight, None, [2, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, False])[1]


def with_bias(grad: Tensor, images: Tensor, weight: Tensor) -> Tensor:
    return BOTH(grad, images, weight, [8], [2, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True])[2]


def test_where_a_graph_makes_both_they_are_replaced() -> None:
    *tensors, _ = inputs(torch.contiguous_format)
    module = symbolic_trace(both)
    assert put_side_by_side(module.graph) == 1
    module.recompile()
    assert "paceline" in module.code
    for found, one in zip(module(*tensors), both(*tensors), strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("function", [one_alone, with_bias])
def test_others_stay(function: Any) -> None:
    graph = symbolic_trace(function).graph
    assert put_side_by_side(graph) == 0
    assert "paceline" not in str(graph)
