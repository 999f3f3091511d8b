"""Methods x models x measures of the panel: run what is missing, print the table.

    python -m benchmarks.panel --rows docs/evidence/rows/panel
        [--cifar10 FOLDER] [--imagenet FOLDER --weights FILE] [--models NAME,...] [--methods NAME,...]
        [--measures removal,magnitude,perturbation] [--per-class 5] [--offset 400] [--classes 40]

FOLDER: CIFAR-10's test/<class>/*.png, ImageNet's val/<synset>/*; without it, the models of that data set are
only printed from their rows. The images of a class are those at places OFFSET, OFFSET + 1, ... by name
(ImageNet: from 0, of evenly spaced classes). Killed runs resume. The table has one section for each model,
then the mean over the models whose patches can be removed, and the paired differences of --reference to each
method, with 95 % bootstrap intervals: images are drawn with replacement inside each model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.panel import panel, selection
from benchmarks.panel.measure import MEASURES, measure
from benchmarks.panel.tables import print_tables
from steadygaze.method_registry import DEFAULT

BEST_KNOWN = ("gaze", "gaze_removal", "gaze_twice", "libra_fullgrad_plus", "attnlrp", "decompx+skipplus")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="folder of the run folders, by model")
    parser.add_argument("--cifar10", type=Path, help="CIFAR-10's test images")
    parser.add_argument("--imagenet", type=Path, help="ImageNet's validation images")
    parser.add_argument("--weights", type=Path, help="DeiT-Tiny's weights")
    parser.add_argument("--models", type=lambda text: text.split(","), help="default: all")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(BEST_KNOWN))
    parser.add_argument("--measures", type=lambda text: text.split(","), default=["removal"])
    parser.add_argument("--per-class", type=int, default=5, help="images of each class of CIFAR-10")
    parser.add_argument(
        "--offset", type=int, default=400, help="place of the first image of a class, by name"
    )
    parser.add_argument("--classes", type=int, default=40, help="classes of ImageNet, one image each")
    parser.add_argument(
        "--reference", default=DEFAULT, help="method whose differences to the others are printed"
    )
    chosen = parser.parse_args()
    models = panel()
    names = chosen.models or list(models)
    for measures in ([name] for name in chosen.measures):
        if measures[0] not in MEASURES:
            parser.error(f"--measures: expected {', '.join(MEASURES)}, got {measures[0]}")
        for name in names:
            model = models[name]
            folder = chosen.cifar10 if model.data == "cifar10" else chosen.imagenet
            if folder is None:
                continue
            print(f"{name}: {measures[0]}", file=sys.stderr, flush=True)
            per_class, offset, limit = (
                (chosen.per_class, chosen.offset, None) if model.data == "cifar10" else (1, 0, chosen.classes)
            )
            with selection(folder, per_class, offset, limit) as data:
                measure(model, model.load(chosen.weights), data, chosen.methods, measures, chosen.rows / name)
    print_tables({name: chosen.rows / name for name in names}, models, chosen.reference)


if __name__ == "__main__":
    main()
