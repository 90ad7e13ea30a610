"""A model ready to be trained: loaded, built from a configuration, or returned by a user's function.

Weights are always 32-bit master weights: a checkpoint stored as fp16 is widened, because an optimizer that updates
fp16 weights loses small updates and soon meets a NaN. Only safetensors are read; ``convert`` makes them.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paceline.contract.errors import ModelError
from paceline.contract.label_names import are_unnamed, listed, numbered, rows_by_number
from paceline.contract.streams import whole_streams
from paceline.models import factory
from paceline.models.config import counts_from_padding, head_labels, modality
from paceline.models.fit import fit_images, fit_tokens, pads_when_built, require_start, tell_padding
from paceline.models.heads import TaskHead, head_of
from paceline.models.hub import CONFIG_FILES, WEIGHT_FILES, fetch, other_weights, refuse_lfs_note
from paceline.models.structure import head_names
from paceline.recipe.parts import ModelPart

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)

PARALLEL = "module."
"""What torch's DataParallel and DistributedDataParallel put before the names of weights."""

_BUILD_ERRORS = (ValueError, TypeError, KeyError, RuntimeError, AssertionError, ArithmeticError, ImportError, OSError)
"""What transformers and torch raise for a configuration that makes no model."""


def import_class(part: ModelPart, config: PretrainedConfig | None) -> None:
    """Load the code of the model's class, seconds that can pass while something else is waited for.

    ``load_model`` would do so itself. Code that comes with a model is left to it.
    """
    if config is None:
        return
    from transformers.models.auto import modeling_auto

    mapping: Any = (
        modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        if modality(part, config) == "image"
        else modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
    )
    if type(config) in mapping:
        mapping[type(config)]


def load_model(
    part: ModelPart,
    config: PretrainedConfig | None,
    *,
    num_labels: int,
    label_names: Sequence[str],
    kind: str,
    vocabulary_size: int | None = None,
    pad_id: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    seed: int = 0,
    weights: bool = True,
    tell: Callable[[str], None] = log.warning,
) -> nn.Module:
    """The model of a recipe, on the CPU, in fp32 and in training mode. The caller's random numbers are left alone.

    The head is new, drawn from ``seed``, unless the checkpoint has one for the same number of labels.

    Args:
        part: the recipe's ``model``.
        config: what ``read_config`` gave for it; not changed.
        num_labels: outputs of the head: classes, or 1 for regression.
        label_names: their names, in order; saved with the model.
        kind: name of the task.
        vocabulary_size: number of token ids of the tokenizer; None for images.
        pad_id: token id of the filling; None for images.
        image_shape: height, width, channels; None for text.
        seed: of new weights.
        weights: False: read none, and leave them as the configuration has them drawn; for who asks for sizes alone.
        tell: is given what a person should know: which weights are new, and what became of the checkpoint's head.

    Raises:
        ModelError: weights that are missing, damaged, pickled or of another shape; a model that does not fit the data.
    """
    if part.factory or config is None:
        with seeded(seed):
            return factory.build(part.factory or "", num_labels).train()
    head = head_of(kind)
    old = head_labels(config) if head.rows_are_classes else ()
    config = copy.deepcopy(config)
    _name_outputs(config, head, num_labels, label_names)
    late = False
    if modality(part, config) == "image":
        fit_images(part, config, image_shape)
    else:
        require_start(part, config)
        fit_tokens(part, config, vocabulary_size)
        late = not pads_when_built(part, config)
        if pad_id is not None and not late:
            config.pad_token_id = pad_id
    chosen = head.auto_class(modality(part, config))
    if part.source and weights:
        model = _pretrained(part, config, chosen, seed, old, tell)
    else:
        model = _random(chosen, config, seed)
    # RoBERTa and its kin count positions from their own padding, whatever the tokenizer fills with
    if pad_id is not None and late and not counts_from_padding(config):
        tell_padding(model, pad_id)
    return model.train()


def _name_outputs(config: PretrainedConfig, head: TaskHead, num_labels: int, label_names: Sequence[str]) -> None:
    names = head.outputs(label_names)
    config.num_labels = num_labels  # a field of its own in some configurations (PVT), which id2label leaves as it was
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    config.problem_type = head.written_problem(num_labels)


