"""Small plain values between ranks, through the store, as JSON.

They go past the GPU: through NCCL every value would be a kernel in the queue behind the step's own, and reading it
would make the host wait for all of them. Nothing is pickled, so nothing that another rank sends is executed. Ranks
wait by asking again and again, so that a signal is answered meanwhile and the failure of one rank reaches all.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, final

from torch.distributed.distributed_c10d import Store

from paceline.contract.calls import at_work
from paceline.contract.errors import PacelineError, Preempted, UserError, first_line, in_a_line
from paceline.contract.streams import write_error
from paceline.distributed.answers import AnsweringStore, Silence
from paceline.machine.cluster import named

GRACE_SECONDS = 2.0
"""How long a failing rank waits for the others to hear of it, and they for one another to say what they saw."""

PULSE_SECONDS = 1.0

_PULSE = "pulse"
"""Counts the signs of life of all ranks that others wait for; with its number behind it, those of one."""

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05


class LostRank(UserError):
    """Another rank failed, ended, or never arrived: ``ranks`` of the run. What is wrong is told by their own logs."""

    def __init__(self, what: str, why: str = "", fix: str = "", *, ranks: Collection[int]) -> None:
        self.ranks = tuple(ranks)
        super().__init__(what, why, fix)


@final
class Exchange:
    """What the ranks of a run tell each other; every rank calls the same methods in the same order.

    Args:
        store: of this run alone.
        timeout_seconds: how long a rank waits for another.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_seconds: float) -> None:
        self._store = AnsweringStore(store, timeout_seconds)
        self._rank, self._size, self.timeout_seconds = rank, size, timeout_seconds
        self._turn = self._firsts = 0
        self._own = ""

    def all(
        self, at: str, value: Any = None, *, report: Callable[[Callable[[], list[int]]], None] | None = None
    ) -> list[Any]:
        """Each rank's value, in rank order. Waits on while a rank that goes first on its machine shows signs of life.

        Args:
            at: what this is, for people; the same on all ranks.
            report: called while this rank waits, with a function that returns the ranks that have not come yet.

        Raises:
            LostRank: a rank failed or did not arrive in time.
            RuntimeError: ranks are at different places of the program.
        """
        self._turn += 1
        keys = [f"{self._turn}/{rank}" for rank in range(self._size)]
        with self._reaching_store():
            self._store.set(f"at/{self._rank}", at)
            self._store.set(keys[self._rank], json.dumps([at, value]))
            self._until(lambda: self._store.check(keys), lambda: self._absent(keys), at, _PULSE, report)
            found = [json.loads(text) for text in self._store.multi_get(keys)]
            # whoever is in this turn has read all of the last one
            self._store.delete_key(f"{self._turn - 1}/{self._rank}")
            if self._own:
                self._store.set(f"at/{self._rank}", self._own)
        check_places([place for place, _ in found])
        return [value for _, value in found]

    @contextmanager
    def at(self, what: str) -> Iterator[None]:
        """Inside, those who wait in vain for this rank are told that it was last seen at ``what``."""
        before, self._own = self._own, what
        with self._reaching_store():
            self._store.set(f"at/{self._rank}", what)
        try:
            yield
        finally:
            self._own = before

    @contextmanager
    def first(self, leader: int, what: str) -> Iterator[None]:
        """Inside, rank ``leader`` runs before the ranks that name it as theirs.

        It may take as long as it wants to; the others give up when it has shown no sign of life for the time-out.

        Raises:
            LostRank: the leader failed, with its message, or is silent.
        """
        self._firsts += 1
        done, pulse = f"first/{self._firsts}/{leader}", f"{_PULSE}/{leader}"
        if self._rank != leader:
            with self._reaching_store():
                self._until(lambda: self._store.check([done]), lambda: [leader], f"the end of {what}", pulse)
                failure = json.loads(self._store.get(done))
            if failure:
                raise _retold(failure, what)
            yield
            return
        try:
            with self._pulse(pulse, what):
                yield
        except BaseException as error:
            with suppress(RuntimeError):  # the error says more than a lost store
                self._store.set(done, json.dumps(_told(self._rank, error)))
            raise
        with self._reaching_store():
            self._store.set(done, "null")

    def enter(self, once: str) -> bool:
        """Whether this is the first process to do ``once`` in this store."""
        with self._reaching_store():
            return int(self._store.add(once, 1)) == 1

    def announce(self, error: BaseException) -> None:
        """Let every rank that waits, or will, fail with this error instead; the first announcement stands."""
        self._store.hurry()
        if not isinstance(error, LostRank):
            self._publish(_told(self._rank, error))

    def leave(self) -> None:
        """Say goodbye; rank 0, which may hold the store, goes last.

        Raises:
            LostRank: a rank failed or stays behind.
        """
        with self._reaching_store():
            self._store.set(f"left/{self._rank}", "")
            if self._rank == 0:
                keys = [f"left/{rank}" for rank in range(self._size)]
                self._until(lambda: self._store.check(keys), lambda: self._absent(keys), "the end of the run")

    def close(self) -> None:
        """Drop the store; nothing is exchanged after this."""
        del self._store

    def leave_failed(self) -> None:
        """Say goodbye after an error; never raises, and takes at most ``GRACE_SECONDS``."""
        with suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "")
            if self._rank == 0:
                keys = [f"left/{rank}" for rank in range(self._size)]
                self._within_grace(lambda: self._store.check(keys))

    def explained(self, error: RuntimeError, at: str) -> Exception:
        """What a collective of tensors failed of: the rank that is not there, or the error itself."""
        keys = [f"stuck/{rank}" for rank in range(self._size)]
        self._store.hurry()
        try:
            with self._reaching_store():
                self._store.set(keys[self._rank], at)
                # who has announced a failure says nothing else, and waits no longer than this for others to hear of it
                self._within_grace(lambda: self._store.check(keys) or self._store.check(["failure"]))
                self._raise_failure(at)
                missing = self._absent(keys)
        except PacelineError as told:
            return told
        return self._lost(missing, at, "") if missing else error

    def _until(
        self,
        ready: Callable[[], bool],
        missing: Callable[[], list[int]],
        at: str,
        pulse: str | None = None,
        report: Callable[[Callable[[], list[int]]], None] | None = None,
    ) -> None:
        """Wait until ``ready``, for as long as the time-out, or after the last change of the counter ``pulse``."""
        pause, since, beats = _SHORTEST_PAUSE, time.monotonic(), 0
        while not ready():
            if pause == _LONGEST_PAUSE:
                self._raise_failure(at)
                if report:
                    report(missing)
                if pulse and (now := self._store.add(pulse, 0)) != beats:
                    since, beats = time.monotonic(), now
            if time.monotonic() - since > self.timeout_seconds:
                lost = self._lost(missing(), at, f" within {seconds(self.timeout_seconds)}")
                # this rank leaves soon, perhaps with the store, and another may have begun to wait later
                self._publish({"lost": lost.ranks, "what": lost.what, "why": lost.why, "fix": lost.fix})
                raise lost
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _within_grace(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        while not ready() and time.monotonic() < deadline:
            time.sleep(_LONGEST_PAUSE)

    def _absent(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def _publish(self, failure: dict[str, Any]) -> None:
        """The first failure stands."""
        # the store may be what was lost
        with suppress(RuntimeError):
            if self._store.add("failures", 1) == 1:
                self._store.set("failure", json.dumps(failure))

    def _raise_failure(self, at: str) -> None:
        if self._store.check(["failure"]):
            raise _retold(json.loads(self._store.get("failure")), at)

    def _lost(self, ranks: Collection[int], at: str, within: str) -> LostRank:
        last = [f"at/{rank}" for rank in ranks]
        been = [self._store.get(key).decode() for key in last if self._store.check([key])]
        seen = f"; last seen at {been[0]!r}" if been else "; never seen"
        one = len(ranks) == 1
        return LostRank(
            f"{named(ranks)} of {self._size} {'has' if one else 'have'} not reached '{at}'{within}",
            f"{'it has ended, hangs or needs' if one else 'they have ended, hang or need'} more time{seen}",
            f"look at the log of {named(ranks)}; where more time is needed, raise --timeout",
            ranks=ranks,
        )

    @contextmanager
    def _pulse(self, counter: str, what: str) -> Iterator[None]:
        """Show signs of life inside, from a thread of its own; and say where it is that takes long."""
        over, began, tell_after = threading.Event(), time.monotonic(), self.timeout_seconds

        def beat() -> None:
            nonlocal tell_after
            with suppress(RuntimeError):
                while not over.wait(min(PULSE_SECONDS, self.timeout_seconds / 4)):
                    self._store.add(counter, 1)
                    self._store.add(_PULSE, 1)
                    if time.monotonic() - began > tell_after:
                        waited, tell_after = seconds(round(tell_after, 1)), 2 * tell_after
                        told = f"for {waited} the other ranks have waited for rank {self._rank}, which is {what}"
                        write_error(f"paceline: {told}\n  where: {at_work('paceline-prepare')}")

        thread = threading.Thread(target=beat, name="paceline-pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextmanager
    def _reaching_store(self) -> Iterator[None]:
        """Turn the loss of the store into the loss of the rank that holds it."""
        try:
            yield
        except Silence as silence:
            raise LostRank(
                f"rank 0 hangs: the store of the ranks, which it or its launcher holds, has given {silence}",
                "its process is stopped (SIGSTOP, a debugger) or starved, or the link to its machine is cut",
                "look at rank 0: ps -o pid,stat,args; a T under STAT is a process that is stopped, and kill -CONT PID "
                "lets it go on",
                ranks=(0,),
            ) from None
        except RuntimeError as error:
            why = f"the store that the ranks meet in, which it or its launcher holds, is gone: {first_line(error)}"
            raise LostRank(
                "rank 0 cannot be reached", why, "look at its log, and at the network between the machines", ranks=(0,)
            ) from None


def check_places(places: Sequence[str]) -> None:
    """Make sure that all ranks are at the same place of the program.

    Raises:
        RuntimeError: they are not, so that what they exchange are values of different things.
    """
    if len(set(places)) > 1:
        where = "; ".join(f"{named([rank])} is at {place!r}" for rank, place in enumerate(places))
        raise RuntimeError(f"the ranks are at different places of the program: {where}")


def seconds(number: float) -> str:
    """``90 s``; ``0.5 s``."""
    return f"{number:g} s"


def _told(rank: int, error: BaseException) -> dict[str, Any]:
    """An error as plain values, for the others."""
    parts = {"what": error.what, "why": error.why, "fix": error.fix} if isinstance(error, UserError) else {}
    # not an error but a wish to stop: Ctrl-C, or a signal that interrupts
    interrupted = not isinstance(error, Exception | SystemExit)
    text = first_line(error) if isinstance(error, PacelineError) else in_a_line(error)
    what = "interrupted" if interrupted else text
    stopped = interrupted or isinstance(error, Preempted)
    return {"rank": rank, "stopped": stopped, "what": what, "why": "", "fix": "", **parts}


def _retold(failure: dict[str, Any], at: str) -> PacelineError:
    """The error of another rank, as this one raises it."""
    if "lost" in failure:
        return LostRank(failure["what"], failure["why"], failure["fix"], ranks=failure["lost"])
    rank = failure["rank"]
    if failure["stopped"]:
        return Preempted(f"rank {rank} was stopped: {failure['what']}")
    what = f"rank {rank} failed: {failure['what']}"
    return LostRank(what, failure["why"] or f"this rank waited for it at {at!r}", failure["fix"], ranks=(rank,))
