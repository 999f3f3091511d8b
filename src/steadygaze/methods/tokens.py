"""Methods that look at the patch tokens alone: they need no class, no gradient and no attention.

| name  | map_p                                                       | source             |
| norms | ‖x_p‖                                                       | Darcet et al. 2024 |
| pca   | ⟨z_p − mean_q z_q, v⟩, v the first principal direction of z | Oquab et al. 2023  |

x are the patch tokens at layer `at`: 0 is the input of block 0, L or -1 the output of the last block. z_p is
x_p without its mean over channels, divided by its deviation (a LayerNorm without gain and bias), so that a
few tokens with large norms do not decide; with normalize=False, x_p itself. The sign of v makes the mean of
the map over the patches at the border of the grid negative: objects are mostly inside, background touches the
border. On grids of at most two rows or columns, Σ_p map_p³ is positive.

Formulas: docs/equations.md#token-norms, docs/equations.md#token-pca.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import InputError
from steadygaze.methods.registry import register_method
from steadygaze.target import at_least_float32
from steadygaze.trace.completeness import resize_map
from steadygaze.trace.query import Query


def _patches(query: Query, at: int, name: str) -> Float[Tensor, "b h w d"]:
    """The patch tokens at a layer, on their grid."""
    count = len(query.hidden)
    if not -count <= at < count:
        raise InputError(
            f"{name}: expected at=0..{count - 1} (the inputs of blocks, and the output of the last one), or "
            f"counted from the end, -1..-{count}; got {at}"
        )
    layer = at % count
    layout = query.vit.layout(query.tokens)
    return at_least_float32(query.vit.patches(layer, query.hidden[layer], layout))


@register_method(
    "norms", "model", family="tokens", gradient=False, class_specific=False, cost=1.0, reads_hidden=True
)
def norms(query: Query, *, at: int = -1) -> Float[Tensor, "b h w"]:
    """Norms of the patch tokens at layer `at`; -1 is the output of the last block."""
    return resize_map(_patches(query, at, "norms").norm(dim=-1), query.grid).to(query.tokens.dtype)


@register_method(
    "pca", "model", family="tokens", gradient=False, class_specific=False, cost=1.0, reads_hidden=True
)
def pca(query: Query, *, at: int = -1, normalize: bool = True) -> Float[Tensor, "b h w"]:
    """First principal component of the patch tokens at layer `at`, negative at the image border."""
    x = _patches(query, at, "pca")
    z = F.layer_norm(x, x.shape[-1:]) if normalize else x
    return resize_map(first_component(z), query.grid).to(query.tokens.dtype)


def first_component(x: Float[Tensor, "b h w d"], *, centered: bool = True) -> Float[Tensor, "b h w"]:
    """Projection of the patches on their first principal direction, negative at the border of the grid.

    Args:
        centered: Whether the mean over patches is subtracted first.
    """
    grid, z = x.shape[1:3], x.flatten(1, 2)
    u, s, _ = torch.linalg.svd(z - z.mean(1, keepdim=True) if centered else z, full_matrices=False)
    projection = (u[..., 0] * s[:, :1]).unflatten(1, tuple(grid))
    border = torch.ones(grid, dtype=torch.bool, device=x.device)
    border[1:-1, 1:-1] = False
    direction = (projection**3).sum((1, 2)) if border.all() else -projection[:, border].mean(1)
    return torch.where(direction[:, None, None] < 0, -projection, projection)
