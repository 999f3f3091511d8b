"""PVT v1, pyramid vision transformer (Wang et al., ICCV 2021): four stages, attention to a reduced map.

Only the last stage has a class token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import DropPath, Mlp, trunc_normal_
from timm.models._builder import build_model_with_cfg
from timm.models._registry import generate_default_cfgs, register_model
from torch import Tensor, nn

from steadygaze.models.layers import Classifier, Grid, attend, cfg, init_linear, to_map, to_tokens


class Attention(nn.Module):
    """Queries from every token, keys and values from the map reduced by `reduce` in both directions."""

    def __init__(self, dim: int, heads: int, reduce: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.sr = nn.Conv2d(dim, dim, reduce, stride=reduce) if reduce > 1 else None
        self.norm = nn.LayerNorm(dim) if reduce > 1 else nn.Identity()

    def forward(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b n d"]:
        source = x if self.sr is None else self.norm(to_tokens(self.sr(to_map(x, grid))))
        k, v = self.kv(source).chunk(2, dim=-1)
        return self.proj(attend(self.q(x), k, v, self.num_heads))


class Block(nn.Module):
    """A transformer block on a map of patches; `prefix` is the number of class tokens before them."""

    def __init__(
        self, dim: int, heads: int, ratio: float, reduce: int, drop_path: float, prefix: int
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, heads, reduce)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), Mlp(dim, int(dim * ratio))
        self.drop_path1, self.drop_path2 = DropPath(drop_path), DropPath(drop_path)

    def forward(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b n d"]:
        x = x + self.drop_path1(self.attn(self.norm1(x), grid))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class Stage(nn.Module):
    """Patch embedding, position embedding and blocks of one stage."""

    def __init__(
        self, before: int, dim: int, patch: int, grid: Grid, blocks: list[Block], prefix: int
    ) -> None:
        super().__init__()
        self.grid, self.prefix = grid, prefix
        self.proj, self.norm = nn.Conv2d(before, dim, patch, stride=patch), nn.LayerNorm(dim)
        self.pos_embed = nn.Parameter(
            trunc_normal_(torch.empty(1, prefix + grid[0] * grid[1], dim), std=0.02)
        )
        self.cls_token = nn.Parameter(trunc_normal_(torch.empty(1, 1, dim), std=0.02)) if prefix else None
        self.blocks = nn.ModuleList(blocks)

    def embed(self, x: Float[Tensor, "b c h w"]) -> tuple[Float[Tensor, "b n d"], Grid]:
        """Tokens at the input of the first block, position embedding added, and their grid."""
        x = self.proj(x)
        grid = (x.shape[2], x.shape[3])
        x = self.norm(to_tokens(x))
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return x + self.positions(grid), grid

    def positions(self, grid: Grid) -> Float[Tensor, "1 n d"]:
        """The learned position embedding, resized for other image sizes."""
        if grid == self.grid:
            return self.pos_embed
        learned = to_map(self.pos_embed[:, self.prefix :], self.grid)
        patches = F.interpolate(learned, size=grid, mode="bilinear")
        return torch.cat([self.pos_embed[:, : self.prefix], to_tokens(patches)], dim=1)


class PVT(Classifier):
    """Stages with patches of 4, 8, 16 and 32 pixels; logits from the class token of the last stage.

    Examples:
        >>> one, width = (1, 1, 1, 1), (8, 8, 8, 8)
        >>> model = PVT(img_size=32, depths=one, embed_dims=width, num_heads=one, num_classes=10)
        >>> model.eval()(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        depths: tuple[int, ...] = (2, 2, 2, 2),
        embed_dims: tuple[int, ...] = (64, 128, 320, 512),
        num_heads: tuple[int, ...] = (1, 2, 5, 8),
        mlp_ratios: tuple[float, ...] = (8, 8, 4, 4),
        sr_ratios: tuple[int, ...] = (8, 4, 2, 1),
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.img_size, self.in_chans = (height, width), in_chans
        self.num_classes, self.num_features = num_classes, embed_dims[-1]
        rates = torch.linspace(0, drop_path_rate, sum(depths), device="cpu").tolist()
        self.stages, before = nn.ModuleList(), in_chans
        settings = zip(depths, embed_dims, num_heads, mlp_ratios, sr_ratios, strict=True)
        for s, (depth, dim, heads, ratio, reduce) in enumerate(settings):
            patch, prefix = 2 if s else 4, int(s + 1 == len(depths))
            height, width = height // patch, width // patch
            blocks = [Block(dim, heads, ratio, reduce, rates.pop(0), prefix) for _ in range(depth)]
            self.stages.append(Stage(before, dim, patch, (height, width), blocks, prefix))
            before = dim
        self.norm = nn.LayerNorm(self.num_features, eps=1e-6)
        self.head = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()
        self.apply(init_linear)

    @property
    def patch_embed(self) -> nn.Module:
        """The first module that receives the images."""
        return self.stages[0].proj  # type: ignore[return-value]

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith("cls_token")}

    def forward_features(self, x: Tensor) -> Float[Tensor, "b n d"]:
        for stage in self.stages:
            tokens, grid = stage.embed(x)  # type: ignore[operator]
            for block in stage.blocks:  # type: ignore[union-attr]
                tokens = block(tokens, grid)
            if stage is not self.stages[-1]:
                x = to_map(tokens, grid)
        return self.norm(tokens)


default_cfgs = generate_default_cfgs(
    {f"{name}.untrained": cfg("stages.0.proj") for name in ("pvt_tiny", "pvt_small")}
)


@register_model
def pvt_tiny(pretrained: bool = False, **kwargs: Any) -> PVT:
    return build_model_with_cfg(PVT, "pvt_tiny", pretrained, **{"depths": (2, 2, 2, 2), **kwargs})


@register_model
def pvt_small(pretrained: bool = False, **kwargs: Any) -> PVT:
    return build_model_with_cfg(PVT, "pvt_small", pretrained, **{"depths": (3, 4, 6, 3), **kwargs})
