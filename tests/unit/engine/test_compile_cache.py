"""Where compiled kernels are kept, and what is noted of them; tests/parity/test_compile.py finds kernels again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.engine.compile_cache import is_kept, kept_cache, note_kept
from tests.parity.driving import assembled, recipe
from tests.parity.reference import tiny_model


def test_kernels_are_kept_where_the_user_said_or_with_our_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    ours = tmp_path / "ours"
    with kept_cache(ours):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(ours)
        assert ours.stat().st_mode & 0o777 == 0o700, "what torch unpickles can be written by others"
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "theirs"))
    with kept_cache(ours):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "theirs")


def test_a_note_tells_whether_these_blocks_were_compiled_before(tmp_path: Path) -> None:
    build = assembled(tiny_model(), recipe()).build
    assert not is_kept(build, tmp_path)
    note_kept(build, tmp_path)
    assert is_kept(assembled(tiny_model(), recipe()).build, tmp_path)
    assert not is_kept(assembled(tiny_model(dropout=0.3), recipe()).build, tmp_path)
