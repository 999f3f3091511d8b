"""What the loop takes from accelerate (processes, precision) and from timm (optimiser, schedule, average of the weights)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn

from steadygaze.errors import BadInput
from steadygaze.training.recipe import Recipe


def accelerator(recipe: Recipe, device: str) -> Any:
    """The processes that `accelerate launch` or `torchrun` started; this one alone otherwise."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    if device not in ("auto", "cpu"):
        raise BadInput(
            f"device: expected auto or cpu, got {device!r}. Which GPU: CUDA_VISIBLE_DEVICES=1; several: accelerate launch."
        )
    cpu = device == "cpu" or not torch.cuda.is_available()
    precision = "no" if recipe.precision == "float32" else recipe.precision
    if cpu and precision == "fp16":
        raise BadInput("precision: fp16 needs a GPU. Use float32.")
    handlers = [
        DistributedDataParallelKwargs(find_unused_parameters=True),
        InitProcessGroupKwargs(timeout=timedelta(hours=12)),
    ]
    return Accelerator(cpu=cpu, mixed_precision=precision, kwargs_handlers=handlers)


def optimiser(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Of timm; biases and norms do not decay unless the recipe says so."""
    from timm.optim import create_optimizer_v2

    o = recipe.optimiser
    lr = o.lr * (recipe.batch / o.lr_batch if o.lr_batch else 1.0)
    more: dict[str, Any] = {} if o.betas is None else {"betas": tuple(o.betas)}
    more |= {} if o.eps is None else {"eps": o.eps}
    try:
        return create_optimizer_v2(
            model, o.name, lr=lr, weight_decay=o.weight_decay, momentum=o.momentum, layer_decay=o.layer_decay,
            filter_bias_and_bn=not o.decay_all, **more,
        )  # fmt: skip
    except (ValueError, AssertionError, TypeError) as error:
        raise BadInput(f"optimiser: timm makes no {o.name!r} like that ({error})") from error


def schedule(steps_by: torch.optim.Optimizer, recipe: Recipe, per_epoch: int) -> Any:
    """The rate of every step follows from its number alone."""
    from timm.scheduler import create_scheduler_v2

    s = recipe.schedule
    constant = s.name == "none"
    kind = {"cosine": "cosine", "linear": "poly", "step": "step", "none": "step"}[s.name]
    more = (
        {"decay_rate": 1.0 if constant else s.rate, "decay_epochs": s.every}
        if kind == "step"
        else {"decay_rate": 1.0}
    )
    return create_scheduler_v2(
        steps_by, kind, num_epochs=recipe.epochs, min_lr=s.min_lr, warmup_lr=s.warmup_lr, warmup_epochs=s.warmup_epochs,
        step_on_epochs=False, updates_per_epoch=per_epoch, **more,
    )[0]  # fmt: skip


def average(model: nn.Module, recipe: Recipe) -> Any:
    """The average of the weights over time; None where the recipe keeps none."""
    if not recipe.ema.decay:
        return None
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=recipe.ema.decay, use_warmup=recipe.ema.warmup)
