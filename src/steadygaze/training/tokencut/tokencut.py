"""TokenCut: masks without labels, from the keys of a ViT's last block (Wang et al. 2022;
docs/equations.md#tokencut).

    F_i = key of patch i, all heads side by side, of length 1        W_ij = 1 if F_i·F_j > τ else ε
    (D − W) v = λ D v, v the eigenvector of the second smallest λ     foreground: v > mean v, on the side of argmax |v|

Only the connected piece (four neighbours) that holds argmax |v| is kept. Any ViT's keys serve; the authors take DINO ViT-B/16. The keys of
models trained with labels have much in common, so that all of them look alike at τ: `centred` takes each picture's mean key away, which
changes no attention (softmax over the keys does not see it). Edges follow the picture where `bilateral.refine` draws them; the authors'
script keeps of the solver's pieces the second largest, background counted, and in effect drops the pictures where that is not the
object: here the largest piece counts, or the coarse mask.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from steadygaze.data.folders import Item
from steadygaze.data.images import read_image
from steadygaze.errors import BadInput, MethodUnavailable
from steadygaze.trace import Seam, Want
from steadygaze.training.data import Shape, told
from steadygaze.training.tokencut.bilateral_solver import piece_of, refine
from steadygaze.vit import ViT, adapt
from steadygaze.vit.view import Block, evaluation_mode, layout_of, remember

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
    """The keys of the last block, heads side by side, as a picture: prefix tokens dropped, windows put together."""
    vit = adapt(model)
    with torch.no_grad(), evaluation_mode(vit.model):
        x = vit.embed(images)
        layout, last = vit.layout(x), vit.blocks[-1]
        for block in vit.blocks[:-1]:
            x = block(x)
        keys = _keys(last, x)
        if keys is None or keys.shape[1] < x.shape[1]:
            raise MethodUnavailable(
                f"tokencut: the last block of this {vit.plan.kind} shows no key of each patch. Use a plain ViT."
            )
        if not vit.plan.global_attention:
            keys = keys[:, _order(last, x)]
    return last.patches(keys, layout)


def _keys(block: Block, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b m e"] | None:
    """Keys of a block, picture by picture, in the order in which its attention takes them (one window after the other)."""
    with _Keys() as seam:
        block(x)
    k = seam.keys
    return (
        None
        if k is None or len(k) % len(x)
        else k.transpose(1, 2).flatten(2).unflatten(0, (len(x), -1)).flatten(1, 2)
    )


def _order(block: Block, x: Float[Tensor, "b n d"]) -> Int[Tensor, " n"]:
    """Where each token's key stands among the keys: the one that changes with it. Keys of padding change with none."""
    count = x.shape[1]
    tried = x[:1].repeat(count + 1, 1, 1)
    tried[torch.arange(count) + 1, torch.arange(count)] += torch.randn(
        x.shape[-1], generator=torch.Generator().manual_seed(0)
    ).to(x)
    keys = _keys(block, remember(tried, layout_of(x, block.plan)))
    assert keys is not None
    moved = (keys[1:] - keys[:1]).abs().amax(-1)  # (token, key)
    changed = moved > 1e-3 * moved.amax()
    if not ((changed.sum(0) <= 1).all() and (changed.sum(1) == 1).all()):
        raise MethodUnavailable(
            f"tokencut: in the last block of this {block.plan.kind} a key is made of several patches. Use a plain ViT."
        )
    return changed.int().argmax(1)


def tokencut(model: nn.Module | ViT, images: Float[Tensor, "b c h w"], *, tau: float = TAU, epsilon: float = EPSILON,
             centred: bool = False) -> Bool[Tensor, "b gh gw"]:  # fmt: skip
    """Where the object is, by patch; never empty."""
    if not -1 <= tau <= 1 or not epsilon > 0:
        raise BadInput(f"tokencut: expected tau in -1..1 and epsilon above 0, got {tau} and {epsilon}")
    keys = last_keys(model, images)
    keys = keys - keys.mean((1, 2), keepdim=True) if centred else keys
    return torch.stack([cut(one, tau=tau, epsilon=epsilon) for one in keys])


def cut(
    features: Float[Tensor, "gh gw d"], *, tau: float = TAU, epsilon: float = EPSILON
) -> Bool[Tensor, "gh gw"]:
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


def tokencut_masks(model: nn.Module, items: Sequence[Item], shape: Shape, *, refined: bool = False, centred: bool = False,
                   batch: int = 16) -> dict[str, Tensor]:  # fmt: skip
    """Name -> mask (255 object, 0 rest) of every picture, squeezed whole to `shape`, as the model wants them; refined: edges by pixels."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as F

    vit, where = adapt(model), next(model.parameters()).device
    mean, std = list(shape.mean), list(shape.std)
    found: dict[str, Tensor] = {}
    for some in told(
        [items[start : start + batch] for start in range(0, len(items), batch)],
        f"TokenCut, batches of {batch}",
    ):
        squeezed = [
            F.resize(read_image(item.path), list(shape.size), InterpolationMode(shape.interpolation))
            for item in some
        ]
        pictures = torch.stack([F.to_tensor(picture) for picture in squeezed])
        cuts = tokencut(vit, F.normalize(pictures, mean, std).to(where), centred=centred).cpu()
        if refined:
            whole = (
                nn.functional.interpolate(cuts[:, None].float(), size=shape.size, mode="nearest")[:, 0] > 0.5
            )
            cuts = torch.stack([refine(mask, picture) for mask, picture in zip(whole, pictures, strict=True)])
        found |= {item.name: mask.to(torch.uint8) * 255 for item, mask in zip(some, cuts, strict=True)}
    return found
