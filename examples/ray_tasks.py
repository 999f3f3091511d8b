"""One verify run as Ray tasks: each task is a shard, all write into one folder that every node can reach.

    python examples/ray_tasks.py --model deit_base_patch16_224 --data /data/val --out /shared/run --shards 16

Needs `pip install ray`. A task that dies with its node is tried again by Ray, and its shard is resumed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import steadygaze as sg


def run(model: str, data: str, methods: list[str], out: str, shards: int, cpus: float = 1) -> sg.Rows:
    """All shards as tasks of Ray; returns the rows of the whole run."""
    import ray

    def measure(index: int) -> int:
        """One shard; returns the number of its rows."""
        return len(sg.verify(model, data, methods=methods, out=out, shard=(index, shards)))

    task = ray.remote(num_cpus=cpus, max_retries=3)(measure)  # with GPUs: num_gpus=1
    ray.get([task.remote(index) for index in range(shards)])
    return sg.Rows.read(out)


def labeled_examples(folder: Path) -> Path:
    """The example images of the package, in folders named by class."""
    for image in (Path(sg.__file__).parent / "assets" / "demo").glob("*.png"):
        (folder / image.stem).mkdir(parents=True)
        shutil.copy(image, folder / image.stem)
    return folder


def main(words: list[str] | None = None) -> None:
    """Without options: two shards of the example images, with the embedded model."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--data", default=None)
    parser.add_argument("--methods", default="gae,rollout")
    parser.add_argument("--out", default=None)
    parser.add_argument("--shards", type=int, default=2)
    given = parser.parse_args([] if words is None else words)
    ray.init(num_cpus=None if given.data else 2, include_dashboard=False, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            data = given.data or str(labeled_examples(Path(folder) / "data"))
            out = given.out or f"{folder}/run"
            rows = run(given.model, data, given.methods.split(","), out, given.shards)
            print(rows.table(repeats=200).markdown())
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
