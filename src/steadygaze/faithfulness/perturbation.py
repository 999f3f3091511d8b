"""Perturbation: pixels are painted over, most relevant first (positive) or least relevant first (negative).

Chefer et al. (docs/equations.md#perturbation-tests): the map is upsampled bilinearly; at f = 0.1 ... 0.9 the first int(H·W·f) pixels are filled, by
default with black before normalisation; value = mean over the nine steps of 100 · [argmax = target].

Vision DiffMask (docs/equations.md#diffmask-perturbation): the map is upsampled by nearest; at i = 0 ... 28 the first H·W·i // 28 pixels become noise
U(−1, 1) in normalised space. With p₀ the whole picture's probabilities, p those of the perturbed one, c = argmax p₀:

    as in the paper   accuracy 100 · [argmax p = c]     KL Σ_k p₀_k log(p₀_k / p_k)       mean height of the curve (trapezoid / 28)
    as in the code    accuracy p_c                      KL −log p_c                       trapezoid with steps of 1, so 28 times

The paper prints neither formula; it names accuracy and KL divergence of the predictions, which is read so here.
Lower is better for positive accuracies and negative KL, higher for negative accuracies and positive KL.
Ties are broken in raster order. The noise of an image depends on the seed and its name alone.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from steadygaze.errors import BadInput, UnknownName
from steadygaze.faithfulness.localisation import upsample
from steadygaze.faithfulness.metric import Batch, Values
from steadygaze.faithfulness.removal import CachedForward, at_least_float32

FILLS = ("zero", "mean", "blur", "noise")
FRACTIONS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
POINTS = 29
SIGNS = ("positive", "negative")


def perturbation(whole: CachedForward, batch: Batch, maps: Float[Tensor, "m b gh gw"], target: Int[Tensor, " b"], names: Sequence[str], *,
                 seed: int = 0, fill: str = "zero") -> dict[str, Values]:  # fmt: skip
    """Those of the perturbation measures that `names` asks for; `detail` is the raw curve."""
    found: dict[str, Values] = {}
    for sign in SIGNS:
        if f"{sign}_perturbation" in names:
            found[f"{sign}_perturbation"] = chefer(whole, maps, target, filling(batch, fill, seed), sign)
        if any(name.startswith(f"{sign}_") and not name.endswith("_perturbation") for name in names):
            found |= diffmask(whole, maps, filling(batch, "noise", seed), sign)
    return found


def chefer(whole: CachedForward, maps: Float[Tensor, "m b gh gw"], target: Int[Tensor, " b"], paint: Float[Tensor, "b c h w"],
           sign: str) -> Values:  # fmt: skip
    """Accuracy in percent, mean over nine steps; `detail` is the curve (M, B, 9)."""
    size = (paint.shape[-2], paint.shape[-1])
    counts = [int(size[0] * size[1] * f) for f in FRACTIONS]
    curve = []
    for one in maps:
        place = places(upsample(one, size), sign)
        curve.append(_run(whole, place, paint, counts).argmax(-1) == target[:, None])
    detail = 100.0 * torch.stack(curve).to(whole.probabilities.dtype)
    return Values(detail.mean(-1), detail)


def diffmask(
    whole: CachedForward, maps: Float[Tensor, "m b gh gw"], noise: Float[Tensor, "b c h w"], sign: str
) -> dict[str, Values]:
    """The four curves of one sign, each (M, B, 29), and their areas."""
    size = (noise.shape[-2], noise.shape[-1])
    counts = [size[0] * size[1] * i // (POINTS - 1) for i in range(1, POINTS - 1)]
    nothing, everything = whole.logits, whole.vit(noise)  # painted: for all maps
    answer = nothing.argmax(-1)
    curves: dict[str, list[Tensor]] = {kind: [] for kind in ("kl", "accuracy", "kl_code", "accuracy_code")}
    for one in maps:
        between = _run(whole, places(upsample(one, size, "nearest"), sign), noise, counts)
        log_p = at_least_float32(
            torch.cat([nothing[:, None], between, everything[:, None]], dim=1)
        ).log_softmax(-1)  # (B, 29, classes)
        log_c = log_p.gather(-1, answer[:, None, None].expand(-1, POINTS, 1))[..., 0]
        curves["kl"].append((log_p[:, :1].exp() * (log_p[:, :1] - log_p)).sum(-1).clamp_min(0))
        curves["accuracy"].append(100.0 * (log_p.argmax(-1) == answer[:, None]).to(log_p.dtype))
        curves["kl_code"].append(-log_c)
        curves["accuracy_code"].append(log_c.exp())
    found = {}
    for kind, curve in curves.items():
        detail = torch.stack(curve)
        area = torch.trapezoid(detail, dim=-1)
        found[f"{sign}_{kind}"] = Values(area if kind.endswith("code") else area / (POINTS - 1), detail)
    return found


def places(pixels: Float[Tensor, "b h w"], sign: str) -> Int[Tensor, "b h w"]:
    """When each pixel's turn comes, 0 first; equal pixels in raster order."""
    flat = (pixels if sign == "positive" else -pixels).flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    turn = torch.arange(flat.shape[1], device=flat.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, turn).view(pixels.shape)


