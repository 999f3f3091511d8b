"""Patch-wise augmentation (RVT; Mao et al. 2022): cross-entropy also of images with augmented patches.

Equations: docs/equations.md#patch-augmentation.

    x̃ = clamp(fold(flip(noise(crop(patches(x))))), (0 − μ) / σ, (1 − μ) / σ)
    loss = CE(f(x̃), y),   added to the CE(f(x), y) of [losses.cross_entropy]

| symbol | variable | value |   | symbol | variable              | value |
| p      | patch    | 16    |   | s      | scale                 | .85, 1|
| noise  | noise    | .01   |   | each   | crop, noisy, flip     | .1    |

Patches are those of the normalized images after mixup, and keep the targets of their images. The side of a
crop is round(p √s); sides of the whole patch are drawn again, up to `ATTEMPTS` times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from torch import Tensor

from steadygaze.errors import InputError
from steadygaze.training.losses.cross_entropy import CrossEntropyOptions, cross_entropy
from steadygaze.training.losses.registry import (
    Loss,
    LossBatch,
    LossSetup,
    NonNegative,
    model_outputs,
    register_loss,
)

ATTEMPTS = 10  # as in kornia, which the authors use
Share = Annotated[float, Field(ge=0, le=1)]


def _scale(values: list[float]) -> list[float]:
    if len(values) != 2 or not 0 < values[0] <= values[1] <= 1:
        raise PydanticCustomError("expected", "expected [least, most], above 0 and at most 1")
    return values


class PatchAugmentationOptions(CrossEntropyOptions):
    """Options of [losses.patch_augmentation].

    Attributes:
        patch: Side of a patch in pixels.
        scale: Smallest and largest area of a crop, as a share of the patch.
        crop: Probability that a patch is cropped.
        crop_draw: Whether crops are drawn for each patch, or once for all patches of a micro-batch, as
            kornia 0.6 does.
        noise: Standard deviation of the noise, of normalized values.
        noisy: Probability that noise is added.
        flip: Probability that a patch is flipped.
        smoothing: Label smoothing, without mixup.
    """

    patch: Annotated[int, Field(gt=0)] = 16
    scale: Annotated[list[float], AfterValidator(_scale)] = Field(default_factory=lambda: [0.85, 1.0])
    crop: Share = 0.1
    crop_draw: Literal["patch", "batch"] = "patch"
    noise: NonNegative = 0.01
    noisy: Share = 0.1
    flip: Share = 0.1


@dataclass(frozen=True)
class PatchDraws:
    """What is random about N patches.

    Attributes:
        side: Side of the crop; `patch` where the patch is not cropped.
        top: First row of the crop.
        left: First column of the crop.
        noise: What is added; 0 where nothing is.
        flipped: Whether left and right change places.
    """

    side: Int[Tensor, " n"]
    top: Int[Tensor, " n"]
    left: Int[Tensor, " n"]
    noise: Float[Tensor, "n c p p"]
    flipped: Bool[Tensor, " n"]


def draw_patches(patches: Float[Tensor, "n c p p"], options: PatchAugmentationOptions) -> PatchDraws:
    """Draw what is random about these patches, from torch's generator of their device."""
    count, p = len(patches), options.patch

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, device=patches.device)

    cropped = uniform(1 if options.crop_draw == "batch" else count) < options.crop
    least, most = options.scale
    sides = (p * (least + (most - least) * uniform(count, ATTEMPTS)).sqrt()).round().long().clamp_min(1)
    first_smaller = (sides < p).float().argmax(1, keepdim=True)  # the first attempt if all are whole patches
    side = torch.where(cropped, sides.gather(1, first_smaller).squeeze(1), p)
    top, left = ((uniform(count) * (p - side + 1)).floor().long() for _ in range(2))
    noisy = uniform(count) < options.noisy
    noise = torch.randn_like(patches) * options.noise * noisy[:, None, None, None]
    return PatchDraws(side, top, left, noise, uniform(count) < options.flip)


