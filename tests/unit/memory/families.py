"""Runs of many kinds of models: texts, packed and padded, and images."""

from __future__ import annotations

from typing import Any

from tests.unit.memory.apart import main
from tests.unit.memory.runs import BERT, SIZES, Found, assert_near, flat, traced

TEXTS: dict[str, dict[str, Any]] = {
    "bert": BERT,
    "roberta": {"model_type": "roberta", **SIZES},
    "electra": {"model_type": "electra", "embedding_size": 32, **SIZES},
    "distilbert": {
        "model_type": "distilbert",
        "dim": 64,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 130,
    },
    "modernbert": {
        "model_type": "modernbert",
        **SIZES,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "deberta": {
        "model_type": "deberta-v2",
        **SIZES,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
    },
    "albert": {"model_type": "albert", "embedding_size": 32, **SIZES},
}

PADDED = {"deberta"}
"""Whose attention cannot be packed."""

IMAGES: dict[str, dict[str, Any]] = {
    "vit": {
        "model_type": "vit",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "patch_size": 4,
        "image_size": 32,
    },
    "resnet": {
        "model_type": "resnet",
        "embedding_size": 16,
        "hidden_sizes": [32, 64],
        "depths": [2, 2],
        "layer_type": "bottleneck",
    },
    "convnext": {
        "model_type": "convnext",
        "hidden_sizes": [16, 32, 64, 64],
        "depths": [1, 1, 2, 1],
        "patch_size": 4,
        "image_size": 32,
    },
}


def _check(family: str, config: dict[str, Any], kinds: set[str]) -> tuple[Found, Found]:
    found, more = (traced(*settings, config=config) for settings in ((), ("loop.batch_size=32",)))
    plan = found.plan
    assert plan.moment in ("forward", "backward"), f"{family}: the peak is in {plan.moment}"
    assert plan.parts["parameters"] == plan.parts["gradients"] == flat(found.weights), family
    assert_near(plan.parts["optimizer states"], 2 * flat(found.weights))
    assert plan.num_parameters == plan.num_trained == sum(found.weights), family
    # the peak may be at another operator
    assert 1.7 < more.kept / found.kept < 2.3, f"{family}: {more.kept / found.kept:.3f} of the activations"
    assert more.plan.allocated > plan.allocated > sum(found.weights) * 16, family
    assert kinds <= set(plan.activations), f"{family}: {plan.activations}"
    assert plan.reserved >= plan.allocated
    return found, more


def check_texts() -> None:
    for family, config in TEXTS.items():
        found, _ = _check(family, config, {"linear layers", "norms", "attention"})
        layout = "padded" if family in PADDED else "packed"
        assert found.plan.execution["layout"] == layout, f"{family}: {found.plan.execution}"
        said = [decision for decision in found.plan.decisions if decision.setting == "techniques.packing"]
        assert [decision.value for decision in said] == [str(layout == "packed").lower()], family


def check_a_shared_block_has_its_weights_once_and_its_activations_twice() -> None:
    albert, bert = traced(config=TEXTS["albert"]), traced()
    assert albert.plan.parts["parameters"] < 0.6 * bert.plan.parts["parameters"]
    assert albert.kept > 0.8 * bert.kept


def check_images() -> None:
    for family, config in IMAGES.items():
        kinds = {"attention"} if family == "vit" else {"convolutions"}
        found, more = _check(family, config, kinds)
        assert (found.plan.samples, found.plan.slots) == (16, 16), family
        assert found.plan.execution["layout"] == "images"
        # uint8 images of all 128 samples, as they are gathered from
        assert found.plan.parts["data"] == more.plan.parts["data"] >= 128 * 32 * 32 * 3, family


def check_batch_norms_keep_their_statistics() -> None:
    resnet = traced(config=IMAGES["resnet"])
    assert resnet.plan.parts["buffers"] > 0
    assert "norms" in resnet.plan.activations


if __name__ == "__main__":
    main(globals())
