"""Distribution shifts: other images of ImageNet's classes, read in their published layouts.

| name | layout | right | group |
| --- | --- | --- | --- |
| imagenet-a | `<synset>/*.jpg`, 200 classes, 7,500 images | one | |
| imagenet-r | `<synset>/<style>_0.jpg`, 200 classes, 30,000 images | one | style |
| imagenet-sketch | `<synset>/*.JPEG`, 1,000 classes, 50,889 images | one | |
| imagenet-v2 | `<0..999>/*.jpeg`, 10,000 images | one | |
| imagenet-real | ILSVRC2012_val_*.JPEG, flat or by synset, and real.json | any of several | |
| objectnet | `images/<folder>/*.png`, `mappings/*.json`; a red border | any of several | |
| si-score | `<class>/<id>.jpg`, maybe metadata.csv and foreground_classes.csv | one | what is varied |
| imagenet-c | `[<kind>/]<corruption>/<1..5>/<synset>/*.JPEG`, 224 x 224 | one | corruption:severity |
| imagenet-p | `<kind>/<synset>/*.mp4`, about 30 frames | flips, not answers | kind |

A prediction is correct in the top k if any correct class is among the k highest logits: of all 1,000
("top1 of 1000"), and, where the official protocol restricts the classes, of those alone ("top1 of 200").
Higher is better. Nothing is skipped silently: missing files are an error (`partial=True`: a note), and what a
protocol leaves out is counted in `left_out`, such as the kinds of ImageNet-P's archives that are not part of
mFR. Videos are decoded by PyAV or OpenCV, whichever is installed.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from steadygaze.data.datasets.imagenet import (
    COMMON,
    CORRUPTIONS,
    IMAGENET_CLASSES,
    PERTURBATIONS,
    SEVERITIES,
    imagenet_names,
    imagenet_synsets,
)
from steadygaze.data.datasets.tree import (
    abbreviated,
    check_complete,
    check_count,
    image_files,
    require_folder,
    subfolders,
)
from steadygaze.data.folders import ClassLookup, Item, interleave
from steadygaze.data.images import images_below, read_image
from steadygaze.errors import ImageError, InputError, SteadygazeError, UnknownNameError
from steadygaze.untrusted import parse_json, read_text


@dataclass(frozen=True)
class Shifted(Item):
    """An image with every class that is correct for it; `label` is the first. Its group is the part of the
    data set that is scored separately."""

    right: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shift:
    """A data set of shifted images.

    Args:
        name (str): of the data set.
        items (list[Shifted]): the images.
        classes (tuple[int, ...]): the official restriction of the classes; None for all 1,000.
        border (int): pixels to cut off each side.
        ready (bool): whether the images already have the model's size and are not resized.
        left_out (dict): reason -> names of what the protocol leaves out.
        notes (tuple[str, ...]): what is missing.
    """

    name: str
    items: list[Shifted]
    classes: tuple[int, ...] | None = None
    border: int = 0
    ready: bool = False
    left_out: dict[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def read(self, item: Item) -> Image.Image:
        """Read the image as RGB, without its border if it has one."""
        image = read_image(item.path)
        if not self.border:
            return image
        return image.crop((self.border, self.border, image.width - self.border, image.height - self.border))


def read_synset_folders(
    what: str,
    root: str | Path,
    synsets: Sequence[str],
    expected: int,
    *,
    partial: bool,
    group: Callable[[Path], str] | str = "",
) -> Shift:
    """Read the images of ROOT/<synset>/, each labeled with the class of its synset."""
    root = require_folder(root, what, f"a folder with {len(synsets)} synset folders such as {synsets[0]}/")
    index = {s: i for i, s in enumerate(imagenet_synsets())}
    labeled = read_class_folders(
        what, root, {s: (index[s],) for s in synsets}, expected, partial=partial, group=group
    )
    classes = tuple(sorted(index[s] for s in synsets)) if len(synsets) < IMAGENET_CLASSES else None
    return Shift(what, labeled.items, classes, notes=labeled.notes)


def read_class_folders(
    what: str,
    root: Path,
    right: Mapping[str, tuple[int, ...]],
    expected: int | None,
    *,
    partial: bool,
    group: Callable[[Path], str] | str = "",
    others: bool = False,
    above: Path | None = None,
) -> Shift:
    """Read the images of ROOT/<folder>/, labeled by their folder, in an order that visits classes evenly."""
    present = [name for name in subfolders(root) if name in right or not others]
    notes = [check_complete(what, root, "class folder", right, present, partial=partial)]
    groups = []
    for name in present:
        files = image_files(root / name)
        if not files and not partial:
            raise InputError(
                f"{what}: {root / name} contains no image. Incomplete download? partial=True reads what is "
                "there"
            )
        notes.append("" if files else f"{name} is empty")
        base = root if above is None else above
        paths = ((p, p.relative_to(base).as_posix()) for p in files)
        groups.append(
            [
                Shifted(
                    rel, p, right[name][0], None, right[name], group=group(p) if callable(group) else group
                )
                for p, rel in paths
            ]
        )
    items = cast(list[Shifted], interleave(groups))
    if not items:
        raise InputError(f"{what}: expected images in {root}/<class>/, found none")
    if expected is not None:
        notes.append(check_count(what, root, "images", len(items), expected, partial=partial))
    return Shift(what, items, notes=tuple(note for note in notes if note))


def read_json(what: str, file: Path, kind: type) -> Any:
    """Read a JSON file, which must be a non-empty `kind`."""
    if not file.is_file():
        raise InputError(f"{what}: {file} is missing; it comes with the data set")
    try:
        read = parse_json(read_text(file).encode())
    except ValueError as error:
        raise InputError(f"{what}: {file} cannot be read as JSON ({error}): truncated?") from error
    if not isinstance(read, kind) or not read:
        raise InputError(
            f"{what}: expected {file} to hold a {kind.__name__} with entries, got {type(read).__name__}"
        )
    return read


def read_table(what: str, file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """Read the rows of a CSV file that must have these columns."""
    with file.open(newline="", encoding="utf-8-sig") as opened:
        reader = csv.DictReader(opened)
        missing = [c for c in columns if c not in (reader.fieldnames or ())]
        if missing:
            raise InputError(
                f"{what}: {file} lacks the columns {', '.join(missing)}; expected {', '.join(columns)}"
            )
        return list(reader)


VALIDATION = re.compile(r"ILSVRC2012_val_(\d{8})")
KINDS = ("noise", "blur", "weather", "digital", "extra")  # the archives of ImageNet-C
SI_SCORE = {  # its names that are not ImageNet's own
    "band-aid": "Band Aid",
    "common fig": "fig",
    "eraser": "rubber eraser",
    "jeans": "jean",
    "light switch": "switch",
    "maracas": "maraca",
}
EXTRA = re.compile(r"spatter|shear|gaussian_blur|speckle_noise|(gaussian|shot|speckle)_noise_[23]")
FILMS = (".mp4", ".avi")
BORDER = 2  # pixels around every image of ObjectNet


def read_shift(name: str, root: str | Path, *, partial: bool = False, **options: Any) -> Shift:
    """Read a data set of shifted images.

    Args:
        name (str): a name of the table above, such as "imagenet-a".
        root (str | Path): folder of the data set.
        partial (bool): read an incomplete folder, with a note.
        **options: `real` (file of imagenet-real), `border` and `labels` (objectnet), `corruptions` and
            `severities` (imagenet-c).

    Returns:
        Shift: the images with their correct classes.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> with TemporaryDirectory() as folder:  # a part of the data: one image
        ...     Path(folder, "n01498041").mkdir()
        ...     Image.new("RGB", (8, 8)).save(Path(folder, "n01498041", "a.jpg"))
        ...     shift = read_shift("imagenet-a", folder, partial=True)
        >>> len(shift.items), len(shift.classes)
        (1, 200)
    """
    if name not in READERS:
        raise UnknownNameError("shift", str(name), READERS)
    return READERS[name](root, partial=partial, **options)


def imagenet_a(root: str | Path, *, partial: bool = False) -> Shift:
    """Read ImageNet-A: natural adversarial examples, 200 classes."""
    return read_synset_folders("imagenet-a", root, imagenet_synsets("a"), 7_500, partial=partial)


def imagenet_r(root: str | Path, *, partial: bool = False) -> Shift:
    """Read ImageNet-R: renditions, 200 classes; groups are the styles."""
    return read_synset_folders(
        "imagenet-r",
        root,
        imagenet_synsets("r"),
        30_000,
        partial=partial,
        group=lambda p: p.stem.rsplit("_", 1)[0],
    )


def imagenet_sketch(root: str | Path, *, partial: bool = False) -> Shift:
    """Read ImageNet-Sketch: 1,000 classes in black and white."""
    inner = Path(root) / "sketch"
    folder = inner if inner.is_dir() else root
    return read_synset_folders("imagenet-sketch", folder, imagenet_synsets(), 50_889, partial=partial)


def imagenet_v2(root: str | Path, *, partial: bool = False) -> Shift:
    """Read ImageNet-V2, one of its three samplings; folders are the class indices."""
    what = "imagenet-v2"
    root = require_folder(root, what, "a folder with the class indices 0/ .. 999/ as folders")
    return read_class_folders(
        what, root, {str(i): (i,) for i in range(IMAGENET_CLASSES)}, 10_000, partial=partial
    )


def imagenet_real(root: str | Path, *, real: str | Path | None = None, partial: bool = False) -> Shift:
    """Read the validation images of ImageNet with the reassessed labels; images without one are left out.

    Args:
        real: The published real.json; by default the one in `root`.
    """
    what = "imagenet-real"
    root = require_folder(root, what, "a folder of ILSVRC2012_val_*.JPEG, flat or by synset, and real.json")
    file = root / "real.json" if real is None else Path(real)
    labels = read_json(what, file, list)
    found: dict[int, Path] = {}
    for path in sorted(p for p in images_below(root) if VALIDATION.fullmatch(p.stem)):
        found[int(VALIDATION.fullmatch(path.stem)[1])] = path  # type: ignore[index]
    beyond = [path.name for number, path in found.items() if not 1 <= number <= len(labels)]
    if not found or beyond:
        raise InputError(
            f"{what}: expected ILSVRC2012_val_00000001 .. {len(labels):08d} in {root}, "
            f"got {abbreviated(beyond) or 'none'}"
        )
    note = check_count(what, root, "images", len(found), len(labels), partial=partial)
    items, without = [], []
    for number, path in sorted(found.items()):
        right = tuple(labels[number - 1])
        if any(not isinstance(c, int) or not 0 <= c < IMAGENET_CLASSES for c in right):
            raise InputError(
                f"{what}: {file} gives image {number} the classes {list(right)}, expected 0..999"
            )
        if right:
            items.append(Shifted(path.relative_to(root).as_posix(), path, right[0], None, right))
        else:
            without.append(path.name)
    left_out = {"no label is right": tuple(without)} if without else {}
    return Shift(what, items, left_out=left_out, notes=(note,) if note else ())


def objectnet(root: str | Path, *, border: bool = True, labels: str = "any", partial: bool = False) -> Shift:
    """Read ObjectNet's classes that ImageNet has too; the others are left out, and named.

    Args:
        border: Cut off the red border.
        labels: "any" of a class's ImageNet classes is right, or the "first" alone (RobustViT).
    """
    what = "objectnet"
    if labels not in ("any", "first"):
        raise InputError(f"labels: expected 'any' or 'first', got {labels!r}")
    root = require_folder(root, what, "a folder objectnet-1.0 with images/<folder>/*.png and mappings/*.json")
    if (root / "objectnet-1.0").is_dir():
        root = root / "objectnet-1.0"
    images, maps = (
        require_folder(root / name, what, f"images/ and mappings/ in {root}")
        for name in ("images", "mappings")
    )
    label_of = read_json(what, maps / "folder_to_objectnet_label.json", dict)
    names = {
        k: [n.strip() for n in v.split(";")]
        for k, v in read_json(what, maps / "objectnet_to_imagenet_1k.json", dict).items()
    }
    index = _objectnet_index(what, maps)
    lost = sorted({n for wanted in names.values() for n in wanted if n not in index})
    unknown = sorted(set(names) - set(label_of.values()))
    if lost or unknown:
        raise InputError(
            f"{what}: classes that do not map: {abbreviated([*lost, *unknown])}; "
            f"the files in {maps} do not belong together"
        )
    note = check_complete(what, images, "folder", sorted(label_of), subfolders(images), partial=partial)
    ids = {f: tuple(index[n] for n in names[label]) for f, label in label_of.items() if label in names}
    restriction = tuple(sorted({c for right in ids.values() for c in right}))
    here = {f: right if labels == "any" else right[:1] for f, right in ids.items() if (images / f).is_dir()}
    folders = read_class_folders(what, images, here, None, partial=partial, others=True)
    outside = tuple(sorted(f for f in subfolders(images) if f not in ids))
    left_out = {"no class of ImageNet": outside} if outside else {}
    notes = (note,) if note else ()
    return Shift(what, folders.items, restriction, BORDER if border else 0, left_out=left_out, notes=notes)


def _objectnet_index(what: str, maps: Path) -> dict[str, int]:
    """Map ImageNet's label texts to class indices, through the ILSVRC2012 order of the mapping files."""
    file = maps / "imagenet_to_label_2012_v2"
    if not file.is_file():
        raise InputError(f"{what}: {file} is missing; expected one label per line")
    texts = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    torch_to_line = read_json(what, maps / "pytorch_to_imagenet_2012_id.json", dict)
    if sorted(torch_to_line.values()) != list(range(len(texts))):
        raise InputError(
            f"{what}: expected {maps}/pytorch_to_imagenet_2012_id.json to number "
            f"the {len(texts)} lines of {file.name} from 0"
        )
    return {texts[line]: int(i) for i, line in torch_to_line.items()}


