"""`steadygaze card`: two models in, one page out: accuracy, robustness, attention, faithfulness, maps and
classes before and after."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steadygaze.cli.running import guarded, print_line, progress_bar, wide
from steadygaze.cli.verify import print_masked_models
from steadygaze.report.card import write_card
from steadygaze.report.changes import short_list
from steadygaze.runs.card import CardRequest, FaithfulnessChange, faithfulness_changes, measure_side
from steadygaze.runs.compare import Change, compare
from steadygaze.runs.messages import small_sample_note
from steadygaze.runs.processes import World
from steadygaze.runs.rows import Rows, read_run
from steadygaze.runs.verify.summary import masked_models

STYLE = {"better": "green", "worse": "red"}
COLUMNS = ("before", "after", "difference", "95 %")


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
    console.print(_changes_table(short_list(comparison.changes)))
    console.print(_faithfulness_table(faithfulness))
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


def _changes_table(changes: Sequence[Change]) -> Table:
    table = Table("setting", "metric", *COLUMNS, box=SIMPLE, title="accuracy, robustness, attention")
    for change in changes:
        scale = change.scale
        table.add_row(
            escape(change.setting.label),
            escape(change.quantity.title),
            f"{scale * change.before.mean:.4g}",
            f"{scale * change.after.mean:.4g}",
            f"{scale * change.difference:+.3g}",
            f"{scale * change.low:+.3g} to {scale * change.high:+.3g}",
            style=STYLE.get(change.verdict),
        )
    return table


def _faithfulness_table(changes: Sequence[FaithfulnessChange]) -> Table:
    table = Table("method", "metric", *COLUMNS, box=SIMPLE, title="faithfulness")
    for change in changes:
        table.add_row(
            escape(change.method),
            escape(change.quantity.title),
            change.quantity.text(change.before),
            change.quantity.text(change.after),
            f"{change.difference:+.3g}",
            f"{change.low:+.3g} to {change.high:+.3g}",
            style=STYLE.get(change.verdict),
        )
    return table


def default_out(after: str) -> Path:
    """Beside the second model, if it is a folder."""
    folder = Path(after)
    return folder / "card" if folder.is_dir() else Path("steadygaze-card")
