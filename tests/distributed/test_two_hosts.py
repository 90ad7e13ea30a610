"""Runs over two hosts: what one machine cannot show is that addresses, disks and the link between them are real."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from paceline.run.checkpoint.store import CheckpointStore
from paceline.verbs.train import train
from tests.distributed.hosts import ADDRESSES, Host, Running, missing, two_hosts
from tests.e2e.whole_runs import STEPS, recipe
from tests.testing.tiny import tiny_bert_config, write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]

PORT = "29500"
"""Each test has a network of its own, in which every port is free."""

WATCHED = """
import os
from pathlib import Path

import paceline.data.prepare as prepare
from paceline.verbs import cli

encode = prepare.encode_texts

def noted(*arguments, **named):
    rank = os.environ.get("RANK") or os.environ["NUMBER"]
    Path(os.environ["HOST_DISK"], f"encoded-by-{rank}").touch()
    return encode(*arguments, **named)

prepare.encode_texts = noted
cli.main()
"""
"""``paceline``, which leaves a file on the host's own disk where a rank encodes texts."""

LINK_TIMEOUT = 10
"""Seconds that ranks wait for one another where the link is cut."""

LINK_DEADLINE = LINK_TIMEOUT + 16
"""Seconds after the cut in which both ranks have to have ended."""


@pytest.fixture(scope="module")
def network() -> None:
    """That hosts can be made here."""
    if why := missing():
        pytest.skip(f"two hosts in network namespaces: {why}")


@pytest.fixture(scope="module")
def workplace(network: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shared disk: recipe.yaml, and the run of one process, without dropout and with SGD."""
    place = tmp_path_factory.mktemp("shared")
    (place / "watched.py").write_text(WATCHED)
    with (place / "reviews.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        rows.writerows((f"film {row}:{' it was long' * (row % 7)}", ("good", "bad")[row % 2]) for row in range(60))
    chosen = recipe(
        write_tiny_model(place / "model", tiny_bert_config()),
        place / "reviews.csv",
        optimizer={"type": "sgd", "lr": 0.05},
        loop={"checkpoint_every": 1},
    )
    (place / "recipe.yaml").write_text(yaml.safe_dump(chosen.plain()))
    train(chosen, out=place / "undisturbed")
    return place


@pytest.fixture
def hosts(network: None, workplace: Path, tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with two_hosts(tmp_path, workplace) as both:
        yield both


def by_hand(host: Host, rank: int, size: int, *arguments: str, **variables: str) -> Running:
    """A rank that is told where to meet by options."""
    options = ["--init", f"tcp://{ADDRESSES[0]}:{PORT}", "--rank", str(rank), "--world-size", str(size)]
    return host.start("watched.py", "train", *arguments, *options, variables={"NUMBER": str(rank), **variables})


def encoders(host: Host) -> list[str]:
    return sorted(path.name for path in host.disk.glob("encoded-by-*"))


def assert_as_undisturbed(place: Path, name: str) -> None:
    found, expected = (load_file(place / run / "model" / "model.safetensors") for run in (name, "undisturbed"))
    for key, tensor in expected.items():
        far = (found[key] - tensor).norm() / tensor.norm().clamp(min=1e-3)
        assert far < 1e-6, f"{key}: {far:.1e} away, relative to its norm"


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def newest_step(folder: Path) -> int:
    """Of the checkpoints that say that they are whole; 0: none yet."""
    return max(
        (int(path.parent.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*/COMMITTED")), default=0
    )


def test_torchrun(workplace: Path, hosts: tuple[Host, Host]) -> None:
    """The second host may not write to the shared disk: if it tried to, it would fail."""
    with pytest.raises(CalledProcessError):
        hosts[1].command("touch", str(workplace / "written"))
    where = ["--nnodes", "2", "--nproc-per-node", "1", "--master-addr", ADDRESSES[0], "--master-port", PORT]
    command = ["watched.py", "train", "recipe.yaml", "--out", "torchrun", "--timeout", "60"]
    agents = [
        host.start("-W", "ignore", "-m", "torch.distributed.run", "--node-rank", str(number), *where, *command)
        for number, host in enumerate(hosts)
    ]
    for agent in agents:
        assert agent.ended(90) == 0, agent.said()
    assert newest_step(workplace / "torchrun") == STEPS
    assert_as_undisturbed(workplace, "torchrun")
    assert [encoders(host) for host in hosts] == [["encoded-by-0"], ["encoded-by-1"]]
    assert [host.left() for host in hosts] == [[], []], "processes are left"


def test_three_ranks_by_hand(workplace: Path, hosts: tuple[Host, Host]) -> None:
    """Two of them on the second host, where the first of the two encodes for both."""
    one, other = hosts
    arguments = ["recipe.yaml", "--out", "by-hand", "--timeout", "60"]
    ranks = [
        by_hand(one, 0, 3, *arguments),
        by_hand(other, 1, 3, *arguments, LOCAL_RANK="0", LOCAL_WORLD_SIZE="2"),
        by_hand(other, 2, 3, *arguments, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2"),
    ]
    for rank in ranks:
        assert rank.ended(90) == 0, rank.said()
    assert_as_undisturbed(workplace, "by-hand")
    assert [encoders(host) for host in hosts] == [["encoded-by-0"], ["encoded-by-1"]]
    assert [host.left() for host in hosts] == [[], []], "processes are left"


def test_ranks_meet_in_a_file(workplace: Path, hosts: tuple[Host, Host]) -> None:
    """Which tells nothing of machines: each rank is the first on its own, and listens where the other reaches it."""
    meeting = f"file://{hosts[0].disk}/meeting"
    arguments = ["watched.py", "train", "recipe.yaml", "--out", "in-a-file", "--timeout", "60", "--world-size", "2"]
    ranks = [
        host.start(*arguments, "--init", meeting, "--rank", str(rank), variables={"NUMBER": str(rank)})
        for rank, host in enumerate(hosts)
    ]
    for rank in ranks:
        assert rank.ended(90) == 0, rank.said()
    assert_as_undisturbed(workplace, "in-a-file")
    assert [encoders(host) for host in hosts] == [["encoded-by-0"], ["encoded-by-1"]]


def test_a_firewall_with_one_port_open(hosts: tuple[Host, Host]) -> None:
    """The second host's packets go nowhere, but for those from and to the port where ranks meet."""
    for number, rule in enumerate((f"sport {PORT} lookup main", f"dport {PORT} lookup main", "blackhole"), 10):
        hosts[1].command("ip", "rule", "add", "pref", str(number), "ipproto", "tcp", *rule.split())
    arguments = ["recipe.yaml", "--out", "walled", "--timeout", "6"]
    started = time.monotonic()
    ranks = [by_hand(host, rank, 2, *arguments) for rank, host in enumerate(hosts)]
    for rank in ranks:
        assert rank.ended(40) == 2, rank.said()
        assert f"rank 0 does not reach rank 1 at {ADDRESSES[1]}:" in rank.said()
        assert "no answer within 3 s" in rank.said()
        assert "Traceback" not in rank.said()
    assert time.monotonic() < started + 30
    assert [host.left() for host in hosts] == [[], []], "processes are left"


@dataclass(frozen=True, kw_only=True)
class Ending:
    """What became of a rank after the link was cut."""

    code: int | None
    """None: it had not ended by the deadline."""
    said: str
    left: list[str]
    """Command lines of processes that were still there."""


def until(steps: int) -> list[str]:
    """Options of a run that ends after so many steps, which all have one learning rate, however many there are."""
    settings = ("loop.epochs=100000", f"loop.max_steps={steps}", "schedule.type=constant", "schedule.warmup=0")
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture(scope="module")
def cut(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Ending]:
    """A run whose link goes down after the third checkpoint: the end of each rank, or what it was at the deadline."""
    arguments = ["recipe.yaml", "--out", "cut", "--timeout", str(LINK_TIMEOUT), *until(100_000)]
    with two_hosts(tmp_path_factory.mktemp("cut"), workplace) as hosts:
        ranks = [by_hand(host, rank, 2, *arguments) for rank, host in enumerate(hosts)]
        started = time.monotonic()
        while newest_step(workplace / "cut") < 3:
            assert all(rank.process.poll() is None for rank in ranks), [rank.said() for rank in ranks]
            assert time.monotonic() < started + 60, "the run does not get on"
            time.sleep(0.02)
        hosts[1].command("ip", "link", "set", "eth0", "down")
        deadline = time.monotonic() + LINK_DEADLINE
        while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.05)
        return [
            Ending(code=rank.process.poll(), said=rank.said(), left=host.left())
            for rank, host in zip(ranks, hosts, strict=True)
        ]


