"""A region of a segmentation as the question: what made the model say "road" here? (docs/equations.md#region)

    y_c = 1/|R| Σ_{p∈R} s_c(p) = Σ_j w_j s_c(j)

| symbol | meaning                                                              | in the code             |
| s_c    | the segmenter's own scores of class c, at pixels p or at cells j     | `scores`                |
| R      | the pixels of the region, of the image as the model sees it          | `mask`                  |
| w      | the region on the grid of the scores: the adjoint of the upsampling  | `region_weights`        |

Scores are upsampled bilinearly to the image, as segmenters are used. A region makes a segmenter a classifier
of images, whose classes are those of the segmenter. Its views are in `segmenters`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from steadygaze.errors import BadInput, UnknownName, UnsupportedModel

Size = tuple[int, int]  # height, width


@dataclass(frozen=True, eq=False)
class Region:
    """Some pixels of an image, and a class that a segmenter may give them.

    label: the class, by name or index; None is the class that the model predicts for the region
    mask: (H, W), booleans or 0 and 1; an array or tensor
    box: (left, top, right, bottom): pixels with left <= x < right and top <= y < bottom
    point: (x, y), one pixel

    Give one of the three, in pixels of the image as the model sees it (after preprocessing).
    """

    label: str | int | None = None
    mask: Any = None
    box: Sequence[float] | None = None
    point: Sequence[float] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("mask", "box", "point") if getattr(self, name) is not None]
        if len(given) != 1:
            raise BadInput(f"Region: give one of mask, box and point, got {' and '.join(given) or 'none'}")
        check_label("Region", self.label)

    def pixels(self, size: Size) -> Bool[Tensor, "h w"]:
        """The pixels of the region in an image of this size; an error if there are none."""
        if self.point is not None:
            return _point_mask(self.point, size)
        if self.box is not None:
            return box_mask("Region", self.box, size)
        return _checked_mask(self.mask, size)


def check_label(kind: str, label: Any) -> None:
    """An error unless a label is a name, an index or None."""
    if label is not None and (isinstance(label, bool) or not isinstance(label, (str, int))):
        raise BadInput(f"{kind}: expected a label by name or index, or None, got {label!r:.80}")


def box_mask(kind: str, box: Any, size: Size) -> Bool[Tensor, "h w"]:
    """The pixels in a box."""
    height, width = size
    left, top, right, bottom = _numbers(kind, "box", box, "(left, top, right, bottom)", 4)
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise BadInput(
            f"{kind}: box (left, top, right, bottom) must have 0 <= left < right <= {width} and 0 <= top < "
            f"bottom <= {height}, in pixels of the image as the model sees it, got {tuple(box)}"
        )
    y, x = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    mask = ((top <= y) & (y <= bottom))[:, None] & ((left <= x) & (x <= right))[None]
    if not mask.any():
        raise BadInput(
            f"{kind}: box {tuple(box)} has no pixel's centre in it. Make it larger, or give a point"
        )
    return mask


def _point_mask(point: Any, size: Size) -> Bool[Tensor, "h w"]:
    x, y = _numbers("Region", "point", point, "(x, y)", 2)
    height, width = size
    if not (0 <= x < width and 0 <= y < height):
        raise BadInput(
            f"Region: point (x, y) must lie in the image as the model sees it, {width} pixels wide and "
            f"{height} high, got {tuple(point)}"
        )
    mask = torch.zeros(size, dtype=torch.bool)
    mask[int(y), int(x)] = True
    return mask


def _numbers(kind: str, name: str, given: Any, form: str, count: int) -> list[float]:
    try:
        numbers = [float(number) for number in given]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count:
        raise BadInput(f"{kind}: {name}: expected {count} numbers, {form}, got {given!r:.80}")
    return numbers


def _checked_mask(given: Any, size: Size) -> Bool[Tensor, "h w"]:
    try:
        mask = torch.as_tensor(given).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(f"Region: mask: expected an array of shape {size}, got {given!r:.80}") from None
    if tuple(mask.shape) != tuple(size):
        raise BadInput(
            f"Region: mask: expected shape {tuple(size)}, the image as the model sees it, got "
            f"{tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise BadInput("Region: mask: expected booleans, or 0 and 1, got other values. Use mask > 0")
    if not mask.any():
        raise BadInput("Region: mask: expected at least one pixel, got an empty mask")
    return mask.bool()


def region_weights(mask: Bool[Tensor, "h w"], grid: Size) -> Float[Tensor, "gh gw"]:
    """w: how much each cell of a grid counts in the region's mean, if the grid is upsampled bilinearly.

    They sum to 1.
    """
    rows, columns = (
        F.interpolate(torch.eye(cells, dtype=torch.float64)[None], size=pixels, mode="linear")[0]
        for cells, pixels in zip(grid, mask.shape, strict=True)
    )
    pixels = mask.cpu().double()
    return rows @ (pixels / pixels.sum()) @ columns.T


def weighted_mean(scores: Float[Tensor, "b n c"], weights: Float[Tensor, "#b n"]) -> Float[Tensor, "b c"]:
    """Σ_j w_j s_j / Σ_j w_j over the cells that are there; zeros if none of the region is.

    Written with `mean`, which masking (`vit.masking`) takes over the visible cells.
    """
    weights = weights.to(scores)[..., None]
    visible = weights + 0 * scores.detach()[..., :1]  # a hidden cell is NaN in both means
    total = visible.mean(1).clamp_min(torch.finfo(scores.dtype).tiny)
    return (weights * scores).mean(1) / total


def scores_of(output: Any) -> Float[Tensor, "b c h w"]:
    """The class scores of whatever a segmenter returns: a tensor, an output of transformers, or torchvision's
    dict."""
    scores = output
    if isinstance(output, Mapping) and "out" in output:
        scores = output["out"]
    elif not isinstance(output, Tensor):
        scores = getattr(output, "logits", None)
    if not isinstance(scores, Tensor) or scores.dim() != 4:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(output).__name__
        raise UnsupportedModel(
            "expected a segmenter: class scores (B, C, h, w), an output with .logits or a dict with 'out'; "
            f"got {got}"
        )
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


class RegionClassifier(nn.Module):
    """A segmenter and a region: images (B, 3, H, W) -> mean scores of the region (B, classes).

    mask: (H, W), the pixels of the region
    class_names: None where they are not known
    """

    mask: Tensor

    def __init__(
        self, model: nn.Module, mask: Bool[Tensor, "h w"], class_names: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.class_names = None if class_names is None else tuple(class_names)
        device = next(model.parameters()).device
        self.register_buffer("mask", mask.to(device), persistent=False)

    @property
    def size(self) -> Size:
        """(H, W) of the images."""
        return self.mask.shape[0], self.mask.shape[1]

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """The mean over the region of the segmenter's own scores."""
        return self.pool(scores_of(self.model(images)))

    def pool(self, scores: Float[Tensor, "b classes h w"]) -> Float[Tensor, "b classes"]:
        """The mean over the region of scores on any grid."""
        weights = region_weights(self.mask, (scores.shape[-2], scores.shape[-1])).flatten()
        return weighted_mean(scores.flatten(2).transpose(1, 2), weights[None])

    def class_index(self, name: str) -> int:
        """The class of that name."""
        return label_index(name, self.class_names, type(self.model).__name__)


def label_index(label: str | int, names: Sequence[str] | None, model: str) -> int:
    """The class of a label, by name or index."""
    if isinstance(label, int):
        return label
    if names is None:
        raise BadInput(
            f"label: expected a class index, got {label!r}: the names of the classes of this {model} are not "
            "known. Give the index, or names by steadygaze.load_model(model, class_names=...)",
            option="target",
        )
    if label not in names:
        raise UnknownName("class", label, names)
    return list(names).index(label)


def own_class_names(model: Any) -> tuple[str, ...] | None:
    """The class names in the configuration of a model of transformers."""
    names: dict[int, str] | None = getattr(getattr(model, "config", None), "id2label", None)
    return None if not names else tuple(names[index] for index in sorted(names))
