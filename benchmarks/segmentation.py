"""Do TAP and ADL help segmentation under corruption? python -m benchmarks.segmentation run | rows | table
(docs/evidence/segmentation.md)

    run --checkpoint FILE --pets FOLDER --out DIR       train and test what is not in DIR yet
    run --checkpoint FILE --camvid FOLDER --out DIR     the same on driving scenes
    rows DIR --out FILE.csv.gz                          gather the counts of every image
    table FILE.csv.gz                                   print the tables from the rows alone

DeiT-Tiny with a linear decoder is fine-tuned by a shipped recipe, `segmentation-deit-tiny` (240 images of
pets) or `camvid-deit-tiny` (367 driving scenes), as it is, with TAP, with ADL, with both, and tested on other
images: clean, and under 15 corruptions at some severities. A row is one image under one setting by one model,
and for each class the pixels that are right, that are predicted and that are true. The first line of a table
is the plain segmenter, the others are differences, with 95 % bootstrap intervals over images and seeds, the
same draws for both sides.
"""

import argparse
import csv
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image

import steadygaze as sg
from steadygaze.data.images import images_in
from steadygaze.data.label_maps import find_label_maps
from steadygaze.robustness.mean_miou import mean_miou, retention
from steadygaze.runs.suites.segmentation import set_numbers
from steadygaze.training.recipe import read_recipe

HALF = 240  # images of pets to train with
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {  # title, changes of the recipe
    "plain": ("plain", {}),
    "adl": ("ADL", {"losses.adl": {}}),
    "tap": ("TAP", {"modules.tap": {}}),
    "tap-adl": ("TAP and ADL", {"modules.tap": {}, "losses.adl": {}}),
    "segformer": ("plain, decoder `segformer`", {"model.decoder": "segformer"}),
}
CAMVID = (
    "sky",
    "building",
    "pole",
    "road",
    "pavement",
    "tree",
    "sign",
    "fence",
    "car",
    "pedestrian",
    "bicyclist",
)
CAMVID_IGNORED = 11
COUNTS = ("right", "said", "true")


def run(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    out = Path(options.out)
    given: dict[str, Any] = {"model.checkpoint": options.checkpoint, "data.test": None, "tensorboard": False}
    masks: Path | None = None
    if options.camvid:
        recipe, data = "camvid-deit-tiny", camvid(Path(options.camvid), out / "camvid")
        test, masks = data / "val" / "images", data / "val" / "labels"
        train = data / "train"
        given |= {"data.train": str(train / "images"), "data.masks": str(train / "labels")}
    else:
        recipe, test = "segmentation-deit-tiny", other_half(Path(options.pets), out / "test")
        given["data.train"] = options.pets
    for seed in options.seeds:
        for name in options.variants:
            folder = out / "train" / f"{name}-{seed}"
            print(f"{name}, seed {seed}", flush=True)
            if not (folder / "done").exists():
                sg.train(read_recipe(recipe, given | VARIANTS[name][1] | {"seed": seed}), folder)
                (folder / "done").touch()
            sg.stress(
                sg.load_model(str(folder)),
                test,
                "segmentation",
                masks=masks,
                severities=options.severities,
                limit=options.images,
                batch_size=8,
                out=out / "stress" / folder.name,
            )


def camvid(source: Path, folder: Path) -> Path:
    """CamVid with label maps as steadygaze reads them: classes.txt, and 255 where no class counts."""
    for part in ("train", "val"):
        labels = folder / part / "labels"
        if (labels / "classes.txt").exists():
            continue
        labels.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source / part / "images", folder / part / "images", dirs_exist_ok=True)
        for file in images_in(source / part / "labels"):
            pixels = np.asarray(Image.open(file))
            Image.fromarray(np.where(pixels == CAMVID_IGNORED, 255, pixels).astype(np.uint8)).save(
                labels / file.name
            )
        (labels / "classes.txt").write_text("\n".join(CAMVID) + "\n")
    return folder


def other_half(pets: Path, folder: Path) -> Path:
    """A folder of the images that no segmenter is trained on."""
    if not folder.exists():
        items = find_label_maps(pets).items[HALF:]
        folder.mkdir(parents=True)
        with (folder / "index.csv").open("w", newline="") as opened:
            writer = csv.writer(opened)
            writer.writerow(["image", "mask", "class"])
            for item in items:
                assert item.mask is not None
                names = [path.relative_to(pets).as_posix() for path in (item.path, item.mask)]
                for name in names:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(pets / name, folder / name)
                writer.writerow([*names, item.path.parent.name])
    return folder


def gather(options: argparse.Namespace) -> None:
    found = []
    for folder in sorted((Path(options.folder) / "stress").iterdir()):
        variant, _, seed = folder.name.rpartition("-")
        for row in sg.Rows.read(folder):
            counts = {
                f"{count}_{int(group[0])}": int(group[1 + i])
                for group in np.reshape(row["detail"], (-1, 4))  # class, right, predicted, true
                for i, count in enumerate(COUNTS)
            }
            head = {"variant": variant, "seed": int(seed), "setting": row["setting"], "picture": row["image"]}
            found.append(head | counts)
    rows = pd.DataFrame(found).fillna(0)
    columns = [column for column in rows.columns if column[-1].isdigit()]
    rows[columns] = rows[columns].astype(int)
    ordered = sorted(columns, key=lambda name: (int(name.split("_")[1]), COUNTS.index(name.split("_")[0])))
    rows[["variant", "seed", "setting", "picture", *ordered]].to_csv(options.out, index=False)
    print(f"{len(found)} rows -> {options.out}")


