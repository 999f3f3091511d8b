"""The frozen-linear network by explicit `.detach()`, and `gaze`, which is input x gradient of it, summed over layers.

    A' = alpha sg(A) + (1 - alpha) A,   sigma' = sg(sigma) (means not frozen; every norm, qk-norm and final norm too),
    GELU' = h sg(Phi(h)),               s_j = sum_l <x^l_j, dT/dx^l_j>,  l = 0..L-1
    gaze: alpha = 3/4, T = log-odds.    alpha = 1, T = logit, one l: bias-free DecompX from layer l

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
