"""A segmentation model from any vision transformer, with one of two decoders.

linear: Strudel et al. 2021 ("Segmenter")

| symbol | variable |
| --- | --- |
| z, patch tokens of the last block after the final norm | `tokens` |
| W z + b, one score for each class and patch | `decoder` |

segformer: the all-MLP decoder of Xie et al. 2021 ("SegFormer"), docs/equations.md#segformer-decoder

| symbol | variable |
| --- | --- |
| F_i, patch tokens of several blocks: the last of each stage, or four of a plain ViT | `maps` |
| Linear(d_i, C)(F_i), upsampled to the finest grid | `project` |
| ReLU(BN(Linear(4C, C)(concat))) | `fuse` |
| Linear(C, classes) | `predict` |

Both: bilinear upsampling to the size of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import InputError, UnknownNameError, UnsupportedModelError
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.view import ViT, blank_image

Decoder = Literal["linear", "segformer"]
LEVELS = 4  # hidden states that the SegFormer decoder reads of a ViT with one grid
WIDTH = 256  # C of the SegFormer decoder, as in SegFormer-B0 and -B1
DROPOUT = 0.1


class SegFormerDecoder(nn.Module):
    """Patch tokens of several blocks -> class scores of each cell of the finest grid.

    The blocks of a ViT are not followed by a norm, as SegFormer's stages are: each map has one here.

    Examples:
        >>> decoder = SegFormerDecoder([8, 8], classes=5)
        >>> sum(p.numel() for p in decoder.parameters()) > 0
        True
    """

    def __init__(self, widths: Sequence[int], classes: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(d) for d in widths)
        self.project = nn.ModuleList(nn.Linear(d, WIDTH) for d in widths)
        self.fuse = nn.Sequential(
            nn.Conv2d(WIDTH * len(widths), WIDTH, 1, bias=False), nn.BatchNorm2d(WIDTH), nn.ReLU()
        )
        self.dropout = nn.Dropout2d(DROPOUT)
        self.predict = nn.Conv2d(WIDTH, classes, 1)

    def forward(self, maps: Sequence[Float[Tensor, "b _ _ _"]]) -> Float[Tensor, "b classes h w"]:
        size = max((z.shape[1], z.shape[2]) for z in maps)
        parts = []
        for norm, project, z in zip(self.norms, self.project, maps, strict=True):
            part = project(norm(z)).permute(0, 3, 1, 2)
            same = tuple(part.shape[-2:]) == size
            parts.append(
                part if same else F.interpolate(part, size=size, mode="bilinear", align_corners=False)
            )
        return self.predict(self.dropout(self.fuse(torch.cat(parts, 1))))


class Segmenter(nn.Module):
    """images (B, 3, H, W) -> class scores of each pixel (B, classes, H, W). Created by `segmenter`.

    Attributes:
        backbone: The classifier, with its inserted modules; its own head is kept but not used.
        layers: The hidden states that the SegFormer decoder reads, x^l; L is the output of the last block.

    Examples:
        >>> import steadygaze as sg
        >>> model = sg.modules.segmenter(sg.load_model("embedded").model, classes=2)
        >>> type(model).__name__
        'Segmenter'
    """

    def __init__(
        self, backbone: nn.Module, norm: str, classes: int, decoder: nn.Module, layers: Sequence[int] = ()
    ) -> None:
        super().__init__()
        self.backbone, self.norm, self.classes, self.layers = backbone, norm, classes, tuple(layers)
        self.decoder = decoder

    @property
    def decoder_name(self) -> Decoder:
        return "segformer" if isinstance(self.decoder, SegFormerDecoder) else "linear"

    def maps(self, images: Float[Tensor, "b 3 h w"], layers: Sequence[int]) -> list[Float[Tensor, "b _ _ _"]]:
        """Patch tokens of these hidden states, each on its grid."""
        vit = adapt(self.backbone)  # cached by adapt; an attribute would still run the original in a copy
        return hidden_maps(vit, vit.embed(images), layers)

    def tokens(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b gh gw d"]:
        """Patch tokens of the last block after the final norm, on their grid."""
        (z,) = self.maps(images, (len(adapt(self.backbone).blocks),))
        return self.backbone.get_submodule(self.norm)(z) if self.norm else z

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b classes h w"]:
        if isinstance(self.decoder, SegFormerDecoder):
            scores = self.decoder(self.maps(images, self.layers))
        else:
            scores = self.decoder(self.tokens(images)).permute(0, 3, 1, 2)
        return F.interpolate(scores, size=images.shape[-2:], mode="bilinear", align_corners=False)

    def no_weight_decay(self) -> set[str]:
        """Parameters of the backbone without weight decay: position embedding and class token."""
        own = getattr(self.backbone, "no_weight_decay", None)
        return {f"backbone.{name}" for name in own()} if callable(own) else set()


def segmenter(model: nn.Module, classes: int, decoder: Decoder = "linear") -> Segmenter:
    """A segmentation model with `classes` classes around this classifier (the module itself, not a copy).

    The decoder is initialized by torch with its global random state.

    Args:
        model: Any classifier that `adapt` supports.
        classes: Number of classes, 2..255.
        decoder: "linear", one linear layer on the last block; "segformer", the all-MLP decoder on several
            blocks.

    Returns:
        images (B, 3, H, W) -> class scores of each pixel (B, classes, H, W).

    Raises:
        InputError: The model is not a classifier, or the number of classes is out of range.
        UnsupportedModelError: The patch tokens do not lie on a grid.

    Examples:
        >>> import steadygaze as sg
        >>> segmenter(sg.load_model("embedded").model, classes=5)(torch.randn(1, 3, 32, 32)).shape
        torch.Size([1, 5, 32, 32])
    """
    if isinstance(classes, bool) or not isinstance(classes, int) or not 2 <= classes <= 255:
        raise InputError(f"classes: expected an integer from 2 to 255, got {classes!r}")
    if decoder not in get_args(Decoder):
        raise UnknownNameError("decoder", str(decoder), get_args(Decoder))
    if isinstance(model, ViT | Segmenter):
        raise InputError(f"model: expected a classifier, a torch.nn.Module, got a {type(model).__name__}")
    vit = adapt(model)
    norm, z = _final_norm(vit)
    layers: tuple[int, ...] = ()
    if decoder == "linear":
        layer: nn.Module = nn.Linear(z.shape[-1], classes)
    else:
        layers, widths = _levels(vit)
        layer = SegFormerDecoder(widths, classes)
    return Segmenter(model, norm, classes, layer.to(z.device, z.dtype), layers).train(model.training)


def hidden_maps(vit: ViT, x: Tensor, layers: Sequence[int]) -> list[Float[Tensor, "b _ _ _"]]:
    """Patch tokens of the hidden states x^l, l in `layers`, each on its grid."""
    maps = []
    for l, block in enumerate(vit.blocks):
        if l in layers:
            maps.append(vit.patches(l, x, vit.layout(x)))
        x = block(x)
    if len(vit.blocks) in layers:
        maps.append(vit.patches(len(vit.blocks), x, vit.layout(x)))
    return maps


def _levels(vit: ViT) -> tuple[tuple[int, ...], list[int]]:
    """(hidden states that the SegFormer decoder reads, their widths).

    The last state on each grid, or with one grid four at equal distances, fewer if there are fewer blocks.
    """
    depth = len(vit.blocks)
    with torch.no_grad(), evaluation_mode(vit.model):
        shapes = [z.shape[1:] for z in hidden_maps(vit, vit.embed(blank_image(vit)), range(depth + 1))]
    last = [l for l in range(1, depth + 1) if l == depth or shapes[l + 1] != shapes[l]]
    if len(last) == 1:
        last = sorted({round(depth * i / LEVELS) for i in range(1, LEVELS + 1)} - {0})
    return tuple(last), [shapes[l][-1] for l in last]


def _final_norm(vit: ViT) -> tuple[str, Tensor]:
    """(name of the final norm, patch tokens of the last block); the name is "" where no norm fits the width.

    It is the first norm that the head calls, found by running the head once: libraries place it
    differently, and models that average their patches normalize the mean.
    """
    names = {
        m: name
        for name, m in vit.model.named_modules()
        if "norm" in type(m).__name__.lower() and not list(m.children())
    }
    called: list[str] = []
    handles = [m.register_forward_hook(lambda m, given, out: called.append(names[m])) for m in names]
    try:
        with torch.no_grad(), evaluation_mode(vit.model):
            x = vit.embed(blank_image(vit))
            for block in vit.blocks:
                x = block(x)
            called.clear()
            vit.head(x)
            z = vit.patches(len(vit.blocks), x, vit.layout(x))
    finally:
        for handle in handles:
            handle.remove()
    if z.dim() != 4:
        raise UnsupportedModelError(
            f"segmenter: expected patch tokens of a {vit.plan.kind} on a grid, got {tuple(z.shape)}"
        )
    norm = called[0] if called else ""
    weight = getattr(vit.model.get_submodule(norm), "weight", None)
    fits = norm and (weight is None or weight.shape == z.shape[-1:])
    return (norm if fits else ""), z
