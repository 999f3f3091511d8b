"""The CAM family: activations a and gradients g of the patches (P x channels) at the input of a block.

| name                | map_p                                                                              |
| gradcam             | Σ_k w_k a_pk, w_k = mean_p g_pk                                                    |
| xgradcam            | Σ_k w_k a_pk, w_k = Σ_p g_pk a_pk / (Σ_p a_pk + 1e-7)                              |
| xgradcam_plus       | the same with |a| inside w (Mehri et al. 2024)                                     |
| gradcam_plus_plus   | Σ_k w_k a_pk, w_k = Σ_p g⁺ α, α = g² / (2 g² + (Σ_p a_pk) g³ + 1e-6), 0 where g = 0 |
| hirescam            | Σ_k g_pk a_pk                                                                      |
| elementwise_gradcam | Σ_k (g_pk a_pk)⁺                                                                   |
| layercam            | Σ_k g⁺_pk a_pk                                                                     |

The bare name is the last block's input. Options: `at="norm1"` takes the output of the block's first norm,
as pytorch-grad-cam does; `normalise=True` divides each layer's map by its maximum (LayerCAM over layers);
`tokens="all"` lets prefix tokens into the sums over p, as SkipPLUS' code does; `relu=True` drops negative
scores. No min-max here.

Formulas: docs/equations.md#gradcam-family.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import MethodUnavailable, UnknownName
from steadygaze.method_registry import register_method
from steadygaze.trace.capture import Trace


def _weighted(a: Tensor, w: Float[Tensor, "b k"]) -> Tensor:
    return torch.einsum("bpk,bk->bp", a, w)


def gradcam(a: Tensor, g: Tensor) -> Tensor:
    """GradCAM: channels weighted by their mean gradient."""
    return _weighted(a, g.mean(1))


def xgradcam(a: Tensor, g: Tensor) -> Tensor:
    """XGradCAM: channel weights normalised by the activations' sum."""
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


def _activations(trace: Trace, layer: int, at: str) -> tuple[Tensor, Tensor]:
    if at == "input":
        return trace.tokens(layer)
    if at != "norm1":
        raise UnknownName("at", at, ("input", "norm1"))
    norms = trace.norms(layer)
    parts = trace.vit.blocks[layer].parts
    norms = (
        norms[1:] if parts is not None and parts().before is not None else norms
    )  # `norm_pre` ran in this block
    if not norms or norms[0].shape != trace.run.hidden[layer].shape:
        raise MethodUnavailable(
            f"at='norm1': block {layer} of this model does not begin with a norm over its tokens"
        )
    return norms[0].detach(), trace.grad(norms[0])


def _register(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    def cam(
        trace: Trace,
        layer: int,
        *,
        at: str = "input",
        tokens: str = "patches",
        relu: bool = False,
        normalise: bool = False,
    ) -> Float[Tensor, "b h w"]:
        block, layout = trace.vit.blocks[layer], trace.run.layout
        a, g = _activations(trace, layer, at)
        if tokens == "all" and block.spatial is None:
            image = function(a, g)[:, trace.vit.prefix :].unflatten(1, layout.grid)
        elif tokens in ("patches", "all"):
            a, g = block.patches(a, layout), block.patches(g, layout)
            image = function(a.flatten(1, 2), g.flatten(1, 2)).unflatten(1, a.shape[1:3])
        else:
            raise UnknownName("tokens", tokens, ("patches", "all"))
        image = image.relu() if relu else image
        if normalise:
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
