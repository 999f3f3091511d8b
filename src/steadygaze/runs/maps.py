"""Attribution maps for a run: a broken map is flagged and does not stop the run or spoil the other maps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steadygaze.errors import BrokenMapError, DegenerateMapWarning
from steadygaze.methods.explain import explain_batch
from steadygaze.methods.registry import Method
from steadygaze.results.attribution import Attribution
from steadygaze.target import class_score
from steadygaze.vit.clean_forward import CleanForward

ZERO, BROKEN = "zero map", "broken map"


@dataclass(frozen=True)
class MethodMaps:
    """The maps of one method.

    Attributes:
        maps: (B, gh, gw), zero where a map is broken.
        flags: Image index -> flag, where a map is zero or broken.
        unattributed: (B,), what the map leaves out of the explained number.
        explained: (B,), the number that is explained.
    """

    maps: Tensor
    flags: dict[int, str]
    unattributed: Tensor
    explained: Tensor


_Numbers = tuple[Tensor, Tensor, Tensor]  # maps, unattributed, explained


def maps_of(
    clean: CleanForward, target: Tensor, methods: Sequence[Method], score: str | None
) -> list[MethodMaps]:
    """The maps of each method."""
    made = _maps_and_broken(clean, target, list(methods), score)
    return [MethodMaps(maps, flags_of(maps, broken), *numbers) for (maps, *numbers), broken in made]


def flags_of(maps: Tensor, broken: list[int]) -> dict[int, str]:
    """Image index -> flag, of maps (B, gh, gw) some of which are broken."""
    zero = (maps.flatten(1) == 0).all(1).nonzero()[:, 0].tolist()
    return dict.fromkeys(zero, ZERO) | dict.fromkeys(broken, BROKEN)


def _maps_and_broken(
    clean: CleanForward, target: Tensor, methods: list[Method], score: str | None
) -> list[tuple[_Numbers, list[int]]]:
    """All methods at once; after a broken map, method by method; then image by image."""
    try:
        return [(numbers, []) for numbers in _maps(clean, target, methods, score)]
    except BrokenMapError:
        pass
    if len(methods) > 1:
        return [_maps_and_broken(clean, target, [method], score)[0] for method in methods]
    if len(clean.images) == 1:
        nothing = clean.images.new_zeros(1)
        return [((clean.images.new_zeros(1, *clean.grid), nothing, nothing), [0])]
    parts = [
        _maps_and_broken(CleanForward(clean.vit, image[None]), target[b : b + 1], methods, score)[0]
        for b, image in enumerate(clean.images)
    ]
    broken = [b for b, (_, failed) in enumerate(parts) if failed]
    maps, unattributed, explained = (torch.cat(some) for some in zip(*(n for n, _ in parts), strict=True))
    return [((maps, unattributed, explained), broken)]


def _maps(clean: CleanForward, target: Tensor, methods: list[Method], score: str | None) -> list[_Numbers]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DegenerateMapWarning)  # flagged instead
        # an interrupted search raises: its unfinished map must not become a row
        many = explain_batch(clean, target, methods, score, allow_partial=False)
    return [_numbers(many[method.name]) for method in methods]


def _numbers(found: Attribution) -> _Numbers:
    assert found.target is not None, "a class was given"
    explained = class_score(found.score, found.logits, found.target, found.outputs)
    rest = torch.zeros_like(explained) if found.unattributed is None else found.unattributed
    return found.scores, rest, explained
