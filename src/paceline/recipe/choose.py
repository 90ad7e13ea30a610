"""From ``auto`` to explicit settings, with a reason each; what cannot work on this machine is refused here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from paceline.contract.errors import RecipeError
from paceline.contract.records import Decision
from paceline.machine.facts import Facts, Gpu
from paceline.recipe.catalogue.strategies import AXES, STRATEGIES
from paceline.recipe.entries import value_of, written
from paceline.recipe.parts import ParallelPart
from paceline.recipe.parts.optimizer import LOW_BIT
from paceline.recipe.recipe import Recipe
from paceline.recipe.rules import check_rules, decision_of, why_off
from paceline.recipe.techniques import CATALOGUE, OWN_SETTINGS, capable, entry_of, one_process, users_of

Decide = Callable[[Recipe, Facts], Decision | None]

EVALUATED_ON_GPU = 128
"""Samples of an evaluation's forward pass on a GPU, at least: it runs eagerly, kernel by kernel, and with 24 texts the
host took 5 ms for 2 ms of work (H200, DistilBERT)."""

_CAPABILITY = {value.name: value.capability for value in entry_of("precision").values}
_GPUS_ONLY = {value.name: value.gpus_only for value in entry_of("precision").values if value.gpus_only}

FP8 = (8, 9)
"""Compute capability from which a GPU has numbers in fp8, which torchao's states of that format need."""

STATE_BYTES = {"adamw": 8, "adam": 8, "adamw8bit": 2, "adamw4bit": 1, "adamwfp8": 2, "sgd": 4, "muon": 8}
"""Bytes of an optimizer's states for each trained number, beside 4 of the weight and 4 of its gradient."""

STATES_SHARE = 0.7
"""Share of a GPU's memory that weights, gradients and states may take for every rank to keep them whole. The rest is
for activations, the workspace of kernels, and what the driver keeps: a margin, not a measurement."""


def choose(recipe: Recipe, facts: Facts, world_size: int = 1) -> tuple[Recipe, tuple[Decision, ...]]:
    """The recipe with every ``auto`` of this floor made explicit, and the decisions taken.

    Chosen is what the machine decides: device, precision, sizes of batches, and which of the fast path's techniques
    have no use here. What depends on the model and the data stays ``auto`` until they are there. Choosing again from
    the result changes nothing.

    Args:
        world_size: processes that share the run. Whether the model fits each of their GPUs is known later, to
            ``choose_strategy``.

    Raises:
        RecipeError: a setting that cannot work on this machine.
    """
    decisions = []
    first: list[Decide] = [_device, *_sharing(recipe, world_size), _precision]
    techniques: list[Decide] = [partial(decision_of, entry) for entry in CATALOGUE]
    for decide in (*first, _micro_batch_size, _evaluation_batch_size, _resident, *techniques):
        decision = decide(recipe, facts)
        if decision is not None:
            decisions.append(decision)
            recipe = recipe.with_settings([f"{decision.setting}={decision.value}"])
    _check_optimizer(recipe, facts)
    _check_save(recipe)
    _check_loss_scale(recipe)
    _check_parallel(recipe, facts, world_size)
    check_rules(recipe, facts)
    return recipe, tuple(decisions)


