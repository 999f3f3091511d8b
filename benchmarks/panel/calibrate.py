"""What `sg.calibrate` chooses for each model of the panel, and what it gains on images that did not choose.

    python -m benchmarks.panel.calibrate [--cifar10 FOLDER] [--imagenet FOLDER --weights FILE]
        [--pets FOLDER --dinov2 FILE] [--models NAME,...] --out FILE
    python -m benchmarks.panel.calibrate --rows FILE [--panel docs/evidence/rows/panel]    # only the tables

The images are none of those that the panel reports on: the first four of each class of CIFAR-10, the second
image of 48 classes of ImageNet, images 14 and 15 of each breed of pets. Half of them choose. With --panel,
also what the best constant would be: for each model the one-pass method that is best in the mean over the
others.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import steadygaze as sg
from benchmarks.panel import panel, selection
from benchmarks.panel.tables import read_scores
from steadygaze.methods.registry import DEFAULT

IMAGES = {"cifar10": (4, 0, None), "imagenet": (1, 1, 48), "pets": (2, 14, None)}  # of a class, from, classes


def table(rows: list[dict[str, object]]) -> str:
    """One line for each model."""
    lines = [
        "| model | chosen | removal score | default | gain over the default | images |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        found = sg.Calibration(**row)  # type: ignore[arg-type]
        mean, low, high = found.gain
        own, default = found.scores[found.name], found.scores[DEFAULT]
        options = found.name.partition(":")[2].replace(",", ", ") or "as the default"
        cells = (f"{own:.1f}", f"{default:.1f}", f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]")
        lines.append(f"| {found.model} | {options} | {' | '.join(cells)} | {found.reported_on} |")
    return "\n".join(lines)


def leave_one_out(panel_rows: Path) -> str:
    """For each model, the method that is best in the mean over the other models, and the best on it."""
    found = {name: read_scores(panel_rows / name) for name in panel() if (panel_rows / name).is_dir()}
    scores = {name: each for name, each in found.items() if each is not None}
    methods = [m for m in sg.list_methods() if all(m.name in each.values for each in scores.values())]
    names = [m.name for m in methods if m.cost <= 2 and m.name != "random"]
    lines = ["| model | best on the other models | its score here | best here | its score |"]
    lines.append("| --- | --- | ---: | --- | ---: |")
    for left_out in scores:
        mean = {
            name: sum(each.mean(name).mean() for model, each in scores.items() if model != left_out)
            for name in names
        }
        here = {name: float(scores[left_out].mean(name).mean()) for name in names}
        constant, best = max(mean, key=mean.__getitem__), max(here, key=here.__getitem__)
        cells = f"`{constant}` | {here[constant]:.1f} | `{best}` | {here[best]:.1f}"
        lines.append(f"| {left_out} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("cifar10", "imagenet", "pets", "weights", "dinov2", "out", "rows", "panel"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--models", type=lambda text: text.split(","))
    options = parser.parse_args()
    if options.rows:
        print(table(json.loads(options.rows.read_text())))
        if options.panel:
            print(f"\n{leave_one_out(options.panel)}")
        return
    pets = None if options.pets is None else options.pets / "images"
    folders = {"cifar10": options.cifar10, "imagenet": options.imagenet, "pets": pets}
    rows = json.loads(options.out.read_text()) if options.out.is_file() else []
    models = panel(options.models or ())
    for name in options.models or [name for name, model in models.items() if model.removable]:
        model = models[name]
        if folders[model.data] is None or any(row["model"] == name for row in rows):
            continue
        loaded = model.load(options.weights, options.dinov2)
        with selection(folders[model.data], *IMAGES[model.data]) as data:
            files = sorted(data.rglob("*.*"), key=lambda file: (file.name, file.parent.name))
            found = sg.calibrate(loaded, [str(file) for file in files])
        rows.append({**vars(found), "model": name, "gain": list(found.gain)})
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(name, found.name, found.gain, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
