"""RVT, robust vision transformer (Mao et al., CVPR 2022): convolutional stem and FFN, mean pooling.

RVT has neither a position embedding nor a class token. `_plus` models (RVT* in the paper) scale the
attention logits of their first blocks by position: softmax((q kᵀ / √d) ⊙ σ(M)), with a learned matrix M for
each head, which fixes the grid. RVT-B has a plain FFN; `conv_ffn=True` gives it the convolutional one, on
which TAP was evaluated.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from timm.layers import DropPath, Mlp, trunc_normal_
from timm.models._builder import build_model_with_cfg
from timm.models._registry import generate_default_cfgs, register_model
from torch import Tensor, nn

from steadygaze.models.layers import Classifier, Grid, attend, cfg, split_heads, to_map, to_tokens


class Stem(nn.Module):
    """224 pixels -> 111 -> 56 -> 14x14 tokens, without an activation."""

    def __init__(self, width: int, in_chans: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_chans, 32, 7, stride=2, padding=2)
        self.norm = nn.BatchNorm2d(32)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        self.proj = nn.Conv2d(32, width, 4, stride=4)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d gh gw"]:
        return self.proj(self.pool(self.norm(self.conv(x))))

    @staticmethod
    def grid(height: int, width: int) -> Grid:
        """Rows and columns of the tokens of images of this size."""
        rows, columns = (((n - 3) // 2 + 1 - 1) // 2 + 1 for n in (height, width))
        return rows // 4, columns // 4


class Attention(nn.Module):
    """Self-attention. tokens: their number, if the attention logits are scaled by position."""

    def __init__(self, dim: int, heads: int, tokens: int | None = None) -> None:
        super().__init__()
        self.num_heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.scaling = None
        if tokens is not None:  # σ(M) starts at about 1/2
            scaling = torch.empty(heads, tokens, tokens)
            self.scaling = nn.Parameter(trunc_normal_(scaling, std=0.02, a=-0.02, b=0.02))

    def forward(self, x: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.scaling is None:
            return self.proj(attend(q, k, v, self.num_heads))
        q, k, v = (split_heads(t, self.num_heads) for t in (q, k, v))
        logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        weights = torch.softmax(logits * self.scaling.sigmoid(), dim=-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class ConvFFN(nn.Module):
    """1x1, depthwise 3x3 and 1x1 convolutions on the map, each followed by a batch norm."""

    def __init__(self, dim: int, ratio: float = 4.0) -> None:
        super().__init__()
        hidden = int(dim * ratio)
        self.fc1, self.norm1 = nn.Conv2d(dim, hidden, 1), nn.BatchNorm2d(hidden)
        self.dw, self.norm2 = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden), nn.BatchNorm2d(hidden)
        self.fc2, self.norm3 = nn.Conv2d(hidden, dim, 1), nn.BatchNorm2d(dim)
        self.act = nn.GELU()

    def forward(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b n d"]:
        x = self.act(self.norm1(self.fc1(to_map(x, grid))))
        x = self.act(self.norm2(self.dw(x)))
        return to_tokens(self.norm3(self.fc2(x)))


class LinearFFN(Mlp):
    """The plain MLP, which ignores the grid."""

    def forward(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b n d"]:
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, *, conv_ffn: bool, tokens: int | None, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, heads, tokens)
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = ConvFFN(dim) if conv_ffn else LinearFFN(dim, 4 * dim)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, x: Float[Tensor, "b n d"], grid: Grid) -> Float[Tensor, "b n d"]:
        x = x + self.drop_path1(self.attn(self.norm1(x)))
        return x + self.drop_path2(self.mlp(self.norm2(x), grid))


class RVT(Classifier):
    """One or two stages; between them a grouped convolution halves the grid.

    Attributes:
        scaled_blocks: Number of first blocks that scale their attention by position, which fixes the image
            size.

    Examples:
        >>> model = RVT(img_size=32, depths=(1,), embed_dims=(32,), num_heads=(2,), num_classes=10).eval()
        >>> model(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 10])
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        depths: tuple[int, ...] = (12,),
        embed_dims: tuple[int, ...] = (384,),
        num_heads: tuple[int, ...] = (6,),
        conv_ffn: bool = True,
        scaled_blocks: int = 0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.img_size, self.in_chans = (height, width), in_chans
        self.num_classes, self.num_features = num_classes, embed_dims[-1]
        self.scaled_blocks, self.conv_ffn = scaled_blocks, conv_ffn
        self.patch_embed = Stem(embed_dims[0], in_chans)
        rows, columns = Stem.grid(height, width)
        total, done = sum(depths), 0
        self.stages, self.downsamples = nn.ModuleList(), nn.ModuleList()
        for s, (depth, dim, heads) in enumerate(zip(depths, embed_dims, num_heads, strict=True)):
            before = embed_dims[s - 1]
            self.downsamples.append(
                nn.Conv2d(before, dim, 3, stride=2, padding=1, groups=before) if s else nn.Identity()
            )
            rows, columns = (-(-rows // 2), -(-columns // 2)) if s else (rows, columns)
            tokens = rows * columns
            blocks = [
                Block(
                    dim,
                    heads,
                    conv_ffn=conv_ffn,
                    tokens=tokens if i < scaled_blocks else None,
                    drop_path=drop_path_rate * i / total,
                )
                for i in range(done, done + depth)
            ]
            self.stages.append(nn.ModuleList(blocks))
            done += depth
        self.norm = nn.LayerNorm(self.num_features, eps=1e-6)
        self.head = nn.Linear(self.num_features, num_classes) if num_classes > 0 else nn.Identity()

    def no_weight_decay(self) -> set[str]:
        return set()

    def forward_features(self, x: Tensor) -> Float[Tensor, "b n d"]:
        x = self.patch_embed(x)
        for downsample, blocks in zip(self.downsamples, self.stages, strict=True):
            x = downsample(x)
            grid = (x.shape[2], x.shape[3])
            x = to_tokens(x)
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x, grid)
            x = to_map(x, grid)
        return to_tokens(x)

    def forward_head(self, x: Float[Tensor, "b n d"], pre_logits: bool = False) -> Tensor:
        x = self.norm(x.mean(1))
        return x if pre_logits else self.head(x)


NAMES = [f"rvt_{size}{plus}" for size in ("tiny", "small", "base") for plus in ("", "_plus")]
default_cfgs = generate_default_cfgs(
    {f"{name}.untrained": cfg("patch_embed.conv", fixed_input_size="plus" in name) for name in NAMES}
)


def _create(name: str, pretrained: bool, kwargs: dict[str, Any], **own: Any) -> RVT:
    return build_model_with_cfg(RVT, name, pretrained, **{**own, **kwargs})


TINY: dict[str, Any] = {"depths": (10, 2), "embed_dims": (192, 384), "num_heads": (6, 12)}
SMALL: dict[str, Any] = {"depths": (12,), "embed_dims": (384,), "num_heads": (6,)}
BASE: dict[str, Any] = {"depths": (12,), "embed_dims": (768,), "num_heads": (12,), "conv_ffn": False}


@register_model
def rvt_tiny(pretrained: bool = False, **kwargs: Any) -> RVT:
    return _create("rvt_tiny", pretrained, kwargs, **TINY)


@register_model
def rvt_tiny_plus(pretrained: bool = False, **kwargs: Any) -> RVT:
    return _create("rvt_tiny_plus", pretrained, kwargs, **TINY, scaled_blocks=10)


@register_model
def rvt_small(pretrained: bool = False, **kwargs: Any) -> RVT:
    return _create("rvt_small", pretrained, kwargs, **SMALL)


@register_model
def rvt_small_plus(pretrained: bool = False, **kwargs: Any) -> RVT:
    return _create("rvt_small_plus", pretrained, kwargs, **SMALL, scaled_blocks=5)


@register_model
def rvt_base(pretrained: bool = False, **kwargs: Any) -> RVT:
    return _create("rvt_base", pretrained, kwargs, **BASE)


@register_model
def rvt_base_plus(pretrained: bool = False, **kwargs: Any) -> RVT:
    return _create("rvt_base_plus", pretrained, kwargs, **BASE, scaled_blocks=5)
