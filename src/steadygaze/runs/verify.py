"""`verify`: how faithful are the maps of these methods, on this model and this data?

A request is checked as a whole before anything is written, then executed. Methods that share passes are
explained together (a part). Their maps are then measured a few at a time, so that rows are on the disk soon
after their map is made; metrics that compare maps or run the methods again follow when all parts are done.
What is measured together depends on the plan and the device only, never on what was done before: the rows of
a resumed batch are those of an undisturbed one.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from steadygaze import __version__
from steadygaze.data.folders import ClassLookup, Item, Unlabeled
from steadygaze.data.images import names_hash, read_image, source_hash, tensor_hash
from steadygaze.data.masks import LabeledImages, find_labeled_images, read_mask
from steadygaze.data.memory import Data, InMemoryData, TensorBatch
from steadygaze.data.stream_spec import StreamSpec
from steadygaze.data.streams import ImageStream, open_stream, read_ahead
from steadygaze.errors import (
    DamagedDataWarning,
    ImageError,
    ImagesOutOfRangeWarning,
    InputError,
    UnknownNameError,
)
from steadygaze.faithfulness.evaluate import evaluate
from steadygaze.faithfulness.inputs import Batch, CachedForward
from steadygaze.faithfulness.metric import METRICS, Values
from steadygaze.loading.loaded import LoadedModel
from steadygaze.methods.learned import with_files
from steadygaze.methods.registry import Method
from steadygaze.methods.search import report_searches
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.results.manifest import versions
from steadygaze.results.map_files import (
    SUFFIX,
    MapFolder,
    MapName,
    MapWriter,
    StoredMethod,
    missing_message,
    open_maps,
)
from steadygaze.runs.loop import Inputs, J, Job, Lacks, Pace, Portion, Run, default_num_workers, owned_images
from steadygaze.runs.maps import BROKEN, MethodMaps, flags_of, maps_of
from steadygaze.runs.plan import MapPart, Plan, make_plan, parse_start_layers
from steadygaze.runs.prepare import (
    Normalization,
    about_run,
    identity_of,
    named_by_data,
    normalization_of,
    number_of_classes,
    task_setting,
)
from steadygaze.runs.request import DEFAULT_METRICS, Request, VerifyRequest, documented, options_of
from steadygaze.runs.rows import Row, RowKey, Rows, json_number
from steadygaze.runs.samples import store_map_samples
from steadygaze.runs.shards import World
from steadygaze.runs.status import others_are_running
from steadygaze.target import Outputs, task_of_outputs
from steadygaze.vit.adapt import adapt
from steadygaze.vit.clean_forward import CleanForward
from steadygaze.vit.image_range import range_note
from steadygaze.vit.view import ViT

if TYPE_CHECKING:
    from steadygaze.runs.request import Target


@dataclass(frozen=True)
class FilesSource:
    """Labeled images of a folder or a stream, with masks if they are needed; also the `Loader` of its jobs,
    whose payload is a tuple of `Item`."""

    images: LabeledImages | ImageStream
    loaded: LoadedModel
    batch_size: int

    @cached_property
    def count(self) -> int | None:
        return self.images.count()

    def work(self, world: World) -> int | None:
        return owned_images(self.count, self.batch_size, world)

    @property
    def damaged(self) -> list[str]:
        return self.images.damaged if isinstance(self.images, ImageStream) else []

    def jobs(self, keys: tuple[RowKey, ...]) -> Iterator[Iterable[Job]]:
        if isinstance(self.images, ImageStream):
            yield self._jobs(read_ahead(self.images), keys)
        else:
            yield list(self._jobs(iter(self.images), keys))

    def _jobs(self, items: Iterator[Item], keys: tuple[RowKey, ...]) -> Iterator[Job]:
        batches = iter(lambda: tuple(islice(items, self.batch_size)), ())
        for number, batch in enumerate(batches):
            yield Job(tuple(item.name for item in batch), keys, batch=number, payload=batch)

    def position(self, image: str) -> int:
        return self.images.position(image)

    def load(self, job: Job) -> Inputs[Batch]:
        return self._load(job.payload)

    def _load(self, items: Sequence[Item]) -> Inputs[Batch]:
        read: dict[str, tuple[Item, Tensor, Tensor | None]] = {}
        content: dict[str, str] = {}
        unreadable: dict[str, str] = {}
        for item in items:
            try:
                content[item.name] = source_hash(item.source)
                read[item.name] = (item, *self._read(item))
            except ImageError as error:
                content.pop(item.name, None)
                unreadable[item.name] = str(error)
        if not read:
            return Inputs(None, content, unreadable)
        masks = [mask for _, _, mask in read.values() if mask is not None]
        batch = Batch(
            torch.stack([image for _, image, _ in read.values()]),
            torch.tensor([-1 if item.label is None else item.label for item, _, _ in read.values()]),
            torch.stack(masks) if masks else None,
            torch.tensor(self.loaded.mean, dtype=torch.float32),
            torch.tensor(self.loaded.std, dtype=torch.float32),
            tuple(read),
        )
        return Inputs(batch, content, unreadable)

    def _read(self, item: Item) -> tuple[Tensor, Tensor | None]:
        image = read_image(item.source)
        preprocess, decode = self.loaded.preprocess, self.images.decode
        mask = None if decode is None else preprocess.mask(read_mask(item, decode, image.size))
        return preprocess(image), mask

    def readable(self, job: Job, image: str) -> bool:
        try:
            self._read(_item(job, image))
        except ImageError:
            return False
        return True

    def content(self, job: Job, image: str) -> str:
        return source_hash(_item(job, image).source)

    def again(self, images: Sequence[str]) -> Iterator[Batch]:
        for item in self.images.find(images):
            batch = self._load([item]).data
            if batch is not None:
                yield batch


def _item(job: Job, image: str) -> Item:
    return job.payload[job.images.index(image)]


def open_images(
    request: Request, place: Path | StreamSpec, lookup: ClassLookup, *, labels_needed: bool
) -> tuple[LabeledImages | ImageStream, dict[str, Any]]:
    """The images, and what identifies them in the settings of the run."""
    if isinstance(place, StreamSpec):
        request.refuse_masks(place)
        stream = open_stream(place, lookup, labels_needed=labels_needed, limit=request.limit)
        return stream, stream.facts(stream.first())
    images = find_labeled_images(place, request.masks, lookup, request.limit)
    unlabeled = next((item.name for item in images.items if item.label is None), None)
    if labels_needed and unlabeled is not None:
        raise InputError(
            f"{unlabeled}: its class is not one of the model's. Explain the predicted class instead: "
            "target='predicted'"
        )
    lines = (f"{item.name}\t{item.label}\t{item.mask is not None}" for item in images.items)
    facts = {"images": len(images.items), "images_hash": names_hash(lines), "layout": images.layout}
    return images, facts


# -- batches in memory
# -----------------------------------------------------------------------------------------------


@dataclass
class MemorySource:
    """Data in memory, read as it comes; also the `Loader` of its jobs, whose payload is a `TensorBatch`."""

    data: InMemoryData
    normalization: Normalization
    dtype: torch.dtype

    @property
    def count(self) -> int | None:
        return self.data.count

    damaged: ClassVar[list[str]] = []

    def work(self, world: World) -> int | None:
        return None if world.shard else self.count

    @cached_property
    def _batches(self) -> Iterator[TensorBatch]:
        return iter(self.data)

    @cached_property
    def first(self) -> TensorBatch:
        """The first batch, which identifies the data in the settings of a run."""
        return next(self._batches)

    def jobs(self, keys: tuple[RowKey, ...]) -> Iterator[Sequence[Job]]:
        batch: TensorBatch | None = self.first
        del self.first  # each batch is freed when the next one is read
        for number in count():
            if batch is None:
                return
            yield [Job(batch.names, keys, batch=number, payload=batch)]
            batch = next(self._batches, None)

    def position(self, image: str) -> int:
        return int(image)

    def load(self, job: Job) -> Inputs[Batch]:
        hashes = (tensor_hash(image) for image in job.payload.images)
        return Inputs(self._batch(job.payload), dict(zip(job.images, hashes, strict=True)))

    def _batch(self, tensors: TensorBatch) -> Batch:
        return Batch(
            tensors.images.to(self.dtype),
            tensors.labels,
            tensors.masks,
            torch.tensor(self.normalization.mean, dtype=torch.float32),
            torch.tensor(self.normalization.std, dtype=torch.float32),
            tensors.names,
        )

    def readable(self, job: Job, image: str) -> bool:
        return True

    def content(self, job: Job, image: str) -> str:
        return tensor_hash(job.payload.images[job.images.index(image)])

    def again(self, images: Sequence[str]) -> Iterator[Batch]:
        if not self.data.rereadable:
            return
        kept: dict[str, Batch] = {}
        for batch in self.data:
            for i in (i for i, name in enumerate(batch.names) if name in images):
                kept[batch.names[i]] = self._batch(batch[i : i + 1])
            if len(kept) == len(images):
                break
        yield from (kept[image] for image in images if image in kept)


AT_ONCE = {"cpu": 1}  # maps that are measured together: more would not run faster

AT_ONCE_ELSEWHERE = 8

TargetOf = Callable[[Batch, CachedForward], Tensor]  # the class that is explained for each image, (B,)

Maps = dict[int, MethodMaps]  # by number in the plan


def compute_rows(
    forward: CachedForward,
    batch: Batch,
    plan: Plan,
    target: Tensor,
    identity: dict[str, Any],
    lacks: Lacks = lambda images, keys: True,
    keep: MapWriter | None = None,
) -> Iterator[Portion]:
    """The rows of a batch that are missing, in portions that become known together.

    Args:
        lacks: Which rows are missing; the others are not computed.
        keep: Stores the maps, before their rows are returned.
    """
    return _BatchRows(forward, batch, plan, target, identity, lacks, keep).portions()


@dataclass(frozen=True)
class _BatchRows:
    """Computes the rows of one batch; all maps and metrics share `forward`."""

    forward: CachedForward
    batch: Batch
    plan: Plan
    target: Tensor
    identity: dict[str, Any]
    lacks: Lacks
    keep: MapWriter | None

    def portions(self) -> Iterator[Portion]:
        """See `compute_rows`."""
        plan, maps = self.plan, Maps()
        joint = self._missing(range(len(plan.maps)), plan.joint_metrics)
        for part in plan.parts(len(self.forward.vit.blocks)):
            groups = self._groups(part.numbers)
            missing = [self._missing(group, plan.single_metrics) for group in groups]
            work = len(self.batch.names)
            if not any(missing) and not joint:
                yield Portion([], work * len(part.numbers), known=True)
                continue
            made = part_maps(self.forward, self.target, part, self.batch.names)
            maps |= made
            if self.keep is not None and not part.stored:
                keep_maps(self.keep, self.batch, made, self.target, plan)
            for group, wanted in zip(groups, missing, strict=True):
                chosen = {number: made[number] for number in group}
                rows = self._rows(chosen, plan.single_metrics) if wanted else []
                yield Portion(rows, work * len(group), known=not wanted and bool(plan.single_metrics))
        if joint:
            yield Portion(self._rows(dict(sorted(maps.items())), plan.joint_metrics))

    def _groups(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        """Maps that are measured together."""
        size = AT_ONCE.get(self.forward.images.device.type, AT_ONCE_ELSEWHERE)
        return [tuple(numbers[start : start + size]) for start in range(0, len(numbers), size)]

    def _missing(self, numbers: Sequence[int], metrics: Sequence[str]) -> bool:
        keys = self._keys(tuple(numbers), tuple(metrics))
        return bool(keys) and self.lacks(self.batch.names, keys)

    def _keys(self, numbers: Sequence[int], metrics: Sequence[str]) -> tuple[RowKey, ...]:
        wanted = set(numbers)
        columns = zip(self.plan.columns, self.plan.source, strict=True)
        return tuple(column.key(name) for column, source in columns if source in wanted for name in metrics)

    def _rows(self, maps: Maps, metrics: Sequence[str]) -> list[Row]:
        """The rows of these maps, by image, column and metric."""
        vit, plan = self.forward.vit, self.plan

        def explain_again(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
            clean = CleanForward.of(adapt(model, task_of_outputs(vit.plan.outputs)), images)
            return _stacked([one.maps for one in plan_maps(clean, classes, plan, self.batch.names)])

        evaluation = evaluate(
            vit,
            self.batch,
            _stacked([one.maps for one in maps.values()]),
            metrics,
            target=self.target,
            seed=plan.seed,
            ratios=plan.ratios,
            fill=plan.fill,
            explain=explain_again,
            forward=self.forward,
            unattributed=_stacked([one.unattributed for one in maps.values()]),
            explained=_stacked([one.explained for one in maps.values()]),
        )
        numbers = {name: _MetricValues(name, values, plan) for name, values in evaluation.values.items()}
        position = {number: index for index, number in enumerate(maps)}
        rows = []
        for b, image in enumerate(self.batch.names):
            for column, source in zip(plan.columns, plan.source, strict=True):
                if source not in maps:
                    continue
                flag = maps[source].flags.get(b)
                broken = flag == BROKEN
                for name in metrics:
                    row: Row = {
                        **self.identity,
                        "method": column.method.name,
                        "score": column.score,
                        "metric": name,
                        "image": image,
                    }
                    index = position[source]
                    row["value"] = None if broken else numbers[name].value(index, b)
                    optional = {
                        "detail": None if broken else numbers[name].detail(index, b),
                        "note": evaluation.notes.get(name),
                        "flag": flag,
                    }
                    row |= {key: value for key, value in optional.items() if value}
                    row["seed"] = plan.seed
                    rows.append(row)
        return rows


class _MetricValues:
    """The values of a metric as JSON numbers, by map and image."""

    def __init__(self, name: str, values: Values, plan: Plan) -> None:
        self._values = values.value.detach().cpu().numpy()
        self._details: np.ndarray | None = None
        if values.detail is not None:
            self._details = values.detail.detach().cpu().numpy()
            if METRICS[name].detail_by_method:  # a row has one number for each column, not for each map
                self._details = self._details[..., list(plan.source)]

    def value(self, m: int, b: int) -> float | None:
        return json_number(self._values[m, b])

    def detail(self, m: int, b: int) -> list[float | None] | None:
        return None if self._details is None else [json_number(x) for x in self._details[m, b]]


def part_maps(clean: CleanForward, target: Tensor, part: MapPart, names: Sequence[str]) -> Maps:
    """The maps of methods that share passes, and which of them are zero or broken (those are zero here).

    Args:
        names: Keys of the images, for maps that are read.
    """
    if not part.stored:
        methods = [m for m in part.methods if not isinstance(m, StoredMethod)]
        made = maps_of(clean, target, methods, part.score)
        return dict(zip(part.numbers, made, strict=True))
    height, width = clean.images.shape[-2:]
    logit = clean.logits.gather(1, target[:, None])[:, 0]  # what they explain is not stored
    read: Maps = {}
    for number, method in zip(part.numbers, part.methods, strict=True):
        assert isinstance(method, StoredMethod)
        maps, broken = method.batch(names, target.tolist(), clean.grid, (height, width))
        maps = maps.to(clean.images.device)
        read[number] = MethodMaps(maps, flags_of(maps, broken), torch.zeros_like(logit), logit)
    return read


def plan_maps(clean: CleanForward, target: Tensor, plan: Plan, names: Sequence[str]) -> list[MethodMaps]:
    """The maps of the whole plan, those that are computed first, then those that are read.

    Args:
        names: Keys of the images, for maps that are read.
    """
    maps: Maps = {}
    for part in plan.parts(len(clean.vit.blocks)):
        maps |= part_maps(clean, target, part, names)
    return [maps[number] for number in sorted(maps)]


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor, in the widest of their precisions."""
    widest = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    return torch.stack([tensor.to(widest) for tensor in tensors])


