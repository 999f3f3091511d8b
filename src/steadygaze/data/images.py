"""Image files: finding them, reading any kind of them as upright 8-bit RGB, and hashing their content.

`read_image` is the only reader: of the command line, the page, verify, stress and training. So the same bytes
give the same pixels everywhere:

| file | RGB |
| --- | --- |
| transparency (RGBA, gray with alpha, a palette with a transparent color) | blended with white |
| 16-bit and 32-bit gray | scaled to 8 bits: 0..65535 to 0..255, floating point 0..1 to 0..255 |
| gray, palette, CMYK | converted |
| EXIF orientation | applied |
| animation (GIF, WebP, APNG) | the first frame |

Files may be untrusted. Only the formats in FORMATS are decoded, whatever a file is called; size and
aspect ratio are checked in the header, before any pixel is decoded; only regular files are opened; and time
and memory are limited (`decoding.py`). Everything else is an `ImageError` that names the file.

A content hash has 16 hex digits and identifies the bytes of an image, whatever the file is called.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageOps

from steadygaze.data.decoding import (
    FORMATS,
    Want,
    article,
    check_bounds,
    decode,
    decode_apart,
    first_line,
    is_plain,
    to_rgb,
)
from steadygaze.errors import ImageError, InputError

if TYPE_CHECKING:
    from torch import Tensor  # paths are found and checked without torch

SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)
IMAGE_KINDS = "a path, a PIL image or a numpy array (H, W, 3) of uint8"
MAX_NAME = 120  # bytes of an image's name in names of files
SOURCE_KEY = "steadygaze_source"  # in `Image.info`: the file's name, for errors of preprocessing


@dataclass(frozen=True)
class EncodedImage(ABC):
    """An image file inside another file: a member of an archive, or a cell of a table.

    Attributes:
        name: Where it is, for errors.
    """

    name: str

    @abstractmethod
    def read(self) -> bytes:
        """Return the bytes of the image file; may raise `ImageError`."""

    def __str__(self) -> str:
        return self.name


Source = str | Path | bytes | EncodedImage


def images_below(folder: Path) -> Iterator[Path]:
    """Everything below a folder that is called like an image file, at any depth.

    Links are followed, unless they lead to a parent. What cannot be an image (a dangling link, a FIFO) is
    included: reading it raises `ImageError` with its name. Links and folders that cannot be followed are
    reported as warnings.
    """
    for directory, subfolders, names in os.walk(folder, followlinks=True, onerror=_warn_unreadable):
        here = Path(directory)
        parents = [here, *(parent for parent in here.parents if parent.is_relative_to(folder))]
        loops = [name for name in subfolders if _leads_up(here / name, parents)]
        for name in loops:
            warnings.warn(f"{here / name}: a link to a parent folder, not followed", stacklevel=2)
        subfolders[:] = [name for name in subfolders if name not in loops]
        for name in names:
            path = here / name
            if path.suffix.lower() in SUFFIXES:
                yield path
            elif path.is_symlink() and not path.exists():
                warnings.warn(f"{path}: {_broken_link(path)}", stacklevel=2)


def _warn_unreadable(error: OSError) -> None:
    warnings.warn(f"{error.filename}: this folder cannot be read ({error.strerror})", stacklevel=2)


def _leads_up(path: Path, parents: list[Path]) -> bool:
    if not path.is_symlink():
        return False
    target = path.resolve()
    return any(parent.resolve().is_relative_to(target) for parent in parents)


def images_in(folder: Path) -> list[Path]:
    """Every image file below a folder, sorted by name; `InputError` if there is none."""
    if not folder.is_dir():
        state = "a file" if folder.exists() else "no such folder"
        raise InputError(f"expected a folder of images, got {folder}: {state}")
    files = sorted(images_below(folder))
    if not files:
        raise InputError(f"expected images in {folder}, found none ({', '.join(sorted(SUFFIXES))})")
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


def read_image(source: Source, *, apart: bool = False) -> Image.Image:
    """An image file, or the bytes of one, as upright 8-bit RGB; see the table above.

    A file that is missing, truncated, too large, too slow or not an image raises `ImageError` with its name.

    Args:
        apart: Decode in a child process, whatever the file is; otherwise files that may take long.
    """
    rgb = _decoded(source, "rgb", apart=apart)
    rgb.info[SOURCE_KEY] = _name(source)
    return rgb


def any_image(image: Any) -> Image.Image:
    """One image as people have it, as upright 8-bit RGB.

    Args:
        image: A path, a PIL image, or a numpy array (H, W, 3) or (H, W) of uint8.

    Raises:
        ImageError: If a file or a PIL image cannot be read.
        InputError: If it is anything else.

    Examples:
        >>> any_image(np.zeros((4, 6, 3), np.uint8)).size
        (6, 4)
    """
    if isinstance(image, (str, os.PathLike)):
        return read_image(Path(image))
    if isinstance(image, Image.Image):
        try:
            return to_rgb(ImageOps.exif_transpose(image))
        except Exception as error:  # a lazily opened file, whose decoder may raise anything
            name = getattr(image, "filename", "") or "image in memory"
            raise ImageError(f"{name}: does not decode as an image ({first_line(error)})") from error
    if not isinstance(image, np.ndarray):
        raise InputError(f"image: expected {IMAGE_KINDS}, got {type(image).__name__}")
    got = f"image: expected a numpy array (H, W, 3) of uint8, got {image.dtype} of shape {image.shape}"
    if image.dtype != np.uint8:
        raise InputError(
            f"{got}. Pixels in 0..1: use (image * 255).round().astype('uint8'). Preprocessed images: give a "
            "tensor (B, 3, H, W), as torch.from_numpy makes it"
        )
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] != 3):
        first = image.ndim == 3 and image.shape[0] == 3
        hint = "The channels are first: use image.transpose(1, 2, 0)" if first else "Convert it to RGB"
        raise InputError(f"{got}. {hint}")
    check_bounds(image.shape[1], image.shape[0])
    return Image.fromarray(np.ascontiguousarray(image)).convert("RGB")


def unique_names(names: Iterable[Sequence[str]]) -> list[str]:
    """A short name for each image, usable as part of a file name.

    Args:
        names: The parts of each name, such as folders and stem: the last one is its name, with those before
            it or a number added where names are equal.

    Examples:
        >>> unique_names([("a", "cat"), ("b", "cat"), ("a", "my dog")])
        ['cat', 'b-cat', 'my-dog']
    """
    unique: list[str] = []
    taken: set[str] = set()
    for words in names:
        parts = [re.sub(r"[^\w.-]+", "-", word) for word in words if word not in ("/", ".", "..")]
        joined = ["-".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
        # file systems allow names of 255 bytes, and method and class are added
        choices = [text.encode("utf-8", "replace")[:MAX_NAME].decode("utf-8", "ignore") for text in joined]
        unused = (choice for choice in choices if choice.lower() not in taken)
        name = next(unused, f"{choices[0]}-{len(taken)}")
        taken.add(name.lower())  # some file systems do not distinguish A.png from a.png
        unique.append(name)
    return unique


def read_stored(source: Source, kind: str) -> Image.Image:
    """The same, in the mode of the file. kind: "image" or "mask", for errors."""
    return _decoded(source, "stored", kind)


def image_size(source: Source) -> tuple[int, int]:
    """Width and height of the image that `read_image` would give, without decoding its pixels."""
    return _decoded(source, "size").size


def _decoded(source: Source, want: Want, kind: str = "image", *, apart: bool = False) -> Image.Image:
    name = _name(source)
    if isinstance(source, (str, Path)):
        check_regular_file(source, kind)
        data: bytes | str = str(source)
    else:
        data = source if isinstance(source, bytes) else source.read()
    if apart:
        return decode_apart(data, want, name, kind)
    try:
        with Path(data).open("rb") if isinstance(data, str) else io.BytesIO(data) as file:
            if is_plain(file):
                return decode(file, want, name, kind)
    except OSError as error:
        raise ImageError(f"{name}: cannot be read ({error.strerror})") from error
    return decode_apart(data, want, name, kind)


def check_regular_file(path: str | Path, kind: str = "image") -> None:
    """Raise `ImageError` unless the path leads to a regular file. Opening a FIFO would wait for ever."""
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError as error:
        missing = "no such file" if kind == "image" else f"no such {kind}"
        raise ImageError(f"{path}: {_broken_link(path) if path.is_symlink() else missing}") from error
    except (OSError, ValueError) as error:  # a loop of links, no permission, a name that is too long
        raise ImageError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "FIFO", stat.S_IFDIR: "folder", stat.S_IFSOCK: "socket"}
        got = kinds.get(stat.S_IFMT(mode), "device")
        raise ImageError(f"{path}: expected {article(kind)} file, got a {got}")


def _name(source: Source) -> str:
    if isinstance(source, bytes):
        return "image in memory"
    return str(source) if isinstance(source, (str, Path)) else source.name


def _broken_link(path: Path) -> str:
    return f"a link to {path.readlink()}, which does not exist"


DIGITS = 16


def bytes_hash(data: bytes) -> str:
    """The first 16 hex digits of the SHA-256 of these bytes.

    Examples:
        >>> bytes_hash(b"")
        'e3b0c44298fc1c14'
    """
    return hashlib.sha256(data).hexdigest()[:DIGITS]


def file_hash(path: str | Path) -> str:
    """The hash of a file's bytes; `ImageError` if the file cannot be read."""
    check_regular_file(path)
    try:
        with Path(path).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]
    except OSError as error:
        raise ImageError(f"{path}: {error.strerror}") from error


def source_hash(source: Source) -> str:
    """The hash of the bytes of an image, wherever they are; `ImageError` if they cannot be read."""
    if isinstance(source, (str, Path)):
        return file_hash(source)
    return bytes_hash(source if isinstance(source, bytes) else source.read())


def tensor_hash(*tensors: Tensor | None) -> str:
    """The hash of the dtype, shape and bytes of these tensors; None is skipped."""
    import torch

    hashed = hashlib.sha256()
    for x in tensors:
        if x is not None:
            hashed.update(f"{x.dtype} {tuple(x.shape)}".encode())
            hashed.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()[:DIGITS]


def names_hash(lines: Iterable[str]) -> str:
    """The hash of a list of lines, such as the names of a run's images with their labels."""
    return bytes_hash("\n".join(lines).encode())
