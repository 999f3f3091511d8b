"""FAN, fully attentional network (Zhou et al., ICML 2022): channel attention takes the place of the MLP.

FAN-ViT models have a convolutional stem, FAN-Hybrid models the first two stages of ConvNeXt-B; positions are
encoded by Fourier features. The class token is added after the blocks, for two class-attention blocks.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import DropPath, LayerNorm2d, Mlp, trunc_normal_
from timm.models._builder import build_model_with_cfg
from timm.models._registry import generate_default_cfgs, register_model
from torch import Tensor, nn

from steadygaze.models.layers import (
    Classifier,
    Grid,
    attend,
    cfg,
    init_linear,
    split_heads,
    to_map,
    to_tokens,
)


class ConvStem(nn.Sequential):
    """Four 3x3 convolutions of stride 2 with batch norms and GELU: 224 pixels -> 14x14 tokens."""

    def __init__(self, width: int, in_chans: int = 3) -> None:
        channels = [in_chans, width // 8, width // 4, width // 2, width]
        layers: list[nn.Module] = []
        for before, after in pairwise(channels):
            layers += [
                nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.GELU(),
            ]
        super().__init__(*layers[:-1])


class UnbiasedLayerNorm2d(LayerNorm2d):
    """LayerNorm over channels with the unbiased variance, Σ(x − μ)² / (C − 1)."""

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        variance, mean = torch.var_mean(x, dim=1, keepdim=True, correction=1)
        normalized = (x - mean) * torch.rsqrt(variance + self.eps)
        return normalized * self.weight[:, None, None] + self.bias[:, None, None]


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int, norm_layer: type[LayerNorm2d] = LayerNorm2d) -> None:
        super().__init__()
        self.dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = norm_layer(width, eps=1e-6)
        self.fc1, self.act = nn.Conv2d(width, 4 * width, 1), nn.GELU()
        self.fc2 = nn.Conv2d(4 * width, width, 1)
        self.gamma = nn.Parameter(1e-6 * torch.ones(width))

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        return x + self.gamma[:, None, None] * self.fc2(self.act(self.fc1(self.norm(self.dw(x)))))


class ConvNeXtStem(nn.Module):
    """n₁ blocks at 128 channels (56x56), n₂ at 256 (28x28), then a convolution to 14x14 tokens.

    Attributes:
        unbiased_norm: Normalize as the authors' code does, for weights that they trained. Their norm uses the
            unbiased variance if its input is not contiguous, which holds for every norm but the first.
    """

    def __init__(
        self,
        width: int,
        blocks: tuple[int, int],
        in_chans: int = 3,
        channels: tuple[int, int] = (128, 256),
        unbiased_norm: bool = False,
    ) -> None:
        super().__init__()
        norm_layer = UnbiasedLayerNorm2d if unbiased_norm else LayerNorm2d
        self.backbone = nn.Sequential(
            nn.Conv2d(in_chans, channels[0], 4, stride=4),
            LayerNorm2d(channels[0], eps=1e-6),
            *(ConvNeXtBlock(channels[0], norm_layer) for _ in range(blocks[0])),
            norm_layer(channels[0], eps=1e-6),
            nn.Conv2d(channels[0], channels[1], 2, stride=2),
            *(ConvNeXtBlock(channels[1], norm_layer) for _ in range(blocks[1])),
        )
        self.proj = nn.Conv2d(channels[1], width, 2, stride=2)
        for module in self.backbone.modules():
            if isinstance(module, nn.Conv2d) and module.bias is not None:
                trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d gh gw"]:
        return self.proj(self.backbone(x))


class FourierPositions(nn.Module):
    """Sines and cosines of row and column, 32 features each, projected by a learned 1x1 convolution."""

    def __init__(self, width: int, features: int = 32) -> None:
        super().__init__()
        self.features = features
        self.proj = nn.Conv2d(2 * features, width, 1)

    def axis(self, length: int, like: Tensor) -> Float[Tensor, "n f"]:
        """[sin φω₀, cos φω₀, sin φω₁, ...] for φ = 2πi/length, i = 1..length."""
        index = torch.arange(1, length + 1, device=like.device, dtype=like.dtype)
        phase = 2 * math.pi * index / (length + 1e-6)
        frequency = torch.arange(self.features // 2, device=like.device, dtype=like.dtype)
        omega = 10000 ** (-2 * frequency / self.features)
        angle = phase[:, None] * omega
        return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)

    def forward(self, grid: Grid) -> Float[Tensor, "1 d h w"]:
        rows, columns = (self.axis(n, self.proj.weight) for n in grid)
        pairs = [rows[:, None].expand(-1, grid[1], -1), columns[None].expand(grid[0], -1, -1)]
        return self.proj(torch.cat(pairs, dim=2).permute(2, 0, 1)[None])


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.kv, self.proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        k, v = self.kv(x).chunk(2, dim=-1)
        return self.proj(attend(self.q(x), k, v, self.num_heads))


class LocalMix(nn.Module):
    """Depthwise 3x3, GELU, batch norm, depthwise 3x3."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.act, self.norm = nn.GELU(), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, groups=width)
        for conv in (self.conv1, self.conv2):
            nn.init.normal_(conv.weight, std=(2 / 9) ** 0.5)
            assert conv.bias is not None
            nn.init.zeros_(conv.bias)

    def forward(self, x: Float[Tensor, "b n c"], grid: Grid) -> Float[Tensor, "b n c"]:
        return to_tokens(self.conv2(self.norm(self.act(self.conv1(to_map(x, grid))))))


