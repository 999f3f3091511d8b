"""From rows to a ranking: one section for each model and data set, one line for each method and score, one
cell a metric.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from steadygaze.errors import BadInput
from steadygaze.faithfulness.metric import METRICS, in_table_order
from steadygaze.quantity import Quantity
from steadygaze.quantity import mean as plain_mean
from steadygaze.runs.messages import markdown_text, plural, small_sample_note
from steadygaze.runs.table import Cell, ImageTable, bootstrap, difference, interval
from steadygaze.runs.verify.grouping import distinction, group_runs

if TYPE_CHECKING:
    import pandas as pd

    from steadygaze.runs.rows import Row, Rows

Line = tuple[str, str]  # method, score
OVERALL = Quantity(
    "removal_mean",
    "%",
    label="mean of removal scores",
    summary="the mean of an image's removal scores; methods are ranked by it",
)


def quantity(metric: str) -> Quantity:
    """What is known of a metric by name; one that is not registered is taken to be a percentage."""
    if metric == OVERALL.name:
        return OVERALL
    return METRICS[metric] if metric in METRICS else Quantity(metric, "%")


class Section:
    """Everything that was measured for one model (identified by its weights) on one data set.

    run: number of the first of its runs
    variant: what distinguishes it from another section of the same model and data
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
    ) -> None:
        self.model, self.weights, self.data = model, weights, data
        self.repeats, self.seed = repeats, seed
        self.run, self.variant, self.ratios = run, variant, list(ratios)
        self.table = ImageTable[tuple[str, Line]]()  # columns are (metric, (method, score))
        self.notes: dict[str, str] = {}  # metric -> how it was measured
        self.flags: dict[Line, set[str]] = {}  # line -> images whose map is zero or broken

    def add(self, row: Row) -> None:
        """Add one row."""
        line = row["method"], row["score"]
        self.table.add((row["metric"], line), row["image"], row["value"], row.get("detail"))
        if row.get("note"):
            self.notes[row["metric"]] = row["note"]
        if row.get("flag"):
            self.flags.setdefault(line, set()).add(row["image"])

    @property
    def title(self) -> str:
        """The model and the data, and what else distinguishes the section from others."""
        return f"{self.model} on {self.data}{f' ({self.variant})' if self.variant else ''}"

    @property
    def names(self) -> list[str]:
        """The images in order of name, as in `array`."""
        return self.table.names

    @cached_property
    def metrics(self) -> list[str]:
        """The metrics that were measured, in the order of tables."""
        return in_table_order({metric for metric, _ in self.table.columns})

    @cached_property
    def removal(self) -> list[str]:
        """The metrics of token removal among them."""
        return [name for name in self.metrics if name in METRICS and METRICS[name].family == "removal"]

    @property
    def shown(self) -> list[str]:
        """The columns of the table; the first decides the ranking."""
        return ([OVERALL.name] if len(self.removal) > 1 else []) + self.metrics

    @cached_property
    def all_lines(self) -> list[Line]:
        """Every method with its score, in order of arrival."""
        return list(dict.fromkeys(line for _, line in self.table.columns))

    def lines_of(self, metric: str) -> list[Line]:
        """The lines that have values of a metric."""
        needed = self.removal if metric == OVERALL.name else [metric]
        return [line for line in self.all_lines if all((name, line) in self.table for name in needed)]

    def array(self, metric: str, line: Line) -> np.ndarray:
        """The value of every image of the section, NaN where there is none."""
        if metric == OVERALL.name:
            return np.mean([self.array(name, line) for name in self.removal], axis=0)
        return self.table.array((metric, line))

    def detail(self, metric: str, line: Line) -> np.ndarray | None:
        """(images, numbers) behind the values, NaN where there are none."""
        return self.table.detail((metric, line))

    def curve(self, metric: str, line: Line) -> np.ndarray | None:
        """The mean curve over the ratios, as it was measured."""
        detail = self.detail(metric, line)
        if detail is None or detail.shape[1] != len(self.ratios):
            return None
        return np.nanmean(detail, axis=0)

    @cached_property
    def cells(self) -> dict[tuple[str, Line], Cell]:
        """The number of each metric and line, with its interval."""
        cells = {}
        for metric in self.shown:
            lines = self.lines_of(metric)
            if not lines:
                continue
            values = np.stack([self.array(metric, line) for line in lines])
            point, samples = bootstrap(
                values,
                self._details(metric, lines),
                combine=quantity(metric).combine,
                repeats=self.repeats,
                seed=self.seed,
            )
            low, high = interval(samples)
            for k, line in enumerate(lines):
                images = int((~np.isnan(values[k])).sum())
                note = self.notes.get(metric, "")
                cells[metric, line] = Cell(float(point[k]), float(low[k]), float(high[k]), images, note)
        return cells

    def _details(self, metric: str, lines: list[Line]) -> np.ndarray | None:
        if quantity(metric).combine is plain_mean:
            return None
        parts = [self.detail(metric, line) for line in lines]
        known = [part for part in parts if part is not None]
        return np.stack(known) if len(known) == len(parts) else None

    @cached_property
    def lines(self) -> list[Line]:
        """Every method with its score, the best first."""
        first = self.shown[0]
        sign = 1 if quantity(first).better == "lower" else -1

        def key(line: Line) -> tuple[bool, float]:
            cell = self.cells.get((first, line))
            if cell is None or np.isnan(cell.value):
                return True, 0.0
            return False, sign * cell.value

        return sorted(self.all_lines, key=key)

    def best(self, metric: str) -> Line | None:
        """The best line; None where neither direction is better."""
        sign = quantity(metric).sign
        if not sign:
            return None
        values = {line: self.cells[metric, line].value for line in self.lines if (metric, line) in self.cells}
        defined = [line for line, value in values.items() if not np.isnan(value)]
        return max(defined, key=lambda line: sign * values[line]) if defined else self.lines[0]

    def versus(self, baseline: Line | str, metric: str | None = None) -> dict[Line, Cell]:
        """Each line minus the baseline over the images that both have, paired: an interval without 0 is a
        difference.
        """
        metric = metric or self.shown[0]
        base = self.line(baseline) if isinstance(baseline, str) else baseline
        if (metric, base) not in self.cells:
            return {}
        cells = {}
        for line in self.lines_of(metric):
            if line == base:
                continue
            values = np.stack([self.array(metric, line), self.array(metric, base)])
            value, low, high = difference(
                values,
                self._details(metric, [line, base]),
                combine=quantity(metric).combine,
                repeats=self.repeats,
                seed=self.seed,
            )
            cells[line] = Cell(value, low, high, int((~np.isnan(values).any(0)).sum()))
        return cells

    def line(self, name: str) -> Line:
        """The line of a name: a method, or method/score where it has several."""
        for line in self.lines:
            if name in (line[0], "/".join(line)):
                return line
        methods = ", ".join(dict.fromkeys(method for method, _ in self.lines))
        raise BadInput(f"no method {name!r} among the rows: {methods}")


