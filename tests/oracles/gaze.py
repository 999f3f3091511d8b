"""The frozen-linear network by explicit `.detach()`, and `gaze`: its input x gradient, summed over layers.

    A' = alpha sg(A) + (1 - alpha) A,   sigma' = sg(sigma) (means not frozen; every norm, qk-norm and final
                                        norm too),
    GELU' = h sg(Phi(h)),               s_j = sum_l <x^l_j, dT/dx^l_j>,  l = 0..L-1
    gaze: alpha = 3/4, T = log-odds.    alpha = 1, T = logit, one l: bias-free DecompX from layer l

    gaze_removal: sum_l s^l / L + q^l, q^l_j = sum_h sum_{i != j} dT/dS^l_hij, attention not frozen there:
    what T loses with the weight of key j; and for the last l, <x^L_j - mean of x^L over patches,
    dT/dx^L_j>: the same where the head reads patches

`freeze` is alpha; `slope="tangent"` leaves GELU's own derivative. Signed (B,P); no smoothing, no clamping.
"""

import torch
from torch import Tensor

from . import vit
from .vit import Model


def gaze_layers(
    model: Model,
    images: Tensor,
    target: Tensor,
    *,
    score: str = "log_odds",
    freeze: float = 0.75,
    slope: str = "origin",
) -> list[Tensor]:
    state, scalar = vit.trace(model, images, target, score=score, freeze=freeze, slope=slope)
    grads = vit.gradients(scalar, state.x[:-1])
    return [vit.patches_of(model, (x * g).sum(-1)).detach() for x, g in zip(state.x, grads, strict=False)]


def gaze(
    model: Model,
    images: Tensor,
    target: Tensor,
    *,
    score: str = "log_odds",
    freeze: float = 0.75,
    slope: str = "origin",
) -> Tensor:
    return torch.stack(gaze_layers(model, images, target, score=score, freeze=freeze, slope=slope)).sum(0)


def gaze_removal_layers(
    model: Model,
    images: Tensor,
    target: Tensor,
    *,
    score: str = "log_odds",
    freeze: float = 0.75,
    slope: str = "origin",
) -> list[Tensor]:
    state, scalar = vit.trace(model, images, target, score=score, freeze=freeze, slope=slope)
    maps = gaze_layers(model, images, target, score=score, freeze=freeze, slope=slope)
    maps = [m / len(maps) for m in maps]
    grads = vit.gradients(scalar, [block.A for block in state.blocks])
    for l, (block, by_attention) in enumerate(zip(state.blocks, grads, strict=True)):
        logits = (
            block.S.detach().requires_grad_()
        )  # the softmax by itself, so that attention may be frozen wholly
        (g,) = torch.autograd.grad(logits.softmax(-1), logits, by_attention)
        for j in range(g.shape[-1] - model.num_prefix_tokens):
            key = model.num_prefix_tokens + j
            others = [i for i in range(g.shape[-1]) if i != key]
            maps[l][:, j] += g[:, :, others, key].sum(dim=(1, 2))
    (g,) = vit.gradients(scalar, state.x[-1:])
    x, g = vit.patches_of(model, state.x[-1]), vit.patches_of(model, g)
    maps[-1] += ((x - x.mean(1, keepdim=True)) * g).sum(-1).detach()
    return maps


def gaze_removal(
    model: Model,
    images: Tensor,
    target: Tensor,
    *,
    score: str = "log_odds",
    freeze: float = 0.75,
    slope: str = "origin",
) -> Tensor:
    return torch.stack(
        gaze_removal_layers(model, images, target, score=score, freeze=freeze, slope=slope)
    ).sum(0)
