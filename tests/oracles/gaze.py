"""The frozen-linear network by explicit `.detach()`, and `gaze`: its input x gradient, summed over layers.

    A' = alpha sg(A) + (1 - alpha) A,   sigma' = sg(sigma) (means not frozen; every norm, qk-norm and final
                                        norm too),
    GELU' = h sg(Phi(h)),               s_j = sum_l <x^l_j, dT/dx^l_j>,  l = 0..L-1
    gaze: alpha = 3/4, T = log-odds.    alpha = 1, T = logit, one l: bias-free DecompX from layer l

    gaze_removal: sum_l s^l / L + q^l, q^l_j = sum_h sum_{i != j} dT/dS^l_hij, attention not frozen there:
    what T loses with the weight of key j; and for the last l, <x^L_j - mean of x^L over patches,
    dT/dx^L_j>: the same where the head reads patches

    gaze_weighted: sum_l w_l (s^l / L + q^l) + p, w_l = min(1, 8 / a_l)^2, a_l = sum_j |s^l_j| / max(|T|, 1)
    gaze_outline: (e + W e) / 2, e = gaze_weighted of y_c - 0.5 logsumexp of the others, W e with the mean
    subtracted and scaled to the spread of e, W_ij = softmax_j cos(x_i - mean, x_j - mean) / 0.2, x at L / 4

`freeze` is alpha; `slope="tangent"` leaves GELU's own derivative. Signed (B,P); no smoothing, no clamping.
"""

from typing import Any

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
    keys: float = 1.0,
    limit: float | None = None,
    against: float = 1.0,
) -> list[Tensor]:
    """against: 1 is the score itself; a share of it, the rest the logit."""
    state, scalar = vit.trace(model, images, target, score=score, freeze=freeze, slope=slope)
    explained = against * vit.quantity(state.logits, target, score)
    explained = explained + (1 - against) * vit.quantity(state.logits, target, "logit")
    scalar = explained.sum()
    prefix, inputs = model.num_prefix_tokens, state.x[:-1]
    maps = []
    by_x = vit.gradients(scalar, inputs)
    by_attention = vit.gradients(scalar, [block.A for block in state.blocks])
    for x, by_input, block, by_weights in zip(inputs, by_x, state.blocks, by_attention, strict=True):
        sent = vit.patches_of(model, (x * by_input).sum(-1)).detach()
        total = sent / len(inputs)
        # the softmax by itself, so that attention may be frozen wholly
        logits = block.S.detach().requires_grad_()
        (g,) = torch.autograd.grad(logits.softmax(-1), logits, by_weights)
        for j in range(g.shape[-1] - prefix):
            others = [i for i in range(g.shape[-1]) if i != prefix + j]
            total[:, j] += keys * g[:, :, others, prefix + j].sum(dim=(1, 2))
        for image in range(len(images)) if limit is not None else ():
            amplified = float(sent[image].abs().sum()) / max(1.0, abs(explained[image].item()))
            total[image] *= min(1.0, limit / amplified) ** 2
        maps.append(total)
    (g,) = vit.gradients(scalar, state.x[-1:])
    x, g = vit.patches_of(model, state.x[-1]), vit.patches_of(model, g)
    maps[-1] += keys * ((x - x.mean(1, keepdim=True)) * g).sum(-1).detach()
    return maps


def gaze_removal(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    return torch.stack(gaze_removal_layers(model, images, target, **options)).sum(0)


def gaze_weighted(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    return gaze_removal(model, images, target, limit=8.0, **options)


def gaze_outline(
    model: Model,
    images: Tensor,
    target: Tensor,
    *,
    limit: float | None = 8.0,
    keys: float = 1.0,
    first: int = 0,
    against: float = 0.5,
    share: float = 0.5,
    temperature: float = 0.2,
) -> Tensor:
    layers = gaze_removal_layers(model, images, target, limit=limit, against=against, keys=keys)
    effects = torch.stack(layers[first:]).sum(0)
    state, _ = vit.trace(model, images, target, freeze=0.75)
    wanted = []
    for e, tokens in zip(effects, state.x[len(model.blocks) // 4], strict=True):
        x = tokens[model.num_prefix_tokens :].detach()
        x = x - x.mean(0)
        shared = torch.zeros_like(e)
        for i in range(len(e)):
            cosines = torch.stack([x[i] @ y / (x[i].norm() * y.norm()) for y in x])
            shared[i] = ((cosines / temperature).softmax(0) * e).sum()
        shared = (shared - shared.mean()) / shared.std(unbiased=False) * e.std(unbiased=False)
        wanted.append((1 - share) * e + share * shared)
    return torch.stack(wanted)
