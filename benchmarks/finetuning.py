"""Effect of the relevance loss: python -m benchmarks.finetuning run | table | masks | perturbation

    run --checkpoint FILE --pets FOLDER --imagenet FOLDER --out DIR     train and test what is not in DIR yet
    table DIR                                                           print the tables from the rows
    masks --checkpoint FILE --pets FOLDER                               agreement of TokenCut with human masks
    perturbation BEFORE AFTER...                                        changes between runs of `verify`

The tables are in docs/evidence/training.md. DeiT-Tiny is fine-tuned on 6 images of each of 12 breeds by the
shipped recipe `relevance-deit-tiny-small`, 6 epochs, and tested on held-out images of the same breeds
("seen", 4 of each) and of 12 other breeds ("unseen", 8 of each): unchanged, with the background removed or
replaced by an ImageNet image, and as objects that are moved, rotated and resized; and on ImageNet. Every
control is trained in the same way. Its learning rate is the one with the best accuracy among the 24 breeds on
the varied "seen" images, with random seed 0 (accuracy over 1,000 classes would select the rate that predicts
the trained breeds most often). Two more seeds follow. A row is one image in one setting: correct among 1,000
classes, and correct among the 24 breeds.

`run --again` is a replication on images that no choice was based on: the halves of the breeds are exchanged,
and no image of pets or of ImageNet, for training or testing, was used before. Nothing is selected there: the
best variants and their controls, each with a learning rate of 1e-5.

`run --again --only NAME...` trains these variants alone; `--models DIR` keeps the trained models.
"""

import argparse
import csv
import gzip
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import steadygaze as sg
from benchmarks.measure import spread
from steadygaze.data.folders import ClassLookup
from steadygaze.data.masks import BORDER, OBJECT, find_labeled_images, read_mask
from steadygaze.robustness import synthetic
from steadygaze.training.recipe import read_recipe
from steadygaze.training.tokencut import tokencut_masks

RECIPE, EPOCHS, RATES, SEEDS = "relevance-deit-tiny-small", 6, (3e-6, 1e-5, 3e-5, 1e-4), (0, 1, 2)
OWN: dict[str, Any] = {"losses": {"relevance": {}}}
VARIANTS: dict[str, dict[str, Any]] = {  # changes of the recipe; these have every rate and seed
    "cross-entropy": {"losses": {"cross_entropy": {}}},
    "confidence only": {"losses.relevance.relevance": 0.0},
    "relevance only": {"losses.relevance.confidence": 0.0},
    "relevance and confidence (paper)": {},
    "the same, second order": {"losses.relevance.second_order": True},
    "the same, TokenCut masks": {"data.masks": "tokencut"},  # uncentered keys: masks that miss the animal
}
SIDE: dict[str, dict[str, Any]] = {  # at the rate of the paper's variant
    "20 times the relevance": {"losses.relevance.relevance": 16.0},
    "TokenCut masks, centered keys": {
        "data.masks": "tokencut",
        "data.cut_centered": True,
        "data.cut_edges": "bilateral",
    },
    "map by rollout": {"losses.relevance.method": "rollout"},
    "map by rollout, relevance only": {
        "losses.relevance.method": "rollout",
        "losses.relevance.confidence": 0.0,
    },
    "map by raw attention": {"losses.relevance.method": "raw_attention"},
    "map by gaze": {"losses.relevance.method": "gaze"},
    "without background": {"losses.relevance.background": 0.0},
    "without foreground": {"losses.relevance.foreground": 0.0},
    "confident of the label": {"losses.relevance.confident_of": "label"},
    "20 times the relevance, second order": {
        "losses.relevance.relevance": 16.0,
        "losses.relevance.second_order": True,
    },
    "GradMask": {"losses": {"gradmask": {}}},
    "RRR": {"losses": {"rrr": {}}},
    "1 picture a breed": {"data.images": [0, 1], "epochs": 6 * EPOCHS},
    "4 breeds": {"data.classes": [0, 4], "epochs": 3 * EPOCHS},
}
OFTEN = 4  # the first four run with every seed, the others with the first seed only
AGAIN = (
    "confidence only",
    "relevance only",
    "relevance and confidence (paper)",
    "map by rollout",
    "map by rollout, relevance only",
    "map by raw attention",
)
ROLLOUT = SIDE["map by rollout, relevance only"]
TOKENCUT = SIDE["TokenCut masks, centered keys"]
HALF: dict[str, Any] = {"data.images": [10, 13], "epochs": 2 * EPOCHS}
LATER: dict[str, dict[str, Any]] = {  # of the replication: without human masks, and with half the images
    "rollout only, TokenCut masks": ROLLOUT | TOKENCUT,
    "rollout only, half the images": ROLLOUT | HALF,
    "rollout only, TokenCut masks, half the images": ROLLOUT | TOKENCUT | HALF,
    "CFT, TokenCut masks, half the images": {"losses": {"cft": {}}} | TOKENCUT | HALF,
    "CFT by rollout only, TokenCut masks, half the images": {
        "losses": {"cft": {"method": "rollout", "accuracy": 0.0}}
    }
    | TOKENCUT
    | HALF,
}
KINDS = {
    "location": {"values": [(0.1, 0.1), (0.9, 0.3), (0.3, 0.9)]},
    "rotation": {"values": [81, 161, 241]},
    "size": {"values": [0.05, 0.1, 0.7]},
}
VARIED = ("location", "rotation", "size", "swapped", "removed")
# stored names of variants -> names in tables
TITLES = {"as it was": "before", "1 picture a breed": "1 image per breed"}
COLUMNS = ("variant", "rate", "seed", "set", "kind", "picture", "right", "right_of_24", "share")


