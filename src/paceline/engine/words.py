"""Which rows of a model's word embeddings a step changes: ranks need to sum only those.

A model's words are often most of its weights, of which a step looks up a few thousand. Their gradient is complete last,
so that nothing is left to hide its sum behind. Every rank knows the samples of the whole step, and so, without asking
the others, which words occur in them; all other rows of the gradient are zero on every rank.

Source: sums of rows in place of tables are Horovod's sparse gradients (Sergeev and Del Balso, arXiv 1802.05799); there
the ranks ask one another which rows they have.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from paceline.data.dataset import Tokens

MOST = 0.75
"""Share of the rows from which the whole table is summed: rows are gathered and put back by passes of their own."""


def word_embeddings(model: nn.Module) -> nn.Parameter | None:
    """The table that a transformers model looks tokens up in, if it is trained; None: there is none that is known."""
    table = input_embeddings(model)
    return table if table is not None and table.requires_grad else None


def input_embeddings(model: nn.Module) -> nn.Parameter | None:
    """The table [ids, width] that a transformers model looks tokens up in; None: there is none that is known."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        table = getattr(find(), "weight", None) if find is not None else None
    except (NotImplementedError, AttributeError):  # transformers' way of saying that it has none
        return None
    return table if isinstance(table, nn.Parameter) and table.ndim == 2 else None


@final
class Words:
    """The words of a step.

    Args:
        tokens: of all samples.
        table: the word embeddings, [rows, width].
    """

    def __init__(self, tokens: Tokens, table: Tensor) -> None:
        self._tokens = tokens
        self._occurs = np.zeros(len(table), dtype=bool)
        given = 1 if tokens.types is None else int(tokens.types.max(initial=0))
        self._types = 1 + max(given, tokens.pad_type)
        # a rank that ran out of memory here would leave the others waiting for its sums
        self._rows = torch.empty(len(table), dtype=torch.int64, device=table.device)

    def of(self, samples: NDArray[Any]) -> Tensor | None:
        """int64 [words] in order, on the table's device, without waiting for it; None: most words occur.

        What the last call gave is overwritten, once the device has done what it was to do before this one.

        Args:
            samples: ids of the step's samples, of all ranks.
        """
        flat, offsets, occurs = self._tokens.flat, self._tokens.offsets, self._occurs
        occurs.fill(False)
        occurs[self._tokens.pad_id] = True
        if self._tokens.typed:  # GPT-2 and its kin look token types up among the words
            occurs[: self._types] = True
        for sample in samples.tolist():
            occurs[flat[offsets[sample] : offsets[sample + 1]]] = True
        rows = np.flatnonzero(occurs)
        if len(rows) > MOST * len(occurs):
            return None
        found = torch.from_numpy(rows)
        on_card = self._rows.device.type == "cuda"
        return self._rows[: len(rows)].copy_(found.pin_memory() if on_card else found, non_blocking=True)
