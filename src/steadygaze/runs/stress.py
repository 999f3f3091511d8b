"""`stress`: how robust is a model to corruption, shift, attack and occlusion, and what does its attention do?

The names and options of suites are checked as a whole before anything is written. A job is a batch of images
under one condition.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from steadygaze import __version__
from steadygaze.data.folders import ClassLookup, Unlabeled
from steadygaze.data.images import tensor_hash
from steadygaze.data.label_maps import SegmentationImages
from steadygaze.data.masks import LabeledImages
from steadygaze.data.memory import Data, InMemoryData
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError, UnknownNameError, UnsupportedModelError
from steadygaze.loading.loaded import LoadedModel
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.results.manifest import versions
from steadygaze.runs.evaluator import Evaluator, class_count
from steadygaze.runs.loop import Lacks, Pace, Portion, Prepared, total_work
from steadygaze.runs.prepare import about_run, identity_of, named_by_data, normalization_of, task_setting
from steadygaze.runs.request import StressRequest, documented, options_of
from steadygaze.runs.rows import STRESS, Rows
from steadygaze.runs.sampler import SettingSampler
from steadygaze.runs.settings import CLEAN, Condition, quantity_record
from steadygaze.runs.shards import World
from steadygaze.runs.source import (
    Batch,
    FileSource,
    Job,
    MemorySource,
    RunImage,
    Source,
    ViewLoader,
    gray_levels,
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
            of_suite = arguments.setdefault(suite.name, [])
            if colon:
                of_suite.append(argument)
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
    references: tuple[Job, ...] = (),
) -> Iterator[Job]:
    """A batch under every condition; conditions that make many views of an image take few images at a
    time."""
    for condition in conditions:
        step = len(images) if condition.views <= 2 else max(1, VIEWS_PER_JOB // condition.views)
        for some in split_images(images, 1 if condition.single else step):
            yield Job(
                some,
                tuple((setting, "", metric) for setting, metric in condition.rows),
                batch=number,
                work=len(some) * condition.views,
                requires=references,
                condition=condition,
            )


def set_jobs(image_sets: Sequence[ImageSet], batch_size: int, number: int = 0) -> Iterator[Job]:
    """The images of the suites' own sets. number: of the first batch."""
    for image_set in image_sets:
        condition = Condition(image_set.conditions[0].suite, (), ())
        references = tuple(  # they are shown to the suite, and have no rows
            Job(some, (), condition=condition, set_name=image_set.name)
            for some in split_images(image_set.references, batch_size)
        )
        for images in split_images(image_set.images, batch_size):
            yield from batch_jobs(images, image_set.conditions, number, references)
            number += 1


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


