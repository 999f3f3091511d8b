"""The Libra family from its rules, on a timm VisionTransformer with SwiGLU or ordinary MLPs, in float64.

Written out with stop-gradients, as a forward pass that never changes its values (Mehri et al. 2025):

    A = sg(softmax(q k^T / sqrt(e)))        LN(x) = gain (x - mu) / sg(sigma) + bias
    GELU(h) = h sg(Phi(h))                  SiLU(h) = h sg(sigmoid(h))
    a * b   = (a * b + sg(a * b)) / 2       a gated MLP: both branches get half of the product's gradient
    u / |u| = u / sg(|u|)                   CLIP's unit vectors

The scalar is log p of the class. `trace` gives the block inputs x^l, the biases with the tensors they were
added into, and the attentions.
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from timm.layers import SwiGLU
from torch import Tensor

from . import vit


@dataclass
class Pass:
    x: list[Tensor] = field(default_factory=list)
    A: list[Tensor] = field(default_factory=list)
    tokens: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (bias, output with a token axis)
    pooled: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (bias, output behind the pooling)


def held(value: Tensor) -> Tensor:
    return value.detach()


def linear(x: Tensor, layer: Any, terms: list[tuple[Tensor, Tensor]]) -> Tensor:
    y = x @ vit.weight(layer.weight).T + vit.bias(layer)
    terms.append((vit.bias(layer), y))
    return y


def norm(x: Tensor, layer: Any, terms: list[tuple[Tensor, Tensor]]) -> Tensor:
    if isinstance(layer, torch.nn.Identity):
        return x
    mu = x.mean(-1, keepdim=True)
    sigma = held((((x - mu) ** 2).mean(-1, keepdim=True) + layer.eps).sqrt())
    y = vit.weight(layer.weight) * (x - mu) / sigma + vit.weight(layer.bias)
    terms.append((vit.weight(layer.bias), y))
    return y


def mlp(x: Tensor, layer: Any, terms: list[tuple[Tensor, Tensor]]) -> Tensor:
    if not isinstance(layer, SwiGLU):
        h = linear(x, layer.fc1, terms)
        return linear(h * held(vit.phi(h)), layer.fc2, terms)
    h, other = linear(x, layer.fc1_g, terms), linear(x, layer.fc1_x, terms)
    product = h * held(torch.sigmoid(h)) * other
    return linear((product + held(product)) / 2, layer.fc2, terms)


def trace(model: Any, images: Tensor, target: Tensor) -> tuple[Pass, Tensor]:
    """The pass and the sum over the images of log p of the class."""
    seen = Pass()
    x = vit.embed_any(model, images).detach().requires_grad_()
    d = x.shape[-1]
    for layer, block in enumerate(model.blocks):
        seen.x.append(x)
        if layer == 0:
            x = norm(x, model.norm_pre, seen.tokens)
        e = block.attn.head_dim
        qkv = linear(norm(x, block.norm1, seen.tokens), block.attn.qkv, seen.tokens)
        q, k, v = (t.unflatten(-1, (-1, e)).transpose(1, 2) for t in qkv.chunk(3, -1))
        A = held(vit.softmax(q @ k.transpose(-2, -1) / sqrt(e)))
        seen.A.append(A)
        o = linear((A @ v).transpose(1, 2).flatten(2), block.attn.proj, seen.tokens)
        x = x + vit.gain(block.ls1, d) * o
        x = x + vit.gain(block.ls2, d) * mlp(norm(x, block.norm2, seen.tokens), block.mlp, seen.tokens)
    x = norm(x, model.norm, seen.tokens)
    pooled = norm(x[:, vit.reads(model)].mean(1), model.fc_norm, seen.pooled)
    logits = linear(pooled, model.head, seen.pooled)
    return seen, vit.quantity(logits, target, "log_prob").sum()


def ixg_layers(model: Any, images: Tensor, target: Tensor) -> list[Tensor]:
    """(B,N), prefix tokens included, for every block input."""
    seen, scalar = trace(model, images, target)
    grads = vit.gradients(scalar, seen.x)
    return [(x * g).sum(-1).detach() for x, g in zip(seen.x, grads, strict=True)]


def biases(model: Any, images: Tensor, target: Tensor) -> Tensor:
    """(B,N): every bias x gradient at its token; biases behind the pooling at the tokens that are read."""
    seen, scalar = trace(model, images, target)
    total = torch.zeros(seen.x[0].shape[:2], dtype=torch.float64)
    for (b, _), g in zip(seen.tokens, vit.gradients(scalar, [y for _, y in seen.tokens]), strict=True):
        total += (b * g).sum(-1)
    for (b, _), g in zip(seen.pooled, vit.gradients(scalar, [y for _, y in seen.pooled]), strict=True):
        for token in vit.reads(model):
            total[:, token] += (b * g).sum(-1) / len(vit.reads(model))
    return total.detach()


def cam(model: Any, images: Tensor, target: Tensor, kind: str) -> list[Tensor]:
    """GradCAM or XGradCAM+ at every block input; sums over all tokens, prefix included; (B,N)."""
    seen, scalar = trace(model, images, target)
    maps = []
    for x, g in zip(seen.x, vit.gradients(scalar, seen.x), strict=True):
        a = x.detach()
        if kind == "gradcam":
            w = g.mean(1)
        else:
            w = (g * a.abs()).sum(1) / (a.abs().sum(1) + 1e-7)
        maps.append((a * w[:, None]).sum(-1))
    return maps


def maps(model: Any, images: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Every method of the family by its name, (B,P)."""
    ixg = ixg_layers(model, images, target)
    received = [A.mean((1, 2)) for A in trace(model, images, target)[0].A]
    bias = biases(model, images, target)
    whole = {
        "libra_ixg": ixg[0],
        "libra_cat": sum(ixg),
        "libra_attcat": sum(a * m for a, m in zip(received, ixg, strict=True)),
        "libra_fullgrad": ixg[0] + bias,
        "libra_fullgrad_plus": sum(ixg) + bias,
        "libra_gradcam_plus": sum(cam(model, images, target, "gradcam")),
        "libra_xgradcam_plus": sum(cam(model, images, target, "xgradcam_plus")),
        "libra_hirescam": ixg[-1],
    }
    return {name: vit.patches_of(model, scores) for name, scores in whole.items()}
