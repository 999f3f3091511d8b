"""A `verify` run: what it is given, checked as a whole before anything is written, then executed."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygaze import __version__
from steadygaze.data.content import names_hash, tensor_hash
from steadygaze.data.folders import Classes, Unlabelled
from steadygaze.data.masks import LabelledImages
from steadygaze.data.sources import InMemoryData
from steadygaze.errors import BadInput, DamagedData, ImagesOutOfRange
from steadygaze.faithfulness.inputs import Batch, CachedForward
from steadygaze.loading.loaded import LoadedModel
from steadygaze.manifest import versions
from steadygaze.maps import MapWriter, open_maps
from steadygaze.maps.sources import Given
from steadygaze.method_registry import DEFAULT, Method
from steadygaze.methods.learnt.files import with_files
from steadygaze.methods.search import report_searches
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.runs.load_ahead import default_num_workers
from steadygaze.runs.loop import J, Job, Lacks, Pace, Portion, Run
from steadygaze.runs.normalisation import Normalisation, normalisation_of
from steadygaze.runs.processes import World
from steadygaze.runs.request import (
    Request,
    about_run,
    identity_of,
    named_by_data,
    number_of_classes,
    task_setting,
)
from steadygaze.runs.rows import Rows
from steadygaze.runs.shards.progress_files import others_are_running
from steadygaze.runs.verify.given_maps import check_complete, warn_of_missing_maps
from steadygaze.runs.verify.images import FilesSource, ImageSource, MemorySource, open_images
from steadygaze.runs.verify.measure import TargetOf, compute_rows
from steadygaze.runs.verify.plan import DEFAULT_METRICS, Plan, make_plan, parse_start_layers
from steadygaze.runs.verify.samples import store_samples
from steadygaze.target import Outputs
from steadygaze.vit import ViT, adapt
from steadygaze.vit.image_range import range_note

Target = int | str | Sequence[int] | Tensor | None
BY_NAME = ("label", "predicted")


@dataclass(frozen=True, kw_only=True)
class VerifyRequest(Request):
    """What `verify` is given.

    target: the class that is explained and scored: "label" or None, "predicted", a class (index or name), or
        one class for each image
    start_layers: "all", or layers such as "0,3,6": score each method with PLUS starting at each of them
    mean, std: the normalisation of images in memory
    diffmask, shapley: files of the learnt methods diffmask and vit_shapley
    maps: maps to measure besides those of `methods`: a folder, or arrays by method
    keep_maps: a folder for the maps that are computed
    random: also measure the method `random`, the chance level
    """

    methods: Sequence[str | Method] = (DEFAULT,)
    metrics: Sequence[str] = field(default=DEFAULT_METRICS)
    scores: Sequence[str] | None = None
    start_layers: str | None = None
    ratios: Sequence[float] | None = None
    fill: str = "zero"
    target: Target = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    diffmask: Path | None = None
    maps: Given | None = None
    keep_maps: Path | None = None
    shapley: Path | None = None
    random: bool = False

    @property
    def learnt(self) -> dict[str, Path | None]:
        """The files of learnt methods, by the method's name."""
        return {"diffmask": self.diffmask, "vit_shapley": self.shapley}


@dataclass(frozen=True)
class PreparedVerify:
    """A run that is checked, with nothing computed yet.

    images_without_mask: number of images that are left out because they have no mask
    """

    request: VerifyRequest
    vit: ViT
    loaded: LoadedModel | None
    plan: Plan
    source: ImageSource
    target_of: TargetOf
    identity: dict[str, str]
    settings: dict[str, Any]
    about: dict[str, Any]
    images_without_mask: int = 0

    @property
    def device(self) -> torch.device:
        return next(self.vit.model.parameters()).device

    @property
    def num_workers(self) -> int:
        """Threads that load images ahead of the model."""
        given = self.request.num_workers
        if given is None:
            return 0 if self.request.in_memory else default_num_workers(self.device)
        return given

    def compute(self, job: Job, batch: Batch, lacks: Lacks) -> Iterator[Portion]:
        """The rows of one batch, as they become known."""
        batch = batch.to(self.device)
        forward = CachedForward.of(self.vit, batch.images)
        target = self.target_of(batch, forward)
        return compute_rows(forward, batch, self.plan, target, self.identity, lacks, self._writer)

    def counted(self, jobs: Iterable[J]) -> Iterator[J]:
        """The jobs with maps as units of progress."""
        return (replace(job, work=len(job.images) * len(self.plan.maps)) for job in jobs)

    @cached_property
    def _writer(self) -> MapWriter | None:
        folder = self.request.keep_maps
        return None if folder is None else MapWriter(folder, self.identity)


