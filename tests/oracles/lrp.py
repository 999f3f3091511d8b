"""Layer-wise relevance: TransAtt and full LRP (Chefer 2021), and AttnLRP (Achtibat 2024).

TransAtt. R_out = one-hot of the target (1, not the logit; the score only enters the gradient G). div(a, b) =
a / (b + 1e-9), 0 where b = 0. Rules, backwards:

    linear     Z = x+ W+' + x- W-', S = div(R, Z), R_in = x+ (S W+) + x- (S W-); the bias is ignored
    product    Z = X Y: R_X = X (div(R, Z) Y'), R_Y = Y (X' div(R, Z)), both halved; for q k' without the
               scale
    add        Z = X + Y: a = X div(R, Z), b = Y div(R, Z), then a <- a div(div(|Sa|, |Sa|+|Sb|) SR, Sa), b
               the same; S is the sum over tokens and channels of ONE sample (the reference sums over its
               batch of one)
    select     R at the class token: x div(R, x).   Mean of tokens: x_p/P div(R, mean).   Clone: plain sum
    identity   GELU, softmax, every LayerNorm (qk-norm, fc_norm too), LayerScale (not in the reference)

    A-bar^l = mean_h relu(G^l R_A^l), R_A the halved relevance of A; R <- R + A-bar^l R for l >= start_layer
    (default 0)

Full LRP. The same R, on to the pixels; no gradient, so the score does not enter.

    positions  add rule for tokens + position embedding; the share of the position embedding is dropped
    z^B        output o of a patch with pixels x_i: c_i = x_i w_oi - low w_oi+ - high w_oi-,
               R_i = sum_o c_i / (sum_i c_i + 1e-9) R_o; low, high: least and greatest value of the image

    map: the sum over the channels and pixels of a patch

AttnLRP. Input x gradient of a network whose backward pass is changed: sigma of every norm constant, GELU
with the slope Phi(h) held constant, and in q k' and in A v each factor gets half of its gradient; softmax
keeps its own (its rule R_i = S_i (R_i - A_i sum_j R_j) is input x gradient). v is thus halved once in a
block, q and k twice.
"""

from typing import Any

import torch
from torch import Tensor

from . import attention, vit
from .gradient import patch_sums
from .vit import Model


def div(a: Tensor, b: Tensor) -> Tensor:
    den = b + 1e-9
    den = torch.where(den == 0, torch.full_like(den, 1e-9), den)
    return torch.where(b == 0, torch.zeros_like(den), a / den)


def linear_rule(x: Tensor, W: Tensor, R: Tensor) -> Tensor:
    xp, xn, Wp, Wn = x.clamp(min=0), x.clamp(max=0), W.clamp(min=0), W.clamp(max=0)
    S = div(R, xp @ Wp.T + xn @ Wn.T)
    return xp * (S @ Wp) + xn * (S @ Wn)


