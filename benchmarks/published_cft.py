"""One step of CFT beside the authors' code: loss and gradient of DeiT-Tiny, in float64 and float32.

    git clone https://github.com/yonisGit/cft
    python -m benchmarks.published_cft cft --checkpoint FILE --data pets-masks [--start 0] [--limit 8]

Prints the figures of docs/equations.md#cft. Needs OpenCV and einops. Of the training script, which does not
start, `_compute_forward_and_losses` is run as it is; it gets `generate_relevance` from the file that has it,
and its identity matrix on the CPU and in the type of the model. The data is a folder with an index.csv of
images, masks and imagenet_index; rows are spread over the file, from `--start` on.
"""

import argparse
import ast
import importlib
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import v2

import steadygaze as sg
from steadygaze.losses import CFT

WEIGHTS = SimpleNamespace(lambda_ctx=1.2, lambda_concept=0.5, lambda_align=0.8, lambda_acc=0.2, temperature=1)
FUNCTION = "_compute_forward_and_losses"
Gradients = dict[str, Tensor]


def published(folder: Path, weights: dict[str, Tensor]) -> tuple[nn.Module, Any]:
    """Their DeiT-Tiny, and their function that computes the losses."""
    sys.path[:0] = [str(folder), str(folder / "src" / "models")]
    explanations = importlib.import_module("src.models.explanations")
    model = importlib.import_module("src.models.ViT").deit_tiny_patch16_224()
    model.load_state_dict(weights)
    script = ast.parse((folder / "scripts" / "train.py").read_text())
    script.body = [
        node for node in script.body if isinstance(node, ast.FunctionDef) and node.name == FUNCTION
    ]
    names = {"torch": torch, "generate_relevance": explanations.generate_relevance}
    exec(compile(script, "train.py", "exec"), names)
    return model, names[FUNCTION]


def step_of(model: nn.Module, loss: Tensor) -> tuple[float, Gradients]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return float(loss.detach()), {name: g.double() for name, g in zip(names, gradients, strict=True)}


def batch(folder: Path, start: int, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Normalized images, masks of 0 and 1, classes."""
    index = pd.read_csv(folder / "index.csv")
    index = index.iloc[start :: max(1, len(index) // limit)][:limit]
    mean, std = torch.tensor(timm.data.IMAGENET_DEFAULT_MEAN), torch.tensor(timm.data.IMAGENET_DEFAULT_STD)

    def read(name: str, interpolation: v2.InterpolationMode) -> Tensor:
        image = v2.functional.resize(Image.open(folder / name), [256], interpolation)
        return torch.from_numpy(np.array(v2.functional.center_crop(image, [224])))

    images = torch.stack([read(name, v2.InterpolationMode.BICUBIC) for name in index.image]) / 255
    masks = torch.stack([read(name, v2.InterpolationMode.NEAREST) for name in index["mask"]])[:, None]
    labels = torch.tensor(index.imagenet_index.to_numpy())
    return ((images - mean) / std).movedim(3, 1), (masks > 127).to(images), labels


def eye_on_cpu(kind: torch.dtype, count: int, device: str) -> Tensor:
    """The identity matrix that their code makes on the GPU, in float32."""
    return torch.diag(torch.ones(count, dtype=kind))


def difference(one: Gradients, other: Gradients) -> float:
    """Length of the difference, in lengths of the other."""
    return sum(float((one[k] - g).square().sum()) for k, g in other.items()) ** 0.5 / length(other)


def length(gradients: Gradients) -> float:
    return sum(float(g.square().sum()) for g in gradients.values()) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a checkout of github.com/yonisGit/cft")
    parser.add_argument("--checkpoint", type=Path, required=True, help="weights of deit_tiny_patch16_224")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--limit", type=int, default=8)
    chosen = parser.parse_args()
    ours = sg.load_model("deit_tiny_patch16_224", checkpoint=chosen.checkpoint).model.train()
    theirs, losses_of = published(chosen.folder, ours.state_dict())
    images, masks, labels = batch(chosen.data, chosen.start, chosen.limit)
    found: dict[torch.dtype, list[tuple[float, Gradients]]] = {}
    for kind in (torch.float64, torch.float32):
        x, s = images.to(kind), masks.to(kind)
        own = step_of(ours.to(kind), CFT()(ours, x, s, labels))
        with patch.object(torch, "eye", partial(eye_on_cpu, kind)):
            loss, *_ = losses_of(
                WEIGHTS, theirs.to(kind), theirs, x, s, labels, nn.CrossEntropyLoss(), nn.BCELoss(), True
            )
        found[kind] = [own, step_of(theirs, loss)]
    print("| | loss | relative difference | length of the gradient | relative difference |")
    print("| --- | ---: | ---: | ---: | ---: |")
    loss, gradient = found[torch.float64][0]
    print(f"| ours, float64 | {loss:.6f} | | {length(gradient):.4g} | |")
    for title, kind, who in (
        ("theirs, float64", torch.float64, 1),
        ("ours, float32", torch.float32, 0),
        ("theirs, float32", torch.float32, 1),
    ):
        other, slope = found[kind][who]
        apart = f"{abs(other - loss) / loss:.0e} | {length(slope):.4g} | {difference(slope, gradient):.0e}"
        print(f"| {title} | {other:.6f} | {apart} |")


if __name__ == "__main__":
    main()
