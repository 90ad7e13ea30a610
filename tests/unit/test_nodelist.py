"""Slurm's short forms of nodes and counts."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from paceline.contract.errors import UserError
from paceline.machine.jobs import MOST_NODES, counts, nodes

LISTS = {
    "n1": ["n1"],
    "n1,n2": ["n1", "n2"],
    "n[1-3]": ["n1", "n2", "n3"],
    "gpu[01-03,7],login": ["gpu01", "gpu02", "gpu03", "gpu7", "login"],
    "n[008-011]": ["n008", "n009", "n010", "n011"],
    "n[9-11]": ["n9", "n10", "n11"],
    "rack[1-2]node[1-2]": ["rack1node1", "rack1node2", "rack2node1", "rack2node2"],
    "a[1-2]-ib,b-[3]": ["a1-ib", "a2-ib", "b-3"],
    "gpu-a100-[2,4]": ["gpu-a100-2", "gpu-a100-4"],
}


@pytest.mark.parametrize(("text", "expected"), LISTS.items())
def test_nodes_are_listed(text: str, expected: list[str]) -> None:
    assert nodes(text) == expected


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="Slurm's scontrol is not installed")
@pytest.mark.parametrize("text", [text for text in LISTS if "-ib" not in text])
def test_scontrol_lists_the_same(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    # it wants a configuration, and asks no controller; scontrol 22.05 knows nothing that follows brackets
    configuration = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    configuration.write_text("ClusterName=test\nSlurmctldHost=localhost\nNodeName=localhost\n")
    environment = {"SLURM_CONF": str(configuration), "PATH": "/usr/bin:/bin"}
    command = ["scontrol", "show", "hostnames", text]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        pytest.skip(f"scontrol does not answer here: {done.stderr.strip()}")
    assert done.stdout.split() == nodes(text)


@pytest.mark.parametrize("text", ["", ",", "n[1-", "n1]", "n[3-1]", "n[a-b]", "n[1,,2]", "n[]", "n[1-2][", "n[٣]"])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="SLURM_JOB_NODELIST=") as refused:
        nodes(text)
    assert "MASTER_ADDR" in refused.value.fix


def test_a_list_without_end_ends() -> None:
    assert len(nodes("n[0-999999999]")) == MOST_NODES
    assert len(nodes("n[0-9999]x[0-9999]x[0-9]")) == MOST_NODES


@pytest.mark.parametrize(
    ("text", "expected"), [("4", [4]), ("4(x2),1", [4, 4, 1]), ("1(x3)", [1, 1, 1]), ("2,1", [2, 1])]
)
def test_counts_are_listed(text: str, expected: list[int]) -> None:
    assert counts(text) == expected


@pytest.mark.parametrize("text", ["", "4(2)", "x", "4,", "4(x2"])
def test_what_is_no_count_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="SLURM_STEP_TASKS_PER_NODE="):
        counts(text)
