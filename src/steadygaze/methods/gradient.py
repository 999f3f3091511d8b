"""Gradient methods on the hidden states: one score a patch at the input x^l of each block.

| name              | map at layer l                                            | source                          |
| vanilla_grad      | ‖∂y/∂x^l‖₁ over channels                                  |                                 |
| vanilla_grad_norm | ‖∂y/∂x^l‖₂ over channels                                  |                                 |
| ixg               | Σ_channels x^l ⊙ ∂y/∂x^l                                  | input x gradient                |
| cat               | Σ_l ixg^l                                                 | = ixg+plus                      |
| attixg            | AttnFrom_j · ixg_j, AttnFrom_j = mean over h, i of A_hij  | AttCAT (Qiang et al. 2022)      |
| attcat            | Σ_l attixg^l                                              | = attixg+plus                   |
| fullgrad          | ixg^l + Σ of bias terms at or after l                     | Srinivas & Fleuret 2019, for ViT |
| fullgrad_plus     | Σ_l ixg^l + every bias term once                          | = fullgrad+plus                 |

Hierarchical models: each layer's map, and each block's bias terms (`trace.offsets`), are resized to the last grid, their sum kept.
Every one of them can be run under frozen-linear rules: `freeze` (0..1) is the share of attention held constant.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import BadInput, MethodUnavailable, UnknownName
from steadygaze.method_registry import register_alias, register_method
from steadygaze.methods.attention import global_attention
from steadygaze.trace.capture import Trace


@register_method("vanilla_grad", "map", family="gradient", aggregator="first")
def vanilla_grad(trace: Trace, layer: int, *, reduce: str = "abs") -> Float[Tensor, "b h w"]:
    """Size of the gradient at each token, L1 (reduce="sum": signed; zero for every pre-norm ViT, whose LayerNorms see no mean)."""
    if reduce not in ("abs", "sum"):
        raise UnknownName("reduce", reduce, ("abs", "sum"))
    g = trace.patches(layer)[1]
    return g.abs().sum(-1) if reduce == "abs" else g.sum(-1)


@register_method("vanilla_grad_norm", "map", family="gradient", aggregator="first")
def vanilla_grad_norm(trace: Trace, layer: int) -> Float[Tensor, "b h w"]:
    """L2 norm of the gradient at each token; never negative."""
    return trace.patches(layer)[1].norm(dim=-1)


@register_method("ixg", "map", family="gradient", aggregator="first")
def ixg(trace: Trace, layer: int) -> Float[Tensor, "b h w"]:
    """Input x gradient at the tokens."""
    x, g = trace.patches(layer)
    return torch.einsum("bhwc,bhwc->bhw", x, g)


@register_method(
    "attixg",
    "map",
    family="gradient",
    aggregator="first",
    needs={"attention": True},
    unsupported=global_attention,
)
def attixg(trace: Trace, layer: int, *, pairing: str = "same") -> Float[Tensor, "b h w"] | None:
    """Input x gradient weighted by the attention that a token receives (pairing: "same" layer, or "next" as in SkipPLUS' code)."""
    if pairing not in ("same", "next"):
        raise UnknownName("pairing", pairing, ("same", "next"))
    above = layer + (pairing == "next")
    if above >= trace.depth:
        return None  # the reference drops the last block
    received = trace.weights(layer).mean((1, 2))
    return received[:, trace.vit.prefix :].unflatten(1, trace.run.layout.grid) * ixg(trace, above)


def _bias_maps(trace: Trace, first: int, *, implicit: bool = False) -> list[Float[Tensor, "b h w"]]:
    """Bias terms of every block from `first` on, and of the head, each on its own grid."""
    if implicit and any(a.v is None for record in trace.run.records for a in record.attention):
        raise MethodUnavailable(
            f"implicit=True: a {trace.vit.plan.kind} mixes attention after its softmax, and the offset of that is not known. "
            f"Leave implicit out, with freeze=1: then it has no such terms."
        )
    return [m for l in range(first, trace.depth + 1) for m in trace.bias_maps(l, implicit=implicit)]


@register_method(
    "fullgrad",
    "map",
    family="gradient",
    aggregator="first",
    added_once=_bias_maps,
    needs=lambda options: {"bias": True, "implicit": bool(options.get("implicit"))},
)
def fullgrad(trace: Trace, layer: int, *, implicit: bool = False) -> Float[Tensor, "b h w"]:
    """Input x gradient and every bias x gradient (implicit=True: also the offsets of nonlinear maps, which makes it complete)."""
    return ixg(trace, layer)


register_alias("cat", "ixg+plus", summary="Input x gradient summed over the blocks (CAT).")
register_alias(
    "attcat", "attixg+plus", summary="Attention-weighted input x gradient summed over the blocks (AttCAT)."
)
register_alias(
    "fullgrad_plus",
    "fullgrad+plus",
    summary="Input x gradient of every block and every bias once (FullGrad+).",
)


@register_method("integrated_gradients", "model", family="gradient", cost=40.0)
def integrated_gradients(ask: Any, *, steps: int = 20, space: str = "tokens") -> Float[Tensor, "b h w"]:
    """Gradients along the straight path from zero, midpoint rule (space: "tokens" x^0, or "pixels" from a mean-grey picture)."""
    _positive("integrated_gradients", "steps", steps)
    start = _start_of(ask, space)
    mean = torch.zeros_like(start)
    for k in range(steps):
        mean += ask.gradient((k + 0.5) / steps * start, space) / steps
    return ask.per_patch(start * mean, space)


@register_method("smoothgrad", "model", family="gradient", cost=40.0)
def smoothgrad(ask: Any, *, samples: int = 20, noise: float = 0.1, seed: int = 0) -> Float[Tensor, "b h w"]:
    """Size of the pixel gradient averaged over noisy copies (noise: share of the image's range)."""
    _positive("smoothgrad", "samples", samples)
    if not 0 <= noise < float("inf"):
        raise BadInput(
            f"smoothgrad: noise is a share of the image's range, a number from 0 on, got {noise!r}"
        )
    x = ask.images
    spread = noise * (x.amax((1, 2, 3), keepdim=True) - x.amin((1, 2, 3), keepdim=True))
    mean = torch.zeros_like(x)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(samples):
        draw = torch.randn(x.shape[1:], generator=generator, dtype=torch.float64).to(
            x
        )  # the same for each image of a batch
        mean += ask.gradient(x + spread * draw, "pixels") / samples
    return ask.per_patch(mean.abs(), "pixels")


@register_method("random", "model", family="baseline", gradient=False, class_specific=False, cost=0.0)
def random(ask: Any, *, seed: int = 0) -> Float[Tensor, "b h w"]:
    """Uniform random scores: the baseline that every method must beat. Depends on the image and the seed only."""
    from zlib import crc32

    draws = []
    for image in ask.images:
        key = crc32(str(seed).encode() + image.detach().cpu().double().numpy().tobytes())
        generator = torch.Generator().manual_seed(key)
        draws.append(torch.rand(ask.grid, generator=generator, dtype=torch.float64))
    return torch.stack(draws).to(ask.images)


def _positive(name: str, option: str, value: Any) -> None:
    if not isinstance(value, int) or value < 1:
        raise BadInput(f"{name}: {option} must be an integer from 1 on, got {value!r}")


def _start_of(ask: Any, space: str) -> Tensor:
    if space not in ("tokens", "pixels"):
        raise UnknownName("space", space, ("tokens", "pixels"))
    return ask.images if space == "pixels" else ask.tokens