def masked_models(sections: Iterable[Section]) -> list[str]:
    """Models whose patches could not be removed, and were hidden from attention instead."""
    return list(dict.fromkeys(s.model for s in sections if "attention masking" in s.notes.values()))


class Table:
    """The ranking of each model and data set."""

    def __init__(self, sections: list[Section]) -> None:
        self.sections = sections

    @classmethod
    def of(cls, rows: Rows, *, repeats: int = 2000, seed: int = 0) -> Table:
        """Group runs that were measured with the same settings, and summarise each group."""
        sections: dict[tuple[int, str, str], Section] = {}
        groups = group_runs(rows)
        group_of = {run: group for group in groups for run in group}
        for run, row in rows.everything():
            if "unreadable" in row:
                continue
            first = group_of[run][0]
            key = first, row["model"], row["weights"]
            if key not in sections:
                settings = rows.runs[first]["settings"]
                sections[key] = Section(
                    row["model"],
                    row["weights"],
                    settings.get("data", ""),
                    repeats=repeats,
                    seed=seed,
                    run=first,
                    variant=distinction(rows, group_of[run], groups),
                    ratios=settings.get("ratios", ()),
                )
            sections[key].add(row)
        return cls(list(sections.values()))

    def records(self) -> Iterator[dict[str, Any]]:
        """One dict for each number; `variant` is set where another section has the same model and data."""
        for section in self.sections:
            for line in section.lines:
                for metric in section.shown:
                    cell = section.cells.get((metric, line))
                    if cell is None:
                        continue
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
                        "better": quantity(metric).better,
                        "note": cell.note,
                        "variant": section.variant,
                    }

    def to_pandas(self) -> pd.DataFrame:
        """One line a number, best methods first."""
        import pandas as pd

        return pd.DataFrame(list(self.records()))

    def csv(self) -> str:
        """The same as CSV text, with four decimals."""
        return self.to_pandas().to_csv(index=False, float_format="%.4f", na_rep="nan", lineterminator="\n")

    def markdown(self) -> str:
        """A Markdown table for each section: value [low, high], best in bold."""
        parts = []
        for section in self.sections:
            best = {metric: section.best(metric) for metric in section.shown}
            shown = [quantity(metric) for metric in section.shown]
            heads = " | ".join(markdown_text(f"{q.title}{q.arrow}") for q in shown)
            images = plural(len(section.table), "image")
            title, weights = markdown_text(section.title), markdown_text(section.weights)
            lines = [
                f"**{title}** ({weights}), {images}; 95 % intervals",
                "",
                f"| method | score | {heads} |",
                f"| --- | --- |{' ---: |' * len(shown)}",
            ]
            for line in section.lines:
                cells = [
                    _cell_text(section.cells.get((q.name, line)), q, best[q.name] == line) for q in shown
                ]
                names = " | ".join(markdown_text(name) for name in line)
                lines.append(f"| {names} | {' | '.join(cells)} |")
            note = small_sample_note(len(section.table))
            lines += ["", note] if note else []
            parts.append("\n".join(lines))
        return "\n\n".join(parts) + "\n"

    __str__ = markdown


def _cell_text(cell: Cell | None, shown: Quantity, bold: bool) -> str:
    if cell is None or np.isnan(cell.value):
        return ""
    value = shown.text(cell.value)
    return f"{f'**{value}**' if bold else value} [{shown.text(cell.low)}, {shown.text(cell.high)}]"
