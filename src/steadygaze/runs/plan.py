"""What a run computes: columns (a method with the score it explains) and the maps behind them, each computed
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from steadygaze.errors import InputError, MethodUnavailableError, UnknownNameError
from steadygaze.faithfulness.hiding import HIDES
from steadygaze.faithfulness.inputs import RATIOS
from steadygaze.faithfulness.metric import METRICS, check_outputs, check_truth, metric
from steadygaze.faithfulness.perturbation import FILLS
from steadygaze.faithfulness.removal import checked_ratios
from steadygaze.methods.explain import plan_passes
from steadygaze.methods.greedy import BY
from steadygaze.methods.registry import (
    AGGREGATORS,
    Method,
    base_methods,
    list_methods,
    parse_method,
    rules_of,
    unavailable,
)
from steadygaze.methods.registry import (
    method as make_method,
)
from steadygaze.methods.search import check_budget
from steadygaze.results.map_files import MapSource, StoredMethod
from steadygaze.runs.request import CHANCE, DEFAULT_METRICS, SEARCHED
from steadygaze.runs.rows import RowKey
from steadygaze.target import check_score, default_score
from steadygaze.vit.view import ViT

SEARCHES = "black box"  # the family of methods that search: hundreds of forward passes for each image


DEFAULT_VALUE_METRICS = ("insertion_value", "deletion_value")  # of regression models, without probabilities


@dataclass(frozen=True)
class Column:
    """One line of the ranking: a method, or the maps that it made before, and the score it explains."""

    method: Method | StoredMethod
    score: str

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for columns with equal maps: aliases, and several scores of a method that does not depend on
        it.
        """
        m = self.method
        if isinstance(m, StoredMethod):
            return m.name, self.score
        return m.base.name, m.aggregator, m.options, rules_of(m), self.score if m.class_specific else None

    def key(self, metric: str) -> RowKey:
        """What identifies this column's rows of a metric among the rows of an image."""
        return self.method.name, self.score, metric


@dataclass(frozen=True)
class MapPart:
    """Methods whose maps are made together: they share passes, or are a single search.

    Attributes:
        numbers: Of their maps in `Plan.maps`.
        score: What they explain; None is each method's own.
        stored: The maps are read, not computed.
    """

    numbers: tuple[int, ...]
    methods: tuple[Method | StoredMethod, ...]
    score: str | None = None
    stored: bool = False


