"""A run over a folder of pictures: what `steadygaze verify` is asked for, checked as a whole before anything is
written, then done."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygaze.data.folders import Classes, Item
from steadygaze.data.images import read_image
from steadygaze.data.masks import Labelled, find, geometry, read_mask
from steadygaze.errors import BadImage, BadInput
from steadygaze.faithfulness.metric import Batch
from steadygaze.loading.load import Loaded
from steadygaze.methods.diffmask import with_gates
from steadygaze.runs.asked import Asked, digest, outputs
from steadygaze.runs.loop import Chunk, Told, World, run
from steadygaze.runs.plan import DEFAULT_METRICS, Plan, make_plan, start_layers
from steadygaze.runs.rows import Rows
from steadygaze.runs.store import Done, Store, prepare
from steadygaze.runs.verify import about, picker, settings_of
from steadygaze.vit import ViT, adapt


def words(texts: Sequence[str] | None) -> list[str]:
    """Names between commas."""
    return [piece.strip() for text in texts or () for piece in text.split(",") if piece.strip()]


def numbers(text: str | None) -> list[float] | None:
    """Numbers between commas."""
    try:
        return None if text is None else [float(piece) for piece in text.split(",")]
    except ValueError as error:
        raise BadInput(f"--ratios: expected numbers such as 0.1,0.5,0.9; got {text!r}") from error


def command_line() -> str:
    """The command that was given, to be read and to be given again."""
    return shlex.join(["steadygaze", *sys.argv[1:]])


@dataclass(frozen=True)
class Request(Asked):
    """What `steadygaze verify` is asked for."""

    methods: list[str]
    metrics: list[str] = field(default_factory=list)  # empty: the four removal scores
    scores: list[str] | None = None
    start_layers: str | None = None
    ratios: list[float] | None = None
    fill: str = "zero"
    workers: int = 0
    target: str = "label"
    diffmask: Path | None = None


@dataclass(frozen=True)
class Prepared:
    """A run over a folder, checked, with nothing computed yet."""

    request: Request
    loaded: Loaded
    vit: ViT
    plan: Plan
    found: Labelled
    settings: dict[str, Any]

    @property
    def chunks(self) -> list[tuple[Item, ...]]:
        """The items of each batch."""
        size = self.request.batch
        return [tuple(self.found.items[i : i + size]) for i in range(0, len(self.found.items), size)]


def prepare_run(request: Request, place: World | None = None) -> Prepared:
    """Load the model, find the pictures, check every name; raises before anything is written."""
    place = place or World()
    data = request.folder  # before the model is loaded: it is quicker
    loaded = request.load(place)
    vit, classes = adapt(loaded.model), outputs(loaded.model, loaded.size)
    plan = make_plan(
        vit,
        with_gates(request.methods, request.diffmask),
        request.metrics or DEFAULT_METRICS,
        request.scores,
        request.ratios,
        request.seed,
        start_layers(request.start_layers, vit),
        request.fill,
    )
    found = find(data, request.masks, Classes(loaded.classes, classes), request.limit)
    if plan.needs_masks and found.decode is None:
        raise BadInput(
            f"{', '.join(plan.needs_masks)}: expected masks. Give --masks FOLDER, or leave these metrics out."
        )
    if request.target == "label" and any(item.label is None for item in found.items):
        unknown = next(item.name for item in found.items if item.label is None)
        raise BadInput(
            f"{unknown}: its class is none of the model's. Explain the model's own answer: --target predicted"
        )
    target: Any = (
        request.target if request.target in ("label", "predicted") else loaded.class_index(request.target)
    )
    if isinstance(target, int) and target >= classes:
        raise BadInput(f"class {target} is out of range: the model has classes 0..{classes - 1}")
    more = {
        **request.facts(loaded),
        "pictures": len(found.items),
        "pictures_hash": digest(
            f"{item.name}\t{item.label}\t{item.mask is not None}" for item in found.items
        ),
        "layout": found.layout,
        "masks": found.decode is not None,
        "batch": request.batch,
        "target": str(target),
        "start_layers": request.start_layers,
        "device": loaded_device(vit).type,
    }
    if request.diffmask is not None:
        more["diffmask"] = hashlib.sha256(request.diffmask.read_bytes()).hexdigest()[:16]
    settings = settings_of(plan, loaded.identity, more)
    return Prepared(request, loaded, vit, plan, found, settings)


def verify_run(
    request: Request,
    place: World | None = None,
    told: Told = lambda finished, computed: None,
    prepared: Prepared | None = None,
) -> Rows:
    """Run `steadygaze verify`: rows go into the request's folder; what is there already is not computed again."""
    place = place or World()
    ready = prepared or prepare_run(request, place)
    if place.local_main:
        prepare(
            request.out,
            ready.settings,
            {**about(request.command), "given": {**request.given(), **_gates(request)}},
        )
    place.wait()
    target: Any = (
        request.target if request.target in ("label", "predicted") else int(ready.settings["target"])
    )
    pool = ThreadPoolExecutor(max(1, request.workers))
    try:
        with Store(request.out, place.rank) as store:
            place.wait()  # every file is open before anyone reads them
            chunks = (_chunk(ready, items, pool) for items in ready.chunks)
            run(
                ready.vit,
                chunks,
                ready.plan,
                picker(ready.vit, target),
                ready.loaded.identity,
                store.append,
                Done(request.out),
                told,
                place,
                ahead=request.workers,
            )
    finally:
        pool.shutdown(cancel_futures=True)
    place.wait()
    return Rows.read(request.out)


def _chunk(ready: Prepared, items: tuple[Item, ...], pool: ThreadPoolExecutor) -> Chunk:
    loaded, decode, where = ready.loaded, ready.found.decode, loaded_device(ready.vit)
    shrink = None if decode is None else geometry(loaded.source, loaded.recipe)

    def one(item: Item) -> tuple[Tensor, Tensor | None] | str:
        try:
            picture = read_image(item.path)
            image, mask = loaded.preprocess(picture), None
            if decode is not None and shrink is not None:
                seen = shrink(read_mask(item, decode, picture.size))
                mask = torch.frombuffer(bytearray(seen.tobytes()), dtype=torch.uint8).view(
                    seen.height, seen.width
                )
        except BadImage as error:
            return str(error)
        return image, mask

    def load() -> tuple[Batch | None, dict[str, str]]:
        parts = list(pool.map(one, items)) if ready.request.workers else [one(item) for item in items]
        good = [(item, part) for item, part in zip(items, parts, strict=True) if not isinstance(part, str)]
        failed = {item.name: part for item, part in zip(items, parts, strict=True) if isinstance(part, str)}
        if not good:
            return None, failed
        images = torch.stack([image for _, (image, _) in good])
        masks = (
            torch.stack([mask for _, (_, mask) in good if mask is not None]) if decode is not None else None
        )
        labels = torch.tensor([-1 if item.label is None else item.label for item, _ in good])
        mean, std = (torch.tensor(x, dtype=torch.float32, device=where) for x in (loaded.mean, loaded.std))
        names = tuple(item.name for item, _ in good)
        return Batch(
            images.to(where), labels.to(where), None if masks is None else masks.to(where), mean, std, names
        ), failed

    def again(names: Sequence[str]) -> bool:
        return any(not isinstance(one(item), str) for item in items if item.name in set(names))

    return Chunk(tuple(item.name for item in items), load, again)


def _gates(request: Request) -> dict[str, str]:
    return {} if request.diffmask is None else {"diffmask": str(request.diffmask)}


def loaded_device(vit: ViT) -> torch.device:
    return next(vit.model.parameters()).device
