"""The forward pass of a timm `VisionTransformer`, written out by hand from its weights, in float64.

Slow and obvious on purpose: no hooks, no function modes, no fused kernels, no `nn.Module` call. Every
intermediate is a tensor of the graph. Symbols (B batch, H heads, N tokens, d width, e = d/H, m hidden width
of the MLP):

    x[l]    (B,N,d)    input of block l; x[0]: after the position embedding, BEFORE norm_pre; x[L]: last
    A       (B,H,N,N)  attention after softmax: rows are queries ("to"), columns are keys ("from")
    S       (B,H,N,N)  attention logits, scale included
    q k v   (B,H,N,e)  q and k after qk-norm
    h       (B,N,m)    pre-activation of the MLP

Choices: x of `BlockState` is what enters norm1 and the residual, so for block 0 it is norm_pre(x[0]).
Freezing a norm means that sigma = sqrt(var + eps) is a constant while the mean is not; it holds for EVERY
norm, qk-norm too. Freezing attention by alpha: A' = alpha sg(A) + (1 - alpha) A, and `BlockState.A` is A',
the tensor that multiplies v.
"""

from dataclasses import dataclass, replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn

Model = Any  # a timm VisionTransformer; Any because nn.Module types its attributes as Tensor | Module


@dataclass(frozen=True)
class Rule:
    """What is held constant in the backward pass. The values of the forward pass never change."""

    attention: float = 0.0  # alpha
    norm: bool = False  # sigma constant
    slope: str = "tangent"  # "tangent": GELU's own derivative; "origin": f(h)/h = Phi(h), constant
    halve: bool = False  # both factors of a product get half of its gradient (AttnLRP's uniform rule)
    gamma: float = 0.0  # of the gamma rule on linear maps


def rule(freeze: float | None = None, slope: str = "origin") -> Rule:
    """`freeze=None` is the ordinary gradient; a number freezes sigma, the slope, and attention by alpha."""
    return Rule() if freeze is None else Rule(attention=freeze, norm=True, slope=slope)


@dataclass
class NormState:
    """out = gain (x - mu) / sigma + bias."""

    x: Tensor
    mu: Tensor
    sigma: Tensor
    eps: float
    gain: Tensor
    bias: Tensor
    out: Tensor


@dataclass
class BlockState:
    """Everything a block computes, in the order of computation."""

    x: Tensor  # (B,N,d)
    norm1: NormState
    qkv: Tensor  # (B,N,3d) output of the qkv layer, bias included
    q_norm: NormState | None
    k_norm: NormState | None
    q: Tensor
    k: Tensor
    v: Tensor
    S: Tensor
    A: Tensor
    z: Tensor  # (B,N,d) heads concatenated, input of the output projection
    o: Tensor  # (B,N,d) output of the projection, bias included, before LayerScale
    x_mid: Tensor  # (B,N,d) x' = x + ls1 o
    norm2: NormState
    h: Tensor  # (B,N,m)
    f: Tensor  # (B,N,m) GELU(h)
    m: Tensor  # (B,N,d) output of fc2, bias included, before LayerScale
    out: Tensor  # (B,N,d) x'' = x' + ls2 m


@dataclass
class State:
    """One forward pass."""

    x: list[Tensor]  # x[0] ... x[L]; entries below the start layer repeat x[start]
    start: int
    pre: NormState | None
    blocks: list[BlockState]  # blocks[start:]; index with `at(l)`
    final: NormState | None  # the norm before pooling
    pooled: Tensor  # (B,d)
    fc: NormState | None  # the norm after pooling
    logits: Tensor  # (B,C)

    def at(self, layer: int) -> BlockState:
        """The state of block `layer`."""
        return self.blocks[layer - self.start]


def weight(parameter: Tensor) -> Tensor:
    return parameter.detach().double()


def bias(layer: Any) -> Tensor:
    """The bias of a linear layer or norm, zeros where it has none."""
    if layer.bias is not None:
        return weight(layer.bias)
    return torch.zeros(layer.weight.shape[0], dtype=torch.float64)


def gain(scale: Any, width: int) -> Tensor:
    """LayerScale's gamma (d,), ones where there is none."""
    return torch.ones(width, dtype=torch.float64) if isinstance(scale, nn.Identity) else weight(scale.gamma)


def check(model: Model) -> None:
    """Refuse what this file does not write out."""
    plain = type(model).__name__ == "VisionTransformer" and model.attn_pool is None
    plain = (
        plain and model.global_pool in ("token", "avg") and isinstance(model.patch_embed.norm, nn.Identity)
    )
    for block in model.blocks:
        plain = plain and type(block).__name__ == "Block" and type(block.attn).__name__ == "Attention"
        plain = plain and isinstance(block.attn.norm, nn.Identity) and isinstance(block.mlp.norm, nn.Identity)
        plain = plain and block.attn.gate is None and isinstance(block.norm1, nn.LayerNorm)
        plain = plain and isinstance(block.mlp.act, nn.GELU) and block.mlp.act.approximate == "none"
    if not plain:
        raise NotImplementedError(
            "the oracles serve plain timm VisionTransformers: LayerNorm, exact GELU, token or avg pool"
        )


