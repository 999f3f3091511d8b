"""The inputs of metrics: images with labels and masks, the model's run on whole images, and the maps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from steadygaze.errors import InputError
from steadygaze.target import PRESENT, at_least_float32, predictions
from steadygaze.vit.clean_forward import CleanForward
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.removal import chunk_of
from steadygaze.vit.view import ViT

RATIOS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
OBJECT, BACKGROUND = 255, 0  # values of masks; any other value is left out

# (model, images (B, C, H, W), target (B,)) -> maps (M, B, gh, gw): runs the methods again
Explain = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """Normalized images with their labels and masks.

    Args:
        images (Tensor): (B, C, H, W), as the model takes them.
        labels (Tensor): (B,), class indices.
        masks (Tensor): (B, H, W), uint8: 255 object, 128 border (left out), 0 background.
        mean (Tensor): (C,), of the normalization; needed by metrics that paint pixels.
        std (Tensor): (C,), of the normalization.
        names (tuple[str, ...]): one for each image; the random numbers of an image depend on the seed and its
            name.

    Examples:
        >>> images, labels = torch.zeros(2, 3, 32, 32), torch.tensor([3, 5])
        >>> Batch(images, labels, names=("a", "b")).names
        ('a', 'b')
    """

    images: Float[Tensor, "b c h w"]
    labels: Int[Tensor, " b"]
    masks: UInt8[Tensor, "b h w"] | None = None
    mean: Float[Tensor, " c"] | None = None
    std: Float[Tensor, " c"] | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = self.images.shape[0]
        if tuple(self.labels.shape) != (count,):
            raise InputError(
                f"labels: expected one for each of {count} images, got shape {tuple(self.labels.shape)}"
            )
        if self.names and len(self.names) != count:
            raise InputError(f"names: expected one for each of {count} images, got {len(self.names)}")
        if self.masks is not None and tuple(self.masks.shape) != (count, *self.images.shape[-2:]):
            raise InputError(
                f"masks: expected {(count, *self.images.shape[-2:])}, the size of the images, got "
                f"{tuple(self.masks.shape)}. Resize them with the images (nearest)."
            )

    def name(self, index: int) -> str:
        """The name of an image; its index where none was given."""
        return self.names[index] if self.names else str(index)

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device."""

        def moved(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            images=self.images.to(device),
            labels=self.labels.to(device),
            masks=moved(self.masks),
            mean=moved(self.mean),
            std=moved(self.std),
        )


@dataclass(frozen=True, eq=False)
class CachedForward(CleanForward):
    """The model's output on unmodified images, computed once and shared by all maps and metrics."""

    @cached_property
    def probabilities(self) -> Float[Tensor, "b classes"]:
        """Probabilities of classes or labels, at least in float32; values as they are."""
        return self.predictions(self.logits)

    def predictions(self, logits: Tensor) -> Tensor:
        """Probabilities, or values, of these logits, at least in float32."""
        return predictions(self.vit.plan.outputs, at_least_float32(logits))

    def as_expected(
        self, logits: Float[Tensor, "n classes"], target: Int[Tensor, " n"], image: Int[Tensor, " n"]
    ) -> Bool[Tensor, " n"]:
        """Whether these logits, of modified images, still predict `target`.

        A class: it is the predicted one. A label, or the one class of a binary classifier: it is present
        (p > 0.5) or absent, as in the unmodified image. Values are not predicted in this sense.
        """
        if self.vit.plan.outputs != "labels" and logits.shape[1] > 1:
            return logits.argmax(1) == target
        present = self.predictions(logits).gather(1, target[:, None])[:, 0] > PRESENT
        return present == (self.probabilities[image, target] > PRESENT)

    @property
    def chunk(self) -> int:
        """Maximum number of tokens in one forward pass."""
        return chunk_of(self.images)

    @property
    def images_at_once(self) -> int:
        """Maximum number of whole images in one forward pass."""
        return max(1, self.chunk // self.tokens.shape[1])


def maps_like(
    maps: Float[Tensor, "m b gh gw"], explain: Explain, model: nn.Module, images: Tensor, target: Tensor
) -> Float[Tensor, "m b gh gw"]:
    """The maps of `explain`, at least in float32; InputError if their shape is not that of `maps`."""
    again = explain(model, images, target)
    if again.shape != maps.shape:
        expected, got = tuple(maps.shape), tuple(again.shape)
        raise InputError(f"explain: expected maps of shape {expected}, like those evaluated, got {got}")
    return at_least_float32(again.detach())


@dataclass(frozen=True)
class MetricInput:
    """The input of a metric's function: M maps of the B images of a batch.

    Args:
        vit (ViT): the model.
        batch (Batch): the images.
        maps (Tensor): (M, B, gh, gw), one for each method, unnormalized, at least float32.
        target (Tensor): (B,), the class that the maps explain.
        forward (CachedForward): the model's logits, probabilities and tokens for the unmodified images,
            computed once for all metrics.
        seed (int): random seed of the run; combine it with the image's name, `batch.name(i)`.
        ratios (tuple[float, ...]): shares of patches that are kept or removed.
        fill (str): what hidden pixels become: "zero", "mean", "blur" or "noise".
        hide (str): how patches are hidden: "remove", or "paint" with `fill`.
        explain (Callable): (model, images, target) -> maps (M, B, gh, gw), for metrics that declare
            needs_explain.
        unattributed (Tensor): (M, B), what each method gives to no patch; None: nothing.
        explained (Tensor): (M, B), the quantity that each map explains; None: the logit of the target.

    Examples:
        >>> from steadygaze.faithfulness import Values
        >>> def peak(given: MetricInput, names):  # whole example: `register_metric`
        ...     return {name: Values(given.maps.flatten(2).amax(-1)) for name in names}
    """

    vit: ViT
    batch: Batch
    maps: Float[Tensor, "m b gh gw"]
    target: Int[Tensor, " b"]
    forward: CachedForward
    seed: int = 0
    ratios: tuple[float, ...] = RATIOS
    fill: str = "zero"
    hide: str = "remove"
    explain: Explain | None = None
    unattributed: Float[Tensor, "m b"] | None = None
    explained: Float[Tensor, "m b"] | None = None

    @property
    def logits(self) -> Float[Tensor, "b classes"]:
        """The model's logits for the unmodified images."""
        with torch.no_grad(), evaluation_mode(self.vit.model):
            return self.forward.logits

    @property
    def masks(self) -> UInt8[Tensor, "b h w"]:
        """The masks of the batch, for metrics that declare needs_masks."""
        assert self.batch.masks is not None, "declare needs_masks=True"
        return self.batch.masks

    def explain_again(
        self,
        model: nn.Module | None = None,
        target: Int[Tensor, " b"] | None = None,
        images: Float[Tensor, "b c h w"] | None = None,
    ) -> Float[Tensor, "m b gh gw"]:
        """The same methods on another model, for other classes, or on other versions of the images."""
        assert self.explain is not None, "declare needs_explain=True"
        model = self.vit.model if model is None else model
        images = self.batch.images if images is None else images
        return maps_like(self.maps, self.explain, model, images, self.target if target is None else target)
