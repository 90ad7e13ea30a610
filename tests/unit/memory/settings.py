"""What settings do to a run's memory: optimizers, precision, what is trained, attention, captured steps."""

from __future__ import annotations

import pytest

from tests.unit.memory.apart import main
from tests.unit.memory.runs import BERT, assert_near, flat, traced

WHOLE = "techniques.early_pooling=false"


def check_frozen_weights_have_no_gradients_and_no_states() -> None:
    found, last = traced("model.train=head"), traced("model.train=last:1")
    for one, most in ((found, 0.01), (last, 0.5)):
        assert 0 < sum(one.trained) < most * sum(one.weights)
    assert last.plan.parts["gradients"] == flat(last.trained)
    assert_near(last.plan.parts["optimizer states"], 2 * flat(last.trained))
    assert last.kept < traced().kept, "nothing is kept for the backward pass of a frozen block"
    update = last.plan.phases["update"] - found.plan.phases["update"]
    assert abs(update - 3 * (flat(last.trained) - flat(found.trained))) < 64 * 1024, "one block's three"


def check_features_take_a_pass_of_an_evaluations_batch() -> None:
    few, many, none = (
        traced("model.train=features", f"loop.evaluation_batch_size={size}", f"data.splits.validation={split}")
        for size, split in ((2, 0.25), (8, 0.25), (8, 0))
    )
    assert (few.plan.samples, many.plan.samples, none.plan.samples) == (2, 8, 8), "all training samples go through"
    held = (many.plan.slots - few.plan.slots) * BERT["hidden_size"] * 2
    assert many.plan.phases["evaluation"] - few.plan.phases["evaluation"] > held > 0, "in bf16, of a layer"
    assert not {"forward", "backward", "update"} & set(many.plan.phases), "there are no steps"


def check_states_of_other_optimizers() -> None:
    momentum, plain = (
        traced("optimizer.type=sgd"),
        traced("optimizer.type=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"),
    )
    weights = 4 * sum(momentum.weights)
    assert_near(momentum.plan.parts["optimizer states"], weights)
    assert plain.plan.parts.get("optimizer states", 0) < 4096


def check_accumulation_leaves_activations_as_they_are() -> None:
    one, two = traced(WHOLE), traced(WHOLE, "loop.batch_size=32", "loop.micro_batch_size=16")
    assert two.plan.samples == 16
    assert abs(two.kept - one.kept) <= one.plan.parts["buffers"], "but for what the warm-up remembers"
    # the next micro-batch is there before the last has gone
    assert 0 <= two.plan.allocated - one.plan.allocated <= 2 * one.plan.parts["batch"]


def check_fp32_takes_more_than_bf16() -> None:
    narrow, wide = traced(), traced("techniques.precision=fp32")
    assert 1.3 * narrow.kept < wide.kept < 2.5 * narrow.kept
    assert wide.plan.parts["parameters"] == narrow.plan.parts["parameters"], "weights are fp32 in both"
    half = traced("techniques.precision=fp16")
    assert 0 <= half.kept - narrow.kept <= 16, "a loss that is scaled"


def check_padded_batches_take_a_mask_along() -> None:
    packed, padded = traced(WHOLE), traced("techniques.packing=false")
    assert packed.plan.execution["layout"] == "packed"
    assert padded.plan.execution["layout"] == "padded"
    assert padded.plan.slots == packed.plan.slots, "all texts are of one length here"
    assert "attention by flash" in packed.plan.assumed, packed.plan.assumed
    assert "attention by cudnn" in padded.plan.assumed, padded.plan.assumed


def check_eager_attention_keeps_its_scores() -> None:
    fused, eager = (
        traced("techniques.packing=false", config={**BERT, "attn_implementation": name}) for name in ("sdpa", "eager")
    )
    # of two layers: scores after softmax in fp32 and in bf16, after dropout with its mask
    scores = 16 * 4 * 64 * 64
    assert eager.kept - fused.kept > 2 * scores * (4 + 2 + 2 + 1) * 0.6
    assert "attention" in eager.plan.activations


