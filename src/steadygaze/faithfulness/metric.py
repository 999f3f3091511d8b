"""The registry of faithfulness metrics: what a metric declares, and how to add one.

A metric gives one number for each map of each image. `combine` makes the number of a data set from many of
them; where that is not the mean, rows carry what it needs as `detail`. A value that is undefined for an image
(a mask without object) is NaN and is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import InputError
from steadygaze.faithfulness.inputs import Batch, MetricInput
from steadygaze.notebook import Listing
from steadygaze.quantity import INF, Better, Combine, Curve, Quantity, mean, pooled
from steadygaze.registry import Registry
from steadygaze.target import Outputs, task_of_outputs

__all__ = [
    "METRICS",
    "Batch",
    "Curve",
    "Metric",
    "MetricInfo",
    "MetricInput",
    "Values",
    "add_metrics",
    "in_table_order",
    "list_metrics",
    "mean",
    "metric",
    "pooled",
    "register_metric",
]

FAMILIES = (
    "removal",
    "value",
    "perturbation",
    "magnitude",
    "subsets",
    "localization",
    "sanity",
    "stability",
    "concentration",
    "truth",
    "parts",
)  # the order of tables; others follow


@dataclass(frozen=True)
class Values:
    """A metric of M maps of B images.

    Args:
        value (Tensor): (M, B), one number for each map and image; NaN where it is undefined.
        detail (Tensor): (M, B, K), the curve behind the value, or what `combine` adds up.
        note (str): how it was measured, for the rows.

    Examples:
        >>> import torch
        >>> Values(torch.tensor([[0.5, 0.7]])).value.shape  # one map of each of two images
        torch.Size([1, 2])
    """

    value: Float[Tensor, "m b"]
    detail: Float[Tensor, "m b k"] | None = None
    note: str = ""


# several metrics that share forward passes have one function, which receives the requested names
Compute = Callable[[MetricInput, Sequence[str]], Mapping[str, Values]]


@dataclass(frozen=True)
class Metric(Quantity):
    """One entry of the registry; `register_metric` documents the other fields.

    Args:
        compute (Callable): measures; metrics that share it run together.
        suite (str): name of the suite of `verify` that alone can measure it. What it knows is the model's
            attribute of that name.
        uses_model (bool): false for metrics that look at maps and masks only.
        uses_fill (bool): whether it paints pixels with the option `fill`.
        hides_patches (bool): whether the option `hide` decides how it hides patches.
        detail_by_method (bool): whether the detail has one number for each map, and is not a curve.
        curve (Curve): how the report draws the details.
        outputs (tuple[str, ...]): the outputs of models that it can measure.
        variant (bool): whether it is another form of a metric, which listings leave out.

    Examples:
        >>> metric("insertion_accuracy").family, metric("pointing_game").needs_masks
        ('removal', True)
    """

    _: KW_ONLY
    family: str
    compute: Compute
    needs_masks: bool = False
    needs_explain: bool = False
    suite: str = ""
    uses_model: bool = True
    uses_fill: bool = False
    hides_patches: bool = False
    detail_by_method: bool = False
    by_map: bool = False
    curve: Curve | None = None
    outputs: tuple[Outputs, ...] = ("classes", "labels", "values", "features")
    variant: bool = False


@dataclass(frozen=True)
class MetricInfo:
    """The public description of a metric, as `list_metrics` gives it.

    Examples:
        >>> info = next(info for info in list_metrics() if info.name == "deletion_aopc")
        >>> info.family, info.unit, info.better
        ('removal', 'points', 'higher')
    """

    name: str
    family: str
    unit: str
    better: Better
    low: float
    high: float
    label: str
    summary: str
    needs_masks: bool
    needs_explain: bool


METRICS: Registry[Metric] = Registry(
    "metric",
    built_in=[
        f"steadygaze.faithfulness.{file}"
        for file in (
            "localization",
            "magnitude",
            "removal",
            "perturbation",
            "road",
            "subsets",
            "sanity",
            "stability",
            "concentration",
            "truth",
            "ground_truth",
            "single_deletion",
            "funnybirds",
        )
    ],
    hint="sg.list_metrics() lists them.",
)


def register_metric(
    name: str,
    *,
    unit: str = "",
    better: Better = "higher",
    low: float = -INF,
    high: float = INF,
    label: str = "",
    summary: str | None = None,
    family: str = "custom",
    needs_masks: bool = False,
    needs_explain: bool = False,
    by_map: bool = False,
    digits: int | None = None,
    combine: Combine = mean,
    replace: bool = False,
) -> Callable[[Callable[[MetricInput], Tensor | Values]], Callable[[MetricInput], Tensor | Values]]:
    """Register the decorated function as a faithfulness metric.

    The function is given a `MetricInput` (maps, target, images, masks, the model and its logits) and returns
    a tensor (M, B), one number for each map and image, or `Values` with details. It runs without gradients
    unless the metric declares needs_explain, and the model is left as it was. From then on the metric works
    as ours do: in `verify` and `steadygaze verify --metrics`, in runs that are resumed, in tables and in the
    report.

    Args:
        name (str): name for `verify`, `--metrics` and rows.
        unit (str): "%", "nats", ... or nothing.
        better (str): "higher", "lower", or "neither" for descriptive numbers.
        low (float): lower end of the range of the values.
        high (float): upper end.
        label (str): name for people; by default the name with spaces.
        summary (str): one sentence for listings and the report; by default the first line of the docstring.
        family (str): heading under which the metric is listed.
        needs_masks (bool): whether it needs images with masks; data without masks is then an error.
        needs_explain (bool): whether it runs the methods again, by
            `given.explain_again(model, target, images)`.
        by_map (bool): whether the numbers of a map do not depend on the other maps; rows are then written
            as soon as a map is measured, otherwise when all maps of a batch are.
        digits (int): decimals that are shown; by default one in percent, three otherwise.
        combine (Callable): (values, details) -> the number of a data set; the mean by default.
        replace (bool): replace a metric that has this name already, instead of raising an error.

    Returns:
        Callable: the decorator, which returns the function unchanged.

    Examples:
        >>> import steadygaze as sg, torch
        >>> @sg.register_metric("positive_share", better="higher", low=0, high=1)
        ... def positive_share(given):
        ...     "Share of the absolute relevance that is positive."
        ...     values = given.maps.flatten(2)  # (M, B, patches)
        ...     return values.clamp_min(0).sum(2) / values.abs().sum(2)
        >>> model = sg.load_model("embedded")
        >>> data = [(torch.rand(2, 3, 32, 32), torch.tensor([3, 5]))]
        >>> rows = sg.verify(model, data, methods="gaze", metrics="positive_share")
        >>> len(rows), all(0 <= row["value"] <= 1 for row in rows)
        (2, True)
        >>> METRICS.remove("positive_share")  # forget it again
    """

    def decorate(
        function: Callable[[MetricInput], Tensor | Values],
    ) -> Callable[[MetricInput], Tensor | Values]:
        def compute(given: MetricInput, names: Sequence[str]) -> Mapping[str, Values]:
            values = function(given)
            value = values.value if isinstance(values, Values) else values
            expected, shape = tuple(given.maps.shape[:2]), tuple(getattr(value, "shape", ()))
            if shape != expected:
                raise InputError(
                    f"metric {name!r}: expected one number for each map and image, {expected}, got {shape}"
                )
            return {name: values if isinstance(values, Values) else Values(values)}

        docstring = (function.__doc__ or "").strip()
        entry = Metric(
            name,
            unit,
            better,
            low,
            high,
            label=label,
            summary=docstring.partition("\n")[0] if summary is None else summary,
            digits=digits,
            combine=combine,
            family=family,
            compute=compute,
            needs_masks=needs_masks,
            needs_explain=needs_explain,
            by_map=by_map,
        )
        METRICS.add(name, entry, origin=function.__module__, replace=replace)
        return function

    return decorate


def add_metrics(entries: Iterable[Metric]) -> None:
    """Register entries as they are; for metrics that share one `compute`."""
    for entry in entries:
        METRICS.add(entry.name, entry, origin=entry.compute.__module__)


def metric(name: str) -> Metric:
    """Return the metric of that name, or raise `UnknownNameError` with the nearest one.

    Examples:
        >>> metric("pointing_game").better
        'higher'
    """
    return METRICS[name]


def check_outputs(metrics: Iterable[Metric], outputs: Outputs) -> None:
    """Raise `InputError` if a metric cannot measure a model with these outputs."""
    for entry in metrics:
        if outputs not in entry.outputs:
            instead = [m.name for m in METRICS.values() if m.family == "value" and outputs in m.outputs]
            raise InputError(
                f"{entry.name} measures {' or '.join(entry.outputs)}, but this model gives {outputs} "
                f"(task {task_of_outputs(outputs)}). Use {', '.join(instead)} instead.",
                option="metrics",
            )


def check_truth(metrics: Iterable[Metric], model: nn.Module) -> None:
    """Raise `InputError` if a metric needs a truth that is not known for this model and its images."""
    for entry in metrics:
        if entry.suite and not hasattr(model, entry.suite):
            raise InputError(
                f"{entry.name}: expected a model whose true patch importance or part effects are known, got "
                f"{type(model).__name__}. Use verify with suite={entry.suite!r}.",
                option="metrics",
            )


def list_metrics() -> Listing[MetricInfo]:
    """List the metrics by family; the list shows itself as a table in a notebook.

    Variants of a metric (`positive_kl_code`: as the authors' code computes it) are used by name only.

    Examples:
        >>> [info.better for info in list_metrics() if info.name == "insertion_aopc"]
        ['higher']
    """
    infos = [
        MetricInfo(
            m.name,
            m.family,
            m.unit,
            m.better,
            m.low,
            m.high,
            m.label or m.name.replace("_", " "),
            m.summary,
            m.needs_masks,
            m.needs_explain,
        )
        for m in map(metric, in_table_order(METRICS))
        if not m.variant
    ]
    return Listing(infos, "metrics", ("name", "family", "better", "needs_masks", "summary"))


def in_table_order(names: Iterable[str]) -> list[str]:
    """Sort metrics in the order of tables: by family, as registered; unknown ones last, by name."""
    wanted = set(names)
    families = {family: rank for rank, family in enumerate(FAMILIES)}
    known = [name for name in METRICS if name in wanted]
    known.sort(key=lambda name: families.get(METRICS[name].family, len(families)))
    return known + sorted(wanted - set(known))
