"""Joining: every way to meet, and everything that can keep ranks from it. Processes of their own each time."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.contract.errors import Preempted, RecipeError, UserError
from paceline.distributed import backends, exchange, group, reach, roll_call, stores
from paceline.distributed.exchange import LostRank
from paceline.distributed.failures import REPORT_FD
from paceline.distributed.group import joined
from paceline.distributed.sockets import STORE_FD, listen
from paceline.distributed.waiting import Waiting
from paceline.machine.cluster import LAUNCHER, Place
from paceline.seams import Alone
from tests.testing.distributed import RankError, run_processes
from tests.testing.ports import free_port

pytestmark = pytest.mark.usefixtures("forked_interpreters")

CPU = torch.device("cpu")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/tcp")
GRACE_SECONDS = 0.5
"""In place of the seconds that ranks give one another after an error, so that tests of errors are quick."""

LONG_SECONDS = 20.0
"""Less than the time-out of 30 s, and much more than anything here takes even on a busy machine."""

SIZES = pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])


def at(rank: int, size: int, init_method: str | None, **changes: Any) -> Place:
    found = {"local_rank": rank, "local_world_size": size, "started": "environment", **changes}
    return Place(rank=rank, world_size=size, init_method=init_method, **found)


def tcp() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


def meets(rank: int, size: int, init_method: str, timeout_seconds: float = 20) -> list[Any]:
    with joined(at(rank, size, init_method), device=CPU, timeout_seconds=timeout_seconds) as world:
        return [world.all_reduce(torch.ones(1)).item(), *world.gather(rank)]


@SIZES
def test_ranks_meet_at_an_address(size: int) -> None:
    assert run_processes(meets, size, size, tcp()) == [[size, *range(size)]] * size


def test_the_name_of_this_machine_is_as_good_as_its_loopback_address() -> None:
    assert run_processes(meets, 2, 2, f"tcp://{socket.gethostname()}:{free_port()}") == [[2, 0, 1]] * 2


@SIZES
def test_ranks_meet_in_a_file(size: int, tmp_path: Path) -> None:
    assert run_processes(meets, size, size, f"file://{tmp_path}/ranks") == [[size, *range(size)]] * size
    assert not list(tmp_path.iterdir()), "the file is removed, so that the next run can use it"


def leaves_often(rank: int, folder: str, times: int) -> None:
    for number in range(times):
        place = at(rank, 2, f"file://{folder}/{number}")
        store = stores.open_store(place, 20, Waiting(place, 20))
        store.add("here", 1)
        while store.add("here", 0) < 2:  # so that both leave at the same time
            pass
        with stores.leaving(place):
            del store


@pytest.mark.parametrize("times", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_a_file_is_removed_also_where_ranks_leave_at_the_same_time(times: int, tmp_path: Path) -> None:
    run_processes(leaves_often, 2, str(tmp_path), times)
    assert len(list(tmp_path.iterdir())) == 0, "files were left, and the next run could not use them"


@SIZES
def test_ranks_meet_where_the_environment_says(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert run_processes(meets, size, size, "env://") == [[size, *range(size)]] * size


def meets_on_a_socket(rank: int, size: int, port_file: str) -> tuple[list[Any], bool]:
    path = Path(port_file)
    if rank == 0:
        listening = listen()
        path.with_suffix(".part").write_text(str(listening.getsockname()[1]))
        path.with_suffix(".part").rename(path)
        os.environ[STORE_FD] = str(listening.detach())
    while not path.exists():
        time.sleep(0.01)
    # for rank 0 the port is taken: only the descriptor can be meant
    return meets(rank, size, f"tcp://127.0.0.1:{path.read_text()}"), STORE_FD in os.environ


def test_rank_0_takes_the_socket_of_its_launcher(tmp_path: Path) -> None:
    found = run_processes(meets_on_a_socket, 2, 2, str(tmp_path / "port"))
    assert found == [([2, 0, 1], False)] * 2, "the variable is used up"


def meets_after(rank: int, size: int, init_method: str, late: int, seconds: float) -> list[Any]:
    time.sleep(seconds if rank == late else 0)
    return meets(rank, size, init_method)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_comes_later_is_waited_for(late: int) -> None:
    assert run_processes(meets_after, 2, 2, tcp(), late, 0.5) == [[2, 0, 1]] * 2


def meets_often(rank: int, size: int, ports: list[int]) -> list[Any]:
    return [meets(rank, size, f"tcp://127.0.0.1:{port}") for port in ports]


def test_a_process_can_join_again_after_it_has_left() -> None:
    port = free_port()
    assert run_processes(meets_often, 2, 2, [port, free_port(), port]) == [[[2, 0, 1]] * 3] * 2


def meets_beside_an_import(rank: int, size: int, port: int) -> list[Any]:
    """As transformers' models import it; what the server has loaded, from which ranks are forked, is loaded again."""
    for name in [name for name in sys.modules if name.startswith("torch.distributed.nn")]:
        del sys.modules[name]
    vars(dist).pop("nn", None)
    found = []
    for _ in range(2):
        with joined(at(rank, size, f"tcp://127.0.0.1:{port}"), device=CPU, timeout_seconds=20) as world:
            importlib.import_module("torch.distributed.nn")
            found.append(world.gather(rank))
    return found


