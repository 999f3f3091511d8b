"""From the rows of a stress run to its card: every setting and metric with its 95 % interval, and the scores
that the suites derive from them. Intervals: Wilson's of accuracies, which also hold for few images; of
everything else bootstrap over images, the same draws for every number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from steadygaze.data.datasets.tree import abbreviated
from steadygaze.errors import InputError
from steadygaze.quantity import Quantity
from steadygaze.robustness.by_class import Spread
from steadygaze.runs.rows import STRESS, Columns, Rows
from steadygaze.runs.settings import (
    CLEAN,
    TOP1,
    Figure,
    Number,
    Score,
    Setting,
    Table,
    quantity_of_record,
    with_wilson,
)
from steadygaze.runs.statistics import ImageTable, bootstrap, small_sample_note

if TYPE_CHECKING:
    import pandas as pd

Key = tuple[str, str]  # label of the setting, name of the metric


@dataclass(frozen=True)
class Change:
    """One number before and after; difference with its paired 95 % interval; p: McNemar's test of correct and
    wrong predictions, for one seed a side."""

    setting: Setting
    quantity: Quantity
    before: Spread
    after: Spread
    difference: float
    low: float
    high: float
    images: int
    p: float | None
    note: str

    @property
    def key(self) -> Key:
        return self.setting.label, self.quantity.name

    @property
    def verdict(self) -> str:
        """better, worse, more, less where the interval excludes zero; otherwise empty."""
        if not (self.low > 0 or self.high < 0):
            return ""
        if not self.quantity.sign:
            return "more" if self.difference > 0 else "less"
        return "better" if self.difference * self.quantity.sign > 0 else "worse"

    @property
    def scale(self) -> float:
        """Factor between values and what is shown."""
        return self.quantity.scale


class SuiteResults:
    """The half of a suite that reads rows: its scores, tables and figures.

    Attributes:
        name: The suite's name in `suites=` and on the command line.
        title: Heading in a report.
        quantities: The metrics and scores it knows by name.
        tiles: (setting label, metric name) -> words; numbers that stand large at the top of a report.
        compared: Facts that must be equal in two runs that are compared.
        uneven_details: Metrics whose details differ in length from image to image, and so are no curves.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    quantities: ClassVar[tuple[Quantity, ...]] = ()
    tiles: ClassVar[Mapping[tuple[str, str], str]] = MappingProxyType({})
    compared: ClassVar[tuple[str, ...]] = ()
    uneven_details: ClassVar[frozenset[str]] = frozenset()

    @staticmethod
    def setting_words(setting: Setting) -> str:
        """The label of one of its settings for people, in charts, tiles and tables of pages."""
        return setting.plain_words

    def headline(self, card: Card) -> dict[Key, str]:
        """The numbers that stand large at the top of a report, with words: those of `tiles`, and where the
        run has none of them, the first number of each setting, of a series the last level. Accuracy, its own
        metrics and those that no suite describes count; what other suites add to a setting does not."""
        chosen = {key: words for key, words in self.tiles.items() if key in card.numbers}
        if chosen:
            return chosen
        others = {quantity for suite in card.suites for quantity in suite.quantities}
        others -= {TOP1, *self.quantities}
        first: dict[Setting, Key] = {}  # number of each setting
        for key, number in card.numbers.items():
            if number.setting.suite == self.name and number.quantity not in others:
                first.setdefault(number.setting, key)
        major = [setting for setting in first if not setting.minor]
        last = {setting.name: first[setting] for setting in major or first}
        return dict.fromkeys(last.values(), "")

    def numbers(self, card: Card, population: str) -> Iterator[Score]:
        """Numbers of single settings that are no mean over images."""
        return iter(())

    def scores(self, card: Card) -> Iterator[Score]:
        """The scores of the field."""
        return iter(())

    def tables(self, card: Card) -> Iterator[Table]:
        """Tables for the command line."""
        return iter(())

    def figures(self, card: Card) -> Iterator[Figure]:
        """Figures of the suite's section in a report."""
        return iter(())

    def change_figures(self, changes: Sequence[Change]) -> Iterator[Figure]:
        """Figures of a comparison of two models."""
        return iter(())


