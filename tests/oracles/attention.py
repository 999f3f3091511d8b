"""Attention methods from their formulas. G^l = dT/dA^l, A-bar^l = mean_h relu(G^l A^l), I the identity.

    raw_attention    mean_h A^(L-1)                                  rollout   prod_l (0.5 mean_h A^l + 0.5 I)
    attn_grad^l      mean_h G^l, signed                              genatt    R <- R + A-bar^l R from R = I
    attcam^l_ij      mean_h w_hi A_hij, w_hi = mean over patch columns j of G_hij, signed
    gradsam          sum_l A-bar^l (= genatt+plus)

Each matrix is read at the class row, or, for averaged heads, at the mean of the averaged rows; patch
columns only. `freeze`: G is the gradient with respect to A' = alpha sg(A) + (1 - alpha) A, the tensor that
multiplies v.
"""

from typing import Any

import torch
from torch import Tensor

from . import vit
from .vit import Model


def attentions(model: Model, images: Tensor, target: Tensor, **how: Any) -> tuple[list[Tensor], list[Tensor]]:
    """A^l and G^l for every block, each (B,H,N,N)."""
    state, scalar = vit.trace(model, images, target, **how)
    A = [block.A for block in state.blocks]
    return [a.detach() for a in A], vit.gradients(scalar, A)


def identity(like: Tensor) -> Tensor:
    return torch.eye(like.shape[-1], dtype=torch.float64).expand(like.shape[0], -1, -1)


def product(matrices: list[Tensor]) -> Tensor:
    """R <- M^l R in forward order, from R = I."""
    R = identity(matrices[0])
    for M in matrices:
        R = M @ R
    return R


def plus_identity(matrices: list[Tensor]) -> Tensor:
    """R <- R + M^l R in forward order, from R = I."""
    R = identity(matrices[0])
    for M in matrices:
        R = R + M @ R
    return R


def raw_attention_layers(model: Model, images: Tensor, target: Tensor, **how: Any) -> list[Tensor]:
    A, _ = attentions(model, images, target, **how)
    return [vit.read(model, a.mean(1)) for a in A]


def raw_attention(model: Model, images: Tensor, target: Tensor, **how: Any) -> Tensor:
    return raw_attention_layers(model, images, target, **how)[-1]


def rollout_matrices(model: Model, images: Tensor, target: Tensor, **how: Any) -> list[Tensor]:
    """0.5 mean_h A^l + 0.5 I: rows sum to one."""
    A, _ = attentions(model, images, target, **how)
    return [0.5 * a.mean(1) + 0.5 * identity(a) for a in A]


def rollout(model: Model, images: Tensor, target: Tensor, **how: Any) -> Tensor:
    return vit.read(model, product(rollout_matrices(model, images, target, **how)))


def attn_grad_layers(model: Model, images: Tensor, target: Tensor, **how: Any) -> list[Tensor]:
    _, G = attentions(model, images, target, **how)
    return [vit.read(model, g.mean(1)) for g in G]


def attn_grad(model: Model, images: Tensor, target: Tensor, **how: Any) -> Tensor:
    """Block 0."""
    return attn_grad_layers(model, images, target, **how)[0]


def attcam_layers(
    model: Model, images: Tensor, target: Tensor, *, relu: bool = False, **how: Any
) -> list[Tensor]:
    """For averaged heads each row has its own weight w_hi; then the mean of the rows, then relu."""
    maps = []
    for a, g in zip(*attentions(model, images, target, **how), strict=True):
        w = g[..., model.num_prefix_tokens :].mean(dim=-1, keepdim=True)
        maps.append(vit.read(model, (w * a).mean(1)))
    return [m.clamp(min=0) for m in maps] if relu else maps


