"""A detection as the question: what made the model say "dog" there? (docs/equations.md#detection)

    q = argmax_k IoU(b_k, b) · p_k(c)      y = the class logits of query q, "no object" last

YOLOS of transformers runs [class token, patches, detection tokens] through one stack of blocks, and every
detection token (query) ends as a box b_k and probabilities p_k. In the view, the class token and the
detection tokens are prefix tokens, so patches are attributed and removed as in any ViT. The query is chosen
once, on the whole image, and stays the same when patches are removed.

IoU times probability is the similarity of D-RISE (Petsiuk et al. 2021) for a target that is one class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import InputError, UnsupportedModelError
from steadygaze.questions.regions import Size, box_mask, check_label, label_index, own_class_names
from steadygaze.vit.adapters.transformers import layer_parts
from steadygaze.vit.contexts import evaluation_mode, without_autocast
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Layout, Plan

NO_OBJECT = "no object"


@dataclass(frozen=True, eq=False)
class Detection:
    """An object that a detector finds: a class, and a box around it.

    Attributes:
        label: The class, by name or index; None is the class that the model gives the box.
        box: (left, top, right, bottom), in pixels of the image as the model sees it (after preprocessing).

    Examples:
        >>> Detection("dog", box=(10, 20, 110, 140)).label
        'dog'
    """

    label: str | int | None = None
    box: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.box is None:
            raise InputError(
                "Detection: give the box (left, top, right, bottom) around the object, in pixels"
            )
        check_label("Detection", self.label)


class QueryClassifier(nn.Module):
    """A `YolosForObjectDetection` and one of its queries: images (B, 3, H, W) -> logits (B, classes + 1).

    Attributes:
        size: (H, W) of the images.
        class_names: Those of the model, and "no object".
    """

    def __init__(
        self, model: nn.Module, query: int, size: Size, class_names: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.model, self.query, self.size = model, query, size
        names = own_class_names(model) if class_names is None else class_names
        self.class_names = None if names is None else (*names, NO_OBJECT)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        """The class logits of the query by the model's own forward pass."""
        return self.model(images).logits[:, self.query]

    def class_index(self, name: str) -> int:
        """The class of that name."""
        return label_index(name, self.class_names, type(self.model).__name__)


def detects(model: Any) -> bool:
    """Whether a model is a YOLOS detector."""
    return type(model).__name__ == "YolosForObjectDetection"


def detection_query(
    model: nn.Module, image: Float[Tensor, "1 c h w"], detection: Detection, names: Sequence[str] | None
) -> tuple[QueryClassifier, int]:
    """The query that detects this on the image, as a classifier, and the class of the label."""
    if not detects(model):
        raise UnsupportedModelError(
            f"Detection: expected a YolosForObjectDetection of transformers, got {type(model).__name__}. A "
            "segmenter takes steadygaze.Region(label, box=...)"
        )
    size = (image.shape[-2], image.shape[-1])
    box_mask("Detection", detection.box, size)
    names = own_class_names(model) if names is None else names
    label = detection.label
    index = None if label is None else label_index(label, names, type(model).__name__)
    with torch.no_grad(), without_autocast(model), evaluation_mode(model):
        output = model(image.to(next(model.parameters()).dtype))
    probabilities = output.logits[0].softmax(-1)[:, :-1]
    if index is not None and not 0 <= index < probabilities.shape[1]:
        raise InputError(
            f"Detection: class {index} is out of range; the model has classes 0..{probabilities.shape[1] - 1}"
        )
    fit = overlap(corners(output.pred_boxes[0], size), torch.tensor(detection.box).to(output.pred_boxes))
    if not bool((fit > 0).any()):
        raise InputError(
            f"Detection: none of the {len(fit)} boxes that the model gives for this image overlaps "
            f"{tuple(detection.box or ())}. Give a box that the model detects"
        )
    confidence = probabilities.amax(-1) if index is None else probabilities[:, index]
    query = int((fit * confidence).argmax())
    chosen = int(probabilities[query].argmax()) if index is None else index
    return QueryClassifier(model, query, size, names), chosen


def corners(boxes: Float[Tensor, "*k 4"], size: Size) -> Float[Tensor, "*k 4"]:
    """(left, top, right, bottom) in pixels, of (center x, center y, width, height) as shares of the image.

    Examples:
        >>> corners(torch.tensor([0.5, 0.5, 1.0, 0.5]), (8, 16)).tolist()
        [0.0, 2.0, 16.0, 6.0]
    """
    x, y, width, height = boxes.unbind(-1)
    relative = torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], -1)
    return relative * relative.new_tensor([size[1], size[0], size[1], size[0]])


def overlap(boxes: Float[Tensor, "k 4"], box: Float[Tensor, " 4"]) -> Float[Tensor, " k"]:
    """IoU of boxes (left, top, right, bottom) with one box.

    Examples:
        >>> overlap(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([0.0, 0.0, 2.0, 1.0])).tolist()
        [0.5]
    """
    low, high = torch.maximum(boxes[:, :2], box[:2]), torch.minimum(boxes[:, 2:], box[2:])
    common = (high - low).clamp(min=0).prod(-1)
    areas = (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(-1)
    return common / (areas + (box[2:] - box[:2]).prod() - common).clamp_min(1e-12)


@register_adapter("detection", matches=QueryClassifier)
def plan(classifier: QueryClassifier) -> Plan:
    """The view of YOLOS: class token and detection tokens, then patches."""
    model: Any = classifier.model
    config, body = model.config, model.vit
    layers, queries = body.encoder.layer, config.num_detection_tokens
    prefix, patch = 1 + queries, config.patch_size
    height, width = classifier.size
    middle = body.encoder.interpolation  # positions added between blocks; None in some models

    def ordered(x: Tensor) -> Tensor:
        """[class, patches, queries] -> [class, queries, patches]."""
        return torch.cat([x[..., :1, :], x[..., -queries:, :], x[..., 1:-queries, :]], -2)

    def embed(images: Tensor) -> tuple[Tensor, Any, tuple[int, int]]:
        size = images.shape[-2:]
        positions = None if middle is None else ordered(middle(size))[:, 0]
        return ordered(body.embeddings(images)), positions, (size[0] // patch, size[1] // patch)

    def call(index: int, x: Tensor, layout: Layout) -> Tensor:
        y = layers[index](x)
        y = y if isinstance(y, Tensor) else y[0]
        if layout.state is None or index + 1 == len(layers):
            return y
        return y + _of_kept(layout.state[index], layout, prefix)

    return Plan(
        embed=embed,
        blocks=[
            {"module": layer, "call": partial(call, index), "parts": layer_parts(layer, None)}
            for index, layer in enumerate(layers)
        ],
        head=lambda x, layout: model.class_labels_classifier(body.layernorm(x[:, 1 + classifier.query])),
        input_size=(config.num_channels, height, width),
        fixed_size=True,
        grid=(height // patch, width // patch),
        prefix=prefix,
        readout="class",
        readout_rows=(1 + classifier.query,),
        kind="transformers YolosForObjectDetection",
        rotary=middle is not None,
    )


def _of_kept(table: Float[Tensor, "n d"], layout: Layout, prefix: int) -> Tensor:
    """Positions of the tokens that are left: (n, d), or (b, m, d) where patches were removed."""
    if layout.kept is None:
        return table
    patches = table[prefix:][layout.kept]
    return torch.cat([table[:prefix].expand(len(patches), -1, -1), patches], 1)
