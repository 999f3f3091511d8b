"""Names of the first version, until `stress` uses `runs.table`."""

from steadygaze.runs.table import bootstrap, difference, draws, interval

__all__ = ["bootstrap", "difference", "draws", "interval"]
