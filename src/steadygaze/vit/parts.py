"""The linear parts of a pre-norm attention branch, from the modules that every library builds it of."""

from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import MethodUnavailableError
from steadygaze.vit.view import Parts

Linear = tuple[Tensor, Tensor | None]  # weight and bias


@torch.no_grad()
def linear(module: nn.Module) -> Linear:
    """Weight and bias of a linear map; for a wrapped one (such as LoRA), the effective ones."""
    if type(module) is nn.Linear and not (module._forward_hooks or module._forward_pre_hooks):
        return module.weight, module.bias
    inner = next((m for m in module.modules() if isinstance(m, nn.Linear)), None)
    width = getattr(module, "in_features", getattr(inner, "in_features", None))
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    if width is not None and parameter is not None:
        eye = torch.eye(width, device=parameter.device, dtype=parameter.dtype)
        bias = module(torch.zeros_like(eye))[0]
        weight = (module(eye) - bias).T
        if torch.allclose(
            module(-eye.cumsum(0)),
            bias - weight.T.cumsum(0),
            rtol=1e-3,
            atol=1e-3 * float(weight.abs().max()),
        ):
            return weight, bias
    raise MethodUnavailableError(
        f"a {type(module).__name__} stands where attention has a linear map, and what it does is not one"
    )


def linear_parts(
    *,
    norm1: nn.Module,
    value: Linear,
    output: Linear,
    norm2: nn.Module,
    scale1: Tensor | None = None,
    scale2: Tensor | None = None,
    inner: nn.Module | None = None,
    groups: tuple[int, int] = (1, 1),
    before: nn.Module | None = None,
) -> Parts:
    """Parts of x + scale1 · output(inner(A · value(norm1(x)))), then of scale2 · MLP(norm2(x)).

    `value` and `output` are weight and bias; `groups` is (value heads, query heads served by each);
    `before` runs ahead of the block.
    """
    with torch.no_grad():
        weight, bias = value
        offset = weight.new_zeros(weight.shape[0]) if bias is None else bias
        beta = _norm(norm1)[1]
        if beta is not None:
            offset = offset + weight @ beta
        if groups[1] > 1:
            offset = offset.unflatten(0, (groups[0], -1)).repeat_interleave(groups[1], 0).flatten()
        mix, shift = output
        inner_norm = None
        if inner is not None and not isinstance(inner, nn.Identity):
            gain, beta, eps, centered = _norm(inner)
            if beta is not None:
                shift = mix @ beta if shift is None else shift + mix @ beta
            mix = mix if gain is None else mix * gain
            mix = mix - mix.mean(1, keepdim=True) if centered else mix
            inner_norm = (eps, centered)
        if scale1 is not None:
            mix, shift = scale1[:, None] * mix, None if shift is None else scale1 * shift
        gain, _, eps, centered = _norm(norm2)
        gain = torch.ones_like(mix[:, 0]) if gain is None else gain
        gain = gain if scale2 is None else gain * scale2
        return Parts(offset, mix, inner_norm, gain, (eps, centered), output_bias=shift, before=before)


def _norm(module: Any) -> tuple[Tensor | None, Tensor | None, float, bool]:
    """(gain, bias, eps, centered) of a LayerNorm or RMSNorm."""
    gain, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return gain, bias, getattr(module, "eps", 1e-6), "rms" not in type(module).__name__.lower()


def classifies(model: Any) -> bool:
    """Whether a timm model ends in a classifier; `num_classes=0` leaves it out."""
    return not (hasattr(model, "get_classifier") and isinstance(model.get_classifier(), nn.Identity))


def first(root: Any, *paths: str) -> Any:
    """The first of the dotted attributes that exists; None if none does."""
    for path in paths:
        value: Any = root
        for step in path.split("."):
            value = getattr(value, step, None)
        if value is not None:
            return value
    return None
