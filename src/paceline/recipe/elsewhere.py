"""What settings are called elsewhere, and what they are here: the one table of it.

Errors about unknown keys and docs/coming-from.md are both made of it. Names are those of transformers'
TrainingArguments and example scripts, Lightning's Trainer and callbacks, Accelerate's Accelerator and configuration,
DeepSpeed's JSON, peft's LoraConfig, the training scripts of timm and torchvision, and what scikit-learn, PyTorch,
XGBoost and LightGBM have for rare labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final


@dataclass(frozen=True)
class Name:
    """A setting elsewhere."""

    called: str
    """All that it is called, blanks between; a dotted one is of a configuration with groups."""
    here: str = ""
    """What takes its place: ``optimizer.lr`` takes the value as it is, ``seed=1`` has its own, ``--gpus {}`` is typed,
    with the value for ``{}``. Empty: nothing does, and ``note`` says why."""
    note: str = ""
    """What is different, or why there is nothing of the kind: a clause for people."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Value there, in lower case -> ``here`` for it; empty where that is so without being set."""
    only: bool = False
    """Whether no other value there is one here."""

    @property
    def names(self) -> tuple[str, ...]:
        """Each of them."""
        return tuple(self.called.split())


TRAINER, LIGHTNING, ACCELERATE, DEEPSPEED = "transformers' Trainer", "Lightning", "Accelerate", "DeepSpeed"
PEFT: Final = "PEFT"
TIMM = "timm's and torchvision's scripts"
APEX, HOROVOD, LAUNCH = "Apex", "Horovod", "torch.distributed.launch"
IMBALANCE = "losses and rare labels, in scikit-learn, PyTorch and XGBoost"

_LEFT_OUT: Final = {"false": ""}
_UNCLIPPED: Final = {"0": "optimizer.clip_norm=null", "0.0": "optimizer.clip_norm=null"}
_GLOBAL: Final = "loop.batch_size is the global batch: the samples of one update on all GPUs together"
_PIECES: Final = (
    "set the batch of an update, loop.batch_size, and what a GPU takes of it at a time; the number of pieces follows"
)


def _of(setting: str, words: str) -> dict[str, str]:
    """Values of one setting, ``there=here`` each, or one word where both call it so."""
    pairs = (word.partition("=") for word in words.split())
    return {there: f"{setting}={here or there}" for there, _, here in pairs}


_PRECISION: Final = _of(
    "techniques.precision",
    "no=fp32 32=fp32 32-true=fp32 16=fp16 fp16 16-mixed=fp16 bf16 bf16-mixed=bf16 bf16-true=pure_bf16",
)
_SHARDED: Final = "fsdp shards as stage 3 does and needs no package; deepspeed has parallel.stage, 1 to 3"
_STAGE: Final = "parallel.strategy=deepspeed --set parallel.stage="
_ZERO: Final = {
    "deepspeed": f"{_STAGE}2",
    **{f"deepspeed_stage_{stage}": f"{_STAGE}{stage}" for stage in (1, 2, 3)},
    "deepspeed_stage_2_offload": f"{_STAGE}2 --set parallel.offload=optimizer",
    "deepspeed_stage_3_offload": f"{_STAGE}3 --set parallel.offload=parameters",
}
_LOADING: Final = (
    "texts are encoded once and kept on the disk; a thread reads ahead, through pinned memory, without more processes"
)
_EVERY: Final = "no=never epoch steps=500"


