"""Masks on a GPU: none where there is nothing to mask, and the others taken as they are, for looking waits for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    ViTConfig,
    ViTModel,
    masking_utils,
)

from paceline.models.masks import unread_masks

aten: Any = torch.ops.aten


def test_a_mask_that_is_not_there_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)  # as of any captured stream
    before = masking_utils.is_tracing
    with unread_masks():
        assert masking_utils.is_tracing(None) is False
        assert masking_utils.is_tracing(torch.ones(1, 2)) is True, "the contents of a mask cannot be looked at"
    assert masking_utils.is_tracing is before


def test_it_is_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = masking_utils.is_tracing
    with pytest.raises(RuntimeError), unread_masks():
        raise RuntimeError
    assert masking_utils.is_tracing is before


def test_a_captured_vision_transformer_gets_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8)
    config.patch_size = 4
    model, masks = ViTModel(config, add_pooling_layer=False), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(*tensors: Any, attn_mask: Any = None, **named: Any) -> Any:
        masks.append(attn_mask)
        return attend(*tensors, attn_mask=attn_mask, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    # in the older way: a capture is a trace
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)
    with unread_masks():
        model(pixel_values=torch.zeros(2, 3, 8, 8))
    assert masks == [None]


class ValuesAreSecret(TorchDispatchMode):
    """Whoever looks at a tensor's value on the host is refused, as a host that must not wait for a GPU is."""

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        assert operator not in (aten._local_scalar_dense.default, aten.nonzero.default), f"{operator} is looked at"
        return operator(*arguments, **(named or {}))


@pytest.mark.parametrize("is_masked", [True, False], ids=["masked", "all of one length"])
@pytest.mark.parametrize(
    "kind", ["bert", "distilbert", "roberta", "electra", "mpnet", "modernbert", "deberta", "deberta-v2", "roformer"]
)
def test_no_model_looks_at_its_mask(kind: str, is_masked: bool) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    if kind == "distilbert":
        sizes = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16}
    config = AutoConfig.for_model(kind, vocab_size=50, pad_token_id=0, max_position_embeddings=32, **sizes)
    model = AutoModelForSequenceClassification.from_config(config)
    tokens = torch.arange(2, 26).view(2, 12)
    padded = {"input_ids": tokens}
    if is_masked:
        padded["attention_mask"] = (torch.arange(12) < torch.tensor([[12], [7]])).long()
    plain = model.eval()(**padded).logits
    with unread_masks(), ValuesAreSecret():
        unread = model(**padded).logits
    assert torch.equal(unread, plain)


def test_a_mask_is_looked_at_otherwise() -> None:
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50)
    model, tokens = BertModel(config), torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(AssertionError, match="is looked at"), ValuesAreSecret():
        model(input_ids=tokens, attention_mask=tokens)
