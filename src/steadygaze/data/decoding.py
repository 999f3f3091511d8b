"""From the bytes of an image file to pixels, in bounded time and memory, whoever made the file.

Decoders are written in C, read what strangers send, and can be slow: PIL joins the comment blocks of a GIF in
quadratic time, and each of the thousands of scans that a JPEG may have costs a pass over all its pixels. So
files are decoded in a child process that is killed when it takes too long (`decode_apart`):

| resource | limit |
| --- | --- |
| time | `SECONDS` of processor time, and one second more for every `PIXELS_PER_SECOND` pixels |
| memory | `MAX_MEMORY` bytes of address space, where the system can limit it |

Processor time does not depend on what else the machine does, so that a busy machine reads the same images;
on Windows, which has no timer of that kind, the limit is `SECONDS_WITHOUT_TIMER` seconds in total.

A child costs 0.3 ms for a photograph of 500 x 375, whose decoding takes 1.6 ms. The page and `explain` pay
that for each file. Runs over data sets do not: files that are `is_plain`, JPEG with few scans and PNG, take
time in proportion to their size and are decoded where they are needed, all others in a child. Both ways run
`decode`, so the same bytes give the same pixels.

The child imports PIL, numpy and this file, nothing else of steadygaze. It gets a line of JSON for each image,
with the bytes of the image after it, and answers alike; nothing is pickled.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import cache, partial
from threading import Timer
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from PIL import ExifTags, Image, ImageOps

from steadygaze.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMATS = {  # PIL's name of each format that is read, and its suffixes
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "AVIF": (".avif",),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm"),
}
MAX_SIDE = 65_535  # pixels; also the largest side of a JPEG file
MAX_PIXELS = 89_000_000  # below the number from which on PIL warns; up to 400 MB as RGB
MAX_ASPECT = 100  # longer side / shorter side: preprocessing scales the shorter side to that of the model
ROWS_AT_ONCE = 2**22  # number of pixels that are converted from 16 to 8 bits at once
TRANSPOSED = (5, 6, 7, 8)  # EXIF orientations that swap width and height
ALPHA_MODES = ("RGBA", "LA", "PA", "La", "RGBa")

SECONDS = 5.0
PIXELS_PER_SECOND = 4_000_000
SECONDS_WITHOUT_TIMER = 60.0
MAX_MEMORY = 4 * 2**30  # MAX_PIXELS with transparency take 2 GiB
MAX_SCANS = 20  # of a JPEG that is decoded in this process; progressive files have about 10

Want = Literal["rgb", "stored", "size"]


# -- what an image file may be -------------------------------------------------------------------------


def check_bounds(width: int, height: int, *, name: str = "image in memory") -> None:
    """Raise `ImageError` if an image of this size would take too much memory to decode or to preprocess."""
    size = f"got {width:,} x {height:,}"
    if min(width, height) < 1:
        raise ImageError(f"{name}: expected at least one pixel, {size}")
    if max(width, height) > MAX_SIDE:
        raise ImageError(f"{name}: expected sides of at most {MAX_SIDE:,} pixels, {size}")
    if width * height > MAX_PIXELS:
        raise ImageError(f"{name}: expected at most {MAX_PIXELS:,} pixels, {size} = {width * height:,}")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise ImageError(
            f"{name}: expected an aspect ratio of at most {MAX_ASPECT}:1, {size}. Crop it, or leave it out."
        )


def is_plain(file: BinaryIO) -> bool:
    """Whether decoding takes time in proportion to the size: PNG, and JPEG of at most `MAX_SCANS` scans.

    The file is read from its start, and is at its start again afterwards.
    """
    start = file.read(8)
    plain = start == b"\x89PNG\r\n\x1a\n"
    if start.startswith(b"\xff\xd8"):
        scans, last = 0, b""
        while scans <= MAX_SCANS and (block := file.read(2**20)):
            scans += (last + block).count(b"\xff\xda")  # compressed data never holds this marker
            last = block[-1:]
        plain = scans <= MAX_SCANS
    file.seek(0)
    return plain


@cache
def _formats() -> tuple[str, ...]:
    """The formats that this build of PIL can open."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type where there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def article(kind: str) -> str:
    """The kind of a file ("image", "mask") with its article."""
    return f"an {kind}" if kind == "image" else f"a {kind}"


