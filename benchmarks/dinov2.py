"""What needs no class: attention, features and class-free methods of DINOv2 ViT-S/14 beside DeiT-Tiny.

    python -m benchmarks.dinov2 --weights dinov2_vits14_518_float16.safetensors \
        --deit deit_tiny_patch16_224.safetensors --data pets-masks \
        [--out rows.csv] [--size 224] [--each 5] [--methods alti,rollout] [--starts 3,6,9]
    python -m benchmarks.dinov2 --rows rows.csv         # only the table, from rows

Average precision of each map for the animal (docs/equations.md#segmentation-ap), on five photographs of each
of 24 breeds, with 95 % bootstrap intervals over images. Prints the table of docs/evidence/dinov2.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import timm
import torch
from safetensors.torch import load_file
from torch import nn

import steadygaze as sg
from benchmarks.registers import backbone, read_mask, transform
from steadygaze.faithfulness.localization import localization

EACH, BATCH, SAMPLES = 5, 12, 2000
METHODS = ["rollout", "alti", "attin", "globenc", "norms", "pca", "random"]


def maps(
    model: nn.Module, files: list[str], size: int, methods: list[str], starts: list[int]
) -> dict[str, torch.Tensor]:
    """Maps (B, h, w) by name; none needs a class."""
    steps = transform(size)
    seen = sg.attention(model, files, transform=steps)
    late = torch.stack([seen.map(layer) for layer in range(-4, 0)]).mean(0)
    found = {"attention, last block": seen.map(-1), "attention, last four": late}
    for start in starts:
        found[f"rollout, from block {start} on"] = seen.rollout(discard=0, start=start)
    split = sg.features(model, files, transform=steps).pca(1, foreground=True).foreground
    found["foreground of features"] = split.float()
    if methods:
        explained = sg.explain(model, files, target=_any_class(model), method=methods, transform=steps)
        found |= {name: attribution.scores for name, attribution in explained.items()}
    return found


def _any_class(model: nn.Module) -> int | None:
    """Maps without a class are the same for each; a classifier is asked about one nevertheless."""
    return None if model.num_classes == 0 else 0


def table(rows: pd.DataFrame) -> str:
    """A Markdown table: mean average precision of each map and model, with its interval."""
    models = list(dict.fromkeys(rows.model))
    lines = [f"| map | {' | '.join(models)} |", f"| --- |{' ---: |' * len(models)}"]
    draw = np.random.default_rng(0)
    order = rows[rows.model == models[0]].groupby("map").ap.mean().sort_values(ascending=False).index
    for name in order:
        cells = []
        for model in models:
            values = rows[(rows.model == model) & (rows["map"] == name)].ap.to_numpy()
            means = draw.choice(values, (SAMPLES, len(values))).mean(1)
            low, high = np.percentile(means, [2.5, 97.5])
            cells.append(f"{values.mean():.1f} [{low:.1f}, {high:.1f}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--deit", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--each", type=int, default=EACH, help="photographs of each breed")
    parser.add_argument("--methods", default=",".join(METHODS), help="of sg.explain; '': none")
    parser.add_argument(
        "--starts", default="", help="also rollouts that start at these blocks, such as 3,6,9"
    )
    options = parser.parse_args()
    if options.rows:
        print(table(pd.read_csv(options.rows)))
        return
    deit = timm.create_model("deit_tiny_patch16_224").eval()
    deit.load_state_dict(load_file(options.deit))
    index = pd.read_csv(options.data / "index.csv")
    chosen = index.groupby("synset").head(options.each + 1).groupby("synset").tail(options.each)
    starts = [int(number) for number in options.starts.split(",") if number]
    methods = [name for name in options.methods.split(",") if name]
    rows = []
    for name, model in (("DINOv2 ViT-S/14", backbone(options.weights)), ("DeiT-Tiny", deit)):
        for start in range(0, len(chosen), BATCH):
            some = chosen.iloc[start : start + BATCH]
            files = [str(options.data / file) for file in some.image]
            masks = torch.stack([read_mask(options.data / file) for file in some["mask"]])
            for kind, scores in maps(model, files, options.size, methods, starts).items():
                located = localization(scores.detach().float()[None], masks, ["average_precision"])
                values = located["average_precision"].value[0].tolist()
                rows += [(name, kind, image, value) for image, value in zip(some.image, values, strict=True)]
            print(f"{name}: {min(start + BATCH, len(chosen))} of {len(chosen)}", flush=True)
    frame = pd.DataFrame(rows, columns=["model", "map", "image", "ap"])
    if options.out:
        frame.round(3).to_csv(options.out, index=False)
    print(table(frame))


if __name__ == "__main__":
    main()
