"""Torchrun's lines for several machines, printed, and carried out by an ssh that stays on this one."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.contract.errors import UserError
from paceline.verbs import cli
from paceline.verbs.launch.hosts import Machines, lines, parse_hosts, run_by_ssh

MACHINES = Machines(
    hosts=["ada@a", "b"],
    folder=Path("/work/it's"),
    python=["/venv/bin/python", "-P"],
    arguments=["train", "r.yaml", "--out", "runs/x"],
    ranks=4,
)

SSH = """#!/bin/bash
# ssh -tt HOST COMMAND
export HOST_NAME=$2
trap 'kill $child; wait $child; exit 255' TERM
bash -c "$3" & child=$!
wait $child
"""


def test_the_lines_differ_in_the_rank_of_the_node() -> None:
    first, second = lines(MACHINES)
    assert first == (
        "/venv/bin/python -P -m torch.distributed.run --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr a "
        "--master-port 29500 -m paceline train r.yaml --out runs/x"
    )
    assert second == first.replace("--node-rank 0", "--node-rank 1")


def test_each_machine_may_count_its_own_gpus() -> None:
    assert "--nproc-per-node gpu " in lines(replace(MACHINES, ranks="gpu"))[0]


@pytest.mark.parametrize("text", ["", "a,,b", "a b", "-oProxyCommand=x", "a,-b", "a,a", "a;b", "@a"])
def test_what_names_no_machines_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--hosts"):
        parse_hosts(text)


def test_machines_are_names_and_addresses() -> None:
    assert parse_hosts("node1, ada@node-2.site,10.0.0.1") == ["node1", "ada@node-2.site", "10.0.0.1"]


def test_the_command_prints_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    words = ["launch", "torchrun", "r.yaml", "--hosts", "a,b", "--processes", "2", "--out", "runs/x"]
    monkeypatch.setattr(sys, "argv", ["paceline", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"# on each machine, in {tmp_path}\n\n# a\nCUDA_VISIBLE_DEVICES= " in out
    assert "\n# b\n" in out
    assert out.count("--nproc-per-node 2 --master-addr a --master-port 29500 -m paceline train r.yaml") == 2


RECIPE = "name: x\nmodel: {config: {model_type: bert}, vocabulary_size: 900}\ndata: {source: a.csv, text: t}"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def machines(tmp_path: Path, program: str) -> Machines:
    """``python`` is a program of the test's."""
    file = tmp_path / "pro gram"
    file.write_text(f"#!/bin/bash\n{program}\n")
    file.chmod(0o755)
    return Machines(hosts=["a", "b"], folder=tmp_path, python=[str(file)], arguments=[], ranks=1, on_cpu=True)


@pytest.mark.usefixtures("ssh")
def test_ssh_carries_them_out(tmp_path: Path) -> None:
    shown: list[str] = []
    told = machines(tmp_path, 'echo "$HOST_NAME in $PWD: rank $6 of $4, GPUs <$CUDA_VISIBLE_DEVICES>"')
    assert run_by_ssh(told, shown.append) == 0
    assert sorted(shown) == [
        f"[{host}] {host} in {tmp_path}: rank {rank} of 2, GPUs <>\n" for rank, host in enumerate("ab")
    ]


@pytest.mark.usefixtures("ssh")
def test_where_one_machine_fails_the_other_is_ended(tmp_path: Path) -> None:
    shown: list[str] = []
    begun = time.monotonic()
    fails = "while [ ! -e ready ]; do sleep 0.01; done; echo fails; exit 7"
    waits = "trap 'kill $!; echo saved; exit 75' TERM; sleep 20 & touch ready; wait"
    told = machines(tmp_path, f"if [ $6 = 1 ]; then {fails}; fi; {waits}")
    assert run_by_ssh(told, shown.append) == 7
    assert "[b] fails\n" in shown
    assert "[a] saved\n" in shown
    assert time.monotonic() - begun < 10, "the other machine went on"


def test_without_ssh_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="ssh: no such program"):
        run_by_ssh(MACHINES, print)


@pytest.mark.usefixtures("ssh")
@pytest.mark.parametrize(
    ("words", "ends"), [([], "--set observe.console=plain"), (["--set", "observe.console=off"], "")]
)
def test_on_the_terminal_that_ssh_makes_no_bar_is_drawn(
    tmp_path: Path, words: list[str], ends: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "python").chmod(0o755)
    command = ["launch", "torchrun", "r.yaml", "--hosts", "a,b", "--out", "x", "--ssh", *words]
    monkeypatch.setattr(sys, "argv", ["paceline", *command])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    lines_shown = capsys.readouterr().out.splitlines()
    assert len(lines_shown) == 2
    for line in lines_shown:
        assert line.endswith(f"--out x {ends}".rstrip()), line
        assert line.count("observe.console") == 1
