"""The ways of splitting a run over ranks or GPUs, of which it has one at most: the values of ``parallel.strategy``."""

from __future__ import annotations

from paceline.recipe.catalogue.speed import COPIED, NO_STEP
from paceline.recipe.entries import OwnSetting, Rule, Saving, TechniqueEntry

STRATEGY = "parallel.strategy"
"""The setting that names the way of splitting a run."""

INSTALL_DEEPSPEED = "DS_BUILD_OPS=0 pip install 'paceline[deepspeed]'"
"""None of its operators is compiled: what a run needs of them is torch's."""
_FEW_BITS = Rule(
    "optimizer.type=adamw8bit|adamw4bit|adamwfp8", "its states are rounded in blocks that would cross shards"
)
_WHOLE = "it takes hold of the products of a whole attention layer"
_MEETS = "processes meet inside each block, which no compiler sees"

_REDUCE_DTYPE = OwnSetting(
    "reduce_dtype",
    "number format of the gradients' all-reduce; bf16 halves the bytes and rounds each rank's share.",
    default="fp32",
)

_OFFLOAD = OwnSetting(
    "offload",
    "what is kept in main memory and used there: nothing; optimizer: states, and the update with them (deepspeed);"
    " parameters: weights, gradients and states. true and false stand for parameters and none.",
    default="none",
    chooses=True,
    needs=(Rule("device=cuda", "nothing moves on a CPU, whose memory the weights are in already"),),
    values=("none", "optimizer", "parameters"),
    of_values=(
        ("optimizer", Rule(f"{STRATEGY}!=fsdp", "it moves shards, gradients and states together: offload=parameters")),
        ("parameters", Rule("parallel.stage!=1|2", "only stage 3 has shards of the weights, which can be moved")),
    ),
)

_OFFLOAD_FOLDER = OwnSetting(
    "offload_folder",
    "folder on a disk (NVMe) for shards that are updated, their gradients and states: stage 3 with offload; null: main"
    " memory.",
    chooses=True,
    needs=(
        Rule("parallel.offload!=none", "it says where what is offloaded goes: add --set parallel.offload=optimizer"),
        Rule("parallel.stage!=1|2", "only stage 3 reads states from disks: --set parallel.stage=3"),
    ),
)

SCHEDULE = OwnSetting(
    "schedule",
    "order of a step's passes. 1f1b: a backward pass as soon as one can be made, so that few activations are kept;"
    " gpipe: all forward passes first; interleaved: 1f1b with two stages a process, which wait half as long.",
    default="1f1b",
    values=("1f1b", "gpipe", "interleaved"),
)

_FOREIGN = "it takes hold of every block, of which other processes have most"
_PAIRS = "its engine makes its micro-batches without partners"
_HOOKS = "DeepSpeed works in hooks on modules and gradients, where a graph of a block would be cut"
AXES: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "tensor",
        "Neighbouring processes share each block: some attention heads and MLP columns each.",
        "up to rounding",
        off=1,
        excludes=(
            NO_STEP,
            Rule("model.train=lora", "its weights stand beside the layers that would be cut"),
            Rule("parallel.strategy=fsdp", "its shards are cut from whole weights"),
            Rule("parallel.strategy=dp", "it is one process"),
            _FEW_BITS,
            Rule("techniques.early_pooling=true", _WHOLE),
            Rule("techniques.fused_qkv=true", _WHOLE),
            Rule("techniques.fusion=true", _MEETS),
            Rule("techniques.compile=true", _MEETS),
            Rule("techniques.capture=true", "processes meet inside each block, and a graph waits for no other process"),
        ),
        memory="of N processes each keeps 1/N of its blocks' weights, gradients and states, and of some activations",
        place="parallel.tensor",
        example=2,
        room="paceline.strategies.tensor.strategy",
    ),
    TechniqueEntry(
        "pipeline",
        "Neighbouring processes have stretches of the blocks each, and hand micro-batches on.",
        "up to rounding",
        off=1,
        excludes=(
            NO_STEP,
            Rule("model.train=head", "all stages but the last would have nothing to train"),
            Rule("model.train=lora", "not tried beside adapters"),
            Rule("parallel.tensor!=1", "norm and checkpoints know one cut of a tensor: over stages, or within a block"),
            Rule("parallel.strategy=fsdp", "its shards are of whole models"),
            Rule("parallel.strategy=deepspeed", "its engine makes its own passes"),
            Rule("parallel.strategy=dp", "it is one process"),
            Rule("parallel.backend=mpi", "messages over MPI were not tried"),
            Rule("parallel.sync_batch_norm=true", "batch norms are refused in a pipeline"),
            Rule("optimizer.type=adamw8bit|adamw4bit|adamwfp8", "not tried beside states of few bits"),
            Rule("techniques.fusion=true", _FOREIGN),
            Rule("techniques.compile=true", _FOREIGN),
            Rule("techniques.capture=true", "processes meet within each pass, and a graph waits for no other process"),
        ),
        memory="of N processes each keeps the weights, gradients and states of its blocks, and their activations of"
        " several micro-batches",
        place="parallel.pipeline",
        example=2,
        room="paceline.strategies.pipeline.strategy",
        settings=(SCHEDULE,),
        assumed="an estimate: the first stage, with the embeddings and the most micro-batches at a time; what others"
        " take, and the buffers of messages, are not counted",
    ),
)
"""Further ways in which processes share one model: each has a field of ``parallel``, and ranks of its own."""

