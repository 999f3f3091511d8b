"""Reading run.json, of this version and of the first: there, settings were strings and metrics had no
description. Only this file takes such strings apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steadygaze.data.datasets.imagenet import CORRUPTIONS
from steadygaze.quantity import Quantity
from steadygaze.runs.evaluator import Predictions
from steadygaze.runs.suite import (
    CLEAN,
    SUITES,
    Setting,
    Suite,
    accuracy,
    quantity_of_record,
    restricted,
    share,
)

Facts = Mapping[str, Any]  # run["settings"]
ATTACKS = ("fgsm", "pgd")
DROPS = ("random_drop", "salient_drop")
FACTORS = ("location", "rotation", "size")


def settings_of_run(facts: Facts) -> list[Setting]:
    """The settings of a run, in its order."""
    return [
        setting_of_label(one, facts) if isinstance(one, str) else Setting.from_record(one)
        for one in facts.get("conditions", ())
    ]


def quantities_of_run(facts: Facts) -> dict[str, Quantity]:
    """What is known of the run's metrics: from run.json, and from the suites."""
    suites: list[type[Suite]] = [Predictions, *SUITES.values()]
    known = {quantity.name: quantity for suite in suites for quantity in suite.quantities}
    recorded = {record["name"]: quantity_of_record(record) for record in facts.get("quantities", ())}
    return {**recorded, **known}


def images_of_sets(facts: Facts, settings: Sequence[Setting]) -> dict[str, int]:
    """Number of images of each setting with images of its own. The first version did not keep it for sets
    with several settings: at least one."""
    if "set_images" in facts:
        return dict(facts["set_images"])
    sets = [*facts.get("shifts", ()), *facts.get("neighbors", ())]
    sizes = {one["name"]: one["pictures"] for one in sets}
    counts = {}
    for setting in settings:
        if setting.source:
            alone = sum(other.source == setting.source for other in settings) == 1
            size = sizes.get(setting.source, 0)
            counts[setting.label] = min(size, facts.get("limit") or size) if alone else 1
    return counts


def setting_of_label(label: str, facts: Facts) -> Setting:
    """The setting that the first version wrote as this string."""
    if label == CLEAN.label:
        return CLEAN
    name, _, rest = label.partition("/")
    if any(name == shift["name"] for shift in facts.get("shifts", ())):
        return _of_shift(name, rest, label)
    if name == "neighbors":
        return Setting("neighbors", rest, source=rest, label=label)
    if name in CORRUPTIONS:
        return Setting("corruptions", name, int(rest), minor=True) if rest else Setting("corruptions", name)
    if name == "sequence":
        return Setting("sequences", rest, label=label, minor=True)
    if name in ATTACKS:
        return Setting("attacks", name, float(rest), label=label)
    if name in DROPS or name == "center_square":
        return Setting("occlusion", name, float(rest) if rest else None, label=label)
    if name in FACTORS:
        values = tuple(float(value) for value in rest.split(","))
        return Setting("synthetic", name, values if len(values) > 1 else values[0], label=label, minor=True)
    if name == "background":
        return Setting("synthetic", name, rest, label=label)
    return Setting("", name, rest or None, label=label)


def _of_shift(source: str, rest: str, label: str) -> Setting:
    if not rest:
        return Setting("shift", source, source=source, label=label)
    name, _, severity = rest.partition("/")
    if severity:
        return Setting("shift", name, int(severity), source, label, minor=True)
    return Setting("shift", name, source=source, label=label)


def quantity_of_name(name: str) -> Quantity:
    """The quantity of a metric that run.json does not describe, by how the first version named it."""
    for k in (1, 5):
        if name.startswith(f"top{k}_of_"):
            return restricted(k, int(name.removeprefix(f"top{k}_of_")))
    if name.startswith("knn"):
        return accuracy(name, "k = " + name.removeprefix("knn").replace("_", ", "))
    if name.startswith("iou_"):
        return share(name, f"IoU {name.removeprefix('iou_')}")
    return Quantity(name)
