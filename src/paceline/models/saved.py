"""A trained model on disk: what plain transformers loads, beside ``paceline.json`` with what it leaves out."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from paceline.contract.errors import ModelError, in_a_line
from paceline.contract.files import disk_errors, fsync_file, fsync_folder, require_room
from paceline.contract.panics import is_failure
from paceline.models import factory as factories
from paceline.models.adapters import CONFIG, Base, check_base, load_adapters, save_adapters
from paceline.models.digests import check_digests, weight_digests
from paceline.models.group_norm import apply_group_norm
from paceline.models.heads import head_of
from paceline.models.hub import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, fetch, require_files
from paceline.models.images import ImageSettings
from paceline.models.imports import import_transformers
from paceline.models.load import check_weights, from_folder, quiet, seeded
from paceline.models.processor import Processor, open_processor
from paceline.models.tokenizers import cutting_on

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

FILE = "paceline.json"
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")
"""What a batch norm keeps and a group norm does not."""
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True, kw_only=True)
class SavedModel:
    """What ``paceline.json`` keeps."""

    label_names: tuple[str, ...]
    kind: str
    """Name of the task."""
    modality: str
    """``text`` or ``image``."""
    max_length: int | None = None
    """Tokens kept of a sample; None for images."""
    overflow: Mapping[str, Any] | None = None
    """What is kept of a longer text, as fields of the recipe's data part; None: its beginning."""
    pairs: bool = False
    """Whether a sample is two texts."""
    image: ImageSettings | None = None
    factory: str | None = None
    """``package.module:function`` that builds the module; None for a transformers model."""
    base: Base | None = None
    """What the model's adapters stand beside, which are all that is saved; None: whole weights are."""
    group_norm: int | None = None
    """Groups of the norms that stand in place of batch norms."""
    class_weights: tuple[float, ...] = ()
    """By which the loss was weighted, in the order of the labels; empty: not."""
    thresholds: tuple[float, ...] = ()
    """Above which labels are predicted, see ``Task``; empty: the likeliest class, or above one half."""
    weights: Mapping[str, str] = field(default_factory=dict, compare=False)
    """As read: the SHA-256 of each file of weights. Empty: saved before they were kept."""

    @property
    def auto_class(self) -> Any:
        """The class of transformers that makes such a model of a configuration."""
        return head_of(self.kind).auto_class(self.modality)


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A saved model, on the CPU, in fp32 and evaluation mode."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerFast | None
    saved: SavedModel
    processor: Processor | None = None
    """What the pixels came through, where that was the model's own image processor."""


