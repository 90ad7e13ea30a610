"""A tiny model of every family that transformers can classify with, as the Hub would hold it.

Configurations are transformers' own, shrunk by the names of their settings; tokenizers are of the family's own class,
with a vocabulary trained on the test's texts. So a family that the next release of transformers brings is covered
without a line here, unless its configuration cannot be shrunk so.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch

VOCABULARY = 300
SIZES: Mapping[str, int] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "word_embed_proj_dim", "embedding_size"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_self_attends_per_block"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "d_inner", "n_inner", "hidden_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "ffn_hidden_size"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("head_dim", "d_head", "d_kv"), 8),
    **dict.fromkeys(("d_latents", "num_latents", "bottleneck_size"), 32),
    "sliding_window": 64,
    "image_size": 32,
    "patch_size": 8,
    "entity_vocab_size": 8,
}
"""What a configuration's settings of these names become."""

UNSET = ("head_dim", "num_key_value_heads")
"""Of these also where the configuration leaves them open."""

MLA: Mapping[str, Any] = {
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8
    ),
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
}
"""Multi-head latent attention, whose heads have sizes of their own."""

QUIRKS: Mapping[str, Mapping[str, Any]] = {
    "bigbird_pegasus": {"attention_type": "original_full"},
    "big_bird": {"attention_type": "original_full"},
    "canine": {"num_hash_buckets": 64},
    "shieldgemma2": {
        "text_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY,
                        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0},
        "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                          "num_attention_heads": 4, "image_size": 32, "patch_size": 8}},
    **{name: {"vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "image_size": 32, "patch_size": 8}} for name in ("clip", "metaclip_2", "siglip", "siglip2")},
    **{name: {"image_size": 64, "patch_size": 4, "window_size": 2} for name in ("swin", "swinv2", "donut-swin")},
    **{name: {"image_size": 64, "patch_size": 4} for name in ("convnext", "convnextv2", "focalnet")},
    **{name: {"image_size": 64, "patch_size": 2} for name in ("mobilevit", "mobilevitv2")},
    "efficientnet": {"hidden_dim": 1280, "depth_coefficient": 1.0, "width_coefficient": 1.0},
    **{name: {"image_size": 160} for name in ("mobilenet_v1", "mobilenet_v2")},
    "cvt": {"depth": [1, 2, 10]},
    "levit": {"image_size": 64, "patch_size": 16},
    "pvt": {"image_size": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    **dict.fromkeys(("axk2", "deepseek_v2", "deepseek_v3", "minicpm3"), MLA),
    "axk1": {**MLA, "n_group": 2, "topk_group": 1},
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"block_sizes": [2, 2], "num_decoder_layers": 1},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 16},
    "esm": {"pad_token_id": 0},
    "gptj": {"rotary_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "layoutlmv3": {"visual_embed": False, "coordinate_size": 6, "shape_size": 4},
    "lilt": {"hidden_size": 48},
    "mistral4": {**MLA, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
                                            "original_max_position_embeddings": 128}},
    "nystromformer": {"num_landmarks": 64, "segment_means_seq_len": 64, "conv_kernel_size": 5},
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "reformer": {"attn_layers": ["local", "local"], "local_attn_chunk_length": 8, "axial_pos_shape": [8, 16],
                 "axial_pos_embds_dim": [16, 16], "attention_head_size": 8},
    "t5": {"decoder_start_token_id": 0},
    "umt5": {"decoder_start_token_id": 0},
    "mt5": {"decoder_start_token_id": 0},
    "xmod": {"default_language": "en_XX"},
    "yoso": {"use_expectation": True, "conv_window": None},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
}  # fmt: skip
"""What a family needs beyond SIZES to be built, or to be built small."""

TEXTS = (
    "the plot was thin but the actors were wonderful",
    "dull",
    "we laughed, we cried; what a wonderful evening at the cinema, and what music",
    "bad lighting, bad sound, bad jokes: the worst evening",
    "a film to remember",
    "nothing happens, nobody cares, and it never ends, it never ever ends",
    "wonderful wonderful music",
    "the worst of the year",
    "not bad at all",
    "we never cared",
)
SECONDS = (
    "the actors were fine",
    "nobody laughed at all",
    "music",
    "the sound was bad",
    "it was a dull film and nobody remembers it",
    "it ends",
    "thin music",
    "the best of the year, they say",
    "bad",
    "we cared a lot about the plot",
)
LABELS = ("good", "poor", "good", "poor", "good", "poor", "good", "poor", "good", "poor")


def text_families() -> list[str]:
    """Model types with a sequence classifier."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as names

    return sorted(names)


def image_families() -> list[str]:
    """Model types with an image classifier."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES as names

    return sorted(names)


def configuration(family: str, **settings: Any) -> Any:
    """The family's configuration, shrunk, without dropout.

    Raises:
        Whatever the configuration's class raises where the shrunk sizes do not go together.
    """
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    return kind(**{**_shrunk(kind().to_dict()), **QUIRKS.get(family, {}), **settings})


def _shrunk(plain: Mapping[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, value in plain.items():
        if isinstance(value, dict) and "model_type" in value:
            changed[name] = {**value, **_shrunk(value)}
        elif name == "vocab_size":
            changed[name] = VOCABULARY
        elif isinstance(value, bool) or (value is None and name not in UNSET):
            continue
        elif name in SIZES and isinstance(value, int | None):
            changed[name] = SIZES[name]
        elif "drop" in name and isinstance(value, int | float):
            changed[name] = type(value)(0)
        elif "drop" in name and isinstance(value, list):
            changed[name] = [0.0] * len(value)
        elif name in ("depths", "depth", "num_conv_layers", "stage_num_blocks") and isinstance(value, list):
            changed[name] = [1] * len(value)  # deep batch norm over ten small images amplifies any rounding
        elif name == "layer_types" and isinstance(value, list):
            changed[name] = value[-SIZES["num_hidden_layers"] :]  # of several kinds the last two differ
        elif name.endswith("_token_id") and isinstance(value, int) and value >= VOCABULARY:
            changed[name] = 3
    return changed


def write_text_model(family: str, folder: Path) -> Path:
    """Configuration, random weights and tokenizer of a tiny text classifier with the labels good and poor."""
    from transformers import AutoModelForSequenceClassification

    tokenizer = tokenizer_of(family)
    settings = {"id2label": {0: "good", 1: "poor"}, "label2id": {"good": 0, "poor": 1}}
    plain = configuration(family).to_dict()
    for name in ("pad", "bos", "eos", "cls", "sep"):
        if plain.get(f"{name}_token_id") is not None and (found := getattr(tokenizer, f"{name}_token_id")) is not None:
            settings[f"{name}_token_id"] = found
    config = configuration(family, **settings)
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_config(config).float()
    with torch.no_grad():  # a head that tells texts apart, so that a wrong input shows
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and 2 in weight.shape:
                weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(len(name)))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_image_model(family: str, folder: Path) -> Path:
    """Configuration, random weights and image processor of a tiny image classifier with the labels dark and light."""
    import transformers
    from transformers import AutoModelForImageClassification
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    names = {"num_labels": 2, "id2label": {0: "dark", 1: "light"}, "label2id": {"dark": 0, "light": 1}}
    config = configuration(family, **names)
    found = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES[family]
    config.architectures = [found if isinstance(found, str) else found[0]]  # of two classes transformers asks which
    torch.manual_seed(5)
    model = AutoModelForImageClassification.from_config(config).float()
    model.save_pretrained(folder)
    processor = (IMAGE_PROCESSOR_MAPPING_NAMES.get(family) or {}).get("pil", "ViTImageProcessorPil")
    kind = getattr(transformers, processor)
    whole = kind().to_dict()
    # of the processor's own kind, but as large as the tiny model wants it
    side, changed = _side(family), dict[str, Any]()
    sizes = {name for name, value in (whole.get("size") or {}).items() if value is not None}
    crops = bool(whole.get("do_center_crop"))
    if known := sizes & {"height", "width", "shortest_edge"}:
        changed["size"] = dict.fromkeys(known, side + 8 * crops)
    if crops:
        changed["crop_size"] = {"height": side, "width": side}
    made = kind(**changed)
    made.save_pretrained(folder)
    return folder


def _side(family: str) -> int:
    """Pixels a side: what the configuration says, or enough for a pyramid of five stages."""
    found = getattr(configuration(family), "image_size", None)
    if isinstance(found, list | tuple):
        return int(found[0])
    nested = getattr(configuration(family), "vision_config", None)
    return found if isinstance(found, int) else getattr(nested, "image_size", 128)


def tokenizer_of(family: str) -> Any:
    """A tokenizer of the family's own class with a trained vocabulary.

    Where that class is written in Python alone, or none is named, it is byte-level BPE without token types and without
    a padding token, as decoders come.
    """
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    chosen = TOKENIZER_MAPPING_NAMES.get(family)
    try:
        kind = getattr(transformers, chosen) if chosen else None
        model = getattr(kind, "model", None)
    except ImportError:
        kind = model = None
    if family in SUBSTITUTES:
        kind = getattr(transformers, SUBSTITUTES[family])
        model = kind.model
    if kind is None or model is None:
        return _byte_level()
    parameters = inspect.signature(kind.__init__).parameters
    special = _special_tokens(parameters)
    name = model.__name__
    if name == "WordPiece":
        vocabulary = _trained(tokenizers.models.WordPiece(unk_token="[UNK]"), special)
        return kind(vocab=vocabulary)
    if name == "Unigram":
        pieces = [piece for piece in dict.fromkeys(_words("▁")) if piece not in special]
        scores = [(token, 0.0) for token in special] + [(piece, -float(i + 1)) for i, piece in enumerate(pieces)]
        return kind(vocab=scores[:VOCABULARY])
    plain = _byte_level()
    found = json_of(plain)["model"]
    vocabulary = {token: index for index, token in enumerate(special)}
    for token in sorted(found["vocab"], key=found["vocab"].get):
        vocabulary.setdefault(token, len(vocabulary))
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in found["merges"]]
    kept = {token: index for token, index in vocabulary.items() if index < VOCABULARY}
    merges = [(a, b) for a, b in merges if a in kept and b in kept and a + b in kept]
    return kind(vocab=kept, merges=merges)


SUBSTITUTES: Mapping[str, str] = {
    **dict.fromkeys(
        ("bigbird_pegasus", "biogpt", "canine", "layoutlmv3", "luke", "markuplm", "plbart"), "RobertaTokenizer"
    ),
    **dict.fromkeys(("camembert", "xmod", "xlm-roberta-xl"), "XLMRobertaTokenizer"),
    "umt5": "T5Tokenizer",
    **dict.fromkeys(("esm", "esmc", "tapas"), "BertTokenizer"),
}
"""Whose own tokenizer is written in Python, wants more than texts, or has a fixed vocabulary of proteins."""


def json_of(tokenizer: Any) -> dict[str, Any]:
    """A tokenizer's parts as plain data."""
    import json

    found: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return found


def _special_tokens(parameters: Mapping[str, inspect.Parameter]) -> list[str]:
    """What the class calls its special tokens, in the order of its parameters."""
    found = [str(p.default) for name, p in parameters.items() if name.endswith("_token") and isinstance(p.default, str)]
    return list(
        dict.fromkeys(["<unk>" if "unk_token" not in parameters else str(parameters["unk_token"].default), *found])
    )


def _words(mark: str) -> Sequence[str]:
    words = sorted({word for text in (*TEXTS, *SECONDS) for word in text.split()}, key=lambda w: (-len(w), w))
    letters = sorted({letter for word in words for letter in word})
    return [f"{mark}{word}" for word in words] + [mark, *letters]


def _trained(model: Any, special: Sequence[str]) -> dict[str, int]:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=VOCABULARY, special_tokens=list(special), show_progress=False
    )
    backend.train_from_iterator([*TEXTS, *SECONDS], trainer)
    found: dict[str, int] = backend.get_vocab()
    return found


def _byte_level() -> Any:
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*TEXTS, *SECONDS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|endoftext|>",
        bos_token="<|endoftext|>",
        model_input_names=["input_ids", "attention_mask"],
    )
