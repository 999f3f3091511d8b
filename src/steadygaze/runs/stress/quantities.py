"""What every classifier's run measures, and the numbers that follow from it."""

from __future__ import annotations

from typing import Any

from steadygaze.quantity import Better, Quantity


def share(name: str, label: str = "", better: Better = "higher", summary: str = "") -> Quantity:
    """A share in 0..1, shown in percent."""
    return Quantity(name, "%", better, 0, 1, label=label, scale=100, summary=summary)


TOP1 = share("top1", "top-1")
TOP5 = share("top5", "top-5")
CONFIDENCE = share("confidence", better="neither", summary="probability of the predicted class")
ECE = share("ece", "ECE", "lower", "expected calibration error")


def restricted(k: int, classes: int) -> Quantity:
    """Accuracy among the official classes of a data set."""
    return share(f"top{k}_of_{classes}", f"top-{k} of {classes}")


def quantity_record(quantity: Quantity) -> dict[str, Any]:
    """As it stands in run.json."""
    return {
        "name": quantity.name,
        "unit": quantity.unit,
        "better": quantity.better,
        "label": quantity.label,
        "scale": quantity.scale,
        "digits": quantity.digits,
    }
