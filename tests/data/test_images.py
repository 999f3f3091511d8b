"""Image files of every kind."""

import io

import numpy as np
import pytest
from PIL import Image

from steadygaze.data.images import find_images, image_size, read_image
from steadygaze.errors import ImageError, InputError, SteadygazeError

COLORS = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [255, 255, 255]]], np.uint8)


def test_rgb_is_read_as_it_is(tmp_path):
    Image.fromarray(COLORS).save(tmp_path / "a.png")
    assert np.array_equal(read_image(tmp_path / "a.png"), COLORS)


def test_gray_becomes_three_equal_channels(tmp_path):
    Image.fromarray(np.array([[0, 128], [200, 255]], np.uint8)).save(tmp_path / "a.png")
    pixels = np.asarray(read_image(tmp_path / "a.png"))
    assert pixels[..., 0].tolist() == [[0, 128], [200, 255]] and (pixels == pixels[..., :1]).all()


def test_transparent_parts_become_white(tmp_path):
    pixels = np.array([[[10, 20, 30, 255], [10, 20, 30, 0]]], np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    assert np.asarray(read_image(tmp_path / "a.png")).tolist() == [[[10, 20, 30], [255, 255, 255]]]


def test_palette_with_and_without_transparency(tmp_path):
    palette = Image.fromarray(COLORS).convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    palette.save(tmp_path / "a.png")
    assert np.array_equal(read_image(tmp_path / "a.png"), COLORS)
    palette.save(tmp_path / "b.png", transparency=palette.getpixel((0, 0)))
    assert np.asarray(read_image(tmp_path / "b.png"))[0].tolist() == [[255, 255, 255], [0, 255, 0]]


def test_sixteen_bits_keep_their_scale(tmp_path):
    Image.fromarray(np.array([[0, 32768], [16384, 65535]], np.uint16)).save(tmp_path / "a.png")
    assert np.asarray(read_image(tmp_path / "a.png"))[..., 0].tolist() == [[0, 128], [64, 255]]


def test_float_tiff(tmp_path):
    Image.fromarray(np.array([[0.0, 0.5]], np.float32)).save(tmp_path / "a.tif")
    assert np.asarray(read_image(tmp_path / "a.tif"))[..., 0].tolist() == [[0, 128]]


def test_exif_rotation_is_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    Image.fromarray(COLORS).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(read_image(tmp_path / "a.png"), np.rot90(COLORS, -1))
    assert image_size(tmp_path / "a.png") == read_image(tmp_path / "a.png").size


def _jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(
        buffer, "JPEG"
    )
    return buffer.getvalue()


@pytest.mark.parametrize(
    "content", [b"", b"no image at all", _jpeg()[:900], b"\x89PNG\r\n\x1a\n" + b"\0" * 40]
)
def test_broken_files_are_named(tmp_path, content):
    (tmp_path / "broken.jpg").write_bytes(content)
    with pytest.raises(ImageError, match=r"broken\.jpg") as caught:
        read_image(tmp_path / "broken.jpg")
    assert isinstance(caught.value, SteadygazeError) and isinstance(caught.value, ValueError)


def test_missing_file(tmp_path):
    with pytest.raises(ImageError, match="no such file"):
        read_image(tmp_path / "none.png")


def test_folders_are_searched_in_order_and_each_file_comes_once(tmp_path):
    for name in ("b.png", "a.JPG", "deep/c.webp", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    found = find_images([tmp_path, tmp_path / "b.png", tmp_path / "named.raw"])
    assert [file.name for file in found] == ["a.JPG", "b.png", "c.webp", "named.raw"]


def test_a_folder_without_images_is_refused(tmp_path):
    with pytest.raises(InputError, match="found none"):
        find_images([tmp_path])
