"""Distribution shifts: other images of the same 1,000 classes, read in their published layouts and scored by
their protocols.

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
| imagenet-p | `<kind>/<synset>/*.mp4`, see `clips` | flips, not answers | kind |

A prediction is correct in the top k if any correct class is among the k highest logits: of all 1,000
("top1 of 1000"), and, where the official protocol restricts the classes, of those alone ("top1 of 200").
Higher is better. Nothing is skipped silently: missing files are an error (`partial=True`: a note), and what a
protocol leaves out is counted in `left_out`.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from steadygaze.data.benchmarks import (
    complete,
    complete_count,
    folder,
    folders_in,
    imagenet_names,
    imagenet_synsets,
    some,
)
from steadygaze.data.folders import Classes
from steadygaze.data.images import below
from steadygaze.errors import BadInput, SteadygazeError, UnknownName
from steadygaze.robustness.corruptions.corrupt import COMMON, CORRUPTIONS, SEVERITIES
from steadygaze.robustness.shift_folders import (
    Shift,
    Shifted,
    read_class_folders,
    read_json,
    read_synset_folders,
    read_table,
)

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
BORDER = 2  # pixels around every image of ObjectNet


def any_correct(
    logits: Float[Tensor, "b classes"],
    right: Sequence[Sequence[int]],
    *,
    k: int,
    classes: Sequence[int] | None = None,
) -> Bool[Tensor, " b"]:
    """Whether any correct class is among the k highest logits, of all classes or of `classes`; ties: lower
    index first.

    >>> any_correct(torch.tensor([[0.1, 0.7, 0.2]]), [[0, 2]], k=2)
    tensor([True])
    """
    if logits.dim() != 2 or len(right) != len(logits):
        shape = tuple(logits.shape)
        raise BadInput(
            f"expected logits (B, classes) and correct classes for each, got {shape} and {len(right)}"
        )
    columns = logits.shape[1] if classes is None else len(classes)
    highest = max((c for row in (*right, classes or ()) for c in row), default=-1)
    if highest >= logits.shape[1] or any(not row for row in right):
        raise BadInput(
            f"expected correct classes in 0..{logits.shape[1] - 1}, at least one per image; "
            f"the highest is {highest}"
        )
    if not 1 <= k <= columns:
        raise BadInput(f"k: expected 1..{columns}, got {k}")
    chosen = (
        torch.arange(columns, device=logits.device)
        if classes is None
        else torch.tensor(list(classes), device=logits.device)
    )
    best = chosen[logits[:, chosen].argsort(dim=1, descending=True, stable=True)[:, :k]]
    most = max(len(row) for row in right)
    padded = torch.tensor([[*row, *[-1] * (most - len(row))] for row in right], device=logits.device)
    return (best[:, :, None] == padded[:, None]).any(2).any(1)


def shift_scores(
    logits: Float[Tensor, "b classes"], items: Sequence[Shifted], shift: Shift
) -> dict[str, Bool[Tensor, " b"]]:
    """Whether each image is classified correctly, by the name of the protocol: "top1 of 1000", "top5 of
    200", ...

    >>> shift = Shift("mine", [Shifted(Path("a.jpg"), 2, "a.jpg", right=(2, 3))])
    >>> shift_scores(torch.eye(1000)[[3]], shift.items, shift)
    {'top1 of 1000': tensor([True]), 'top5 of 1000': tensor([True])}
    """
    right = [item.right for item in items]
    protocols = [None] if shift.classes is None else [None, shift.classes]
    out = {}
    for classes in protocols:
        columns = logits.shape[1] if classes is None else len(classes)
        for k in (1, 5):
            out[f"top{k} of {columns}"] = any_correct(logits, right, k=min(k, columns), classes=classes)
    return out


def read_shift(name: str, root: str | Path, *, partial: bool = False, **options: Any) -> Shift:
    """The data set of that name; options: `real` (real.json), `border` and `labels` (ObjectNet).

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
        raise UnknownName("shift", str(name), READERS)
    return READERS[name](root, partial=partial, **options)


def imagenet_a(root: str | Path, *, partial: bool = False) -> Shift:
    """ImageNet-A: natural adversarial examples, 200 classes."""
    return read_synset_folders("imagenet-a", root, imagenet_synsets("a"), 7_500, partial=partial)


