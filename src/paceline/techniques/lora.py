"""LoRA: train two narrow matrices beside each linear layer, and the head, instead of the whole model.

A layer W then computes ``W x + alpha / rank * B A x``. Only A [rank, in], B [out, rank] and the head have gradients and
an optimizer's states. B begins as zeros, so that the first pass is that of the model as it was. With DoRA the sum's
direction is learned so, and the length of each of its rows apart. The layers are peft's, which are put into the model
in place: its class, its other layers and their names stay.

Source: Hu et al., LoRA, arXiv 2106.09685; Liu et al., DoRA, arXiv 2402.09353; peft, https://github.com/huggingface/peft.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterable, Sequence

from torch import nn

from paceline.contract.errors import RecipeError


def apply_lora(
    model: nn.Module,
    targets: Sequence[str],
    head: Iterable[str] = (),
    *,
    rank: int = 8,
    alpha: int = 16,
    dropout: float = 0.0,
    dora: bool = False,
) -> None:
    """Put adapters beside linear layers of ``model``, in place, and freeze all else but its head.

    A is drawn from torch's generator, as peft does.

    Args:
        targets: names of the layers, or what they end with: ``q_lin`` is every layer of that name.
        head: names of what is trained in full: modules or parameters.
        rank: the width between A and B.
        alpha: an adapter's result is multiplied by ``alpha / rank``.
        dropout: of what goes into an adapter.
        dora: learn lengths apart from directions.

    Raises:
        RecipeError: peft is not installed.
        ValueError: from peft, where no layer has such a name, or one that is not linear.
    """
    require_peft()
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    whole = tuple(head)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), lora_dropout=dropout, use_dora=dora)
    with warnings.catch_warnings():
        # GPT-2's layers have their weights transposed, which peft sees and tells
        warnings.filterwarnings("ignore", message="fan_in_fan_out")
        inject_adapter_in_model(config, model)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            # autocast rounds what it multiplies: a wider copy before that has the same bits, and is kept by each
            module.cast_input_dtype_enabled = False
    for name, parameter in model.named_parameters():
        if any(name == one or name.startswith(f"{one}.") for one in whole):
            parameter.requires_grad_()


def require_peft() -> None:
    """Refuse what needs peft where it is not installed, without importing it.

    Raises:
        RecipeError: it is not.
    """
    if importlib.util.find_spec("peft") is None:
        raise RecipeError("model.train = lora", "needs peft, which is not installed", "pip install 'paceline[lora]'")
