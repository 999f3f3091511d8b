"""A region of a segmentation as the question: what made the model say "road" here? (docs/equations.md#region)

    y_c = 1/|R| Σ_{p∈R} s_c(p) = Σ_j w_j s_c(j)

| symbol | meaning                                                              | in the code             |
| s_c    | the segmenter's own scores of class c, at pixels p or at cells j     | `scores`                |
| R      | the pixels of the region, of the image as the model sees it          | `mask`                  |
| w      | the region on the grid of the scores: the adjoint of the upsampling  | `region_weights`        |

Scores are upsampled bilinearly to the image, as segmenters are used. A region makes a segmenter a classifier
of images, whose classes are those of the segmenter (`RegionClassifier`). Its view depends on the segmenter:

| segmenter                               | patches                                                          |
| `modules.segmenter`, linear decoder     | removed where those of the backbone can be, else masked          |
| the same with decoder="segformer", DPT, | masked: their heads read several layers and mix patches          |
| SegFormer of transformers               |                                                                  |
| any other around one ViT                | as that of `vit.wrapped`: the segmenter's own code is the head  |

A head that reads several layers is given them as the layout's `taps`: block l adds its input, so that the
gradient at x^l has both paths, through the blocks above and straight to the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from steadygaze.errors import InputError, UnknownNameError, UnsupportedModelError
from steadygaze.target import at_least_float32
from steadygaze.vit.adapt import adapt
from steadygaze.vit.adapters.transformers import layer_parts
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Layout, Plan, remember

Size = tuple[int, int]  # height, width


@dataclass(frozen=True, eq=False)
class Region:
    """Some pixels of an image, and a class that a segmenter may give them.

    Give one of mask, box and point, in pixels of the image as the model sees it (after preprocessing).

    Attributes:
        label: The class, by name or index; None is the class that the model predicts for the region.
        mask: Booleans, or 0 and 1, (H, W); an array or tensor.
        box: (left, top, right, bottom): pixels with left <= x < right and top <= y < bottom.
        point: (x, y), one pixel.

    Examples:
        >>> int(Region("road", box=(0, 0, 2, 3)).pixels((4, 4)).sum())
        6
    """

    label: str | int | None = None
    mask: Any = None
    box: Sequence[float] | None = None
    point: Sequence[float] | None = None

    def __post_init__(self) -> None:
        stated = [name for name in ("mask", "box", "point") if getattr(self, name) is not None]
        if len(stated) != 1:
            raise InputError(f"Region: give one of mask, box and point, got {' and '.join(stated) or 'none'}")
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
        raise InputError(f"{kind}: expected a label by name or index, or None, got {label!r:.80}")


def box_mask(kind: str, box: Any, size: Size) -> Bool[Tensor, "h w"]:
    """The pixels in a box."""
    height, width = size
    left, top, right, bottom = _numbers(kind, "box", box, "(left, top, right, bottom)", 4)
    if not (0 <= left < right <= width and 0 <= top < bottom <= height):
        raise InputError(
            f"{kind}: box (left, top, right, bottom) must have 0 <= left < right <= {width} and 0 <= top < "
            f"bottom <= {height}, in pixels of the image as the model sees it, got {tuple(box)}"
        )
    y, x = torch.arange(height) + 0.5, torch.arange(width) + 0.5
    mask = ((top <= y) & (y <= bottom))[:, None] & ((left <= x) & (x <= right))[None]
    if not mask.any():
        raise InputError(
            f"{kind}: box {tuple(box)} has no pixel's center in it. Make it larger, or give a point"
        )
    return mask


def _point_mask(point: Any, size: Size) -> Bool[Tensor, "h w"]:
    x, y = _numbers("Region", "point", point, "(x, y)", 2)
    height, width = size
    if not (0 <= x < width and 0 <= y < height):
        raise InputError(
            f"Region: point (x, y) must lie in the image as the model sees it, {width} pixels wide and "
            f"{height} high, got {tuple(point)}"
        )
    mask = torch.zeros(size, dtype=torch.bool)
    mask[int(y), int(x)] = True
    return mask


def _numbers(kind: str, name: str, values: Any, form: str, count: int) -> list[float]:
    try:
        numbers = [float(number) for number in values]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count:
        raise InputError(f"{kind}: {name}: expected {count} numbers, {form}, got {values!r:.80}")
    return numbers


def _checked_mask(region: Any, size: Size) -> Bool[Tensor, "h w"]:
    try:
        mask = torch.as_tensor(region).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"Region: mask: expected an array of shape {size}, got {region!r:.80}") from None
    if tuple(mask.shape) != tuple(size):
        raise InputError(
            f"Region: mask: expected shape {tuple(size)}, the image as the model sees it, got "
            f"{tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
        raise InputError("Region: mask: expected booleans, or 0 and 1, got other values. Use mask > 0")
    if not mask.any():
        raise InputError("Region: mask: expected at least one pixel, got an empty mask")
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
    """The class scores in what a segmenter returns: a tensor, transformers' output, or torchvision's dict."""
    scores = output
    if isinstance(output, Mapping) and "out" in output:
        scores = output["out"]
    elif not isinstance(output, Tensor):
        scores = getattr(output, "logits", None)
    if not isinstance(scores, Tensor) or scores.dim() != 4:
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(output).__name__
        raise UnsupportedModelError(
            "expected a segmenter: class scores (B, C, h, w), an output with .logits or a dict with 'out'; "
            f"got {got}"
        )
    return at_least_float32(scores)


class RegionClassifier(nn.Module):
    """A segmenter and a region: images (B, 3, H, W) -> mean scores of the region (B, classes).

    Attributes:
        mask: (H, W), the pixels of the region.
        class_names: None where they are not known.
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
        raise InputError(
            f"label: expected a class index, got {label!r}: the names of the classes of this {model} are not "
            "known. Give the index, or names by steadygaze.load_model(model, class_names=...)",
            option="target",
        )
    if label not in names:
        raise UnknownNameError("class", label, names)
    return list(names).index(label)


