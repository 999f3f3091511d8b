"""A segmentation model from any vision transformer: the linear decoder of Strudel et al. 2021 ("Segmenter").

| symbol | variable |
| --- | --- |
| z, patch tokens of the last block after the final norm | `tokens` |
| W z + b, one score for each class and patch | `decoder` |
| bilinear upsampling to the size of the image | `forward` |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import BadInput, UnsupportedModel
from steadygaze.vit import ViT, adapt
from steadygaze.vit.view import evaluation_mode


class Segmenter(nn.Module):
    """images (B, 3, H, W) -> class scores of each pixel (B, classes, H, W). Created by `segmenter`.

    backbone: the classifier, with its inserted modules; its own head is kept but not used.
    """

    def __init__(self, backbone: nn.Module, norm: str, width: int, classes: int) -> None:
        super().__init__()
        self.backbone, self.norm, self.classes = backbone, norm, classes
        self.decoder = nn.Linear(width, classes)

    def tokens(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b gh gw d"]:
        """Patch tokens of the last block after the final norm, on their grid."""
        vit = adapt(self.backbone)  # cached by adapt; an attribute would still run the original in a copy
        x = vit.embed(images)
        for block in vit.blocks:
            x = block(x)
        z = vit.patches(len(vit.blocks), x, vit.layout(x))
        return self.backbone.get_submodule(self.norm)(z) if self.norm else z

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b classes h w"]:
        scores = self.decoder(self.tokens(images)).permute(0, 3, 1, 2)
        return F.interpolate(scores, size=images.shape[-2:], mode="bilinear", align_corners=False)

    def no_weight_decay(self) -> set[str]:
        """Parameters of the backbone without weight decay: position embedding and class token."""
        own = getattr(self.backbone, "no_weight_decay", None)
        return {f"backbone.{name}" for name in own()} if callable(own) else set()


def segmenter(model: nn.Module, classes: int) -> Segmenter:
    """A segmentation model with `classes` classes around this classifier (the module itself, not a copy).

    The decoder is initialised by torch with its global random state. Any model that `adapt` supports can be
    used.
    """
    if isinstance(classes, bool) or not isinstance(classes, int) or not 2 <= classes <= 255:
        raise BadInput(f"classes: expected an integer from 2 to 255, got {classes!r}")
    if isinstance(model, ViT | Segmenter):
        raise BadInput(f"model: expected a classifier, a torch.nn.Module, got a {type(model).__name__}")
    vit = adapt(model)
    norm, z = _final_norm(vit)
    segmentation_model = Segmenter(model, norm, z.shape[-1], classes)
    segmentation_model.decoder.to(z.device, z.dtype)
    return segmentation_model.train(model.training)


def _final_norm(vit: ViT) -> tuple[str, Tensor]:
    """(name of the final norm, patch tokens of the last block); the name is "" where no norm fits the width.

    It is the first norm that the head calls, found by running the head once: libraries place it
    differently, and models that average their patches normalise the mean.
    """
    names = {
        m: name
        for name, m in vit.model.named_modules()
        if "norm" in type(m).__name__.lower() and not list(m.children())
    }
    called: list[str] = []
    handles = [m.register_forward_hook(lambda m, given, out: called.append(names[m])) for m in names]
    parameter = next(vit.model.parameters())
    images = torch.zeros(1, *vit.plan.input_size, device=parameter.device, dtype=parameter.dtype)
    try:
        with torch.no_grad(), evaluation_mode(vit.model):
            x = vit.embed(images)
            for block in vit.blocks:
                x = block(x)
            called.clear()
            vit.head(x)
            z = vit.patches(len(vit.blocks), x, vit.layout(x))
    finally:
        for handle in handles:
            handle.remove()
    if z.dim() != 4:
        raise UnsupportedModel(
            f"segmenter: expected patch tokens of a {vit.plan.kind} on a grid, got {tuple(z.shape)}"
        )
    norm = called[0] if called else ""
    weight = getattr(vit.model.get_submodule(norm), "weight", None)
    fits = norm and (weight is None or weight.shape == z.shape[-1:])
    return (norm if fits else ""), z
