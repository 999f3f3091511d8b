"""What is left to gain: removal scores against the best that searched orders reach, from committed rows.

    python -m benchmarks.ceiling [docs/evidence/rows/panel] [--figure FILE] [--cifar10 FOLDER]

For each model, on the images that were searched (`python -m benchmarks.panel --methods ceiling` adds them):
the four removal scores, their mean, and its share (score − random) / (ceiling − random). With CIFAR-10's test
images, also the areas under the curves of the class probability of the embedded model. The figure has a point
for each method and model: insertion against deletion.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import steadygaze as sg
from benchmarks.panel import panel, selection
from benchmarks.panel.measure import REMOVAL
from benchmarks.panel.tables import HEADS, difference, read_all, text_with_interval
from steadygaze.runs.request import CEILING, SEARCHED

ROWS = Path("docs/evidence/rows/panel")
METHODS = (  # besides the searched ones
    "gaze_outline",
    "gaze_weighted",
    "gaze_halves",
    "gaze_removal",
    "gaze_twice",
    "gaze",
    "libra_fullgrad_plus",
    "attnlrp",
    "decompx+skipplus",
    "gae",
    "random",
)
INSERTION, DELETION = REMOVAL.index("insertion_aopc"), REMOVAL.index("deletion_aopc")


@dataclass(frozen=True)
class Searched:
    """The removal scores (images, 4) of each method, on the images of one model that were searched."""

    values: Mapping[str, np.ndarray]

    @property
    def orders(self) -> list[str]:
        """The searched orders."""
        return [name for name in self.values if name.partition(":")[0] == SEARCHED]

    @property
    def ceiling(self) -> np.ndarray:
        """(images, 5): the best of each score, and of their mean."""
        each = np.stack([self.values[name] for name in self.orders])
        return np.concatenate([each.max(0), each.mean(2).max(0)[:, None]], axis=1)

    def scores(self, method: str) -> np.ndarray:
        """(images, 5): the four scores and their mean; of the ceiling too."""
        if method == CEILING:
            return self.ceiling
        x = self.values[method]
        return np.concatenate([x, x.mean(1, keepdims=True)], axis=1)

    def share(self, method: str) -> float:
        """(score − random) / (ceiling − random) of the mean."""
        score, chance, top = (self.scores(name)[:, -1].mean() for name in (method, "random", CEILING))
        return float((score - chance) / (top - chance))


def read_searched(folder: Path) -> Searched | None:
    """None without searched orders."""
    found = read_all(folder)
    if found is None:
        return None
    orders = [x for name, x in found.values.items() if name.partition(":")[0] == SEARCHED]
    if len(orders) < 2:
        return None
    known = ~np.isnan(np.stack(orders)).any((0, 2))
    values = {name: x[known] for name, x in found.values.items()}
    return Searched({name: x for name, x in values.items() if not np.isnan(x).any()})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="?", default=ROWS)
    parser.add_argument("--figure", type=Path, default=Path("docs/images/ceiling.png"))
    parser.add_argument("--cifar10", type=Path, help="CIFAR-10's test images")
    chosen = parser.parse_args()
    found = {name: read_searched(chosen.rows / name) for name in panel()}
    models = {name: searched for name, searched in found.items() if searched is not None}
    for name, searched in models.items():
        print_model(name, searched)
    print_left(models)
    if chosen.cifar10 is not None and "embedded" in models:
        print_areas(models["embedded"], chosen.cifar10)
    draw(models, chosen.figure)


def shown_methods(searched: Searched) -> list[str]:
    """The ceiling, the searched orders and the compared methods, best first."""
    names = [CEILING, *searched.orders, *(name for name in METHODS if name in searched.values)]
    return sorted(names, key=lambda name: -searched.scores(name)[:, -1].mean())


def print_model(name: str, searched: Searched) -> None:
    """Scores of one model."""
    images = len(searched.ceiling)
    print(f"\n### `{name}`, {images} images\n")
    print(f"| order | {' | '.join(HEADS)} | mean | share |\n| --- |{' ---: |' * (len(HEADS) + 2)}")
    for method in shown_methods(searched):
        numbers = [f"{value:.1f}" for value in searched.scores(method).mean(0)]
        print(f"| {method} | {' | '.join(numbers)} | {100 * searched.share(method):.0f} % |")


def print_left(models: Mapping[str, Searched]) -> None:
    """The ceiling minus the default and `gaze_halves`, over the models."""
    print(f"\n### Left to gain, mean over {len(models)} models\n")
    print(f"| ceiling minus | {' | '.join(HEADS)} | mean | share |\n| --- |{' ---: |' * (len(HEADS) + 2)}")
    everywhere = [m for m in METHODS if all(m in s.values for s in models.values())]
    for method in everywhere:
        gaps = [s.ceiling - s.scores(method) for s in models.values()]
        cells = [text_with_interval(*difference(gaps, column)) for column in range(len(HEADS) + 1)]
        share = np.mean([s.share(method) for s in models.values()])
        print(f"| {method} | {' | '.join(cells)} | {100 * share:.0f} % |")


def print_areas(searched: Searched, folder: Path) -> None:
    """Areas under the curves of the probability of the class, by the embedded model."""
    loaded = sg.load_model("embedded")
    with selection(folder, 1, 400) as data:
        files = sorted(path for path in data.rglob("*.png"))
        images = torch.stack([loaded.preprocess(Image.open(file).convert("RGB")) for file in files])
    assert len(images) == len(searched.ceiling), "the areas are of one image of each class"
    with torch.no_grad():
        whole = 100 * loaded.model(images).softmax(-1)[torch.arange(len(images)), torch.arange(len(images))]
    print(f"\n### Areas under the curves of the class probability, embedded model, {len(images)} images\n")
    print("| order | insertion | deletion (lower is better) | difference |\n| --- | ---: | ---: | ---: |")
    rows = []
    for method in [name for name in shown_methods(searched) if name != CEILING]:
        values = searched.values[method]
        insertion = float((whole.numpy() - 100 + values[:, INSERTION]).mean())
        deletion = float((whole.numpy() - values[:, DELETION]).mean())
        rows.append((insertion - deletion, insertion, deletion, method))
    for change, insertion, deletion, method in sorted(rows, reverse=True):
        print(f"| {method} | {insertion:.1f} | {deletion:.1f} | {change:.1f} |")


def draw(models: Mapping[str, Searched], path: Path) -> None:
    """Insertion against deletion: a panel for each model, a point for each method; searched orders marked."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(models))
    rows = -(-len(models) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.4 * columns, 3.9 * rows), dpi=150, squeeze=False, layout="constrained"
    )
    for axes, (name, searched) in zip(grid.flat, models.items(), strict=False):
        _points(axes, name, searched)
    for axes in grid.flat[len(models) :]:
        axes.set_visible(False)
    figure.supxlabel("deletion AOPC (higher is better)")
    figure.supylabel("insertion AOPC (higher is better)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


MARKS = {"greedy": "joint", "greedy:by=insertion": "insertion", "greedy:by=deletion": "deletion"}


def _points(axes, name: str, searched: Searched) -> None:  # type: ignore[no-untyped-def]
    others: Sequence[str] = [m for m in searched.values if m not in searched.orders]
    for method in others:
        x, y = (searched.values[method][:, column].mean() for column in (DELETION, INSERTION))
        named = method in ("gaze_removal", "gaze_halves", "gae", "random")
        axes.scatter(x, y, s=26 if named else 9, color="#2563eb" if named else "#cbd5e1", zorder=2 + named)
        if named:
            below = method == "gaze_removal"  # close to gaze_halves
            place = (-5, -8) if below else (-5, 3)
            axes.annotate(method, (x, y), xytext=place, textcoords="offset points", fontsize=7, ha="right")
    top = searched.ceiling[:, [DELETION, INSERTION]].mean(0)
    axes.axvline(top[0], color="#94a3b8", linestyle="--", linewidth=0.8)
    axes.axhline(top[1], color="#94a3b8", linestyle="--", linewidth=0.8)
    for method in searched.orders:
        x, y = (searched.values[method][:, column].mean() for column in (DELETION, INSERTION))
        axes.scatter(x, y, s=60, marker="*", color="#c2410c", zorder=4)
        label = f"searched: {MARKS.get(method, method.partition(':')[2])}"
        axes.annotate(label, (x, y), xytext=(-5, -9), textcoords="offset points", fontsize=7, ha="right")
    axes.set_title(f"{name}, {len(searched.ceiling)} images", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(0.12)


if __name__ == "__main__":
    main()
