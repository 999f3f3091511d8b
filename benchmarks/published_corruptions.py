"""Our corruptions beside the published script for ImageNet-C, with the same random numbers.

    git clone https://github.com/hendrycks/robustness
    python -m benchmarks.published_corruptions robustness/ImageNet-C/create_c --images FOLDER [--severity 3]

Prints the figures of docs/stress.md: the largest and the mean difference in gray levels. Needs ImageMagick,
wand, OpenCV, scikit-image and scipy. The script is run as it is, except for names that numpy, scipy and
scikit-image have since changed; its `np.random` draws from our generator, so that both see the same numbers.
Shot and impulse noise draw in another way here: of these two, mean and variance of the noise are compared.
"""

import argparse
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from PIL import Image

from steadygaze.data.datasets.imagenet import CORRUPTIONS
from steadygaze.robustness.corruptions.corrupt import IMAGENET
from steadygaze.robustness.corruptions.filters import draw_normal

RENAMED = {
    "np.float_": "np.float64",
    "np.fromstring": "np.frombuffer",
    "scipy.ndimage.interpolation": "scipy.ndimage",
    "multichannel=True": "channel_axis=-1",
}
SIZE, OTHER_DRAWS = 224, ("shot_noise", "impulse_noise")


def published(folder: Path) -> types.ModuleType:
    """The published script without its last part, which makes the data set."""
    text = (folder / "make_imagenet_c.py").read_text().partition("import collections")[0]
    for old, new in RENAMED.items():
        text = text.replace(old, new)
    module = types.ModuleType("make_imagenet_c")
    exec(compile(text, "make_imagenet_c.py", "exec"), module.__dict__)
    return module


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


class Draws:
    """`np.random` of the published script, drawing as our function of that name does."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.rng = name, generator(seed)
        self.ready: list[Any] = []

    def normal(self, loc: float = 0.0, scale: float = 1.0, size: Any = None) -> np.ndarray:
        return draw_normal(self.rng, size).astype(np.float64) * scale + loc

    def uniform(self, low: float, high: float, size: Any = None) -> Any:
        if self.name == "fog":
            return (self.rng.random(size, dtype=np.float32).astype(np.float64) - 0.5) * (high - low)
        if self.name == "elastic_transform" and size != (3, 2):  # both displacements are drawn at once here
            if not self.ready:
                field = self.rng.random((*size, 2), dtype=np.float32).astype(np.float64) * 2 - 1
                self.ready = [field[..., 1], field[..., 0]]
            return self.ready.pop()
        return self.rng.uniform(low, high, size)

    def randint(self, low: int, high: int | None = None, size: Any = None) -> Any:
        if self.name != "glass_blur":
            return int(self.rng.integers(low) if high is None else self.rng.integers(low, high))
        if not self.ready:  # the script draws pixel by pixel from the last one, ours all at once
            assert high is not None
            inner = SIZE - 2 * high
            steps = self.rng.integers(low, high, size=(2, inner, inner), dtype=np.int8).astype(int)
            self.ready = list(steps[::-1].reshape(2, -1).T)
        return self.ready.pop()

    @contextmanager
    def installed(self) -> Iterator[None]:
        with patch.multiple(np.random, normal=self.normal, uniform=self.uniform, randint=self.randint):
            yield


def ours(name: str, severity: int, image: Image.Image, seed: int) -> np.ndarray:
    function, levels = IMAGENET[name]
    folder = (".",) if name == "frost" else ()
    return function(np.array(image), *levels[severity - 1], *folder, generator(seed)).astype(int)


def differences(script: Any, name: str, severity: int, images: list[Image.Image]) -> str:
    found = []
    for seed, image in enumerate(images):
        with Draws(name, seed).installed():
            theirs = np.uint8(getattr(script, name)(image, severity)).astype(int)
        found.append(np.abs(ours(name, severity, image, seed) - theirs))
    return f"| `{name}` | {np.max(found)} | {np.mean(found):.4f} |"


def laws(script: Any, name: str, severity: int, images: list[Image.Image]) -> str:
    means, ratios = [], []
    for image in images:
        clean = np.array(image).astype(int)
        ours_, theirs = [], []
        for seed in range(20):
            ours_.append(ours(name, severity, image, seed) - clean)
            np.random.seed(seed)  # noqa: NPY002
            theirs.append(np.uint8(getattr(script, name)(image, severity)).astype(int) - clean)
        means.append(np.mean(ours_) - np.mean(theirs))
        ratios.append(np.var(ours_) / np.var(theirs))
    return f"| `{name}` | mean {np.mean(means):+.3f} | variance x {np.mean(ratios):.4f} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("script", type=Path, help="folder of make_imagenet_c.py and its frost images")
    parser.add_argument("--images", type=Path, required=True, help="folder with images")
    parser.add_argument("--limit", type=int, default=4)
    parser.add_argument("--severity", type=int, default=3)
    parser.add_argument("--names", nargs="+", default=CORRUPTIONS)
    chosen = parser.parse_args()
    files = sorted(
        path for path in chosen.images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png")
    )
    images = [crop(path) for path in files[:: max(1, len(files) // chosen.limit)][: chosen.limit]]
    script = published(chosen.script)
    os.chdir(chosen.script)  # the script reads ./frost1.png
    print(f"{len(images)} images, severity {chosen.severity}\n")
    print("| corruption | largest | mean |\n| --- | ---: | ---: |")
    for name in chosen.names:
        compare = laws if name in OTHER_DRAWS else differences
        print(compare(script, name, chosen.severity, images), flush=True)


def crop(path: Path) -> Image.Image:
    """Short side 256, the middle 224 x 224, as the published set was made."""
    image = Image.open(path).convert("RGB")
    scale = 256 / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BILINEAR)
    left, top = (image.width - SIZE) // 2, (image.height - SIZE) // 2
    return image.crop((left, top, left + SIZE, top + SIZE))


if __name__ == "__main__":
    main()