def phi(h: Tensor) -> Tensor:
    """Phi(h), the normal distribution function: GELU(h) = h Phi(h), so Phi is its slope from the origin."""
    return 0.5 * (1 + torch.erf(h / sqrt(2)))


def linear(x: Tensor, W: Tensor, b: Tensor, gamma: float) -> Tensor:
    """W x + b. With gamma, contributions W_ij x_j (and b_i) of the sign of y_i count 1 + gamma times, and
    y_i g_i is shared in proportion: constants c_ij with sum_j c_ij x_j as the part that has a gradient.
    """
    y = x @ W.T + b
    if not gamma:
        return y
    z = x[..., None, :] * W
    more = 1 + gamma * (z * y[..., None] > 0).double()
    total = (more * z).sum(-1) + torch.where(b * y > 0, (1 + gamma) * b, b)
    c = (more * W * (y / total)[..., None]).detach()
    moving = (c * x[..., None, :]).sum(-1)
    return moving + (y - moving).detach()


def normalize(x: Tensor, norm: Any, how: Rule) -> NormState:
    mu = x.mean(dim=-1, keepdim=True)
    sigma = (((x - mu) ** 2).mean(dim=-1, keepdim=True) + norm.eps).sqrt()
    divisor = sigma.detach() if how.norm else sigma
    g = weight(norm.weight) if norm.weight is not None else torch.ones(x.shape[-1], dtype=torch.float64)
    b = weight(norm.bias) if norm.bias is not None else torch.zeros(x.shape[-1], dtype=torch.float64)
    return NormState(x, mu, sigma, norm.eps, g, b, g * (x - mu) / divisor + b)


def optional_norm(x: Tensor, norm: Any, how: Rule) -> NormState | None:
    return None if isinstance(norm, nn.Identity) else normalize(x, norm, how)


def half(x: Tensor, how: Rule) -> Tensor:
    """The value of x, half of its gradient, where the rule says so."""
    return 0.5 * x + 0.5 * x.detach() if how.halve else x


def softmax(S: Tensor) -> Tensor:
    e = (S - S.max(dim=-1, keepdim=True).values).exp()
    return e / e.sum(dim=-1, keepdim=True)


def embed(model: Model, images: Tensor) -> Tensor:
    """Images (B,3,H,W) -> x^0 (B,N,d): patches, prefix tokens, position embedding; without norm_pre."""
    check(model)
    return embed_any(model, images)


def embed_any(model: Model, images: Tensor, gamma: float = 0.0) -> Tensor:
    """The same, whatever the blocks are; gamma: of the patch projection."""
    images, proj = images.double(), model.patch_embed.proj
    ph, pw = proj.kernel_size
    rows, columns = model.patch_embed.grid_size
    assert images.shape[-2:] == (rows * ph, columns * pw), "the oracle does not resample position embeddings"
    patches = [
        linear(
            images[:, :, r * ph : (r + 1) * ph, c * pw : (c + 1) * pw].flatten(1),
            weight(proj.weight).flatten(1),
            bias(proj),
            gamma,
        )
        for r in range(rows)
        for c in range(columns)
    ]
    x = torch.stack(patches, dim=1)
    prefix = [weight(t).expand(len(x), -1, -1) for t in (model.cls_token, model.reg_token) if t is not None]
    if model.pos_embed is None:
        return torch.cat([*prefix, x], dim=1)
    if model.no_embed_class:
        return torch.cat([*prefix, x + weight(model.pos_embed)], dim=1)
    return torch.cat([*prefix, x], dim=1) + weight(model.pos_embed)


