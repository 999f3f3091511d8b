"""From the rows of a stress run to its card: every setting and metric with its 95 % interval, and the scores of the field.

| score | setting | of |
| --- | --- | --- |
| error, ce | `fog` | mean top-1 error over severities; the same in percent of AlexNet's |
| mean_error, mce, relative_mce | `corruptions`, `imagenet-c` | the 15 common corruptions; `mean_error_all`: of all that were run |
| ece | any that has top1 and confidence | expected calibration error, 15 bins |
| flips, mfr, top5_distance | `sequences`, `imagenet-p` | mean over kinds; mfr in percent of AlexNet's, if all ten were run |
| top1 | `location`, `rotation`, `size` | mean over the factor's values |
| attention_stability | `corruptions` | mean over corruptions |
| miou, pixel_accuracy, iou_CLASS | `clean`, `fog/3`; miou of `fog` | of counts summed over pictures; IoU by class of clean ones |
| mean_miou, retention | `corruptions` | mean over corruptions, and its share of the clean mIoU; `_cityscapes_c`: by that protocol |

mCE and its relatives compare with AlexNet's errors on ImageNet, so they are given for models of 1,000 classes alone, and only
if all 15 corruptions were run at all 5 severities. Intervals: bootstrap over pictures, the same draws for every number.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from steadygaze.data.benchmarks import some
from steadygaze.errors import BadInput
from steadygaze.robustness.calibration import BINS
from steadygaze.robustness.corruptions.corrupt import COMMON, CORRUPTIONS, SEVERITIES
from steadygaze.robustness.scores import ALEXNET, ALEXNET_CLEAN, ALEXNET_FLIPS
from steadygaze.robustness.sequences import PERTURBATIONS
from steadygaze.robustness.synthetic import FACTORS
from steadygaze.runs.statistics import bootstrap
from steadygaze.runs.stress_numbers import Key, Number, better, number_of, resampled_ece
from steadygaze.runs.stress_segmentation import METRIC, resampled, segmentation_scores, set_numbers, unpacked

if TYPE_CHECKING:
    import pandas as pd

    from steadygaze.runs.rows import Row, Rows


@dataclass
class _Column:
    """One metric of one setting: values by place of the picture, and the sums of what is behind them."""

    places: array = field(default_factory=lambda: array("l"))
    values: array = field(default_factory=lambda: array("d"))
    sums: np.ndarray | None = None
    squares: np.ndarray | None = None
    counts: np.ndarray | None = None
    notes: dict[str, None] = field(default_factory=dict)
    packed: list[array] = field(
        default_factory=list
    )  # of a segmentation: what `stress_segmentation.packed` wrote

    @property
    def note(self) -> str:
        """What all rows say; where they are of several groups (the styles of ImageNet-R), which."""
        return f"{len(self.notes)} groups: {some(self.notes)}" if len(self.notes) > 1 else "".join(self.notes)

    def add(self, place: int, row: Row) -> None:
        self.places.append(place)
        self.values.append(float("nan") if row["value"] is None else row["value"])
        if row.get("note"):
            self.notes[row["note"]] = None
        if row["metric"] == METRIC:
            self.packed.append(array("q", row.get("detail") or ()))
        elif row.get("detail") and row["metric"] != "top1":
            detail = np.array([np.nan if x is None else x for x in row["detail"]], dtype=np.float64)
            if self.sums is None or self.squares is None or self.counts is None:
                self.sums, self.squares, self.counts = (np.zeros_like(detail) for _ in range(3))
            known = ~np.isnan(detail)
            filled = np.where(known, detail, 0)
            self.sums, self.squares, self.counts = (
                self.sums + filled,
                self.squares + filled**2,
                self.counts + known,
            )


class Card:
    """What one stress run found."""

    def __init__(self, run: dict[str, Any], *, repeats: int = 2000, seed: int = 0) -> None:
        self.run, self.repeats, self.seed = run, repeats, seed
        self.model, self.weights = run["settings"]["model"], run["settings"]["weights"]
        self.data = run["settings"].get("data", "")
        self._apart = {"neighbours", *(shift["name"] for shift in run["settings"].get("shifts", ()))}
        self._places: dict[str, int] = {}
        self._columns: dict[Key, _Column] = {}
        self.unreadable: dict[str, bool] = {}  # False: it could not be read, and can be now
        self.answers: dict[str, tuple[int, int]] = {}  # clean: label and predicted class of each picture

    @classmethod
    def of(
        cls, rows: Rows, *, repeats: int = 2000, seed: int = 0, take: Callable[[Row], bool] = lambda row: True
    ) -> list[Card]:
        """A card of each run; take: which rows count."""
        from steadygaze.runs.rows import STRESS

        if rows.kinds != {STRESS}:
            raise BadInput(
                "expected rows of steadygaze stress, got rows of verify: their numbers are in table()"
            )
        cards = [cls(run, repeats=repeats, seed=seed) for run in rows.runs]
        for number, row in rows.everything():
            if "unreadable" in row:
                cards[number].unreadable[row["image"]] = bool(row["unreadable"])
            elif take(row):
                cards[number].add(row)
        return cards

    def add(self, row: Row) -> None:
        place = self._places.setdefault(row["image"], len(self._places))
        key = row["setting"], row["metric"]
        self._columns.setdefault(key, _Column()).add(place, row)
        if (
            row["metric"] == "top1"
            and row.get("detail")
            and (row["setting"] == "clean" or self.population(row["setting"]))
        ):
            self.answers[row["image"]] = tuple(row["detail"])

    def population(self, setting: str) -> str:
        """Which pictures a setting was measured on: "" the data itself, otherwise a set of its own."""
        return setting if setting.split("/")[0] in self._apart else ""

    @property
    def images(self) -> list[str]:
        """The names of all pictures, sorted."""
        return sorted(self._places)

    @cached_property
    def pictures(self) -> int:
        """Of the data itself."""
        return len(
            {p for (setting, _), c in self._columns.items() if not self.population(setting) for p in c.places}
        )

    def names_of(self, population: str) -> list[str]:
        """The pictures of a population, sorted."""
        return self._names.get(population, [])

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        places: dict[str, set[int]] = {}
        for (setting, _), column in self._columns.items():
            places.setdefault(self.population(setting), set()).update(column.places)
        names = list(self._places)
        return {population: sorted(names[p] for p in found) for population, found in places.items()}

    def without(self, key: Key) -> set[str]:
        """The pictures of a setting's population that have no such number."""
        names = self.names_of(self.population(key[0]))
        return {names[i] for i in np.flatnonzero(np.isnan(self.values(*key)))}

    def values(self, setting: str, metric: str) -> np.ndarray:
        """The value of each picture of the setting's population, in order of name, NaN where there is none."""
        order = self._orders[self.population(setting)]
        out, column = np.full(order.max() + 1, np.nan), self._columns[setting, metric]
        out[order[np.asarray(column.places)]] = column.values
        return out

    @cached_property
    def _orders(self) -> dict[str, np.ndarray]:
        found = {}
        for population in dict.fromkeys(self.population(setting) for setting, _ in self._columns):
            order = np.full(len(self._places), -1)
            for i, name in enumerate(self.names_of(population)):
                order[self._places[name]] = i
            found[population] = order
        return found

    @property
    def done(self) -> dict[str, int]:
        """How many pictures have been through each setting, broken answers too."""
        found: dict[str, int] = {}
        for (setting, _), column in self._columns.items():
            found[setting] = min(found.get(setting, len(column.places)), len(column.places))
        return found

    @property
    def keys(self) -> list[Key]:
        """What was measured, in the order of the run."""
        order = {setting: i for i, setting in enumerate(self.run["settings"].get("conditions", ()))}
        return sorted(self._columns, key=lambda key: order.get(key[0], len(order)))

    def curve(self, setting: str, metric: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean and half of the 95 % interval at each point of a curve, or of each layer; None where there is none."""
        column = self._columns.get((setting, metric))
        if column is None or column.sums is None or column.squares is None or column.counts is None:
            return None
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = column.sums / column.counts
            variance = np.maximum(column.squares / column.counts - mean**2, 0)
            return mean, 1.96 * np.sqrt(variance / column.counts)

    @cached_property
    def measured(self) -> dict[Key, Number]:
        """The mean of every setting and metric, and every setting's ECE."""
        found: dict[Key, Number] = {}
        for population in self._orders:
            keys = [key for key in self.keys if self.population(key[0]) == population]
            values = np.stack([self.values(*key) for key in keys])
            point, samples = bootstrap(values, repeats=self.repeats, seed=self.seed)
            for k, key in enumerate(keys):
                count = int((~np.isnan(values[k])).sum())
                found[key] = number_of(
                    key, np.concatenate([point[k : k + 1], samples[:, k]]), count, self._columns[key].note
                )
            for setting in (s for s, m in keys if m == METRIC):
                found |= self._segmented(setting)
            for setting in dict.fromkeys(
                s for s, m in keys if m == "top1" and (s, "confidence") in self._columns
            ):
                right, sure = self.values(setting, "top1"), self.values(setting, "confidence")
                count = int((~np.isnan(right + sure)).sum())
                if count:
                    gaps = resampled_ece(right, sure, self.repeats, self.seed)
                    found[setting, "ece"] = number_of((setting, "ece"), gaps, count, f"{BINS} bins")
        return found

    def _segmented(self, setting: str) -> dict[Key, Number]:
        """The numbers of a segmentation under one condition, of summed counts."""
        column, order = self._columns[setting, METRIC], self._orders[self.population(setting)]
        counts = unpacked(
            column.packed,
            order[np.asarray(column.places)],
            order.max() + 1,
            len(self.run["settings"]["segments"]),
        )
        mean, right, by_class = set_numbers(resampled(counts, self.repeats, self.seed))
        images = sum(map(bool, column.packed))
        found = {METRIC: mean, "pixel_accuracy": right}
        found |= {
            f"iou_{name}": by_class[:, c]
            for c, name in enumerate(self.run["settings"]["segments"])
            if setting == "clean"
        }
        return {
            (setting, metric): number_of((setting, metric), samples, images, "")
            for metric, samples in found.items()
        }

    @cached_property
    def scores(self) -> dict[Key, Number]:
        """The scores of the field; see the table above."""
        found: dict[Key, Number] = {}
        for key, samples, images, note in self._scores():
            found[key] = number_of(key, samples, images, note)
        return found

    @cached_property
    def numbers(self) -> dict[Key, Number]:
        """All of them: clean, then the scores, then the rest."""
        clean = {key: number for key, number in self.measured.items() if key[0] == "clean"}
        return {**clean, **self.scores, **self.measured}

    def _all(self, setting: str, metric: str = "top1") -> np.ndarray | None:
        number = self.measured.get((setting, metric))
        return None if number is None else number.samples

    def _scores(self) -> Iterator[tuple[Key, np.ndarray, int, str]]:
        yield from self._corruption_scores("", "corruptions", "made in memory, no JPEG", "clean")
        yield from self._corruption_scores("imagenet-c/", "imagenet-c", "the published pictures", "clean")
        yield from self._segmentation_scores()
        yield from self._sequence_scores("sequence", "sequences", "made in memory, no video compression")
        yield from self._sequence_scores("imagenet-p", "imagenet-p", "the published films")
        for factor in FACTORS:
            yield from self._mean_of(
                (factor, "top1"),
                [s for s, m in self.keys if m == "top1" and s.startswith(f"{factor}/")],
                "values",
            )
        stable = [s for s, m in self.keys if m == "attention_stability"]
        yield from self._mean_of(("corruptions", "attention_stability"), stable, "corruptions")

    def _mean_of(
        self, key: Key, settings: list[str], what: str
    ) -> Iterator[tuple[Key, np.ndarray, int, str]]:
        parts = [self.measured[setting, key[1]] for setting in settings]
        if parts:
            yield (
                key,
                np.mean([p.samples for p in parts], axis=0),
                parts[0].images,
                f"mean over {len(parts)} {what}",
            )

    def _segmentation_scores(self) -> Iterator[tuple[Key, np.ndarray, int, str]]:
        found: dict[str, dict[int, np.ndarray]] = {}
        for name, severity in product(CORRUPTIONS, SEVERITIES):
            samples = self._all(f"{name}/{severity}", METRIC)
            if samples is not None:
                found.setdefault(name, {})[severity] = samples
        if found:
            yield from segmentation_scores(found, self._all("clean", METRIC), self.pictures)

    def _corruption_scores(
        self, prefix: str, called: str, which: str, clean: str
    ) -> Iterator[tuple[Key, np.ndarray, int, str]]:
        errors: dict[str, dict[int, np.ndarray]] = {}
        images = 0
        for name in CORRUPTIONS:
            for severity in SEVERITIES:
                right = self._all(f"{prefix}{name}/{severity}")
                if right is not None:
                    errors.setdefault(name, {})[severity] = 1 - right
                    images = max(images, self.measured[f"{prefix}{name}/{severity}", "top1"].images)
        if not errors:
            return
        imagenet = self.run["settings"].get("classes") == 1000
        for name, found in errors.items():
            levels = ", ".join(map(str, found))
            yield (
                (f"{prefix}{name}", "error"),
                np.mean(list(found.values()), axis=0),
                images,
                f"severities {levels}",
            )
            if imagenet and len(found) == len(SEVERITIES) and name in ALEXNET:
                yield (
                    (f"{prefix}{name}", "ce"),
                    100 * _total(found) / sum(ALEXNET[name]),
                    images,
                    "AlexNet is 100",
                )
        common = [name for name in errors if name in COMMON]
        whole = all(len(errors[name]) == len(SEVERITIES) for name in common)
        note = f"{len(common)} of the 15 common corruptions, {_severities(errors, common)}; {which}; {images} pictures"
        if common:
            yield (
                (called, "mean_error"),
                np.mean([e for n in common for e in errors[n].values()], axis=0),
                images,
                note,
            )
        if len(common) < len(errors):
            every = np.mean([e for found in errors.values() for e in found.values()], axis=0)
            yield (
                (called, "mean_error_all"),
                every,
                images,
                f"{len(errors)} corruptions, the extra ones too; {which}; {images} pictures",
            )
        if not (imagenet and whole and len(common) == len(COMMON)):
            return
        note = f"the 15 common corruptions at 5 severities, AlexNet is 100; {which}; {images} pictures"
        yield (
            (called, "mce"),
            100 * np.mean([_total(errors[n]) / sum(ALEXNET[n]) for n in COMMON], axis=0),
            images,
            note,
        )
        first = self._all(clean)
        if first is not None:
            grown = [
                (_total(errors[n]) - 5 * (1 - first)) / (sum(ALEXNET[n]) - 5 * ALEXNET_CLEAN) for n in COMMON
            ]
            yield (called, "relative_mce"), 100 * np.mean(grown, axis=0), images, note

    def _sequence_scores(
        self, prefix: str, called: str, which: str
    ) -> Iterator[tuple[Key, np.ndarray, int, str]]:
        for metric in ("flips", "top5_distance"):
            kinds = {
                name: f"{prefix}/{name}"
                for name in PERTURBATIONS
                if (f"{prefix}/{name}", metric) in self.measured
            }
            yield from self._mean_of((called, metric), list(kinds.values()), "kinds")
            imagenet = self.run["settings"].get("classes") == 1000
            if metric == "flips" and len(kinds) == len(PERTURBATIONS) and imagenet:
                rates = [self.measured[s, "flips"].samples / ALEXNET_FLIPS[name] for name, s in kinds.items()]
                note = f"ten kinds at difficulty 1, AlexNet is 100 (its rates are not confirmed); {which}"
                images = max(self.measured[s, "flips"].images for s in kinds.values())
                yield (called, "mfr"), 100 * np.mean(rates, axis=0), images, note

    def records(self) -> Iterator[dict[str, Any]]:
        """One dict for each number: model, weights, data, seed, setting, metric, value, low, high, images, better, note."""
        facts = {
            "model": self.model,
            "weights": self.weights,
            "data": self.data,
            "seed": self.run["settings"].get("seed"),
        }
        for (setting, metric), n in self.numbers.items():
            facts_of = {"setting": setting, "metric": metric, "value": n.value, "low": n.low, "high": n.high}
            yield {**facts, **facts_of, "images": n.images, "better": better(metric), "note": n.note}

    def to_pandas(self) -> pd.DataFrame:
        """One line a number."""
        import pandas as pd

        return pd.DataFrame(list(self.records()))


def _severities(errors: dict[str, dict[int, np.ndarray]], names: list[str]) -> str:
    levels = sorted({s for name in names for s in errors[name]})
    return f"severities {', '.join(map(str, levels))}" if len(levels) < 5 else "severities 1 to 5"


def _total(found: dict[int, np.ndarray]) -> np.ndarray:
    return np.sum(list(found.values()), axis=0)
