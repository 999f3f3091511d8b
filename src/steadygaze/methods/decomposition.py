"""Decomposition methods: how much of token i's new state comes from token j in pre-norm blocks.

Equations: docs/equations.md#pre-norm-mixing and docs/equations.md#decompx.

    T_ij = δ_ij x_i + s_i Σ_h A_hij f_hj,   f_hj = LayerScale · W_o^h (v_hj − offset): free of biases
    v_ij = T_ij + LayerScale₂ γ₂ ⊙ (T_ij − mean T_ij) / σ₂_i   (the second norm decomposed, the MLP passed by)

| name    | matrix of a layer                            | bare name                | source                 |
| attin   | ‖T_ij − δ_ij x_i‖₂ ("n"), ‖T_ij‖₂ ("n_res")  | Π (½ rows to 1 + ½ I), Π | Kobayashi 2020, 2021   |
| globenc | ‖v_ij‖₂                                      | Π                        | Modarressi 2022        |
| alti    | (‖y_i‖₁ − ‖y_i − T_ij‖₁)⁺, rows sum to 1     | Π                        | Ferrando 2022          |
| decompx | input x gradient with A, σ and slopes frozen | from block 0             | Modarressi 2023        |
| gaze    | the same, A frozen by 3/4, score log-odds    | Σ_l                      | docs/equations.md#gaze |
| tokentm | (I + W') (I + (A W) ⊙ relu(∂T/∂A))           | Π, times ‖x⁰_j‖          | Wu et al. 2024         |

No N x N x d tensor where a formula avoids it: ‖Σ_h A_hij f_hj‖² = Σ_hg A_hij A_gij ⟨f_hj, f_gj⟩ needs heads
x heads numbers a token. ALTI's L1 norm has no such form; its rows are computed in slices of bounded size.

Formulas: docs/equations.md#attin, docs/equations.md#globenc, docs/equations.md#alti,
docs/equations.md#tokentm.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.methods.attention import add_identity, global_attention, half_identity
from steadygaze.methods.gradient import ixg
from steadygaze.methods.registry import METHODS, Alias, Options, register_method
from steadygaze.trace.capture import Trace
from steadygaze.trace.replay import BIAS_RULES, decompose
from steadygaze.vit.view import Parts

SLICE = 2**19  # numbers in one slice of T: two megabytes, which stay in the cache


def _has_parts(vit: Any) -> str:
    why = global_attention(vit)
    if why:
        return why
    if any(b.parts is None for b in vit.blocks):
        return f"it is defined for pre-norm blocks with one attention; a {vit.plan.kind} has other blocks."
    return ""


@dataclass(frozen=True)
class Mixed:
    """What the attention branch of one block mixes."""

    x: Float[Tensor, "b n d"]  # input of the block
    a: Float[Tensor, "b h n n"]  # attention, times the row scale s_i
    f: Float[Tensor, "b h n d"]  # what a head would send of token j
    own: Float[Tensor, "b n d"]  # T_ii
    after: Float[Tensor, "b n d"]  # x', the true state after the attention branch
    gain: Float[Tensor, " d"]  # LayerScale₂ γ₂
    centered: bool
    t: Float[Tensor, "b n"]  # 1/σ₂_i

    def second(self, vectors: Tensor) -> Tensor:
        """LayerScale₂ γ₂ ⊙ (T − mean T), before the division by σ₂."""
        return self.gain * (vectors - vectors.mean(-1, keepdim=True) if self.centered else vectors)


def _inverse_sigma(x: Tensor, norm: tuple[float, bool]) -> Float[Tensor, "b n"]:
    eps, centered = norm
    return ((x.var(-1, unbiased=False) if centered else x.pow(2).mean(-1)) + eps).rsqrt()


@dataclass(frozen=True)
class Branch:
    """The attention branch of one block, undivided."""

    parts: Parts
    x: Float[Tensor, "b n d"]  # what the block reads
    after: Float[Tensor, "b n d"]  # x', the true state after the branch
    scale: Float[Tensor, "b n"] | None  # s_i, of a norm inside the branch


def branch_of(trace: Trace, layer: int) -> Branch:
    """The attention branch of a pre-norm block, from a trace with values."""
    block, seen = trace.vit.blocks[layer], trace.mixing(layer)
    assert block.parts is not None and seen.out is not None
    parts = block.parts()
    x = trace.run.hidden[layer].detach()
    x = x if parts.before is None else parts.before(x).detach()
    z = seen.out.detach().transpose(1, 2).flatten(2)
    sent = z @ parts.output.detach().T
    scale = None if parts.inner_norm is None else _inverse_sigma(z, parts.inner_norm)
    sent = sent if scale is None else sent * scale[..., None]
    after = x + sent if parts.output_bias is None else x + sent + parts.output_bias.detach()
    return Branch(parts, x, after, scale)


def _mix(trace: Trace, layer: int) -> Mixed:
    branch, seen = branch_of(trace, layer), trace.mixing(layer)
    parts, x, after = branch.parts, branch.x, branch.after
    assert seen.v is not None
    heads, width = seen.v.shape[1], seen.v.shape[-1]
    output = parts.output.detach().unflatten(1, (heads, width))
    free = seen.v.detach() - parts.value_offset.detach().view(heads, 1, width)
    f = torch.einsum("bhjk,dhk->bhjd", free, output)
    a = seen.a.detach()
    a = a if branch.scale is None else a * branch.scale[:, None, :, None]
    own = x + torch.einsum("bhi,bhid->bid", a.diagonal(dim1=-2, dim2=-1), f)
    return Mixed(
        x,
        a,
        f,
        own,
        after,
        parts.second_gain.detach(),
        parts.second_norm[1],
        _inverse_sigma(after, parts.second_norm),
    )


def _quadratic(a: Tensor, f: Tensor, g: Tensor) -> Float[Tensor, "b n n"]:
    """Σ_hg A_hij A_gij ⟨f_hj, g_gj⟩."""
    gram = torch.einsum("bhjd,bgjd->bjhg", f, g)
    return (torch.einsum("bhij,bjhg->bgij", a, gram) * a).sum(1)


def _with_diagonal(m: Float[Tensor, "b n n"], diagonal: Float[Tensor, "b n"]) -> Float[Tensor, "b n n"]:
    return m - torch.diag_embed(m.diagonal(dim1=-2, dim2=-1)) + torch.diag_embed(diagonal)


def _attin_step(m: Tensor, *, form: str = "n") -> Tensor:
    return half_identity(m / m.sum(-1, keepdim=True).clamp_min(1e-12)) if form == "n" else m


@register_method(
    "attin",
    "matrix",
    family="decomposition",
    aggregator="rollout",
    gradient=False,
    unsupported=_has_parts,
    needs={"attention": True, "value": True},
    rollout_step=_attin_step,
)
def attin(trace: Trace, layer: int, *, form: str = "n") -> Float[Tensor, "b n n"]:
    """Norms of the vectors that attention passes between tokens (form: "n", or "n_res" with the residual)."""
    if form not in ("n", "n_res"):
        raise UnknownNameError("form", form, ("n", "n_res"))
    mixed = _mix(trace, layer)
    norms = _quadratic(mixed.a, mixed.f, mixed.f).clamp_min(0).sqrt()
    return norms if form == "n" else _with_diagonal(norms, mixed.own.norm(dim=-1))


@register_method(
    "globenc",
    "matrix",
    family="decomposition",
    aggregator="rollout",
    gradient=False,
    unsupported=_has_parts,
    needs={"attention": True, "value": True},
)
def globenc(trace: Trace, layer: int) -> Float[Tensor, "b n n"]:
    """Norms of the decomposed block without its MLP: attention, residuals and both norms."""
    mixed = _mix(trace, layer)
    u, t = mixed.second(mixed.f), mixed.t[..., None]
    square = (
        _quadratic(mixed.a, mixed.f, mixed.f)
        + 2 * t * _quadratic(mixed.a, mixed.f, u)
        + t**2 * _quadratic(mixed.a, u, u)
    )
    return _with_diagonal(square.clamp_min(0).sqrt(), (mixed.own + t * mixed.second(mixed.own)).norm(dim=-1))


@register_method(
    "alti",
    "matrix",
    family="decomposition",
    aggregator="rollout",
    gradient=False,
    unsupported=_has_parts,
    needs={"attention": True, "value": True},
)
def alti(trace: Trace, layer: int, *, against: str = "attn") -> Float[Tensor, "b n n"]:
    """L1 proximity of each token's contribution to the output (against: "attn" branch, or whole "block")."""
    if against not in ("attn", "block"):
        raise UnknownNameError("against", against, ("attn", "block"))
    mixed = _mix(trace, layer)
    y = mixed.after if against == "attn" else trace.run.hidden[layer + 1].detach()
    batch, n, d = mixed.x.shape
    rows = max(1, SLICE // (batch * n * d))
    pieces = []
    for begin in range(0, n, rows):
        i = slice(begin, min(begin + rows, n))
        part = torch.einsum("bhij,bhjd->bijd", mixed.a[:, :, i], mixed.f)
        index = torch.arange(n, device=part.device)[i]
        part[:, index - begin, index] += mixed.x[:, i]
        if against == "block":
            part = part + mixed.t[:, i, None, None] * mixed.second(part)
        distance = part.sub_(y[:, i, None]).abs_().sum(-1)
        pieces.append((y[:, i].abs().sum(-1, keepdim=True) - distance).clamp_min(0))
    c = torch.cat(pieces, dim=1)
    total = c.sum(-1, keepdim=True)
    return torch.where(total > 0, c / total.clamp_min(torch.finfo(c.dtype).tiny), torch.zeros_like(c))


def _transformation(a: Float[Tensor, "b n d"], b: Float[Tensor, "b n d"]) -> Float[Tensor, "b n"]:
    """The diagonal of W(a, b): ‖b_j‖ / ‖a_j‖ · softmax_j cos(a_j, b_j), how much of a token stays."""
    ratio = b.norm(dim=-1) / a.norm(dim=-1).clamp_min(torch.finfo(a.dtype).tiny)
    return ratio * torch.cosine_similarity(a, b, dim=-1).softmax(-1)


def _tokentm(a: Tensor, g: Tensor) -> Tensor:
    return a.mean(1) * g.relu().mean(1)


@register_method(
    "tokentm",
    "matrix",
    family="decomposition",
    aggregator="rollout",
    unsupported=_has_parts,
    needs={"attention": True, "value": True},
    fuse_heads=_tokentm,
)
def tokentm(trace: Trace, layer: int) -> Float[Tensor, "b n n"]:
    """TokenTM: attention x positive gradient, weighted by how length and direction of tokens change."""
    branch = branch_of(trace, layer)
    a, g = trace.attention(layer)
    out = trace.run.hidden[layer + 1].detach()
    matrix = a.mean(1) * _transformation(branch.x, branch.after)[:, None] * g.relu().mean(1)
    matrix = add_identity(matrix) * (1 + _transformation(branch.after, out))[:, :, None]
    return matrix * branch.x.norm(dim=-1)[:, None] if layer == 0 else matrix


def _check_bias(name: str, options: Options) -> None:
    """Biases can be distributed only where attention is held constant."""
    bias, freeze = options.get("bias", "none"), options.get("freeze")
    if bias not in ("none", "token") and freeze not in (None, 1):
        raise InputError(
            f"{name}: bias={bias!r} shares biases among tokens, which needs attention held constant, "
            f"got freeze={freeze!r}. Use freeze=1, or bias='none'."
        )


@register_method(
    "decompx",
    "map",
    family="decomposition",
    aggregator="first",
    freeze=1.0,
    check_options=_check_bias,
    needs=lambda options: {"bias": options.get("bias") == "token"},  # of the bias token, which no patch is
    input_x_gradient=lambda options: options.get("bias", "none") in ("none", "token"),
)
def decompx(trace: Trace, layer: int, *, bias: str = "none") -> Float[Tensor, "b h w"]:
    """DecompX in one backward pass (bias "none" or "token").

    bias "absdot", "norm", "equal" or "cls" shares biases among tokens, which takes the full decomposition.
    """
    if bias not in BIAS_RULES:
        raise UnknownNameError("bias", bias, BIAS_RULES)
    if bias in ("none", "token"):
        return ixg(trace, layer)
    shares = decompose(trace, layer, bias)
    return shares[:, trace.vit.prefix :].unflatten(1, trace.run.layout.grid)


METHODS.add(
    "gaze",
    Alias(
        "decompx+plus:freeze=0.75",
        score="log_odds",
        summary="Evidence for the class against the others: frozen-linear input x gradient over all blocks.",
    ),
    origin=__name__,
)