STRATEGIES: tuple[TechniqueEntry, ...] = (
    TechniqueEntry(
        "ddp",
        "Every process keeps the model; gradients are summed in one flat buffer, beside the backward pass.",
        "up to rounding",
        auto="where weights, gradients and states fit a GPU",
        off="auto",
        excludes=(NO_STEP,),
        memory="every process keeps all weights, gradients and states",
        choice=STRATEGY,
        room="paceline.strategies.ddp.strategy",
        settings=(
            OwnSetting(
                "bucket_mib",
                "MiB of gradients in one all-reduce; null: 192 over NVLink, where many small ones slow the"
                " backward pass down, else 25, which begin early.",
                least=1,
                stays=True,
            ),
            _REDUCE_DTYPE,
        ),
    ),
    TechniqueEntry(
        "fsdp",
        "Every process keeps a shard of each weight, gradient and state; weights are whole while used.",
        "up to rounding",
        auto="where weights, gradients and states do not fit a GPU",
        off="auto",
        excludes=(
            NO_STEP,
            _FEW_BITS,
            Rule("techniques.channels_last=true", "a shard is cut from a weight in its usual order in memory"),
        ),
        memory="of N processes each keeps 1/N of weights, gradients and states",
        saving=Saving(
            "fsdp", 0.0, "each of {gpus} GPUs has its share of a step, and they exchange weights and gradients"
        ),
        shards=True,
        choice=STRATEGY,
        room="paceline.strategies.fsdp.strategy",
        settings=(
            OwnSetting(
                "shard_size",
                "processes that share one copy of the model, as those of one machine; null: all.",
                least=2,
                chooses=True,
            ),
            _OFFLOAD,
            _REDUCE_DTYPE,
        ),
    ),
    TechniqueEntry(
        "deepspeed",
        "Every process keeps shards of states (stage 1), gradients (2), weights (3), in DeepSpeed's engine.",
        "up to rounding",
        off="auto",
        excludes=(
            NO_STEP,
            _FEW_BITS,
            Rule("optimizer.ema!=null", "the average would be of weights that DeepSpeed's engine holds in shards"),
            Rule("data.augment.mixup!=0.0", _PAIRS),
            Rule("data.augment.cutmix!=0.0", _PAIRS),
            Rule("model.train=lora", "not tried beside adapters"),
            Rule("parallel.tensor!=1", "not tried beside blocks that processes share"),
            Rule("parallel.sync_batch_norm=true", "not tried beside batch norms in which processes meet"),
            Rule("techniques.precision=pure_bf16", "it keeps an fp32 copy of each weight, which that does without"),
            Rule("techniques.channels_last=true", "a shard is cut from a weight in its usual order in memory"),
            Rule("techniques.capture=true", "DeepSpeed's engine moves and frees tensors between passes"),
            Rule("techniques.compile=true", _HOOKS),
            Rule("techniques.fusion=true", _HOOKS),
        ),
        packages=("deepspeed",),
        install=INSTALL_DEEPSPEED,
        memory="of N processes each keeps 1/N of states and of an fp32 copy of the weights; of gradients from stage 2,"
        " of weights in stage 3",
        shards=True,
        alone=True,
        saving=Saving(
            "deepspeed",
            4.0,
            "needs the package deepspeed; the update is made in main memory, which takes several times as long",
            beside=("parallel.offload=optimizer",),
        ),
        assumed="what DeepSpeed holds beside the passes: by the rules of its code (0.19), on a GPU not measured",
        choice=STRATEGY,
        room="paceline.strategies.deepspeed.strategy",
        settings=(
            OwnSetting(
                "stage",
                "what is sharded, by ZeRO's stage. 1: states; 2: gradients too; 3: weights too; null: 2, or 3 where"
                " parameters are offloaded.",
                least=1,
                most=3,
                chooses=True,
            ),
            _OFFLOAD,
            _OFFLOAD_FOLDER,
        ),
    ),
    TechniqueEntry(
        "dp",
        "One process splits each batch over all its GPUs by torch's DataParallel: slow, for completeness.",
        "up to rounding",
        off="auto",
        needs=(Rule("device=cuda", "it splits each batch over several GPUs"),),
        excludes=(
            NO_STEP,
            Rule("techniques.packing=true", "a packed row cannot be split over several GPUs"),
            Rule("data.overflow=windows", "it would split a text's windows from the text's label"),
            Rule("techniques.early_pooling=true", "it needs packed rows, which cannot be split", only="asked"),
            *(
                Rule(f"techniques.{name}=true", COPIED)
                for name in ("fully_connected", "fused_qkv", "fusion", "recompute", "compile", "capture")
            ),
        ),
        memory="every GPU keeps all weights; the first also has states once and gradients three times",
        choice=STRATEGY,
        room="paceline.strategies.dp",
        one_process=True,
    ),
)
