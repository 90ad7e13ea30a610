"""Layer-wise decay of learning rates: the further from the head a weight is, the less it is changed.

Source: Clark et al., ELECTRA, ICLR 2020; the depths are those of Bao et al., BEiT, ICLR 2022: the head has the whole
rate, the last of n blocks ``decay`` times it, the first ``decay ** n``, and the embeddings ``decay ** (n + 1)``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def rate_factors(model: nn.Module, blocks: Sequence[nn.Module], decay: float) -> dict[str, float]:
    """Name of each parameter -> what its learning rate is multiplied by.

    What is registered before the first block counts as embeddings, and so does every ``nn.Embedding`` outside the
    blocks; what is registered between two blocks counts to the one before, what comes after the last to the head.

    Args:
        model: has the blocks.
        blocks: in the order they are passed.
        decay: above 0, at most 1.

    Raises:
        ValueError: there are no blocks.

    Example:
        >>> factors = rate_factors(model, model.bert.encoder.layer, 0.9)
        >>> groups = [{"params": [p], "lr": 5e-5 * factors[name]} for name, p in model.named_parameters()]
        >>> optimizer = torch.optim.AdamW(groups)
    """
    number = {parameter: index for index, block in enumerate(blocks, 1) for parameter in block.parameters()}
    if not number:
        raise ValueError("there are no blocks to tell depth by")
    named = list(model.named_parameters())
    last = max(index for index, (_, parameter) in enumerate(named) if parameter in number)
    tables = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    factors, passed, head = {}, 0, len(blocks) + 1
    for index, (name, parameter) in enumerate(named):
        passed = max(passed, number.get(parameter, 0))
        layer = number.get(parameter, 0 if parameter in tables else passed if index < last else head)
        factors[name] = decay ** (head - layer)
    return factors
