"""Everything the steps of a training run need: model, images, objective, optimiser."""

from __future__ import annotations

from typing import Any

from torch import nn

from steadygaze.errors import BadInput
from steadygaze.modules.base import Start
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.training.images.dataset import TrainingImages
from steadygaze.training.images.features import CachedFeatures, head_name, unused_augmentation
from steadygaze.training.images.preparation import prepare_images
from steadygaze.training.images.sampling import StepSampler, make_mixer
from steadygaze.training.losses import LossSetup
from steadygaze.training.model import build_recipe_model
from steadygaze.training.objective import Objective
from steadygaze.training.optimisation import make_accelerator, make_average, make_optimiser, make_schedule
from steadygaze.training.recipe import Recipe


class TrainingSetup:
    """What a recipe describes, ready to be trained.

    notes: what the user should know before the first step
    module_start: as for `build_recipe_model`
    head_name: of a linear probe, the layer that is trained; its images are replaced by features before the
        first step
    parallel_objective, parallel_optimiser: as accelerate wraps them for several processes
    """

    def __init__(
        self,
        recipe: Recipe,
        device: str = "auto",
        on_progress: OnProgress = ignore_progress,
        *,
        trust_remote_code: bool = False,
        module_start: Start | None = None,
    ) -> None:
        self.trust_remote_code = trust_remote_code
        self.recipe, self.on_progress = recipe, on_progress
        self.accelerator = make_accelerator(recipe, device)
        self.built = build_recipe_model(
            recipe, trust_remote_code=trust_remote_code, module_start=module_start
        )
        self.images: TrainingImages | CachedFeatures
        self.images, self.notes = self._prepare_images("train")
        self.test_images: TrainingImages | CachedFeatures | None = None
        if recipe.data.test:
            self.test_images, notes = self._prepare_images("test")
            self.notes += notes
        processes = self.accelerator.num_processes
        probe = recipe.train == "head"
        self.head_name = head_name(self.built.model, self.built.preprocess.size) if probe else None
        self.sampler = StepSampler(
            len(self.images),
            recipe.batch,
            recipe.accumulate,
            recipe.seed,
            self.accelerator.process_index,
            processes,
            1 if probe else recipe.augment.repeats,
        )
        self.total_steps = recipe.epochs * self.sampler.steps_per_epoch
        self.notes += self._schedule_notes()
        self.model = self.built.model.to(self.accelerator.device)
        parts = recipe.accumulate * processes
        setup = LossSetup(self.model, parts, self.built.num_classes, self.built.preprocess, trust_remote_code)
        self.objective = Objective(self.trained_part(self.model), recipe.active_losses, setup)
        self.mixer: Any = None
        self.frozen: list[nn.Parameter] = []
        if probe:
            self._freeze_backbone()
        else:
            self.mixer = make_mixer(recipe.augment, self.built.num_classes, self.objective.label_smoothing)
        if self.mixer is not None and self.sampler.micro_batch_size % 2:
            raise BadInput(
                "augment.mixup, augment.cutmix: images are mixed in pairs: expected an even number of images "
                f"in each micro-batch, got {self.sampler.micro_batch_size}"
            )
        self.optimiser = make_optimiser(self.model, recipe)
        self.schedule = make_schedule(self.optimiser, recipe, self.sampler.steps_per_epoch)
        self.average = make_average(self.model, recipe)
        self.parallel_objective, self.parallel_optimiser = self.accelerator.prepare(
            self.objective, self.optimiser
        )

    def trained_part(self, model: nn.Module) -> nn.Module:
        """Of a model, what is trained: all of it, or its head."""
        return model if self.head_name is None else model.get_submodule(self.head_name)

    def _freeze_backbone(self) -> None:
        self.frozen = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.model.requires_grad_(False)
        self.trained_part(self.model).requires_grad_(True)
        unused = unused_augmentation(self.recipe.augment)
        if unused:
            self.notes.append(
                "train = 'head' uses the features of each image's centre view, which are computed once: "
                f"{', '.join(sorted(unused))} have no effect"
            )

    def _prepare_images(self, part: str) -> tuple[TrainingImages, list[str]]:
        return prepare_images(
            self.recipe,
            self.built,
            part,
            self.accelerator.device,
            self.on_progress,
            trust_remote_code=self.trust_remote_code,
        )

    def _schedule_notes(self) -> list[str]:
        recipe, notes = self.recipe, []
        if self.sampler.step_size < recipe.batch:
            notes.append(f"only {self.sampler.step_size} images: a step uses all of them, not {recipe.batch}")
        if recipe.keep == "best" and self.test_images is None:
            notes.append(
                "keep = 'best' needs test images, and data.test is not given: the last weights are kept"
            )
        warmup = recipe.schedule.warmup_epochs
        if recipe.schedule.name != "none" and warmup >= recipe.epochs:
            notes.append(
                f"epochs = {recipe.epochs} ends within schedule.warmup_epochs = {warmup:g}: "
                "the learning rate of the recipe is never reached"
            )
        return notes

    @property
    def kept_model(self) -> nn.Module:
        """The model that is tested and written: the weight average if the recipe uses one."""
        return self.model if self.average is None else self.average.module