def augment_patches(patches: Float[Tensor, "n c p p"], draws: PatchDraws) -> Float[Tensor, "n c p p"]:
    """Crops, resized to the whole patch (bilinear, corners aligned); then noise; then flips."""
    p = patches.shape[-1]
    cropped = (draws.side < p).nonzero().squeeze(1)
    patches = patches.clone()
    if len(cropped):
        patches[cropped] = _resized_crops(
            patches[cropped], draws.side[cropped], draws.top[cropped], draws.left[cropped]
        )
    patches = patches + draws.noise
    return torch.where(draws.flipped[:, None, None, None], patches.flip(-1), patches)


def _resized_crops(
    patches: Float[Tensor, "n c p p"],
    side: Int[Tensor, " n"],
    top: Int[Tensor, " n"],
    left: Int[Tensor, " n"],
) -> Float[Tensor, "n c p p"]:
    p = patches.shape[-1]
    steps = torch.linspace(0, 1, p, device=patches.device, dtype=patches.dtype)
    rows, columns = (corner[:, None] + steps * (side - 1)[:, None] for corner in (top, left))
    # coordinates of grid_sample: -1 is the center of the first pixel, 1 that of the last
    rows, columns = (2 * x / (p - 1) - 1 for x in (rows, columns))
    x, y = columns[:, None, :].expand(-1, p, -1), rows[:, :, None].expand(-1, -1, p)
    return F.grid_sample(patches, torch.stack([x, y], -1), align_corners=True, padding_mode="border")


def augment_images(
    images: Float[Tensor, "b c h w"],
    options: PatchAugmentationOptions,
    mean: Float[Tensor, " c"],
    std: Float[Tensor, " c"],
) -> Float[Tensor, "b c h w"]:
    """x̃: normalized images with augmented patches, within the range of images.

    Args:
        mean: μ of the normalization.
        std: σ of the normalization.
    """
    p = options.patch
    grid = images.unflatten(3, (-1, p)).unflatten(2, (-1, p)).permute(0, 2, 4, 1, 3, 5)  # b i j c p p
    patches = grid.flatten(0, 2)
    patches = augment_patches(patches, draw_patches(patches, options))
    augmented = patches.unflatten(0, grid.shape[:3]).permute(0, 3, 1, 4, 2, 5).reshape(images.shape)
    low, high = ((value - mean) / std for value in (0.0, 1.0))
    return augmented.clamp(low[:, None, None], high[:, None, None])


@register_loss("patch_augmentation", options=PatchAugmentationOptions)
class PatchAugmentation(Loss):
    """Cross-entropy of images whose patches are augmented one by one (Mao et al. 2022); 0 in testing."""

    options: PatchAugmentationOptions
    runs_model = True  # before the others, so that batch norms see the images in the authors' order
    tasks = ("classification",)

    def __init__(self, options: PatchAugmentationOptions, setup: LossSetup) -> None:
        super().__init__(options, setup)
        self.label_smoothing = options.smoothing
        if setup.preprocess is None:
            raise InputError(
                "losses.patch_augmentation: expected the preprocessing of the model, for the range of images"
            )
        size = setup.preprocess.size
        if size[0] % options.patch or size[1] % options.patch:
            raise InputError(
                f"losses.patch_augmentation.patch: images of {size[0]}x{size[1]} cannot be divided into "
                f"patches of {options.patch}x{options.patch} pixels. Use a divisor of both sides."
            )
        self.mean, self.std = (torch.tensor(v) for v in (setup.preprocess.mean, setup.preprocess.std))

    def __call__(self, batch: LossBatch) -> Tensor:
        if not batch.model.training:
            return batch.images.new_zeros(())
        images = augment_images(
            batch.images, self.options, self.mean.to(batch.images), self.std.to(batch.images)
        )
        outputs = model_outputs(batch.model(images))
        logits = outputs if isinstance(outputs, Tensor) else outputs[0]
        if batch.soft_targets is not None:  # mixup has smoothed them already
            return cross_entropy(logits, batch.soft_targets)
        return cross_entropy(logits, batch.labels, smoothing=self.options.smoothing)
