"""Count the modules that one image passes through, for each verb.

    python tools/count_hops.py

From a loaded model to the result: the modules of steadygaze in which a function is called, each counted once.
Imports do not count, since each verb runs twice and the second run is counted.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image

import steadygaze as sg


def entered(call: Callable[[int], Any]) -> list[str]:
    """Modules in which a function is called; call: gets the number of the run."""
    call(0)
    seen: set[str] = set()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("steadygaze.") and frame.f_code.co_name != "<module>":
            seen.add(name)

    sys.setprofile(watch)
    try:
        call(1)
    finally:
        sys.setprofile(None)
    return sorted(seen)


def main() -> None:
    warnings.simplefilter("ignore")
    loaded = sg.load_model("embedded")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        for name in ("cat", "dog"):
            (data / name).mkdir(parents=True)
            pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(data / name / "0.png")
        file, out = data / "cat" / "0.png", Path(folder)
        run: dict[str, Any] = {"batch_size": 1, "num_workers": 0}
        verbs: dict[str, Callable[[int], Any]] = {
            "attention": lambda number: sg.attention(loaded, file)[-1],
            "features": lambda number: sg.features(loaded, file),
            "explain": lambda number: sg.explain(loaded, file),
            "verify": lambda number: sg.verify(loaded, data, methods=["gae"], out=out / f"v{number}", **run),
            "stress": lambda number: sg.stress(
                loaded, data, suites=["corruptions"], out=out / f"s{number}", **run
            ),
        }
        for verb, call in verbs.items():
            print(f"{verb:10} {len(entered(call)):3}")


if __name__ == "__main__":
    main()