TABLE: Final[Mapping[str, tuple[Name, ...]]] = {
    TRAINER: (
        Name("learning_rate", "optimizer.lr"),
        Name("num_train_epochs", "loop.epochs", "a whole number; loop.max_steps ends a run sooner"),
        Name(
            "per_device_train_batch_size per_gpu_train_batch_size",
            "loop.batch_size={} x GPUs",
            f"{_GLOBAL}, those of all pieces (gradient_accumulation_steps) too",
        ),
        Name("per_device_eval_batch_size", "loop.evaluation_batch_size"),
        Name("gradient_accumulation_steps", "loop.micro_batch_size=N", _PIECES),
        Name("gradient_checkpointing", "techniques.recompute=true", values=_LEFT_OUT),
        Name("fp16", "techniques.precision=fp16", values=_LEFT_OUT),
        Name("bf16", "techniques.precision=bf16", "auto takes it on GPUs that compute in bf16", values=_LEFT_OUT),
        Name("tf32", "techniques.precision=tf32", values=_LEFT_OUT),
        Name("fp16_full_eval bf16_full_eval", note="an evaluation has the precision of the run"),
        Name("warmup_ratio", "schedule.warmup", "below 1 it is a share of all steps"),
        Name("warmup_steps num_warmup_steps", "schedule.warmup", "from 1 it is a number of steps"),
        Name("weight_decay", "optimizer.weight_decay"),
        Name("max_grad_norm", "optimizer.clip_norm", values=_UNCLIPPED),
        Name("max_steps", "loop.max_steps", values={"-1": ""}),
        Name(
            "lr_scheduler_type lr_scheduler",
            "schedule.type",
            "or one_cycle, as torch's OneCycleLR, or a function of yours; schedule.warmup comes before each",
            values=_of(
                "schedule.type",
                "linear cosine constant constant_with_warmup=constant polynomial=module:function"
                " cosine_with_restarts=cosine_restarts inverse_sqrt",
            ),
            only=True,
        ),
        Name("num_cycles", "schedule.cycles", "with schedule.type=cosine_restarts; one cycle is schedule.type=cosine"),
        Name(
            "layer_decay layerwise_lr_decay layer_lr_decay llrd",
            "optimizer.layer_decay",
            "the head has the whole rate, the last block this times it, the embeddings the smallest",
        ),
        Name(
            "optim",
            "optimizer.type",
            "adamw, adam, sgd or adamw8bit, which saves memory of states, as adamw4bit and adamwfp8 do; each is"
            " fused by itself",
            values={
                **_of(
                    "optimizer.type",
                    "adamw_torch=adamw adamw_torch_fused=adamw adamw_hf=adamw sgd adamw_bnb_8bit=adamw8bit"
                    " adamw_8bit=adamw8bit",
                ),
                "adamw_torch_8bit": "optimizer.type=adamw8bit --set optimizer.low_bit=torchao",
                "adamw_torch_4bit": "optimizer.type=adamw4bit",
            },
            only=True,
        ),
        Name(
            "adafactor",
            note="optimizer.type=adamw8bit saves memory of states, by another update rule",
            values=_LEFT_OUT,
        ),
        Name("adam_beta1 adam_beta2", "optimizer.betas=[0.9,0.999]", "both in one list"),
        Name("adam_epsilon", "optimizer.eps"),
        Name(
            "label_smoothing_factor label_smoothing",
            "task.label_smoothing",
            "of the loss of evaluations too, as the Trainer has it",
            values={"0": "", "0.0": ""},
        ),
        Name(
            "group_by_length length_column_name pad_to_max_length",
            note="batches are packed, so nothing is padded and texts stay in random order: techniques.packing",
        ),
        Name("torch_compile", "techniques.compile", "auto compiles where the run is long enough"),
        Name(
            "torch_compile_mode torch_compile_backend",
            note="techniques.compile compiles each block, and techniques.capture captures CUDA graphs; both are auto",
        ),
        Name(
            "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor dataloader_persistent_workers",
            note=_LOADING,
        ),
        Name("dataloader_drop_last", "loop.drop_last"),
        Name("eval_steps", "loop.evaluate_every"),
        Name(
            "eval_strategy evaluation_strategy",
            "loop.evaluate_every",
            "epoch, never, or the number of steps itself",
            values=_of("loop.evaluate_every", _EVERY),
            only=True,
        ),
        Name("save_steps", "loop.checkpoint_every"),
        Name(
            "save_strategy",
            "loop.checkpoint_every",
            "epoch, never, or the number of steps itself; the best is kept in any case",
            values=_of("loop.checkpoint_every", _EVERY) | {"best": ""},
            only=True,
        ),
        Name("save_total_limit", "loop.keep_last"),
        Name("logging_steps", "observe.log_every"),
        Name(
            "logging_dir logging_strategy logging_first_step",
            note="every step is in the run folder's metrics.jsonl; observe.log_every is of the console alone",
        ),
        Name("load_best_model_at_end", "loop.save_best"),
        Name("metric_for_best_model", "loop.best_metric"),
        Name(
            "greater_is_better",
            "loop.best_metric=-NAME",
            "a leading '-' means that lower is better",
            values={"true": ""},
        ),
        Name("early_stopping_patience", "loop.early_stopping.patience"),
        Name("early_stopping_threshold", "loop.early_stopping.min_delta"),
        Name(
            "report_to",
            note="the run folder's metrics.jsonl has a record a line, from which any tracker can be fed",
            values={"none": "", "tensorboard": "observe.tensorboard=true"},
        ),
        Name("resume_from_checkpoint", "paceline train RUN --resume", "RUN is the run's folder"),
        Name("output_dir", "--out {}"),
        Name("overwrite_output_dir", note="a folder with a run in it is never overwritten: name another --out"),
        Name("run_name", "name"),
        Name("data_seed", "seed", "the order of samples follows from it too"),
        Name("full_determinism", "deterministic"),
        Name("max_seq_length model_max_length", "data.max_length"),
        Name(
            "truncation_side",
            "data.overflow",
            "head+tail keeps both ends, windows all of a text",
            values={"right": "", "left": "data.overflow=tail"},
            only=True,
        ),
        Name(
            "doc_stride return_overflowing_tokens",
            "data.overflow=windows",
            "data.stride is by how much windows overlap: a share of a window, or a number of tokens from 1",
            values={"false": ""},
        ),
        Name("model_name_or_path pretrained_model_name_or_path model_name", "model.source"),
        Name("tokenizer_name", "model.tokenizer"),
        Name("model_revision", "model.revision"),
        Name("train_file dataset_name", "data.source", "a data set of the Hub is hub:NAME"),
        Name("validation_file", "data.validation"),
        Name("test_file", "data.test"),
        Name("text_column_name text_column_names", "data.text"),
        Name("label_column_name label_names", "data.label"),
        Name("remove_unused_columns", note="columns are named by data.text, data.pair and data.label alone"),
        Name(
            "problem_type",
            "task.type",
            values=_of(
                "task.type",
                "single_label_classification=classification multi_label_classification=multi_label regression",
            ),
            only=True,
        ),
        Name("num_labels id2label label2id", note="labels and their names are read off the data"),
        Name("do_train do_eval do_predict", "paceline train, evaluate or predict", "each is a command"),
        Name("no_cuda use_cpu", "device=cpu", values=_LEFT_OUT),
        Name(
            "local_rank ddp_timeout",
            "--gpus N",
            "ranks are started, or found as torchrun says; --timeout SECONDS is how long they wait",
        ),
        Name("ddp_backend", "parallel.backend"),
        Name("ddp_bucket_cap_mb", "parallel.bucket_mib"),
        Name("ddp_find_unused_parameters", note="a parameter without a gradient counts as zeros"),
        Name("fsdp fsdp_config", "parallel.strategy=fsdp", _SHARDED),
        Name(
            "deepspeed",
            "parallel.strategy=deepspeed",
            "its JSON is not read: parallel.stage and parallel.offload are the settings of it that are left",
        ),
        Name(
            "auto_find_batch_size",
            "loop.on_oom=split",
            "the batch stays, and only its pieces get smaller",
            values=_LEFT_OUT,
        ),
        Name("push_to_hub hub_model_id", note="nothing is uploaded: hf upload NAME RUN/model does it"),
        Name("cache_dir", note="HF_HOME says where models of the Hub are kept"),
        Name("token use_auth_token hub_token", note="HF_TOKEN, an environment variable, is sent to the Hub"),
    ),
    LIGHTNING: (
        Name("max_epochs", "loop.epochs"),
        Name("precision", "techniques.precision", values=_PRECISION, only=True),
        Name(
            "accelerator",
            "device",
            "auto, cuda or cpu; there is no other device",
            values={"gpu": "device=cuda", "cuda": "device=cuda", "cpu": "device=cpu", "auto": ""},
            only=True,
        ),
        Name("devices", "--gpus {}", "or --devices 1,3 for these GPUs; --processes N on the CPU"),
        Name(
            "strategy",
            "parallel.strategy",
            _SHARDED,
            values={
                "auto": "",
                **_of("parallel.strategy", "dp ddp ddp_find_unused_parameters_true=ddp ddp_sharded=fsdp fsdp"),
                **_ZERO,
            },
            only=True,
        ),
        Name("num_nodes", "torchrun --nnodes {}", "docs/distributed.md has the whole command"),
        Name("accumulate_grad_batches", "loop.micro_batch_size=N", _PIECES),
        Name("gradient_clip_val", "optimizer.clip_norm", values=_UNCLIPPED),
        Name("gradient_clip_algorithm", note="gradients are clipped by their norm: optimizer.clip_norm"),
        Name("val_check_interval", "loop.evaluate_every=N", "a number of steps, or epoch"),
        Name(
            "check_val_every_n_epoch", "loop.evaluate_every=epoch", "each epoch, or a number of steps: that of n epochs"
        ),
        Name("limit_train_batches overfit_batches", "loop.max_steps"),
        Name("fast_dev_run", "loop.max_steps=1", values=_LEFT_OUT),
        Name(
            "limit_val_batches limit_test_batches",
            "data.splits.validation=N",
            "the split itself is made smaller: a share of the rows, or their number",
        ),
        Name("num_sanity_val_steps", note="data are checked before the first step, every row of them"),
        Name("log_every_n_steps", "observe.log_every"),
        Name(
            "logger",
            note="the run folder's metrics.jsonl has a record a line, from which any tracker can be fed",
            values={"false": "", "tensorboard": "observe.tensorboard=true"},
        ),
        Name("enable_progress_bar", "observe.console=off", values={"true": ""}),
        Name("enable_checkpointing", "loop.checkpoint_every=never", values={"true": ""}),
        Name("every_n_train_steps", "loop.checkpoint_every"),
        Name("train_time_interval", "loop.checkpoint_minutes", "a number of minutes"),
        Name("save_top_k", "loop.keep_last", "the newest ones; the best of its time is kept beside"),
        Name("monitor", "loop.best_metric", "a leading '-' means that lower is better"),
        Name("patience", "loop.early_stopping.patience", "counted in evaluations"),
        Name("default_root_dir dirpath", "--out {}"),
        Name("ckpt_path", "paceline train RUN --resume", "RUN is the run's folder"),
        Name("profiler", "paceline trace RECIPE --steps 90:100"),
        Name("benchmark", "techniques.cudnn_benchmark"),
        Name("sync_batchnorm", "parallel.sync_batch_norm"),
        Name(
            "swa_lrs swa_epoch_start annealing_epochs",
            note="no stochastic weight averaging: optimizer.ema keeps a moving average over the whole run",
        ),
        Name("update_every_n_steps", "optimizer.ema.every", "of EMAWeightAveraging"),
        Name("detect_anomaly", note="a loss or gradient that is no number is found at once, and the rows named"),
        Name("num_workers pin_memory persistent_workers prefetch_factor", note=_LOADING),
        Name("freeze freeze_backbone", "model.train=head", values=_LEFT_OUT),
        Name(
            "callbacks", note="steps are watched through files and spans: docs/own-loop.md has the loop in your hands"
        ),
    ),
    ACCELERATE: (
        Name(
            "mixed_precision",
            "techniques.precision",
            "fp32, tf32, bf16, fp16 or pure_bf16; fp8 is not there",
            values=_PRECISION,
            only=True,
        ),
        Name("num_processes", "--gpus {}", "or --processes N on the CPU"),
        Name("gpu_ids", "--devices 1,3"),
        Name("num_machines machine_rank", "torchrun --nnodes {}", "docs/distributed.md has the whole command"),
        Name(
            "main_process_ip main_process_port",
            "--init tcp://HOST:PORT",
            "with --rank and --world-size, for ranks that are started one by one",
        ),
        Name(
            "distributed_type",
            "parallel.strategy=fsdp",
            "auto, ddp, fsdp, deepspeed or dp",
            values={"no": "", **_of("parallel.strategy", "multi_gpu=ddp fsdp deepspeed multi_cpu=ddp")},
            only=True,
        ),
        Name("split_batches", note=f"{_GLOBAL}, which is split_batches=True"),
        Name(
            "dispatch_batches even_batches use_seedable_sampler",
            note="every rank knows the order of samples, and takes its share of each batch",
        ),
        Name("dynamo_backend dynamo_config", "techniques.compile=true", values={"no": ""}),
        Name(
            "fsdp_sharding_strategy fsdp_version",
            "parallel.strategy=fsdp",
            "parallel.shard_size=N is HYBRID_SHARD over N processes",
        ),
        Name("fsdp_offload_params", "parallel.offload=parameters", values=_LEFT_OUT),
        Name("fsdp_activation_checkpointing", "techniques.recompute"),
    ),
    DEEPSPEED: (
        Name("train_batch_size", "loop.batch_size", _GLOBAL),
        Name("train_micro_batch_size_per_gpu", "loop.micro_batch_size", f"what a GPU takes at a time; {_GLOBAL}"),
        Name(
            "zero_optimization.stage zero_stage",
            "parallel.stage",
            "with parallel.strategy=deepspeed; fsdp shards as stage 3 does and needs no package",
            values={"0": "parallel.strategy=ddp"},
        ),
        Name(
            "zero_optimization.offload_optimizer offload_optimizer.device",
            "parallel.offload=optimizer",
            "with parallel.strategy=deepspeed; nvme: parallel.offload_folder=FOLDER too, with stage 3",
            values={"none": ""},
        ),
        Name(
            "zero_optimization.offload_param offload_param.device",
            "parallel.offload=parameters",
            "with stage 3 of parallel.strategy=deepspeed, or with fsdp; nvme: weights stay in main memory",
            values={"none": ""},
        ),
        Name("zero_optimization.reduce_bucket_size", "parallel.bucket_mib=N", "MiB, not elements"),
        Name(
            "zero_optimization.overlap_comm zero_optimization.contiguous_gradients",
            note="gradients are summed beside the backward pass by themselves",
        ),
        Name("gradient_clipping", "optimizer.clip_norm", values=_UNCLIPPED),
        Name("warmup_num_steps", "schedule.warmup"),
        Name("initial_scale_power", "optimizer.loss_scale.init_scale=N", "2 to the power of it"),
        Name("loss_scale_window", "optimizer.loss_scale.growth_interval"),
        Name("loss_scale", note="fp16's scale adapts itself; optimizer.loss_scale.init_scale is where it begins"),
        Name("activation_checkpointing", "techniques.recompute=true"),
        Name("communication_data_type", "parallel.reduce_dtype"),
        Name("steps_per_print", "observe.log_every"),
        Name("wall_clock_breakdown flops_profiler", "paceline trace RECIPE --steps 90:100"),
    ),
    PEFT: (
        Name("r lora_r lora_rank", "model.lora.rank", "beside model.train=lora"),
        Name("lora_alpha", "model.lora.alpha", "beside model.train=lora"),
        Name("lora_dropout", "model.lora.dropout", "beside model.train=lora"),
        Name(
            "target_modules lora_target_modules",
            "model.lora.targets",
            "beside model.train=lora; auto takes all linear layers of the blocks",
            values={"all-linear": ""},
        ),
        Name("use_dora", "model.lora.dora", "beside model.train=lora", values=_LEFT_OUT),
        Name("use_peft use_lora", "model.train=lora", values=_LEFT_OUT),
        Name("modules_to_save", note="the head is trained in full beside the adapters, and nothing else"),
    ),
    TIMM: (
        Name(
            "model_ema use_ema",
            "optimizer.ema=0.999",
            "the decay itself; both are measured, and the average is saved",
            values=_LEFT_OUT,
        ),
        Name(
            "model_ema_decay ema_decay",
            "optimizer.ema",
            "between 0 and 1; 0.9999 looks back on ten thousand steps, more than most fine-tunings have",
        ),
        Name(
            "model_ema_warmup",
            "optimizer.ema.warmup",
            "TensorFlow's warm-up of the decay; optimizer.ema.decay goes with it",
        ),
        Name("model_ema_steps", "optimizer.ema.every", "in applied steps; optimizer.ema.decay goes with it"),
    ),
    IMBALANCE: (
        Name(
            "class_weight",
            "task.class_weights",
            "balanced, or a map from label names to weights",
            values={"balanced": "task.class_weights=balanced", "null": "", "none": ""},
        ),
        Name(
            "pos_weight scale_pos_weight is_unbalance",
            "task.class_weights=balanced",
            "or a map from label names to weights: {negative: 1, positive: 5}",
        ),
        Name(
            "focal_loss",
            "task.loss=focal",
            "task.focal_gamma is its gamma, and task.class_weights its alpha",
            values=_LEFT_OUT,
        ),
        Name("gamma fl_gamma", "task.loss=focal --set task.focal_gamma={}", "of the focal loss"),
        Name("weightedrandomsampler", "loop.sampler=balanced", "of classes, equally often"),
    ),
    APEX: (
        Name(
            "opt_level",
            "techniques.precision",
            "weights stay fp32 under torch's autocast, as with O1; bf16 needs no loss scale",
            values=_of("techniques.precision", "o0=fp32 o1=fp16 o2=fp16 o3=pure_bf16"),
            only=True,
        ),
        Name(
            "keep_batchnorm_fp32 master_weights",
            note="weights, norms and states are fp32 in every precision but pure_bf16",
        ),
        Name("fusedadam fused_adam", "optimizer.type=adamw", "torch's fused update, by itself"),
        Name("fusedsgd fused_sgd", "optimizer.type=sgd", "torch's fused update, by itself"),
        Name("delay_allreduce", note="gradients are summed beside the backward pass: parallel.bucket_mib"),
        Name("convert_syncbn_model", "parallel.sync_batch_norm=true"),
    ),
    HOROVOD: (
        Name("horovodrun num_proc", "--gpus {}", "or --processes N on the CPU"),
        Name("fp16_allreduce", "parallel.reduce_dtype=bf16", values=_LEFT_OUT),
        Name("fusion_threshold_mb", "parallel.bucket_mib", "MiB of gradients in one all-reduce"),
        Name("backward_passes_per_step", "loop.micro_batch_size=N", _PIECES),
        Name("adasum", note="gradients are summed, as a global batch has it"),
    ),
    LAUNCH: (
        Name("nproc_per_node", "--gpus {}", "torchrun --nproc-per-node joins too"),
        Name("node_rank", "torchrun --node-rank {}", "docs/distributed.md has the whole command"),
        Name("use_env", note="ranks always read the environment"),
    ),
}
"""Library -> its names, as its users meet them."""