@dataclass(frozen=True)
class Split:
    """Which breeds, in the order of their classes, are trained on; and which images of a breed, or of an
    ImageNet class, are whose."""

    breeds: tuple[int, int]
    train: tuple[int, int]
    seen: tuple[int, int]
    unseen: tuple[int, int]
    imagenet: int


FIRST = Split(breeds=(0, 12), train=(0, 6), seen=(6, 10), unseen=(0, 8), imagenet=0)
SECOND = Split(breeds=(12, 24), train=(10, 16), seen=(16, 20), unseen=(10, 18), imagenet=1)


@dataclass(frozen=True)
class Test:
    """An image in one setting, as the model sees it; mask: of the object, if the image is unaltered."""

    set: str
    kind: str
    name: str
    label: int
    image: torch.Tensor
    mask: torch.Tensor | None = None


def tests(ready: Any, pets: Path, imagenet: Path, count: int, split: Split) -> tuple[list[Test], list[int]]:
    """Every test image, made once for all models; and the classes of the breeds."""
    rows = list(csv.DictReader((pets / "index.csv").open()))
    breeds = sorted({int(row["imagenet_index"]) for row in rows})
    folders = sorted(p for p in imagenet.iterdir() if p.is_dir())
    files = [sorted(folder.iterdir())[split.imagenet] for folder in folders]
    behind = [np.asarray(Image.open(f).convert("RGB")) for f in files[:: max(1, len(files) // 40)][:40]]
    found: list[Test] = []
    for breed in breeds:
        seen = breeds.index(breed) in range(*split.breeds)
        of_it = [row for row in rows if int(row["imagenet_index"]) == breed]
        for number, row in enumerate(of_it[slice(*(split.seen if seen else split.unseen))]):
            photo, mask = Image.open(pets / row["image"]).convert("RGB"), Image.open(pets / row["mask"])
            pixels, where = np.asarray(photo), np.asarray(mask)
            index = breed * 100 + number
            made = [("clean", photo)]
            made += [("swapped", synthetic.swap_background(pixels, where, behind[index % len(behind)]))]
            made += [("removed", synthetic.remove_background(pixels, where))]
            for kind, options in KINDS.items():
                made += [
                    (kind, s.pixels)
                    for s in synthetic.vary(pixels, where, behind, kind, seed=0, index=index, **options)
                ]
            for kind, some in made:
                image = ready.preprocess(some if isinstance(some, Image.Image) else Image.fromarray(some))
                mask_of = None
                if kind == "clean":
                    three = ready.preprocess(
                        Image.merge("RGB", [Image.fromarray((where == 255).astype(np.uint8) * 255)] * 3)
                    )
                    mask_of = three[0] > three[0].aminmax().min.lerp(three[0].max(), 0.5)
                found.append(Test("seen" if seen else "unseen", kind, row["image"], breed, image, mask_of))
    for label, file in islice(enumerate(files), count):
        found.append(
            Test(
                "imagenet",
                "clean",
                f"{file.parent.name}/{file.name}",
                label,
                ready.preprocess(Image.open(file).convert("RGB")),
            )
        )
    return found, breeds


@torch.no_grad()
def answers(model: torch.nn.Module, some: list[Test], batch: int = 32) -> Iterator[tuple[Test, torch.Tensor]]:
    model.eval()
    for start in range(0, len(some), batch):
        part = some[start : start + batch]
        yield from zip(part, model(torch.stack([t.image for t in part])), strict=True)


def judge(
    model: torch.nn.Module, some: list[Test], breeds: list[int], head: dict[str, Any]
) -> list[dict[str, Any]]:
    rows = []
    for test, logits in answers(model, some):
        share = ""
        if test.mask is not None and test.set != "imagenet":
            image = test.image[None]
            seen = (
                sg.explain(model, image, test.label, method="gae").upsample(image.shape[-2:])[0].clamp(min=0)
            )
            share = f"{float(seen[test.mask].sum() / seen.sum()):.4f}"
        of_24 = breeds[int(logits[breeds].argmax())] == test.label if test.label in breeds else ""
        rows.append(
            {
                **head,
                "set": test.set,
                "kind": test.kind,
                "picture": test.name,
                "right": int(logits.argmax() == test.label),
                "right_of_24": int(of_24) if of_24 != "" else "",
                "share": share,
            }
        )
    return rows


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    base = sg.load_model("deit_tiny_patch16_224", checkpoint=options.checkpoint)
    split = SECOND if options.again else FIRST
    made, breeds = tests(base, Path(options.pets), Path(options.imagenet), options.images, split)
    validation = [t for t in made if t.set == "seen" and t.kind in VARIED]
    given = {
        "model.checkpoint": options.checkpoint,
        "epochs": EPOCHS,
        "test_every": 0,
        "tensorboard": False,
        "save_every": 1000,
    }
    given |= {f"data.{key}": options.pets for key in ("train", "masks")} | {
        "data.test": None,
        "data.test_masks": None,
    }
    given |= {"data.classes": list(split.breeds), "data.images": list(split.train)}

    def trained(name: str, rate: float, seed: int, changes: dict[str, Any]) -> torch.nn.Module:
        print(f"{name}, rate {rate:g}, seed {seed}", flush=True)
        recipe = read_recipe(RECIPE, given | changes | {"optimizer.lr": rate, "seed": seed})
        if options.models:
            return sg.train(recipe, Path(options.models) / f"{file_name(name)}-{seed}").model
        with tempfile.TemporaryDirectory() as folder:
            return sg.train(recipe, folder).model

    def kept(
        name: str, rate: float, seed: int, changes: dict[str, Any], some: list[Test]
    ) -> list[dict[str, Any]]:
        file = out / f"{file_name(name)}_{rate:g}_{seed}_{len(some)}.csv.gz"
        if not file.exists():
            model = base.model if name == "as it was" else trained(name, rate, seed, changes)
            rows = judge(model, some, breeds, {"variant": name, "rate": rate, "seed": seed})
            write(file, rows)
        return list(read(file))

    kept("as it was", 0, 0, {}, made)
    if options.again:
        for seed, name in product(SEEDS, options.only or (*AGAIN, *LATER)):
            kept(name, 1e-5, seed, (VARIANTS | SIDE | LATER)[name], made)
        return
    best: dict[str, float] = {}
    for name, changes in VARIANTS.items():
        found = {
            rate: np.mean([int(r[options.choose]) for r in kept(name, rate, 0, changes, validation)])
            for rate in RATES
        }
        best[name] = max(found, key=lambda rate: found[rate])
        print(
            name, {rate: f"{100 * value:.1f}" for rate, value in found.items()}, "->", best[name], flush=True
        )
    for seed in SEEDS:
        for name, changes in VARIANTS.items():
            kept(name, best[name], seed, changes, made)
    for number, (name, changes) in enumerate(SIDE.items()):
        for seed in SEEDS if number < OFTEN else SEEDS[:1]:
            kept(name, best["relevance and confidence (paper)"], seed, changes, made)


def file_name(variant: str) -> str:
    return variant.replace(" ", "-").replace(",", "")


def write(file: Path, rows: list[dict[str, Any]]) -> None:
    beside = file.with_suffix(".part")
    with gzip.open(beside, "wt", newline="") as text:
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    beside.rename(file)


def read(file: Path) -> Iterator[dict[str, str]]:
    with gzip.open(file, "rt", newline="") as text:
        yield from csv.DictReader(text)


# -- tables ----------------------------------------------------------------------------------------

MEASURES = [  # title, set, kinds, column
    ("unseen breeds, varied: of 1,000", "unseen", VARIED, "right"),
    ("of 24", "unseen", VARIED, "right_of_24"),
    ("unseen, unaltered", "unseen", ("clean",), "right"),
    ("seen breeds, varied: of 1,000", "seen", VARIED, "right"),
    ("of 24", "seen", VARIED, "right_of_24"),
    ("ImageNet", "imagenet", ("clean",), "right"),
    ("relevance on the animal, unseen", "unseen", ("clean",), "share"),
]


def table(options: argparse.Namespace) -> None:
    runs: dict[str, dict[int, list[dict[str, str]]]] = {}
    rates: dict[str, str] = {}
    chosen: dict[str, dict[str, str]] = {}
    for file in sorted(Path(options.rows).glob("*.csv.gz")):
        rows = list(read(file))
        name = rows[0]["variant"]
        if any(r["set"] == "imagenet" for r in rows):
            runs.setdefault(name, {})[int(rows[0]["seed"])] = rows
            rates[name] = rows[0]["rate"]
        else:
            means_of = (100 * np.mean([int(r[column]) for r in rows]) for column in ("right_of_24", "right"))
            chosen.setdefault(name, {})[rows[0]["rate"]] = " / ".join(f"{value:.1f}" for value in means_of)
    if chosen:
        print(
            "Accuracy on the varied seen images (validation) by learning rate, %: "
            "of the 24 breeds / of 1,000 classes\n"
        )
        print("| variant | " + " | ".join(f"{r:g}" for r in RATES) + " |\n| --- |" + " ---: |" * len(RATES))
    for name in [n for n in VARIANTS if n in chosen]:
        found = {float(rate): value for rate, value in chosen[name].items()}
        print(f"| {name} | " + " | ".join(found.get(r, "") for r in RATES) + " |")
    before = runs["as it was"][0]
    titles = " | ".join(title for title, *_ in MEASURES)
    print(
        "\nThe model before fine-tuning in %, then the change in points "
        "with 95 % intervals over images and seeds:\n"
    )
    print(f"| variant | rate | seeds | {titles} |")
    print("| --- | ---: | ---: |" + " ---: |" * len(MEASURES))
    cells = [f"{100 * np.mean(list(means(before, *m[1:]).values())):.1f}" for m in MEASURES]
    print(f"| {TITLES['as it was']} | | | " + " | ".join(cells) + " |")
    for name in [n for n in (*VARIANTS, *SIDE, *LATER) if n in runs]:
        cells = [change(before, list(runs[name].values()), *m[1:]) for m in MEASURES]
        print(f"| {TITLES.get(name, name)} | {rates[name]} | {len(runs[name])} | " + " | ".join(cells) + " |")


def means(rows: list[dict[str, str]], part: str, kinds: tuple[str, ...], column: str) -> dict[str, float]:
    """Image -> its mean over the settings."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["set"] == part and row["kind"] in kinds and row[column] != "":
            found.setdefault(row["picture"], []).append(float(row[column]))
    return {name: float(np.mean(values)) for name, values in found.items()}


def change(
    before: list[dict[str, str]],
    after: list[list[dict[str, str]]],
    part: str,
    kinds: tuple[str, ...],
    column: str,
) -> str:
    """Mean change in points and its 95 % interval over images and seeds."""
    was = means(before, part, kinds, column)
    now = [means(rows, part, kinds, column) for rows in after]
    mean, low, high = spread(np.array([[found[name] - was[name] for name in was] for found in now]) * 100)
    return f"{mean:+.1f} [{low:.1f}, {high:.1f}]"


# -- masks -----------------------------------------------------------------------------------------


def masks(options: argparse.Namespace) -> None:
    """IoU of TokenCut's masks with the human ones, border excluded: mean and 95 % interval over images."""
    torch.set_num_threads(1)
    ready = sg.load_model("deit_tiny_patch16_224", checkpoint=options.checkpoint)
    classes = ClassLookup(ready.class_names, 1000)
    found = find_labeled_images(options.pets, options.pets, classes, limit=options.count)
    preprocess = ready.preprocess.override(interpolation="bicubic", crop_pct=1.0)
    print(
        f"TokenCut from the keys of DeiT-Tiny, {len(found.items)} images\n\n"
        "| keys | edges | IoU, % |\n| --- | --- | ---: |"
    )
    for keys, edges in product(("uncentered", "centered"), ("patches", "bilateral")):
        made = tokencut_masks(
            ready.model, found.items, preprocess, refined=edges == "bilateral", centered=keys == "centered"
        )
        each = []
        for item in found.items:
            human = np.asarray(read_mask(item, found.decode))
            mine = (
                np.asarray(
                    Image.fromarray(made[item.name].numpy()).resize(
                        human.shape[::-1], Image.Resampling.NEAREST
                    )
                )
                == OBJECT
            )
            inside, counted = human == OBJECT, human != BORDER
            each.append((inside & mine).sum() / ((inside | mine) & counted).sum())
        mean, low, high = spread(100 * np.array([each]))
        print(f"| {keys} | {edges} | {mean:.1f} [{low:.1f}, {high:.1f}] |")


# -- perturbation ----------------------------------------------------------------------------------


def perturbation(options: argparse.Namespace) -> None:
    """The means of the first run, and the paired changes in the others, with 95 % intervals over images."""
    runs = [
        sg.Rows.read(run).to_pandas().set_index(["method", "metric", "image"]).value.sort_index()
        for run in options.runs
    ]
    kinds = sorted({key[:2] for key in runs[0].index})
    print(
        "| run | " + " | ".join(f"`{method}`, {metric.replace('_', ' ')}" for method, metric in kinds) + " |"
    )
    print("| --- |" + " ---: |" * len(kinds))
    for number, (run, found) in enumerate(zip(options.runs, runs, strict=True)):
        cells = []
        for kind in kinds:
            change = found.loc[kind] - (runs[0].loc[kind] if number else 0)
            mean, low, high = spread(change.to_numpy()[None])
            cells.append(f"{mean:{'+' if number else ''}.1f} [{low:.1f}, {high:.1f}]")
        print(f"| {Path(run).name} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    todo = parser.add_subparsers(required=True)
    train = todo.add_parser("run")
    for name in ("--checkpoint", "--pets", "--imagenet", "--out"):
        train.add_argument(name, required=True)
    train.add_argument("--images", type=int, default=1000, help="number of images of ImageNet")
    train.add_argument(
        "--choose",
        choices=("right_of_24", "right"),
        default="right_of_24",
        help="what chooses the learning rate",
    )
    train.add_argument(
        "--again", action="store_true", help="the other half of the breeds, on held-out images"
    )
    train.add_argument("--only", nargs="+", help="with --again: these variants")
    train.add_argument("--models", help="folder for the trained models; default: they are not kept")
    train.set_defaults(go=run)
    show = todo.add_parser("table")
    show.add_argument("rows")
    show.set_defaults(go=table)
    check = todo.add_parser("masks")
    check.add_argument("--checkpoint", required=True)
    check.add_argument("--pets", required=True)
    check.add_argument("--count", type=int, default=120, help="number of images")
    check.set_defaults(go=masks)
    beside = todo.add_parser("perturbation")
    beside.add_argument("runs", nargs="+")
    beside.set_defaults(go=perturbation)
    options = parser.parse_args()
    options.go(options)


if __name__ == "__main__":
    main()