def prepare_verify(request: VerifyRequest, world: World | None = None) -> PreparedVerify:
    """Load the model, find the images, check every name; raises before anything is written."""
    if request.in_memory:
        return _prepare_memory(request)
    return _prepare_files(request, world or World())


def run_verify(
    request: VerifyRequest,
    world: World | None = None,
    on_progress: OnProgress = ignore_progress,
    prepared: PreparedVerify | None = None,
    pace: Pace | None = None,
) -> Rows:
    """Execute a run. Rows go into `request.out`; those that are there already are not computed again."""
    world = (world or World()).of_shard(request.shard)
    ready = prepared or prepare_verify(request, world)
    run = Run(
        request.out,
        ready.settings,
        ready.about,
        task="verify",
        unit="maps",
        world=world,
        on_progress=on_progress,
    )
    run.pace = pace or run.pace
    with run, report_searches(on_progress):
        for group in ready.source.jobs(ready.plan.keys):
            images = ready.source.work(world)
            run.total = None if images is None else images * len(ready.plan.maps)
            counted = ready.counted(group)
            jobs = list(counted) if isinstance(group, Sequence) else counted  # a stream is read as it runs
            run.execute(jobs, ready.source, ready.compute, num_workers=ready.num_workers)
    for damage in ready.source.damaged:
        warnings.warn(damage, DamagedData, stacklevel=2)
    rows = run.rows()
    if request.keep_maps is not None and run.resumed and world.rank == 0:
        warn_of_missing_maps(request.keep_maps, rows)
    if request.out is not None and world.rank == 0 and not others_are_running(request.out, request.shard):
        store_samples(request.out, ready, Rows.read(request.out))  # of all shards, by the last one
    return rows


def _plan(request: VerifyRequest, vit: ViT) -> Plan:
    return make_plan(
        vit,
        with_files(request.methods, request.learnt),
        request.metrics,
        request.scores,
        request.ratios,
        request.seed,
        parse_start_layers(request.start_layers, vit),
        request.fill,
        None if request.maps is None else open_maps(request.maps),
        request.random,
    )


