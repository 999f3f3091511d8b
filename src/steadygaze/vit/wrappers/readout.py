"""Which tokens feed the head of an outer model: read from the gradient of its outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from steadygaze.errors import UnsupportedModel
from steadygaze.trace.intercept import SOFTMAX, Interception, TorchFunction
from steadygaze.vit.outputs import FORWARD
from steadygaze.vit.view import Layout, Plan

Head = Callable[[Tensor, Layout], Tensor]


@dataclass(frozen=True)
class Read:
    """The tokens that a head reads.

    rows: prefix tokens; patches: whether it reads patches; pool: whether it does so by attention
    strength: a prefix token's gradient over that of a patch
    """

    rows: tuple[int, ...]
    patches: bool
    pool: bool
    strength: float

    def describe(self, patches: int) -> dict[str, Any]:
        """The fields of a plan. A head reads a token by itself if its gradient is far above a patch's."""
        if not self.patches:
            return {"readout": "class", "readout_rows": self.rows, "readout_patches": 0.0}
        if self.pool:
            return {"readout": "pool", "readout_rows": (), "readout_patches": 0.0}
        if self.rows and self.strength > patches**0.5:  # the class token beside the mean of the patches
            return {"readout": "class", "readout_rows": self.rows, "readout_patches": 0.5}
        return {"readout": "mean", "readout_rows": self.rows, "readout_patches": 0.0}


def tokens_read(head: Head, x: Tensor, layout: Layout, prefix: int) -> Read | None:
    """Which tokens `head` reads; None if its outputs are constant."""
    with torch.enable_grad(), _Attention(x.shape[1] - prefix) as attention:
        tokens = x.detach().requires_grad_()
        outputs = head(tokens, layout)
        weights = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0)).to(outputs)
        total = (outputs * weights).sum()
    gradient, pool = None, False
    if total.requires_grad:
        seen = [y for y in attention.outputs if y.requires_grad]
        gradient, *through = torch.autograd.grad(total, [tokens, *seen], allow_unused=True)
        pool = any(g is not None for g in through)  # an attention whose result is not used pools nothing
    size = torch.zeros_like(x[0, :, 0]) if gradient is None else gradient.abs().sum(-1).amax(0)
    if not size.any():
        if torch.equal(outputs.detach(), head(x.roll(1, 0), layout)):
            return None  # such as a classifier that is still zero
        raise UnsupportedModel(
            "no gradient passes from the outputs to the last block, though they depend on it: the model "
            "detaches its tokens, checkpoints activations (turn that off), or rounds. Give a forward pass "
            f"that does not: {FORWARD}."
        )
    read = size > 1e-7 * size.max()
    felt = size * x.std(-1).amax(0)  # the gradient through a norm is divided by the token's deviation
    mean = felt[prefix:].mean()
    strength = float(felt[:prefix].max() / mean) if prefix and mean > 0 else 0.0
    rows = tuple(int(i) for i in read[:prefix].nonzero()[:, 0])
    return Read(rows, bool(read[prefix:].any()), pool, strength)


class _Attention(Interception):
    """The outputs of attentions over at least `keys` tokens."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.keys = keys
        self.outputs: list[Tensor] = []
        self.intercept("sdpa", F.scaled_dot_product_attention)
        self.intercept("pooled", F.multi_head_attention_forward)
        self.intercept("softmax", *SOFTMAX)

    def sdpa(self, func: TorchFunction, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.add(func(q, k, v, *args, **kwargs), k.shape[-2])

    def pooled(self, func: TorchFunction, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        """F.multi_head_attention_forward, whose keys are (tokens, batch, width)."""
        output, weights = func(query, key, *args, **kwargs)
        return self.add(output, key.shape[0]), weights

    def softmax(self, func: TorchFunction, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.add(func(x, *args, **kwargs), x.shape[-1] if x.dim() > 2 else 0)

    def add(self, output: Tensor, keys: int) -> Tensor:
        if keys >= self.keys:
            self.outputs.append(output)
        return output


def description(plan: Plan, head: Head, x: Tensor, layout: Layout) -> dict[str, Any]:
    """What an outer model's head says of its plan, where `plan` is that of the ViT inside.

    If the head gives what the ViT's own head gives, the plan holds as it is.
    """
    logits, patches = head(x, layout), x.shape[1] - plan.prefix
    read = tokens_read(head, x, layout, plan.prefix)
    removable = {"removable": plan.removable and _takes_fewer(plan, head, x, layout)}
    try:
        own = plan.head(x, layout)
        same = own.shape == logits.shape and torch.allclose(own, logits, rtol=1e-4, atol=1e-6)
        alike = same or _fields(tokens_read(plan.head, x, layout, plan.prefix), patches) == _fields(
            read, patches
        )
    except Exception:  # the ViT has no head, or a pooled one is missing
        same = alike = False
    if same:
        return removable
    outputs = "classes" if plan.outputs == "features" else plan.outputs
    return {"outputs": outputs, **({} if alike else _fields(read, patches)), **removable}


def _fields(read: Read | None, patches: int) -> dict[str, Any]:
    return {} if read is None else read.describe(patches)


def _takes_fewer(plan: Plan, head: Head, x: Tensor, layout: Layout) -> bool:
    """Whether the head runs on fewer patches: one that needs the grid does not."""
    left = max((x.shape[1] - plan.prefix) // 2, 1)
    kept = torch.arange(left, device=x.device).expand(x.shape[0], -1)
    try:
        outputs = head(x[:, : plan.prefix + left], Layout(layout.grid, kept, layout.state))
    except Exception:  # whatever the code of others raises about a number of tokens that it did not expect
        return False
    return outputs.dim() == 2
