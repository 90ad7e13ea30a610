import pytest
import torch

from paceline.seams import Alone
from paceline.tasks.in_order import in_order
from tests.unit.tasks.ranks import on_ranks

CPU = torch.device("cpu")


def parts(*lengths: int, width: int = 3) -> list[torch.Tensor]:
    rows = torch.arange(sum(lengths) * width, dtype=torch.float32).view(-1, width)
    return list(rows.split(list(lengths)))


@pytest.mark.parametrize("block_bytes", [1, 12, 40, 10**6])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4]], [[3, 0], [4, 2, 1]], [[], [4], [], [2, 0, 1, 3]]])
def test_parts_come_in_the_order_of_their_places_whoever_has_them(split: list[list[int]], block_bytes: int) -> None:
    whole = parts(2, 1, 5, 2, 1)

    def one(world):
        return in_order(world, split[world.rank], [whole[i] for i in split[world.rank]], CPU, block_bytes)

    first, *others = on_ranks(len(split), one)
    assert torch.equal(torch.cat(first), torch.cat(whole))
    assert others == [[]] * (len(split) - 1), "only the first rank is to hold them"


def test_no_more_than_a_block_is_sent_at_a_time_but_never_less_than_a_part() -> None:
    whole = parts(2, 1, 5, 2, 1)

    def one(world):
        mine = [1, 3] if world.rank else [0, 2, 4]
        in_order(world, mine, [whole[i] for i in mine], CPU, 40)  # rows of 12 bytes: three of them
        return world.sent

    assert on_ranks(2, one) == [[36, 60, 36]] * 2


def test_no_bit_changes() -> None:
    odd = torch.tensor([-0.0, float("nan"), float("inf"), -float("inf"), 1e-45, 3.0])
    odd = torch.cat([odd, torch.tensor([0x7FC12345, -1], dtype=torch.int32).view(torch.float32)])
    for dtype in (torch.int32, torch.int64, torch.uint8):
        sent = odd.view(dtype)

        def one(world, sent=sent):
            return in_order(world, [world.rank], [sent.chunk(2)[world.rank]], CPU)

        assert torch.equal(torch.cat(on_ranks(2, one)[0]), sent)

    def as_they_are(world):
        return in_order(world, [world.rank], [odd.chunk(2)[world.rank]], CPU)

    found = torch.cat(on_ranks(2, as_they_are)[0])
    assert found.dtype == odd.dtype
    assert torch.equal(found.view(torch.int32), odd.view(torch.int32))


def test_parts_without_rows_and_nobody_with_parts() -> None:
    assert in_order(Alone(), [], [], CPU) == []
    assert on_ranks(2, lambda world: in_order(world, [], [], CPU)) == [[], []]
    empty = in_order(Alone(), [0], [torch.empty(0, 3)], CPU)
    assert [part.shape for part in empty] == [(0, 3)]


def test_ranks_that_claim_the_same_place_are_told_so_everywhere() -> None:
    def one(world):
        with pytest.raises(ValueError, match="two ranks have the same batch"):
            in_order(world, [0, 1 + world.rank // 2], parts(1, 1), CPU)
        return True

    assert on_ranks(3, one) == [True] * 3
