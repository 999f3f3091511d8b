"""The linear parts of a pre-norm attention branch, from the modules that every library builds it of."""

from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.vit.view import Parts


def linear_parts(*, norm1: nn.Module, value: tuple[Tensor, Tensor | None], output: nn.Linear, norm2: nn.Module,
                 scale1: Tensor | None = None, scale2: Tensor | None = None, inner: nn.Module | None = None,
                 groups: tuple[int, int] = (1, 1), before: nn.Module | None = None) -> Parts:  # fmt: skip
    """Parts of x + scale1 · output(inner(A · value(norm1(x)))), then of scale2 · MLP(norm2(x)).

    `value` is weight and bias; `groups` is (value heads, query heads served by each); `before` runs ahead of the block.
    """
    with torch.no_grad():
        weight, bias = value
        offset = weight.new_zeros(weight.shape[0]) if bias is None else bias
        beta = _norm(norm1)[1]
        if beta is not None:
            offset = offset + weight @ beta
        if groups[1] > 1:
            offset = offset.unflatten(0, (groups[0], -1)).repeat_interleave(groups[1], 0).flatten()
        mix: Tensor = output.weight
        shift: Tensor | None = output.bias
        inner_norm = None
        if inner is not None and not isinstance(inner, nn.Identity):
            gain, beta, eps, centred = _norm(inner)
            if beta is not None:
                shift = mix @ beta if shift is None else shift + mix @ beta
            mix = mix if gain is None else mix * gain
            mix = mix - mix.mean(1, keepdim=True) if centred else mix
            inner_norm = (eps, centred)
        if scale1 is not None:
            mix, shift = scale1[:, None] * mix, None if shift is None else scale1 * shift
        gain, _, eps, centred = _norm(norm2)
        gain = torch.ones_like(mix[:, 0]) if gain is None else gain
        gain = gain if scale2 is None else gain * scale2
        return Parts(offset, mix, inner_norm, gain, (eps, centred), output_bias=shift, before=before)


def _norm(module: Any) -> tuple[Tensor | None, Tensor | None, float, bool]:
    """(gain, bias, eps, centred) of a LayerNorm or RMSNorm."""
    gain, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    return gain, bias, getattr(module, "eps", 1e-6), "rms" not in type(module).__name__.lower()


def first(root: Any, *paths: str) -> Any:
    """The first of the dotted attributes that exists; None if none does."""
    for path in paths:
        found: Any = root
        for step in path.split("."):
            found = getattr(found, step, None)
        if found is not None:
            return found
    return None
