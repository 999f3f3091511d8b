"""How objects of this package show themselves in a notebook: escaped HTML without scripts, and PNG images."""

from steadygaze.notebook.html import facts, figure, table, to_png
from steadygaze.notebook.listing import Listing

__all__ = ["Listing", "facts", "figure", "table", "to_png"]
