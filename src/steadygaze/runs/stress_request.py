"""A stress run over folders: what `steadygaze stress` is asked for, checked as a whole before anything is written, then done."""


from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze import __version__
from steadygaze.data.benchmarks import folders_in, some
from steadygaze.data.folders import Classes, Item, pictures_in
from steadygaze.data.images import SUFFIXES
from steadygaze.data.masks import Labelled, find
from steadygaze.errors import BadInput, UnsupportedModel
from steadygaze.heatmap import versions
from steadygaze.robustness.shifts import Shift, read_shift
from steadygaze.runs.loop import Told, World
from steadygaze.runs.rows import STRESS, Rows
from steadygaze.runs.store import Done, Store, prepare
from steadygaze.runs.stress_data import Lens, Maker, Picture, free_cores
from steadygaze.runs.stress_loop import Batch, Pace, batches, carry_out, mine, shift_batches, work
from steadygaze.runs.stress_measure import Judge
from steadygaze.runs.stress_suite import Options, Plan, Suite, make_plan, parse_suite
from steadygaze.runs.verify import about
from steadygaze.vit import ViT, adapt
from steadygaze.vit.load import Loaded, load_model
from steadygaze.vit.view import logits_of, undisturbed


@dataclass(frozen=True)
class Request:
    """What `steadygaze stress` is asked for."""

    model: str
    data: Path
    out: Path
    suite: Sequence[str]
    checkpoint: Path | None = None
    masks: Path | None = None
    backgrounds: Path | None = None
    limit: int | None = None
    seed: int = 0
    batch: int = 16
    workers: int | None = None  # None: as many as cores are free
    partial: bool = False
    options: Options = field(default_factory=Options)
    num_classes: int | None = None
    device: str = "auto"
    command: str = ""


@dataclass(frozen=True)
class Prepared:
    """A run over folders, checked, with nothing computed yet."""

    request: Request
    loaded: Loaded
    judge: Judge
    plan: Plan
    maker: Maker
    batches: list[Batch]
    settings: dict[str, Any]
    workers: int
    notes: tuple[str, ...]

    def work(self, place: World) -> int:
        """How many pictures the model of this process is shown, all in all."""
        return sum(work(job) for batch in mine(self.batches, place) for job in batch.jobs())


def check_counts(**counts: int | None) -> None:
    """limit, batch: 1 or more; workers, seed: 0 or more."""
    for name, value in counts.items():
        least = 1 if name in ("limit", "batch") else 0
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise BadInput(f"{name}: expected a whole number of {least} or more, got {value!r}")


def prepare_stress(request: Request, place: World | None = None, loaded: Loaded | None = None) -> Prepared:
    """Load the model, find the pictures, check every name; raises before anything is written."""
    place = place or World()
    suite = parse_suite(request.suite)
    device: Any = request.device
    if device == "auto":
        device = place.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if not request.data.is_dir():  # before the model is loaded: it is quicker
        raise BadInput(f"expected a folder of pictures, got {request.data}: {'a file' if request.data.exists() else 'no such folder'}")
    shifts = tuple(_shift(name, folder, request) for name, folder in suite.shifts)
    loaded = loaded or load_model(request.model, request.checkpoint, num_classes=request.num_classes, device=device)
    vit = view(loaded.model, suite)
    classes = outputs(loaded.model, loaded.size)
    if shifts and classes != 1000:
        raise BadInput(f"{shifts[0].name}: its classes are ImageNet's 1,000, but {loaded.name} has {classes}: they do not map")
    found = find(request.data, request.masks, Classes(loaded.classes, classes), request.limit)
    _labelled(found, loaded.name)
    if "synthetic" in suite and found.decode is None:
        raise BadInput(f"synthetic: expected masks: --masks FOLDER, or a column mask in {request.data / 'index.csv'}")
    side = square_side(loaded.size, suite)
    behind = _backgrounds(request.backgrounds, suite)
    plan = make_plan(suite, request.options, vit, loaded.name, classes, side, shifts, bool(behind), request.seed, request.batch)
    judge = Judge(loaded.model, vit, plan, loaded.mean, loaded.std)
    maker = Maker(request.seed, Lens(loaded), shifts, decode=found.decode if "synthetic" in suite else None, backgrounds=behind)
    all_batches = batches([Picture.of(item) for item in found.items], plan.conditions, request.batch)
    for number, shift in enumerate(shifts):
        all_batches += shift_batches(shift, number, plan, request.limit)
    more = {
        "checkpoint": None if request.checkpoint is None else request.checkpoint.name,
        "preprocessing": {k: str(v) for k, v in sorted(loaded.recipe.items())},
        "data": request.data.resolve().name,
        "layout": found.layout,
        "limit": request.limit,
        "shifts": [_facts(shift) for shift in shifts],
        "backgrounds": len(behind),
        "device": judge.device.type,
    }
    notes = (*plan.notes, *(f"{s.name}: {note}" for s in shifts for note in s.notes))
    notes += tuple(f"{s.name}: {len(which)} left out: {why}" for s in shifts for why, which in s.left_out.items())
    empty = _empty(request.data, found)
    if empty:
        notes += (f"{len(empty)} class folders of {request.data.name} hold no picture (half downloaded?): {some(empty)}",)
    if found.without:
        notes += (f"{found.without} pictures have no mask and are left out",)
    identity = {"model": loaded.name, "weights": loaded.weights_hash}
    settings = settings_of(plan, suite, identity, all_batches, notes, more)
    workers = free_cores(judge.device) if request.workers is None else request.workers
    return Prepared(request, loaded, judge, plan, maker, all_batches, settings, workers, notes)


