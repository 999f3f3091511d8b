"""Looking inside a model: recorded forward passes, rules for gradients, queries for methods that run it."""

from steadygaze.trace.capture import Forward, Trace, forward
from steadygaze.trace.query import Query
from steadygaze.trace.record import Attention, Record, Term, Want
from steadygaze.trace.rules import ATTNLRP, PLAIN, Rules, frozen
from steadygaze.trace.seam import Seam
from steadygaze.vit.intercept import Interception

__all__ = [
    "ATTNLRP",
    "PLAIN",
    "Attention",
    "Forward",
    "Interception",
    "Query",
    "Record",
    "Rules",
    "Seam",
    "Term",
    "Trace",
    "Want",
    "forward",
    "frozen",
]
