"""LocalViT (Li et al., 2021): DeiT with a depthwise convolution and squeeze-and-excitation in its FFN.

The FFN is applied to the patches only, without a norm before it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from timm.layers import DropPath, PatchEmbed, trunc_normal_
from timm.models._builder import build_model_with_cfg
from timm.models._registry import generate_default_cfgs, register_model
from torch import Tensor, nn

from steadygaze.models.layers import Classifier, Grid, attend, cfg, init_linear, to_map, to_tokens


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.proj(attend(q, k, v, self.num_heads))


class _HardSigmoid(torch.autograd.Function):
    """F.hardsigmoid with a second derivative, which torch does not implement."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return F.hardsigmoid(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return g * ((x > -3) & (x < 3)) / 6

    @staticmethod
    def jvp(ctx: Any, t: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return t * ((x > -3) & (x < 3)) / 6


class SqueezeExcite(nn.Module):
    """Channels scaled by a gate computed from their means over the map."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        gate = _HardSigmoid.apply(self.fc2(F.relu(self.fc1(x.mean((2, 3))))))[:, :, None, None]
        gate.activation_ = True  # for the seam: this factor of the product is the gate
        return gate * x


class LocalFFN(nn.Module):
    """1x1, depthwise 3x3 and 1x1 convolutions with batch norms, h-swish and squeeze-and-excitation."""

    def __init__(self, dim: int, ratio: float, reduction: int) -> None:
        super().__init__()
        hidden = int(dim * ratio)
        self.fc1, self.norm1 = nn.Conv2d(dim, hidden, 1, bias=False), nn.BatchNorm2d(hidden)
        self.dw = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False)
        self.norm2 = nn.BatchNorm2d(hidden)
        self.se = SqueezeExcite(hidden, hidden // reduction)
        self.fc2, self.norm3 = nn.Conv2d(hidden, dim, 1, bias=False), nn.BatchNorm2d(dim)
        self.act = nn.Hardswish()

    def forward(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b n d"]:
        x = self.act(self.norm1(self.fc1(to_map(x, grid))))
        x = self.se(self.act(self.norm2(self.dw(x))))
        return to_tokens(self.norm3(self.fc2(x)))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, ratio: float, reduction: int, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, heads)
        self.drop_path1 = DropPath(drop_path)
        self.mlp = LocalFFN(dim, ratio, reduction)

    def forward(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b n d"]:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        patches = x[:, 1:]
        return torch.cat([x[:, :1], patches + self.mlp(patches, grid)], dim=1)


class LocalViT(Classifier):
    """A class token, a learned position embedding, one grid; the image size is fixed.

    Examples:
        >>> model = LocalViT(img_size=32, embed_dim=32, depth=1, num_heads=2, se_reduction=8, num_classes=10)
        >>> model.eval()(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        patch_size: int = 16,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        se_reduction: int = 192,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.in_chans, self.num_classes = in_chans, num_classes
        self.num_features, self.embed_dim = embed_dim, embed_dim
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim)
        self.img_size: tuple[int, int] = self.patch_embed.img_size
        self.grid: Grid = self.patch_embed.grid_size
        self.cls_token = nn.Parameter(trunc_normal_(torch.empty(1, 1, embed_dim), std=0.02))
        positions = torch.empty(1, 1 + self.patch_embed.num_patches, embed_dim)
        self.pos_embed = nn.Parameter(trunc_normal_(positions, std=0.02))
        rates = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mlp_ratio, se_reduction, rate) for rate in rates
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes > 0 else nn.Identity()
        self.apply(init_linear)

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    def embed(self, images: Tensor) -> Float[Tensor, "b n d"]:
        """Tokens at the input of the first block, position embedding added."""
        x = self.patch_embed(images)
        return torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed

    def forward_features(self, x: Tensor) -> Float[Tensor, "b n d"]:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, self.grid)
        return self.norm(x)


default_cfgs = generate_default_cfgs(
    {"localvit_tiny_mlp4_act3_r192.untrained": cfg("patch_embed.proj", fixed_input_size=True)}
)


@register_model
def localvit_tiny_mlp4_act3_r192(pretrained: bool = False, **kwargs: Any) -> LocalViT:
    return build_model_with_cfg(LocalViT, "localvit_tiny_mlp4_act3_r192", pretrained, **kwargs)
