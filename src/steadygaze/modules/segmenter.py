"""A segmenter made of any vision transformer: the linear decoder of Strudel et al. 2021, "Segmenter", which DINO's probes use too.

| symbol | variable |
| --- | --- |
| z, patch tokens of the last block behind the final norm | `tokens` |
| W z + b, one score for each class and patch | `decoder` |
| bilinear, to the picture | `forward` |
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
    """images (B, 3, H, W) -> scores of each class for each pixel, (B, classes, H, W). Made by `segmenter`.

    backbone: the classifier it is made of, with inserted modules if it has any; its own head is kept, and not used.
    """

    def __init__(self, backbone: nn.Module, norm: str, width: int, classes: int) -> None:
        super().__init__()
        self.backbone, self.norm, self.classes = backbone, norm, classes
        self.decoder = nn.Linear(width, classes)

    def tokens(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b gh gw d"]:
        """Patches of the last block, behind the final norm, where they lie."""
        vit = adapt(
            self.backbone
        )  # cached; not kept here, for a copy of this module must not run the old one
        x = vit.embed(images)
        for block in vit.blocks:
            x = block(x)
        z = vit.patches(len(vit.blocks), x, vit.layout(x))
        return self.backbone.get_submodule(self.norm)(z) if self.norm else z

    def forward(self, images: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b classes h w"]:
        scores = self.decoder(self.tokens(images)).permute(0, 3, 1, 2)
        return F.interpolate(scores, size=images.shape[-2:], mode="bilinear", align_corners=False)

    def no_weight_decay(self) -> set[str]:
        """What timm's optimisers leave alone in the backbone: positions and the class token."""
        own = getattr(self.backbone, "no_weight_decay", None)
        return {f"backbone.{name}" for name in own()} if callable(own) else set()


def segmenter(model: nn.Module, classes: int) -> Segmenter:
    """A segmenter of so many classes with this classifier inside (the very module, not a copy).

    The decoder's weights come from torch's own initialisation and random state. Any model that `adapt` views will do.
    """
    if isinstance(classes, bool) or not isinstance(classes, int) or not 2 <= classes <= 255:
        raise BadInput(f"classes: expected a whole number from 2 to 255, got {classes!r}")
    if isinstance(model, ViT | Segmenter):
        raise BadInput(f"model: expected a classifier, a torch.nn.Module, got a {type(model).__name__}")
    vit = adapt(model)
    norm, z = _final_norm(vit)
    made = Segmenter(model, norm, z.shape[-1], classes)
    made.decoder.to(z.device, z.dtype)
    return made.train(model.training)


def _final_norm(vit: ViT) -> tuple[str, Tensor]:
    """The name of the first norm that the head calls, and patches of the last block; "" where the head has none for their width.

    Found by running the head once: each library puts it elsewhere, and models that average their patches norm the mean.
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
            f"segmenter: expected patches of a {vit.plan.kind} as a picture, got {tuple(z.shape)}"
        )
    norm = called[0] if called else ""
    weight = getattr(vit.model.get_submodule(norm), "weight", None)
    fits = norm and (weight is None or weight.shape == z.shape[-1:])
    return (norm if fits else ""), z
