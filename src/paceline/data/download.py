"""``paceline data imdb``: fetch the IMDB reviews and write them as train, validation and test files.

The archive is fetched so that a cut connection is taken up where it broke, checked, and then read as a stream: reviews
go from the archive straight into rows, and nothing is ever written under a name that the archive chose.

Source: Maas et al., Learning Word Vectors for Sentiment Analysis, ACL 2011,
https://ai.stanford.edu/~amaas/data/sentiment/.
"""

from __future__ import annotations

import gzip
import hashlib
import http.client
import io
import json
import re
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

import numpy as np

from paceline.data.dataset import Origins
from paceline.data.splits import deal, duplicate_keys
from paceline.data.table import Table
from paceline.errors import DataError
from paceline.files import disk_errors, fsync_folder, require_room, write_atomically
from paceline.recipe.parts import SplitsPart

IMDB_URL = "https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz"
IMDB_MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
IMDB_SPLITS = SplitsPart(train=35_000, validation=5_000, test=10_000)

Progress = Callable[[int, int | None], None]
"""Called with the bytes received so far and in total; the total is None when the server does not say."""

_REVIEW = re.compile(r"aclImdb/(?:train|test)/(pos|neg)/[^/]+\.txt")
_LABELS = {"pos": "positive", "neg": "negative"}

# the real archive has 100,022 members, 330 MB in all, and no review above 15 kB
_MOST_MEMBERS = 200_000
_MOST_BYTES = 2**30
_MOST_REVIEW_BYTES = 2**20

_ATTEMPTS = 5
_TIMEOUT_SECONDS = 30.0
_BLOCK = 2**18


def download_imdb(
    folder: Path,
    *,
    url: str = IMDB_URL,
    md5: str = IMDB_MD5,
    splits: SplitsPart = IMDB_SPLITS,
    progress: Progress | None = None,
    pause_seconds: float = 1.0,
) -> dict[str, Path]:
    """Write ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl`` into ``folder`` and return their paths.

    Each line is ``{"text": ..., "label": "positive" | "negative"}``. The reviews of the archive's own train and test
    parts are dealt together, stratified and seeded, and no text is in two files. Files that are all there already are
    returned as they are; a download that was cut short is taken up where it ended, also by a later call.

    Args:
        folder: created if needed.
        url: http or https address of the archive.
        md5: of the archive, in hexadecimal, as its publisher gives it.
        splits: rows of each file.
        progress: told of every block received.
        pause_seconds: wait before the second attempt; it doubles with each further one.

    Raises:
        DataError: no connection, a wrong checksum, or an archive that is not what it should be.
        DiskFullError: not enough room.
    """
    paths = {name: folder / f"{name}.jsonl" for name in ("train", "validation", "test")}
    if all(path.exists() for path in paths.values()):
        return paths
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    archive = fetch(url, folder / "aclImdb_v1.tar.gz", md5, progress, pause_seconds)
    for name, rows in _dealt(sorted(reviews(archive)), splits, archive).items():
        lines = [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in rows]
        write_atomically(paths[name], "".join(f"{line}\n" for line in lines).encode("utf-8"))
    archive.unlink()
    return paths


