"""Names of the first version, until `stress` uses `runs.normalisation`."""

from steadygaze.runs.normalisation import check_levels as fits
from steadygaze.runs.normalisation import has_whole_levels as whole_levels

__all__ = ["fits", "whole_levels"]
