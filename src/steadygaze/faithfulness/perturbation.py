"""Pixel perturbation: pixels are filled, most relevant first (positive) or least relevant first (negative).

Chefer et al. (docs/equations.md#perturbation-tests): the map is upsampled bilinearly; at f = 0.1 ... 0.9
the first int(H·W·f) pixels are filled, by default with black before normalization. The value is the mean
over the nine fractions of 100 · [argmax = target]. For a label (multi-label) it is 100 · [the label is
predicted present or absent as in the whole image].

Vision DiffMask (docs/equations.md#diffmask-perturbation): the map is upsampled with nearest neighbors; at
i = 0 ... 28 the first H·W·i // 28 pixels become noise U(−1, 1) in normalized space. With p₀ the
probabilities of the image, p those of the perturbed image and c = argmax p₀:

    paper   accuracy 100 · [argmax p = c]     KL Σ_k p₀_k log(p₀_k / p_k)     mean height of the curve
    code    accuracy p_c                      KL −log p_c                     trapezoid with steps of 1

The paper prints neither formula; it names accuracy and KL divergence of the predictions, which are read so
here. Lower is better for positive accuracies and negative KL, higher for negative accuracies and positive
KL. Ties are broken in raster order. The noise of an image depends on the seed and its name alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torchvision.transforms.functional import gaussian_blur

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.faithfulness.inputs import Batch, CachedForward, MetricInput
from steadygaze.faithfulness.localization import upsample
from steadygaze.faithfulness.metric import Metric, Values, add_metrics
from steadygaze.quantity import INF, Better
from steadygaze.seeding import image_seed
from steadygaze.target import at_least_float32

FILLS = ("zero", "mean", "blur", "noise")
FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
POINTS = 29
SIGNS = ("positive", "negative")
BLUR = 22  # the standard deviation of fill="blur" is 1/22 of the image's longer side


def compute(given: MetricInput, names: Sequence[str]) -> dict[str, Values]:
    """The metrics `names`, and those that share their forward passes; `detail` is the raw curve."""
    values: dict[str, Values] = {}
    for sign in SIGNS:
        filled_metric = f"{sign}_perturbation"
        if filled_metric in names:
            filled = fill_values(given.batch, given.fill, given.seed)
            curve = chefer(given.forward, given.maps, given.target, filled, sign)
            values[filled_metric] = replace(curve, note=given.fill)
        if any(name.startswith(f"{sign}_") and name != filled_metric for name in names):
            noise = fill_values(given.batch, "noise", given.seed)
            values |= diffmask(given.forward, given.maps, noise, sign)
    return values


def chefer(
    whole: CachedForward,
    maps: Float[Tensor, "m b gh gw"],
    target: Int[Tensor, " b"],
    filled: Float[Tensor, "b c h w"],
    sign: str,
) -> Values:
    """Accuracy in percent, mean over nine fractions; `detail` is the curve (M, B, 9)."""
    size = (filled.shape[-2], filled.shape[-1])
    counts = [int(size[0] * size[1] * f) for f in FRACTIONS]
    correct = []
    image = torch.arange(len(target), device=target.device).repeat_interleave(len(counts))
    for scores in maps:
        order = fill_order(upsample(scores, size), sign)
        logits = _perturbed_logits(whole, order, filled, counts).flatten(0, 1)
        correct.append(whole.as_expected(logits, target[image], image).unflatten(0, (-1, len(counts))))
    detail = 100.0 * torch.stack(correct).to(whole.probabilities.dtype)
    return Values(detail.mean(-1), detail)


def diffmask(
    whole: CachedForward, maps: Float[Tensor, "m b gh gw"], noise: Float[Tensor, "b c h w"], sign: str
) -> dict[str, Values]:
    """The four curves of one sign, each (M, B, 29), and their areas."""
    size = (noise.shape[-2], noise.shape[-1])
    counts = [size[0] * size[1] * i // (POINTS - 1) for i in range(1, POINTS - 1)]
    first, last = whole.logits, whole.vit(noise)  # no pixel and all pixels replaced: the same for all maps
    answer = first.argmax(-1)
    curves: dict[str, list[Tensor]] = {kind: [] for kind in ("kl", "accuracy", "kl_code", "accuracy_code")}
    for scores in maps:
        order = fill_order(upsample(scores, size, "nearest"), sign)
        between = _perturbed_logits(whole, order, noise, counts)
        logits = torch.cat([first[:, None], between, last[:, None]], dim=1)  # (B, 29, classes)
        log_p = at_least_float32(logits).log_softmax(-1)
        log_c = log_p.gather(-1, answer[:, None, None].expand(-1, POINTS, 1))[..., 0]
        divergence = (log_p[:, :1].exp() * (log_p[:, :1] - log_p)).sum(-1)
        curves["kl"].append(divergence.clamp_min(0))
        curves["accuracy"].append(100.0 * (log_p.argmax(-1) == answer[:, None]).to(log_p.dtype))
        curves["kl_code"].append(-log_c)
        curves["accuracy_code"].append(log_c.exp())
    values = {}
    for kind, curve in curves.items():
        detail = torch.stack(curve)
        area = torch.trapezoid(detail, dim=-1)
        height = area if kind.endswith("code") else area / (POINTS - 1)
        values[f"{sign}_{kind}"] = Values(height, detail, "noise")
    return values


def fill_order(pixels: Float[Tensor, "b h w"], sign: str) -> Int[Tensor, "b h w"]:
    """Position of each pixel in the order of filling, 0 first; equal pixels in raster order."""
    flat = (pixels if sign == "positive" else -pixels).flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    position = torch.arange(flat.shape[1], device=flat.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, position).view(pixels.shape)


def _perturbed_logits(
    whole: CachedForward, order: Int[Tensor, "b h w"], filled: Float[Tensor, "b c h w"], counts: Sequence[int]
) -> Float[Tensor, "b s classes"]:
    """Logits with the first n pixels of `order` replaced by those of `filled`, for each n in `counts`."""
    pairs = [(image, n) for image in range(len(order)) for n in counts]
    size = whole.images_at_once
    logits = []
    for start in range(0, len(pairs), size):
        image, n = torch.tensor(pairs[start : start + size], device=order.device).unbind(1)
        replaced = (order[image] < n[:, None, None])[:, None]
        logits.append(whole.vit(torch.where(replaced, filled[image], whole.images[image])))
    return torch.cat(logits).view(len(order), len(counts), -1)


def fill_values(batch: Batch, fill: str, seed: int = 0) -> Float[Tensor, "b c h w"]:
    """The pixels that replace perturbed ones, in normalized space.

    Args:
        fill: "zero" is black before normalization; "mean" the color that the normalization subtracts; "blur"
            the image under a Gaussian blur; "noise" uniform in −1..1.
    """
    images = batch.images
    match fill:
        case "zero":
            if batch.mean is None or batch.std is None:
                raise InputError(
                    "fill 'zero' is black before normalization: expected a batch with mean and std, got none"
                )
            black = -batch.mean.to(images) / batch.std.to(images)
            return black[:, None, None].expand_as(images)
        case "mean":
            return torch.zeros_like(images)
        case "blur":
            return blur(images, max(images.shape[-2:]) / BLUR)
        case "noise":
            seeds = [image_seed(seed, batch.name(i), separator=":", size=7) for i in range(len(images))]
            generators = [torch.Generator().manual_seed(s) for s in seeds]
            draws = [torch.rand(images.shape[1:], generator=g, dtype=torch.float64) for g in generators]
            return (2 * torch.stack(draws) - 1).to(images)
    raise UnknownNameError("fill", fill, FILLS)


def blur(images: Float[Tensor, "b c h w"], sigma: float) -> Float[Tensor, "b c h w"]:
    """Gaussian blur, truncated at three sigma, reflected at the edges; one axis after the other."""
    height, width = (2 * min(int(3 * sigma + 0.5), side - 1) + 1 for side in images.shape[-2:])
    return gaussian_blur(gaussian_blur(images, [1, height], [sigma, sigma]), [width, 1], [sigma, sigma])


# -- registration


def _entry(name: str, unit: str, better: Better, high: float, summary: str) -> Metric:
    uses_fill = name.endswith("_perturbation")
    return Metric(
        name,
        unit,
        better,
        0,
        high,
        summary=summary,
        family="perturbation",
        by_map=True,
        compute=compute,
        uses_fill=uses_fill,
        outputs=("classes", "labels") if uses_fill else ("classes",),
        variant=name.endswith("_code"),
    )


def _entries() -> list[Metric]:
    steps = "relevant pixels painted first; mean of nine steps"
    entries = [
        _entry("positive_perturbation", "%", "lower", 100, f"correct predictions, most {steps}"),
        _entry("negative_perturbation", "%", "higher", 100, f"correct predictions, least {steps}"),
    ]
    directions: tuple[tuple[str, str, Better, Better], ...] = (
        ("positive", "most", "higher", "lower"),
        ("negative", "least", "lower", "higher"),
    )
    for sign, first, kl, accuracy in directions:
        order = f"{first} relevant pixels replaced by noise first, 29 points"
        height = f"{order}; mean height of the curve"
        as_code = f"{order}; area with steps of 1, as in the code"
        same = "prediction is still that of the whole image"
        entries += [
            _entry(f"{sign}_kl", "nats", kl, INF, f"KL(p whole ‖ p perturbed), {height}"),
            _entry(f"{sign}_accuracy", "%", accuracy, 100, f"{same}, {height}"),
            _entry(f"{sign}_kl_code", "nats", kl, INF, f"−log p of the first prediction, {as_code}"),
            _entry(f"{sign}_accuracy_code", "", accuracy, 28, f"p of the first prediction, {as_code}"),
        ]
    return entries


add_metrics(_entries())