def si_score(root: str | Path, *, partial: bool = False) -> Shift:
    """Read SI-Score (object_size, object_location or object_rotation); groups: the values that are varied."""
    what = "si-score"
    root = require_folder(
        root, what, "a folder with <class>/<id>.jpg, such as area/, rotation/ or location20_area02_min0pc/"
    )
    class_of: dict[str, int] = {}
    if (root / "foreground_classes.csv").is_file():
        class_of = {
            row["label"]: int(row["int"])
            for row in read_table(what, root / "foreground_classes.csv", ("int", "label"))
        }
    classes, there, strange = ClassLookup(imagenet_names(), IMAGENET_CLASSES), subfolders(root), []
    for name in (n for n in there if n not in class_of):
        try:
            class_of[name] = classes.index(SI_SCORE.get(name, name.split(" (")[0]))
        except SteadygazeError:
            strange.append(name)
    if strange or not there:
        reason = f"class folders that do not map: {abbreviated(strange)}" if strange else "no class folder"
        raise InputError(f"{what}: {root} holds {reason}")
    groups: dict[str, str] = {}
    expected = None
    if (root / "metadata.csv").is_file():
        rows = read_table(what, root / "metadata.csv", ("image_id", "x_coord", "y_coord", "area", "rotation"))
        expected = len(rows)
        for row in rows:
            groups[row["image_id"]] = "x={x_coord} y={y_coord} area={area} rotation={rotation}".format(**row)
    return read_class_folders(
        what,
        root,
        {n: (class_of[n],) for n in there},
        expected,
        partial=partial,
        group=lambda p: groups.get(p.stem, ""),
    )


