"""One run at a time in a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import warnings
from pathlib import Path

from paceline.contract.errors import RunFolderError
from paceline.contract.files import OpenFolder, disk_errors
from paceline.run_folder.checks import LOCK, refuse_links
from paceline.run_folder.origin import now


def hold(path: Path, held: contextlib.ExitStack) -> OpenFolder:
    """Hold the folder until ``held`` is closed; the kernel lets go when this process ends, however it ends.

    Raises:
        RunFolderError: another run is in it, or one of its files is a link.
    """
    file = path / LOCK
    refuse_links(path)
    with disk_errors(file):
        itself = OpenFolder(path)
    held.callback(itself.close)
    with disk_errors(file):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(path, os.pread(descriptor, 4096, 0)) from None
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        warnings.warn(f"{path}: this file system has no locks; two runs in one folder go unnoticed", stacklevel=3)
        return itself
    # forked workers share the lock and may outlive us: let go of it by name, not by closing
    held.callback(fcntl.flock, descriptor, fcntl.LOCK_UN)
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "started": now()}
    with disk_errors(file):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)
    return itself


def _in_use(path: Path, content: bytes) -> RunFolderError:
    try:
        owner = json.loads(content)
        who = f"process {int(owner['pid'])} on {ascii(owner['host'])[1:-1]}, since {ascii(owner['started'])[1:-1]}"
    except (ValueError, KeyError, TypeError, RecursionError):
        who = "a process that has only just begun"
    return RunFolderError(
        f"{path}: in use by another run", who, "wait for it, stop it, or choose another folder with --out"
    )
