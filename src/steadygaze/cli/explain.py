"""`steadygaze explain`: picture files in; overlays, one grid, scores.npz and manifest.json out."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from torch import Tensor

from steadygaze.data.images import find_images, read_image
from steadygaze.errors import BadImage, BadInput, BrokenMap, DegenerateMap, PartialMap
from steadygaze.explainer import explain
from steadygaze.heatmap import Attribution, grid_picture, overlay_name, percent, versions
from steadygaze.loading.load import Loaded, load_model
from steadygaze.methods import parse
from steadygaze.methods.diffmask import with_gates
from steadygaze.methods.search import manner
from steadygaze.runs.wording import counted
from steadygaze.target import chances
from steadygaze.vit import ViT, adapt

GRID_ROWS = 12  # pictures in the comparing grid
TABLE_ROWS = 20  # pictures in the printed table
SMALLEST = 224  # overlays of smaller pictures are drawn on an enlarged copy


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    images: list[Path]
    model: str
    methods: list[Any]  # names, and what `with_gates` makes of them
    out: Path
    checkpoint: Path | None = None
    target: str = "auto"
    top: int = 1
    score: str | None = None
    batch: int = 8
    signed: bool = False
    num_classes: int | None = None
    device: str = "auto"
    diffmask: Path | None = None
    patches: bool = False


@dataclass
class Results:
    """What was found so far, picture by picture."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    scores: dict[str, list[np.ndarray]] = field(default_factory=dict)
    used: dict[str, str] = field(default_factory=dict)  # method -> the score it explained
    logits: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    grid: list[tuple[list[Image.Image], dict[str, Attribution], list[str]]] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # pictures with a map that is not finite
    empty: list[str] = field(default_factory=list)  # maps that are zero everywhere
    partial: list[str] = field(default_factory=list)  # searches that were stopped


