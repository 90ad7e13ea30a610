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

SETTING = "loop.checkpoint_mirror"


@final
class Mirror:
    """Copies the checkpoints of a run folder to ``URL/<name of the run folder>`` on a thread of its own.

    A checkpoint is there once its ``COMMITTED`` is, written last. The newest goes first, and what the run no longer
    keeps is removed there too. Errors are notices; the next checkpoint, and the next start, copy what is missing.

    Args:
        url: as ``Remote`` takes it.
        folder: the run folder.

    Raises:
        RecipeError: nothing can be written at such a URL, or it lies in the run folder itself.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.where = f"{url.rstrip('/')}/{folder.name}"
        self._remote, self._folder = Remote(self.where, f"{SETTING} = {url}"), folder
        there = self._remote.path
        if there is not None and (there.resolve().is_relative_to(folder) or folder.is_relative_to(there.resolve())):
            what = f"{SETTING} = {url}: leads to {there}, where the run itself is"
            raise RecipeError(what, "a copy there would take its place", "name a folder of another disk")
        self._may_begin, self._first_start = False, None
        self._notices: deque[str] = deque()
        self._changed, self._answered = threading.Condition(), threading.Event()
        self._asked = self._done = 0  # passes over the folder
        self._is_closed, self._refusal, self._trouble = False, "", ""
        self._thread: threading.Thread | None = None

    def begin(self, *, may_begin: bool, seconds: float = 10.0) -> None:
        """Start copying what the run folder holds and what comes; waits a little for the first answer from there.

        Args:
            may_begin: whether a place without this run may be taken; False where the setting came with the folder,
                which may be somebody else's.
            seconds: after which the run begins without an answer.

        Raises:
            UserError: another run is there, or nothing is and ``may_begin`` is False.
        """
        self._may_begin, self._first_start = may_begin, _first_start((self._folder / "manifest.json").read_bytes())
        # a daemon: a file system that never answers must not hold the end of the process
        self._thread = threading.Thread(target=self._work, name="paceline-mirror", daemon=True)
        self._thread.start()
        self.poke()
        self._answered.wait(seconds)
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
        """Return what went wrong since the last call; never waits."""
        return [self._notices.popleft() for _ in range(len(self._notices))]

    def wait(self, seconds: float) -> list[str]:
        """Wait until all that was asked for is there, but not for longer; return what is to be said of it."""
        if self._thread is None or self._refusal:
            return self.notices()
        with self._changed:
            is_done = self._changed.wait_for(lambda: self._done >= self._asked, seconds) and not self._trouble
        late = f"{self.where}: the newest checkpoint is not there after {seconds:g} seconds; the next start copies it"
        return [*self.notices(), *([] if is_done or self._refusal else [late])]

    def close(self) -> None:
        """End the thread; one that waits for the other side is left alone, and ends with the process."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(1.0)

    def _work(self) -> None:
        while not self._refusal:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._asked > self._done)
                if self._is_closed:
                    return
                asked = self._asked
            trouble = ""
            try:
                self._refusal = self._reason_against()
                self._answered.set()
                if self._refusal:
                    self._notices.append(f"{self.where}: {self._refusal}; nothing is copied there")
                else:
                    self._copy_all()
            except Exception as error:  # each file system has errors of its own, and none is a reason to lose a run
                trouble = in_a_line(error)
                if trouble != self._trouble:  # once, and not at every checkpoint
                    self._notices.append(
                        f"{self.where}: cannot be written ({trouble}); the next checkpoint tries again"
                    )
            self._answered.set()
            with self._changed:
                self._done, self._trouble = asked, trouble
                self._changed.notify_all()

    def _reason_against(self) -> str:
        """Say why the place is not this run's; empty where it is."""
        there = self._remote.read("manifest.json")
        if there is None:
            return "" if self._may_begin else "holds nothing of this run, whose folder names it"
        return "" if _first_start(there) == self._first_start else "holds another run of this name"

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
                names = [MANIFEST, *read_manifest(root, slot).files]
                files = {name: stack.enter_context(open_regular(folder / name)) for name in names}
                marker = (folder / MARKER).read_bytes()
            except (DamagedError, FileNotFoundError):  # dropped by now, or damaged, which a resume tells
                return
            if self._remote.read(f"{place}/{MARKER}") == marker:
                return
            self._remote.remove(place)  # another of that step, or the beginning of one
            for name, file in files.items():
                self._remote.send(file, f"{place}/{name}")
        for name in FOLLOWING:
            with contextlib.suppress(FileNotFoundError), (self._folder / name).open("rb") as file:
                self._remote.send(file, name)
        self._remote.write(f"{place}/{MARKER}", marker)


def _first_start(manifest: bytes) -> Any:
    """Return what tells a run from every other: its first start, with its time and its machine."""
    try:
        return json.loads(manifest)["starts"][0]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