def test_a_process_can_join_again_at_the_same_port() -> None:
    """Functions that took the group for a default, when they were imported, kept it and its store."""
    assert run_processes(meets_beside_an_import, 2, 2, free_port()) == [[[0, 1]] * 2] * 2


def meets_again_at_once(rank: int, size: int, init_method: str) -> list[Any]:
    """Rank 0 needs half a second more to close its end, and the store with it."""
    closed = dist.destroy_process_group

    def late() -> None:
        time.sleep(0.5 if rank == 0 else 0)
        closed()

    dist.destroy_process_group = late
    return [meets(rank, size, init_method) for _ in range(2)]


def test_a_rank_that_joins_again_at_once_does_not_meet_the_store_it_has_left() -> None:
    assert run_processes(meets_again_at_once, 2, 2, tcp()) == [[[2, 0, 1]] * 2] * 2


def test_one_process_opens_nothing() -> None:
    with joined(Place(), device=CPU, timeout_seconds=1) as world:
        assert isinstance(world, Alone)
        assert not dist.is_initialized()


# what listens


def listening_addresses() -> set[str]:
    """Local addresses on which this process listens, as /proc/net/tcp and tcp6 write them."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/self/fd/{descriptor}")))
        except OSError:  # the descriptor of listdir itself
            continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


def listens(rank: int, size: int, init_method: str) -> tuple[set[str], set[str]]:
    with joined(at(rank, size, init_method), device=CPU, timeout_seconds=20) as world:
        more = dist.new_group(list(range(size)))
        dist.all_reduce(torch.ones(1), group=more)
        world.barrier("all listen")
        found = listening_addresses()
        world.barrier("all have looked")
    return found, {name for name in backends.INTERFACES if name in os.environ}


@LINUX
@SIZES
def test_ranks_of_one_machine_listen_on_loopback_alone(size: int, tmp_path: Path) -> None:
    for init_method in (tcp(), f"tcp://{socket.gethostname()}:{free_port()}", f"file://{tmp_path}/ranks"):
        for addresses, variables in run_processes(listens, size, size, init_method):
            assert addresses == {"0100007F"}, f"{init_method}: listens on {addresses}"
            assert not variables, "the environment is put back"


@LINUX
def test_the_guard_sees_a_store_that_listens_everywhere() -> None:
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    assert listening_addresses() - {"0100007F"}
    del store


def interfaces_inside(rank: int, init_method: str, **changes: Any) -> str | None:
    with joined(at(rank, 2, init_method, **changes), device=CPU, timeout_seconds=20):
        return os.environ.get("GLOO_SOCKET_IFNAME")


def test_a_chosen_interface_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    (loopback,) = (name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", f"{loopback},{loopback}")
    assert run_processes(interfaces_inside, 2, tcp()) == [f"{loopback},{loopback}"] * 2


def poses_as_two_machines(rank: int, port: int) -> str | None:
    place = at(rank, 2, f"tcp://127.0.0.1:{port}", local_rank=0, local_world_size=1)
    with joined(place, device=CPU, timeout_seconds=20) as world:
        with world.alone_first("downloading"):
            pass
        world.barrier("both are first on theirs")
        return os.environ.get("GLOO_SOCKET_IFNAME")


def test_ranks_of_several_machines_choose_no_interface_and_do_not_wait_for_each_other() -> None:
    assert run_processes(poses_as_two_machines, 2, free_port()) == [None, None]


# who is on which machine


def counts_itself(rank: int, init_method: str, gpus: list[str | None], leads: int) -> tuple[int, str | None, bool]:
    """Local rank, chosen interface, and whether it waited for rank ``leads`` to go first."""
    if gpus[rank] is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpus[rank])
    place = at(rank, 2, init_method, local_rank=0, local_world_size=1, is_local_guessed=True)
    with joined(place, device=CPU, timeout_seconds=20) as world:
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        if rank != leads:
            time.sleep(0.2)
        with world.alone_first("downloading"):
            at_once = time.monotonic()
        waited = world.gather(at_once)
        return world.local_rank, interface, waited[leads] <= at_once


def test_ranks_that_meet_at_the_machines_own_address_count_themselves() -> None:
    """Nobody has set LOCAL_RANK, and the address does not tell that all ranks are here."""
    (loopback,) = (name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    found = run_processes(counts_itself, 2, tcp(), [None, None], 0)
    assert found == [(0, loopback, True), (1, loopback, True)]


def test_ranks_that_were_left_a_gpu_each_take_the_first_they_see() -> None:
    found = run_processes(counts_itself, 2, tcp(), ["0", "1"], 0)
    assert [local for local, _, _ in found] == [0, 0]


def from_two_machines(rank: int, init_method: str) -> tuple[int, str | None]:
    roll_call._machine = lambda: f"host{rank}"
    place = at(rank, 2, init_method, is_local_guessed=True)
    with joined(place, device=CPU, timeout_seconds=20) as world:
        return world.local_rank, os.environ.get("GLOO_SOCKET_IFNAME")


def test_ranks_that_meet_in_a_file_may_be_on_two_machines(tmp_path: Path) -> None:
    """Each has the first GPU of its own, and none listens on loopback for the other."""
    assert run_processes(from_two_machines, 2, f"file://{tmp_path}/ranks") == [(0, None)] * 2


def opens_late(rank: int, init_method: str) -> float:
    """When this rank is inside, rank 0 having needed half a second more to open its end."""
    opened = group.open_group

    def late(*arguments: Any) -> None:
        opened(*arguments)
        if rank == 0:
            time.sleep(0.5)

    group.open_group = late
    with joined(at(rank, 2, init_method), device=CPU, timeout_seconds=20):
        return time.monotonic()


def test_no_rank_is_inside_before_all_have_opened_the_group() -> None:
    """Its leaving looked like a crash to one that was opening still: gloo saw a connection closed."""
    first, other = run_processes(opens_late, 2, tcp())
    assert abs(first - other) < 0.4


@LINUX
def test_a_store_for_several_machines_listens_where_they_meet_and_nowhere_else() -> None:
    init_method = f"tcp://127.0.0.2:{free_port()}"
    first, other = run_processes(listens_for_others, 2, init_method)
    assert first == {"0200007F", "0100007F"}, "the second is gloo's"
    assert other == {"0100007F"}


@LINUX
def test_a_store_at_an_address_that_is_not_this_machines_listens_on_every_one() -> None:
    """It may be passed on to this machine."""
    place = at(0, 2, f"tcp://192.0.2.1:{free_port()}", local_world_size=1)
    store = stores.open_store(place, 1, Waiting(place, 1))
    assert listening_addresses() & {"0" * 8, "0" * 32}
    del store


def listens_for_others(rank: int, init_method: str) -> set[str]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with joined(at(rank, 2, init_method, local_rank=0, local_world_size=1), device=CPU, timeout_seconds=20) as world:
        found = listening_addresses()
        world.barrier("all have looked")
    return found


def out_of_reach(rank: int, init_method: str, port: int, why: str) -> str:
    roll_call._machine = lambda: f"host{rank}"
    if rank == 1:
        reach._listening = lambda: nullcontext(("127.0.0.1", port))  # type: ignore[assignment]
    if why == "silence" and rank == 0:

        def create_connection(address: Any, *_: Any) -> Any:
            raise TimeoutError

        socket.create_connection = create_connection
    with joined(at(rank, 2, init_method), device=CPU, timeout_seconds=20):
        return "joined"


@pytest.mark.parametrize(
    ("why", "told"),
    [("closed", "Connection refused\n"), ("silence", "no answer within 10 s\n")],
    ids=["closed", "silence"],
)
def test_ports_that_are_closed_between_machines_are_told_at_once(why: str, told: str, tmp_path: Path) -> None:
    port, meeting = free_port(), f"file://{tmp_path}/ranks"
    (first, seconds), (other, _) = run_processes(outcome, 2, "out_of_reach", meeting, port, why)
    assert first.startswith(f"UserError: rank 0 does not reach rank 1 at 127.0.0.1:{port}: {told}"), first
    assert "GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1" in first
    assert other == first, "all ranks say the same"
    assert seconds < LONG_SECONDS


def address_of_interface(rank: int, name: str) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = name
    with reach._listening() as address:
        return address and address[0]


@LINUX
def test_the_address_is_that_of_the_chosen_interface() -> None:
    assert run_processes(address_of_interface, 1, "lo,eth7") == ["127.0.0.1"]
    assert run_processes(address_of_interface, 1, "none0") == [None], "gloo itself says that there is none"


# torchrun


RANK_SCRIPT = r"""
import os, sys, torch
from paceline.machine.cluster import find_place
from paceline.distributed.group import joined
place = find_place(os.environ)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with joined(place, device=torch.device("cpu"), timeout_seconds=30) as world:
    if attempt < int(sys.argv[1]) and place.rank == 1:
        os._exit(9)
    found = f"{world.all_reduce(torch.ones(1)).item()} {world.gather(place.rank)}"
    os.write(1, f"rank {place.rank} {place.started} {attempt}: {found}\n".encode())
