"""The training loop of recipes, on accelerate and timm: one process, several, or several machines.

A killed run resumes, and on one process ends with exactly the weights of an unbroken one: what is random
follows from the seed and the step (`run_files.seeded`), and everything else is in the checkpoint. The images
of a step depend neither on the number of processes that share them nor on the number of micro-batches they
are accumulated from.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from steadygaze.data.label_maps import confusion, miou
from steadygaze.errors import CheckpointError, ImageError, InputError
from steadygaze.files import FileLock, lock_folder
from steadygaze.loading.checkpoint import fit, read_weights
from steadygaze.modules import inserted
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.results.manifest import versions
from steadygaze.training.images import (
    CachedFeatures,
    TrainingImages,
    cache_features,
    head_name,
    unused_augmentation,
)
from steadygaze.training.losses import LossSetup
from steadygaze.training.losses.cross_entropy import cross_entropy
from steadygaze.training.losses.registry import class_logits, model_outputs
from steadygaze.training.model import build_recipe_model, prepare_images
from steadygaze.training.objective import Objective
from steadygaze.training.recipe import Optimizer, Recipe, make_recipe, read_recipe
from steadygaze.training.run_files import (
    STATE,
    WEIGHTS,
    Log,
    TrainingProgress,
    TrainingResult,
    TrainingStoppedError,
    load_state,
    make_folder,
    prepare_folder,
    read_log,
    read_module_start,
    save_state,
    save_weights,
    seeded,
)
from steadygaze.training.sampling import StepSampler


def make_accelerator(recipe: Recipe, device: str) -> Any:
    """The processes that `accelerate launch` or `torchrun` started, or this one alone."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    if device not in ("auto", "cpu"):
        raise InputError(
            f"device: expected auto or cpu, got {device!r}. "
            "Select a GPU by CUDA_VISIBLE_DEVICES=1, several by accelerate launch."
        )
    cpu = device == "cpu" or not torch.cuda.is_available()
    precision = "no" if recipe.precision == "float32" else recipe.precision
    if cpu and precision == "fp16":
        raise InputError("precision: fp16 needs a GPU. Use float32.")
    handlers = [
        DistributedDataParallelKwargs(find_unused_parameters=True),
        InitProcessGroupKwargs(timeout=timedelta(hours=12)),
    ]
    return Accelerator(cpu=cpu, mixed_precision=precision, kwargs_handlers=handlers)


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """timm's optimizer; biases and norms do not decay unless the recipe says so."""
    from timm.optim import create_optimizer_v2

    o = recipe.optimizer
    lr = o.lr * (recipe.batch / o.lr_batch if o.lr_batch else 1.0)
    options: dict[str, Any] = {} if o.betas is None else {"betas": tuple(o.betas)}
    options |= {} if o.eps is None else {"eps": o.eps}
    if o.module_factor != 1 and inserted(model):
        options["param_group_fn"] = lambda model: _groups_with_modules(model, o)
    try:
        return create_optimizer_v2(
            model,
            o.name,
            lr=lr,
            weight_decay=o.weight_decay,
            momentum=o.momentum,
            layer_decay=o.layer_decay,
            filter_bias_and_bn=not o.decay_all,
            **options,
        )
    except Exception as error:  # optimizers of many packages each raise their own kinds
        raise InputError(f"optimizer: timm cannot create {o.name!r} with these options ({error})") from error


def _groups_with_modules(model: nn.Module, o: Optimizer) -> list[dict[str, Any]]:
    """timm's parameter groups, with the parameters of inserted modules in groups of their own.

    `lr_scale` is the factor that timm's schedules apply to a group.
    """
    from timm.optim import param_groups_layer_decay, param_groups_weight_decay

    no_decay: set[str] = getattr(model, "no_weight_decay", set)()
    options: dict[str, Any] = {"no_weight_decay_list": no_decay, "weight_decay_exclude_1d": not o.decay_all}
    if o.layer_decay is None:
        groups = param_groups_weight_decay(model, o.weight_decay, **options)
    else:
        groups = param_groups_layer_decay(model, o.weight_decay, layer_decay=o.layer_decay, **options)
    of_modules = {id(p) for module in inserted(model).values() for p in module.parameters()}
    split = []
    for group in groups:
        scale = o.module_factor * group.get("lr_scale", 1.0)
        parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for parameter in group["params"]:
            parts[id(parameter) in of_modules].append(parameter)
        split += [{**group, "params": parts[0]}] if parts[0] else []
        split += [{**group, "params": parts[1], "lr_scale": scale, "inserted": True}] if parts[1] else []
    return split


