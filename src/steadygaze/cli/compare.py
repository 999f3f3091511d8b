"""`steadygaze compare-models`: two stress runs in, what changed out; an HTML file and a table beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from steadygaze.cli.output import Column, print_line, print_table, progress_bar, wide
from steadygaze.report.comparison import short_list, write_comparison
from steadygaze.report.pages import records_csv, write_all
from steadygaze.robustness.by_class import ClassChange, Spread
from steadygaze.runs.card import Change
from steadygaze.runs.compare import SEEN, UNSEEN, Comparison, compare, group_changes, read_seen
from steadygaze.runs.statistics import plural, small_sample_note

CLASSES = 8  # that lost most, and that gained most
STYLE = {"better": "green", "worse": "red"}
TURNED = {"wrong": "newly wrong", "right": "newly correct"}


def run(
    before: str,
    after: str,
    out: Path | None,
    setting: str,
    show: int,
    images: bool,
    console: Console | None = None,
    *,
    seen: str | None = None,
    by_class: bool = False,
) -> int:
    """Compare, print and write; returns the exit code."""
    console = console or wide(Console())
    folders = [_folders(before), _folders(after)]
    with progress_bar(Console(stderr=True)) as on_progress:
        comparison = compare(folders[0], folders[1], setting=setting, on_progress=on_progress)
    _print_heading(comparison, console)
    _print_changes(comparison, console)
    records = _print_groups(comparison, seen, console) if seen is not None else []
    if comparison.turned:
        if by_class:
            _print_every_class(comparison, seen, console)
        else:
            _print_classes(comparison, console)
        _print_turned(comparison, show, console)
    count = comparison.before[0].image_count
    if count and (caution := small_sample_note(count)):
        print_line(console, caution, "yellow")
    for note in comparison.notes:
        print_line(console, f"note: {note}", "yellow")
    path = out or folders[1][0] / "compare.html"
    files = write_comparison(comparison, path, show=show, images=images)
    if records:
        files += write_all({path.with_name(f"{path.stem}-classes.csv"): records_csv(records)})
    for file in files:
        print_line(console, f"wrote {file}")
    return 0


def _folders(text: str) -> list[Path]:
    """The stress runs; a folder of `train` or `sweep` stands for the one inside it."""
    folders = [Path(piece.strip()) for piece in text.split(",") if piece.strip()]
    return [folder / "stress" if (folder / "stress" / "run.json").is_file() else folder for folder in folders]


def _print_groups(comparison: Comparison, seen: str, console: Console) -> list[dict[str, Any]]:
    """Print seen against unseen classes; returns the numbers."""
    changes = group_changes(comparison, read_seen(seen, comparison.class_names))
    rows: list[tuple[list[str], str]] = []
    for change in changes:
        ends = [f"{100 * value:.1f}" for value in (change.before, change.after)]
        gap, low, high = (f"{100 * value:+.1f}" for value in (change.difference, change.low, change.high))
        cells = [change.setting, change.group, str(change.classes), str(change.images), *ends, gap]
        rows.append(([*cells, f"{low} to {high}"], STYLE.get(change.verdict, "")))
    names = [Column(name, "name") for name in ("setting", "classes")]
    numbers = [Column(name) for name in ("number", "images", "before", "after", "difference", "interval")]
    title = "top1, %, of seen and unseen classes, 95 % interval over images and seeds"
    print_table(console, [*names, *numbers], rows, title=title, keys=2)
    return [change.record() for change in changes]


def _print_every_class(comparison: Comparison, seen: str | None, console: Console) -> None:
    """Every class, those that lost most first."""
    listed = None if seen is None else read_seen(seen, comparison.class_names)
    rows: list[tuple[list[str], str]] = []
    for change in comparison.classes:
        name = comparison.class_names.get(change.label, "").split(",")[0]
        group = "-" if listed is None else SEEN if change.label in listed else UNSEEN
        ends, _, rest = _class_text(change).partition(", ")
        rows.append(([f"{change.label} {name}".rstrip(), group, ends, rest], ""))
    columns = [Column("class", "text"), Column("seen", "name"), Column("before to after", "name")]
    title = f"accuracy by class ({comparison.setting}), first run of each side, Newcombe's interval"
    print_table(console, [*columns, Column("difference", "text")], rows, title=title)


def _print_heading(comparison: Comparison, console: Console) -> None:
    one, two = comparison.before[0], comparison.after[0]
    seeds = ""
    if max(len(comparison.before), len(comparison.after)) > 1:
        seeds = f"; {len(comparison.before)} and {len(comparison.after)} seeds"
    models = f"before: {one.model} ({one.weights}); after: {two.model} ({two.weights})"
    print_line(console, f"{models}; {plural(one.image_count, 'image')} of {one.data}{seeds}", "bold")


def _print_changes(comparison: Comparison, console: Console) -> None:
    names = [Column(name, "name") for name in ("setting", "metric")]
    numbers = [Column(name) for name in ("before", "after", "difference", "interval", "p")]
    rows = [(_change_cells(c), STYLE.get(c.verdict, "")) for c in short_list(comparison.changes)]
    title = "after minus before, 95 % interval over the same images"
    print_table(console, [*names, *numbers, Column("verdict", "name")], rows, title=title, keys=2)


def _change_cells(change: Change) -> list[str]:
    digits = len(change.quantity.text(0).partition(".")[2])
    gap, low, high = (f"{change.scale * v:+.{digits}f}" for v in (change.difference, change.low, change.high))
    return [
        change.setting.label,
        change.quantity.title,
        _side(change.before, change),
        _side(change.after, change),
        gap,
        f"{low} to {high}",
        "-" if change.p is None else f"{change.p:.3f}",
        change.verdict or "unclear",
    ]


def _side(spread: Spread, change: Change) -> str:
    if np.isnan(spread.mean):
        return "no number"
    text = change.quantity.text(spread.mean)
    return f"{text} ±{change.quantity.text(spread.deviation)}" if spread.seeds > 1 else text


def _print_classes(comparison: Comparison, console: Console) -> None:
    lost = [c for c in comparison.classes if c.difference < 0][:CLASSES]
    gained = [c for c in comparison.classes[::-1] if c.difference > 0][:CLASSES]
    for words, classes in (("lost", lost), ("gained", gained)):
        if not classes:
            print_line(console, f"no class {words} accuracy ({comparison.setting})")
            continue
        print_line(console, f"classes that {words} most ({comparison.setting}):")
        for change in classes:
            name = comparison.class_names.get(change.label, "").split(",")[0]
            print_line(console, f"  {change.label} {name}: {_class_text(change)}")


def _class_text(change: ClassChange) -> str:
    ends = f"{100 * change.before.value:.0f} % to {100 * change.after.value:.0f} %"
    span = f"[{100 * change.low:+.0f}, {100 * change.high:+.0f}]"
    verdict = "" if change.verdict == "unclear" else f", {change.verdict}"
    return f"{ends}, {span}, {plural(change.count, 'image')}{verdict}"


def _print_turned(comparison: Comparison, show: int, console: Console) -> None:
    for way, names in comparison.turned.items():
        listed = ", ".join(names[:show])
        more = f", and {len(names) - show} more" if len(names) > show else ""
        colon = ": " if names and show else ""
        text = f"{TURNED[way]} ({comparison.setting}): {len(names)}{colon}{listed}{more}"
        print_line(console, text)