"""


def under_torchrun(folder: Path, *options: str, failures: int = 0) -> str:
    script = folder / "rank.py"
    script.write_text(RANK_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options, str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(failures)], env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def meets_at_an_agents(rank: int, port: int) -> list[Any]:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ.update(variables)
    found = []
    for _ in range(2):
        with joined(at(rank, 2, "env://", started="torchrun"), device=CPU, timeout_seconds=20) as world:
            found.append([world.all_reduce(torch.ones(1)).item(), *world.gather(rank)])
    return found


def test_ranks_join_the_store_of_torchruns_agent_again() -> None:
    """As in a script with two runs: the store outlives the first, and knows its ranks."""
    agents = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert run_processes(meets_at_an_agents, 2, agents.port) == [[[2, 0, 1]] * 2] * 2


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--standalone"], ["--master-addr", "127.0.0.1", "--master-port"]])
def test_ranks_join_the_store_of_torchruns_agent(options: list[str], tmp_path: Path) -> None:
    options = options + [str(free_port())] * (options[-1] == "--master-port")
    printed = under_torchrun(tmp_path, *options)
    assert sorted(printed.splitlines()) == [f"rank {rank} torchrun 0: 2.0 [0, 1]" for rank in (0, 1)]


@pytest.mark.slow
def test_ranks_join_again_when_torchrun_restarts_them(tmp_path: Path) -> None:
    printed = under_torchrun(tmp_path, "--standalone", "--max-restarts", "1", failures=1)
    assert sorted(printed.splitlines()) == [f"rank {rank} torchrun 1: 2.0 [0, 1]" for rank in (0, 1)]


# what cannot work


@pytest.mark.parametrize(
    ("backend", "device", "message"),
    [
        ("nccl", "cpu", r"parallel.backend = nccl\n  why: it moves data between GPUs, and this run is on the cpu"),
        (
            "mpi",
            "cpu",
            r"parallel.backend = mpi\n  why: the installed torch \S+ is built without it; torch has it only where",
        ),
        ("glo", "cpu", r"parallel.backend = glo\n  why: there is no such backend; did you mean 'gloo'\?"),
        ("ucc", "cpu", r"there is no such backend"),
    ],
)
def test_a_backend_that_cannot_work_is_refused(backend: str, device: str, message: str) -> None:
    if backend == "mpi" and dist.is_mpi_available():
        pytest.skip("this torch is built with MPI")
    place = at(0, 2, "tcp://127.0.0.1:1")
    with (
        pytest.raises(RecipeError, match=message),
        joined(place, backend=backend, device=torch.device(device), timeout_seconds=1),
    ):
        pass


def test_nccl_that_is_not_built_in_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with (
        pytest.raises(RecipeError, match=r"parallel.backend = nccl\n.* built without it\n  fix: .*backend=gloo"),
        joined(at(0, 2, "tcp://127.0.0.1:1"), device=torch.device("cuda"), timeout_seconds=1),
    ):
        pass


def joins_with_one_gpu(rank: int, init_method: str) -> str:
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None
    with joined(at(rank, 2, init_method), backend="gloo", device=torch.device("cuda"), timeout_seconds=30):
        return "joined"


def test_a_rank_without_a_gpu_is_refused_and_the_others_hear_of_it() -> None:
    (other, seconds), (refused, _) = run_processes(outcome, 2, "joins_with_one_gpu", tcp())
    assert refused.startswith("UserError: LOCAL_RANK = 1: no GPU for rank 1"), refused
    assert other.startswith("LostRank: rank 1 failed: LOCAL_RANK = 1: no GPU for rank 1"), other
    assert seconds < LONG_SECONDS, "nobody waits for the time-out"


def trains_in_a_group_of_its_own(rank: int, size: int, folder: str) -> str:
    """As the tutorials' ``setup(rank, world_size)`` under mp.spawn: a group is open, and no variable says so."""
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(f"{folder}/store", size))
    alone = Place(rank=0, world_size=1, local_rank=0, local_world_size=1, init_method=None, started="alone")
    try:
        with pytest.raises(UserError) as caught, joined(alone, device=CPU, timeout_seconds=20):
            pass
    finally:
        dist.destroy_process_group()
    return str(caught.value)


