"""`steadygaze card`: two models in, one page out: accuracy, robustness, attention, faithfulness, maps and
classes before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from steadygaze.cli.output import Column, guarded, print_line, print_table, progress_bar, wide
from steadygaze.cli.verify import print_masked_models
from steadygaze.report.comparison import sentence, short_list, write_card
from steadygaze.runs.before_after import CardRequest, FaithfulnessChange, faithfulness_changes, measure_side
from steadygaze.runs.card import Change
from steadygaze.runs.compare import compare
from steadygaze.runs.ranking import masked_models
from steadygaze.runs.rows import Rows, read_run
from steadygaze.runs.shards import World
from steadygaze.runs.statistics import small_sample_note

STYLE = {"better": "green", "worse": "red"}
COLUMNS = ("before", "after", "difference", "95 % interval")


def run(before: str, after: str, request: CardRequest, show: int, images: bool) -> int:
    """Measure what is missing, compare, print and write; returns the exit code."""

    def work(world: World, notes: Console) -> int:
        with progress_bar(notes, visible=not world.rank) as on_progress:
            folders = [
                measure_side(side, name, request, world, on_progress)
                for side, name in ((before, "before"), (after, "after"))
            ]
        world.wait()
        if world.rank:
            return 0
        return _close(folders, request, show, images, wide(Console()))

    return guarded(request.out, work)


def _close(folders: Sequence[Path], request: CardRequest, show: int, images: bool, console: Console) -> int:
    comparison = compare([folders[0] / "stress"], [folders[1] / "stress"])
    faithfulness = faithfulness_changes(folders[0] / "verify", folders[1] / "verify")
    print_line(console, sentence(comparison), "bold")
    _print_changes(short_list(comparison.changes), console)
    _print_faithfulness(faithfulness, console)
    if caution := small_sample_note(comparison.before[0].image_count):
        print_line(console, caution, "yellow")
    for note in comparison.notes:
        print_line(console, f"note: {note}", "yellow")
    sections = [Rows.read(folder / "verify").table().sections for folder in folders]
    print_masked_models([section for side in sections for section in side], console)
    files = write_card(
        comparison,
        faithfulness,
        request.out / "card.html",
        [read_run(folder / kind) for folder in folders for kind in ("stress", "verify")],
        show=show,
        images=images,
        masked=[bool(masked_models(side)) for side in sections],
    )
    for file in files:
        print_line(console, f"wrote {file}")
    return 0


def _print_changes(changes: Sequence[Change], console: Console) -> None:
    rows: list[tuple[list[str], str]] = []
    for change in changes:
        scale = change.scale
        cells = [
            change.setting.label,
            change.quantity.title,
            f"{scale * change.before.mean:.4g}",
            f"{scale * change.after.mean:.4g}",
            f"{scale * change.difference:+.3g}",
            f"{scale * change.low:+.3g} to {scale * change.high:+.3g}",
        ]
        rows.append((cells, STYLE.get(change.verdict, "")))
    columns = [Column("setting", "name"), Column("metric", "name"), *map(Column, COLUMNS)]
    print_table(console, columns, rows, title="accuracy, robustness, attention", keys=2)


def _print_faithfulness(changes: Sequence[FaithfulnessChange], console: Console) -> None:
    rows: list[tuple[list[str], str]] = []
    for change in changes:
        cells = [
            change.method,
            change.quantity.title,
            change.quantity.text(change.before),
            change.quantity.text(change.after),
            f"{change.difference:+.3g}",
            f"{change.low:+.3g} to {change.high:+.3g}",
        ]
        rows.append((cells, STYLE.get(change.verdict, "")))
    columns = [Column("method", "name"), Column("metric", "name"), *map(Column, COLUMNS)]
    print_table(console, columns, rows, title="faithfulness", keys=2)


def default_out(after: str) -> Path:
    """Beside the second model, if it is a folder."""
    folder = Path(after)
    return folder / "card" if folder.is_dir() else Path("steadygaze-card")
