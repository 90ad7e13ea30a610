"""A Slurm of two nodes that are both this machine: munged, slurmctld and two slurmd, started for the tests alone.

Debian's packages ``slurm-wlm`` and ``munge`` are all it takes; any user may start it. The nodes' names are those of no
machine, as on clusters where Slurm has short names of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from getpass import getuser
from pathlib import Path
from typing import final

from tests.testing.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")

NODES = ("n1", "n2")

UP_SECONDS = 60.0

CONFIGURATION = """
ClusterName=paceline
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={place}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool/%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
SlurmctldLogFile={place}/log/slurmctld.log
SlurmdLogFile={place}/log/slurmd-%n.log
SlurmdTimeout=300
KillWait=20
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
{nodes}
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str:
    """Why it cannot be started here; empty where it can."""
    absent = [program for program in PROGRAMS if _program(program) is None]
    return f"no {', '.join(absent)} here: apt-get install slurm-wlm munge" if absent else ""


@final
class Cluster:
    """The two nodes.

    Args:
        place: a folder of its own, whose name is short: the socket of munged is in it.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.environment = {**os.environ, "SLURM_CONF": str(place / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """All daemons; returns when both nodes wait for work."""
        for folder in ("munge", "state", "log", *(f"spool/{node}" for node in NODES)):
            (self.place / folder).mkdir(parents=True)
        (self.place / "munge").chmod(0o700)
        key = self.place / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**21
        host = socket.gethostname().partition(".")[0]
        nodes = [
            f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs={os.cpu_count()} "
            f"RealMemory={memory} State=UNKNOWN"
            for node in NODES
        ]
        (self.place / "slurm.conf").write_text(
            CONFIGURATION.format(
                host=host, port=free_port(), user=getuser(), place=self.place, nodes="\n".join(nodes)
            ).lstrip()
        )
        munge = self.place / "munge"
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={munge / 'socket'}", *files)
        self.wait("munged listens", lambda: (munge / "socket").exists())
        self._daemon("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        self.wait("both nodes are idle", lambda: self.told("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * 2)

    def start_node(self, node: str) -> None:
        """Its daemon."""
        self._daemon("slurmd", "-D", "-N", node, name=node)

    def lose_node(self, node: str) -> None:
        """End all that runs on the node, as a loss of power does."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        tasks = [pid for pid, variables in self._processes() if f"SLURMD_NODENAME={node}".encode() in variables]
        # slurmstepd is what started them, and would tell the controller of their end
        for pid in {_parent(pid) for pid in tasks} - set(tasks) | set(tasks):
            if pid > 1:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def told(self, *command: str) -> str:
        """What one of Slurm's programs answers."""
        done = subprocess.run(
            [_program(command[0]) or command[0], *command[1:]],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout if done.returncode == 0 else ""

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETING; empty when it has left the queue."""
        return self.told("squeue", "-h", "-j", job, "-o", "%T").strip()

    def wait(self, what: str, is_so: Callable[[], bool], seconds: float = UP_SECONDS) -> None:
        """Until something is so.

        Raises:
            AssertionError: it is not, in time; with the end of every log.
        """
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                logs = [f"{log.name}: {log.read_text(errors='replace')[-1500:]}" for log in self.place.glob("log/*")]
                raise AssertionError("\n".join([f"not within {seconds:.0f} s: {what}", *logs]))
            time.sleep(0.2)

    def stop(self) -> None:
        """End every job, and every daemon."""
        self.told("scancel", "--user", getuser())
        with suppress(AssertionError):
            self.wait("no job is left", lambda: not self.told("squeue", "-h"), 40)
        for name in (*NODES, "slurmctld", "munged"):
            if daemon := self._daemons.get(name):
                daemon.terminate()
                try:
                    daemon.wait(10)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()
        for pid, _ in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _daemon(self, program: str, *arguments: str, name: str = "") -> None:
        with (self.place / "log" / f"{name or program}.out").open("ab") as log:
            self._daemons[name or program] = subprocess.Popen(
                [_program(program) or program, *arguments],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _processes(self) -> Iterator[tuple[int, list[bytes]]]:
        """What runs in a job of this cluster's: process and variables."""
        ours = f"SLURM_CONF={self.place / 'slurm.conf'}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (folder / "environ").read_bytes().split(b"\0")
                if ours in variables and any(each.startswith(b"SLURM_JOB_ID=") for each in variables):
                    yield int(folder.name), variables


@contextmanager
def cluster(place: Path) -> Iterator[Cluster]:
    """A cluster that is up, and gone afterwards."""
    made = Cluster(place)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