TOLD: Final[Mapping[str, tuple[str, ...]]] = {
    APEX: (
        "Apex's parts are torch's own by now, and need no build: amp is autocast, FusedAdam is torch's fused AdamW,",
        "its DistributedDataParallel is `parallel.strategy=ddp`, whose gradients lie in one flat buffer.",
    ),
    HOROVOD: (
        "Horovod averages gradients by a ring all-reduce. `parallel.strategy=ddp` does so through NCCL or gloo, which",
        "choose rings or trees themselves. `--gpus N` takes the place of `horovodrun -np N`; where horovodrun has to",
        "start the ranks, its numbers join: `horovodrun -np 2 sh -c 'RANK=$HOROVOD_RANK WORLD_SIZE=$HOROVOD_SIZE",
        "LOCAL_RANK=$HOROVOD_LOCAL_RANK MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 paceline train RECIPE.yaml'`.",
    ),
    LAUNCH: (
        "`python -m torch.distributed.launch` is torchrun under its old name, and starts ranks that join:",
        "`python -m torch.distributed.launch --nproc-per-node 2 -m paceline train RECIPE.yaml`.",
    ),
}
"""Library -> what it is here, in a few lines; of those that are no settings but ways of computing and starting."""

_PIPELINE = "parallel.pipeline="

VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "parallel.strategy": {
        **_of(
            "parallel.strategy",
            "none=auto single_device=auto distributeddataparallel=ddp ddp_spawn=ddp ddp_notebook=ddp"
            " ddp_find_unused_parameters_true=ddp horovod=ddp apex=ddp dataparallel=dp"
            " ddp_sharded=fsdp fsdp2=fsdp fsdp_native=fsdp full_shard=fsdp",
        ),
        "fsdp_cpu_offload": "parallel.strategy=fsdp --set parallel.offload=parameters",
        "hybrid_shard": "parallel.strategy=fsdp --set parallel.shard_size=N",
        # layers on several GPUs: a pipeline, with one micro-batch unless more are asked for
        **dict.fromkeys(("model_parallel", "naive_model_parallel", "pipe", "pipeline_parallel"), f"{_PIPELINE}2"),
        **{name: f"{_PIPELINE}2 --set parallel.schedule={name}" for name in ("gpipe", "1f1b")},
        **{name: here for name, here in _ZERO.items() if name != "deepspeed"},
        "zero": f"{_STAGE}2",
        **{f"zero{stage}": f"{_STAGE}{stage}" for stage in (1, 2, 3)},
        "zero_offload": f"{_STAGE}2 --set parallel.offload=optimizer",
        "zero2_offload": f"{_STAGE}2 --set parallel.offload=optimizer",
        "zero3_offload": f"{_STAGE}3 --set parallel.offload=parameters",
    },
}
"""A setting of ours -> what its values are called elsewhere, in lower case, and what they are here."""
