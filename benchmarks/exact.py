"""The best order of the patches exactly, on a grid small enough to enumerate: how good are searches?

    python -m benchmarks.exact --cifar10 FOLDER [--images 10]

The embedded model runs on images of 16x16 pixels, 4x4 patches, so there are 65,536 sets of patches and 16!
orders. The probability p(S) of the predicted class is computed for every set S. With V all patches, and S_k
the first k patches of an order, k = int(r P) at the nine ratios r, the areas are

    insertion   mean over k of p(S_k), higher is better
    deletion    mean over k of p(V − S_k), lower is better

and the best order for either, or for their difference, follows by dynamic programming over the sets:

    best(S) = max over j in S of best(S − j) + [|S| is one of the k] gain(S)

FOLDER: CIFAR-10's test images; one image of each class, number 400 by name, as in benchmarks/ceiling.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import steadygaze as sg
from benchmarks.panel import selection
from steadygaze.data.images import find_images, read_image
from steadygaze.faithfulness.removal import RATIOS
from steadygaze.vit.removal import ranking, subset_logits

SIDE, PATCHES = 16, 16
METHODS = (
    "greedy", "greedy:by=insertion", "greedy:by=deletion", "gaze_halves", "gaze_outline", "gaze_removal",
    "attnlrp", "decompx+skipplus", "gae", "rollout", "random",
)  # fmt: skip
GOALS = ("insertion", "deletion", "both")
SIZES = sorted({int(ratio * PATCHES) for ratio in RATIOS} - {0})


@torch.no_grad()
def every_set(vit: sg.ViT, image: torch.Tensor) -> np.ndarray:
    """p(S) for all sets, a set being the bits of its index."""
    tokens = vit.embed(image)
    target = int(vit.logits(tokens).argmax())
    keep = torch.from_numpy(members(np.arange(2**PATCHES), PATCHES))
    found = []
    for part in keep.split(4096):
        first = torch.zeros(len(part), dtype=torch.long)
        logits = subset_logits(vit, image, tokens, part, first, "remove")
        found.append(logits.double().softmax(-1)[:, target])
    return torch.cat(found).numpy()


def members(sets: np.ndarray, patches: int) -> np.ndarray:
    """Which patches are in each set."""
    return (sets[:, None] >> np.arange(patches)) & 1 == 1


def gain(p: np.ndarray, goal: str) -> np.ndarray:
    """What a goal gains from a set of the first patches."""
    removed = p[::-1]  # of V − S: the bits of the index are inverted
    return {"insertion": p, "deletion": -removed, "both": p - removed}[goal]


def best(p: np.ndarray, goal: str, sizes: Sequence[int] = SIZES) -> float:
    """The mean gain of the best order."""
    patches = len(p).bit_length() - 1
    included = members(np.arange(len(p)), patches)
    count = included.sum(1)
    total = np.where(np.isin(count, sizes), gain(p, goal), 0.0)
    value = np.full(len(p), -np.inf)
    value[0] = 0.0
    for size in range(1, patches + 1):
        sets = np.flatnonzero(count == size)
        without = sets[:, None] & ~(1 << np.arange(patches))
        value[sets] = np.where(included[sets], value[without], -np.inf).max(1) + total[sets]
    return float(value[-1] / len(sizes))


def reached(p: np.ndarray, order: Sequence[int], goal: str, sizes: Sequence[int] = SIZES) -> float:
    """The mean gain of an order."""
    sets = [sum(1 << patch for patch in order[:size]) for size in sizes]
    return float(gain(p, goal)[sets].mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cifar10", type=Path, required=True, help="CIFAR-10's test images")
    parser.add_argument("--images", type=int, default=10, help="at most this many, one of each class")
    chosen = parser.parse_args()
    embedded = sg.load_model("embedded")
    embedded.model.set_input_size(img_size=SIDE)
    prepared = embedded.preprocess
    loaded = sg.load_model(embedded.model, image_size=SIDE, mean=prepared.mean, std=prepared.std)
    vit = sg.adapt(loaded)
    gains: dict[str, list[list[float]]] = {name: [] for name in ("exact", *METHODS)}
    with selection(chosen.cifar10, 1, 400, chosen.images) as data:
        for path in find_images([data]):
            maps = sg.explain(loaded, path, method=list(METHODS), score=None)
            image = loaded.preprocess(read_image(path))[None]
            p = every_set(vit, image)
            gains["exact"].append([best(p, goal) for goal in GOALS])
            for name in METHODS:
                order = ranking(maps[name].scores)[0].tolist()
                gains[name].append([reached(p, order, goal) for goal in GOALS])
    mean = {name: 100 * np.array(values).mean(0) for name, values in gains.items()}
    exact, chance = mean["exact"], mean["random"]
    print("| order | insertion ↑ | deletion ↓ | difference ↑ | share of the exact difference |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, (insertion, deletion, both) in sorted(mean.items(), key=lambda entry: -entry[1][2]):
        share = 100 * (both - chance[2]) / (exact[2] - chance[2])
        print(f"| {name} | {insertion:.1f} | {-deletion:.1f} | {both:.1f} | {share:.0f} % |")


if __name__ == "__main__":
    main()
