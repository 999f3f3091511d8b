"""Outlier tokens and test-time registers of DINOv2 ViT-S/14, on photographs with masks.

    python -m benchmarks.registers --weights dinov2_vits14_518_float16.safetensors --data pets-masks \
        --out rows.csv.gz --figure registers.png
    python -m benchmarks.registers --rows rows.csv.gz         # only the tables, from rows
    python -m benchmarks.registers --deit deit_tiny_patch16_224.safetensors --data pets-masks  # of DeiT-Tiny

The data folder has index.csv (image, mask, breed) and masks of 255 (object), 128 (border) and 0. Register
neurons are found on the first image of each breed, at 518 pixels, and everything is measured on others.
`--out` gets one row for each image, size and model. Prints the tables of docs/evidence/dinov2.md.
"""

from __future__ import annotations

import argparse
import gzip
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torchvision import transforms

import steadygaze as sg
from steadygaze.faithfulness.localization import localization
from steadygaze.modules import Registers
from steadygaze.results.drawing import Row, paint, tile

FINE = 518
SIZES = {224: 5, FINE: 1}  # pixels -> images of each breed
MODELS = ("as it is", "registers", "registers, maximum='layer'", "a token without neurons", "random neurons")
SHARES = ("share_last", "share_late", "share_most")
PAIRED = 2000  # bootstrap samples