def run_block(block: Any, x: Tensor, how: Rule, normed: Tensor | None = None) -> BlockState:
    """normed: in place of what the first norm gives."""
    B, N, d = x.shape
    H, e = block.attn.num_heads, block.attn.head_dim
    norm1 = normalize(x, block.norm1, how)
    norm1 = norm1 if normed is None else replace(norm1, out=normed)
    qkv = linear(norm1.out, weight(block.attn.qkv.weight), bias(block.attn.qkv), how.gamma)
    q, k, v = (qkv[:, :, i * H * e : (i + 1) * H * e].reshape(B, N, H, e).transpose(1, 2) for i in range(3))
    q_norm, k_norm = optional_norm(q, block.attn.q_norm, how), optional_norm(k, block.attn.k_norm, how)
    q = q_norm.out if q_norm else q
    k = k_norm.out if k_norm else k
    S = half(q, how) @ half(k, how).transpose(-2, -1) / sqrt(e)
    A = softmax(S)
    A = how.attention * A.detach() + (1 - how.attention) * A
    z = (half(A, how) @ half(v, how)).transpose(1, 2).reshape(B, N, H * e)
    o = linear(z, weight(block.attn.proj.weight), bias(block.attn.proj), how.gamma)
    x_mid = x + gain(block.ls1, d) * o
    norm2 = normalize(x_mid, block.norm2, how)
    h = linear(norm2.out, weight(block.mlp.fc1.weight), bias(block.mlp.fc1), how.gamma)
    f = h * (phi(h).detach() if how.slope == "origin" else phi(h))
    m = linear(f, weight(block.mlp.fc2.weight), bias(block.mlp.fc2), how.gamma)
    out = x_mid + gain(block.ls2, d) * m
    return BlockState(x, norm1, qkv, q_norm, k_norm, q, k, v, S, A, z, o, x_mid, norm2, h, f, m, out)


def run(model: Model, tokens: Tensor, start: int = 0, how: Rule | None = None) -> State:
    """From `tokens` = x^start (B,N,d): norm_pre (if start is 0), blocks[start:], final norm, pool, head."""
    check(model)
    how = how or Rule()
    x = tokens
    xs, blocks = [tokens] * (start + 1), []
    pre = optional_norm(x, model.norm_pre, how) if start == 0 else None
    x = pre.out if pre else x
    for block in model.blocks[start:]:
        blocks.append(run_block(block, x, how))
        x = blocks[-1].out
        xs.append(x)
    final, pooled, fc, logits = run_head(model, x, how)
    return State(xs, start, pre, blocks, final, pooled, fc, logits)


def head_of(model: Model, x: Tensor) -> Tensor:
    """Logits of the last block's output."""
    return run_head(model, x, Rule())[3]


def run_head(model: Model, x: Tensor, how: Rule) -> tuple[NormState | None, Tensor, NormState | None, Tensor]:
    """(final norm, pooled, norm after pooling, logits) of the last block's output."""
    final = optional_norm(x, model.norm, how)
    x = final.out if final else x
    pooled = torch.stack([x[:, i] for i in reads(model)], dim=0).mean(dim=0)
    fc = optional_norm(pooled, model.fc_norm, how)
    features = fc.out if fc else pooled
    logits = linear(features, weight(model.head.weight), bias(model.head), how.gamma)
    return final, pooled, fc, logits


def reads(model: Model) -> list[int]:
    """The tokens that the head reads: the class token, or all that are averaged (the patches, as a rule)."""
    if model.global_pool == "token":
        return [0]
    patches = model.patch_embed.grid_size[0] * model.patch_embed.grid_size[1]
    first = 0 if model.pool_include_prefix else model.num_prefix_tokens
    return list(range(first, model.num_prefix_tokens + patches))


def read(model: Model, matrix: Tensor) -> Tensor:
    """Matrix (B,N,N) -> (B,P): row of the class token, or mean of the averaged rows; patch columns."""
    rows = torch.stack([matrix[:, i] for i in reads(model)], dim=0).mean(dim=0)
    return patches_of(model, rows)


def patches_of(model: Model, scores: Tensor) -> Tensor:
    """(B,N) -> (B,P): the prefix tokens (class, registers) are dropped."""
    return scores[:, model.num_prefix_tokens :]


def quantity(logits: Tensor, target: Tensor, score: str = "logit") -> Tensor:
    """The explained quantity, (B,): logit, log_prob, log_odds or contrast (logit minus the largest other)."""
    values = []
    for y, c in zip(logits, target.tolist(), strict=True):
        others = torch.cat([y[:c], y[c + 1 :]])
        if score == "logit":
            value = y[c]
        elif score == "log_prob":
            value = y[c] - y.exp().sum().log()
        elif score == "log_odds":
            value = y[c] - others.exp().sum().log()
        elif score == "contrast":
            value = y[c] - others.max()
        else:
            raise ValueError(f"unknown score {score!r}")
        values.append(value)
    return torch.stack(values)


def trace(
    model: Model,
    images: Tensor,
    target: Tensor,
    *,
    score: str = "logit",
    freeze: float | None = None,
    slope: str = "origin",
    how: Rule | None = None,
) -> tuple[State, Tensor]:
    """Forward from x^0 as a leaf of the graph; gives the state and the scalar (sum over the batch)."""
    tokens = embed(model, images).detach().requires_grad_()
    state = run(model, tokens, how=how or rule(freeze, slope))
    return state, quantity(state.logits, target, score).sum()


def gradients(scalar: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """d scalar / d each input; zeros where it does not depend on it."""
    grads = torch.autograd.grad(scalar, inputs, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]
