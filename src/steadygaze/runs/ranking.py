"""From the rows of `verify` to a ranking: a section for each model and data set, a line for each method and
score, a cell for each metric.

Runs share a section if they were measured with the same settings on the same images. They may differ in
methods, scores, metrics and in how many images of one data set were used. Numbers for another class, at other
ratios, with another fill, seed or preprocessing, or of other images in a folder of the same name are another
section.

Where orders were searched (two or more methods `greedy:...`), a line `ceiling` has for each image and metric
of removal the best value that any of them reaches, and for the mean of the removal scores the best mean. A
score as a share of what can be reached is (score − chance) / (ceiling − chance).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from steadygaze.errors import InputError
from steadygaze.quantity import Quantity, plural
from steadygaze.quantity import mean as plain_mean
from steadygaze.runs.metrics import in_table_order, known_metric
from steadygaze.runs.request import CEILING, CHANCE, SEARCHED
from steadygaze.runs.rows import Columns, Groups
from steadygaze.runs.settings import NOT_COMBINED, quantity_of_record
from steadygaze.runs.statistics import (
    Cell,
    ImageTable,
    bootstrap,
    csv_text,
    difference,
    interval,
    latex_text,
    markdown_text,
    mean_differences,
    small_sample_note,
    told_apart,
)

if TYPE_CHECKING:
    import pandas as pd

    from steadygaze.runs.rows import Rows

SAME = ("target", "ratios", "fill", "seed", "preprocessing")  # settings that runs of one table share
Contents = dict[str, str]  # image -> content hash; "" where it is unknown


def group_runs(rows: Rows) -> list[list[int]]:
    """The runs of each table, by number."""
    contents = cache(lambda number: _contents(rows, number))
    groups: list[list[int]] = []
    for number in range(len(rows.runs)):
        fitting = (group for group in groups if all(_comparable(rows, number, n, contents) for n in group))
        group = next(fitting, None)
        if group is None:
            groups.append([number])
        else:
            group.append(number)
    return groups


def _comparable(rows: Rows, one: int, two: int, contents: Callable[[int], Contents]) -> bool:
    a, b = (rows.runs[number]["settings"] for number in (one, two))
    if any(a.get(key) != b.get(key) for key in ("model", "weights", "data", *SAME)):
        return False
    if a.get("maps") and b.get("maps") and a["maps"] != b["maps"]:
        return False  # given maps: other ones may have the same name
    from_folders = "images" in a and "images" in b  # names of images in memory are mere numbers
    if not from_folders:
        return a.get("images_hash") == b.get("images_hash")
    return _same_images(contents(one), contents(two), a.get("images_hash") == b.get("images_hash"))


def _same_images(one: Contents, two: Contents, same_list: bool) -> bool:
    """Whether two samples of a data set fit: one contains the other's images, and shared images have one
    content.
    """
    nested = same_list or one.keys() <= two.keys() or two.keys() <= one.keys()
    return nested and all(
        not one[name] or not two[name] or one[name] == two[name] for name in one.keys() & two.keys()
    )


def _contents(rows: Rows, number: int) -> Contents:
    columns = rows.columns()
    own = np.flatnonzero(columns.run == number)[::-1]
    last = own[columns.groups(["image"], own).first]
    contents = (content or "" for content in columns.text("content", last))
    return dict(zip(columns.text("image", last), contents, strict=True))


def distinction(rows: Rows, group: Sequence[int], groups: Sequence[Sequence[int]]) -> str:
    """What distinguishes a group of runs from others with the same model and data; "" if there is no such
    group.
    """
    own = rows.runs[group[0]]["settings"]
    others = [rows.runs[other[0]]["settings"] for other in groups if other is not group]
    others = [s for s in others if all(s.get(key) == own.get(key) for key in ("model", "data"))]
    changed = [key for key in ("weights", *SAME) if any(s.get(key) != own.get(key) for s in others)]
    if own.get("maps") and any(s.get("maps", own["maps"]) != own["maps"] for s in others):
        changed.append("maps")
    if others and not changed:
        return f"images of {rows.folders[group[0]].name}"
    if "weights" in changed:
        numbers = [group[0], *(other[0] for other in groups if other is not group)]
        runs = [rows.runs[i] for i in numbers]
        names = told_apart(runs, [rows.folders[i] if rows.folders else None for i in numbers])
        mark = names[0].removeprefix(f"{own['model']} ").strip("()")
        others_text = [f"{key} {_value_text(own.get(key))}" for key in changed if key != "weights"]
        return ", ".join([mark, *others_text])
    return ", ".join(f"{key} {_value_text(own.get(key))}" for key in changed)


def _value_text(value: Any) -> str:
    if value is None:
        return "default"
    if isinstance(value, dict):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return ", ".join(f"{x:g}" for x in value) if isinstance(value, list) else str(value)


Line = tuple[str, str]  # method, score
MAX_LINES = 500  # of a table: a folder of a stranger may have any number of names
MAX_METRICS = 100
NUMBERS = 2**24  # values that are resampled at a time
IDENTITY = ("model", "weights")  # what identifies the rows of a model
OVERALL = Quantity(
    "removal_mean",
    "points",
    label="mean of removal scores",
    summary="of each image; methods are ranked by it",
)


SHARE = "share of the ceiling"


class Section:
    """Everything that was measured for one model (identified by its weights) on one data set.

    Attributes:
        run: Number of the first of its runs.
        variant: What distinguishes it from another section of the same model and data.
        recorded: Metrics that are described in the run.json of its runs.
    """

    def __init__(
        self,
        model: str,
        weights: str,
        data: str,
        *,
        repeats: int = 2000,
        seed: int = 0,
        run: int = 0,
        variant: str = "",
        ratios: Iterable[float] = (),
        recorded: Mapping[str, Quantity] = MappingProxyType({}),
        rows: Columns,
        positions: np.ndarray,
    ) -> None:
        self.model, self.weights, self.data = model, weights, data
        self.repeats, self.seed = repeats, seed
        self.run, self.variant, self.ratios = run, variant, list(ratios)
        self.recorded = recorded
        self.table: ImageTable[tuple[str, Line]] = ImageTable(
            rows,
            positions,
            ["metric", "method", "score"],
            lambda metric, method, score: (metric, (method, score)),
        )
        self.notes = _last_notes(rows, positions)  # metric -> how it was measured
        own = [name for name in recorded if NOT_COMBINED in self.quantity(name).summary]
        self.notes |= dict.fromkeys(own, NOT_COMBINED)
        self.flags = _flagged_images(rows, positions)  # line -> images whose map is zero or broken

    @property
    def title(self) -> str:
        """The model and the data, and what else distinguishes the section from others."""
        return f"{self.model} on {self.data}{f' ({self.variant})' if self.variant else ''}"

    def quantity(self, metric: str) -> Quantity:
        """What is known of a metric: built in or registered here, or else described in run.json."""
        if metric == OVERALL.name:
            return OVERALL
        known = known_metric(metric)
        return self.recorded.get(metric, Quantity(metric, "%")) if known is None else known.quantity

    @property
    def names(self) -> list[str]:
        """The images in order of name, as in `array`."""
        return self.table.names

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics that were measured, in the order of tables; at most `MAX_METRICS`."""
        return in_table_order({metric for metric, _ in self.table.columns})[:MAX_METRICS]

    @cached_property
    def removal(self) -> list[str]:
        """The metrics of token removal among them."""
        known = ((name, known_metric(name)) for name in self.metrics)
        return [name for name, metric in known if metric is not None and metric.family == "removal"]

    @property
    def shown(self) -> list[str]:
        """The columns of the table; the first decides the ranking."""
        return ([OVERALL.name] if len(self.removal) > 1 else []) + self.metrics

    @cached_property
    def all_lines(self) -> list[Line]:
        """Every method with its score, in order of arrival; of more than `MAX_LINES`, the best."""
        measured = self._measured
        if len(measured) <= MAX_LINES:
            return measured
        first = self.shown[0]
        sign = -1 if self.quantity(first).better == "lower" else 1
        needed = self.removal if first == OVERALL.name else [first]

        def key(line: Line) -> tuple[bool, bool, float]:
            columns = [(name, line) for name in needed if (name, line) in self.table]
            mean = np.mean([self.table.mean(column) for column in columns]) if columns else np.nan
            kept = line[0] == CHANCE or line == self.ceiling
            return kept, not np.isnan(mean), sign * float(np.nan_to_num(mean))

        best = set(sorted(measured, key=key, reverse=True)[:MAX_LINES])
        return [line for line in measured if line in best]

    @cached_property
    def _measured(self) -> list[Line]:
        lines = list(dict.fromkeys(line for _, line in self.table.columns))
        return lines if self.ceiling is None else [*lines, self.ceiling]

    @cached_property
    def searched(self) -> list[Line]:
        """The orders that were searched by removal."""
        lines = dict.fromkeys(line for metric, line in self.table.columns if metric in self.removal)
        return [line for line in lines if line[0].partition(":")[0] == SEARCHED]

    @property
    def ceiling(self) -> Line | None:
        """The line of the best that the searched orders reach; None unless there are several."""
        return (CEILING, self.searched[0][1]) if len(self.searched) > 1 else None

    @property
    def chance(self) -> Line | None:
        """The line of the chance level, if it was measured."""
        return next((line for line in self.lines if line[0] == CHANCE), None)

    @property
    def ranked(self) -> list[Line]:
        """Every method with its score, the best first, without the line of the ceiling."""
        return [line for line in self.lines if line != self.ceiling]

    def share(self, metric: str, line: Line) -> float | None:
        """(score − chance) / (ceiling − chance), of a metric of removal or their mean."""
        keys = [(metric, known) for known in (line, self.chance, self.ceiling) if known is not None]
        if len(keys) < 3 or any(key not in self.cells for key in keys):
            return None
        score, chance, ceiling = (self.cells[key].value for key in keys)
        return (score - chance) / (ceiling - chance) if ceiling != chance else None

    def has(self, metric: str, line: Line) -> bool:
        """Whether a line has values of a metric that was measured."""
        if line == self.ceiling:
            return metric in self.removal and all((metric, one) in self.table for one in self.searched)
        return (metric, line) in self.table

    @property
    def omission(self) -> str:
        """A sentence about what is left out; "" if there is nothing."""
        metrics = len({metric for metric, _ in self.table.columns})
        parts = (
            ("best", len(self.all_lines), len(self._measured), "methods"),
            ("first", len(self.metrics), metrics, "metrics"),
        )
        return " ".join(
            f"The {which} {shown:,} of {count:,} {noun} are listed, {count - shown:,} are left out."
            for which, shown, count, noun in parts
            if shown < count
        )

    def lines_of(self, metric: str) -> list[Line]:
        """The lines that have values of a metric."""
        needed = self.removal if metric == OVERALL.name else [metric]
        return [line for line in self.all_lines if all(self.has(name, line) for name in needed)]

    def array(self, metric: str, line: Line) -> np.ndarray:
        """The value of every image of the section, NaN where there is none."""
        if line == self.ceiling:
            return np.max([self.array(metric, one) for one in self.searched], axis=0)
        if metric == OVERALL.name:
            return np.mean([self.array(name, line) for name in self.removal], axis=0)
        return self.table.array((metric, line))

    def detail(self, metric: str, line: Line) -> np.ndarray | None:
        """(images, numbers) behind the values, NaN where there are none."""
        if line != self.ceiling:
            return self.table.detail((metric, line))
        details = [self.detail(metric, one) for one in self.searched]
        known = [detail for detail in details if detail is not None]
        if len(known) < len(details):
            return None
        values = np.stack([self.array(metric, one) for one in self.searched])
        return np.stack(known)[np.nan_to_num(values, nan=-np.inf).argmax(0), np.arange(values.shape[1])]

    def curve(self, metric: str, line: Line) -> np.ndarray | None:
        """The mean curve over the ratios, as it was measured."""
        detail = self.detail(metric, line)
        if detail is None or detail.shape[1] != len(self.ratios):
            return None
        return np.nanmean(detail, axis=0)

    @cached_property
    def cells(self) -> dict[tuple[str, Line], Cell]:
        """The number of each metric and line, with its interval."""
        columns = [(metric, line) for metric in self.shown for line in self.lines_of(metric)]
        means = [key for key in columns if self.quantity(key[0]).combine is plain_mean]
        cells = self._cells(means)  # all at once: they share their draws
        for metric in dict.fromkeys(
            metric for metric, _ in columns if self.quantity(metric).combine is not plain_mean
        ):
            cells |= self._cells([key for key in columns if key[0] == metric])
        return {key: cells[key] for key in columns}

    def _cells(self, keys: list[tuple[str, Line]]) -> dict[tuple[str, Line], Cell]:
        """The cells of columns that are combined in the same way."""
        if not keys:
            return {}
        step = max(1, NUMBERS // max(1, len(self.table)))
        if len(keys) > step:  # each part has the same draws
            parts = (self._cells(keys[start : start + step]) for start in range(0, len(keys), step))
            return {key: cell for part in parts for key, cell in part.items()}
        metric = keys[0][0]
        values = np.stack([self.array(*key) for key in keys])
        point, samples = bootstrap(
            values,
            self._details(metric, [line for _, line in keys]),
            combine=self.quantity(metric).combine,
            repeats=self.repeats,
            seed=self.seed,
        )
        low, high = interval(samples)
        images = (~np.isnan(values)).sum(1)
        return {
            key: Cell(
                float(point[k]), float(low[k]), float(high[k]), int(images[k]), self.notes.get(key[0], "")
            )
            for k, key in enumerate(keys)
        }

    def _details(self, metric: str, lines: list[Line]) -> np.ndarray | None:
        if self.quantity(metric).combine is plain_mean:
            return None
        parts = [self.detail(metric, line) for line in lines]
        known = [part for part in parts if part is not None]
        return np.stack(known) if len(known) == len(parts) else None

    def first_lines(self, most: int) -> list[Line]:
        """The best lines, at most this many; those of the chance level are kept, as the last ones."""
        rest = [line for line in self.lines[most:] if line[0] == CHANCE]
        return self.lines[: max(0, most - len(rest))] + rest

    @cached_property
    def lines(self) -> list[Line]:
        """Every method with its score, the best first."""
        first = self.shown[0]
        sign = 1 if self.quantity(first).better == "lower" else -1

        def key(line: Line) -> tuple[bool, float]:
            cell = self.cells.get((first, line))
            if cell is None or np.isnan(cell.value):
                return True, 0.0
            return False, sign * cell.value

        return sorted(self.all_lines, key=key)

    def best(self, metric: str) -> Line | None:
        """The best method; None where neither direction is better."""
        sign = self.quantity(metric).sign
        if not sign:
            return None
        values = {
            line: self.cells[metric, line].value for line in self.ranked if (metric, line) in self.cells
        }
        defined = [line for line, value in values.items() if not np.isnan(value)]
        return max(defined, key=lambda line: sign * values[line]) if defined else self.ranked[0]

    def versus(self, baseline: Line | str, metric: str | None = None) -> dict[Line, Cell]:
        """Each line minus the baseline over the images that both have, paired: an interval without 0 is a
        difference.
        """
        metric = metric or self.shown[0]
        base = self.line(baseline) if isinstance(baseline, str) else baseline
        if (metric, base) not in self.cells:
            return {}
        lines = [line for line in self.lines_of(metric) if line != base]
        if not lines:
            return {}
        values, reference = np.stack([self.array(metric, line) for line in lines]), self.array(metric, base)
        if self.quantity(metric).combine is plain_mean:
            gaps = mean_differences(values, reference, repeats=self.repeats, seed=self.seed)
        else:
            gaps = [
                difference(
                    np.stack([own, reference]),
                    self._details(metric, [line, base]),
                    combine=self.quantity(metric).combine,
                    repeats=self.repeats,
                    seed=self.seed,
                )
                for own, line in zip(values, lines, strict=True)
            ]
        images = (~np.isnan(values + reference)).sum(1)
        return {line: Cell(*gaps[k], int(images[k])) for k, line in enumerate(lines)}

    def line(self, name: str) -> Line:
        """The line of a name: a method, or method/score where it has several."""
        for line in self.lines:
            if name in (line[0], "/".join(line)):
                return line
        methods = ", ".join(dict.fromkeys(method for method, _ in self.lines))
        raise InputError(f"no method {name!r} among the rows: {methods}")


def _last_notes(rows: Columns, positions: np.ndarray) -> dict[str, str]:
    noted = positions[rows.filled("note")[positions]][::-1]
    last = noted[rows.groups(["metric"], noted).first]
    return dict(zip(rows.text("metric", last), rows.text("note", last), strict=True))


def _flagged_images(rows: Columns, positions: np.ndarray) -> dict[Line, set[str]]:
    flagged = positions[rows.filled("flag")[positions]]
    images: dict[Line, set[str]] = {}
    names = (rows.text(name, flagged) for name in ("method", "score", "image"))
    for method, score, image in zip(*names, strict=True):
        images.setdefault((method, score), set()).add(image)
    return images


def masked_models(sections: Iterable[Section]) -> list[str]:
    """Models whose patches could not be removed, and were hidden from attention instead."""
    return list(dict.fromkeys(s.model for s in sections if "attention masking" in s.notes.values()))


class Table:
    """The ranking of each model and data set."""

    def __init__(self, sections: list[Section]) -> None:
        self.sections = sections

    @classmethod
    def of(cls, rows: Rows, *, repeats: int = 2000, seed: int = 0) -> Table:
        """Group runs that were measured with the same settings, and summarize each group."""
        columns = rows.columns()
        if not len(columns):
            return cls([])
        runs = group_runs(rows)
        group_of = {run: number for number, group in enumerate(runs) for run in group}
        group = np.array([group_of[run] for run in range(len(rows.runs))])[columns.run]
        groups = Groups.of([group, *(columns.codes[name] for name in IDENTITY)])
        sections = []
        for number, first in enumerate(groups.first):
            own = runs[group[first]]
            model, weights = (columns.text(name, groups.first[number : number + 1])[0] for name in IDENTITY)
            if model is None or weights is None:
                raise InputError(f"run {own[0]}: expected rows that name their model and weights, got others")
            settings = rows.runs[own[0]]["settings"]
            sections.append(
                Section(
                    model,
                    weights,
                    settings.get("data", ""),
                    repeats=repeats,
                    seed=seed,
                    run=own[0],
                    variant=distinction(rows, own, runs),
                    ratios=settings.get("ratios", ()),
                    recorded={
                        record["name"]: quantity_of_record(record)
                        for run in own
                        for record in rows.runs[run].get("about", {}).get("quantities", ())
                    },
                    rows=columns,
                    positions=groups.rows(number),
                )
            )
        return cls(sections)

    def records(self) -> Iterator[dict[str, Any]]:
        """One dict for each number; `variant` is set where another section has the same model and data."""
        for section in self.sections:
            for line in section.lines:
                for metric in section.shown:
                    cell = section.cells.get((metric, line))
                    if cell is None:
                        continue
                    share = section.share(metric, line)
                    yield {
                        "model": section.model,
                        "weights": section.weights,
                        "data": section.data,
                        "method": line[0],
                        "score": line[1],
                        "metric": metric,
                        "value": cell.value,
                        "low": cell.low,
                        "high": cell.high,
                        "images": cell.images,
                        "flagged": len(section.flags.get(line, ())),
                        "better": section.quantity(metric).better,
                        "note": cell.note,
                        "variant": section.variant,
                        **({} if section.ceiling is None else {"share": share}),
                    }

    def to_pandas(self) -> pd.DataFrame:
        """One line a number, best methods first."""
        import pandas as pd

        return pd.DataFrame(list(self.records()))

    def csv(self) -> str:
        """The same as CSV text, with four decimals."""
        frame = self.to_pandas().map(csv_text)
        return frame.to_csv(index=False, float_format="%.4f", na_rep="nan", lineterminator="\n")

    def markdown(self) -> str:
        """A Markdown table for each section: value [low, high], best in bold."""
        parts = []
        for section in self.sections:
            best = {metric: section.best(metric) for metric in section.shown}
            shown = [section.quantity(metric) for metric in section.shown]
            heads = [markdown_text(f"{q.title}{q.arrow}") for q in shown]
            with_share = section.ceiling is not None and section.chance is not None
            heads += [SHARE] if with_share else []
            images = plural(len(section.table), "image")
            title, weights = markdown_text(section.title), markdown_text(section.weights)
            lines = [
                f"**{title}** ({weights}), {images}; 95 % intervals",
                "",
                f"| method | score | {' | '.join(heads)} |",
                f"| --- | --- |{' ---: |' * len(heads)}",
            ]
            for line in section.lines:
                cells = [
                    _cell_text(section.cells.get((q.name, line)), q, best[q.name] == line) for q in shown
                ]
                cells += [share_text(section.share(section.shown[0], line))] if with_share else []
                names = " | ".join(markdown_text(name) for name in line)
                lines.append(f"| {names} | {' | '.join(cells)} |")
            uncombined = [metric for metric in section.shown if section.notes.get(metric) == NOT_COMBINED]
            notes = [f"{markdown_text(metric)}: {NOT_COMBINED}" for metric in uncombined]
            for note in (small_sample_note(len(section.table)), section.omission, *notes):
                lines += ["", note] if note else []
            parts.append("\n".join(lines))
        return "\n\n".join(parts) + "\n"

    __str__ = markdown

    def latex(self) -> str:
        """A LaTeX table for each section, for the package booktabs: value [low, high], best in bold."""
        parts = []
        for section in self.sections:
            best = {metric: section.best(metric) for metric in section.shown}
            shown = [section.quantity(metric) for metric in section.shown]
            with_share = section.ceiling is not None and section.chance is not None
            heads = ["method", "score", *(f"{q.title}{q.arrow}" for q in shown)]
            heads += [SHARE] if with_share else []
            images = plural(len(section.table), "image")
            caution = small_sample_note(len(section.table))
            caption = f"{section.title}, {images}; 95 % intervals. {caution}".strip()
            lines = [
                r"\begin{table}",
                r"\centering",
                rf"\caption{{{latex_text(caption)}}}",
                rf"\begin{{tabular}}{{ll{'r' * (len(heads) - 2)}}}",
                r"\toprule",
                rf"{' & '.join(map(latex_text, heads))} \\",
                r"\midrule",
            ]
            for line in section.lines:
                cells = [
                    _latex_cell(section.cells.get((q.name, line)), q, best[q.name] == line) for q in shown
                ]
                cells += [latex_text(share_text(section.share(section.shown[0], line)))] if with_share else []
                lines.append(rf"{' & '.join([*map(latex_text, line), *cells])} \\")
            parts.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]))
        return "\n\n".join(parts) + "\n"


def _latex_cell(cell: Cell | None, shown: Quantity, bold: bool) -> str:
    if cell is None or np.isnan(cell.value):
        return "--"
    value, low, high = (latex_text(shown.text(number)) for number in (cell.value, cell.low, cell.high))
    best = rf"\textbf{{{value}}}"
    return rf"{best if bold else value} {{\scriptsize [{low}, {high}]}}"


def _cell_text(cell: Cell | None, shown: Quantity, bold: bool) -> str:
    if cell is None or np.isnan(cell.value):
        return ""
    value = shown.text(cell.value)
    return f"{f'**{value}**' if bold else value} [{shown.text(cell.low)}, {shown.text(cell.high)}]"


def share_text(share: float | None) -> str:
    """
    >>> share_text(0.857), share_text(None)
    ('86 %', '')
    """
    return "" if share is None else f"{100 * share:.0f} %"
