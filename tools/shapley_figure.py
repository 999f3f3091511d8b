"""Draw docs/images/vit_shapley.png, the map of a trained explainer on a demo image:

steadygaze shapley train --model embedded --data cifar10/train --out shapley.safetensors --steps 140
python tools/shapley_figure.py shapley.safetensors
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import steadygaze as sg
from tools.docs_site.images import SHOWN, demo, png, row

STORED = Path(__file__).parents[1] / "docs" / "images" / "vit_shapley.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    shown = demo()
    method = sg.method("vit_shapley", file=str(options.file))
    maps = sg.explain(shown.loaded.model, shown.images[:SHOWN], method=method)
    STORED.write_bytes(png(row(shown, maps)))
    print(STORED)


if __name__ == "__main__":
    main()
