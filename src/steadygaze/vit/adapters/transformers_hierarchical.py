"""Adapter for hierarchical models of transformers: Swin, Swin V2, PVT, PVT v2. See `hierarchical`.

The head of one without a classifier gives its features (`vit.outputs.backbone_features`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from steadygaze.target import Outputs
from steadygaze.vit.adapters.hierarchical import Grid, Layer, hierarchical_plan
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Plan

CLASSIFIER = "ForImageClassification"


def matches(model: nn.Module) -> bool:
    """Whether a model is a hierarchical model of transformers, with a classifier or without."""
    return type(model).__module__.startswith("transformers.") and _family(model) in _VIEWS


def _family(model: nn.Module) -> str:
    return type(model).__name__.removesuffix(CLASSIFIER).removesuffix("Model")


@register_adapter("transformers_hierarchical", matches=matches)
def plan(model: Any) -> Plan:
    """The view of a hierarchical model of transformers, with a classifier or without."""
    return _VIEWS[_family(model)](model)


def _options(model: Any) -> dict[str, Any]:
    outputs: Outputs = "classes" if hasattr(model, "classifier") else "features"
    kind = f"transformers {type(model).__name__}"
    return {"channels": model.config.num_channels, "kind": kind, "outputs": outputs}


def _classify(model: Any, features: Tensor) -> Tensor:
    return model.classifier(features) if hasattr(model, "classifier") else features


def _swin(model: Any) -> Plan:
    """Swin and Swin V2: blocks on tokens; patch merging ends a stage. Small images change their windows."""
    body = model.base_model
    stages = list(body.encoder.layers)

    def run(block: nn.Module, merge: nn.Module | None, x: Tensor, grid: Grid) -> Tensor:
        x = block(x, grid)[0]
        return x if merge is None else merge(x, grid)

    layers = []
    for stage in stages:
        for block in stage.blocks:
            merge = stage.downsample if block is stage.blocks[-1] else None
            layers.append(Layer(block, partial(run, block, merge), 1 if merge is None else 2))

    def head(x: Tensor, grid: Grid) -> Tensor:
        x = body.layernorm(x)
        pooled = x.mean(1) if body.pooler is None else body.pooler(x.transpose(1, 2)).flatten(1)
        return _classify(model, pooled)

    return hierarchical_plan(model, body.embeddings, layers, head, _size(model), **_options(model))


def _pvt(model: Any) -> Plan:
    """PVT: a patch embedding begins each stage; only the last stage has a class token."""
    encoder = model.base_model.encoder
    embeddings, stages = list(encoder.patch_embeddings), list(encoder.block)
    layers, prefixes = [], []
    for s, blocks in enumerate(stages):
        for block in blocks:
            after = embeddings[s + 1] if block is blocks[-1] and s + 1 < len(stages) else None
            stride = 1 if after is None else after.projection.stride[0]
            layers.append(Layer(block, partial(_run_pvt, block, None, after), stride))
            prefixes.append(int(embeddings[s].cls_token is not None))
    return hierarchical_plan(
        model,
        partial(_embed_pvt, embeddings[0]),
        layers,
        lambda x, grid: _classify(model, encoder.layer_norm(x)[:, 0]),
        _size(model),
        prefix=1,
        prefixes=prefixes,
        readout="class",
        rows=(0,),
        **_options(model),
    )


def _pvt_v2(model: Any) -> Plan:
    """PVT v2: a norm ends each stage, then an overlapping patch embedding follows."""
    stages = list(model.base_model.encoder.layers)
    layers = []
    for s, stage in enumerate(stages):
        for block in stage.blocks:
            last = block is stage.blocks[-1] and s + 1 < len(stages)
            after = stages[s + 1].patch_embedding if last else None
            stride = 1 if after is None else after.proj.stride[0]
            layers.append(Layer(block, partial(_run_pvt, block, stage.layer_norm, after), stride))
    return hierarchical_plan(
        model,
        partial(_embed_pvt, stages[0].patch_embedding),
        layers,
        lambda x, grid: _classify(model, stages[-1].layer_norm(x).mean(dim=1)),
        _size(model),
        fixed=False,
        **_options(model),
    )


def _embed_pvt(embedding: nn.Module, images: Tensor) -> tuple[Tensor, Grid]:
    x, height, width = embedding(images)
    return x, (height, width)


def _run_pvt(
    block: nn.Module, norm: nn.Module | None, following: nn.Module | None, x: Tensor, grid: Grid
) -> Tensor:
    x = block(x, *grid)[0]
    if following is None:
        return x
    x = x if norm is None else norm(x)
    return following(x.unflatten(1, grid).permute(0, 3, 1, 2).contiguous())[0]


def _size(model: Any) -> tuple[int, int]:
    size = model.config.image_size
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return int(height), int(width)


_VIEWS: dict[str, Callable[[Any], Plan]] = {"Swin": _swin, "Swinv2": _swin, "Pvt": _pvt, "PvtV2": _pvt_v2}
