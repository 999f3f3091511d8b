"""Shape bias of several models on the same cue-conflict images: python -m benchmarks.shape_bias TITLE=RUN
TITLE=RUN,RUN...

Prints the table of docs/evidence/shape_bias.md from runs of `steadygaze stress --suites cue_conflict:FOLDER`.
The first run is in percent; each further line is the mean change over its runs (seeds), in points, with 95 %
bootstrap intervals: images and seeds are drawn anew, the same images for both sides. Only images that all
runs have are used.
"""

import sys
from pathlib import Path

import numpy as np

import steadygaze as sg

REPEATS = 2000
COLUMNS = ("shape bias", "shape decisions", "texture decisions")


def decisions(run: Path) -> dict[str, tuple[float, float]]:
    """image -> (whether shape decides, whether texture decides)."""
    rows = sg.Rows.read(run).to_pandas()
    wide = rows[rows.setting == "cue_conflict"].pivot(index="image", columns="metric", values="value")
    columns = wide[["shape_decisions", "texture_decisions"]].to_numpy()
    return {image: (shape, texture) for image, (shape, texture) in zip(wide.index, columns, strict=True)}


def measures(counts: np.ndarray) -> np.ndarray:
    """(..., images, 2) -> (..., 3): shape bias, shares of shape and of texture decisions, in percent."""
    shape, texture = counts.mean(-2)[..., 0], counts.mean(-2)[..., 1]
    return 100 * np.stack([shape / (shape + texture), shape, texture], -1)


def cells(samples: np.ndarray, sign: str) -> str:
    """The first sample with the interval of the others, for each measure."""
    low, high = np.percentile(samples[1:], [2.5, 97.5], axis=0)
    return " | ".join(
        f"{value:{sign}.1f} [{a:.1f}, {b:.1f}]" for value, a, b in zip(samples[0], low, high, strict=True)
    )


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("expected TITLE=RUN, then any number of TITLE=RUN,RUN...")
    (first_title, first_run), *lines = [argument.partition("=")[::2] for argument in sys.argv[1:]]
    first = decisions(Path(first_run))
    others = {run: decisions(Path(run)) for _, runs in lines for run in runs.split(",")}
    images = sorted(set(first).intersection(*others.values()))
    rng = np.random.default_rng(0)
    everything, shape = np.arange(len(images)), (REPEATS, len(images))
    drawn = np.concatenate([everything[None], rng.integers(len(images), size=shape)])
    before = measures(np.array([first[image] for image in images])[drawn])
    print(f"| model ({len(images)} images) | runs | " + " | ".join(f"{c}, %" for c in COLUMNS) + " |")
    print("| --- | ---: | ---: | ---: | ---: |")
    print(f"| {first_title} | | {cells(before, '')} |")
    for title, runs in lines:
        found = [others[run] for run in runs.split(",")]
        changes = [measures(np.array([one[image] for image in images])[drawn]) - before for one in found]
        each = np.stack(changes, 1)  # (draws, seeds, measures)
        seeds = rng.integers(each.shape[1], size=each.shape[:2])
        seeds[0] = np.arange(each.shape[1])
        mean = np.take_along_axis(each, seeds[..., None], 1).mean(1)
        print(f"| {title} | {len(found)} | {cells(mean, '+')} |")


if __name__ == "__main__":
    main()
