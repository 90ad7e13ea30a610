"""Committed checkpoints copied to somewhere else, behind the run: the training never waits for it."""

from __future__ import annotations

import contextlib
import json
import threading
from collections import deque
from pathlib import Path
from typing import Any, final

from paceline.contract.errors import RecipeError, UserError, in_a_line
from paceline.run.checkpoint.manifest import (
    MANIFEST,
    MARKER,
    DamagedError,
    Slot,
    is_committed,
    open_regular,
    read_manifest,
    slots_of,
)
from paceline.run.checkpoint.remote import Remote

FOLLOWING = ("recipe.yaml", "manifest.json", "metrics.jsonl")
"""Files of a run folder that a resume reads, copied beside each checkpoint."""

END_SECONDS = 120.0
"""How long the end of a run waits for its last checkpoint to be copied."""

STOP_SECONDS = 5.0
"""How long a run that was asked to stop does."""

FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0
"""Seconds until what failed is tried again: doubled each time."""

SETTING = "loop.checkpoint_mirror"


class _Refused(Exception):
    """What is there is not this run's: nothing is written."""


@final
class Mirror:
    """Copies the checkpoints of a run folder to ``URL/<name of the run folder>`` on a thread of its own.

    A checkpoint is there once its ``COMMITTED`` is, written last. Files are sent one by one, each compared with the
    manifest's SHA-256 on the way and with its size there; after an error or a kill those that arrived are not sent
    again. Of several that wait the newest goes first, and what the run no longer keeps is removed there too. Errors
    are notices, and tried again.

    All methods but the thread's own are called from one thread.

    Args:
        url: as ``Remote`` takes it.
        folder: the run folder.

    Raises:
        RecipeError: nothing can be written at such a URL, or it lies in the run folder itself.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.where = f"{url.rstrip('/')}/{folder.name}"
        self._remote, self._folder, self._first_start = Remote(self.where, f"{SETTING} = {url}"), folder, None
        there = self._remote.path
        if there is not None and (there.resolve().is_relative_to(folder) or folder.is_relative_to(there.resolve())):
            what = f"{SETTING} = {url}: leads to {there}, where the run itself is"
            raise RecipeError(what, "a copy there would take its place", "name a folder of another disk")
        self._may_begin = False
        self._told: deque[str] = deque()
        self._changed = threading.Condition()
        self._asked = self._done = 0  # passes over the folder
        self._is_closed = self._is_admitted = False
        self._refusal = ""
        self._trouble = ""
        self._thread: threading.Thread | None = None

    def begin(self, *, may_begin: bool, seconds: float = 10.0) -> None:
        """Start copying what the run folder holds and what comes; waits a little for the first answer from there.

        Args:
            may_begin: where nothing of this run is there, claim the place; otherwise it has to be there already, for
                the setting came with a folder that may be somebody else's.
            seconds: after which the run begins without an answer.

        Raises:
            UserError: another run is there, or nothing is and ``may_begin`` is False.
        """
        self._may_begin, self._first_start = may_begin, _first_start((self._folder / "manifest.json").read_bytes())
        # a daemon: a file system that never answers must not hold the end of the process
        self._thread = threading.Thread(target=self._work, name="paceline-mirror", daemon=True)
        self._thread.start()
        self.poke()
        with self._changed:
            self._changed.wait_for(lambda: self._is_admitted or self._refusal or self._told, seconds)
        if self._refusal:
            fix = f"--set {SETTING}={self.where.rpartition('/')[0]} on the command line says that it is meant"
            raise UserError(f"{self.where}: {self._refusal}", "", "choose another --out" if may_begin else fix)

    def poke(self) -> None:
        """Say that a checkpoint was committed."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def move(self, folder: Path) -> None:
        """Copy from ``folder`` from now on; what is there keeps its name."""
        self._folder = folder

    def notices(self) -> list[str]:
        """What went wrong since the last call; never waits."""
        return [self._told.popleft() for _ in range(len(self._told))]

    def wait(self, seconds: float) -> list[str]:
        """Wait until all that was asked for is there, but not for longer; what is to be said of it."""
        if self._thread is None or self._refusal:
            return self.notices()
        with self._changed:
            is_done = self._changed.wait_for(lambda: self._done >= self._asked or bool(self._refusal), seconds)
        late = f"{self.where}: the newest checkpoint is not there after {seconds:g} seconds; the next start copies it"
        return [*self.notices(), *([] if is_done else [late])]

    def close(self) -> None:
        """End the thread; one that waits for the other side is left alone, and ends with the process."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(1.0)

    def _work(self) -> None:
        delay = FIRST_DELAY
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._asked > self._done)
                if self._is_closed:
                    return
                asked = self._asked
            try:
                self._admit()
                self._copy_all()
            except _Refused as refused:
                with self._changed:
                    self._refusal = str(refused)
                    self._told.append(f"{self.where}: {refused}; nothing is copied there")
                    self._changed.notify_all()
                return
            except Exception as error:  # each file system has errors of its own, and none is a reason to lose a run
                self._tell(error, delay)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, delay)
                delay = min(2 * delay, LONGEST_DELAY)
            else:
                delay = FIRST_DELAY
                with self._changed:
                    if self._trouble:
                        self._told.append(f"{self.where}: can be written again")
                    self._done, self._trouble = asked, ""
                    self._changed.notify_all()

    def _tell(self, error: Exception, delay: float) -> None:
        cause = in_a_line(error)
        with self._changed:
            if cause != self._trouble:  # once, and not at every try
                self._told.append(f"{self.where}: cannot be written ({cause}); tried again in {delay:g} s, and so on")
            self._trouble = cause
            self._changed.notify_all()

    def _admit(self) -> None:
        """Find out whether the place is this run's."""
        if self._is_admitted:
            return
        there = self._remote.read("manifest.json")
        if there is None and not self._may_begin:
            raise _Refused("holds nothing of this run, whose folder names it")
        if there is not None and _first_start(there) != self._first_start:
            raise _Refused("holds another run of this name")
        if there is None:
            self._follow()
        with self._changed:
            self._is_admitted = True
            self._changed.notify_all()

    def _copy_all(self) -> None:
        root = self._folder / "checkpoints"
        slots = [slot for slot in slots_of(root) if is_committed(root, slot)]
        for slot in reversed(slots):
            self._copy(root, slot)
            if self._is_closed:
                return
        if slots:  # a folder that is gone is no reason to remove what is there
            kept = {slot.name for slot in slots_of(root)} | {slot.name for slot in slots}
            for name in self._remote.names("checkpoints"):
                if Slot.parse(name) is not None and name not in kept:
                    self._remote.remove(f"checkpoints/{name}/{MARKER}")
                    self._remote.remove(f"checkpoints/{name}")

    def _copy(self, root: Path, slot: Slot) -> None:
        folder, place = root / slot.name, f"checkpoints/{slot.name}"
        with contextlib.ExitStack() as stack:
            try:
                # opened together: a file that the run drops meanwhile can be read to its end
                manifest = read_manifest(root, slot)
                content, marker = ((folder / name).read_bytes() for name in (MANIFEST, MARKER))
                files = {name: stack.enter_context(open_regular(folder / name)) for name in manifest.files}
            except (DamagedError, FileNotFoundError):  # dropped by now, or damaged, which a resume tells
                return
            if self._remote.read(f"{place}/{MARKER}") == marker:
                return
            if self._remote.read(f"{place}/{MANIFEST}") != content:
                self._remote.remove(place)  # another of that step, or the beginning of one
                self._remote.write(f"{place}/{MANIFEST}", content)
            for name, entry in manifest.files.items():
                if self._remote.size(f"{place}/{name}") != entry.num_bytes:
                    self._remote.send(files[name], f"{place}/{name}", entry.num_bytes, entry.sha256)
        self._follow()
        self._remote.write(f"{place}/{MARKER}", marker)

    def _follow(self) -> None:
        """Copy the run's other files as they are now."""
        for name in FOLLOWING:
            try:
                content = (self._folder / name).read_bytes()
            except FileNotFoundError:  # not written yet, or the folder is gone
                continue
            self._remote.write(name, content)


def _first_start(manifest: bytes) -> Any:
    """What tells a run from every other: its first start, with its time and its machine."""
    try:
        return json.loads(manifest)["starts"][0]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
