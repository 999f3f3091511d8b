"""`stress`: how robust is a model to corruption, shift, attack and occlusion, and what does its attention do?

The names and options of suites are checked as a whole before anything is written. A job is a batch of images
under one condition.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steadygaze import __version__
from steadygaze.data.memory import Data
from steadygaze.data.preprocess import Preprocess
from steadygaze.data.stream_spec import StreamSpec
from steadygaze.errors import DamagedDataWarning, InputError, UnknownNameError, UnsupportedModelError
from steadygaze.loading.loaded import LoadedModel
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.results.manifest import versions
from steadygaze.runs.evaluator import Evaluator, class_count
from steadygaze.runs.loop import Pace, Run, at_once, default_num_workers, owned_images, total_work
from steadygaze.runs.prepare import (
    Normalization,
    about_run,
    identity_of,
    named_by_data,
    normalization_of,
    task_setting,
)
from steadygaze.runs.request import StressRequest, documented, options_of
from steadygaze.runs.rows import STRESS, Row, Rows
from steadygaze.runs.samples import SettingSampler
from steadygaze.runs.settings import CLEAN, Condition, quantity_record
from steadygaze.runs.shards import World
from steadygaze.runs.source import (
    Batch,
    FolderData,
    ImageLoader,
    MemoryData,
    RunImage,
    StreamData,
    StressJob,
)
from steadygaze.runs.suite import SUITES, ImageSet, Suite, all_options, check_outputs, with_predictions
from steadygaze.target import own_task, task_of_outputs
from steadygaze.vit.view import ViT


def parse_suites(texts: str | Sequence[str], options: Mapping[str, Any] | None = None) -> list[Suite]:
    """The suites that these texts name, comma-separated, in the order of the registry.

    Args:
        options: By name, as the user gave them; None stands for the default. All are checked, used or not.

    Examples:
        >>> [suite.name for suite in parse_suites("corruptions,shift:imagenet-a=folder")]
        ['corruptions', 'shift']
    """
    arguments = _arguments([texts] if isinstance(texts, str) else texts)
    values = parse_options(options or {})
    suites = []
    for name in SUITES:
        if name in arguments:
            suite = SUITES[name](arguments[name], **values)
            suite.check()
            suites.append(suite)
    if not suites:
        raise InputError(f"suites: expected at least one of {', '.join(SUITES)}, got none", option="suites")
    alone = next((suite.name for suite in suites if suite.label_maps), None)
    if alone and len(suites) > 1:
        raise InputError(
            f"{alone}: is measured on a segmenter, every other suite on a classifier. Run it alone.",
            option="suites",
        )
    _check_served(values, suites)
    return suites


def _arguments(texts: Sequence[str]) -> dict[str, list[str]]:
    """suite -> what stood after its colon, each time it was named."""
    arguments: dict[str, list[str]] = {}
    for text in texts:
        for piece in filter(None, (piece.strip() for piece in str(text).split(","))):
            name, colon, argument = piece.partition(":")
            suite = SUITES[name]
            given = arguments.setdefault(suite.name, [])
            if colon:
                given.append(argument)
    return arguments


def parse_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Checked values of the options that were given."""
    known = all_options()
    values = {}
    for name, given in options.items():
        if name not in known:
            raise UnknownNameError("option of a suite", name, known)
        if given is not None:
            try:
                values[name] = known[name].parse(given)
            except InputError as error:
                error.option = error.option or name
                raise
    return values


def _check_served(values: Mapping[str, Any], suites: Sequence[Suite]) -> None:
    """Options that may not be given in vain."""
    used = {option.name for suite in suites for option in suite.options}
    known = all_options()
    for name in values:
        if name not in used and known[name].must_serve:
            owners = [suite.name for suite in SUITES.values() if known[name] in suite.options]
            raise InputError(
                f"{name}: an option of the suite {', '.join(owners)}, which is not among the suites",
                option=name,
            )


VIEWS_PER_JOB = 64  # images that one job makes, about; sequences make 31 of each


