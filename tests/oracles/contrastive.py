"""LeGrad and Grad-ECLIP from their formulas, one image, one query and one key at a time.

    legrad      sum_l mean_h mean_i relu(ds^l/dA^l_hij), s^l = T(head(norm(mean of tokens behind block l)))
    grad_eclip  relu(sum_i lambda_ij sum_c w_ic v_jc), w = dT/dz of the rows i that feed the head,
                z = A v of all heads, lambda_ij = minmax over patches j of cos(q_i, k_j), of all heads

`project`: q and k behind the output projection and LayerScale. Maps of single layers: the same at block l.
"""

from typing import Any

import torch
from torch import Tensor

from . import vit
from .vit import Model


def own_score(model: Model, z: Tensor, target: Tensor, score: str, how: vit.Rule) -> Tensor:
    """s^l of tokens z (B,N,d): what the head says of their mean."""
    x = sum(z[:, i] for i in range(z.shape[1])) / z.shape[1]
    for norm in (model.norm, model.fc_norm):
        state = vit.optional_norm(x, norm, how)
        x = state.out if state else x
    logits = x @ vit.weight(model.head.weight).T + vit.bias(model.head)
    return vit.quantity(logits, target, score).sum()


def legrad(
    model: Model,
    images: Tensor,
    target: Tensor,
    *,
    layers: int = 0,
    score: str = "logit",
    freeze: float | None = None,
) -> Tensor:
    how = vit.rule(freeze)
    state, _ = vit.trace(model, images, target, freeze=freeze)
    depth = len(model.blocks)
    total = torch.zeros(len(images), state.x[0].shape[1], dtype=torch.float64)
    for layer in range(depth - layers if layers else 0, depth):
        s = own_score(model, state.x[layer + 1], target, score, how)
        (G,) = vit.gradients(s, [state.at(layer).A])
        _, H, N, _ = G.shape
        for h in range(H):
            for i in range(N):
                total = total + G[:, h, i].clamp(min=0) / (H * N)
    return vit.patches_of(model, total)


def all_heads(x: Tensor) -> Tensor:
    """(B,H,N,e) -> (B,N,H e)."""
    return torch.cat([x[:, h] for h in range(x.shape[1])], dim=-1).detach()


def key_weights(q: Tensor, k: list[Tensor]) -> list[Tensor]:
    """minmax over the keys of cos(q, k_j)."""
    cosines = [(q @ key) / (q.norm() * key.norm()) for key in k]
    low, high = min(cosines), max(cosines)
    return [(c - low) / (high - low) for c in cosines]


def grad_eclip_layers(
    model: Model, images: Tensor, target: Tensor, *, keys: bool = True, project: bool = False, **how: Any
) -> list[Tensor]:
    state, scalar = vit.trace(model, images, target, **how)
    weights = vit.gradients(scalar, [block.z for block in state.blocks])
    prefix, maps = model.num_prefix_tokens, []
    for module, block, w in zip(model.blocks, state.blocks, weights, strict=True):
        q, k, v = all_heads(block.q), all_heads(block.k), all_heads(block.v)
        if project:
            matrix, offset = vit.weight(module.attn.proj.weight), vit.bias(module.attn.proj)
            scale = vit.gain(module.ls1, matrix.shape[0])
            q, k = (scale * (t @ matrix.T + offset) for t in (q, k))
        scores = torch.zeros(len(images), v.shape[1] - prefix, dtype=torch.float64)
        for b in range(len(images)):
            patches = list(range(prefix, v.shape[1]))
            for i in vit.reads(model):
                weight = key_weights(q[b, i], [k[b, j] for j in patches]) if keys else [1.0] * len(patches)
                for n, j in enumerate(patches):
                    scores[b, n] += weight[n] * (w[b, i] @ v[b, j])
        maps.append(scores.clamp(min=0))
    return maps


def grad_eclip(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Last block."""
    return grad_eclip_layers(model, images, target, **options)[-1]
