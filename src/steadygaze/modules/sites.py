"""Where modules are hooked into a block.

Sites are found by the submodule names of timm, transformers, torchvision and `steadygaze.models`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn

from steadygaze.errors import UnsupportedModel
from steadygaze.vit.parts import first

NORM1 = ("norm1", "layernorm_before", "layer_norm1", "ln_1")
ATTENTION = ("attn", "attention", "self_attn", "self_attention")
MLP = ("mlp", "intermediate")  # in some models of transformers: two modules, intermediate and output
MLP_LAST = ("mlp.fc2", "mlp.down_proj", "mlp.weights_out", "output.dense", "mlp.3")
ATTENTION_LAST = (
    "attn.proj",
    "attention.o_proj",
    "attention.out_proj",
    "attention.output.dense",
    "self_attn.out_proj",
)
WINDOWED = ("SwinTransformerBlock", "SwinTransformerV2Block", "SwinTransformerV2CrBlock")
NO_POOLING = {  # blocks whose attention does not read norm1 of the block input in raster order
    "SwinTransformerV2Block": "cuts its input into windows before any module sees it",
    "SwinTransformerV2CrBlock": "cuts its input into windows before any module sees it",
    "MultiScaleBlock": "pools inside its attention, and its residual too",
    "HieraBlock": "keeps its tokens in the order of mask units",
    "ParallelScalingBlock": "runs attention and MLP from one norm",
    "DiffParallelScalingBlock": "runs attention and MLP from one norm",
    "ParallelThingsBlock": "runs several attentions side by side",
    "ViltLayer": "runs text of any length and patches in one sequence",
}


@dataclass(frozen=True)
class Site:
    """A module to hook at its input ("before") or output ("after"), and the number of channels there."""

    module: nn.Module
    side: Literal["before", "after"]
    width: int
    channels_first: bool = False


def pooling_site(block: nn.Module) -> Site:
    """Input of the norm that precedes attention; in post-norm blocks, the input of attention."""
    kind = type(block).__name__
    norm, attention = first(block, *NORM1), first(block, *ATTENTION)
    if kind in NO_POOLING or attention is None:
        reason = NO_POOLING.get(kind, "has no attention module with a known name")
        raise UnsupportedModel(f"TAP cannot be inserted into a {kind}: it {reason}.")
    return Site(attention if "Post" in kind else norm, "before", width_of(block))


def broadcast_site(block: nn.Module, branch: str, position: str) -> Site:
    """Site of CB in a branch ("mlp" or "msa"), at its "front", "mid" or "end"."""
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
            f"CB cannot be inserted at the {position} of the {branch} of a {kind}: no module there sees all "
            "tokens of an image. Use position='end' and where='mlp'."
        )
    if position == "mid":
        conv = isinstance(last, nn.Conv2d)
        return Site(last, "before", last.in_channels if conv else last.in_features, conv)
    if position == "front":
        norm = first(block, *NORM1)
        if branch == "msa" and norm is not None and "Post" not in kind:
            # not at attention itself, which may take its input by name, or three times
            return Site(norm, "after", width_of(block))
        return Site(body, "before", width_of(block))
    # where the MLP is split into `intermediate` and `output`, `output` may add the residual
    split = type(body).__name__.endswith("Intermediate")
    return Site(last if split else body, "after", width_of(block))


def width_of(block: nn.Module) -> int:
    """Number of channels of a block's tokens, by its first norm."""
    norm = first(block, *NORM1)
    return int((getattr(norm, "normalized_shape", None) or norm.weight.shape)[-1])


def embedding_of(model: nn.Module) -> nn.Module | None:
    """The patch embedding, the first module that receives the images."""
    names = ("patch_embed", "embeddings", "conv_proj")
    return next((m for name, m in model.named_modules() if name.rpartition(".")[2] in names), None)