def imagenet_c(
    root: str | Path,
    *,
    corruptions: Sequence[str] = COMMON,
    severities: Sequence[int] = SEVERITIES,
    partial: bool = False,
) -> Shift:
    """Read the published ImageNet-C: 15 corruptions (or those given) of 50,000 images at 5 severities.

    Other corruptions in the folder are left out and listed.
    """
    what = "imagenet-c"
    for name in corruptions:
        if name not in CORRUPTIONS:
            raise UnknownNameError("corruption", str(name), CORRUPTIONS)
    root = require_folder(
        root,
        what,
        "a folder with <corruption>/<1..5>/<synset>/*.JPEG, each corruption maybe in noise/, blur/, ...",
    )
    places = {
        name: place for up in ("", *KINDS) for name in CORRUPTIONS if (place := root / up / name).is_dir()
    }
    there = [name for name in corruptions if name in places]
    missing = check_complete(what, root, "corruption", corruptions, there, partial=partial)
    levels = [str(severity) for severity in severities]
    synsets = {s: (i,) for i, s in enumerate(imagenet_synsets())}
    items: list[Shifted] = []
    lacks: dict[str, list[str]] = {}
    for name in there:
        have = [s for s in levels if (places[name] / s).is_dir()]
        if note := check_complete(what, places[name], "severity folder", levels, have, partial=partial):
            lacks.setdefault(note, []).append(name)
        for severity in have:
            group = f"{name}:{severity}"
            part = read_class_folders(
                what, places[name] / severity, synsets, 50_000, partial=partial, group=group, above=root
            )
            items += part.items
            for note in part.notes:
                lacks.setdefault(note, []).append(group)
    notes = ([missing] if missing else []) + [
        f"{abbreviated(groups)}: {note}" for note, groups in lacks.items()
    ]
    beyond = tuple(name for name in places if name not in corruptions)
    return Shift(
        what,
        items,
        ready=True,
        left_out={"corruptions not requested": beyond} if beyond else {},
        notes=tuple(notes),
    )


