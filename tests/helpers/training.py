"""Shared by tests."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file

import steadygaze as sg
from steadygaze.training.recipe import make_recipe

SIDE, CLASSES = 16, ("bright", "dark")
MODEL = {"img_size": SIDE, "patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2, "mlp_ratio": 2}


def image_folder(folder: Path, each: int = 6, masks: bool = False) -> Path:
    """Two classes that a small model tells apart at once: bright and dark."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(CLASSES):
        for part in (folder / name, folder / "masks" / name):
            if masks or part.parent == folder:
                part.mkdir(parents=True)
        for i in range(each):
            low = 170 * (1 - number)
            Image.fromarray(rng.integers(low, low + 80, (SIDE, SIDE, 3), dtype=np.uint8)).save(
                folder / name / f"{i}.png"
            )
            if masks:
                mask = np.zeros((SIDE, SIDE), np.uint8)
                mask[4:12, 2:10] = 255
                Image.fromarray(mask).save(folder / "masks" / name / f"{i}.png")
    return folder


def masks_of(folder: Path) -> str:
    return str(folder.parent / f"{folder.name}-masks")


def content(data: Path, **more) -> dict:
    return {
        "model": {"name": "vit_tiny_patch16_224", "arguments": MODEL},
        "data": {"train": str(data), "test": str(data)},
        "augment": {"crop": "pad", "pad": 2},
        "optimizer": {"lr": 0.01},
        "epochs": 2,
        "batch": 4,
        "log_every": 1,
        "save_every": 2,
        "tensorboard": False,
        **more,
    }


def recipe(data: Path, **more):
    return make_recipe(content(data, **more))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def attempt(given: Any, out: Path, **more: Any) -> bool:
    """Whether `sg.train` accepts it; anything but a SteadygazeError fails the test."""
    try:
        sg.train(given, out, **more)
    except sg.SteadygazeError as error:
        assert str(error).strip() and "Traceback" not in str(error)
        return False
    return True
