"""From ``auto`` to explicit settings, with a reason each; what cannot work on this machine is refused here."""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import RecipeError
from paceline.facts import Card, Facts
from paceline.recipe.recipe import Recipe
from paceline.recipe.techniques import check_rules
from paceline.records import Decision

Decide = Callable[[Recipe, Facts], Decision | None]

EIGHT_BIT_PACKAGES = ("bitsandbytes", "torchao")
"""Either brings the 8-bit AdamW."""

EVALUATED_ON_CARD = 128
"""Samples of an evaluation's forward pass on a card, at least: it is launched kernel by kernel, and with 24 texts the
host took 5 ms for 2 ms of work (H200, DistilBERT)."""

_CAPABILITY = {"bf16": (8, 0), "tf32": (8, 0), "fp16": (5, 3)}
# NVIDIA, CUDA programming guide, arithmetic by compute capability: bf16 and tf32 from 8.0, fp16 from 5.3

_CARDS_ONLY = {
    "fp16": "fp16 with loss scaling is for cards: CPUs compute it in software",
    "tf32": "tf32 is a mode of the tensor cores of cards and has no effect on a CPU",
}


def choose(recipe: Recipe, facts: Facts) -> tuple[Recipe, tuple[Decision, ...]]:
    """The recipe with every ``auto`` of this floor made explicit, and the decisions taken.

    Chosen is what the machine decides: device, precision, sizes of batches, and which of the fast path's techniques
    have no use here. What depends on the model and the data stays ``auto`` until they are there. Choosing again from
    the result changes nothing.

    Raises:
        RecipeError: a setting that cannot work on this machine.
    """
    decisions = []
    for decide in (_device, _precision, _micro_batch_size, _evaluation_batch_size, *_SWITCHES):
        decision = decide(recipe, facts)
        if decision is not None:
            decisions.append(decision)
            recipe = recipe.with_settings([f"{decision.setting}={decision.value}"])
    _check_optimizer(recipe, facts)
    check_rules(recipe, facts)
    return recipe, tuple(decisions)


def _device(recipe: Recipe, facts: Facts) -> Decision | None:
    problem = facts.cuda_problem
    if recipe.device == "cuda" and problem:
        raise RecipeError("device = cuda", problem, "--set device=cpu, or see paceline doctor")
    if recipe.device != "auto":
        return None
    if problem:
        return Decision(setting="device", value="cpu", reason=problem)
    return Decision(setting="device", value="cuda", reason=f"{facts.cards[0].name} is usable")


def _precision(recipe: Recipe, facts: Facts) -> Decision | None:
    card = facts.cards[0] if recipe.device == "cuda" else None
    precision = recipe.techniques.precision
    if precision == "auto":
        value, reason = _fastest_safe_precision(card)
        return Decision(setting="techniques.precision", value=value, reason=reason)
    what = f"techniques.precision = {precision}"
    if card is None and precision in _CARDS_ONLY:
        raise RecipeError(what, _CARDS_ONLY[precision], "--set techniques.precision=fp32 (or bf16)")
    have, needed = card.compute_capability if card else None, _CAPABILITY.get(precision)
    if card and have and needed and have < needed:
        why = f"needs compute capability {needed[0]}.{needed[1]}; {card.name} has {have[0]}.{have[1]}"
        usable = "fp16" if have >= _CAPABILITY["fp16"] else "fp32"
        raise RecipeError(what, why, f"--set techniques.precision={usable}")
    return None


def _fastest_safe_precision(card: Card | None) -> tuple[str, str]:
    """A precision whose results equal fp32's up to rounding, and why."""
    if card is None:
        return "fp32", "the device is a CPU, which gains little from less"
    have = card.compute_capability
    if have is None:
        return "fp32", f"the compute capability of {card.name} is not known"
    if have < _CAPABILITY["bf16"]:
        return "fp32", f"{card.name} (compute capability {have[0]}.{have[1]}) does not compute in bf16"
    return "bf16", f"{card.name} computes in bf16"


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
    if recipe.device == "cuda" and 2 * micro < EVALUATED_ON_CARD:
        reason = "enough to keep a card busy: without gradients the activations are not kept"
        return Decision(setting="loop.evaluation_batch_size", value=str(EVALUATED_ON_CARD), reason=reason)
    reason = "twice the micro-batch: without gradients the activations are not kept"
    return Decision(setting="loop.evaluation_batch_size", value=str(2 * micro), reason=reason)


def _on_cards_only(path: str, reason: str) -> Decide:
    """Switches off what has no use on a CPU; on a card it stays open."""

    def decide(recipe: Recipe, facts: Facts) -> Decision | None:
        part, _, name = path.partition(".")
        if recipe.device != "cpu" or getattr(getattr(recipe, part), name) != "auto":
            return None
        return Decision(setting=path, value="false", reason=reason)

    return decide


def _compile(recipe: Recipe, facts: Facts) -> Decision | None:
    if recipe.techniques.compile is False or recipe.device != "cuda":
        return None
    setting = "techniques.compile"
    if recipe.techniques.compile is True:
        if facts.versions.get("triton") is None:
            raise RecipeError(f"{setting} = true", "needs triton, which is not installed", f"--set {setting}=false")
        return None
    if recipe.model.train == "features":
        return Decision(setting=setting, value="false", reason="no step is made with train: features")
    if facts.versions.get("triton") is None:
        return Decision(setting=setting, value="false", reason="triton is not installed")
    return None


def _capture(recipe: Recipe, facts: Facts) -> Decision | None:
    if recipe.techniques.capture != "auto" or recipe.device != "cuda":
        return None
    setting = "techniques.capture"
    if recipe.model.train == "features":
        return Decision(setting=setting, value="false", reason="no step is made with train: features")
    if recipe.techniques.recompute:
        reason = "recompute saves and restores the random numbers' state on the host"
        return Decision(setting=setting, value="false", reason=reason)
    return Decision(setting=setting, value="true", reason="replayed steps cost the host next to nothing")


_SWITCHES: tuple[Decide, ...] = (
    _on_cards_only("data.resident", "the device's memory is the host's"),
    _on_cards_only("techniques.channels_last", "not measured to pay on a CPU"),
    _on_cards_only("techniques.fused_qkv", "not measured to pay on a CPU"),
    _on_cards_only("techniques.compile", "not measured to pay on a CPU"),
    _on_cards_only("techniques.capture", "CUDA graphs need a card"),
    _compile,
    _capture,
)


def _check_optimizer(recipe: Recipe, facts: Facts) -> None:
    if recipe.optimizer.type != "adamw8bit":
        return
    what = "optimizer.type = adamw8bit"
    if recipe.device != "cuda":
        raise RecipeError(what, "the 8-bit update runs on cards only", "--set optimizer.type=adamw")
    if not any(facts.versions.get(name) for name in EIGHT_BIT_PACKAGES):
        fix = "pip install 'paceline[bitsandbytes]', or --set optimizer.type=adamw"
        raise RecipeError(what, f"needs {' or '.join(EIGHT_BIT_PACKAGES)}, and neither is installed", fix)
