"""The CAM family: activations a and gradients g of the patches (P x channels) at the input of a block.

| name                | map_p                                                                              |
| gradcam             | Σ_k w_k a_pk, w_k = mean_p g_pk                                                    |
| xgradcam            | Σ_k w_k a_pk, w_k = Σ_p g_pk a_pk / (Σ_p a_pk + 1e-7)                              |
| xgradcam_plus       | the same with |a| inside w (Mehri et al. 2024)                                     |
| gradcam_plus_plus   | Σ_k w_k a_pk, w_k = Σ_p g⁺ α, α = g² / (2 g² + (Σ_p a_pk) g³ + 1e-6), 0 where g = 0 |
| hirescam            | Σ_k g_pk a_pk                                                                      |
| elementwise_gradcam | Σ_k (g_pk a_pk)⁺                                                                   |
| layercam            | Σ_k g⁺_pk a_pk                                                                     |
| shapley_cam         | Σ_k a_pk (g − ½ H a)_pk, H the Hessian of T (Cai 2025)                             |
| eigen               | ⟨a_p − mean_q a_q, v⟩, v the first right singular vector (EigenCAM, Muhammad 2020) |

The bare name is the last block's input. Options: `at="norm1"` takes the output of the block's first norm,
as pytorch-grad-cam does; `normalize=True` divides each layer's map by its maximum (LayerCAM over layers);
`tokens="all"` lets prefix tokens into the sums over p, as SkipPLUS' code does; `relu=True` drops negative
scores. No min-max here. `shapley_cam` is at the output of the last block's first norm: at the block's input
it vanishes for class-token heads, as hirescam does. `eigen` is there too, needs no class and no gradient, and
has the sign of `pca`: negative at the border of the grid. The paper does not subtract the mean
(centered=False); pytorch-grad-cam does.

Formulas: docs/equations.md#gradcam-family, docs/equations.md#shapley-cam, docs/equations.md#eigen.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import MethodUnavailableError, UnknownNameError
from steadygaze.methods.registry import METHODS, Alias, register_method
from steadygaze.methods.tokens import first_component
from steadygaze.target import at_least_float32
from steadygaze.trace.capture import Forward, Trace, forward
from steadygaze.trace.query import Query
from steadygaze.trace.record import Want


def _weighted(a: Tensor, w: Float[Tensor, "b k"]) -> Tensor:
    return torch.einsum("bpk,bk->bp", a, w)


def gradcam(a: Tensor, g: Tensor) -> Tensor:
    """GradCAM: channels weighted by their mean gradient."""
    return _weighted(a, g.mean(1))


def xgradcam(a: Tensor, g: Tensor) -> Tensor:
    """XGradCAM: channel weights normalized by the activations' sum."""
    return _weighted(a, (g * a).sum(1) / (a.sum(1) + 1e-7))


def xgradcam_plus(a: Tensor, g: Tensor) -> Tensor:
    """XGradCAM+: the same with absolute activations in the weights."""
    return _weighted(a, (g * a.abs()).sum(1) / (a.abs().sum(1) + 1e-7))


def gradcam_plus_plus(a: Tensor, g: Tensor) -> Tensor:
    """GradCAM++: positive gradients weighted by second- and third-order terms."""
    alpha = g**2 / (2 * g**2 + a.sum(1, keepdim=True) * g**3 + 1e-6)
    alpha = torch.where(g != 0, alpha, torch.zeros_like(alpha))
    return _weighted(a, (g.relu() * alpha).sum(1))


def hirescam(a: Tensor, g: Tensor) -> Tensor:
    """HiResCAM: activation x gradient, element by element."""
    return (g * a).sum(-1)


def elementwise_gradcam(a: Tensor, g: Tensor) -> Tensor:
    """GradCAM element-wise: the positive part of activation x gradient."""
    return (g * a).relu().sum(-1)


def layercam(a: Tensor, g: Tensor) -> Tensor:
    """LayerCAM: activation x positive gradient."""
    return (g.relu() * a).sum(-1)


def _first_norm(run: Forward, layer: int) -> Tensor | None:
    """The output of the block's first norm over its tokens; None if it does not begin with one."""
    norms, parts = run.records[layer].norms, run.vit.blocks[layer].parts
    norms = norms[1:] if parts is not None and parts().before is not None else norms  # `norm_pre` ran here
    return norms[0] if norms and norms[0].shape == run.hidden[layer].shape else None


def _activations(trace: Trace, layer: int, at: str) -> tuple[Tensor, Tensor]:
    if at == "input":
        return trace.tokens(layer)
    if at != "norm1":
        raise UnknownNameError("at", at, ("input", "norm1"))
    norm = _first_norm(trace.run, layer)
    if norm is None:
        raise MethodUnavailableError(
            f"at='norm1': block {layer} of this model does not begin with a norm over its tokens"
        )
    return norm.detach(), trace.grad(norm)


