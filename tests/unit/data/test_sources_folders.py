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
        (("a/1", "b/2", "b/Main.java"), "3 files (2 suffixless, 1 .java)", "give texts the suffix .txt"),
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


@pytest.mark.parametrize(
    "names",
    [
        ("alt.atheism/49960", "alt.atheism/51060", "sci.med/58043"),
        ("spam/0001.bfc8d64d12b325ff385cca8d07b84288", "spam/2.1", "ham/00001.1a31cc283af0060967a233d26548a6ce"),
    ],
)
def test_texts_whose_files_have_no_suffix_are_read_with_a_notice(tmp_path: Path, names: tuple[str, ...]) -> None:
    root = tree(tmp_path / "data", *names)
    table = read(part(root))
    assert table.texts is not None
    assert sorted(table.texts) == sorted(f"text of {name}" for name in names)
    assert table.notices == (f"{root}: reads 3 files without a suffix as texts",)
    assert source_fingerprint(part(root)) != source_fingerprint(part(tree(tmp_path / "other", *names, "sci.med/3")))


def test_pictures_whose_files_have_no_suffix_are_read_with_a_notice(tmp_path: Path) -> None:
    from PIL import Image

    for at, label in enumerate(("cat", "dog")):
        (tmp_path / label).mkdir()
        Image.new("L", (4, 4), 100 * at).save(tmp_path / label / "1f3a", "PNG")
    table = read(part(tmp_path))
    assert table.labels == ["cat", "dog"]
    assert table.notices == (f"{tmp_path}: reads 2 files without a suffix as images",)


def test_files_without_a_suffix_that_are_no_samples_are_named(tmp_path: Path) -> None:
    tree(tmp_path, "a/1", "b/1")
    (tmp_path / "b/2").write_bytes(b"\x7fELF\0\0\0")
    with pytest.raises(DataError, match="no texts, images or tables found") as caught:
        read(part(tmp_path))
    assert "3 files (3 suffixless), such as a/1" in caught.value.why


def test_folders_with_a_split_as_a_word_are_splits(tmp_path: Path) -> None:
    root = tree(tmp_path, *(f"20news-bydate-{split}/{label}/1" for split in ("train", "test") for label in ("a", "b")))
    table = read(part(root))
    assert table.splits is not None
    assert [*zip(table.splits, table.labels or (), strict=True)] == [
        *(("test", "a"), ("test", "b"), ("train", "a"), ("train", "b"))
    ]
    assert f"{root}: reads 20news-bydate-test as test, 20news-bydate-train as train" in table.notices


def test_classes_with_a_split_as_a_word_stay_classes(tmp_path: Path) -> None:
    assert read(part(tree(tmp_path, "test_drive/1.txt", "train_ride/1.txt"))).labels == ["test_drive", "train_ride"]


@pytest.mark.parametrize("link", ["b", "b/2"])
def test_no_file_without_a_suffix_is_read_out_of_the_folder(tmp_path: Path, link: str) -> None:
    root = tree(tmp_path / "data", "a/1", "b/1" if "/" in link else "c/1")
    tree(tmp_path / "home", "keys/id_rsa", "keys/known")
    (root / link).symlink_to(tmp_path / "home/keys" / ("id_rsa" if "/" in link else ""))
    with pytest.raises(DataError, match="a link to a file of another kind, out of the folder"):
        read(part(root))
    (root / link).unlink()
    (root / "a/2").symlink_to(
        tree(tmp_path, "store/0123456789abcdef0123456789abcdef") / f"store/{'0123456789abcdef' * 2}"
    )
    table = read(part(root))
    assert len(table) == 3
