"""The sample of slow tests that a continuous integration run takes."""

from __future__ import annotations

from tests.sampling import choose_files

FILES = [f"tests/e2e/test_{number:02}.py" for number in range(69)]
COMMITS = [f"{number:040x}" for number in range(40)]


def test_samples_of_a_few_commits_cover_every_file() -> None:
    samples = [choose_files(FILES, 4, commit) for commit in COMMITS]
    assert {len(sample) for sample in samples} <= {17, 18}
    assert len({frozenset(sample) for sample in samples}) == 4, "the sample never changes"
    assert set().union(*samples) == set(FILES)


def test_a_commit_has_one_sample() -> None:
    assert choose_files(FILES, 4, COMMITS[0]) == choose_files(FILES, 4, COMMITS[0])


def test_one_file_in_one_is_all() -> None:
    assert choose_files(FILES, 1, COMMITS[0]) == set(FILES)
