"""DecompX in full: every token as a sum of N+1 vectors, one for each source token and one for all biases.

    D (B,N,N+1,d):  x_n = sum_k D_nk at every point of the network
    start at layer l: D_nk = delta_nk x^l_n, D_nN = 0
    norm      D <- gain (D - mean_d D) / sigma_n, then beta as a bias (sigma of the true state)
    linear    D <- W D, then the bias
    attention  D_n <- sum_m A_nm D_m per head;    activation  D <- slope(h) D
    pool, fc_norm, head the same; score_k = sum_c dT/dy_c (W_head D_k)_c, which is (W_head D_k)_target for
    the logit

Where a bias b goes (`bias`): "none" is dropped; "token" goes to source N; the others share it among the N
sources with weights w_k / (sum w + 1e-12), w from the vectors D_k AFTER the step's linear part: "absdot"
|D_k . b|, "norm" |D_k|_2, "equal" 1 where D_k is not zero, "cls" all to source 0 (only with a class token).
Where: beta_1, beta_2, b_fc1, b_fc2 (before LayerScale), final beta, fc_norm beta and the head's (on the
whole C-vector of logits) right after they are added; attention's biases once, as W_o b_v + b_o scaled by
LayerScale, after the residual connection (as the authors' code: rows of A sum to 1, so A b_v = b_v).
`slope`: "origin" Phi(h), no offset; "tangent" f'(h), with f - f'h as one more bias before fc2. Signed;
source N is never drawn.
"""

from typing import Any

import torch
from torch import Tensor

from . import vit
from .vit import Model, NormState


def add_bias(D: Tensor, b: Tensor, rule: str) -> Tensor:
    """D (B,N,K,d), b (d,) or (B,N,d) -> D with the bias given to its sources."""
    b = b.expand(D.shape[0], D.shape[1], D.shape[3])
    tokens = D[:, :, :-1]
    if rule == "none":
        return D
    if rule == "token":
        return torch.cat([tokens, D[:, :, -1:] + b[:, :, None]], dim=2)
    length = (tokens**2).sum(-1).sqrt()
    if rule == "absdot":
        w = (tokens * b[:, :, None]).sum(-1).abs()
    elif rule == "norm":
        w = length
    elif rule == "equal":
        w = (length != 0).double()
    elif rule == "cls":
        w = torch.zeros_like(length)
        w[:, :, 0] = 1
    else:
        raise ValueError(f"unknown bias rule {rule!r}")
    w = w / (w.sum(-1, keepdim=True) + 1e-12)
    return torch.cat([tokens + w[..., None] * b[:, :, None], D[:, :, -1:]], dim=2)


def norm_step(D: Tensor, norm: NormState | None, rule: str) -> Tensor:
    """D (B,N,K,d); the mean of each vector is its own, sigma is that of the true state."""
    if norm is None:
        return D
    centered = D - D.mean(-1, keepdim=True)
    return add_bias(norm.gain * centered / norm.sigma[:, :, None], norm.bias, rule)


def linear_step(D: Tensor, weight: Tensor, b: Tensor, rule: str) -> Tensor:
    return add_bias(D @ weight.T, b, rule)


def block_step(D: Tensor, block: Any, s: vit.BlockState, rule: str, slope: str) -> Tensor:
    d = D.shape[-1]
    H, e = block.attn.num_heads, block.attn.head_dim
    u = norm_step(D, s.norm1, rule)
    W_v, b_v = vit.weight(block.attn.qkv.weight)[2 * H * e :], vit.bias(block.attn.qkv)[2 * H * e :]
    W_o, b_o = vit.weight(block.attn.proj.weight), vit.bias(block.attn.proj)
    values = u @ W_v.T
    mixed = torch.zeros_like(values)
    for head in range(H):
        part = slice(head * e, (head + 1) * e)
        mixed[..., part] = torch.einsum("bnm,bmke->bnke", s.A[:, head], values[..., part])
    scale = vit.gain(block.ls1, d)
    D = add_bias(D + scale * (mixed @ W_o.T), scale * (W_o @ b_v + b_o), rule)
    u = norm_step(D, s.norm2, rule)
    hidden = linear_step(u, vit.weight(block.mlp.fc1.weight), vit.bias(block.mlp.fc1), rule)
    if slope == "origin":
        hidden = vit.phi(s.h)[:, :, None] * hidden
    elif slope == "tangent":
        derivative = vit.phi(s.h) + s.h * torch.exp(-(s.h**2) / 2) / (2 * torch.pi) ** 0.5
        hidden = add_bias(derivative[:, :, None] * hidden, s.f - derivative * s.h, rule)
    else:
        raise ValueError(f"unknown slope {slope!r}")
    m = linear_step(hidden, vit.weight(block.mlp.fc2.weight), vit.bias(block.mlp.fc2), rule)
    return D + vit.gain(block.ls2, d) * m


def decomposed_logits(
    model: Model, images: Tensor, *, layer: int = 0, bias: str = "none", slope: str = "origin"
) -> tuple[Tensor, Tensor]:
    """(B,N+1,C) contributions of every source to every logit, and the logits (B,C)."""
    if bias == "cls" and model.cls_token is None:
        raise ValueError("bias='cls' needs a class token")
    with torch.no_grad():
        whole = vit.run(model, vit.embed(model, images))
        x = whole.x[layer]
        B, N, d = x.shape
        D = torch.zeros(B, N, N + 1, d, dtype=torch.float64)
        for n in range(N):
            D[:, n, n] = x[:, n]
        if layer == 0:
            D = norm_step(D, whole.pre, bias)
        for index in range(layer, len(model.blocks)):
            D = block_step(D, model.blocks[index], whole.at(index), bias, slope)
        D = norm_step(D, whole.final, bias)
        pooled = torch.stack([D[:, i] for i in vit.reads(model)], dim=0).mean(dim=0)[
            :, None
        ]  # (B,1,K,d): one "token"
        if whole.fc is not None:
            fc = whole.fc
            one = NormState(
                fc.x[:, None], fc.mu[:, None], fc.sigma[:, None], fc.eps, fc.gain, fc.bias, fc.out[:, None]
            )
            pooled = norm_step(pooled, one, bias)
        sources = linear_step(pooled, vit.weight(model.head.weight), vit.bias(model.head), bias)
        return sources[:, 0], whole.logits


def decompx_sources(
    model: Model, images: Tensor, target: Tensor, *, layer: int = 0, score: str = "logit", **options: Any
) -> Tensor:
    """(B,N+1): all sources, prefix tokens first, the bias token last; contracted with dT/dlogits."""
    sources, logits = decomposed_logits(model, images, layer=layer, **options)
    logits = logits.detach().requires_grad_()
    direction = vit.gradients(vit.quantity(logits, target, score).sum(), [logits])[0]
    return (sources * direction[:, None]).sum(-1)


def decompx_layers(model: Model, images: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    """One map for every start layer l = 0..L-1."""
    maps = []
    for layer in range(len(model.blocks)):
        sources = decompx_sources(model, images, target, layer=layer, **options)
        maps.append(vit.patches_of(model, sources[:, :-1]))
    return maps


def decompx(model: Model, images: Tensor, target: Tensor, *, layer: int = 0, **options: Any) -> Tensor:
    """From the input of block 0; bias-free, slope at the origin. "none" and "token" draw the same patches."""
    return vit.patches_of(model, decompx_sources(model, images, target, layer=layer, **options)[:, :-1])
