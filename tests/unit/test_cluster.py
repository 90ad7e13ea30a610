"""Who this process is: tables of what is set and what follows."""

from __future__ import annotations

import pytest

from paceline.contract.errors import UserError
from paceline.machine.cluster import LAUNCHER, Place, check_gpus, find_place

HERE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
THERE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PATH": "/bin", "LOCAL_RANK": "3"},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "8"},
        {"RANK": "5"},
        {"WORLD_SIZE": "many"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"RANK": "", "WORLD_SIZE": " "},
        HERE,
        {**HERE, "WORLD_SIZE": "1"},
        {**HERE, "WORLD_SIZE": "", "RANK": ""},
        {"TORCHELASTIC_RUN_ID": "left over"},
    ],
    ids=str,
)
def test_what_a_cluster_leaves_lying_about_is_no_rank(environment: dict[str, str]) -> None:
    assert find_place(environment) == Place()


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (
            {**HERE, "RANK": "1", "WORLD_SIZE": "4"},
            Place(
                rank=1,
                world_size=4,
                local_rank=1,
                local_world_size=4,
                is_local_guessed=True,
                started="environment",
                init_method="env://",
            ),
        ),
        (
            {**THERE, "RANK": "1", "WORLD_SIZE": "2"},
            Place(
                rank=1,
                world_size=2,
                local_rank=0,
                local_world_size=1,
                is_local_guessed=True,
                started="environment",
                init_method="env://",
            ),
        ),
        (
            {**THERE, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
            Place(rank=5, world_size=8, local_rank=1, local_world_size=2, started="environment", init_method="env://"),
        ),
        (
            {**THERE, "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
            Place(rank=5, world_size=8, local_rank=1, local_world_size=4, started="environment", init_method="env://"),
        ),
        (
            {"MASTER_ADDR": "::1", "MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"},
            Place(
                rank=0,
                world_size=2,
                local_rank=0,
                local_world_size=2,
                is_local_guessed=True,
                started="environment",
                init_method="env://",
            ),
        ),
        (
            {**THERE, **TORCHRUN, "RANK": "3", "WORLD_SIZE": "4"},
            Place(rank=3, world_size=4, local_rank=1, local_world_size=2, started="torchrun", init_method="env://"),
        ),
        (
            {**HERE, LAUNCHER: "77", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            Place(rank=1, world_size=2, local_rank=1, local_world_size=2, started="paceline", init_method="env://"),
        ),
        (
            {**HERE, **TORCHRUN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "WORLD_SIZE": "1"},
            Place(started="torchrun", init_method="env://"),
        ),
    ],
)
def test_a_place_in_the_environment(environment: dict[str, str], place: Place) -> None:
    assert find_place(environment) == place


@pytest.mark.parametrize(
    ("environment", "parts"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, ("no MASTER_ADDR and no MASTER_PORT", "export MASTER_ADDR=", "unset RANK")),
        ({**HERE, "RANK": "0"}, ("no WORLD_SIZE", "export WORLD_SIZE=2", "unset MASTER_ADDR MASTER_PORT RANK")),
        ({**HERE, "WORLD_SIZE": "2"}, ("no RANK", "export RANK=0")),
        ({**HERE, "WORLD_SIZE": "2", "RANK": ""}, ("no RANK",)),
        ({"MASTER_ADDR": "a", "RANK": "0", "WORLD_SIZE": "2"}, ("no MASTER_PORT", "export MASTER_PORT=29500")),
        ({**HERE, "RANK": "4", "WORLD_SIZE": "4"}, ("RANK=4 with WORLD_SIZE=4", "RANK=0 to RANK=3, or WORLD_SIZE=5")),
        ({**HERE, "RANK": "1", "WORLD_SIZE": "1"}, ("RANK=1 with WORLD_SIZE=1", "RANK=0, or WORLD_SIZE=2")),
        ({**HERE, "RANK": "one", "WORLD_SIZE": "2"}, ("RANK='one'", "whole number", "RANK=0")),
        ({**HERE, "RANK": "-1", "WORLD_SIZE": "2"}, ("RANK='-1'",)),
        ({**HERE, "RANK": "1.0", "WORLD_SIZE": "2"}, ("RANK='1.0'",)),
        ({**HERE, "RANK": "٣", "WORLD_SIZE": "4"}, ("RANK='٣'",)),
        ({**HERE, "RANK": "0", "WORLD_SIZE": "9" * 5000}, ("WORLD_SIZE='999", "5,000 characters")),
        ({**HERE, "RANK": "0", "WORLD_SIZE": "0"}, ("WORLD_SIZE='0'", "WORLD_SIZE=1")),
        ({**HERE, "MASTER_PORT": "x", "RANK": "0", "WORLD_SIZE": "2"}, ("MASTER_PORT='x'", "1 to 65535")),
        ({**HERE, "MASTER_PORT": "70000", "RANK": "0", "WORLD_SIZE": "2"}, ("MASTER_PORT='70000'", "=29500")),
        ({**HERE, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "2"}, ("LOCAL_RANK=2", "LOCAL_RANK=1")),
        ({**THERE, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "7"}, ("LOCAL_RANK=7", "2 ranks")),
        ({**THERE, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4"}, ("LOCAL_WORLD_SIZE=4", "2 ranks")),
        (
            {**THERE, "RANK": "1", "WORLD_SIZE": "9", "LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"},
            ("LOCAL_RANK=4", "4 of the ranks", "LOCAL_RANK=1"),
        ),
        ({**HERE, "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, ("LOCAL_RANK='x'",)),
    ],
)
def test_contradictions_in_the_environment_teach(environment: dict[str, str], parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refused:
        find_place(environment)
    assert refused.value.fix
    for part in parts:
        assert part in str(refused.value), refused.value


@pytest.mark.parametrize(
    ("environment", "init", "local_rank", "local_world_size"),
    [
        ({}, "tcp://127.0.0.1:29500", 1, 3),
        ({}, "tcp://localhost:29500", 1, 3),
        ({}, "tcp://[::1]:29500", 1, 3),
        ({}, "tcp://10.1.1.20:29500", 0, 1),
        ({}, "file:///tmp/a file", 1, 3),
        ({"WORLD_SIZE": "1"}, "tcp://10.1.1.20:29500", 0, 1),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, "tcp://node1:29500", 1, 2),
    ],
)
def test_a_place_by_options(environment: dict[str, str], init: str, local_rank: int, local_world_size: int) -> None:
    place = find_place(environment, init=init, rank=1, world_size=3)
    assert place == Place(
        rank=1,
        world_size=3,
        local_rank=local_rank,
        local_world_size=local_world_size,
        is_local_guessed="LOCAL_RANK" not in environment,
        started="environment",
        init_method=init,
    )


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"rank": 0}, ("--init and --world-size: missing", "--init tcp://127.0.0.1:29500 --rank 0 --world-size 2")),
        ({"init": "tcp://a:1", "rank": 0}, ("--world-size: missing", "--init tcp://a:1 --rank 0 --world-size 2")),
        ({"init": "tcp://a:1", "rank": 2, "world_size": 2}, ("--rank 2 with --world-size 2", "--rank 0 to --rank 1")),
        ({"init": "tcp://a:1", "rank": -1, "world_size": 2}, ("--rank '-1'", "--rank 0")),
        ({"init": "tcp://a:1", "rank": 0, "world_size": 0}, ("--world-size '0'",)),
        ({"init": "tcp://a", "rank": 0, "world_size": 2}, ("'tcp://a'", "a host and a port")),
        ({"init": "tcp://a:0", "rank": 0, "world_size": 2}, ("a host and a port",)),
        ({"init": "tcp://:29500", "rank": 0, "world_size": 2}, ("a host and a port",)),
        ({"init": "tcp://a:x", "rank": 0, "world_size": 2}, ("'tcp://a:x'", "Port")),
        ({"init": "tcp://a:99999", "rank": 0, "world_size": 2}, ("Port out of range",)),
        ({"init": "tcp://a:1?rank=0", "rank": 0, "world_size": 2}, ("nothing else",)),
        ({"init": "tcp://[::1:1", "rank": 0, "world_size": 2}, ("--init 'tcp://[::1:1'",)),
        ({"init": "file://tmp/x", "rank": 0, "world_size": 2}, ("third /", "file:///tmp/ranks")),
        ({"init": "file:///", "rank": 0, "world_size": 2}, ("third /",)),
        ({"init": "env://", "rank": 0, "world_size": 2}, ("are read without it",)),
        ({"init": "127.0.0.1:29500", "rank": 0, "world_size": 2}, ("tcp:// or file://",)),
        ({"init": "", "rank": 0, "world_size": 2}, ("tcp:// or file://",)),
    ],
)
def test_options_that_cannot_be_meant_teach(options: dict[str, str | int], parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as refused:
        find_place({}, **options)  # type: ignore[arg-type]
    assert refused.value.fix
    for part in parts:
        assert part in str(refused.value), refused.value


@pytest.mark.parametrize(
    ("environment", "by"),
    [
        ({**HERE, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "2"}, "torchrun"),
        ({**HERE, LAUNCHER: "77", "RANK": "0", "WORLD_SIZE": "2"}, "paceline's launcher"),
        ({**HERE, "RANK": "0", "WORLD_SIZE": "2"}, "RANK=0, WORLD_SIZE=2"),
    ],
)
def test_a_place_given_twice_is_refused(environment: dict[str, str], by: str) -> None:
    with pytest.raises(UserError, match="given twice") as refused:
        find_place(environment, init="tcp://127.0.0.1:29500", rank=0, world_size=2)
    assert by in refused.value.why
    assert "leave the options out" in refused.value.fix


@pytest.mark.parametrize(
    ("started", "num_gpus", "fix"),
    [
        ("torchrun", 2, "torchrun --nproc-per-node 2"),
        ("environment", 2, "LOCAL_RANK=0 to LOCAL_RANK=1"),
        ("environment", 1, "LOCAL_RANK=0"),
        ("paceline", 2, "--gpus 2"),
        ("torchrun", 0, "--set device=cpu"),
    ],
)
def test_a_rank_without_a_gpu(started: str, num_gpus: int, fix: str) -> None:
    place = Place(rank=6, world_size=8, local_rank=2, local_world_size=4, started=started)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="LOCAL_RANK = 2: no GPU for rank 6") as refused:
        check_gpus(place, num_gpus)
    assert refused.value.fix == fix
    check_gpus(place, 3)
