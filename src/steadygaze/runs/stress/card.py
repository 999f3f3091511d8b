"""From the rows of a stress run to its card: every setting and metric with its 95 % interval, and the scores
that the suites derive from them. Intervals: Wilson's of accuracies, which also hold for few images; of
everything else bootstrap over images, the same draws for every number."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steadygaze.data.benchmarks import some
from steadygaze.errors import BadInput
from steadygaze.quantity import Quantity
from steadygaze.runs.stress import first_version
from steadygaze.runs.stress.predictions import Predictions
from steadygaze.runs.stress.quantities import TOP1
from steadygaze.runs.stress.setting import CLEAN, Setting
from steadygaze.runs.stress.suite import SUITES, Number, Score, Suite, with_wilson
from steadygaze.runs.table import bootstrap

if TYPE_CHECKING:
    import pandas as pd

    from steadygaze.runs.rows import Row, Rows

Key = tuple[str, str]  # label of the setting, name of the metric


@dataclass
class _Column:
    """One metric of one setting: the value of each image by its index, and sums of the details behind
    them."""

    keep_details: bool = False
    indices: array[int] = field(default_factory=lambda: array("l"))
    values: array[float] = field(default_factory=lambda: array("d"))
    sums: np.ndarray | None = None  # (3, D): sums, sums of squares, counts
    notes: dict[str, None] = field(default_factory=dict)
    details: list[array[int]] = field(default_factory=list)

    @property
    def note(self) -> str:
        """What all rows say; where they are of several groups (the styles of ImageNet-R), which."""
        return f"{len(self.notes)} groups: {some(self.notes)}" if len(self.notes) > 1 else "".join(self.notes)

    def add(self, index: int, row: Row) -> None:
        self.indices.append(index)
        self.values.append(float("nan") if row["value"] is None else row["value"])
        if row.get("note"):
            self.notes[row["note"]] = None
        if self.keep_details:
            self.details.append(array("q", row.get("detail") or ()))
        elif row.get("detail") and row["metric"] != TOP1.name:
            self._sum(row["detail"])

    def _sum(self, given: Sequence[float | None]) -> None:
        detail = np.array([np.nan if x is None else x for x in given], dtype=np.float64)
        known = ~np.isnan(detail)
        filled = np.where(known, detail, 0)
        if self.sums is None:
            self.sums = np.zeros((3, len(detail)))
        if self.sums.shape[1] != len(detail):
            raise BadInput(
                f"rows of a metric have {self.sums.shape[1]} and {len(detail)} numbers behind their values: "
                "they are of runs with different settings"
            )
        self.sums = self.sums + np.stack([filled, filled**2, known])


class Card:
    """The numbers of one stress run."""

    def __init__(
        self, run: dict[str, Any], *, repeats: int = 2000, seed: int = 0, folder: Path | None = None
    ) -> None:
        self.run, self.repeats, self.seed, self.folder = run, repeats, seed, folder
        facts = run["settings"]
        self.model, self.weights, self.data = facts["model"], facts["weights"], facts.get("data", "")
        self.settings: dict[str, Setting] = {s.label: s for s in first_version.settings_of_run(facts)}
        self.quantities: dict[str, Quantity] = first_version.quantities_of_run(facts)
        self.unreadable: dict[str, bool] = {}  # False: it could not be read before, and can be now
        self.answers: dict[str, tuple[int, int]] = {}  # label and predicted class of each clean image
        self._planned = list(self.settings)
        self._indices: dict[str, int] = {}
        self._columns: dict[Key, _Column] = {}
        self._suites: list[Suite] = [Predictions(), *(suite() for suite in SUITES.values())]
        self._kept = frozenset().union(*(suite.kept_details for suite in self._suites))

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
        folders: Sequence[Path | None] = rows.folders or [None] * len(rows.runs)
        cards = [
            cls(run, repeats=repeats, seed=seed, folder=folder)
            for run, folder in zip(rows.runs, folders, strict=True)
        ]
        for number, row in rows.everything():
            if "unreadable" in row:
                cards[number].unreadable[row["image"]] = bool(row["unreadable"])
            elif take(row):
                cards[number].add(row)
        return cards

    def add(self, row: Row) -> None:
        """Take in one row."""
        index = self._indices.setdefault(row["image"], len(self._indices))
        label, metric = row["setting"], row["metric"]
        if label not in self.settings:
            self.settings[label] = first_version.setting_of_label(label, self.run["settings"])
        key = label, metric
        if key not in self._columns:
            self._columns[key] = _Column(metric in self._kept)
        self._columns[key].add(index, row)
        if metric == TOP1.name and row.get("detail") and (label == CLEAN.label or self.population(label)):
            self.answers[row["image"]] = tuple(row["detail"])

    # -- what was measured -------------------------------------------------------------------------

    def population(self, label: str) -> str:
        """Which images a setting was measured on: "" the data of the run, otherwise a set of its own."""
        return self.settings[label].population

    def quantity(self, metric: str) -> Quantity:
        """What a metric's number is."""
        if metric not in self.quantities:
            self.quantities[metric] = first_version.quantity_of_name(metric)
        return self.quantities[metric]

    @property
    def images(self) -> list[str]:
        """The names of all images, sorted."""
        return sorted(self._indices)

    @cached_property
    def image_count(self) -> int:
        """Number of images of the data of the run."""
        own = [column for (label, _), column in self._columns.items() if not self.population(label)]
        return len({index for column in own for index in column.indices})

    def names_of(self, population: str) -> list[str]:
        """The images of a population, sorted."""
        return self._names.get(population, [])

    @cached_property
    def _names(self) -> dict[str, list[str]]:
        indices: dict[str, set[int]] = {}
        for (label, _), column in self._columns.items():
            indices.setdefault(self.population(label), set()).update(column.indices)
        names = list(self._indices)
        return {population: sorted(names[i] for i in own) for population, own in indices.items()}

    def without(self, key: Key) -> set[str]:
        """The images of a setting's population that have no such number."""
        names = self.names_of(self.population(key[0]))
        return {names[i] for i in np.flatnonzero(np.isnan(self.values(*key)))}

    def values(self, label: str, metric: str) -> np.ndarray:
        """The value of each image of the setting's population, in order of name, NaN where there is none."""
        order, column = self._orders[self.population(label)], self._columns[label, metric]
        ranks = order[np.asarray(column.indices)]
        return _by_rank(ranks, column.values, int(order.max() + 1), f"{label}, {metric}")

    def details(self, label: str, metric: str) -> tuple[np.ndarray, list[array[int]], int]:
        """Of a metric whose details are kept: the rank by name of each image, its detail, and the number of
        images."""
        order, column = self._orders[self.population(label)], self._columns[label, metric]
        return order[np.asarray(column.indices)], column.details, int(order.max() + 1)

    @cached_property
    def _orders(self) -> dict[str, np.ndarray]:
        """Of each population, the rank by name of every image; -1 for images of others."""
        orders = {}
        for population in dict.fromkeys(self.population(label) for label, _ in self._columns):
            order = np.full(len(self._indices), -1)
            for rank, name in enumerate(self.names_of(population)):
                order[self._indices[name]] = rank
            orders[population] = order
        return orders

    @property
    def done(self) -> dict[str, int]:
        """How many images have been through each setting, those with broken predictions too."""
        done: dict[str, int] = {}
        for (label, _), column in self._columns.items():
            count = len(set(column.indices))
            done[label] = min(done.get(label, count), count)
        return done

    @property
    def keys(self) -> list[Key]:
        """What was measured, in the order of the run."""
        order = {label: i for i, label in enumerate(self._planned)}
        return sorted(self._columns, key=lambda key: order.get(key[0], len(order)))

    def measured_settings(
        self, suite: str | None = None, metric: str = "", source: str = ""
    ) -> list[Setting]:
        """The settings of a suite (None: of all) that have this metric, in the order of the run."""
        labels = dict.fromkeys(label for label, name in self.keys if not metric or name == metric)
        settings = [self.settings[label] for label in labels]
        return [s for s in settings if suite is None or (s.suite, s.source) == (suite, source)]

    def metrics_of(self, labels: Iterable[str]) -> list[Quantity]:
        """The metrics that were measured of these settings."""
        wanted = set(labels)
        return [self.quantity(name) for name in dict.fromkeys(m for label, m in self.keys if label in wanted)]

    def curve(self, label: str, metric: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean and half of the 95 % interval at each point of a curve, or of each layer; None where there is
        none."""
        column = self._columns.get((label, metric))
        if column is None or column.sums is None:
            return None
        sums, squares, counts = column.sums
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = sums / counts
            variance = np.maximum(squares / counts - mean**2, 0)
            return mean, 1.96 * np.sqrt(variance / counts)

    # -- numbers -----------------------------------------------------------------------------------

    @cached_property
    def measured(self) -> dict[Key, Number]:
        """The mean of every setting and metric, and what suites add to single settings."""
        measured: dict[Key, Number] = {}
        for population in self._orders:
            keys = [key for key in self.keys if self.population(key[0]) == population]
            values = np.stack([self.values(*key) for key in keys])
            point, samples = bootstrap(values, repeats=self.repeats, seed=self.seed)
            for k, (label, metric) in enumerate(keys):
                count = int((~np.isnan(values[k])).sum())
                all_samples = np.concatenate([point[k : k + 1], samples[:, k]])
                note = self._columns[label, metric].note
                score = Score(self.settings[label], self.quantity(metric), all_samples, count, note)
                measured[label, metric] = with_wilson(Number.of(score), values[k])
            for suite in self._suites:
                measured |= _by_key(suite.numbers(self, population))
        return measured

    @cached_property
    def scores(self) -> dict[Key, Number]:
        """The scores that suites derive."""
        return _by_key(score for suite in self._suites for score in suite.scores(self))

    @cached_property
    def numbers(self) -> dict[Key, Number]:
        """All of them: clean, then the scores, then the rest."""
        clean = {key: number for key, number in self.measured.items() if key[0] == CLEAN.label}
        return {**clean, **self.scores, **self.measured}

    def samples(self, label: str, quantity: Quantity) -> np.ndarray | None:
        """The samples of a measured number; None if it was not measured."""
        number = self.measured.get((label, quantity.name))
        return None if number is None else number.samples

    def text(self, label: str, metric: str, *, spread: bool = True) -> str:
        """A number for people; empty if there is none."""
        number = self.numbers.get((label, metric))
        return "" if number is None else number.text(spread=spread)

    @property
    def suites(self) -> list[Suite]:
        """All known suites; each finds what it knows in the card."""
        return self._suites

    @property
    def setting_count(self) -> int:
        """Number of settings of the run, clean images included."""
        return len(self.settings)

    def unfinished(self) -> list[str]:
        """The settings that some images have not been through: the run was killed, or is still running."""
        facts, done = self.run["settings"], self.done
        of_sets = first_version.images_of_sets(facts, [self.settings[label] for label in self._planned])
        sources = {self.settings[label].source for label in self._planned} - {""}
        lost = [image for image, still in self.unreadable.items() if still]
        unfinished = []
        for label in self._planned:
            source = self.settings[label].source
            if source:
                expected = of_sets[label] - sum(_set_of(image, sources) == source for image in lost)
            else:
                expected = (facts.get("pictures") or 0) - sum(not _set_of(image, sources) for image in lost)
            if done.get(label, 0) < expected:
                unfinished.append(label)
        return unfinished

    def records(self) -> Iterator[dict[str, Any]]:
        """One dict for each number: model, weights, data, seed, setting, metric, value, low, high, images,
        better, note."""
        facts = {
            "model": self.model,
            "weights": self.weights,
            "data": self.data,
            "seed": self.run["settings"].get("seed"),
        }
        for (label, metric), number in self.numbers.items():
            better = number.quantity.better
            yield {
                **facts,
                "setting": label,
                "metric": metric,
                "value": number.value,
                "low": number.low,
                "high": number.high,
                "images": number.images,
                "better": "" if better == "neither" else better,
                "note": number.note,
            }

    def to_pandas(self) -> pd.DataFrame:
        """One line a number."""
        import pandas as pd

        return pd.DataFrame(list(self.records()))


def _by_rank(ranks: np.ndarray, values: Sequence[float], count: int, name: str) -> np.ndarray:
    """An array of `count` values, NaN where there is none. Two rows of one image must agree."""
    given = np.asarray(values, dtype=np.float64)
    out = np.full(count, np.nan)
    out[ranks] = given
    conflicts = int((~np.isclose(out[ranks], given, rtol=0, atol=0, equal_nan=True)).sum())
    if conflicts:
        raise BadInput(
            f"{name}: {conflicts} images have two rows with different values. The folder holds rows of two "
            "runs: remove the row file that does not belong to it."
        )
    return out


def _by_key(scores: Iterable[Score]) -> dict[Key, Number]:
    return {(score.setting.label, score.quantity.name): Number.of(score) for score in scores}


def _set_of(image: str, sources: set[str]) -> str:
    """The image set that an image belongs to, whose names are SET:NAME; empty for the data of the run."""
    name, colon, _ = image.partition(":")
    return name if colon and name in sources else ""
