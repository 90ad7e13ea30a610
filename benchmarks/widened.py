"""A pretrained model of DistilBERT's shape, out of a small BERT-type one: every channel twice.

    python benchmarks/widened.py MINILM_FOLDER OUT_FOLDER

MiniLM of 6 layers, 12 heads and 384 units becomes a DistilBERT of 6 layers, 12 heads and 768 units that computes the
same: each unit stands beside its copy. A weight is shared out unevenly between a unit and its copy, so that both learn
different things from the first step on. It is for machines without the Hub: trained on real text, and as large and as
fast as distilbert-base-uncased.

Source: Net2Net's widening (Chen, Goodfellow and Shlens 2016, https://arxiv.org/abs/1511.05641).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, DistilBertConfig, DistilBertModel

BLOCK = {
    "attention.self.query": "attention.q_lin",
    "attention.self.key": "attention.k_lin",
    "attention.self.value": "attention.v_lin",
    "attention.output.dense": "attention.out_lin",
    "attention.output.LayerNorm": "sa_layer_norm",
    "intermediate.dense": "ffn.lin1",
    "output.dense": "ffn.lin2",
    "output.LayerNorm": "output_layer_norm",
}
"""Module of BERT's block -> module of DistilBERT's."""

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt")


def twice(weights: Tensor) -> Tensor:
    """Each unit beside its copy: the last dimension doubled."""
    return weights.repeat_interleave(2, dim=-1)


def product(weight: Tensor, generator: torch.Generator) -> Tensor:
    """A matrix [out, in] that does to doubled units what ``weight`` does: [2 out, 2 in].

    A unit and its copy carry equal values, so that any two shares of a weight that add up to it compute the same.
    """
    weight = weight.repeat_interleave(2, dim=0)
    share = 0.25 + 0.5 * torch.rand(weight.shape, generator=generator)
    return torch.stack([weight * share, weight * (1 - share)], dim=-1).flatten(1)


def widened(small: torch.nn.Module, seed: int = 0) -> DistilBertModel:
    """DistilBERT of twice the width, which gives each unit of ``small``'s last hidden state twice.

    Args:
        small: transformers' BertModel; its first token type is added to every position.
    """
    config, generator = small.config, torch.Generator().manual_seed(seed)
    model = DistilBertModel(
        DistilBertConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            n_layers=config.num_hidden_layers,
            n_heads=config.num_attention_heads,
            dim=2 * config.hidden_size,
            hidden_dim=2 * config.intermediate_size,
            pad_token_id=config.pad_token_id,
        )
    )
    old, new = small.state_dict(), {}
    positions = old["embeddings.position_embeddings.weight"] + old["embeddings.token_type_embeddings.weight"][0]
    new["embeddings.word_embeddings.weight"] = twice(old["embeddings.word_embeddings.weight"])
    new["embeddings.position_embeddings.weight"] = twice(positions)
    for kind in ("weight", "bias"):
        new[f"embeddings.LayerNorm.{kind}"] = twice(old[f"embeddings.LayerNorm.{kind}"])
    for layer in range(config.num_hidden_layers):
        for theirs, ours in BLOCK.items():
            source, target = f"encoder.layer.{layer}.{theirs}", f"transformer.layer.{layer}.{ours}"
            weight, bias = old[f"{source}.weight"], twice(old[f"{source}.bias"])
            weight = twice(weight) if weight.ndim == 1 else product(weight, generator)
            if theirs.endswith("query"):
                # heads twice as wide sum twice as much, and are divided by the root of twice the width
                weight, bias = weight / 2**0.5, bias / 2**0.5
            new[f"{target}.weight"], new[f"{target}.bias"] = weight, bias
    model.load_state_dict(new)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of a BERT-type model, with its tokenizer")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    small = AutoModel.from_pretrained(options.source, add_pooling_layer=False, dtype=torch.float32)
    model = widened(small)
    model.save_pretrained(options.out)
    for name in TOKENIZER:
        if (options.source / name).exists():
            shutil.copy(options.source / name, options.out / name)
    print(f"{options.out}: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