def _prepare_files(request: VerifyRequest, world: World) -> PreparedVerify:
    place = request.place  # checked before the model is loaded, which takes longer
    loaded = request.load(world)
    vit, classes = adapt(loaded), number_of_classes(loaded.model, loaded.size)
    loaded = named_by_data(loaded, place, classes)
    plan = _plan(request, vit)
    lookup = Classes(loaded.class_names, classes)
    if vit.plan.outputs == "values":
        lookup = Unlabelled()  # folders are not named by values
    target = _class_target(request.target, loaded, classes, vit.plan.outputs)
    images, facts = open_images(request, place, lookup, labels_needed=target == "label")
    if plan.needs_masks and images.decode is None:
        raise BadInput(
            f"{', '.join(plan.needs_masks)}: expected masks. Give masks=FOLDER, or leave these metrics out."
        )
    source = FilesSource(images, loaded, request.batch_size)
    check_complete(plan, source, target)
    described = {
        **request.settings(loaded),
        **facts,
        "masks": images.decode is not None,
        "batch": request.batch_size,
        "target": _target_text(target),
        **task_setting(vit.plan.outputs),
        "start_layers": request.start_layers,
        "device": next(vit.model.parameters()).device.type,
    }
    origin = request.origin(loaded)
    for name, file in request.learnt.items():
        if file is not None:
            described[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
            origin[name] = str(file)
    return PreparedVerify(
        request,
        vit,
        loaded,
        plan,
        source,
        _target_function(target, source),
        loaded.identity,
        _settings(plan, loaded.identity, described),
        {**about_run(request), "given": origin},
        images.without if isinstance(images, LabelledImages) else 0,
    )


def _prepare_memory(request: VerifyRequest) -> PreparedVerify:
    loaded = request.model if isinstance(request.model, LoadedModel) else None
    if isinstance(request.model, str):
        loaded = request.load(World())
    vit = adapt(request.model if loaded is None else loaded)
    plan = _plan(request, vit)
    normalisation = normalisation_of(vit.model, loaded, request.mean, request.std)
    if plan.painting and not normalisation.known:
        warnings.warn(
            f"{', '.join(plan.painting)}: pixels are set to black before normalisation, which the model "
            "does not "
            "declare: ImageNet's mean and std are assumed. Give mean= and std= if they are others.",
            stacklevel=5,  # the caller of `verify`
        )
    width = number_of_classes(vit.model, vit.plan.input_size[1:]) if vit.plan.outputs == "values" else None
    wanted = vit.plan.main_value if request.target is None else request.target
    target = _class_target(wanted, loaded, width, vit.plan.outputs)
    data = InMemoryData(
        request.data,
        request.batch_size,
        request.limit,
        plan.needs_masks,
        preprocess=None if loaded is None else loaded.preprocess,
        labels_used=target == "label" or vit.plan.outputs == "classes",
    )
    source = MemorySource(data, normalisation, next(vit.model.parameters()).dtype)
    target_of = _target_function(target, source)
    identity = identity_of(vit.model, loaded)
    first = source.first
    if note := range_note(loaded or vit, vit.check(first.images)):
        warnings.warn(note, ImagesOutOfRange, stacklevel=5)  # the caller of `verify`
    described: dict[str, Any] = {
        "data": "in memory",
        "pictures_hash": tensor_hash(first.images, first.labels, first.masks),
        "target": _target_text(target),
        **task_setting(vit.plan.outputs),
    }
    if request.limit is not None:
        described["limit"] = request.limit
    if plan.painting:
        described |= {name: torch.tensor(values).tolist() for name, values in _statistics(normalisation)}
    settings = _settings(plan, identity, described)
    return PreparedVerify(
        request, vit, loaded, plan, source, target_of, identity, settings, about_run(request)
    )


def _statistics(normalisation: Normalisation) -> list[tuple[str, tuple[float, ...]]]:
    return [("mean", normalisation.mean), ("std", normalisation.std)]


def _settings(plan: Plan, identity: dict[str, str], described: dict[str, Any]) -> dict[str, Any]:
    """Everything that defines the numbers of a run."""
    return {
        **identity,
        **described,
        "columns": [[column.method.name, column.score] for column in plan.columns],
        "metrics": list(plan.metrics),
        "ratios": list(plan.ratios),
        "seed": plan.seed,
        **({"maps": plan.stored[0].source.digest} if plan.stored else {}),
        **({} if plan.fill == "zero" else {"fill": plan.fill}),
        "versions": {"steadygaze": __version__, **versions()},
    }


# -- the class that is explained
# ---------------------------------------------------------------------------------------


def _class_target(
    target: Target, loaded: LoadedModel | None, classes: int | None, outputs: Outputs
) -> str | int | Tensor:
    """ "label", "predicted", a class index, or one class for each image."""
    if outputs == "values" and (target is None or (isinstance(target, str) and target in BY_NAME)):
        if classes == 1:
            return 0
        raise BadInput(
            f"target: this model gives {classes} values (regression), and none of them is the label or the "
            f"predicted one. Give the index of the value to explain.",
            option="target",
        )
    if target is None:
        return "label"
    if isinstance(target, str):
        if target in BY_NAME:
            return target
        if loaded is None:
            raise BadInput(
                f"target: expected label, predicted, a class, or one class for each image, got {target!r}"
            )
        target = loaded.class_index(target)
    indices = torch.as_tensor(target, dtype=torch.long)
    if indices.dim() > 1:
        raise BadInput(f"target: expected one class for each image, got shape {tuple(indices.shape)}")
    if indices.dim() == 1:
        return indices
    if classes is not None and int(indices) >= classes:
        raise BadInput(f"class {int(indices)} is out of range: the model has classes 0..{classes - 1}")
    return int(indices)


def _target_text(target: str | int | Tensor) -> str:
    if isinstance(target, Tensor):
        return f"given, {names_hash(map(str, target.tolist()))}"
    return str(target)


def _target_function(target: str | int | Tensor, source: ImageSource) -> TargetOf:
    """From a batch to the classes that are explained, (B,)."""
    if target == "label":
        return lambda batch, forward: batch.labels
    if target == "predicted":
        return lambda batch, forward: forward.logits.argmax(-1)
    if isinstance(target, int):
        return lambda batch, forward: torch.full_like(batch.labels, target)
    assert isinstance(target, Tensor)

    def given(batch: Batch, forward: CachedForward) -> Tensor:
        positions = [source.position(name) for name in batch.names]
        if max(positions) >= len(target):
            raise BadInput(
                f"target: expected one class for each image, got {len(target)} for more than "
                f"{max(positions)} images"
            )
        return target[positions].to(batch.labels.device)

    return given