def test_a_group_that_the_program_opened_is_not_ignored(tmp_path: Path) -> None:
    """Each rank trained alone, without a word, and rank 1 saved no weights."""
    for rank, message in enumerate(run_processes(trains_in_a_group_of_its_own, 2, 2, str(tmp_path))):
        assert f"this process is rank {rank} of 2 in an open process group" in message
        assert "torchrun --nproc-per-node 2" in message


def test_an_open_group_is_not_opened_again() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with (
            pytest.raises(UserError, match="a process group is open"),
            joined(at(0, 2, tcp()), device=CPU, timeout_seconds=1),
        ):
            pass
    finally:
        dist.destroy_process_group()


def test_a_port_in_use_is_named() -> None:
    with listen() as listening:
        port = listening.getsockname()[1]
        with (
            pytest.raises(UserError, match=rf"port {port} of 127.0.0.1: in use"),
            joined(at(0, 2, f"tcp://127.0.0.1:{port}"), device=CPU, timeout_seconds=1),
        ):
            pass


def test_a_port_in_use_is_named_among_several_machines(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as listening:
        port = listening.getsockname()[1]
        place = at(0, 2, f"tcp://localhost:{port}", local_world_size=1)
        with (
            pytest.raises(UserError, match=rf"MASTER_PORT = {port}: in use"),
            joined(place, device=CPU, timeout_seconds=1),
        ):
            pass


@pytest.mark.parametrize("accepts", [True, False])
def test_what_does_not_answer_as_a_store_is_given_up(accepts: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with listen() as listening:
        port = listening.getsockname()[1]
        if not accepts:
            listening.close()
        begun = time.monotonic()
        with (
            pytest.raises(LostRank, match=rf"rank 0 is not at 127.0.0.1:{port}") as caught,
            joined(at(1, 2, f"tcp://127.0.0.1:{port}"), device=CPU, timeout_seconds=0.5),
        ):
            pass
        assert time.monotonic() - begun < LONG_SECONDS
        assert caught.value.ranks == (0,)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_stands_for_no_machine_is_named(rank: int) -> None:
    place = at(rank, 2, "tcp://no.such.machine.invalid:29500", local_world_size=1, local_rank=0)
    with (
        pytest.raises(UserError, match=r"MASTER_ADDR = no\.such\.machine\.invalid\n  why: no machine of this name"),
        joined(place, device=CPU, timeout_seconds=5),
    ):
        pass


def test_rank_0_needs_nobody_at_its_address_to_say_who_never_came() -> None:
    """A wrong address, or one of a machine that passes on; the first kept it waiting, deaf to signals."""
    place = at(0, 2, f"tcp://192.0.2.1:{free_port()}", local_world_size=1)
    with (
        pytest.raises(LostRank, match="rank 1 of 2 has not reached 'joining' within 1 s"),
        joined(place, device=CPU, timeout_seconds=1),
    ):
        pass


def test_a_store_that_cannot_be_opened_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise dist.DistNetworkError("the server socket has failed to listen. code: -13, name: EACCES\nframe #0: c10::")

    monkeypatch.setattr(stores, "TCPStore", refused)
    place = at(0, 2, "tcp://localhost:80", local_world_size=1)
    with (
        pytest.raises(UserError, match=r"MASTER_PORT = 80: .*\n  why: .* EACCES\n  fix: ") as caught,
        joined(place, device=CPU, timeout_seconds=1),
    ):
        pass
    assert "frame" not in str(caught.value)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=rf"file://{tmp_path}/absent/ranks: cannot be opened"),
        joined(at(0, 2, f"file://{tmp_path}/absent/ranks"), device=CPU, timeout_seconds=1),
    ):
        pass


