"""The words of a step: which rows of the embeddings they are, and that ranks sum those and no others."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import DistilBertConfig, DistilBertForSequenceClassification

from paceline.data.dataset import Tokens
from paceline.engine.buckets import Reduction
from paceline.engine.flat import FlatLayout
from paceline.engine.gradients import FlatGradients
from paceline.engine.words import Words, word_embeddings
from paceline.seams import World
from paceline.testing.distributed import run_distributed
from tests.unit.engine.test_gradients_ranks import Likes

ROWS, WIDTH = 40, 4


def tokens() -> Tokens:
    lengths = [3, 0, 5, 20]
    flat = np.concatenate([[7, 9, 7], [30, 31, 7, 39, 0], np.arange(10, 30)]).astype(np.uint16)
    return Tokens(flat, np.cumsum([0, *lengths]), pad_id=2)


@pytest.mark.parametrize(
    ("samples", "rows"), [([0], [2, 7, 9]), ([2, 0], [0, 2, 7, 9, 30, 31, 39]), ([1], [2]), ([], [2])]
)
def test_all_words_of_the_samples_and_the_padding(samples: list[int], rows: list[int]) -> None:
    found = Words(tokens(), torch.zeros(ROWS, WIDTH)).of(np.array(samples, dtype=np.int64))
    assert found is not None
    assert found.dtype == torch.int64
    assert found.tolist() == rows


def test_most_words_are_as_good_as_all() -> None:
    words = Words(tokens(), torch.zeros(ROWS, WIDTH))
    assert words.of(np.array([3])) is not None
    assert words.of(np.array([0, 2, 3])) is not None, "26 of 40"
    few = Words(tokens(), torch.zeros(34, WIDTH))
    assert few.of(np.array([0, 3])) is not None
    with_others = Words(Tokens(np.arange(31, dtype=np.uint16), np.array([0, 31]), pad_id=0), torch.zeros(ROWS, WIDTH))
    assert with_others.of(np.array([0])) is None, "31 of 40"


def test_a_step_does_not_remember_the_one_before() -> None:
    words = Words(tokens(), torch.zeros(ROWS, WIDTH))
    words.of(np.array([3]))
    found = words.of(np.array([0]))
    assert found is not None
    assert found.tolist() == [2, 7, 9]


def test_a_step_takes_no_memory_of_the_device() -> None:
    """A rank that ran out of it here would leave the others waiting for its sums."""
    words = Words(tokens(), torch.zeros(ROWS, WIDTH))
    first, second = (words.of(np.array([sample])) for sample in (0, 2))
    assert first is not None
    assert second is not None
    assert first.data_ptr() == second.data_ptr()


def test_the_table_of_a_model() -> None:
    sizes = {"vocab_size": 50, "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8}
    model = DistilBertForSequenceClassification(DistilBertConfig(**sizes))
    table = word_embeddings(model)
    assert table is model.distilbert.embeddings.word_embeddings.weight
    table.requires_grad_(False)
    assert word_embeddings(model) is None
    assert word_embeddings(nn.Linear(2, 2)) is None


class Texts(nn.Module):
    """Words and places, and a head; some of the loss may be about words that do not occur."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(ROWS, WIDTH), nn.Embedding(8, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, weight_of_all: float = 0.0) -> Tensor:
        found = self.head(self.words(ids) + self.places(torch.arange(len(ids)))).square().sum()
        return found + weight_of_all * self.words.weight.square().sum()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("about_all", [0.0, 0.5], ids=["of words", "of all"])
