"""`steadygaze card`: two models in, one page out: accuracy, robustness, attention, faithfulness, maps and classes before and after."""

from __future__ import annotations

from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from steadygaze.cli.running import progress, say, wide
from steadygaze.cli.verify import print_masked_models
from steadygaze.report.card import write_card
from steadygaze.report.changes import short_list
from steadygaze.runs.card import Ask, Shift, faithfulness, measured
from steadygaze.runs.loop import world
from steadygaze.runs.rows import Rows, read_run
from steadygaze.runs.stress_compare import Change, compare
from steadygaze.runs.stress_numbers import label
from steadygaze.runs.verify.summary import masked_models
from steadygaze.runs.wording import caution, number
from steadygaze.runs.wording import label as faithful_label

STYLE = {"better": "green", "worse": "red"}


def run(before: str, after: str, ask: Ask, method: str, show: int, pictures: bool) -> int:
    """Measure what is missing, compare, print and write; gives the exit code."""
    place, console, notes = world(), wide(Console()), Console(stderr=True)
    try:
        folders = [
            measured(
                side,
                which,
                ask,
                place,
                lambda verb, total: progress(total, place, notes, verb, f"pictures, {verb}"),
            )
            for side, which in ((before, "before"), (after, "after"))
        ]
        place.wait()
        if place.rank:
            return 0
        found = compare([folders[0] / "stress"], [folders[1] / "stress"])
        shifts = faithfulness(folders[0] / "verify", folders[1] / "verify")
        console.print(_numbers(short_list(found.changes)))
        console.print(_faithful(shifts))
        if few := caution(found.before[0].pictures):
            say(console, few, "yellow")
        for note in found.notes:
            say(console, f"note: {note}", "yellow")
        sections = [Rows.read(folder / "verify").table().sections for folder in folders]
        print_masked_models([s for side in sections for s in side], console)
        runs = [read_run(folder / kind) for folder in folders for kind in ("stress", "verify")]
        path = ask.out / "card.html"
        masked = [bool(masked_models(side)) for side in sections]
        for file in write_card(
            found, shifts, path, runs, method=method, show=show, pictures=pictures, masked=masked
        ):
            say(console, f"wrote {file}")
        return 0
    except KeyboardInterrupt:
        say(notes, f"stopped; the same command goes on where it stopped ({ask.out})")
        return 130
    finally:
        place.end()


def _numbers(changes: list[Change]) -> Table:
    table = Table(
        "setting",
        "metric",
        "before",
        "after",
        "difference",
        "95 %",
        box=SIMPLE,
        title="accuracy, robustness, attention",
    )
    for c in changes:
        gap = f"{c.scale * c.difference:+.3g}"
        span = f"{c.scale * c.low:+.3g} to {c.scale * c.high:+.3g}"
        sides = (f"{c.scale * c.before.mean:.4g}", f"{c.scale * c.after.mean:.4g}")
        table.add_row(c.setting, label(c.metric), *sides, gap, span, style=STYLE.get(c.verdict))
    return table


def _faithful(shifts: list[Shift]) -> Table:
    table = Table(
        "method", "metric", "before", "after", "difference", "95 %", box=SIMPLE, title="faithfulness"
    )
    for s in shifts:
        sides = (number(s.before, s.metric), number(s.after, s.metric))
        span = f"{s.low:+.3g} to {s.high:+.3g}"
        table.add_row(
            s.method,
            faithful_label(s.metric),
            *sides,
            f"{s.difference:+.3g}",
            span,
            style=STYLE.get(s.verdict),
        )
    return table


def default_out(after: str) -> Path:
    """Beside the second model, if it is a folder."""
    there = Path(after)
    return there / "card" if there.is_dir() else Path("steadygaze-card")
