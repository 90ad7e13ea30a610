"""The folder of a run: its files by name, and what is written into them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from paceline.contract.errors import RunFolderError
from paceline.contract.files import OpenFolder, disk_errors, write_atomically
from paceline.contract.plain import plain
from paceline.contract.records import RunRecord
from paceline.contract.redaction import redacted, redacted_command
from paceline.machine.jobs import job_of
from paceline.recipe import Recipe
from paceline.recipe.places import absolute
from paceline.run_folder.checks import (
    BEFORE_STEPS,
    LOCK,
    QUARANTINE,
    refuse_links,
    require_fresh,
    require_utf8,
    require_writable,
    resolved,
)
from paceline.run_folder.leftovers import sweep
from paceline.run_folder.lock import hold
from paceline.run_folder.origin import git_state, now, versions
from paceline.run_folder.ways import has_checkpoint, named_now, way_on

MANIFEST_VERSION = 1


class RunFolder:
    """A run's folder, held by this process until ``close``; only ``view`` does not hold it.

    Paths are absolute, with links resolved once, so that neither a change of the current folder nor of a link moves a
    run that is under way.
    """

    def __init__(
        self,
        path: Path,
        held: contextlib.ExitStack,
        made: Sequence[Path] = (),
        itself: OpenFolder | None = None,
    ) -> None:
        self._held, self._made, self._itself = held, made, itself
        self._has_begun = False
        self._settle(path)

    def _settle(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self.recipe = path / "recipe.yaml"
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.preempted = path / "preempted"
        self.report = path / "report.html"
        self.quarantine = path / QUARANTINE
        self.model = path / "model"
        self.checkpoints = path / "checkpoints"

    @classmethod
    def create(cls, path: str | Path, *, anew: bool = False) -> Self:
        """Make and lock the folder of a run that starts now; one without a step, that was there, gives way to it.

        Args:
            anew: what was made of a run without a checkpoint gives way too.

        Raises:
            RunFolderError: a run is or was there, the folder holds something else, or it cannot be written.
        """
        shown, path = path, resolved(path)
        require_utf8(path)
        made = [folder for folder in (path, *path.parents) if not folder.exists()]
        with disk_errors(path):
            try:
                path.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise RunFolderError(f"{shown}: not a folder", fix="choose another --out") from None
            except FileNotFoundError as error:  # a file system that takes none, such as /proc
                raise RunFolderError(f"{shown}: cannot be made", error.strerror or "", "choose another --out") from None
        anew = anew and not has_checkpoint(path)
        if not ((path / LOCK).is_file() or anew):
            require_fresh(path)  # first without the lock, so that a stranger's folder is left as it was
        held = contextlib.ExitStack()
        with held:
            itself = hold(path, held)
            if not anew:
                require_fresh(path)
            for name in BEFORE_STEPS - {QUARANTINE}:
                _remove(path / name)
            sweep(path)
            return cls(path, held.pop_all(), made, itself)

    @classmethod
    def create_named(cls, name: str, parent: str | Path = "runs") -> Self:
        """Make and lock ``parent/<name>-<YYYYmmdd-HHMMSS>``, with a counter where that is taken.

        Raises:
            RunFolderError: the name could lead elsewhere, or the folder cannot be written.
        """
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
            raise RunFolderError(
                f"name = {name!r}", "a run's name starts its folder's", "use letters, digits, '_', '.' and '-'"
            )
        stem = named_now(name).name
        parent = Path(parent).resolve()
        require_utf8(parent)
        above = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        for count in range(1, 1000):
            path = parent / (stem if count == 1 else f"{stem}-{count}")
            with disk_errors(path), contextlib.suppress(FileExistsError):
                parent.mkdir(parents=True, exist_ok=True)
                path.mkdir()  # whoever makes it owns it: two runs of one second never share a folder
                folder = cls.create(path)
                folder._made = (path, *above)
                return folder
        raise RunFolderError(f"{parent}/{stem}: taken, and so are 999 like it", fix="choose a folder with --out")

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Lock the folder of a run that goes on (``--resume``).

        Raises:
            RunFolderError: no run is there, it is in use by a live process, or it cannot be written.
        """
        folder = cls.view(path)
        require_utf8(folder.path)
        require_writable(folder.path)
        with folder._held:
            itself = hold(folder.path, folder._held)
            sweep(folder.path)
            return cls(folder.path, folder._held.pop_all(), itself=itself)

    @classmethod
    def view(cls, path: str | Path) -> Self:
        """The folder of a run, to read only: not locked, so it may be another process's live run.

        Raises:
            RunFolderError: no run is there, or one of its files is a link, or no file.
        """
        shown, path = path, resolved(path)
        if not (path / "recipe.yaml").is_file():
            why = "it has no recipe.yaml" if path.is_dir() else "there is no such folder"
            raise RunFolderError(f"{shown}: not a run folder", why, "give the folder that paceline train printed")
        refuse_links(path)
        return cls(path, contextlib.ExitStack())

    @classmethod
    def follow(cls, path: str | Path) -> Self:
        """The folder of a run that rank 0 holds, for a rank that writes nothing into it."""
        return cls(Path(path), contextlib.ExitStack())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._take_back()
        self.close()

    def _take_back(self) -> None:
        """Remove the folders that were made for a run which failed before it wrote anything."""
        if self._made and not self.is_gone and set(os.listdir(self.path)) <= {LOCK}:
            (self.path / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # somebody else has put something there
                for folder in self._made:
                    folder.rmdir()

    def close(self) -> None:
        """Let the next run have the folder; closing twice does nothing."""
        self._held.close()

    @property
    def is_gone(self) -> bool:
        """Whether somebody has removed, renamed or emptied the folder that this process holds; never of another."""
        if self._itself is None:
            return False
        # an editor may have put one of the two aside for a moment
        is_empty = self._has_begun and not self.recipe.exists() and not self.metrics.exists()
        return is_empty or not self._itself.is_at(self.path)

    def find_again(self) -> RunFolderError | None:
        """Where the folder is gone, lead its paths to where the run can still write, and say so; None where it is not.

        That is the folder itself, emptied or under its new name, or else a new and locked one in its place, without
        what was in the old one.

        Raises:
            RunFolderError: something else is in its place, so that nothing more of the run can be saved.
        """
        if self._itself is None or not self.is_gone:
            return None
        if self._itself.is_at(self.path):
            self._has_begun = False
            what = f"{self.path}: was emptied while a run was in it"
            return RunFolderError(what, "what was in it is gone", way_on(self.path))
        found, what = self._itself.where(), f"{self.path}: was removed or renamed while a run was in it"
        if found is not None:
            self._settle(found)
            return RunFolderError(what, f"it is {found} now", way_on(found))
        try:
            self.path.mkdir(parents=True)
        except OSError as error:
            raise RunFolderError(
                what, f"nothing can be saved in its place: {error.strerror}", "start the run again with another --out"
            ) from None
        self._itself, self._has_begun = hold(self.path, self._held), False
        return RunFolderError(
            what, "what was in it is gone, and a new one was made for what the run still had", way_on(self.path)
        )

    def write_recipe(self, recipe: Recipe) -> None:
        """Write the resolved recipe, its paths absolute: whoever goes on with the run may stand in another folder."""
        write_atomically(self.recipe, absolute(recipe).to_yaml().encode())
        self._has_begun = True

    def read_recipe(self) -> Recipe:
        """The recipe that the folder's run was started with.

        Raises:
            RecipeError: the file was changed into something that is no recipe.
        """
        return Recipe.load(self.recipe)

    def write_manifest(
        self,
        *,
        command: Sequence[str],
        hardware: Mapping[str, Any],
        data_fingerprint: str,
        seeds: Mapping[str, int],
        first_step: int = 0,
        changes: Sequence[str] = (),
        num_ranks: int = 1,
    ) -> None:
        """Write what the run started from; a resumed run adds a start to those before it.

        Args:
            command: the command line; secrets in it are redacted.
            hardware: facts about this machine, as plain data.
            data_fingerprint: digest of samples, labels and splits.
            seeds: every seed by name.
            first_step: the step that this start goes on after.
            changes: settings that differ from those of the start before, as text.
            num_ranks: processes that share the work.
        """
        earlier = self.read_manifest()["starts"] if self.manifest.exists() else []
        start = {
            "time": now("microseconds"),  # two runs that begin in one second are told apart by it
            "first_step": first_step,
            "command": redacted_command(command),
            "changes": [redacted(change) for change in changes],
            "num_ranks": num_ranks,
            "job": job_of(os.environ),
            "versions": versions(),
            "git": git_state(Path.cwd()),
            "hardware": dict(hardware),
            "data_fingerprint": data_fingerprint,
            "seeds": dict(seeds),
        }
        _write_json(self.manifest, {"format": MANIFEST_VERSION, "name": self.name, "starts": [*earlier, start]})

    def read_manifest(self) -> dict[str, Any]:
        """The manifest: ``starts`` holds one entry for each start of the run, the latest last.

        Raises:
            RunFolderError: it is missing or not what was written.
        """
        try:
            manifest = json.loads(self.manifest.read_bytes())
        except FileNotFoundError:
            raise RunFolderError(f"{self.manifest}: missing", fix="start a new run with another --out") from None
        except (ValueError, RecursionError):
            manifest = None
        starts = manifest.get("starts") if isinstance(manifest, dict) else None
        if not (isinstance(starts, list) and starts and all(isinstance(start, dict) for start in starts)):
            raise RunFolderError(
                f"{self.manifest}: damaged", "it lists no starts of a run", "put a whole copy of it back"
            )
        return dict(manifest)

    def write_summary(self, record: RunRecord) -> None:
        """Write the run's outcome; numbers that are not finite are the strings ``NaN``, ``Infinity``, ``-Infinity``."""
        _write_json(self.summary, record)

    def mark_preempted(self, message: str) -> None:
        """Leave word that the run was asked to stop and can go on, for who does not see its exit code.

        A run without a checkpoint leaves nothing: it is not resumed but started again.
        """
        if has_checkpoint(self.path):
            write_atomically(self.preempted, f"{message}\n".encode())

    def truncate_metrics(self, after_step: int, evaluated: Collection[tuple[str, int]] = ()) -> int:
        """Drop what metrics.jsonl says of what a run that goes on comes to again, and lines that a crash cut short.

        Args:
            after_step: that of the checkpoint; steps above it come again.
            evaluated: split and step of each evaluation that the checkpoint knows of. Others come again where no step
                of what is kept follows them: one that the checkpoint was not saved after, and those of a run's end.

        Returns:
            The number of lines dropped.
        """
        if not self.metrics.exists():
            return 0
        lines = self.metrics.read_bytes().splitlines()
        kept: list[bytes] = []
        followed = False  # by a step that is kept
        for line in reversed(lines):
            record = _record(line)
            step = record and record.get("step")
            if record is None or (isinstance(step, int) and step > after_step):
                continue
            followed |= record.get("kind") == "step"
            if record.get("kind") == "evaluation" and not followed and (record.get("split"), step) not in evaluated:
                continue
            kept.append(line)
        write_atomically(self.metrics, b"".join(line + b"\n" for line in reversed(kept)))
        return len(lines) - len(kept)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _record(line: bytes) -> dict[str, Any] | None:
    """What a line of metrics.jsonl says; None of one that a crash cut short."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _write_json(path: Path, content: Any) -> None:
    text = json.dumps(plain(content), indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(path, f"{text}\n".encode())