class Card:
    """The numbers of one stress run.

    Attributes:
        rows: Where its rows are, and possibly those of others.
        positions: Which ones are its own.
        suites: Every suite; each finds what it knows in the card.
    """

    def __init__(
        self,
        run: dict[str, Any],
        rows: Columns,
        positions: np.ndarray,
        suites: Sequence[SuiteResults],
        *,
        repeats: int = 2000,
        seed: int = 0,
        folder: Path | None = None,
        unreadable: dict[str, bool] | None = None,
    ) -> None:
        self.run, self.suites, self.repeats, self.seed, self.folder = run, suites, repeats, seed, folder
        facts = run["settings"]
        self.model, self.weights, self.data = facts["model"], facts["weights"], facts.get("data", "")
        settings = [Setting.from_record(record) for record in facts.get("conditions", ())]
        self.settings: dict[str, Setting] = {setting.label: setting for setting in settings}
        self.quantities: dict[str, Quantity] = {
            **{record["name"]: quantity_of_record(record) for record in facts.get("quantities", ())},
            **{quantity.name: quantity for suite in suites for quantity in suite.quantities},
        }
        self.unreadable = unreadable or {}  # False: it could not be read before, and can be now
        self._uneven = frozenset[str]().union(*(suite.uneven_details for suite in suites))
        self._all = rows
        codes, texts = rows.codes["setting"][positions], rows.values_of("setting")
        populations: dict[str, list[int]] = {}  # of the data, and of each set: the settings
        for code in np.unique(codes):
            if texts[code] not in self.settings:
                raise InputError(f"{folder or 'rows'}: run.json does not describe the setting {texts[code]}")
            populations.setdefault(self.population(texts[code]), []).append(code)
        self._tables: dict[str, ImageTable[Key]] = {
            population: ImageTable(
                rows,
                positions[np.isin(codes, own)],
                ["setting", "metric"],
                lambda label, metric: (label, metric),
                uneven=self._is_uneven,
                unique=True,
            )
            for population, own in populations.items()
        }
        for _, metric in self.keys:
            self.quantities.setdefault(metric, Quantity(metric))

    @classmethod
    def of(
        cls,
        rows: Rows,
        suites: Sequence[SuiteResults],
        *,
        repeats: int = 2000,
        seed: int = 0,
        take: Callable[[Columns], np.ndarray] | None = None,
    ) -> list[Card]:
        """A card of each run; take: a mask of the rows that count."""
        if rows.kinds != {STRESS}:
            raise InputError(
                "expected rows of steadygaze stress, got rows of verify: their numbers are in table()"
            )
        folders: Sequence[Path | None] = rows.folders or [None] * len(rows.runs)
        columns = rows.columns()
        taken = np.ones(len(columns), dtype=bool) if take is None else take(columns)
        unreadable: list[dict[str, bool]] = [{} for _ in rows.runs]
        for number, image, reason in columns.unreadable:
            unreadable[number][image] = bool(reason)
        return [
            cls(
                run,
                columns,
                np.flatnonzero(taken & (columns.run == number)),
                suites,
                repeats=repeats,
                seed=seed,
                folder=folder,
                unreadable=unreadable[number],
            )
            for number, (run, folder) in enumerate(zip(rows.runs, folders, strict=True))
        ]

    def _is_uneven(self, key: Key) -> bool:
        """Whether the details of a metric are no curve: label and prediction, or of any length."""
        return key[1] == TOP1.name or key[1] in self._uneven

    def _table(self, label: str) -> ImageTable[Key]:
        return self._tables[self.population(label)]

    @cached_property
    def answers(self) -> dict[str, tuple[int, int]]:
        """Label and predicted class of each clean image, and of each image of other sets."""
        answers: dict[str, tuple[int, int]] = {}
        for label, metric in self.keys:
            if metric == TOP1.name and (label == CLEAN.label or self.population(label)):
                rows = self._table(label).rows((label, metric))
                rows = rows[self._all.lengths[rows] > 0]
                if (self._all.lengths[rows] != 2).any():
                    raise InputError(f"{label}: expected two numbers behind top1, label and predicted class")
                pairs = self._all.details(rows).astype(np.int64).reshape(-1, 2).tolist()
                images = self._all.text("image", rows)
                answers.update((image, (pair[0], pair[1])) for image, pair in zip(images, pairs, strict=True))
        return answers

    @cached_property
    def groups(self) -> list[str] | None:
        """The group of each image of the data, in order of name, empty where it is unknown; None without
        groups."""
        key = CLEAN.label, TOP1.name
        if not self.run["settings"].get("groups") or key not in self.keys:
            return None
        table = self._table(CLEAN.label)
        rows = table.rows(key)
        groups = [""] * len(table)
        for rank, group in zip(table.ranks(rows), self._all.text("note", rows), strict=True):
            groups[rank] = group
        return groups

    # -- what was measured -------------------------------------------------------------------------

    def population(self, label: str) -> str:
        """Which images a setting was measured on: "" the data of the run, otherwise a set of its own."""
        return self.settings[label].population

    def quantity(self, metric: str) -> Quantity:
        """What a metric's number is."""
        if metric not in self.quantities:  # a suite computes it from other rows, such as the IoU of a class
            self.quantities |= {number.quantity.name: number.quantity for number in self.numbers.values()}
        return self.quantities[metric]

    @property
    def images(self) -> list[str]:
        """The names of all images, sorted."""
        return sorted({name for table in self._tables.values() for name in table.names})

    @cached_property
    def image_count(self) -> int:
        """Number of images of the data of the run."""
        return len(self.names_of(""))

    @property
    def caution(self) -> str:
        """A caution if the data, or a suite's own set of images, is so small that intervals are unreliable;
        otherwise empty."""
        counts = {population: len(table) for population, table in self._tables.items()}
        few = {population: count for population, count in counts.items() if small_sample_note(count)}
        if not few:
            return ""
        if "" in few:
            return small_sample_note(few[""])
        sets = abbreviated(self.settings[label].words for label in few)
        return f"{sets}: {small_sample_note(min(few.values()))}"

    def names_of(self, population: str) -> list[str]:
        """The images of a population, sorted."""
        return self._tables[population].names if population in self._tables else []

    def without(self, key: Key) -> set[str]:
        """The images of a setting's population that have no such number."""
        names = self.names_of(self.population(key[0]))
        return {names[i] for i in np.flatnonzero(np.isnan(self.values(*key)))}

    def values(self, label: str, metric: str) -> np.ndarray:
        """The value of each image of the setting's population, in order of name, NaN where there is none."""
        return self._table(label).array((label, metric))

    def details(self, label: str, metric: str) -> Details:
        """The details of a metric, image by image."""
        table = self._table(label)
        rows = table.rows((label, metric))
        return Details(table.ranks(rows), self._all.lengths[rows], self._all.details(rows), len(table))

    @property
    def done(self) -> dict[str, int]:
        """How many images have been through each setting, those with broken predictions too."""
        done: dict[str, int] = {}
        for label, metric in self.keys:
            count = self._table(label).count((label, metric))
            done[label] = min(done.get(label, count), count)
        return done

    @cached_property
    def keys(self) -> list[Key]:
        """What was measured, in the order of the run."""
        order = {label: i for i, label in enumerate(self.settings)}
        columns = (column for table in self._tables.values() for column in table.columns)
        return sorted(columns, key=lambda key: order[key[0]])

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
        key = label, metric
        if label not in self.settings or key not in self._tables.get(self.population(label), ()):
            return None
        if self._is_uneven(key):
            return None
        rows = self._table(label).rows(key)
        rows = rows[self._all.lengths[rows] > 0]
        if not len(rows):
            return None
        numbers = self._all.details(rows).reshape(len(rows), -1)
        known = ~np.isnan(numbers)
        filled = np.where(known, numbers, 0)
        sums, squares, counts = filled.sum(0), (filled**2).sum(0), known.sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = sums / counts
            variance = np.maximum(squares / counts - mean**2, 0)
            return mean, 1.96 * np.sqrt(variance / counts)

    # -- numbers -----------------------------------------------------------------------------------

    @cached_property
    def measured(self) -> dict[Key, Number]:
        """The mean of every setting and metric, and what suites add to single settings."""
        measured: dict[Key, Number] = {}
        for population in self._tables:
            keys = [key for key in self.keys if self.population(key[0]) == population]
            values = np.stack([self.values(*key) for key in keys])
            point, samples = bootstrap(values, repeats=self.repeats, seed=self.seed)
            for k, (label, metric) in enumerate(keys):
                count = int((~np.isnan(values[k])).sum())
                all_samples = np.concatenate([point[k : k + 1], samples[:, k]])
                note = self._note((label, metric))
                score = Score(self.settings[label], self.quantity(metric), all_samples, count, note)
                measured[label, metric] = with_wilson(Number.of(score), values[k])
            for suite in self.suites:
                measured |= _by_key(suite.numbers(self, population))
        return measured

    def _note(self, key: Key) -> str:
        """The note of all rows; where they are of several groups (the styles of ImageNet-R), which."""
        rows = self._table(key[0]).rows(key)
        rows = rows[self._noted[rows]]
        notes = self._all.text("note", rows[self._all.groups(["note"], rows).first]).tolist()
        if self.groups is not None and set(notes) <= set(self.groups):
            return ""  # each image's own group
        return f"{len(notes)} groups: {abbreviated(notes)}" if len(notes) > 1 else "".join(notes)

    @cached_property
    def _noted(self) -> np.ndarray:
        return self._all.filled("note")

    @cached_property
    def scores(self) -> dict[Key, Number]:
        """The scores that suites derive."""
        return _by_key(score for suite in self.suites for score in suite.scores(self))

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
    def setting_count(self) -> int:
        """Number of settings of the run, clean images included."""
        return len(self.settings)

    def unfinished(self) -> list[str]:
        """The settings that some images have not been through: the run was killed, or is still running."""
        facts, done = self.run["settings"], self.done
        set_images = facts.get("set_images", {})
        sources = {setting.source for setting in self.settings.values()} - {""}
        lost = [image for image, still in self.unreadable.items() if still]
        unfinished = []
        for label, setting in self.settings.items():
            planned = set_images.get(label, 0) if setting.source else facts.get("images") or 0
            expected = planned - sum(_set_of(image, sources) == setting.source for image in lost)
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


class Details(NamedTuple):
    """The numbers behind the values of a metric.

    Attributes:
        ranks: The rank by name of each row's image.
        lengths: How many numbers each row has.
        numbers: Of all rows, one after the other.
        images: The number of images.
    """

    ranks: np.ndarray
    lengths: np.ndarray
    numbers: np.ndarray
    images: int


def _by_key(scores: Iterable[Score]) -> dict[Key, Number]:
    return {(score.setting.label, score.quantity.name): Number.of(score) for score in scores}


def _set_of(image: str, sources: set[str]) -> str:
    """The image set that an image belongs to, whose names are SET:NAME; empty for the data of the run."""
    name, colon, _ = image.partition(":")
    return name if colon and name in sources else ""
