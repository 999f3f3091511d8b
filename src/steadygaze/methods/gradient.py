"""Gradient methods on the hidden states: one score per patch at the input x^l of each block.

| name              | map at layer l                                           | source                  |
| vanilla_grad      | ‖∂y/∂x^l‖₁ over channels                                 |                         |
| vanilla_grad_norm | ‖∂y/∂x^l‖₂ over channels                                 |                         |
| ixg               | Σ_channels x^l ⊙ ∂y/∂x^l                                 | input x gradient        |
| cat               | Σ_l ixg^l                                                | = ixg+plus              |
| attixg            | AttnFrom_j · ixg_j, AttnFrom_j = mean over h, i of A_hij | Qiang et al. 2022       |
| attcat            | Σ_l attixg^l                                             | = attixg+plus           |
| fullgrad          | ixg^l + Σ of bias terms at or after l                    | Srinivas & Fleuret 2019 |
| fullgrad_plus     | Σ_l ixg^l + every bias term once                         | = fullgrad+plus         |

Equations: docs/equations.md#vanilla-grad, docs/equations.md#ixg, docs/equations.md#cat-attcat,
docs/equations.md#fullgrad, docs/equations.md#integrated-gradients, docs/equations.md#smoothgrad.

The Libra family (LibraGrad, Mehri et al. 2025; docs/equations.md#libra) is these methods and three of the CAM
family under the rules of LibraGrad, on log_prob: attention, σ of norms, slopes of activations and the length
of unit vectors are constants, and the gradient of a product of two branches (gated MLP) is halved.

Hierarchical models: each layer's map, and each block's bias terms (`trace.offsets`), are resized to the
last grid, keeping their sum. All can be run under frozen-linear rules: `freeze` (0..1) is the share of
attention held constant.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError, MethodUnavailableError, UnknownNameError
from steadygaze.methods.attention import global_attention
from steadygaze.methods.registry import METHODS, Alias, register_method
from steadygaze.methods.search import image_generators
from steadygaze.trace.capture import Trace
from steadygaze.trace.completeness import Shares
from steadygaze.trace.query import Query

SPACES = ("tokens", "pixels")


@register_method("vanilla_grad", "map", family="gradient", aggregator="first")
def vanilla_grad(trace: Trace, layer: int, *, reduce: str = "abs") -> Float[Tensor, "b h w"]:
    """L1 norm of the gradient at each token (reduce="sum": signed sum, which is zero for pre-norm ViTs)."""
    if reduce not in ("abs", "sum"):
        raise UnknownNameError("reduce", reduce, ("abs", "sum"))
    g = trace.patches(layer)[1]
    return g.abs().sum(-1) if reduce == "abs" else g.sum(-1)


@register_method("vanilla_grad_norm", "map", family="gradient", aggregator="first")
def vanilla_grad_norm(trace: Trace, layer: int) -> Float[Tensor, "b h w"]:
    """L2 norm of the gradient at each token; never negative."""
    return trace.patches(layer)[1].norm(dim=-1)


@register_method("ixg", "map", family="gradient", aggregator="first", input_x_gradient=True)
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
    """Input x gradient times the attention that a token receives (pairing: "same" layer, or the "next").

    SkipPLUS' code pairs attention with the next layer.
    """
    if pairing not in ("same", "next"):
        raise UnknownNameError("pairing", pairing, ("same", "next"))
    above = layer + (pairing == "next")
    if above >= trace.depth:
        return None  # the reference code drops the last block
    received = trace.weights(layer).mean((1, 2))
    return received[:, trace.vit.prefix :].unflatten(1, trace.run.layout.grid) * ixg(trace, above)


def _bias_maps(trace: Trace, first: int, *, implicit: bool = False) -> list[Float[Tensor, "b h w"]]:
    """Bias terms of all blocks from `first` on, and of the head, each on its own grid."""
    if implicit and any(a.v is None for record in trace.run.records for a in record.attention):
        raise MethodUnavailableError(
            f"implicit=True: a {trace.vit.plan.kind} mixes attention after softmax, whose offset is not "
            "known. Use implicit=False with freeze=1: then there are no such terms."
        )
    return [m for l in range(first, trace.depth + 1) for m in trace.bias_maps(l, implicit=implicit)]


@register_method(
    "fullgrad",
    "map",
    family="gradient",
    aggregator="first",
    added_once=_bias_maps,
    input_x_gradient=True,
    needs=lambda options: {"bias": True, "implicit": bool(options.get("implicit"))},
)
def fullgrad(trace: Trace, layer: int, *, implicit: bool = False) -> Float[Tensor, "b h w"]:
    """Input x gradient plus bias x gradient (implicit=True: also offsets of nonlinear maps; complete)."""
    return ixg(trace, layer)


METHODS.add(
    "cat", Alias("ixg+plus", summary="Input x gradient summed over the blocks (CAT)."), origin=__name__
)
METHODS.add(
    "attcat",
    Alias("attixg+plus", summary="Attention-weighted input x gradient summed over the blocks (AttCAT)."),
    origin=__name__,
)
METHODS.add(
    "fullgrad_plus",
    Alias("fullgrad+plus", summary="Input x gradient of every block and every bias once (FullGrad+)."),
    origin=__name__,
)

LIBRA = "freeze=1.0,gate=half"
for _name, _target, _summary in (
    ("libra_ixg", "ixg", "Input x gradient at the tokens"),
    ("libra_cat", "ixg+plus", "Input x gradient summed over the blocks (CAT)"),
    ("libra_attcat", "attixg+plus", "Attention-weighted input x gradient summed over the blocks (AttCAT)"),
    ("libra_fullgrad", "fullgrad", "Input x gradient plus bias x gradient (FullGrad)"),
    ("libra_fullgrad_plus", "fullgrad+plus", "Input x gradient of every block, every bias once (FullGrad+)"),
):
    METHODS.add(
        _name,
        Alias(
            f"{_target}:{LIBRA}", score="log_prob", summary=f"LibraGrad: {_summary[0].lower()}{_summary[1:]}."
        ),
        origin=__name__,
    )


@register_method("integrated_gradients", "model", family="gradient", cost=40.0)
def integrated_gradients(query: Query, *, steps: int = 20, space: str = "tokens") -> Shares:
    """Gradients along the straight path from zero, midpoint rule (space: "tokens" x^0, or "pixels")."""
    _check_positive("integrated_gradients", "steps", steps)
    if space not in SPACES:
        raise UnknownNameError("space", space, SPACES)
    end = query.images if space == "pixels" else query.tokens
    mean = torch.zeros_like(end)
    for k in range(steps):
        mean += query.gradient((k + 0.5) / steps * end, space) / steps
    product = end * mean
    scores = query.per_patch(product, space)
    total = query.at(torch.zeros_like(end), space) + product.flatten(1).sum(1)
    return Shares(scores, total - scores.sum((1, 2)))


@register_method("smoothgrad", "model", family="gradient", cost=40.0)
def smoothgrad(
    query: Query, *, samples: int = 20, noise: float = 0.1, seed: int = 0
) -> Float[Tensor, "b h w"]:
    """Magnitude of the pixel gradient averaged over noisy copies (noise: share of the image's range)."""
    _check_positive("smoothgrad", "samples", samples)
    if not 0 <= noise < float("inf"):
        raise InputError(f"smoothgrad: noise is a share of the image's range, a number >= 0, got {noise!r}")
    x = query.images
    spread = noise * (x.amax((1, 2, 3), keepdim=True) - x.amin((1, 2, 3), keepdim=True))
    mean = torch.zeros_like(x)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(samples):
        # the same noise for each image of a batch
        draw = torch.randn(x.shape[1:], generator=generator, dtype=torch.float64).to(x)
        mean += query.gradient(x + spread * draw, "pixels") / samples
    return query.per_patch(mean.abs(), "pixels")


@register_method("random", "model", family="baseline", gradient=False, class_specific=False, cost=0.0)
def random(query: Query, *, seed: int = 0) -> Float[Tensor, "b h w"]:
    """Uniform random scores, the baseline for every method; depends on the image and the seed only."""
    generators = image_generators(query.images, seed)
    draws = [torch.rand(query.grid, generator=g, dtype=torch.float64) for g in generators]
    return torch.stack(draws).to(query.images)


def _check_positive(name: str, option: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise InputError(f"{name}: {option} must be an integer >= 1, got {value!r}")
