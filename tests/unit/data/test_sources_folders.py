"""A folder loses nothing in silence: links to nothing, links out of it, and entries that no reader takes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.contract.errors import DataError
from paceline.data.sources import file_states, read, read_unlabelled, source_fingerprint
from paceline.recipe.parts import DataPart


def tree(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}")
    return root


def linked(root: Path, store: Path, count: int = 4) -> Path:
    """A folder per class, whose files are links into ``store``."""
    for label in ("bad", "good"):
        (root / label).mkdir(parents=True)
        for at in range(count):
            tree(store, f"{label}{at}.txt")
            os.symlink(os.path.relpath(store / f"{label}{at}.txt", root / label), root / label / f"{at}.txt")
    return root


def part(root: Path, **settings: object) -> DataPart:
    return DataPart.model_validate({"source": str(root), **settings})


def test_links_out_of_the_folder_are_followed_and_counted(tmp_path: Path) -> None:
    root = linked(tmp_path / "data", tmp_path / "store")
    table = read(part(root))
    assert table.texts is not None
    assert len(table) == 8
    assert table.texts[0] == "text of bad0.txt"
    assert table.notices == (
        f"{root}: 8 links lead out of the folder, such as bad/0.txt -> {tmp_path / 'store/bad0.txt'}",
    )


def test_links_within_the_folder_are_files_like_others(tmp_path: Path) -> None:
    root = tree(tmp_path / "data", "a/1.txt", "b/1.txt")
    os.symlink("1.txt", root / "a/2.txt")
    assert (len(read(part(root))), read(part(root)).notices) == (3, ())


def test_folders_of_classes_may_be_links(tmp_path: Path) -> None:
    tree(tmp_path / "store", "a/1.txt", "b/1.txt")
    (tmp_path / "data").mkdir()
    for label in ("a", "b"):
        os.symlink(tmp_path / "store" / label, tmp_path / "data" / label)
    table = read(part(tmp_path / "data"))
    assert table.labels == ["a", "b"]
    assert "2 links lead out" in table.notices[0]


@pytest.mark.parametrize("labelled", [True, False])
def test_a_link_to_nothing_is_a_row_that_cannot_be_used(tmp_path: Path, labelled: bool) -> None:
    root, store = linked(tmp_path / "data", tmp_path / "store"), tmp_path / "store"
    for at in range(3):
        (store / f"good{at}.txt").unlink()

    def notices(**settings: object) -> tuple[str, ...]:
        said: list[str] = []
        if labelled:
            return read(part(root, **settings)).notices
        tables = list(read_unlabelled(part(root, **settings), 9, tell=said.append))
        assert [len(table) for table in tables] == [5]
        return tuple(said)

    with pytest.raises(DataError, match=r"good/0.txt: a link to nothing") as caught:
        notices()
    assert "../../store/good0.txt, which is not there; so do 2 more links" in caught.value.why
    assert any(
        "dropped 3 of 8 rows (37.50%): 3 × a link to nothing" in notice
        for notice in notices(on_bad_row="skip", bad_rows_allowed=0.5)
    )


def test_a_folder_of_links_to_nothing_alone(tmp_path: Path) -> None:
    root = linked(tmp_path / "data", tmp_path / "store")
    for path in (tmp_path / "store").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"bad/0.txt: a link to nothing") as caught:
        read(part(root, on_bad_row="skip", bad_rows_allowed=1.0))
    assert "7 more links" in caught.value.why


def test_the_folder_of_a_class_may_be_a_link_to_nothing(tmp_path: Path) -> None:
    root = tree(tmp_path / "data", "a/1.txt", "b/1.txt")
    os.symlink("/nowhere/at/all", root / "c")
    os.symlink("c/d", root / "loop")
    os.symlink("loop", root / "a/loop")
    with pytest.raises(DataError, match="c: a link to nothing"):
        read(part(root))


def test_a_link_that_leads_to_itself_is_one_to_nothing(tmp_path: Path) -> None:
    root = tree(tmp_path / "data", "a/1.txt", "b/1.txt")
    os.symlink("2.txt", root / "a/2.txt")
    with pytest.raises(DataError, match=r"a/2.txt: a link to nothing"):
        read(part(root))


def test_the_cache_sees_links_break(tmp_path: Path) -> None:
    root = linked(tmp_path / "data", tmp_path / "store")
    whole, states = source_fingerprint(part(root)), file_states(part(root))
    (tmp_path / "store/good0.txt").unlink()
    broken = source_fingerprint(part(root))
    assert file_states(part(root)) != states
    (root / "good/0.txt").unlink()
    assert len({whole, broken, source_fingerprint(part(root))}) == 3


@pytest.mark.parametrize("target", ["passwd", "id_rsa", "token.json", "secret.png"])
def test_a_link_out_of_the_folder_to_a_file_of_another_kind_is_refused(tmp_path: Path, target: str) -> None:
    root = tree(tmp_path / "data", "a/1.txt", "b/1.txt")
    os.symlink(tree(tmp_path / "home", target) / target, root / "a/2.txt")
    with pytest.raises(DataError, match="a link to a file of another kind") as caught:
        read(part(root, on_bad_row="skip"))
    assert str(tmp_path / "home" / target) in caught.value.why


@pytest.mark.parametrize("digest", ["0" * 40, "ab" * 32, "cd" * 15])
def test_stores_by_content_are_read(tmp_path: Path, digest: str) -> None:
    """As the Hub's cache, git-annex and DVC have them."""
    root = tree(tmp_path / "snapshots/1", "a/1.txt", "b/1.txt")
    os.symlink(tree(tmp_path / "blobs", digest) / digest, root / "a/2.txt")
    assert len(read(part(root))) == 3


