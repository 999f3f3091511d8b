"""Before and after: two models on the same images under the same settings.

Every number is after minus before, over the images and settings that both have: means over corruptions and
the like too. The interval is paired (the same draws for both), so an interval without zero is a significant
difference. With several seeds a side, each image counts with its mean over them, and each side's own spread
over seeds is given.

Classes that were trained on ("seen") against the others ("unseen"), for two models on the same images.

Accuracy of each group before and after, in one setting and as the mean over all others. The 95 % interval of
the difference is a paired bootstrap over images, and over the seeds of each side if there are several (in
pairs if both sides have the same number).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from steadygaze.data.datasets.imagenet import imagenet_synsets
from steadygaze.data.datasets.tree import abbreviated
from steadygaze.data.folders import SYNSET, ClassLookup
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.robustness.by_class import ClassChange, Spread, class_changes, mcnemar, over_seeds, turned
from steadygaze.runs.card import Card, Change, Key
from steadygaze.runs.rows import Columns, Rows
from steadygaze.runs.settings import CLEAN, TOP1, Accuracy
from steadygaze.runs.statistics import draws, interval
from steadygaze.runs.suite import SUITES, all_suites
from steadygaze.untrusted import check_complete, damaged_files

COMPARED = ("data", "images_hash", "groups", "batch", "preprocessing", "device", "versions")
NO_SPREAD = Spread(float("nan"), float("nan"), float("nan"), float("nan"), 0)


@dataclass(frozen=True)
class Comparison:
    """What changed. classes and turned (wrong, right: image names) are of `setting`, between the first run of
    each side; empty for segmenters."""

    before: list[Card]
    after: list[Card]
    changes: list[Change]
    setting: str
    classes: list[ClassChange]
    class_names: dict[int, str]
    turned: dict[str, list[str]]
    counts: dict[str, int]
    notes: list[str]

    def records(self) -> list[dict[str, Any]]:
        """One dict for each number."""
        return [
            {
                "setting": change.setting.label,
                "metric": change.quantity.name,
                "before": change.before.mean,
                "after": change.after.mean,
                "difference": change.difference,
                "low": change.low,
                "high": change.high,
                "verdict": change.verdict,
                "p": "" if change.p is None else change.p,
                "images": change.images,
                "seeds_before": change.before.seeds,
                "deviation_before": change.before.deviation,
                "seeds_after": change.after.seeds,
                "deviation_after": change.after.deviation,
                "note": change.note,
            }
            for change in self.changes
        ]


def compare(
    before: Sequence[str | Path],
    after: Sequence[str | Path],
    *,
    setting: str = CLEAN.label,
    repeats: int = 2000,
    seed: int = 0,
    on_progress: OnProgress = ignore_progress,
) -> Comparison:
    """Compare the runs of two models, one folder or one for each seed a side."""
    with damaged_files(*before, *after):
        sides = [_rows(before), _rows(after)]
        for side in sides:
            side.columns(on_progress)
        return _compare(sides, setting, repeats, seed)


def _compare(sides: list[Rows], setting: str, repeats: int, seed: int) -> Comparison:
    before, after = (_joined(side.folders) for side in sides)
    notes = [*_differences([run for side in sides for run in side.runs]), *_seed_notes(sides)]
    names = [_images(side) for side in sides]
    common = set.intersection(*(images for side in names for images in side))
    if not common:
        raise InputError(f"{before} and {after} have no image in common: give runs over the same data")
    for side, rows in zip(names, sides, strict=True):
        for images, folder in zip(side, rows.folders, strict=True):
            if len(images) > len(common):
                missing = f"{len(images) - len(common)} of its {len(images)} images"
                notes.append(f"{folder}: {missing} are not in all runs, and are left out")
    _check_contents(sides, common)
    cards, left_out = _paired(sides, common, repeats, seed)
    notes += left_out
    _check_labels(cards)
    every = [card for side in cards for card in side]
    shared = [key for key in every[0].numbers if all(key in card.numbers for card in every)]
    if not shared:
        raise InputError(f"{before} and {after} have no setting in common")
    changes = [_change(cards, key) for key in shared]
    one, two = cards[0][0], cards[1][0]
    if not any(metric == TOP1.name for card in (one, two) for _, metric in card.keys):
        return Comparison(cards[0], cards[1], changes, setting, [], {}, {}, {}, notes)  # segmenters
    if (setting, TOP1.name) not in shared:
        known = [label for label, metric in shared if metric == TOP1.name]
        raise UnknownNameError(
            "setting", setting, known, "Both models must have been run under it.", option="setting"
        )
    classified, correct, labels = _predictions(one, two, setting)
    changed = turned(classified, *correct)
    known_names = {**_class_names(one), **_class_names(two)}
    return Comparison(
        cards[0],
        cards[1],
        changes,
        setting,
        class_changes(labels, *correct),
        known_names,
        changed,
        {way: len(which) for way, which in changed.items()},
        notes,
    )


def _class_names(card: Card) -> dict[int, str]:
    names = card.run.get("about", {}).get("classes", {})
    return {int(label): name for label, name in names.items()}


def _rows(folders: Sequence[str | Path]) -> Rows:
    rows = Rows.read(*folders)
    if rows.kinds != {"stress"}:
        raise InputError(
            f"{_joined(folders)}: expected runs of steadygaze stress, got a run of verify: compare those "
            "with steadygaze report"
        )
    check_complete(rows.runs, rows.folders)
    weights = {(run["settings"]["model"], run["settings"]["weights"]) for run in rows.runs}
    seeds = [run["settings"]["seed"] for run in rows.runs]
    if len(seeds) > 1 and len(weights) < len(seeds) and len(set(seeds)) < len(seeds):
        raise InputError(
            f"{_joined(folders)}: expected runs of several seeds, got the same model with the same seed twice"
        )
    return rows


def _joined(folders: Sequence[str | Path]) -> str:
    return ", ".join(map(str, folders))


def _images(rows: Rows) -> list[set[str]]:
    columns = rows.columns()
    found = [columns.distinct("image", columns.run == number) for number in range(len(rows.runs))]
    if not all(found):
        raise InputError(f"{_joined(rows.folders)}: a run has no rows yet. Run steadygaze stress first.")
    return found


def _check_contents(sides: Sequence[Rows], common: set[str]) -> None:
    """InputError if an image has one content in one run and another, or an unknown one, in another."""
    contents: dict[str, str] = {}
    for columns in (side.columns() for side in sides):
        first = columns.groups(["image", "content"]).first
        for image, content in zip(columns.text("image", first), columns.text("content", first), strict=True):
            if image in common and (not content or contents.setdefault(image, content) != content):
                raise InputError(
                    f"{image} is not the same image in all runs: its content differs. Measure both models on "
                    "the same files."
                )


def _paired(
    sides: Sequence[Rows], common: set[str], repeats: int, seed: int
) -> tuple[list[list[Card]], list[str]]:
    """The cards of both sides, restricted to what every run has measured of every image, and notes on what is
    left out."""
    take = partial(_counted, common=common)
    cards = [Card.of(side, all_suites(), repeats=repeats, seed=seed, take=take) for side in sides]
    every = [card for side in cards for card in side]
    shared = set.intersection(*(set(card.keys) for card in every))
    lost = {key: set().union(*(card.without(key) for card in every)) for key in shared}
    lost = {key: images for key, images in lost.items() if images}
    notes = []
    for side, which in zip(cards, ("before", "after"), strict=True):
        measured = {label for card in side for label, _ in card.keys}
        alone = sorted(measured - {label for label, _ in shared})
        if alone:
            notes.append(f"only {which}: {abbreviated(alone)}")
    if lost:
        most: dict[str, int] = {}
        for (label, _), images in lost.items():
            most[label] = max(most.get(label, 0), len(images))
        counts = abbreviated(f"{label} {count}" for label, count in sorted(most.items()))
        notes.append(
            f"images that are missing from a run and are left out: {counts}. An unfinished run, or numbers "
            "that are NaN?"
        )
    if not lost and all(set(card.keys) == shared for card in every):
        return cards, notes

    take = partial(_counted, common=common, shared=shared, lost=lost)
    return [Card.of(side, all_suites(), repeats=repeats, seed=seed, take=take) for side in sides], notes


def _counted(
    rows: Columns,
    common: set[str],
    shared: set[Key] | None = None,
    lost: Mapping[Key, set[str]] = MappingProxyType({}),
) -> np.ndarray:
    """Which rows count: of common images, of shared settings and metrics (None: of all), unless they are
    lost."""
    mask = rows.among("image", common)
    if shared is None:
        return mask
    groups = rows.groups(["setting", "metric"])
    keys = zip(rows.text("setting", groups.first), rows.text("metric", groups.first), strict=True)
    for number, key in enumerate(keys):
        own = groups.rows(number)
        if key not in shared:
            mask[own] = False
        elif key in lost:
            mask[own] &= ~rows.among("image", lost[key], own)
    return mask


def _seed_notes(sides: Sequence[Rows]) -> list[str]:
    """Random conditions are the same before and after only with the same seeds."""
    seeds = [sorted(run["settings"]["seed"] for run in side.runs) for side in sides]
    own = {suite.name for suite in SUITES.values() if suite.own_images}
    random = any(set(run["settings"].get("suite", ())) - own for side in sides for run in side.runs)
    if seeds[0] == seeds[1] or not random:
        return []
    one, two = (", ".join(map(str, side)) for side in seeds)
    return [
        f"other seeds before ({one}) than after ({two}): corruptions and everything else that is random "
        "differ between the sides"
    ]


def _differences(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What the runs were made with that is not the same."""
    notes = []
    for key in (*COMPARED, *(fact for suite in SUITES.values() for fact in suite.compared)):
        given = [run["settings"].get(key) for run in runs]
        values = [value for value in given if value not in (None, [])]  # of those that used it
        if any(value != values[0] for value in values[1:]):
            shown = "; ".join(dict.fromkeys(_words(value) for value in values))
            notes.append(f"not the same in all runs: {key} ({shown})")
    return notes