def choose_strategy(
    recipe: Recipe,
    decisions: tuple[Decision, ...],
    facts: Facts,
    world_size: int,
    num_parameters: int,
    num_trained: int,
) -> tuple[Recipe, tuple[Decision, ...]]:
    """How the ranks share a model that is there by now, where ``choose`` left that open.

    Args:
        recipe: what ``choose`` made of it.
        decisions: taken so far; those about what cannot be had beside the strategy are taken back.
        facts: with GPUs as large as the run's smallest, on whichever machine that is (``with_smallest_gpu``), so
            that all ranks decide the same.
        num_parameters: the model's weights, in single numbers.
        num_trained: those among them that are trained.

    Raises:
        RecipeError: the model fits no GPU whole, and what was asked for cannot be had beside shards.
    """
    if recipe.parallel.strategy != "auto" or world_size == 1 or recipe.model.train == "features":
        return recipe, decisions
    number = 2 if recipe.techniques.precision == "pure_bf16" else 4
    states = STATE_BYTES[recipe.optimizer.type]
    if recipe.optimizer.type not in LOW_BIT:
        states = states * number // 4
    if recipe.optimizer.rounding == "kahan":
        states += number
    average = 0 if recipe.optimizer.ema is None else 4  # in fp32 in any case
    needed = num_parameters * number + num_trained * (number + states + average)
    sizes = [gpu.memory_bytes for gpu in facts.gpus if gpu.memory_bytes is not None]
    told = f"weights, gradients and states take {needed / 2**30:.1f} GiB"
    if not sizes:
        value, reason = "ddp", f"{told}, and the memory of the GPUs is not known"
    else:
        value = "ddp" if needed <= STATES_SHARE * min(sizes) else "fsdp"
        most = f"{STATES_SHARE:.0%} of the smallest GPU's {min(sizes) / 2**30:.0f} GiB"
        reason = f"{told}, {'at most' if value == 'ddp' else 'more than'} {most}"
    taken = [Decision(setting="parallel.strategy", value=value, reason=reason)]
    ours, shared = {decision.setting for decision in decisions}, recipe.with_settings([f"parallel.strategy={value}"])
    for entry in CATALOGUE:
        now = value_of(recipe, entry.setting)
        why = why_off(entry, shared, facts)
        if why is not None and (now == "auto" or (entry.setting in ours and now is True)):
            taken.append(Decision(setting=entry.setting, value="false", reason=why))
    recipe = recipe.with_settings([f"{decision.setting}={decision.value}" for decision in taken])
    check_rules(recipe, facts)
    anew = {decision.setting for decision in taken}
    return recipe, (*(decision for decision in decisions if decision.setting not in anew), *taken)


BUCKET_MIB = {"NVLink": 192, "else": 25}
"""MiB of gradients in one all-reduce. It takes multiprocessors, and a matrix product that has not all of them
takes up to twice as long: on four H200 a backward pass beside an all-reduce of 25 MiB takes longer than one that has it
at its end. Where it takes longer than that, it has to begin early. Benchmarks: sums_beside_backward.py."""


def bucket_decision(recipe: Recipe, link_rate: Callable[[], float | None]) -> Decision | None:
    """How the gradients are cut for their all-reduce, where that was left open and ranks reduce whole gradients.

    Args:
        link_rate: bytes a second that NVLinks carry between all ranks' GPUs, asked where it matters, by all ranks;
            None: there are none.
    """
    if recipe.parallel.strategy != "ddp" or recipe.parallel.bucket_mib is not None:
        return None
    kind, reason = "else", "without NVLink between all ranks an all-reduce takes long, and begins early"
    rate = link_rate()
    if rate is not None:
        kind = "NVLink"
        reason = f"NVLinks carry {rate / 1e9:.0f} GB/s: each all-reduce is short, and many slow the backward pass down"
    return Decision(setting="parallel.bucket_mib", value=str(BUCKET_MIB[kind]), reason=reason)


def num_processes(recipe: Recipe, num_gpus: int) -> int:
    """The processes of a run on so many GPUs: one a GPU, or, with ``dp``, one that has them all."""
    return 1 if one_process(recipe.parallel.strategy) else num_gpus


