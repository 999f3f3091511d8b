"""The figures of the leaderboard: removal scores with intervals, beside them the other measures as colors;
the two ends, removal against localization.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from pathlib import Path

import numpy as np

import steadygaze as sg
from benchmarks.panel.columns import LOCALIZATION, REMOVAL_MEAN, Measure
from benchmarks.panel.ranking import Entry
from steadygaze.errors import UnknownNameError
from steadygaze.methods.registry import forward_passes

SHOWN = 22
COLORS = {  # by family; what is not listed is gray
    "decomposition": "#c2410c",
    "gradient": "#2563eb",
    "propagation": "#7c3aed",
    "attention": "#059669",
    "cam": "#ca8a04",
    "black box": "#475569",
}


def draw(ranks: Mapping[Measure, Sequence[Entry]], path: Path) -> None:
    """The best methods, and random."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    entries = ranks[REMOVAL_MEAN]
    shown = [*entries[:SHOWN], *(e for e in entries[SHOWN:] if e.method == "random")]
    others = [m for m in ranks if m.about and m is not REMOVAL_MEAN and m.title != "SRG"]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(11, 0.33 * len(shown) + 1.6), dpi=150, sharey=True,
        width_ratios=[2.2, 0.42 * max(len(others), 1)], gridspec_kw={"wspace": 0.03},
    )  # fmt: skip
    _points(left, shown)
    _table(right, shown, others, ranks)
    figure.suptitle(
        "How faithful is an explanation? Removal of patches, mean over the panel's models",
        x=0.01, y=0.96, ha="left", fontsize=13, fontweight="bold",
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def draw_two_ends(ranks: Mapping[Measure, Sequence[Entry]], path: Path) -> None:
    """Every method that has both: the removal score across, average precision upward. Named in black: methods
    that no other one exceeds in both. Nothing is drawn without localization."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    heights = {entry.method: entry.value for entry in ranks.get(LOCALIZATION, ())}
    ends = {e.method: (e.value, heights[e.method]) for e in ranks[REMOVAL_MEAN] if e.method in heights}
    if not ends:
        return
    figure, axes = plt.subplots(figsize=(10, 7), dpi=150)
    best = {m for m, (x, y) in ends.items() if not any(a > x and b > y for a, b in ends.values())}
    families: dict[str, object] = {}
    for method, point in ends.items():
        family, _ = _known(method)
        color = COLORS.get(family, "#94a3b8")
        mark = axes.scatter(*point, color=color, s=60 if method in best else 22, zorder=3)
        families.setdefault(family, mark)
    axes.set_xlabel("removal: mean of four scores over the panel's models (points)")
    axes.set_ylabel("localization: average precision on pets, DeiT-Tiny (%)")
    axes.set_title("Two ends: faithful to the model, or an outline of the object", loc="left", weight="bold")
    axes.grid(color="#e2e8f0")
    axes.set_axisbelow(True)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(families.values(), families.keys(), loc="lower right", fontsize=8, frameon=False)
    _name_points(axes, ends, best)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def _name_points(axes, points: Mapping[str, tuple[float, float]], best: Set[str]) -> None:  # type: ignore[no-untyped-def]
    """Write each name beside its point, the best first, where it covers the least of what is there."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    axes.figure.canvas.draw()
    pixels = {method: axes.transData.transform(point) for method, point in points.items()}
    placed = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in pixels.values()]
    for method in sorted(points, key=lambda method: method not in best):
        choices = []
        for distance in (5, 14, 24, 36, 50):
            for dx, dy, ha in ((1, 0.4, "left"), (-1, 0.4, "right"), (1, -1, "left"), (-1, -1, "right")):
                text = axes.annotate(
                    method, points[method], xytext=(6 * dx, distance * dy), textcoords="offset points", ha=ha,
                    va="center", fontsize=9 if method in best else 6.5,
                    color="black" if method in best else "#64748b",
                    fontweight="bold" if method in best else None,
                    arrowprops=None if distance < 14 else {"arrowstyle": "-", "color": "#cbd5e1", "lw": 0.5},
                )  # fmt: skip
                text.get_window_extent()  # places it
                box = Text.get_window_extent(text)  # without its line
                covered = sum(map(box.count_overlaps, ([other] for other in placed)))
                outside = box.x1 > axes.bbox.x1 or box.x0 < axes.bbox.x0
                choices.append((covered + 5 * outside, distance, len(choices), text, box))
        *_, kept, box = min(choices, key=lambda choice: choice[:3])
        for *_, text, _box in choices:
            if text is not kept:
                text.remove()
        placed.append(box)


def _points(axes, shown: Sequence[Entry]) -> None:  # type: ignore[no-untyped-def]
    families: dict[str, object] = {}
    for place, entry in enumerate(shown):
        family, cost = _known(entry.method)
        error = [[entry.value - entry.low], [entry.high - entry.value]]
        color = COLORS.get(family, "#94a3b8")
        mark = axes.errorbar(entry.value, place, xerr=error, fmt="o", color=color, capsize=3, markersize=6)
        families.setdefault(family, mark)
        axes.annotate(
            cost, (1.0, place), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=8,
            color="#64748b", xytext=(-4, 0), textcoords="offset points",
        )  # fmt: skip
    axes.set_yticks(range(len(shown)), [entry.method for entry in shown])
    axes.invert_yaxis()
    axes.grid(axis="x", color="#e2e8f0")
    axes.set_axisbelow(True)
    low, high = min(e.low for e in shown), max(e.high for e in shown)
    axes.set_xlim(max(0, low - 2), high + 0.22 * (high - low))
    axes.set_xlabel("mean of four removal scores (points, higher is better, 95 % intervals)")
    axes.annotate(
        "forwards", (1.0, -0.9), xycoords=("axes fraction", "data"), ha="right", va="center", fontsize=8,
        color="#64748b", xytext=(-4, 0), textcoords="offset points", annotation_clip=False,
    )  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        families.values(),
        families.keys(),
        loc="lower left",
        bbox_to_anchor=(0, 0.06),
        fontsize=8,
        frameon=False,
    )


def _table(axes, shown, others, ranks) -> None:  # type: ignore[no-untyped-def]
    """A cell's color runs from the value of `random` (white) to the best method's (green)."""
    for x, measure in enumerate(others):
        values = {e.method: e.value for e in ranks[measure]}
        best, chance = max(values.values()), values.get("random", min(values.values()))
        for y, entry in enumerate(shown):
            value = values.get(entry.method)
            if value is None or np.isnan(value):
                continue
            share = float(np.clip((value - chance) / (best - chance or 1), 0, 1))
            color = tuple(1 - share * (1 - c) for c in (0.33, 0.72, 0.53))
            axes.add_patch(_rectangle(x, y, color))
            weight = "bold" if value == best else "normal"
            axes.text(
                x,
                y,
                f"{round(value, measure.digits) + 0.0:.{measure.digits}f}",
                ha="center",
                va="center",
                fontsize=8,
                weight=weight,
            )
    axes.set_xlim(-0.5, max(len(others), 1) - 0.5)
    axes.set_xticks(range(len(others)), [m.title for m in others], fontsize=9)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelleft=False)
    axes.spines[:].set_visible(False)


def _rectangle(x: float, y: float, color: tuple[float, ...]):  # type: ignore[no-untyped-def]
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=color, edgecolor="none")


def _known(method: str) -> tuple[str, str]:
    """Family and cost; of a method that is not registered here, nothing is known."""
    try:
        found = sg.method(method)
    except UnknownNameError:
        return "yours", ""
    return found.base.family, f"{forward_passes(found):g}"