def run(request: Request, console: Console | None = None) -> int:
    """Do it; 0, or 1 where a file could not be read or explained."""
    console, live = console or Console(), Console(stderr=True)
    if request.top > 1 and request.target != "auto":
        raise BadInput(
            f"--top means the likeliest classes, but --target is {request.target}: give only one of them"
        )
    for method in request.methods:
        parse(method)  # a wrong name is told before anything is loaded
    request = replace(request, methods=with_gates(request.methods, request.diffmask))
    files = find_images(request.images)
    device = request.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with live.status(f"loading {escape(request.model)}") if live.is_terminal else nullcontext():
        loaded = load_model(request.model, request.checkpoint, num_classes=request.num_classes, device=device)
        vit = adapt(loaded.model)
    names, found = unique_names(files), Results()
    try:
        request.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"--out: expected a folder that can be written, got {request.out} ({error.strerror})"
        ) from error
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=live, transient=True)
    task = progress.add_task("explaining", total=len(files))
    with progress if live.is_terminal else nullcontext():
        for some, images in batches(files, loaded, request.batch, found.unreadable):
            with manner(
                lambda name, done, total: progress.update(
                    task, description=f"explaining: {name}, {done} of {total} runs"
                )
            ):
                explain_batch(request, loaded, vit, [names[f] for f in some], some, images.to(device), found)
            progress.update(
                task,
                completed=len(found.rows) + len(found.unreadable) + len(found.broken),
                description="explaining",
            )
            if found.partial:  # stopped: what was found until then is written, and nothing more begun
                break
    if found.rows:
        finish(request, loaded, found)
        print_predictions(found, console)
        print_written(request, found, console)
    for text in found.partial:
        console.print(f"stopped before all was done. {text}", style="yellow", markup=False, soft_wrap=True)
    for text in found.empty:
        console.print(
            f"zero everywhere, explains nothing: {text}", style="yellow", markup=False, soft_wrap=True
        )
    for text in found.broken:
        console.print(f"not explained: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
    for text in found.unreadable:
        console.print(f"not read: {text}", style="red", markup=False, highlight=False, soft_wrap=True)
    return 1 if found.unreadable or found.broken else 0


def batches(
    files: list[Path], loaded: Loaded, size: int, unreadable: list[str]
) -> Iterator[tuple[list[Path], Tensor]]:
    """Files that could be read and their preprocessed pictures (b, 3, H, W); the others are noted down."""
    some: list[Path] = []
    images: list[Tensor] = []
    for file in files:
        try:
            images.append(loaded.preprocess(read_image(file)))
            some.append(file)
        except BadImage as error:
            unreadable.append(str(error))
        if len(some) == size:
            yield some, torch.stack(images)
            some, images = [], []
    if some:
        yield some, torch.stack(images)


def explain_batch(
    request: Request,
    loaded: Loaded,
    vit: ViT,
    names: list[str],
    files: list[Path],
    images: Tensor,
    found: Results,
) -> None:
    """Explain a batch, write its overlays and note it for the record; a picture with a broken map is left out."""
    target: Any = None if request.target == "auto" else loaded.class_index(request.target)
    if request.top > 1:
        with torch.no_grad():
            logits = vit(images)
        target = logits.topk(min(request.top, logits.shape[-1])).indices
    try:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("ignore", DegenerateMap)  # told at the end, with the picture's name
            many = explain(vit, images, target=target, method=list(request.methods), score=request.score)
        found.partial += [
            f"{', '.join(names)}: {w.message}" for w in heard if issubclass(w.category, PartialMap)
        ]
        for w in heard:
            if not issubclass(w.category, PartialMap):
                warnings.warn_explicit(w.message, w.category, w.filename, w.lineno)
    except BrokenMap as error:
        if len(files) == 1:
            found.broken.append(f"{files[0]}: {error}")
            return
        for one in range(len(files)):
            each = slice(one, one + 1)
            explain_batch(request, loaded, vit, names[each], files[each], images[each], found)
        return
    pictures = [loaded.picture(image) for image in images]
    many = {name: attribution.to("cpu") for name, attribution in many.items()}
    for name, attribution in many.items():
        found.scores.setdefault(name, []).append(attribution.scores.float().numpy())
        found.used[name] = attribution.score
    first = next(iter(many.values()))
    assert first.target is not None
    found.logits.append(first.logits.float().numpy())
    found.targets.append(first.target.numpy())
    for row, (name, file) in enumerate(zip(names, files, strict=True)):
        found.rows.append(
            {
                "name": name,
                "file": str(file),
                "predictions": ranked(first.logits[row], loaded.classes, 3),
                "targets": described(first, row, loaded.classes),
                "overlays": {key: draw(request, name, pictures[row], att, row) for key, att in many.items()},
            }
        )
        zero = (key for key, att in many.items() if not att.scores[row].any())
        found.empty.extend(f"{key} of {file}" for key in zero)
    if sum(len(some) for some, _, _ in found.grid) < GRID_ROWS:
        found.grid.append((pictures, many, names))


def draw(request: Request, name: str, picture: Image.Image, attribution: Attribution, row: int) -> list[str]:
    """Write the overlays of one picture; gives the names of their files."""
    factor = -(-SMALLEST // max(picture.size))
    if factor > 1:
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    written = []
    for index in attribution.places():
        if (index if isinstance(index, int) else index[0]) == row:
            file = overlay_name(name, attribution.method, index)
            shares = attribution.method.startswith(
                "diffmask"
            )  # of 0..1: a patch that alone is kept is no outlier
            how: dict[str, Any] = {"signed": request.signed, "percentile": 100.0 if shares else 99.0}
            attribution.overlay(picture, index, **how).save(request.out / file)
            written.append(file)
            if request.patches or shares:  # its paper shows both
                hard = file.removesuffix(".png") + "-patches.png"
                attribution.overlay(picture, index, mode="nearest", **how).save(request.out / hard)
                written.append(hard)
    return written


def ranked(logits: Tensor, classes: tuple[str, ...] | None, count: int) -> list[dict[str, Any]]:
    """The most probable classes of one picture."""
    best = chances(logits.double()).topk(min(count, logits.shape[-1]))
    return [_class(int(c), float(p), classes) for p, c in zip(best.values, best.indices, strict=True)]


def described(attribution: Attribution, row: int, classes: tuple[str, ...] | None) -> list[dict[str, Any]]:
    """The classes that were explained for one picture."""
    assert attribution.target is not None
    shares = chances(attribution.logits[row].double())
    return [_class(int(c), float(shares[c]), classes) for c in attribution.target[row].reshape(-1)]


def _class(index: int, probability: float, classes: tuple[str, ...] | None) -> dict[str, Any]:
    name = classes[index] if classes else None
    return {"class": index, "name": name, "probability": round(probability, 6)}


def finish(request: Request, loaded: Loaded, found: Results) -> None:
    """Write the grid, scores.npz and manifest.json."""
    pictures, notes, parts = [], [], {name: [] for name in found.scores}  # type: ignore[var-annotated]
    for some, many, names in found.grid:
        pictures += some
        notes += names
        for name, attribution in many.items():
            parts[name].append(attribution)
    rows = slice(0, GRID_ROWS)
    whole = {name: joined(some)[rows] for name, some in parts.items()}
    grid = grid_picture(
        pictures[rows], whole, classes=short(loaded.classes), notes=notes[rows], signed=request.signed
    )
    grid.save(request.out / "grid.png")
    arrays: dict[str, Any] = {name: np.concatenate(some) for name, some in found.scores.items()}
    arrays |= {"logits": np.concatenate(found.logits), "target": np.concatenate(found.targets)}
    np.savez_compressed(
        request.out / "scores.npz", **arrays, names=np.array([row["name"] for row in found.rows])
    )
    manifest = {
        "model": {
            "name": loaded.name,
            "source": loaded.source,
            "checkpoint": loaded.checkpoint,
            "weights_hash": loaded.weights_hash,
        },
        "preprocessing": loaded.recipe,
        "target": request.target if request.top == 1 else f"top {request.top}",
        "methods": [{"name": name, "score": found.used[name]} for name in found.scores],
        **({} if request.diffmask is None else {"diffmask": request.diffmask.name}),
        "grid": list(next(iter(whole.values())).grid),
        "images": found.rows,
        "unreadable": found.unreadable,
        **({} if not found.partial else {"partial": found.partial}),
        "not_explained": found.broken,
        "zero_maps": found.empty,
        "versions": versions(),
    }
    (request.out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def joined(parts: list[Attribution]) -> Attribution:
    """Attributions of several batches as one."""
    first = parts[0]
    targets = [part.target for part in parts if part.target is not None]
    return Attribution(
        scores=torch.cat([part.scores for part in parts]),
        target=torch.cat(targets) if targets else None,
        logits=torch.cat([part.logits for part in parts]),
        method=first.method,
        score=first.score,
    )


def short(classes: tuple[str, ...] | None) -> list[str] | None:
    """Class names up to their first comma, for titles."""
    return None if classes is None else [name.split(",")[0] for name in classes]


def print_predictions(found: Results, console: Console) -> None:
    table = Table(
        Column("picture", overflow="fold"),
        "1st",
        "2nd",
        "3rd",
        title="what the model says",
        title_justify="left",
        box=SIMPLE,
    )
    for row in found.rows[:TABLE_ROWS]:
        answers = [
            f"{(p['name'] or str(p['class'])).split(',')[0]} {percent(p['probability'])}"
            for p in row["predictions"]
        ]
        table.add_row(*(escape(text) for text in (row["name"], *answers)))
    console.print(table)
    if len(found.rows) > TABLE_ROWS:
        console.print(f"and {len(found.rows) - TABLE_ROWS} more in manifest.json")


def print_written(request: Request, found: Results, console: Console) -> None:
    overlays = sum(len(files) for row in found.rows for files in row["overlays"].values())
    console.print(
        f"wrote to {request.out}: {counted(overlays, 'overlay')}, and",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    rest = "" if len(found.rows) <= GRID_ROWS else f", the first {GRID_ROWS} of {len(found.rows)} pictures"
    for name, what in (
        ("grid.png", f"the methods side by side{rest}"),
        ("scores.npz", "the scores of every patch"),
        ("manifest.json", "model, preprocessing, targets, versions"),
    ):
        console.print(f"  {request.out / name}  {what}", highlight=False, soft_wrap=True, markup=False)


def unique_names(files: list[Path]) -> dict[Path, str]:
    """A short name for each file: its stem; with folders, or at last a number, where stems meet."""
    names: dict[Path, str] = {}
    taken: set[str] = set()
    for file in files:
        words = (*file.parts[:-1], file.stem)
        parts = [re.sub(r"[^\w.-]+", "-", word) for word in words if word not in ("/", ".", "..")]
        choices = ["-".join(parts[start:]) for start in range(len(parts) - 1, -1, -1)]
        name = next(
            (choice for choice in choices if choice.lower() not in taken), f"{choices[0]}-{len(taken)}"
        )
        taken.add(name.lower())  # some disks do not tell A.png from a.png
        names[file] = name
    return names
