"""Looking inside a model: recorded forward passes, rules for gradients, queries for methods that run it.

Names are imported on first use: `steadygaze.vit` uses `trace.intercept`, and must not import all of this.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steadygaze.trace.capture import Forward, Trace, forward
    from steadygaze.trace.intercept import Interception
    from steadygaze.trace.query import Query
    from steadygaze.trace.record import Attention, Record, Term, Want
    from steadygaze.trace.rules import ATTNLRP, PLAIN, Rules, frozen
    from steadygaze.trace.seam import Seam

_HOME = {
    "ATTNLRP": "rules",
    "Attention": "record",
    "Forward": "capture",
    "Interception": "intercept",
    "PLAIN": "rules",
    "Query": "query",
    "Record": "record",
    "Rules": "rules",
    "Seam": "seam",
    "Term": "record",
    "Trace": "capture",
    "Want": "record",
    "forward": "capture",
    "frozen": "rules",
}
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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'steadygaze.trace' has no attribute {name!r}")
    return getattr(import_module(f"steadygaze.trace.{_HOME[name]}"), name)
