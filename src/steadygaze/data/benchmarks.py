"""Published trees: what must be there, what is missing, and the picture sets that are read for their features.

| set | layout |
| --- | --- |
| iNaturalist 2021 mini | `train_mini/<00000_Kingdom_..._species>/*.jpg`, `val/<the same>/*.jpg`; 10,000 species |
| CIFAR-100 | `cifar-100-python/{train,test,meta}` or `cifar-100-binary/{train.bin,test.bin,fine_label_names.txt}` |
| pneumonia X-ray | `chest_xray/{train,val,test}/{NORMAL,PNEUMONIA}/*.jpeg` |
| any other | `train/<class>/*.jpg` and `test/<class>/*.jpg` (or `val`), or two folders of class folders |

A tree that lacks something is an error that names it; `partial=True` takes what is there.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8
from PIL import Image

from steadygaze.data.images import SUFFIXES, read_image
from steadygaze.errors import BadInput

SHOWN = 6  # names that an error spells out


@cache
def imagenet_synsets(subset: str = "") -> tuple[str, ...]:
    """The 1,000 synsets of ImageNet in the order of the logits; "a" or "r": the 200 of ImageNet-A or -R."""
    from importlib.resources import files

    name = f"imagenet_{subset}_synsets.txt" if subset else "imagenet_synsets.txt"
    return tuple((files("timm.data") / "_info" / name).read_text(encoding="utf-8").split())


@cache
def imagenet_names() -> tuple[str, ...]:
    """The names of the 1,000 classes, in the order of the logits."""
    from timm.data import ImageNetInfo

    info = ImageNetInfo()
    return tuple(info.index_to_description(i) for i in range(1000))


def folder(path: str | Path, what: str, expected: str) -> Path:
    """The folder, if it is one; else an error that says what a tree of `what` looks like."""
    path = Path(path)
    if not path.is_dir():
        state = "is a file" if path.exists() else "does not exist"
        raise BadInput(f"{what}: expected {expected}; {path} {state}")
    return path


def folders_in(path: Path) -> list[str]:
    """Names of the folders inside, sorted; hidden ones are left out."""
    return sorted(p.name for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))


def pictures(path: Path) -> list[Path]:
    """The pictures of one folder, by name."""
    return sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())


def some(names: Iterable[str]) -> str:
    """The first few names, and how many more."""
    names = list(names)
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def complete(
    what: str, root: Path, kind: str, wanted: Iterable[str], there: Iterable[str], *, partial: bool
) -> str:
    """A note on what is missing, empty if nothing is; an error unless `partial`. Names that nobody wants are always an error."""
    wanted, there = list(wanted), set(there)
    strange = sorted(there - set(wanted))
    if strange:
        raise BadInput(
            f"{what}: {root} holds {kind}s that do not map: {some(strange)}. Expected {some(wanted)}"
        )
    missing = [name for name in wanted if name not in there]
    if missing and (not partial or not there):
        raise BadInput(
            f"{what}: {root} lacks {len(missing)} of {len(wanted)} {kind}s: {some(missing)}. Half downloaded? "
            "Fetch the rest, or read what is there with partial=True"
        )
    return f"{len(wanted) - len(missing)} of {len(wanted)} {kind}s" if missing else ""


def complete_count(what: str, root: Path, kind: str, found: int, expected: int, *, partial: bool) -> str:
    """The same for a number of things whose names are not known."""
    if found == expected:
        return ""
    if not partial:
        raise BadInput(
            f"{what}: expected {expected} {kind} in {root}, found {found}. Half downloaded? partial=True reads what is there"
        )
    return f"{found} of {expected} {kind}"


@dataclass(frozen=True, eq=False)
class Pictures:
    """Labelled pictures, from files or from one array (N, H, W, 3); `pictures[i]` is an RGB picture."""

    labels: Int[np.ndarray, " n"]
    sources: Sequence[Path] | UInt8[np.ndarray, "n h w 3"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> Image.Image:
        source = self.sources[i]
        return Image.fromarray(source) if isinstance(source, np.ndarray) else read_image(source)


@dataclass(frozen=True, eq=False)
class PictureSet:
    """Pictures to learn from and pictures to judge by, of classes of their own. notes: what is missing, empty if nothing."""

    name: str
    classes: tuple[str, ...]
    train: Pictures
    test: Pictures
    notes: tuple[str, ...] = ()


def inaturalist_mini(root: str | Path, *, partial: bool = False) -> PictureSet:
    """iNaturalist 2021 with its mini training set; tested on its validation set."""
    what, expected = (
        "iNaturalist 2021 mini",
        "a folder with train_mini/<00000_..._species>/ and val/<the same>/",
    )
    root = folder(root, what, expected)
    splits = [folder(root / name, what, expected) for name in ("train_mini", "val")]
    names = sorted(set(folders_in(splits[0])) | set(folders_in(splits[1])))
    odd = [name for name in names if not re.fullmatch(r"\d{5}_.+", name)]
    if odd:
        raise BadInput(f"{what}: expected species folders such as 00000_Animalia_..., got {some(odd)}")
    notes = [
        complete(what, split, "species folder", names, folders_in(split), partial=partial) for split in splits
    ]
    notes.append(complete_count(what, root, "species", len(names), 10_000, partial=partial))
    if partial:  # a class without training or without test pictures cannot be judged
        names = sorted(set(folders_in(splits[0])) & set(folders_in(splits[1])))
    return _split_set("inaturalist-2021-mini", what, splits, names, notes)


def pneumonia(root: str | Path, *, validation: bool = False, partial: bool = False) -> PictureSet:
    """Chest X-rays of Kermany et al., two classes; learnt from train, judged on test (or on val, 16 pictures)."""
    what = "pneumonia X-ray"
    expected = "a folder chest_xray with train/, val/ and test/, each with NORMAL/ and PNEUMONIA/"
    root = folder(root, what, expected)
    if (root / "chest_xray").is_dir():  # as the archive unpacks
        root = root / "chest_xray"
    splits = [folder(root / name, what, expected) for name in ("train", "val" if validation else "test")]
    classes = ("NORMAL", "PNEUMONIA")
    for split in splits:
        complete(what, split, "class folder", classes, folders_in(split), partial=False)
    sizes = (5216, 16 if validation else 624)
    made = _split_set("pneumonia", what, splits, classes, [])
    notes = [
        complete_count(what, s, "pictures", len(p), n, partial=partial)
        for s, p, n in zip(splits, (made.train, made.test), sizes, strict=True)
    ]
    return PictureSet(made.name, made.classes, made.train, made.test, tuple(note for note in notes if note))


def two_folders(
    name: str, train: str | Path, test: str | Path | None = None, *, partial: bool = False
) -> PictureSet:
    """Any pictures in class folders, to learn from and to judge by; without `test`, the folders train and test (or val) in
    the one that is given."""
    expected = "train/<class>/ and test/<class>/ (or val/<class>/), or two folders of class folders"
    train = folder(train, name, expected)
    if test is None:
        root = train
        train = folder(root / "train", name, f"{expected}. A published set is called {', '.join(SETS)}")
        test = root / "val" if (root / "val").is_dir() and not (root / "test").is_dir() else root / "test"
    splits = [train, folder(test, name, expected)]
    classes = folders_in(train)
    note = complete(name, splits[1], "class folder", classes, folders_in(splits[1]), partial=partial)
    if partial:
        classes = folders_in(splits[1])
    return _split_set(name, name, splits, classes, [note])


def _split_set(
    name: str, what: str, splits: list[Path], classes: Sequence[str], notes: list[str]
) -> PictureSet:
    made = []
    for split in splits:
        files = [
            (path, label)
            for label, folder_name in enumerate(classes)
            for path in pictures(split / folder_name)
        ]
        have = {label for _, label in files}
        empty = [c for label, c in enumerate(classes) if label not in have]
        if not files or empty:
            raise BadInput(
                f"{what}: expected pictures in {split}/<class>/, found none in {some(empty) or 'any'}"
            )
        made.append(Pictures(np.array([label for _, label in files]), [path for path, _ in files]))
    return PictureSet(name, tuple(classes), made[0], made[1], tuple(note for note in notes if note))


def cifar100(root: str | Path, *, coarse: bool = False, partial: bool = False) -> PictureSet:
    """CIFAR-100, the python or the binary edition; coarse: the 20 superclasses. partial changes nothing: half of it is no set."""
    what = "CIFAR-100"
    expected = "cifar-100-python with train, test and meta, or cifar-100-binary with train.bin, test.bin and fine_label_names.txt"
    root = folder(root, what, f"a folder {expected}")
    kind = "coarse" if coarse else "fine"
    for place in (root, root / "cifar-100-python", root / "cifar-100-binary"):
        if (place / "train.bin").is_file() or (place / "fine_label_names.txt").is_file():
            names, parts = _binary(what, place, kind)
            break
        if (place / "meta").is_file() or (place / "train").is_file():
            names, parts = _pickled(what, place, kind)
            break
    else:
        raise BadInput(
            f"{what}: expected {expected} in {root}, found {some(sorted(p.name for p in root.iterdir())) or 'nothing'}"
        )
    return PictureSet("cifar-100" + ("-coarse" if coarse else ""), names, parts[0], parts[1])


SETS = {"inaturalist-2021-mini": inaturalist_mini, "cifar-100": cifar100, "pneumonia": pneumonia}


def picture_set(
    name: str, train: str | Path, test: str | Path | None = None, *, partial: bool = False
) -> PictureSet:
    """The published set of that name, or two folders called so."""
    if test is None and name in SETS:
        return SETS[name](train, partial=partial)
    return two_folders(name, train, test, partial=partial)


def _need(what: str, place: Path, names: Sequence[str]) -> None:
    missing = [name for name in names if not (place / name).is_file()]
    if missing:
        raise BadInput(
            f"{what}: {place} lacks {some(missing)}; expected {', '.join(names)}. Half downloaded?"
        )


def _binary(what: str, place: Path, kind: str) -> tuple[tuple[str, ...], list[Pictures]]:
    """Records of a coarse label, a fine label and 3072 bytes, planes of red, green and blue."""
    _need(what, place, ("train.bin", "test.bin", f"{kind}_label_names.txt"))
    names = tuple((place / f"{kind}_label_names.txt").read_text(encoding="utf-8").split())
    parts = []
    for file in ("train.bin", "test.bin"):
        data = np.fromfile(place / file, dtype=np.uint8)
        if not len(data) or len(data) % 3074:
            raise BadInput(
                f"{what}: expected records of 3074 bytes in {place / file}, got {len(data)} bytes: cut off?"
            )
        rows = data.reshape(-1, 3074)
        parts.append(_arrays(what, place / file, rows[:, 1 if kind == "fine" else 0], rows[:, 2:], names))
    return names, parts


class _Plain(pickle.Unpickler):
    """Reads arrays, lists, dicts, strings and numbers; anything that would run code is refused."""

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
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a picture file")
        return super().find_class(module, name)


def _pickled(what: str, place: Path, kind: str) -> tuple[tuple[str, ...], list[Pictures]]:
    _need(what, place, ("train", "test", "meta"))
    read = {}
    for name in ("meta", "train", "test"):
        try:
            raw = _Plain(io.BytesIO((place / name).read_bytes()), encoding="bytes").load()
            read[name] = {k.decode() if isinstance(k, bytes) else k: v for k, v in raw.items()}
        except Exception as error:  # a damaged pickle raises whatever its bytes call for
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise BadInput(
                f"{what}: {place / name} cannot be read ({reason}): cut off, or no file of CIFAR-100"
            ) from error
    try:
        names = tuple(n.decode() if isinstance(n, bytes) else n for n in read["meta"][f"{kind}_label_names"])
        parts = [
            _arrays(
                what,
                place / name,
                np.asarray(read[name][f"{kind}_labels"]),
                np.asarray(read[name]["data"]),
                names,
            )
            for name in ("train", "test")
        ]
    except KeyError as error:
        raise BadInput(
            f"{what}: {place} lacks the entry {error}; expected data, {kind}_labels and {kind}_label_names"
        ) from error
    return names, parts


def _arrays(what: str, file: Path, labels: np.ndarray, data: np.ndarray, names: tuple[str, ...]) -> Pictures:
    if (
        data.ndim != 2
        or data.shape[1] != 3072
        or data.dtype != np.uint8
        or len(labels) != len(data)
        or not len(data)
    ):
        raise BadInput(
            f"{what}: expected rows of 3072 bytes and a label each in {file}, got {data.shape} and {len(labels)} labels"
        )
    if int(labels.max()) >= len(names):
        raise BadInput(f"{what}: {file} has the label {int(labels.max())}, but there are {len(names)} names")
    return Pictures(
        labels.astype(np.int64), np.ascontiguousarray(data.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    )
