"""Adapter for timm's plain ViTs: VisionTransformer, DeiT, hybrid, EVA, BEiT, relpos, CaiT, NaFlexViT."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.models.beit import Beit
from timm.models.cait import Cait
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.naflexvit import NaFlexVit
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn

from steadygaze.vit.parts import classifies, linear, linear_parts
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Headless, Layout, Parts, Plan, Readout, rotary

POOLED = ("token", "avg", "avgmax", "max", "map")
CLASSES = (VisionTransformer, VisionTransformerRelPos, Beit, Eva, Cait, NaFlexVit)


@register_adapter("timm", matches=CLASSES)
def plan(model: nn.Module) -> Plan:
    """The view of a plain timm ViT."""
    if isinstance(model, Cait):
        return _cait(model)
    if isinstance(model, Eva):
        return _eva(model)
    if isinstance(model, NaFlexVit):
        return _naflex(model)
    if isinstance(model, Beit):
        return _plain(model, _beit_embed, shared_rel_pos_bias="rel_pos_bias")
    if isinstance(model, VisionTransformerRelPos):
        return _plain(model, _relpos_embed, shared_rel_pos="shared_rel_pos")
    return _plain(model, lambda model, x: model._pos_embed(x))


def _plain(model: Any, embed: Callable[[Any, Tensor], Tensor], **shared: str) -> Plan:
    """embed, then every block on all tokens; `shared` names a bias table that all blocks share."""

    def call(block: nn.Module, x: Tensor, layout: Layout) -> Tensor:
        if block is model.blocks[0]:
            x = getattr(model, "norm_pre", nn.Identity())(x)
        return block(x, **{name: _table(getattr(model, source)) for name, source in shared.items()})

    def embedded(images: Tensor) -> tuple[Tensor, None, tuple[int, int]]:
        x = model.patch_embed(images)
        grid = tuple(x.shape[1:3]) if x.dim() == 4 else model.patch_embed.grid_size
        return embed(model, x), None, grid

    return Plan(
        embed=embedded,
        blocks=[
            {"module": b, "call": partial(call, b), "parts": _parts(b, _before(model, b))}
            for b in model.blocks
        ],
        head=_head(model, lambda x, layout: model.forward_head(model.norm(x))),
        **_description(model),
    )


def _table(module: Any) -> Tensor | None:
    """A shared table of relative position biases: beit's module is called, relpos' has get_bias."""
    return None if module is None else module.get_bias() if hasattr(module, "get_bias") else module()


def _beit_embed(model: Beit, x: Tensor) -> Tensor:
    x = torch.cat((model.cls_token.expand(x.shape[0], -1, -1), x), dim=1)
    return x if model.pos_embed is None else x + model.pos_embed


def _relpos_embed(model: VisionTransformerRelPos, x: Tensor) -> Tensor:
    return x if model.cls_token is None else torch.cat((model.cls_token.expand(x.shape[0], -1, -1), x), dim=1)


def _eva(model: Eva) -> Plan:
    def embed(images: Tensor) -> tuple[Tensor, Tensor | None, tuple[int, int]]:
        x = model.patch_embed(images)
        grid = tuple(x.shape[1:3]) if x.dim() == 4 else model.patch_embed.grid_size
        tokens, rope = model._pos_embed(x)
        return tokens, rope, grid

    def call(index: int, x: Tensor, layout: Layout) -> Tensor:
        if index == 0:
            x = model.norm_pre(x)
        rope = layout.state
        if rope is not None:
            rope = rotary(rope[index] if model.rope_mixed else rope, layout.kept)
        return model.blocks[index](x, rope=rope)

    return Plan(
        embed=embed,
        blocks=[
            {"module": b, "call": partial(call, i), "parts": _parts(b, _before(model, b))}
            for i, b in enumerate(model.blocks)
        ],
        head=_head(model, lambda x, layout: model.forward_head(model.norm(x))),
        rotary=model.rope is not None,
        **_description(model),
    )


def _naflex(model: NaFlexVit) -> Plan:
    """Images of one size: without padding, it is a plain ViT."""
    channels, height, width = model.pretrained_cfg["input_size"]
    patch = model.embeds.patch_size

    def embed(images: Tensor) -> tuple[Tensor, Any, tuple[int, int]]:
        x, grid = model.embeds(images)
        rope = None if model.rope is None else model.rope.get_embed(shape=grid)
        return x, rope, grid

    def call(index: int, x: Tensor, layout: Layout) -> Tensor:
        x = model.norm_pre(x) if index == 0 else x
        if layout.state is None:
            return model.blocks[index](x)
        rope = layout.state[index] if model.rope_is_mixed else layout.state
        return model.blocks[index](x, rope=rotary(rope, layout.kept))

    return Plan(
        embed=embed,
        blocks=[
            {"module": b, "call": partial(call, i), "parts": _parts(b, _before(model, b))}
            for i, b in enumerate(model.blocks)
        ],
        head=_head(model, lambda x, layout: model.forward_head(model.norm(x))),
        input_size=(channels, height, width),
        fixed_size=False,
        grid=(height // patch[0], width // patch[1]),
        rotary=model.rope is not None,
        **_readout(model),
    )


def _cait(model: Cait) -> Plan:
    """Only patches run through the blocks; the class-attention blocks are the head."""

    def embed(images: Tensor) -> tuple[Tensor, None, tuple[int, int]]:
        return model.patch_embed(images) + model.pos_embed, None, model.patch_embed.grid_size

    def head(x: Tensor, layout: Layout) -> Tensor:
        token = model.cls_token.expand(x.shape[0], -1, -1)
        for block in model.blocks_token_only:
            token = block(x, token)
        return model.forward_head(model.norm(torch.cat((token, x), dim=1)))

    description = _description(model) | {
        "prefix": 0,
        "readout": "pool" if model.global_pool == "token" else "mean",
    }
    return Plan(
        embed=embed,
        blocks=[{"module": b, "call": lambda x, layout, b=b: b(x)} for b in model.blocks],
        head=_head(model, head),
        **description,
    )


def _head(model: Any, head: Callable[[Tensor, Layout], Tensor]) -> Callable[[Tensor, Layout], Tensor]:
    pool = getattr(model, "global_pool", "token")
    if pool in POOLED:
        return head
    return Headless(
        f"{type(model).__name__} has global_pool={pool!r}: no pooled head. "
        f"Use 'token', 'avg' or 'map' and num_classes > 0."
    )


def _readout(model: Any) -> dict[str, Any]:
    """Which tokens feed the head, and what that gives."""
    prefix = getattr(model, "num_prefix_tokens", 0)
    pool = getattr(model, "global_pool", "token")
    readout: Readout
    rows: tuple[int, ...]
    if isinstance(model, VisionTransformerDistilled):
        readout, rows = "class", (0, 1)
    elif getattr(model, "attn_pool", None) is not None or pool == "map":
        readout, rows = "pool", ()
    elif pool == "token":
        readout, rows = "class", (0,)
    elif pool in ("avg", "avgmax", "max"):
        readout, rows = "mean", tuple(range(prefix)) if getattr(model, "pool_include_prefix", False) else ()
    else:  # features (B, N, D): a view only of a model that pools them
        readout, rows = "class", ()
    return {
        "prefix": prefix,
        "readout": readout,
        "readout_rows": rows,
        "kind": f"timm {type(model).__name__}",
        "outputs": "classes" if classifies(model) else "features",
    }


def _description(model: Any) -> dict[str, Any]:
    embed = model.patch_embed
    size = getattr(embed, "img_size", None) or model.pretrained_cfg["input_size"][1:]
    channels = embed.proj.in_channels if isinstance(getattr(embed, "proj", None), nn.Conv2d) else 3
    if hasattr(embed, "backbone"):
        channels = 3
    return {
        "input_size": (channels, *size),
        "fixed_size": not getattr(model, "dynamic_img_size", False)
        and getattr(embed, "strict_img_size", True),
        "grid": tuple(embed.grid_size),
        **_readout(model),
    }


def _before(model: Any, block: nn.Module) -> nn.Module | None:
    """What runs before the first block: `norm_pre`, unless it does nothing."""
    norm = getattr(model, "norm_pre", None)
    return norm if block is model.blocks[0] and not isinstance(norm, nn.Identity) else None


def _parts(block: Any, before: nn.Module | None) -> Callable[[], Parts] | None:
    """Linear parts of a pre-norm block with one attention; None where the block is of another make."""
    block = getattr(block, "_orig_mod", block)  # one that torch.compile wraps
    attn: Any = getattr(block, "attn", None)
    pre_norm = type(block).__name__ in ("Block", "EvaBlock", "RelPosBlock", "SerialBlock")
    gated, differential = getattr(attn, "gate", None) is not None, hasattr(attn, "lambda_init")
    if not pre_norm or gated or differential or not hasattr(attn, "proj"):
        return None

    def parts() -> Parts:
        output, own_bias = linear(attn.proj), getattr(attn, "v_bias", None)
        if getattr(attn, "qkv", None) is None:
            value = linear(attn.v_proj)
        else:  # with a bias of v alone, the weight is used by itself
            width = output[0].shape[1]
            weight, bias = linear(attn.qkv) if own_bias is None else (attn.qkv.weight, None)
            value = weight[-width:], own_bias if bias is None else bias[-width:]
        return linear_parts(
            norm1=block.norm1,
            value=value,
            output=output,
            norm2=block.norm2,
            scale1=_layer_scale(block, 1),
            scale2=_layer_scale(block, 2),
            inner=getattr(attn, "norm", None),
            groups=(getattr(attn, "num_kv_heads", 1), getattr(attn, "num_kv_groups", 1)),
            before=before,
        )

    return parts


def _layer_scale(block: Any, which: int) -> Tensor | None:
    scale = getattr(block, f"gamma_{which}", None)
    return scale if scale is not None else getattr(getattr(block, f"ls{which}", None), "gamma", None)
