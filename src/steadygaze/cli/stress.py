"""`steadygaze stress`: progress while it runs, the robustness card when it is done."""

from __future__ import annotations

import numpy as np
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table as Shown

from steadygaze.cli.running import guarded, progress, say, tell_unreadable, wide
from steadygaze.robustness.corruptions.corrupt import CORRUPTIONS, SEVERITIES
from steadygaze.robustness.sequences import PERTURBATIONS
from steadygaze.runs.loop import World
from steadygaze.runs.rows import Rows
from steadygaze.runs.stress_card import Card
from steadygaze.runs.stress_loop import Pace
from steadygaze.runs.stress_numbers import label, percent
from steadygaze.runs.stress_request import Prepared, Request, prepare_stress, stress_run
from steadygaze.runs.wording import caution, counted

FEW = 8  # classes of a segmenter that are told one by one


def run(request: Request, console: Console | None = None) -> int:
    """Do it; gives the exit code."""

    def work(place: World, notes: Console) -> int:
        ready, pace = prepare_stress(request, place), Pace()
        if place.rank == 0:
            _announce(ready, place, notes)
        with progress(ready.work(place), place, notes, "stressing", "pictures shown") as told:
            rows = stress_run(request, place, told, ready, pace)
        if place.rank:
            return 0
        if pace.model:
            by = counted(ready.workers, "worker")
            say(
                notes,
                f"the model worked {100 * pace.share:.0f} % of the time and waited for pictures the rest ({by})",
            )
        return _close(request, rows, console or wide(Console()))

    return guarded(request.out, work)


def _announce(ready: Prepared, place: World, notes: Console) -> None:
    processes = f", {place.size} processes" if place.size > 1 else ""
    pictures = counted(sum(len(batch.pictures) for batch in ready.batches), "picture")
    settings = counted(len(ready.settings["conditions"]), "setting")
    say(notes, f"{ready.request.model}: {pictures}, {settings}{processes}")
    for note in ready.notes:
        say(notes, f"note: {note}", "yellow")


def _close(request: Request, rows: Rows, console: Console) -> int:
    for card in rows.cards():
        print_card(card, console)
        if card.pictures and (few := caution(card.pictures)):
            say(console, few, "yellow")
        for note in card.run["settings"].get("notes", ()):
            say(console, f"note: {note}", "yellow")
    say(console, f"rows in {request.out}; the whole story: steadygaze report {request.out}")
    flagged = rows.flagged
    if flagged:
        each = ", ".join(f"{setting} {flag}: {count}" for (setting, flag), count in flagged.items())
        say(console, f"flagged: {each}", "yellow")
    return tell_unreadable(rows, console)


def print_card(card: Card, console: Console) -> None:
    """The card as tables."""
    data = f" on {card.data}, {counted(card.pictures, 'picture')}" if card.pictures else ""
    say(console, f"{card.model}{data}; ± half of the 95 % interval", "bold")
    shown = [_segmentation(card), _answers(card), _corruptions(card, ""), _corruptions(card, "imagenet-c/"), _factors(card),
             _sequences(card, "sequence"), _sequences(card, "imagenet-p"), _drops(card), _layers(card), _neighbours(card)]  # fmt: skip
    if ("clean", "miou") in card.numbers:
        by_class = [m for s, m in card.numbers if s == "clean" and m.startswith("iou_")]
        clean = ["miou", "pixel_accuracy", *(by_class if len(by_class) <= FEW else ())]
        told = ", ".join(f"{label(m)} {_cell(card, 'clean', m)}" for m in clean)
        say(console, f"clean, %: {told}")
    for table in shown:
        if table is not None:
            console.print(table)
    for setting, metric in card.scores:
        if setting in ("corruptions", "imagenet-c", "sequences", "imagenet-p"):
            number = card.scores[setting, metric]
            unit = " %" if percent(metric) else ""
            say(console, f"{setting} {label(metric)}: {number.text()}{unit} ({number.note})")


