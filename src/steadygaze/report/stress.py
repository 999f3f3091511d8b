"""The report of stress runs: bars by corruption, severity curves, attacks, occlusion, attention by layer, sample pictures, how
it was run; one HTML file, table.csv, table.md."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from steadygaze.data.benchmarks import some
from steadygaze.errors import BadInput
from steadygaze.report import svg
from steadygaze.report.bars import Bar, bars, grid
from steadygaze.report.html import rendered, write_all
from steadygaze.report.page import Cell, Figure, Part, legend
from steadygaze.report.samples import sample_pictures
from steadygaze.robustness.corruptions.corrupt import CORRUPTIONS, SEVERITIES
from steadygaze.robustness.sequences import PERTURBATIONS
from steadygaze.robustness.synthetic import PLACES
from steadygaze.runs.rows import STRESS, Rows
from steadygaze.runs.stress_card import Card
from steadygaze.runs.stress_done import unfinished
from steadygaze.runs.stress_numbers import Number, better, percent, table_csv

KINDS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"),
    "weather": ("snow", "frost", "fog", "brightness", "spatter"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression", "saturate"),
}
TILES = {
    ("clean", "miou"): "clean, mIoU",
    ("corruptions", "mean_miou"): "mean mIoU, corrupted",
    ("corruptions", "retention"): "retention",
    ("corruptions", "mean_miou_cityscapes_c"): "mean mIoU, Cityscapes-C protocol",
    ("clean", "top1"): "clean, top-1",
    ("clean", "top5"): "clean, top-5",
    ("corruptions", "mean_error"): "mean corruption error",
    ("corruptions", "mce"): "mCE",
    ("corruptions", "relative_mce"): "relative mCE",
    ("corruptions", "mean_error_all"): "mean error, extra corruptions too",
    ("imagenet-c", "mce"): "mCE, published ImageNet-C",
    ("clean", "ece"): "ECE, clean",
    ("sequences", "mfr"): "mean flip rate",
    ("imagenet-p", "mfr"): "mean flip rate, published ImageNet-P",
    ("corruptions", "attention_stability"): "attention stability",
}


def write_stress(
    rows: Rows, out: str | Path | None = None, *, pictures: bool = True, repeats: int = 2000
) -> list[Path]:
    """Write the report of these stress runs; gives the files: report.html, table.csv, table.md."""
    if rows.kinds != {STRESS}:
        raise BadInput("expected runs of one kind, got runs of verify and of stress: make a report of each")
    cards = rows.cards(repeats=repeats)
    if not all(card.keys for card in cards):
        raise BadInput(f"{', '.join(map(str, rows.folders))}: no row yet. Let steadygaze stress run first.")
    parts = [
        part for i, card in enumerate(cards) for part in _parts(card, i if len(cards) > 1 else None, pictures)
    ]
    leads = [text for card in cards for text in (_lead(card), _unfinished(card)) if text]
    page = rendered(
        "card.html",
        rows.runs,
        rows,
        title="How does the model hold up?",
        about=cards[0].model,
        leads=leads,
        parts=parts,
    )
    path = rows.folders[0] / "report.html" if out is None else Path(out)
    records = [record for card in cards for record in card.records()]
    markdown = "\n".join(_markdown(card) for card in cards)
    return write_all(
        {path: page, path.with_name("table.csv"): table_csv(records), path.with_name("table.md"): markdown}
    )


def _lead(card: Card) -> str:
    settings = len({s for s, _ in card.keys} - {"clean"})
    return f"{card.model} under {settings} settings{f', on {card.pictures} pictures of {card.data}' if card.pictures else ''}."


def _unfinished(card: Card) -> str:
    found = unfinished(card)
    if not found:
        return ""
    words = f"Not finished: {len(found)} of {len(card.run['settings']['conditions'])} settings lack pictures ({some(found)})"
    return f"{words}. Their numbers may be of other pictures than the rest; the same steadygaze stress command goes on."


def _parts(card: Card, number: int | None, pictures: bool) -> list[Part]:
    tail = "" if number is None else f": {card.model} {number + 1}"
    mark = "" if number is None else str(number + 1)
    found = [
        Part(f"The card{tail}", f"card{mark}", tiles=_tiles(card), text="± half of the 95 % interval, by bootstrap over pictures."),
        Part(f"Corruptions{tail}", f"corruptions{mark}", figures=_corruptions(card)),
        Part(f"Attacks, shifts and occlusion{tail}", f"attacks{mark}", "Attacks and shifts",
             figures=[*_attacks(card), *_shifts(card), *_drops(card), *_neighbours(card)]),
        Part(f"Sequences and synthetic pictures{tail}", f"sequences{mark}", "Sequences", figures=[*_sequences(card), *_synthetic(card)]),
        Part(f"Attention{tail}", f"attention{mark}", text="Mean over heads, by layer.", figures=_attention(card)),
    ]  # fmt: skip
    found = [part for part in found if part.tiles or part.figures]
    if pictures and any(s.split("/")[0] in CORRUPTIONS for s, _ in card.keys):
        samples, sheets, why = sample_pictures(card)
        found.append(
            Part(f"Sample pictures{tail}", f"samples{mark}", text=why, samples=samples, sheets=sheets)
        )
    found.append(_everything(card, tail, mark))
    return found


def _tiles(card: Card) -> list[tuple[str, str, str]]:
    found = []
    for key, name in TILES.items():
        number = card.numbers.get(key)
        if number is not None:
            unit = " %" if percent(number.metric) else ""
            half = f"± {number.text().partition('±')[2]}"
            found.append(
                (name, number.text(spread=False) + unit, f"{half}; {number.note}" if number.note else half)
            )
    return found


def _corruptions(card: Card) -> list[Figure]:
    found = []
    for prefix, words, score in (
        ("", "", "error"),
        ("imagenet-c/", ", published ImageNet-C", "error"),
        ("", "", "miou"),
    ):
        errors = [
            card.scores[f"{prefix}{name}", score]
            for name in CORRUPTIONS
            if (f"{prefix}{name}", score) in card.scores
        ]
        if not errors:
            continue
        what, title = ("top-1 error", "Error") if score == "error" else ("mIoU", "mIoU")
        rank = {name: i for i, names in enumerate(KINDS.values()) for name in names}
        drawn = [
            _bar(n, n.setting.removeprefix(prefix).replace("_", " "), rank[n.setting.removeprefix(prefix)])
            for n in errors
        ]
        chart = bars(
            drawn, x_label=f"{what}, mean over severities, %", title=f"{what} by corruption", highest=100
        )
        kinds = [
            svg.Series(kind, [], [], i) for i, kind in enumerate(KINDS) if any(bar.rank == i for bar in drawn)
        ]
        found.append(
            Figure(f"{title} by corruption{words}", f"whiskers are 95 % intervals{legend(kinds)}", chart)
        )
        found += _severities(card, prefix, words, "top1" if score == "error" else score)
    return found


def _bar(n: Number, name: str, rank: int = 0) -> Bar:
    return Bar(name, 100 * n.value, 100 * n.low, 100 * n.high, rank)


def _severities(card: Card, prefix: str, words: str, measure: str) -> list[Figure]:
    clean, what = card.numbers.get(("clean", measure)), "Right answers" if measure == "top1" else "mIoU"
    levels = [
        s for s in SEVERITIES if any((f"{prefix}{name}/{s}", measure) in card.numbers for name in CORRUPTIONS)
    ]
    series, every = [], {}
    for rank, (kind, names) in enumerate(KINDS.items()):
        curves = []
        for name in names:
            found = [card.numbers.get((f"{prefix}{name}/{s}", measure)) for s in levels]
            if all(found):
                curve = [100 * n.value for n in found if n]
                every[name] = curve
                curves.append(curve)
        if curves:
            series.append(svg.Series(kind, levels, np.mean(curves, axis=0).tolist(), rank))
    if clean is not None:
        series = [svg.Series(s.name, [0, *s.x], [100 * clean.value, *s.y], s.rank) for s in series]
    single = [svg.Series(name.replace("_", " "), levels, curve, svg.COLOURS) for name, curve in every.items()]
    if not series or len(levels) + (clean is not None) < 2:
        return []
    axis = {"x_label": "severity (0: clean)", "y_label": f"{what}, %".replace("Right", "right")}
    chart = svg.lines([*series, *single], **axis, title=f"{what} by severity", whole=True)
    drawn = [
        Figure(
            f"{what} by severity{words}", f"means of each kind, single ones in grey{legend(series)}", chart
        )
    ]
    if measure != "top1":
        return drawn
    sure = {"right": "top1", "confidence": "confidence", "ECE": "ece"}
    lines = []
    for rank, (name, metric) in enumerate(sure.items()):
        ys = []
        for s in levels:
            there = [n.value for c in every if (n := card.numbers.get((f"{prefix}{c}/{s}", metric)))]
            ys.append(100 * float(np.mean(there)) if there else float("nan"))
        start = card.numbers.get(("clean", metric))
        xs = [0, *levels] if start else levels
        lines.append(svg.Series(name, xs, [100 * start.value, *ys] if start else ys, rank))
    chart = svg.lines(
        lines, x_label="severity (0: clean)", y_label="%", title="calibration by severity", whole=True
    )
    return [
        *drawn,
        Figure(f"Is it as sure as it is right?{words}", f"mean over corruptions{legend(lines)}", chart),
    ]


def _attacks(card: Card) -> list[Figure]:
    series, clean = [], card.numbers.get(("clean", "top1"))
    for rank, kind in enumerate(("fgsm", "pgd")):
        found = [card.numbers[s, m] for s, m in card.keys if m == "top1" and s.startswith(f"{kind}/")]
        points = [(float(n.setting.split("/")[1]), n) for n in found]
        if clean is not None and points:
            points = [(0.0, clean), *points]
        if points:
            limits = [(100 * n.low, 100 * n.high) for _, n in points]
            series.append(
                svg.Series(
                    kind.upper(), [x for x, _ in points], [100 * n.value for _, n in points], rank, limits
                )
            )
    if not series:
        return []
    chart = svg.lines(series, x_label="epsilon, 1/255", y_label="right answers, %", title="attacks")
    return [Figure("Attacks in pixel space", legend(series), chart)]


def _shifts(card: Card) -> list[Figure]:
    apart = tuple(
        f"{name}/" for name in (*CORRUPTIONS, "imagenet-c", "fgsm", "pgd", "location", "rotation", "size")
    )
    rows = []
    for setting, metric in card.keys:
        if metric.startswith("top1") and not setting.startswith(apart):
            tail = "" if metric == "top1" else f", of {metric.removeprefix('top1_of_')}"
            rows.append(
                _bar(
                    card.numbers[setting, metric],
                    setting.replace("_", " ") + tail,
                    1 if setting != "clean" else 2,
                )
            )
    if len(rows) < 2:
        return []
    chart = bars(rows, x_label="right answers, %", title="shifts", highest=100)
    return [Figure("Right answers by set", "top-1; whiskers are 95 % intervals", chart)]


def _drops(card: Card) -> list[Figure]:
    shares = [100 * s for s in card.run["settings"].get("shares") or []]
    series = []
    for rank, name in enumerate(("random_drop", "salient_drop")):
        found = card.curve(name, "drop_right")
        if found is not None and len(found[0]) == len(shares):
            mean, half = 100 * found[0], 100 * found[1]
            limits = list(
                zip((mean - half).clip(0).tolist(), (mean + half).clip(max=100).tolist(), strict=True)
            )
            words = f"{name.replace('_', ' ')} {card.numbers[name, 'drop_right'].note}".strip()
            series.append(svg.Series(words, shares, mean.tolist(), rank, limits))
    if not series:
        return []
    chart = svg.lines(
        series, x_label="share of the tokens dropped, %", y_label="right answers, %", title="occlusion"
    )
    return [Figure("While tokens are dropped", legend(series), chart)]


def _neighbours(card: Card) -> list[Figure]:
    rows = []
    for setting, metric in card.keys:
        if metric.startswith("knn") and not metric.endswith("euclidean"):
            words = f"{setting.removeprefix('neighbours/')}, k = {metric.removeprefix('knn')}"
            rows.append(_bar(card.numbers[setting, metric], words, 3))
    if not rows:
        return []
    chart = bars(rows, x_label="right answers, %", title="nearest neighbours", highest=100)
    return [
        Figure(
            "Classes it never saw",
            "by the nearest pictures in its features, cosine; whiskers are 95 % intervals",
            chart,
        )
    ]


def _sequences(card: Card) -> list[Figure]:
    found = []
    for prefix, words in (("sequence", ""), ("imagenet-p", ", published ImageNet-P")):
        rows = [
            _bar(n, name.replace("_", " "))
            for name in PERTURBATIONS
            if (n := card.numbers.get((f"{prefix}/{name}", "flips")))
        ]
        if rows:
            chart = bars(rows, x_label="frames whose answer flips, %", title="flips by perturbation")
            found.append(Figure(f"Flips in perturbation sequences{words}", "lower is steadier", chart))
    return found


def _synthetic(card: Card) -> list[Figure]:
    found = []
    for factor, axis in (("size", "area of the object's box, %"), ("rotation", "degrees")):
        numbers = [card.numbers[s, m] for s, m in card.keys if m == "top1" and s.startswith(f"{factor}/")]
        if len(numbers) > 1:
            scale = 100 if factor == "size" else 1
            xs = [scale * float(n.setting.split("/")[1]) for n in numbers]
            limits = [(100 * n.low, 100 * n.high) for n in numbers]
            one = svg.Series(factor, xs, [100 * n.value for n in numbers], 0, limits)
            found.append(
                Figure(
                    f"By {factor}",
                    "",
                    svg.lines([one], x_label=axis, y_label="right answers, %", title=factor),
                )
            )
    places = [[card.numbers.get((f"location/{x:g},{y:g}", "top1")) for x in PLACES] for y in PLACES]
    if any(n for row in places for n in row):
        values = [[100 * n.value if n else float("nan") for n in row] for row in places]
        found.append(
            Figure(
                "By location",
                "right answers, %",
                grid(values, title="location", names=("left to right", "top to bottom")),
            )
        )
    return found


def _attention(card: Card) -> list[Figure]:
    found = []
    for metric in dict.fromkeys(m for _, m in card.keys if m.startswith("attention_")):
        name = metric.removeprefix("attention_")
        clean = card.curve("clean", metric)
        others = [
            (s, curve[0])
            for s, m in card.keys
            if m == metric and s != "clean" and (curve := card.curve(s, m))
        ]
        series = []
        if clean is not None:
            limits = list(zip((clean[0] - clean[1]).tolist(), (clean[0] + clean[1]).tolist(), strict=True))
            series.append(svg.Series("clean", list(range(len(clean[0]))), clean[0].tolist(), 1, limits))
        if others:
            mean = np.mean([curve for _, curve in others], axis=0)
            series.append(svg.Series("corrupted, mean", list(range(len(mean))), mean.tolist(), 0))
            series += [
                svg.Series(s, list(range(len(curve))), curve.tolist(), svg.COLOURS) for s, curve in others
            ]
        if series:
            chart = svg.lines(
                series,
                x_label="layer (0: the first)",
                y_label=name,
                title=f"attention {name} by layer",
                whole=True,
            )
            found.append(Figure(f"{name.capitalize()}", f"{MEANING.get(name, '')}{legend(series)}", chart))
    return found


MEANING = {
    "entropy": "in nats; high: spread out",
    "overfocus": "share of the five most attended tokens",
    "gini": "of what tokens are given; 0: even",
    "peak": "the most attended token, in even shares",
    "distance": "in patches; high: looks far",
    "diversity": "cosine between heads; lower is more diverse",
    "stability": "cosine between clean and corrupted; 1: unchanged",
}


def _everything(card: Card, tail: str, mark: str) -> Part:
    rows = []
    for (setting, metric), n in card.numbers.items():
        scale = 100 if percent(metric) else 1
        span = f"{scale * n.low:.4g} to {scale * n.high:.4g}"
        way = {"higher": "↑", "lower": "↓"}.get(better(metric), "")
        cells = [
            Cell(setting, setting),
            Cell(f"{metric} {way}".strip(), metric),
            Cell(n.text(spread=False), n.value, "", span),
        ]
        rows.append([*cells, Cell(str(n.images), n.images), Cell(n.note, n.note)])
    heads = ["setting", "metric", "value", "pictures", "note"]
    return Part(
        f"All numbers{tail}",
        f"numbers{mark}",
        heads=heads,
        rows=rows,
        folded=f"{len(rows)} numbers with 95 % intervals",
    )


def _markdown(card: Card) -> str:
    lines = [
        f"**{card.model}** ({card.weights}) on {card.data}, {card.pictures} pictures; 95 % intervals",
        "",
    ]
    if words := _unfinished(card):
        lines += [words, ""]
    lines += [
        "| setting | metric | value | 95 % interval | pictures | note |",
        "| --- | --- | ---: | --- | ---: | --- |",
    ]
    for (setting, metric), n in card.numbers.items():
        scale = 100 if percent(metric) else 1
        span = f"[{scale * n.low:.4g}, {scale * n.high:.4g}]"
        lines.append(
            f"| {setting} | {metric}{' %' if scale == 100 else ''} | {n.text(spread=False)} | {span} | {n.images} | {n.note} |"
        )
    return "\n".join(lines) + "\n"
