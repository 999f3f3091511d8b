"""Maps of a hierarchical model's stages, resized to one grid (docs/equations.md#resize-maps)."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def resize_map(image: Float[Tensor, "b h w"], grid: tuple[int, int]) -> Float[Tensor, "b gh gw"]:
    """Resize a map to `grid` by bilinear interpolation, keeping its sum."""
    if tuple(image.shape[-2:]) == tuple(grid):
        return image
    wide = image.float() if image.dtype.itemsize < 4 else image  # CPUs do not resize in half precision
    small = F.interpolate(wide[:, None], size=grid, mode="bilinear", align_corners=False, antialias=True)
    small = small[:, 0] * (image.shape[-2] * image.shape[-1] / (grid[0] * grid[1]))
    lost = wide.sum((-2, -1), keepdim=True) - small.sum((-2, -1), keepdim=True)
    return (small + lost / (grid[0] * grid[1])).to(image.dtype)
