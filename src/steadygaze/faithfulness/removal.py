"""Insertion and deletion by token removal (SkipPLUS; docs/equations.md#token-removal).

Patches are removed after `embed`. The remaining patches keep their positions, prefix tokens are never
removed. With P patches, ratio r and k = int(r·P), ranked by the map (stable, descending; ties in raster
order):

    insertion keeps the top k         deletion removes the top k, so P − k are left
    accuracy(r) = 100 · [argmax = target]          AOPC(r) = 100 · (p_whole − p_left) of the target
    area = ∫ curve dr / (r_last − r_first), trapezoid; a single ratio: the curve itself

    insertion_accuracy = area                      deletion_accuracy = 100 − area
    insertion_aopc     = 100 − area                deletion_aopc     = area
    insertion_value    = −area                     deletion_value    = area       higher is better in all
    srg = 100 · (area of p with the k least important patches removed − area of p with the top k removed)
    monotonicity = 100 · share of steps without a loss of p, as patches are added from least to most important

`srg`, the symmetric relevance gain (docs/equations.md#srg), has half as many passes of its own: both of its
curves remove k patches, and insertion keeps k, which is not P − k at the opposite ratio. `monotonicity`
(docs/equations.md#monotonicity) reads the curve of deletion backward, up to the whole image.
`insertion_value` and `deletion_value` are areas of y_whole − y_left, the loss of the target's output itself:
of a value (regression), in its own unit, or of a logit. For a label (multi-label), p is its sigmoid, and
accuracy is whether it is predicted present or absent (p > 0.5) as in the whole image. Values have no
accuracy, no AOPC, no `srg` and no `monotonicity`.

All come from the same forward passes. Passes with equal numbers of remaining patches share a batch,
over maps, images, insertion and deletion, in chunks of a bounded number of tokens. `embed` and the pass on
the whole image run once for all maps.

Models whose patches cannot be removed (Swin) are masked in their attention instead (`vit.masking`). A model
that reads patches only has no output when none is left: probability and expected accuracy are 1 / classes
(1/2 for a label), and `insertion_value` and `deletion_value` are undefined.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import InputError
from steadygaze.faithfulness.hiding import hiding_note, paint_of, painted_pieces
from steadygaze.faithfulness.inputs import RATIOS, CachedForward, MetricInput
from steadygaze.faithfulness.metric import Curve, Metric, Values, add_metrics
from steadygaze.results.check import area
from steadygaze.target import at_least_float32
from steadygaze.vit.removal import Group, Piece, pieces, ranking, reads_nothing, run_pieces

NAMES = ("insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc")
SYMMETRIC, MONOTONICITY = "srg", "monotonicity"
LOWER_IS_BETTER = ("deletion_accuracy", "insertion_aopc")  # of the raw curves; their scores are 100 − area
VALUE_NAMES = ("insertion_value", "deletion_value")
INSERTION, DELETION, LEAST_FIRST = 0, 1, 2


class Curves(NamedTuple):
    """What the model predicts at every ratio; index 0 is insertion, 1 is deletion, 2 (for `srg`) removal of
    the least important patches.

    Attributes:
        correct: 1 if the target is predicted, 0 if not, or the chance level.
        probability: Probability of the target; for regression its value.
        output: The target's logit, or its value.
    """

    correct: Float[Tensor, "kinds m b r"]
    probability: Float[Tensor, "kinds m b r"]
    output: Float[Tensor, "kinds m b r"]


def removal(
    whole: CachedForward,
    maps: Float[Tensor, "m b gh gw"],
    target: Int[Tensor, " b"],
    ratios: Sequence[float] = RATIOS,
    *,
    symmetric: bool = False,
    paint: Float[Tensor, "b c h w"] | None = None,
) -> dict[str, Values]:
    """The removal scores of every map, higher is better; `detail` is the raw curve.

    Of values only `insertion_value` and `deletion_value`; the others are in percent. symmetric: `srg` too.
    paint: pixels that replace those of hidden patches; None: patches are removed.
    """
    ratios = checked_ratios(ratios)
    symmetric = symmetric and whole.vit.plan.outputs != "values"
    found = curves(whole, ranking(maps), target, ratios, symmetric=symmetric, paint=paint)
    note = "removal" if whole.vit.plan.removable else "attention masking"
    lost_output = at_least_float32(whole.logits).gather(1, target[:, None]) - found.output[:2]  # (2, M, B, R)
    values = {}
    for name, curve, sign in zip(VALUE_NAMES, lost_output, (-1, 1), strict=True):
        values[name] = Values(sign * area(curve, ratios), curve, note)
    if whole.vit.plan.outputs == "values":
        return values
    lost = whole.probabilities.gather(1, target[:, None]) - found.probability[:2]
    for name, curve in zip(NAMES, (*(100 * found.correct[:2]), *(100 * lost)), strict=True):
        height = area(curve, ratios)
        values[name] = Values(100 - height if name in LOWER_IS_BETTER else height, curve, note)
    if symmetric:
        _, top_first, least_first = area(100 * found.probability, ratios)
        values[SYMMETRIC] = Values(least_first - top_first, note=note)
    whole_p = whole.probabilities.gather(1, target[:, None])[:, 0].expand(found.probability.shape[1:3])
    added = torch.cat([found.probability[DELETION].flip(-1), whole_p[..., None]], -1)
    values[MONOTONICITY] = Values(100 * (added.diff(dim=-1) >= 0).double().mean(-1), note=note)
    return values


def curves(
    whole: CachedForward,
    order: Int[Tensor, "m b p"],
    target: Int[Tensor, " b"],
    ratios: Sequence[float],
    *,
    symmetric: bool = False,
    paint: Float[Tensor, "b c h w"] | None = None,
) -> Curves:
    """What the model predicts with the first patches of `order` alone, and without them; `symmetric`: also
    without as many of the last ones. `paint`: as in `removal`."""
    m, b, p = order.shape
    image = torch.arange(b, device=order.device).repeat(m)
    kinds = 3 if symmetric else 2
    # correct, probability and output, each for insertion, deletion and removal of the least important
    found = whole.probabilities.new_empty(3, kinds, len(ratios), m * b)
    settings = []  # (kind, index of the ratio, number of remaining patches)
    for index, ratio in enumerate(ratios):
        k = int(ratio * p)
        settings += [(INSERTION, index, k), (DELETION, index, p - k), (LEAST_FIRST, index, p - k)][:kinds]
    forward_passes: list[Piece] = []
    for kind, index, remaining in sorted(settings, key=lambda setting: (setting[2], setting[0], setting[1])):
        if remaining == p:
            found[:, kind, index] = _read(whole, whole.logits, target, image[:b]).repeat(1, m)
        elif remaining == 0 and paint is None and reads_nothing(whole.vit):
            found[:2, kind, index] = _chance(whole)
            found[2, kind, index] = float("nan")
        else:
            keep = order[..., p - remaining :] if kind == DELETION else order[..., :remaining]
            group = Group(image, keep.reshape(m * b, remaining))
            forward_passes += pieces(whole.vit, whole.tokens, group, (kind, index))
    if paint is None:
        runs = run_pieces(whole.vit, whole.tokens, forward_passes)
    else:
        runs = painted_pieces(whole, forward_passes, paint)
    for piece, logits in runs:
        images = piece.group.image
        found[:, *piece.place] = _read(whole, logits, target[images], images)
    return Curves(*found.view(3, kinds, len(ratios), m, b).permute(0, 1, 3, 4, 2))


def _read(
    whole: CachedForward,
    logits: Float[Tensor, "n classes"],
    target: Int[Tensor, " n"],
    image: Int[Tensor, " n"],
) -> Float[Tensor, "3 n"]:
    """Whether the prediction is correct, the target's probability, and its output."""
    correct = whole.as_expected(logits, target, image)
    probability = whole.predictions(logits).gather(1, target[:, None])[:, 0]
    output = logits.gather(1, target[:, None])[:, 0]
    return torch.stack([correct.to(probability.dtype), probability, output.to(probability.dtype)])