# -- decoding ------------------------------------------------------------------------------------------


def decode(
    file: BinaryIO | str,
    want: Want,
    name: str,
    kind: str = "image",
    on_pixels: Callable[[int], None] = lambda pixels: None,
) -> Image.Image:
    """Decode an image file in this process.

    Args:
        want: "rgb": upright 8-bit RGB; "stored": upright, in the mode of the file; "size": an image of one
            color, of the size that the upright image has.
        name: Of the file, for errors.
        kind: "image" or "mask", for errors.
        on_pixels: Called with the number of pixels before they are decoded.

    Raises:
        ImageError: Whatever is wrong with the file.
    """
    try:
        with Image.open(file, formats=_formats()) as image:
            check_bounds(*image.size, name=name)
            on_pixels(image.width * image.height)
            if want == "size":
                width, height = image.size
                swapped = image.getexif().get(ExifTags.Base.Orientation, 1) in TRANSPOSED
                return Image.new("1", (height, width) if swapped else (width, height))
            image.load()
            upright = ImageOps.exif_transpose(image)
            return to_rgb(upright) if want == "rgb" else upright
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{name}: expected at most {MAX_PIXELS:,} pixels, got more ({error})") from error
    except Image.UnidentifiedImageError as error:
        expected = f"expected one of the formats {', '.join(_formats())}"
        raise ImageError(f"{name}: does not decode as {article(kind)} ({expected})") from error
    except Exception as error:  # PIL's decoders raise many kinds, from SyntaxError to struct.error
        raise ImageError(f"{name}: does not decode as {article(kind)} ({first_line(error)})") from error


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
    """Gray of 16 or 32 bits, which PIL would clip to white, as 8 bits.

    16-bit integers and floats in [0, 1] keep their full scale; anything else is stretched from its minimum
    to its maximum.
    """
    values = np.asarray(image)
    step = max(1, ROWS_AT_ONCE // image.width)
    blocks = [values[start : start + step] for start in range(0, image.height, step)]
    low = float(np.min([block.min() for block in blocks]))
    high = float(np.max([block.max() for block in blocks]))
    if not np.isfinite((low, high)).all():
        raise ValueError("it has values that are not finite")
    if image.mode == "F" and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif image.mode.startswith("I") and low >= 0 and high <= 65535:
        low, high = 0.0, 65535.0 if high > 255 else 255.0
    gray = np.empty(values.shape, np.uint8)
    for index, block in enumerate(blocks):
        unit = (block.astype(np.float64) - low) / (high - low or 1.0)
        gray[index * step : (index + 1) * step] = (unit * 255).round().astype(np.uint8)
    return Image.fromarray(gray).convert("RGB")


# -- the child process ---------------------------------------------------------------------------------


def decode_apart(source: bytes | str, want: Want, name: str, kind: str = "image") -> Image.Image:
    """Decode an image file, or the bytes of one, in a child process; arguments and errors as for `decode`.

    A child stays for the next image, in each thread that needs one at the same time.
    """
    try:
        child = _idle.pop()
    except IndexError:
        child = Child()
    if not child.is_alive():  # somebody ended it while it waited
        child.kill()
        child = Child()
    try:
        image = child.decode(source, want, name, kind)
    except BaseException as error:
        if isinstance(error, ImageError) and child.is_alive():
            _idle.append(child)
        else:  # killed, or interrupted before it answered
            child.kill()
        raise
    _idle.append(child)
    return image


class Child:
    """A process that decodes images, one at a time."""

    def __init__(self) -> None:
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; "
        code += f"serve({MAX_MEMORY})"
        # one thread, and no memory that is reserved for more
        few = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **few},
            pipesize=2**20,
        )
        _children.add(self)

    def is_alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        _children.discard(self)
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):
                assert pipe is not None
                pipe.close()

    def decode(self, source: bytes | str, want: Want, name: str, kind: str) -> Image.Image:
        sent = b"" if isinstance(source, str) else source
        request = {"want": want, "name": name, "kind": kind, "bytes": len(sent), "seconds": SECONDS}
        if isinstance(source, str):
            request["path"] = os.path.abspath(source)  # noqa: PTH100  # a link is not resolved
        with _stopped(self.process):
            try:
                answer, pixels = self._exchange(request, sent)
            except (OSError, EOFError, ValueError) as error:
                raise ImageError(f"{name}: {self._death()}") from error
        if "error" in answer:
            raise ImageError(answer["error"])
        image = Image.frombytes(answer["mode"], tuple(answer["size"]), pixels)
        if answer["palette"] is not None:
            image.putpalette(bytes.fromhex(answer["palette"]["data"]), answer["palette"]["mode"])
        return image

    def _exchange(self, request: dict[str, Any], sent: bytes) -> tuple[dict[str, Any], bytes]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None and stdout is not None
        _write(stdin, request, sent)
        return _read(stdout)

    def _death(self) -> str:
        """Why the process ended, for an error."""
        self.process.kill()  # it may have answered something else than it should
        code = -self.process.wait()
        if TIMED and code == signal.SIGPROF:
            return (
                f"decoding was stopped after {SECONDS:g} seconds and one for every {PIXELS_PER_SECOND:,} "
                "pixels. No ordinary image takes so long: if it is yours, save it again"
            )
        if not TIMED:
            return f"decoding was stopped after {SECONDS_WITHOUT_TIMER:g} seconds, or failed"
        return f"its decoder failed (signal {code}): the file is damaged"


