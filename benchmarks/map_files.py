"""What rounding to float16 does to the rows of `verify`, and the size of map files.

    python -m benchmarks.map_files [--model NAME] [--checkpoint FILE] --data FOLDER [--limit N]

One run computes maps, measures them and keeps them; a second one measures the kept maps. Printed for each
method: images whose order of patches float16 changed, and by metric the rows that differ, with the largest
difference. Rows of images with the same order must be equal for metrics that use the order only.
"""

import argparse
import tempfile
from pathlib import Path

import pandas as pd
import torch
from rich.console import Console
from rich.table import Table

import steadygaze as sg
from steadygaze.results.map_files import MapFolder, MapName

METHODS = ["gaze_removal", "gae", "ixg+plus", "rollout", "gradcam"]
METRICS = ["insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc"]
ROUNDING = 1e-9  # sums over ratios in another order


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--checkpoint")
    parser.add_argument("--data", required=True)
    parser.add_argument("--limit", type=int, default=50)
    options = parser.parse_args()
    loaded = sg.load_model(options.model, options.checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        asked = {"metrics": METRICS, "limit": options.limit, "target": "predicted"}
        direct = sg.verify(
            loaded, options.data, methods=METHODS, out=run, keep_maps=True, **asked
        ).to_pandas()
        again = sg.verify(loaded, options.data, maps=run, **asked).to_pandas()
        tied = {method: ties(MapFolder(run), method) for method in METHODS}
        size = sum(file.stat().st_size for file in (run / "maps").iterdir())
    again["method"] = again["method"].str.removeprefix("maps:")
    both = direct.merge(again, on=["method", "score", "metric", "image"], suffixes=("", "_kept"))
    assert len(both) == len(direct) == len(again)
    both["difference"] = (both["value"] - both["value_kept"]).abs()
    table = Table(
        "method",
        "maps with equal scores after rounding",
        *(f"{metric}: rows that differ (largest)" for metric in METRICS),
        title=f"{options.model}, {options.limit} images",
    )
    for method in METHODS:
        rows = both[both["method"] == method]
        cells = []
        for metric in METRICS:
            difference = rows[rows["metric"] == metric]["difference"]
            cells.append(f"{int((difference > ROUNDING).sum())} ({difference.max():.2g})")
        table.add_row(method, str(len(tied[method])), *cells)
        untied = rows[~rows["image"].isin(tied[method])]
        assert (untied["difference"] == 0).all(), "a row changed although no scores became equal"
    console = Console(width=160)
    console.print(table)
    changed = both[both["difference"] > ROUNDING]
    console.print(
        f"{len(changed)} of {len(both)} rows differ; largest change of a mean over the images: "
        f"{_mean_change(both):.3f} points. {size / (options.limit * len(METHODS)):.0f} bytes for a map."
    )


def _mean_change(both: pd.DataFrame) -> float:
    means = both.groupby(["method", "metric"])[["value", "value_kept"]].mean()
    return float((means["value"] - means["value_kept"]).abs().max())


def ties(maps: MapFolder, method: str) -> set[str]:
    """Images whose map has two equal scores in float16."""
    name = next(name for name in maps.names if name.method == method)
    return {image for image in maps.images if _tied(maps, name, image)}


def _tied(maps: MapFolder, name: MapName, image: str) -> bool:
    file, position = next((f, f.images.index(image)) for f in maps.files if image in f.images)
    scores, _, _ = maps.read(name, image, file.targets[position] if file.targets else 0)
    return torch.unique(scores).numel() < scores.numel()


if __name__ == "__main__":
    main()