def _chance(whole: CachedForward) -> float:
    """The probability of a target that nothing is known about."""
    match whole.vit.plan.outputs:
        case "values":
            return float("nan")
        case "labels":
            return 0.5
    return 1 / max(whole.logits.shape[1], 2)


def checked_ratios(ratios: Sequence[float]) -> tuple[float, ...]:
    """Increasing ratios in 0..1; other input is an error."""
    try:
        values = tuple(float(r) for r in ratios)
    except (TypeError, ValueError):
        values = ()
    increasing = all(a < b for a, b in pairwise(values))
    if not values or not increasing or not 0 <= values[0] <= values[-1] <= 1:  # NaN is in no order
        raise InputError(
            f"ratios: expected increasing numbers from 0 to 1, such as 0.1, 0.5, 0.9, got {list(ratios)}"
        )
    return values


# -- registration


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """All scores from one set of forward passes."""
    symmetric, paint = SYMMETRIC in names, paint_of(given)
    values = removal(given.forward, given.maps, given.target, given.ratios, symmetric=symmetric, paint=paint)
    return {name: replace(one, note=hiding_note(given)) for name, one in values.items()}


def _entry(name: str, unit: str, low: float, high: float, summary: str, curve: Curve) -> Metric:
    area_text = "area under the curve over the ratios, by token removal"
    return Metric(
        name,
        unit,
        "higher",
        low,
        high,
        summary=f"{summary}; {area_text}",
        family="removal",
        by_map=True,
        compute=compute,
        curve=curve,
        hides_patches=True,
        outputs=("classes", "labels"),
    )


