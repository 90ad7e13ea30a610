"""Both gradients of a convolution, side by side on two streams of a GPU.

The gradient of the images and that of the weights need nothing of each other, and each alone leaves much of a GPU idle
where images are small: a layer of 4 x 4 pixels at batch 128 makes 64 blocks for the 132 multiprocessors of an H200.

Shapes: N samples, C channels in, K channels out, H x W pixels.
Source: CUDA C++ Programming Guide, Concurrent Kernel Execution; streams that part and join while they are captured
become branches of the graph (the same guide, Cross-stream Dependencies and Events).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from paceline.machine.device import named_stream

_both = torch.ops.aten.convolution_backward.default


@torch.library.custom_op("paceline::convolution_gradients", mutates_args=(), tags=(torch.Tag.needs_fixed_stride_order,))
def convolution_gradients(
    grad: Tensor,
    images: Tensor,
    weight: Tensor,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
) -> tuple[Tensor, Tensor]:
    """The gradients of ``images`` and ``weight``, bit for bit those of ``aten::convolution_backward``.

    Args:
        grad: [N, K, H', W'], of the convolution's result.
        images: [N, C, H, W].
        weight: [K, C / groups, R, S].
    """
    given = (grad, images, weight, None, stride, padding, dilation, transposed, output_padding, groups)
    if not images.is_cuda:
        return _both(*given, [True, True, False])[:2]  # type: ignore[no-any-return]
    here = torch.cuda.current_stream(images.device)
    beside = _beside(images.device, here.cuda_stream)
    beside.wait_stream(here)
    with torch.cuda.stream(beside):
        of_weight = _both(*given, [False, True, False])[1]
    of_images = _both(*given, [True, False, False])[0]
    # what was made beside is read, and what was read there is freed, after this: no memory changes hands too early
    here.wait_stream(beside)
    return of_images, of_weight


@convolution_gradients.register_fake
def _(grad: Tensor, images: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _both(grad, images, weight, None, *options, [True, True, False])[:2]  # type: ignore[no-any-return]


def put_side_by_side(graph: Graph) -> int:
    """Replace the backward passes of convolutions in a traced graph that make both gradients; returns how many."""
    found = [
        node
        for node in graph.find_nodes(op="call_function", target=_both)
        if list(node.args[-1]) == [True, True, False]
    ]
    for node in found:
        grad, images, weight, _, *options, _ = node.args
        with graph.inserting_before(node):
            ours = graph.call_function(
                torch.ops.paceline.convolution_gradients.default, (grad, images, weight, *options)
            )
        # the third, of the bias, is none, and nobody reads it
        ours.meta.update(node.meta)
        node.replace_all_uses_with(ours)
        graph.erase_node(node)
    return len(found)


@functools.cache
def _beside(device: torch.device, here: int) -> Any:
    """One stream for each that gradients are asked for on: what is freed there is used again by that one alone."""
    return named_stream(device, "convolutions")
