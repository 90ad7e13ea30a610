"""A batch of images in one pass: gathered, cropped, mirrored, normalised, and a square blanked.

With torch's operators that is a dozen passes over the batch, each launched by the host: at 32 pixels and batch 128 they
take longer to launch than half of a ResNet-18's step takes a GPU. On a GPU one kernel reads each byte and writes each
float once; on a CPU torch's operators do it, with the same bits.

Shapes: S samples, n images, C channels, H height, W width.
Source: He et al. 2016, arXiv:1512.03385, section 4.2 (padded crop, mirror); DeVries and Taylor 2017, arXiv:1708.04552
(cutout).
"""

# mypy: disable-error-code="import-not-found,import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"
# The kernel is Triton's language, not typed Python, and Triton exists for some platforms only.

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from paceline.kernels.launch import HAS_TRITON, launch, runs_kernels
from paceline.machine.device import PLANNED

BLOCK: Final = 1024
"""Numbers of one image that a program writes."""


def images(
    pixels: Tensor,
    ids: Tensor | None,
    draws: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    crop: int,
    cutout: int,
    channels_last: bool,
) -> Tensor:
    """``(pixels / 255 - mean) / deviation``, after a crop and a mirror; 0 in a blank square.

    What a crop uncovers is black before normalisation. The square comes last, and is the mean colour.

    Args:
        pixels: uint8 [n, H, W, C].
        ids: int64 [S], which of them; None: all, in their order.
        draws: int64 [5, S]: 1 where left and right change places; row and column, 0 to 2 * ``crop``, at which the
            window begins in the image with its border; row and column of the middle of the square. None: no change.
        mean: fp32 [C, 1, 1], of values scaled to 0..1.
        deviation: fp32 [C, 1, 1].
        crop: pixels of border on each side.
        cutout: pixels a side of the square; 0: none.
        channels_last: of the result, in memory.

    Returns:
        fp32 [S, C, H, W].
    """
    if pixels.device.type == PLANNED:  # else the way through torch would take longer than the kernel
        found: Tensor = torch.ops.paceline.images(pixels, ids, draws, mean, deviation, crop, cutout, channels_last)
        return found
    if not runs_kernels(pixels):
        return _by_torch(pixels, ids, draws, mean, deviation, crop, cutout, channels_last)
    pixels = pixels.contiguous()
    out = _empty(pixels, ids, channels_last)
    _, height, width, channels = pixels.shape
    if not out.numel():
        return out
    given = (pixels if part is None else part for part in (ids, draws))  # a kernel takes no None
    with torch.cuda.device_of(pixels):
        launch(
            _images_kernel,
            (len(out), -(-(height * width * channels) // BLOCK)),
            *(pixels, *given, mean, deviation, out, len(out)),
            H=height, W=width, C=channels, CROP=crop, CUTOUT=cutout,
            GATHERED=ids is not None, DRAWN=draws is not None, LAST=channels_last, BLOCK=BLOCK, num_warps=4,
            # a product and a sum that are rounded once would be other bits than torch's
            enable_fp_fusion=False,
        )  # fmt: skip
    return out


torch.library.custom_op("paceline::images", images, mutates_args=())


@torch.library.register_fake("paceline::images")
def _(pixels: Tensor, ids: Tensor | None, *others: Any) -> Tensor:
    return _empty(pixels, ids, others[-1])


def _empty(pixels: Tensor, ids: Tensor | None, channels_last: bool) -> Tensor:
    count, height, width, channels = pixels.shape
    shape = count if ids is None else len(ids), channels, height, width
    memory = torch.channels_last if channels_last else torch.contiguous_format
    return torch.empty(shape, dtype=torch.float32, device=pixels.device, memory_format=memory)


def _by_torch(
    pixels: Tensor,
    ids: Tensor | None,
    draws: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    crop: int,
    cutout: int,
    channels_last: bool,
) -> Tensor:
    if ids is not None:
        pixels = pixels.index_select(0, ids)
    _, height, width, _ = pixels.shape
    found = pixels.permute(0, 3, 1, 2)
    if draws is not None:
        if crop:
            windows = pad(pixels, (0, 0, *[crop] * 4)).unfold(1, height, 1).unfold(2, width, 1)
            found = windows[torch.arange(len(pixels), device=pixels.device), draws[1], draws[2]]
        found = torch.where(draws[0].bool()[:, None, None, None], found.flip(-1), found)
    found = found.contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    # bytes divided are floats: one pass fewer than to make floats of them first
    values = found.div(255).sub_(mean).div_(deviation)
    if draws is not None and cutout:
        rows, columns = (torch.arange(side, device=pixels.device) for side in (height, width))
        down, across = (_within(at, middle, cutout) for at, middle in zip((rows, columns), draws[3:], strict=True))
        values.masked_fill_((down[:, :, None] & across[:, None, :])[:, None], 0)
    return values


def _within(at: Tensor, middle: Tensor, cutout: int) -> Tensor:
    """bool [S, side]: which rows, or columns, the square covers."""
    first = (middle - cutout // 2)[:, None]
    return (at >= first) & (at < first + cutout)


if HAS_TRITON:
    import triton
    import triton.language as tl

    _jit = triton.jit(do_not_specialize=("samples",))

    @_jit
    def _images_kernel(
        pixels, ids, draws, mean, deviation, out, samples,
        H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CROP: tl.constexpr, CUTOUT: tl.constexpr,
        GATHERED: tl.constexpr, DRAWN: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """A program: a block of one image's numbers, in the order in which they are written."""
        sample = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < H * W * C
        if LAST:
            channel, column, row = at % C, at // C % W, at // (C * W)
        else:
            column, row, channel = at % W, at // W % H, at // (H * W)
        source = sample
        if GATHERED:
            source = tl.load(ids + sample)
        from_row, from_column, there = row, column, inside
        if DRAWN:
            if tl.load(draws + sample) != 0:
                from_column = W - 1 - column
            from_row = from_row + (tl.load(draws + samples + sample) - CROP).to(tl.int32)
            from_column = from_column + (tl.load(draws + 2 * samples + sample) - CROP).to(tl.int32)
            there = inside & (from_row >= 0) & (from_row < H) & (from_column >= 0) & (from_column < W)
        place = pixels + source * (H * W * C) + (from_row * W + from_column) * C + channel
        value = tl.div_rn(tl.load(place, mask=there, other=0).to(tl.float32), 255.0)
        value = value - tl.load(mean + channel, mask=inside, other=0.0)
        value = tl.div_rn(value, tl.load(deviation + channel, mask=inside, other=1.0))
        if DRAWN and CUTOUT > 0:
            top = (tl.load(draws + 3 * samples + sample) - CUTOUT // 2).to(tl.int32)
            left = (tl.load(draws + 4 * samples + sample) - CUTOUT // 2).to(tl.int32)
            blank = (row >= top) & (row < top + CUTOUT) & (column >= left) & (column < left + CUTOUT)
            value = tl.where(blank, 0.0, value)
        tl.store(out + sample * (H * W * C) + at, value, mask=inside)
