"""Make the small example images of `steadygaze demo`, 96 x 96 pixels.

    python tools/make_demo_images.py src/steadygaze/assets/demo

The cat is a photograph, the horse a silhouette on a drawn meadow, both from scikit-image; the others are
drawn here. Sources and licenses are in the folder's README.md. The page of the demo shows the photograph as
it is, too: `demo_photograph.jpg` in the folder above.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter
from skimage.data import chelsea

SIDE, SCALE = 96, 8
FULL = SIDE * SCALE
Color = tuple[int, int, int]


def shade(top: Color, bottom: Color, height: int, grain: float, rng: np.random.Generator) -> Image.Image:
    """A gradient from one color to another with soft noise, so that no area is uniform."""
    ramp = np.linspace(0, 1, height)[:, None, None]
    strip = (1 - ramp) * np.array(top) + ramp * np.array(bottom) + np.zeros((height, FULL, 1))
    noise = rng.normal(size=(height // 12 + 1, FULL // 24 + 1)) * 127 / 4 + 128
    soft = Image.fromarray(noise.clip(0, 255).astype(np.uint8)).resize(
        (FULL, height), Image.Resampling.BICUBIC
    )
    strip = strip + grain * (np.asarray(soft, dtype=np.float64)[..., None] - 128)
    return Image.fromarray(strip.clip(0, 255).astype(np.uint8))


def scene(
    sky: tuple[Color, Color], ground: tuple[Color, Color] | None, horizon: float, seed: int
) -> Image.Image:
    """Sky above ground; only sky if there is no ground."""
    rng = np.random.default_rng(seed)
    image = shade(*sky, FULL, 0.12, rng)
    if ground:
        edge = int(FULL * horizon)
        image.paste(shade(*ground, FULL - edge, 0.5, rng), (0, edge))
    return image


def points(*pairs: tuple[float, float]) -> list[tuple[float, float]]:
    """Points given in percent of the image size."""
    return [(x / 100 * FULL, y / 100 * FULL) for x, y in pairs]


def finish(image: Image.Image) -> Image.Image:
    """Slight blur, then the final size."""
    return image.filter(ImageFilter.GaussianBlur(SCALE * 0.5)).resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def ship() -> Image.Image:
    image = scene(((150, 190, 225), (214, 226, 235)), ((46, 92, 128), (24, 54, 84)), 0.6, 1)
    pen = ImageDraw.Draw(image)
    pen.polygon(points((10, 52), (92, 52), (83, 70), (19, 70)), (42, 46, 56))
    pen.polygon(points((16.5, 65), (86, 65), (83, 70), (19, 70)), (150, 40, 36))
    pen.polygon(points((26, 40), (70, 40), (72, 52), (24, 52)), (238, 238, 234))
    pen.polygon(points((32, 31), (58, 31), (59, 40), (31, 40)), (225, 226, 226))
    for x in range(28, 68, 6):
        pen.rectangle(points((x, 44), (x + 3, 47)), (70, 84, 100))
    pen.polygon(points((42, 17), (51, 17), (52, 31), (41, 31)), (196, 60, 44))
    pen.rectangle(points((41.6, 17), (51.4, 20)), (32, 32, 36))
    pen.line(points((78, 52), (78, 28)), (90, 90, 96), SCALE)
    for x in range(4, 96, 9):
        pen.arc([*points((x, 69.5))[0], *points((x + 8, 73.5))[0]], 180, 360, (190, 212, 226), SCALE // 2)
    return finish(image)


def airplane() -> Image.Image:
    image = scene(((84, 142, 206), (176, 206, 232)), None, 1, 2)
    clouds = Image.new("L", image.size)
    pen = ImageDraw.Draw(clouds)
    for x, y, r in ((12, 82, 12), (24, 86, 14), (38, 88, 10), (84, 14, 9), (94, 17, 11)):
        pen.ellipse([*points((x - r, y - r * 0.55))[0], *points((x + r, y + r * 0.55))[0]], 200)
    image.paste((240, 244, 248), mask=clouds.filter(ImageFilter.GaussianBlur(3 * SCALE)))
    pen = ImageDraw.Draw(image)
    pen.polygon(points((44, 46), (56, 45), (38, 16), (31, 17)), (150, 158, 170))  # far wing
    pen.polygon(points((9, 50), (18, 49), (10, 28), (4, 29)), (196, 52, 48))  # fin
    pen.polygon(points((6, 50), (60, 42), (84, 42), (94, 48), (90, 53), (64, 57), (14, 55)), (240, 242, 245))
    pen.polygon(points((6, 50), (14, 55), (64, 57), (90, 53), (94, 49), (60, 52), (14, 52)), (176, 184, 194))
    pen.polygon(points((42, 53), (60, 52), (40, 84), (31, 85)), (112, 120, 134))  # near wing
    pen.polygon(points((8, 53), (17, 52), (6, 64), (1, 64)), (130, 138, 150))  # near tailplane
    for x in range(26, 80, 5):
        pen.rectangle(points((x, 47), (x + 2, 49)), (64, 78, 98))
    pen.polygon(points((84, 43.5), (90, 46.5), (85, 47.5)), (48, 60, 78))
    return finish(image)


def horse() -> Image.Image:
    from skimage.data import horse as silhouette

    image = scene(((150, 190, 226), (214, 226, 228)), ((112, 148, 66), (70, 106, 42)), 0.62, 4)
    mask = Image.fromarray(np.where(silhouette(), 0, 255).astype(np.uint8))
    mask = mask.crop(mask.getbbox())
    mask.thumbnail((int(FULL * 0.86), int(FULL * 0.78)))
    mask = mask.resize(
        (int(FULL * 0.86), int(mask.height * FULL * 0.86 / mask.width)), Image.Resampling.LANCZOS
    )
    coat = shade((140, 88, 50), (78, 44, 24), FULL, 0.4, np.random.default_rng(6)).resize(mask.size)
    image.paste(coat, ((FULL - mask.width) // 2, int(FULL * 0.93) - mask.height), mask)
    return finish(image)


def cat() -> Image.Image:
    return Image.fromarray(chelsea()).resize((SIDE, SIDE), Image.Resampling.LANCZOS)


def main() -> None:
    """Write the images to the folder given on the command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for make in (airplane, cat, horse, ship):
        make().save(folder / f"{make.__name__}.png", optimize=True)
        print(folder / f"{make.__name__}.png")
    photograph = folder.parent / "demo_photograph.jpg"
    Image.fromarray(chelsea()).save(photograph, quality=90)
    print(photograph)


if __name__ == "__main__":
    main()