def imagenet_p(root: str | Path, *, partial: bool = False) -> Shift:
    """Read the published clips of ImageNet-P's ten kinds; group: the kind."""
    what = "imagenet-p"
    root = require_folder(root, what, "a folder with <kind>/<synset>/*.mp4, the ten kinds of ImageNet-P")
    there = subfolders(root)
    beyond = {name: tuple(subfolders(root / name)) for name in there if EXTRA.fullmatch(name)}
    kinds = [name for name in there if name not in beyond]
    notes = [check_complete(what, root, "kind", PERTURBATIONS, kinds, partial=partial)]
    class_index = {synset: i for i, synset in enumerate(imagenet_synsets())}
    items: list[Shifted] = []
    for kind in (name for name in PERTURBATIONS if name in kinds):
        synsets = subfolders(root / kind)
        strange = [name for name in synsets if name not in class_index]
        if strange:
            raise InputError(
                f"{what}: {root / kind} contains folders that are not synsets of ImageNet: "
                f"{abbreviated(strange)}"
            )
        films = [
            path
            for name in synsets
            for path in sorted((root / kind / name).iterdir())
            if path.suffix.lower() in FILMS
        ]
        if not films:
            raise InputError(f"{what}: expected {kind}/<synset>/*.mp4 in {root}, found no video")
        items += [
            Shifted(
                path.relative_to(root).as_posix(),
                path,
                class_index[path.parent.name],
                None,
                (class_index[path.parent.name],),
                group=kind,
            )
            for path in films
        ]
    left_out = {"no kind of mFR": tuple(beyond)} if beyond else {}
    _decoder()  # a missing decoder is reported now
    return Shift(what, items, ready=True, left_out=left_out, notes=tuple(filter(None, notes)))