def test_the_link_goes_down_seen_by_the_first_host(workplace: Path, cut: list[Ending]) -> None:
    """Nobody closes a connection then, so it is the time-out that ends the wait."""
    ending, folder = cut[0], workplace / "cut"
    assert ending.code == 2, f"not a person's error within {LINK_DEADLINE} s: {ending}"
    assert "paceline: rank 1 of 2 has not reached" in ending.said
    assert "Traceback" not in ending.said, ending.said
    assert ending.left == []
    newest = CheckpointStore(folder / "checkpoints", 1).newest()
    assert newest.step == newest_step(folder), f"the newest checkpoint is not whole: {newest.notices}"
    assert newest.tensors("model")


def test_the_link_goes_down_seen_by_the_second_host(cut: list[Ending]) -> None:
    """The store is beyond the link too: what the collective failed of cannot be asked there."""
    ending = cut[1]
    assert ending.code == 2, f"not a person's error within {LINK_DEADLINE} s: {ending}"
    assert "paceline: rank 1: rank 0 " in ending.said, "neither it nor the lost rank is named"
    assert "Traceback" not in ending.said, ending.said
    assert ending.left == []


def test_the_run_goes_on_when_the_link_is_up_again(
    workplace: Path, hosts: tuple[Host, Host], cut: list[Ending]
) -> None:
    """It loses the steps since the last checkpoint and those under way, and ends with an undisturbed run's bits."""
    folder = workplace / "cut"
    kept = newest_step(folder)
    made = max(record["step"] for record in records(folder) if record["kind"] == "step")
    assert made <= kept + 2, f"{made} steps were made, and the last checkpoint is of step {kept}"
    for out, recipe_or_run in (("cut", [str(folder), "--resume"]), ("uncut", ["recipe.yaml", "--out", "uncut"])):
        ranks = [by_hand(host, rank, 2, *recipe_or_run, *until(kept + 4)) for rank, host in enumerate(hosts)]
        for rank in ranks:
            assert rank.ended(60) == 0, rank.said()
        assert newest_step(workplace / out) == kept + 4
    found, expected = (load_file(workplace / run / "model" / "model.safetensors") for run in ("cut", "uncut"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
