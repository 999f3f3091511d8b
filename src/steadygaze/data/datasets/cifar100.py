"""CIFAR-100 in its two published versions, read without executing code.

| version | files |
| --- | --- |
| Python | `cifar-100-python/{train,test,meta}`, pickles |
| binary | `cifar-100-binary/{train.bin,test.bin,fine_label_names.txt,coarse_label_names.txt}` |
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from steadygaze.data.datasets.tree import abbreviated, require_folder
from steadygaze.data.decoding import first_line
from steadygaze.errors import InputError

DATASET = "CIFAR-100"
EXPECTED = (
    "cifar-100-python with train, test and meta, or cifar-100-binary with train.bin, test.bin and "
    "fine_label_names.txt"
)
PIXEL_BYTES = 3 * 32 * 32  # planes of red, green and blue
RECORD_BYTES = 2 + PIXEL_BYTES  # a coarse label, a fine label, the pixels

Part = tuple[Int[np.ndarray, " _"], UInt8[np.ndarray, "_ h w 3"]]  # labels, images


def read_cifar100(root: str | Path, *, coarse: bool = False) -> tuple[tuple[str, ...], Part, Part]:
    """Class names, training part and test part. coarse: the 20 superclasses instead of the 100 classes."""
    root = require_folder(root, DATASET, f"a folder {EXPECTED}")
    kind = "coarse" if coarse else "fine"
    for folder in (root, root / "cifar-100-python", root / "cifar-100-binary"):
        if (folder / "train.bin").is_file() or (folder / "fine_label_names.txt").is_file():
            return _read_binary(folder, kind)
        if (folder / "meta").is_file() or (folder / "train").is_file():
            return _read_pickled(folder, kind)
    present = abbreviated(sorted(path.name for path in root.iterdir()))
    raise InputError(f"{DATASET}: expected {EXPECTED} in {root}, found {present or 'nothing'}")


def _require_files(folder: Path, names: Sequence[str]) -> None:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise InputError(
            f"{DATASET}: {folder} lacks {abbreviated(missing)}; expected {', '.join(names)}. "
            "Incomplete download?"
        )


def _read_binary(folder: Path, kind: str) -> tuple[tuple[str, ...], Part, Part]:
    names_file = f"{kind}_label_names.txt"
    _require_files(folder, ("train.bin", "test.bin", names_file))
    names = tuple((folder / names_file).read_text(encoding="utf-8").split())
    label_column = 1 if kind == "fine" else 0

    def read(file: Path) -> Part:
        data = np.fromfile(file, dtype=np.uint8)
        if not len(data) or len(data) % RECORD_BYTES:
            raise InputError(
                f"{DATASET}: expected records of {RECORD_BYTES} bytes in {file}, "
                f"got {len(data)} bytes: truncated?"
            )
        records = data.reshape(-1, RECORD_BYTES)
        return _checked(file, records[:, label_column], records[:, 2:], names)

    return names, read(folder / "train.bin"), read(folder / "test.bin")


class _SafeUnpickler(pickle.Unpickler):
    """Reads arrays, lists, dicts, strings and numbers; anything that would execute code is refused."""

    ALLOWED = frozenset(
        (module, name)
        for module in (
            "numpy",
            "numpy.core.multiarray",
            "numpy._core.multiarray",
            "numpy.core.numeric",
            "numpy._core.numeric",
        )
        for name in ("ndarray", "dtype", "_reconstruct", "_frombuffer")
    ) | {("_codecs", "encode")}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong into a file of images")
        return super().find_class(module, name)


def _read_pickled(folder: Path, kind: str) -> tuple[tuple[str, ...], Part, Part]:
    _require_files(folder, ("train", "test", "meta"))
    contents = {name: _unpickle(folder / name) for name in ("meta", "train", "test")}
    names_key, labels_key = f"{kind}_label_names", f"{kind}_labels"

    def read(name: str) -> Part:
        content = contents[name]
        return _checked(folder / name, np.asarray(content[labels_key]), np.asarray(content["data"]), names)

    try:
        names = tuple(_text(name) for name in contents["meta"][names_key])
        return names, read("train"), read("test")
    except KeyError as error:
        raise InputError(
            f"{DATASET}: {folder} lacks the entry {error}; expected data, {labels_key} and {names_key}"
        ) from error


def _unpickle(file: Path) -> dict[str, Any]:
    try:
        content = _SafeUnpickler(io.BytesIO(file.read_bytes()), encoding="bytes").load()
        return {_text(key): value for key, value in content.items()}
    except Exception as error:  # a damaged pickle raises many kinds
        raise InputError(
            f"{DATASET}: {file} cannot be read ({first_line(error)}): truncated, or not a file of CIFAR-100"
        ) from error


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _checked(file: Path, labels: np.ndarray, data: np.ndarray, names: tuple[str, ...]) -> Part:
    is_images = data.ndim == 2 and data.shape[1] == PIXEL_BYTES and data.dtype == np.uint8
    if not is_images or len(labels) != len(data) or not len(data):
        raise InputError(
            f"{DATASET}: expected rows of {PIXEL_BYTES} bytes and a label for each in {file}, "
            f"got {data.shape} and {len(labels)} labels"
        )
    if int(labels.max()) >= len(names):
        raise InputError(
            f"{DATASET}: {file} has the label {int(labels.max())}, but there are {len(names)} names"
        )
    images = np.ascontiguousarray(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return labels.astype(np.int64), images