# -- tables ----------------------------------------------------------------------------------------


def measures(counts: np.ndarray, settings: list[str]) -> dict[str, np.ndarray]:
    """counts (r, settings, 3, classes), summed over images -> title: (r,), in percent."""
    by_setting = {setting: set_numbers(counts[:, i])[0] for i, setting in enumerate(settings)}
    corrupted: dict[str, dict[int, np.ndarray]] = {}
    for setting, values in by_setting.items():
        name, _, severity = setting.partition("/")
        if severity:
            corrupted.setdefault(name, {})[int(severity)] = values
    mean = mean_miou(corrupted)
    kinds = {
        f"severity {s}": mean_miou({c: {s: v[s]} for c, v in corrupted.items()})
        for s in sorted(next(iter(corrupted.values())))
    }
    found = {
        "clean mIoU": by_setting["clean"],
        "mean mIoU": mean,
        "retention": retention(mean, by_setting["clean"]),
        "mean mIoU, Cityscapes-C": mean_miou(corrupted, "cityscapes-c"),
        **kinds,
    }
    return {title: 100 * values for title, values in found.items()} | {
        c: 100 * mean_miou({c: v}) for c, v in corrupted.items()
    }


def table(options: argparse.Namespace) -> None:
    rows = pd.read_csv(options.rows)
    settings, images = list(dict.fromkeys(rows.setting)), sorted(set(rows.picture))
    runs: dict[str, dict[int, np.ndarray]] = {}
    for (variant, seed), own in rows.groupby(["variant", "seed"], sort=False):
        places = (
            own.setting.map({s: i for i, s in enumerate(settings)}),
            own.picture.map({p: i for i, p in enumerate(images)}),
        )
        columns = list(own.columns[4:])
        counts = np.zeros((len(settings), len(images), 3, len(columns) // 3))
        counts[places] = own[columns].to_numpy().reshape(len(own), -1, 3).swapaxes(1, 2)
        if len(own) == len(settings) * len(images):  # a run that was not finished does not count
            runs.setdefault(str(variant), {})[int(seed)] = counts
    names = [name for name in VARIANTS if name in runs]
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(len(images), np.full(len(images), 1 / len(images)), options.repeats)
    taken = np.concatenate([np.ones((1, len(images))), drawn])
    found = {
        n: {s: measures(np.einsum("rn,snkc->rskc", taken, counts), settings) for s, counts in runs[n].items()}
        for n in names
    }
    print(
        f"{len(images)} images, {len(settings)} settings; "
        "first in %, then what changed in points, with 95 % intervals\n"
    )
    titles = list(next(iter(found["plain"].values())))
    split = titles.index("gaussian_noise")
    for some in (titles[:split], titles[split:]):
        print(
            "| segmenter | seeds | "
            + " | ".join(t.replace("_", " ") for t in some)
            + " |\n| --- | ---: |"
            + " ---: |" * len(some)
        )
        for name in names:
            seeds, plain = sorted(set(found[name]) & set(found["plain"])), name == "plain"
            which = np.concatenate(
                [np.arange(len(seeds))[None], rng.integers(len(seeds), size=(options.repeats, len(seeds)))]
            )
            each = {
                t: np.stack([found[name][s][t] - (0 if plain else found["plain"][s][t]) for s in seeds], 1)
                for t in some
            }
            cells = [_cell(np.take_along_axis(each[t], which, 1).mean(1), "" if plain else "+") for t in some]
            print(f"| {VARIANTS[name][0]} | {len(seeds)} | " + " | ".join(cells) + " |")
        print()
    print("| segmenter | clean mIoU of each seed | mean mIoU of each seed |\n| --- | ---: | ---: |")
    for name in names:
        cells = [
            " ".join(f"{found[name][s][t][0]:.1f}" for s in sorted(runs[name]))
            for t in ("clean mIoU", "mean mIoU")
        ]
        print(f"| {VARIANTS[name][0]} | {cells[0]} | {cells[1]} |")


def _cell(samples: np.ndarray, sign: str) -> str:
    low, high = np.percentile(samples[1:], [2.5, 97.5])
    return f"{samples[0]:{sign}.1f} [{low:.1f}, {high:.1f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    todo = parser.add_subparsers(required=True)
    make = todo.add_parser("run")
    for name in ("--checkpoint", "--out"):
        make.add_argument(name, required=True)
    data = make.add_mutually_exclusive_group(required=True)
    data.add_argument("--pets")
    data.add_argument("--camvid")
    make.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    make.add_argument("--variants", nargs="+", default=list(VARIANTS)[:4], choices=list(VARIANTS))
    make.add_argument("--images", type=int, default=48)
    make.add_argument("--severities", default="1,3,5")
    make.set_defaults(go=run)
    keep = todo.add_parser("rows")
    keep.add_argument("folder")
    keep.add_argument("--out", required=True)
    keep.set_defaults(go=gather)
    show = todo.add_parser("table")
    show.add_argument("rows")
    show.add_argument("--repeats", type=int, default=2000)
    show.set_defaults(go=table)
    options = parser.parse_args()
    options.go(options)


if __name__ == "__main__":
    main()
