"""Stems of FAN (convolutional, or the first two stages of ConvNeXt-B) and its Fourier position encoding."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from jaxtyping import Float
from timm.layers import LayerNorm2d, trunc_normal_
from torch import Tensor, nn

from steadygaze.models.layers import Grid


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
        normalised = (x - mean) * torch.rsqrt(variance + self.eps)
        return normalised * self.weight[:, None, None] + self.bias[:, None, None]


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

    unbiased_norm: normalise as the authors' code does, for weights that they trained. Their norm uses the
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
