"""How near learned Shapley values are to searched ones.

    python -m benchmarks.shapley --shapley FILE --data FOLDER

For some images, the Shapley values of the predicted class by KernelSHAP with many forward passes, and the
maps of `vit_shapley`, of KernelSHAP with fewer passes and of other methods. Prints

correlation   Pearson, over the patches of an image, mean over the images; the sum of a map plays no part
explained     share of the variation of v(S) over subsets of the Shapley kernel that the values explain
              (all classes; 0 for equal shares): for `vit_shapley`, and for a regression on many subsets of
              the same image, tested on others
seconds       of CPU time for one image
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

import steadygaze as sg
from steadygaze.data.images import find_images, read_image
from steadygaze.methods import vit_shapley as shapley
from steadygaze.methods.perturbation import shapley_pairs
from steadygaze.target import predictions
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.removal import available_hiding

REFERENCE = 4000  # forward passes of the reference
RIDGE = 50.0
METHODS = ("kernel_shap:budget=100", "kernel_shap:budget=500", "gaze", "gaze_removal", "gae", "random")


def correlation(maps: Tensor, reference: Tensor) -> float:
    pairs = zip(maps.flatten(1).double(), reference.flatten(1).double(), strict=True)
    return float(torch.stack([torch.corrcoef(torch.stack(pair))[0, 1] for pair in pairs]).mean())


def explained(vit: sg.ViT, images: Tensor, file: Path, pairs: int, seed: int) -> tuple[float, float]:
    """(of the learned values, of a regression on `pairs` pairs), both tested on a quarter as many others."""
    explainer, _, tensors = shapley.load(file, vit)
    with torch.no_grad(), evaluation_mode(vit.model):
        hidden = shapley.trunk_hidden(vit, images)
        game = shapley.fine_tuned(vit, file, "surrogate", tensors)
        tokens = game.embed(images)
        mode = available_hiding(game, tokens)
        whole = predictions(vit.plan.outputs, game.logits(tokens))
        null = tensors["null"].to(whole)
        trunk = shapley.fine_tuned(vit, file, "trunk", tensors)
        seen = hidden if trunk is vit else shapley.trunk_hidden(trunk, images)
        phi = explainer(shapley.states_read(trunk, seen, whole.dtype), shapley.prefix_of(vit))
        phi = shapley.efficient(phi, whole, null)
        patches = phi.shape[1]
        generator = torch.Generator().manual_seed(seed)
        draws = torch.rand(
            len(images), pairs + pairs // 4, patches + 1, generator=generator, dtype=torch.float64
        )
        keep = shapley_pairs(draws)
        value = shapley.values(game, images, tokens, keep, mode)
        even = shapley.efficient(torch.zeros_like(phi), whole, null)
        fitted = even.clone()
        for i in range(len(images)):
            z = keep[i, : 2 * pairs].to(whole)
            rest = value[i, : 2 * pairs] - null - z @ even[i]
            z = z - z.mean(1, keepdim=True)
            slope = torch.linalg.solve(z.T @ z + RIDGE * torch.eye(patches), z.T @ rest)
            fitted[i] += slope - slope.mean(0)
        tested = slice(2 * pairs, None)
        losses = [
            float(shapley.kernel_shap_loss(values, keep[:, tested], value[:, tested], null))
            for values in (phi, fitted, even)
        ]
    return 1 - losses[0] / losses[2], 1 - losses[1] / losses[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--shapley", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=10)
    parser.add_argument("--reference", type=int, default=REFERENCE)
    parser.add_argument("--pairs", type=int, default=500)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    loaded = sg.load_model(chosen.model)
    vit = sg.adapt(loaded)
    files = find_images([chosen.data])
    files = files[:: max(1, len(files) // chosen.images)][: chosen.images]
    images = torch.stack([loaded.preprocess(read_image(file)) for file in files])
    reference = sg.explain(vit, images, method=f"kernel_shap:seed=1,budget={chosen.reference}").scores
    learned, fitted = explained(vit, images, chosen.shapley, chosen.pairs, seed=2)
    print(f"{chosen.model}, {len(images)} images, reference: kernel_shap with {chosen.reference} passes")
    print(
        f"variation of v explained: vit_shapley {100 * learned:.1f} %, regression on {2 * chosen.pairs} "
        f"subsets of the same image {100 * fitted:.1f} %\n"
    )
    print("| method | correlation with the reference | seconds an image |\n| --- | ---: | ---: |")
    for method in (sg.method("vit_shapley", file=str(chosen.shapley)), *METHODS):
        begin = time.process_time()
        scores = sg.explain(vit, images, method=method).scores
        seconds = (time.process_time() - begin) / len(images)
        name = str(method).partition(":file=")[0]
        print(f"| {name} | {correlation(scores, reference):.3f} | {seconds:.3f} |", flush=True)


if __name__ == "__main__":
    main()