READERS: dict[str, Callable[..., Shift]] = {
    "imagenet-a": imagenet_a,
    "imagenet-r": imagenet_r,
    "imagenet-sketch": imagenet_sketch,
    "imagenet-v2": imagenet_v2,
    "imagenet-real": imagenet_real,
    "objectnet": objectnet,
    "si-score": si_score,
    "imagenet-c": imagenet_c,
    "imagenet-p": imagenet_p,
}


def read_clip(path: str | Path) -> UInt8[np.ndarray, "t h w 3"]:
    """Read the frames of a video, RGB; at least two.

    Examples:
        ```python
        frames = read_clip("clip.mp4")  # (T, H, W, 3)
        ```
    """
    name, library = _decoder()
    if not Path(path).is_file():
        raise ImageError(f"{path} is not a video: no such file")
    try:
        frames: list[np.ndarray] = []
        if name == "av":
            with library.open(str(path)) as film:
                frames = [frame.to_ndarray(format="rgb24") for frame in film.decode(video=0)]
        else:
            film = library.VideoCapture(str(path))
            while (read := film.read())[0]:
                frames.append(np.ascontiguousarray(read[1][..., ::-1]))
            film.release()
    except Exception as error:  # each library has errors of its own
        raise ImageError(f"{path} is not a readable video ({str(error) or type(error).__name__})") from error
    if len(frames) < 2 or len({frame.shape for frame in frames}) > 1:
        raise ImageError(f"{path}: expected a video of two frames or more, got {len(frames)}: truncated?")
    return np.stack(frames)


def _decoder() -> tuple[str, Any]:
    for name in ("av", "cv2"):
        try:
            return name, import_module(name)
        except ImportError:
            continue
    raise InputError("imagenet-p: its videos need a decoder: pip install av, or opencv-python-headless")
