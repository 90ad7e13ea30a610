"""Files of a model: from a local folder, the Hub's cache or the Hub, with one message for each way it can fail.

Everything else in this room reads local folders only. Downloads are huggingface_hub's: resumed when the connection
breaks, shared between processes, and honouring HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from paceline.contract.errors import ModelError, nearest
from paceline.contract.files import LFS_NOTE, is_irregular, is_utf8, lfs_note
from paceline.contract.streams import Screen

ADAPTERS = "adapter_config.json"
"""File by which peft marks a folder of adapters."""

CONFIG_FILES = ("config.json", "preprocessor_config.json", ADAPTERS)
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "*.model",
)
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")

_WELL_KNOWN = (
    "albert-base-v2",
    "answerdotai/ModernBERT-base",
    "answerdotai/ModernBERT-large",
    "bert-base-cased",
    "bert-base-chinese",
    "bert-base-multilingual-cased",
    "bert-base-uncased",
    "bert-large-uncased",
    "distilbert-base-cased",
    "distilbert-base-multilingual-cased",
    "distilbert-base-uncased",
    "distilroberta-base",
    "google/electra-base-discriminator",
    "google/electra-small-discriminator",
    "google/vit-base-patch16-224",
    "google/vit-base-patch16-224-in21k",
    "microsoft/deberta-v3-base",
    "microsoft/deberta-v3-small",
    "microsoft/mpnet-base",
    "microsoft/resnet-18",
    "microsoft/resnet-50",
    "roberta-base",
    "roberta-large",
    "xlm-roberta-base",
)
"""Names that a misspelt one is compared with, beside those in the cache."""


def fetch(
    source: str,
    patterns: tuple[str, ...],
    *,
    revision: str | None = None,
    code: bool = False,
    setting: str = "model.source",
) -> Path:
    """The folder that holds those files of ``source`` that match ``patterns``.

    A local folder is returned as it is. Otherwise ``source`` is a Hub name: what is missing in the cache is downloaded
    (one request when nothing is), and with HF_HUB_OFFLINE or without a network the cache alone is used.

    Args:
        source: local folder or Hub name.
        patterns: globs on file names at the top of the repository.
        revision: branch, tag or commit on the Hub.
        code: also fetch the repository's Python files, for ``model.trust_remote_code``.
        setting: the recipe's path that ``source`` came from, for messages.

    Raises:
        ModelError: no such folder or name, a file of it that is none, no access, no network, a download that was cut,
            no room for the cache.
    """
    if (folder := local_folder(source, setting)) is not None:
        require_files(folder, patterns)
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    # huggingface_hub's transport errors are of httpx or httpx2, whichever its version is built on
    transport: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        with _download_bars():
            return Path(
                snapshot_download(
                    source,
                    revision=revision,
                    allow_patterns=[*patterns, *(["*.py"] if code else [])],
                    ignore_patterns=None if code else ["*/*"],
                )
            )
    except (transport, HFValidationError, EntryNotFoundError, OSError, UnicodeEncodeError) as error:
        # 'from None': the cause may hold the request, and with it the token
        raise _teach(error, source, revision, setting) from None


def local_folder(source: str, setting: str = "model.source") -> Path | None:
    """The local folder that ``source`` names, or None when it is a Hub name.

    Raises:
        ModelError: written as a path, but no folder is there.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    written_as_path = source.startswith((".", "/", "~")) or "\\" in source or source.count("/") > 1
    if path.exists():
        is_beside = (path.parent / "config.json").is_file()
        fix = (
            f"--set {setting}={path.parent}" if is_beside else "give the folder that holds config.json and the weights"
        )
        raise ModelError(f"{setting} = {source}: is a file", "a model is a folder", fix)
    if written_as_path:
        parent = path.parent
        beside = [child.name for child in parent.iterdir() if child.is_dir()] if parent.is_dir() else []
        close = nearest(path.name, beside) if beside else ""
        why = close if close.startswith("did you") else f"{parent} is no folder" if not parent.is_dir() else ""
        raise ModelError(
            f"{setting} = {source}: no such folder", why, "give the folder that holds config.json, or a Hub name"
        )
    return None


