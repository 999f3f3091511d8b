"""The pages of a comparison: `compare-models` and `card`, each one HTML file with its numbers as .csv beside.

Both show every number before and after, the classes gained and lost, and changed images with their maps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from steadygaze.quantity import percent, plural
from steadygaze.report.pages import (
    NOT_STORED,
    Figure,
    Part,
    TableCell,
    Titled,
    draw,
    records_csv,
    rendered,
    write_all,
)
from steadygaze.robustness.by_class import Spread
from steadygaze.runs.before_after import FaithfulnessChange
from steadygaze.runs.card import Change
from steadygaze.runs.compare import Comparison
from steadygaze.runs.request import CHANCE
from steadygaze.runs.samples import ImageSample, Samples, data_address, read_setting_samples
from steadygaze.runs.statistics import small_sample_note, told_apart
from steadygaze.runs.suites.attention import Attention
from steadygaze.untrusted import damaged_files

HEADS = ["setting", "metric", "before", "after", "difference", "p", "images", "note"]
CLASS_HEADS = ["class", "before", "after", "difference", "gained", "lost", "images"]
STYLES = {"better": "good", "worse": "sure"}
HEADLINES = (  # setting and metric of the first sentence of a page, the most important first
    ("clean", "top1"),
    ("clean", "miou"),
    ("corruptions", "mean_error"),
    ("corruptions", "mean_miou"),
)
TILES = (
    ("clean", "top1"),
    ("clean", "worst_group"),
    ("corruptions", "mean_error"),
    ("corruptions", "mce"),
    ("corruptions", "attention_stability"),
    ("clean", "attention_entropy"),
)
ATTENTION_TEXT = (
    "Entropy: how spread out attention is. Stability: how similar attention under corruption is to that on "
    "the clean image. Overfocus, Gini and peak: how much attention the most attended tokens receive. "
    "Distance: how far away tokens attend, in patches. Head and token similarity: how alike the attention "
    "of two heads or two tokens is."
)
FAITHFULNESS_TEXT = (
    "How faithful the maps of each model are, measured by removing patches in the order of the map. ↑: "
    "higher is better; ↓: lower is better. random is the chance level. A difference may come from the model "
    "rather than the maps: a model that is more confident, or depends on fewer patches, loses more when they "
    "are removed."
)
ROBUSTNESS_NOTE = (
    "After minus before. ↑: higher is better; ↓: lower is better. Colored: the paired 95 % interval "
    "excludes zero. p: McNemar's exact test of correct and wrong predictions; – where a row has none."
)
TURNED = {"wrong": "Newly wrong", "right": "Newly correct"}
FIRST = (
    "After minus before on the same images. ↑: higher is better; ↓: lower is better. Colored: the paired "
    "95 % interval excludes zero."
)
NOTE = (
    "Scores, and every setting with a significant change; the others are at the end. p: McNemar's exact "
    "test of correct and wrong predictions; – where a row has none."
)


@dataclass(frozen=True)
class Shot:
    """An image with what was made of it: (words, data address)."""

    name: str
    title: str
    images: Titled


def _shots(
    comparison: Comparison, names: Mapping[str, Sequence[str]], show: int
) -> tuple[dict[str, list[Shot]], str]:
    """Collect images of each group that both runs stored, with the maps of both models, and a caption."""
    folders = comparison.before[0].folder, comparison.after[0].folder
    before, after = (None if folder is None else read_setting_samples(folder) for folder in folders)
    if before is None or after is None or folders[0] is None or folders[1] is None:
        return {}, NOT_STORED
    images_before, images_after = ({i.name: i for i in samples.images} for samples in (before, after))
    shots: dict[str, list[Shot]] = {}
    for group, wanted in names.items():
        both = [name for name in wanted if name in images_before and name in images_after][:show]
        shots[group] = [
            _shot((folders[0], before, images_before[name]), (folders[1], after, images_after[name]))
            for name in both
        ]
    methods = " and ".join(dict.fromkeys((before.method, after.method)))
    count = min(len(before.images), len(after.images))
    text = f"Clean images with maps by {methods}, of the class each model predicts"
    return shots, f"{text}; the runs stored {count} images."


def _shot(before: tuple[Path, Samples, ImageSample], after: tuple[Path, Samples, ImageSample]) -> Shot:
    run, samples, image = before
    images = [("image", data_address(run, image.file))]
    for side, (folder, own, shown) in (("before", before), ("after", after)):
        words = f"{side}: {_shown_class(own, shown.predicted)} {percent(shown.probability)}"
        images.append((words, data_address(folder, shown.map_file or shown.file)))
    return Shot(image.name, _shown_class(samples, image.label), images)


def _shown_class(samples: Samples, index: int) -> str:
    name = samples.class_names.get(index)
    return f"class {index}" if name is None else name.split(",")[0]


def short_list(changes: Sequence[Change]) -> list[Change]:
    """Return the changes without those of single severities, frames and values."""
    return [change for change in changes if not change.setting.minor]


def sentence(comparison: Comparison) -> str:
    """Describe in one sentence what changed, and for which images and classes."""
    changes = {change.key: change for change in comparison.changes}
    headlines = [changes[key] for key in HEADLINES if key in changes][:2] or short_list(comparison.changes)[
        :1
    ]
    card = comparison.before[0]
    few = "only " if small_sample_note(card.image_count) else ""
    images = f"On {few}{plural(card.image_count, 'image')} of {card.data}, " if card.image_count else ""
    text = f"{images}{' and '.join(map(_change_text, headlines))}"
    if not comparison.turned:
        return f"{text}."
    counts = [len(comparison.turned.get(way, ())) for way in ("right", "wrong")]
    turned = f"{plural(counts[0], 'image is', 'images are')} newly correct and {counts[1]} newly wrong"
    return f"{text}: {turned} ({comparison.setting}), {_classes_text(comparison)}."


def _change_text(change: Change) -> str:
    quantity, scale = change.quantity, change.scale
    before, after = (quantity.text(side.mean) for side in (change.before, change.after))
    moved = f"{'rises' if change.difference > 0 else 'falls'} from {before} to {after}"
    moved = f"{moved if change.difference else f'stays at {after}'} {quantity.unit}".rstrip()
    gap, low, high = (f"{scale * value:+.3g}" for value in (change.difference, change.low, change.high))
    sure = change.verdict or "no significant change"
    return f"{quantity.words} ({change.setting.words}) {moved} ({sure}: {gap}, 95 % interval {low} to {high})"


def _classes_text(comparison: Comparison) -> str:
    """Name the classes that gained or lost significantly, at most three of each."""
    parts = []
    for verdict, ordered in (("gained", comparison.classes[::-1]), ("lost", comparison.classes)):
        names = [
            comparison.class_names.get(change.label, "").split(",")[0] or f"class {change.label}"
            for change in ordered
            if change.verdict == verdict
        ]
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            parts.append(f"{', '.join(names[:3])}{more} {verdict} significantly")
    return "; ".join(parts) or "and no single class gained or lost significantly"


def _row(change: Change) -> list[TableCell]:
    """Return the cells below `HEADS`."""
    quantity, scale = change.quantity, change.scale
    span = f"{scale * change.low:+.3g} to {scale * change.high:+.3g}"
    p = change.p
    return [
        TableCell(change.setting.words, change.setting.label),
        TableCell(f"{quantity.words}{quantity.arrow}", quantity.name),
        _side(change.before, scale),
        _side(change.after, scale),
        TableCell(
            f"{scale * change.difference:+.3g}", change.difference, STYLES.get(change.verdict, ""), span
        ),
        TableCell("" if p is None else f"{p:.3f}", "" if p is None else p),
        TableCell(str(change.images), change.images),
        TableCell(change.note, change.note),
    ]


def _side(spread: Spread, scale: float) -> TableCell:
    text = "no number" if math.isnan(spread.mean) else f"{scale * spread.mean:.4g}"
    several = f"± {scale * spread.deviation:.2g} over {spread.seeds} seeds" if spread.seeds > 1 else ""
    return TableCell(text, spread.mean, "", several)


def _change_figures(comparison: Comparison) -> list[Figure]:
    """Draw what suites declare about both models."""
    suites = comparison.before[0].suites
    return [draw(figure) for suite in suites for figure in suite.change_figures(comparison.changes)]


def write_comparison(comparison: Comparison, path: Path, *, show: int = 8, images: bool = True) -> list[Path]:
    """Write the page of `compare-models` and, beside it, the numbers as .csv.

    Args:
        comparison (Comparison): of two sets of stress runs.
        path (Path): HTML file.
        show (int): number of changed images that are shown and named.
        images (bool): whether changed images are shown with their maps.

    Returns:
        list[Path]: the files.
    """
    with damaged_files(*_folders(comparison)):
        changes = Part(
            "What changed",
            "changes",
            text=FIRST,
            figures=_change_figures(comparison),
            heads=HEADS,
            rows=[_row(c) for c in comparison.changes if c.verdict or c.setting.level is None],
            after=NOTE,
        )
        runs = [card.run for card in (*comparison.before, *comparison.after)]
        classes = [_classes_part(comparison)] if comparison.turned else []
        parts = [changes, *classes, *_turned_parts(comparison, show if images else 0, show)]
        return _write(comparison, path, runs, parts, {})


def write_card(
    comparison: Comparison,
    faithfulness: Sequence[FaithfulnessChange],
    path: Path,
    runs: Sequence[dict[str, Any]],
    *,
    show: int = 6,
    images: bool = True,
    masked: Sequence[bool] = (False, False),
) -> list[Path]:
    """Write the page of `card` and, beside it, both tables as .csv.

    Args:
        comparison (Comparison): of the two stress runs.
        faithfulness (Sequence[FaithfulnessChange]): of the two verify runs.
        path (Path): HTML file.
        runs (Sequence[dict]): run.json of all runs, whose settings the page lists.
        show (int): number of images that are shown, and of changed images that are named.
        images (bool): whether images are shown with their maps.
        masked (Sequence[bool]): whether patches were hidden from attention, not removed; before, after.

    Returns:
        list[Path]: the files.
    """
    shown = show if images else 0
    attention_names = {quantity.name for quantity in Attention.quantities}
    first = short_list(comparison.changes)
    attention = [_row(c) for c in first if c.quantity.name in attention_names]
    rest = [_row(c) for c in first if c.quantity.name not in attention_names]
    with damaged_files(*_folders(comparison)):
        parts = [
            Part(
                "At a glance",
                "glance",
                tiles=_card_tiles(comparison, faithfulness),
                text="Before → after, on the same images. ↑: higher is better; ↓: lower is better.",
            ),
            Part(
                "Accuracy and robustness",
                "robustness",
                heads=HEADS,
                figures=_change_figures(comparison),
                rows=rest,
                after=ROBUSTNESS_NOTE,
            ),
            Part(
                "Attention",
                "attention",
                heads=HEADS,
                rows=attention,
                text=ATTENTION_TEXT,
                empty="" if attention else "Not measured: the runs do not include the suite attention.",
            ),
            Part(
                "Faithfulness",
                "faithfulness",
                heads=["method", "metric", "before", "after", "difference", "images"],
                rows=[_faithfulness_row(change) for change in faithfulness],
                text=FAITHFULNESS_TEXT + _masking_text(*masked),
            ),
        ]
        if shown:
            shots, text = _shots(comparison, {"samples": _spread(comparison, shown)}, shown)
            parts.append(Part("Maps side by side", "maps", shots=shots.get("samples", []), text=text))
        parts += [_classes_part(comparison), *_turned_parts(comparison, shown, show)]
        columns = [column.name for column in fields(FaithfulnessChange) if column.name != "quantity"]
        records = [
            {column: str(getattr(change, column)) for column in columns} | {"verdict": change.verdict}
            for change in faithfulness
        ]
        beside = path.with_name(f"{path.stem}-faithfulness.csv")
        return _write(comparison, path, runs, parts, {beside: records_csv(records)})


def _write(
    comparison: Comparison,
    path: Path,
    runs: Sequence[dict[str, Any]],
    parts: list[Part],
    tables: dict[Path, str],
) -> list[Path]:
    """Write a page with these parts and all differences at its end, the differences as .csv, and `tables`."""
    before, after = comparison.before[0], comparison.after[0]
    rows = [_row(c) for c in comparison.changes]
    folded = f"{len(rows)} numbers before and after"
    differences = path.with_suffix(".csv")
    names = " and ".join(file.name for file in (differences, *tables))
    names_of = told_apart([card.run for card in (before, after)], [before.folder, after.folder])
    models = f"Before: {names_of[0]}. After: {names_of[1]}."
    page = rendered(
        "card.html",
        runs,
        title="Before and after",
        about=f"{before.model} {after.model}",
        leads=[
            sentence(comparison),
            f"{models} {before.image_count} images of {before.data}.",
            *filter(None, [small_sample_note(before.image_count) if before.image_count else ""]),
            *comparison.notes,
        ],
        parts=[*parts, Part("All differences", "all", heads=HEADS, rows=rows, folded=folded)],
        beside=f"{names} in the same folder contain{'' if tables else 's'} the numbers.",
    )
    return write_all({path: page, differences: records_csv(comparison.records()), **tables})


def _folders(comparison: Comparison) -> list[Path]:
    cards = (*comparison.before, *comparison.after)
    return [card.folder for card in cards if card.folder is not None]


def _classes_part(comparison: Comparison) -> Part:
    """List the classes with any image gained or lost."""
    rows = []
    for change in comparison.classes:
        if not change.gained and not change.lost:
            continue
        class_name = comparison.class_names.get(change.label, "").split(",")[0]
        name = f"{change.label} {class_name}".strip()
        style = {"gained": "good", "lost": "sure"}.get(change.verdict, "")
        span = f"{100 * change.low:+.0f} to {100 * change.high:+.0f}"
        rows.append(
            [
                TableCell(name, name),
                *(TableCell(f"{100 * side.value:.0f}", side.value) for side in (change.before, change.after)),
                TableCell(f"{100 * change.difference:+.0f}", change.difference, style, span),
                *(TableCell(str(count), count) for count in (change.gained, change.lost, change.count)),
            ]
        )
    text = f"Accuracy by class ({comparison.setting}); intervals by Newcombe."
    empty = "" if rows else "No class has a newly correct or newly wrong image."
    title = "Classes gained and lost"
    return Part(title, "classes", text=text, heads=CLASS_HEADS, texts=1, rows=rows, empty=empty)


def _turned_parts(comparison: Comparison, shown: int, listed: int) -> list[Part]:
    """List the images that are newly wrong and newly correct, with maps of those that the runs stored."""
    shots, text = _shots(comparison, comparison.turned, shown) if shown else ({}, "")
    parts = []
    for way, names in comparison.turned.items():
        more = f" and {len(names) - listed} more" if len(names) > listed else ""
        parts.append(
            Part(
                TURNED[way],
                f"turned-{way}",
                text=f"{plural(len(names), 'image')} ({comparison.setting}). {text if names else ''}".strip(),
                shots=shots.get(way, []),
                after=", ".join(names[:listed]) + more,
            )
        )
    return parts


def _masking_text(before: bool, after: bool) -> str:
    """Describe models whose patches were hidden, not removed."""
    if before and after:
        return " Patches of both models cannot be removed: they were hidden from attention instead."
    if not (before or after):
        return ""
    one, other = ("before", "after") if before else ("after", "before")
    hidden = f" Patches of the model {one} cannot be removed: they were hidden from attention."
    return (
        f"{hidden} Those of the model {other} were removed: the two are not measured with the same settings."
    )


def _spread(comparison: Comparison, show: int) -> list[str]:
    """Images of the run, spread over its classes: in folders of classes, names are sorted by class."""
    card = comparison.before[0]
    names = card.names_of(card.population(comparison.setting))
    if len(names) <= show:
        return names
    chosen = [names[i * len(names) // show] for i in range(show)]
    return [
        *chosen,
        *(name for name in names if name not in chosen),
    ]  # the runs may not have stored all of them


def _card_tiles(
    comparison: Comparison, faithfulness: Sequence[FaithfulnessChange]
) -> list[tuple[str, str, str]]:
    """The tiles of a card: (title, numbers, difference)."""
    changes = {change.key: change for change in comparison.changes}
    card = comparison.before[0]
    told = {card.settings[label].suite for label, _ in TILES if label in card.settings}
    of_suites = [key for suite in card.suites if suite.name not in told for key in suite.headline(card)]
    tiles = []
    for key in dict.fromkeys((*TILES, *of_suites)):
        if change := changes.get(key):
            title = f"{change.setting.words}: {change.quantity.words}{change.quantity.arrow}"
            text = change.quantity.text
            sides = f"{text(change.before.mean)} → {text(change.after.mean)}"
            tiles.append((title, sides, _difference(change, change.scale)))
    for row in [row for row in faithfulness if row.method.partition("/")[0] != CHANCE][:1]:
        title = f"{row.method}: {row.quantity.words}{row.quantity.arrow}"
        sides = f"{row.before:.1f} → {row.after:.1f}"
        tiles.append((title, sides, _difference(row, 1.0)))
    return tiles


def _difference(change: Change | FaithfulnessChange, scale: float) -> str:
    few = f", only {plural(change.images, 'image')}" if small_sample_note(change.images) else ""
    return f"{scale * change.difference:+.3g}, {change.verdict or 'no significant change'}{few}"


def _faithfulness_row(change: FaithfulnessChange) -> list[TableCell]:
    span = f"{change.low:+.3g} to {change.high:+.3g}"
    style = STYLES.get(change.verdict, "")
    return [
        TableCell(change.method, change.method),
        TableCell(f"{change.quantity.words}{change.quantity.arrow}", change.metric),
        *(TableCell(change.quantity.text(value), value) for value in (change.before, change.after)),
        TableCell(f"{change.difference:+.3g}", change.difference, style, span),
        TableCell(str(change.images), change.images),
    ]
