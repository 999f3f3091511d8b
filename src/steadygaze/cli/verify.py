"""`steadygaze verify`: progress while it runs, the ranking when it is done."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from time import monotonic

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Shown

from steadygaze.cli.running import guarded, progress, say, tell_unreadable, wide
from steadygaze.runs.loop import World
from steadygaze.runs.plan import passes
from steadygaze.runs.request import Prepared, Request, prepare_run, verify_run
from steadygaze.runs.rows import Rows
from steadygaze.runs.table import Section, masked_models
from steadygaze.runs.wording import arrow, caution, counted, label, number
from steadygaze.vit import ViT

SHOWN = 40  # lines of the printed table


def run(request: Request, console: Console | None = None) -> int:
    """Do it; gives the exit code."""

    def work(place: World, notes: Console) -> int:
        ready = prepare_run(request, place)
        if place.rank == 0:
            _announce(ready, place, notes)
        total = sum(len(items) for i, items in enumerate(ready.chunks) if i % place.size == place.rank)
        with progress(total, place, notes, "verifying", "pictures") as told:
            rows = verify_run(request, place, told, ready)
        return 0 if place.rank else _close(request, rows, console or wide(Console()))

    return guarded(request.out, work)


def _announce(ready: Prepared, place: World, notes: Console) -> None:
    plan, request = ready.plan, ready.request
    shared = f" ({len(plan.maps)} different maps)" if len(plan.maps) < len(plan.columns) else ""
    processes = f", {place.size} processes" if place.size > 1 else ""
    methods, scores = (
        {column.method.name for column in plan.columns},
        {column.score for column in plan.columns},
    )
    each = f", {len(scores)} scores each" if len(plan.columns) > len(methods) else ""
    what = (
        f"{counted(len(methods), 'method')}{each}{shared}, {counted(len(plan.metrics), 'metric')}{processes}"
    )
    say(notes, f"{request.model}: {counted(len(ready.found.items), 'picture')}, {what}")
    if plan.searches and (text := price(ready)):
        say(notes, text, "yellow")
    if ready.found.without:
        say(notes, f"left out for lack of a mask: {counted(ready.found.without, 'picture')}", "yellow")


def price(ready: Prepared) -> str:
    """What the searches of a run cost beside the rest, if that is more than a minute; one forward pass is timed."""
    costs = {column.method.name: passes(column.method) for column in ready.plan.maps}
    searches = [method.name for method in ready.plan.searches]
    each = sum(costs[name] for name in searches)
    minutes = each * len(ready.found.items) * _forward_seconds(ready.vit) / 60
    if minutes <= 1:
        return ""
    return (
        f"{', '.join(searches)}: about {each:,.0f} forward passes a picture (the other methods: {sum(costs.values()) - each:,.0f}), up to "
        f"{f'{minutes / 60:.1f} hours' if minutes >= 60 else f'{minutes:.0f} minutes'} here. "
        "--methods quick is all methods but such searches; NAME:budget=100 is a cheaper one"
    )


def _forward_seconds(vit: ViT) -> float:
    where = next(vit.model.parameters())
    x = torch.zeros(1, *vit.plan.input_size, device=where.device, dtype=where.dtype)
    with torch.no_grad():
        for _ in range(2):  # the first warms up
            begin = monotonic()
            vit(x).sum().item()
    return monotonic() - begin


def _close(request: Request, rows: Rows, console: Console) -> int:
    """The ranking, what was flagged and what could not be read."""
    sections = rows.table().sections
    for section in sections:
        console.print(_ranking(section))
        if few := caution(len(section.images)):
            say(console, few, "yellow")
        if len(section.lines) > SHOWN:
            say(console, f"and {len(section.lines) - SHOWN} more: steadygaze report {request.out}")
    say(console, f"rows in {request.out}; the whole story: steadygaze report {request.out}")
    tell_masking(sections, console)
    flagged = rows.flagged
    if flagged:
        each = ", ".join(f"{method} {count}" for (method, _), count in flagged.items())
        kinds = " or ".join(sorted({flag for _, flag in flagged}))
        say(console, f"flagged: {sum(flagged.values())} maps ({kinds}): {each}", "yellow")
    return tell_unreadable(rows, console)


def tell_masking(sections: Sequence[Section], console: Console) -> None:
    """Say of which models patches cannot be removed."""
    for model in masked_models(sections):
        say(
            console,
            f"note: patches of {model} cannot be removed: they were hidden from attention instead (attention masking)",
            "yellow",
        )


def _ranking(section: Section) -> Shown:
    title = f"{section.title}, {counted(len(section.images), 'picture')}; ± half of the 95 % interval"
    shown = Shown(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    shown.add_column("method", no_wrap=True)
    shown.add_column("score", no_wrap=True)
    for metric in section.shown:
        shown.add_column(f"{label(metric)}{arrow(metric)}", justify="right", min_width=10)
    best = {metric: section.best(metric) for metric in section.shown}
    for line in section.lines[:SHOWN]:
        cells = []
        for metric in section.shown:
            cell = section.cells.get((metric, line))
            if cell is None or isnan(cell.value):
                cells.append("")
                continue
            text = f"{number(cell.value, metric)} ±{number((cell.high - cell.low) / 2, metric)}"
            cells.append(f"[bold]{text}[/bold]" if best[metric] == line else text)
        shown.add_row(escape(line[0]), line[1], *cells)
    return shown
