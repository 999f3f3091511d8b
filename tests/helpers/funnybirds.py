"""A small data set in the layout of FunnyBirds, drawn here, and a model that tells its classes apart."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from steadygaze.models.layers import small_vit

SIZE, PATCH = 48, 8
PARTS = ("eye", "beak", "tail", "foot", "wing")
VARIANTS = ((220, 40, 40), (40, 200, 60), (60, 80, 240))
CLASSES = (
    (0, 0, 0, 0, 0),
    (0, 0, 1, 1, 1),
    (1, 1, 0, 0, 1),
    (1, 1, 1, 1, 0),
    (2, 0, 2, 0, 2),
    (0, 2, 2, 1, 1),
)
BODY, GROUND = (130, 120, 110), (235, 235, 225)
# part -> pieces: color in the part map, and (top, left, height, width) from the corner of the bird
PIECES = {
    "eye": (((255, 255, 253), (4, 18, 4, 4)), ((255, 255, 254), (4, 23, 4, 4))),
    "beak": (((255, 255, 0), (9, 24, 5, 8)),),
    "tail": (((0, 0, 255), (12, 0, 6, 8)),),
    "foot": (((255, 0, 1), (26, 12, 6, 3)), ((255, 0, 2), (26, 20, 6, 3))),
    "wing": (((0, 255, 1), (13, 10, 8, 5)), ((0, 255, 2), (13, 17, 8, 5))),
}
OBJECTS = ((0, 40, 7, 8), (41, 2, 6, 9))  # of the background: (top, left, height, width)


def draw(variants, corner, kept=PARTS, objects=(0, 1), tint=0) -> tuple[np.ndarray, np.ndarray]:
    """An image and its part map, (SIZE, SIZE, 3) each."""
    image = np.full((SIZE, SIZE, 3), GROUND, np.uint8)
    codes = np.zeros((SIZE, SIZE, 3), np.uint8)
    for k in objects:
        top, left, height, width = OBJECTS[k]
        image[top : top + height, left : left + width] = (90 + 60 * k, 150 - tint, 180 + tint)
        codes[top : top + height, left : left + width] = (204, 204, 204 + k)
    y, x = corner
    image[y + 4 : y + 26, x + 8 : x + 26] = BODY
    for part, variant in zip(PARTS, variants, strict=True):
        for color, (top, left, height, width) in PIECES[part] if part in kept else ():
            place = slice(y + top, y + top + height), slice(x + left, x + left + width)
            image[place], codes[place] = VARIANTS[variant], color
    return image, codes


def save(pixels: np.ndarray, path: Path) -> None:
    """As PNG with an alpha channel, as the authors' files are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.dstack([pixels, np.full(pixels.shape[:2], 255, np.uint8)])).save(path)


def write_funnybirds(root: Path, labels=(0, 1, 2, 3, 4, 0), drawn=(0, 1, 2, 3, 4, 2)) -> Path:
    """The test part. The last image is drawn as another class, so that a model is wrong."""
    root.mkdir(parents=True, exist_ok=True)
    variants = {part: [{"model": f"{part}{k}", "color": str(k)} for k in range(3)] for part in PARTS}
    classes = [
        {"class_idx": number, "parts": dict(zip(PARTS, one, strict=True))}
        for number, one in enumerate(CLASSES)
    ]
    images = [
        {"class_idx": label, "camera_distance": 3.5, "bg_objects": "3,17", "bg_scale": "1.5,2"}
        for label in labels
    ]
    for name, content in (("parts", variants), ("classes", classes), ("dataset_test", images)):
        (root / f"{name}.json").write_text(json.dumps(content))
    for number, label in enumerate(labels):
        bird = {
            "variants": CLASSES[drawn[number]],
            "corner": (4 + number % 5, 3 + 3 * number % 7),
            "tint": 9 * number % 60,
        }
        image, codes = draw(**bird)
        save(image, root / f"test/{label}/{number:06d}.png")
        save(codes, root / f"test_part_map/{label}/{number:06d}.png")
        place = root / f"test_interventions/{label}/{number:06d}"
        for size in range(len(PARTS) + 1):
            for kept in combinations(sorted(PARTS), size):
                save(draw(**bird, kept=kept)[0], place / f"body_{'_'.join(kept)}.png")
        for k in range(2):
            save(draw(**bird, objects=(1 - k,))[0], place / f"background_interventions/{k}.png")
    return root


def bird_model(drawn: int = 360) -> nn.Module:
    """A random ViT whose classifier is fitted to drawn birds in closed form, so that it takes no training."""
    model = small_vit(SIZE, PATCH, len(CLASSES), width=96, depth=2, pool="avg").eval()
    generator = np.random.default_rng(0)
    labels = torch.arange(drawn) % len(CLASSES)
    images = []
    for label in labels.tolist():
        corner = tuple(generator.integers(2, 12, 2))
        images.append(draw(CLASSES[label], corner, tint=int(generator.integers(60)))[0])
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        features = model.forward_head(model.forward_features(pixels), pre_logits=True).double()
        features = torch.cat([features, torch.ones(drawn, 1)], 1)
        wanted = 4.0 * nn.functional.one_hot(labels, len(CLASSES)).double()
        gram = features.T @ features + 1e-5 * torch.eye(97, dtype=torch.float64)
        weight = torch.linalg.solve(gram, features.T @ wanted)
        model.head.weight.copy_(weight[:-1].T)
        model.head.bias.copy_(weight[-1])
    return model
