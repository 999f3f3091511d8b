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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from steadygaze import __version__
from steadygaze.data.folders import ClassLookup, Unlabeled
from steadygaze.data.images import names_hash, tensor_hash
from steadygaze.data.memory import Data, InMemoryData
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import (
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
from steadygaze.runs.jobs import Inputs, Job, RunImage
from steadygaze.runs.loop import Lacks, Pace, Portion, Prepared, Run
from steadygaze.runs.maps import BROKEN, MethodMaps, flags_of, maps_of
from steadygaze.runs.plan import MapPart, Plan, make_plan, parse_start_layers
from steadygaze.runs.prepare import (
    about_run,
    check_quantity,
    identity_of,
    named_by_data,
    normalization_of,
    number_of_classes,
    task_setting,
)
from steadygaze.runs.request import DEFAULT_METRICS, VerifyRequest, documented, options_of
from steadygaze.runs.rows import Row, RowKey, Rows, json_number
from steadygaze.runs.sampler import store_map_samples
from steadygaze.runs.settings import metric_record
from steadygaze.runs.shards import World
from steadygaze.runs.source import FileSource, ImageLoader, MemorySource, Source
from steadygaze.runs.status import others_are_running
from steadygaze.target import Outputs, task_of_outputs
from steadygaze.vit.adapt import adapt
from steadygaze.vit.clean_forward import CleanForward
from steadygaze.vit.image_range import range_note
from steadygaze.vit.view import ViT

if TYPE_CHECKING:
    from steadygaze.runs.request import Target


@dataclass
class BatchLoader(ImageLoader[Batch]):
    """Reads images as the model takes them, with their masks. dtype: of images in memory."""

    dtype: torch.dtype = torch.float32

    def load(self, job: Job) -> Inputs[Batch]:
        read: dict[str, tuple[RunImage, Tensor, Tensor | None]] = {}
        content: dict[str, str] = {}
        unreadable: dict[str, str] = {}
        for image in job.run_images:
            try:
                digest = self.hash(image)
                read[image.name] = (image, *self._read(image))
                content[image.name] = digest
            except ImageError as error:
                unreadable[image.name] = str(error)
        if not read:
            return Inputs(None, content, unreadable)
        masks = [mask for _, _, mask in read.values() if mask is not None]
        batch = Batch(
            torch.stack([tensor for _, tensor, _ in read.values()]),
            torch.tensor([image.labels[0] if image.labels else -1 for image, _, _ in read.values()]),
            torch.stack(masks) if masks else None,
            torch.tensor(self.preprocess.mean, dtype=torch.float32),
            torch.tensor(self.preprocess.std, dtype=torch.float32),
            tuple(read),
        )
        return Inputs(batch, content, unreadable)

    def _read(self, image: RunImage) -> tuple[Tensor, Tensor | None]:
        if image.tensor is not None:
            return image.tensor.to(self.dtype), image.mask
        opened = self.opened(image)
        mask = None if self.decode is None else self.preprocess.mask(self.mask(image, opened.size))
        return self.preprocess(opened), mask


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
            part_of_maps = part_maps(self.forward, self.target, part, self.batch.names)
            maps |= part_of_maps
            if self.keep is not None and not part.stored:
                keep_maps(self.keep, self.batch, part_of_maps, self.target, plan)
            for group, wanted in zip(groups, missing, strict=True):
                chosen = {number: part_of_maps[number] for number in group}
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
            return _stacked([found.maps for found in plan_maps(clean, classes, plan, self.batch.names)])

        evaluation = evaluate(
            vit,
            self.batch,
            _stacked([found.maps for found in maps.values()]),
            metrics,
            target=self.target,
            seed=plan.seed,
            ratios=plan.ratios,
            fill=plan.fill,
            hide=plan.hide,
            explain=explain_again,
            forward=self.forward,
            unattributed=_stacked([found.unattributed for found in maps.values()]),
            explained=_stacked([found.explained for found in maps.values()]),
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
        return dict(zip(part.numbers, maps_of(clean, target, methods, part.score), strict=True))
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


def check_complete(plan: Plan, source: Source, loader: BatchLoader, target: object) -> None:
    """InputError if an image of a folder has no map, or one of another class; images that cannot be read need
    none. The images of a stream are not known before they are read.

    Args:
        target: "label", a class, or anything else for classes that are not known yet.
    """
    if not plan.stored or source.is_stream:
        return
    images = {image.name: image for batches in source.groups() for _, batch in batches for image in batch}
    for method in plan.stored:
        missing = [name for name in images if not method.source.has(method.maps, name)]
        if any(loader.readable(Job((images[name],), ()), name) for name in missing):
            unknown = method.source.images - set(images)
            raise InputError(missing_message(method.maps, missing, len(images), unknown))
        unread = set(missing)
        for name in (name for name in images if name not in unread):
            explained = next(iter(images[name].labels), None) if target == "label" else target
            if isinstance(explained, int):
                method.source.check(method.maps, name, explained)


BY_NAME = ("label", "predicted")


@dataclass(frozen=True, kw_only=True)
class PreparedVerify(Prepared[Batch]):
    """A run of verify that is checked: every batch becomes maps, and maps become rows."""

    task: ClassVar[str] = "verify"
    unit: ClassVar[str] = "maps"

    request: VerifyRequest
    vit: ViT
    plan: Plan
    target_of: TargetOf

    @property
    def device(self) -> torch.device:
        return next(self.vit.model.parameters()).device

    def jobs_of(self, images: tuple[RunImage, ...], number: int) -> list[Job]:
        return [Job(images, self.plan.keys, batch=number, work=len(images) * len(self.plan.maps))]

    def work(self, world: World) -> int | None:
        images = self.source.owned(world)
        return None if images is None else images * len(self.plan.maps)

    def compute(self, job: Job, data: Batch, lacks: Lacks) -> Iterator[Portion]:
        batch = data.to(self.device)
        forward = CachedForward.of(self.vit, batch.images)
        target = self.target_of(batch, forward)
        return compute_rows(forward, batch, self.plan, target, self.identity, lacks, self._writer)

    @cached_property
    def _writer(self) -> MapWriter | None:
        folder = self.request.keep_maps
        return None if folder is None else MapWriter(folder, self.identity)

    def reporting(self, on_progress: OnProgress) -> AbstractContextManager[None]:
        return report_searches(on_progress)

    def after_run(self, run: Run, rows: Rows, world: World) -> None:
        """Warn of maps that are missing, and store sample images with the run."""
        request = self.request
        if request.keep_maps is not None and run.resumed and world.rank == 0:
            warn_of_missing_maps(request.keep_maps, rows)
        if request.out is None or world.rank or others_are_running(request.out, request.shard):
            return
        store_map_samples(
            request.out,
            Rows.read(request.out),  # of all shards, by the last one
            self.plan.columns,
            self.vit,
            self._again,
            self.target_of,
            None if self.loaded is None else self.loaded.class_names,
        )

    def _again(self, names: Sequence[str]) -> Iterator[Batch]:
        """Images by name, each as a batch of one; those that cannot be read are left out."""
        loaded = (self.loader.load(Job((image,), ())).data for image in self.source.find(names))
        return (batch for batch in loaded if batch is not None)


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
    if request.suite == "ground_truth":
        from steadygaze.runs.ground_truth import run_ground_truth

        return run_ground_truth(request, run_verify, on_progress)
    if request.suite == "mosaics":
        from steadygaze.runs.mosaics import run_mosaics

        return run_mosaics(request, run_verify, on_progress)
    if request.suite == "funnybirds":
        from steadygaze.runs.funnybirds import run_funnybirds

        return run_funnybirds(request, functools.partial(run_verify, on_progress=on_progress))
    ready = prepared or prepare_verify(request, (world or World()).of_shard(request.shard))
    return replace(ready, request=request).run(world, on_progress, pace)


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
        request.hide,
        None if request.maps is None else open_maps(request.maps),
        request.random,
        request.ceiling,
    )


def _prepare_files(request: VerifyRequest, world: World) -> PreparedVerify:
    place = request.place  # checked before the model is loaded, which takes longer
    loaded = request.load(world)
    vit = adapt(loaded)
    check_quantity(vit)
    classes = number_of_classes(loaded.model, loaded.size)
    loaded = named_by_data(loaded, place, classes)
    plan = _plan(request, vit)
    lookup = ClassLookup(loaded.class_names, classes)
    if vit.plan.outputs == "values":
        lookup = Unlabeled()  # folders are not named by values
    target = _class_target(request.target, loaded, classes, vit.plan.outputs)
    source = FileSource.open(request, place, lookup, labels_needed=target == "label")
    if target == "label" and source.unlabeled is not None:
        raise InputError(
            f"{source.unlabeled}: its class is not one of the model's. Explain the predicted class instead: "
            "target='predicted'"
        )
    if plan.needs_masks and source.decode is None:
        raise InputError(
            f"{', '.join(plan.needs_masks)}: expected masks. Give masks=FOLDER, or leave these metrics out.",
            option="masks",
        )
    loader = BatchLoader(loaded.preprocess, source.decode)
    check_complete(plan, source, loader, target)
    described = {
        **request.settings(loaded),
        **source.facts(masks=True),
        "masks": source.decode is not None,
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
        request=request,
        loaded=loaded,
        source=source,
        loader=loader,
        identity=loaded.identity,
        settings=_settings(plan, loaded.identity, described),
        about={**about_run(request), "given": origin, **_described_metrics(plan.metrics)},
        vit=vit,
        plan=plan,
        target_of=_target_function(target, source),
    )


def _prepare_memory(request: VerifyRequest) -> PreparedVerify:
    loaded = request.model if isinstance(request.model, LoadedModel) else None
    if isinstance(request.model, str):
        loaded = request.load(World())
    vit = adapt(request.model if loaded is None else loaded)
    check_quantity(vit)
    plan = _plan(request, vit)
    normalization = normalization_of(vit.model, loaded, request.mean, request.std)
    if plan.painting and not normalization.known:
        warnings.warn(
            f"{', '.join(plan.painting)}: pixels are set to black before normalization, which the model "
            "does not declare: ImageNet's mean and std are assumed. Give mean= and std= if they are others.",
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
    source = MemorySource(data, normalization)
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
        mean, std = normalization.mean, normalization.std
        described |= {"mean": torch.tensor(mean).tolist(), "std": torch.tensor(std).tolist()}
    preprocess = Preprocess.resize_and_crop(source.size, mean=normalization.mean, std=normalization.std)
    return PreparedVerify(
        request=request,
        loaded=loaded,
        source=source,
        loader=BatchLoader(preprocess, dtype=next(vit.model.parameters()).dtype),
        identity=identity,
        settings=_settings(plan, identity, described),
        about={**about_run(request), **_described_metrics(plan.metrics)},
        vit=vit,
        plan=plan,
        target_of=_target_function(target, source),
    )


def _described_metrics(names: Sequence[str]) -> dict[str, Any]:
    """What a report in another process needs to know about a user's own metrics, for `about` of run.json."""
    own = [METRICS[name] for name in names if not METRICS.is_built_in(name)]
    return {"quantities": [metric_record(metric) for metric in own]} if own else {}


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
        **({} if plan.hide == "remove" else {"hide": plan.hide}),
        "versions": {"steadygaze": __version__, **versions()},
    }


# -- the class that is explained -------------------------------------------------------------------


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


def _target_function(target: str | int | Tensor, source: Source) -> TargetOf:
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
    model: nn.Module | ViT | LoadedModel | str | None = None,
    data: Data | None = None,
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
        >>> rows = verify(suite="ground_truth", methods="gaze_removal", limit=1)  # the truth is known
        >>> sorted({row["metric"] for row in rows})
        ['distractor_share', 'importance_correlation', 'importance_rank']
    """
    names = [field.name for field, _ in options_of(VerifyRequest)]
    for name in options:
        if name not in names:
            raise UnknownNameError("option of verify", name, names)
    arguments: dict[str, Any] = {"model": model, "methods": methods, "metrics": metrics, **options}
    return run_verify(VerifyRequest(data=data, **arguments), on_progress=on_progress)
