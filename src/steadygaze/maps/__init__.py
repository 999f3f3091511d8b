"""Attribution maps as files, from this package or from any other: the format, its writer and its reader.

The format is described for users in docs/maps.md.
"""

from steadygaze.maps.names import GIVEN, MapName
from steadygaze.maps.sources import MapSource, StoredMethod, open_maps
from steadygaze.maps.writer import MapWriter

__all__ = ["GIVEN", "MapName", "MapSource", "MapWriter", "StoredMethod", "open_maps"]