def outcome(rank: int, name: str, *arguments: Any) -> tuple[str, float]:
    """What a function of this module ends with on this rank, and how many seconds that took."""
    exchange.GRACE_SECONDS = GRACE_SECONDS
    begun = time.monotonic()
    try:
        text = str(globals()[name](rank, *arguments))
    except (UserError, Preempted, ValueError, RuntimeError, KeyboardInterrupt) as error:
        text = f"{type(error).__name__}: {error}"
    assert not dist.is_initialized(), "the group is closed, whatever happened"
    return text, time.monotonic() - begun


def joins_as(
    rank: int, size: int, init_method: str, ranks: list[int], sizes: list[int], timeout_seconds: float = 30
) -> str:
    place = at(ranks[rank], sizes[rank], init_method, local_rank=0)
    with joined(place, device=CPU, timeout_seconds=timeout_seconds):
        return "joined"


def lose_patience(world: Any, seconds: float = 1.0) -> None:
    """From now on this is the time-out. Processes that start beside many others may take longer to join."""
    world.barrier("all have joined")
    world._exchange.timeout_seconds = seconds
    dist.group.WORLD.set_timeout(timedelta(seconds=seconds))


@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_ranks_that_never_arrive_are_named_by_all(size: int) -> None:
    """One process fewer, or two fewer, than the world's size."""
    missing = "rank 2 of 3 has" if size == 3 else "ranks 2, 3 of 4 have"
    for text, seconds in run_processes(outcome, 2, "joins_as", size, tcp(), [0, 1], [size, size], 3.0):
        assert text.startswith(f"LostRank: {missing} not reached 'joining' within 3 s\n"), text
        assert "never seen" in text
        assert seconds < LONG_SECONDS