def num_shares(recipe: Recipe, processes: int) -> int:
    """The shares that so many processes split each batch into: one a process, or one a group that shares a model."""
    return max(1, processes // _group_size(recipe))


def _group_size(recipe: Recipe) -> int:
    """Processes that have one model together and work on the same samples."""
    return math.prod(value_of(recipe, entry.setting) for entry in AXES)


def with_smallest_gpu(facts: Facts, sizes: Iterable[int | None]) -> Facts:
    """The facts with GPUs as large as the smallest of several machines.

    Args:
        sizes: bytes of all machines' GPUs; None where they are not known.
    """
    memory = min((size for size in sizes if size is not None), default=None)
    return replace(facts, gpus=tuple(replace(gpu, memory_bytes=memory) for gpu in facts.gpus))


def _device(recipe: Recipe, facts: Facts) -> Decision | None:
    problem = facts.cuda_problem
    if recipe.device == "cuda" and problem:
        raise RecipeError("device = cuda", problem, "--set device=cpu, or see paceline doctor")
    if recipe.device != "auto":
        return None
    if problem:
        return Decision(setting="device", value="cpu", reason=problem)
    return Decision(setting="device", value="cuda", reason=f"{facts.gpus[0].name} is usable")


def _sharing(recipe: Recipe, world_size: int) -> tuple[Decide, ...]:
    if world_size > 1:
        return (_strategy, _stage)
    # what shards over one process still moves to main memory, and steps as it does with several
    used = next((entry for entry in STRATEGIES if entry.alone and entry.is_on(recipe)), None)
    kept = {"strategy", *(own.name for own in used.settings)} if used else set()
    own = (name for name, setting in OWN_SETTINGS.items() if not setting.stays)
    # what has no effect without an axis goes before it
    axes = (path.rpartition(".")[2] for entry in AXES for path in (*(o.setting for o in entry.settings), entry.setting))
    dropped = (name for name in ("strategy", "backend", "sync_batch_norm", *axes, *own) if name not in kept)
    return (*map(_unshared, dropped), _stage)


def _unshared(name: str) -> Decide:
    """A setting of several processes, where there is one: a run that they began may go on, or be evaluated, in one."""
    plain = ParallelPart.model_fields[name].default

    def decide(recipe: Recipe, facts: Facts) -> Decision | None:
        part = recipe.parallel
        if one_process(part.strategy) or getattr(part, name) == plain:
            return None
        reason = "one process has nobody to share with"
        return Decision(setting=f"parallel.{name}", value=written(plain), reason=reason)

    return decide


def _strategy(recipe: Recipe, facts: Facts) -> Decision | None:
    part = recipe.parallel
    if part.strategy != "auto" or recipe.model.train == "features":
        return None
    wishes = [own for own in OWN_SETTINGS.values() if own.chooses and getattr(part, own.name) != own.default]
    having = [one for one in STRATEGIES if wishes and all(own in one.settings for own in wishes)]
    allowed = [one for one in having if not any(own.refuses(one.name, recipe) for own in wishes)]
    for strategy in allowed or having:
        told, also = " and ".join(own.setting for own in wishes), [one.name for one in having if one is not strategy]
        reason = f"{told} is set, of {strategy.name}{f' and {also[0]}' if also else ' alone'}"
        return Decision(setting="parallel.strategy", value=strategy.name, reason=reason)
    if _group_size(recipe) > 1:
        reason = "ranks that share one model sum whole gradients with the others"
        return Decision(setting="parallel.strategy", value="ddp", reason=reason)
    if recipe.device == "cpu":
        reason = "the ranks share the host's memory, and a whole model is quicker"
        return Decision(setting="parallel.strategy", value="ddp", reason=reason)
    return None


def _stage(recipe: Recipe, facts: Facts) -> Decision | None:
    """The stage that a strategy with stages has, where none is named."""
    part, stage = recipe.parallel, OWN_SETTINGS["stage"]
    if part.strategy not in users_of(stage) or part.stage is not None:
        return None
    if part.offload_folder is not None:
        return Decision(setting=stage.setting, value="3", reason="only stage 3 reads states from a disk")
    if part.offload == "parameters":
        return Decision(setting=stage.setting, value="3", reason="only stage 3 has weights that can be offloaded")
    reason = "states and gradients are sharded, and weights are nowhere gathered in a pass"
    return Decision(setting=stage.setting, value="2", reason=reason)


def _check_parallel(recipe: Recipe, facts: Facts, world_size: int) -> None:
    part = recipe.parallel
    if one_process(part.strategy):
        what, fix = f"parallel.strategy = {part.strategy}", "--set parallel.strategy=auto"
        if world_size > 1:
            raise RecipeError(what, f"it is one process with several GPUs, and there are {world_size} processes", fix)
        if recipe.device == "cuda" and len(facts.gpus) < 2:
            raise RecipeError(what, "it splits a batch over several GPUs, and one is visible to this process", fix)
    if part.shard_size and world_size % part.shard_size:
        raise RecipeError(
            f"parallel.shard_size = {part.shard_size}",
            f"there are {world_size} processes, which are no whole number of groups of {part.shard_size}",
            "--set parallel.shard_size=null, or a divisor of the number of processes",
        )
    if world_size > 1 and part.backend == "nccl" and recipe.device != "cuda":
        why = f"it moves data between GPUs, and this run is on the {recipe.device}"
        raise RecipeError("parallel.backend = nccl", why, "--set parallel.backend=auto")
    check_shares(recipe, world_size)


def check_shares(recipe: Recipe, world_size: int) -> None:
    """Refuse a number of processes that the axes or the batch do not divide among.

    Raises:
        RecipeError: no whole number of groups that share a model, or more of them than samples of a batch.
    """
    group = _group_size(recipe)
    if world_size % group:
        raise _no_whole_groups(recipe, world_size, group)
    shares = num_shares(recipe, world_size)
    if recipe.loop.batch_size < shares:
        size, groups = recipe.loop.batch_size, "" if group == 1 else f" in groups of {group}"
        most = size * group
        raise RecipeError(
            f"loop.batch_size = {size}: {world_size} processes{groups}",
            f"the batch is global, split over all {'groups' if groups else 'processes'}, and some would never get a"
            " sample",
            f"--set loop.batch_size={shares}, or start " + (f"{most} processes or fewer" if most > 1 else "1 process"),
        )


def _no_whole_groups(recipe: Recipe, world_size: int, group: int) -> RecipeError:
    """What is said of a number of processes that is no multiple of those that have one model together."""
    used = [(entry.setting, value_of(recipe, entry.setting)) for entry in AXES if entry.is_on(recipe)]
    (setting, _), others = used[-1], math.prod(number for _, number in used[:-1])
    what = ", ".join(f"{name} = {number}" for name, number in used)
    fitting = [n for n in range(2, world_size + 1) if world_size % (n * others) == 0]
    fix = "".join(f"--set {setting}={n}, or " for n in fitting)
    why = f"there are {world_size} processes, which are no whole number of groups of {group}"
    return RecipeError(what, why, f"{fix}start {group} processes")


def _precision(recipe: Recipe, facts: Facts) -> Decision | None:
    gpu = facts.gpus[0] if recipe.device == "cuda" else None
    precision = recipe.techniques.precision
    if precision == "auto":
        value, reason = _fastest_safe_precision(gpu)
        return Decision(setting="techniques.precision", value=value, reason=reason)
    what = f"techniques.precision = {precision}"
    if gpu is None and precision in _GPUS_ONLY:
        raise RecipeError(what, _GPUS_ONLY[precision], "--set techniques.precision=fp32 (or bf16)")
    have, needed = gpu.compute_capability if gpu else None, _CAPABILITY.get(precision)
    if gpu and have and needed and have < needed:
        why = f"needs compute capability {needed[0]}.{needed[1]}; {gpu.name} has {have[0]}.{have[1]}"
        usable = "fp16" if have >= _CAPABILITY["fp16"] else "fp32"
        raise RecipeError(what, why, f"--set techniques.precision={usable}")
    return None


def _fastest_safe_precision(gpu: Gpu | None) -> tuple[str, str]:
    """A precision whose results equal fp32's up to rounding, and why."""
    if gpu is None:
        return "fp32", "the device is a CPU, which gains little from less"
    have = gpu.compute_capability
    if have is None:
        return "fp32", f"the compute capability of {gpu.name} is not known"
    if have < _CAPABILITY["bf16"]:
        return "fp32", f"{gpu.name} (compute capability {have[0]}.{have[1]}) does not compute in bf16"
    return "bf16", f"{gpu.name} computes in bf16"


def _micro_batch_size(recipe: Recipe, facts: Facts) -> Decision | None:
    loop = recipe.loop
    if loop.micro_batch_size is None:
        reason = "the whole batch in one forward pass"
        return Decision(setting="loop.micro_batch_size", value=str(loop.batch_size), reason=reason)
    if loop.micro_batch_size > loop.batch_size:
        raise RecipeError(
            f"loop.micro_batch_size = {loop.micro_batch_size}",
            f"a micro-batch is a piece of the batch, and loop.batch_size = {loop.batch_size}",
            f"--set loop.micro_batch_size={loop.batch_size}, or a larger loop.batch_size",
        )
    return None


def _evaluation_batch_size(recipe: Recipe, facts: Facts) -> Decision | None:
    micro = recipe.loop.micro_batch_size
    if recipe.loop.evaluation_batch_size is not None or micro is None:
        return None
    if recipe.device == "cuda" and 2 * micro < EVALUATED_ON_GPU:
        reason = "enough to keep a GPU busy: without gradients the activations are not kept"
        return Decision(setting="loop.evaluation_batch_size", value=str(EVALUATED_ON_GPU), reason=reason)
    reason = "twice the micro-batch: without gradients the activations are not kept"
    return Decision(setting="loop.evaluation_batch_size", value=str(2 * micro), reason=reason)


def _resident(recipe: Recipe, facts: Facts) -> Decision | None:
    if recipe.device != "cpu" or recipe.data.resident != "auto":
        return None
    return Decision(setting="data.resident", value="false", reason="the device's memory is the host's")


def _check_save(recipe: Recipe) -> None:
    if recipe.saves != "weights" and recipe.optimizer.ema is None:
        why = "without optimizer.ema there are the trained weights alone"
        raise RecipeError(f"loop.save = {recipe.loop.save}", why, "--set optimizer.ema=0.999, or --set loop.save=auto")


def _check_loss_scale(recipe: Recipe) -> None:
    """Refuse a loss scale that nothing uses; a default written out, as in a run's own recipe, is no wish."""
    part, precision = recipe.optimizer.loss_scale, recipe.techniques.precision
    changed = part.model_dump(exclude_defaults=True)
    if changed and precision != "fp16":
        name, value = next(iter(changed.items()))
        why = f"only fp16 has a loss scale, and techniques.precision = {precision}"
        leave = f"--set optimizer.loss_scale.{name}={type(part).model_fields[name].default}"
        raise RecipeError(f"optimizer.loss_scale.{name} = {value}", why, f"--set techniques.precision=fp16, or {leave}")


def _check_optimizer(recipe: Recipe, facts: Facts) -> None:
    part = recipe.optimizer
    if part.type not in LOW_BIT:
        return
    what, leave = f"optimizer.type = {part.type}", "--set optimizer.type=adamw"
    if recipe.device != "cuda":
        raise RecipeError(what, "updates of states of few bits run on GPUs only", leave)
    libraries = LOW_BIT[part.type] if part.low_bit == "auto" else (part.low_bit,)
    if not any(facts.versions.get(name) for name in libraries):
        neither = "neither is" if len(libraries) > 1 else "it is not"
        why = f"needs {' or '.join(libraries)}, and {neither} installed"
        raise RecipeError(what, why, f"pip install 'paceline[{libraries[0]}]', or {leave}")
    capability = facts.gpus[0].compute_capability if facts.gpus else None
    if part.type == "adamwfp8" and capability is not None and capability < FP8:
        why = "needs {}; this one has {}.{}".format(capable(FP8), *capability)
        raise RecipeError(what, why, "--set optimizer.type=adamw8bit")
