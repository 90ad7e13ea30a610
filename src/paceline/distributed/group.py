"""Joining the other processes of a run, and what they do together.

Tensors go through torch's process group (backends.py), on their own device; small plain values go through the store,
past the GPU (exchange.py).
"""

from __future__ import annotations

import hashlib
import itertools
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from paceline.contract.errors import UserError
from paceline.contract.files import require_open_files
from paceline.contract.spans import span
from paceline.distributed.agree import agree
from paceline.distributed.backends import OPENING, abort_group, backend_of, gpu_of, listening, new_group, open_group
from paceline.distributed.exchange import Exchange
from paceline.distributed.failures import LOST_CONNECTION, tell_launcher
from paceline.distributed.reach import check_reach
from paceline.distributed.roll_call import call_roll
from paceline.distributed.stores import leaving, open_store
from paceline.distributed.waiting import Waiting
from paceline.machine.cluster import Place
from paceline.machine.facts import version_of
from paceline.seams import Alone, Link, World

BROADCAST_BYTES = 64 * 2**20
"""Tensors are joined up to this size for one broadcast: few calls, and no second copy of a model."""

ALL_REDUCE = "an all-reduce"

MESSAGE = "a message between two ranks"

COLLECTIVE = "what ranks do together in a pass"

PACKAGES = ("paceline", "torch", "transformers")

_joins = itertools.count()
"""How often this process has joined at torchrun's: as often as the others, which run the same program."""


