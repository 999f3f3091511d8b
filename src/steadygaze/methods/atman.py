"""AtMan (Deiseroth et al. 2023): the loss in output when attention to a patch is suppressed.

    s_j = f(all) − f_j,   f_j with the attention logits of key k multiplied by 1 − 0.9 c_jk, in every layer

c_jk is 1 for j itself, the cosine similarity of the token embeddings where that is over 0.7, else 0
(docs/equations.md#atman). The explained quantity is the logit unless another score is requested.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError
from steadygaze.methods.attention import global_attention
from steadygaze.methods.perturbation import BLACK_BOX, PATCHES, fill_missing, spread_order, to_grid
from steadygaze.methods.registry import register_method
from steadygaze.methods.search import check_budget, explained_values, full_runs_per_step, run_search
from steadygaze.trace.query import Query
from steadygaze.trace.seam import Seam
from steadygaze.vit.intercept import TorchFunction
from steadygaze.vit.view import remember


class SuppressedAttention(Seam):
    """Attention logits of each key multiplied by its own factor (s, n) before softmax."""

    def __init__(self, factor: Float[Tensor, "s n"], prefix: int) -> None:
        super().__init__()
        self.factor, self.prefix = factor, prefix

    def factor_of(self, keys: int) -> Float[Tensor, "s keys"]:
        """The factors of that many keys: all tokens, the patches, or a pooling's own token and all tokens."""
        f = self.factor
        factors = {
            f.shape[1]: f,
            f.shape[1] - self.prefix: f[:, self.prefix :],
            f.shape[1] + 1: F.pad(f, (1, 0), value=1.0),
        }
        if keys not in factors:
            raise InputError(
                f"atman: expected attention over {f.shape[1]} tokens, got {keys} keys in an attention of "
                f"the model"
            )
        return factors[keys]

    def sdpa(
        self,
        func: TorchFunction,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        factor = self.factor_of(k.shape[-2])
        k = k * factor[:, None, :, None].to(k)
        if attn_mask is not None and attn_mask.dtype != torch.bool:  # a position table is part of the logits
            attn_mask = attn_mask * factor[:, None, None, :].to(attn_mask)
        return super().sdpa(func, q, k, v, attn_mask, *args, **kwargs)

    def softmax(
        self, func: TorchFunction, x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        if x.dim() == 4 and dim in (-1, 3):
            x = x * self.factor_of(x.shape[-1])[:, None, None, :].to(x)
        return super().softmax(func, x, dim, *args, **kwargs)


@register_method(
    "atman", "model", cost=PATCHES + 1.0, unsupported=global_attention, **{**BLACK_BOX, "score": "logit"}
)
def atman(
    query: Query, *, budget: int | None = None, suppress: float = 0.9, similar: float = 0.7
) -> Float[Tensor, "b h w"]:
    """Decrease of the class score when attention to a patch and similar ones is suppressed (AtMan)."""
    for option, value in (("suppress", suppress), ("similar", similar)):
        if not 0 <= value <= 1:
            raise InputError(f"atman: {option} is a number in 0..1, got {value!r}")
    p, prefix = query.patches, query.vit.prefix
    order, layout = spread_order(p), query.vit.layout(query.tokens)
    unit = F.normalize(query.tokens[:, prefix:], dim=-1)
    similarity = unit @ unit.transpose(1, 2)
    c = torch.where(similarity > similar, similarity, torch.zeros_like(similarity))
    c.diagonal(dim1=1, dim2=2).fill_(1.0)
    factor = F.pad(1 - suppress * c[:, order], (prefix, 0), value=1.0)  # (B, run, token)
    factor = torch.cat([torch.ones_like(factor[:, :1]), factor], 1)

    def run(part: slice) -> Tensor:
        some = factor[:, part]
        x = remember(query.tokens.repeat_interleave(some.shape[1], 0), layout)
        with SuppressedAttention(some.flatten(0, 1), prefix):
            logits = query.vit.logits(x)
        return explained_values(query, logits.unflatten(0, some.shape[:2]))

    total = check_budget("atman", budget, 2, p + 1)
    f = run_search(query, "atman", total, full_runs_per_step(query), run, least=2)
    return to_grid(query, fill_missing(f[:, :1] - f[:, 1:], order, p))
