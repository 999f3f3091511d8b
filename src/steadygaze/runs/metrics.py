"""What tables and reports know of the metrics of `verify`, without importing the code that measures them.

Metrics of this package are described in its catalog (tools/catalog.py). Where the registry of metrics is in
use, in a process that measures or by a plugin, the registry decides: it has the user's metrics, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from steadygaze.quantity import Curve, Quantity
from steadygaze.registry import REGISTRIES, catalog, load_plugins
from steadygaze.runs.settings import COMBINES, quantity_of_record


@dataclass(frozen=True)
class KnownMetric:
    """A metric as tables and reports show it. curve: how its details are drawn, if they are a curve."""

    quantity: Quantity
    family: str
    curve: Curve | None


def known_metric(name: str) -> KnownMetric | None:
    """The metric of that name; None if it is neither part of this package nor registered here.

    Examples:
        >>> known_metric("deletion_aopc").family, known_metric("my_metric")
        ('removal', None)
    """
    if not _registry_in_use():
        if name not in _built_in():
            return None
        known = _built_in()[name]
        if known is not None:
            return known
    from steadygaze.faithfulness.metric import METRICS

    if name not in METRICS:
        return None
    entry = METRICS[name]
    return KnownMetric(entry, entry.family, entry.curve)


def in_table_order(names: Iterable[str]) -> list[str]:
    """Sort metrics in the order of tables: by family, as registered; unknown ones last, by name."""
    if _registry_in_use():
        from steadygaze.faithfulness.metric import in_table_order as in_order_of_registry

        return in_order_of_registry(names)
    wanted = set(names)
    return [name for name in _built_in() if name in wanted] + sorted(wanted - _built_in().keys())


def _registry_in_use() -> bool:
    load_plugins()
    return "metric" in REGISTRIES


@cache
def _built_in() -> dict[str, KnownMetric | None]:
    """The metrics of this package in the order of tables; None: only its code can combine images."""
    known: dict[str, KnownMetric | None] = {}
    for entry in catalog()["quantities"]:
        family, curve = entry.pop("family"), entry.pop("curve")
        drawn = None if curve is None else Curve(**curve)
        is_described = entry["combine"] in COMBINES
        quantity = quantity_of_record(entry)
        known[quantity.name] = KnownMetric(quantity, family, drawn) if is_described else None
    return known