def transform(size: int) -> transforms.Compose:
    return transforms.Compose(
        [
            transforms.Resize((size, size), transforms.InterpolationMode.BICUBIC),
            transforms.ToTensor(),
            transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


def backbone(weights: Path) -> nn.Module:
    model = timm.create_model("vit_small_patch14_dinov2", num_classes=0, dynamic_img_size=True).eval()
    model.load_state_dict({name: value.float() for name, value in load_file(weights).items()})
    return model


def variants(model: nn.Module, found: Registers) -> dict[str, nn.Module]:
    """The model as it is, with registers, and two controls."""
    draw = random.Random(0)
    drawn = [(layer, draw.randrange(4 * model.embed_dim)) for layer, _ in found.neurons]
    specs = (
        found,
        Registers(neurons=found.neurons, maximum="layer"),
        Registers(),
        Registers(neurons=drawn),
    )
    inserted = [sg.modules.insert(model, registers=spec) for spec in specs]
    return dict(zip(MODELS, [model, *inserted], strict=True))


def measure(
    model: nn.Module, before: sg.Outliers | None, files: pd.DataFrame, size: int, data: Path
) -> tuple[sg.Outliers, pd.DataFrame]:
    """(outliers, a frame with one row for each image)."""
    out = sg.outliers(model, [str(data / file) for file in files.image], transform=transform(size))
    reference = out if before is None else before
    layer, mask = reference.layer, reference.mask
    norms = out.norms[:, layer].flatten(1)
    masks = torch.stack([read_mask(data / file) for file in files["mask"]])
    last, late = out.attention[:, -1], out.attention[:, -4:].mean(1)
    located = localization(torch.stack([last, late]), masks, ["average_precision"])
    share = (out.attention * mask[:, None]).sum((2, 3))
    table = {
        "image": files.image,
        "outliers": out.counts,
        "first": -1 if out.first is None else out.first,
        "norm_ratio": norms.amax(1) / norms.median(1).values,
        "patch_share": mask.flatten(1).float().mean(1),
        "share_last": share[:, -1],
        "share_late": share[:, -4:].mean(1),
        "share_most": share.amax(1),
        "ap_last": located["average_precision"].value[0],
        "ap_late": located["average_precision"].value[1],
    }
    return out, pd.DataFrame({name: _list(values) for name, values in table.items()}, index=files.index)


def _list(values: object) -> object:
    return values.tolist() if isinstance(values, Tensor) else values


def read_mask(path: Path) -> Tensor:
    return torch.from_numpy(np.asarray(Image.open(path).convert("L")).copy())


@torch.no_grad()
def neighbor_hits(model: nn.Module, files: pd.DataFrame, size: int, data: Path) -> list[float]:
    """Whether the most similar other image, by class token, is of the same breed."""
    prepare, features = transform(size), []
    for file in files.image:
        features.append(model(prepare(Image.open(data / file).convert("RGB"))[None]))
    unit = nn.functional.normalize(torch.cat(features), dim=-1)
    nearest = (unit @ unit.T - 2 * torch.eye(len(unit))).argmax(1).tolist()
    breeds = files.breed.tolist()
    return [float(breeds[i] == breeds[j]) for i, j in enumerate(nearest)]


def run(weights: Path, data: Path, out: Path, figure: Path | None) -> pd.DataFrame:
    index = pd.read_csv(data / "index.csv")
    number = index.groupby("breed").cumcount()
    model = backbone(weights)
    finding = [str(data / file) for file in index.image[number == 0]]
    found = sg.find_registers(model, finding, transform=transform(FINE))
    print(found, flush=True)
    frames, pictures = [], {}
    for size, each in SIZES.items():
        files = index[(number > 0) & (number <= each)].reset_index(drop=True)
        before = None
        for name, variant in variants(model, found).items():
            result, frame = measure(variant, before, files, size, data)
            before = result if before is None else before
            if size == 224:
                frame["neighbor"] = neighbor_hits(variant, files, size, data)
            frames.append(frame.assign(size=size, model=name))
            pictures[size, name] = result
            print(size, name, result.advice, flush=True)
    rows = pd.concat(frames, ignore_index=True)
    with gzip.open(out, "wt", encoding="utf-8") as file:
        rows.to_csv(file, index=False, float_format="%.5g")
    if figure is not None:
        draw(pictures[FINE, MODELS[0]], pictures[FINE, MODELS[1]]).save(figure)
    return rows


def draw(before: sg.Outliers, after: sg.Outliers) -> Image.Image:
    """Norms and attention of a few images, before and after."""
    chosen = before.counts.argsort(descending=True, stable=True)[:4].tolist()
    headings = ("norms", "attention", "norms, register", "attention, register")
    rows = []
    for i in chosen:
        highest = before.norms[i, before.layer].max()
        maps = [
            before.norms[i, before.layer] / highest,
            before.attention[i, -1] / before.attention[i, -1].max(),
            after.norms[i, before.layer] / highest,
            after.attention[i, -1] / after.attention[i, -1].max(),
        ]
        cells = [paint(m.repeat_interleave(6, 0).repeat_interleave(6, 1).numpy(), None) for m in maps]
        counts = f"{int(before.counts[i])} outlier tokens, {int(after.counts[i])} with a register"
        rows.append(Row(cells, before.names[i], counts))
    return tile(rows, headings, cell=200)


def tables(rows: pd.DataFrame) -> Iterator[str]:
    for size, part in rows.groupby("size", sort=True):
        first = part[part.model == MODELS[0]].set_index("image")
        with_any = first.outliers > 0
        yield f"\n{size} pixels, {len(first)} images ({int(with_any.sum())} with outlier tokens)\n"
        yield (
            "| model | outlier tokens per image | images with any | largest norm / median | "
            "attention at outliers, last block, % | last 4 blocks, % | most of any block, % | "
            "AP, last block | AP, last 4 blocks | nearest neighbor, % |"
        )
        yield "| --- " + "| ---: " * 9 + "|"
        for name in MODELS:
            frame = part[part.model == name].set_index("image").loc[first.index]
            some = frame[with_any]
            cells = [
                f"{frame.outliers.mean():.2f}",
                f"{int((frame.outliers > 0).sum())}",
                f"{frame.norm_ratio.mean():.2f}",
                *(
                    f"{100 * some[column].mean():.2f}"
                    for column in ("share_last", "share_late", "share_most")
                ),
                *(_precision(frame[column], first[column]) for column in ("ap_last", "ap_late")),
                "" if frame.neighbor.isna().all() else f"{100 * frame.neighbor.mean():.1f}",
            ]
            yield f"| {name} | {' | '.join(cells)} |"
        share = 100 * first.patch_share[with_any].mean()
        start = int(first["first"].iloc[0])
        yield f"\nOutliers are {share:.2f} % of the patches, high from block {start} on."


def _precision(values: pd.Series, first: pd.Series) -> str:
    mean = f"{values.mean():.1f}"
    if values is first or np.array_equal(values, first):
        return mean
    change = (values - first).to_numpy()
    samples = np.random.default_rng(0).choice(change, (PAIRED, len(change))).mean(1)
    low, high = np.percentile(samples, [2.5, 97.5])
    return f"{mean} ({change.mean():+.1f} [{low:+.1f}, {high:+.1f}])"


def of_deit(weights: Path, data: Path, each: int = SIZES[224]) -> str:
    """The outlier tokens of DeiT-Tiny on the images that are measured at 224 pixels, in words."""
    model = timm.create_model("deit_tiny_patch16_224").eval()
    model.load_state_dict(load_file(weights))
    index = pd.read_csv(data / "index.csv")
    number = index.groupby("breed").cumcount()
    files = [str(data / file) for file in index.image[(number > 0) & (number <= each)]]
    out = sg.outliers(model, files, transform=transform(224))
    last = float(out.attention_share[-1])
    return (
        f"DeiT-Tiny: {out.advice}\nIn the last block: {last:.1%} of the class token's attention to patches."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("registers.csv.gz"))
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--rows", type=Path, help="rows of an earlier run")
    parser.add_argument("--deit", type=Path, help="weights of DeiT-Tiny: its outlier tokens, nothing else")
    given = parser.parse_args()
    if given.deit is not None and given.data is not None:
        print(of_deit(given.deit, given.data))
        return
    if given.rows is None and (given.weights is None or given.data is None):
        parser.error("expected --weights and --data, or --rows")
    rows = (
        pd.read_csv(given.rows)
        if given.rows is not None
        else run(given.weights, given.data, given.out, given.figure)
    )
    print("\n".join(tables(rows)))


if __name__ == "__main__":
    main()