def joins_later(rank: int, init_method: str) -> str:
    if rank == 1:
        time.sleep(2.5)
    with joined(at(rank, 3, init_method, local_rank=0), device=CPU, timeout_seconds=3.0):
        return "joined"


def test_who_begins_to_wait_later_hears_who_never_arrived() -> None:
    """Not that the store is gone, which the first to lose patience takes along."""
    for text, _ in run_processes(outcome, 2, "joins_later", tcp()):
        assert text.startswith("LostRank: rank 2 of 3 has not reached 'joining' within 3 s\n"), text


@pytest.mark.parametrize("place", ["tcp", "file"])
def test_one_rank_given_twice_is_named(place: str, tmp_path: Path) -> None:
    init_method = tcp() if place == "tcp" else f"file://{tmp_path}/ranks"
    found = run_processes(outcome, 3, "joins_as", 3, init_method, [0, 1, 1], [3, 3, 3])
    texts = sorted(text.splitlines()[0] for text, _ in found)
    assert texts == ["LostRank: rank 1 failed: RANK = 1: taken"] * 2 + ["UserError: RANK = 1: taken"]
    assert max(seconds for _, seconds in found) < LONG_SECONDS, "nobody waits for the time-out"


def test_a_file_left_by_a_crash_is_named(tmp_path: Path) -> None:
    init_method = f"file://{tmp_path}/ranks"
    with pytest.raises(RankError, match="SIGKILL"):
        run_processes(dies, 2, init_method, 0)
    assert (tmp_path / "ranks").exists(), "a crash leaves the file, which this test is about"
    found = run_processes(outcome, 2, "joins_as", 2, init_method, [0, 1], [2, 2])
    assert any("UserError: RANK" in text and "remove the file" in text for text, _ in found), found


def test_different_sizes_of_the_world_are_named() -> None:
    found = run_processes(outcome, 2, "joins_as", 2, tcp(), [0, 1], [2, 3])
    assert found[0][0].startswith("UserError: WORLD_SIZE = 2\n  why: rank 1 was told that there are 3 ranks")
    assert found[1][0].startswith("LostRank: rank 0 failed: WORLD_SIZE = 2\n")
    assert max(seconds for _, seconds in found) < LONG_SECONDS


def joins_with_versions(rank: int, init_method: str, package: str) -> str:
    real = group.version_of
    group.version_of = lambda name: "0.0.1" if rank == 2 and name == package else real(name)
    with joined(at(rank, 4, init_method), device=CPU, timeout_seconds=30):
        return "joined"


@pytest.mark.parametrize("package", ["torch", "transformers", "paceline"])
def test_different_library_versions_are_named(package: str) -> None:
    own = group.version_of(package)
    for text, _ in run_processes(outcome, 4, "joins_with_versions", tcp(), package):
        assert text.startswith("UserError: library versions: not the same on all ranks"), text
        assert f'why: {package} is "{own}" on ranks 0, 1, 3 and "0.0.1" on rank 2' in text


