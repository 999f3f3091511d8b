"""Draw the figures of README.md into docs/images.

    python tools/readme_figures.py [--checkpoint deit_tiny_patch16_224.safetensors] [--dinov2 FILE]

`first.png`, `explain.png`, `scores.png`, `check.png` and `patch_fool.png` need DeiT-Tiny (from the hub, or
the checkpoint) and the photographs of scikit-image.
`stress.png`, `steady.png` and `strip_training.png` draw tables of docs/evidence, whose rows are committed.
`leaderboard.png` is drawn by `python -m benchmarks.leaderboard`.
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


def draw_first(checkpoint: Path | None) -> None:
    """What the first lines of README.md write: one photograph, its map, and the check of the map."""
    from PIL import Image
    from skimage import data

    import steadygaze as sg

    loaded = sg.load_model("deit_tiny_patch16_224", checkpoint=checkpoint)
    att = sg.explain(loaded, Image.fromarray(data.chelsea()), check=True)
    _save_small(att.figure(cell=260), "first.png")


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


def draw_strip(checkpoint: Path | None, dinov2: Path | None) -> None:
    """Small pictures, one for each use, on one photograph: docs/images/strip_NAME.png."""
    import numpy as np
    import timm
    import torch
    from PIL import Image
    from safetensors.torch import load_file
    from skimage import data

    import steadygaze as sg
    from steadygaze.robustness import corrupt

    loaded = sg.load_model("deit_tiny_patch16_224", checkpoint=checkpoint)
    photo = Image.fromarray(data.chelsea())
    seen = loaded.to_image(loaded.preprocess(photo))
    att = sg.explain(loaded, photo, check=True)
    rows, columns = att.grid
    rank = att.scores[0].flatten().argsort(descending=True)
    keep = torch.ones(rows * columns, dtype=torch.bool)
    keep[rank[: rows * columns // 4]] = False
    holes = np.kron(keep.view(rows, columns).numpy(), np.ones((224 // rows, 224 // columns)))[..., None]
    removed = np.where(holes, np.asarray(seen), 245).astype(np.uint8)
    tiles = {
        "attention": sg.attention(loaded, photo).overlay(layer=-1, head=1),
        "class": att.overlay(),
        "removed": Image.fromarray(removed),
        "corruption": Image.fromarray(corrupt(np.asarray(seen), "fog", 3, seed=0)),
    }
    if dinov2 is not None:
        model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, dynamic_img_size=True).eval()
        model.load_state_dict({name: value.float() for name, value in load_file(dinov2).items()})
        from torchvision import transforms

        steps = transforms.Compose(
            [
                transforms.Resize((448, 448), transforms.InterpolationMode.BICUBIC),
                transforms.ToTensor(),
                transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )
        features = sg.features(model, photo, transform=steps)
        colors = features.pca(3).colors[0]
        tiles["features"] = Image.fromarray((255 * colors.numpy()).astype(np.uint8))
        tiles["point"] = _like_the_eye(features, photo)
    for name, tile in tiles.items():
        smooth = Image.Resampling.BICUBIC
        _save_small(tile.convert("RGB").resize((160, 160), smooth), f"strip_{name}.png")


def _like_the_eye(features: Any, photo: Any) -> Any:
    """The photograph colored by the cosine of each patch with the left eye, which is marked."""
    import numpy as np
    from PIL import Image, ImageDraw

    from steadygaze.results.drawing import paint

    side, row, column = 448, 12, 11
    alike = Image.fromarray(features.similarity(0, (row, column))[0].numpy())
    smooth = np.asarray(alike.resize((side, side), Image.Resampling.BICUBIC))
    tile = paint(smooth, photo.convert("RGB").resize((side, side)))
    step = side / alike.width
    x, y = (column + 0.5) * step, (row + 0.5) * step
    ImageDraw.Draw(tile).ellipse((x - 18, y - 18, x + 18, y + 18), outline="white", width=7)
    return tile


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


def draw_strip_training() -> None:
    """The tile of the strip: accuracy on breeds not used for training, and on ImageNet, before and after."""
    from matplotlib import pyplot

    page = ROOT / "docs" / "evidence" / "training.md"
    lines = _table(page, "| variant | rate | seeds")
    before = next(cells for cells in lines if cells[0] == "before")
    change = next(cells for cells in lines if cells[0] == RELEVANCE)
    figure, axes = pyplot.subplots(figsize=(1.6, 1.6), dpi=200)
    for column, name, color in ((3, "new breeds", WARM), (8, "ImageNet", COOL)):
        gain = float(change[column].split()[0])
        start = float(before[column])
        axes.plot([0, 1], [start, start + gain], "o-", color=color, linewidth=2.5, markersize=5)
        axes.text(1.12, start + gain, f"{gain:+.1f}", color=color, fontsize=9, va="center", weight="bold")
        axes.text(0.5, start + gain / 2 + 3.5, name, color=color, fontsize=7.5, ha="center")
    axes.set(xlim=(-0.3, 1.75), ylim=(22, 80), xticks=[0, 1], yticks=[])
    axes.set_xticklabels(["before", "after"], fontsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    _save(figure, "strip_training.png")


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
    parser.add_argument("--dinov2", type=Path, help="weights of DINOv2 ViT-S/14, for two tiles of the strip")
    parser.add_argument("--only-tables", action="store_true", help="only figures of tables")
    options = parser.parse_args()
    draw_stress()
    draw_steady()
    draw_strip_training()
    if not options.only_tables:
        draw_first(options.checkpoint)
        draw_explain(options.checkpoint)
        draw_scores(options.checkpoint)
        draw_check(options.checkpoint)
        draw_strip(options.checkpoint, options.dinov2)
        draw_patch_fool(options.checkpoint)


if __name__ == "__main__":
    main()