@dataclass(frozen=True)
class Plan:
    """Columns x metrics. `maps` are the columns that are computed, `source[i]` is the one that serves column
    i.

    Attributes:
        fill: What positive_perturbation and negative_perturbation fill pixels with, and hide="paint".
        hide: How metrics of token removal hide patches.
        own_scores: Every method explains its own default score, so that one call serves all.
    """

    columns: tuple[Column, ...]
    metrics: tuple[str, ...]
    ratios: tuple[float, ...]
    seed: int = 0
    fill: str = "zero"
    hide: str = "remove"
    own_scores: bool = False

    @cached_property
    def maps(self) -> tuple[Column, ...]:
        first: dict[tuple[object, ...], Column] = {}
        for column in self.columns:
            first.setdefault(column.identity, column)
        return tuple(first.values())

    @cached_property
    def source(self) -> tuple[int, ...]:
        index = {column.identity: i for i, column in enumerate(self.maps)}
        return tuple(index[column.identity] for column in self.columns)

    @cached_property
    def stored(self) -> tuple[StoredMethod, ...]:
        """The last ones of `maps`: those that are read, not computed."""
        return tuple(c.method for c in self.maps if isinstance(c.method, StoredMethod))

    @cached_property
    def computed(self) -> tuple[tuple[Method, str], ...]:
        """The others of `maps`, with their scores."""
        return tuple((c.method, c.score) for c in self.maps if isinstance(c.method, Method))

    @cached_property
    def calls(self) -> tuple[tuple[str | None, tuple[Method, ...]], ...]:
        """(score, methods) for each call of `explain`; together, in this order, they give `computed`."""
        if not self.computed:
            return ()
        if self.own_scores:
            return ((None, tuple(method for method, _ in self.computed)),)
        scores = dict.fromkeys(score for _, score in self.computed)
        return tuple((score, tuple(m for m, own in self.computed if own == score)) for score in scores)

    def parts(self, depth: int) -> list[MapPart]:
        """Methods whose maps are made together, in the order of `calls`; then the maps that are read.

        Args:
            depth: Number of the model's blocks.
        """
        numbers = {(m.name, score): number for number, (m, score) in enumerate(self.computed)}
        scores = {m.name: score for m, score in self.computed}
        parts = []
        for score, methods in self.calls:
            passes = [{m.name for m in one.methods} for one in plan_passes(list(methods), depth).values()]
            together = [tuple(m for m in methods if m.name in names) for names in passes]
            for some in (*together, *((m,) for m in methods if m.base.kind == "model")):
                own = tuple(numbers[m.name, score or scores[m.name]] for m in some)
                parts.append(MapPart(own, some, score))
        read = enumerate(self.stored, len(self.computed))
        return [*parts, *(MapPart((number,), (m,), stored=True) for number, m in read)]

    @cached_property
    def single_metrics(self) -> tuple[str, ...]:
        """Metrics that measure each map by itself."""
        return tuple(n for n in self.metrics if METRICS[n].by_map and not METRICS[n].needs_explain)

    @cached_property
    def joint_metrics(self) -> tuple[str, ...]:
        """Metrics that are given all maps of a batch at once: they compare maps, or run all methods again."""
        return tuple(n for n in self.metrics if n not in self.single_metrics)

    @cached_property
    def keys(self) -> tuple[RowKey, ...]:
        """The rows that each image must have."""
        return tuple(column.key(name) for column in self.columns for name in self.metrics)

    @property
    def searches(self) -> list[Method]:
        """The methods that search."""
        return [method for method, _ in self.computed if method.base.family == SEARCHES]

    @property
    def painting(self) -> list[str]:
        """The metrics that paint pixels black, so that the normalization must be known."""
        paints = {name: METRICS[name].uses_fill for name in self.metrics}
        if self.hide == "paint":
            paints |= {name: True for name in self.metrics if METRICS[name].hides_patches}
        return [name for name in self.metrics if paints[name] and self.fill == "zero"]

    @property
    def needs_masks(self) -> list[str]:
        """The metrics that need masks."""
        return [name for name in self.metrics if METRICS[name].needs_masks]


def make_plan(
    vit: ViT,
    methods: Sequence[str | Method],
    metrics: Sequence[str],
    scores: Sequence[str] | None,
    ratios: Sequence[float] | None,
    seed: int,
    start_layers: Sequence[int] | None = None,
    fill: str = "zero",
    hide: str = "remove",
    maps: MapSource | None = None,
    random: bool = False,
    ceiling: int | None = None,
) -> Plan:
    """Check every name, and that every method supports the model, before anything is computed.

    Args:
        maps: Maps that are measured besides those of `methods`.
        random: Also measure the chance level, unless it is among the methods.
        ceiling: Also search orders by removal, with this budget each.
    """
    chosen = choose(vit, methods) if methods or maps is None else []
    if start_layers is not None:
        chosen = [started for method in chosen for started in with_start_layers(method, start_layers)]
    if random and all(method.base.name != CHANCE for method in chosen):
        chosen.append(parse_method(CHANCE))
    if ceiling is not None:
        if vit.plan.outputs == "values":
            raise InputError("ceiling: expected a classifier, got a model that gives values (regression)")
        check_budget("ceiling", ceiling)
        searched = [make_method(SEARCHED, by=by, budget=ceiling) for by in BY if by != "both"]
        chosen += [method for method in searched if method.name not in {known.name for known in chosen}]
    outputs = vit.plan.outputs
    for score in scores or ():
        check_score(score, outputs)
    if fill not in FILLS:
        raise UnknownNameError("fill", fill, FILLS)
    if hide not in HIDES:
        raise UnknownNameError("way to hide patches", hide, HIDES)
    if outputs == "values" and tuple(metrics) == DEFAULT_METRICS:
        metrics = DEFAULT_VALUE_METRICS
    names = tuple(dict.fromkeys(metric(name).name for name in metrics))
    if not names:
        raise InputError("metrics: expected at least one, got none")
    check_outputs(map(metric, names), outputs)
    check_truth(map(metric, names), vit.model)
    stored = () if maps is None else tuple(Column(StoredMethod(n, maps), n.score) for n in maps.names)
    repeating = [name for name in names if METRICS[name].needs_explain]
    if stored and repeating:
        raise InputError(
            f"{', '.join(repeating)}: the methods are run again on other weights, classes or images, which "
            "is not possible for maps that are given. Leave these metrics out, or measure methods by name.",
            option="metrics",
        )
    if scores:
        columns = tuple(Column(m, s) for s in dict.fromkeys(scores) for m in chosen)
    else:
        columns = tuple(Column(m, default_score(m.score, outputs)) for m in chosen)
    columns = _without_aliases(columns)
    columns = (*columns, *stored)
    return Plan(columns, names, checked_ratios(ratios or RATIOS), seed, fill, hide, not scores)


