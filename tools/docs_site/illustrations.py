"""Images of suites that need data of others, drawn from the demo images when the site is built.

`CAPTIONS` says on a page how its image was made, where that is special.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from steadygaze.loading.loaded import LoadedModel
from steadygaze.robustness.corruptions.corrupt import corrupt
from steadygaze.robustness.neighbors import features
from steadygaze.robustness.synthetic import cut_out, place, swap_background
from steadygaze.training.tokencut import tokencut

SIDE, LINE = 256, 30  # pixels of a tile, and of the text below it
CAPTIONS = {  # kind/name -> how the image was made
    "suites/shift": "Drawn from a demo image: corruptions as in `imagenet-c`. The suite reads the published "
    "images.",
    "suites/cue_conflict": "Drawn from demo images: the Fourier phase of the first with the amplitudes of "
    "the second. The suite reads the published images, which are made by style transfer.",
    "suites/neighbors": "A corrupted demo image and the four demo images, sorted by the cosine similarity "
    "of the embedded model's features.",
    "suites/segmentation": "A demo image, clean and corrupted, with two classes: object and background by "
    "TokenCut of the embedded model. The suite measures the predictions of a segmenter.",
    "suites/synthetic": "Drawn from demo images; the object is found by TokenCut of the embedded model. The "
    "suite uses your masks and backgrounds.",
    "suites/vqa": "A demo image, clean and corrupted; the question stays the same. Question and answers are "
    "made up.",
}


def illustrations(loaded: LoadedModel, images: Tensor) -> dict[str, list[Image.Image]]:
    """Name of a suite -> tiles of equal size."""
    photos = [tile(loaded.to_image(image)) for image in images]
    makers: dict[str, Callable[[], list[Image.Image]]] = {
        "shift": lambda: [captioned(photos[0], "original"), *_corrupted(photos[0])],
        "cue_conflict": lambda: _cue_conflict(photos[0], photos[1]),
        "neighbors": lambda: _neighbors(loaded, photos),
        "segmentation": lambda: _segmentation(loaded, photos[0]),
        "synthetic": lambda: _synthetic(loaded, photos[0], photos[1]),
        "vqa": lambda: _question(photos[0]),
    }
    return {name: make() for name, make in makers.items()}


def tile(image: Image.Image) -> Image.Image:
    return image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BICUBIC)


def captioned(image: Image.Image, text: str) -> Image.Image:
    """The tile with a line of text below it."""
    whole = Image.new("RGB", (image.width, image.height + LINE), "white")
    whole.paste(image, (0, 0))
    font = ImageFont.load_default(16)
    ImageDraw.Draw(whole).text((image.width / 2, image.height + LINE / 2), text, "black", font, anchor="mm")
    return whole


def _damaged(image: Image.Image, name: str, severity: int = 3) -> Image.Image:
    return Image.fromarray(corrupt(np.asarray(image), name, severity, seed=0))


def _corrupted(image: Image.Image) -> list[Image.Image]:
    names = ("gaussian_noise", "defocus_blur", "fog", "jpeg_compression")
    return [captioned(_damaged(image, name), f"{name.replace('_', ' ')} 3") for name in names]


def _cue_conflict(shape: Image.Image, texture: Image.Image) -> list[Image.Image]:
    one, two = (np.fft.fft2(np.asarray(image, dtype=np.float64), axes=(0, 1)) for image in (shape, texture))
    mixed = np.fft.ifft2(np.abs(two) * np.exp(1j * np.angle(one)), axes=(0, 1)).real
    both = Image.fromarray(mixed.clip(0, 255).astype(np.uint8))
    return [captioned(shape, "shape"), captioned(texture, "texture"), captioned(both, "both cues")]


def _neighbors(loaded: LoadedModel, photos: list[Image.Image]) -> list[Image.Image]:
    query = _damaged(photos[0], "gaussian_noise", 2)
    encoded = features(loaded.model, torch.stack([loaded.preprocess(image) for image in (query, *photos)]))
    similar = torch.nn.functional.cosine_similarity(encoded[:1], encoded[1:])
    ranked = [(float(similar[i]), photos[i]) for i in similar.argsort(descending=True)]
    return [captioned(query, "query"), *(captioned(image, f"cosine {value:.2f}") for value, image in ranked)]


def _segmentation(loaded: LoadedModel, photo: Image.Image) -> list[Image.Image]:
    tiles = []
    for text, image in (("clean", photo), ("gaussian noise 3", _damaged(photo, "gaussian_noise"))):
        mask = tokencut(loaded.model, loaded.preprocess(image)[None])[0].numpy()
        colors = np.where(mask[..., None], (228, 87, 46), (46, 134, 228)).astype(np.uint8)
        classes = Image.fromarray(colors).resize((SIDE, SIDE), Image.Resampling.NEAREST)
        tiles += [captioned(image, text), captioned(Image.blend(image, classes, 0.55), "two classes")]
    return tiles


def _synthetic(loaded: LoadedModel, photo: Image.Image, other: Image.Image) -> list[Image.Image]:
    found = tokencut(loaded.model, loaded.preprocess(photo)[None])[0].numpy().astype(np.uint8) * 255
    mask = np.asarray(Image.fromarray(found).resize((SIDE, SIDE), Image.Resampling.NEAREST))
    pixels, gray = np.asarray(photo), np.full((SIDE, SIDE, 3), 128, dtype=np.uint8)
    cut = cut_out(pixels, mask)
    varied = {
        "moved": place(cut, gray, x=0.3, y=0.3)[0],
        "rotated": place(cut, gray, rotation=45.0)[0],
        "resized": place(cut, gray, area=0.6)[0],
        "another background": swap_background(pixels, mask, np.asarray(other)),
    }
    return [
        captioned(photo, "original"),
        *(captioned(Image.fromarray(image), text) for text, image in varied.items()),
    ]


def _question(photo: Image.Image) -> list[Image.Image]:
    text = "What is in the image?"
    damaged = ("gaussian_noise", "fog")
    return [
        captioned(photo, text),
        *(captioned(_damaged(photo, name), f"{name.replace('_', ' ')} 3, same question") for name in damaged),
    ]
