"""What a model is, before any weight is read: its configuration, what it reads, and how much of it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.contract.errors import ModelError, nearest
from paceline.contract.label_names import are_unnamed
from paceline.models.hub import CONFIG_FILES, fetch, refuse_adapters
from paceline.models.imports import import_transformers
from paceline.recipe.parts import ModelPart

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_FROM_PADDING = frozenset(
    {
        "camembert",
        "data2vec-text",
        "esm",
        "ibert",
        "longformer",
        "luke",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
"""Families whose first token sits at position ``padding_idx + 1``."""

_RELATIVE = frozenset({"mt5", "t5", "umt5", "xlnet"})
"""Families with relative positions only, whatever number their configuration carries."""


def import_readers(part: ModelPart) -> None:
    """Load what reading a configuration and a tokenizer takes; they would do so themselves, where nobody times it."""
    if not part.factory:
        import_transformers()
        from transformers import AutoConfig, AutoTokenizer  # noqa: F401


def read_config(part: ModelPart) -> PretrainedConfig | None:
    """The configuration of a model, with ``part.config`` put in; None for a factory, which has none.

    Raises:
        ModelError: no config.json, an unknown ``model_type``, a setting that the configuration does not know or that
            it refuses, code that would have to be trusted, a quantised checkpoint; and whatever ``fetch`` raises.
    """
    if part.factory:
        return None
    if part.source is None:
        return _from_settings(dict(part.config or {}))
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    folder = fetch(part.source, CONFIG_FILES, revision=part.revision, code=part.trust_remote_code)
    refuse_adapters(folder, f"model.source = {part.source}")
    written = _read_config_json(part.source, folder)
    _require_trust(part, written)
    if "quantization_config" in written:
        raise ModelError(
            f"model.source = {part.source}: its weights are quantised",
            "quantised weights cannot be fine-tuned",
            "choose the checkpoint that it was made from",
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=part.trust_remote_code, local_files_only=True)
        _override(config, part.config or {})
    except (StrictDataclassError, ValueError, TypeError, KeyError, OSError) as error:
        raise ModelError(f"model.source = {part.source}: its config.json cannot be used", _first_line(error)) from error
    config.name_or_path = part.source  # transformers tells some tokenizers by the Hub name
    return config


def modality(part: ModelPart, config: PretrainedConfig | None) -> str:
    """What the model reads: ``text`` or ``image``; ``any`` for a factory, where the data decides.

    Raises:
        ModelError: transformers has no classifier for this kind of model.
    """
    if config is None:
        return "any"
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    remote = getattr(config, "auto_map", None) or {}
    if config.model_type in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return "text"
    if config.model_type in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        return "image"
    if part.trust_remote_code and "AutoModelForSequenceClassification" in remote:
        return "text"
    if part.trust_remote_code and "AutoModelForImageClassification" in remote:
        return "image"
    raise ModelError(
        f"model_type = {config.model_type}: cannot classify",
        "transformers has neither a sequence nor an image classifier of this kind",
        "choose another model, or write one and name it with model.factory",
    )


def counts_from_padding(config: PretrainedConfig) -> bool:
    """Whether the first token's position is one behind the id of the padding."""
    return config.model_type in _FROM_PADDING


def checkpoint_labels(part: ModelPart, config: PretrainedConfig | None) -> tuple[str, ...]:
    """Class names of a checkpoint's head in index order, ``LABEL_0`` where nobody has named one.

    Empty where there are no weights, or no head among them: a configuration counts two classes whether there are any
    or not, so that the architecture that wrote it has to tell.
    """
    if config is None or part.source is None:
        return ()
    names = head_labels(config)
    written_by = getattr(config, "architectures", None) or ()
    if written_by or are_unnamed(names):
        return names if any("Classification" in str(name) for name in written_by) else ()
    return names


def head_labels(config: PretrainedConfig) -> tuple[str, ...]:
    """Class names in a configuration, in index order."""
    return tuple(str(config.id2label[index]) for index in sorted(config.id2label or ()))


def max_positions(config: PretrainedConfig | None) -> int | None:
    """Longest sequence, in tokens, that the model has positions for; None where nothing limits it.

    RoBERTa and its kin count positions from ``padding_idx + 1``, so that 514 positions hold 512 tokens. For rotary
    positions the configuration's number is the length that the model was trained for.
    """
    if config is None or config.model_type in _RELATIVE:
        return None
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    if getattr(config, "relative_attention", False) and not getattr(config, "position_biased_input", True):
        return None  # DeBERTa: distances are bucketed, no table of positions is read
    if counts_from_padding(config):
        padding = config.pad_token_id
        return positions - (1 if padding is None else padding) - 1
    return positions


