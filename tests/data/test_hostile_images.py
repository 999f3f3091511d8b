"""Image files from strangers: bounded memory, no other decoders, no hanging, nothing skipped silently."""

import io
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.cli import app
from steadygaze.data import decoding as reader
from steadygaze.data.decoding import MAX_ASPECT, MAX_PIXELS, MAX_SIDE
from steadygaze.data.images import (
    file_hash,
    find_images,
    image_size,
    read_image,
)
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import ImageError


def png_header(width: int, height: int, *, bits: int = 8, color: int = 0) -> bytes:
    """A PNG that claims a size and holds almost no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, bits, color, 0, 0, 0)
    data = zlib.compress(b"\0" * 100)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


@pytest.fixture
def never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Image.Image) -> None:
        raise AssertionError("pixels were decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)


@pytest.mark.parametrize(
    ("width", "height", "bits", "message"),
    [
        (1, 60_000, 8, rf"at most {MAX_ASPECT}:1, got 1 x 60,000"),
        (60_000, 1, 8, rf"at most {MAX_ASPECT}:1, got 60,000 x 1"),
        (1_000, 70_000, 8, rf"at most {MAX_SIDE:,} pixels, got 1,000 x 70,000"),
        (13_300, 13_300, 16, rf"at most {MAX_PIXELS:,} pixels"),
        (60_000, 60_000, 8, rf"at most {MAX_PIXELS:,} pixels"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_size_is_checked_before_decoding(never_decoded, tmp_path, width, height, bits, message):
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(width, height, bits=bits))
    for source in (path, path.read_bytes()):
        for read in (read_image, image_size):
            with pytest.raises(ImageError, match=message):
                read(source)


def test_16_bits_are_converted_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(reader, "ROWS_AT_ONCE", 64)
    values = np.random.default_rng(0).integers(0, 65536, (37, 20), dtype=np.uint16)
    expected = (values.astype(np.float64) / 65535 * 255).round().astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(values).save(buffer, "PNG")
    assert np.array_equal(np.asarray(read_image(buffer.getvalue()))[..., 0], expected)


def test_images_in_memory_are_bounded_too():
    preprocess = Preprocess.resize_and_crop((32, 32))
    with pytest.raises(ImageError, match="aspect ratio"):
        preprocess(Image.new("RGB", (1, 60_000)))
    with pytest.raises(ImageError, match="aspect ratio"):
        preprocess.mask(Image.new("L", (60_000, 1)))


@pytest.mark.parametrize("suffix", ["jpg", "eps", "png"])
def test_postscript_never_reaches_ghostscript(monkeypatch, tmp_path, suffix):
    def ghostscript(*args: object, **options: object) -> None:
        raise AssertionError("Ghostscript was started")

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", ghostscript)
    path = tmp_path / f"x.{suffix}"
    Image.new("RGB", (8, 8)).save(path, "EPS")
    with pytest.raises(ImageError, match=r"x\..*expected one of the formats JPEG, PNG"):
        read_image(path)


def test_avif_is_found_and_read(tmp_path):
    pytest.importorskip("PIL.AvifImagePlugin")
    if "AVIF" not in Image.registered_extensions().values():
        pytest.skip("this build of PIL has no AVIF")
    Image.new("RGB", (40, 30), "red").save(tmp_path / "a.avif")
    assert find_images([tmp_path]) == [tmp_path / "a.avif"]
    assert read_image(tmp_path / "a.avif").size == (40, 30)


def hostile_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    Image.new("RGB", (40, 30), "red").save(folder / "good.png")
    (folder / "bomb.png").write_bytes(png_header(1, 60_000))
    os.mkfifo(folder / "fifo.jpg")
    (folder / "dangling.jpg").symlink_to("nowhere.jpg")
    (folder / "loop.jpg").symlink_to("loop.jpg")
    return folder


MESSAGES = {
    "bomb.png": "aspect ratio",
    "fifo.jpg": "got a FIFO",
    "dangling.jpg": "a link to nowhere.jpg, which does not exist",
    "loop.jpg": "levels of symbolic links",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_no_image_is_named(tmp_path, name):
    path = hostile_folder(tmp_path / "data") / name
    assert path in find_images([tmp_path])
    with pytest.raises(ImageError, match=rf"{name}: .*{MESSAGES[name]}"):
        read_image(path)
    if name != "bomb.png":
        with pytest.raises(ImageError, match=name):
            file_hash(path)


def test_links_that_are_not_followed_are_reported(tmp_path):
    Image.new("RGB", (4, 3)).save(tmp_path / "a.png")
    (tmp_path / "up").symlink_to(tmp_path)
    (tmp_path / "cats").symlink_to(tmp_path / "gone")
    with pytest.warns(UserWarning) as warned:
        assert find_images([tmp_path]) == [tmp_path / "a.png"]
    messages = sorted(str(warning.message) for warning in warned)
    assert "cats: a link to" in messages[0] and "up: a link to a parent folder" in messages[1]


def test_explain_names_every_bad_file_and_explains_the_rest(tmp_path):
    folder = hostile_folder(tmp_path / "data")
    options = ["--model", "embedded", "--method", "ixg", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["explain", str(folder), *options], env={"COLUMNS": "400"})
    assert done.exit_code == 1
    assert all(name in done.output and message in done.output for name, message in MESSAGES.items())
    assert any("good" in file.name for file in (tmp_path / "out").iterdir())


@pytest.mark.full
@pytest.mark.parametrize("letter", ["x", "\u00e4"])
def test_long_file_names_fit_the_overlays(tmp_path, letter):
    folder = tmp_path / "data"
    folder.mkdir()
    length = 250 // len(letter.encode())
    for end in "ab":
        Image.new("RGB", (40, 30), "red").save(folder / f"{letter * (length - 1)}{end}.png")
    options = ["--model", "embedded", "--method", "ixg", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["explain", str(folder), *options])
    assert done.exit_code == 0, done.output
    assert len([file for file in (tmp_path / "out").iterdir() if letter * 20 in file.name]) == 2


def test_verify_and_stress_use_the_rest(tmp_path):
    hostile_folder(tmp_path / "data" / "cat")
    loaded = sg.load_model("embedded")
    rows = sg.verify(loaded, tmp_path / "data", "ixg", metrics=["insertion_accuracy"])
    assert {row["image"] for row in rows} == {"cat/good.png"}
    rows = sg.stress(loaded, tmp_path / "data", "corruptions", corruptions="fog", severities=[1])
    assert len(rows) > 0


def test_an_error_of_preprocessing_names_the_file(tmp_path, monkeypatch):
    def fails(image: Image.Image) -> Image.Image:
        raise MemoryError

    monkeypatch.setattr(Preprocess, "_geometry", staticmethod(fails))
    Image.new("RGB", (40, 30)).save(tmp_path / "a.png")
    with pytest.raises(ImageError, match=r"a\.png: cannot be preprocessed, size 40 x 30 \(MemoryError\)"):
        Preprocess.resize_and_crop((32, 32))(read_image(tmp_path / "a.png"))
