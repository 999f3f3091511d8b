"""Picture files: finding them, and reading any kind of them as upright 8-bit RGB."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps

from steadygaze.errors import BadImage, BadInput

SUFFIXES = frozenset({".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".pgm", ".tif", ".tiff", ".webp"})

LYING = (5, 6, 7, 8)  # orientations of EXIF that exchange width and height


def below(folder: Path) -> Iterator[Path]:
    """The pictures below a folder, also those behind links to other folders, except where a link leads back up."""
    for here, inner, names in os.walk(folder, followlinks=True):
        place = Path(here)
        above = [place, *(p for p in place.parents if p.is_relative_to(folder))]
        inner[:] = [
            name for name in inner if not (place / name).is_symlink() or not _leads_up(place / name, above)
        ]
        yield from (
            place / name
            for name in names
            if Path(name).suffix.lower() in SUFFIXES and (place / name).is_file()
        )


def _leads_up(link: Path, above: list[Path]) -> bool:
    target = link.resolve()
    return any(place.resolve().is_relative_to(target) for place in above)


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """The files named, and in folders every picture at any depth, in order of name; each once."""
    found: dict[Path, None] = {}
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(below(path))
            if not inside:
                raise BadInput(f"expected pictures in {path}, found none ({', '.join(sorted(SUFFIXES))})")
            found.update(dict.fromkeys(inside))
        else:
            found[path] = (
                None  # a missing file is found out when it is read, so that the others are still served
            )
    return list(found)


def read_image(path: str | Path) -> Image.Image:
    """The picture as RGB, turned as its EXIF says, transparency on white, 16 bits brought to 8.

    A file that is missing, truncated or no picture raises `BadImage` with its name.
    """
    with _opened(path) as opened:
        opened.load()
        return to_rgb(ImageOps.exif_transpose(opened))


def size_of(path: str | Path) -> tuple[int, int]:
    """Width and height of the picture that `read_image` would give; its pixels are not decoded."""
    with _opened(path) as opened:
        width, height = opened.size
        return (
            (height, width)
            if opened.getexif().get(ExifTags.Base.Orientation, 1) in LYING
            else (width, height)
        )


@contextmanager
def _opened(path: str | Path) -> Iterator[Image.Image]:
    """The file opened by PIL; whatever is wrong with it becomes `BadImage`."""
    try:
        with Image.open(path) as opened:
            yield opened
    except FileNotFoundError as error:
        raise BadImage(f"{path}: no such file") from error
    except Image.DecompressionBombError as error:
        raise BadImage(f"{path}: too large to be read safely ({error})") from error
    except (
        Exception
    ) as error:  # PIL's decoders raise whatever their format calls for, from SyntaxError to struct.error
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadImage(f"{path}: does not decode as a picture ({reason})") from error


def to_rgb(picture: Image.Image) -> Image.Image:
    """8-bit RGB of a picture of any mode; transparent parts become white."""
    if picture.mode.startswith(("I", "F")):
        return _narrowed(picture)
    if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        clear = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", clear.size, "white"), clear).convert("RGB")
    return picture.convert("RGB")


def _narrowed(picture: Image.Image) -> Image.Image:
    """Grey of 16 or 32 bits, which PIL would clip to white: 16-bit files keep their full scale, floats in [0, 1] too,
    anything else spans its own range."""
    values = np.asarray(picture, dtype=np.float64)
    low, high = float(values.min()), float(values.max())
    if not np.isfinite((low, high)).all():
        raise ValueError("holds values that are not finite")
    if low >= 0 and high <= 1 and picture.mode == "F":
        low, high = 0.0, 1.0
    elif picture.mode.startswith("I") and low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0 if high > 255 else 255.0
    grey = (values - low) / (high - low or 1.0) * 255
    return Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")
