"""Torchrun's lines for several machines, printed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.contract.errors import UserError
from paceline.verbs import cli
from paceline.verbs.launch.hosts import Machines, lines, parse_hosts

MACHINES = Machines(
    hosts=["ada@a", "b"],
    python=["/venv/bin/python", "-P"],
    arguments=["train", "r.yaml", "--out", "runs/x"],
    ranks=4,
)


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