def _words(value: Any) -> str:
    text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_labels(cards: list[list[Card]]) -> None:
    first = cards[0][0].answers
    for card in (card for side in cards for card in side):
        for image, (label, _) in card.answers.items():
            if image in first and first[image][0] != label:
                raise InputError(
                    f"{image} has the label {first[image][0]} in one run and {label} in another: "
                    "their classes do not map"
                )


def _change(cards: list[list[Card]], key: Key) -> Change:
    sides = [[card.numbers[key] for card in side] for side in cards]
    samples = [np.mean([number.samples for number in side], axis=0) for side in sides]
    gap = samples[1] - samples[0]
    low, high = interval(gap[1:])
    spreads = [
        over_seeds([number.value for number in side])
        if all(np.isfinite(number.value) for number in side)
        else NO_SPREAD
        for side in sides
    ]
    first = sides[0][0]
    return Change(
        first.setting,
        first.quantity,
        spreads[0],
        spreads[1],
        float(gap[0]),
        float(low),
        float(high),
        first.images,
        _significance(cards, key),
        first.note,
    )


def _significance(cards: list[list[Card]], key: Key) -> float | None:
    """McNemar's p of a metric that is 0 or 1 for each image, such as top1; None for others, and for several
    seeds."""
    one_seed = all(len(side) == 1 and key in side[0].measured for side in cards)
    if not one_seed or not isinstance(cards[0][0].quantity(key[1]), Accuracy):
        return None
    before, after = (side[0].values(*key) for side in cards)
    both = ~np.isnan(before + after)
    return mcnemar(before[both], after[both]) if both.any() else None


