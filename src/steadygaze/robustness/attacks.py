"""Attacks in pixel space, L∞: FGSM and PGD.

Goodfellow et al., arXiv:1412.6572 (FGSM); Madry et al., arXiv:1706.06083 (PGD).

With pixels x in [0, 1]³, label y, cross-entropy J and budget ε:

    FGSM    x' = clip(x + ε · sign ∂J/∂x, 0, 1)
    PGD     x₀ = clip(x + U(−ε, ε), 0, 1)
            x_{t+1} = clip(x + clip(x_t + α · sign ∂J/∂x_t − x, −ε, ε), 0, 1)

Images are taken and returned normalized, with the given mean and std. ε and α are fractions of the full
scale, so that 8/255 means eight gray levels, whatever the normalization. Any classifier serves; it is
attacked in evaluation mode.

Formulas: docs/equations.md#fgsm, docs/equations.md#pgd.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from steadygaze.errors import InputError
from steadygaze.target import at_least_float32
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.outputs import logits_of
from steadygaze.vit.view import ViT

Images = Float[Tensor, "b c h w"]
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OUTSIDE = 1e-3  # how far from [0, 1] a pixel may lie before mean and std must be wrong


def fgsm(
    model: nn.Module | ViT,
    images: Images,
    labels: Int[Tensor, " b"],
    *,
    epsilon: float,
    mean: Sequence[float],
    std: Sequence[float],
) -> Images:
    """Attack with one step of size epsilon against the labels.

    Args:
        model (nn.Module | ViT): any classifier.
        images (Tensor): (B, C, H, W), normalized.
        labels (Tensor): (B,), class indices.
        epsilon (float): size of the step, as a fraction of the pixel range.
        mean (Sequence[float]): of the normalization, one number per channel.
        std (Sequence[float]): of the normalization.

    Returns:
        Tensor: (B, C, H, W), the attacked images, normalized like `images`.

    Examples:
        >>> import steadygaze as sg
        >>> loaded, images = sg.load_model("embedded"), torch.zeros(1, 3, 32, 32)
        >>> norm = {"mean": loaded.mean, "std": loaded.std}
        >>> fgsm(loaded.model, images, torch.tensor([3]), epsilon=2 / 255, **norm).shape
        torch.Size([1, 3, 32, 32])
    """
    epsilon = budget("epsilon", epsilon)
    return _attack(model, images, labels, mean, std, epsilon, epsilon, 1, None)


def pgd(
    model: nn.Module | ViT,
    images: Images,
    labels: Int[Tensor, " b"],
    *,
    epsilon: float,
    mean: Sequence[float],
    std: Sequence[float],
    steps: int = 10,
    step: float | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Images:
    """Attack by projected gradient descent within epsilon of the images.

    Args:
        model (nn.Module | ViT): any classifier.
        images (Tensor): (B, C, H, W), normalized.
        labels (Tensor): (B,), class indices.
        epsilon (float): largest change of a pixel, as a fraction of the pixel range.
        mean (Sequence[float]): of the normalization, one number per channel.
        std (Sequence[float]): of the normalization.
        steps (int): number of steps.
        step (float): α, by default 2.5·epsilon / steps.
        generator (torch.Generator | Sequence[torch.Generator]): draws the random start: one for the batch, or
            one for each image, so that an image's start does not depend on its neighbors. Without one, the
            start is the image itself.

    Returns:
        Tensor: (B, C, H, W), the attacked images, normalized like `images`.

    Examples:
        >>> import steadygaze as sg
        >>> loaded, images = sg.load_model("embedded"), torch.zeros(1, 3, 32, 32)
        >>> norm = {"mean": loaded.mean, "std": loaded.std}
        >>> pgd(loaded.model, images, torch.tensor([3]), epsilon=2 / 255, steps=2, **norm).shape
        torch.Size([1, 3, 32, 32])
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps: expected a whole number of 1 or more, got {steps!r}")
    epsilon = budget("epsilon", epsilon)
    alpha = 2.5 * epsilon / steps if step is None else budget("step", step)
    return _attack(model, images, labels, mean, std, epsilon, alpha, steps, generator)