# ranks that fail once they have joined


WAITS = {
    "barrier": lambda world: world.barrier("the first step"),
    "any": lambda world: world.any(False),
    "start_all_reduce": lambda world: world.start_all_reduce(torch.ones(1))(),
}


def waits_in_vain(rank: int, init_methods: dict[str, str], size: int) -> str:
    """One group of ``size`` for each of ``WAITS``; the last rank of each does not come along."""
    what, rank = list(init_methods)[rank // size], rank % size
    with joined(at(rank, size, init_methods[what]), device=CPU, timeout_seconds=30) as world:
        lose_patience(world)
        if rank == size - 1:
            time.sleep(1.0 + GRACE_SECONDS + 1.5)
            return "slept"
        WAITS[what](world)
    return "passed"


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_along_is_named(size: int) -> None:
    init_methods = {what: tcp() for what in WAITS}
    found = run_processes(outcome, size * len(WAITS), "waits_in_vain", init_methods, size)
    for rank, (text, seconds) in enumerate(found):
        if rank % size != size - 1:
            assert text.startswith(f"LostRank: rank {size - 1} of {size} has not reached "), text
            assert "last seen at 'all have joined'" in text
            assert seconds < LONG_SECONDS


def fails(rank: int, init_method: str, size: int, error: BaseException) -> str:
    with joined(at(rank, size, init_method), device=CPU, timeout_seconds=30) as world:
        world.barrier("start")
        if rank == 1:
            raise error
        world.barrier("the end of the epoch")
    return "passed"


@SIZES
@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("bad tensor\nwith details"), "LostRank: rank 1 failed: ValueError: bad tensor\n"),
        (
            UserError("data.source = x", "it is empty", "another"),
            "LostRank: rank 1 failed: data.source = x\n  why: it is",
        ),
        (Preempted("stopped by SIGTERM"), "Preempted: rank 1 was stopped: stopped by SIGTERM"),
    ],
    ids=["bug", "user error", "stop"],
)
def test_a_failure_of_one_rank_reaches_all_at_once(size: int, error: Exception, told: str) -> None:
    found = run_processes(outcome, size, "fails", tcp(), size, error)
    assert found[1][0].startswith(f"{type(error).__name__}: ")
    for rank, (text, seconds) in enumerate(found):
        assert rank == 1 or text.startswith(told), text
        assert seconds < LONG_SECONDS, "nobody waits for the time-out"


def tells_its_launcher(rank: int, init_method: str) -> str:
    """Poses as a rank of our launcher's; returns what that is told."""
    reading, writing = os.pipe()
    os.environ[LAUNCHER], os.environ[REPORT_FD] = str(os.getppid()), str(writing)
    outcome(rank, "fails", init_method, 2, UserError("data.source = x", "it is empty"))
    os.close(writing)
    with open(reading) as told:
        return json.loads(told.readline())["message"]


def test_the_launcher_is_told_too() -> None:
    other, failing = run_processes(tells_its_launcher, 2, tcp())
    assert failing.startswith("data.source = x")
    assert other.startswith("rank 1 failed: data.source = x")


def fails_in_a_sum(rank: int, init_method: str, ours: bool) -> str:
    with joined(at(rank, 2, init_method), device=CPU, timeout_seconds=30) as world:
        if rank == 0:
            raise ValueError("bad batch")
        (world.all_reduce if ours else torch.distributed.all_reduce)(torch.ones(1))
    return "passed"


@pytest.mark.parametrize("ours", [True, False], ids=["of ours", "of another library"])
def test_a_failure_reaches_ranks_that_wait_in_a_sum(ours: bool) -> None:
    found = run_processes(outcome, 2, "fails_in_a_sum", tcp(), ours)
    assert found[0][0] == "ValueError: bad batch"
    assert found[1][0].startswith("LostRank: rank 0 failed: ValueError: bad batch"), found[1]
    assert found[1][1] < LONG_SECONDS


def dies(rank: int, init_method: str, dying: int) -> str:
    with joined(at(rank, 2, init_method), device=CPU, timeout_seconds=30) as world:
        world.barrier("start")
        if rank == dying:
            os.kill(os.getpid(), signal.SIGKILL)
        world.any(False)
    return "passed"


def test_a_process_that_is_killed_is_missed_in_the_next_collective(survivors_can_report: None, tmp_path: Path) -> None:
    report = tmp_path / "report"
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        run_processes(reports_outcome, 2, str(report), "dies", tcp(), 1)
    text, _, seconds = report.read_text().rpartition("|")
    assert text.startswith("LostRank: rank 1 of 2 has not reached 'a question to all ranks'"), text
    assert float(seconds) < LONG_SECONDS