def _predictions(
    one: Card, two: Card, setting: str
) -> tuple[list[str], tuple[np.ndarray, np.ndarray], np.ndarray]:
    """The images of a setting that both models classified: names, correct before and after, labels."""
    names = one.names_of(one.population(setting))
    before, after = one.values(setting, TOP1.name), two.values(setting, TOP1.name)
    known = [i for i in range(len(names)) if not np.isnan(before[i] + after[i]) and names[i] in one.answers]
    if not known:
        raise InputError(f"{setting}: no image was classified by both models")
    labels = np.array([one.answers[names[i]][0] for i in known])
    return [names[i] for i in known], (before[known], after[known]), labels


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
        raise InputError(f"{given[:80]} is not a readable text file ({error})", option="seen") from error
    known = [names.get(index, "") for index in range(max(names, default=-1) + 1)]
    lookup = ClassLookup(known or None, len(known))
    found = {_class_index(text.strip(), lookup) for text in texts if text.strip()}
    if not found:
        raise InputError(
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
        raise InputError("seen: expected runs of classifiers with labeled images, got none", option="seen")
    is_seen = np.isin(labels, list(seen))
    if is_seen.all() or not is_seen.any():
        which = "every" if is_seen.all() else "no"
        raise InputError(
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
            changes.append(_group_change(title, group, labels, mask, *sides))
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


def _group_change(
    setting: str,
    group: str,
    labels: Int[np.ndarray, " n"],
    mask: Bool[np.ndarray, " n"],
    before: Float[np.ndarray, "a n"],
    after: Float[np.ndarray, "b n"],
) -> GroupChange:
    known = mask & (labels >= 0) & ~np.isnan(before).any(0) & ~np.isnan(after).any(0)
    if not known.any():
        raise InputError(f"{setting}: no image of the {group} classes was classified by both models")
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
