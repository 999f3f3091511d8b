"""The CAM family on the patches of one layer. a, g (B,P,d): activations and gradients without prefix tokens.

    gradcam              w_k = mean_p g_pk                                   map_p = sum_k w_k a_pk
    xgradcam             w_k = sum_p g_pk a_pk / (sum_p a_pk + 1e-7)         map_p = sum_k w_k a_pk
    xgradcam_plus        w_k = sum_p g_pk |a_pk| / (sum_p |a_pk| + 1e-7)     map_p = sum_k w_k a_pk
    gradcam_plus_plus    alpha = g^2 / (2 g^2 + (sum_p a_pk) g^3 + 1e-6), 0 where g = 0; w_k = sum_p
                         relu(g_pk) alpha_pk
    hirescam             map_p = sum_k g_pk a_pk
    elementwise_gradcam  map_p = sum_k relu(g_pk a_pk)
    layercam             map_p = sum_k relu(g_pk) a_pk

`at="input"`: x^l, the input of block l (before norm_pre for l = 0); `at="norm1"`: the output of
blocks[l].norm1. The bare name is the last block. `relu=True` clamps the finished map. No min-max, no
resizing. Signed (B,P).
"""

from typing import Any

import torch
from torch import Tensor

from . import vit
from .vit import Model

Pairs = list[tuple[Tensor, Tensor]]


def pairs(model: Model, images: Tensor, target: Tensor, at: str, **how: Any) -> Pairs:
    """(a, g) for every block."""
    state, scalar = vit.trace(model, images, target, **how)
    if at == "input":
        activations = state.x[:-1]
    elif at == "norm1":
        activations = [block.norm1.out for block in state.blocks]
    else:
        raise ValueError(f"unknown value of at: {at!r}")
    return [
        (vit.patches_of(model, a).detach(), vit.patches_of(model, g))
        for a, g in zip(activations, vit.gradients(scalar, activations), strict=True)
    ]


def weighted(a: Tensor, w: Tensor) -> Tensor:
    """sum_k w_k a_pk."""
    return (w[:, None, :] * a).sum(-1)


def gradcam_map(a: Tensor, g: Tensor) -> Tensor:
    return weighted(a, g.mean(1))


def xgradcam_map(a: Tensor, g: Tensor) -> Tensor:
    return weighted(a, (g * a).sum(1) / (a.sum(1) + 1e-7))


def xgradcam_plus_map(a: Tensor, g: Tensor) -> Tensor:
    return weighted(a, (g * a.abs()).sum(1) / (a.abs().sum(1) + 1e-7))


def gradcam_plus_plus_map(a: Tensor, g: Tensor) -> Tensor:
    alpha = g**2 / (2 * g**2 + a.sum(1, keepdim=True) * g**3 + 1e-6)
    alpha = torch.where(g == 0, torch.zeros_like(g), alpha)
    return weighted(a, (g.clamp(min=0) * alpha).sum(1))


def hirescam_map(a: Tensor, g: Tensor) -> Tensor:
    return (g * a).sum(-1)


def elementwise_gradcam_map(a: Tensor, g: Tensor) -> Tensor:
    return (g * a).clamp(min=0).sum(-1)


def layercam_map(a: Tensor, g: Tensor) -> Tensor:
    return (g.clamp(min=0) * a).sum(-1)


MAPS = {
    "gradcam": gradcam_map,
    "xgradcam": xgradcam_map,
    "xgradcam_plus": xgradcam_plus_map,
    "gradcam_plus_plus": gradcam_plus_plus_map,
    "hirescam": hirescam_map,
    "elementwise_gradcam": elementwise_gradcam_map,
    "layercam": layercam_map,
}


def cam_layers(
    name: str,
    model: Model,
    images: Tensor,
    target: Tensor,
    *,
    at: str = "input",
    relu: bool = False,
    **how: Any,
) -> list[Tensor]:
    """One map for every block."""
    maps = [MAPS[name](a, g) for a, g in pairs(model, images, target, at, **how)]
    return [m.clamp(min=0) for m in maps] if relu else maps


def gradcam_layers(model: Model, images: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    return cam_layers("gradcam", model, images, target, **options)


def gradcam(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    return gradcam_layers(model, images, target, **options)[-1]


def xgradcam_layers(model: Model, images: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    return cam_layers("xgradcam", model, images, target, **options)


def xgradcam(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    return xgradcam_layers(model, images, target, **options)[-1]


def xgradcam_plus_layers(model: Model, images: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    return cam_layers("xgradcam_plus", model, images, target, **options)


def xgradcam_plus(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    return xgradcam_plus_layers(model, images, target, **options)[-1]


def gradcam_plus_plus_layers(model: Model, images: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    return cam_layers("gradcam_plus_plus", model, images, target, **options)


def gradcam_plus_plus(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    return gradcam_plus_plus_layers(model, images, target, **options)[-1]


def hirescam_layers(model: Model, images: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    return cam_layers("hirescam", model, images, target, **options)


def hirescam(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    return hirescam_layers(model, images, target, **options)[-1]


def elementwise_gradcam_layers(model: Model, images: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    return cam_layers("elementwise_gradcam", model, images, target, **options)


def elementwise_gradcam(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    return elementwise_gradcam_layers(model, images, target, **options)[-1]


def layercam_layers(
    model: Model, images: Tensor, target: Tensor, *, normalize: bool = False, **options: Any
) -> list[Tensor]:
    """`normalize=True`: each image's map of each layer divided by its maximum (not where that is <= 0)."""
    maps = cam_layers("layercam", model, images, target, **options)
    if not normalize:
        return maps
    tops = [m.amax(dim=1, keepdim=True) for m in maps]
    return [torch.where(top > 0, m / top, m) for m, top in zip(maps, tops, strict=True)]


def layercam(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    return layercam_layers(model, images, target, **options)[-1]


def shapley_cam(
    model: Model,
    images: Tensor,
    target: Tensor,
    *,
    at: str = "auto",
    weights: str = "tokens",
    score: str = "logit",
) -> Tensor:
    """a . (g - H a / 2) at the last block: the Hessian of each image in full, entry by entry.

    at "norm1" ("auto" for these models): the output of the last block's first norm, as a variable of its own.
    """
    scores = []
    for image, c in zip(images, target, strict=True):
        state = vit.run(model, vit.embed(model, image[None]))
        block, s = model.blocks[-1], state.blocks[-1]
        a = (s.x if at == "input" else s.norm1.out).detach()

        def value(flat: Tensor, a: Tensor = a, s: Any = s, c: Tensor = c, block: Any = block) -> Tensor:
            point = flat.view_as(a)
            if at == "input":
                out = vit.run_block(block, point, vit.Rule()).out
            else:
                out = vit.run_block(block, s.x.detach(), vit.Rule(), point).out
            return vit.quantity(vit.head_of(model, out), c[None], score).sum()

        g = torch.autograd.functional.jacobian(value, a.flatten())
        H = torch.autograd.functional.hessian(value, a.flatten())
        w = (g - H @ a.flatten() / 2).view_as(a)
        a, w = (t[:, model.num_prefix_tokens :] for t in (a, w))
        products = a * (w.mean(1, keepdim=True) if weights == "channels" else w)
        scores.append((products.relu() if weights == "positive" else products).sum(-1)[0])
    return torch.stack(scores)
