"""Images come as one array of one size; what does not fit is said, not stretched in silence."""

import numpy as np
import pytest

from paceline.data.sources import read, read_unlabelled
from paceline.errors import DataError
from paceline.recipe.parts import DataPart

Image = pytest.importorskip("PIL.Image")


def picture(path, array, mode=None, **settings):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(array)
    (image.convert(mode) if mode else image).save(path, **settings)


def grey(value, side=8):
    return np.full((side, side), value, dtype=np.uint8)


def colour(red, side=8):
    return np.dstack([grey(red, side), grey(20, side), grey(30, side)])


def test_grey_stays_one_channel(tmp_path):
    picture(tmp_path / "a/1.png", grey(7))
    picture(tmp_path / "b/1.pgm", grey(9))
    picture(tmp_path / "b/2.png", grey(200), "1")
    table = read(DataPart(source=str(tmp_path)))
    assert table.images.shape == (3, 8, 8, 1)
    assert table.images.dtype == np.uint8
    assert table.images[:, 0, 0, 0].tolist() == [7, 9, 255]
    assert (table.texts, table.labels, table.kind) == (None, ["a", "b", "b"], "classification")
    assert table.columns == {"image": "image", "label": "label"}


def test_one_in_colour_makes_all_rgb(tmp_path):
    picture(tmp_path / "a/1.png", grey(7))
    picture(tmp_path / "b/1.png", colour(9))
    picture(tmp_path / "b/2.png", colour(9), "RGBA")
    picture(tmp_path / "b/3.bmp", colour(9), "P")
    table = read(DataPart(source=str(tmp_path)))
    assert table.images.shape == (4, 8, 8, 3)
    assert table.images[0, 0, 0].tolist() == [7, 7, 7]
    assert table.images[1, 0, 0].tolist() == table.images[2, 0, 0].tolist() == [9, 20, 30]


def test_sixteen_bits_are_scaled(tmp_path):
    picture(tmp_path / "a/1.png", np.full((8, 8), 0x8000, dtype=np.uint16))
    picture(tmp_path / "b/1.png", grey(3))
    assert read(DataPart(source=str(tmp_path))).images[0, 0, 0, 0] == 0x80


def test_photographs_are_turned_upright(tmp_path):
    array = grey(0)
    array[0] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    picture(tmp_path / "a/1.png", array, exif=exif)
    picture(tmp_path / "b/1.png", array)
    images = read(DataPart(source=str(tmp_path))).images
    assert (images[0, ::-1, ::-1] == images[1]).all()


def test_resizing(tmp_path):
    picture(tmp_path / "a/1.png", grey(7, 30))
    picture(tmp_path / "b/1.png", grey(9, 10))
    table = read(DataPart(source=str(tmp_path), image_size=16))
    assert table.images.shape == (2, 16, 16, 1)
    assert table.images[:, 3, 3, 0].tolist() == [7, 9]


def test_different_sizes_are_an_error(tmp_path):
    picture(tmp_path / "a/1.png", grey(7, 30))
    picture(tmp_path / "b/1.png", grey(9, 10))
    with pytest.raises(DataError, match=r"b/1.png: the images are of different sizes") as caught:
        read(DataPart(source=str(tmp_path), on_bad_row="skip", bad_rows_allowed=1.0))
    assert "10 × 10 pixels, the first 30 × 30" in caught.value.why
    assert caught.value.fix.startswith("--set data.image_size=10")


@pytest.mark.parametrize("cut", [0, 20, 80])
def test_damaged_image(tmp_path, cut):
    noise = np.random.default_rng(0).integers(0, 256, (8, 8), dtype=np.uint8)
    picture(tmp_path / "a/1.png", noise)
    picture(tmp_path / "b/1.png", noise)
    picture(tmp_path / "b/2.png", noise)
    whole = (tmp_path / "b/1.png").read_bytes()
    (tmp_path / "b/1.png").write_bytes(whole[:cut])
    with pytest.raises(DataError, match=r"b/1.png: not a whole image"):
        read(DataPart(source=str(tmp_path)))
    table = read(DataPart(source=str(tmp_path), on_bad_row="skip", bad_rows_allowed=0.5))
    assert table.labels == ["a", "b"]
    assert (table.images[0] == table.images[1]).all()


@pytest.mark.filterwarnings("ignore")
def test_a_picture_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    picture(tmp_path / "a/1.png", grey(7, 30))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(DataError, match=r"a/1.png: not a whole image"):
        read(DataPart(source=str(tmp_path)))


def test_images_in_splits(tmp_path):
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            picture(tmp_path / split / label / "1.jpg", colour(9))
    table = read(DataPart(source=str(tmp_path)))
    assert table.splits == ["test", "test", "train", "train"]
    assert table.images.shape == (4, 8, 8, 3)


def test_images_in_memory():
    rows = [{"image": Image.fromarray(colour(n)), "label": "odd" if n % 2 else "even"} for n in range(4)]
    table = read(DataPart(source="unused.csv"), rows=rows)
    assert table.images[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    (unlabelled,) = read_unlabelled(DataPart(source="unused.csv"), 9, rows=rows, tell=print)
    assert unlabelled.rows[0] == {"label": "even"}, "an image is not held twice"
    assert any("image column: 'image' (guessed" in notice for notice in table.notices)
    rows = [{"img": grey(n), "label": n % 2} for n in range(4)]
    assert read(DataPart(source="unused.csv"), rows=rows).images.shape == (4, 8, 8, 1)
    assert read(DataPart(source="unused.csv", image_size=16), rows=rows).images.shape == (4, 16, 16, 1)
    with pytest.raises(DataError, match="rows:5, column 'img': no image"):
        read(DataPart(source="unused.csv"), rows=[*rows, {"img": None, "label": 1}])


def test_images_in_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    rows = []
    for n in range(3):
        picture(tmp_path / "x.png", grey(n))
        rows.append({"image": {"bytes": (tmp_path / "x.png").read_bytes(), "path": "x.png"}, "label": n % 2})
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert read(DataPart(source=str(tmp_path / "a.parquet"))).images[:, 0, 0, 0].tolist() == [0, 1, 2]
