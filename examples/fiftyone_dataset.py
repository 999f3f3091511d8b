"""Maps and removal scores as a FiftyOne dataset: browse, sort by score, compare methods in its app.

    pip install steadygaze fiftyone
    python fiftyone_dataset.py FOLDER [MODEL]      # without arguments: the example images, the embedded model

Each method is a `Heatmap` label, each check against chance a number of the sample.
"""

import sys
from importlib.resources import files
from pathlib import Path

import fiftyone as fo
import numpy as np

import steadygaze as sg

METHODS = ["gaze_outline", "gae", "rollout"]


def dataset(folder: Path, model: str) -> fo.Dataset:
    """One sample for each image of the folder."""
    images = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".png", ".jpg", ".jpeg"))
    maps = sg.explain(model, [str(path) for path in images], method=METHODS, check=True)
    made = fo.Dataset()
    for i, path in enumerate(images):
        sample = fo.Sample(filepath=str(path))
        for name, att in maps.items():
            scores = att.scores[i].clamp_min(0).numpy()
            scaled = (255 * scores / max(float(scores.max()), 1e-9)).astype(np.uint8)
            sample[name] = fo.Heatmap(map=scaled)
            sample[f"{name}_versus_chance"] = float(att.check.versus_chance[i])
        made.add_sample(sample)
    return made


if __name__ == "__main__":
    given = [Path(sys.argv[1])] if len(sys.argv) > 1 else [Path(str(files("steadygaze") / "assets" / "demo"))]
    result = dataset(given[0], sys.argv[2] if len(sys.argv) > 2 else "embedded")
    print(result)
    print("open it: fiftyone.launch_app(dataset)")
