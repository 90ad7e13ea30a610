"""What the ranks of an open group do together, on 2 and on 4 of them."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.contract.errors import UserError
from paceline.distributed import backends
from paceline.distributed.agree import agree
from paceline.distributed.exchange import Exchange, LostRank
from paceline.machine.cluster import named
from paceline.seams import Alone, World
from tests.testing.distributed import run_distributed

SIZES = pytest.mark.parametrize("size", [2, 4])


def place_in(world: World) -> tuple[int, int, int, bool]:
    return world.rank, world.size, world.local_rank, world.is_first


@SIZES
def test_every_rank_knows_its_place(size: int) -> None:
    assert run_distributed(place_in, size) == [(rank, size, rank, rank == 0) for rank in range(size)]


def test_a_world_of_one_is_alone() -> None:
    assert run_distributed(type, 1) == [Alone]


def summed(world: World, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
    tensor = torch.full((3, 2), world.rank + 1, dtype=dtype)
    return tensor, world.all_reduce(tensor) is tensor


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_sums_are_in_place(size: int, dtype: torch.dtype) -> None:
    for tensor, is_same in run_distributed(summed, size, dtype):
        assert is_same
        assert torch.equal(tensor, torch.full((3, 2), size * (size + 1) // 2, dtype=dtype))


def summed_beside_other_work(world: World) -> tuple[list[float], list[float]]:
    tensors = [torch.full((1000,), float(10**number * (world.rank + 1))) for number in range(3)]
    waits = [world.start_all_reduce(tensor) for tensor in tensors]
    between = [world.all_reduce(torch.tensor([1.0])).item(), float(world.any(True))]
    for wait in waits:
        wait()
    return [tensor.unique().item() for tensor in tensors], between


@SIZES
def test_sums_can_go_on_beside_other_work(size: int) -> None:
    total = size * (size + 1) / 2
    assert run_distributed(summed_beside_other_work, size) == [([total, 10 * total, 100 * total], [size, 1.0])] * size


def given_rank_0s(world: World, sizes: list[int]) -> list[torch.Tensor]:
    torch.manual_seed(world.rank)
    tensors = [torch.randn(size) for size in sizes]
    tensors += [torch.nn.Parameter(torch.randn(2, 3)), torch.randn(4, 5).t(), torch.randn(())]
    tensors += [torch.randn(3).bfloat16(), torch.rand(7) > 0.5, torch.randint(99, (2, 2)), torch.empty(0)]
    tensors += [torch.randn(2, dtype=torch.complex64), torch.tensor([math.nan, math.inf])]
    world.broadcast_(tensors)
    return [tensor.detach() for tensor in tensors]


@SIZES
def test_a_broadcast_gives_every_rank_the_bits_of_rank_0(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = run_distributed(given_rank_0s, size, [5, 1])
    torch.manual_seed(0)
    assert torch.equal(first[0], torch.randn(5)), "rank 0's own must not change"
    for tensors in others:
        for mine, expected in zip(tensors, first, strict=True):
            assert mine.dtype == expected.dtype
            assert mine.shape == expected.shape
            assert torch.equal(
                mine.contiguous().view(-1).view(torch.uint8), expected.contiguous().view(-1).view(torch.uint8)
            )


def number_of_broadcasts(world: World, sizes: list[int], most_bytes: int) -> tuple[int, bool]:
    from paceline.distributed import group

    calls, broadcast, most = [], dist.broadcast, group.BROADCAST_BYTES
    dist.broadcast = lambda tensor, *to, **among: calls.append(tensor.nbytes) or broadcast(tensor, *to, **among)  # type: ignore
    group.BROADCAST_BYTES = most_bytes
    try:
        tensors = [torch.full((size,), float(world.rank)) for size in sizes]
        world.broadcast_(tensors)
    finally:
        dist.broadcast, group.BROADCAST_BYTES = broadcast, most
    return len(calls), all(not tensor.any() for tensor in tensors)


@pytest.mark.parametrize(
    ("sizes", "most_bytes", "calls"),
    [([10] * 100, 2**20, 1), ([10] * 100, 400, 10), ([10, 1000, 10], 400, 3), ([], 400, 0)],
    ids=["one call", "full parts", "one larger than a part", "nothing"],
)
def test_tensors_are_joined_to_few_broadcasts(sizes: list[int], most_bytes: int, calls: int) -> None:
    assert run_distributed(number_of_broadcasts, 2, sizes, most_bytes) == [(calls, True)] * 2


def broadcasts_what_differs(world: World) -> None:
    world.broadcast_([torch.zeros(2 + world.rank)])


def test_a_broadcast_of_different_shapes_is_refused() -> None:
    with pytest.raises(UserError, match="the model's tensors: not the same on all ranks"):
        run_distributed(broadcasts_what_differs, 2)


VALUES = [None, True, 0, -1.5, "a \u2603 \x00 text", [1, [2]], {"a": {"b": [None]}}, "x" * 100_000]


def exchanged(world: World, values: list[Any]) -> list[Any]:
    own = [[value, world.rank] for value in values]
    return [(world.gather(value), world.share(value)) for value in own]


@SIZES
def test_values_arrive_whole_and_in_rank_order(size: int) -> None:
    for found in run_distributed(exchanged, size, VALUES):
        for value, (gathered, shared) in zip(VALUES, found, strict=True):
            assert gathered == [[value, rank] for rank in range(size)]
            assert shared == [value, 0]


def shared_only_by_rank_0(world: World) -> Any:
    return world.share("of rank 0" if world.is_first else object())


def test_what_other_ranks_would_share_is_not_looked_at() -> None:
    assert run_distributed(shared_only_by_rank_0, 2) == ["of rank 0"] * 2


def gathers_an_object(world: World) -> None:
    world.gather(object())


def test_values_that_json_does_not_hold_are_refused() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        run_distributed(gathers_an_object, 2)


def any_of(world: World, rank: int | None) -> bool:
    return world.any(world.rank == rank)


@SIZES
def test_one_flag_is_enough(size: int) -> None:
    for rank in range(size):
        assert run_distributed(any_of, size, rank) == [True] * size
    assert run_distributed(any_of, size, None) == [False] * size


def passes_a_barrier(world: World) -> tuple[float, float]:
    time.sleep(0.05 * world.rank)
    before = time.monotonic()
    world.barrier("all are here")
    return before, time.monotonic()


@SIZES
def test_nobody_passes_a_barrier_before_all_have_reached_it(size: int) -> None:
    times = run_distributed(passes_a_barrier, size)
    assert min(passed for _, passed in times) >= max(reached for reached, _ in times)


def is_out_of_step(world: World) -> None:
    world.barrier("reading" if world.rank == 0 else "writing")


def test_ranks_at_different_places_are_told_so() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 is at 'reading'; rank 1 is at 'writing'"):
        run_distributed(is_out_of_step, 2)


def test_a_rank_that_is_waited_for_in_vain_is_told_with_what_it_does() -> None:
    """Also after it has met the others amid that."""
    store = dist.HashStore()
    one, other = (Exchange(store, rank, 2, timeout_seconds=0.3) for rank in range(2))
    with one.at("saving a checkpoint"):
        with ThreadPoolExecutor() as pool:
            assert list(pool.map(lambda rank: rank.all("values", 1), (one, other))) == [[1, 1], [1, 1]]
        with pytest.raises(
            LostRank, match=r"(?s)rank 0 of 2 has not reached 'a step'.*last seen at 'saving a checkpoint'"
        ):
            other.all("a step")


def number_of_keys(world: World, rounds: int) -> int:
    for number in range(rounds):
        world.gather(number)
    world.barrier("counting")
    return int(world._exchange._store._store.underlying_store.num_keys())  # type: ignore[attr-defined]


def test_values_are_not_kept_in_the_store() -> None:
    after_few = max(run_distributed(number_of_keys, 2, 5))
    after_many = max(run_distributed(number_of_keys, 2, 200))
    # a rank may count before the other has removed its last value
    assert after_many <= after_few + 2, f"{after_many} keys after 200 rounds, {after_few} after 5"


def works_alone_first(world: World, folder: str) -> tuple[float, float]:
    with world.alone_first("tokenising"):
        begun = time.monotonic()
        time.sleep(0.1 if world.rank == 0 else 0.0)
        done = time.monotonic()
    return begun, done


@SIZES
def test_the_first_rank_of_a_machine_is_done_before_the_others_begin(size: int) -> None:
    (_, done), *others = run_distributed(works_alone_first, size, "")
    assert all(begun >= done for begun, _ in others)


def test_ranks_that_wait_long_for_the_first_are_told_where_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    """It may take as long as it wants to, so nothing ends."""
    store = dist.HashStore()
    one, other = (Exchange(store, rank, 2, timeout_seconds=0.2) for rank in range(2))

    def follows() -> None:
        with other.first(0, "reading the data"):
            pass

    with ThreadPoolExecutor() as pool:
        with one.first(0, "reading the data"):
            waits = pool.submit(follows)
            time.sleep(0.9)
        waits.result()
    said = capfd.readouterr().err
    assert said.count("for 0.2 s the other ranks have waited for rank 0, which is reading the data") == 1, said
    assert said.count("for 0.4 s") == 1, said
    assert "where: test_ranks_that_wait_long_for_the_first_are_told_where_it_is (distributed/test_group.py:" in said


class Waiting:
    """A backend, and the group that it is the whole of."""

    _device_types = (torch.device("cuda"), torch.device("cpu"))

    def __init__(self) -> None:
        self.seconds: float | None = None

    def _get_backend(self, device: torch.device) -> Waiting:
        assert device.type == "cuda"
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.seconds = timeout.total_seconds()


class ProcessGroupNCCL(Waiting):
    pass


class ProcessGroupGloo(Waiting):
    pass


def test_the_watchdog_of_nccl_waits_longer_than_hosts_who_can_say_where_a_rank_hangs() -> None:
    nccl, gloo = ProcessGroupNCCL(), ProcessGroupGloo()
    for group in (nccl, gloo, dist.GroupMember.NON_GROUP_MEMBER):
        backends._let_hosts_end_first(group, 20)
    # with our launcher they have ended 8 s later
    assert nccl.seconds is not None
    assert nccl.seconds > 20 + 8
    assert gloo.seconds is None


def nests_alone_first(world: World) -> list[str]:
    done = []
    with world.alone_first("preparing"):
        with world.alone_first("downloading"):
            done.append("downloaded")
        done.append("prepared")
    with world.alone_first("saving"):
        done.append("saved")
    return [*done, *world.gather(world.rank)]


def test_going_first_can_be_nested_and_repeated() -> None:
    assert run_distributed(nests_alone_first, 2) == [["downloaded", "prepared", "saved", 0, 1]] * 2


def fails_alone_first(world: World, error: Exception) -> str:
    try:
        with world.alone_first("downloading the model"):
            if world.rank == 0:
                raise error
    except Exception as caught:
        return f"{type(caught).__name__}: {caught}"
    return "went on"


@SIZES
def test_a_failure_of_the_first_rank_is_everybodys(size: int) -> None:
    error = UserError("model.source = 'x'", "there is no such model", "model.source = 'y'")
    first, *others = run_distributed(fails_alone_first, size, error)
    assert first.startswith("UserError: model.source")
    expected = "LostRank: rank 0 failed: model.source = 'x'\n  why: there is no such model\n  fix: model.source = 'y'"
    assert others == [expected] * (size - 1)


def test_a_bug_of_the_first_rank_is_named_too() -> None:
    _, other = run_distributed(fails_alone_first, 2, KeyError("lost"))
    assert other.splitlines()[0] == "LostRank: rank 0 failed: KeyError: 'lost'"
    assert "'downloading the model'" in other


def agrees(world: World, values: list[Any]) -> str:
    try:
        agree(world, "the recipe", values[world.rank], "copy one recipe to all")
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", [{"a": {"b": 1.0, "c": [1]}, "d": None}, "text", 3, None, math.nan, {}])
def test_equal_values_agree(value: Any) -> None:
    assert run_distributed(agrees, 2, [value] * 2) == [""] * 2


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (
            [{"optimizer": {"lr": 1e-5, "name": "adamw"}}] * 2 + [{"optimizer": {"lr": 3e-5, "name": "adamw"}}] * 2,
            "optimizer.lr is 1e-05 on ranks 0, 1 and 3e-05 on ranks 2, 3",
        ),
        ([{"a": 1}, {"a": 1, "b": {}}, {"a": 1}, {"a": 1}], "b is absent on ranks 0, 2, 3 and {} on rank 1"),
        ([{"a": 1}, {"a": True}, {"a": 1}, {"a": 1}], "a is 1 on ranks 0, 2, 3 and true on rank 1"),
        (["x", "x", "y", "x"], 'it is "x" on ranks 0, 1, 3 and "y" on rank 2'),
        (
            [{str(key): rank for key in range(10)} for rank in range(4)],
            "; and 2 more",
        ),
    ],
    ids=["nested", "absent", "type", "plain", "many"],
)
def test_differing_values_are_named_on_every_rank(values: list[Any], why: str) -> None:
    messages = run_distributed(agrees, 4, values)
    assert len(set(messages)) == 1
    assert messages[0].startswith("the recipe: not the same on all ranks\n  why: ")
    assert why in messages[0]
    assert messages[0].endswith("fix: copy one recipe to all")


def agrees_on_something_else(world: World) -> None:
    agree(world, "the recipe" if world.rank == 0 else "the data", {"seed": 1})


def test_two_agreements_do_not_pair_up() -> None:
    with pytest.raises(RuntimeError, match=r"rank 0 is at 'the recipe'; rank 1 is at 'the data'"):
        run_distributed(agrees_on_something_else, 2)


@pytest.mark.parametrize(
    ("ranks", "text"), [([2], "rank 2"), ([0, 1], "ranks 0, 1"), ([9, 0, 1, 2, 5, 4], "ranks 0-2, 4, 5, 9")]
)
def test_ranks_are_named_briefly(ranks: list[int], text: str) -> None:
    assert named(ranks) == text


def test_a_lost_rank_keeps_its_number() -> None:
    assert LostRank("x", ranks=[3]).ranks == (3,)
