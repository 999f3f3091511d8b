"""Draw every method on one image: python tools/method_sheet.py IMAGE OUT.png --model NAME --checkpoint
FILE"""

import argparse
from pathlib import Path

from PIL import Image, ImageDraw

import steadygaze as sg
from steadygaze.data.images import read_image
from steadygaze.methods.registry import unavailable

SIDE, GAP, TITLE, COLUMNS = 168, 8, 18, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("image", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="deit_tiny_patch16_224")
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    loaded = sg.load_model(options.model, checkpoint=options.checkpoint)
    images = loaded.preprocess(read_image(options.image))[None]
    image = loaded.to_image(images[0])
    vit = sg.adapt(loaded.model)
    names = [m.name for m in sg.list_methods() if not unavailable(sg.method(m.name), vit)]
    maps = sg.explain(vit, images, method=names)
    tiles: dict[str, Image.Image] = {"image": image}
    tiles |= {name: attribution.overlay(image) for name, attribution in maps.items()}
    rows = -(-len(tiles) // COLUMNS)
    sheet = Image.new("RGB", (COLUMNS * (SIDE + GAP) + GAP, rows * (SIDE + GAP + TITLE) + GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for i, (name, tile) in enumerate(tiles.items()):
        x, y = GAP + i % COLUMNS * (SIDE + GAP), GAP + i // COLUMNS * (SIDE + GAP + TITLE)
        pen.text((x, y), name, fill="black", font_size=13)
        sheet.paste(tile.resize((SIDE, SIDE), Image.Resampling.LANCZOS), (x, y + TITLE))
    sheet.save(options.out, optimize=True)
    print(f"{options.out}: {len(names)} methods")


if __name__ == "__main__":
    main()