def imagenet_r(root: str | Path, *, partial: bool = False) -> Shift:
    """ImageNet-R: renditions, 200 classes; groups are the styles."""
    return read_synset_folders(
        "imagenet-r",
        root,
        imagenet_synsets("r"),
        30_000,
        partial=partial,
        group=lambda p: p.stem.rsplit("_", 1)[0],
    )


def imagenet_sketch(root: str | Path, *, partial: bool = False) -> Shift:
    """ImageNet-Sketch: 1,000 classes in black and white."""
    root = Path(root)
    inner = root / "sketch"
    return read_synset_folders(
        "imagenet-sketch", inner if inner.is_dir() else root, imagenet_synsets(), 50_889, partial=partial
    )


def imagenet_v2(root: str | Path, *, partial: bool = False) -> Shift:
    """ImageNet-V2, one of its three samplings; folders are the class indices."""
    what = "imagenet-v2"
    root = folder(root, what, "a folder with the class indices 0/ .. 999/ as folders")
    names = [str(i) for i in range(1000)]
    return read_class_folders(
        what, root, dict(zip(names, ((i,) for i in range(1000)), strict=True)), 10_000, partial=partial
    )


def imagenet_real(root: str | Path, *, real: str | Path | None = None, partial: bool = False) -> Shift:
    """The validation images of ImageNet with the reassessed labels. Images without a label are left out and
    counted.

    real: the published real.json; by default the one in `root`.
    """
    what = "imagenet-real"
    root = folder(root, what, "a folder of ILSVRC2012_val_*.JPEG, flat or by synset, and real.json")
    file = root / "real.json" if real is None else Path(real)
    labels = read_json(what, file, list)
    found: dict[int, Path] = {}
    for path in sorted(p for p in below(root) if VALIDATION.fullmatch(p.stem)):
        found[int(VALIDATION.fullmatch(path.stem)[1])] = path  # type: ignore[index]
    beyond = [path.name for number, path in found.items() if not 1 <= number <= len(labels)]
    if not found or beyond:
        raise BadInput(
            f"{what}: expected ILSVRC2012_val_00000001 .. {len(labels):08d} in {root}, "
            f"got {some(beyond) or 'none'}"
        )
    note = complete_count(what, root, "images", len(found), len(labels), partial=partial)
    items, without = [], []
    for number, path in sorted(found.items()):
        right = tuple(labels[number - 1])
        if any(not isinstance(c, int) or not 0 <= c < 1000 for c in right):
            raise BadInput(f"{what}: {file} gives image {number} the classes {list(right)}, expected 0..999")
        if right:
            items.append(Shifted(path.relative_to(root).as_posix(), path, right[0], None, right))
        else:
            without.append(path.name)
    left_out = {"no label is right": tuple(without)} if without else {}
    return Shift(what, items, left_out=left_out, notes=(note,) if note else ())


