"""Methods x models x measures of the panel: run what is missing, print the table.

    python -m benchmarks.panel --rows docs/evidence/rows/panel
        [--cifar10 FOLDER] [--imagenet FOLDER --weights FILE] [--pets FOLDER --dinov2 FILE]
        [--models NAME,... [--checkpoint FILE] [--class-names FILE]]
        [--methods best|quick|searches|all|NAME,...] [--measures removal,saco,perturbation,localization,truth]
        [--per-class 5] [--offset 400] [--classes 40]

FOLDER: CIFAR-10's test/<class>/*.png, ImageNet's val/<synset>/*, pets with masks; without it, the models of
that data set are only printed from their rows. NAME: a model of the panel, or any model of timm or
transformers, which is measured on --imagenet: with local weights (--checkpoint), or a model that compares
images with text with a file of ImageNet's class names, in its order (--class-names). The images of a class
are those at places OFFSET, OFFSET + 1, ... by name (ImageNet: from 0, of evenly spaced classes; pets: two of
each breed, from 16). Killed runs resume. `localization` is of DeiT-Tiny and DINOv2 on --pets; `truth` trains
two small ViTs on tasks whose relevant patches are known (about two minutes).

The table has one section for each model, then the mean over the models whose patches can be removed, and the
paired differences of --reference to each method, with 95 % bootstrap intervals: images are drawn with
replacement inside each model. Only methods with rows of every image are in it; the leaderboard has all.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.panel import PanelModel, panel, selection
from benchmarks.panel.measure import MEASURES, measure
from benchmarks.panel.methods import expand
from benchmarks.panel.tables import print_tables
from benchmarks.panel.truth import measure_truth
from steadygaze.cli.options import split_methods
from steadygaze.methods.registry import DEFAULT

PETS = 24  # images, one of each breed
PETS_OFFSET, PETS_EACH = 16, 2  # the probe of DINOv2 has seen images 0 to 13 of each breed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, required=True, help="folder of the run folders, by model")
    parser.add_argument("--cifar10", type=Path, help="CIFAR-10's test images")
    parser.add_argument("--imagenet", type=Path, help="ImageNet's validation images")
    parser.add_argument("--weights", type=Path, help="DeiT-Tiny's weights")
    parser.add_argument("--pets", type=Path, help="Oxford pets with masks and an index.csv")
    parser.add_argument("--dinov2", type=Path, help="weights of DINOv2 ViT-S/14")
    parser.add_argument("--models", type=lambda text: text.split(","), help="default: all")
    parser.add_argument("--checkpoint", type=Path, help="weights of a model that is not of the panel")
    parser.add_argument("--class-names", type=Path, help="its classes, if it compares images with text")
    parser.add_argument("--methods", type=lambda text: split_methods([text]), default=["best"])
    parser.add_argument("--measures", type=lambda text: text.split(","), default=["removal"])
    parser.add_argument("--per-class", type=int, default=5, help="images of each class of CIFAR-10")
    parser.add_argument(
        "--offset", type=int, default=400, help="place of the first image of a class, by name"
    )
    parser.add_argument(
        "--classes", type=int, default=40, help="at most this many classes of ImageNet or pets"
    )
    parser.add_argument(
        "--reference", default=DEFAULT, help="method whose differences to the others are printed"
    )
    chosen = parser.parse_args()
    wrong = [name for name in chosen.measures if name not in MEASURES]
    if wrong:
        parser.error(f"--measures: expected {', '.join(MEASURES)}, got {wrong[0]}")
    models, methods = panel(chosen.models or ()), expand(chosen.methods)
    names = chosen.models or list(models)
    for kind in chosen.measures:
        if kind == "truth":
            measure_truth(methods, chosen.rows)
            continue
        for model in (models[name] for name in names):
            run(model, methods, kind, chosen)
    print_tables({name: chosen.rows / Path(name).name for name in names}, models, chosen.reference)


def run(model: PanelModel, methods: list[str], kind: str, chosen: argparse.Namespace) -> None:
    """Rows of one model and one measure, if its images were given."""
    out, begin = chosen.rows / Path(model.name).name, f"{model.name}: {kind}"
    if kind == "localization":
        if model.name == "deit_tiny" and chosen.pets is not None:
            print(begin, file=sys.stderr, flush=True)
            loaded = model.load(chosen.weights)
            measure(model, loaded, chosen.pets, methods, [kind], out, 8, masks=chosen.pets, limit=PETS)
        if model.name == "dinov2" and chosen.pets is not None:
            print(begin, file=sys.stderr, flush=True)
            with selection(chosen.pets / "images", PETS_EACH, PETS_OFFSET) as data:
                masks = chosen.pets / "masks"
                loaded = model.load(None, chosen.dinov2)
                measure(model, loaded, data, methods, [kind], out, 8, masks=masks)
        return
    pets = None if chosen.pets is None else chosen.pets / "images"
    folder = {"cifar10": chosen.cifar10, "imagenet": chosen.imagenet, "pets": pets}[model.data]
    if folder is None:
        return
    print(begin, file=sys.stderr, flush=True)
    per_class, offset, limit = chosen.per_class, chosen.offset, None
    if model.data == "imagenet":
        per_class, offset, limit = 1, 0, chosen.classes
    if model.data == "pets":
        per_class, offset, limit = PETS_EACH, PETS_OFFSET, chosen.classes
    with selection(folder, per_class, offset, limit) as data:
        batch = 8 if model.data == "pets" else 20
        own = {"checkpoint": chosen.checkpoint, "class_names": chosen.class_names}
        loaded = model.load(chosen.weights, chosen.dinov2, **own)
        measure(model, loaded, data, methods, [kind], out, batch)


if __name__ == "__main__":
    main()