def own_class_names(model: Any) -> tuple[str, ...] | None:
    """The class names in the configuration of a model of transformers."""
    names: dict[int, str] | None = getattr(getattr(model, "config", None), "id2label", None)
    return None if not names else tuple(names[index] for index in sorted(names))


@register_adapter("region", matches=RegionClassifier)
def plan(classifier: RegionClassifier) -> Plan | None:
    """The view of a segmenter with a region; None if its class is not known here."""
    name = type(classifier.model).__name__
    if is_own(classifier.model):
        linear = classifier.model.decoder_name == "linear"
        return _own(classifier) if linear else _own_of_several_layers(classifier)
    if name == "DPTForSemanticSegmentation":
        return _dpt(classifier)
    if name == "SegformerForSemanticSegmentation":
        return _segformer(classifier)
    return None


def is_own(model: Any) -> bool:
    """Whether a model is one of `modules.segmenter`."""
    return type(model).__name__ == "Segmenter" and hasattr(model, "decoder_name")


def _own(classifier: RegionClassifier) -> Plan:
    """A linear decoder of patches: the region's mean is a weighted mean over those that are there."""
    model: Any = classifier.model
    backbone = adapt(model.backbone)
    tower, last = backbone.plan, len(backbone.blocks)
    norm = model.backbone.get_submodule(model.norm) if model.norm else nn.Identity()
    grid = _grid_of(tower, classifier)

    def head(x: Tensor, layout: Layout) -> Tensor:
        weights = region_weights(classifier.mask, layout.grid).flatten()
        rows = weights[None] if layout.kept is None else weights.to(x.device)[layout.kept]
        if tower.spatial is None:
            z = norm(x)[:, tower.prefix :]
        else:
            z = norm(backbone.patches(last, x, layout)).flatten(1, 2)
        return weighted_mean(model.decoder(z), rows)

    kind = f"steadygaze Segmenter of a {tower.kind}"
    return replace(tower, head=head, grid=grid, kind=kind, **_common(classifier, grid, tower.input_size[0]))


def _own_of_several_layers(classifier: RegionClassifier) -> Plan:
    """A SegFormer decoder: block l adds the map of its input to the taps if the decoder reads it."""
    model: Any = classifier.model
    backbone = adapt(model.backbone)
    tower, last = backbone.plan, len(backbone.blocks)
    grid = _grid_of(tower, classifier)

    def call(index: int, run: Callable[[Tensor, Layout], Tensor], x: Tensor, layout: Layout) -> Tensor:
        if index in model.layers:
            layout = replace(layout, taps=(*layout.taps, backbone.patches(index, x, layout)))
        return remember(run(x, layout), layout)

    def head(x: Tensor, layout: Layout) -> Tensor:
        maps = (*layout.taps, backbone.patches(last, x, layout))
        _check_taps(maps, len(model.layers))
        return classifier.pool(model.decoder(maps))

    return replace(
        tower,
        blocks=[{**b, "call": partial(call, i, b["call"])} for i, b in enumerate(tower.blocks)],
        head=head,
        grid=grid,
        kind=f"steadygaze Segmenter of a {tower.kind}",
        removable=False,
        mixed=True,
        reads_layers=True,
        **_common(classifier, grid, tower.input_size[0]),
    )


def _grid_of(tower: Plan, classifier: RegionClassifier) -> Size:
    """The patches of an image with the region's size; an error if the model does not take it."""
    _, height, width = tower.input_size
    if tower.fixed_size and classifier.size != (height, width):
        raise InputError(
            f"region: this Segmenter takes images of {width} x {height} pixels, and the region is one of an "
            f"image of {classifier.size[1]} x {classifier.size[0]}"
        )
    return tower.grid[0] * classifier.size[0] // height, tower.grid[1] * classifier.size[1] // width


def _common(classifier: RegionClassifier, grid: Size, channels: int) -> dict[str, Any]:
    """What views of a region share: the readout is a weighted mean of the patches."""
    return {
        "input_size": (channels, *classifier.size),
        "fixed_size": True,
        "readout": "mean",
        "readout_rows": (),
        "readout_patches": 0.0,
        "readout_weights": region_weights(classifier.mask, grid).flatten(),
        "outputs": "classes",
        "checked": False,
    }


