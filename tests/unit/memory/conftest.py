"""One process plans for all tests that ask for it: it imports torch and transformers once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.memory.predict import Predictor


@pytest.fixture(scope="session")
def predictor() -> Iterator[Predictor]:
    with Predictor() as made:
        made.start()
        yield made