def _from_settings(settings: dict[str, Any]) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    model_type = settings.pop("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"model.config.model_type = {model_type}: unknown", nearest(str(model_type), CONFIG_MAPPING))
    config_class = CONFIG_MAPPING[model_type]
    try:
        config = config_class()
        _require_known(config, settings)
        return config_class(**settings)
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"model.config: not a {model_type} configuration", _first_line(error)) from error


def _override(config: PretrainedConfig, settings: dict[str, Any]) -> None:
    if settings.get("model_type", config.model_type) != config.model_type:
        raise ModelError(
            f"model.config.model_type = {settings['model_type']}: the weights are of a {config.model_type}",
            fix="leave model_type out",
        )
    changes = {key: value for key, value in settings.items() if key != "model_type"}
    _require_known(config, changes)
    for key, value in changes.items():
        setattr(config, "_attn_implementation" if key == "attn_implementation" else key, value)
    validate = getattr(config, "validate", None)
    if callable(validate):
        validate()


def _require_known(config: PretrainedConfig, settings: dict[str, Any]) -> None:
    """A key that the configuration does not know would be stored and change nothing."""
    known = {*config.to_dict(), *config.attribute_map, "num_labels", "attn_implementation"}
    if dataclasses.is_dataclass(config):
        known |= {field.name for field in dataclasses.fields(config)}
    for key, value in settings.items():
        if key in ("num_labels", "id2label", "label2id", "problem_type"):
            raise ModelError(f"model.config.{key}: follows from the data", fix=f"leave model.config.{key} out")
        if key in ("dtype", "torch_dtype"):
            raise ModelError(
                f"model.config.{key}: has no effect",
                "weights are kept in fp32, whatever is computed in",
                "set techniques.precision",
            )
        if key not in known and not hasattr(config, key) and not _is_read(type(config), key):
            public = [name for name in known if not name.startswith("_")]
            why = nearest(key, public)
            raise ModelError(f"model.config.{key} = {value!r}: a {config.model_type} has no such setting", why)


def _is_read(config_class: type, key: str) -> bool:
    """Whether the model's code reads a setting that the configuration does not declare, as DeBERTa does."""
    folder = Path(inspect.getfile(config_class)).parent
    word = re.compile(rf"\b{re.escape(key)}\b")
    return any(word.search(path.read_text(encoding="utf-8")) for path in folder.glob("modeling_*.py"))


def read_json(path: Path) -> Any:
    """What a JSON file beside a model holds.

    Raises:
        FileNotFoundError: there is none.
        ModelError: it is damaged.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ModelError(f"{path}: not JSON", why, "download or copy it again") from None


def _read_config_json(source: str, folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        written = read_json(path)
    except FileNotFoundError:
        holding = sorted(one.parent for depth in ("*", "*/*") for one in folder.glob(f"{depth}/config.json"))
        fix = f"--set model.source={holding[0]}" if holding else "give the folder that holds config.json"
        if Path(source).expanduser().is_dir() and not source.startswith((".", "/", "~")):
            fix += f"; to take {source} from the Hub, run where no folder has that name"
        raise ModelError(
            f"model.source = {source}: has no config.json", "it is not a transformers model", fix
        ) from None
    if not isinstance(written, dict):
        raise ModelError(f"{path}: not a configuration", f"found {type(written).__name__}")
    return written


def _require_trust(part: ModelPart, written: dict[str, Any]) -> None:
    """Refuse before transformers would ask on the terminal whether to run the model's code."""
    from transformers import CONFIG_MAPPING

    model_type = written.get("model_type")
    if model_type not in CONFIG_MAPPING and not part.trust_remote_code:
        if written.get("auto_map"):
            raise ModelError(
                f"model.source = {part.source}: needs Python code that comes with it",
                "model.trust_remote_code is off, so that nothing of a download is executed",
                "read that code, then --set model.trust_remote_code=true (and model.revision to the commit you read)",
            )
        if model_type is None:
            raise ModelError(
                f"model.source = {part.source}: its config.json names no model_type",
                fix="add model_type, such as bert, to it",
            )
        raise ModelError(
            f"model.source = {part.source}: model_type {model_type!r} is unknown to this transformers",
            nearest(str(model_type), CONFIG_MAPPING),
            "pip install --upgrade transformers",
        )
    attention = str(written.get("attn_implementation") or written.get("_attn_implementation") or "")
    if "/" in attention and not part.trust_remote_code:
        raise ModelError(
            f"model.source = {part.source}: its config.json asks for attention code from the Hub ({attention})",
            "model.trust_remote_code is off, so that nothing of a download is executed",
            "--set model.trust_remote_code=true, once that code is read; or a copy whose config.json has sdpa there",
        )


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return " ".join(lines[:2]) if lines else type(error).__name__
