"""Stand-ins for the ViTs of libraries that the tests do not install.

They have the same class names, module paths, names of parts and forward passes, at a tiny size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, DEPTH, SIDE, PATCH = 16, 2, 3, 16, 4
PATCHES = (SIDE // PATCH) ** 2


def heads_of(x: Tensor) -> Tensor:
    """(B, N, D) -> (B, heads, N, d)."""
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Mlp(nn.Sequential):
    """Two linear maps with GELU."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Convolution(nn.Module):
    """DINO's PatchEmbed."""

    def __init__(self) -> None:
        super().__init__()
        self.img_size, self.patch_size, self.num_patches = SIDE, PATCH, PATCHES
        self.proj = nn.Conv2d(3, WIDTH, PATCH, PATCH)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).transpose(1, 2)


class DinoAttention(nn.Module):
    """Attention of DINO (written out, returns its weights) or of DINOv2 (fused)."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.fused = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), fused
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Any:
        q, k, v = (heads_of(t) for t in self.qkv(x).chunk(3, -1))
        if self.fused:
            return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        weights = self.attn_drop((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(dim=-1))
        return self.proj((weights @ v).transpose(1, 2).flatten(2)), weights


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class DinoBlock(nn.Module):
    def __init__(self, second: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp, self.second = DinoAttention(second), Mlp(), second
        if second:
            self.ls1, self.ls2 = LayerScale(), LayerScale()

    def forward(self, x: Tensor) -> Tensor:
        if self.second:
            x = x + self.ls1(self.attn(self.norm1(x)))
            return x + self.ls2(self.mlp(self.norm2(x)))
        x = x + self.attn(self.norm1(x))[0]
        return x + self.mlp(self.norm2(x))


class Tokens(nn.Module):
    """What DINO and DINOv2 have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.patch_embed, self.norm = Convolution(), nn.LayerNorm(WIDTH)
        self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, PATCHES + 1, WIDTH))
        self.head = nn.Identity()

    def positioned(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)
        return torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed


class VisionTransformer(Tokens):
    """DINO's."""

    __module__ = "vision_transformer"

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([DinoBlock(second=False) for _ in range(DEPTH)])

    def prepare_tokens(self, x: Tensor) -> Tensor:
        return self.positioned(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.prepare_tokens(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class Chunk(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = block(x)
        return x


class DinoVisionTransformer(Tokens):
    """DINOv2's."""

    __module__ = "dinov2.models.vision_transformer"

    def __init__(self, registers: int = 0, chunks: bool = False, head: nn.Module | None = None) -> None:
        super().__init__()
        blocks: list[nn.Module] = [DinoBlock(second=True) for _ in range(DEPTH)]
        self.chunked_blocks, self.num_register_tokens = chunks, registers
        self.register_tokens = nn.Parameter(torch.randn(1, registers, WIDTH)) if registers else None
        whole = [Chunk(blocks[:2]), Chunk([nn.Identity(), nn.Identity(), *blocks[2:]])]
        self.blocks = nn.ModuleList(whole if chunks else blocks)
        self.head = head or nn.Identity()

    def prepare_tokens_with_masks(self, x: Tensor, masks: Tensor | None = None) -> Tensor:
        x = self.positioned(x)
        if self.register_tokens is None:
            return x
        return torch.cat([x[:, :1], self.register_tokens.expand(x.shape[0], -1, -1), x[:, 1:]], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.prepare_tokens_with_masks(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Rearrange(nn.Module):
    """The layer of einops that cuts patches."""

    def __init__(self) -> None:
        super().__init__()
        self.axes_lengths = {"p1": PATCH, "p2": PATCH}

    def forward(self, images: Tensor) -> Tensor:
        x = images.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))  # b c h p1 w p2
        return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


class LucidAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(WIDTH), nn.Softmax(dim=-1)
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.to_out = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(t) for t in self.to_qkv(self.norm(x)).chunk(3, -1))
        weights = self.attend(torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5)
        return self.to_out(torch.matmul(weights, v).transpose(1, 2).flatten(2))


class LucidFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(WIDTH), *Mlp())

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class LucidTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        pairs = [nn.ModuleList([LucidAttention(), LucidFeedForward()]) for _ in range(DEPTH)]
        self.layers = nn.ModuleList(pairs)

    def forward(self, x: Tensor) -> Tensor:
        for attend, feed in self.layers:  # type: ignore[misc]
            x = attend(x) + x
            x = feed(x) + x
        return self.norm(x)


class LucidViT(nn.Module):
    """vit-pytorch's."""

    __module__ = "vit_pytorch.vit"

    def __init__(self, pool: str = "cls", num_classes: int = 0) -> None:
        super().__init__()
        area = 3 * PATCH**2
        layers = (nn.LayerNorm(area), nn.Linear(area, WIDTH), nn.LayerNorm(WIDTH))
        self.to_patch_embedding = nn.Sequential(Rearrange(), *layers)
        tokens = int(pool == "cls")
        self.cls_token = nn.Parameter(torch.randn(tokens, WIDTH))
        self.pos_embedding = nn.Parameter(torch.randn(PATCHES + tokens, WIDTH))
        self.dropout, self.transformer, self.pool = nn.Dropout(0.0), LucidTransformer(), pool
        self.to_latent = nn.Identity()
        self.mlp_head = nn.Linear(WIDTH, num_classes) if num_classes else None

    def forward(self, img: Tensor) -> Tensor:
        x = self.to_patch_embedding(img)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        x = self.transformer(self.dropout(x + self.pos_embedding[: x.shape[1]]))
        if self.mlp_head is None:
            return x
        return self.mlp_head(self.to_latent(x.mean(dim=1) if self.pool == "mean" else x[:, 0]))


LucidViT.__name__ = "ViT"


class ClipBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ln_1 = nn.MultiheadAttention(WIDTH, HEADS), nn.LayerNorm(WIDTH)
        self.mlp, self.ln_2 = Mlp(), nn.LayerNorm(WIDTH)

    def attention(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=False)[0]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


ClipBlock.__name__ = "ResidualAttentionBlock"


class ClipStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.resblocks = nn.Sequential(*[ClipBlock() for _ in range(DEPTH)])

    def forward(self, x: Tensor) -> Tensor:
        return self.resblocks(x)


class ClipTower(nn.Module):
    """The image tower of OpenAI's `clip`."""

    __module__ = "clip.model"

    def __init__(self) -> None:
        super().__init__()
        self.input_resolution = SIDE
        self.conv1 = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
        self.class_embedding = nn.Parameter(torch.randn(WIDTH))
        self.positional_embedding = nn.Parameter(torch.randn(PATCHES + 1, WIDTH))
        self.ln_pre, self.ln_post = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.transformer, self.proj = ClipStack(), nn.Parameter(torch.randn(WIDTH, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_embedding.expand(x.shape[0], 1, -1), x], dim=1) + self.positional_embedding
        x = self.transformer(self.ln_pre(x).transpose(0, 1)).transpose(0, 1)
        return self.ln_post(x[:, 0]) @ self.proj


ClipTower.__name__ = "VisionTransformer"


class Clip(nn.Module):
    """OpenAI's whole model, with a text tower that is never run."""

    __module__ = "clip.model"

    def __init__(self) -> None:
        super().__init__()
        self.visual = ClipTower()
        self.logit_scale = nn.Parameter(torch.zeros(()))

    def encode_image(self, image: Tensor) -> Tensor:
        return self.visual(image)

    def encode_text(self, text: Tensor) -> Tensor:
        raise NotImplementedError


Clip.__name__ = "CLIP"


class MonaiAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out_proj, self.qkv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.to_v, self.drop_weights = nn.Identity(), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(t) for t in self.qkv(x).chunk(3, -1))
        weights = (torch.einsum("blxd,blyd->blxy", q, k) * q.shape[-1] ** -0.5).softmax(dim=-1)
        x = torch.einsum("bhxy,bhyd->bhxd", self.drop_weights(weights), v)
        return self.out_proj(x.transpose(1, 2).flatten(2))


class MonaiBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.attn = Mlp(), MonaiAttention()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MonaiEmbedding(nn.Module):
    def __init__(self, patches: nn.Module) -> None:
        super().__init__()
        self.patch_embeddings = patches
        self.position_embeddings = nn.Parameter(torch.randn(1, PATCHES, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embeddings(x)
        x = x.flatten(2).transpose(-1, -2) if x.dim() == 4 else x
        return x + self.position_embeddings


class MonaiViT(nn.Module):
    """MONAI's."""

    __module__ = "monai.networks.nets.vit"

    def __init__(self, classes: int = 0, patches: nn.Module | None = None) -> None:
        super().__init__()
        self.patch_embedding = MonaiEmbedding(patches or nn.Conv2d(3, WIDTH, PATCH, PATCH))
        self.blocks = nn.ModuleList([MonaiBlock() for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(WIDTH)
        if classes:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
            self.classification_head = nn.Sequential(nn.Linear(WIDTH, classes), nn.Tanh())

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.patch_embedding(x)
        if hasattr(self, "cls_token"):
            x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        hidden = []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        x = self.norm(x)
        return (self.classification_head(x[:, 0]) if hasattr(self, "classification_head") else x), hidden


MonaiViT.__name__ = "ViT"
PERCEPTRON = (Rearrange, lambda: nn.Linear(3 * PATCH**2, WIDTH))

STAND_INS: dict[str, Any] = {
    "dino": VisionTransformer,
    "dinov2": DinoVisionTransformer,
    "dinov2 registers, chunks": lambda: DinoVisionTransformer(registers=2, chunks=True),
    "dinov2 classifier": lambda: DinoVisionTransformer(head=nn.Linear(WIDTH, 5)),
    "vit-pytorch": LucidViT,
    "vit-pytorch mean": lambda: LucidViT("mean"),
    "vit-pytorch classifier": lambda: LucidViT(num_classes=5),
    "clip tower": ClipTower,
    "clip": Clip,
    "monai": MonaiViT,
    "monai perceptron": lambda: MonaiViT(patches=nn.Sequential(*[make() for make in PERCEPTRON])),
    "monai classifier": lambda: MonaiViT(classes=5),
}
