"""What a measure is, and the table of all of them: name, family, direction, range, unit.

Every value is one number for one map of one image. `combine` makes the data set's number of many rows; where it is not the
mean, the rows carry what it needs as `detail`. A value that is undefined for an image (a mask without object) is NaN and is
left out.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from steadygaze.errors import BadInput, UnknownName
from steadygaze.quantity import Quantity, mean, pooled

Family = Literal["removal", "perturbation", "localisation", "sanity", "truth"]
Better = Literal["higher", "lower", "neither"]
Combine = Callable[[Any, Sequence[Any]], float]
INF = float("inf")


@dataclass(frozen=True)
class Metric:
    """One measure: `low` and `high` bound its value, `better` says which way is good, `masks` whether it needs masks."""

    name: str
    family: Family
    better: Better
    low: float
    high: float
    unit: Literal["%", "", "nats"]
    summary: str
    masks: bool = False
    explains: bool = False  # runs the method again: `evaluate` needs `explain`
    combine: Combine = mean


@dataclass(frozen=True)
class Values:
    """A measure of M maps of B images; `detail` holds the raw curve, or the counts that `combine` adds up."""

    value: Float[Tensor, "m b"]
    detail: Float[Tensor, "m b k"] | None = None


@dataclass(frozen=True)
class Batch:
    """Images as the model wants them, with what is known of them. Masks: 255 object, 128 border (left out), 0 background."""

    images: Float[Tensor, "b c h w"]
    labels: Int[Tensor, " b"]
    masks: UInt8[Tensor, "b h w"] | None = None
    mean: Float[Tensor, " c"] | None = (
        None  # of the normalisation; needed by perturbations, which paint pixels
    )
    std: Float[Tensor, " c"] | None = None
    names: tuple[
        str, ...
    ] = ()  # one for each image; random numbers of an image depend on the seed and its name

    def __post_init__(self) -> None:
        count = self.images.shape[0]
        if tuple(self.labels.shape) != (count,):
            raise BadInput(
                f"labels: expected one for each of {count} images, got shape {tuple(self.labels.shape)}"
            )
        if self.names and len(self.names) != count:
            raise BadInput(f"names: expected one for each of {count} images, got {len(self.names)}")
        if self.masks is not None and tuple(self.masks.shape) != (count, *self.images.shape[-2:]):
            raise BadInput(
                f"masks: expected {(count, *self.images.shape[-2:])}, the size of the images, got {tuple(self.masks.shape)}. "
                "Resize them with the images (nearest)."
            )

    def to(self, device: torch.device) -> "Batch":
        """The same batch on a device."""
        moved = {
            name: None if tensor is None else tensor.to(device)
            for name, tensor in (("masks", self.masks), ("mean", self.mean), ("std", self.std))
        }
        return replace(self, images=self.images.to(device), labels=self.labels.to(device), **moved)

    def name(self, index: int) -> str:
        """The name of an image; its index where none was given."""
        return self.names[index] if self.names else str(index)


def _removal() -> list[Metric]:
    said = "area under the curve over the ratios, by true token removal"
    return [
        Metric(
            "insertion_accuracy",
            "removal",
            "higher",
            0,
            100,
            "%",
            f"right answers with the top k patches alone; {said}",
        ),
        Metric(
            "deletion_accuracy",
            "removal",
            "higher",
            0,
            100,
            "%",
            f"100 − right answers without the top k patches; {said}",
        ),
        Metric(
            "insertion_aopc",
            "removal",
            "higher",
            0,
            200,
            "%",
            f"100 − lost probability with the top k patches alone; {said}",
        ),
        Metric(
            "deletion_aopc",
            "removal",
            "higher",
            -100,
            100,
            "%",
            f"lost probability without the top k patches; {said}",
        ),
    ]


def _perturbation() -> list[Metric]:
    family: Family = "perturbation"
    steps = "relevant pixels painted first; mean of nine steps"
    found = [
        Metric("positive_perturbation", family, "lower", 0, 100, "%", f"right answers, most {steps}"),
        Metric("negative_perturbation", family, "higher", 0, 100, "%", f"right answers, least {steps}"),
    ]
    up: Better = "higher"
    down: Better = "lower"
    for sign, first, kl, accuracy in (("positive", "most", up, down), ("negative", "least", down, up)):
        order = f"{first} relevant pixels turned into noise first, 29 points"
        mean_height, as_code = (
            f"{order}; mean height of the curve",
            f"{order}; area with steps of 1, as the code",
        )
        found += [
            Metric(f"{sign}_kl", family, kl, 0, INF, "nats", f"KL(p whole ‖ p perturbed), {mean_height}"),
            Metric(
                f"{sign}_accuracy",
                family,
                accuracy,
                0,
                100,
                "%",
                f"answer still that of the whole picture, {mean_height}",
            ),
            Metric(f"{sign}_kl_code", family, kl, 0, INF, "nats", f"−log p of the first answer, {as_code}"),
            Metric(f"{sign}_accuracy_code", family, accuracy, 0, 28, "", f"p of the first answer, {as_code}"),
        ]
    return found


def _localisation() -> list[Metric]:
    def one(name: str, summary: str, combine: Combine = mean) -> Metric:
        return Metric(name, "localisation", "higher", 0, 100, "%", summary, masks=True, combine=combine)

    return [
        one("average_precision", "average precision of the object's pixels, map upsampled by nearest"),
        one("pixel_accuracy", "pixels on the right side of the map's mean, summed over images", pooled),
        one("miou", "mean IoU of object and background at the map's mean, summed over images", pooled),
        one("map_chefer", "average precision over both channels, map and 1 − map"),
        one("pointing_game", "the map's maximum lies in the object: 100 or 0"),
        one("mask_share", "share of the positive relevance that lies in the object"),
    ]


def _others() -> list[Metric]:
    shuffled = (
        "1 − |rank correlation| of the maps before and after weights are shuffled, mean over the cascade"
    )
    classes = "rank correlation of the maps of the target and of another class"
    alike = "mean rank correlation with the maps of the other methods of the run"
    area = "area under the ROC curve of the truly relevant patches"
    precision = "truly relevant ones among the top n patches, n their number"
    return [
        Metric("randomisation", "sanity", "higher", 0, 1, "", shuffled, explains=True),
        Metric("class_sensitivity", "sanity", "lower", -1, 1, "", classes, explains=True),
        Metric("agreement", "sanity", "neither", -1, 1, "", alike),
        Metric("truth_auroc", "truth", "higher", 0, 1, "", area, masks=True),
        Metric("truth_precision", "truth", "higher", 0, 100, "%", precision, masks=True),
    ]


METRICS: dict[str, Metric] = {
    m.name: m for m in (*_removal(), *_perturbation(), *_localisation(), *_others())
}


def metric(name: str) -> Metric:
    """The measure of that name, or `UnknownName` with the nearest one."""
    if name not in METRICS:
        raise UnknownName("metric", name, METRICS)
    return METRICS[name]


def in_table_order(names: Iterable[str]) -> list[str]:
    """Metrics in the order of tables: as they are registered, then unknown ones by name."""
    there = set(names)
    return [name for name in METRICS if name in there] + sorted(there - set(METRICS))
