"""Draw the figures of README.md into docs/images.

    python tools/readme_figures.py [--checkpoint deit_tiny_patch16_224.safetensors]

`explain.png`, `scores.png`, `check.png` and `patch_fool.png` need DeiT-Tiny (from the hub, or the
checkpoint) and the photographs of scikit-image.
`stress.png` and `steady.png` draw tables of docs/evidence, whose rows are committed. `leaderboard.png` is
drawn by `python -m benchmarks.leaderboard`.
"""

import argparse
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
METHODS = ["gaze_outline", "attnlrp", "gae", "rollout"]
PHOTOS = ("chelsea", "coffee", "rocket")
WARM, COOL, GRAY = "#c1440e", "#1c4fa0", "#94a3b8"
RELEVANCE = "map by rollout, relevance only"  # the line of docs/evidence/training.md that is drawn
MEASURES = {  # columns of that table
    3: "breeds not used for training, varied: top-1 of 1,000 classes",
    4: "the same: of the 24 breeds",
    6: "breeds used for training, varied: top-1 of 1,000 classes",
    8: "ImageNet: top-1",
    9: "relevance on the animal",
}


def draw_explain(checkpoint: Path | None) -> None:
    """Methods side by side on three photographs."""
    import torch
    from PIL import Image
    from skimage import data

    import steadygaze as sg
    from steadygaze.results.attribution import comparison_grid

    loaded = sg.load_model("deit_tiny_patch16_224", checkpoint=checkpoint)
    photos = [Image.fromarray(getattr(data, name)()) for name in PHOTOS]
    images = torch.stack([loaded.preprocess(photo) for photo in photos])
    attributions = sg.explain(loaded, images, method=METHODS)
    grid = comparison_grid([loaded.to_image(image) for image in images], attributions, cell=176)
    _save_small(grid, "explain.png")


def draw_scores(checkpoint: Path | None) -> None:
    """One method on one photograph, for the logit and for the log-odds."""
    from PIL import Image
    from skimage import data

    import steadygaze as sg

    loaded = sg.load_model("deit_tiny_patch16_224", checkpoint=checkpoint)
    photo = Image.fromarray(data.chelsea())
    maps = {
        f"{method}, {score}": sg.explain(loaded, photo, method=method, score=score)
        for method in ("gaze_outline", "gaze")
        for score in ("logit", "log_odds")
    }
    _save_small(sg.Attributions(maps).figure(cell=176), "scores.png")


def draw_patch_fool(checkpoint: Path | None) -> None:
    """A photograph before and after Patch-Fool, and the attention that its patches receive."""
    from PIL import Image
    from skimage import data

    import steadygaze as sg

    loaded = sg.load_model("deit_tiny_patch16_224", checkpoint=checkpoint)
    image = loaded.preprocess(Image.fromarray(data.chelsea()))[None]
    label = loaded.model(image).argmax(1)
    result = sg.robustness.patch_fool(
        loaded.model, image, label, mean=loaded.mean, std=loaded.std, stop_early=True
    )
    _save_small(result.figure(), "patch_fool.png")


def draw_check(checkpoint: Path | None) -> None:
    """A map with its removal curves, for the predicted class, and a map that fails."""
    from PIL import Image
    from skimage import data

    import steadygaze as sg

    loaded = sg.load_model("deit_tiny_patch16_224", checkpoint=checkpoint)
    photo = Image.fromarray(data.rocket())
    maps = sg.explain(loaded, photo, method=["gaze_outline", "rollout"], check=True)
    _save_small(maps.figure(), "check.png")


def _save_small(figure: Any, name: str) -> None:
    """Write a PNG with 256 colors."""
    from PIL import Image

    palette = figure.quantize(256, method=Image.Quantize.MAXCOVERAGE)
    figure.quantize(palette=palette, dither=Image.Dither.FLOYDSTEINBERG).save(IMAGES / name, optimize=True)


def draw_stress() -> None:
    """Error under each corruption of ImageNet-C, severities 1 to 5."""
    page = ROOT / "docs" / "evidence" / "robustness.md"
    lines = _table(page, "| corruption | error %")
    clean = 100 - float(_table(page, "| measure | value")[0][1].partition(",")[0])
    errors = {cells[0]: [float(cell) for cell in cells[1:6]] for cells in lines}
    names = sorted(errors, key=lambda name: errors[name][2])
    figure, axes = _axes(5.2)
    for place, name in enumerate(names):
        axes.plot(errors[name], [place] * 5, color=GRAY, linewidth=1.5, zorder=1)
        for severity, error in enumerate(errors[name], 1):
            axes.scatter(
                error, place, s=10 + 10 * severity, color=WARM, alpha=0.2 + 0.16 * severity, zorder=2
            )
    axes.axvline(clean, color=COOL, linewidth=1.2)
    axes.text(clean - 0.5, 7, "clean", color=COOL, ha="right", va="center", rotation=90)
    axes.set_xlim(left=25)
    axes.set_yticks(range(len(names)), [name.replace("_", " ") for name in names])
    axes.set_xlabel("top-1 error in %, severity 1 (small) to 5 (large)")
    _save(figure, "stress.png")


def draw_steady() -> None:
    """What a fine-tuning changed, in points with 95 % intervals."""
    lines = _table(ROOT / "docs" / "evidence" / "training.md", "| variant | rate | seeds")
    cells = next(cells for cells in lines if cells[0] == RELEVANCE)
    figure, axes = _axes(2.3)
    for place, column in enumerate(reversed(MEASURES)):
        value, low, high = map(float, re.findall(r"[-+]?\d+\.\d+", cells[column]))
        color = GRAY if low <= 0 <= high else (WARM if value > 0 else COOL)
        axes.plot([low, high], [place, place], color=color, linewidth=2)
        axes.scatter(value, place, color=color, s=40, zorder=2)
    axes.axvline(0, color="#1b1b1f", linewidth=0.8)
    axes.set_yticks(range(len(MEASURES)), list(reversed(MEASURES.values())))
    axes.set_xlabel("change in points, with 95 % intervals")
    _save(figure, "steady.png")


def _table(path: Path, head: str) -> list[list[str]]:
    """The lines of the Markdown table that begins with `head`, as cells."""
    lines = path.read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head)) + 2
    end = next(n for n in range(start, len(lines) + 1) if n == len(lines) or not lines[n].startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[start:end]]


def _axes(height: float) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, height), dpi=110)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#e5e7eb")
    axes.set_axisbelow(True)
    return figure, axes


def _save(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(IMAGES / name)


def main() -> None:
    """Draw all figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--only-tables", action="store_true", help="only figures of tables")
    options = parser.parse_args()
    draw_stress()
    draw_steady()
    if not options.only_tables:
        draw_explain(options.checkpoint)
        draw_scores(options.checkpoint)
        draw_check(options.checkpoint)
        draw_patch_fool(options.checkpoint)


if __name__ == "__main__":
    main()
