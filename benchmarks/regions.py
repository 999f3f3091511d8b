"""Are maps of a region faithful? A segmenter of pets, one pixel of the animal in each image.

    python -m benchmarks.regions --model RUN --data pets-masks [--images N]

RUN is a folder of `steadygaze train segmentation-deit-tiny`, whose test images these are. The pixel is the
one of the animal that is farthest from its border; maps explain "animal" there, and are scored by removing
patches. Without the patches around the pixel its scores are zero, so a map that ranks nothing but these first
(`own_patches`) is the baseline to compare with. Prints the mean of each metric, with the half width of its
95 % interval over images.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from scipy import ndimage

import steadygaze as sg
from steadygaze.data.images import read_image

METHODS = ("gaze_removal", "gaze", "gae", "rollout", "ixg", "gradcam", "occlusion", "own_patches", "random")
ANIMAL = 1


@sg.register_method("own_patches", "model")
def own_patches(query: Any) -> Any:
    """A baseline: the patches whose scores are interpolated at the pixel, then the others at random."""
    weights = query.vit.plan.readout_weights.reshape(1, *query.grid).to(query.images)
    noise = torch.rand(query.grid, generator=torch.Generator().manual_seed(0)).to(query.images)
    return (weights + 1e-6 * noise).expand(len(query.images), -1, -1)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.regions", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a trained segmenter")
    parser.add_argument("--data", type=Path, required=True, help="folder of pets with masks and index.csv")
    parser.add_argument("--images", type=int, default=40, help="number of test images")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = sg.load_model(str(options.model))
    index = pd.read_csv(options.data / "index.csv")
    chosen = index.iloc[np.linspace(len(index) // 2, len(index) - 1, options.images).astype(int)]
    frames = []
    for row in chosen.itertuples():
        mask = Image.open(options.data / row.mask).convert("L")
        image = loaded.preprocess(read_image(options.data / row.image))[None]
        animal = np.asarray(mask.resize(loaded.size[::-1], Image.Resampling.NEAREST)) == 255
        depth = ndimage.distance_transform_edt(np.pad(animal, 1))[1:-1, 1:-1]
        y, x = np.unravel_index(depth.argmax(), depth.shape)
        asked = sg.ask(loaded, region=sg.Region(ANIMAL, point=(int(x), int(y))))
        rows = sg.verify(asked, [(image, torch.tensor([ANIMAL]))], methods=options.methods)
        frames.append(rows.to_pandas().assign(image=row.image))
    values = pd.concat(frames).groupby(["method", "metric"])["value"]
    half = 1.96 * values.std() / len(frames) ** 0.5
    table = values.mean().map("{:.1f}".format) + " ± " + half.map("{:.1f}".format)
    print(table.unstack("metric").loc[list(options.methods)].to_string())


if __name__ == "__main__":
    main()
