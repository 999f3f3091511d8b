"""Attribution maps for a run: a broken map is flagged and does not stop the run or spoil the other maps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from steadygaze.errors import BrokenMap, DegenerateMap, ImagesOutOfRange
from steadygaze.explainer import explain
from steadygaze.method_registry import Method
from steadygaze.vit import ViT, adapt

ZERO, BROKEN = "zero map", "broken map"


def maps_of(
    model: nn.Module | ViT, images: Tensor, target: Tensor, methods: Sequence[Method], score: str | None
) -> list[tuple[Tensor, dict[int, str]]]:
    """For each method its maps (B, gh, gw), and image index -> flag where a map is zero or broken (then zero
    here).
    """
    made = _maps_and_broken(model, images, target, list(methods), score)
    return [(maps, _flags(maps, broken)) for maps, broken in made]


def _flags(maps: Tensor, broken: list[int]) -> dict[int, str]:
    zero = (maps.flatten(1) == 0).all(1).nonzero()[:, 0].tolist()
    return dict.fromkeys(zero, ZERO) | dict.fromkeys(broken, BROKEN)


def _maps_and_broken(
    model: nn.Module | ViT, images: Tensor, target: Tensor, methods: list[Method], score: str | None
) -> list[tuple[Tensor, list[int]]]:
    """All methods at once; after a broken map, method by method; then image by image."""
    try:
        return [(maps, []) for maps in _maps(model, images, target, methods, score)]
    except BrokenMap:
        pass
    if len(methods) > 1:
        return [_maps_and_broken(model, images, target, [method], score)[0] for method in methods]
    if len(images) == 1:
        return [(images.new_zeros(1, *_grid(model, images)), [0])]
    parts = [
        _maps_and_broken(model, images[b : b + 1], target[b : b + 1], methods, score)[0]
        for b in range(len(images))
    ]
    broken = [b for b, (_, failed) in enumerate(parts) if failed]
    return [(torch.cat([maps for maps, _ in parts]), broken)]


def _maps(
    model: nn.Module | ViT, images: Tensor, target: Tensor, methods: list[Method], score: str | None
) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateMap)  # flagged instead
        warnings.simplefilter("ignore", ImagesOutOfRange)  # a run warns once, when it starts
        # an interrupted search raises: its unfinished map must not become a row
        many = explain(model, images, target=target, methods=methods, score=score, allow_partial=False)
    return [many[method.name].scores for method in methods]


def _grid(model: nn.Module | ViT, images: Tensor) -> tuple[int, int]:
    vit = adapt(model) if isinstance(model, nn.Module) else model
    if not vit.plan.global_attention:
        return vit.grid
    with torch.no_grad():
        return vit.layout(vit.embed(images)).grid