def recipe_lr(optimizer: torch.optim.Optimizer) -> float:
    """The learning rate of this step, without the factors of layers and inserted modules."""
    return max(group["lr"] for group in optimizer.param_groups if not group.get("inserted"))


def make_schedule(optimizer: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> Any:
    """timm's schedule; the learning rate of a step follows from its number alone."""
    from timm.scheduler import create_scheduler_v2

    s = recipe.schedule
    kind = {"cosine": "cosine", "linear": "poly", "step": "step", "none": "step"}[s.name]
    options = {"decay_rate": s.rate if s.name == "step" else 1.0}
    if kind == "step":
        options["decay_epochs"] = s.every
    scheduler, _ = create_scheduler_v2(
        optimizer,
        kind,
        num_epochs=recipe.epochs - s.cooldown_epochs,
        min_lr=s.min_lr,
        warmup_lr=s.warmup_lr,
        warmup_epochs=s.warmup_epochs,
        step_on_epochs=False,
        updates_per_epoch=steps_per_epoch,
        **options,
    )
    return scheduler


def evaluate(
    model: nn.Module,
    objective: Objective,
    test: TrainingImages | CachedFeatures,
    accelerator: Any,
    batch_size: int,
    seed: tuple[int, ...],
) -> dict[str, float]:
    """Compute test_loss and test_top1, or test_miou for segmentation (both 0..1), over all processes.

    The loss is the recipe's objective if `model` is the one it trains and the images have the masks it needs,
    otherwise cross-entropy.
    """
    use_objective = model is objective.model and (test.has_masks or not objective.needs_masks)
    indices = range(accelerator.process_index, len(test), accelerator.num_processes)
    keys = [(None, index) for index in indices]
    batches = [keys[start : start + batch_size] for start in range(0, len(keys), batch_size)]
    loader = DataLoader(test, batch_sampler=batches, generator=torch.Generator(), collate_fn=list)
    device, num_classes = accelerator.device, test.segmentation_classes
    # loss, number of images, then correct predictions or the confusion matrix
    sums = torch.zeros(2 + max(1, num_classes**2), dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    with seeded(*seed), accelerator.autocast():
        for samples in loader:
            readable = [sample for sample in samples if sample is not None]
            if not readable:
                continue
            images, labels, masks = default_collate(readable)
            images, labels = images.to(device), labels.to(device)
            with torch.set_grad_enabled(use_objective and objective.needs_gradients):
                if use_objective:
                    loss, _, logits = objective(images, labels, None, masks.to(device))
                else:
                    logits = class_logits(model_outputs(model(images)))
                    loss = cross_entropy(logits, labels)
            predicted = logits.argmax(1)
            if num_classes:
                counts = confusion(predicted, labels, num_classes).sum(0)
            else:
                counts = (predicted == labels).sum()
            batch_sums = [loss.detach().double() * len(labels), sums.new_tensor(len(labels))]
            sums += torch.cat([torch.stack(batch_sums), counts.double().flatten()])
    model.train(was_training)
    loss, num_images, *counts = accelerator.reduce(sums, reduction="sum").tolist()
    if not num_images:
        raise ImageError(f"data.test: none of the {len(test)} images can be read")
    if num_classes:
        matrix = torch.tensor(counts).long().view(num_classes, num_classes)
        return {"test_loss": loss / num_images, "test_miou": float(miou(matrix))}
    return {"test_loss": loss / num_images, "test_top1": counts[0] / num_images}


log = logging.getLogger(__name__)
MicroBatch = tuple[Tensor, Tensor, Tensor]  # images (of a linear probe: features), labels, masks


def train(
    recipe: Recipe | str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    changes: Mapping[str, Any] | None = None,
    on_progress: OnProgress = ignore_progress,
    device: str = "auto",
    stop_after: int | None = None,
    trust_remote_code: bool = False,
    allow_pipe: bool = False,
) -> TrainingResult:
    """Train by a recipe; log, checkpoints and weights go into the folder `out`.

    The same call resumes a stopped run.

    Args:
        recipe: A TOML file, the name of a shipped recipe, its tables as a dict, or a `Recipe`.
        out: Folder of the run. `load_model` accepts it as a name afterwards.
        changes: Values by full key, such as {"data.train": "FOLDER", "seed": 1}.
        on_progress: Called with a `TrainingProgress` after every logged step, and with a `Progress` while
            masks are prepared.
        device: "auto" or "cpu".
        stop_after: Save a checkpoint and return after this step.
        trust_remote_code: As for `load_model`, for the models that the recipe names.
        allow_pipe: Accept data in a recipe file that runs a shell command (`wds:pipe:...`). Values in
            `changes`, a dict or a `Recipe` are your own and always accepted.

    Returns:
        The folder, the model with the resulting weights, and the log.

    Raises:
        InputError: The recipe or its images are not valid, or the folder holds a run of another recipe.
        TrainingStoppedError: The loss is not finite, or the disk is full. The last good checkpoint is kept.

    Examples:
        ```python
        result = sg.train("cifar10-tap", "runs/tap", changes={"data.train": "cifar10/train"})
        ```
    """
    if isinstance(recipe, (str, Path)):
        recipe = read_recipe(recipe, changes, allow_pipe=allow_pipe)
    elif isinstance(recipe, Mapping):
        recipe = make_recipe(recipe, changes)
    elif changes:
        recipe = make_recipe(recipe.model_dump(), changes)
    if not recipe.data.train:
        raise InputError("data.train: expected a folder of images. Set it in the recipe or in the changes.")
    run = TrainingRun(recipe, Path(out), device, on_progress, trust_remote_code=trust_remote_code)
    try:
        return run.execute(stop_after)
    finally:
        run.close()


class TrainingRun:
    """The steps of a training run, with its log, tests and checkpoints.

    Attributes:
        notes: What the user should know before the first step.
        head_name: The layer that a linear probe trains; its images are replaced by features before the first
            step.
        parallel_objective: The objective as accelerate wraps it for several processes.
        parallel_optimizer: The optimizer as accelerate wraps it.
    """

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        device: str = "auto",
        on_progress: OnProgress = ignore_progress,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        self.recipe, self.out, self.on_progress = recipe, out, on_progress
        self.trust_remote_code = trust_remote_code
        self.step = self.resumed = 0
        self.sums: dict[str, float] = {}  # of the values since the last row of the log, and their count
        self.best_loss, self.seconds = math.inf, 0.0
        self.log: Log | None = None  # of the main process
        self.lock: FileLock | None = None  # likewise
        self.accelerator = make_accelerator(recipe, device)
        self.built = build_recipe_model(
            recipe, trust_remote_code=trust_remote_code, module_start=read_module_start(out)
        )
        self.notes: list[str] = []
        self.images: TrainingImages | CachedFeatures = self._prepare_images("train")
        self.test_images: TrainingImages | CachedFeatures | None = None
        if recipe.data.test:
            self.test_images = self._prepare_images("test")
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
        self._add_schedule_notes()
        self.model = self.built.model.to(self.accelerator.device)
        parts = recipe.accumulate * processes
        setup = LossSetup(self.model, parts, self.built.num_classes, self.built.preprocess, trust_remote_code)
        self.objective = Objective(self.trained_part(self.model), recipe.active_losses, setup)
        self.mixer: Any = None
        self.frozen: list[nn.Parameter] = []
        if probe:
            self.frozen = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.model.requires_grad_(False)
            self.trained_part(self.model).requires_grad_(True)
        elif recipe.augment.mixup or recipe.augment.cutmix:
            self.mixer = self._make_mixer()
        self.optimizer = make_optimizer(self.model, recipe)
        self.schedule = make_schedule(self.optimizer, recipe, self.sampler.steps_per_epoch)
        self.average: Any = None  # exponential moving average of the weights
        if recipe.ema.decay:
            from timm.utils import ModelEmaV3

            self.average = ModelEmaV3(self.model, decay=recipe.ema.decay, use_warmup=recipe.ema.warmup)
        self.parallel_objective, self.parallel_optimizer = self.accelerator.prepare(
            self.objective, self.optimizer
        )

    def _make_mixer(self) -> Any:
        """timm's mixup and cutmix: (images, labels) -> (images, soft targets)."""
        from timm.data import Mixup

        if self.sampler.micro_batch_size % 2:
            raise InputError(
                "augment.mixup, augment.cutmix: images are mixed in pairs: expected an even number of images "
                f"in each micro-batch, got {self.sampler.micro_batch_size}"
            )
        augment = self.recipe.augment
        return Mixup(
            mixup_alpha=augment.mixup,
            cutmix_alpha=augment.cutmix,
            prob=augment.mix_probability,
            switch_prob=augment.switch,
            label_smoothing=self.objective.label_smoothing,
            num_classes=self.built.num_classes,
        )

    def trained_part(self, model: nn.Module) -> nn.Module:
        """What of a model is trained: all of it, or its head."""
        return model if self.head_name is None else model.get_submodule(self.head_name)

    @property
    def kept_model(self) -> nn.Module:
        """The model that is tested and written: the weight average if the recipe uses one."""
        return self.model if self.average is None else self.average.module

    def _prepare_images(self, part: str) -> TrainingImages:
        images, notes = prepare_images(
            self.recipe,
            self.built,
            part,
            self.accelerator.device,
            self.on_progress,
            trust_remote_code=self.trust_remote_code,
        )
        self.notes += notes
        return images

    def _add_schedule_notes(self) -> None:
        recipe = self.recipe
        if self.sampler.step_size < recipe.batch:
            self.notes.append(
                f"only {self.sampler.step_size} images: a step uses all of them, not {recipe.batch}"
            )
        if recipe.keep == "best" and self.test_images is None:
            self.notes.append(
                "keep = 'best' needs test images, and data.test is not given: the last weights are kept"
            )
        warmup = recipe.schedule.warmup_epochs
        if recipe.schedule.name != "none" and warmup >= recipe.epochs:
            self.notes.append(
                f"epochs = {recipe.epochs} ends within schedule.warmup_epochs = {warmup:g}: "
                "the learning rate of the recipe is never reached"
            )
        unused = unused_augmentation(recipe.augment) if recipe.train == "head" else []
        if unused:
            self.notes.append(
                "train = 'head' uses the features of each image's center view, which are computed once: "
                f"{', '.join(sorted(unused))} have no effect"
            )

    # -- steps -------------------------------------------------------------------------------------

    def execute(self, stop_after: int | None = None) -> TrainingResult:
        """Train from the last checkpoint to the end, or to `stop_after`."""
        self._begin()
        if self.head_name is not None and self.step < self.total_steps:
            self._cache_features()
        first_step, started = self.step, time.monotonic() - self.seconds
        self.parallel_objective.train()
        for micro_batches in self._remaining_steps():
            values = self.train_step(micro_batches)
            self.step += 1
            for key, value in {"count": 1.0, **values}.items():
                self.sums[key] = self.sums.get(key, 0.0) + value
            self.seconds = time.monotonic() - started
            self._log_and_save(stop=self.step == stop_after)
            if self.step == stop_after:
                break
        self.model.eval()
        for parameter in self.frozen:
            parameter.requires_grad_(True)
        weights = self.out / WEIGHTS
        if self.recipe.keep == "best" and weights.is_file():
            fit(self.kept_model, read_weights(weights), str(weights))  # not those of the last epoch
        datasets = (self.images, self.test_images)
        return TrainingResult(
            self.out,
            weights,
            self.kept_model,
            self.recipe,
            read_log(self.out),
            self.notes,
            steps=self.step - first_step,
            unreadable=sorted({file for images in datasets if images for file in images.unreadable}),
        )

    def _begin(self) -> None:
        """Lock and prepare the folder, resume from its checkpoint and open the log."""
        recipe, is_main = self.recipe, self.accelerator.is_main_process
        if is_main:
            make_folder(self.out)
            self.lock = lock_folder(self.out)
            about = {"command": recipe.command, "versions": versions()}
            prepare_folder(self.out, recipe.settings, about, self.built.module_start, recipe.model.checkpoint)
        self.accelerator.wait_for_everyone()
        self._resume()
        if not is_main:
            return
        score = "test_miou" if recipe.task == "segmentation" else "test_top1"
        columns = ["step", "epoch", "lr", "loss", *self.objective.term_names, "test_loss", score, "seconds"]
        self.log = Log(self.out, columns, self.step, recipe.tensorboard)
        self.notes += [self.log.note] if self.log.note else []
        for note in self.notes:  # before the first step: a run may take days
            log.warning("note: %s", note)

    def _cache_features(self) -> None:
        """Replace the images of a linear probe by their features."""
        head = self.trained_part(self.model)
        assert isinstance(head, nn.Linear)

        def features(images: TrainingImages | CachedFeatures, task: str) -> CachedFeatures:
            assert isinstance(images, TrainingImages)
            return cache_features(
                self.model,
                head,
                images,
                self.accelerator,
                batch_size=max(1, self.sampler.micro_batch_size),
                workers=self.recipe.data.workers,
                on_progress=self.on_progress,
                task=task,
            )

        self.images = features(self.images, "features")
        if self.test_images is not None:
            self.test_images = features(self.test_images, "test features")

    def _remaining_steps(self) -> Iterator[list[MicroBatch]]:
        """The micro-batches of this process, for every step that is left."""
        steps = range(self.step, self.total_steps)
        remaining = (keys for step in steps for keys in self.sampler.micro_batches(step))
        loader: Iterable[MicroBatch]
        if isinstance(self.images, CachedFeatures):
            loader = (self.images.batch(keys) for keys in remaining)
        else:
            loader = DataLoader(
                self.images,
                batch_sampler=remaining,
                num_workers=self.recipe.data.workers,
                generator=torch.Generator(),  # not the caller's
            )
        micro_batches: list[MicroBatch] = []
        for micro_batch in loader:
            micro_batches.append(micro_batch)
            if len(micro_batches) == self.recipe.accumulate:
                yield micro_batches
                micro_batches = []

    def train_step(self, micro_batches: list[MicroBatch]) -> dict[str, float]:
        """One step of the optimizer; the loss and its terms, averaged over all images of the step."""
        accelerator, device = self.accelerator, self.accelerator.device
        self.schedule.step_update(self.step)
        self.parallel_optimizer.zero_grad()
        values: list[Tensor] = []
        for number, micro_batch in enumerate(micro_batches):
            images, labels, masks = (tensor.to(device) for tensor in micro_batch)
            is_last = number == len(micro_batches) - 1
            synchronized = nullcontext() if is_last else accelerator.no_sync(self.parallel_objective)
            with synchronized, seeded(self.recipe.seed, 3, self.step, number, accelerator.process_index):
                soft_targets = None
                if self.mixer is not None:
                    images, soft_targets = self.mixer(images, labels)
                total, terms, _ = self.parallel_objective(images, labels, soft_targets, masks)
                parts = [total, *(terms[name] for name in self.objective.term_names)]
                values.append(torch.stack([part.detach() for part in parts]).double())
                accelerator.backward(total / len(micro_batches))
        mean = accelerator.reduce(torch.stack(values).mean(0), reduction="mean")
        means = dict(zip(("loss", *self.objective.term_names), mean.tolist(), strict=True))
        clip = self.recipe.optimizer.clip or math.inf
        norm = float(accelerator.clip_grad_norm_(self.parallel_objective.parameters(), clip))
        # a gradient scaler skips a step whose gradients overflow, and lowers its scale
        overflow_allowed = accelerator.scaler is not None
        if not math.isfinite(means["loss"]) or not (overflow_allowed or math.isfinite(norm)):
            self._stop_not_finite(means, norm)
        self.parallel_optimizer.step()
        if self.average is not None:
            self.average.update(self.model, step=self.step)
        return means

    # -- log, tests and checkpoints ----------------------------------------------------------------

    def _log_and_save(self, stop: bool) -> None:
        """After a step: a row of the log, a test, weights and a checkpoint, each if it is due."""
        recipe = self.recipe
        epoch_ended = self.step % self.sampler.steps_per_epoch == 0
        row: dict[str, float] = {}
        if self.step % recipe.log_every == 0 or epoch_ended:
            count = self.sums.pop("count")
            row = {key: value / count for key, value in self.sums.items()}
            self.sums = {}
        improved = False
        if self._test_is_due():
            assert self.test_images is not None
            row |= evaluate(
                self.trained_part(self.kept_model),
                self.objective,
                self.test_images,
                self.accelerator,
                max(1, self.sampler.micro_batch_size),
                (recipe.seed, 4, self.step),
            )
            improved = row["test_loss"] < self.best_loss or not (self.out / WEIGHTS).exists()
            self.best_loss = min(self.best_loss, row["test_loss"])
        if row:
            self._report(row)
        keep = recipe.keep == "last" or self.test_images is None or improved
        if epoch_ended and keep and self.accelerator.is_main_process:
            save_weights(self.out / WEIGHTS, self.kept_model.state_dict(), self.built.metadata)
        if epoch_ended or stop or self.step % recipe.save_every == 0:
            self._save_checkpoint()

    def _test_is_due(self) -> bool:
        epoch, steps_left_over = divmod(self.step, self.sampler.steps_per_epoch)
        if steps_left_over or self.test_images is None:
            return False
        every = self.recipe.test_every
        return self.step == self.total_steps or (every > 0 and epoch % every == 0)

    def _report(self, row: dict[str, float]) -> None:
        epoch = self.step / self.sampler.steps_per_epoch
        lr = recipe_lr(self.optimizer)
        if self.log is not None:
            position = {"step": self.step, "epoch": round(epoch, 6), "lr": lr}
            self.log.add({**position, **row, "seconds": round(self.seconds, 3)})
        self.on_progress(
            TrainingProgress(
                task="train",
                done=self.step,
                total=self.total_steps,
                unit="steps",
                resumed=self.resumed,
                detail="  ".join(f"{key} {value:.4g}" for key, value in {"lr": lr, **row}.items()),
                epoch=math.ceil(epoch),
                epochs=self.recipe.epochs,
                lr=lr,
                values=row,
                seconds=self.seconds,
            )
        )

    def _save_checkpoint(self) -> None:
        for name, parameter in self.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                self._stop(f"the weights {name} are not finite after step {self.step}")
        if self.accelerator.is_main_process:
            state = {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self.step,
                "sums": self.sums,
                "best": self.best_loss,
                "spent": self.seconds,
                "name": self.recipe.model.name,
            }
            if self.average is not None:
                state["ema"] = self.average.module.state_dict()
            if self.accelerator.scaler is not None:
                state["scaler"] = self.accelerator.scaler.state_dict()
            save_state(self.out / STATE, state)
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        """Continue from the checkpoint in the folder, if there is one."""
        path = self.out / STATE
        if not path.exists():
            return
        state = load_state(path)
        try:
            _check_state(state, self.total_steps)
            fit(self.model, state["model"], str(path))
            self.optimizer.load_state_dict(state["optimizer"])
            if self.average is not None:
                fit(self.average.module, state["ema"], str(path))
            if self.accelerator.scaler is not None and "scaler" in state:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            self.step, self.sums = state["step"], state["sums"]
            self.best_loss, self.seconds = state["best"], state["spent"]
        except CheckpointError:
            raise
        except Exception as error:  # of whatever the file holds in place of a state
            raise CheckpointError(
                f"{path} is not a checkpoint of this run ({error}). Remove it to start again."
            ) from error
        self.resumed = self.step

    # -- the end -----------------------------------------------------------------------------------

    def _stop_not_finite(self, values: Mapping[str, float], norm: float) -> NoReturn:
        terms = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
        if self.step and not (self.out / STATE).exists():
            self._save_checkpoint()  # the weights are still those after the last good step
        self._stop(
            f"the loss or its gradient is not finite at step {self.step + 1} "
            f"({terms}, gradient norm {norm:.4g})"
        )

    def _stop(self, reason: str) -> NoReturn:
        path = self.out / STATE
        good = "There is no earlier checkpoint."
        if path.exists():
            good = f"The last good checkpoint, of step {load_state(path)['step']}, is {path}."
        raise TrainingStoppedError(
            f"{reason}. {good} "
            "Lower the learning rate or the weight of a loss, clip the gradient, or use float32."
        )

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        self.accelerator.end_training()
        if self.lock is not None:
            self.lock.close()


def _check_state(state: Any, total_steps: int) -> None:
    """Types of a checkpoint's values; ValueError or KeyError for others."""
    if not isinstance(state, dict):
        raise ValueError(f"it holds a {type(state).__name__}")
    step, sums = state["step"], state["sums"]
    if type(step) is not int or not 0 <= step <= total_steps:
        raise ValueError(f"its step is {step!r} of {total_steps}")
    numbers = {**sums, "best": state["best"], "spent": state["spent"]}
    for key, value in numbers.items():
        if not isinstance(key, str) or not isinstance(value, (int, float)):
            raise ValueError(f"{key!r:.80} is not a number")
