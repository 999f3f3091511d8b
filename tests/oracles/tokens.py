"""Methods that read the patch tokens, in loops over patches.

norms: ‖x_p‖. pca: the projection of z_p on the eigenvector of Σ_p z_p z_pᵀ with the largest eigenvalue.
"""

from typing import Any

import torch
from torch import Tensor

from .vit import Model, embed, run


def _patches(model: Model, images: Tensor) -> Tensor:
    """Tokens (B, P, D) behind the last block."""
    return run(model, embed(model, images)).x[-1].detach()[:, model.num_prefix_tokens :]


def norms(model: Model, images: Tensor, target: Tensor, **how: Any) -> Tensor:
    tokens = _patches(model, images)
    return torch.stack([torch.stack([(x * x).sum() ** 0.5 for x in image]) for image in tokens])


def pca(model: Model, images: Tensor, target: Tensor, **how: Any) -> Tensor:
    maps = []
    for image in _patches(model, images):
        z = torch.stack([(x - x.mean()) / (x.var(unbiased=False) + 1e-5) ** 0.5 for x in image])
        z = z - z.mean(0)
        covariance = sum(torch.outer(x, x) for x in z)
        direction = torch.linalg.eigh(covariance).eigenvectors[:, -1]
        scores, side = z @ direction, round(len(z) ** 0.5)
        places = [divmod(p, side) for p in range(len(z))]
        border = [p for p, place in enumerate(places) if {0, side - 1} & set(place)]
        maps.append(-scores if scores[border].mean() > 0 else scores)
    return torch.stack(maps)
