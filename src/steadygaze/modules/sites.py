"""Where a block can be hooked, found by the names that timm, transformers, torchvision and `steadygaze.models` give its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from steadygaze.errors import UnsupportedModel
from steadygaze.vit.parts import first

NORM1 = ("norm1", "layernorm_before", "layer_norm1", "ln_1")
ATTENTION = ("attn", "attention", "self_attn", "self_attention")
MLP = ("mlp", "intermediate")  # some of transformers' lie in two parts, intermediate and output
MLP_LAST = ("mlp.fc2", "mlp.down_proj", "mlp.weights_out", "output.dense", "mlp.3")
ATTENTION_LAST = (
    "attn.proj",
    "attention.o_proj",
    "attention.out_proj",
    "attention.output.dense",
    "self_attn.out_proj",
)
WINDOWED = ("SwinTransformerBlock", "SwinTransformerV2Block", "SwinTransformerV2CrBlock")
ELSEWHERE = {  # blocks whose attention is not fed by norm1 of their own input, in raster order
    "SwinTransformerV2Block": "cuts its input into windows before any module sees it",
    "SwinTransformerV2CrBlock": "cuts its input into windows before any module sees it",
    "MultiScaleBlock": "pools inside its attention, and its residual too",
    "HieraBlock": "keeps its tokens in the order of mask units",
    "ParallelScalingBlock": "runs attention and MLP from one norm",
    "DiffParallelScalingBlock": "runs attention and MLP from one norm",
    "ParallelThingsBlock": "runs several attentions side by side",
}


@dataclass(frozen=True)
class Site:
    """A module to hook, on its input or its output, and the number of channels that are seen there."""

    module: nn.Module
    side: Literal["before", "after"]
    width: int
    channels_first: bool = False


def pooling_site(block: nn.Module) -> Site:
    """Before the norm that feeds attention; in blocks with their norms behind, before attention itself."""
    kind = type(block).__name__
    norm, attention = first(block, *NORM1), first(block, *ATTENTION)
    if kind in ELSEWHERE or attention is None:
        raise UnsupportedModel(
            f"TAP cannot go into a {kind}: it {ELSEWHERE.get(kind, 'has no attention that is known here')}."
        )
    return Site(attention if "Post" in kind else norm, "before", width_of(block))


def broadcast_site(block: nn.Module, branch: str, position: str) -> Site:
    """Where CB sees the tokens of a branch ("mlp" or "msa") at its "front", "mid" or "end"."""
    kind = type(block).__name__
    body = first(block, *(MLP if branch == "mlp" else ATTENTION))
    last = first(block, *(MLP_LAST if branch == "mlp" else ATTENTION_LAST))
    windowed = branch == "msa" and kind in WINDOWED
    if windowed and kind == "SwinTransformerBlock" and position != "mid":  # attention itself sees windows
        at = block.drop_path1 if position == "end" else block.norm1
        return Site(at, "before" if position == "end" else "after", width_of(block))  # type: ignore[arg-type]
    unseen = position == "mid" and (last is None or isinstance(body, nn.MultiheadAttention))
    if body is None or windowed or unseen or kind == "MultiScaleBlock":
        raise UnsupportedModel(
            f"CB cannot go to the {position} of the {branch} of a {kind}: no module there sees all tokens of an image. "
            "Take position='end' and where='mlp'."
        )
    if position == "mid":
        conv = isinstance(last, nn.Conv2d)
        return Site(last, "before", last.in_channels if conv else last.in_features, conv)
    if position == "front":
        norm = first(block, *NORM1)
        if branch == "msa" and norm is not None and "Post" not in kind:
            return Site(
                norm, "after", width_of(block)
            )  # attention may take its input by name, or three times
        return Site(body, "before", width_of(block))
    split = type(body).__name__.endswith(
        "Intermediate"
    )  # then `output` may add the residual: only its last product is the MLP's
    return Site(last if split else body, "after", width_of(block))


def width_of(block: nn.Module) -> int:
    """Channels of a block's tokens: what its first norm sees."""
    norm = first(block, *NORM1)
    return int((getattr(norm, "normalized_shape", None) or norm.weight.shape)[-1])


def embedding_of(model: nn.Module) -> nn.Module | None:
    """The module that images go into first."""
    names = ("patch_embed", "embeddings", "conv_proj")
    return next((m for name, m in model.named_modules() if name.rpartition(".")[2] in names), None)
