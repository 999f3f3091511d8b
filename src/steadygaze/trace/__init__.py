"""Seeing inside: rules, the seam, and traces."""

from steadygaze.trace.capture import Forward, Trace, forward
from steadygaze.trace.rules import ATTNLRP, PLAIN, Rules, frozen
from steadygaze.trace.seam import Attention, Record, Seam, Want

__all__ = [
    "ATTNLRP",
    "PLAIN",
    "Attention",
    "Forward",
    "Record",
    "Rules",
    "Seam",
    "Trace",
    "Want",
    "forward",
    "frozen",
]