def test_pipes_are_counted(tmp_path: Path) -> None:
    root = tree(tmp_path / "data", "a/1.txt", "b/1.txt")
    os.mkfifo(root / "a/2.txt")
    assert read(part(root)).notices == (f"{root}: ignored 1 pipe(s) or device(s)",)


def test_tables_beside_classes_are_counted(tmp_path: Path) -> None:
    root = tree(tmp_path / "data", "a/1.txt", "b/1.txt", "train.csv")
    assert read(part(root)).notices == (f"{root}: ignored 1 table(s) beside the class folders",)


def test_splits_without_classes_are_no_classes(tmp_path: Path) -> None:
    root = tree(tmp_path / "data", "train/1.txt", "test/1.txt")
    with pytest.raises(DataError, match="no folder per class below the splits"):
        read(part(root))
    assert len(next(read_unlabelled(part(root), 9, tell=print))) == 2
    tree(root, "exam/1.txt")
    assert read(part(root)).labels == ["exam", "test", "train"], "test may be a class among others"


@pytest.mark.parametrize("name", ["validation", "test"])
def test_a_folder_of_splits_is_no_split(tmp_path: Path, name: str) -> None:
    root = tree(tmp_path / "data", "train/a/1.txt", "train/b/1.txt", f"{name}/a/2.txt", f"{name}/b/2.txt")
    with pytest.raises(DataError, match="holds several splits") as caught:
        read(part(root / "train", **{name: str(root)}))
    assert f"data.{name}={root}/{name}" in caught.value.fix
    assert read(part(root / "train", **{name: str(root / name)})).splits == ["train"] * 2 + [name] * 2


def test_a_class_of_which_nothing_is_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="all rows are of one class") as caught:
        read(part(tree(tmp_path / "data", "a/1.txt", "a/2.txt", "b/1.md", "b/2.md")))
    assert "ignored 2 .md file(s)" in caught.value.why


@pytest.mark.parametrize(
    ("names", "why", "fix"),
    [
        ((), "no files", "put data there"),
        (("a/1.heic", "b/1.heic", "b/2.heic"), "3 files (3 .heic), such as a/1.heic", "mogrify"),
        (("a/1.md", "README"), "2 files (1 suffixless, 1 .md), such as README", ".txt"),
        (("a/1", "b/2"), "2 files (2 suffixless)", "give texts the suffix .txt"),
        (("pictures/train/cat/1.png",), "1 file (1 .png), such as pictures/train/cat/1.png", "--data {root}/pictures"),
        (("x/y/cat/1.png", "x/y/dog/1.png"), "2 files", "--data {root}/x/y"),
        (("cat/x/1.png", "dog/y/1.png"), "such as cat/x/1.png", "move the files up"),
        (("x/reviews.csv",), "such as x/reviews.csv", "--data {root}/x"),
        (("archive.zip",), "1 .zip", "unzip {root}/archive.zip -d {root}"),
        (("config.json", "model.safetensors"), "1 .json", "--model {root}"),
    ],
)
def test_an_error_for_nothing_to_read_names_what_is_there(
    tmp_path: Path, names: tuple[str, ...], why: str, fix: str
) -> None:
    root = tmp_path / "data"
    root.mkdir()
    tree(root, *names)
    with pytest.raises(DataError, match="no texts, images or tables found") as caught:
        read(part(root))
    assert why in caught.value.why
    assert fix.format(root=root) in caught.value.fix
