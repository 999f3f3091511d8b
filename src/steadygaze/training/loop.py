"""The training loop, on accelerate: one process, several, several machines.

A run goes on where it was killed, and on one process ends with the very weights of an unbroken one: what is random follows from the
seed and the step (`data.drawn_from`), and everything else is in the checkpoint. A step's pictures do not depend on how many processes
share them, nor on how many pieces they are accumulated from.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from steadygaze.errors import BadCheckpoint, BadInput
from steadygaze.loading.checkpoint import fit, read_weights
from steadygaze.loading.load import load_model
from steadygaze.manifest import versions
from steadygaze.training import run_files as files
from steadygaze.training.batches import Turns, mixer
from steadygaze.training.build import Built, build
from steadygaze.training.data import Pictures, check_masks, drawn_from, find_pictures
from steadygaze.training.evaluation import evaluate
from steadygaze.training.learner import Learner
from steadygaze.training.recipe import Recipe
from steadygaze.training.recipe_files import read_recipe
from steadygaze.training.run_files import STATE, Log, TrainingStopped
from steadygaze.training.setup import accelerator, average, optimiser, schedule
from steadygaze.training.teacher import teacher_of

log = logging.getLogger(__name__)
Told = Callable[["Report"], None]
WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class Report:
    """How far a run is: after a step, or after a test."""

    step: int
    steps: int
    epoch: int
    epochs: int
    lr: float
    values: dict[
        str, float
    ]  # loss and its terms, means since the row before; test_loss and test_top1 (or test_miou) after a test
    seconds: float


@dataclass(frozen=True, eq=False)
class Trained:
    """What came out. `weights` is the file for `load_model(name, checkpoint=...)` and for `--checkpoint`; `model` has these weights.
    steps: that this call took; 0 where the run had ended before."""

    folder: Path
    weights: Path
    model: nn.Module
    recipe: Recipe
    log: list[dict[str, str]]
    notes: list[str] = field(default_factory=list)
    steps: int = 0

    @property
    def top1(self) -> float | None:
        """On the test pictures, of the weights that were kept: the last ones, or those of the best epoch; None of a segmentation."""
        return self._kept("test_top1")

    @property
    def miou(self) -> float | None:
        """The same of a segmentation."""
        return self._kept("test_miou")

    def _kept(self, column: str) -> float | None:
        rows = [row for row in self.log if row.get(column)]
        if not rows:
            return None
        kept = min(rows, key=lambda row: float(row["test_loss"])) if self.recipe.keep == "best" else rows[-1]
        return float(kept[column])


def train(
    recipe: Recipe | str | Path, out: str | Path, *, changes: Mapping[str, Any] | None = None, told: Told = lambda report: None,
    device: str = "auto", stop_after: int | None = None,
) -> Trained:  # fmt: skip
    """Train by a recipe: a `Recipe`, a TOML file or a shipped recipe's name; rows, checkpoint and weights go into `out`.

    The same call goes on where it stopped. changes: such as {"data.train": "FOLDER", "seed": 1}. stop_after: leave after that step,
    with a checkpoint, as if killed.
    """
    if not isinstance(recipe, Recipe):
        recipe = read_recipe(recipe, changes)
    elif changes:
        raise BadInput(
            "changes: expected for a recipe that is read; use dataclasses.replace for one that is made"
        )
    if not recipe.data.train:
        raise BadInput(
            "data.train: expected a folder of pictures. Give it in the recipe, or --set data.train=FOLDER."
        )
    run = Run(recipe, Path(out), device)
    try:
        return run.go(told, stop_after)
    finally:
        run.close()


class Run:
    """A run with everything that its steps need."""

    def __init__(self, recipe: Recipe, out: Path, device: str = "auto") -> None:
        self.recipe, self.out, self.notes = recipe, out, list[str]()
        self.accelerator = accelerator(recipe, device)
        place = self.accelerator
        self.built: Built = build(recipe)
        self.data = self._pictures("train")
        self.test = self._pictures("test") if recipe.data.test else None
        self.turns = Turns(
            len(self.data),
            recipe.batch,
            recipe.accumulate,
            recipe.seed,
            place.process_index,
            place.num_processes,
        )
        if self.turns.size < recipe.batch:
            self.notes.append(f"only {self.turns.size} pictures: a step takes them all, not {recipe.batch}")
        if recipe.keep == "best" and self.test is None:
            self.notes.append(
                "keep = 'best' is of the test pictures, and data.test is not given: the last weights are kept"
            )
        if recipe.schedule.name != "none" and recipe.schedule.warmup_epochs >= recipe.epochs:
            few = f"epochs = {recipe.epochs} ends within schedule.warmup_epochs = {recipe.schedule.warmup_epochs:g}"
            self.notes.append(f"{few}: the learning rate of the recipe is never reached")
        self.steps = recipe.epochs * self.turns.steps
        model = self.built.model.to(place.device)
        d = recipe.losses.distillation
        teacher = (
            teacher_of(d, self.built.shape, self.built.about["num_classes"], place.device) if d else None
        )
        self.learner = Learner(model, recipe.losses, teacher, recipe.accumulate * place.num_processes)
        smoothing = recipe.losses.cross_entropy.smoothing if recipe.losses.cross_entropy else 0.0
        self.mixer = mixer(recipe.augment, self.built.about["num_classes"], smoothing)
        if self.mixer is not None and self.turns.size // (recipe.accumulate * place.num_processes) % 2:
            raise BadInput(
                "augment.mixup, cutmix: pictures are mixed in pairs: expected an even number in each piece of a step"
            )
        self.optimiser = optimiser(model, recipe)
        self.schedule = schedule(self.optimiser, recipe, self.turns.steps)
        self.ema = average(model, recipe)
        self.step, self.sums, self.best, self.spent = 0, dict[str, float](), math.inf, 0.0
        self.log: Log | None = None
        self.wrapped, self.stepper = place.prepare(self.learner, self.optimiser)

    @property
    def model(self) -> nn.Module:
        return self.learner.model

    @property
    def kept(self) -> nn.Module:
        """The weights that are tested and written: their average over time, if the recipe keeps one."""
        return self.model if self.ema is None else self.ema.module

    def _pictures(self, part: str) -> Pictures:
        recipe, train = self.recipe, part == "train"
        masks = recipe.data.masks if train else recipe.data.test_masks
        if recipe.task == "segmentation":
            return self._maps(part, masks)
        needs, made = bool(recipe.losses.need_masks), masks == "tokencut"
        found = find_pictures(recipe.data, part, self.built.classes, None if made or not needs else masks)
        pictures = Pictures(found, self.built.shape, recipe.augment, recipe.seed)
        if needs and made:
            pictures.made = self._cut(pictures)
        elif needs and train and found.decode is None:
            raise BadInput(
                f"data.masks: expected masks for {', '.join(recipe.losses.need_masks)}, found none in {masks}"
            )
        elif needs and found.without:
            self.notes.append(f"data.{part}: {found.without} pictures have no mask and are left out")
        elif not needs:
            pictures.decode = None  # index.csv may list masks that nobody asked for
        if needs and not made:
            check_masks(found)
        return pictures

    def _maps(self, part: str, masks: str | None) -> Pictures:
        """Pictures with label maps, every one looked at."""
        found = find_pictures(self.recipe.data, part, None, masks)
        pictures = Pictures(found, self.built.shape, self.recipe.augment, self.recipe.seed)
        trained = self.built.about["segments"]
        if pictures.classes != trained:
            raise BadInput(
                f"data.{part}: expected masks of the {trained} classes that are trained, got {pictures.classes}"
            )
        if found.without:
            self.notes.append(f"data.{part}: {found.without} pictures have no mask and are left out")
        check_masks(found)
        return pictures

    def _cut(self, pictures: Pictures) -> dict[str, Tensor]:
        """Masks by TokenCut, from the keys of the model that the recipe names, or of this one as it begins."""
        from steadygaze.training.tokencut.tokencut import tokencut_masks

        data, model, shape = self.recipe.data, self.built.model, pictures.shape
        if data.cut_by:
            other = load_model(data.cut_by, data.cut_checkpoint, device=self.accelerator.device)
            model, shape = other.model, replace(shape, size=other.size, mean=other.mean, std=other.std)
        found = tokencut_masks(
            model, pictures.items, shape, refined=data.cut_edges == "bilateral", centred=data.cut_centred
        )
        covered = statistics.median(float(mask.bool().double().mean()) for mask in found.values())
        if covered < 0.05:
            advice = (
                "Take data.cut_by, another model." if data.cut_centred else "Try data.cut_centred = true."
            )
            self.notes.append(
                f"TokenCut's masks cover {100 * covered:.1f} % of a picture (median): they may miss the object. {advice}"
            )
        return found

    # -- the run ------------------------------------------------------------------------------------------------------

    def go(self, told: Told, stop_after: int | None) -> Trained:
        place, recipe = self.accelerator, self.recipe
        if place.is_main_process:
            files.begin(self.out, recipe.settings, {"command": recipe.command, "versions": versions()})
        place.wait_for_everyone()
        self._resume()
        if place.is_main_process:
            tested = "test_miou" if recipe.task == "segmentation" else "test_top1"
            columns = ["step", "epoch", "lr", "loss", *self.learner.names, "test_loss", tested, "seconds"]
            self.log = Log(self.out, columns, self.step, recipe.tensorboard)
            self.notes += [self.log.note] if self.log.note else []
            for note in self.notes:  # before the first step: a run may take days
                log.warning("note: %s", note)
        began, first = time.monotonic() - self.spent, self.step
        self.wrapped.train()
        for pieces in self._batches():
            values = self._one_step(pieces)
            self.step += 1
            for key, value in {"count": 1.0, **values}.items():
                self.sums[key] = self.sums.get(key, 0.0) + value
            self.spent = time.monotonic() - began
            self._after_step(told, stop_after)
            if self.step == stop_after:
                break
        self.model.eval()
        written = self.out / WEIGHTS
        if recipe.keep == "best" and written.is_file():
            fit(self.kept, read_weights(written), str(written))  # not those of the last epoch
        return Trained(
            self.out, written, self.kept, recipe, files.read_log(self.out), self.notes, self.step - first
        )

    def _batches(self) -> Any:
        """This process's pieces of every step that is left."""
        accumulate = self.recipe.accumulate
        keys: Any = (
            list(self.turns.upcoming(self.step, self.steps)) if self.recipe.data.workers else _Lazy(self)
        )
        own = torch.Generator()  # of the loader's workers, not the caller's
        loader = DataLoader(
            self.data, batch_sampler=keys, num_workers=self.recipe.data.workers, generator=own
        )
        pieces = []
        for piece in loader:
            pieces.append(piece)
            if len(pieces) == accumulate:
                yield pieces
                pieces = []

    def _one_step(self, pieces: list[Any]) -> dict[str, float]:
        place, recipe = self.accelerator, self.recipe
        self.schedule.step_update(self.step)
        self.stepper.zero_grad()
        gathered: list[Tensor] = []
        for number, (images, labels, masks) in enumerate(pieces):
            images, labels, masks = (t.to(place.device) for t in (images, labels, masks))
            last = number == len(pieces) - 1
            with (
                nullcontext() if last else place.no_sync(self.wrapped),
                drawn_from(recipe.seed, 3, self.step, number, place.process_index),
            ):
                targets = None
                if self.mixer is not None:
                    images, targets = self.mixer(images, labels)
                total, terms, _ = self.wrapped(images, labels, targets, masks)
                gathered.append(
                    torch.stack(
                        [total.detach(), *(terms[name].detach() for name in self.learner.names)]
                    ).double()
                )
                place.backward(total / len(pieces))
        mean = place.reduce(torch.stack(gathered).mean(0), reduction="mean")
        values = dict(zip(("loss", *self.learner.names), mean.tolist(), strict=True))
        norm = place.clip_grad_norm_(self.wrapped.parameters(), recipe.optimiser.clip or math.inf)
        scaled = (
            place.scaler is not None
        )  # its gradients may overflow: it skips the step and lowers its scale
        if not math.isfinite(values["loss"]) or not (scaled or math.isfinite(float(norm))):
            self._not_finite(values, float(norm))
        self.stepper.step()
        if self.ema is not None:
            self.ema.update(self.model, step=self.step)
        return values

    def _after_step(self, told: Told, stop_after: int | None) -> None:
        recipe, ended = self.recipe, self.step == self.steps
        epoch_over = self.step % self.turns.steps == 0
        epoch = self.step / self.turns.steps
        lr = max(group["lr"] for group in self.optimiser.param_groups)
        count = self.sums["count"]
        row: dict[str, float] = {}
        if self.step % recipe.log_every == 0 or epoch_over:
            row = {key: value / count for key, value in self.sums.items() if key != "count"}
            self.sums = {}
        improved, size = (
            False,
            max(1, self.turns.size // (recipe.accumulate * self.accelerator.num_processes)),
        )
        if (
            epoch_over
            and self.test is not None
            and (ended or (recipe.test_every and round(epoch) % recipe.test_every == 0))
        ):
            row |= evaluate(
                self.kept, self.learner, self.test, self.accelerator, size, (recipe.seed, 4, self.step)
            )
            improved = (
                row["test_loss"] < self.best or not (self.out / WEIGHTS).exists()
            )  # also where no loss is a number
            self.best = min(self.best, row["test_loss"])
        if row:
            if self.log is not None:
                self.log.add(
                    {
                        "step": self.step,
                        "epoch": round(epoch, 6),
                        "lr": lr,
                        **row,
                        "seconds": round(self.spent, 3),
                    }
                )
            told(Report(self.step, self.steps, math.ceil(epoch), recipe.epochs, lr, row, self.spent))
        if ended or epoch_over or self.step % recipe.save_every == 0 or self.step == stop_after:
            if (recipe.keep == "last" or self.test is None or improved) and (epoch_over or ended):
                self._write_weights()
            self._save()

    # -- what is written ------------------------------------------------------------------------------------------------

    def _save(self) -> None:
        broken = next(
            (name for name, p in self.model.named_parameters() if not bool(torch.isfinite(p).all())), None
        )
        if broken is not None:
            self._stop(f"the weights {broken} are not finite after step {self.step}")
        if self.accelerator.is_main_process:
            state = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(), "step": self.step, "sums": self.sums,
                     "best": self.best, "spent": self.spent, "name": self.recipe.model.name}  # fmt: skip
            if self.ema is not None:
                state["ema"] = self.ema.module.state_dict()
            if self.accelerator.scaler is not None:
                state["scaler"] = self.accelerator.scaler.state_dict()
            files.save_state(self.out / STATE, state)
        self.accelerator.wait_for_everyone()

    def _write_weights(self) -> None:
        if self.accelerator.is_main_process:
            files.save_weights(self.out / WEIGHTS, self.kept.state_dict(), self.built.metadata)

    def _resume(self) -> None:
        path = self.out / STATE
        if not path.exists():
            return
        state = files.load_state(path)
        try:
            fit(self.model, state["model"], str(path))
            self.optimiser.load_state_dict(state["optimiser"])
            if self.ema is not None:
                fit(self.ema.module, state["ema"], str(path))
            if self.accelerator.scaler is not None and "scaler" in state:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            self.step, self.sums, self.best, self.spent = (
                state[key] for key in ("step", "sums", "best", "spent")
            )
        except (KeyError, ValueError) as error:
            if isinstance(error, BadCheckpoint):
                raise
            raise BadCheckpoint(
                f"{path} is no checkpoint of this run ({error}). Remove it to begin anew."
            ) from error

    def _not_finite(self, values: dict[str, float], norm: float) -> None:
        terms = ", ".join(f"{key} {value:.4g}" for key, value in values.items())
        if self.step and not (self.out / STATE).exists():
            self._save()  # this step was not taken: the weights are still those of the last good one
        self._stop(
            f"the loss or its gradient is not finite at step {self.step + 1} ({terms}, norm of the gradient {norm:.4g})"
        )

    def _stop(self, why: str) -> None:
        path = self.out / STATE
        good = (
            f"The last good checkpoint, of step {files.load_state(path)['step']}, is {path}."
            if path.exists()
            else "No step was good."
        )
        raise TrainingStopped(
            f"{why}. {good} Lower the learning rate or a loss's weight, clip the gradient, or use float32."
        )

    def close(self) -> None:
        if self.log is not None:
            self.log.close()
        self.accelerator.end_training()


class _Lazy:
    """The keys of a run's steps, made as they are asked for."""

    def __init__(self, run: Run) -> None:
        self.turns, self.start, self.stop, self.each = run.turns, run.step, run.steps, run.recipe.accumulate

    def __len__(self) -> int:
        return (self.stop - self.start) * self.each

    def __iter__(self) -> Any:
        return self.turns.upcoming(self.start, self.stop)
