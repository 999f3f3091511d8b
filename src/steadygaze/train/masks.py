"""TokenCut: masks without labels, from the keys of a ViT's last block (Wang et al. 2022; NUMERICS 1.7).

    F_i = key of patch i, all heads side by side, of length 1        W_ij = 1 if F_i·F_j > τ else ε
    (D − W) v = λ D v, v the eigenvector of the second smallest λ     foreground: v > mean v, on the side of argmax |v|

Only the connected piece (four neighbours) that holds argmax |v| is kept. The authors take DINO ViT-B/16 and refine the edges by a
bilateral solver; here the mask stays at the size of patches, and any ViT's keys serve.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from steadygaze.errors import BadInput, MethodUnavailable
from steadygaze.trace import Seam, Want
from steadygaze.vit import ViT, adapt
from steadygaze.vit.view import undisturbed

TAU, EPSILON = 0.2, 1e-5


class _Keys(Seam):
    """Sees the keys of the attention that ran last: fused, or written out as softmax(q kᵀ)."""

    def __init__(self) -> None:
        super().__init__(want=Want(hidden=False))
        self.keys: Tensor | None = None
        self.product: Tensor | None = None  # what the last matrix product was taken with

    def sdpa(self, func: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.keys = k
        return func(q, k, v, *args, **kwargs)

    def matmul(self, func: Any, a: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        if a.dim() == 4 and v.dim() == 4 and not hasattr(a, "attention_"):
            self.product = v.transpose(-2, -1)
        return super().matmul(func, a, v, **kwargs)

    def softmax(self, func: Any, x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
        y = super().softmax(func, x, dim, *args, **kwargs)
        if hasattr(y, "attention_") and self.product is not None and self.product.shape[-2] == x.shape[-1]:
            self.keys = self.product
        return y


def last_keys(model: nn.Module | ViT, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b gh gw d"]:
    """The keys of the last block, heads side by side, prefix tokens dropped."""
    vit = adapt(model)
    if not vit.plan.global_attention:
        raise MethodUnavailable(f"tokencut: a {vit.plan.kind} has no keys over all patches (windows, reduced keys). Use a plain ViT.")
    with torch.no_grad(), undisturbed(vit.model):
        x = vit.embed(images)
        grid = vit.layout(x).grid
        for block in vit.blocks[:-1]:
            x = block(x)
        with _Keys() as seam:
            vit.blocks[-1](x)
    if seam.keys is None or seam.keys.shape[-2] != x.shape[1]:
        raise MethodUnavailable(f"tokencut: the last block of this {vit.plan.kind} shows no keys of its patches")
    flat = seam.keys.transpose(1, 2).flatten(2)
    return flat[:, vit.prefix :].unflatten(1, grid)


def tokencut(model: nn.Module | ViT, images: Float[Tensor, "b c h w"], *, tau: float = TAU,
             epsilon: float = EPSILON) -> Bool[Tensor, "b gh gw"]:  # fmt: skip
    """Where the object is, by patch; never empty."""
    if not -1 <= tau <= 1 or not epsilon > 0:
        raise BadInput(f"tokencut: expected tau in -1..1 and epsilon above 0, got {tau} and {epsilon}")
    return torch.stack([cut(one, tau=tau, epsilon=epsilon) for one in last_keys(model, images)])


def cut(features: Float[Tensor, "gh gw d"], *, tau: float = TAU, epsilon: float = EPSILON) -> Bool[Tensor, "gh gw"]:
    """The normalised cut of one picture's patches, on the side that holds the most outstanding one."""
    height, width, _ = features.shape
    if height * width < 2:
        raise BadInput(f"tokencut: expected at least two patches, got a grid of {height}x{width}")
    f = nn.functional.normalize(features.flatten(0, 1).double(), dim=-1)
    w = torch.where(f @ f.T > tau, 1.0, epsilon).to(f)
    scale = w.sum(1).rsqrt()  # D^-1/2 (D − W) D^-1/2 u = λ u with u = D^1/2 v
    laplacian = torch.eye(len(w), dtype=w.dtype, device=w.device) - scale[:, None] * w * scale
    v = scale * torch.linalg.eigh(laplacian).eigenvectors[:, 1]
    seed = int(v.abs().argmax())
    inside = v > v.mean()
    if not inside[seed]:
        inside = ~inside
    return piece_of(inside.view(height, width), seed)


def piece_of(inside: Bool[Tensor, "h w"], seed: int) -> Bool[Tensor, "h w"]:
    """The connected piece (four neighbours) around place `seed`.

    >>> piece_of(torch.tensor([[True, False, True]]), 0).tolist()
    [[True, False, False]]
    """
    found = torch.zeros_like(inside)
    found.view(-1)[seed] = True
    while True:
        grown = found.clone()
        grown[1:] |= found[:-1]
        grown[:-1] |= found[1:]
        grown[:, 1:] |= found[:, :-1]
        grown[:, :-1] |= found[:, 1:]
        grown &= inside
        if torch.equal(grown, found):
            return found
        found = grown


def tokencut_masks(model: nn.Module, pictures: Any, *, batch: int = 16) -> dict[str, Tensor]:
    """Name -> mask (patches, 255 object, 0 rest) of every picture of a training set, squeezed whole to the model's size."""
    from torchvision.transforms import functional as F

    from steadygaze.data.images import read_image

    vit = adapt(model)
    where = next(model.parameters()).device
    found: dict[str, Tensor] = {}
    items = pictures.items
    for start in range(0, len(items), batch):
        some = items[start : start + batch]
        squeezed = [F.resize(read_image(item.path), list(pictures.shape.size), pictures.how(False)) for item in some]
        cuts = tokencut(vit, torch.stack([pictures.finish(picture) for picture in squeezed]).to(where))
        found |= {item.name: mask.to("cpu", torch.uint8) * 255 for item, mask in zip(some, cuts, strict=True)}
    return found