def from_folder(
    folder: Path, config: PretrainedConfig, chosen: Any, *, trust_remote_code: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """The classifier in a folder of safetensors, in fp32, and transformers' account of the loading.

    Weights that were saved under DataParallel or DistributedDataParallel, all with ``module.`` before their names, are
    taken by the names of the model inside.

    Args:
        chosen: the class of transformers that makes the model, see ``TaskHead.auto_class``.

    Raises:
        ModelError: the weights are damaged, or the configuration makes no model.
    """
    check_weights(folder)
    # not by transformers' key_mapping, which would put the prefix back whenever the model is saved
    plain = None if trust_remote_code else _without_prefix(folder)
    with quiet():
        try:
            if plain is not None:  # which only a model's own class takes
                with torch.device("meta"):
                    chosen = type(chosen.from_config(config))
            model, account = chosen.from_pretrained(
                folder if plain is None else None,
                state_dict=plain,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
            )
        except (SafetensorError, *_BUILD_ERRORS) as error:
            raise ModelError(f"{folder}: cannot be loaded", _told(error)) from error
    return model, account


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """New weights are drawn from ``seed``; afterwards torch's CPU generator is as it was."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


def check_weights(folder: Path) -> None:
    """Read the header of every safetensors file at the top of ``folder``.

    Raises:
        ModelError: one is cut, damaged, or the stand-in that git leaves without git-lfs.
    """
    for path in sorted(folder.glob("*.safetensors")):
        refuse_lfs_note(path)
        try:
            with safe_open(path, framework="pt") as weights:
                weights.keys()
        except SafetensorError as error:
            raise ModelError(f"{path}: damaged", str(error), "download or copy it again") from None


def _without_prefix(folder: Path) -> dict[str, Tensor] | None:
    """The weights in a folder without the ``module.`` that all their names begin with; None where they do not."""
    whole = folder / "model.safetensors"
    files = [whole] if whole.is_file() else sorted(folder.glob("model-*.safetensors"))
    found: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as weights:
            names = list(weights.keys())
            if not all(name.startswith(PARALLEL) for name in names):
                return None
            found |= {name.removeprefix(PARALLEL): weights.get_tensor(name) for name in names}
    return found or None


def _pretrained(
    part: ModelPart,
    config: PretrainedConfig,
    chosen: Any,
    seed: int,
    old: Sequence[str],
    tell: Callable[[str], None],
) -> nn.Module:
    source = part.source or ""
    folder = fetch(source, CONFIG_FILES + WEIGHT_FILES, revision=part.revision, code=part.trust_remote_code)
    if not any(folder.glob("*.safetensors")):
        raise no_safetensors(part, folder)
    with seeded(seed):
        model, account = from_folder(folder, config, chosen, trust_remote_code=part.trust_remote_code)
    _check_fit(part, model, account, tell)
    _settle_head(part, model, account, old, seed, tell)
    config = model.config
    config.name_or_path = source
    if folder.parent.name == "snapshots":  # the Hub's cache, where a folder is called by its commit
        config._commit_hash = folder.name
    return model


def _random(chosen: Any, config: PretrainedConfig, seed: int) -> nn.Module:
    try:
        with quiet(), seeded(seed):
            model: nn.Module = chosen.from_config(config, dtype=torch.float32)
    except _BUILD_ERRORS as error:
        raise ModelError(
            f"model.config: makes no {config.model_type} model", _told(error), "change the setting that it names"
        ) from error
    return model


def _check_fit(part: ModelPart, model: nn.Module, account: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Weights that are not there would be random without a word: new ones are for the head only."""
    source = f"model.source = {part.source}"
    head = set(head_names(model))
    for name, found, wanted in sorted(account["mismatched_keys"]):
        if name not in head and name not in _of_classes(model):
            raise ModelError(
                f"{source}: {name} has the shape {list(found)}, the configuration asks for {list(wanted)}",
                "weights of another shape cannot be kept",
                "leave out the model.config setting that changes it"
                if part.config
                else "use a whole copy: its config.json and its weights are of two models",
            )
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if name not in head}
    missing = {name: sizes[name] for name in account["missing_keys"] if name in sizes}
    if 2 * sum(missing.values()) > sum(sizes.values()):
        unknown = sorted(account["unexpected_keys"])
        raise ModelError(
            f"{source}: its weights are not those of a {type(model).__name__}",
            f"{len(missing)} of {len(sizes)} weights are missing, such as {min(missing)}"
            + (f"; it holds {unknown[0]} instead" if unknown else ""),
            "choose a checkpoint of this architecture, or correct model_type in its config.json",
        )
    if missing and part.train == "lora" and not part.lora.merge:
        raise ModelError(
            f"{source}: has no weights for {listed(sorted(missing))}",
            "they start random, and would not be in the saved adapters",
            "--set model.lora.merge=true",
        )
    if missing:
        tell(f"{source}: has no weights for {listed(sorted(missing))}; they start random")


