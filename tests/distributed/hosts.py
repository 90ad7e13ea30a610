"""Two hosts on one machine: namespaces with a network, a name and a process table of their own, joined by one link."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import final

ADDRESSES = ("10.77.0.1", "10.77.0.2")

NAMESPACES = ("--net", "--uts", "--mount")

TOOLS = ("ip", "mount", "nsenter", "unshare")

FURNISH = """
set -e
name=$1 hosts=$2 shared=$3 access=$4
echo "$name" > /proc/sys/kernel/hostname
mount --bind "$hosts" /etc/hosts
mount --bind "$shared" "$shared"
mount -o "remount,bind,$access" "$shared"
echo furnished
exec cat
"""
"""Of a host's first process; it ends when the pipe to it closes, however the tests end, and with it all the others."""


def missing() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if sys.platform != "linux":
        return "namespaces are Linux's"
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        return f"no {', '.join(absent)} on this machine"
    # root alone says little: a container's may lack the right to mount, or its kernel veth
    link = "mount -t tmpfs none /mnt && ip link add name one type veth peer name other"
    command = ["unshare", *NAMESPACES, "--pid", "--fork", "--mount-proc", "sh", "-c", link]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return f"takes root and namespaces: {tried.stderr.strip()}" if tried.returncode else ""


@final
class Host:
    """One of the two.

    Args:
        first: the process that holds the namespaces; when it is killed, all others of the host are.
        disk: a folder of this host alone.
        shared: a folder that all hosts see; the current one of what is started here.
    """

    def __init__(self, first: subprocess.Popen[bytes], address: str, disk: Path, shared: Path) -> None:
        self.first, self.address, self.disk = first.pid, address, disk
        self._shared, self._power = shared, first
        self._started: list[Running] = []

    def start(self, *arguments: str, variables: Mapping[str, str] | None = None) -> Running:
        """A Python command on this host."""
        log = self.disk / f"log-{len(self._started)}.txt"
        own = {"OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(self.disk / "cache"), "HOST_DISK": str(self.disk)}
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*self._inside(), f"--wd={self._shared}", sys.executable, *arguments],
                env={**os.environ, **own, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._started.append(Running(process, log))
        return self._started[-1]

    def command(self, *command: str) -> None:
        """Run a tool to its end, such as ``ip link set eth0 down``."""
        subprocess.run([*self._inside(), *command], check=True, timeout=20)

    def left(self) -> list[str]:
        """Command lines of the processes that run here, but for the first."""
        found = []
        for process in (path for path in Path("/proc").iterdir() if path.name.isdecimal()):
            try:
                if os.stat(process / "ns" / "pid").st_ino == os.stat(self._processes).st_ino:
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip())
            except OSError:  # it has ended meanwhile
                continue
        return [command for command in found if command != "cat"]

    def end(self) -> None:
        """Kill all that runs here."""
        self._power.kill()
        for running in self._started:
            running.ended(20)

    def _inside(self) -> Sequence[str]:
        return "nsenter", f"--target={self.first}", *NAMESPACES, f"--pid={self._processes}"

    @property
    def _processes(self) -> str:
        """The process table; the first process stands outside of it, and its child is number 1 inside."""
        return f"/proc/{self.first}/ns/pid_for_children"


@final
class Running:
    """A command on a host; ``process`` passes on its exit code."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    def said(self) -> str:
        """All that it has printed so far, errors among it."""
        return self._log.read_text(errors="replace")

    def ended(self, timeout: float) -> int:
        """Its exit code.

        Raises:
            AssertionError: it has not ended within ``timeout`` seconds.
        """
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout:g} s; it said: {self.said()}") from None


@contextmanager
def two_hosts(disks: Path, shared: Path) -> Iterator[tuple[Host, Host]]:
    """host1 and host2, which reach each other and nothing else; to the second, the shared disk is read-only.

    Args:
        disks: a folder for what each has of its own.
    """
    names = [f"host{number}" for number, _ in enumerate(ADDRESSES, 1)]
    table = disks / "hosts"
    lines = [f"{address} {name}\n" for address, name in zip(ADDRESSES, names, strict=True)]
    table.write_text("".join(["127.0.0.1 localhost\n", *lines]))
    with ExitStack() as powered:
        hosts = []
        for name, address, access in zip(names, ADDRESSES, ("rw", "ro"), strict=True):
            (disks / name).mkdir()
            first = powered.enter_context(_powered([name, str(table), str(shared), access]))
            hosts.append(Host(first, address, disks / name, shared))
            powered.callback(hosts[-1].end)
        _join(*hosts)
        yield hosts[0], hosts[1]


@contextmanager
def _powered(furnishing: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    isolated = ["unshare", *NAMESPACES, "--pid", "--fork", "--kill-child", "--mount-proc"]
    first = subprocess.Popen(
        [*isolated, "sh", "-c", FURNISH, "sh", *furnishing], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert first.stdin is not None
    assert first.stdout is not None
    with first.stdin, first.stdout:
        try:
            assert first.stdout.readline() == b"furnished\n", "the host has not started"
            yield first
        finally:
            first.kill()
            first.wait(20)


def _join(one: Host, other: Host) -> None:
    ends = [["netns", str(host.first), "name", "eth0"] for host in (one, other)]
    made = ["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]]
    subprocess.run(made, check=True, timeout=20)
    for host in (one, other):
        host.command("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            host.command("ip", "link", "set", device, "up")
