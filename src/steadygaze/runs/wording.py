"""Names of the first version, until `stress` uses `runs.messages` and `quantity`."""

from steadygaze.runs.messages import plural as counted
from steadygaze.runs.messages import small_sample_note as caution
from steadygaze.runs.verify.summary import quantity

__all__ = ["better", "caution", "counted", "label", "number"]


def better(metric: str) -> str:
    return quantity(metric).better


def label(metric: str) -> str:
    return quantity(metric).title


def number(value: float, metric: str) -> str:
    return quantity(metric).text(value)