def _dpt(classifier: RegionClassifier) -> Plan:
    """DPT: a plain ViT; its neck reads the outputs of some blocks, and fuses them by convolutions."""
    model: Any = classifier.model
    config, body, layers = model.config, model.dpt, model.dpt.encoder.layer
    read = set(config.backbone_out_indices)
    grid = (classifier.size[0] // config.patch_size, classifier.size[1] // config.patch_size)
    if config.is_hybrid:
        raise UnsupportedModelError(
            "DPTForSemanticSegmentation with is_hybrid=True has a CNN before its ViT, which its head reads "
            "too. Use a DPT without one, such as Intel/dpt-large-ade."
        )
    if grid[0] != grid[1]:
        raise InputError(
            f"DPTForSemanticSegmentation takes square images, and the region is one of an image of "
            f"{classifier.size[1]} x {classifier.size[0]} pixels"
        )

    def call(index: int, x: Tensor, layout: Layout) -> Tensor:
        taps = (*layout.taps, x) if index - 1 in read else layout.taps
        return remember(_tensor(layers[index](x)), replace(layout, taps=taps))

    def head(x: Tensor, layout: Layout) -> Tensor:
        states = (*layout.taps, x) if len(layers) - 1 in read else layout.taps
        _check_taps(states, len(read))
        return classifier.pool(model.head(model.neck(hidden_states=list(states))))

    return Plan(
        embed=lambda images: (body.embeddings(images).last_hidden_states, None, grid),
        blocks=[
            {"module": layer, "call": partial(call, index), "parts": layer_parts(layer, None)}
            for index, layer in enumerate(layers)
        ],
        head=head,
        grid=grid,
        prefix=1,
        kind="transformers DPTForSemanticSegmentation",
        removable=False,
        mixed=True,
        reads_layers=True,
        **_common(classifier, grid, config.num_channels),
    )


def _segformer(classifier: RegionClassifier) -> Plan:
    """SegFormer: four stages; the head reads the normed output of each."""
    model: Any = classifier.model
    stages = _stages(model.segformer)

    def grids(size: Size) -> tuple[Size, ...]:
        found: list[Size] = []
        for embed, _, _ in stages:
            size = _convolved(embed.proj, size)
            found.append(size)
        return tuple(found)

    def embedded(images: Tensor) -> tuple[Tensor, tuple[Size, ...], Size]:
        state = grids((images.shape[-2], images.shape[-1]))
        return stages[0][0](images)[0], state, state[-1]

    def to_map(stage: int, x: Tensor, layout: Layout) -> Tensor:
        return x.unflatten(1, layout.state[stage]).permute(0, 3, 1, 2).contiguous()

    def call(stage: int, block: nn.Module, last: bool, x: Tensor, layout: Layout) -> Tensor:
        y = _tensor(block(x, *layout.state[stage]))
        if last and stage + 1 < len(stages):
            output = to_map(stage, stages[stage][2](y), layout)
            layout = replace(layout, taps=(*layout.taps, output))
            y = stages[stage + 1][0](output)[0]
        return remember(y, layout)

    def head(x: Tensor, layout: Layout) -> Tensor:
        states = (*layout.taps, to_map(-1, stages[-1][2](x), layout))
        _check_taps(states, len(stages))
        return classifier.pool(model.decode_head(states))

    def spatial(stage: int) -> Callable[[Tensor, Layout], Tensor]:
        return lambda x, layout: x.unflatten(1, layout.state[stage])

    grid = grids(classifier.size)[-1]
    return Plan(
        embed=embedded,
        blocks=[
            {
                "module": block,
                "call": partial(call, index, block, block is blocks[-1]),
                "spatial": spatial(index),
            }
            for index, (_, blocks, _) in enumerate(stages)
            for block in blocks
        ],
        head=head,
        grid=grid,
        prefix=0,
        kind="transformers SegformerForSemanticSegmentation",
        removable=False,
        global_attention=False,
        mixed=True,
        reads_layers=True,
        spatial=spatial(-1),
        **_common(classifier, grid, model.config.num_channels),
    )


def _stages(body: Any) -> list[tuple[Any, Any, Any]]:
    """(patch embedding, blocks, norm) of every stage; older transformers keep them in three lists."""
    if hasattr(body, "stages"):
        return [(stage.patch_embeddings, stage.blocks, stage.layer_norm) for stage in body.stages]
    encoder = body.encoder
    return list(zip(encoder.patch_embeddings, encoder.block, encoder.layer_norm, strict=True))


def _convolved(convolution: Any, size: Size) -> Size:
    """The size of a convolution's output."""
    kernel, stride, padding = convolution.kernel_size, convolution.stride, convolution.padding
    height, width = ((size[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in range(2))
    return height, width


def _check_taps(states: tuple[Tensor, ...], expected: int) -> None:
    if len(states) != expected:
        raise InputError(
            f"the head reads the outputs of {expected} layers, and these tokens remember {len(states)}. Use "
            "tokens that vit.embed or a block returned, not a copy of them"
        )


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]