@contextmanager
def joined(
    place: Place, *, backend: str | None = None, device: torch.device, timeout_seconds: float
) -> Iterator[World]:
    """Join the ranks of this run; inside, the process group is open.

    Args:
        backend: nccl, gloo or mpi; None: nccl on GPUs, gloo on the CPU.
        device: of this rank; ``cuda`` is the GPU of its local rank.
        timeout_seconds: how long ranks wait for one another, here and in every collective; NCCL's own watchdog waits
            longer.

    Raises:
        RecipeError: a backend that is not there, or does not suit the device.
        UserError: an address that cannot be used, no GPU for this rank, different library versions, a limit of open
            files that is too low, a process group that the program has opened itself.
        LostRank: a rank failed, ended, or did not arrive; it is named.
    """
    size = place.world_size
    # each rank has a socket for every other, and rank 0's store one more
    require_open_files(16 if size == 1 else 24 + 4 * size)
    _refuse_open_group(size)
    if size == 1:
        yield Alone()
        return
    group_backend = backend_of(backend, device)
    # imported with a group open, its functions would keep that as a default, and rank 0's store would listen for good
    from torch.distributed import nn  # noqa: F401

    waiting = Waiting(place, timeout_seconds)
    store = _open_own_store(place, timeout_seconds, waiting)
    exchange = Exchange(store, place.rank, place.world_size, timeout_seconds)
    try:
        present = call_roll(exchange, place, waiting)
        # here, so that the others hear of a rank without a GPU in what they exchange next
        if device.type == "cuda":
            device = gpu_of(present.place, device)
        world = ProcessGroupWorld(present.place, exchange, present.leader)
        versions = {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
        agree(world, "library versions", versions, "install the same versions on every machine")
        check_reach(exchange, place.rank, [ranks[0] for ranks in present.machines], timeout_seconds)
        with listening(present.is_one_machine):
            open_group(group_backend, place, device, store, exchange, timeout_seconds)
            # one that is done before another has opened its end would be taken by it for one that crashed
            exchange.all(OPENING)
            with _lost_named(exchange):
                yield world
            exchange.leave()
    except BaseException as error:
        # before anything is taken down, for what the others then run into is a consequence
        tell_launcher(error)
        exchange.announce(error)
        abort_group()
        exchange.leave_failed()
        raise
    with leaving(place):
        dist.destroy_process_group()
        exchange.close()
        del store


def _open_own_store(place: Place, timeout_seconds: float, waiting: Waiting) -> PrefixStore:
    """Open the ranks' store under a prefix of this start and run.

    torchrun's agent keeps its store when it starts ranks again, and for the next run of one program.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    turn = next(_joins) if place.started == "torchrun" else 0
    return PrefixStore(f"paceline/{attempt}/{turn}", open_store(place, timeout_seconds, waiting))


def _refuse_open_group(size: int) -> None:
    """Refuse a process group of several ranks that the program has opened itself.

    In it a run of one process would train on its own in every rank, and transformers saves weights in rank 0 alone.

    Raises:
        UserError: says how paceline starts or joins the ranks.
    """
    if not dist.is_initialized():
        return
    if size > 1:
        why = "this process has joined its ranks already, and can do so once"
        raise UserError("torch.distributed: a process group is open", why, "torch.distributed.destroy_process_group()")
    ranks = dist.get_world_size()
    if ranks > 1:
        raise UserError(
            f"torch.distributed: this process is rank {dist.get_rank()} of {ranks} in an open process group",
            "paceline opens the group of its ranks itself, and each of them would train alone",
            f"without init_process_group: torchrun --nproc-per-node {ranks} SCRIPT, or in a single process"
            f" paceline.train(RECIPE, gpus={ranks}) in place of mp.spawn",
        )


@contextmanager
def _lost_named(exchange: Exchange) -> Iterator[None]:
    """Inside, a collective of other libraries that fails for want of a rank is told as that rank's failure.

    FSDP and DeepSpeed ask torch for theirs, where nobody of ours stands between.

    Raises:
        LostRank: in place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        explained = exchange.explained(error, COLLECTIVE) if LOST_CONNECTION.search(str(error)) else error
        if explained is error:
            raise
        raise explained from None


@final
class ProcessGroupWorld(World):
    """The ranks of an open process group, or those of a part of it.

    Args:
        place: of this process.
        exchange: with the other ranks of the run.
        leader: the rank that goes first on this machine.
        ranks: of the part, by their numbers in the run; None: all.
        group: torch's, of the part.
        groups: all parts that the run was cut into with this one; none: it is all of it.
    """

    def __init__(
        self,
        place: Place,
        exchange: Exchange,
        leader: int,
        *,
        ranks: Sequence[int] | None = None,
        group: dist.ProcessGroup | None = None,
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self._ranks = range(place.world_size) if ranks is None else ranks
        self.rank, self.size, self.local_rank = self._ranks.index(place.rank), len(self._ranks), place.local_rank
        self._place, self._exchange, self._leader, self._group = place, exchange, leader, group
        self._groups = groups or (self._ranks,)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        with span("communicate"), self._explained(ALL_REDUCE):
            dist.all_reduce(tensor, group=self._group)
        return tensor

    def start_all_reduce(self, tensor: Tensor) -> Callable[[], None]:
        with self._explained(ALL_REDUCE):
            work = dist.all_reduce(tensor, group=self._group, async_op=True)

        def wait() -> None:
            with self._explained(ALL_REDUCE):
                work.wait()

        return wait

    def broadcast_(self, tensors: Sequence[Tensor]) -> None:
        # ranks that sent different bytes would wait for one another, or take the one's weights for the other's
        kinds = " ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)
        digest = hashlib.sha256(kinds.encode()).hexdigest()[:12]
        agree(self, "the model's tensors", {"their number": len(tensors), "digest of shapes and types": digest})
        with torch.no_grad(), self._explained("tensors of rank 0"):
            for part in _parts([tensor.detach() for tensor in tensors]):
                joined_bytes = torch.cat([_bytes(tensor) for tensor in part])
                dist.broadcast(joined_bytes, self._ranks[0], group=self._group)
                sent = joined_bytes.split([tensor.nbytes for tensor in part])
                for tensor, content in zip(part, sent, strict=True):
                    # cloned to an address that is aligned for the type
                    tensor.copy_(content.clone().view(tensor.dtype).view(tensor.shape))

    def gather(self, value: Any) -> list[Any]:
        with span("communicate"):
            found = self._exchange.all("values of all ranks", value)
        return [found[rank] for rank in self._ranks]

    def share(self, value: Any) -> Any:
        with span("communicate"):
            return self._exchange.all("a value of rank 0", value if self.is_first else None)[self._ranks[0]]

    def any(self, flag: bool) -> bool:
        # once a step, perhaps: on the CPU no kernel queue is waited for, and no key of the store is spent
        found = torch.tensor([int(flag)], dtype=torch.int32)
        with span("communicate"), self._explained("a question to all ranks"):
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def barrier(self, what: str) -> None:
        with span("communicate"):
            self._exchange.all(what)

    def at(self, what: str) -> AbstractContextManager[None]:
        return self._exchange.at(what)

    def announce(self, error: BaseException) -> bool:
        self._exchange.announce(error)
        return True

    def alone_first(self, what: str) -> AbstractContextManager[None]:
        return self._exchange.first(self._leader, what)

    def _opened(self, groups: Sequence[Sequence[int]], own: Sequence[int]) -> World:
        place, exchange, group = self._place, self._exchange, self._open(groups)
        return ProcessGroupWorld(place, exchange, self._leader, ranks=own, group=group, groups=groups)

    def _open(self, groups: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """This rank's of these groups."""
        # torch asks every rank of the run for every group, in the same order
        opened = [new_group(ranks, self._exchange.timeout_seconds) for ranks in groups]
        own: dist.ProcessGroup = opened[next(i for i, ranks in enumerate(groups) if self._place.rank in ranks)]
        return own

    def links(self, number: int) -> list[Link]:
        opened = [self._open(self._groups) for _ in range(number)]
        return [_GroupLink(self._ranks, group, self._explained) for group in opened]

    @contextmanager
    def _explained(self, at: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            explained = self._exchange.explained(error, at)
            if explained is error:
                raise
            raise explained from None


@final
class _GroupLink(Link):
    """Messages of a process group of its own: torch keeps the order of two ranks in one group alone.

    Args:
        ranks: by their numbers in the run.
        group: torch's.
        explained: turns what torch raises into who is not there.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        group: dist.ProcessGroup,
        explained: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._ranks, self._group, self._explained = ranks, group, explained

    def start_send(self, tensor: Tensor, to: int) -> Callable[[], None]:
        sent = tensor.detach().contiguous()
        with self._explained(MESSAGE):
            work = dist.isend(sent, self._ranks[to], group=self._group)

        def wait() -> None:
            nonlocal sent
            with self._explained(MESSAGE):
                if work is not None:
                    work.wait()
            del sent  # kept alive until here

        return wait

    def receive_(self, tensor: Tensor, source: int) -> Tensor:
        with span("communicate"), self._explained(MESSAGE):
            work = dist.irecv(tensor, self._ranks[source], group=self._group)
            if work is not None:
                work.wait()
        return tensor


def _parts(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in order, of one device and at most ``BROADCAST_BYTES`` a part, or one alone."""
    part: list[Tensor] = []
    for tensor in tensors:
        if part and (
            sum(each.nbytes for each in part) + tensor.nbytes > BROADCAST_BYTES or tensor.device != part[0].device
        ):
            yield part
            part = []
        part.append(tensor)
    if part:
        yield part


def _bytes(tensor: Tensor) -> Tensor:
    """uint8 [number of bytes]: what the tensor holds, whatever its type, so that all types go in one call."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)
