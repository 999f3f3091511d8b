"""Choose the constants of the default leave-one-model-out: each model is measured with those of the others.

    python -m benchmarks.panel.choose --rows docs/evidence/rows/panel_choice --panel docs/evidence/rows/panel
        [--cifar10 FOLDER] [--imagenet FOLDER --weights FILE] [--models NAME,...]

Every candidate is one setting of a family, measured on two sets of images, "choose" and "report". For each
model, the constants that are best in the mean over the first set of the other models are reported on its own
second set, whose images are those of the panel's rows, so that differences to other methods are paired.

    one pass   Σ_l (a_l s^l / L + keys · q^l) + keys · p   `gaze_removal` has keys = 1, a_l = 1
    halves     the same + own · the same in its own half   `gaze_halves` has own = 1/4
    parity     the same, in two halves like a chessboard   two passes of half the patches each

a_l = 1 + late · (2 l / (L - 1) - 1): late = 1 gives the first layer no weight and the last one double weight.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

import steadygaze as sg
from benchmarks.panel import panel, selection
from benchmarks.panel.measure import REMOVAL, measure, run_folders
from benchmarks.panel.tables import HEADS, difference, text_with_interval
from steadygaze.methods.gaze import pooled, taken
from steadygaze.methods.registry import register_method
from steadygaze.trace.capture import forward
from steadygaze.trace.query import Query
from steadygaze.trace.record import Want

CHOOSE, REPORT = "choose", "report"
PLACES = {CHOOSE: 0, REPORT: 400}  # place by name of the first image of a class of CIFAR-10
BEST_KNOWN = (
    "gaze",
    "gaze_removal",
    "gaze_twice",
    "libra_fullgrad_plus",
    "attnlrp",
    "attnlrp_gamma",
    "decompx+skipplus",
)
# names as rows have them: options in alphabetical order
FAMILIES: dict[str, tuple[str, ...]] = {
    "one pass": (
        *(f"removal_family:freeze=0.75,keys={keys}" for keys in (0.0, 0.25, 0.5, 1.0, 2.0)),
        *(f"removal_family:freeze={freeze},keys=1.0" for freeze in (0.5, 1.0)),
        *(f"removal_family:freeze=0.75,keys=1.0,late={late}" for late in (-1.0, 1.0)),
        "removal_family:centered=True,freeze=0.75,keys=0.5",
    ),
    "halves": (
        *(f"removal_family:freeze=0.75,keys=1.0,own={own}" for own in (0.125, 0.25, 0.5, 1.0)),
        *(f"removal_family:freeze=0.75,keys=0.5,own={own}" for own in (0.25, 0.5)),
    ),
    "parity": ("parity_family:freeze=0.75,keys=1.0",),
}


def effects(query: Query, tokens: Tensor, keys: float, late: float, centered: bool) -> Float[Tensor, "b p"]:
    """The one-pass map of the patches in `tokens`."""
    run = forward(query.vit, tokens, rules=query.rules, want=Want(keys=True))
    trace = run.trace(query.value(run.logits))
    total = keys * pooled(trace)
    for l in range(trace.depth):
        x, g = (t[:, trace.vit.prefix :] for t in trace.tokens(l))
        if centered:
            x = x - x.mean(1, keepdim=True)
        weight = 1 + late * (2 * l / max(1, trace.depth - 1) - 1)
        total = total + weight / trace.depth * (x * g).sum(-1) + keys * taken(trace, l)
    return total


@register_method("removal_family", "model", freeze=0.75, score="log_odds")
def removal_family(
    query: Query, *, keys: float = 1.0, own: float = 0.0, late: float = 0.0, centered: bool = False
) -> Float[Tensor, "b h w"]:
    """`gaze_removal` and `gaze_halves` with other constants."""
    whole = effects(query, query.tokens, keys, late, centered)
    if not own:
        return whole.unflatten(1, query.grid)
    order = whole.argsort(dim=1, descending=True, stable=True)
    half = order.shape[1] // 2
    in_half = torch.zeros_like(whole)
    for part in (order[:, :half], order[:, half:]):
        in_half = in_half.scatter(
            1, part, effects(query, query.vit.select(query.tokens, part), keys, late, centered)
        )
    return (whole + own * in_half).unflatten(1, query.grid)


@register_method("parity_family", "model", freeze=0.75, score="log_odds")
def parity_family(query: Query, *, keys: float = 1.0) -> Float[Tensor, "b h w"]:
    """`gaze_removal` in each of two halves that alternate like the fields of a chessboard."""
    height, width = query.grid
    places = torch.arange(height * width, device=query.tokens.device)
    odd = (places // width + places % width) % 2 == 1
    result = query.tokens.new_zeros(query.tokens.shape[0], height * width)
    for part in (places[odd], places[~odd]):
        chosen = part.expand(query.tokens.shape[0], -1)
        result = result.scatter(
            1, chosen, effects(query, query.vit.select(query.tokens, chosen), keys, 0.0, False)
        )
    return result.unflatten(1, query.grid)


def run(arguments: argparse.Namespace) -> None:
    """Measure the candidates that have no rows yet."""
    models = panel()
    candidates = [name for family in FAMILIES.values() for name in family]
    for name in arguments.models or [name for name, model in models.items() if model.removable]:
        model = models[name]
        folder = arguments.cifar10 if model.data == "cifar10" else arguments.imagenet
        for part, place in PLACES.items() if folder is not None else ():
            print(f"{name}: {part}", file=sys.stderr, flush=True)
            on_cifar10 = model.data == "cifar10"
            offset = place if on_cifar10 else (1 if part == CHOOSE else 0)
            with selection(
                folder, 5 if on_cifar10 else 1, offset, None if on_cifar10 else arguments.classes
            ) as data:
                measure(
                    model,
                    model.load(arguments.weights),
                    data,
                    candidates,
                    ["removal"],
                    arguments.rows / part / name,
                )


def report(rows: Path, panel_rows: Path) -> None:
    """Print what each model's constants are and how they do on images and models that did not choose them."""
    names = [folder.name for folder in sorted((rows / REPORT).iterdir()) if folder.is_dir()]
    chosen = {name: _scores(rows / CHOOSE / name) for name in names}
    reported = {name: _scores(rows / REPORT / name, panel_rows / name) for name in names}
    for family, candidates in FAMILIES.items():
        picks = {name: _best(chosen, name, candidates) for name in names}
        print(f"\n### {family}: constants chosen on the other models\n")
        print(
            f"| model | constants | {' | '.join(HEADS)} | mean |\n| --- | --- |{' ---: |' * (len(HEADS) + 1)}"
        )
        for name in names:
            values = reported[name][picks[name]]
            cells = [*values.mean(0), values.mean()]
            constants = picks[name].partition(":")[2].replace(",", ", ")
            print(f"| {name} | {constants} | {' | '.join(f'{cell:.1f}' for cell in cells)} |")
        print(f"\n| {family} minus | {' | '.join(HEADS)} | mean |\n| --- |{' ---: |' * (len(HEADS) + 1)}")
        for method in BEST_KNOWN:
            changes = [
                reported[name][picks[name]] - reported[name][method]
                for name in names
                if method in reported[name]
            ]
            cells = [
                text_with_interval(*difference(changes, column)) for column in (*range(len(HEADS)), None)
            ]
            print(f"| {method} | {' | '.join(cells)} |")


