"""A stress run over folders: what `steadygaze stress` is asked for, checked as a whole before anything is written, then done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steadygaze import __version__
from steadygaze.data.benchmarks import folders_in, some
from steadygaze.data.folders import Classes, Item, pictures_in
from steadygaze.data.images import below
from steadygaze.data.label_maps import Segmented, find_maps
from steadygaze.data.masks import Labelled, find, geometry
from steadygaze.errors import BadInput, UnsupportedModel
from steadygaze.heatmap import versions
from steadygaze.loading.load import Loaded
from steadygaze.robustness.neighbours import features
from steadygaze.robustness.shifts import Shift, read_shift
from steadygaze.runs.asked import Asked, digest, outputs
from steadygaze.runs.loop import Told, World
from steadygaze.runs.rows import STRESS, Rows
from steadygaze.runs.store import Done, Store, prepare
from steadygaze.runs.stress_data import Lens, Maker, Picture, free_cores
from steadygaze.runs.stress_loop import Batch, Pace, batches, carry_out, mine, shift_batches, total_work
from steadygaze.runs.stress_measure import Judge
from steadygaze.runs.stress_neighbours import Neighbours, read_neighbours
from steadygaze.runs.stress_segmentation import segment_outputs, segmentation_plan
from steadygaze.runs.stress_suite import APART, Options, Plan, Suite, make_plan, parse_suite
from steadygaze.runs.verify import about
from steadygaze.vit import ViT, adapt


@dataclass(frozen=True)
class Request(Asked):
    """What `steadygaze stress` is asked for; data may be None where every suite has pictures of its own."""

    suite: Sequence[str]
    backgrounds: Path | None = None
    workers: int | None = None  # None: as many as cores are free
    partial: bool = False
    bank: int | None = None  # pictures that neighbours are looked for among; None: all
    options: Options = field(default_factory=Options)


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
        return total_work(mine(self.batches, place), self.maker.sets, self.plan.batch)


def check_counts(**counts: int | None) -> None:
    """limit, batch, bank: 1 or more; workers, seed: 0 or more."""
    for name, value in counts.items():
        least = 1 if name in ("limit", "batch", "bank") else 0
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise BadInput(f"{name}: expected a whole number of {least} or more, got {value!r}")


def prepare_stress(request: Request, place: World | None = None, loaded: Loaded | None = None) -> Prepared:
    """Load the model, find the pictures, check every name; raises before anything is written."""
    place = place or World()
    suite = parse_suite(request.suite)
    data = None if request.data is None and set(suite.names) <= set(APART) else request.folder
    shifts = tuple(_shift(name, folder, request) for name, folder in suite.shifts)
    near = tuple(
        read_neighbours(
            name, folders, len(shifts) + i, bank=request.bank, limit=request.limit, partial=request.partial
        )
        for i, (name, folders) in enumerate(suite.neighbours)
    )
    loaded = loaded or request.load(place)  # the folders were looked at before: it is quicker
    vit = view(loaded.model, suite)
    segments = "segmentation" in suite
    classes = (segment_outputs if segments else outputs)(loaded.model, loaded.size)
    if shifts and classes != 1000:
        raise BadInput(
            f"{shifts[0].name}: its classes are ImageNet's 1,000, but {loaded.name} has {classes}: they do not map"
        )
    if near:  # has it features that can be compared?
        features(loaded.model, torch.zeros(1, 3, *loaded.size, **_place_of(loaded.model)))
    found = _found(request, data, loaded, classes, segments)
    _labelled(found, loaded.name)
    if "synthetic" in suite and found.decode is None:
        raise BadInput(f"synthetic: expected masks: --masks FOLDER, or a column mask in {data}/index.csv")
    side = square_side(loaded.size, suite)
    behind = _backgrounds(request.backgrounds, suite)
    if segments:
        plan = segmentation_plan(request.options, classes, request.seed, request.batch)
    else:
        plan = make_plan(
            suite,
            request.options,
            vit,
            loaded.name,
            classes,
            side,
            shifts,
            bool(behind),
            request.seed,
            request.batch,
        )
    judge = Judge(loaded.model, vit, plan, loaded.mean, loaded.std)
    decode = found.decode if segments or "synthetic" in suite else None
    look = geometry(loaded.source, loaded.recipe) if segments else None
    maker = Maker(request.seed, Lens(loaded), (*shifts, *near), decode=decode, backgrounds=behind, look=look)
    all_batches = batches([Picture.of(item) for item in found.items], plan.conditions, request.batch)
    for number, shift in enumerate(shifts):
        all_batches += shift_batches(shift, number, plan, request.limit)
    for one in near:
        all_batches += batches(one.asked, [plan.of_neighbours(one.name, len(one.bank))], plan.batch)
    more = {
        **request.facts(loaded),
        "layout": found.layout,
        "shifts": [_facts(shift) for shift in shifts],
        "backgrounds": len(behind),
        "device": judge.device.type,
    }
    if near:
        more["neighbours"] = [one.facts() for one in near]
    if isinstance(found, Segmented):
        more["segments"] = list(found.names or range(found.classes))
    notes = (*plan.notes, *_notes(data, found, shifts, near))
    settings = settings_of(plan, suite, loaded.identity, all_batches, notes, more)
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
        names = ready.loaded.classes
        labels = sorted(
            {p.right[0] for b in ready.batches if b.conditions[0].kind != "neighbours" for p in b.pictures}
        )
        classes = {} if names is None else {str(c): names[c] for c in labels}
        prepare(
            request.out,
            ready.settings,
            {**about(request.command), "given": request.given(), "classes": classes},
        )
    place.wait()
    with Store(request.out, place.rank) as store:
        place.wait()  # every file is open before anyone reads them
        own = mine(ready.batches, place)
        carry_out(
            own,
            ready.maker,
            ready.judge,
            ready.loaded.identity,
            store.append,
            Done(request.out),
            told,
            ready.workers,
            pace,
        )
    place.wait()
    return Rows.read(request.out)


def settings_of(
    plan: Plan,
    suite: Suite,
    identity: dict[str, Any],
    all_batches: Sequence[Batch],
    notes: Sequence[str],
    more: dict[str, Any],
) -> dict[str, Any]:
    """Everything that defines the numbers of a run."""
    options = plan.options
    own = [p for b in all_batches for p in b.pictures if p.shift < 0]
    conditions = dict.fromkeys(setting for b in all_batches for c in b.conditions for setting, _ in c.rows)
    used = any(c.kind in ("corruption", "attention") for c in plan.conditions)
    return {
        "kind": STRESS,
        **identity,
        "pictures": len(own) or None,
        "pictures_hash": digest(f"{p.name}\t{p.right}" for p in own) if own else None,
        **more,
        "suite": list(suite.names),
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


def view(model: nn.Module, suite: Suite) -> ViT | None:
    """The model's view, where something asks for it; None if it is no vision transformer."""
    if "occlusion" not in suite and "attention" not in suite:
        return None
    try:
        return adapt(model)
    except UnsupportedModel:
        return None


