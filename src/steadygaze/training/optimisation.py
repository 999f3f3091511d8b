"""Accelerator, optimiser, schedule and weight average of a recipe, from accelerate and timm."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch import nn

from steadygaze.errors import BadInput
from steadygaze.modules import inserted
from steadygaze.training.recipe import Optimiser, Recipe


def make_accelerator(recipe: Recipe, device: str) -> Any:
    """The processes that `accelerate launch` or `torchrun` started, or this one alone."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

    if device not in ("auto", "cpu"):
        raise BadInput(
            f"device: expected auto or cpu, got {device!r}. "
            "Select a GPU by CUDA_VISIBLE_DEVICES=1, several by accelerate launch."
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


def make_optimiser(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """timm's optimiser; biases and norms do not decay unless the recipe says so."""
    from timm.optim import create_optimizer_v2

    o = recipe.optimiser
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
    except Exception as error:  # optimisers of many packages each raise their own kinds
        raise BadInput(f"optimiser: timm cannot create {o.name!r} with these options ({error})") from error


def _groups_with_modules(model: nn.Module, o: Optimiser) -> list[dict[str, Any]]:
    """timm's parameter groups, with the parameters of inserted modules in groups of their own: `lr_scale` is
    the factor that timm's schedules apply to a group."""
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


def recipe_lr(optimiser: torch.optim.Optimizer) -> float:
    """The learning rate of this step, without the factors of layers and inserted modules."""
    return max(group["lr"] for group in optimiser.param_groups if not group.get("inserted"))


def make_schedule(optimiser: torch.optim.Optimizer, recipe: Recipe, steps_per_epoch: int) -> Any:
    """timm's schedule; the learning rate of a step follows from its number alone."""
    from timm.scheduler import create_scheduler_v2

    s = recipe.schedule
    kind = {"cosine": "cosine", "linear": "poly", "step": "step", "none": "step"}[s.name]
    options = {"decay_rate": s.rate if s.name == "step" else 1.0}
    if kind == "step":
        options["decay_epochs"] = s.every
    scheduler, _ = create_scheduler_v2(
        optimiser,
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


def make_average(model: nn.Module, recipe: Recipe) -> Any:
    """The exponential moving average of the weights; None if the recipe does not use it."""
    if not recipe.ema.decay:
        return None
    from timm.utils import ModelEmaV3

    return ModelEmaV3(model, decay=recipe.ema.decay, use_warmup=recipe.ema.warmup)