def test_ranks_sum_the_words_alone_if_the_others_are_zero(about_all: float, dtype: Any) -> None:
    model, world = Texts(), Likes()
    parameters = list(model.parameters())

    def made(world: Likes, words: nn.Parameter | None) -> FlatGradients:
        reduction = Reduction(world, tuple(parameters), words=words, dtype=dtype)
        return FlatGradients(parameters, FlatLayout([parameters]), reduction)

    whole, of_words = made(Likes(), None), made(world, model.words.weight)
    ids, rows = torch.tensor([3, 5, 3]), torch.tensor([2, 3, 5, 11])
    for step in range(3):
        world.begun.clear()
        for gradients in (whole, of_words):
            gradients.touch(rows)
            gradients.add(model(ids, about_all), first=True, last=True)
            gradients.finish()
        for value, expected in zip(of_words.flat.views, whole.flat.views, strict=True):
            # in bf16 the other rows of a first step are summed as they are
            torch.testing.assert_close(value, expected, rtol=1e-2 if dtype and about_all else 0, atol=0)
        by_rows = (len(rows), WIDTH) in [tuple(tensor.shape) for tensor in world.begun]
        assert by_rows == (not about_all or step == 0)


def summed_with_all_words(world: World) -> Tensor:
    """The words' gradient of a step whose loss is about words that do not occur, too."""
    model = Texts()
    parameters = list(model.parameters())
    reduction = Reduction(world, tuple(parameters), words=model.words.weight)
    gradients = FlatGradients(parameters, FlatLayout([parameters]), reduction)
    torch.manual_seed(world.rank)
    gradients.touch(torch.tensor([3, 5]))
    # numbers of many sizes, of which additions in another order have other bits
    shares = torch.randn(ROWS, WIDTH) * torch.logspace(-3, 3, WIDTH)
    loss = model(torch.tensor([3, 5, 3])) + (shares * model.words.weight).sum()
    gradients.add(loss, first=True, last=True)
    gradients.finish()
    return gradients.flat.views[0].clone()


def test_the_other_words_have_the_same_bits_on_all_ranks() -> None:
    first, *others = run_distributed(summed_with_all_words, 4)
    assert first.any(dim=1).all(), "rows were not summed"
    for words in others:
        assert torch.equal(words, first)


def test_a_step_without_any_gradient_shows_nothing_about_the_others() -> None:
    """As of a rank that has nothing but filler, or a head that begins at zero."""
    model, world = Texts(), Likes()
    parameters = list(model.parameters())
    made = [
        FlatGradients(parameters, FlatLayout([parameters]), Reduction(like, tuple(parameters), words=words))
        for like, words in ((Likes(), None), (world, model.words.weight))
    ]
    ids, rows = torch.tensor([3, 5, 3]), torch.tensor([2, 3, 5, 11])
    for share in (0.0, 1.0, 1.0):
        for gradients in made:
            gradients.touch(rows)
            gradients.add(share * model(ids, 0.5), first=True, last=True)
            gradients.finish()
        whole, of_words = (gradients.flat.views for gradients in made)
        for value, expected in zip(of_words, whole, strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=0)


def test_a_step_that_does_not_say_its_words_is_summed_whole() -> None:
    model, world = Texts(), Likes()
    parameters = list(model.parameters())
    gradients = FlatGradients(
        parameters, FlatLayout([parameters]), Reduction(world, tuple(parameters), words=model.words.weight)
    )
    for words in (torch.tensor([3, 5]), None):
        gradients.touch(words)
        gradients.add(model(torch.tensor([3, 5] if words is not None else [8, 9])), first=True, last=True)
        gradients.finish()
    table = next(bucket for bucket in gradients._sums.buckets if bucket.table is not None)
    assert world.begun[-1] is table.stretch
    assert model.words.weight.grad[8:10].all()


def test_token_types_are_words_where_the_tokenizer_gives_them() -> None:
    """GPT-2 looks its token types up among its words."""
    plain = Tokens(np.array([9, 8, 7], np.uint16), np.array([0, 3]), pad_id=6)
    table = torch.zeros(ROWS, WIDTH)

    def rows(**settings: object) -> list[int]:
        found = Words(dataclasses.replace(plain, **settings), table).of(np.array([0]))
        assert found is not None
        return found.tolist()

    assert rows() == [6, 7, 8, 9]
    assert rows(typed=True) == [0, 1, 6, 7, 8, 9]
    assert rows(typed=True, types=np.array([0, 0, 2], np.uint8), pad_type=3) == [0, 1, 2, 3, 6, 7, 8, 9]