def _settle_head(
    part: ModelPart,
    model: Any,
    account: dict[str, Any],
    old: Sequence[str],
    seed: int,
    tell: Callable[[str], None],
) -> None:
    """Rows of a head stand for its classes: keep it where the data's are the same ones, else draw a new one; say so.

    Args:
        old: class names of the checkpoint; empty where rows are no classes.
    """
    names = head_labels(model.config)
    head, missing = set(head_names(model)), set(account["missing_keys"])
    counted = f"its head for {len(old):,} classes ({listed(old, 5)})" if old else "its head"
    lost = f"model.source = {part.source}: {counted} is lost; a new head for {listed(names, 5)} starts random"
    if account["mismatched_keys"]:  # of the head: the others are refused
        rows = rows_by_number(names, len(old)) if are_unnamed(old) else {}
        written = ", ".join(old[row] for row in rows.values())
        tell(f"{lost}; labels that are written {written} keep it" if len(rows) == len(names) else lost)
        return
    if not old or [name.casefold() for name in names] == [name.casefold() for name in old]:
        return
    if head & missing and (head <= missing or missing.issuperset(_of_classes(model))):
        return  # the checkpoint has no head
    rows = rows_by_number(names, len(old))
    if list(rows.values()) == list(range(len(names))):
        tell(numbered(rows, old))
    elif are_unnamed(old):
        pairs = [f"{name} is {row}" for name, row in zip(names, old, strict=True)]
        tell(f"the model's classes have no names, and are matched with the labels in this order: {listed(pairs)}")
    else:
        _draw_again(model, seed)
        tell(lost)


def _draw_again(model: Any, seed: int) -> None:
    """New weights for whatever puts out the logits."""
    layers = [model.get_submodule(name) for name in dict.fromkeys(n.rpartition(".")[0] for n in _of_classes(model))]
    # as most families of transformers do; its own initialisation passes over what was loaded
    std = getattr(model.config, "initializer_range", None)
    with seeded(seed), torch.no_grad():
        for layer in layers:
            layer.reset_parameters()
            if isinstance(std, float):
                layer.weight.normal_(0.0, std)
                if layer.bias is not None:
                    layer.bias.zero_()


def _of_classes(model: Any) -> list[str]:
    """Names of the parameters whose shapes follow from the number of classes, in whatever family.

    Some have two layers of logits (SwiftFormer), some have theirs inside the base model (Perceiver).
    """
    config = copy.deepcopy(model.config)
    config.num_labels = count = len(config.id2label) + 1
    config.id2label = {row: f"LABEL_{row}" for row in range(count)}
    config.label2id = {name: row for row, name in config.id2label.items()}
    with quiet(), torch.device("meta"):
        shapes = {name: parameter.shape for name, parameter in type(model)(config).named_parameters()}
    return [name for name, parameter in model.named_parameters() if shapes[name] != parameter.shape]


def no_safetensors(part: ModelPart, folder: Path) -> ModelError:
    """The error for a folder without weights that are read; it says which others are there."""
    source = part.source or ""
    others = other_weights(source, folder, part.revision)
    if not others:
        return ModelError(
            f"model.source = {source}: has no model.safetensors", "there are no weights to start from",
            "give a folder or a Hub name with weights; with model.config alone the weights are random",
        )  # fmt: skip
    is_local = Path(source).expanduser().is_dir()
    target = folder if is_local else Path("FOLDER")
    download = "" if is_local else f"hf download {source} --local-dir FOLDER, then "
    return ModelError(
        f"model.source = {source}: its weights are only there as {others[0]}",
        "that is a pickle, which can hold code; paceline reads safetensors",
        f"{download}paceline convert {target}" + ("" if is_local else ", then --set model.source=FOLDER"),
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show no bar for what takes a moment, and no table of new head weights: ``_check_fit`` reports what matters.

    transformers asks whether standard output is a terminal, which a caller's own stream may not know.
    """
    from huggingface_hub import constants
    from transformers.utils import logging as transformers_logging

    hide = transformers_logging.is_progress_bar_enabled() and constants.HF_HUB_DISABLE_PROGRESS_BARS is None
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_not_the_load_report)
    if hide:
        transformers_logging.disable_progress_bar()
    try:
        with whole_streams():
            yield
    finally:
        logger.removeFilter(_not_the_load_report)
        if hide:
            transformers_logging.enable_progress_bar()


def _not_the_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


def _told(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"