def objectnet(root: str | Path, *, border: bool = True, labels: str = "any", partial: bool = False) -> Shift:
    """ObjectNet's classes that ImageNet has too; the others are left out, and named.

    border: cut off the red border. labels: "any" of a class's ImageNet classes is right, or the "first" alone
        (RobustViT).
    """
    what = "objectnet"
    if labels not in ("any", "first"):
        raise BadInput(f"labels: expected 'any' or 'first', got {labels!r}")
    root = folder(root, what, "a folder objectnet-1.0 with images/<folder>/*.png and mappings/*.json")
    if (root / "objectnet-1.0").is_dir():
        root = root / "objectnet-1.0"
    images, maps = (
        folder(root / name, what, f"images/ and mappings/ in {root}") for name in ("images", "mappings")
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
        raise BadInput(
            f"{what}: classes that do not map: {some([*lost, *unknown])}; "
            f"the files in {maps} do not belong together"
        )
    note = complete(what, images, "folder", sorted(label_of), folders_in(images), partial=partial)
    ids = {f: tuple(index[n] for n in names[label]) for f, label in label_of.items() if label in names}
    restriction = tuple(sorted({c for right in ids.values() for c in right}))
    here = {f: right if labels == "any" else right[:1] for f, right in ids.items() if (images / f).is_dir()}
    made = read_class_folders(what, images, here, None, partial=partial, others=True)
    outside = tuple(sorted(f for f in folders_in(images) if f not in ids))
    left_out = {"no class of ImageNet": outside} if outside else {}
    notes = (note,) if note else ()
    return Shift(what, made.items, restriction, BORDER if border else 0, left_out=left_out, notes=notes)


def _objectnet_index(what: str, maps: Path) -> dict[str, int]:
    """ImageNet's label texts to the index of the logits, by way of the ILSVRC2012 order that the mapping
    files use."""
    file = maps / "imagenet_to_label_2012_v2"
    if not file.is_file():
        raise BadInput(f"{what}: {file} is missing; expected one label per line")
    texts = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    torch_to_line = read_json(what, maps / "pytorch_to_imagenet_2012_id.json", dict)
    if sorted(torch_to_line.values()) != list(range(len(texts))):
        raise BadInput(
            f"{what}: expected {maps}/pytorch_to_imagenet_2012_id.json to number "
            f"the {len(texts)} lines of {file.name} from 0"
        )
    return {texts[line]: int(i) for i, line in torch_to_line.items()}


def si_score(root: str | Path, *, partial: bool = False) -> Shift:
    """SI-Score, one of object_size (area), object_location, object_rotation; groups are the values of what is
    varied."""
    what = "si-score"
    root = folder(
        root, what, "a folder with <class>/<id>.jpg, such as area/, rotation/ or location20_area02_min0pc/"
    )
    known: dict[str, int] = {}
    if (root / "foreground_classes.csv").is_file():
        known = {
            row["label"]: int(row["int"])
            for row in read_table(what, root / "foreground_classes.csv", ("int", "label"))
        }
    classes, there, strange = Classes(imagenet_names(), 1000), folders_in(root), []
    for name in (n for n in there if n not in known):
        try:
            known[name] = classes.index(SI_SCORE.get(name, name.split(" (")[0]))
        except SteadygazeError:
            strange.append(name)
    if strange or not there:
        reason = f"class folders that do not map: {some(strange)}" if strange else "no class folder"
        raise BadInput(f"{what}: {root} holds {reason}")
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
        {n: (known[n],) for n in there},
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
    """The published ImageNet-C: 15 corruptions (or those given) of 50,000 images at 5 severities. Other
    corruptions in the folder are left out and listed."""
    what = "imagenet-c"
    for name in corruptions:
        if name not in CORRUPTIONS:
            raise UnknownName("corruption", str(name), CORRUPTIONS)
    root = folder(
        root,
        what,
        "a folder with <corruption>/<1..5>/<synset>/*.JPEG, each corruption maybe in noise/, blur/, ...",
    )
    places = {
        name: place for up in ("", *KINDS) for name in CORRUPTIONS if (place := root / up / name).is_dir()
    }
    there = [name for name in corruptions if name in places]
    missing = complete(what, root, "corruption", corruptions, there, partial=partial)
    levels = [str(severity) for severity in severities]
    synsets = {s: (i,) for i, s in enumerate(imagenet_synsets())}
    items: list[Shifted] = []
    lacks: dict[str, list[str]] = {}
    for name in there:
        have = [s for s in levels if (places[name] / s).is_dir()]
        if note := complete(what, places[name], "severity folder", levels, have, partial=partial):
            lacks.setdefault(note, []).append(name)
        for severity in have:
            group = f"{name}:{severity}"
            part = read_class_folders(
                what, places[name] / severity, synsets, 50_000, partial=partial, group=group, above=root
            )
            items += part.items
            for note in part.notes:
                lacks.setdefault(note, []).append(group)
    notes = ([missing] if missing else []) + [f"{some(groups)}: {note}" for note, groups in lacks.items()]
    beyond = tuple(name for name in places if name not in corruptions)
    return Shift(
        what,
        items,
        ready=True,
        left_out={"corruptions not requested": beyond} if beyond else {},
        notes=tuple(notes),
    )


def _imagenet_p(root: str | Path, *, partial: bool = False) -> Shift:
    from steadygaze.robustness.clips import imagenet_p

    return imagenet_p(root, partial=partial)


READERS: dict[str, Callable[..., Shift]] = {
    "imagenet-a": imagenet_a,
    "imagenet-r": imagenet_r,
    "imagenet-sketch": imagenet_sketch,
    "imagenet-v2": imagenet_v2,
    "imagenet-real": imagenet_real,
    "objectnet": objectnet,
    "si-score": si_score,
    "imagenet-c": imagenet_c,
    "imagenet-p": _imagenet_p,
}
