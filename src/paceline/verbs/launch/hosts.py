"""A run on several machines without a batch system: torchrun's line for each of them, printed or carried out by ssh."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.contract.errors import INTERRUPTED, UserError, excerpt

_HOST = re.compile(r"(?:[A-Za-z0-9_][\w.-]*@)?[A-Za-z0-9_][\w.:-]*", re.ASCII)
"""A name or an address, with a user where ssh wants one; never an option of ssh."""

LOOK_SECONDS = 0.2

END_SECONDS = 30.0
"""How long the machines may take to save and end, once one of them has ended."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """What each machine runs."""

    hosts: Sequence[str]
    folder: Path
    """The current folder, absolute; the same on all."""
    python: Sequence[str]
    """The Python of each, as a command."""
    arguments: Sequence[str]
    """Those of paceline."""
    ranks: int | Literal["gpu"]
    """On each machine; gpu: as many as it has GPUs, as torchrun counts them."""
    on_cpu: bool = False
    port: int = 29500


def parse_hosts(text: str) -> list[str]:
    """The machines in ``a,b``; the ranks meet on the first.

    Raises:
        UserError: one is no name, or named twice.
    """
    hosts = [word.strip() for word in text.split(",")]
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise UserError(f"--hosts {excerpt(text)}", "machines are names, with commas between them", "--hosts a,b")
    if len(set(hosts)) < len(hosts):
        raise UserError(f"--hosts {excerpt(text)}", "a machine is named twice", f"--hosts {','.join({*hosts})}")
    return hosts


def lines(machines: Machines) -> list[str]:
    """The line of each machine, as it is typed there, in the same folder."""
    meet_at = machines.hosts[0].rpartition("@")[2]
    hidden = "CUDA_VISIBLE_DEVICES= " if machines.on_cpu else ""
    return [
        hidden
        + shlex.join(
            [
                *(*machines.python, "-m", "torch.distributed.run"),
                *("--nnodes", str(len(machines.hosts)), "--node-rank", str(number)),
                *("--nproc-per-node", str(machines.ranks)),
                *("--master-addr", meet_at, "--master-port", str(machines.port)),
                *("-m", "paceline", *machines.arguments),
            ]
        )
        for number in range(len(machines.hosts))
    ]


def run_by_ssh(machines: Machines, show: Callable[[str], object]) -> int:
    """Run each line on its machine, and pass on what they say; returns the first code that is not 0.

    Where one machine ends with an error, the others are hung up on: their runs save a checkpoint and end. So they do
    after Ctrl-C.

    Raises:
        UserError: there is no ssh here.
    """
    if shutil.which("ssh") is None:
        raise UserError("ssh: no such program", fix="leave out --ssh, and type each line on its machine")
    code = 0
    running = []
    try:
        for host, line in zip(machines.hosts, lines(machines), strict=True):
            # -tt: what runs there is hung up on when the connection ends, and does not go on alone
            command = ["ssh", "-tt", host, f"cd {shlex.quote(str(machines.folder))} && exec env {line}"]
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            reader = threading.Thread(target=_pass_on, args=(process, host, show), daemon=True)
            reader.start()
            running.append((process, reader))
        while None in (codes := [process.poll() for process, _ in running]):
            code = next(filter(None, codes), 0)
            if code:
                break
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        # all are told before any is waited for
        for process, _ in running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process, reader in running:
            _await_end(process)
            reader.join(timeout=1.0)
    return code or next((process.returncode for process, _ in running if process.returncode), 0)


def _await_end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pass_on(process: subprocess.Popen[bytes], host: str, show: Callable[[str], object]) -> None:
    if process.stdout is not None:
        with process.stdout as lines_of_host:
            for line in lines_of_host:
                show(f"[{host}] {line.decode(errors='replace').rstrip()}\n")
