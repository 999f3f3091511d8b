"""What a run computes: columns (a method with the score it explains), and the maps behind them, each made and measured
once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from steadygaze.errors import BadInput, MethodUnavailable, UnknownName
from steadygaze.explainer import rules_of, unavailable
from steadygaze.faithfulness.metric import METRICS, metric
from steadygaze.method_names import make_method
from steadygaze.method_registry import AGGREGATORS, Method, base_methods
from steadygaze.methods import list_methods, parse
from steadygaze.target import SCORES
from steadygaze.vit import ViT

SEARCHES = "black box"  # the family of methods that search
DEFAULT_METRICS = ("insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc")


@dataclass(frozen=True)
class Column:
    """One line of the ranking: a method and the score it explains."""

    method: Method
    score: str

    @property
    def identity(self) -> tuple[object, ...]:
        """Equal for columns whose maps are equal: aliases, and scores of a method that does not look at them."""
        m = self.method
        own = tuple((k, v) for k, v in m.options)
        return m.base.name, m.aggregator, own, rules_of(m), self.score if m.class_specific else None


@dataclass(frozen=True)
class Plan:
    """Columns x metrics. `maps` are the columns that are really computed, `source[i]` is the one that serves column
    i."""

    columns: tuple[Column, ...]
    metrics: tuple[str, ...]
    ratios: tuple[float, ...]
    seed: int = 0
    fill: str = "zero"  # what positive_perturbation and negative_perturbation paint
    own_scores: bool = False  # every method explains its own score: one call serves all

    @cached_property
    def maps(self) -> tuple[Column, ...]:
        first: dict[tuple[object, ...], Column] = {}
        for column in self.columns:
            first.setdefault(column.identity, column)
        return tuple(first.values())

    @cached_property
    def source(self) -> tuple[int, ...]:
        place = {column.identity: i for i, column in enumerate(self.maps)}
        return tuple(place[column.identity] for column in self.columns)

    @cached_property
    def calls(self) -> tuple[tuple[str | None, tuple[Method, ...]], ...]:
        """(score, methods) for each call of `explain`; together, in this order, they give `maps`."""
        if self.own_scores:
            return ((None, tuple(column.method for column in self.maps)),)
        scores = dict.fromkeys(column.score for column in self.maps)
        return tuple((score, tuple(c.method for c in self.maps if c.score == score)) for score in scores)

    @property
    def rows_per_image(self) -> int:
        return len(self.columns) * len(self.metrics)

    @property
    def searches(self) -> list[Method]:
        """The methods that search: they cost hundreds of forward passes a picture, the others a few."""
        return [column.method for column in self.maps if column.method.base.family == SEARCHES]

    @property
    def needs_masks(self) -> list[str]:
        return [name for name in self.metrics if METRICS[name].masks]


def make_plan(
    vit: ViT,
    methods: Sequence[str | Method],
    metrics: Sequence[str],
    scores: Sequence[str] | None,
    ratios: Sequence[float] | None,
    seed: int,
    start_layers: Sequence[int] | None = None,
    fill: str = "zero",
) -> Plan:
    """Check every name, and that the model serves every method, before anything is computed."""
    from steadygaze.faithfulness.perturbation import FILLS
    from steadygaze.faithfulness.removal import RATIOS, checked_ratios

    chosen = choose(vit, methods)
    if start_layers is not None:
        chosen = [started for one in chosen for started in begun(one, start_layers)]
    for score in scores or ():
        if score not in SCORES:
            raise UnknownName("score", score, SCORES)
    if fill not in FILLS:
        raise UnknownName("fill", fill, FILLS)
    names = tuple(dict.fromkeys(metric(name).name for name in metrics))
    if not names:
        raise BadInput("metrics: expected at least one, got none")
    if scores:
        columns = tuple(Column(m, s) for s in dict.fromkeys(scores) for m in chosen)
    else:
        columns = tuple(Column(m, m.score) for m in chosen)
    return Plan(columns, names, checked_ratios(ratios or RATIOS), seed, fill, own_scores=not scores)


def choose(vit: ViT, methods: Sequence[str | Method]) -> list[Method]:
    """The methods of these names; "all" is every one that the model serves, "quick" all but the searches, "all+plus"
    each of those with layers, so aggregated."""
    found: dict[str, Method] = {}
    for entry in methods:
        whole, _, aggregator = entry.partition("+") if isinstance(entry, str) else ("", "", "")
        if whole in ("all", "quick"):
            chosen = [m for m in _all(aggregator) if whole == "all" or m.base.family != SEARCHES]
            served = [m for m in chosen if not unavailable(m, vit)]
        else:
            served = [entry if isinstance(entry, Method) else parse(entry)]
            why = unavailable(served[0], vit)
            if why:
                raise MethodUnavailable(f"{served[0].name}: {why}")
        found.update((m.name, m) for m in served)
    if not found:
        raise BadInput("methods: expected at least one, got none")
    return list(found.values())


def passes(method: Method) -> float:
    """Forward passes for one image, about: the budget that was asked for, or what is listed."""
    budget = method.option("budget")
    return method.base.cost if budget is None else float(budget)


def _all(aggregator: str) -> list[Method]:
    if not aggregator:
        return [parse(info.name) for info in list_methods()]
    if aggregator not in AGGREGATORS:
        raise UnknownName("aggregator", aggregator, AGGREGATORS)
    fitting = [
        b.name
        for b in base_methods()
        if b.kind != "model" and (aggregator != "rollout" or b.kind == "matrix")
    ]
    return [parse(f"{name}+{aggregator}") for name in fitting]


def begun(method: Method, layers: Sequence[int]) -> list[Method]:
    """The method with PLUS begun at each of these layers."""
    if method.base.kind == "model":
        raise BadInput(
            f"--start-layers: {method.name} has no layers. Use a method that composes with +plus, such as ixg+plus."
        )
    options = {k: v for k, v in method.options if k != "start"}
    name = method.name.partition(":")[0]
    if method.aggregator != "plus":
        name, options = f"{method.base.name}+plus", {k: v for k, v in options.items() if k != "cut"}
    written = options if "+" in name else _own_words(method, options)
    return [make_method(name, **written, start=layer) for layer in layers]


def _own_words(method: Method, options: dict[str, object]) -> dict[str, object]:
    """Of an alias, the options that were written and are not part of what it stands for."""
    plain = dict(parse(method.name.partition(":")[0]).options)
    return {k: v for k, v in options.items() if plain.get(k) != v}


def start_layers(text: str | None, vit: ViT) -> list[int] | None:
    """What --start-layers means for this model: all, or numbers between commas."""
    if text is None:
        return None
    depth = len(vit.blocks)
    if text.strip() == "all":
        return list(range(depth))
    try:
        layers = sorted({int(piece) for piece in text.split(",")})
    except ValueError as error:
        raise BadInput(f"--start-layers: expected all, or layers such as 0,3,6; got {text!r}") from error
    if layers[0] < 0 or layers[-1] >= depth:
        raise BadInput(f"--start-layers: the model has layers 0..{depth - 1}, got {text!r}")
    return layers
