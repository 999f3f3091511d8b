"""The result of `explain`: one attribution, or several by name of their method."""

from steadygaze.heatmap.attribution import (
    SHOWN_IN_NOTEBOOK,
    Attribution,
    Index,
    arrays,
    overlay_name,
    resized,
    store_maps,
)
from steadygaze.heatmap.comparison import Attributions, comparison_grid

__all__ = [
    "SHOWN_IN_NOTEBOOK",
    "Attribution",
    "Attributions",
    "Index",
    "arrays",
    "comparison_grid",
    "overlay_name",
    "resized",
    "store_maps",
]
