"""The result of `explain`, one attribution or several by name of their method: drawn, saved, shown."""

from steadygaze.results.attribution import Attribution
from steadygaze.results.comparison import Attributions

__all__ = ["Attribution", "Attributions"]