def keep_maps(writer: MapWriter, batch: Batch, maps: Maps, target: Tensor, plan: Plan) -> None:
    """Store maps of a batch that were computed, not read."""
    names = {number: MapName(plan.maps[number].method.name, plan.maps[number].score) for number in maps}
    broken = {
        names[number]: [b for b, flag in one.flags.items() if flag == BROKEN] for number, one in maps.items()
    }
    writer.write(
        batch.names,
        {names[number]: one.maps for number, one in maps.items()},
        target.tolist(),
        {name: positions for name, positions in broken.items() if positions},
    )


def warn_of_missing_maps(folder: Path, rows: Rows) -> None:
    """Rows of an earlier run into the same folder may have been computed without keeping their maps."""
    stored = MapFolder(folder).images if any(folder.glob(f"*{SUFFIX}")) else set()
    missing = {row["image"] for row in rows} - stored
    if missing:
        warnings.warn(
            f"{folder} has no maps of {len(missing)} images: their rows were computed before, without "
            "keep_maps. Use another output folder to store all maps.",
            stacklevel=3,
        )


def check_complete(plan: Plan, source: FilesSource, target: object) -> None:
    """InputError if an image of a folder has no map, or one of another class; images that cannot be read need
    none. The images of a stream are not known before they are read.

    Args:
        target: "label", a class, or anything else for classes that are not known yet.
    """
    if isinstance(source.images, ImageStream):
        return
    images = {item.name: item for item in source.images}
    for method in plan.stored:
        missing = [image for image in images if not method.source.has(method.maps, image)]
        if any(source.readable(Job((one,), (), payload=(images[one],)), one) for one in missing):
            unknown = method.source.images - set(images)
            raise InputError(missing_message(method.maps, missing, len(images), unknown))
        unread = set(missing)
        for image in (name for name in images if name not in unread):
            explained = images[image].label if target == "label" else target
            if isinstance(explained, int):
                method.source.check(method.maps, image, explained)