TIMED = hasattr(signal, "setitimer")  # not on Windows


@contextmanager
def _stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill the process if it does not limit its time itself."""
    if TIMED:
        yield
        return
    timer = Timer(SECONDS_WITHOUT_TIMER, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write(pipe: Any, header: dict[str, Any], data: bytes = b"") -> None:
    pipe.write(json.dumps(header).encode() + b"\n")
    pipe.write(data)
    pipe.flush()


def _read(pipe: Any) -> tuple[dict[str, Any], bytes]:
    line = pipe.readline()
    if not line:
        raise EOFError
    header = json.loads(line)
    data = pipe.read(header.get("bytes", 0))
    if len(data) < header.get("bytes", 0):
        raise EOFError
    return header, data


def serve(max_memory: int) -> None:
    """Decode images until the input ends: what the child process runs."""
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a decoder prints is not an answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes the input
    warnings.simplefilter("ignore")
    _limit_memory(max_memory)
    with suppress(ImportError):
        from PIL import AvifImagePlugin

        AvifImagePlugin.DEFAULT_MAX_THREADS = 1
    while True:
        try:
            request, data = _read(stdin)
        except EOFError:
            return
        seconds = request["seconds"]
        _limit_time(seconds)
        try:
            file = io.BytesIO(data) if "path" not in request else request["path"]
            image = decode(
                file, request["want"], request["name"], request["kind"], partial(_limit_time, seconds)
            )
            palette = image.palette
            answer = {
                "mode": image.mode,
                "size": image.size,
                "palette": palette and {"mode": palette.mode, "data": palette.tobytes().hex()},
            }
            pixels = image.tobytes()
        except ImageError as error:
            answer, pixels = {"error": str(error)}, b""
        except MemoryError:
            answer, pixels = {"error": f"{request['name']}: takes too much memory to decode"}, b""
        _limit_time(0)
        _write(stdout, {**answer, "bytes": len(pixels)}, pixels)


def _limit_memory(size: int) -> None:
    with suppress(ImportError, ValueError, OSError):  # Windows; a lower limit is set already
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def _limit_time(seconds: float, pixels: int = 0) -> None:
    """End this process after so much processor time from now; 0: never."""
    if TIMED:  # the signal ends it in the middle of a C function too
        signal.setitimer(signal.ITIMER_PROF, seconds + pixels / PIXELS_PER_SECOND)


_children: set[Child] = set()
_idle: list[Child] = []  # those that wait for an image


def _forget() -> None:
    """In a forked process: the children are the parent's."""
    for child in _children:
        child.process.returncode = 0  # not waited for
    _children.clear()
    _idle.clear()


def end_decoding() -> None:
    """End all children. Threads that wait for one get `ImageError`."""
    _idle.clear()
    for child in list(_children):
        child.process.kill()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
atexit.register(end_decoding)