def attcam(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Last block; signed unless `relu=True`, which is Chefer's form without its min-max."""
    return attcam_layers(model, images, target, **options)[-1]


def genatt_matrices(model: Model, images: Tensor, target: Tensor, **how: Any) -> list[Tensor]:
    """mean_h relu(G A): the clamp is per head, before the mean."""
    return [
        (a * g).clamp(min=0).mean(1) for a, g in zip(*attentions(model, images, target, **how), strict=True)
    ]


def genatt(model: Model, images: Tensor, target: Tensor, **how: Any) -> Tensor:
    return vit.read(model, plus_identity(genatt_matrices(model, images, target, **how)))


def gradsam_matrices(model: Model, images: Tensor, target: Tensor, **how: Any) -> list[Tensor]:
    return genatt_matrices(model, images, target, **how)


def gradsam(model: Model, images: Tensor, target: Tensor, **how: Any) -> Tensor:
    return vit.read(model, torch.stack(gradsam_matrices(model, images, target, **how)).sum(0))


def tokentm_matrices(model: Model, images: Tensor, target: Tensor, **how: Any) -> list[Tensor]:
    """(I + W_mlp) (I + (mean A W_att) . mean relu(dT/dA)) of every block; block 0 times diag |x^0_j|.

    W(a, b) = diag(|b_j| / |a_j| softmax_j cos(a_j, b_j)) over all tokens, token by token.
    """
    state, scalar = vit.trace(model, images, target, **how)
    grads = vit.gradients(scalar, [s.A for s in state.blocks])

    def weights(a: Tensor, b: Tensor) -> Tensor:
        B, N, _ = a.shape
        W = torch.zeros(B, N, N, dtype=torch.float64)
        for n in range(B):
            length = [
                (float((a[n, j] ** 2).sum()) ** 0.5, float((b[n, j] ** 2).sum()) ** 0.5) for j in range(N)
            ]
            cosine = [float((a[n, j] * b[n, j]).sum()) / (length[j][0] * length[j][1]) for j in range(N)]
            share = vit.softmax(torch.tensor(cosine, dtype=torch.float64))
            for j in range(N):
                W[n, j, j] = length[j][1] / length[j][0] * share[j]
        return W

    matrices = []
    for layer, (s, G) in enumerate(zip(state.blocks, grads, strict=True)):
        one = identity(s.A.mean(1))
        x, middle, out, A = s.x.detach(), s.x_mid.detach(), s.out.detach(), s.A.detach()
        attended = one + (A.mean(1) @ weights(x, middle)) * G.clamp(min=0).mean(1)
        U = (one + weights(middle, out)) @ attended
        matrices.append(U @ torch.diag_embed((x**2).sum(-1).sqrt()) if layer == 0 else U)
    return matrices


def tokentm(model: Model, images: Tensor, target: Tensor, **how: Any) -> Tensor:
    return vit.read(model, product(tokentm_matrices(model, images, target, **how)))


def beyond_intuition(
    model: Model,
    images: Tensor,
    target: Tensor,
    *,
    form: str = "head",
    steps: int = 20,
    first: int = 0,
    **how: Any,
) -> Tensor:
    """sum_i w_i F_ij P_ij; P <- P + O P, F = mean_h relu(mean of dT/dA^(L-1) over scaled images)."""
    A, G = attentions(model, images, target, **how)
    state = vit.trace(model, images, target, **how)[0]
    P = identity(A[0])
    for layer in range(first, len(A)):
        O = torch.zeros_like(P)
        for b in range(len(P)):
            heads = range(A[layer].shape[1])
            if form == "head":
                size = [(A[layer][b, h].T @ G[layer][b, h]).abs().mean() for h in heads]
                O[b] = sum(size[h] / sum(size) * A[layer][b, h] for h in heads)
                continue
            block, own = model.blocks[layer], state.at(layer)
            W = vit.gain(block.ls1, own.x.shape[-1])[:, None] * vit.weight(block.attn.proj.weight)
            for j in range(P.shape[-1]):
                v = torch.cat([own.v[b, h, j] for h in heads])
                O[b, :, j] = A[layer][b, :, :, j].mean(0) * (W @ v).norm() / own.x[b, j].norm()
        P = P + O @ P
    F = sum(attentions(model, images * k / steps, target, **how)[1][-1] for k in range(1, steps + 1)) / steps
    return vit.read(model, F.clamp(min=0).mean(1) * P.detach())


def beyond_intuition_token(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    return beyond_intuition(model, images, target, **{"form": "token", **options})
