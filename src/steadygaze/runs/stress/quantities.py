"""What every classifier's run measures, and the numbers that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steadygaze.quantity import Better, Quantity


@dataclass(frozen=True)
class Accuracy(Quantity):
    """A share of correct predictions: each image is 0 or 1, so that its interval is Wilson's, and McNemar's
    test compares two models."""


def share(name: str, label: str = "", better: Better = "higher", summary: str = "") -> Quantity:
    """A share in 0..1, shown in percent."""
    return Quantity(name, "%", better, 0, 1, label=label, scale=100, summary=summary)


def accuracy(name: str, label: str = "") -> Accuracy:
    """A share of correct predictions, shown in percent."""
    return Accuracy(name, "%", "higher", 0, 1, label=label, scale=100)


TOP1 = accuracy("top1", "top-1")
TOP5 = accuracy("top5", "top-5")
CONFIDENCE = share("confidence", better="neither", summary="probability of the predicted class")
ECE = share("ece", "ECE", "lower", "expected calibration error")


def restricted(k: int, classes: int) -> Accuracy:
    """Accuracy among the official classes of a data set."""
    return accuracy(f"top{k}_of_{classes}", f"top-{k} of {classes}")


def quantity_record(quantity: Quantity) -> dict[str, Any]:
    """As written to run.json."""
    return {
        "name": quantity.name,
        "unit": quantity.unit,
        "better": quantity.better,
        "label": quantity.label,
        "scale": quantity.scale,
        "digits": quantity.digits,
        "accuracy": isinstance(quantity, Accuracy),
    }


def quantity_of_record(record: Mapping[str, Any]) -> Quantity:
    """The quantity that run.json describes."""
    fields = {name: value for name, value in record.items() if name != "accuracy"}
    return Accuracy(**fields) if record["accuracy"] else Quantity(**fields)
