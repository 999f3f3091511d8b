"""Classes that were trained on ("seen") against the others ("unseen"), for two models on the same images.

Accuracy of each group before and after, in one setting and as the mean over all others. The 95 % interval of
the difference is a paired bootstrap over images, and over the seeds of each side if there are several (in
pairs if both sides have the same number).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from steadygaze.data.folders import SYNSET, ClassLookup
from steadygaze.data.imagenet import imagenet_synsets
from steadygaze.errors import BadInput
from steadygaze.runs.compare import Comparison
from steadygaze.runs.stress.card import Card
from steadygaze.runs.stress.quantities import TOP1
from steadygaze.runs.table import draws, interval

SEEN, UNSEEN = "seen", "unseen"


@dataclass(frozen=True)
class GroupChange:
    """Top-1 accuracy of a group of classes before and after, 0..1; difference with its 95 % interval."""

    setting: str
    group: str
    classes: int
    images: int
    before: float
    after: float
    difference: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """better or worse where the interval excludes zero; otherwise empty."""
        return "better" if self.low > 0 else "worse" if self.high < 0 else ""

    def record(self) -> dict[str, Any]:
        return {**vars(self), "verdict": self.verdict}


def read_seen(given: str, names: Mapping[int, str]) -> set[int]:
    """Class indices from a file with one class a line, or from classes between commas: index, synset or
    name."""
    try:
        path = Path(given)
        texts = path.read_text(encoding="utf-8").splitlines() if path.is_file() else given.split(",")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{given[:80]} is not a readable text file ({error})", option="seen") from error
    known = [names.get(index, "") for index in range(max(names, default=-1) + 1)]
    lookup = ClassLookup(known or None, len(known))
    found = {_class_index(text.strip(), lookup) for text in texts if text.strip()}
    if not found:
        raise BadInput(
            f"expected classes, one per line or separated by commas, got none in {given!r}", option="seen"
        )
    return found


def _class_index(text: str, lookup: ClassLookup) -> int:
    if text.isdecimal():
        return int(text)
    synsets = imagenet_synsets()
    if SYNSET.fullmatch(text) and text in synsets and text not in (lookup.names or ()):
        return synsets.index(text)
    return lookup.index(text)


def group_changes(comparison: Comparison, seen: Iterable[int]) -> list[GroupChange]:
    """Both groups in the comparison's setting, then as the mean over the other settings, if there are any."""
    one = comparison.before[0]
    labels = _labels(one)
    if labels is None:
        raise BadInput("seen: expected runs of classifiers with labelled images, got none", option="seen")
    is_seen = np.isin(labels, list(seen))
    if is_seen.all() or not is_seen.any():
        which = "every" if is_seen.all() else "no"
        raise BadInput(
            f"seen: {which} image is of a seen class, so there is nothing to compare. "
            f"The images have the classes {', '.join(map(str, np.unique(labels)[:10]))}, ...",
            option="seen",
        )
    shared = [
        change.setting.label
        for change in comparison.changes
        if change.quantity.name == TOP1.name
        and (change.setting.label, TOP1.name) in one.measured
        and not change.setting.population
    ]
    others = [label for label in shared if label != comparison.setting]
    wanted = {comparison.setting: [comparison.setting]}
    if others:
        wanted[others[0] if len(others) == 1 else f"mean of {len(others)} others"] = others
    changes = []
    for title, settings in wanted.items():
        sides = [_correct(cards, settings) for cards in (comparison.before, comparison.after)]
        for group, mask in ((SEEN, is_seen), (UNSEEN, ~is_seen)):
            changes.append(_change(title, group, labels, mask, *sides))
    return changes


def _labels(card: Card) -> Int[np.ndarray, " n"] | None:
    """The label of each image of the data, in order of name; -1 where it is unknown."""
    if not card.answers:
        return None
    return np.array([card.answers.get(name, (-1, -1))[0] for name in card.names_of("")])


def _correct(cards: Sequence[Card], settings: Sequence[str]) -> Float[np.ndarray, "seeds n"]:
    """Share of the settings in which each image is classified correctly, for each seed."""
    per_card = [np.stack([card.values(setting, TOP1.name) for setting in settings]) for card in cards]
    return np.stack([values.mean(0) for values in per_card])


def _change(
    setting: str,
    group: str,
    labels: Int[np.ndarray, " n"],
    mask: Bool[np.ndarray, " n"],
    before: Float[np.ndarray, "a n"],
    after: Float[np.ndarray, "b n"],
) -> GroupChange:
    known = mask & (labels >= 0) & ~np.isnan(before).any(0) & ~np.isnan(after).any(0)
    if not known.any():
        raise BadInput(f"{setting}: no image of the {group} classes was classified by both models")
    sides = before[:, known], after[:, known]
    paired = len(before) == len(after)
    gap = _resampled(sides[1], 0 if paired else 1) - _resampled(sides[0], 0)
    low, high = interval(gap)
    was, now = (float(side.mean()) for side in sides)
    classes = len(np.unique(labels[known]))
    return GroupChange(
        setting, group, classes, int(known.sum()), was, now, now - was, float(low), float(high)
    )


def _resampled(
    values: Float[np.ndarray, "s n"], seed_draw: int, repeats: int = 2000
) -> Float[np.ndarray, " r"]:
    """Means over seeds and images, both drawn with replacement. The images are the same for both sides, and
    with the same `seed_draw` the seeds are too."""
    seeds, images = values.shape
    means = np.concatenate([taken @ values.T / images for taken in draws(images, repeats, seed=0)])
    drawn = np.random.default_rng(seed_draw).integers(0, seeds, means.shape)
    return np.take_along_axis(means, drawn, axis=1).mean(1)
