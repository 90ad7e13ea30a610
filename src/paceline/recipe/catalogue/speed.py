"""What makes a run faster or smaller and leaves its result as it is: each a field of ``techniques``."""

from __future__ import annotations

from paceline.recipe.entries import Rule, Saving, TechniqueEntry, Value

NO_STEP = Rule("model.train=features", "no step is made with train: features")
_OWN_KERNELS = Rule("device=cuda", "its kernels are for GPUs")
_NOT_ON_A_CPU = Rule("device=cuda", "not measured to pay on a CPU", only="auto")
_NOT_TRAINED = "no embedding is trained"
_DORA = Rule("model.lora.dora=true", "peft's DoRA asks for the class of a weight, which no compiler traces")
SYNC = "parallel.sync_batch_norm=true"
COPIED = "DataParallel copies the model at every pass, and a copy would compute with the first GPU's weights"

SPEED: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "packing",
        "Put the texts of a micro-batch one after the other in one row: no padding, no mask.",
        "up to rounding",
        auto="wherever packed and padded gradients of this model are found equal at the start",
        inference="open",
        memory="nothing is kept of padding; on a GPU each row may have some filler",
    ),
    TechniqueEntry(
        "early_pooling",
        "In the last block compute only the position of each text that the head reads.",
        "up to rounding",
        auto="of packed rows, wherever gradients with and without the other positions are found equal at the start",
        needs=(Rule("techniques.packing=auto|true", "it picks positions out of packed rows", only="asked"),),
        excludes=(Rule("parallel.stage=3", "what gathers the weights of a module puts a copy in place of its input"),),
        inference="auto",
        memory="the last block keeps keys and values of all positions, and else one position a text",
    ),
    TechniqueEntry(
        "channels_last",
        "Keep images and convolution weights with the channels last in memory.",
        "up to rounding",
        auto="for convolutions on a GPU",
        needs=(_NOT_ON_A_CPU,),
        inference="kept",
        memory="a copy of a batch's images that are not in this order yet",
    ),
    TechniqueEntry(
        "fully_connected",
        "Compute convolutions that put out one pixel as matrix products over the pixels they see.",
        "up to rounding",
        auto="on a GPU",
        needs=(_NOT_ON_A_CPU,),
    ),
    TechniqueEntry(
        "precision",
        "Compute in tf32, bf16, fp16, or only bf16.",
        "up to rounding",
        auto="bf16 on GPUs that compute in it, fp32 elsewhere",
        off="fp32",
        # NVIDIA, CUDA programming guide, arithmetic by compute capability: bf16 and tf32 from 8.0, fp16 from 5.3
        values=(
            Value("tf32", (8, 0), "tf32 is a mode of the tensor cores of GPUs and has no effect on a CPU"),
            Value("bf16", (8, 0)),
            Value("fp16", (5, 3), "fp16 with loss scaling is for GPUs: CPUs compute it in software"),
            Value(
                "pure_bf16",
                (8, 0),
                words="weights, gradients and the optimizer's states too",
                preserves="changes the result",
            ),
        ),
        execution=False,
        inference="open",
        memory="bf16 and fp16 keep activations of matrix products in half the bytes, pure_bf16 all there is",
    ),
    TechniqueEntry(
        "fused_qkv",
        "Compute query, key and value of an attention layer in one matrix product.",
        "up to rounding",
        auto="on a GPU",
        needs=(_NOT_ON_A_CPU,),
        memory="a joined copy of each attention layer's three weights",
    ),
    TechniqueEntry(
        "fusion",
        "Compute bias and GELU, and dropout, residual and LayerNorm, by one kernel each.",
        "up to rounding",
        auto="on a GPU, in bf16 or fp16",
        takes="fewer passes over memory, and nothing to compile",
        needs=(
            _OWN_KERNELS,
            Rule(
                "techniques.precision=bf16|fp16",
                "its kernels are for autocast: products in bf16 or fp16 beside sums in fp32",
            ),
        ),
        excludes=(NO_STEP, _DORA),
        packages=("triton",),
        capability=(8, 0),
    ),
    TechniqueEntry(
        "embedding_gradient",
        "Add up the gradients of embeddings by kernels of our own.",
        "up to rounding",
        auto="on a GPU, where the step is not compiled",
        needs=(_OWN_KERNELS, Rule("model.train=all", _NOT_TRAINED, only="auto")),
        excludes=(
            Rule("model.train=head|lora|features", _NOT_TRAINED),
            Rule("parallel.strategy=fsdp", "not measured beside shards", only="auto"),
            Rule("parallel.strategy=dp", COPIED),
        ),
        packages=("triton",),
    ),
    TechniqueEntry(
        "recompute",
        "Recompute each block's activations in the backward pass instead of keeping them.",
        "bit-exact",
        excludes=(Rule("model.train=head|features", "no block has a backward pass"),),
        memory="of each block only the input is kept",
        # one forward pass more, where a step is worth three: Chen et al., arXiv 1604.06174
        saving=Saving("true", 1 / 3, "up to {slowdown:.0%} slower: one forward pass more"),
    ),
    TechniqueEntry(
        "compile",
        "Compile each block of the model for training.",
        "up to rounding",
        auto="on a GPU, when the run is long enough to win back the seconds of compiling",
        needs=(_NOT_ON_A_CPU,),
        excludes=(NO_STEP, _DORA, Rule(SYNC, "ranks meet in every batch norm, which a compiled block cannot hold")),
        packages=("triton",),
        memory="fused kernels keep fewer intermediate results",
    ),
    TechniqueEntry(
        "capture",
        "Capture the kernels of a step as CUDA graphs and replay them.",
        "bit-exact",
        auto="on a GPU",
        takes="replayed steps cost the host next to nothing",
        needs=(Rule("device=cuda", "CUDA graphs need a GPU"),),
        excludes=(
            NO_STEP,
            Rule("parallel.offload!=none", "the host waits for what travels between its memory and the GPU"),
            Rule(SYNC, "ranks meet in every batch norm; graphs that hold what ranks exchange are not proven with it"),
            Rule("techniques.recompute=true", "recompute saves and restores the random numbers' state on the host"),
            Rule("data.overflow=windows", "each step has another number of windows, and so another shape"),
        ),
        room="paceline.engine.capture",
        memory="the graphs keep a pool of their own",
    ),
)
"""Every technique with a field of its own, in the order of application."""