def _found(request: Request, data: Path | None, loaded: Loaded, classes: int, segments: bool) -> Labelled:
    """The pictures of the data: with labels, or for a segmenter with label maps of the same classes."""
    if data is None:
        return Labelled([])
    if not segments:
        return find(data, request.masks, Classes(loaded.classes, classes), request.limit)
    found = find_maps(data, request.masks, limit=request.limit)
    if found.classes != classes:
        raise BadInput(
            f"segmentation: {loaded.name} tells {classes} classes apart, the masks of {data} ({found.layout}) {found.classes}"
        )
    return found


def _place_of(model: nn.Module) -> dict[str, Any]:
    parameter = next(iter(model.parameters()), torch.zeros(0))
    return {"device": parameter.device, "dtype": parameter.dtype}


def _notes(
    data: Path | None, found: Labelled, shifts: Sequence[Shift], near: Sequence[Neighbours]
) -> Iterator[str]:
    """What is missing or left out."""
    for shift in shifts:
        yield from (f"{shift.name}: {note}" for note in shift.notes)
        yield from (
            f"{shift.name}: {len(which)} left out: {why} ({some(which)})"
            for why, which in shift.left_out.items()
        )
    for one in near:
        yield from (f"{one.name}: {note}" for note in one.source.notes)
    empty = [] if data is None else _empty(data, found)
    if data is not None and empty:
        yield f"{len(empty)} class folders of {data.name} hold no picture (half downloaded?): {some(empty)}"
    if found.without:
        yield f"{found.without} pictures have no mask and are left out"


def _labelled(found: Labelled, model: str) -> None:
    names = [item.name for item in found.items]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise BadInput(f"{twice} is listed twice: every picture of a run counts once")
    unknown = next((item.name for item in found.items if item.label is None), None)
    if unknown is not None:
        raise BadInput(
            f"{unknown}: its class is none of {model}'s. Every picture needs a label that the model knows."
        )


def _empty(folder: Path, found: Labelled) -> list[str]:
    """Class folders without a picture: a download that stopped half way leaves such."""
    if found.layout not in ("class folders", "pairs"):
        return []
    return [name for name in folders_in(folder) if not any(below(folder / name))]


def square_side(size: tuple[int, int], suite: Suite) -> int:
    if size[0] != size[1] and ("sequences" in suite or "synthetic" in suite):
        raise BadInput(
            f"sequences and synthetic: expected a model of square pictures, this one takes {size[0]}x{size[1]}"
        )
    return size[0]


def _backgrounds(folder: Path | None, suite: Suite) -> tuple[Item, ...]:
    if folder is None or "synthetic" not in suite:
        if folder is not None:
            raise BadInput("backgrounds: they serve the suite synthetic alone, which is not asked for")
        return ()
    return tuple(Item(path.relative_to(folder).as_posix(), path, None) for path in pictures_in(folder))


def _shift(name: str, folder: Path, request: Request) -> Shift:
    options = request.options
    asked = (
        {"corruptions": options.corruptions, "severities": options.severities} if name == "imagenet-c" else {}
    )
    try:
        return read_shift(name, folder, partial=request.partial, **asked)
    except BadInput as error:
        raise BadInput(str(error).replace("partial=True", "--partial (partial=True)")) from error


def _facts(shift: Shift) -> dict[str, Any]:
    return {
        "name": shift.name,
        "pictures": len(shift.items),
        "hash": digest(f"{item.name}\t{item.right}" for item in shift.items),
        "classes": None if shift.classes is None else len(shift.classes),
    }
