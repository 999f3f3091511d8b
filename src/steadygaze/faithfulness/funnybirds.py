"""FunnyBirds' protocol: do maps name the parts of a bird that the model uses?

R. Hesse, S. Schaub-Meyer, S. Roth: FunnyBirds: A Synthetic Vision Dataset for a Part-Based Analysis of
Explainable AI Methods, ICCV 2023 (docs/equations.md#funnybirds). Parts are really removed: the data set has
each image rendered without them.

    e_k     = Σ over the pieces of part k, dilated by 5 x 5 pixels, of the map at pixel resolution (nearest)
    P_t     = {k : e_k > t Σ e},  Σ e the sum of the map over all pixels, t one of 80 thresholds
    CSDC(t) = max over minimal sufficient part sets S of the class of |S ∩ P_t| / |S|   (correct images)
    PC(t)   = [the prediction stays with the parts P_t only]      (map of the predicted class)
    DC(t)   = [the prediction changes without the parts P_t]      (map of the predicted class)
    D(t)    = 1 − |I ∩ P_t| / |I|,  I the parts and background objects without effect on the class
    Com     = max_t ((CSDC + PC + DC) / 3 + D) / 2, of the means over the images
    Cor     = (1 + Spearman correlation over parts of e_k and f(x) − f(x without k)) / 2   (SD)
    Con     = mean of two: with classes a and b that share two parts each with the image's class, all four
              different, are a's parts worth more in the map of a than in that of b, and b's less?   (TS)

In percent, higher is better. Properties of the model, the same for every map: accuracy, and background
independence, the share of background objects whose removal lowers the class logit by less than 5 %.

| symbol | meaning                                       | in code                   |
| e      | importance of parts and background objects    | `importance`              |
| t      | thresholds                                    | `THRESHOLDS`              |
| P_t    | important parts                               | `important`               |
| f      | logit of a class                              | `whole`, `kept`           |
| I      | irrelevant parts                              | `irrelevant`              |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from steadygaze.data.datasets.funnybirds import COLORS, FIRST_OBJECT, FunnyBirds
from steadygaze.data.images import read_image
from steadygaze.data.preprocess import Preprocess
from steadygaze.faithfulness.inputs import MetricInput, at_least_float32
from steadygaze.faithfulness.localization import spearman
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.quantity import Better, Combine, mean, pooled
from steadygaze.vit.view import ViT

THRESHOLDS = np.linspace(0.01, 0.50, 80)
CURVES = ("csdc", "pc", "dc", "distractibility")  # the details of completeness, 80 numbers each
DILATION = 5  # pixels
NO_EFFECT = 0.05  # of the logit
SHARED = 2  # parts that a contrast class shares with the class of the image
SUITE = "funnybirds"


# -- classes -------------------------------------------------------------------------------------------


def sufficient_sets(classes: Sequence[Mapping[str, int]], label: int) -> list[frozenset[str]]:
    """The smallest sets of parts that no other class has in the same variants.

    Examples:
        >>> birds = [{"eye": 0, "tail": 0}, {"eye": 0, "tail": 1}, {"eye": 1, "tail": 1}]
        >>> sufficient_sets(birds, 0), len(sufficient_sets(birds, 1)[0])
        ([frozenset({'tail'})], 2)
    """
    own = classes[label]
    others = [other for number, other in enumerate(classes) if number != label]
    found: list[frozenset[str]] = []
    for size in range(1, len(own) + 1):
        for subset in map(frozenset, combinations(own, size)):
            shared = any(all(other[part] == own[part] for part in subset) for other in others)
            if not shared and not any(smaller < subset for smaller in found):
                found.append(subset)
    return found


def shared_parts(one: Mapping[str, int], other: Mapping[str, int]) -> frozenset[str]:
    """Parts that are equal in both classes."""
    return frozenset(part for part in one if one[part] == other[part])


def contrast_classes(classes: Sequence[Mapping[str, int]], label: int) -> tuple[int, int] | None:
    """The first two classes that share two parts each with the class `label`, all four of them different."""
    shared = {number: shared_parts(classes[label], other) for number, other in enumerate(classes)}
    near = [number for number, parts in shared.items() if number != label and len(parts) == SHARED]
    pairs = ((a, b) for a, b in combinations(near, 2) if not shared[a] & shared[b])
    return next(pairs, None)


# -- parts of an image ---------------------------------------------------------------------------------


def part_pixels(
    codes: UInt8[Tensor, "h w"], parts: Sequence[str], objects: int, grid: tuple[int, int]
) -> Float[Tensor, "k gh gw"]:
    """Dilated pixels of each part, then of each background object, in each patch."""
    pieces = [[code for code, part in enumerate(COLORS.values(), 1) if part == name] for name in parts]
    pieces += [[FIRST_OBJECT + k] for k in range(objects)]
    wanted = torch.tensor([code for group in pieces for code in group], device=codes.device)
    masks = (codes == wanted[:, None, None]).float()[:, None]
    dilated = F.max_pool2d(masks, DILATION, stride=1, padding=DILATION // 2)[:, 0].double()
    rows, columns = (
        F.one_hot(torch.arange(size, device=codes.device) * n // size, n).double()  # nearest neighbor
        for size, n in zip(codes.shape, grid, strict=True)
    )
    counts = torch.einsum("kyx,yi,xj->kij", dilated, rows, columns)
    return torch.stack([group.sum(0) for group in counts.split([len(group) for group in pieces])])


def part_importance(
    maps: Float[Tensor, "m gh gw"], pixels: Float[Tensor, "k gh gw"], size: tuple[int, int]
) -> tuple[Float[Tensor, "m k"], Float[Tensor, " m"]]:
    """Sum of each map over the pixels of each part, and over all pixels."""
    rows, columns = (
        torch.bincount(torch.arange(length, device=maps.device) * n // length, minlength=n).double()
        for length, n in zip(size, maps.shape[-2:], strict=True)
    )
    double = maps.double()
    return (
        torch.einsum("mij,kij->mk", double, pixels),
        torch.einsum("mij,i,j->m", double, rows, columns),
    )


def important_parts(importance: Float[Tensor, "m k"], total: Float[Tensor, " m"]) -> Bool[Tensor, "m t k"]:
    """Whether a part has more than the share t of the map."""
    thresholds = torch.from_numpy(THRESHOLDS).to(total)
    return importance[:, None] > (total[:, None] * thresholds)[..., None]


# -- what the model does without parts -------------------------------------------------------------------


@dataclass(frozen=True)
class Effects:
    """Logits of one image under every intervention.

    Attributes:
        kept: With each subset of the parts, by the bits of the parts that are kept.
        objects: Without each background object.
        pixels: Of each part, then of each object, in each patch.
    """

    kept: Float[Tensor, "subsets classes"]
    objects: Float[Tensor, "o classes"]
    pixels: Float[Tensor, "k gh gw"]


@dataclass(frozen=True)
class PartTruth:
    """What the metrics know besides maps: the model's attribute `funnybirds` during a run of the suite.

    Attributes:
        numbers: Number in the data set of each image of the run.
    """

    data: FunnyBirds
    preprocess: Preprocess
    numbers: tuple[int, ...]
    known: dict[int, Effects] = field(default_factory=dict)

    def effects(self, vit: ViT, number: int, grid: tuple[int, int], at_once: int) -> Effects:
        """The logits of an image under its interventions, computed once for all maps."""
        if number not in self.known:
            data, parameter = self.data, next(vit.model.parameters())
            files = [data.part_file(number, subset) for subset in data.subsets]
            files += [data.object_file(number, k) for k in range(data.objects[number])]
            logits = []
            for start in range(0, len(files), at_once):
                images = [self.preprocess(read_image(file)) for file in files[start : start + at_once]]
                logits.append(at_least_float32(vit(torch.stack(images).to(parameter))))
            parts, objects = torch.cat(logits).split([len(data.subsets), data.objects[number]])
            bits = [sum(1 << data.parts.index(part) for part in subset) for subset in data.subsets]
            kept = torch.empty_like(parts)
            kept[bits] = parts
            codes = self.preprocess.mask(data.part_map(number)).to(parameter.device)
            pixels = part_pixels(codes, data.parts, data.objects[number], grid)
            self.known[number] = Effects(kept, objects, pixels)
        return self.known[number]


# -- scores --------------------------------------------------------------------------------------------


def completeness_curves(
    label_parts: Bool[Tensor, "m t k"],
    predicted_parts: Bool[Tensor, "m t k"],
    whole: Float[Tensor, " classes"],
    effects: Effects,
    label: int,
    sufficient: Sequence[Sequence[int]],
) -> Float[Tensor, "m four t"]:
    """CSDC, PC, DC and distractibility at each threshold, 0..1; NaN where undefined.

    Args:
        label_parts: Important parts, then objects, by the map of the label.
        predicted_parts: Those by the map of the predicted class.
        sufficient: Minimal sufficient sets, by the numbers of the parts.
    """
    p = len(effects.kept).bit_length() - 1
    predicted = int(whole.argmax())
    nan = torch.full(label_parts.shape[:2], float("nan"), dtype=torch.float64, device=whole.device)
    csdc = nan
    if predicted == label:
        shares = [label_parts[..., list(one)].double().mean(-1) for one in sufficient]
        csdc = torch.stack([*shares, torch.zeros_like(nan)]).amax(0)
    bits = 1 << torch.arange(p, device=whole.device)
    present = (predicted_parts[..., :p] * bits).sum(-1)
    stays = effects.kept.argmax(-1) == predicted
    pc, dc = stays[present].double(), (~stays[2**p - 1 - present]).double()
    irrelevant = _without_effect(whole, effects, label)
    found = label_parts[..., irrelevant].double()
    distractibility = 1 - found.mean(-1) if len(irrelevant) else nan
    return torch.stack([csdc, pc, dc, distractibility], 1)


def _without_effect(whole: Tensor, effects: Effects, label: int) -> list[int]:
    """Parts, then objects, whose removal lowers the logit of the label by less than 5 %, or raises it."""
    p = len(effects.kept).bit_length() - 1
    every = 2**p - 1
    without = torch.cat(
        [effects.kept[[every - (1 << k) for k in range(p)], label], effects.objects[:, label]]
    )
    change = whole[label] - without
    small = (change.abs() < abs(NO_EFFECT * float(whole[label]))) | (change < 0)
    return [k for k, irrelevant in enumerate(small.tolist()) if irrelevant]


def best_threshold(details: Sequence[Sequence[float] | None]) -> tuple[int, dict[str, float]]:
    """The threshold of largest completeness for these images, and the four scores there, in percent."""
    known = [detail for detail in details if detail is not None]
    if not known:
        return 0, dict.fromkeys(CURVES, float("nan"))
    curves = np.asarray(known, dtype=np.float64).reshape(len(known), len(CURVES), -1)
    undefined = np.isnan(curves)
    count = len(known) - undefined.sum(0)
    means = np.where(undefined, 0, curves).sum(0) / np.where(count > 0, count, np.nan)
    found = int(completeness(means).argmax())
    return found, dict(zip(CURVES, (100 * means[:, found]).tolist(), strict=True))


def completeness(curves: Float[np.ndarray, "four *t"]) -> Float[np.ndarray, "*t"]:
    """((CSDC + PC + DC) / 3 + D) / 2; CSDC or D that is undefined for all images is left out of its mean."""
    csdc, pc, dc, distractibility = curves
    checks = np.where(np.isnan(csdc), (pc + dc) / 2, (csdc + pc + dc) / 3)
    return np.where(np.isnan(distractibility), checks, (checks + distractibility) / 2)


def combine_completeness(values: object, details: Sequence[Sequence[float] | None]) -> float:
    """Completeness of a data set, in percent: one threshold for all images, the best one."""
    scores = best_threshold(details)[1]
    return float(completeness(np.array([scores[name] for name in CURVES])))


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """The metrics that `names` lists, of a model whose attribute `funnybirds` is a `PartTruth`."""
    truth: PartTruth = given.vit.model.funnybirds  # type: ignore[assignment]
    data, logits, label = truth.data, at_least_float32(given.logits), given.target
    numbers = [truth.numbers[int(given.batch.name(b))] for b in range(len(label))]
    with torch.no_grad():
        at_once = given.forward.images_at_once
        effects = [truth.effects(given.vit, number, given.forward.grid, at_once) for number in numbers]
    predicted = logits.argmax(1)
    of_predicted = given.maps if torch.equal(predicted, label) else given.explain_again(target=predicted)
    m, b = given.maps.shape[:2]
    height, width = given.batch.images.shape[-2:]

    def important(maps: Tensor, one: int) -> Bool[Tensor, "m t k"]:
        return important_parts(*part_importance(maps[:, one], effects[one].pixels, (height, width)))

    curves, correctness, background = [], [], []
    every = 2 ** len(data.parts) - 1
    for one in range(b):
        target, found = int(label[one]), effects[one]
        sets = [sorted(map(data.parts.index, s)) for s in sufficient_sets(data.classes, target)]
        curves.append(
            completeness_curves(
                important(given.maps, one), important(of_predicted, one), logits[one], found, target, sets
            ).flatten(1)
        )
        singles = [every - (1 << k) for k in range(len(data.parts))]
        change = (logits[one, target] - found.kept[singles, target]).double()
        importance, _ = part_importance(given.maps[:, one], found.pixels, (height, width))
        parts = importance[:, : len(data.parts)]
        correctness.append(50 + 50 * spearman(parts, change.expand_as(parts)))
        unused = [k for k in _without_effect(logits[one], found, target) if k >= len(data.parts)]
        background.append([len(unused), len(found.objects)])
    pairs = torch.tensor(background, dtype=torch.float64, device=logits.device).expand(m, b, 2)
    detail = torch.stack(curves, 1)
    alone = [[combine_completeness(None, [d]) for d in row] for row in detail.tolist()]
    values = {
        "funnybirds_accuracy": Values(100.0 * (predicted == label).expand(m, b)),
        "funnybirds_background": Values(100 * pairs[..., 0] / pairs[..., 1], pairs),
        "funnybirds_completeness": Values(torch.tensor(alone, dtype=torch.float64), detail),
        "funnybirds_correctness": Values(torch.stack(correctness, 1)),
    }
    if CONTRAST in names:
        values[CONTRAST] = Values(_contrastivity(given, data, effects, logits))
    return {name: values[name] for name in names}


def _contrastivity(
    given: MetricInput, data: FunnyBirds, effects: Sequence[Effects], logits: Tensor
) -> Float[Tensor, "m b"]:
    """Target sensitivity; NaN where the model itself does not use the parts so, or no two classes fit."""
    value = given.maps.new_full(given.maps.shape[:2], float("nan"), dtype=torch.float64)
    every = 2 ** len(data.parts) - 1
    chosen: dict[int, tuple[int, int, list[int], list[int]]] = {}
    for one, label in enumerate(given.target.tolist()):
        pair = contrast_classes(data.classes, label)
        if pair is None:
            continue
        first, second = (
            [data.parts.index(part) for part in shared_parts(data.classes[label], data.classes[other])]
            for other in pair
        )
        without = effects[one].kept[[every - sum(1 << k for k in parts) for parts in (first, second)]]
        change = without[:, pair] - logits[one, pair]  # (parts removed, class)
        if change[0, 0] < change[1, 0] and change[1, 1] < change[0, 1]:
            chosen[one] = (*pair, first, second)
    if not chosen:
        return value
    size = (given.batch.images.shape[-2], given.batch.images.shape[-1])
    importance: list[dict[int, Tensor]] = []
    for which in (0, 1):
        target = given.target.clone()
        for one, (own, other, *_) in chosen.items():
            target[one] = (own, other)[which]
        maps = given.explain_again(target=target)
        importance.append(
            {one: part_importance(maps[:, one], effects[one].pixels, size)[0] for one in chosen}
        )
    for one, (_, _, first, second) in chosen.items():
        a, b = (each[one] for each in importance)
        right = (a[:, first].sum(-1) > b[:, first].sum(-1)).double()
        right += (a[:, second].sum(-1) < b[:, second].sum(-1)).double()
        value[:, one] = 50 * right
    return value


# -- registration --------------------------------------------------------------------------------------


def _entry(name: str, better: Better, summary: str, combine: Combine = mean) -> Metric:
    return Metric(
        name,
        "%",
        better,
        0,
        100,
        summary=summary,
        combine=combine,
        family="parts",
        compute=compute,
        needs_explain=True,
        suite=SUITE,
        outputs=("classes",),
    )


CONTRAST = "funnybirds_contrastivity"
NAMES = (
    "funnybirds_completeness",
    "funnybirds_correctness",
    CONTRAST,
    "funnybirds_accuracy",
    "funnybirds_background",
)
add_metrics(
    [
        _entry(
            NAMES[0],
            "higher",
            "mean of completeness (CSDC, PC, DC) and distractibility of the important parts (Com)",
            combine_completeness,
        ),
        _entry(NAMES[1], "higher", "rank correlation with the removal of each part, from 0 to 100 (Cor, SD)"),
        _entry(NAMES[2], "higher", "are parts of another class worth more in its own map? (Con, TS)"),
        _entry(NAMES[3], "neither", "accuracy of the model (Acc); the same for every method"),
        _entry(
            NAMES[4],
            "neither",
            "background objects that the model does not use (BI); the same for every method",
            pooled,
        ),
    ]
)
