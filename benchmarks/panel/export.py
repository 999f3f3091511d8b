"""Put a trained model into the panel: `python -m benchmarks.panel.export RUN...`

RUN is a folder that `steadygaze train NAME` wrote, called NAME. Its weights are stored in float16, beside the
recipe (train.json, with the data named relative to the data set) and the log of the training.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path, PurePath

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.panel import FOLDER


def export(run: Path) -> Path:
    """The folder of the model in the panel."""
    out = FOLDER / run.name
    out.mkdir(exist_ok=True)
    with safe_open(run / "model.safetensors", "pt") as file:
        metadata = file.metadata()
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    half = {name: x.half() if x.dtype == torch.float32 else x for name, x in weights.items()}
    save_file(half, out / "model.safetensors", metadata)
    (out / "model.safetensors").chmod(0o644)
    recipe = json.loads((run / "train.json").read_text(encoding="utf-8"))
    data = recipe["settings"]["data"]
    for key in ("train", "test"):
        data[key] = "/".join(PurePath(data[key]).parts[-2:])
    recipe["about"]["command"] = (
        f"steadygaze train {run.name} --set data.train={data['train']} --set data.test={data['test']} "
        f"--out runs/{run.name}"
    )
    (out / "train.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
    (out / "log.csv").write_text((run / "log.csv").read_text(encoding="utf-8"), encoding="utf-8")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    for run in parser.parse_args().runs:
        print(export(run))


if __name__ == "__main__":
    main()
