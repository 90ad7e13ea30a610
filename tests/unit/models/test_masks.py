"""Masks while a graph is recorded: none where there is nothing to mask, whatever transformers makes of a recording."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import ViTConfig, ViTModel, masking_utils

from paceline.models.masks import none_where_nothing_is_masked


def test_a_mask_that_is_not_there_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)  # as of any recorded stream
    before = masking_utils.is_tracing
    with none_where_nothing_is_masked():
        assert masking_utils.is_tracing(None) is False
        assert masking_utils.is_tracing(torch.ones(1, 2)) is True, "the contents of a mask cannot be looked at"
    assert masking_utils.is_tracing is before


def test_it_is_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = masking_utils.is_tracing
    with pytest.raises(RuntimeError), none_where_nothing_is_masked():
        raise RuntimeError
    assert masking_utils.is_tracing is before


def test_a_recorded_vision_transformer_gets_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8)
    config.patch_size = 4
    model, masks = ViTModel(config, add_pooling_layer=False), []
    attend = torch.nn.functional.scaled_dot_product_attention

    def noted(*tensors: Any, attn_mask: Any = None, **named: Any) -> Any:
        masks.append(attn_mask)
        return attend(*tensors, attn_mask=attn_mask, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    # in the older way: a recording is a trace
    monkeypatch.setattr(masking_utils, "is_tracing", lambda tensor=None: True)
    with none_where_nothing_is_masked():
        model(pixel_values=torch.zeros(2, 3, 8, 8))
    assert masks == [None]
