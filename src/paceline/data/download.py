"""``paceline data``: fetch the IMDB reviews as train, validation and test files, and CIFAR-10 in its binary version.

An archive is fetched so that a cut connection is taken up where it broke, and its checksum is compared. So what is
read afterwards is the publisher's own archive, and nothing is ever written under a name that it chose.

Source: Maas et al., Learning Word Vectors for Sentiment Analysis, ACL 2011,
https://ai.stanford.edu/~amaas/data/sentiment/. Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009,
https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from paceline.contract.errors import DataError
from paceline.contract.files import disk_errors, require_room, write_atomically
from paceline.data.dataset import Origins
from paceline.data.splits import duplicate_keys, split_rows
from paceline.data.table import Table
from paceline.recipe.catalogue.tasks import ONE_CLASS
from paceline.recipe.parts import SplitsPart

IMDB_URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
IMDB_MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
IMDB_SPLITS = SplitsPart(train=35_000, validation=5_000, test=10_000)

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin", "batches.meta.txt")

Progress = Callable[[int, int | None], None]
"""Called with the bytes received so far and in total; the total is None when the server does not say."""

_REVIEW = re.compile(r"aclImdb/(?:train|test)/(pos|neg)/[^/]+\.txt")
_LABELS = {"pos": "positive", "neg": "negative"}

_TIMEOUT_SECONDS = 30.0
_BLOCK = 2**18


def download_imdb(
    folder: Path,
    *,
    url: str = IMDB_URL,
    md5: str = IMDB_MD5,
    splits: SplitsPart = IMDB_SPLITS,
    progress: Progress | None = None,
) -> dict[str, Path]:
    """Write ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl`` into ``folder`` and return their paths.

    Each line is ``{"text": ..., "label": "positive" | "negative"}``. The reviews of the archive's own train and test
    parts are split together, stratified and seeded, and no text is in two files. Files that are all there already are
    returned as they are; a download that was cut short is taken up where it ended, also by a later call.

    Args:
        folder: created if needed.
        url: http or https address of the archive.
        md5: of the archive, in hexadecimal, as its publisher gives it.
        splits: rows of each file.
        progress: told of every block received.

    Raises:
        DataError: no connection, or a wrong checksum.
        DiskFullError: not enough room.
    """
    paths = {name: folder / f"{name}.jsonl" for name in ("train", "validation", "test")}
    if all(path.exists() for path in paths.values()):
        return paths
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "aclImdb_v1.tar.gz"
    _fetch(url, archive, md5, progress)
    for name, rows in _split(sorted(_reviews(archive)), splits, archive).items():
        lines = [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in rows]
        write_atomically(paths[name], "".join(f"{line}\n" for line in lines).encode("utf-8"))
    archive.unlink()
    return paths


def download_cifar10(
    folder: Path, *, url: str = CIFAR10_URL, md5: str = CIFAR10_MD5, progress: Progress | None = None
) -> dict[str, Path]:
    """Write the files of CIFAR-10's binary version into ``folder`` and return their paths by name.

    50,000 images of 32 x 32 x 3 for training and 10,000 for testing, each file of 10,000. The other version is pickled,
    and reading a pickle runs its code. Args, Raises and what is fetched again are as of ``download_imdb``.
    """
    paths = {name: folder / name for name in CIFAR10_FILES}
    if all(path.exists() for path in paths.values()):
        return paths
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "cifar-10-binary.tar.gz"
    _fetch(url, archive, md5, progress)
    with tarfile.open(archive, "r|gz") as members:
        for member in members:
            path = paths.get(member.name.removeprefix("cifar-10-batches-bin/"))
            content = members.extractfile(member) if path else None
            if path is not None and content is not None:
                write_atomically(path, content.read())
    archive.unlink()
    return paths


def _fetch(url: str, path: Path, md5: str, progress: Progress | None) -> None:
    """Download ``url`` to ``path``; what an earlier attempt left there is not fetched again."""
    while _md5(path) != md5:
        have = _num_bytes(path)
        try:
            _receive(url, path, progress)
        except (OSError, http.client.HTTPException) as error:
            if _num_bytes(path) > have:
                continue  # cut, but it goes on
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            kept = f"; {have:,} bytes are kept in {path}" if have else ""
            raise DataError(
                f"{url}: cannot be downloaded",
                why=f"{reason}{kept}",
                fix="check the network (and HTTPS_PROXY) and run the command again: it goes on where it stopped",
            ) from None
        if (found := _md5(path)) != md5:
            path.unlink()
            raise DataError(
                f"{url}: the download has the wrong checksum",
                why=f"its md5 is {found} instead of {md5}; the file was removed",
                fix="run the command again; if it happens again, the file at this address has changed",
            )


def _receive(url: str, path: Path, progress: Progress | None) -> None:
    """Append to ``path`` what it lacks of ``url``.

    Raises:
        OSError, HTTPException: the connection failed or ended early; what came is kept.
    """
    have = _num_bytes(path)
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing lies behind what we have
            error.close()
            return
        raise
    with response:
        if response.status != 206:
            have = 0  # the server sends the whole file again
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None and length.isdecimal() else None
        if total is not None:
            require_room(path.parent, total - have, path.name)
        with disk_errors(path, (total or have) - have), path.open("ab" if have else "wb") as file:
            while block := response.read(_BLOCK):
                file.write(block)
                have += len(block)
                if progress is not None:
                    progress(have, total)
    if total is not None and have < total:
        # http.client gives a short read no error of its own
        raise ConnectionError(f"the connection ended {total - have:,} bytes early")


def _reviews(archive: Path) -> Iterator[tuple[str, str, str]]:
    """(name, text, label) of every labelled review in the archive, in its order; nothing is written to the disk."""
    with tarfile.open(archive, "r|gz") as members:
        for member in members:
            found = _REVIEW.fullmatch(member.name)
            content = members.extractfile(member) if found else None
            if found and content is not None:
                yield member.name, content.read().decode("utf-8"), _LABELS[found[1]]


def _split(rows: list[tuple[str, str, str]], splits: SplitsPart, archive: Path) -> dict[str, list[tuple[str, str]]]:
    names, texts, labels = zip(*rows, strict=True)
    table = Table(
        texts=texts,
        origins=Origins((archive.name,), np.zeros(len(names), dtype=np.int32), np.zeros(len(names), dtype=np.int64)),
    )
    divided = split_rows(labels, ONE_CLASS, duplicate_keys(table), None, splits)
    # in source order all negatives would come first, which other people's loops may not shuffle
    random = np.random.default_rng(splits.seed)
    return {
        name: [(texts[row], labels[row]) for row in random.permutation(ids)] for name, ids in divided.splits.items()
    }


def _md5(path: Path) -> str:
    """The checksum that the authors publish: it guards against accidents, https against people."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _num_bytes(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
