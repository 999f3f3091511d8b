"""From rows to a ranking: one section for each model and data set, one line for each method and score, one cell a
metric."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from steadygaze.errors import BadInput
from steadygaze.faithfulness.metric import METRICS
from steadygaze.faithfulness.metric import mean as plain_mean
from steadygaze.runs.grouping import grouped, told_apart
from steadygaze.runs.statistics import bootstrap, difference, interval
from steadygaze.runs.wording import OVERALL, arrow, better, caution, counted, label, number

if TYPE_CHECKING:
    import pandas as pd

    from steadygaze.runs.rows import Rows

Line = tuple[str, str]  # method, score


@dataclass(frozen=True)
class Cell:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float
    images: int
    note: str = ""


@dataclass
class Section:
    """All that was measured of one model (by its weights) on one data set."""

    model: str
    weights: str
    data: str
    repeats: int
    seed: int
    run: int = 0  # the first of its runs
    variant: str = ""  # what tells it from another section of the same model and data
    images: dict[str, int] = field(default_factory=dict)  # name -> place
    values: dict[tuple[str, Line], dict[int, float]] = field(default_factory=dict)
    details: dict[tuple[str, Line], dict[int, Any]] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    flags: dict[Line, set[int]] = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        place = self.images.setdefault(row["image"], len(self.images))
        line = row["method"], row["score"]
        self.values.setdefault((row["metric"], line), {})[place] = (
            float("nan") if row["value"] is None else row["value"]
        )
        if row.get("detail"):
            detail = np.array([np.nan if x is None else x for x in row["detail"]], dtype=np.float32)
            self.details.setdefault((row["metric"], line), {})[place] = detail
        if row.get("note"):
            self.notes[row["metric"]] = row["note"]
        if row.get("flag"):
            self.flags.setdefault(line, set()).add(place)

    @property
    def title(self) -> str:
        """The model and the data, and what else tells it from other sections."""
        return f"{self.model} on {self.data}{f' ({self.variant})' if self.variant else ''}"

    @cached_property
    def names(self) -> list[str]:
        """The images in order of name, as in `array`: intervals do not depend on the order in which rows came."""
        return sorted(self.images)

    @cached_property
    def order(self) -> np.ndarray:
        place = {name: i for i, name in enumerate(self.names)}
        return np.array([place[name] for name in self.images], dtype=int)

    @cached_property
    def metrics(self) -> list[str]:
        there = {name for name, _ in self.values}
        return [name for name in METRICS if name in there] + sorted(there - set(METRICS))

    @cached_property
    def removal(self) -> list[str]:
        return [name for name in self.metrics if name in METRICS and METRICS[name].family == "removal"]

    @property
    def shown(self) -> list[str]:
        """The columns of the table."""
        return ([OVERALL] if len(self.removal) > 1 else []) + self.metrics

    @cached_property
    def all_lines(self) -> list[Line]:
        return list(dict.fromkeys(line for _, line in self.values))

    def lines_of(self, metric: str) -> list[Line]:
        wanted = self.removal if metric == OVERALL else [metric]
        return [line for line in self.all_lines if all((name, line) in self.values for name in wanted)]

    def array(self, metric: str, line: Line) -> np.ndarray:
        """The values of every image of the section, NaN where there is none."""
        if metric == OVERALL:
            return np.mean([self.array(name, line) for name in self.removal], axis=0)
        out = np.full(len(self.images), np.nan)
        there = self.values[metric, line]
        out[self.order[list(there)]] = list(there.values())
        return out

    def detail(self, metric: str, line: Line) -> np.ndarray | None:
        """(images, numbers) behind the values, NaN where there is none."""
        there = self.details.get((metric, line))
        if not there:
            return None
        out = np.full((len(self.images), len(next(iter(there.values())))), np.nan)
        out[self.order[list(there)]] = np.stack(list(there.values()))
        return out

    def curve(self, metric: str, line: Line) -> np.ndarray | None:
        """The mean curve over the ratios, as it was measured (percent, not turned over)."""
        detail = self.detail(metric, line)
        if detail is None or detail.shape[1] != len(self.ratios):
            return None
        return np.nanmean(detail, axis=0)

    @cached_property
    def cells(self) -> dict[tuple[str, Line], Cell]:
        found = {}
        for metric in self.shown:
            lines = self.lines_of(metric)
            if not lines:
                continue
            values = np.stack([self.array(metric, line) for line in lines])
            point, samples = bootstrap(
                values,
                self._details(metric, lines),
                combine=combine_of(metric),
                repeats=self.repeats,
                seed=self.seed,
            )
            low, high = interval(samples)
            for k, line in enumerate(lines):
                count = int((~np.isnan(values[k])).sum())
                found[metric, line] = Cell(
                    float(point[k]), float(low[k]), float(high[k]), count, self.notes.get(metric, "")
                )
        return found

    def _details(self, metric: str, lines: list[Line]) -> np.ndarray | None:
        if combine_of(metric) is plain_mean:
            return None
        parts = [self.detail(metric, line) for line in lines]
        return None if any(part is None for part in parts) else np.stack(parts)  # type: ignore[arg-type]

    @cached_property
    def lines(self) -> list[Line]:
        """Every method with its score, the best first."""
        first = self.shown[0]
        sign = 1 if better(first) == "lower" else -1

        def key(line: Line) -> tuple[bool, float]:
            cell = self.cells.get((first, line))
            missing = cell is None or np.isnan(cell.value)
            return missing, 0.0 if missing or cell is None else sign * cell.value

        return sorted(self.all_lines, key=key)

    def best(self, metric: str) -> Line | None:
        """None where neither direction is better."""
        if better(metric) == "neither":
            return None
        sign = 1 if better(metric) == "higher" else -1
        there = [
            line
            for line in self.lines
            if (metric, line) in self.cells and not np.isnan(self.cells[metric, line].value)
        ]
        return max(there, key=lambda line: sign * self.cells[metric, line].value) if there else self.lines[0]

    def versus(self, baseline: Line | str, metric: str | None = None) -> dict[Line, Cell]:
        """Each method minus the baseline, over the images that both have; paired, so an interval without zero is a
        real difference."""
        metric = metric or self.shown[0]
        base = self.line(baseline) if isinstance(baseline, str) else baseline
        found = {}
        for line in self.lines_of(metric):
            if line == base or (metric, base) not in self.cells:
                continue
            values = np.stack([self.array(metric, line), self.array(metric, base)])
            how = {"combine": combine_of(metric), "repeats": self.repeats, "seed": self.seed}
            value, low, high = difference(values, self._details(metric, [line, base]), **how)
            found[line] = Cell(value, low, high, int((~np.isnan(values).any(0)).sum()))
        return found

    def line(self, name: str) -> Line:
        """The line that `name` means: a method, or method/score where it has several."""
        for line in self.lines:
            if name in (line[0], "/".join(line)):
                return line
        raise BadInput(
            f"no method {name!r} among the rows: {', '.join(dict.fromkeys(m for m, _ in self.lines))}"
        )


def masked_models(sections: Iterable[Section]) -> list[str]:
    """Models whose patches could not be removed, and were hidden from attention instead."""
    return list(dict.fromkeys(s.model for s in sections if "attention masking" in s.notes.values()))


def combine_of(metric: str) -> Any:
    return METRICS[metric].combine if metric in METRICS else plain_mean


@dataclass(frozen=True)
class Table:
    """The ranking of each model and data set."""

    sections: list[Section]

    @classmethod
    def of(cls, rows: Rows, *, repeats: int = 2000, seed: int = 0) -> Table:
        sections: dict[tuple[int, str, str], Section] = {}
        groups = grouped(rows)
        home = {run: group for group in groups for run in group}
        for run, row in rows.everything():
            if "unreadable" in row:
                continue
            first, model, weights = key = home[run][0], row["model"], row["weights"]
            if key not in sections:
                settings, variant = rows.runs[first]["settings"], told_apart(rows, home[run], groups)
                ratios = list(settings.get("ratios", []))
                sections[key] = Section(
                    model, weights, settings.get("data", ""), repeats, seed, first, variant, ratios=ratios
                )
            sections[key].add(row)
        return cls(list(sections.values()))

    def records(self) -> Iterator[dict[str, Any]]:
        """One dict for each number: model, data, method, score, metric, value, low, high, images, better, note,
        and variant where another section has the same model and data."""
        for section in self.sections:
            for line in section.lines:
                for metric in section.shown:
                    cell = section.cells.get((metric, line))
                    if cell is not None:
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
                            "better": better(metric),
                            "note": cell.note,
                            "variant": section.variant,
                        }

    def to_pandas(self) -> pd.DataFrame:
        """One line a number, best methods first."""
        import pandas as pd

        return pd.DataFrame(list(self.records()))

    def csv(self) -> str:
        """The same as text."""
        out, records = io.StringIO(), list(self.records())
        if records:
            writer = csv.DictWriter(out, list(records[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(
                {k: f"{v:.4f}" if isinstance(v, float) else v for k, v in record.items()}
                for record in records
            )
        return out.getvalue()

    def markdown(self) -> str:
        """A Markdown table for each section: value [low, high], best in bold."""
        parts = []
        for section in self.sections:
            best = {metric: section.best(metric) for metric in section.shown}
            head = [f"{label(m)}{arrow(m)}" for m in section.shown]
            lines = [
                f"**{section.title}** ({section.weights}), {counted(len(section.images), 'picture')}; 95 % intervals",
                "",
                f"| method | score | {' | '.join(head)} |",
                f"| --- | --- |{' ---: |' * len(head)}",
            ]
            for line in section.lines:
                cells = [
                    _text(section.cells.get((metric, line)), metric, best[metric] == line)
                    for metric in section.shown
                ]
                lines.append(f"| {line[0]} | {line[1]} | {' | '.join(cells)} |")
            lines += ["", few] if (few := caution(len(section.images))) else []
            parts.append("\n".join(lines))
        return "\n\n".join(parts) + "\n"

    __str__ = markdown


def _text(cell: Cell | None, metric: str, strong: bool) -> str:
    if cell is None or np.isnan(cell.value):
        return ""
    value = number(cell.value, metric)
    return f"{f'**{value}**' if strong else value} [{number(cell.low, metric)}, {number(cell.high, metric)}]"