def save_model(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast | None,
    folder: Path,
    saved: SavedModel,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Write a model so that a crash leaves the old folder or the new one, never a mixture.

    A transformers model is written by ``save_pretrained`` with its tokenizer, or its image processor's settings, and
    loads in plain transformers; a factory's module as ``model.safetensors``; adapters as peft has them, where ``saved``
    names a base. Names lose what torch.compile, DDP and
    recomputation put before them.

    The folder is written beside its place and renamed. Replacing an older one takes two renames: should the machine
    stop between them, ``load_saved`` finds the old folder under its other name and puts it back.

    Raises:
        DiskFullError: no room; the old folder is intact.
        RunFolderError: the place cannot be written.
    """
    folder = Path(folder)
    module = unwrapped(model)
    state = on_host({_plain_name(name): value for name, value in (weights or module.state_dict()).items()})
    needed = sum(value.numel() * value.element_size() for value in state.values())
    with disk_errors(folder / FILE, needed):
        folder.parent.mkdir(parents=True, exist_ok=True)
        require_room(folder.parent, needed, f"the model ({folder.name})")
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            _write(module, state, tokenizer, partial, saved)
            _settle(partial)
            _replace(folder, partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def load_saved(folder: Path, *, factory: str | None = None, trust_remote_code: bool = False) -> LoadedModel:
    """Read back what ``save_model`` wrote.

    Args:
        folder: as given to ``save_model``.
        factory: ``model.factory`` of the run's recipe. A file never decides by itself which function is called: for a
            factory's module this must name it.
        trust_remote_code: ``model.trust_remote_code`` of the run's recipe.

    Raises:
        ModelError: no such folder, files that are missing or damaged, or a factory that is not the one saved.
    """
    folder = Path(folder)
    if not folder.exists() and _previous(folder).is_dir():  # a replacement was cut off between its two renames
        _previous(folder).rename(folder)
    require_files(folder, (FILE, CONFIG, *CONFIG_FILES, *TOKENIZER_FILES, "*.safetensors", "*.safetensors.index.json"))
    saved = read_saved(folder)
    if saved.factory is None:
        model = _read_transformers(folder, saved, trust_remote_code)
    else:
        model = _read_factory(folder, saved, factory)
    check_digests(folder, saved.weights, FILE)  # what cannot be read at all is told as that
    # transformers reads config.json for a tokenizer too, and would blame that
    tokenizer = _read_tokenizer(folder) if saved.modality == "text" else None
    own = saved.image is not None and saved.image.processor is not None
    processor = open_processor(folder, f"{folder}") if own else None
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, saved=saved, processor=processor)


def read_saved(folder: Path) -> SavedModel:
    """``paceline.json`` of a saved model.

    Raises:
        ModelError: it is missing or holds something else.
    """
    path = Path(folder) / FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        image = found["image"]
        saved = SavedModel(
            label_names=tuple(str(name) for name in found["label_names"]),
            kind=str(found["kind"]),
            modality=str(found["modality"]),
            max_length=found["max_length"],
            overflow=None if found.get("overflow") is None else dict(found["overflow"]),
            pairs=bool(found.get("pairs", False)),
            image=ImageSettings(**{**image, "mean": tuple(image["mean"]), "std": tuple(image["std"])})
            if image
            else None,
            factory=found["factory"],
            base=_base(found["base"]) if found.get("base") else None,
            group_norm=found.get("group_norm"),
            class_weights=tuple(float(weight) for weight in found.get("class_weights", ())),
            thresholds=tuple(float(threshold) for threshold in found.get("thresholds", ())),
            weights={str(name): str(value) for name, value in dict(found.get("weights", {})).items()},
        )
        _check_numbers(saved)
    except FileNotFoundError:
        raise ModelError(f"{folder}: no model that paceline saved", f"{FILE} is missing", "give a run folder") from None
    except (UnicodeDecodeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be used", _told(error), "save the model again") from None
    return saved


def _check_numbers(saved: SavedModel) -> None:
    """Refuse weights and thresholds that are not those of these labels.

    Raises:
        ValueError: says how many there are.
    """
    labels, weights, thresholds = len(saved.label_names), len(saved.class_weights), len(saved.thresholds)
    allowed = head_of(saved.kind).num_thresholds(labels)
    if weights not in (0, labels) or thresholds not in (0, allowed):
        raise ValueError(f"{weights} class_weights and {thresholds} thresholds for {labels} labels")


def _base(found: Mapping[str, Any]) -> Base:
    told = {name: None if found[name] is None else str(found[name]) for name in ("revision", "digest")}
    return Base(source=str(found["source"]), **told)


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside torch.compile and data-parallel wrappers."""
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while True:
        if isinstance(model, wrappers):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _write(
    module: nn.Module,
    state: dict[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerFast | None,
    folder: Path,
    saved: SavedModel,
) -> None:
    if saved.base is not None:
        config: Any = module.config
        config.architectures = [type(module).__name__]
        config.save_pretrained(folder)
        save_adapters(module, state, folder, saved.base, "SEQ_CLS" if saved.modality == "text" else None)
    elif saved.factory is None:
        with quiet():
            module.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
    else:
        save_file(_unshared(state), folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer is not None:
        _save_tokenizer(tokenizer, folder, saved)
    if saved.image is not None:
        _write_json(folder / "preprocessor_config.json", saved.image.written())
    told = {**asdict(saved), "weights": weight_digests(folder)}
    _write_json(
        folder / FILE,
        {name: value for name, value in told.items() if value is not None or name not in ("overflow", "base")},
    )


def _save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path, saved: SavedModel) -> None:
    """Write the tokenizer's files. With them transformers truncates as the training did: at its length, on its side."""
    before = tokenizer.model_max_length
    is_tail = saved.overflow is not None and saved.overflow["overflow"] == "tail"
    try:
        tokenizer.model_max_length = saved.max_length or before
        with cutting_on(tokenizer, "left" if is_tail else "right"):
            tokenizer.save_pretrained(folder)
    finally:
        tokenizer.model_max_length = before


def _read_transformers(folder: Path, saved: SavedModel, trust_remote_code: bool) -> nn.Module:
    import_transformers()
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except (ValueError, OSError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(
            f"{folder}: its config.json cannot be used", _told(error), "train again, or use a copy that is whole"
        ) from error
    attention = str(getattr(config, "_attn_implementation_internal", None) or "")
    if "/" in attention and not trust_remote_code:
        raise ModelError(
            f"{folder}: its config.json asks for attention code from the Hub ({attention})",
            "nothing that comes with a model is run unless the command allows it",
            "set attn_implementation to sdpa in config.json; or read that code, then add --trust-remote-code",
        )
    if saved.base is not None:
        return _read_adapters(folder, config, saved, saved.base, trust_remote_code)
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{folder}: model.safetensors is missing", fix="train again, or use a copy that has it")
    model, account = from_folder(folder, config, saved.auto_class, trust_remote_code=trust_remote_code)
    missing = set(account["missing_keys"])
    if saved.group_norm is not None:
        norms = apply_group_norm(model, saved.group_norm)
        missing -= {f"{norm}.{name}" for norm in norms for name in _RUNNING}
    absent = sorted({*missing, *(name for name, *_ in account["mismatched_keys"])})
    if absent:
        why = f"{absent[0]} is missing or of another shape"
        raise ModelError(f"{folder}: not the weights of this model", why, "use a copy that is whole")
    return model


def _read_adapters(
    folder: Path, config: PretrainedConfig, saved: SavedModel, base: Base, trust_remote_code: bool
) -> nn.Module:
    """The base model with the adapters of ``folder`` added in."""
    setting = f"{folder / FILE}: base.source"
    of_base = fetch(base.source, WEIGHT_FILES, revision=base.revision, code=trust_remote_code, setting=setting)
    check_base(base, folder)
    with seeded(0):  # of what is drawn, nothing stays
        model, _ = from_folder(of_base, config, saved.auto_class, trust_remote_code=trust_remote_code)
        return load_adapters(model, folder)


def _told(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else in_a_line(error)


def _read_factory(folder: Path, saved: SavedModel, factory: str | None) -> nn.Module:
    if factory != saved.factory:
        raise ModelError(
            f"{folder}: was built by {saved.factory}",
            "a saved file does not decide which function is called" if factory is None else f"not by {factory}",
            f"--set model.factory={saved.factory}",
        )
    check_weights(folder)
    model = factories.build(factory or "", len(head_of(saved.kind).outputs(saved.label_names)))
    if saved.group_norm is not None:
        apply_group_norm(model, saved.group_norm)
    try:
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: model.safetensors is missing", fix="train again, or use a copy that has it"
        ) from None
    except RuntimeError as error:
        why = " ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise ModelError(
            f"{folder}: not the weights of what {factory} builds now", why, "restore that function"
        ) from None
    return model


def _read_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    if not (folder / "tokenizer_config.json").is_file():
        return None  # data of tokens, not of texts
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # the reader of tokenizer.json raises a bare Exception, or panics
        if not is_failure(error):
            raise
        raise ModelError(f"{folder}: its tokenizer cannot be loaded", str(error), "use a copy that is whole") from error


def _replace(folder: Path, partial: Path) -> None:
    previous = _previous(folder)
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        folder.rename(previous)
    partial.rename(folder)
    fsync_folder(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _settle(folder: Path) -> None:
    """Give files the usual permissions, which temporary ones lack, and wait until they are on the disk."""
    umask = os.umask(0)
    os.umask(umask)
    for path in (*folder.rglob("*"), folder):
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
        fsync_file(path)


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def on_host(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In main memory, in the usual order there, which is the only one that files have; equal views stay equal.

    transformers clones what lies in memory with something else, as weights in a flat buffer do, where it is: on a GPU
    that may have no room for a table of word embeddings once more.
    """
    copies: dict[Hashable, torch.Tensor] = {}
    found = {}
    for name, value in state.items():
        place = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
        found[name] = copies[place] = copies[place] if place in copies else value.detach().cpu().contiguous()
    return found


def _unshared(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors that own their memory: safetensors refuses two names for one."""
    seen: set[int] = set()
    owned = {}
    for name, value in state.items():
        pointer = value.untyped_storage().data_ptr()
        owned[name] = value.clone(memory_format=torch.contiguous_format) if pointer in seen else value.contiguous()
        seen.add(pointer)
    return owned


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