def _scores(*folders: Path) -> dict[str, np.ndarray]:
    """(images, scores) of each method, over the images that the rows of the first folder have."""
    first, *others = (pd.concat([sg.Rows.read(run).to_pandas() for run in run_folders(f)]) for f in folders)
    others = [rows[rows.image.isin(first.image)] for rows in others]
    rows = pd.concat([first, *others]).drop_duplicates(["image", "method", "metric"])
    wide = rows.pivot_table(index="image", columns=["method", "metric"], values="value")
    return {name: wide[name][list(REMOVAL)].to_numpy(float) for name in rows.method.unique()}


def _best(chosen: dict[str, dict[str, np.ndarray]], held_out: str, candidates: tuple[str, ...]) -> str:
    """The candidate that is best in the mean over the other models."""
    others = [scores for name, scores in chosen.items() if name != held_out]
    return max(candidates, key=lambda name: float(np.mean([scores[name].mean() for scores in others])))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="folder of the candidates' rows")
    parser.add_argument("--panel", type=Path, required=True, help="folder of the panel's rows")
    parser.add_argument("--cifar10", type=Path, help="CIFAR-10's test images")
    parser.add_argument("--imagenet", type=Path, help="ImageNet's validation images")
    parser.add_argument("--weights", type=Path, help="DeiT-Tiny's weights")
    parser.add_argument(
        "--models", type=lambda text: text.split(","), help="default: all whose patches can be removed"
    )
    parser.add_argument("--classes", type=int, default=20, help="classes of ImageNet, one image each")
    parser.add_argument("--print-only", action="store_true")
    arguments = parser.parse_args()
    if not arguments.print_only:
        run(arguments)
    report(arguments.rows, arguments.panel)


if __name__ == "__main__":
    main()
