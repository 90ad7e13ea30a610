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


@dataclass(frozen=True, kw_only=True)
class Name:
    """A setting elsewhere."""

    names: tuple[str, ...]
    """All that it is called; a dotted one is of a configuration with groups."""
    here: str = ""
    """What takes its place: ``optimizer.lr`` takes the value as it is, ``seed=1`` has its own, ``--gpus {}`` is typed,
    with the value for ``{}``. Empty: nothing does, and ``note`` says why."""
    values: Mapping[str, str] = field(default_factory=dict)
    """Value there, in lower case -> ``here`` for it; empty where that is so without being set."""
    only: bool = False
    """Whether no other value there is one here."""
    note: str = ""
    """What is different, or why there is nothing of the kind: a clause for people."""


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
_PRECISION: Final = {
    "no": "techniques.precision=fp32",
    "32": "techniques.precision=fp32",
    "32-true": "techniques.precision=fp32",
    "16": "techniques.precision=fp16",
    "fp16": "techniques.precision=fp16",
    "16-mixed": "techniques.precision=fp16",
    "bf16": "techniques.precision=bf16",
    "bf16-mixed": "techniques.precision=bf16",
    "bf16-true": "techniques.precision=pure_bf16",
}
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
_EVERY: Final = {"no": "never", "epoch": "epoch"}


def _every(setting: str) -> dict[str, str]:
    return {there: f"{setting}={here}" for there, here in _EVERY.items()} | {"steps": f"{setting}=500"}


