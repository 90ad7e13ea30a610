"""Files that are either whole or absent: atomic writes, checksums, room on the disk, and where caches live."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, final

from paceline.contract.errors import DiskFullError, RunFolderError, UserError


def cache_folder() -> Path:
    """Where encoded data and trained tokenizers are kept: PACELINE_CACHE, or paceline in the user's cache folder."""
    given = os.environ.get("PACELINE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(given) if given else Path(base) / "paceline"


def compiled_folder() -> Path:
    """Where compiled kernels are kept from run to run."""
    return cache_folder() / "compiled"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of ``path`` once it is whole and on the disk.

    A crash or an error leaves ``path`` as it was: temporary file, fsync, rename, fsync folder.
    """
    name = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    # the kernel applies the umask: reading it would mean to set it, for all threads
    descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise
    fsync_folder(path.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that a crash leaves either as it was or complete.

    Raises:
        DiskFullError: no room; the old file is intact and the temporary one removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(path, len(content)), replacing(path) as file:
        file.write(content)


def fsync_file(path: Path) -> None:
    """Wait until the file's content is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_folder(folder: Path) -> None:
    """Wait until the folder's entries are on the disk, so that a created or renamed file survives a power cut."""
    fsync_file(folder)


@final
class OpenFolder:
    """A folder known by what it is, not by its name; open until ``close``, so that no other takes its inode.

    Raises:
        OSError: there is no such folder.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def is_at(self, path: Path) -> bool:
        """Whether ``path`` leads to it now."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def where(self) -> Path | None:
        """Where it is now; None where it was removed, or this system does not say."""
        try:
            path = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        except OSError:
            return None
        return path if self.is_at(path) else None

    def close(self) -> None:
        os.close(self._descriptor)


def is_irregular(path: Path) -> bool:
    """Whether a pipe, a folder or a device has a file's place: opening it may wait forever. Links are followed."""
    return path.exists() and not path.is_file()


def is_utf8(path: Path) -> bool:
    """Return whether a path is text: on Linux a name is any bytes, for which Python has halves of surrogate pairs."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def lfs_note(path: Path) -> tuple[str, str] | None:
    """Return why and fix of an error about a file that is only git-lfs's pointer to it; None of any other file.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if not file.read(len(_LFS)).startswith(_LFS):
            return None
    fix = f"cd {shlex.quote(str(path.parent))} && git lfs pull"
    return "the repository was cloned without git-lfs", fix


LFS_NOTE = "only git-lfs's note of where it is"

_LFS = b"version https://git-lfs"


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_room(folder: Path, needed: int, what: str) -> None:
    """Refuse to start writing ``needed`` bytes where they do not fit.

    Raises:
        DiskFullError: says the bytes needed and free.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise _full(folder, needed, free, what)


def require_open_files(needed: int) -> None:
    """Raise this process's limit of open files where that is lower, as far as the system lets it.

    Raises:
        UserError: it does not.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UserError(
            f"{hard} open files at most (ulimit -n)", f"this run opens up to {needed} at a time", "ulimit -n 1024"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


@contextlib.contextmanager
def disk_errors(path: Path, needed: int = 0) -> Iterator[None]:
    """Turn the operating system's 'no space', 'read-only' and 'not permitted' into errors that teach."""
    try:
        with _told_as_text(path):
            yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(path.parent).free
            raise _full(path.parent, needed, free, f"writing {path.name}") from None
        if error.errno == errno.EFBIG:
            why = "the largest size that this process may give a file is reached"
            raise DiskFullError(
                f"{path}: may not grow any further", why, "ulimit -f unlimited lifts the limit"
            ) from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise RunFolderError(
                f"{path}: cannot be written", error.strerror or "", "choose another folder with --out"
            ) from None
        raise


@contextlib.contextmanager
def _told_as_text(path: Path) -> Iterator[None]:
    """safetensors writes outside Python and gives the operating system's error only as text."""
    try:
        yield
    except Exception as error:
        if number := re.search(r"\(os error (\d+)\)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from None
        raise


def _full(folder: Path, needed: int, free: int, what: str) -> DiskFullError:
    return DiskFullError(
        f"{folder}: no room for {what}",
        f"{needed:,} bytes needed, {free:,} bytes free" if needed else f"{free:,} bytes free",
        "free some space there, or choose another place",
    )
