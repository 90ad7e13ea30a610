"""A folder somewhere else: any file system that fsspec knows, such as S3, or a path. Torch-free.

Credentials are never taken from a URL: a file system finds them where its own tools do, in the environment or in the
files of the person's home.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import posixpath
import shutil
from pathlib import Path
from typing import IO, Any, final

from paceline.contract.errors import DataError, RecipeError

_CHUNK_BYTES = 2**22


@final
class Remote:
    """A folder of a file system, by its URL or path; nothing is asked of it before the first call of a method.

    Whatever the file system raises passes through: OSError for most, but each has errors of its own.

    Args:
        url: ``s3://bucket/folder``, ``memory://folder`` or a path.
        what: what was set, for the errors; by default the URL itself.

    Raises:
        RecipeError: no such kind of file system, or the package that it needs is missing.
    """

    def __init__(self, url: str, what: str = "") -> None:
        self.url, what = url.rstrip("/"), what or url
        if "::" in url:
            raise RecipeError(what, "file systems within one another are not taken", "name one of them")
        try:
            from fsspec.core import url_to_fs

            found = url_to_fs(self.url)
        except ImportError as error:
            is_s3 = url.startswith(("s3:", "s3a:"))
            raise RecipeError(what, str(error), "pip install 'paceline[mirror]'" if is_s3 else "") from None
        except ValueError as error:
            raise RecipeError(what, str(error), "s3://BUCKET/FOLDER, or a path") from None
        self._files: Any = found[0]
        self._root = str(found[1]).rstrip("/")
        protocol = self._files.protocol
        self._is_local = "file" in ({protocol} if isinstance(protocol, str) else set(protocol))

    @property
    def path(self) -> Path | None:
        """Where it is on this machine; None where it is not."""
        return Path(self._root) if self._is_local else None

    def read(self, name: str, limit: int = 2**28) -> bytes | None:
        """The content of a file; None where there is none.

        Raises:
            DataError: it is longer than ``limit`` bytes.
        """
        size = self.size(name)
        if size is None:
            return None
        if size > limit:
            raise DataError(f"{self.url}/{name}: {size:,} bytes", why=f"at most {limit:,} are read")
        return bytes(self._files.cat_file(self._at(name)))

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""
        self._files.invalidate_cache()
        try:
            found = self._files.info(self._at(name))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, whole or not at all."""
        self.send(io.BytesIO(content), name)

    def send(self, file: IO[bytes], name: str) -> None:
        """Copy a file there, whole or not at all: a disk shows it under a hidden name until then, an object store not
        before."""
        place = self._at(name)
        self._files.makedirs(posixpath.dirname(place), exist_ok=True)
        partial = posixpath.join(posixpath.dirname(place), f".{posixpath.basename(place)}.partial")
        with self._files.open(partial if self._is_local else place, "wb") as there:
            shutil.copyfileobj(file, there, _CHUNK_BYTES)
        if self._is_local:
            self._files.mv(partial, place)

    def fetch(self, name: str, file: IO[bytes]) -> str:
        """Copy a file from there; returns its SHA-256."""
        found = hashlib.sha256()
        with self._files.open(self._at(name), "rb") as there:
            while block := there.read(_CHUNK_BYTES):
                found.update(block)
                file.write(block)
        return found.hexdigest()

    def names(self, name: str) -> list[str]:
        """Names of what is in a folder; none where there is none."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._at(name), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted({posixpath.basename(str(path).rstrip("/")) for path in found} - {""})

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; what is not there is no error."""
        self._files.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(self._at(name), recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"
