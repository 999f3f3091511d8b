"""Methods that read the patch tokens, in loops over patches.

norms: ‖x_p‖. pca: the projection of z_p on the eigenvector of Σ_p z_p z_pᵀ with the largest eigenvalue.
eigen: the same for the output of the last block's first norm.
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
        maps.append(_projection(z - z.mean(0)))
    return torch.stack(maps)


def _projection(z: Tensor) -> Tensor:
    """On the first eigenvector, negative at the border."""
    covariance = sum(torch.outer(x, x) for x in z)
    direction = torch.linalg.eigh(covariance).eigenvectors[:, -1]
    scores, side = z @ direction, round(len(z) ** 0.5)
    places = [divmod(p, side) for p in range(len(z))]
    border = [p for p, place in enumerate(places) if {0, side - 1} & set(place)]
    return -scores if scores[border].mean() > 0 else scores


def eigen_layers(
    model: Model, images: Tensor, target: Tensor, *, at: str = "norm1", centered: bool = True, **how: Any
) -> list[Tensor]:
    state = run(model, embed(model, images))
    maps = []
    for layer in range(len(model.blocks)):
        tokens = state.at(layer).norm1.out if at == "norm1" else state.x[layer]
        patches = tokens.detach()[:, model.num_prefix_tokens :]
        maps.append(torch.stack([_projection(z - z.mean(0) if centered else z) for z in patches]))
    return maps


def eigen(model: Model, images: Tensor, target: Tensor, **options: Any) -> Tensor:
    """The last block."""
    return eigen_layers(model, images, target, **options)[-1]
