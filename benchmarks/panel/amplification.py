"""How far the contributions of each layer exceed what they explain: a_l of `gaze_weighted`, by model.

    python -m benchmarks.panel.amplification [--cifar10 FOLDER] [--imagenet FOLDER --weights FILE]
        [--pets FOLDER --dinov2 FILE [--size 224]]

Median over images of Σ_j |s^l_j| / max(|T|, 1), T the log-odds of the label, docs/equations.md#gaze-weighted,
on the images of benchmarks/panel/calibrate.py. Prints the table of docs/evidence/default.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import steadygaze as sg
from benchmarks.panel import load_probe, panel, selection
from benchmarks.panel.calibrate import IMAGES
from steadygaze.data.images import read_image
from steadygaze.methods.registry import parse_method, rules_of
from steadygaze.target import target_value
from steadygaze.trace import Want, forward
from steadygaze.vit.contexts import constant_weights, evaluation_mode

BATCH = 8


def amplification(vit: sg.ViT, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """a_l, (B, L)."""
    with evaluation_mode(vit.model), constant_weights(vit.model):
        rules = rules_of(parse_method("gaze_removal"))
        run = forward(vit, vit.embed(images), rules=rules, want=Want())
        trace = run.trace(target_value(labels, "log_odds", run.logits), labels)
    sums = [(x * g).sum(-1).abs().flatten(1).sum(1) for x, g in map(trace.patches, range(trace.depth))]
    assert trace.quantity is not None
    return torch.stack(sums, 1) / trace.quantity.abs().clamp_min(1)[:, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("cifar10", "imagenet", "pets", "weights", "dinov2"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--size", type=int, default=224, help="pixels of the images of DINOv2")
    options = parser.parse_args()
    pets = None if options.pets is None else options.pets / "images"
    folders = {"cifar10": options.cifar10, "imagenet": options.imagenet, "pets": pets}
    print("| model | a_l, from layer 0 to the last |\n| --- | --- |")
    for name, model in panel().items():
        if folders[model.data] is None or not model.removable:
            continue
        probed = name == "dinov2"
        loaded = load_probe(options.dinov2, options.size) if probed else model.load(options.weights)
        vit, found = sg.adapt(loaded), []
        classes = sorted(path.name for path in folders[model.data].iterdir() if path.is_dir())
        with selection(folders[model.data], *IMAGES[model.data]) as data:
            files = sorted(path for path in data.rglob("*.*") if path.is_file())
            for start in range(0, len(files), BATCH):
                some = files[start : start + BATCH]
                images = torch.stack([loaded.preprocess(read_image(file)) for file in some])
                labels = torch.tensor([classes.index(file.parent.name) for file in some])
                found.append(amplification(vit, images, labels))
        medians = torch.cat(found).median(0).values.tolist()
        print(f"| `{name}` | {', '.join(f'{a:.3g}' for a in medians)} |", flush=True)


if __name__ == "__main__":
    main()
