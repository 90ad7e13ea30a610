"""Images come as one array of one size; what does not fit is said, not stretched in silence."""

import numpy as np
import pytest

from paceline.contract.errors import DataError
from paceline.data.sources import read, read_unlabelled
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


def pictures(root, *arrays, suffix=".png", **settings):
    """A picture of each array, in two classes by turns."""
    for at, array in enumerate(arrays):
        picture(root / "ab"[at % 2] / f"{at}{suffix}", array, **settings)
    return root


def drawing(level, kind=np.uint8):
    """A square on nothing."""
    array = np.zeros((8, 8), dtype=kind)
    array[2:6, 2:6] = level
    return array


@pytest.mark.parametrize(
    ("largest", "bits", "levels"), [(3060, 12, 12), (250, 8, 1), (1000, 10, 4), (16383, 14, 64), (20000, 15, 79)]
)
def test_grey_that_uses_a_part_of_sixteen_bits_is_named(tmp_path, largest, bits, levels):
    part = DataPart(source=str(pictures(tmp_path, *(drawing(largest - at, np.uint16) for at in range(3)))))
    table = read(part)
    assert table.images.max() == largest >> 8
    (notice,) = table.notices
    assert f"3 grey picture(s) of 16 bits use {bits} of them" in notice
    assert f"of 256 levels {levels} are left" in notice
    assert f"--set data.image_bits={bits} " in notice
    said = []
    list(read_unlabelled(part, 2, tell=said.append))
    assert said == [notice], "pieces are counted together"
    whole = read(part.model_copy(update={"image_bits": bits}))
    assert (whole.images.max(), whole.notices) == (largest >> (bits - 8), ())


def test_bits_that_do_not_hold_a_picture_are_refused(tmp_path):
    part = DataPart(source=str(pictures(tmp_path, drawing(4095, np.uint16), drawing(4096, np.uint16))), image_bits=12)
    with pytest.raises(DataError, match=r"b/1.png: a pixel of over 12 bits") as caught:
        read(part)
    assert caught.value.fix == "--set data.image_bits=14"
    table = read(DataPart(source=str(pictures(tmp_path / "8", grey(1), grey(2))), image_bits=12))
    assert table.notices == ("data.image_bits = 12 has no effect: no picture is grey with 16 bits",)


def test_sixteen_bits_in_full_need_no_word(tmp_path):
    table = read(DataPart(source=str(pictures(tmp_path, drawing(60000, np.uint16), drawing(100, np.uint16)))))
    assert (table.images.max(), table.notices) == (234, ())


@pytest.mark.parametrize("array", [drawing(0.5, np.float32), drawing(70000, np.int32), drawing(-1, np.int32)])
def test_thirty_two_bits_say_what_they_hold(tmp_path, array):
    with pytest.raises(DataError, match=r"a/0.tif: pixels of 32 bits") as caught:
        read(DataPart(source=str(pictures(tmp_path, array, array, suffix=".tif"))))
    assert f"from {array.min():g} to {array.max():g}" in caught.value.why
    assert "0..255" in caught.value.fix


@pytest.mark.parametrize("level", [0, 255])
@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_a_drawing_that_is_in_transparency_alone_is_seen(tmp_path, level, mode):
    flat = np.full((8, 8), level, dtype=np.uint8)
    array = np.dstack([flat] * (len(mode) - 1) + [drawing(255)])
    table = read(DataPart(source=str(pictures(tmp_path, array, array))))
    assert set(table.images[0, 2:6, 2:6].ravel()) == {level}
    assert set(table.images[0, :2].ravel()) == {255 - level}
    assert "2 picture(s) whose transparency alone shows something" in table.notices[0]


def test_colours_below_transparency_are_read_as_they_are(tmp_path):
    array = np.dstack([drawing(200), grey(20), grey(30), drawing(255)])
    table = read(DataPart(source=str(pictures(tmp_path, array, array))))
    assert table.images[0, 0, 0].tolist() == [0, 20, 30]
    assert "2 picture(s) with transparent parts" in table.notices[0]
    opaque = np.dstack([drawing(200), grey(20), grey(30), grey(255)])
    assert read(DataPart(source=str(pictures(tmp_path / "opaque", opaque, opaque)))).notices == ()