def _without_aliases(columns: Sequence[Column]) -> tuple[Column, ...]:
    """The columns, where aliases of one method (gae, genatt) are one: under the name that comes first.

    Methods with options keep their names, which charts of these options read.
    """
    first: dict[tuple[object, ...], Column] = {}
    for column in columns:
        has_options = not isinstance(column.method, StoredMethod) and column.method.given
        own: object = column.method.name if has_options else column.identity
        first.setdefault((own, column.score), column)
    return tuple(first.values())


def choose(vit: ViT, methods: Sequence[str | Method]) -> list[Method]:
    """The methods of these names. "all" is every method that supports the model, "quick" all but the
    searches, "all+plus"
    every one with layers, aggregated by plus."""
    chosen: dict[str, Method] = {}
    for entry in methods:
        whole, _, aggregator = entry.partition("+") if isinstance(entry, str) else ("", "", "")
        if whole in ("all", "quick"):
            known = [m for m in _all(aggregator) if whole == "all" or m.base.family != SEARCHES]
            served = [m for m in known if not unavailable(m, vit)]
        else:
            served = [entry if isinstance(entry, Method) else parse_method(entry)]
            why = unavailable(served[0], vit)
            if why:
                raise MethodUnavailableError(f"{served[0].name}: {why}")
        chosen.update((m.name, m) for m in served)
    if not chosen:
        raise InputError("methods: expected at least one, got none")
    return list(chosen.values())


def _all(aggregator: str) -> list[Method]:
    if not aggregator:
        return [parse_method(info.name) for info in list_methods()]
    if aggregator not in AGGREGATORS:
        raise UnknownNameError("aggregator", aggregator, AGGREGATORS)
    fitting = [
        b.name
        for b in base_methods()
        if b.kind != "model" and (aggregator != "rollout" or b.kind == "matrix")
    ]
    return [parse_method(f"{name}+{aggregator}") for name in fitting]


def with_start_layers(method: Method, layers: Sequence[int]) -> list[Method]:
    """The method with PLUS starting at each of these layers."""
    if method.base.kind == "model":
        raise InputError(
            f"start_layers: {method.name} has no layers. Use a method that composes with +plus, such as "
            "ixg+plus."
        )
    if method.aggregator == "plus":
        name, options = method.stem, {k: v for k, v in method.given if k != "start"}
    else:
        name, options = (
            f"{method.base.name}+plus",
            {k: v for k, v in method.options if k not in ("start", "cut")},
        )
    return [make_method(name, **options, start=layer) for layer in layers]


def parse_start_layers(text: str | None, vit: ViT) -> list[int] | None:
    """The layers that a text means for this model: "all", or numbers between commas."""
    if text is None:
        return None
    depth = len(vit.blocks)
    if text.strip() == "all":
        return list(range(depth))
    try:
        layers = sorted({int(piece) for piece in text.split(",")})
    except ValueError as error:
        raise InputError(f"start_layers: expected all, or layers such as 0,3,6; got {text!r}") from error
    if layers[0] < 0 or layers[-1] >= depth:
        raise InputError(f"start_layers: the model has layers 0..{depth - 1}, got {text!r}")
    return layers
