"""The same bytes give the same pixels everywhere: explain, the page, verify, stress and training."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import steadygaze as sg
from helpers.tiers import tiered
from steadygaze.app.viewer import Viewer
from steadygaze.cli import app
from steadygaze.data.folders import Item
from steadygaze.data.images import read_image
from steadygaze.data.masks import LabeledImages
from steadygaze.data.preprocess import Preprocess
from steadygaze.training.images import TrainingImages
from steadygaze.training.recipe import Augment

RNG = np.random.default_rng(0)
PIXELS = np.kron(RNG.integers(0, 256, (8, 10, 4)), np.ones((5, 5, 1))).astype(np.uint8)


def gray16(path: Path) -> None:
    Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257).save(path)


def rgba(path: Path) -> None:
    Image.fromarray(PIXELS).save(path)


def palette(path: Path) -> None:
    image = Image.fromarray(PIXELS[..., :3]).convert("P", palette=Image.Palette.ADAPTIVE, colors=16)
    image.save(path, transparency=image.getpixel((0, 0)))


def cmyk(path: Path) -> None:
    Image.fromarray(PIXELS, "CMYK").save(path)


def rotated(path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PIXELS[..., :3]).save(path, exif=exif)


def animated(path: Path) -> None:
    frames = [Image.fromarray(pixels) for pixels in (PIXELS[..., :3], 255 - PIXELS[..., :3])]
    frames[0].save(path, save_all=True, append_images=frames[1:])


KINDS = {
    "gray16.png": gray16,
    "rgba.png": rgba,
    "palette.png": palette,
    "cmyk.jpg": cmyk,
    "rotated.jpg": rotated,
    "animated.gif": animated,
}


@pytest.fixture(params=tiered(KINDS, ["gray16.png", "rotated.jpg"]))
def file(request, tmp_path: Path) -> Path:
    path = tmp_path / "data" / "cat" / request.param
    path.parent.mkdir(parents=True)
    KINDS[request.param](path)
    return path


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """What is preprocessed, as RGB arrays."""
    images: list[np.ndarray] = []
    pixels = Preprocess.pixels

    def record(self: Preprocess, image: Image.Image, *, crop: bool = True) -> np.ndarray:
        images.append(np.asarray(image).copy())
        return pixels(self, image, crop=crop)

    monkeypatch.setattr(Preprocess, "pixels", record)
    return images


def test_every_entrance_reads_the_same_pixels(file, seen, tmp_path):
    expected = np.asarray(read_image(file))
    assert np.array_equal(read_image(file.read_bytes()), expected) and expected.dtype == np.uint8
    loaded = sg.load_model("embedded")

    def check(entrance: str) -> None:
        assert seen, f"{entrance} does not use Preprocess"
        assert all(np.array_equal(image, expected) for image in seen), entrance
        seen.clear()

    model = ["--model", "embedded"]
    out = ["--method", "ixg", "--out", str(tmp_path / "maps")]
    done = CliRunner().invoke(app, ["explain", str(file), *model, *out])
    assert done.exit_code == 0, done.output
    check("explain")
    Viewer(loaded).predictions(str(file))
    check("page")
    data = ["--data", str(file.parents[1])]
    done = CliRunner().invoke(
        app, ["verify", *data, *model, "--methods", "ixg", "--out", str(tmp_path / "run")]
    )
    assert done.exit_code == 0, done.output
    check("verify")


def test_stress_reads_the_same_pixels(file):
    loaded = sg.load_model("embedded")
    rows = sg.stress(loaded, file.parents[1], "corruptions", corruptions="fog", severities=[1])
    expected = loaded.model(loaded.preprocess(read_image(file))[None]).softmax(-1).max().item()
    (clean,) = [row for row in rows if (row["setting"], row["metric"]) == ("clean", "confidence")]
    assert clean["value"] == pytest.approx(expected, abs=1e-5)


def test_training_reads_the_same_pixels(file):
    loaded = sg.load_model("embedded")
    labeled = LabeledImages([Item("image", file, 0)])
    images = TrainingImages(labeled, loaded.preprocess, Augment(), seed=0)
    image, *_ = images[None, 0]
    assert torch.equal(image, loaded.preprocess(read_image(file)))


def test_no_other_module_opens_image_files():
    """Training, diffmask and every suite use `read_image`. Corruptions open textures and their own JPEGs."""
    source = Path(sg.__file__).parent
    openers = {str(p.relative_to(source)) for p in source.rglob("*.py") if "Image.open(" in p.read_text()}
    openers = {name for name in openers if not name.startswith("robustness/corruptions/")}
    assert openers == {"data/decoding.py"}


def test_the_page_gets_the_file_itself(file):
    gradio = pytest.importorskip("gradio")
    from gradio.data_classes import ImageData

    from steadygaze.app.layout import build_page

    blocks = build_page(Viewer(sg.load_model("embedded")))
    uploads = [b for b in blocks.blocks.values() if isinstance(b, gradio.Image) and b.label == "Image"]
    given = uploads[0].preprocess(ImageData(path=str(file), orig_name=file.name))
    assert Path(given).read_bytes() == file.read_bytes()


def test_transparency_is_blended_with_white(tmp_path):
    Image.new("RGBA", (2, 2), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert torch.from_numpy(np.array(read_image(tmp_path / "clear.png"))).min() == 255
