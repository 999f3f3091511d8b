"""Callbacks that log overlays, attention and the removal score of a few fixed images during training.

    from steadygaze.callbacks import LightningGaze, TrainerGaze

    L.Trainer(callbacks=[LightningGaze(images, target=labels)])          # of Lightning
    trainer.add_callback(TrainerGaze(images, trainer, target=labels))    # of transformers

| logged, of image i     | what it is                                                            |
| gaze/overlay/i         | `sg.explain(...).overlay()`                                            |
| gaze/attention/i       | `sg.attention(...).figure()`: every head of every layer                |
| gaze/versus_chance     | mean over the images of `RemovalCheck.versus_chance`; higher is better |

Pictures go to TensorBoard, Weights & Biases and MLflow through the logger objects of the framework; other
loggers get the score alone. The model comes back as it was: mode, gradients, hooks, random state.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from steadygaze.errors import InputError, SteadygazeError
from steadygaze.look.attention import attention
from steadygaze.methods.explain import explain
from steadygaze.methods.registry import DEFAULT

__all__ = ["LightningGaze", "TrainerGaze"]

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


@cache
def _joined(kind: type[Any], *bases: type[Any]) -> type[Any]:
    """A subclass of the callback and of what its framework expects, which need not be installed."""
    reduce = {"__reduce__": lambda self: (_restored, (kind, self.__dict__))}
    return type(kind.__name__, (kind, *bases), reduce)


def _restored(kind: type, state: dict[str, Any]) -> Any:
    callback: Any = cast(Any, kind).__new__(kind)
    callback.__dict__.update(state)
    return callback


@dataclass(eq=False, repr=False)
class _Gaze:
    """A few images, and when to look at them."""

    images: Any
    _: KW_ONLY
    target: Any = None
    method: str = DEFAULT
    every: int | None = None
    transform: Callable[[Image.Image], Tensor] | None = None
    _at: int | None = field(default=None, init=False)  # the step that was logged last

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise InputError(f"every: expected a number of steps of at least 1, got {self.every}")

    def _due(self, step: int) -> bool:
        """Whether pictures are logged after this step, not counting the end of an epoch."""
        return self.every is not None and step % self.every == 0

    def _look(self, model: nn.Module, step: int) -> tuple[dict[str, Image.Image], dict[str, float]] | None:
        """Pictures and scores by name; None if this step was logged, or the model cannot be explained now."""
        if step == self._at:
            return None
        first, self._at = self._at is None, step
        weight, images = next(model.parameters()), self.images
        images = images.to(weight) if isinstance(images, Tensor) else images
        try:
            with torch.enable_grad():
                maps = explain(model, images, self.target, self.method, check=True, transform=self.transform)
                looks = attention(model, images, transform=self.transform)
                count = len(maps.scores)
                pictures = {f"gaze/overlay/{i}": maps[i].overlay() for i in range(count)}
                pictures |= {f"gaze/attention/{i}": looks.figure(image=i) for i in range(count)}
        except SteadygazeError as error:
            if first:  # wrong from the start, so that nobody waits for an epoch to learn it
                raise
            warnings.warn(f"{type(self).__name__}: nothing was logged at step {step}: {error}", stacklevel=2)
            return None
        assert maps.check is not None
        return pictures, {"gaze/versus_chance": float(maps.check.versus_chance.mean())}


@dataclass(eq=False, repr=False)
class LightningGaze(_Gaze):
    """A callback of Lightning that logs how a model looks at a few images, before and during training.

    Args:
        images: The images, as for `sg.explain`: a tensor (B, 3, H, W), files, PIL images.
        target: The class to explain, as for `sg.explain`. Give labels, so that it stays the same: None is the
            class that is predicted at the time.
        method: Attribution method of the overlays and the score.
        every: Number of optimizer steps between logs; None logs at the end of each epoch.
        transform: As for `sg.explain`, for images that are not a tensor.
        model: Name of the vision transformer in the LightningModule, such as "model" or "net.backbone"; ""
            is the module itself.

    Raises:
        InputError: If Lightning is not installed.
    """

    _: KW_ONLY
    model: str = "model"

    def __new__(cls, *_args: Any, **_options: Any) -> LightningGaze:
        imported = [sys.modules[name] for name in LIGHTNING if sys.modules.get(name)]
        try:
            packages = imported or [importlib.import_module(LIGHTNING[0])]
        except ImportError as error:
            raise InputError("LightningGaze needs Lightning installed: pip install lightning") from error
        bases = tuple(package.Callback for package in packages)
        return object.__new__(cls if issubclass(cls, bases) else _joined(cast(Any, cls), *bases))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._log(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_args: Any) -> None:
        if self._due(trainer.global_step):
            self._log(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.every is None:
            self._log(trainer, pl_module)

    def _log(self, trainer: Any, pl_module: Any) -> None:
        step = trainer.global_step
        seen = self._look(pl_module.get_submodule(self.model), step) if trainer.is_global_zero else None
        if seen is None:
            return
        pictures, scores = seen
        for logger in trainer.loggers:
            logger.log_metrics(scores, step=step)
            experiment = logger.experiment
            for name, picture in pictures.items():
                if hasattr(logger, "log_image"):  # Weights & Biases
                    logger.log_image(name, [picture], step=step)
                elif hasattr(experiment, "add_image"):  # TensorBoard
                    experiment.add_image(name, np.asarray(picture), step, dataformats="HWC")
                elif hasattr(logger, "run_id") and hasattr(experiment, "log_image"):  # MLflow
                    experiment.log_image(logger.run_id, picture, key=name, step=step)


@dataclass(eq=False, repr=False)
class TrainerGaze(_Gaze):
    """A callback of transformers' `Trainer` that logs how a model looks at a few images.

    Args:
        images: As for `LightningGaze`.
        trainer: The trainer it is added to: `trainer.add_callback(TrainerGaze(images, trainer))`.
        target: As for `LightningGaze`.
        method: As for `LightningGaze`.
        every: As for `LightningGaze`.
        transform: As for `LightningGaze`.
    """

    trainer: Any

    def __new__(cls, *_args: Any, **_options: Any) -> TrainerGaze:
        transformers = sys.modules.get("transformers")  # whoever has a trainer has imported it
        if transformers is None:
            raise InputError("TrainerGaze: expected a Trainer of transformers; transformers is not imported")
        base = transformers.TrainerCallback
        return object.__new__(cls if issubclass(cls, base) else _joined(cast(Any, cls), base))

    def __post_init__(self) -> None:
        super().__post_init__()
        if not hasattr(self.trainer, "callback_handler"):
            raise InputError(
                f"TrainerGaze: expected a Trainer of transformers, got {type(self.trainer).__name__}: "
                "trainer.add_callback(TrainerGaze(images, trainer))"
            )

    def on_train_begin(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        self._log(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        if self._due(state.global_step):
            self._log(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_more: Any) -> None:
        if self.every is None:
            self._log(state)

    def _log(self, state: Any) -> None:
        step = state.global_step
        seen = self._look(self.trainer.model, step) if state.is_world_process_zero else None
        if seen is None:
            return
        pictures, scores = seen
        self.trainer.log(scores)
        for integration in self.trainer.callback_handler.callbacks:
            writer, wandb, mlflow = (
                getattr(integration, name, None) for name in ("tb_writer", "_wandb", "_ml_flow")
            )
            if writer is not None:
                for name, picture in pictures.items():
                    writer.add_image(name, np.asarray(picture), step, dataformats="HWC")
            if wandb is not None:
                shown = {name: wandb.Image(picture) for name, picture in pictures.items()}
                wandb.log(shown | {"train/global_step": step})
            if mlflow is not None:
                for name, picture in pictures.items():
                    mlflow.log_image(picture, key=name, step=step)
