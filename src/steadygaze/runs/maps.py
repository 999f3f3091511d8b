"""Attribution maps for a run: a broken map is flagged and does not stop the run or spoil the other maps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from steadygaze.errors import BrokenMap, DegenerateMap
from steadygaze.explainer import explain_batch
from steadygaze.method_registry import Method
from steadygaze.vit.clean_forward import CleanForward

ZERO, BROKEN = "zero map", "broken map"


def maps_of(
    clean: CleanForward, target: Tensor, methods: Sequence[Method], score: str | None
) -> list[tuple[Tensor, dict[int, str]]]:
    """For each method its maps (B, gh, gw), and image index -> flag where a map is zero or broken (then zero
    here).
    """
    made = _maps_and_broken(clean, target, list(methods), score)
    return [(maps, flags_of(maps, broken)) for maps, broken in made]


def flags_of(maps: Tensor, broken: list[int]) -> dict[int, str]:
    """Image index -> flag, of maps (B, gh, gw) some of which are broken."""
    zero = (maps.flatten(1) == 0).all(1).nonzero()[:, 0].tolist()
    return dict.fromkeys(zero, ZERO) | dict.fromkeys(broken, BROKEN)


def _maps_and_broken(
    clean: CleanForward, target: Tensor, methods: list[Method], score: str | None
) -> list[tuple[Tensor, list[int]]]:
    """All methods at once; after a broken map, method by method; then image by image."""
    try:
        return [(maps, []) for maps in _maps(clean, target, methods, score)]
    except BrokenMap:
        pass
    if len(methods) > 1:
        return [_maps_and_broken(clean, target, [method], score)[0] for method in methods]
    if len(clean.images) == 1:
        return [(clean.images.new_zeros(1, *clean.grid), [0])]
    parts = [
        _maps_and_broken(CleanForward(clean.vit, image[None]), target[b : b + 1], methods, score)[0]
        for b, image in enumerate(clean.images)
    ]
    broken = [b for b, (_, failed) in enumerate(parts) if failed]
    return [(torch.cat([maps for maps, _ in parts]), broken)]


def _maps(clean: CleanForward, target: Tensor, methods: list[Method], score: str | None) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateMap)  # flagged instead
        # an interrupted search raises: its unfinished map must not become a row
        many = explain_batch(clean, target, methods, score, allow_partial=False)
    return [many[method.name].scores for method in methods]