def fetch(url: str, path: Path, md5: str, progress: Progress | None = None, pause_seconds: float = 1.0) -> Path:
    """Download ``url`` to ``path``; what an earlier attempt left in ``path``.part is not fetched again.

    Raises:
        DataError: no connection after several attempts, a refusal, or a wrong checksum.
        DiskFullError: not enough room.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise DataError(f"{url}: cannot be downloaded", why="only http and https addresses are", fix="correct the url")
    part = path.with_name(f"{path.name}.part")
    if not path.exists():
        for attempt in range(_ATTEMPTS):
            try:
                _receive(url, part, progress)
                break
            except (OSError, http.client.HTTPException) as error:
                if attempt == _ATTEMPTS - 1 or not _is_passing(error):
                    raise _no_download(url, part, error) from None
                time.sleep(pause_seconds * 2**attempt)
        part.replace(path)
        fsync_folder(path.parent)
    with path.open("rb") as file:
        # published by the archive's authors; it guards against accidents, https against people
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != md5:
        path.unlink()
        raise DataError(
            f"{url}: the download has the wrong checksum",
            why=f"its md5 is {found} instead of {md5}; the file was removed",
            fix="run the command again; if it happens again, the file at this address has changed",
        )
    return path


def reviews(archive: Path) -> Iterator[tuple[str, str, str]]:
    """(name, text, label) of every labelled review in the archive, in its order; nothing is written to the disk.

    Raises:
        DataError: a member that no such archive has (a link, a device, a path that leads out, too many or too large
            ones), or a damaged archive.
    """
    num_members = 0
    try:
        with gzip.open(archive) as unpacked:
            limited = _Limited(unpacked, archive)
            with tarfile.open(fileobj=limited, mode="r|") as members:
                for member in members:
                    num_members += 1
                    _require_harmless(member, num_members, archive)
                    found = _REVIEW.fullmatch(member.name)
                    content = members.extractfile(member) if found and member.isreg() else None
                    if found and content is not None:
                        yield member.name, content.read().decode("utf-8"), _LABELS[found[1]]
    except (tarfile.TarError, EOFError, zlib.error, UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise _unusable(archive, f"it is damaged: {error}") from None


class _Limited(io.RawIOBase):
    """A stream that refuses to give more than an honest archive unpacks to."""

    def __init__(self, stream: gzip.GzipFile, archive: Path) -> None:
        self._stream, self._archive, self._given = stream, archive, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        left = _MOST_BYTES - self._given
        block = self._stream.read(left + 1 if size < 0 else min(size, left + 1))
        self._given += len(block)
        if self._given > _MOST_BYTES:
            raise _unusable(self._archive, f"it unpacks to more than {_MOST_BYTES:,} bytes")
        return block


def _require_harmless(member: tarfile.TarInfo, number: int, archive: Path) -> None:
    name = PurePosixPath(member.name)
    if number > _MOST_MEMBERS:
        raise _unusable(archive, f"it has more than {_MOST_MEMBERS:,} members")
    if not (member.isreg() or member.isdir()):
        raise _unusable(archive, f"{member.name!r} is a link or a device, not a file")
    if name.is_absolute() or ".." in name.parts or "\\" in member.name:
        raise _unusable(archive, f"the path {member.name!r} leads out of the archive")
    if _REVIEW.fullmatch(member.name) and member.size > _MOST_REVIEW_BYTES:
        raise _unusable(archive, f"{member.name!r} has {member.size:,} bytes, which is no review")


def _dealt(rows: list[tuple[str, str, str]], splits: SplitsPart, archive: Path) -> dict[str, list[tuple[str, str]]]:
    if not rows:
        raise _unusable(archive, "it holds no reviews such as aclImdb/train/pos/0_9.txt")
    names, texts, labels = zip(*rows, strict=True)
    table = Table(
        texts=texts,
        origins=Origins((archive.name,), np.zeros(len(names), dtype=np.int32), np.zeros(len(names), dtype=np.int64)),
    )
    dealt = deal(labels, "classification", duplicate_keys(table), None, splits)
    # in source order all negatives would come first, which other people's loops may not shuffle
    random = np.random.default_rng(splits.seed)
    return {name: [(texts[row], labels[row]) for row in random.permutation(ids)] for name, ids in dealt.splits.items()}


def _receive(url: str, part: Path, progress: Progress | None) -> None:
    """Append to ``part`` what it lacks of ``url``.

    Raises:
        OSError, HTTPException: the connection failed or ended early; what came is kept.
    """
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing lies behind what we have: complete, as the checksum will tell
            error.close()
            return
        raise
    with response:
        if response.status != 206:
            have = 0  # the server sends the whole file again
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None and length.isdecimal() else None
        if total is not None:
            require_room(part.parent, total - have, part.name)
        with disk_errors(part, (total or have) - have), part.open("ab" if have else "wb") as file:
            while block := response.read(_BLOCK):
                file.write(block)
                have += len(block)
                if have > _MOST_BYTES:
                    raise DataError(
                        f"{url}: sends more than {_MOST_BYTES:,} bytes", why="no such archive is that large"
                    )
                if progress is not None:
                    progress(have, total)
    if total is not None and have < total:
        # http.client gives a short read no error of its own
        raise ConnectionError(f"the connection ended {total - have:,} bytes early")


def _is_passing(error: Exception) -> bool:
    """Whether another attempt may succeed: a cut or a busy server, unlike 'no such name' or 404."""
    if isinstance(error, urllib.error.HTTPError):
        return error.code in (408, 429) or error.code >= 500
    if isinstance(error, urllib.error.URLError):
        return isinstance(error.reason, TimeoutError | ConnectionResetError)
    return True


def _no_download(url: str, part: Path, error: Exception) -> DataError:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    kept = f"; {part.stat().st_size:,} bytes are kept in {part}" if part.exists() else ""
    return DataError(
        f"{url}: cannot be downloaded",
        why=f"{reason}{kept}",
        fix="check the network (and HTTPS_PROXY) and run the command again: it goes on where it stopped",
    )


def _unusable(archive: Path, why: str) -> DataError:
    return DataError(f"{archive}: not the expected archive", why=why, fix="remove it and download it again")