def _value_entry(name: str, summary: str, curve: Curve) -> Metric:
    text = f"{summary}; area under the curve over the ratios, by token removal"
    return Metric(
        name,
        "",
        "higher",
        summary=text,
        family="value",
        compute=compute,
        curve=curve,
        by_map=True,
        hides_patches=True,
    )


KEPT, REMOVED = "Only the top patches kept", "The top patches removed"
CORRECT, LOST, VALUE_LOST = "correct predictions, %", "probability lost, points", "output lost"
add_metrics(
    [
        _entry(
            "insertion_accuracy",
            "%",
            0,
            100,
            "correct predictions from the top k patches alone",
            Curve(KEPT, CORRECT, "higher is better"),
        ),
        _entry(
            "deletion_accuracy",
            "%",
            0,
            100,
            "100 − correct predictions without the top k patches",
            Curve(REMOVED, CORRECT, "lower is better"),
        ),
        _entry(
            "insertion_aopc",
            "points",
            0,
            200,
            "100 − probability lost with the top k patches alone, above 100 if it rises",
            Curve(KEPT, LOST, "lower is better"),
        ),
        _entry(
            "deletion_aopc",
            "points",
            -100,
            100,
            "probability lost without the top k patches",
            Curve(REMOVED, LOST, "higher is better"),
        ),
        Metric(
            SYMMETRIC,
            "points",
            "higher",
            -100,
            100,
            label="symmetric relevance gain",
            summary="area between the probability without the k least important and without the top k "
            "patches, by token removal",
            family="removal",
            by_map=True,
            compute=compute,
            hides_patches=True,
            outputs=("classes", "labels"),
        ),
        Metric(
            MONOTONICITY,
            "%",
            "higher",
            0,
            100,
            summary="steps at which the probability does not fall, as patches are added from least to most "
            "important; the passes of deletion",
            family="subsets",
            by_map=True,
            compute=compute,
            hides_patches=True,
            outputs=("classes", "labels"),
        ),
        _value_entry(
            "insertion_value",
            "minus the loss of the logit or value with the top k patches alone",
            Curve(KEPT, VALUE_LOST, "lower is better"),
        ),
        _value_entry(
            "deletion_value",
            "loss of the logit or value without the top k patches",
            Curve(REMOVED, VALUE_LOST, "higher is better"),
        ),
    ]
)