def require_files(folder: Path, patterns: tuple[str, ...]) -> None:
    """Refuse a folder in which a pipe, a folder or git-lfs's pointer has the place of a file that will be opened.

    Raises:
        ModelError: names it; or the folder's path is not UTF-8, and the libraries that read a model take no other.
    """
    if not is_utf8(folder):
        why = "the libraries that read models take no other path"
        raise ModelError(f"{folder}: is not UTF-8", why, "rename the folder, or copy the model elsewhere")
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            if is_irregular(path):
                raise ModelError(
                    f"{path}: is no regular file", "a file of the model belongs there", "download or copy it again"
                )
            refuse_lfs_note(path)


def refuse_lfs_note(path: Path) -> None:
    """Raise a ModelError where git, without git-lfs, has left a pointer in a file's place."""
    if note := lfs_note(path):
        raise ModelError(f"{path}: {LFS_NOTE}", *note)


def refuse_adapters(folder: Path, what: str) -> None:
    """Raise a ModelError where a folder holds adapters (LoRA) in place of a model; ``what`` names the setting."""
    path = folder / ADAPTERS
    if not path.is_file():
        return
    try:
        base = json.loads(path.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        base = None
    named = f"; they stand beside {base}" if isinstance(base, str) and base else ""
    raise ModelError(
        f"{what}: holds adapters (LoRA), and not the model that they stand beside",
        f"a model is whole weights{named}",
        "name a model that was saved with model.lora.merge=true, or by peft's merge_and_unload()"
        + (f"; or begin again with --model {base} --set model.train=lora" if named else ""),
    )


def other_weights(source: str, folder: Path, revision: str | None) -> list[str]:
    """Names of the weights of ``source`` that are not safetensors; empty when the Hub cannot be asked."""
    endings = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
    if Path(source).expanduser().is_dir():
        names = [file.name for file in folder.iterdir()]
    else:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError

        transport: type[Exception] = HfHubHTTPError.__bases__[0]
        try:
            names = HfApi().list_repo_files(source, revision=revision)
        except (transport, OSError):
            return []  # only the message is poorer: the caller raises either way
    return sorted(name for name in names if name.endswith(endings) and "/" not in name and name != "training_args.bin")


@contextlib.contextmanager
def _download_bars() -> Iterator[None]:
    """Download bars are for a person at a terminal; log files get none."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    hide = not Screen(sys.stderr).isatty() and not are_progress_bars_disabled()
    if not hide or constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _teach(error: BaseException, source: str, revision: str | None, setting: str) -> ModelError:
    """One message for each cause. No text of the error itself is shown: it may quote headers, and so the token."""
    from huggingface_hub import errors, get_token

    what = f"{setting} = {source}"
    chain = _chain(error)
    if any(isinstance(link, errors.HFValidationError) for link in chain):
        return ModelError(
            f"{what}: neither a folder nor a Hub name", "a Hub name is NAME or OWNER/NAME", _spelling(source)
        )
    if any(isinstance(link, UnicodeEncodeError) for link in chain):
        return ModelError(f"{what}: cannot be asked for", "HF_TOKEN holds characters a token never has", "set it again")
    if any(isinstance(link, errors.RevisionNotFoundError) for link in chain):
        return ModelError(
            f"model.revision = {revision}: {source} has no such branch, tag or commit",
            fix=f"choose one of https://huggingface.co/{source}/tree/main, or leave model.revision out",
        )
    for link in chain:
        if isinstance(link, errors.HfHubHTTPError):
            return _teach_refusal(link, what, source, has_token=get_token() is not None)
    if any(isinstance(link, errors.OfflineModeIsEnabled) for link in chain):
        return ModelError(
            f"{what}: not in the cache",
            "HF_HUB_OFFLINE is set, so only the cache is looked at",
            f"unset HF_HUB_OFFLINE once, or give a folder that holds the model: {_copy_command(source)}",
        )
    for link in chain:
        if isinstance(link, OSError) and link.errno in (errno.ENOSPC, errno.EDQUOT):
            return ModelError(
                f"{what}: no room to download it",
                f"the disk of {_cache()} is full",
                "free some space there, or set HF_HOME to a folder on another disk",
            )
        if isinstance(link, OSError) and link.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return ModelError(
                f"{what}: cannot be kept", f"{_cache()} cannot be written", "set HF_HOME to another folder"
            )
    if isinstance(error, errors.EntryNotFoundError) or any("Connect" in type(link).__name__ for link in chain):
        return ModelError(
            f"{what}: not in the cache, and {_host()} cannot be reached",
            f"no answer ({type(chain[-1]).__name__})",
            "connect to the network, set HF_ENDPOINT to a mirror, or give a folder that holds the model: "
            + _copy_command(source),
        )
    return ModelError(
        f"{what}: the download from {_host()} was cut",
        f"the connection broke and did not come back ({type(error).__name__})",
        "run the same command again: files that are complete are kept",
    )


def _teach_refusal(error: BaseException, what: str, source: str, has_token: bool) -> ModelError:
    from huggingface_hub import errors

    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    page = f"https://huggingface.co/{source}"
    if isinstance(error, errors.GatedRepoError):
        if has_token:
            return ModelError(
                f"{what}: gated, and the account of your token has no access",
                "its owners grant access account by account",
                f"ask for access at {page}, with the account that HF_TOKEN belongs to",
            )
        return ModelError(
            f"{what}: gated, and no token was sent",
            "its owners grant access account by account",
            f"accept its conditions at {page}, then set HF_TOKEN to a token of that account (or run: hf auth login)",
        )
    # the Hub hides private models: without a token it says 401 where there is nothing, too
    if isinstance(error, errors.RepositoryNotFoundError) or (status == 401 and not has_token):
        why = "the token that was sent may not read it, or there is none of that name" if has_token else ""
        return ModelError(
            f"{what}: no such model on {_host()}" + ("" if has_token else ", or a private one and no token was sent"),
            why,
            f"{_spelling(source)} For a private model set HF_TOKEN",
        )
    if status == 401:
        return ModelError(
            f"{what}: the token was refused", "it is wrong or has expired", "set HF_TOKEN to a valid token"
        )
    if status == 403:
        return ModelError(
            f"{what}: access denied (403)",
            "the token lacks the permission to read it" if has_token else "no token was sent",
            "set HF_TOKEN to a token that may read this model",
        )
    if status == 429:
        return ModelError(
            f"{what}: too many requests (429)",
            f"{_host()} limits how often it may be asked",
            "wait a few minutes; with HF_HUB_OFFLINE=1 a model in the cache needs no request",
        )
    return ModelError(
        f"{what}: {_host()} answered with an error ({status})",
        "the Hub, or the mirror that HF_ENDPOINT names, has a problem",
        f"try again later, or give a folder that holds the model: {_copy_command(source)}",
    )


def _chain(error: BaseException) -> list[BaseException]:
    """The error and all that it was raised from, outermost first."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def _spelling(source: str) -> str:
    cache = Path(_cache())
    cached = [folder.name.removeprefix("models--").replace("--", "/") for folder in cache.glob("models--*")]
    advice = nearest(source, {*_WELL_KNOWN, *cached} - {source})
    return advice if advice.startswith("did you") else "check the spelling."


def _copy_command(source: str) -> str:
    return f"hf download {source} --local-dir FOLDER (on a machine with a network), then --set model.source=FOLDER"


def _host() -> str:
    from huggingface_hub import constants

    # the endpoint may carry a user name and a password
    return urlsplit(constants.ENDPOINT).hostname or "the Hub"


def _cache() -> str:
    from huggingface_hub import constants

    return os.fspath(constants.HF_HUB_CACHE)
