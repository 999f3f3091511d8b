"""Draw the methods that are trained, for their pages, into docs/images/methods:

    steadygaze shapley train --model embedded --data cifar10/train --out shapley.safetensors --steps 300
    steadygaze diffmask train --model embedded --data cifar10/train --out diffmask.safetensors --batch 16 \\
        --gate-rate 1e-3 --warmup 100 --dual-start 2 --dual-rate 0.05 --steps 1000
    python tools/learnt_figures.py --diffmask diffmask.safetensors --shapley shapley.safetensors

`make docs` draws the other methods itself: these would take minutes.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import steadygaze as sg
from tools.docs_site.images import LEARNT, SHOWN, demo, png, row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--diffmask", type=Path, required=True)
    parser.add_argument("--shapley", type=Path, required=True)
    options = parser.parse_args()
    shown = demo()
    LEARNT.mkdir(exist_ok=True)
    for name, file in (("diffmask", options.diffmask), ("vit_shapley", options.shapley)):
        method = sg.method(name, file=str(file))
        maps = sg.explain(shown.loaded.model, shown.images[:SHOWN], method=method)
        path = LEARNT / f"{name}.png"
        path.write_bytes(png(row(shown, maps)))
        print(path)


if __name__ == "__main__":
    main()