def batch_jobs(
    images: Sequence[RunImage],
    conditions: Sequence[Condition],
    number: int,
    references: tuple[StressJob, ...] = (),
) -> Iterator[StressJob]:
    """A batch under every condition; conditions that make many views of an image take few images at a
    time."""
    for condition in conditions:
        step = len(images) if condition.views <= 2 else max(1, VIEWS_PER_JOB // condition.views)
        for some in split_images(images, 1 if condition.single else step):
            yield StressJob(
                tuple(image.name for image in some),
                tuple((setting, "", metric) for setting, metric in condition.rows),
                batch=number,
                work=len(some) * condition.views,
                requires=references,
                run_images=some,
                condition=condition,
            )


def data_jobs(data: FolderData | StreamData, conditions: Sequence[Condition]) -> Iterator[StressJob]:
    """The images of the data, batch by batch."""
    for number, batch in enumerate(data.batches()):
        yield from batch_jobs(batch.images, conditions, number)


def set_jobs(image_sets: Sequence[ImageSet], batch_size: int, number: int = 0) -> Iterator[StressJob]:
    """The images of the suites' own sets. number: of the first batch."""
    for image_set in image_sets:
        references = reference_jobs(image_set, batch_size)
        for images in split_images(image_set.images, batch_size):
            yield from batch_jobs(images, image_set.conditions, number, references)
            number += 1


def reference_jobs(image_set: ImageSet, size: int) -> tuple[StressJob, ...]:
    """Jobs that show the references of a set to its suite; they have no rows."""
    if not image_set.references:
        return ()
    condition = Condition(image_set.conditions[0].suite, (), ())
    return tuple(
        StressJob(
            tuple(image.name for image in some),
            (),
            run_images=some,
            condition=condition,
            set_name=image_set.name,
        )
        for some in split_images(image_set.references, size)
    )


def split_images(images: Sequence[RunImage], size: int) -> list[tuple[RunImage, ...]]:
    """Groups of at most `size` images, in order."""
    return [tuple(images[start : start + size]) for start in range(0, len(images), size)]


def run_settings(
    request: StressRequest,
    evaluator: Evaluator,
    suites: Sequence[Suite],
    conditions: Sequence[Condition],
    image_sets: Sequence[ImageSet],
    identity: dict[str, str],
    facts: dict[str, Any],
    notes: list[str],
) -> dict[str, Any]:
    """Everything that defines the numbers of a run."""
    own = [condition for image_set in image_sets for condition in image_set.conditions]
    everywhere = [*(conditions if facts.get("images") != 0 else ()), *own]
    settings = dict.fromkeys(setting for condition in everywhere for setting in condition.settings)
    quantities = dict.fromkeys(metric for condition in everywhere for metric in condition.metrics)
    set_images = {
        setting.label: len(image_set.images)
        for image_set in image_sets
        for condition in image_set.conditions
        for setting in condition.settings
    }
    suite_facts: dict[str, Any] = {}
    for suite in suites:
        suite_facts |= suite.facts()
    return {
        "kind": STRESS,
        **identity,
        **facts,
        "suite": [suite.name for suite in suites if suite.name != CLEAN.suite],
        **suite_facts,
        "conditions": [setting.record() for setting in settings],
        "quantities": [quantity_record(quantity) for quantity in quantities],
        "set_images": set_images,
        "classes": evaluator.classes,
        **({} if "segments" in facts else task_setting(evaluator.outputs)),
        "batch": evaluator.batch_size,
        "seed": request.seed,
        "notes": notes,
        "versions": {"steadygaze": __version__, **versions()},
    }


@dataclass(frozen=True)
class PreparedStress:
    """A run that is checked, with nothing computed yet.

    Attributes:
        data_conditions: What every image of the data goes through        image_sets: images of the suites'
            own.
    """

    request: StressRequest
    evaluator: Evaluator
    suites: Mapping[str, Suite]
    data: FolderData | StreamData | MemoryData
    normalization: Normalization
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
            for number, batch in enumerate(self.data.batches(self.normalization, self.evaluator.classes)):
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

    def sampler(self, out: Path) -> SettingSampler:
        """Stores sample images in `out`, for reports."""
        suites = list(self.suites.values())
        return SettingSampler(
            out, self.evaluator, suites, self.loader, self.request.map_method, self.class_names
        )

    def sample_images(self, jobs: Iterable[StressJob]) -> list[RunImage]:
        """The images of the data, in its order; of a stream, the first ones. jobs: of the first group."""
        if isinstance(self.data, StreamData):
            return self.data.first_images
        own = {image.name: image for job in jobs for image in job.run_images if image.reader is None}
        return list(own.values())

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

    def compute(self, job: StressJob, made: Batch) -> Iterable[Row]:
        """The rows of one job."""
        assert job.condition is not None
        batch = replace(made, views=self._views(job.condition, made))
        suite = self.suites[job.condition.suite]
        if not job.keys:
            suite.reference(self.evaluator, job.set_name, batch)
            return []
        measurements = suite.measure(self.evaluator, job.condition, batch)
        return self.evaluator.rows(measurements, made.images, self.identity)

    def _views(self, condition: Condition, made: Batch) -> torch.Tensor:
        given = self.loader.given
        if given and condition.unchanged:
            images = torch.stack([given[image.name] for image in made.images])[:, None]
            return images.to(self.evaluator.device, self.evaluator.dtype)
        return self.evaluator.normalize(made.views)


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
                ready.sampler(request.out).store(ready.sample_images(jobs))
    for damage in ready.damaged:
        warnings.warn(damage, DamagedDataWarning, stacklevel=2)
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
    labeled = label_maps or evaluator.outputs == "classes"
    if not label_maps:
        check_outputs(suites, evaluator.outputs)
    image_sets = tuple(image_set for suite in suites for image_set in suite.image_sets(evaluator))
    data: FolderData | StreamData
    if isinstance(place, StreamSpec):
        request.refuse_masks(place)
        data = StreamData.open(place, loaded, classes, request, label_maps=label_maps, labels_used=labeled)
    else:
        data = FolderData.read(
            place,
            request.masks,
            loaded,
            classes,
            label_maps=label_maps,
            limit=request.limit,
            batch_size=request.batch_size,
            labels_used=labeled,
        )
    needy = next((suite.name for suite in suites if suite.needs_masks), None)
    if needy and data.decode is None:
        raise InputError(
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
    labels = data.labels(classes) if labeled and not label_maps else []
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
        Normalization(tuple(loaded.mean), tuple(loaded.std)),
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
            raise InputError(
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
        raise UnsupportedModelError(f"expected a classifier, a torch.nn.Module, got {type(module).__name__}")
    normalization = normalization_of(module, loaded, request.mean, request.std)
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
    preprocess = Preprocess.resize_and_crop(data.size, mean=normalization.mean, std=normalization.std)
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
        normalization,
        (),
        ImageLoader(request.seed, {suite.name: suite for suite in measured}, preprocess, memory={}),
        identity_of(module, loaded),
        data.facts(normalization, evaluator.classes),
        data.check_normalization(normalization, name),
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
    normalization: Normalization,
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
        {suite.name: suite for suite in suites},
        data,
        normalization,
        conditions,
        image_sets,
        loader,
        identity,
        settings,
        about,
        num_workers,
        class_names,
    )


@documented(StressRequest)
def stress(
    model: nn.Module | ViT | LoadedModel | str,
    data: Data | None,
    suites: str | Sequence[str] = ("corruptions",),
    *,
    num_workers: int = 0,
    on_progress: OnProgress = ignore_progress,
    **suite_options: Any,
) -> Rows:
    """Measure the robustness of a classifier or a segmenter. `.cards()` of the result has the scores.

    Args:
        {options}
        on_progress: Called with a `Progress` while the run computes.
        suite_options: Options of the suites, as `sg.list_suites()` describes them: corruptions ("all15",
            "all19" or names), severities (some of 1..5): of corruptions, attention, segmentation and
            shift:imagenet-c; epsilons (such as 8/255), pgd_steps: of attacks; salient (a method): of
            occlusion; backgrounds (a folder): of synthetic; bank (number of training images): of neighbors;
            partial (accept incomplete downloads): of shift and neighbors.

    Returns:
        The rows: one number for each image, setting and metric.

    Examples:
        >>> import torch
        >>> from steadygaze import load_model
        >>> batch = torch.rand(2, 3, 32, 32), torch.tensor([3, 5])  # images and labels
        >>> rows = stress(load_model("embedded"), [batch], corruptions="fog", severities=[1])
        >>> sorted({row["setting"] for row in rows})
        ['clean', 'fog/1']
    """
    known = {field.name for field, _ in options_of(StressRequest)}
    given = {name: value for name, value in suite_options.items() if name in known}
    options = {name: value for name, value in suite_options.items() if name not in known}
    request = StressRequest(
        model=model, data=data, suites=suites, num_workers=num_workers, options=options, **given
    )
    return run_stress(request, on_progress=on_progress)
