"""A stress run: what it is given, checked as a whole before anything is written, then executed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.data.streams import StreamSpec
from steadygaze.errors import BadInput, DamagedData, UnsupportedModel
from steadygaze.loading.loaded import LoadedModel
from steadygaze.method_registry import DEFAULT
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.runs.load_ahead import default_num_workers
from steadygaze.runs.loop import Pace, Run, at_once, owned_images, total_work
from steadygaze.runs.normalisation import Normalisation, normalisation_of
from steadygaze.runs.processes import World
from steadygaze.runs.request import Request, about_run, identity_of, named_by_data
from steadygaze.runs.rows import STRESS, Row, Rows
from steadygaze.runs.stress.evaluator import Batch, Evaluator, class_count
from steadygaze.runs.stress.images import ImageLoader, MadeImages, StressJob
from steadygaze.runs.stress.jobs import batch_jobs, data_jobs, run_settings, set_jobs
from steadygaze.runs.stress.parse import parse_suites
from steadygaze.runs.stress.predictions import with_predictions
from steadygaze.runs.stress.samples import store_samples
from steadygaze.runs.stress.sources import FolderData, MemoryData, StreamData
from steadygaze.runs.stress.suite import Condition, ImageSet, Suite, check_outputs
from steadygaze.target import own_task, task_of_outputs
from steadygaze.vit import ViT


@dataclass(frozen=True, kw_only=True)
class StressRequest(Request):
    """What `stress` is given; data may be None if every suite has images of its own.

    options: of the suites, by name, as the user gave them
    mean, std: the normalisation of images in memory
    map_method: attribution method of the maps that are stored with the run, for reports
    """

    suites: str | Sequence[str] = ("corruptions",)
    options: Mapping[str, Any] = field(default_factory=dict)
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    map_method: str = DEFAULT


@dataclass(frozen=True)
class PreparedStress:
    """A run that is checked, with nothing computed yet.

    data_conditions: what every image of the data goes through        image_sets: images of the suites' own
    """

    request: StressRequest
    evaluator: Evaluator
    suites: Mapping[str, Suite]
    data: FolderData | StreamData | MemoryData
    normalisation: Normalisation
    data_conditions: tuple[Condition, ...]
    image_sets: tuple[ImageSet, ...]
    loader: ImageLoader
    identity: dict[str, str]
    settings: dict[str, Any]
    about: dict[str, Any]
    num_workers: int
    class_names: Sequence[str] | None = None

    @property
    def notes(self) -> list[str]:
        """What is left out, missing or assumed."""
        return self.settings["notes"]

    @property
    def damaged(self) -> list[str]:
        """What could not be read whole, with reasons: shards of a stream."""
        return self.data.stream.damaged if isinstance(self.data, StreamData) else []

    @property
    def setting_count(self) -> int:
        return len(self.settings["conditions"])

    @property
    def image_count(self) -> int | None:
        """Images of the data and of all sets; None if unknown, for data in memory."""
        if isinstance(self.data, MemoryData) or self.data.count is None:
            return None
        return self.data.count + sum(len(one.images) for one in self.image_sets)

    def groups(self) -> Iterator[Iterable[StressJob]]:
        """Jobs, group by group: a folder all at once, memory batch by batch, a stream as it comes."""
        if isinstance(self.data, MemoryData):
            for number, batch in enumerate(self.data.batches(self.normalisation, self.evaluator.classes)):
                self.loader.show_batch(batch.pixels, batch.given, batch.label_maps)
                yield list(batch_jobs(batch.images, self.data_conditions, number))
        elif isinstance(self.data, StreamData):
            yield data_jobs(self.data, self.data_conditions)
            yield list(set_jobs(self.image_sets, self.request.batch_size))
        else:
            jobs = list(data_jobs(self.data, self.data_conditions))
            first = jobs[-1].batch + 1 if jobs else 0
            yield [*jobs, *set_jobs(self.image_sets, self.request.batch_size, first)]

    def jobs(self) -> list[StressJob]:
        """All jobs of a run over files, listed."""
        return [job for jobs in self.groups() for job in jobs]

    def work(self, world: World) -> int | None:
        """Number of images that the model of this process is shown; None if unknown."""
        if isinstance(self.data, MemoryData):
            return None
        if isinstance(self.data, FolderData):
            return total_work(self.jobs(), world)
        images = owned_images(self.data.count, self.request.batch_size, world)
        views = sum(condition.views for condition in self.data_conditions)
        sets = total_work(set_jobs(self.image_sets, self.request.batch_size), world)
        return None if images is None else images * views + sets

    def compute(self, job: StressJob, made: MadeImages) -> Iterable[Row]:
        """The rows of one job."""
        assert job.condition is not None
        views = self._views(job.condition, made)
        batch = Batch(made.images, views, made.label_maps)
        suite = self.suites[job.condition.suite]
        if not job.keys:
            suite.reference(self.evaluator, job.set_name, batch)
            return []
        measurements = suite.measure(self.evaluator, job.condition, batch)
        return self.evaluator.rows(measurements, made.images, self.identity)

    def _views(self, condition: Condition, made: MadeImages) -> torch.Tensor:
        given = self.loader.given
        if given and condition.unchanged:
            images = torch.stack([given[image.name] for image in made.images])[:, None]
            return images.to(self.evaluator.device, self.evaluator.dtype)
        return self.evaluator.normalise(made.views)


def prepare_stress(request: StressRequest, world: World | None = None) -> PreparedStress:
    """Load the model, find the images, check every name; raises before anything is written."""
    suites = parse_suites(request.suites, request.options)
    label_maps = any(suite.label_maps for suite in suites)
    if request.in_memory:
        return _prepare_memory(request, suites, label_maps)
    return _prepare_files(request, suites, label_maps, world or World())


def run_stress(
    request: StressRequest,
    world: World | None = None,
    on_progress: OnProgress = ignore_progress,
    prepared: PreparedStress | None = None,
    pace: Pace | None = None,
) -> Rows:
    """Execute a run. Rows go into `request.out`; those that are there already are not computed again."""
    world = (world or World()).of_shard(request.shard)
    ready = prepared or prepare_stress(request, world)
    run = Run(
        request.out,
        ready.settings,
        ready.about,
        task=STRESS,
        total=ready.work(world),
        world=world,
        on_progress=on_progress,
    )
    run.pace = pace or run.pace
    with run:
        for number, jobs in enumerate(ready.groups()):
            run.execute(
                jobs, ready.loader, at_once(ready.compute), num_workers=ready.num_workers, processes=True
            )
            if request.out is not None and world.rank == request.shard.index == number == 0:
                store_samples(request.out, ready, jobs)
    for damage in ready.damaged:
        warnings.warn(damage, DamagedData, stacklevel=2)
    return run.rows()


def _prepare_files(
    request: StressRequest, suites: list[Suite], label_maps: bool, world: World
) -> PreparedStress:
    if not isinstance(request.model, (str, LoadedModel)):
        request.load(world)  # raises: the preprocessing of the model is not known
    needs_data = request.data is not None or not all(suite.own_images for suite in suites)
    place = request.place if needs_data else None
    for suite in suites:  # before the model is loaded, which takes longer
        suite.open(request.limit)
    loaded = request.load(world)
    classes = class_count(loaded.model, loaded.size, label_maps)
    if place is not None:
        loaded = named_by_data(loaded, place, classes)
    evaluator = Evaluator(
        loaded.model,
        loaded.preprocess,
        name=loaded.name,
        classes=classes,
        batch_size=request.batch_size,
        seed=request.seed,
        task=loaded.task,
        tokenizer=loaded.tokenizer,
    )
    labelled = label_maps or evaluator.outputs == "classes"
    if not label_maps:
        check_outputs(suites, evaluator.outputs)
    image_sets = tuple(image_set for suite in suites for image_set in suite.image_sets(evaluator))
    data: FolderData | StreamData
    if isinstance(place, StreamSpec):
        request.refuse_masks(place)
        data = StreamData.open(place, loaded, classes, request, label_maps=label_maps, labels_used=labelled)
    else:
        data = FolderData.read(
            place,
            request.masks,
            loaded,
            classes,
            label_maps=label_maps,
            limit=request.limit,
            batch_size=request.batch_size,
            labels_used=labelled,
        )
    needy = next((suite.name for suite in suites if suite.needs_masks), None)
    if needy and data.decode is None:
        raise BadInput(
            f"{needy}: expected masks. Give masks=FOLDER, a column mask in {place}/index.csv, or ?mask=NAME",
            option="masks",
        )
    decode = data.decode if label_maps or needy else None
    measured = with_predictions(suites, evaluator) if place is not None and not label_maps else list(suites)
    facts = {**request.settings(loaded), **data.facts(), "device": evaluator.device.type}
    num_workers = request.num_workers
    if num_workers is None:
        num_workers = default_num_workers(evaluator.device)
    names = loaded.class_names
    labels = data.labels(classes) if labelled and not label_maps else []
    about = {
        **about_run(request),
        "given": request.origin(loaded),
        "classes": {} if names is None else {str(label): names[label] for label in labels},
    }
    return _prepared(
        request,
        evaluator,
        measured,
        _conditions(measured, evaluator),
        data,
        Normalisation(tuple(loaded.mean), tuple(loaded.std)),
        image_sets,
        ImageLoader(
            request.seed,
            {suite.name: suite for suite in measured},
            loaded.preprocess,
            decode=decode,
            with_label_maps=label_maps,
        ),
        loaded.identity,
        facts,
        list(data.notes()),
        about,
        num_workers,
        names,
    )


def _prepare_memory(request: StressRequest, suites: list[Suite], label_maps: bool) -> PreparedStress:
    for suite in suites:
        if suite.own_images or suite.needs_masks:
            raise BadInput(
                f"{suite.name}: expected data in a folder, got batches. Give the folder and a model of "
                "sg.load_model."
            )
        suite.open(request.limit)
    loaded = request.model if isinstance(request.model, LoadedModel) else None
    if isinstance(request.model, str):
        loaded = request.load(World())
    module: Any = loaded.model if loaded else request.model
    module = module.model if isinstance(module, ViT) else module
    if not isinstance(module, nn.Module):
        raise UnsupportedModel(f"expected a classifier, a torch.nn.Module, got {type(module).__name__}")
    normalisation = normalisation_of(module, loaded, request.mean, request.std)
    view = request.model if isinstance(request.model, ViT) else None
    task = task_of_outputs(view.plan.outputs) if view is not None else loaded.task if loaded else None
    data = MemoryData(
        request.data,
        label_maps=label_maps,
        limit=request.limit,
        batch_size=request.batch_size,
        preprocess=None if loaded is None else loaded.preprocess,
        labels_used=(task or own_task(module)) in (None, "classification"),
    )
    name = loaded.name if loaded else type(module).__name__
    preprocess = Preprocess.resize_and_crop(data.size, mean=normalisation.mean, std=normalisation.std)
    evaluator = Evaluator(
        module,
        preprocess,
        name=name,
        classes=class_count(module, data.size, label_maps),
        batch_size=max(request.batch_size, len(data.first)),
        seed=request.seed,
        task=task,
    )
    if not label_maps:
        check_outputs(suites, evaluator.outputs)
    measured = list(suites) if label_maps else with_predictions(suites, evaluator)
    return _prepared(
        request,
        evaluator,
        measured,
        _conditions(measured, evaluator),
        data,
        normalisation,
        (),
        ImageLoader(request.seed, {suite.name: suite for suite in measured}, preprocess, memory={}),
        identity_of(module, loaded),
        data.facts(normalisation, evaluator.classes),
        data.check_normalisation(normalisation, name),
        about_run(request),
        request.num_workers or 0,
        None if loaded is None else loaded.class_names,
    )


def _conditions(suites: Sequence[Suite], evaluator: Evaluator) -> tuple[Condition, ...]:
    """What every image of the data goes through."""
    return tuple(condition for suite in suites for condition in suite.conditions(evaluator))


def _prepared(
    request: StressRequest,
    evaluator: Evaluator,
    suites: list[Suite],
    conditions: tuple[Condition, ...],
    data: FolderData | StreamData | MemoryData,
    normalisation: Normalisation,
    image_sets: tuple[ImageSet, ...],
    loader: ImageLoader,
    identity: dict[str, str],
    facts: dict[str, Any],
    data_notes: list[str],
    about: dict[str, Any],
    num_workers: int,
    class_names: Sequence[str] | None,
) -> PreparedStress:
    notes = [*(note for suite in suites for note in suite.notes), *data_notes]
    settings = run_settings(request, evaluator, suites, conditions, image_sets, identity, facts, notes)
    return PreparedStress(
        request,
        evaluator,
        loader.suites,
        data,
        normalisation,
        conditions,
        image_sets,
        loader,
        identity,
        settings,
        about,
        num_workers,
        class_names,
    )