def _run(
    whole: CachedForward, place: Int[Tensor, "b h w"], paint: Float[Tensor, "b c h w"], counts: Sequence[int]
) -> Float[Tensor, "b s classes"]:
    """Logits with the first `counts` pixels painted."""
    pairs = [(i, n) for i in range(len(place)) for n in counts]
    size = max(1, whole.chunk // whole.tokens.shape[1])
    found = []
    for start in range(0, len(pairs), size):
        image = torch.tensor([i for i, _ in pairs[start : start + size]], device=place.device)
        until = torch.tensor([n for _, n in pairs[start : start + size]], device=place.device)
        painted = (place[image] < until[:, None, None])[:, None]
        found.append(whole.vit(torch.where(painted, paint[image], whole.images[image])))
    return torch.cat(found).view(len(place), len(counts), -1)


def filling(batch: Batch, fill: str, seed: int = 0) -> Float[Tensor, "b c h w"]:
    """What hidden pixels become: "zero" black, "mean" the colour that the normalisation subtracts, "blur" the image itself under a
    Gaussian of 1/22 of its side, "noise" U(−1, 1) in normalised space."""
    images = batch.images
    match fill:
        case "zero":
            if batch.mean is None or batch.std is None:
                raise BadInput(
                    "fill 'zero' is black before normalisation: expected a batch with mean and std, got none"
                )
            black = -batch.mean.to(images) / batch.std.to(images)
            return black[:, None, None].expand_as(images)
        case "mean":
            return torch.zeros_like(images)
        case "blur":
            return blur(images, max(images.shape[-2:]) / 22)
        case "noise":
            each = [generator(seed, batch.name(i)) for i in range(len(images))]
            draws = [torch.rand(images.shape[1:], generator=g, dtype=torch.float64) for g in each]
            return (2 * torch.stack(draws) - 1).to(images)
    raise UnknownName("fill", fill, FILLS)


def generator(seed: int, name: str) -> torch.Generator:
    """Random numbers of one image, whatever batch it is in."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def blur(images: Float[Tensor, "b c h w"], sigma: float) -> Float[Tensor, "b c h w"]:
    """Gaussian blur, cut at three sigma, mirrored at the edges."""
    for axis in (-2, -1):
        radius = min(int(3 * sigma + 0.5), images.shape[axis] - 1)
        x = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
        weights = (-0.5 * (x / sigma) ** 2).exp()
        weights = (
            (weights / weights.sum())
            .view((1, 1, -1, 1) if axis == -2 else (1, 1, 1, -1))
            .expand(images.shape[1], 1, -1, -1)
        )
        pad = (0, 0, radius, radius) if axis == -2 else (radius, radius, 0, 0)
        images = F.conv2d(F.pad(images, pad, mode="reflect"), weights, groups=images.shape[1])
    return images
