"""Counting the forward passes of any code that runs a model, by hooks on its blocks.

A block that is given t tokens, of the T that it is given for one whole image, counts t / T of its share of a
pass; so does each gradient that passes back through it. Models without a view count by their images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.outputs import run_model
from steadygaze.vit.view import ViT

Run = Callable[[Tensor], Any]


class PassCounter:
    """`total` grows by the forward passes of `model` inside `counting()`; copies of the model count too.

    vit: the view of the model, if it has one
    size: (height, width) of an image
    """

    def __init__(self, model: nn.Module, vit: ViT | None, size: tuple[int, int]) -> None:
        self.total = 0.0
        self._model = model
        run: Run = vit if vit is not None else lambda images: run_model(model, images)
        parameter = next(iter(model.parameters()), torch.zeros(0))
        image = torch.zeros(1, 3, *size, device=parameter.device, dtype=parameter.dtype)
        blocks = [] if vit is None else [block.module for block in vit.blocks]
        whole = self._whole(blocks, run, image)
        if not blocks or not all(whole.values()):  # no view, or one that calls parts of its blocks
            whole = self._whole([model], run, image)
        self._whole_image = whole

    def _whole(self, modules: list[nn.Module], run: Run, image: Tensor) -> dict[nn.Module, int]:
        """The size of the input of each module for one whole image."""
        sizes = dict.fromkeys(modules, 0)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            sizes[module] += _size(args, kwargs)

        handles = [module.register_forward_pre_hook(before, with_kwargs=True) for module in sizes]
        try:
            with torch.no_grad(), evaluation_mode(self._model):
                run(image)
        finally:
            for handle in handles:
                handle.remove()
        return sizes

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what runs inside."""
        handles = [
            module.register_forward_hook(self._hook(whole), with_kwargs=True)
            for module, whole in self._whole_image.items()
            if whole
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, whole: int) -> Callable[..., None]:
        """A plain function, so that a copied model counts here too."""
        unit = 1 / (whole * len(self._whole_image))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            share = _size(args, kwargs) * unit
            self.total += share
            tensor = next(_tensors(output), None)
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._add(share))

        return after

    def _add(self, share: float) -> None:
        self.total += share


def _size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    tensor = next(_tensors((*args, *kwargs.values())), None)
    return 0 if tensor is None else tensor.numel()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
