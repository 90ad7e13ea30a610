"""Adapters (LoRA) on the disk as peft has them, and weights with the adapters added in."""

from __future__ import annotations

import copy
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.contract.errors import ModelError, in_a_line
from paceline.contract.files import digest
from paceline.models.hub import ADAPTERS, WEIGHT_FILES, local_folder

CONFIG, WEIGHTS = ADAPTERS, "adapter_model.safetensors"
"""What peft calls its two files."""

_WITHIN_PEFT = "base_model.model."
"""What peft puts before the names of a model."""


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model that adapters stand beside."""

    source: str
    """Folder or Hub name."""
    revision: str | None = None
    """The commit on the Hub, where it is known."""
    digest: str | None = None
    """Tells whether the weights of a folder have changed; None: they are the Hub's."""


def base_of(model: nn.Module, source: str, revision: str | None) -> Base:
    """What a model was loaded from, so that it is found again as it is now."""
    if local_folder(source) is not None:
        return Base(source=source, digest=weights_digest(Path(source)))
    commit = getattr(getattr(model, "config", None), "_commit_hash", None)
    return Base(source=source, revision=commit or revision)


def weights_digest(folder: Path) -> str:
    """SHA-256 of the weights in a folder, in hexadecimal; of several files, of theirs."""
    found = [digest(path) for pattern in WEIGHT_FILES for path in sorted(folder.expanduser().glob(pattern))]
    return "+".join(found)


def check_base(base: Base, folder: Path) -> None:
    """Refuse a base model that is another than the adapters were trained on.

    Raises:
        ModelError: its weights have changed.
    """
    if base.digest is not None and weights_digest(Path(base.source)) != base.digest:
        raise ModelError(
            f"{folder}: adapters for the weights of {base.source}, which have changed",
            "with other weights they compute something else",
            "put those weights back; model.lora.merge=true saves whole weights",
        )


def save_adapters(
    model: nn.Module, state: Mapping[str, Tensor], folder: Path, base: Base, task_type: str | None = None
) -> None:
    """Write what of ``model`` is trained into a folder that peft loads: adapters, and whole modules such as the head.

    Args:
        model: after ``apply_lora``.
        state: its whole state, in main memory.
        base: what peft loads them onto.
        task_type: in peft's words, as ``SEQ_CLS``.
    """
    from peft import get_peft_model_state_dict

    adapted = adapters_of(model)
    within = tuple(f"{name}." for name in adapted)
    whole = [name for name, p in model.named_parameters() if p.requires_grad and not name.startswith(within)]
    tensors = {**get_peft_model_state_dict(model, state_dict=dict(state)), **{name: state[name] for name in whole}}
    save_file(
        {f"{_WITHIN_PEFT}{name}": tensor.clone() for name, tensor in tensors.items()},
        folder / WEIGHTS,
        metadata={"format": "pt"},
    )
    config: Any = copy.copy(vars(model)["peft_config"]["default"])
    config.base_model_name_or_path, config.revision = base.source, base.revision
    config.target_modules = _endings(list(adapted), [name for name, _ in model.named_modules()])
    config.modules_to_save = list(dict.fromkeys(name.partition(".")[0] for name in whole)) or None
    config.task_type, config.inference_mode = task_type, True
    config.save_pretrained(folder)


def load_adapters(model: nn.Module, folder: Path) -> nn.Module:
    """The base model with adapters of a folder added into its weights, in place; torch's generator is drawn from.

    Raises:
        ModelError: peft is not installed, or the folder's files are missing, damaged, or of another model.
    """
    if importlib.util.find_spec("peft") is None:
        raise ModelError(f"{folder}: adapters, and peft, which reads them, is not installed", fix=_INSTALL)
    from peft import LoraConfig, LoraModel, set_peft_model_state_dict

    try:
        kind = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("peft_type")
        if kind != "LORA":
            raise ModelError(f"{folder / CONFIG}: peft_type is {kind}", "LORA is read", _WHOLE)
        given = {name.removeprefix(_WITHIN_PEFT): value for name, value in load_file(folder / WEIGHTS).items()}
        own = model.state_dict()
        head = {name: given.pop(name) for name in list(given) if name in own}
        config = LoraConfig.from_pretrained(folder)
        config.modules_to_save = None  # the model's own take their place
        adapted = LoraModel(model, config, "default")
        model.load_state_dict(head, strict=False)
        account = set_peft_model_state_dict(model, given)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{folder}: its adapters cannot be loaded", in_a_line(error), _WHOLE) from None
    absent = [name for name in account.missing_keys if ".lora_" in name]
    if other := [*account.unexpected_keys, *absent]:
        raise ModelError(f"{folder}: not the adapters of this model", f"{other[0]} is in one of them alone", _WHOLE)
    plain: nn.Module = adapted.merge_and_unload(progressbar=False)
    return plain


_INSTALL = "pip install 'paceline[lora]'"
_WHOLE = "use a copy that is whole"


def adapters_of(model: nn.Module) -> dict[str, nn.Module]:
    """peft's layers in a model, each of which holds the layer that it adapts."""
    from peft.tuners.lora import LoraLayer

    kind: Any = LoraLayer  # a mixin, which its modules are too

    return {name: module for name, module in model.named_modules() if isinstance(module, kind)}


@torch.no_grad()
def merged(model: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state of the model as it is without adapters, their sums added into its weights.

    Added up in fp32 and in main memory, a layer at a time, by peft. Neither model nor ``state`` is changed.

    Args:
        model: after ``apply_lora``; its own weights are not read, for they may be shards.
        state: its whole state.
    """
    adapted = adapters_of(model)
    within = tuple(f"{name}." for name in adapted)
    found = {name: tensor for name, tensor in state.items() if not name.startswith(within)}
    for name, layer in adapted.items():
        own = {key: state[f"{name}.{key}"].detach().cpu() for key in layer.state_dict()}
        # a copy of the layer with these tensors in the place of its own
        places = {
            id(p): nn.Parameter(own[key].to(torch.float32, copy=True), requires_grad=False)
            for key, p in layer.named_parameters()
        }
        alone: Any = copy.deepcopy(layer, places)
        alone.merge()
        for key, tensor in alone.get_base_layer().state_dict().items():
            found[f"{name}.{key}"] = tensor.to(own[f"base_layer.{key}"].dtype)
    return found


def _endings(chosen: Sequence[str], names: Sequence[str]) -> list[str]:
    """The shortest last parts of names that are those of the chosen alone: how peft's users write them."""
    others, found = set(names) - set(chosen), dict[str, None]()
    for name in chosen:
        parts = name.split(".")
        ways = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
        found[next((way for way in ways if not any(f".{one}".endswith(f".{way}") for one in others)), name)] = None
    return sorted(found)
