"""Speed and memory of `explain`, in units of forward passes.

    python -m benchmarks.explain [--models NAME,...] [--rounds N] [--json FILE]

Unit: one forward pass of the model without gradients, same batch, same run (224 pixels, batch size 8, two
threads). Weights are random: they do not change the cost. Lower bounds: a backward pass without weight
gradients costs one forward pass, so `decompx+skipplus` cannot cost less than 1.5, and a method that needs
gradients at every layer not less than 2.
"""

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from rich.console import Console
from rich.table import Table
from torchvision.transforms.v2 import Normalize

import steadygaze as sg
from benchmarks.measure import peak_memory, ratios

GOALS = {"decompx+skipplus": 2.0, "decompx+plus": 2.7, "gaze": 2.7, "cat": 2.7, "gae": 2.7}
LISTS = {"all gradient, attention, CAM": 10.0, "the same, decompx, gaze": 10.0}
MEMORY = ("decompx+skipplus", "gaze", "gae", "globenc", "alti")


def lists() -> dict[str, list[str]]:
    """All gradient, attention and CAM methods of one pass; and the same plus methods with two other sets of
    rules."""
    families = ("gradient", "attention", "cam")
    plain = [info.name for info in sg.list_methods() if info.family in families and info.cost <= 2]
    return dict(zip(LISTS, (plain, [*plain, "decompx", "decompx+plus", "gaze"]), strict=True))


def candidates(model: torch.nn.Module, images: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Everything that is timed, by name."""
    vit = sg.adapt(model)
    runs: dict[str, Callable[[], Any]] = {
        name: partial(sg.explain, vit, images, 1, name)
        for name in ("decompx+skipplus", "decompx+plus", "gaze", "gaze_removal", "gaze_halves", "cat", "gae")
    }
    runs |= {
        f"{label} ({len(names)} names)": partial(sg.explain, vit, images, 1, names)
        for label, names in lists().items()
    }
    runs |= {name: partial(sg.explain, vit, images, 1, name) for name in ("globenc", "alti", "transatt")}
    wrapped = sg.adapt(torch.nn.Sequential(Normalize([0.5] * 3, [0.5] * 3), model).eval())
    runs["gaze, normalization in front"] = partial(sg.explain, wrapped, images, 1, "gaze")
    return runs | peers(model, images)


def peers(model: torch.nn.Module, images: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Similar methods of other packages, on a copy of the model: pytorch-grad-cam leaves hooks on it."""
    from captum.attr import InputXGradient
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

    model = copy.deepcopy(model)
    side = images.shape[-1] // model.patch_embed.patch_size[0]
    cam = GradCAM(
        model,
        [model.blocks[-1].norm1],
        reshape_transform=lambda x: x[:, 1:].unflatten(1, (side, side)).permute(0, 3, 1, 2),
    )
    targets = [ClassifierOutputTarget(1)] * len(images)
    ixg = InputXGradient(model)
    return {
        "pytorch-grad-cam GradCAM": lambda: cam(images, targets),
        "captum InputXGradient (pixels)": lambda: ixg.attribute(images.clone().requires_grad_(), target=1),
    }


def memory_run(name: str, size: int, method: str) -> Callable[[], Any]:
    """What `peak_memory` measures: the explanation alone; the model is loaded, adapted and warmed up."""
    torch.set_num_threads(2)
    model = timm.create_model(name, img_size=size).eval()
    images = torch.randn(1, 3, size, size)
    vit = sg.adapt(model)
    with torch.no_grad():
        model(images)
    return partial(sg.explain, vit, images, 1, method)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="deit_tiny_patch16_224,vit_base_patch16_224", help="timm names")
    parser.add_argument("--rounds", type=int, default=5, help="number of repetitions")
    parser.add_argument("--batch", type=int, default=8, help="number of images per batch")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    options = parser.parse_args()
    torch.set_num_threads(2)
    console, record = Console(), []
    for name in options.models.split(","):
        model = timm.create_model(name).eval()
        images = torch.randn(options.batch, 3, 224, 224)
        unit = torch.no_grad()(partial(model, images))
        table = Table(
            "method",
            "ms per image",
            "forwards",
            "goal",
            title=f"{name}, 224 pixels, batch {options.batch}, two threads",
        )
        for method, (seconds, ratio) in ratios(unit, candidates(model, images), options.rounds).items():
            goal = (GOALS | LISTS).get(method.partition(" (")[0])
            table.add_row(
                method, f"{1000 * seconds / options.batch:.1f}", f"{ratio:.2f}", f"≤ {goal}" if goal else ""
            )
            record.append(
                {
                    "model": name,
                    "method": method,
                    "batch": options.batch,
                    "ms": 1000 * seconds / options.batch,
                    "forwards": ratio,
                }
            )
        console.print(table)
    record += full_decomposition(console)
    record += memory(console)
    if options.json:
        options.json.write_text(json.dumps(record, indent=1))


def full_decomposition(console: Console) -> list[dict[str, Any]]:
    """DecompX with N source vectors, against one backward pass: DeiT-Tiny, one image."""
    model = timm.create_model("deit_tiny_patch16_224").eval()
    image = torch.randn(1, 3, 224, 224)
    vit = sg.adapt(model)
    runs = {
        "decompx, one pass": partial(sg.explain, vit, image, 1, "decompx"),
        "decompx, N vectors (bias=absdot)": partial(sg.explain, vit, image, 1, "decompx:bias=absdot"),
    }
    table = Table("method", "ms", "forwards", title="deit_tiny_patch16_224, batch 1: the full decomposition")
    record = []
    for name, (seconds, ratio) in ratios(torch.no_grad()(partial(model, image)), runs, 3).items():
        table.add_row(name, f"{1000 * seconds:.0f}", f"{ratio:.1f}")
        record.append(
            {
                "model": "deit_tiny_patch16_224",
                "method": name,
                "batch": 1,
                "ms": 1000 * seconds,
                "forwards": ratio,
            }
        )
    console.print(table)
    return record


def memory(console: Console) -> list[dict[str, Any]]:
    """Peak memory of one explanation at N = 197 and 785 tokens, and the size of one N x N x d tensor."""
    table = Table(
        "method",
        "N = 197: MiB",
        "N = 785: MiB",
        title="deit_tiny_patch16_224, batch 1: peak memory over the loaded model",
    )
    record = []
    for method in MEMORY:
        row = [peak_memory(memory_run, "deit_tiny_patch16_224", size, method) for size in (224, 448)]
        table.add_row(method, *(f"{m:.0f}" for m in row))
        record.append({"method": method, "mib": row})
    table.add_row("one N x N x d tensor", *(f"{n * n * 192 * 4 / 2**20:.0f}" for n in (197, 785)))
    console.print(table)
    return record


if __name__ == "__main__":
    main()
