"""Draw the figures of docs/gallery.md that no other tool draws, into docs/images:

python tools/gallery_figures.py [--checkpoint deit_tiny_patch16_224.safetensors]

They show DeiT-Tiny (from the hub, or the checkpoint) on photographs of scikit-image.
"""

import argparse
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from skimage import data

import steadygaze as sg
from steadygaze.robustness import corrupt

IMAGES = Path(__file__).parents[1] / "docs" / "images"
ENDS = ["gaze_removal", "gaze_outline", "decompx+skipplus"]
CORRUPTIONS = ("fog", "gaussian_noise", "motion_blur")
REMOVED = (0, 5, 10, 20)  # patches
CELL = 176


def attention(loaded: sg.LoadedModel) -> Image.Image:
    """The heads of one layer, from the class token."""
    return sg.attention(loaded, Image.fromarray(data.chelsea())).figure(layer=6)


def ends(loaded: sg.LoadedModel) -> Image.Image:
    """Three methods on two photographs: what removal shows, the default, and outlines."""
    photos = [Image.fromarray(photo()) for photo in (data.chelsea, data.coffee)]
    return sg.explain(loaded, photos, method=ENDS).figure(cell=CELL)


def contrast(loaded: sg.LoadedModel) -> Image.Image:
    """The logit of a class, its log-odds, and its logit minus that of the class that comes second."""
    photos = [Image.fromarray(photo()) for photo in (data.chelsea, data.coffee)]
    scores = ("logit", "log_odds", "contrast")
    maps = {f"gaze, {score}": sg.explain(loaded, photos, method="gaze", score=score) for score in scores}
    return sg.Attributions(maps).figure(cell=CELL)


def corruption(loaded: sg.LoadedModel) -> Image.Image:
    """The default's map of a photograph, clean and corrupted with severity 3; each for its own prediction."""
    photo = data.chelsea()
    maps = sg.explain(loaded, [photo, *(corrupt(photo, name, 3, seed=0) for name in CORRUPTIONS)])
    halves = [maps[:2].figure(cell=CELL), maps[2:].figure(cell=CELL)]
    return beside(halves)


def removed(loaded: sg.LoadedModel) -> Image.Image:
    """Predictions without the brightest patches of a map."""
    vit = sg.adapt(loaded.model)
    photo = Image.fromarray(data.rocket())
    image = loaded.to_image(loaded.preprocess(photo))
    scores = sg.explain(loaded, photo).scores[0].flatten()
    order = scores.argsort(descending=True)
    tokens = vit.embed(loaded.preprocess(photo)[None])
    tiles = []
    for count in REMOVED:
        kept = order[count:].sort().values
        x = vit.select(tokens, kept[None])
        for block in vit.blocks:
            x = block(x)
        probability, index = vit.head(x).softmax(-1)[0].max(-1)
        shown = torch.zeros(len(order))
        shown[kept] = 1
        mask = Image.fromarray((255 * shown.view(vit.grid)).byte().numpy()).resize(image.size, 0)
        drawn = Image.composite(image, Image.new("RGB", image.size, "#f5f5f5"), mask)
        assert loaded.class_names is not None
        name = loaded.class_names[int(index)].partition(",")[0]
        tiles.append(titled(drawn.resize((CELL, CELL)), f"without {count}: {name} {probability:.0%}"))
    return beside(tiles)


def titled(image: Image.Image, words: str) -> Image.Image:
    whole = Image.new("RGB", (image.width, image.height + 22), "white")
    whole.paste(image, (0, 22))
    ImageDraw.Draw(whole).text((0, 4), words, fill="#1b1b1f", font_size=12)
    return whole


def beside(parts: list[Image.Image]) -> Image.Image:
    row = Image.new("RGB", (sum(part.width + 8 for part in parts) - 8, parts[0].height), "white")
    for i, part in enumerate(parts):
        row.paste(part, (sum(one.width + 8 for one in parts[:i]), 0))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path)
    options = parser.parse_args()
    loaded = sg.load_model("deit_tiny_patch16_224", checkpoint=options.checkpoint)
    for draw in (attention, ends, contrast, removed, corruption):
        path = IMAGES / f"gallery_{draw.__name__}.jpg"
        draw(loaded).save(path, quality=80)
        print(path, path.stat().st_size)


if __name__ == "__main__":
    main()
