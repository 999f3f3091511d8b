"""Gradient methods from their formulas. All take `score`, `freeze` and `slope` as options (see `vit.trace`).

    ixg^l_j = sum_channels x^l_j . dy/dx^l_j                     vanilla_grad^l_j = sum_channels dy/dx^l_j
    attixg (same): AttnFrom^l_j ixg^l_j, l = 0..L-1              (next): AttnFrom^l_j ixg^(l+1)_j, l = 0..L-2
    AttnFrom^l_j = mean over heads and query rows of A^l[., ., j]
    fullgrad^l = ixg^l + biases at or after block l              fullgrad_plus = sum_(l>=m) ixg^l + biases
                                                                 after m, once

Every function gives signed patch scores (B,P) in raster order; `*_layers` gives one such map for each block.
"""

from typing import Any

import torch
from torch import Tensor

from . import vit
from .vit import Model, NormState, State


def ixg_layers(model: Model, images: Tensor, target: Tensor, **how: Any) -> list[Tensor]:
    """Input x gradient at the input of every block, l = 0..L-1."""
    state, scalar = vit.trace(model, images, target, **how)
    grads = vit.gradients(scalar, state.x[:-1])
    return [vit.patches_of(model, (x * g).sum(-1)).detach() for x, g in zip(state.x, grads, strict=False)]


def ixg(model: Model, images: Tensor, target: Tensor, **how: Any) -> Tensor:
    return ixg_layers(model, images, target, **how)[0]


def vanilla_grad_layers(
    model: Model, images: Tensor, target: Tensor, *, reduce: str = "sum", **how: Any
) -> list[Tensor]:
    """Sum over channels of the gradient ("sum", signed) or of its absolute value ("abs", >= 0).

    The signed sum is zero up to rounding in every layer of a pre-norm ViT with LayerNorm: nothing reads a
    token's mean.
    """
    state, scalar = vit.trace(model, images, target, **how)
    grads = vit.gradients(scalar, state.x[:-1])
    return [vit.patches_of(model, (g.abs() if reduce == "abs" else g).sum(-1)) for g in grads]


def vanilla_grad(model: Model, images: Tensor, target: Tensor, **how: Any) -> Tensor:
    return vanilla_grad_layers(model, images, target, **how)[0]


def vanilla_grad_norm_layers(model: Model, images: Tensor, target: Tensor, **how: Any) -> list[Tensor]:
    """L2 norm over channels of the gradient, >= 0."""
    state, scalar = vit.trace(model, images, target, **how)
    return [vit.patches_of(model, (g**2).sum(-1).sqrt()) for g in vit.gradients(scalar, state.x[:-1])]


def vanilla_grad_norm(model: Model, images: Tensor, target: Tensor, **how: Any) -> Tensor:
    return vanilla_grad_norm_layers(model, images, target, **how)[0]


def attixg_layers(
    model: Model, images: Tensor, target: Tensor, *, pairing: str = "same", **how: Any
) -> list[Tensor]:
    """L maps for pairing "same" (the default), L-1 maps for "next" (without the last block's attention)."""
    state, scalar = vit.trace(model, images, target, **how)
    grads = vit.gradients(scalar, state.x)
    shift = {"same": 0, "next": 1}[pairing]
    maps = []
    for layer in range(len(model.blocks) - shift):
        attn_from = state.at(layer).A.mean(dim=(1, 2))
        product = (state.x[layer + shift] * grads[layer + shift]).sum(-1)
        maps.append(vit.patches_of(model, attn_from * product).detach())
    return maps


