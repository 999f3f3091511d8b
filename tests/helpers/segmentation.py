"""Shared by tests."""

import csv
from pathlib import Path

import numpy as np
from PIL import Image

from steadygaze.training.recipe import make_recipe

SIDE = 32


MODEL = {"img_size": SIDE, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2}


def squares(folder: Path, count: int = 8, seed: int = 0) -> Path:
    """Bright squares with a border before dark ground, and an index.csv as that of the pets."""
    rng = np.random.default_rng(seed)
    for part in ("images", "masks"):
        (folder / part).mkdir(parents=True)
    with (folder / "index.csv").open("w", newline="") as opened:
        writer = csv.writer(opened)
        writer.writerow(["image", "mask", "class"])
        for i in range(count):
            image, mask = (
                rng.integers(0, 60, (SIDE, SIDE, 3), dtype=np.uint8),
                np.zeros((SIDE, SIDE), np.uint8),
            )
            y, x = rng.integers(2, 13, 2)
            mask[y - 1 : y + 17, x - 1 : x + 17] = 128
            mask[y : y + 16, x : x + 16] = 255
            image[mask == 255] += 180
            Image.fromarray(image).save(folder / "images" / f"{i}.png")
            Image.fromarray(mask).save(folder / "masks" / f"{i}.png")
            writer.writerow([f"images/{i}.png", f"masks/{i}.png", f"breed{i % 2}"])
    return folder


def recipe(folder: Path, **more):
    return make_recipe(
        {
            "task": "segmentation",
            "model": {"name": "vit_tiny_patch16_224", "arguments": MODEL},
            "data": {"train": str(folder), "test": str(folder)},
            "augment": {"crop": "pad", "pad": 4},
            "optimizer": {"lr": 0.01},
            "epochs": 2,
            "batch": 4,
            "log_every": 1,
            "tensorboard": False,
            **more,
        }
    )