def stress_run(
    request: Request,
    place: World | None = None,
    told: Told = lambda finished, computed: None,
    prepared: Prepared | None = None,
    pace: Pace | None = None,
) -> Rows:
    """Run `steadygaze stress`: rows go into the request's folder; what is there already is not computed again."""
    place = place or World()
    ready = prepared or prepare_stress(request, place)
    if place.local_main:
        where = {
            "data": str(request.data),
            "masks": request.masks and str(request.masks),
            "model": request.model,
            "checkpoint": request.checkpoint and str(request.checkpoint),
            "num_classes": request.num_classes,
        }
        names = ready.loaded.classes
        labels = sorted({p.right[0] for b in ready.batches for p in b.pictures})
        classes = {} if names is None else {str(c): names[c] for c in labels}
        prepare(request.out, ready.settings, {**about(request.command), "given": where, "classes": classes})
    place.wait()
    identity = {"model": ready.loaded.name, "weights": ready.loaded.weights_hash}
    with Store(request.out, place.rank) as store:
        place.wait()  # every file is open before anyone reads them
        own = mine(ready.batches, place)
        carry_out(own, ready.maker, ready.judge, identity, store.append, Done(request.out), told, ready.workers, pace)
    place.wait()
    return Rows.read(request.out)


def settings_of(
    plan: Plan, suite: Suite, identity: dict[str, Any], all_batches: Sequence[Batch], notes: Sequence[str], more: dict[str, Any]
) -> dict[str, Any]:
    """Everything that defines the numbers of a run."""
    options = plan.options
    own = [p for b in all_batches for p in b.pictures if p.shift < 0]
    conditions = dict.fromkeys(setting for b in all_batches for c in b.conditions for setting, _ in c.rows)
    used = any(c.kind in ("corruption", "attention") for c in plan.conditions)
    return {
        "kind": STRESS,
        **identity,
        **more,
        "suite": list(suite.names),
        "pictures": len(own) or None,
        "pictures_hash": hash_of(own) if own else None,
        "conditions": list(conditions) or list(dict.fromkeys(s for c in plan.conditions for s, _ in c.rows)),
        "corruptions": list(options.corruptions) if used else [],
        "severities": list(options.severities) if used else [],
        "epsilons": list(options.epsilons) if "attacks" in suite else [],
        "pgd_steps": options.pgd_steps if "attacks" in suite else None,
        "shares": list(options.shares) if "occlusion" in suite else [],
        "salient": options.salient if "occlusion" in suite else None,
        "classes": plan.classes,
        "batch": plan.batch,
        "seed": plan.seed,
        "notes": list(notes),
        "versions": {"steadygaze": __version__, **versions()},
    }


def hash_of(pictures: Sequence[Picture]) -> str:
    text = "\n".join(f"{p.name}\t{p.right}" for p in pictures)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def view(model: nn.Module, suite: Suite) -> ViT | None:
    """The model's view, where something asks for it; None if it is no vision transformer."""
    if "occlusion" not in suite and "attention" not in suite:
        return None
    try:
        return adapt(model)
    except UnsupportedModel:
        return None


def outputs(model: nn.Module, size: tuple[int, int]) -> int:
    """How many classes a classifier tells apart."""
    parameter = next(iter(model.parameters()), torch.zeros(0))
    with torch.no_grad(), undisturbed(model):
        logits = logits_of(model(torch.zeros(1, 3, *size, device=parameter.device, dtype=parameter.dtype)))
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise UnsupportedModel(f"{type(model).__name__}: expected a classifier that gives logits (B, classes), got {_shape(logits)}")
    return logits.shape[1]


def _shape(x: Any) -> str:
    return str(tuple(x.shape)) if isinstance(x, Tensor) else type(x).__name__


def _labelled(found: Labelled, model: str) -> None:
    names = [item.name for item in found.items]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise BadInput(f"{twice} is listed twice: every picture of a run counts once")
    unknown = next((item.name for item in found.items if item.label is None), None)
    if unknown is not None:
        raise BadInput(f"{unknown}: its class is none of {model}'s. Every picture needs a label that the model knows.")


def _empty(folder: Path, found: Labelled) -> list[str]:
    """Class folders without a picture: a download that stopped half way leaves such."""
    if found.layout not in ("class folders", "pairs"):
        return []
    return [name for name in folders_in(folder) if not any(p.suffix.lower() in SUFFIXES for p in (folder / name).rglob("*"))]


def square_side(size: tuple[int, int], suite: Suite) -> int:
    if size[0] != size[1] and ("sequences" in suite or "synthetic" in suite):
        raise BadInput(f"sequences and synthetic: expected a model of square pictures, this one takes {size[0]}x{size[1]}")
    return size[0]


def _backgrounds(folder: Path | None, suite: Suite) -> tuple[Item, ...]:
    if folder is None or "synthetic" not in suite:
        if folder is not None:
            raise BadInput("backgrounds: they serve the suite synthetic alone, which is not asked for")
        return ()
    return tuple(Item(path.relative_to(folder).as_posix(), path, None) for path in pictures_in(folder))


def _shift(name: str, folder: Path, request: Request) -> Shift:
    try:
        return read_shift(name, folder, partial=request.partial)
    except BadInput as error:
        raise BadInput(str(error).replace("partial=True", "--partial (partial=True)")) from error


def _facts(shift: Shift) -> dict[str, Any]:
    text = "\n".join(f"{item.name}\t{item.right}" for item in shift.items)
    return {
        "name": shift.name,
        "pictures": len(shift.items),
        "hash": hashlib.sha256(text.encode()).hexdigest()[:16],
        "classes": None if shift.classes is None else len(shift.classes),
    }
