"""Norm-based token mixing in pre-norm blocks: AttIN (Kobayashi 2020), GlobEnc (Modarressi 2022), ALTI.

    x'_i = sum_j T_ij + b_i,   T_ij = delta_ij x_i + ls1 sum_h A_hij W_o^h W_v^h gain_1 (x_j - mean x_j) /
                               sigma_j
    b_i  = ls1 (W_o (W_v beta_1 + b_v) + b_o)       (T has no biases; x_i of block 0 is after norm_pre)
    v_ij = T_ij + ls2 LN2dec(T_ij),   LN2dec(t) = gain_2 (t - mean t) / sigma(x'_i)   (without the MLP)

    attin "n"       |T_ij - delta_ij x_i|_2   rollout: rows normalized, then product of 0.5 M + 0.5 I
    attin "n_res"   |T_ij|_2                    rollout: plain product
    globenc         |v_ij|_2                    rollout: plain product
    alti "attn"     relu(|y_i|_1 - |y_i - T_ij|_1), y = x' with biases, rows divided by their sum; plain
                    product
    alti "block"    the same with v_ij, y = the true block output

Choices: `attin_matrices` are the bare norms for both forms; rows that sum to zero stay zero; attin's
default is "n", alti's default is "attn". The class plays no part; `target` is taken for the common
signature. All maps are >= 0.
"""

from typing import Any

import torch
from torch import Tensor

from . import attention, vit
from .vit import Model


def mixing_vectors(block: Any, s: vit.BlockState) -> Tensor:
    """T (B,N,N,d), T[:, i, j] the part of x'_i that comes from token j."""
    B, N, d = s.x.shape
    H, e = block.attn.num_heads, block.attn.head_dim
    W_v = vit.weight(block.attn.qkv.weight)[2 * H * e :]
    W_o, scale = vit.weight(block.attn.proj.weight), vit.gain(block.ls1, d)
    T = torch.zeros(B, N, N, d, dtype=torch.float64)
    for j in range(N):
        x_j = s.x[:, j]
        centered = s.norm1.gain * (x_j - x_j.mean(-1, keepdim=True)) / s.norm1.sigma[:, j]
        for h in range(H):
            part = slice(h * e, (h + 1) * e)
            f = scale * (centered @ W_v[part].T @ W_o[:, part].T)
            for i in range(N):
                T[:, i, j] += s.A[:, h, i, j, None] * f
        T[:, j, j] += x_j
    return T


def after_mlp_residual(block: Any, s: vit.BlockState, T: Tensor) -> Tensor:
    """v = T + ls2 LN2dec(T)."""
    centered = T - T.mean(-1, keepdim=True)
    return T + vit.gain(block.ls2, T.shape[-1]) * s.norm2.gain * centered / s.norm2.sigma[:, :, None]


def states(model: Model, images: Tensor) -> vit.State:
    with torch.no_grad():
        return vit.run(model, vit.embed(model, images))


def length(vectors: Tensor) -> Tensor:
    return (vectors**2).sum(-1).sqrt()


def rows_to_one(M: Tensor) -> Tensor:
    """Rows divided by their sum; rows of zeros stay zeros."""
    total = M.sum(-1, keepdim=True)
    return torch.where(
        total > 0, M / torch.where(total > 0, total, torch.ones_like(total)), torch.zeros_like(M)
    )


def attin_matrices(model: Model, images: Tensor, target: Tensor, *, form: str = "n") -> list[Tensor]:
    state, matrices = states(model, images), []
    for block, s in zip(model.blocks, state.blocks, strict=True):
        T = mixing_vectors(block, s)
        if form == "n":
            for i in range(T.shape[1]):
                T[:, i, i] -= s.x[:, i]
        elif form != "n_res":
            raise ValueError(f"unknown form {form!r}")
        matrices.append(length(T))
    return matrices


def attin(model: Model, images: Tensor, target: Tensor, *, form: str = "n") -> Tensor:
    matrices = attin_matrices(model, images, target, form=form)
    if form == "n":
        matrices = [0.5 * rows_to_one(M) + 0.5 * attention.identity(M) for M in matrices]
    return vit.read(model, attention.product(matrices))


def globenc_matrices(model: Model, images: Tensor, target: Tensor) -> list[Tensor]:
    state = states(model, images)
    return [
        length(after_mlp_residual(block, s, mixing_vectors(block, s)))
        for block, s in zip(model.blocks, state.blocks, strict=True)
    ]


def globenc(model: Model, images: Tensor, target: Tensor) -> Tensor:
    return vit.read(model, attention.product(globenc_matrices(model, images, target)))


def alti_matrices(model: Model, images: Tensor, target: Tensor, *, against: str = "attn") -> list[Tensor]:
    """Rows sum to one, or are zero. `against`: "attn" or "block"."""
    state, matrices = states(model, images), []
    for block, s in zip(model.blocks, state.blocks, strict=True):
        T = mixing_vectors(block, s)
        if against == "attn":
            vectors, y = T, s.x_mid
        elif against == "block":
            vectors, y = after_mlp_residual(block, s, T), s.out
        else:
            raise ValueError(f"unknown reference {against!r}")
        c = y.abs().sum(-1)[:, :, None] - (y[:, :, None] - vectors).abs().sum(-1)
        matrices.append(rows_to_one(c.clamp(min=0)))
    return matrices


def alti(model: Model, images: Tensor, target: Tensor, *, against: str = "attn") -> Tensor:
    return vit.read(model, attention.product(alti_matrices(model, images, target, against=against)))
