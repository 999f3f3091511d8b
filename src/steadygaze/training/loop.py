"""The training loop, on accelerate: one process, several, or several machines.

A killed run resumes, and on one process ends with exactly the weights of an unbroken one: what is random
follows from the seed and the step (`random_state.seeded`), and everything else is in the checkpoint. The
images of a step depend neither on the number of processes that share them nor on the number of micro-batches
they are accumulated from.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from steadygaze.errors import BadCheckpoint, BadInput
from steadygaze.files import FileLock, lock_folder
from steadygaze.loading.checkpoint import fit, read_weights
from steadygaze.manifest import versions
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.training.evaluation import evaluate
from steadygaze.training.images.dataset import TrainingImages
from steadygaze.training.images.features import CachedFeatures, cache_features
from steadygaze.training.images.sampling import RemainingBatches
from steadygaze.training.optimisation import recipe_lr
from steadygaze.training.random_state import seeded
from steadygaze.training.recipe import Recipe
from steadygaze.training.recipe_files import make_recipe, read_recipe
from steadygaze.training.result import TrainingProgress, TrainingResult
from steadygaze.training.run_files import (
    STATE,
    WEIGHTS,
    Log,
    TrainingStopped,
    load_state,
    make_folder,
    prepare_folder,
    read_log,
    read_module_start,
    save_state,
    save_weights,
)
from steadygaze.training.setup import TrainingSetup

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
) -> TrainingResult:
    """Train by a recipe; log, checkpoints and weights go into the folder `out`. The same call resumes a
    stopped run.

    recipe: a TOML file, the name of a shipped recipe, its tables as a dict, or a `Recipe`
    changes: values by full key, such as {"data.train": "FOLDER", "seed": 1}
    on_progress: called with a `TrainingProgress` after every logged step, and with a `Progress` while masks
        are prepared
    device: "auto" or "cpu"
    stop_after: save a checkpoint and return after this step
    trust_remote_code: as for `load_model`, for the models that the recipe names
    """
    if isinstance(recipe, (str, Path)):
        recipe = read_recipe(recipe, changes)
    elif isinstance(recipe, Mapping):
        recipe = make_recipe(recipe, changes)
    elif changes:
        recipe = make_recipe(recipe.model_dump(), changes)
    if not recipe.data.train:
        raise BadInput("data.train: expected a folder of images. Set it in the recipe or in the changes.")
    run = TrainingRun(recipe, Path(out), device, on_progress, trust_remote_code=trust_remote_code)
    try:
        return run.execute(stop_after)
    finally:
        run.close()


class TrainingRun(TrainingSetup):
    """The steps of a training run, with its log, tests and checkpoints."""

    def __init__(
        self,
        recipe: Recipe,
        out: Path,
        device: str = "auto",
        on_progress: OnProgress = ignore_progress,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        super().__init__(
            recipe,
            device,
            on_progress,
            trust_remote_code=trust_remote_code,
            module_start=read_module_start(out),
        )
        self.out = out
        self.step = self.resumed = 0
        self.sums: dict[str, float] = {}  # of the values since the last row of the log, and their count
        self.best_loss, self.seconds = math.inf, 0.0
        self.log: Log | None = None  # of the main process
        self.lock: FileLock | None = None  # likewise

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
        return TrainingResult(
            self.out,
            weights,
            self.kept_model,
            self.recipe,
            read_log(self.out),
            self.notes,
            steps=self.step - first_step,
            unreadable=self._unreadable(),
        )

    def _unreadable(self) -> list[str]:
        datasets = (self.images, self.test_images)
        return sorted({file for images in datasets if images is not None for file in images.unreadable})

    def _begin(self) -> None:
        """Lock and prepare the folder, resume from its checkpoint and open the log."""
        recipe, is_main = self.recipe, self.accelerator.is_main_process
        if is_main:
            make_folder(self.out)
            self.lock = lock_folder(self.out)
            about = {"command": recipe.command, "versions": versions()}
            prepare_folder(self.out, recipe.settings, about, self.built.module_start)
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
        remaining = RemainingBatches(self.sampler, self.step, self.total_steps)
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
        """One step of the optimiser; the loss and its terms, averaged over all images of the step."""
        accelerator, device = self.accelerator, self.accelerator.device
        self.schedule.step_update(self.step)
        self.parallel_optimiser.zero_grad()
        values: list[Tensor] = []
        for number, micro_batch in enumerate(micro_batches):
            images, labels, masks = (tensor.to(device) for tensor in micro_batch)
            is_last = number == len(micro_batches) - 1
            synchronised = nullcontext() if is_last else accelerator.no_sync(self.parallel_objective)
            with synchronised, seeded(self.recipe.seed, 3, self.step, number, accelerator.process_index):
                soft_targets = None
                if self.mixer is not None:
                    images, soft_targets = self.mixer(images, labels)
                total, terms, _ = self.parallel_objective(images, labels, soft_targets, masks)
                parts = [total, *(terms[name] for name in self.objective.term_names)]
                values.append(torch.stack([part.detach() for part in parts]).double())
                accelerator.backward(total / len(micro_batches))
        mean = accelerator.reduce(torch.stack(values).mean(0), reduction="mean")
        means = dict(zip(("loss", *self.objective.term_names), mean.tolist(), strict=True))
        clip = self.recipe.optimiser.clip or math.inf
        norm = float(accelerator.clip_grad_norm_(self.parallel_objective.parameters(), clip))
        # a gradient scaler skips a step whose gradients overflow, and lowers its scale
        overflow_allowed = accelerator.scaler is not None
        if not math.isfinite(means["loss"]) or not (overflow_allowed or math.isfinite(norm)):
            self._stop_not_finite(means, norm)
        self.parallel_optimiser.step()
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
            row |= self._test()
            improved = row["test_loss"] < self.best_loss or not (self.out / WEIGHTS).exists()
            self.best_loss = min(self.best_loss, row["test_loss"])
        if row:
            self._report(row)
        if epoch_ended and (recipe.keep == "last" or self.test_images is None or improved):
            self._save_weights()
        if epoch_ended or stop or self.step % recipe.save_every == 0:
            self._save_checkpoint()

    def _test_is_due(self) -> bool:
        epoch, steps_left_over = divmod(self.step, self.sampler.steps_per_epoch)
        if steps_left_over or self.test_images is None:
            return False
        every = self.recipe.test_every
        return self.step == self.total_steps or (every > 0 and epoch % every == 0)

    def _test(self) -> dict[str, float]:
        assert self.test_images is not None
        batch_size = max(1, self.sampler.micro_batch_size)
        seed = (self.recipe.seed, 4, self.step)
        part = self.trained_part(self.kept_model)
        return evaluate(part, self.objective, self.test_images, self.accelerator, batch_size, seed)

    def _report(self, row: dict[str, float]) -> None:
        epoch = self.step / self.sampler.steps_per_epoch
        lr = recipe_lr(self.optimiser)
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

    def _save_weights(self) -> None:
        if self.accelerator.is_main_process:
            save_weights(self.out / WEIGHTS, self.kept_model.state_dict(), self.built.metadata)

    def _save_checkpoint(self) -> None:
        for name, parameter in self.model.named_parameters():
            if not bool(torch.isfinite(parameter).all()):
                self._stop(f"the weights {name} are not finite after step {self.step}")
        if self.accelerator.is_main_process:
            state = {
                "model": self.model.state_dict(),
                "optimiser": self.optimiser.state_dict(),
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
            self.optimiser.load_state_dict(state["optimiser"])
            if self.average is not None:
                fit(self.average.module, state["ema"], str(path))
            if self.accelerator.scaler is not None and "scaler" in state:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            self.step, self.sums = state["step"], state["sums"]
            self.best_loss, self.seconds = state["best"], state["spent"]
        except BadCheckpoint:
            raise
        except Exception as error:  # of whatever the file holds in place of a state
            raise BadCheckpoint(
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
        raise TrainingStopped(
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