BY_NAME = ("label", "predicted")


@dataclass(frozen=True)
class PreparedVerify:
    """A run that is checked, with nothing computed yet.

    Attributes:
        images_without_mask: Number of images that are left out because they have no mask.
    """

    request: VerifyRequest
    vit: ViT
    loaded: LoadedModel | None
    plan: Plan
    source: FilesSource | MemorySource
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
        warnings.warn(damage, DamagedDataWarning, stacklevel=2)
    rows = run.rows()
    if request.keep_maps is not None and run.resumed and world.rank == 0:
        warn_of_missing_maps(request.keep_maps, rows)
    if request.out is not None and world.rank == 0 and not others_are_running(request.out, request.shard):
        store_map_samples(
            request.out,
            Rows.read(request.out),  # of all shards, by the last one
            ready.plan.columns,
            ready.vit,
            ready.source.again,
            ready.target_of,
            None if ready.loaded is None else ready.loaded.class_names,
        )
    return rows


def _plan(request: VerifyRequest, vit: ViT) -> Plan:
    return make_plan(
        vit,
        with_files(request.methods, request.learned),
        request.metrics,
        request.score,
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
    lookup = ClassLookup(loaded.class_names, classes)
    if vit.plan.outputs == "values":
        lookup = Unlabeled()  # folders are not named by values
    target = _class_target(request.target, loaded, classes, vit.plan.outputs)
    images, facts = open_images(request, place, lookup, labels_needed=target == "label")
    if plan.needs_masks and images.decode is None:
        raise InputError(
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
    for name, file in request.learned.items():
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
        images.without if isinstance(images, LabeledImages) else 0,
    )


def _prepare_memory(request: VerifyRequest) -> PreparedVerify:
    loaded = request.model if isinstance(request.model, LoadedModel) else None
    if isinstance(request.model, str):
        loaded = request.load(World())
    vit = adapt(request.model if loaded is None else loaded)
    plan = _plan(request, vit)
    normalization = normalization_of(vit.model, loaded, request.mean, request.std)
    if plan.painting and not normalization.known:
        warnings.warn(
            f"{', '.join(plan.painting)}: pixels are set to black before normalization, which the model "
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
    source = MemorySource(data, normalization, next(vit.model.parameters()).dtype)
    target_of = _target_function(target, source)
    identity = identity_of(vit.model, loaded)
    first = source.first
    if note := range_note(loaded or vit, vit.check(first.images)):
        warnings.warn(note, ImagesOutOfRangeWarning, stacklevel=5)  # the caller of `verify`
    described: dict[str, Any] = {
        "data": "in memory",
        "images_hash": tensor_hash(first.images, first.labels, first.masks),
        "target": _target_text(target),
        **task_setting(vit.plan.outputs),
    }
    if request.limit is not None:
        described["limit"] = request.limit
    if plan.painting:
        described |= {name: torch.tensor(values).tolist() for name, values in _statistics(normalization)}
    settings = _settings(plan, identity, described)
    return PreparedVerify(
        request, vit, loaded, plan, source, target_of, identity, settings, about_run(request)
    )


def _statistics(normalization: Normalization) -> list[tuple[str, tuple[float, ...]]]:
    return [("mean", normalization.mean), ("std", normalization.std)]


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
        raise InputError(
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
            raise InputError(
                f"target: expected label, predicted, a class, or one class for each image, got {target!r}"
            )
        target = loaded.class_index(target)
    indices = torch.as_tensor(target, dtype=torch.long)
    if indices.dim() > 1:
        raise InputError(f"target: expected one class for each image, got shape {tuple(indices.shape)}")
    if indices.dim() == 1:
        return indices
    if classes is not None and int(indices) >= classes:
        raise InputError(f"class {int(indices)} is out of range: the model has classes 0..{classes - 1}")
    return int(indices)


def _target_text(target: str | int | Tensor) -> str:
    if isinstance(target, Tensor):
        return f"given, {names_hash(map(str, target.tolist()))}"
    return str(target)


def _target_function(target: str | int | Tensor, source: FilesSource | MemorySource) -> TargetOf:
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
            raise InputError(
                f"target: expected one class for each image, got {len(target)} for more than "
                f"{max(positions)} images"
            )
        return target[positions].to(batch.labels.device)

    return given


@documented(VerifyRequest)
def verify(
    model: nn.Module | ViT | LoadedModel | str,
    data: Data,
    methods: str | Method | Sequence[str | Method] | None = None,
    metrics: str | Sequence[str] = DEFAULT_METRICS,
    *,
    on_progress: OnProgress = ignore_progress,
    **options: Any,
) -> Rows:
    """Measure how faithful the maps of attribution methods are. `.table()` of the result is the ranking.

    Args:
        {options}
        on_progress: Called with a `Progress` while the run computes.

    Returns:
        The rows: one number for each image, method, score and metric.

    Examples:
        >>> import torch
        >>> from steadygaze import load_model
        >>> batch = torch.rand(2, 3, 32, 32), torch.tensor([3, 5])  # images and labels
        >>> rows = verify(load_model("embedded"), [batch], methods=["gae", "random"], metrics="deletion_aopc")
        >>> sorted((row["method"], row["image"]) for row in rows)
        [('gae', '0'), ('gae', '1'), ('random', '0'), ('random', '1')]
    """
    known = [field.name for field, _ in options_of(VerifyRequest)]
    for name in options:
        if name not in known:
            raise UnknownNameError("option of verify", name, known)
    given: dict[str, Any] = {"methods": methods, "metrics": metrics, **options}
    return run_verify(VerifyRequest(model=model, data=data, **given), on_progress=on_progress)
