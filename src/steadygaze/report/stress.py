"""The report of stress runs: the scores, a section for each suite, sample images, all numbers, how it was
run; one HTML file, table.csv, table.md."""

from __future__ import annotations

from pathlib import Path

from steadygaze.data.benchmarks import some
from steadygaze.errors import BadInput
from steadygaze.report.figures import draw, records_csv
from steadygaze.report.html import rendered, write_all
from steadygaze.report.page import Cell, Part
from steadygaze.report.samples import condition_images
from steadygaze.runs.messages import INTERVALS, markdown_text, plural
from steadygaze.runs.rows import STRESS, Rows
from steadygaze.runs.stress.card import Card
from steadygaze.runs.stress.suite import Number


def write_stress(
    rows: Rows, out: str | Path | None = None, *, images: bool = True, repeats: int = 2000
) -> list[Path]:
    """Write the report of these stress runs; returns the files: report.html, table.csv, table.md."""
    if rows.kinds != {STRESS}:
        raise BadInput("expected runs of one kind, got runs of verify and of stress: write a report for each")
    cards = rows.cards(repeats=repeats)
    if not all(card.keys for card in cards):
        raise BadInput(f"{', '.join(map(str, rows.folders))}: no rows yet. Run steadygaze stress first.")
    several = len(cards) > 1
    parts = [part for i, card in enumerate(cards) for part in _parts(card, i if several else None, images)]
    leads = [text for card in cards for text in (_lead(card), _unfinished(card)) if text]
    page = rendered(
        "card.html",
        rows.runs,
        rows,
        title="Robustness",
        about=cards[0].model,
        leads=leads,
        parts=parts,
    )
    path = rows.folders[0] / "report.html" if out is None else Path(out)
    records = [record for card in cards for record in card.records()]
    markdown = "\n".join(_markdown(card) for card in cards)
    return write_all(
        {path: page, path.with_name("table.csv"): records_csv(records), path.with_name("table.md"): markdown}
    )


def _lead(card: Card) -> str:
    images = f", on {plural(card.image_count, 'image')} of {card.data}" if card.image_count else ""
    return f"{card.model} under {plural(card.setting_count, 'setting')}{images}."


def _unfinished(card: Card) -> str:
    settings = card.unfinished()
    if not settings:
        return ""
    return (
        f"Not finished: {len(settings)} of {card.setting_count} settings lack images ({some(settings)}). "
        "Their numbers may be of other images than the rest; repeat the steadygaze stress command to resume."
    )


def _parts(card: Card, index: int | None, images: bool) -> list[Part]:
    tail = "" if index is None else f": {card.model} {index + 1}"
    mark = "" if index is None else str(index + 1)
    parts = [Part(f"Summary{tail}", f"card{mark}", tiles=_tiles(card), text=f"{INTERVALS}.")]
    for suite in card.suites:
        figures = [draw(figure) for figure in suite.figures(card)]
        if figures:
            parts.append(Part(f"{suite.title}{tail}", f"{suite.name}{mark}", suite.title, figures=figures))
    if images:
        parts += _samples(card, tail, mark)
    return [*parts, _all_numbers(card, tail, mark)]


def _samples(card: Card, tail: str, mark: str) -> list[Part]:
    if not card.image_count or card.folder is None:
        return []
    small, sheets, text = condition_images(card.folder)
    if not text:
        return []
    return [Part(f"Sample images{tail}", f"samples{mark}", text=text, samples=small, sheets=sheets)]


def _tiles(card: Card) -> list[tuple[str, str, str]]:
    tiles = []
    for suite in card.suites:
        for key, title in suite.tiles.items():
            number = card.numbers.get(key)
            if number is not None:
                heading = f"{number.setting.label}: {number.quantity.title}{number.quantity.arrow}"
                tiles.append((heading, _with_unit(number), _small_print(number, title)))
    return tiles


def _with_unit(number: Number) -> str:
    return f"{number.text(spread=False)} {number.quantity.unit}".strip()


def _small_print(number: Number, words: str) -> str:
    return "; ".join(filter(None, (number.spread_text, words, number.quantity.direction_text, number.note)))


def _all_numbers(card: Card, tail: str, mark: str) -> Part:
    rows = []
    for (label, metric), number in card.numbers.items():
        scale = number.quantity.scale
        span = f"{scale * number.low:.4g} to {scale * number.high:.4g}" if number.has_interval else ""
        rows.append(
            [
                Cell(label, label),
                Cell(f"{metric}{number.quantity.arrow}", metric),
                Cell(number.text(spread=False), number.value, "", span),
                Cell(str(number.images), number.images),
                Cell(number.note, number.note),
            ]
        )
    return Part(
        f"All numbers{tail}",
        f"numbers{mark}",
        heads=["setting", "metric", "value", "images", "note"],
        rows=rows,
        folded=f"{len(rows)} numbers with 95 % intervals",
        after="↑: higher is better; ↓: lower is better; –: no note.",
    )


def _markdown(card: Card) -> str:
    images = plural(card.image_count, "image")
    model, weights, data = map(markdown_text, (card.model, card.weights, card.data))
    lines = [f"**{model}** ({weights}) on {data}, {images}; {INTERVALS}", ""]
    if text := _unfinished(card):
        lines += [markdown_text(text), ""]
    lines += [
        "| setting | metric | value | 95 % interval | images | note |",
        "| --- | --- | ---: | --- | ---: | --- |",
    ]
    for (label, metric), number in card.numbers.items():
        scale, unit = number.quantity.scale, number.quantity.unit
        limits = f"[{scale * number.low:.4g}, {scale * number.high:.4g}]" if number.has_interval else ""
        cells = [
            markdown_text(label),
            markdown_text(f"{metric} {unit}"),
            number.text(spread=False),
            limits,
            str(number.images),
            markdown_text(number.note),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
