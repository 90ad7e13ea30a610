"""Long texts in windows: what the model says of each window becomes what it says of the text.

Which tokens are kept, and which windows they are in, is decided where texts are encoded: ``data/overflow.py``.

Shapes: S texts, W windows of them, C classes.
Source: Sun et al., How to Fine-Tune BERT for Text Classification, arXiv 1905.05583, section 5.3 (hierarchical methods).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from paceline.seams import Batch, Build, Layout

Join = Callable[[Tensor, Tensor, int], Tensor]
"""Logits [W, C], the text of each window int64 [W], S -> logits [S, C]."""


def mean(logits: Tensor, windows: Tensor, num_texts: int) -> Tensor:
    """The mean over each text's windows: [W, C] to [S, C], in fp32 or better; 0 of a text without a window."""
    values = logits if logits.element_size() >= 4 else logits.float()
    sums = values.new_zeros(num_texts, values.shape[1]).index_add(0, windows, values)
    counts = values.new_zeros(num_texts).index_add(0, windows, values.new_ones(len(windows)))
    return sums / counts.clamp_min(1)[:, None]


def maximum(logits: Tensor, windows: Tensor, num_texts: int) -> Tensor:
    """The largest of each text's windows, class by class: [W, C] to [S, C]; 0 of a text without a window."""
    where = windows[:, None].expand_as(logits)
    return logits.new_zeros(num_texts, logits.shape[1]).scatter_reduce(0, where, logits, "amax", include_self=False)


JOINS: dict[str, Join] = {"mean": mean, "max": maximum}
"""By the names that ``data.aggregate`` has."""


def aggregate(logits: Tensor, windows: Tensor, num_texts: int, how: str = "mean") -> Tensor:
    """Logits of texts from those of their windows.

    Args:
        logits: [W, C].
        windows: int64 [W]: which text each window is of.
        num_texts: S.
        how: ``mean`` or ``max``, over the windows of a text and for each class alone.

    Returns:
        [S, C].
    """
    return JOINS[how](logits, windows, num_texts)


def apply(build: Build, layout: Layout, how: str | Join) -> Build:
    """The build whose samples are texts of several windows, with logits of texts.

    Args:
        build: of which every window is a sample.
        layout: of texts, whose batches say which text each window is of.
        how: a name that ``aggregate`` knows, or a function of its own.
    """
    join = JOINS[how] if isinstance(how, str) else how
    before = build.forward

    def forward(model: nn.Module, batch: Batch) -> Tensor:
        logits = before(model, batch)
        return logits if batch.windows is None else join(logits, batch.windows, batch.num_samples)

    return replace(build, layout=layout, forward=forward).carried_out(overflow="windows")
