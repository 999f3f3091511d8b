"""Insertion and deletion by token removal (SkipPLUS; docs/equations.md#token-removal).

Patches are removed after `embed`. The remaining patches keep their positions, prefix tokens are never
removed. With P patches, ratio r and k = int(r·P), ranked by the map (stable, descending; ties in raster
order):

    insertion keeps the top k         deletion removes the top k, so P − k are left
    accuracy(r) = 100 · [argmax = target]          AOPC(r) = 100 · (p_whole − p_left) of the target
    area = ∫ curve dr / (r_last − r_first), trapezoid; a single ratio: the curve itself

    insertion_accuracy = area                      deletion_accuracy = 100 − area
    insertion_aopc     = 100 − area                deletion_aopc     = area       higher is better in all

All four come from the same forward passes. Passes with equal numbers of remaining patches share a batch,
over maps, images, insertion and deletion, in chunks of a bounded number of tokens. `embed` and the pass on
the whole image run once for all maps.

Models whose patches cannot be removed (Swin) are masked in their attention instead (`vit.masking`). A model
that reads patches only has no output when none is left: probability and expected accuracy are 1 / classes.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import BadInput
from steadygaze.faithfulness.inputs import RATIOS, CachedForward, MetricInput
from steadygaze.faithfulness.metric import Curve, Metric, Values, add_metrics
from steadygaze.vit.packing import Group
from steadygaze.vit.subsets import Piece, pieces, reads_nothing, run_pieces

NAMES = ("insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc")
LOWER_IS_BETTER = ("deletion_accuracy", "insertion_aopc")  # of the raw curves; their scores are 100 − area
INSERTION, DELETION = 0, 1


def ranking(maps: Float[Tensor, "*b gh gw"]) -> Int[Tensor, "*b p"]:
    """Patch indices by descending relevance; ties in raster order."""
    return maps.flatten(-2).argsort(dim=-1, descending=True, stable=True)


def removal(
    whole: CachedForward,
    maps: Float[Tensor, "m b gh gw"],
    target: Int[Tensor, " b"],
    ratios: Sequence[float] = RATIOS,
) -> dict[str, Values]:
    """The four removal scores of every map, in percent, higher is better; `detail` is the raw curve."""
    ratios = checked_ratios(ratios)
    correct, probability = curves(whole, ranking(maps), target, ratios)
    whole_probability = whole.probabilities.gather(1, target[:, None])
    lost = whole_probability - probability  # (2, M, B, R)
    raw = dict(zip(NAMES, (*(100 * correct), *(100 * lost)), strict=True))
    areas = {name: area(curve, ratios) for name, curve in raw.items()}
    scores = {name: 100 - areas[name] if name in LOWER_IS_BETTER else areas[name] for name in NAMES}
    note = "removal" if whole.vit.plan.removable else "attention masking"
    return {name: Values(scores[name], raw[name], note) for name in NAMES}


def curves(
    whole: CachedForward, order: Int[Tensor, "m b p"], target: Int[Tensor, " b"], ratios: Sequence[float]
) -> tuple[Float[Tensor, "2 m b r"], Float[Tensor, "2 m b r"]]:
    """(correct 0 or 1, probability of the target) at every ratio; index 0 is insertion, 1 is deletion."""
    m, b, p = order.shape
    image = torch.arange(b, device=order.device).repeat(m)
    correct = whole.probabilities.new_empty(2, len(ratios), m * b)
    probability = correct.clone()
    settings = []  # (insertion or deletion, index of the ratio, number of remaining patches)
    for index, ratio in enumerate(ratios):
        k = int(ratio * p)
        settings += [(INSERTION, index, k), (DELETION, index, p - k)]
    forward_passes: list[Piece] = []
    for kind, index, left in sorted(settings, key=lambda setting: (setting[2], setting[0], setting[1])):
        if left == p:
            correct[kind, index] = (whole.logits.argmax(1) == target).to(correct.dtype).repeat(m)
            probability[kind, index] = whole.probabilities.gather(1, target[:, None])[:, 0].repeat(m)
        elif left == 0 and reads_nothing(whole.vit):
            correct[kind, index] = probability[kind, index] = 1 / whole.probabilities.shape[1]
        else:
            keep = order[..., :left] if kind == INSERTION else order[..., p - left :]
            group = Group(image, keep.reshape(m * b, left))
            forward_passes += pieces(whole.vit, whole.tokens, group, (kind, index))
    for piece, logits in run_pieces(whole.vit, whole.tokens, forward_passes):
        classes = target[piece.group.image]
        correct[piece.place] = (logits.argmax(1) == classes).to(correct.dtype)
        probability[piece.place] = whole.predictions(logits).gather(1, classes[:, None])[:, 0]
    shape = (2, len(ratios), m, b)
    return correct.view(shape).permute(0, 2, 3, 1), probability.view(shape).permute(0, 2, 3, 1)


def area(curve: Float[Tensor, "*b r"], ratios: Sequence[float]) -> Float[Tensor, "*b"]:
    """Trapezoid over the ratios divided by their span: the mean height of the curve."""
    curve = curve.double()
    if len(ratios) == 1:
        return curve[..., 0]
    x = torch.tensor(ratios, dtype=torch.float64, device=curve.device)
    height = torch.trapezoid(curve, x, dim=-1) / (x[-1] - x[0])
    return height.clamp(curve.amin(-1), curve.amax(-1))  # rounding must not leave the curve's range


def checked_ratios(ratios: Sequence[float]) -> tuple[float, ...]:
    """Increasing ratios in 0..1; other input is an error."""
    try:
        values = tuple(float(r) for r in ratios)
    except (TypeError, ValueError):
        values = ()
    increasing = all(a < b for a, b in pairwise(values))
    if not values or not increasing or not 0 <= values[0] <= values[-1] <= 1:  # NaN is in no order
        raise BadInput(
            f"ratios: expected increasing numbers from 0 to 1, such as 0.1, 0.5, 0.9, got {list(ratios)}"
        )
    return values


# -- registration
# ------------------------------------------------------------------------------------------------------


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """All four scores from one set of forward passes."""
    return removal(given.forward, given.maps, given.target, given.ratios)


def _entry(name: str, low: float, high: float, summary: str, curve: Curve) -> Metric:
    area_text = "area under the curve over the ratios, by token removal"
    return Metric(
        name,
        "%",
        "higher",
        low,
        high,
        summary=f"{summary}; {area_text}",
        family="removal",
        compute=compute,
        curve=curve,
    )


KEPT, REMOVED = "Only the top patches kept", "The top patches removed"
CORRECT, LOST = "correct predictions, %", "probability lost, points"
add_metrics(
    [
        _entry(
            "insertion_accuracy",
            0,
            100,
            "correct predictions from the top k patches alone",
            Curve(KEPT, CORRECT, "higher is better"),
        ),
        _entry(
            "deletion_accuracy",
            0,
            100,
            "100 − correct predictions without the top k patches",
            Curve(REMOVED, CORRECT, "lower is better"),
        ),
        _entry(
            "insertion_aopc",
            0,
            200,
            "100 − probability lost with the top k patches alone",
            Curve(KEPT, LOST, "lower is better"),
        ),
        _entry(
            "deletion_aopc",
            -100,
            100,
            "probability lost without the top k patches",
            Curve(REMOVED, LOST, "higher is better"),
        ),
    ]
)