def attixg(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    """With the attention of block 0."""
    return attixg_layers(model, images, target, **options)[0]


def patch_sums(model: Model, pixels: Tensor) -> Tensor:
    """(B,3,H,W) -> (B,P): sum over the colors and pixels of each patch."""
    ph, pw = model.patch_embed.proj.kernel_size
    rows, columns = model.patch_embed.grid_size
    cells = [
        pixels[:, :, r * ph : (r + 1) * ph, c * pw : (c + 1) * pw].sum(dim=(1, 2, 3))
        for r in range(rows)
        for c in range(columns)
    ]
    return torch.stack(cells, dim=1)


def integrated_gradients(
    model: Model,
    images: Tensor,
    target: Tensor,
    *,
    steps: int = 20,
    space: str = "tokens",
    score: str = "logit",
    freeze: float | None = None,
    slope: str = "origin",
) -> Tensor:
    """x . mean over the midpoints t = (i + 1/2)/steps of dT/dx at t x: a zero baseline.

    space "tokens": x = x^0, the prefix tokens go to zero as well. "pixels": x = the image, summed over
    colors and pixels of a patch (a zero image, embedded with its biases, class token and positions, is the
    baseline).
    """
    total = torch.zeros(1, dtype=torch.float64)
    whole = images.double() if space == "pixels" else vit.embed(model, images).detach()
    for i in range(steps):
        x = (whole * (i + 0.5) / steps).detach().requires_grad_()
        tokens = vit.embed(model, x) if space == "pixels" else x
        state = vit.run(model, tokens, how=vit.rule(freeze, slope))
        total = total + vit.gradients(vit.quantity(state.logits, target, score).sum(), [x])[0] / steps
    if space == "pixels":
        return patch_sums(model, whole * total)
    return vit.patches_of(model, (whole * total).sum(-1))


def smoothgrad(
    model: Model, images: Tensor, target: Tensor, *, noise: Tensor, spread: float = 0.1, **how: Any
) -> Tensor:
    """Mean pixel gradient at noisy images, summed (signed) over colors and pixels of a patch.

    noise (S,B,3,H,W) is standard normal and given; its deviation is `spread` x (max - min of each image).
    """
    images, total = images.double(), torch.zeros(1, dtype=torch.float64)
    width = (images.amax(dim=(1, 2, 3)) - images.amin(dim=(1, 2, 3))).reshape(-1, 1, 1, 1)
    for n in noise.double():
        x = (images + spread * width * n).detach().requires_grad_()
        state = vit.run(
            model, vit.embed(model, x), how=vit.rule(how.get("freeze"), how.get("slope", "origin"))
        )
        scalar = vit.quantity(state.logits, target, how.get("score", "logit")).sum()
        total = total + vit.gradients(scalar, [x])[0] / len(noise)
    return patch_sums(model, total)


# FullGrad -----------------------------------------------------------------------------------------

Term = tuple[
    Tensor, Tensor
]  # (b, out): the bias b (broadcast over tokens) that was added into the tensor `out`


def norm_terms(norm: NormState | None, implicit: bool, frozen: bool) -> list[Term]:
    """beta; implicit: LN(x) - beta - JVP(x; x) = gain (x - mu)/sigma (1 - eps/sigma^2), or 0 if frozen."""
    if norm is None:
        return []
    terms: list[Term] = [(norm.bias, norm.out)]
    if implicit and not frozen:
        b = norm.gain * (norm.x - norm.mu) / norm.sigma * (1 - norm.eps / norm.sigma**2)
        terms.append((b, norm.out))
    return terms


def block_terms(model: Model, state: State, layer: int, implicit: bool, how: vit.Rule) -> list[Term]:
    """Every bias inside one block, with the tensor it was added into; norm_pre belongs to block 0.

    qk-norm's betas (and implicit terms) are counted too, to the token whose query or key it is. Attention's
    implicit term belongs to the query token: z - JVP(q, k, v) = -(1 - alpha) dA v with dS = 2 S, dA = A (dS
    - sum_j A dS).
    """
    block, s = model.blocks[layer], state.at(layer)
    terms = norm_terms(state.pre, implicit, how.norm) if layer == 0 else []
    terms += [*norm_terms(s.norm1, implicit, how.norm), (vit.bias(block.attn.qkv), s.qkv)]
    terms += norm_terms(s.q_norm, implicit, how.norm) + norm_terms(s.k_norm, implicit, how.norm)
    terms += [(vit.bias(block.attn.proj), s.o), *norm_terms(s.norm2, implicit, how.norm)]
    terms += [(vit.bias(block.mlp.fc1), s.h), (vit.bias(block.mlp.fc2), s.m)]
    if implicit:
        dS = 2 * s.S
        dA = s.A * (dS - (s.A * dS).sum(-1, keepdim=True))
        terms.append((-(1 - how.attention) * (dA @ s.v).transpose(1, 2).flatten(2), s.z))
        if how.slope == "tangent":
            density = torch.exp(-(s.h**2) / 2) / (2 * torch.pi) ** 0.5  # f' = Phi + h density
            terms.append((s.f - (vit.phi(s.h) + s.h * density) * s.h, s.f))
    return terms


def per_token(scalar: Tensor, terms: list[Term]) -> Tensor:
    """sum over channels (and heads) of b . dT/dout for every token, (B,N)."""
    total = torch.zeros(1, dtype=torch.float64)
    for (b, _), grad in zip(terms, vit.gradients(scalar, [out for _, out in terms]), strict=True):
        product = b.detach() * grad
        total = total + (product.sum(dim=(1, 3)) if product.dim() == 4 else product.sum(-1))
    return total


def bias_maps(model: Model, state: State, scalar: Tensor, implicit: bool, how: vit.Rule) -> list[Tensor]:
    """(B,N) for the biases of block 0, ..., L-1, and of what follows (final norm, fc_norm, head).

    The tokenless ones (fc_norm, head.bias) are spread evenly over the tokens that the head reads: with a
    class-token head all goes to token 0 and is dropped with the prefix. A score other than the logit is no
    step of the network: its own offset T - <y, dT/dy> is not counted.
    """
    L = len(model.blocks)
    maps = [per_token(scalar, block_terms(model, state, layer, implicit, how)) for layer in range(L)]
    last = torch.zeros(state.x[0].shape[:2], dtype=torch.float64)
    if state.final is not None:
        last = last + per_token(scalar, norm_terms(state.final, implicit, how.norm))
    tokenless = [*norm_terms(state.fc, implicit, how.norm), (vit.bias(model.head), state.logits)]
    for (b, _), grad in zip(tokenless, vit.gradients(scalar, [out for _, out in tokenless]), strict=True):
        for token in vit.reads(model):
            last[:, token] += (b.detach() * grad).sum(-1) / len(vit.reads(model))
    return [*maps, last]


def fullgrad_tokens(
    model: Model, images: Tensor, target: Tensor, *, implicit: bool = False, **how: Any
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(IxG^l for l = 0..L-1, bias maps for l = 0..L-1 and after, logits); maps are (B,N), prefix included."""
    held = vit.rule(how.get("freeze"), how.get("slope", "origin"))
    state, scalar = vit.trace(model, images, target, **how)
    grads = vit.gradients(scalar, state.x[:-1])
    products = [(x * g).sum(-1).detach() for x, g in zip(state.x, grads, strict=False)]
    return (
        products,
        [m.detach() for m in bias_maps(model, state, scalar, implicit, held)],
        state.logits.detach(),
    )


def fullgrad_layers(model: Model, images: Tensor, target: Tensor, **options: Any) -> list[Tensor]:
    """IxG^l + all biases at or after block l. `implicit=True` adds implicit offsets: complete."""
    products, biases, _ = fullgrad_tokens(model, images, target, **options)
    return [
        vit.patches_of(model, product + torch.stack(biases[layer:]).sum(0))
        for layer, product in enumerate(products)
    ]


def fullgrad(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    """From the input of block 0. Patch-embedding bias and positions are inside x^0, not biases."""
    return fullgrad_layers(model, images, target, **options)[0]


def fullgrad_plus(model: Model, images: Tensor, target: Tensor, *, start: int = 0, **options: Any) -> Tensor:
    """sum_(l >= start) IxG^l + every bias at or after block `start`, once."""
    products, biases, _ = fullgrad_tokens(model, images, target, **options)
    return vit.patches_of(model, torch.stack([*products[start:], *biases[start:]]).sum(0))