def _register(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    def cam(
        trace: Trace,
        layer: int,
        *,
        at: str = "input",
        tokens: str = "patches",
        relu: bool = False,
        normalize: bool = False,
    ) -> Float[Tensor, "b h w"]:
        block, layout = trace.vit.blocks[layer], trace.run.layout
        a, g = _activations(trace, layer, at)
        if tokens == "all" and block.spatial is None:
            image = function(a, g)[:, trace.vit.prefix :].unflatten(1, layout.grid)
        elif tokens in ("patches", "all"):
            a, g = block.patches(a, layout), block.patches(g, layout)
            image = function(a.flatten(1, 2), g.flatten(1, 2)).unflatten(1, a.shape[1:3])
        else:
            raise UnknownNameError("tokens", tokens, ("patches", "all"))
        image = image.relu() if relu else image
        if normalize:
            top = image.amax((-2, -1), keepdim=True)
            image = torch.where(top > 0, image / top, image)
        return image

    cam.__doc__ = function.__doc__
    register_method(
        function.__name__,
        "map",
        family="cam",
        aggregator="last",
        needs=lambda o: {"norm": o.get("at") == "norm1"},
    )(cam)


for _function in (
    gradcam,
    xgradcam,
    xgradcam_plus,
    gradcam_plus_plus,
    hirescam,
    elementwise_gradcam,
    layercam,
):
    _register(_function)


@register_method(
    "eigen",
    "map",
    family="cam",
    aggregator="last",
    gradient=False,
    needs=lambda o: {"norm": o.get("at", "auto") != "input"},
)
def eigen(trace: Trace, layer: int, *, at: str = "auto", centered: bool = True) -> Float[Tensor, "b h w"]:
    """EigenCAM: first principal component of the activations at the last block; needs no class.

    Args:
        at: "norm1", the output of the block's first norm; "input"; or "auto", norm1 if the block begins with
            one.
        centered: Whether the mean over patches is subtracted, as in pytorch-grad-cam.
    """
    block = trace.vit.blocks[layer]
    if at == "auto":
        at = "input" if _first_norm(trace.run, layer) is None else "norm1"
    a = block.patches(_activations(trace, layer, at)[0], trace.run.layout)
    return first_component(at_least_float32(a), centered=centered).to(a.dtype)


@register_method("shapley_cam", "model", family="cam", cost=2.0)
def shapley_cam(query: Query, *, at: str = "auto", weights: str = "tokens") -> Float[Tensor, "b h w"]:
    """ShapleyCAM: activation x (gradient − half a Hessian-vector product) at the last block.

    Args:
        at: "norm1", the output of the block's first norm; "input"; or "auto", norm1 if the block begins with
            one.
        weights: "tokens", each token by its own weights; "positive", the same with the positive part of each
            product, as in the author's code; "channels", their mean over patches, as in pytorch-grad-cam.
    """
    if at not in ("auto", "norm1", "input"):
        raise UnknownNameError("at", at, ("auto", "norm1", "input"))
    if weights not in ("tokens", "positive", "channels"):
        raise UnknownNameError("weights", weights, ("tokens", "positive", "channels"))
    vit, last = query.vit, len(query.vit.blocks) - 1
    # attention as a tensor of the graph: fused kernels have no second derivative
    want = Want(attention=True, norm=True)
    run = forward(vit, query.tokens, rules=query.rules, want=want, start=last, watch=last)
    norm = None if at == "input" else _first_norm(run, last)
    if norm is None and at == "norm1":
        raise MethodUnavailableError("at='norm1': the last block of this model does not begin with a norm")
    value, block = query.value(run.logits).sum(), vit.blocks[last]
    a = run.hidden[last] if norm is None else norm
    (g,) = torch.autograd.grad(value, a, create_graph=True)
    if norm is not None and at == "auto" and not block.patches(g, run.layout).any():
        a = run.hidden[last]  # a norm behind the attention, where the patches have no effect any more
        (g,) = torch.autograd.grad(value, a, create_graph=True)
    hessian_product = torch.zeros_like(a)
    if g.requires_grad:
        (found,) = torch.autograd.grad(g, a, a.detach(), allow_unused=True)
        hessian_product = hessian_product if found is None else found
    a, w = (block.patches(t.detach(), run.layout) for t in (a, g - hessian_product / 2))
    if weights == "channels":
        w = w.mean((1, 2), keepdim=True)
    products = a * w
    return (products.clamp_min(0) if weights == "positive" else products).sum(-1)


LIBRA = "freeze=1.0,gate=half,tokens=all"  # the authors' code: prefix tokens enter the sums over p
for _name, _target, _summary in (
    ("libra_gradcam_plus", "gradcam+plus", "GradCAM summed over the blocks (GradCAM+)"),
    ("libra_xgradcam_plus", "xgradcam_plus+plus", "XGradCAM+ summed over the blocks"),
    ("libra_hirescam", "hirescam", "activation x gradient at the last block (HiResCAM)"),
):
    METHODS.add(
        _name,
        Alias(f"{_target}:{LIBRA}", score="log_prob", summary=f"LibraGrad: {_summary}."),
        origin=__name__,
    )
