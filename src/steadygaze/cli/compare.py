"""`steadygaze compare-models`: two stress runs in, what changed out; an HTML file and a table beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as Shown

from steadygaze.cli.running import say, wide
from steadygaze.report.changes import short_list
from steadygaze.report.compare import write_comparison
from steadygaze.runs.stress_compare import Comparison, compare
from steadygaze.runs.stress_numbers import label
from steadygaze.runs.wording import caution, counted

CLASSES = 8  # that lost most, and that gained most
STYLE = {"better": "green", "worse": "red"}


def run(before: str, after: str, out: Path | None, setting: str, method: str, show: int, pictures: bool,
        console: Console | None = None) -> int:  # fmt: skip
    """Compare, print and write; gives the exit code."""
    console = console or wide(Console())
    folders = [
        [Path(piece.strip()) for piece in text.split(",") if piece.strip()] for text in (before, after)
    ]
    found = compare(folders[0], folders[1], setting=setting)
    _heading(found, console)
    console.print(_changes(found))
    if found.turned:
        _classes(found, console)
        _turned(found, show, console)
    if found.before[0].pictures and (few := caution(found.before[0].pictures)):
        say(console, few, "yellow")
    for note in found.notes:
        say(console, f"note: {note}", "yellow")
    path = out or folders[1][0] / "compare.html"
    for file in write_comparison(found, path, method=method, show=show, pictures=pictures):
        say(console, f"wrote {file}")
    return 0


def _heading(found: Comparison, console: Console) -> None:
    one, two = found.before[0], found.after[0]
    seeds = (
        f"; {len(found.before)} and {len(found.after)} seeds"
        if max(len(found.before), len(found.after)) > 1
        else ""
    )
    models = f"before: {one.model} ({one.weights}); after: {two.model} ({two.weights})"
    say(console, f"{models}; {counted(one.pictures, 'picture')} of {one.data}{seeds}", "bold")


def _changes(found: Comparison) -> Shown:
    shown = Shown(
        title="after minus before, 95 % interval over the same pictures",
        title_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for column in ("setting", "metric"):
        shown.add_column(column, no_wrap=True)
    for column in ("before", "after", "difference", "interval", "p"):
        shown.add_column(column, justify="right", no_wrap=True)
    shown.add_column("")
    for c in short_list(found.changes):
        digits = 1 if c.scale == 100 or c.metric in ("mce", "relative_mce", "ce", "mfr") else 3
        sides = []
        for spread in (c.before, c.after):
            several = f" ±{c.scale * spread.deviation:.{digits}f}" if spread.seeds > 1 else ""
            sides.append(
                "no number" if np.isnan(spread.mean) else f"{c.scale * spread.mean:.{digits}f}{several}"
            )
        numbers = [f"{c.scale * v:+.{digits}f}" for v in (c.difference, c.low, c.high)]
        chance = "" if c.p is None else f"{c.p:.3f}"
        shown.add_row(c.setting, label(c.metric), *sides, numbers[0], f"[{numbers[1]}, {numbers[2]}]".replace("[", "\\["), chance,
                      c.verdict, style=STYLE.get(c.verdict))  # fmt: skip
    return shown


def _classes(found: Comparison, console: Console) -> None:
    lost = [c for c in found.classes if c.difference < 0][:CLASSES]
    gained = [c for c in found.classes[::-1] if c.difference > 0][:CLASSES]
    for words, some in (("lost", lost), ("gained", gained)):
        if not some:
            say(console, f"no class {words} right answers ({found.setting})")
            continue
        say(console, f"classes that {words} most ({found.setting}):")
        for c in some:
            name = found.class_names.get(c.label, "").split(",")[0]
            span = f"[{100 * c.low:+.0f}, {100 * c.high:+.0f}]"
            sure = "" if c.verdict == "unclear" else f", {c.verdict}"
            ends = f"{100 * c.before.value:.0f} % to {100 * c.after.value:.0f} %"
            say(console, f"  {c.label} {name}: {ends}, {span}, {counted(c.count, 'picture')}{sure}")


def _turned(found: Comparison, show: int, console: Console) -> None:
    for way in ("wrong", "right"):
        names = found.turned[way]
        more = f", and {len(names) - show} more" if len(names) > show else ""
        say(
            console,
            f"turned {way} ({found.setting}): {len(names)}{': ' if names and show else ''}{', '.join(names[:show])}{more}",
        )
