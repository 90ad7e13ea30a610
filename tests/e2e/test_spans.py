"""The run's own spans: what a profiler would see of a run, in order and nested."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import final

from paceline.contract.spans import NAMES, Sink, listening
from paceline.recipe import Recipe
from paceline.verbs.train import train
from tests.testing.tiny import tiny_bert_config


@final
class Tree(Sink):
    """Every span with those that it is in, outermost first; a run on a CPU has one thread of them."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.found: list[tuple[str, ...]] = []
        self.steps: list[tuple[str, int]] = []

    def begin(self, name: str, step: int | None) -> None:
        self.open.append(name)
        self.found.append(tuple(self.open))
        if step is not None:
            self.steps.append((name, step))

    def end(self, name: str) -> None:
        assert self.open.pop() == name, "not nested"

    def mark(self, name: str, step: int | None) -> None: ...


def test_a_run_is_cut_into_named_stretches(tmp_path: Path) -> None:
    recipe = Recipe.parse(
        {
            "device": "cpu",
            "model": {"config": tiny_bert_config()},
            "data": {
                "source": "builtin:random",
                "random": {"samples": 48, "length": 8, "vocabulary": 1000},
                "splits": {"validation": 16, "test": 0},
                "max_length": 16,
            },
            "loop": {"epochs": 2, "batch_size": 16, "micro_batch_size": 8, "checkpoint_every": "never"},
        }
    )
    tree = Tree()
    with listening(tree):
        train(recipe, out=tmp_path / "run")
    assert tree.open == [], "what begins ends"
    counts = Counter(tree.found)
    assert [step for name, step in tree.steps if name == "step"] == [1, 2, 3, 4]
    assert [step for name, step in tree.steps if name == "epoch"] == [1, 3]
    for inner, times in (("data wait", 8), ("forward", 8), ("backward", 8), ("clip", 4), ("update", 4)):
        assert counts["epoch", "step", inner] == times, inner
    assert sum(times for names, times in counts.items() if names[-1] == "evaluate") == 2
    assert {name for names in counts for name in names} <= set(NAMES)
    # an epoch's last evaluation belongs to it
    assert counts["epoch", "evaluate"] == 2
    first = tree.found.index(("epoch", "step"))
    # a micro-batch is asked for before the one ahead of it, which may be the step's last, is computed
    batches, passes = [("data wait",), ("data wait", "copy")] * 2, [("forward",), ("backward",)] * 2
    assert [names[2:] for names in tree.found[first + 1 : first + 11]] == [*batches, *passes, ("clip",), ("update",)]