def check_captured_steps_reserve_hardly_more() -> None:
    eager, captured = (
        traced("data.pad_to_multiple_of=64"),
        traced("data.pad_to_multiple_of=64", "techniques.capture=true"),
    )
    assert captured.plan.slots == eager.plan.slots
    more = captured.plan.reserved - eager.plan.reserved
    assert 0 < more < 120 * 2**20, "workspaces and pages of the captures' pool, which what runs eagerly first shares"
    assert captured.plan.execution["steps"].startswith("captured")
    assert eager.plan.execution["steps"].startswith("eager")


def check_compiled_blocks_keep_no_more() -> None:
    eager, compiled = traced(WHOLE), traced(WHOLE, "techniques.compile=true")
    assert compiled.plan.execution["compile"].startswith("each of 2 blocks"), compiled.plan.execution
    # at their peaks, which come at different moments: without passing results, where the most is kept
    assert 0.4 * eager.kept < compiled.kept < 1.1 * eager.kept, f"{compiled.kept / eager.kept:.2f}"
    assert compiled.plan.allocated < eager.plan.allocated
    assert compiled.plan.parts["parameters"] == eager.plan.parts["parameters"]


def check_our_kernels_keep_less() -> None:
    plain, fused = traced(WHOLE), traced(WHOLE, "techniques.fusion=true")
    assert fused.plan.execution["fusion"] == "2 norms and 1 GELU a block", fused.plan.execution
    assert 0.4 * plain.kept < fused.kept < plain.kept, f"{fused.kept / plain.kept:.2f}"


def check_a_factorys_model() -> None:
    found = traced(config={"factory": "tests.unit.memory.runs:convolutional"})
    assert found.plan.parts["parameters"] == flat(found.weights)
    assert found.plan.parts["buffers"] >= 2 * 8 * 4 + 8, "means, variances and a counter"
    assert "convolutions" in found.plan.activations


def check_a_model_that_asks_for_numbers_is_no_plan() -> None:
    with pytest.raises(RuntimeError, match="DataDependentOutputException"):
        traced(config={"factory": "tests.unit.memory.runs:asking"})


def check_augmented_images() -> None:
    model = {"factory": "tests.unit.memory.runs:convolutional"}
    try:
        plain, augmented = traced(config=model), traced("data.augment.flip=true", "data.augment.crop=2", config=model)
    except RuntimeError as error:
        raise AssertionError from error
    assert augmented.plan.allocated >= plain.plan.allocated


def check_packed_and_padded_are_compared_in_a_plan_as_in_a_run() -> None:
    packed, padded = traced(), traced("techniques.packing=false")
    before = packed.plan.phases["preparation"] - padded.plan.phases["preparation"]
    assert before > 3 * flat(packed.weights), "a copy, and its gradients twice"


def check_states_of_eight_bits_are_beside_the_largest_batch() -> None:
    found = traced("techniques.packing=false", "optimizer.type=adamw8bit").plan
    # two bytes a weight, a scale each 256, and small weights in fp32
    share = found.parts.get("optimizer states", 0) / found.num_trained
    assert 2.0 < share < 2.7, f"{share:.2f} bytes a weight at the peak"


def check_kahans_compensation_is_beside_the_largest_batch() -> None:
    narrow = ("techniques.packing=false", "techniques.precision=pure_bf16")
    plain, kahan = traced(*narrow).plan, traced(*narrow, "optimizer.rounding=kahan").plan
    more = kahan.parts.get("optimizer states", 0) - plain.parts.get("optimizer states", 0)
    assert_near(more, 2 * plain.num_trained)


def check_batch_normalisation_is_seen() -> None:
    images = {"factory": "tests.unit.memory.runs:convolutional"}
    assert traced(config=images).plan.normalises_batches
    # taken to pieces by the compiler, and no evaluation shows it whole
    alone = ("techniques.compile=true", "data.splits.validation=0", "data.splits.test=0")
    assert traced(*alone, config=images).plan.normalises_batches
    assert not traced().plan.normalises_batches


def check_the_same_run_is_traced_alike() -> None:
    assert traced().events == traced("seed=0").events
    assert traced().events != traced("loop.batch_size=32").events


if __name__ == "__main__":
    main(globals())
