"""Draw every method on two photographs, for the reference and docs/methods.md.

    python tools/method_sheet.py [--checkpoint deit_tiny_patch16_224.safetensors] [--methods NAME ...]

It needs DeiT-Tiny (from the hub, or the checkpoint) and photographs of scikit-image. Into docs/images it
writes `methods/photographs.jpg`, `methods/NAME.jpg` for each method, and `methods.jpg`, the first photograph
with the map of each. `--methods` draws some of them again. About ten minutes on one core, nearly all of it
for searches.
"""

import argparse
import warnings
from pathlib import Path

import torch
from PIL import Image, ImageDraw

import steadygaze as sg
from steadygaze.methods.registry import unavailable

FOLDER = Path(__file__).parents[1] / "docs" / "images" / "methods"
SHEET = FOLDER.with_suffix(".jpg")
PHOTOS = ("chelsea", "coffee")
BUDGET = 1000  # at most as many forward passes for a search
SIDE, GAP = 224, 8  # of a tile
CELL, TITLE, COLUMNS = 168, 22, 6  # of the sheet
QUALITY = 68


def draw(checkpoint: Path | None, chosen: list[str]) -> None:
    """Write the tiles of the chosen methods, or of all."""
    from skimage import data

    loaded = sg.load_model("deit_tiny_patch16_224", checkpoint=checkpoint)
    vit = sg.adapt(loaded.model)
    inputs = torch.stack([loaded.preprocess(Image.fromarray(getattr(data, name)())) for name in PHOTOS])
    photos = [loaded.to_image(image) for image in inputs]
    beside(photos).save(FOLDER / "photographs.jpg", quality=QUALITY)
    infos = sorted(sg.list_methods(), key=lambda info: info.cost)
    for name in chosen or [info.name for info in infos]:
        if unavailable(sg.method(name), vit):
            continue
        budget = dict(sg.method(name).base.options).get("budget") or 0
        given = {"budget": BUDGET} if budget > BUDGET else {}
        attribution = sg.explain(vit, inputs, method=sg.method(name, **given))
        tiles = [attribution.overlay(photo, i) for i, photo in enumerate(photos)]
        beside(tiles).save(FOLDER / f"{name}.jpg", quality=QUALITY)
        print(name, flush=True)


def beside(tiles: list[Image.Image]) -> Image.Image:
    row = Image.new("RGB", (len(tiles) * (SIDE + GAP) - GAP, SIDE), "white")
    for i, tile in enumerate(tiles):
        row.paste(tile, (i * (SIDE + GAP), 0))
    return row


def sheet() -> list[str]:
    """Write the sheet of the tiles that exist; its comment holds the names, for a test."""
    names = [info.name for info in sg.list_methods() if (FOLDER / f"{info.name}.jpg").exists()]
    rows = -(-(1 + len(names)) // COLUMNS)
    size = COLUMNS * (CELL + GAP) + GAP, rows * (CELL + GAP + TITLE) + GAP
    whole = Image.new("RGB", size, "white")
    pen = ImageDraw.Draw(whole)
    for i, name in enumerate(["photographs", *names]):
        x, y = GAP + i % COLUMNS * (CELL + GAP), GAP + i // COLUMNS * (CELL + GAP + TITLE)
        pen.text((x, y), name if i else "photograph", fill="black", font_size=15)
        tile = Image.open(FOLDER / f"{name}.jpg").crop((0, 0, SIDE, SIDE))
        whole.paste(tile.resize((CELL, CELL), Image.Resampling.LANCZOS), (x, y + TITLE))
    whole.save(SHEET, quality=QUALITY, comment=" ".join(names))
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--methods", nargs="+", default=[], metavar="NAME")
    options = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # maps without any evidence are shown as they are
        draw(options.checkpoint, options.methods)
    names = sheet()
    print(
        f"{SHEET}: {len(names)} methods; without: {sorted({i.name for i in sg.list_methods()} - set(names))}"
    )


if __name__ == "__main__":
    main()
