"""Image files: finding them, and reading any kind of them as upright 8-bit RGB.

`read_image` is the only reader: of the command line, the page, verify, stress and training. So the same bytes
give the same pixels everywhere:

| file | RGB |
| --- | --- |
| transparency (RGBA, grey with alpha, a palette with a transparent colour) | blended with white |
| 16-bit and 32-bit grey | scaled to 8 bits: 0..65535 to 0..255, floating point 0..1 to 0..255 |
| grey, palette, CMYK | converted |
| EXIF orientation | applied |
| animation (GIF, WebP, APNG) | the first frame |
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

from steadygaze.errors import BadImage, BadInput

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})
TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
ALPHA_MODES = ("RGBA", "LA", "PA", "La", "RGBa")

Source = str | Path | bytes


def images_below(folder: Path) -> Iterator[Path]:
    """The image files below a folder, at any depth. Links are followed, unless they lead to a parent."""
    for directory, subfolders, names in os.walk(folder, followlinks=True):
        here = Path(directory)
        parents = [here, *(parent for parent in here.parents if parent.is_relative_to(folder))]
        subfolders[:] = [name for name in subfolders if not _leads_up(here / name, parents)]
        for name in names:
            path = here / name
            if path.suffix.lower() in SUFFIXES and path.is_file():
                yield path


def _leads_up(path: Path, parents: list[Path]) -> bool:
    if not path.is_symlink():
        return False
    target = path.resolve()
    return any(parent.resolve().is_relative_to(target) for parent in parents)


def images_in(folder: Path) -> list[Path]:
    """Every image file below a folder, sorted by name; `BadInput` if there is none."""
    if not folder.is_dir():
        state = "a file" if folder.exists() else "no such folder"
        raise BadInput(f"expected a folder of images, got {folder}: {state}")
    files = sorted(images_below(folder))
    if not files:
        raise BadInput(f"expected images in {folder}, found none ({', '.join(sorted(SUFFIXES))})")
    return files


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """The files given, and every image below the folders given, sorted within each folder; each file once."""
    files: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            files.update(dict.fromkeys(images_in(path)))
        else:
            files[path] = None  # a missing file is reported when it is read: the others are still served
    return list(files)


def read_image(source: Source) -> Image.Image:
    """An image file, or the bytes of one, as upright 8-bit RGB; see the table above.

    A file that is missing, truncated or not an image raises `BadImage` with its name.
    """
    with _opened(source) as image:
        image.load()
        return to_rgb(ImageOps.exif_transpose(image))


def image_size(source: Source) -> tuple[int, int]:
    """Width and height of the image that `read_image` would give, without decoding its pixels."""
    with _opened(source) as image:
        width, height = image.size
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
        return (height, width) if orientation in TRANSPOSED else (width, height)


@contextmanager
def _opened(source: Source) -> Iterator[Image.Image]:
    """The file opened by PIL; whatever is wrong with it becomes `BadImage`."""
    name = "image in memory" if isinstance(source, bytes) else str(source)
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
            yield image
    except FileNotFoundError as error:
        raise BadImage(f"{name}: no such file") from error
    except Image.DecompressionBombError as error:
        raise BadImage(f"{name}: too large to be read safely ({error})") from error
    except Exception as error:  # PIL's decoders raise many kinds, from SyntaxError to struct.error
        raise BadImage(f"{name}: does not decode as an image ({first_line(error)})") from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB of an image of any mode; transparent parts are blended with white."""
    if image.mode.startswith(("I", "F")):
        return _to_8_bits(image)
    if image.mode in ALPHA_MODES or "transparency" in image.info:
        transparent = image.convert("RGBA")
        white = Image.new("RGBA", transparent.size, "white")
        return Image.alpha_composite(white, transparent).convert("RGB")
    return image.convert("RGB")


def _to_8_bits(image: Image.Image) -> Image.Image:
    """Grey of 16 or 32 bits, which PIL would clip to white. 16-bit integers and floats in [0, 1] keep their
    full scale; anything else is stretched from its minimum to its maximum."""
    values = np.asarray(image, dtype=np.float64)
    low, high = float(values.min()), float(values.max())
    if not np.isfinite((low, high)).all():
        raise ValueError("it has values that are not finite")
    if image.mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif image.mode.startswith("I") and low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0 if high > 255 else 255.0
    grey = (values - low) / (high - low or 1.0) * 255
    return Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")


below = images_below
size_of = image_size