def _table(title: str, *columns: str) -> Shown:
    table = Shown(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column(columns[0], no_wrap=True)
    for column in columns[1:]:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cell(card: Card, setting: str, metric: str, *, spread: bool = True) -> str:
    number = card.numbers.get((setting, metric))
    return "" if number is None else number.text(spread=spread)


def _answers(card: Card) -> Shown | None:
    """Clean, shifts, attacks, centre square, background: everything that is answered and in no other table."""
    apart = tuple(f"{name}/" for name in (*CORRUPTIONS, "imagenet-c", "location", "rotation", "size"))
    settings = dict.fromkeys(s for s, m in card.keys if m == "top1" and not s.startswith(apart))
    if not settings:
        return None
    restricted = list(dict.fromkeys(m for _, m in card.keys if "_of_" in m))
    metrics = [
        "top1",
        *(["top5"] if any(m == "top5" for _, m in card.keys) else []),
        *restricted,
        "confidence",
        "ece",
    ]
    table = _table(
        "right answers, confidence and ECE, %", "setting", *(label(m) for m in metrics), "pictures"
    )
    for setting in settings:
        table.add_row(
            setting, *(_cell(card, setting, m) for m in metrics), str(card.numbers[setting, "top1"].images)
        )
    return table


def _segmentation(card: Card) -> Shown | None:
    """mIoU by corruption and severity."""
    names = [name for name in CORRUPTIONS if (name, "miou") in card.scores]
    if not names:
        return None
    levels = [s for s in SEVERITIES if any((f"{name}/{s}", "miou") in card.numbers for name in names)]
    table = _table("segmentation, %", "corruption", *(f"mIoU at {s}" for s in levels), "mean")
    for name in names:
        table.add_row(
            name,
            *(_cell(card, f"{name}/{s}", "miou", spread=False) for s in levels),
            _cell(card, name, "miou"),
        )
    return table


def _corruptions(card: Card, prefix: str) -> Shown | None:
    names = [name for name in CORRUPTIONS if (f"{prefix}{name}", "error") in card.scores]
    if not names:
        return None
    levels = [s for s in SEVERITIES if any((f"{prefix}{name}/{s}", "top1") in card.numbers for name in names)]
    ce = any((f"{prefix}{name}", "ce") in card.scores for name in names)
    heads = [*(f"top-1 at {s}" for s in levels), "mean error", *(["CE"] if ce else []), "confidence", "ECE"]
    table = _table(f"{prefix.rstrip('/') or 'corruptions'}, %", "corruption", *heads)
    for name in names:
        cells = [_cell(card, f"{prefix}{name}/{s}", "top1", spread=False) for s in levels]
        cells.append(_cell(card, f"{prefix}{name}", "error"))
        if ce:
            cells.append(_cell(card, f"{prefix}{name}", "ce"))
        for metric in ("confidence", "ece"):
            found = [n.value for s in levels if (n := card.numbers.get((f"{prefix}{name}/{s}", metric)))]
            cells.append(f"{100 * np.mean(found):.1f}" if found else "")
        table.add_row(name, *cells)
    return table


def _factors(card: Card) -> Shown | None:
    found = [factor for factor in ("location", "rotation", "size") if (factor, "top1") in card.scores]
    if not found:
        return None
    table = _table("synthetic pictures, right answers, %", "factor", "mean", "worst", "at", "best", "at")
    for factor in found:
        values = [card.numbers[s, m] for s, m in card.keys if m == "top1" and s.startswith(f"{factor}/")]
        worst, best = min(values, key=lambda n: n.value), max(values, key=lambda n: n.value)
        ends = [text for n in (worst, best) for text in (n.text(), n.setting.split("/")[1])]
        table.add_row(factor, _cell(card, factor, "top1"), *ends)
    return table


def _sequences(card: Card, prefix: str) -> Shown | None:
    kinds = [name for name in PERTURBATIONS if (f"{prefix}/{name}", "flips") in card.numbers]
    if not kinds:
        return None
    table = _table("sequences" if prefix == "sequence" else prefix, "kind", "flips, %", "top-5 distance")
    for name in kinds:
        table.add_row(
            name, _cell(card, f"{prefix}/{name}", "flips"), _cell(card, f"{prefix}/{name}", "top5_distance")
        )
    return table


def _neighbours(card: Card) -> Shown | None:
    settings = list(dict.fromkeys(s for s, _ in card.keys if s.startswith("neighbours/")))
    if not settings:
        return None
    metrics = list(dict.fromkeys(m for s, m in card.keys if s in settings))
    table = _table(
        "right answers of the k nearest neighbours, %",
        "set",
        *(label(m) for m in metrics),
        "pictures",
        "bank",
    )
    for setting in settings:
        number = card.numbers[setting, metrics[0]]
        name, bank = (
            setting.removeprefix("neighbours/"),
            number.note.removeprefix("bank of ").removesuffix(" pictures"),
        )
        table.add_row(name, *(_cell(card, setting, m) for m in metrics), str(number.images), bank)
    return table


def _drops(card: Card) -> Shown | None:
    shares = card.run["settings"].get("shares") or []
    curves = [
        (name, found[0])
        for name in ("random_drop", "salient_drop")
        if (found := card.curve(name, "drop_right"))
    ]
    if not curves:
        return None
    table = _table(
        "right answers while tokens are dropped, %", "share dropped", *(f"{s:g}" for s in shares), "mean"
    )
    for name, points in curves:
        note = card.numbers[name, "drop_right"].note
        table.add_row(
            f"{name.replace('_', ' ')} {note}".strip(),
            *(f"{100 * p:.1f}" for p in points),
            _cell(card, name, "drop_right"),
        )
    return table


def _layers(card: Card) -> Shown | None:
    first = card.curve("clean", "attention_entropy")
    if first is None:
        return None
    table = _table(
        "attention by layer, mean of heads", "clean", *(str(i) for i in range(len(first[0]))), "mean"
    )
    for metric in dict.fromkeys(m for s, m in card.keys if s == "clean" and m.startswith("attention_")):
        found = card.curve("clean", metric)
        if found is not None:
            cells = [f"{v:.2f}" for v in found[0]]
            table.add_row(
                metric.removeprefix("attention_"), *cells, _cell(card, "clean", metric, spread=False)
            )
    stable = [found[0] for s, m in card.keys if m == "attention_stability" and (found := card.curve(s, m))]
    if stable:
        cells = [f"{v:.2f}" for v in np.mean(stable, axis=0)]
        table.add_row(
            "stability, corrupted", *cells, _cell(card, "corruptions", "attention_stability", spread=False)
        )
    return table
