"""Run methods x models x measures of the panel into run folders; rows that exist are not computed again.

A model whose patches cannot be removed (Swin) is measured with patches hidden from attention instead, which
`verify` does by itself; its rows have the note "attention masking".
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import steadygaze as sg
from benchmarks.panel import PanelModel
from benchmarks.panel.methods import available
from steadygaze.data.images import names_hash

REMOVAL = ("insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc")
MEASURES: dict[str, tuple[str, ...]] = {
    "removal": REMOVAL,
    "saco": ("saco",),
    "perturbation": ("positive_perturbation", "negative_perturbation"),
    "localization": ("average_precision",),
    "truth": ("truth_auroc",),
}


def measure(
    model: PanelModel,
    loaded: sg.LoadedModel,
    data: Path,
    methods: Sequence[str],
    measures: Sequence[str],
    out: Path,
    batch_size: int = 20,
    **options: Any,
) -> None:
    """Compute what is missing of these methods and measures, for the images of the folder `data`.

    Methods that do not support the model are left out. options: of `sg.verify`, such as masks
    """
    metrics = [metric for name in measures for metric in MEASURES[name]]
    options = {"batch_size": batch_size, **options}
    done: set[str] = set()
    for folder in run_folders(out):
        settings = sg.Rows.read(folder).runs[0]["settings"]
        if list(settings["metrics"]) != metrics:
            continue
        own = list(dict.fromkeys(name for name, _ in settings["columns"]))
        if not is_complete(folder, settings):
            sg.verify(loaded, data, own, metrics, out=folder, random=False, **options)
        done |= set(own)
    missing = [name for name in methods if name not in done]
    supported = available(missing, sg.adapt(loaded.model))
    if len(supported) < len(missing):
        skipped = [name for name in missing if name not in supported]
        print(f"not available for {model.name}: {', '.join(skipped)}", file=sys.stderr)
    if supported:
        folder = out / f"{'-'.join(measures)}-{names_hash(supported)[:6]}"
        sg.verify(loaded, data, supported, metrics, out=folder, random=False, **options)


def run_folders(root: Path) -> Iterator[Path]:
    """The run folders below a folder."""
    return (path.parent for path in sorted(root.rglob("run.json")))


def is_complete(folder: Path, settings: dict[str, object]) -> bool:
    """Whether every image has a row of every method and metric."""
    counts = Counter((row["method"], row["metric"]) for row in sg.Rows.read(folder))
    columns, metrics = settings["columns"], settings["metrics"]
    assert isinstance(columns, list) and isinstance(metrics, list)
    return len(counts) == len(columns) * len(metrics) and min(counts.values()) == settings["images"]
