"""Image files on the page: each gives what `steadygaze explain` gives for it, or words."""

import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, features
from typer.testing import CliRunner

import steadygaze as sg
from benchmarks.page_client import Visitor
from helpers.page import served
from helpers.tiers import tiered
from steadygaze.app.viewer import Viewer
from steadygaze.cli import app as command

pytest.importorskip("gradio")
CLASSES = sg.load_model("embedded").class_names or ()
METHODS = ["gae", "gaze_removal"]
RAMP = np.linspace(0, 1, 48)[:, None] * np.linspace(0.2, 1, 40)
COLORS = np.stack([RAMP, RAMP[::-1], np.roll(RAMP, 20, 1)], -1)
RGB = Image.fromarray((255 * COLORS).astype(np.uint8))


def rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def transparent_palette(file: Path) -> None:
    RGB.quantize(16).save(file, transparency=3)


def animated(file: Path) -> None:
    RGB.save(file, save_all=True, append_images=[Image.new("RGB", RGB.size, "red")], duration=100)


GOOD: dict[str, Callable[[Path], None]] = {
    "plain.png": RGB.save,
    "gray16.png": lambda file: Image.fromarray((65535 * RAMP).astype(np.uint16)).save(file),
    "rgba.png": lambda file: Image.merge("RGBA", (*RGB.split(), RGB.getchannel(0))).save(file),
    "palette.png": transparent_palette,
    "cmyk.jpg": lambda file: RGB.convert("CMYK").save(file),
    "rotated.jpg": lambda file: RGB.save(file, exif=rotated()),
    "animated.webp": animated,
    "animated.gif": animated,
    "still.webp": RGB.save,
    "gray16.tiff": lambda file: Image.fromarray((65535 * RAMP).astype(np.uint16)).save(file),
}
if features.check("avif"):
    GOOD["still.avif"] = RGB.save


def png_header(width: int, height: int) -> bytes:
    """A PNG file of this size, without pixels."""
    chunks = {b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT": b"", b"IEND": b""}
    packed = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


def truncated(file: Path) -> None:
    RGB.save(file)
    file.write_bytes(file.read_bytes()[:400])


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "text.png": (lambda file: file.write_text("no image"), "does not decode as an image"),
    "empty.png": (lambda file: file.write_bytes(b""), "does not decode as an image"),
    "truncated.jpg": (truncated, "does not decode as an image"),
    "large.png": (lambda file: file.write_bytes(png_header(20_000, 20_000)), "at most 89,000,000 pixels"),
    "line.png": (Image.new("L", (1, 60_000)).save, "aspect ratio of at most 100:1"),
    "drawing.svg": (lambda file: file.write_text("<svg/>"), "does not decode as an image"),
}


@pytest.fixture(scope="module")
def visitor() -> Iterator[Visitor]:
    with served(sg.load_model("embedded")) as address:
        yield Visitor(address)


@pytest.fixture(scope="module")
def by_command(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """The folder of all good files, and what the command writes about them."""
    folder, out = tmp_path_factory.mktemp("images"), tmp_path_factory.mktemp("out")
    for name, write in GOOD.items():
        write(folder / name)
    files = [str(folder / name) for name in GOOD]
    options = ["--model", "embedded", "--method", ",".join(METHODS), "--batch-size", "1", "--out", str(out)]
    result = CliRunner().invoke(command, ["explain", *files, *options])
    assert result.exit_code == 0, result.output
    return folder, dict(np.load(out / "scores.npz"))


@pytest.mark.parametrize("name", tiered(GOOD, ["plain.png", "rotated.jpg"]))
def test_an_image_gives_what_it_gives_on_the_command_line(
    visitor: Visitor, by_command: tuple[Path, dict[str, np.ndarray]], name: str
) -> None:
    folder, expected = by_command
    row = list(GOOD).index(name)
    answer = visitor.explain(visitor.upload(folder / name), *METHODS)
    assert answer.error is None and len(answer.data[1]) == len(METHODS)
    logits = expected["logits"][row].astype(float)
    probabilities = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    for entry in answer.data[0]["confidences"]:
        index = CLASSES.index(entry["label"])
        assert entry["confidence"] == pytest.approx(probabilities[index], abs=1e-6)
    maps = Viewer(sg.load_model("embedded")).maps(folder / name, METHODS)
    for method in METHODS:
        np.testing.assert_allclose(
            maps[method].scores[0].numpy(), expected[method][row], rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_gets_words(visitor: Visitor, tmp_path: Path, name: str) -> None:
    write, words = BAD[name]
    write(tmp_path / name)
    image = visitor.upload(tmp_path / name)
    for answer in (visitor.explain(image, "gae"), visitor.call("load", image)):
        assert answer.error is not None and answer.error.startswith(f"{name}: ") and words in answer.error
