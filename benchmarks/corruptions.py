"""Corruptions compared with the package imagecorruptions-imaug: milliseconds for one image, on one thread.

    python -m benchmarks.corruptions [--size 224] [--repeat 5]

Both apply every corruption at severities 1 to 5 to the same images, in turn, so that other load of the
machine affects both alike. The minimum time of each severity counts; a corruption's time is the mean over its
five severities. Whatever is computed once (tables, frost textures, compiled loops) is computed before the
timing.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import contextlib
import io
import time
from collections.abc import Callable

import numpy as np
from PIL import Image


def sample_image(size: int, seed: int = 0) -> np.ndarray:
    """A colorful image (size, size, 3) with large and small shapes and some grain, uint8."""
    rng = np.random.default_rng(seed)
    total = np.zeros((size, size, 3), dtype=np.float32)
    for cells, weight in ((3, 1.0), (9, 0.6), (27, 0.35), (81, 0.2)):
        noise = (rng.random((cells, cells, 3)) * 255).astype(np.uint8)
        total += weight * np.asarray(
            Image.fromarray(noise).resize((size, size), Image.Resampling.BICUBIC), dtype=np.float32
        )
    low, high = np.percentile(total, (2, 98))
    return np.clip((total - low) * 255 / (high - low), 0, 255).astype(np.uint8)


def least(run: Callable[[], object], other: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Least milliseconds of each of two calls, made in turn."""
    best = [float("inf"), float("inf")]
    for round_ in range(repeat + 1):
        for which, call in enumerate((run, other)):
            start = time.perf_counter()
            call()
            if round_:  # the first fills caches and compiles
                best[which] = min(best[which], (time.perf_counter() - start) * 1e3)
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(description="Corruptions against imagecorruptions-imaug, on one thread.")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()

    import cv2
    import imagecorruptions
    import torch

    from steadygaze.data.datasets.imagenet import COMMON, CORRUPTIONS
    from steadygaze.robustness.corruptions.corrupt import corrupt
    from steadygaze.robustness.corruptions.frost import TEXTURES, texture

    torch.set_num_threads(1)
    cv2.setNumThreads(1)
    image = sample_image(options.size)
    for index in range(len(TEXTURES)):
        texture(index)

    print(
        f"{options.size} x {options.size} pixels, one thread, minimum of {options.repeat} runs, "
        "mean of severities 1 to 5\n"
    )
    print(f"{'corruption':<20} {'theirs ms':>10} {'ours ms':>10} {'times':>8}")
    sums = {"the 15 common": [0.0, 0.0], "all 19": [0.0, 0.0]}
    for name in CORRUPTIONS:
        theirs, ours = 0.0, 0.0
        for severity in range(1, 6):
            with contextlib.redirect_stdout(io.StringIO()):  # theirs prints on some sizes
                a, b = least(
                    lambda name=name, severity=severity: imagecorruptions.corrupt(image, severity, name),
                    lambda name=name, severity=severity: corrupt(
                        image, name, severity, seed=0, settings="imagenet"
                    ),
                    options.repeat,
                )
            theirs, ours = theirs + a / 5, ours + b / 5
        for group, members in (("the 15 common", COMMON), ("all 19", CORRUPTIONS)):
            if name in members:
                sums[group][0] += theirs
                sums[group][1] += ours
        print(f"{name:<20} {theirs:>10.2f} {ours:>10.2f} {theirs / ours:>8.1f}", flush=True)
    for group, (theirs, ours) in sums.items():
        print(f"{group:<20} {theirs:>10.2f} {ours:>10.2f} {theirs / ours:>8.1f}")


if __name__ == "__main__":
    main()