class ChannelAttention(nn.Module):
    """s ⊙ LN(MLP(u)), s = τ·σ(Qᵀ K): one scale per channel; Q and K are softmaxes over the tokens."""

    def __init__(self, dim: int, heads: int, ratio: float = 4.0) -> None:
        super().__init__()
        hidden = int(dim * ratio)
        self.num_heads = heads
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1))
        self.q = nn.Linear(dim, dim)
        self.fc1, self.local, self.fc2 = nn.Linear(dim, hidden), LocalMix(hidden), nn.Linear(hidden, dim)
        self.gamma = nn.Parameter(torch.ones(hidden))
        self.norm_v = nn.LayerNorm(dim)

    def forward(self, u: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b n d"]:
        q = split_heads(self.q(u), self.num_heads).softmax(dim=2)
        k = split_heads(u, self.num_heads).softmax(dim=2).mean(3, keepdim=True)
        s = self.temperature * (q.transpose(2, 3) @ k).sigmoid()
        t = self.fc1(u)
        t = t + self.gamma * self.local(t, grid)
        return s.flatten(1)[:, None] * self.norm_v(self.fc2(t))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, drop_path: float) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), ChannelAttention(dim, heads)
        self.gamma1, self.gamma2 = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))
        self.drop_path1, self.drop_path2 = DropPath(drop_path), DropPath(drop_path)

    def forward(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b n d"]:
        x = x + self.drop_path1(self.gamma1 * self.attn(self.norm1(x)))
        return x + self.drop_path2(self.gamma2 * self.mlp(self.norm2(x), grid))


class ClassAttention(nn.Module):
    """Attention whose only query is the class token."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, u: Float[Tensor, "b n d"]) -> Float[Tensor, "b 1 d"]:
        return self.proj(attend(self.q(u[:, :1]), self.k(u), self.v(u), self.num_heads))


class ClassBlock(nn.Module):
    """Class attention and an MLP on the class token.

    The second residual is added to the output of the norm, so that patches leave the block as twice that
    output.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), ClassAttention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), Mlp(dim, 4 * dim)
        self.gamma1, self.gamma2 = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def forward(self, z: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        u = self.norm1(z)
        z = z + self.gamma1 * torch.cat([self.attn(u), u[:, 1:]], dim=1)
        w = self.norm2(z)
        return w + torch.cat([self.gamma2 * self.mlp(w[:, :1]), w[:, 1:]], dim=1)


class FAN(Classifier):
    """FAN. convnext: depths of the two stages of a ConvNeXt stem; None is the convolutional stem.

    Attributes:
        unbiased_norm: The norm of the authors' ConvNeXt stem; needed for weights that the authors trained.

    Examples:
        >>> small = {"img_size": 32, "embed_dim": 32, "depth": 1, "num_heads": 2, "class_blocks": 1}
        >>> model = FAN(**small, num_classes=10).eval()
        >>> model(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 4,
        convnext: tuple[int, int] | None = None,
        unbiased_norm: bool = False,
        class_blocks: int = 2,
        drop_path_rate: float = 0.0,
        head_init_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.in_chans = in_chans
        self.num_classes, self.num_features, self.embed_dim = num_classes, embed_dim, embed_dim
        if convnext is None:
            self.patch_embed: nn.Module = ConvStem(embed_dim, in_chans)
        else:
            self.patch_embed = ConvNeXtStem(embed_dim, convnext, in_chans, unbiased_norm=unbiased_norm)
        self.pos_embed = FourierPositions(embed_dim)
        # the drop path rate is the same in all blocks
        self.blocks = nn.ModuleList(Block(embed_dim, num_heads, drop_path_rate) for _ in range(depth))
        self.cls_token = nn.Parameter(trunc_normal_(torch.empty(1, 1, embed_dim), std=0.02))
        self.cls_blocks = nn.ModuleList(ClassBlock(embed_dim, num_heads) for _ in range(class_blocks))
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes > 0 else nn.Identity()
        self.apply(init_linear)
        if isinstance(self.head, nn.Linear):
            self.head.weight.data.mul_(head_init_scale)

    def no_weight_decay(self) -> set[str]:
        return {"pos_embed", "cls_token"}

    def embed(self, images: Tensor) -> tuple[Float[Tensor, "b n d"], Grid]:
        """Tokens at the input of the first block, and their grid."""
        x = self.patch_embed(images)
        grid = (x.shape[2], x.shape[3])
        return to_tokens(x + self.pos_embed(grid)), grid

    def read_out(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b m d"]:
        """Class token and patches after the class-attention blocks and the final norm."""
        z = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        for block in self.cls_blocks:
            z = block(z)
        return self.norm(z)

    def forward_features(self, x: Tensor) -> Float[Tensor, "b m d"]:
        x, grid = self.embed(x)
        for block in self.blocks:
            x = block(x, grid)
        return self.read_out(x)


SIZES: dict[str, dict[str, Any]] = {
    "fan_tiny_12_p16_224": {"embed_dim": 192, "depth": 12, "num_heads": 4},
    "fan_small_12_p16_224": {"embed_dim": 384, "depth": 12, "num_heads": 8},
    "fan_base_18_p16_224": {"embed_dim": 448, "depth": 18, "num_heads": 8},
    "fan_large_24_p16_224": {"embed_dim": 480, "depth": 24, "num_heads": 10},
    "fan_tiny_8_p4_hybrid": {"embed_dim": 192, "depth": 8, "num_heads": 8, "convnext": (3, 3)},
    "fan_small_12_p4_hybrid": {"embed_dim": 384, "depth": 10, "num_heads": 8, "convnext": (3, 3)},
    "fan_base_16_p4_hybrid": {"embed_dim": 448, "depth": 16, "num_heads": 8, "convnext": (3, 3)},
    "fan_large_16_p4_hybrid": {
        "embed_dim": 480,
        "depth": 22,
        "num_heads": 10,
        "convnext": (3, 5),
        "head_init_scale": 0.001,
    },
}
default_cfgs = generate_default_cfgs(
    {
        f"{name}.untrained": cfg("patch_embed.backbone.0" if "convnext" in size else "patch_embed.0")
        for name, size in SIZES.items()
    }
)


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> FAN:
    return build_model_with_cfg(FAN, name, pretrained, **{**SIZES[name], **kwargs})


@register_model
def fan_tiny_12_p16_224(pretrained: bool = False, **kwargs: Any) -> FAN:
    return _create("fan_tiny_12_p16_224", pretrained, kwargs)


@register_model
def fan_small_12_p16_224(pretrained: bool = False, **kwargs: Any) -> FAN:
    return _create("fan_small_12_p16_224", pretrained, kwargs)


@register_model
def fan_base_18_p16_224(pretrained: bool = False, **kwargs: Any) -> FAN:
    return _create("fan_base_18_p16_224", pretrained, kwargs)


@register_model
def fan_large_24_p16_224(pretrained: bool = False, **kwargs: Any) -> FAN:
    return _create("fan_large_24_p16_224", pretrained, kwargs)


@register_model
def fan_tiny_8_p4_hybrid(pretrained: bool = False, **kwargs: Any) -> FAN:
    return _create("fan_tiny_8_p4_hybrid", pretrained, kwargs)


@register_model
def fan_small_12_p4_hybrid(pretrained: bool = False, **kwargs: Any) -> FAN:
    return _create("fan_small_12_p4_hybrid", pretrained, kwargs)


@register_model
def fan_base_16_p4_hybrid(pretrained: bool = False, **kwargs: Any) -> FAN:
    return _create("fan_base_16_p4_hybrid", pretrained, kwargs)


@register_model
def fan_large_16_p4_hybrid(pretrained: bool = False, **kwargs: Any) -> FAN:
    return _create("fan_large_16_p4_hybrid", pretrained, kwargs)