def product_rule(X: Tensor, Y: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Z = X Y (last two axes): the halved relevance of X and of Y."""
    S = div(R, X @ Y)
    return X * (S @ Y.transpose(-2, -1)) / 2, Y * (X.transpose(-2, -1) @ S) / 2


def add_rule(X: Tensor, Y: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    S = div(R, X + Y)
    a, b = X * S, Y * S
    Sa, Sb, SR = (t.sum(dim=(1, 2), keepdim=True) for t in (a, b, R))
    both = Sa.abs() + Sb.abs()
    return a * div(div(Sa.abs(), both) * SR, Sa), b * div(div(Sb.abs(), both) * SR, Sb)


def head_relevance(model: Model, state: vit.State, target: Tensor) -> Tensor:
    """Relevance of the last block's output, (B,N,d)."""
    R = torch.nn.functional.one_hot(target, state.logits.shape[-1]).double()
    features = state.fc.out if state.fc else state.pooled
    R = linear_rule(features, vit.weight(model.head.weight), R)
    normed = state.final.out if state.final else state.x[-1]
    tokens = torch.zeros_like(normed)
    for i in vit.reads(model):
        tokens[:, i] = normed[:, i] / len(vit.reads(model)) * div(R, state.pooled)
    return tokens


def block_relevance(block: Any, s: vit.BlockState, R: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance of the block's output -> (relevance of its input (B,N,d), R_A (B,H,N,N))."""
    B, N, d = s.x.shape
    H, e = block.attn.num_heads, block.attn.head_dim
    R_skip, R_m = add_rule(s.x_mid, vit.gain(block.ls2, d) * s.m, R)
    R_f = linear_rule(s.f, vit.weight(block.mlp.fc2.weight), R_m)
    R_mid = R_skip + linear_rule(s.norm2.out, vit.weight(block.mlp.fc1.weight), R_f)
    R_skip, R_o = add_rule(s.x, vit.gain(block.ls1, d) * s.o, R_mid)
    R_z = linear_rule(s.z, vit.weight(block.attn.proj.weight), R_o)
    R_A, R_v = product_rule(s.A, s.v, R_z.reshape(B, N, H, e).transpose(1, 2))
    R_q, R_kt = product_rule(s.q, s.k.transpose(-2, -1), R_A)
    parts = [t.transpose(1, 2).reshape(B, N, H * e) for t in (R_q, R_kt.transpose(-2, -1), R_v)]
    R_in = linear_rule(s.norm1.out, vit.weight(block.attn.qkv.weight), torch.cat(parts, dim=-1))
    return R_skip + R_in, R_A


def relevances(model: Model, images: Tensor, target: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Relevance of x^0..x^L (that of x^0: after norm_pre, which is the identity) and R_A of every block."""
    with torch.no_grad():
        state = vit.run(model, vit.embed(model, images))
        R = head_relevance(model, state, target)
        Rs, RAs = [R], []
        for layer in reversed(range(len(model.blocks))):
            R, R_A = block_relevance(model.blocks[layer], state.at(layer), R)
            Rs.append(R)
            RAs.append(R_A)
    return Rs[::-1], RAs[::-1]


def transatt_matrices(model: Model, images: Tensor, target: Tensor, **how: Any) -> list[Tensor]:
    """A-bar^l for every block, >= 0."""
    _, G = attention.attentions(model, images, target, **how)
    _, RAs = relevances(model, images, target)
    return [(g * r).clamp(min=0).mean(1) for g, r in zip(G, RAs, strict=True)]


def transatt(model: Model, images: Tensor, target: Tensor, *, start_layer: int = 0, **how: Any) -> Tensor:
    matrices = transatt_matrices(model, images, target, **how)
    return vit.read(model, attention.plus_identity(matrices[start_layer:]))


def position_relevance(model: Model, images: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Relevance of x^0 -> (that of the tokens before positions are added, that of the positions)."""
    if model.pos_embed is None:
        return R, torch.zeros_like(R)
    first = model.num_prefix_tokens if model.no_embed_class else 0
    positions = vit.weight(model.pos_embed).expand(len(R), -1, -1)
    tokens = vit.embed(model, images)[:, first:] - positions
    R_tokens, R_positions = add_rule(tokens, positions, R[:, first:])
    return torch.cat([R[:, :first], R_tokens], dim=1), R_positions


def full_lrp_pixels(model: Model, images: Tensor, target: Tensor) -> Tensor:
    """Relevance of the pixels, (B,3,H,W)."""
    images, W = images.double(), vit.weight(model.patch_embed.proj.weight)
    ph, pw = W.shape[-2:]
    with torch.no_grad():
        R, _ = position_relevance(model, images, relevances(model, images, target)[0][0])
        R = vit.patches_of(model, R)
        out = torch.zeros_like(images)
        for b, image in enumerate(images):
            low, high = image.min(), image.max()
            for patch in range(R.shape[1]):
                row, column = divmod(patch, model.patch_embed.grid_size[1])
                here = (slice(None), slice(row * ph, (row + 1) * ph), slice(column * pw, (column + 1) * pw))
                for o, w in enumerate(W):
                    c = image[here] * w - low * w.clamp(min=0) - high * w.clamp(max=0)
                    out[b][here] += c / (c.sum() + 1e-9) * R[b, patch, o]
        return out


def full_lrp(model: Model, images: Tensor, target: Tensor) -> Tensor:
    return patch_sums(model, full_lrp_pixels(model, images, target))


def attnlrp_layers(
    model: Model, images: Tensor, target: Tensor, *, score: str = "logit", gamma: float = 0.0
) -> list[Tensor]:
    """Relevance of x^l for l = 0..L-1, summed over channels; starts from the logit (or score), not from 1."""
    changed = vit.Rule(attention=0.0, norm=True, slope="origin", halve=True, gamma=gamma)
    state, scalar = vit.trace(model, images, target, score=score, how=changed)
    grads = vit.gradients(scalar, state.x[:-1])
    return [vit.patches_of(model, (x * g).sum(-1)).detach() for x, g in zip(state.x, grads, strict=False)]


def attnlrp(model: Model, images: Tensor, target: Tensor, *, score: str = "logit") -> Tensor:
    return attnlrp_layers(model, images, target, score=score)[0]


def attnlrp_gamma(
    model: Model,
    images: Tensor,
    target: Tensor,
    *,
    gamma: float = 0.05,
    conv_gamma: float = 100.0,
    attention: str = "shared",
    score: str = "logit",
) -> Tensor:
    """Relevance of the pixels, summed over each patch."""
    changed = vit.Rule(norm=True, slope="origin", halve=True, gamma=gamma)
    if attention == "held":
        changed = vit.Rule(attention=1.0, norm=True, slope="origin", gamma=gamma)
    pixels = images.double().detach().requires_grad_()
    state = vit.run(model, vit.embed_any(model, pixels, conv_gamma), how=changed)
    (g,) = vit.gradients(vit.quantity(state.logits, target, score).sum(), [pixels])
    return patch_sums(model, (pixels * g).detach())


def attnlrp_divided(model: Model, images: Tensor, target: Tensor) -> Tensor:
    """AttnLRP as in the paper: relevances divided by outputs, no gradient; class-token heads, logit."""

    def linear(x: Tensor, W: Tensor, out: Tensor, R: Tensor) -> Tensor:
        return x * ((R / out) @ W)

    def norm(n: vit.NormState, R: Tensor) -> Tensor:
        back = n.gain / n.sigma * R / n.out
        return n.x * (back - back.mean(-1, keepdim=True))

    with torch.no_grad():
        state = vit.run(model, vit.embed(model, images))
        assert state.final is not None and state.pre is None
        R = torch.zeros_like(state.x[-1])
        R[:, 0] = state.pooled * vit.weight(model.head.weight)[target]  # R_c = y_c, so R_c / y_c = 1
        R = norm(state.final, R)
        for block, s in zip(reversed(model.blocks), reversed(state.blocks), strict=True):
            d, e = s.x.shape[-1], block.attn.head_dim
            m, o = vit.gain(block.ls2, d) * s.m, vit.gain(block.ls1, d) * s.o
            R_f = linear(s.f, vit.weight(block.mlp.fc2.weight), s.m, R * m / s.out)
            R_mlp = norm(s.norm2, linear(s.norm2.out, vit.weight(block.mlp.fc1.weight), s.h, R_f))
            R_mid = R * s.x_mid / s.out + R_mlp
            R_z = linear(s.z, vit.weight(block.attn.proj.weight), s.o, R_mid * o / s.x_mid)
            z, R_z = (t.unflatten(-1, (-1, e)).transpose(1, 2) for t in (s.z, R_z))
            R_A, R_v = s.A * ((R_z / z) @ s.v.mT) / 2, s.v * (s.A.mT @ (R_z / z)) / 2
            R_S = s.S * (R_A - s.A * R_A.sum(-1, keepdim=True))
            R_q, R_k = s.q * ((R_S / s.S) @ s.k) / e**0.5 / 2, s.k * ((R_S / s.S).mT @ s.q) / e**0.5 / 2
            R_q = norm(s.q_norm, R_q) if s.q_norm else R_q
            R_k = norm(s.k_norm, R_k) if s.k_norm else R_k
            R_qkv = torch.cat([t.transpose(1, 2).flatten(2) for t in (R_q, R_k, R_v)], dim=-1)
            R_attn = norm(s.norm1, linear(s.norm1.out, vit.weight(block.attn.qkv.weight), s.qkv, R_qkv))
            R = R_mid * s.x / s.x_mid + R_attn
        return vit.patches_of(model, R.sum(-1))
