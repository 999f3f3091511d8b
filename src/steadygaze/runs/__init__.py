"""Runs over many images: rows, the resumable loop, tables and comparisons.

The views of rows are entered into `views.VIEWS` here; their modules are imported when they are needed first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from steadygaze.progress import OnProgress
from steadygaze.runs.views import VIEWS

if TYPE_CHECKING:
    from steadygaze.runs.card import Card
    from steadygaze.runs.ranking import Table
    from steadygaze.runs.rows import Rows


def _text(rows: Rows) -> str:
    from steadygaze.runs.display import rows_text

    return rows_text(rows)


def _html(rows: Rows) -> str:
    from steadygaze.runs.display import rows_html

    return rows_html(rows)


def _file(rows: Rows, path: Path, partition: str | None, on_progress: OnProgress) -> Path:
    from steadygaze.runs.export import export_rows

    return export_rows(rows, path, partition, on_progress)


def _table(rows: Rows, *, repeats: int, seed: int) -> Table:
    from steadygaze.runs.ranking import Table

    return Table.of(rows, repeats=repeats, seed=seed)


def _cards(rows: Rows, *, repeats: int, seed: int) -> list[Card]:
    from steadygaze.runs.card import Card
    from steadygaze.runs.suite import all_suites

    return Card.of(rows, all_suites(), repeats=repeats, seed=seed)


VIEWS |= {"text": _text, "html": _html, "file": _file, "table": _table, "cards": _cards}
