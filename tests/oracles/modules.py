"""TAP and CB token by token from their formulas (docs/equations.md#tap, docs/equations.md#cb)."""

from typing import Any

import torch
from torch import Tensor


def pool(x: Tensor, weights: Tensor, kind: str) -> Tensor:
    """Σ_k weights[..., k] · branch_k of a map (B, h, w, D); outside the map is zero, and counts."""
    _, h, w, _ = x.shape
    z = torch.zeros_like(x)
    for k in range(weights.shape[-1]):
        reach = [0] if k == 0 else [-k, 0, k] if kind == "dilated" else list(range(-k, k + 1))
        for i in range(h):
            for j in range(w):
                near = [
                    x[:, i + di, j + dj]
                    for di in reach
                    for dj in reach
                    if 0 <= i + di < h and 0 <= j + dj < w
                ]
                z[:, i, j] += weights[:, i, j, k : k + 1] * torch.stack(near).sum(0) / len(reach) ** 2
    return z


def convolve(x: Tensor, kernel: Tensor) -> Tensor:
    """3x3 convolution of (B, h, w, D) with (O, D, 3, 3), zeros outside."""
    b, h, w, _ = x.shape
    y = x.new_zeros(b, h, w, kernel.shape[0])
    for i in range(h):
        for j in range(w):
            for di in (-1, 0, 1):
                for dj in (-1, 0, 1):
                    if 0 <= i + di < h and 0 <= j + dj < w:
                        y[:, i, j] += x[:, i + di, j + dj] @ kernel[:, :, di + 1, dj + 1].T
    return y


def tap(x: Tensor, module: Any, prefix: int, grid: tuple[int, int]) -> Tensor:
    """T of tokens (B, prefix + h·w, D), with the weights of a TokenPool."""
    first, norm, last = module.predict
    g = x[:, prefix:].unflatten(1, grid)
    y = (convolve(g, first.weight) - norm.running_mean) / (
        norm.running_var + 1e-5
    ).sqrt() * norm.weight + norm.bias
    e = (convolve(y, last.weight) / module.temperature).exp()
    return torch.cat([x[:, :prefix], pool(g, e / e.sum(-1, keepdim=True), module.kind).flatten(1, 2)], 1)


def broadcast(x: Tensor, variant: str, scale: Tensor | None = None) -> Tensor:
    """CB of tokens (B, N, D); the first one is the class token."""
    y = torch.empty_like(x)
    for b in range(x.shape[0]):
        m = sum(x[b, j] for j in range(x.shape[1])) / x.shape[1]
        for i in range(x.shape[1]):
            half = (x[b, i] + m) / 2
            match variant:
                case "plain":
                    y[b, i] = half
                case "scaled":
                    y[b, i] = x[b, i] + scale * m
                case "gate":
                    y[b, i] = x[b, i] * (x[b, 0] + 1)
                case "hybrid":
                    y[b, i] = x[b, i] * x[b, 0] + half
    return y