@dataclass(frozen=True, kw_only=True)
class PreparedStress(Prepared[Batch]):
    """A run of stress that is checked: every batch goes through every condition.

    Attributes:
        data_conditions: What every image of the data goes through.
        image_sets: Images of the suites' own.
    """

    task: ClassVar[str] = STRESS
    processes: ClassVar[bool] = True

    request: StressRequest
    loader: ViewLoader
    evaluator: Evaluator
    suites: Mapping[str, Suite]
    data_conditions: tuple[Condition, ...]
    image_sets: tuple[ImageSet, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.evaluator.device

    @property
    def notes(self) -> list[str]:
        """What is left out, missing or assumed."""
        return self.settings["notes"]

    @property
    def setting_count(self) -> int:
        return len(self.settings["conditions"])

    @property
    def image_count(self) -> int | None:
        """Images of the data and of all sets; None if unknown, for data in memory."""
        if isinstance(self.source, MemorySource) or self.source.count is None:
            return None
        return self.source.count + sum(len(image_set.images) for image_set in self.image_sets)

    def jobs_of(self, images: tuple[RunImage, ...], number: int) -> Iterator[Job]:
        return batch_jobs(images, self.data_conditions, number)

    def groups(self) -> Iterator[Iterable[Job]]:
        """The jobs of the data, then those of the suites' own images."""
        first = 0  # of the batches of sets
        for jobs in super().groups():
            if isinstance(jobs, Sequence) and jobs:
                first = jobs[-1].batch + 1
            yield jobs
        if self.image_sets:
            yield list(set_jobs(self.image_sets, self.request.batch_size, first))

    def work(self, world: World) -> int | None:
        """Number of images that the model of this process is shown; None if unknown."""
        if isinstance(self.source, MemorySource):
            return None
        if not self.source.is_stream:
            return total_work(self.jobs(), world)
        images = self.source.owned(world)
        views = sum(condition.views for condition in self.data_conditions)
        sets = total_work(set_jobs(self.image_sets, self.request.batch_size), world)
        return None if images is None else images * views + sets

    def compute(self, job: Job, data: Batch, lacks: Lacks) -> list[Portion]:
        assert job.condition is not None
        batch = replace(data, views=self._views(job.condition, data))
        suite = self.suites[job.condition.suite]
        if not job.keys:
            suite.reference(self.evaluator, job.set_name, batch)
            return []
        measurements = suite.measure(self.evaluator, job.condition, batch)
        return [Portion(list(self.evaluator.rows(measurements, data.images, self.identity)))]

    def trial(self, job: Job) -> tuple[Job, float, str]:
        assert job.condition is not None
        trial = self.suites[job.condition.suite].trial(self.evaluator, job.condition)
        return replace(job, condition=trial.condition), trial.times, trial.note

    def _views(self, condition: Condition, batch: Batch) -> torch.Tensor:
        """The views as the model takes them; an image in memory that is not changed, as it was given."""
        tensors = [image.tensor for image in batch.images if image.tensor is not None]
        if tensors and condition.unchanged:
            return torch.stack(tensors)[:, None].to(self.evaluator.device, self.evaluator.dtype)
        return self.evaluator.normalize(batch.views)

    def after_group(self, number: int, jobs: Iterable[Job], world: World) -> None:
        """Store sample images of the data, after the first group."""
        out = self.request.out
        if out is None or number or world.rank or self.request.shard.index:
            return
        if isinstance(self.source, FileSource) and self.source.is_stream:
            images = self.source.first_images
        else:
            own = {image.name: image for job in jobs for image in job.run_images if image.reader is None}
            images = list(own.values())
        names = None if self.loaded is None else self.loaded.class_names
        suites = list(self.suites.values())
        method = self.request.map_method
        SettingSampler(out, self.evaluator, suites, self.loader, method, names).store(images)


def prepare_stress(
    request: StressRequest, world: World | None = None, loaded: LoadedModel | None = None
) -> PreparedStress:
    """Load the model, find the images, check every name; raises before anything is written.

    Args:
        loaded: The model of the request, if it is loaded already.
    """
    suites = parse_suites(request.suites, request.options)
    label_maps = any(suite.label_maps for suite in suites)
    if request.in_memory:
        return _prepare_memory(request, suites, label_maps)
    return _prepare_files(request, suites, label_maps, world or World(), loaded)


def run_stress(
    request: StressRequest,
    world: World | None = None,
    on_progress: OnProgress = ignore_progress,
    prepared: PreparedStress | None = None,
    pace: Pace | None = None,
) -> Rows:
    """Execute a run. Rows go into `request.out`; those that are there already are not computed again."""
    ready = prepared or prepare_stress(request, (world or World()).of_shard(request.shard))
    return replace(ready, request=request).run(world, on_progress, pace)


def _prepare_files(
    request: StressRequest, suites: list[Suite], label_maps: bool, world: World, loaded: LoadedModel | None
) -> PreparedStress:
    if not isinstance(request.model, (str, LoadedModel)):
        request.load(world)  # raises: the preprocessing of the model is not known
    needs_data = request.data is not None or not all(suite.own_images for suite in suites)
    place = request.place if needs_data else None
    for suite in suites:  # before the model is loaded, which takes longer
        suite.open(request.limit)
    loaded = loaded or request.load(world)
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
    lookup = ClassLookup(loaded.class_names, classes) if labeled else Unlabeled()
    groups = request.groups or ()
    if groups and (label_maps or not labeled or place is None):
        raise InputError(
            "groups: expected a classifier and data, whose accuracy is measured by group", option="groups"
        )
    data = FileSource.open(request, place, lookup, labels_needed=True, label_maps=label_maps, groups=groups)
    if isinstance(data.images, SegmentationImages) and data.images.classes != classes:
        raise InputError(
            f"segmentation: {loaded.name} has {classes} classes, the masks of {place} "
            f"({data.images.layout}) have {data.images.classes}"
        )
    data.check_labels(loaded.name)
    needy = next((suite.name for suite in suites if suite.needs_masks), None)
    if needy and data.decode is None:
        raise InputError(
            f"{needy}: expected masks. Give masks=FOLDER, a column mask in {place}/index.csv, or ?mask=NAME",
            option="masks",
        )
    for suite in suites:
        suite.use_data(data.images.items if isinstance(data.images, LabeledImages) else None)
    decode = data.decode if label_maps or needy else None
    measured = with_predictions(suites, evaluator) if place is not None and not label_maps else list(suites)
    conditions = _conditions(measured, evaluator)
    facts = {**request.settings(loaded), **data.facts(), "device": evaluator.device.type}
    if groups:
        facts["groups"] = {"columns": list(groups), **data.group_facts()}
    names = loaded.class_names
    labels = data.labels(classes) if labeled and not label_maps else []
    about = {
        **about_run(request),
        "given": request.origin(loaded),
        "library": loaded.source,
        "classes": {} if names is None else {str(label): names[label] for label in labels},
    }
    return _prepared(
        request,
        evaluator,
        measured,
        conditions,
        loaded,
        data,
        ViewLoader(
            loaded.preprocess,
            decode,
            seed=request.seed,
            suites={suite.name: suite for suite in measured},
            with_label_maps=label_maps,
        ),
        image_sets,
        loaded.identity,
        facts,
        list(data.notes()),
        about,
    )


def _prepare_memory(request: StressRequest, suites: list[Suite], label_maps: bool) -> PreparedStress:
    if request.groups:
        raise InputError(
            "groups: expected data in a folder or a table, got batches without columns", option="groups"
        )
    for suite in suites:
        if suite.own_images or suite.needs_masks or suite.needs_files:
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
    batches = InMemoryData(
        request.data,
        request.batch_size,
        request.limit,
        label_maps=label_maps,
        preprocess=None if loaded is None else loaded.preprocess,
        labels_used=(task or own_task(module)) in (None, "classification"),
    )
    data = MemorySource(batches, normalization)
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
    conditions = _conditions(measured, evaluator)
    levels = gray_levels(data.first.images, normalization.mean, normalization.std)
    facts: dict[str, Any] = {
        "images": None,
        "images_hash": tensor_hash(levels, data.first.labels),
        "data": "in memory",
        "limit": request.limit,
    }
    if label_maps:
        facts["segments"] = list(range(evaluator.classes))
    notes = data.check_normalization(name)
    data.classes = evaluator.classes
    return _prepared(
        request,
        evaluator,
        measured,
        conditions,
        loaded,
        data,
        ViewLoader(
            preprocess,
            seed=request.seed,
            suites={suite.name: suite for suite in measured},
            with_label_maps=label_maps,
        ),
        (),
        identity_of(module, loaded),
        facts,
        notes,
        about_run(request),
    )


def _conditions(suites: Sequence[Suite], evaluator: Evaluator) -> tuple[Condition, ...]:
    """What every image of the data goes through; raises if a suite cannot measure the model."""
    return tuple(condition for suite in suites for condition in suite.conditions(evaluator))


def _prepared(
    request: StressRequest,
    evaluator: Evaluator,
    suites: list[Suite],
    conditions: tuple[Condition, ...],
    loaded: LoadedModel | None,
    source: Source,
    loader: ViewLoader,
    image_sets: tuple[ImageSet, ...],
    identity: dict[str, str],
    facts: dict[str, Any],
    data_notes: list[str],
    about: dict[str, Any],
) -> PreparedStress:
    notes = [*(note for suite in suites for note in suite.notes), *data_notes]
    return PreparedStress(
        request=request,
        loaded=loaded,
        source=source,
        loader=loader,
        identity=identity,
        settings=run_settings(request, evaluator, suites, conditions, image_sets, identity, facts, notes),
        about=about,
        evaluator=evaluator,
        suites={suite.name: suite for suite in suites},
        data_conditions=conditions,
        image_sets=image_sets,
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
            shift:imagenet-c; epsilons (such as 8/255), pgd_steps: of attacks; attack_steps, square_queries:
            of autoattack; patch_steps: of patchfool; salient (a method): of occlusion; backgrounds (a
            folder): of synthetic; in_to_in9 (a file): of backgrounds_challenge; bank (number of training
            images): of neighbors; partial (accept incomplete downloads): of shift and neighbors.

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
    names = {field.name for field, _ in options_of(StressRequest)}
    of_run = {name: value for name, value in suite_options.items() if name in names}
    options = {name: value for name, value in suite_options.items() if name not in names}
    request = StressRequest(
        model=model, data=data, suites=suites, num_workers=num_workers, options=options, **of_run
    )
    return run_stress(request, on_progress=on_progress)