def budget(name: str, value: float) -> float:
    """Check a perturbation size: a fraction of the pixel range, from 0 to below 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InputError(f"{name}: expected a number from 0 to 1, such as 8/255, got {value!r}")
    if value >= 1:
        raise InputError(f"{name}: expected a number below 1, got {value:g}: pass {value:g}/255")
    return float(value)


def pixels_of(images: Images, mean: Sequence[float], std: Sequence[float]) -> tuple[Images, Tensor, Tensor]:
    """Return the images in [0, 1], and mean and std as tensors (1, c, 1, 1).

    Raises:
        InputError: if mean and std are not those of the images.
    """
    if not isinstance(images, Tensor) or images.dim() != 4 or not images.numel():
        raise InputError(
            f"expected normalized images (B, C, H, W), at least one, got {getattr(images, 'shape', images)}"
        )
    channels = images.shape[1]
    if len(mean) != channels or len(std) != channels or min(std) <= 0:
        raise InputError(f"mean, std: expected {channels} numbers each, std above 0, got {mean} and {std}")
    m, s = (
        torch.tensor(list(v), dtype=images.dtype, device=images.device).view(1, -1, 1, 1) for v in (mean, std)
    )
    x = images.detach() * s + m
    low, high = float(x.min()), float(x.max())
    if not (low >= -OUTSIDE and high <= 1 + OUTSIDE):
        raise InputError(
            f"expected pixels in [0, 1], got [{low:.2f}, {high:.2f}] with mean {list(mean)} and std "
            f"{list(std)}: give normalized images, and the mean and std that they were normalized with"
        )
    return x.clamp(0, 1), m, s


def checked_labels(labels: Any, batch: int, device: torch.device) -> Tensor:
    """Check that there is one class index for each image."""
    if not isinstance(labels, Tensor) or labels.shape != (batch,) or labels.dtype not in INTEGERS:
        raise InputError(f"labels: expected {batch} class indices, integers ({batch},), got {labels}")
    return labels.to(device=device, dtype=torch.long)


def _attack(
    model: nn.Module | ViT,
    images: Images,
    labels: Any,
    mean: Sequence[float],
    std: Sequence[float],
    epsilon: float,
    alpha: float,
    steps: int,
    generator: Any,
) -> Images:
    clean, m, s = pixels_of(images, mean, std)
    labels = checked_labels(labels, len(clean), clean.device)
    with torch.inference_mode(False), evaluation_mode(model.model if isinstance(model, ViT) else model):
        x = clean.clone()
        if generator is not None:
            x = (x + epsilon * (2 * _noise(x, generator) - 1)).clamp(0, 1)
        for _ in range(steps):
            slope = _slope(model, x, labels, m, s)
            x = (clean + (x + alpha * slope.sign() - clean).clamp(-epsilon, epsilon)).clamp(0, 1)
    return ((x - m) / s).detach()


def _noise(x: Images, generator: torch.Generator | Sequence[torch.Generator]) -> Images:
    """Draw U(0, 1) of the shape of x."""
    if isinstance(generator, torch.Generator):
        return torch.rand(x.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)
    if len(generator) != len(x):
        raise InputError(f"generator: expected one, or one for each of {len(x)} images, got {len(generator)}")
    return torch.stack(
        [torch.rand(x.shape[1:], generator=g, dtype=x.dtype, device=g.device) for g in generator]
    ).to(x.device)


def _slope(model: nn.Module | ViT, x: Images, labels: Tensor, m: Tensor, s: Tensor) -> Images:
    """∂J/∂x, of the sum over images: each image's own gradient."""
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        logits = logits_of(model((x - m) / s))
        if int(labels.min()) < 0 or int(labels.max()) >= logits.shape[1]:
            lowest, highest = int(labels.min()), int(labels.max())
            raise InputError(f"labels: expected classes 0..{logits.shape[1] - 1}, got {lowest}..{highest}")
        loss = F.cross_entropy(at_least_float32(logits), labels, reduction="sum")
        (slope,) = torch.autograd.grad(loss, x)
    return slope
