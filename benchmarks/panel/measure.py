"""Run methods x models x measures of the panel into run folders; rows that exist are not computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import steadygaze as sg
from benchmarks.panel import PanelModel, selection
from steadygaze.data.content import names_hash

REMOVAL = ("insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc")
MEASURES: dict[str, tuple[str, ...]] = {
    "removal": REMOVAL,
    "magnitude": ("saco", "srg"),
    "perturbation": ("positive_perturbation", "negative_perturbation"),
}


def measure(
    model: PanelModel,
    loaded: sg.LoadedModel,
    data: Path,
    methods: Sequence[str],
    measures: Sequence[str],
    out: Path,
    batch_size: int = 20,
) -> None:
    """Compute what is missing of these methods and measures, for the images of the folder `data`."""
    metrics = [metric for name in measures for metric in MEASURES[name]]
    done: set[str] = set()
    for folder in run_folders(out):
        settings = sg.Rows.read(folder).runs[0]["settings"]
        if list(settings["metrics"]) != metrics:
            continue
        own = list(dict.fromkeys(name for name, _ in settings["columns"]))
        if not is_complete(folder, settings):
            sg.verify(loaded, data, own, metrics, batch_size=batch_size, out=folder)
        done |= set(own)
    missing = [name for name in methods if name not in done]
    if missing:
        folder = out / f"{'-'.join(measures)}-{names_hash(missing)[:6]}"
        sg.verify(loaded, data, missing, metrics, batch_size=batch_size, out=folder)


def run_folders(root: Path) -> Iterator[Path]:
    """The run folders below a folder."""
    return (path.parent for path in sorted(root.rglob("run.json")))


def is_complete(folder: Path, settings: dict[str, object]) -> bool:
    """Whether every image has a row of every method and metric."""
    counts = Counter((row["method"], row["metric"]) for row in sg.Rows.read(folder))
    columns, metrics = settings["columns"], settings["metrics"]
    assert isinstance(columns, list) and isinstance(metrics, list)
    return len(counts) == len(columns) * len(metrics) and min(counts.values()) == settings["pictures"]


__all__ = ["MEASURES", "REMOVAL", "is_complete", "measure", "run_folders", "selection"]
