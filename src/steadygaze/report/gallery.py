"""The images that a `verify` run stored: where the leading method did best and worst, with its maps."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadygaze.runs.samples import data_address
from steadygaze.runs.verify.samples import MapSample, read_samples
from steadygaze.runs.verify.summary import Line


@dataclass(frozen=True)
class Shown:
    """An image with its values; addresses: data addresses of the image and of one map for each method."""

    name: str
    title: str
    values: list[float]
    addresses: list[str]


@dataclass(frozen=True)
class Gallery:
    """Best and worst images of the first method, beside the second; or the reason why there are none."""

    methods: list[Line]
    metric: str
    best: list[Shown]
    worst: list[Shown]
    why_not: str = ""


def gallery(folder: Path | None, run: dict[str, Any]) -> Gallery:
    """The gallery of a run folder."""
    samples = None if folder is None else read_samples(folder)
    if samples is None or folder is None:
        return Gallery([], "", [], [], _missing(run))
    best, worst = ([_shown(folder, sample) for sample in group] for group in (samples.best, samples.worst))
    return Gallery(samples.methods, samples.metric, best, worst)


def _missing(run: dict[str, Any]) -> str:
    command = run.get("about", {}).get("command", "")
    again = f" Repeat the command to store them: {command}" if command else ""
    return f"Images are left out: the run stored none (it is unfinished, or of the first version).{again}"


def _shown(folder: Path, sample: MapSample) -> Shown:
    addresses = [data_address(folder, file) for file in sample.files]
    return Shown(sample.name, sample.title, sample.values, addresses)