def test_a_palette_with_transparency(tmp_path):
    for at in range(2):
        image = Image.fromarray(drawing(1), "P")
        image.putpalette([0, 0, 0, 0, 0, 0])
        (tmp_path / "ab"[at]).mkdir()
        image.save(tmp_path / "ab"[at] / "1.gif", transparency=0)
    table = read(DataPart(source=str(tmp_path)))
    assert (table.images[0, 0, 0].tolist(), table.images[0, 3, 3].tolist()) == ([255] * 3, [0] * 3)


@pytest.mark.parametrize("suffix", [".gif", ".tif", ".png", ".webp"])
def test_the_first_of_several_frames_is_read_and_said(tmp_path, suffix):
    frames = {"save_all": True, "append_images": [Image.fromarray(grey(250))]} | (
        {"lossless": True} if suffix == ".webp" else {}
    )
    table = read(DataPart(source=str(pictures(tmp_path, grey(7), grey(9), suffix=suffix, **frames))))
    assert table.images[:, 0, 0, 0].tolist() == [7, 9]
    assert "2 picture(s) with several frames or pages" in table.notices[0]


def test_a_picture_of_two_lenses_is_one_photograph(tmp_path):
    frames = {"format": "MPO", "save_all": True, "append_images": [Image.fromarray(colour(250))]}
    assert read(DataPart(source=str(pictures(tmp_path, colour(7), colour(9), suffix=".jpg", **frames)))).notices == ()


@pytest.mark.parametrize("suffix", [".jfif", ".JPE", ".dib", ".jp2", ".apng"])
def test_lesser_known_suffixes(tmp_path, suffix):
    form = {".jfif": "JPEG", ".JPE": "JPEG", ".dib": "DIB", ".jp2": "JPEG2000", ".apng": "PNG"}[suffix]
    table = read(DataPart(source=str(pictures(tmp_path, grey(7), grey(9), suffix=suffix, format=form))))
    assert (len(table), table.notices) == (2, ())


def test_cmyk_and_lossless_modes(tmp_path):
    white = np.zeros((8, 8, 4), dtype=np.uint8)
    for label in "ab":
        (tmp_path / label).mkdir()
        Image.fromarray(white, "CMYK").save(tmp_path / label / "1.jpg")
    assert read(DataPart(source=str(tmp_path))).images.min() > 250


def test_no_program_is_started_for_a_picture(tmp_path, monkeypatch):
    """PostScript is what Pillow has Ghostscript draw; a suffix does not keep it out."""
    from PIL import EpsImagePlugin

    def started(*_, **__):
        raise AssertionError("Ghostscript was started")

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n"
    pictures(tmp_path, grey(7), grey(9))
    (tmp_path / "a/2.png").write_bytes(eps)
    with pytest.raises(DataError, match=r"a/2.png: not a whole image"):
        read(DataPart(source=str(tmp_path)))
    rows = [{"image": {"bytes": eps, "path": None}, "label": label} for label in "ab"]
    with pytest.raises(DataError, match="rows:1, column 'image': not a whole image"):
        read(DataPart(source="unused.csv"), rows=rows)


@pytest.mark.parametrize(
    ("array", "level"),
    [(drawing(True, np.bool_), 255), (drawing(60000, np.uint16), 234), (np.dstack([drawing(9)] * 3 + [grey(255)]), 9)],
)
def test_arrays_of_other_kinds(array, level):
    rows = [{"image": array, "label": label} for label in "ab"]
    assert read(DataPart(source="unused.csv"), rows=rows).images.max() == level


def test_copies_of_images_are_called_so(tmp_path):
    from paceline.data.splits import duplicate_keys, split_rows
    from paceline.recipe.parts import SplitsPart

    table = read(DataPart(source=str(pictures(tmp_path, *[grey(7)] * 8, *[grey(9)] * 8))))
    divided = split_rows(table.labels, table.kind, duplicate_keys(table), None, SplitsPart(validation=3, test=0))
    assert any("copies of a sample are kept in one split" in notice for notice in divided.notices)
