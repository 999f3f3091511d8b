"""CAAP (Izadi et al. 2026, "Causal Attribution via Activation Patching"): what one patch alone tells.

    s_j = f(n with x^l_j in place of token j at the inputs of blocks l = first..last) − f(n)

| symbol | variable       |                                                                        |
| n      | `neutral`      | the tokens of a neutral context, which run through the model as they are |
| x^l_j  | `query.hidden` | the token of patch j at the input of block l, in the image itself      |
| f      |                | the explained quantity, the logit unless another score is requested    |

Only the abstract was available when this was written: "inserts the corresponding source-image activations
into a neutral target context over an intermediate range of layers and uses the resulting target-class score".
Chosen here: the context is the image of the mean color (zero after normalization) with its own class token
and registers; the layers are the middle half, first = ⌊L/4⌋ and last = ⌊3L/4⌋; one patch at a time; f(n) is
subtracted, which changes no rank. Formula: docs/equations.md#caap.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError
from steadygaze.methods.attention import global_attention
from steadygaze.methods.perturbation import BLACK_BOX, PATCHES, fill_missing, spread_order, to_grid
from steadygaze.methods.registry import register_method
from steadygaze.methods.search import check_budget, explained_values, full_runs_per_step, run_search
from steadygaze.trace.query import Query
from steadygaze.vit.view import ViT, remember


def same_tokens(vit: ViT) -> str:
    """Why the tokens of a model cannot be replaced between blocks; empty if they can."""
    if vit.plan.reads_layers:
        return f"the head of a {vit.plan.kind} reads several layers."
    return global_attention(vit)


@register_method(
    "caap",
    "model",
    cost=PATCHES + 2.0,
    reads_hidden=True,
    unsupported=same_tokens,
    **{**BLACK_BOX, "score": "logit"},
)
def caap(
    query: Query, *, first: int | None = None, last: int | None = None, budget: int | None = None
) -> Float[Tensor, "b h w"]:
    """Class score of a gray image that has the states of one patch at the middle layers (CAAP)."""
    vit, p, depth = query.vit, query.patches, len(query.vit.blocks)
    first, last = depth // 4 if first is None else first, 3 * depth // 4 if last is None else last
    if not 0 <= first <= last < depth:
        raise InputError(
            f"caap: expected 0 <= first <= last <= {depth - 1}, got first={first} and last={last}"
        )
    order, batch = spread_order(p), len(query.images)
    with torch.no_grad():
        neutral = vit.embed(torch.zeros_like(query.images))
        layout = vit.layout(neutral)
        for block in vit.blocks[:first]:
            neutral = block(neutral)

    def run(part: slice) -> Tensor:
        """Run 0 is the context itself, run i has patch order[i − 1]."""
        chosen = order[max(part.start - 1, 0) : part.stop - 1]
        x = neutral[:, None].repeat(1, part.stop - part.start, 1, 1)
        patches = vit.prefix + torch.tensor(chosen, dtype=torch.long, device=x.device)
        runs = torch.arange(x.shape[1] - len(chosen), x.shape[1], device=x.device)
        for l in range(first, depth):
            if l <= last:
                x[:, runs, patches] = query.hidden[l][:, patches].to(x)
            x = vit.blocks[l](remember(x.flatten(0, 1), layout)).unflatten(0, (batch, -1))
        return explained_values(query, vit.head(remember(x.flatten(0, 1), layout)).unflatten(0, (batch, -1)))

    total = check_budget("caap", budget, 2, p + 1)
    f = run_search(query, "caap", total, full_runs_per_step(query), run, least=2)
    return to_grid(query, fill_missing(f[:, 1:] - f[:, :1], order, p))