TABLE: Final[Mapping[str, tuple[Name, ...]]] = {
    TRAINER: (
        Name(names=("learning_rate",), here="optimizer.lr"),
        Name(names=("num_train_epochs",), here="loop.epochs", note="a whole number; loop.max_steps ends a run sooner"),
        Name(
            names=("per_device_train_batch_size", "per_gpu_train_batch_size"),
            here="loop.batch_size={} x GPUs",
            note=f"{_GLOBAL}, those of all pieces (gradient_accumulation_steps) too",
        ),
        Name(names=("per_device_eval_batch_size",), here="loop.evaluation_batch_size"),
        Name(names=("gradient_accumulation_steps",), here="loop.micro_batch_size=N", note=_PIECES),
        Name(names=("gradient_checkpointing",), here="techniques.recompute=true", values=_LEFT_OUT),
        Name(names=("fp16",), here="techniques.precision=fp16", values=_LEFT_OUT),
        Name(
            names=("bf16",),
            here="techniques.precision=bf16",
            values=_LEFT_OUT,
            note="auto takes it on GPUs that compute in bf16",
        ),
        Name(names=("tf32",), here="techniques.precision=tf32", values=_LEFT_OUT),
        Name(names=("fp16_full_eval", "bf16_full_eval"), note="an evaluation has the precision of the run"),
        Name(names=("warmup_ratio",), here="schedule.warmup", note="below 1 it is a share of all steps"),
        Name(names=("warmup_steps", "num_warmup_steps"), here="schedule.warmup", note="from 1 it is a number of steps"),
        Name(names=("weight_decay",), here="optimizer.weight_decay"),
        Name(names=("max_grad_norm",), here="optimizer.clip_norm", values=_UNCLIPPED),
        Name(names=("max_steps",), here="loop.max_steps", values={"-1": ""}),
        Name(
            names=("lr_scheduler_type", "lr_scheduler"),
            only=True,
            here="schedule.type",
            values={
                "linear": "schedule.type=linear",
                "cosine": "schedule.type=cosine",
                "constant": "schedule.type=constant",
                "constant_with_warmup": "schedule.type=constant",
                "polynomial": "schedule.type=module:function",
                "cosine_with_restarts": "schedule.type=cosine_restarts",
                "inverse_sqrt": "schedule.type=inverse_sqrt",
            },
            note="or one_cycle, as torch's OneCycleLR, or a function of yours; schedule.warmup comes before each",
        ),
        Name(
            names=("num_cycles",),
            here="schedule.cycles",
            note="with schedule.type=cosine_restarts; one cycle is schedule.type=cosine",
        ),
        Name(
            names=("layer_decay", "layerwise_lr_decay", "layer_lr_decay", "llrd"),
            here="optimizer.layer_decay",
            note="the head has the whole rate, the last block this times it, the embeddings the smallest",
        ),
        Name(
            names=("optim",),
            only=True,
            here="optimizer.type",
            values={
                "adamw_torch": "optimizer.type=adamw",
                "adamw_torch_fused": "optimizer.type=adamw",
                "adamw_hf": "optimizer.type=adamw",
                "sgd": "optimizer.type=sgd",
                "adamw_bnb_8bit": "optimizer.type=adamw8bit",
                "adamw_8bit": "optimizer.type=adamw8bit",
                "adamw_torch_8bit": "optimizer.type=adamw8bit --set optimizer.low_bit=torchao",
                "adamw_torch_4bit": "optimizer.type=adamw4bit",
            },
            note="adamw, adam, sgd or adamw8bit, which saves memory of states, as adamw4bit and adamwfp8 do; each is"
            " fused by itself",
        ),
        Name(
            names=("adafactor",),
            values=_LEFT_OUT,
            note="optimizer.type=adamw8bit saves memory of states, by another update rule",
        ),
        Name(names=("adam_beta1", "adam_beta2"), here="optimizer.betas=[0.9,0.999]", note="both in one list"),
        Name(names=("adam_epsilon",), here="optimizer.eps"),
        Name(
            names=("label_smoothing_factor", "label_smoothing"),
            here="task.label_smoothing",
            values={"0": "", "0.0": ""},
            note="of the loss of evaluations too, as the Trainer has it",
        ),
        Name(
            names=("group_by_length", "length_column_name", "pad_to_max_length"),
            note="batches are packed, so nothing is padded and texts stay in random order: techniques.packing",
        ),
        Name(names=("torch_compile",), here="techniques.compile", note="auto compiles where the run is long enough"),
        Name(
            names=("torch_compile_mode", "torch_compile_backend"),
            note="techniques.compile compiles each block, and techniques.capture captures CUDA graphs; both are auto",
        ),
        Name(
            names=(
                "dataloader_num_workers",
                "dataloader_pin_memory",
                "dataloader_prefetch_factor",
                "dataloader_persistent_workers",
            ),
            note=_LOADING,
        ),
        Name(names=("dataloader_drop_last",), here="loop.drop_last"),
        Name(names=("eval_steps",), here="loop.evaluate_every"),
        Name(
            names=("eval_strategy", "evaluation_strategy"),
            only=True,
            here="loop.evaluate_every",
            values=_every("loop.evaluate_every"),
            note="epoch, never, or the number of steps itself",
        ),
        Name(names=("save_steps",), here="loop.checkpoint_every"),
        Name(
            names=("save_strategy",),
            only=True,
            here="loop.checkpoint_every",
            values=_every("loop.checkpoint_every") | {"best": ""},
            note="epoch, never, or the number of steps itself; the best is kept in any case",
        ),
        Name(names=("save_total_limit",), here="loop.keep_last"),
        Name(names=("logging_steps",), here="observe.log_every"),
        Name(
            names=("logging_dir", "logging_strategy", "logging_first_step"),
            note="every step is in the run folder's metrics.jsonl; observe.log_every is of the console alone",
        ),
        Name(names=("load_best_model_at_end",), here="loop.save_best"),
        Name(names=("metric_for_best_model",), here="loop.best_metric"),
        Name(
            names=("greater_is_better",),
            here="loop.best_metric=-NAME",
            values={"true": ""},
            note="a leading '-' means that lower is better",
        ),
        Name(names=("early_stopping_patience",), here="loop.early_stopping.patience"),
        Name(names=("early_stopping_threshold",), here="loop.early_stopping.min_delta"),
        Name(
            names=("report_to",),
            values={"none": "", "tensorboard": "observe.tensorboard=true"},
            note="the run folder's metrics.jsonl has a record a line, from which any tracker can be fed",
        ),
        Name(names=("resume_from_checkpoint",), here="paceline train RUN --resume", note="RUN is the run's folder"),
        Name(names=("output_dir",), here="--out {}"),
        Name(
            names=("overwrite_output_dir",), note="a folder with a run in it is never overwritten: name another --out"
        ),
        Name(names=("run_name",), here="name"),
        Name(names=("data_seed",), here="seed", note="the order of samples follows from it too"),
        Name(names=("full_determinism",), here="deterministic"),
        Name(names=("max_seq_length", "model_max_length"), here="data.max_length"),
        Name(
            names=("truncation_side",),
            only=True,
            here="data.overflow",
            values={"right": "", "left": "data.overflow=tail"},
            note="head+tail keeps both ends, windows all of a text",
        ),
        Name(
            names=("doc_stride", "return_overflowing_tokens"),
            here="data.overflow=windows",
            values={"false": ""},
            note="data.stride is by how much windows overlap: a share of a window, or a number of tokens from 1",
        ),
        Name(names=("model_name_or_path", "pretrained_model_name_or_path", "model_name"), here="model.source"),
        Name(names=("tokenizer_name",), here="model.tokenizer"),
        Name(names=("model_revision",), here="model.revision"),
        Name(names=("train_file", "dataset_name"), here="data.source", note="a data set of the Hub is hub:NAME"),
        Name(names=("validation_file",), here="data.validation"),
        Name(names=("test_file",), here="data.test"),
        Name(names=("text_column_name", "text_column_names"), here="data.text"),
        Name(names=("label_column_name", "label_names"), here="data.label"),
        Name(names=("remove_unused_columns",), note="columns are named by data.text, data.pair and data.label alone"),
        Name(
            names=("problem_type",),
            only=True,
            here="task.type",
            values={
                "single_label_classification": "task.type=classification",
                "multi_label_classification": "task.type=multi_label",
                "regression": "task.type=regression",
            },
        ),
        Name(names=("num_labels", "id2label", "label2id"), note="labels and their names are read off the data"),
        Name(
            names=("do_train", "do_eval", "do_predict"),
            here="paceline train, evaluate or predict",
            note="each is a command",
        ),
        Name(names=("no_cuda", "use_cpu"), here="device=cpu", values=_LEFT_OUT),
        Name(
            names=("local_rank", "ddp_timeout"),
            here="--gpus N",
            note="ranks are started, or found as torchrun says; --timeout SECONDS is how long they wait",
        ),
        Name(names=("ddp_backend",), here="parallel.backend"),
        Name(names=("ddp_bucket_cap_mb",), here="parallel.bucket_mib"),
        Name(names=("ddp_find_unused_parameters",), note="a parameter without a gradient counts as zeros"),
        Name(names=("fsdp", "fsdp_config"), here="parallel.strategy=fsdp", note=_SHARDED),
        Name(
            names=("deepspeed",),
            here="parallel.strategy=deepspeed",
            note="its JSON is not read: parallel.stage and parallel.offload are the settings of it that are left",
        ),
        Name(
            names=("auto_find_batch_size",),
            here="loop.on_oom=split",
            values=_LEFT_OUT,
            note="the batch stays, and only its pieces get smaller",
        ),
        Name(names=("push_to_hub", "hub_model_id"), note="nothing is uploaded: hf upload NAME RUN/model does it"),
        Name(names=("cache_dir",), note="HF_HOME says where models of the Hub are kept"),
        Name(
            names=("token", "use_auth_token", "hub_token"), note="HF_TOKEN, an environment variable, is sent to the Hub"
        ),
    ),
    LIGHTNING: (
        Name(names=("max_epochs",), here="loop.epochs"),
        Name(
            names=("precision",),
            only=True,
            here="techniques.precision",
            values=_PRECISION,
        ),
        Name(
            names=("accelerator",),
            only=True,
            here="device",
            values={"gpu": "device=cuda", "cuda": "device=cuda", "cpu": "device=cpu", "auto": ""},
            note="auto, cuda or cpu; there is no other device",
        ),
        Name(names=("devices",), here="--gpus {}", note="or --devices 1,3 for these GPUs; --processes N on the CPU"),
        Name(
            names=("strategy",),
            only=True,
            here="parallel.strategy",
            values={
                "auto": "",
                "dp": "parallel.strategy=dp",
                "ddp": "parallel.strategy=ddp",
                "ddp_find_unused_parameters_true": "parallel.strategy=ddp",
                "ddp_sharded": "parallel.strategy=fsdp",
                "fsdp": "parallel.strategy=fsdp",
                **_ZERO,
            },
            note=_SHARDED,
        ),
        Name(names=("num_nodes",), here="torchrun --nnodes {}", note="docs/distributed.md has the whole command"),
        Name(names=("accumulate_grad_batches",), here="loop.micro_batch_size=N", note=_PIECES),
        Name(names=("gradient_clip_val",), here="optimizer.clip_norm", values=_UNCLIPPED),
        Name(names=("gradient_clip_algorithm",), note="gradients are clipped by their norm: optimizer.clip_norm"),
        Name(names=("val_check_interval",), here="loop.evaluate_every=N", note="a number of steps, or epoch"),
        Name(
            names=("check_val_every_n_epoch",),
            here="loop.evaluate_every=epoch",
            note="each epoch, or a number of steps: that of n epochs",
        ),
        Name(names=("limit_train_batches", "overfit_batches"), here="loop.max_steps"),
        Name(names=("fast_dev_run",), here="loop.max_steps=1", values=_LEFT_OUT),
        Name(
            names=("limit_val_batches", "limit_test_batches"),
            here="data.splits.validation=N",
            note="the split itself is made smaller: a share of the rows, or their number",
        ),
        Name(names=("num_sanity_val_steps",), note="data are checked before the first step, every row of them"),
        Name(names=("log_every_n_steps",), here="observe.log_every"),
        Name(
            names=("logger",),
            values={"false": "", "tensorboard": "observe.tensorboard=true"},
            note="the run folder's metrics.jsonl has a record a line, from which any tracker can be fed",
        ),
        Name(names=("enable_progress_bar",), here="observe.console=off", values={"true": ""}),
        Name(names=("enable_checkpointing",), here="loop.checkpoint_every=never", values={"true": ""}),
        Name(names=("every_n_train_steps",), here="loop.checkpoint_every"),
        Name(names=("train_time_interval",), here="loop.checkpoint_minutes", note="a number of minutes"),
        Name(names=("save_top_k",), here="loop.keep_last", note="the newest ones; the best of its time is kept beside"),
        Name(names=("monitor",), here="loop.best_metric", note="a leading '-' means that lower is better"),
        Name(names=("patience",), here="loop.early_stopping.patience", note="counted in evaluations"),
        Name(names=("default_root_dir", "dirpath"), here="--out {}"),
        Name(names=("ckpt_path",), here="paceline train RUN --resume", note="RUN is the run's folder"),
        Name(names=("profiler",), here="paceline trace RECIPE --steps 90:100"),
        Name(names=("benchmark",), here="techniques.cudnn_benchmark"),
        Name(names=("sync_batchnorm",), here="parallel.sync_batch_norm"),
        Name(
            names=("swa_lrs", "swa_epoch_start", "annealing_epochs"),
            note="no stochastic weight averaging: optimizer.ema keeps a moving average over the whole run",
        ),
        Name(names=("update_every_n_steps",), here="optimizer.ema.every", note="of EMAWeightAveraging"),
        Name(
            names=("detect_anomaly",), note="a loss or gradient that is no number is found at once, and the rows named"
        ),
        Name(names=("num_workers", "pin_memory", "persistent_workers", "prefetch_factor"), note=_LOADING),
        Name(names=("freeze", "freeze_backbone"), here="model.train=head", values=_LEFT_OUT),
        Name(
            names=("callbacks",),
            note="steps are watched through files and spans: docs/own-loop.md has the loop in your hands",
        ),
    ),
    ACCELERATE: (
        Name(
            names=("mixed_precision",),
            only=True,
            here="techniques.precision",
            values=_PRECISION,
            note="fp32, tf32, bf16, fp16 or pure_bf16; fp8 is not there",
        ),
        Name(names=("num_processes",), here="--gpus {}", note="or --processes N on the CPU"),
        Name(names=("gpu_ids",), here="--devices 1,3"),
        Name(
            names=("num_machines", "machine_rank"),
            here="torchrun --nnodes {}",
            note="docs/distributed.md has the whole command",
        ),
        Name(
            names=("main_process_ip", "main_process_port"),
            here="--init tcp://HOST:PORT",
            note="with --rank and --world-size, for ranks that are started one by one",
        ),
        Name(
            names=("distributed_type",),
            only=True,
            here="parallel.strategy=fsdp",
            values={
                "no": "",
                "multi_gpu": "parallel.strategy=ddp",
                "fsdp": "parallel.strategy=fsdp",
                "deepspeed": "parallel.strategy=deepspeed",
                "multi_cpu": "parallel.strategy=ddp",
            },
            note="auto, ddp, fsdp, deepspeed or dp",
        ),
        Name(names=("split_batches",), note=f"{_GLOBAL}, which is split_batches=True"),
        Name(
            names=("dispatch_batches", "even_batches", "use_seedable_sampler"),
            note="every rank knows the order of samples, and takes its share of each batch",
        ),
        Name(names=("dynamo_backend", "dynamo_config"), here="techniques.compile=true", values={"no": ""}),
        Name(
            names=("fsdp_sharding_strategy", "fsdp_version"),
            here="parallel.strategy=fsdp",
            note="parallel.shard_size=N is HYBRID_SHARD over N processes",
        ),
        Name(names=("fsdp_offload_params",), here="parallel.offload=parameters", values=_LEFT_OUT),
        Name(names=("fsdp_activation_checkpointing",), here="techniques.recompute"),
    ),
    DEEPSPEED: (
        Name(names=("train_batch_size",), here="loop.batch_size", note=_GLOBAL),
        Name(
            names=("train_micro_batch_size_per_gpu",),
            here="loop.micro_batch_size",
            note=f"what a GPU takes at a time; {_GLOBAL}",
        ),
        Name(
            names=("zero_optimization.stage", "zero_stage"),
            here="parallel.stage",
            values={"0": "parallel.strategy=ddp"},
            note="with parallel.strategy=deepspeed; fsdp shards as stage 3 does and needs no package",
        ),
        Name(
            names=("zero_optimization.offload_optimizer", "offload_optimizer.device"),
            here="parallel.offload=optimizer",
            values={"none": ""},
            note="with parallel.strategy=deepspeed; to disks (nvme) nothing is moved",
        ),
        Name(
            names=("zero_optimization.offload_param", "offload_param.device"),
            here="parallel.offload=parameters",
            values={"none": ""},
            note="with stage 3 of parallel.strategy=deepspeed, or with fsdp; to disks (nvme) nothing is moved",
        ),
        Name(names=("zero_optimization.reduce_bucket_size",), here="parallel.bucket_mib=N", note="MiB, not elements"),
        Name(
            names=("zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients"),
            note="gradients are summed beside the backward pass by themselves",
        ),
        Name(names=("gradient_clipping",), here="optimizer.clip_norm", values=_UNCLIPPED),
        Name(names=("warmup_num_steps",), here="schedule.warmup"),
        Name(
            names=("loss_scale", "initial_scale_power", "loss_scale_window"),
            note="fp16 is scaled by itself, and a step with infinite gradients is skipped and counted",
        ),
        Name(names=("activation_checkpointing",), here="techniques.recompute=true"),
        Name(names=("communication_data_type",), here="parallel.reduce_dtype"),
        Name(names=("steps_per_print",), here="observe.log_every"),
        Name(names=("wall_clock_breakdown", "flops_profiler"), here="paceline trace RECIPE --steps 90:100"),
    ),
    PEFT: (
        Name(names=("r", "lora_r", "lora_rank"), here="model.lora.rank", note="beside model.train=lora"),
        Name(names=("lora_alpha",), here="model.lora.alpha", note="beside model.train=lora"),
        Name(names=("lora_dropout",), here="model.lora.dropout", note="beside model.train=lora"),
        Name(
            names=("target_modules", "lora_target_modules"),
            here="model.lora.targets",
            values={"all-linear": ""},
            note="beside model.train=lora; auto takes all linear layers of the blocks",
        ),
        Name(names=("use_dora",), here="model.lora.dora", values=_LEFT_OUT, note="beside model.train=lora"),
        Name(names=("use_peft", "use_lora"), here="model.train=lora", values=_LEFT_OUT),
        Name(names=("modules_to_save",), note="the head is trained in full beside the adapters, and nothing else"),
    ),
    TIMM: (
        Name(
            names=("model_ema", "use_ema"),
            here="optimizer.ema=0.999",
            values=_LEFT_OUT,
            note="the decay itself; both are measured, and the average is saved",
        ),
        Name(
            names=("model_ema_decay", "ema_decay"),
            here="optimizer.ema",
            note="between 0 and 1; 0.9999 looks back on ten thousand steps, more than most fine-tunings have",
        ),
        Name(
            names=("model_ema_warmup",),
            here="optimizer.ema.warmup",
            note="TensorFlow's warm-up of the decay; optimizer.ema.decay goes with it",
        ),
        Name(
            names=("model_ema_steps",),
            here="optimizer.ema.every",
            note="in applied steps; optimizer.ema.decay goes with it",
        ),
    ),
    IMBALANCE: (
        Name(
            names=("class_weight",),
            here="task.class_weights",
            values={"balanced": "task.class_weights=balanced", "null": "", "none": ""},
            note="balanced, or a map from label names to weights",
        ),
        Name(
            names=("pos_weight", "scale_pos_weight", "is_unbalance"),
            here="task.class_weights=balanced",
            note="or a map from label names to weights: {negative: 1, positive: 5}",
        ),
        Name(
            names=("focal_loss",),
            here="task.loss=focal",
            values=_LEFT_OUT,
            note="task.focal_gamma is its gamma, and task.class_weights its alpha",
        ),
        Name(names=("gamma", "fl_gamma"), here="task.loss=focal --set task.focal_gamma={}", note="of the focal loss"),
        Name(names=("weightedrandomsampler",), here="loop.sampler=balanced", note="of classes, equally often"),
    ),
    APEX: (
        Name(
            names=("opt_level",),
            only=True,
            here="techniques.precision",
            values={
                "o0": "techniques.precision=fp32",
                "o1": "techniques.precision=fp16",
                "o2": "techniques.precision=fp16",
                "o3": "techniques.precision=pure_bf16",
            },
            note="weights stay fp32 under torch's autocast, as with O1; bf16 needs no loss scale",
        ),
        Name(
            names=("keep_batchnorm_fp32", "master_weights"),
            note="weights, norms and states are fp32 in every precision but pure_bf16",
        ),
        Name(names=("fusedadam", "fused_adam"), here="optimizer.type=adamw", note="torch's fused update, by itself"),
        Name(names=("fusedsgd", "fused_sgd"), here="optimizer.type=sgd", note="torch's fused update, by itself"),
        Name(names=("delay_allreduce",), note="gradients are summed beside the backward pass: parallel.bucket_mib"),
        Name(names=("convert_syncbn_model",), here="parallel.sync_batch_norm=true"),
    ),
    HOROVOD: (
        Name(names=("horovodrun", "num_proc"), here="--gpus {}", note="or --processes N on the CPU"),
        Name(names=("fp16_allreduce",), here="parallel.reduce_dtype=bf16", values=_LEFT_OUT),
        Name(names=("fusion_threshold_mb",), here="parallel.bucket_mib", note="MiB of gradients in one all-reduce"),
        Name(names=("backward_passes_per_step",), here="loop.micro_batch_size=N", note=_PIECES),
        Name(names=("adasum",), note="gradients are summed, as a global batch has it"),
    ),
    LAUNCH: (
        Name(names=("nproc_per_node",), here="--gpus {}", note="torchrun --nproc-per-node joins too"),
        Name(names=("node_rank",), here="torchrun --node-rank {}", note="docs/distributed.md has the whole command"),
        Name(names=("use_env",), note="ranks always read the environment"),
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
        "none": "parallel.strategy=auto",
        "single_device": "parallel.strategy=auto",
        "distributeddataparallel": "parallel.strategy=ddp",
        "ddp_spawn": "parallel.strategy=ddp",
        "ddp_notebook": "parallel.strategy=ddp",
        "ddp_find_unused_parameters_true": "parallel.strategy=ddp",
        "horovod": "parallel.strategy=ddp",
        "apex": "parallel.strategy=ddp",
        "dataparallel": "parallel.strategy=dp",
        "ddp_sharded": "parallel.strategy=fsdp",
        "fsdp2": "parallel.strategy=fsdp",
        "fsdp_native": "parallel.strategy=fsdp",
        "fsdp_cpu_offload": "parallel.strategy=fsdp --set parallel.offload=parameters",
        "full_shard": "parallel.strategy=fsdp",
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