def test_the_loss_of_rank_0_and_its_store_is_told(survivors_can_report: None, tmp_path: Path) -> None:
    report = tmp_path / "report"
    with pytest.raises(RankError, match="rank 0 of 2 was killed by SIGKILL"):
        run_processes(reports_outcome, 2, str(report), "dies", tcp(), 0)
    text, _, seconds = report.read_text().rpartition("|")
    assert text.startswith("LostRank: rank 0 cannot be reached\n  why: the store"), text
    assert float(seconds) < LONG_SECONDS


@pytest.fixture
def survivors_can_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes beside one that was killed are given the time to find that out."""
    monkeypatch.setattr("tests.testing.distributed.GRACE_SECONDS", 10.0)


def reports_outcome(rank: int, report: str, name: str, *arguments: Any) -> None:
    """Into a file, for the other rank does not live to answer."""
    text, seconds = outcome(rank, name, *arguments)
    Path(report).write_text(f"{text}|{seconds}")


# going first


def goes_first(rank: int, init_method: str, what: str) -> str:
    with joined(at(rank, 2, init_method), device=CPU, timeout_seconds=30) as world:
        lose_patience(world)
        if rank == 0 and what == "never comes":
            time.sleep(3)
            return "slept"
        with world.alone_first("downloading the model"):
            if rank == 0 and what == "takes long":
                time.sleep(2.5)
            if rank == 0 and what == "is stopped":
                raise KeyboardInterrupt
            if rank == 0 and what == "hangs":
                os.kill(os.getpid(), signal.SIGSTOP)
        world.barrier("both have it")
    return "passed"


def test_the_first_rank_may_take_longer_than_the_time_out() -> None:
    found = run_processes(outcome, 2, "goes_first", tcp(), "takes long")
    assert [text for text, _ in found] == ["passed"] * 2


def goes_first_on_its_machine(rank: int, port: int) -> str:
    place = at(rank, 2, f"tcp://127.0.0.1:{port}", local_rank=0, local_world_size=1)
    with joined(place, device=CPU, timeout_seconds=30) as world:
        lose_patience(world)
        with world.alone_first("encoding the data"):
            if rank == 0:
                time.sleep(2.5)
        world.barrier("both have the data")
    return "passed"


def test_another_machine_waits_for_as_long_as_a_first_rank_shows_signs_of_life() -> None:
    """A warm cache on one machine, a cold one on the other."""
    found = run_processes(outcome, 2, "goes_first_on_its_machine", free_port())
    assert [text for text, _ in found] == ["passed"] * 2


def test_a_first_rank_that_never_comes_is_named() -> None:
    _, (text, seconds) = run_processes(outcome, 2, "goes_first", tcp(), "never comes")
    assert text.startswith("LostRank: rank 0 of 2 has not reached 'the end of downloading the model' within 1 s"), text
    assert seconds < LONG_SECONDS


def test_a_first_rank_that_hangs_is_named(tmp_path: Path) -> None:
    """Not rank 0, which holds the store: its silence would be noticed in other ways."""
    with pytest.raises(RankError, match="rank 1 of 2 was killed by SIGKILL"):
        run_processes(outlives_rank_1, 2, str(tmp_path))
    text = (tmp_path / "report").read_text()
    assert text.startswith("LostRank: rank 1 of 2 has not reached 'the end of downloading' within 1 s"), text


def outlives_rank_1(rank: int, folder: str) -> None:
    if rank == 1:
        (Path(folder) / "process").write_text(str(os.getpid()))
    text, _ = outcome(rank, "follows_rank_1", f"file://{folder}/ranks")
    (Path(folder) / "report").write_text(text)
    os.kill(int((Path(folder) / "process").read_text()), signal.SIGKILL)


def follows_rank_1(rank: int, init_method: str) -> str:
    with joined(at(rank, 2, init_method, local_rank=1 - rank), device=CPU, timeout_seconds=30) as world:
        lose_patience(world)
        with world.alone_first("downloading"):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
    return "passed"


def test_a_stop_of_the_first_rank_stops_the_others() -> None:
    (first, _), (other, _) = run_processes(outcome, 2, "goes_first", tcp(), "is stopped")
    assert first == "KeyboardInterrupt: "
    assert other.startswith("Preempted: rank 0 was stopped: interrupted"), other
