"""ImageNet-P in its published layout: `<kind>/<synset>/*.mp4`, one clip of about 30 frames of 224 x 224 for
each image.

The archives contain more than the ten kinds of mFR: harder noise (`gaussian_noise_2`), and kinds for
validation (`spatter`, ...). Those are left out and counted. Videos are decoded by PyAV or OpenCV, whichever
is installed.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from steadygaze.data.benchmarks import complete, folder, folders_in, imagenet_synsets, some
from steadygaze.errors import BadImage, BadInput
from steadygaze.robustness.sequences import PERTURBATIONS
from steadygaze.robustness.shifts import Shift, Shifted

EXTRA = re.compile(r"spatter|shear|gaussian_blur|speckle_noise|(gaussian|shot|speckle)_noise_[23]")
FILMS = (".mp4", ".avi")


def imagenet_p(root: str | Path, *, partial: bool = False) -> Shift:
    """The published clips of the ten kinds; group: the kind."""
    what = "imagenet-p"
    root = folder(root, what, "a folder with <kind>/<synset>/*.mp4, the ten kinds of ImageNet-P")
    there = folders_in(root)
    beyond = {name: tuple(folders_in(root / name)) for name in there if EXTRA.fullmatch(name)}
    kinds = [name for name in there if name not in beyond]
    notes = [complete(what, root, "kind", PERTURBATIONS, kinds, partial=partial)]
    class_index = {synset: i for i, synset in enumerate(imagenet_synsets())}
    items: list[Shifted] = []
    for kind in (name for name in PERTURBATIONS if name in kinds):
        synsets = folders_in(root / kind)
        strange = [name for name in synsets if name not in class_index]
        if strange:
            raise BadInput(
                f"{what}: {root / kind} contains folders that are not synsets of ImageNet: {some(strange)}"
            )
        films = [
            path
            for name in synsets
            for path in sorted((root / kind / name).iterdir())
            if path.suffix.lower() in FILMS
        ]
        if not films:
            raise BadInput(f"{what}: expected {kind}/<synset>/*.mp4 in {root}, found no video")
        items += [
            Shifted(
                path.relative_to(root).as_posix(),
                path,
                class_index[path.parent.name],
                None,
                (class_index[path.parent.name],),
                kind,
            )
            for path in films
        ]
    left_out = {"no kind of mFR": tuple(beyond)} if beyond else {}
    _decoder()  # a missing decoder is reported now
    return Shift(what, items, ready=True, left_out=left_out, notes=tuple(filter(None, notes)))


def read_clip(path: str | Path) -> UInt8[np.ndarray, "t h w 3"]:
    """The frames of a video, RGB; at least two.

    Example:

        frames = read_clip("clip.mp4")  # (T, H, W, 3)
    """
    name, library = _decoder()
    if not Path(path).is_file():
        raise BadImage(f"{path} is not a video: no such file")
    try:
        frames = _by_av(library, path) if name == "av" else _by_opencv(library, path)
    except Exception as error:  # each library has errors of its own
        raise BadImage(f"{path} is not a readable video ({str(error) or type(error).__name__})") from error
    if len(frames) < 2 or len({frame.shape for frame in frames}) > 1:
        raise BadImage(f"{path}: expected a video of two frames or more, got {len(frames)}: truncated?")
    return np.stack(frames)


def _decoder() -> tuple[str, Any]:
    for name in ("av", "cv2"):
        try:
            return name, import_module(name)
        except ImportError:
            continue
    raise BadInput("imagenet-p: its videos need a decoder: pip install av, or opencv-python-headless")


def _by_av(av: Any, path: str | Path) -> list[np.ndarray]:
    with av.open(str(path)) as film:
        return [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]


def _by_opencv(cv2: Any, path: str | Path) -> list[np.ndarray]:
    film, frames = cv2.VideoCapture(str(path)), []
    try:
        while (read := film.read())[0]:
            frames.append(np.ascontiguousarray(read[1][..., ::-1]))
    finally:
        film.release()
    return frames
