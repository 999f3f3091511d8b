"""Views of segmenters that are asked about a region (`regions.RegionClassifier`).

| segmenter                               | patches                                                          |
| `modules.segmenter`, linear decoder     | removed where those of the backbone can be, else masked          |
| the same with decoder="segformer", DPT, | masked: their heads read several layers and mix patches          |
| SegFormer of transformers               |                                                                  |
| any other around one ViT                | as that of `vit.wrappers`: the segmenter's own code is the head  |

A head that reads several layers is given them as the layout's `taps`: block l adds its input, so that the
gradient at x^l has both paths, through the blocks above and straight to the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from steadygaze.errors import BadInput, UnsupportedModel
from steadygaze.questions.regions import RegionClassifier, Size, region_weights, weighted_mean
from steadygaze.vit import Layout, Plan, adapt
from steadygaze.vit.adapter_registry import register_built_in
from steadygaze.vit.adapters.transformers import layer_parts
from steadygaze.vit.view import remember


def plan(classifier: RegionClassifier) -> Plan | None:
    """The view of a segmenter with a region; None if its class is not known here."""
    name = type(classifier.model).__name__
    if is_own(classifier.model):
        linear = classifier.model.decoder_name == "linear"
        return _own(classifier) if linear else _own_of_several_layers(classifier)
    if name == "DPTForSemanticSegmentation":
        return _dpt(classifier)
    if name == "SegformerForSemanticSegmentation":
        return _segformer(classifier)
    return None


def is_own(model: Any) -> bool:
    """Whether a model is one of `modules.segmenter`."""
    return type(model).__name__ == "Segmenter" and hasattr(model, "decoder_name")


def _own(classifier: RegionClassifier) -> Plan:
    """A linear decoder of patches: the region's mean is a weighted mean over those that are there."""
    model: Any = classifier.model
    backbone = adapt(model.backbone)
    tower, last = backbone.plan, len(backbone.blocks)
    norm = model.backbone.get_submodule(model.norm) if model.norm else nn.Identity()
    grid = _grid_of(tower, classifier)

    def head(x: Tensor, layout: Layout) -> Tensor:
        weights = region_weights(classifier.mask, layout.grid).flatten()
        rows = weights[None] if layout.kept is None else weights.to(x.device)[layout.kept]
        if tower.spatial is None:
            z = norm(x)[:, tower.prefix :]
        else:
            z = norm(backbone.patches(last, x, layout)).flatten(1, 2)
        return weighted_mean(model.decoder(z), rows)

    kind = f"steadygaze Segmenter of a {tower.kind}"
    return replace(tower, head=head, grid=grid, kind=kind, **_common(classifier, grid, tower.input_size[0]))


def _own_of_several_layers(classifier: RegionClassifier) -> Plan:
    """A SegFormer decoder: block l adds the map of its input to the taps if the decoder reads it."""
    model: Any = classifier.model
    backbone = adapt(model.backbone)
    tower, last = backbone.plan, len(backbone.blocks)
    grid = _grid_of(tower, classifier)

    def call(index: int, run: Callable[[Tensor, Layout], Tensor], x: Tensor, layout: Layout) -> Tensor:
        if index in model.layers:
            layout = replace(layout, taps=(*layout.taps, backbone.patches(index, x, layout)))
        return remember(run(x, layout), layout)

    def head(x: Tensor, layout: Layout) -> Tensor:
        maps = (*layout.taps, backbone.patches(last, x, layout))
        _check_taps(maps, len(model.layers))
        return classifier.pool(model.decoder(maps))

    return replace(
        tower,
        blocks=[{**b, "call": partial(call, i, b["call"])} for i, b in enumerate(tower.blocks)],
        head=head,
        grid=grid,
        kind=f"steadygaze Segmenter of a {tower.kind}",
        removable=False,
        mixed=True,
        reads_layers=True,
        **_common(classifier, grid, tower.input_size[0]),
    )


def _grid_of(tower: Plan, classifier: RegionClassifier) -> Size:
    """The patches of an image with the region's size; an error if the model does not take it."""
    _, height, width = tower.input_size
    if tower.fixed_size and classifier.size != (height, width):
        raise BadInput(
            f"region: this Segmenter takes images of {width} x {height} pixels, and the region is one of an "
            f"image of {classifier.size[1]} x {classifier.size[0]}"
        )
    return tower.grid[0] * classifier.size[0] // height, tower.grid[1] * classifier.size[1] // width


def _common(classifier: RegionClassifier, grid: Size, channels: int) -> dict[str, Any]:
    """What views of a region share: the readout is a weighted mean of the patches."""
    return {
        "input_size": (channels, *classifier.size),
        "fixed_size": True,
        "readout": "mean",
        "readout_rows": (),
        "readout_patches": 0.0,
        "readout_weights": region_weights(classifier.mask, grid).flatten(),
        "outputs": "classes",
        "checked": False,
    }


def _dpt(classifier: RegionClassifier) -> Plan:
    """DPT: a plain ViT; its neck reads the outputs of some blocks, and fuses them by convolutions."""
    model: Any = classifier.model
    config, body, layers = model.config, model.dpt, model.dpt.encoder.layer
    read = set(config.backbone_out_indices)
    grid = (classifier.size[0] // config.patch_size, classifier.size[1] // config.patch_size)
    if config.is_hybrid:
        raise UnsupportedModel(
            "DPTForSemanticSegmentation with is_hybrid=True has a CNN before its ViT, which its head reads "
            "too. Use a DPT without one, such as Intel/dpt-large-ade."
        )
    if grid[0] != grid[1]:
        raise BadInput(
            f"DPTForSemanticSegmentation takes square images, and the region is one of an image of "
            f"{classifier.size[1]} x {classifier.size[0]} pixels"
        )

    def call(index: int, x: Tensor, layout: Layout) -> Tensor:
        taps = (*layout.taps, x) if index - 1 in read else layout.taps
        return remember(_tensor(layers[index](x)), replace(layout, taps=taps))

    def head(x: Tensor, layout: Layout) -> Tensor:
        states = (*layout.taps, x) if len(layers) - 1 in read else layout.taps
        _check_taps(states, len(read))
        return classifier.pool(model.head(model.neck(hidden_states=list(states))))

    return Plan(
        embed=lambda images: (body.embeddings(images).last_hidden_states, None, grid),
        blocks=[
            {"module": layer, "call": partial(call, index), "parts": layer_parts(layer, None)}
            for index, layer in enumerate(layers)
        ],
        head=head,
        grid=grid,
        prefix=1,
        kind="transformers DPTForSemanticSegmentation",
        removable=False,
        mixed=True,
        reads_layers=True,
        **_common(classifier, grid, config.num_channels),
    )


def _segformer(classifier: RegionClassifier) -> Plan:
    """SegFormer: four stages; the head reads the normed output of each."""
    model: Any = classifier.model
    stages = _stages(model.segformer)

    def grids(size: Size) -> tuple[Size, ...]:
        found: list[Size] = []
        for embed, _, _ in stages:
            size = _convolved(embed.proj, size)
            found.append(size)
        return tuple(found)

    def embedded(images: Tensor) -> tuple[Tensor, tuple[Size, ...], Size]:
        state = grids((images.shape[-2], images.shape[-1]))
        return stages[0][0](images)[0], state, state[-1]

    def to_map(stage: int, x: Tensor, layout: Layout) -> Tensor:
        return x.unflatten(1, layout.state[stage]).permute(0, 3, 1, 2).contiguous()

    def call(stage: int, block: nn.Module, last: bool, x: Tensor, layout: Layout) -> Tensor:
        y = _tensor(block(x, *layout.state[stage]))
        if last and stage + 1 < len(stages):
            output = to_map(stage, stages[stage][2](y), layout)
            layout = replace(layout, taps=(*layout.taps, output))
            y = stages[stage + 1][0](output)[0]
        return remember(y, layout)

    def head(x: Tensor, layout: Layout) -> Tensor:
        states = (*layout.taps, to_map(-1, stages[-1][2](x), layout))
        _check_taps(states, len(stages))
        return classifier.pool(model.decode_head(states))

    def spatial(stage: int) -> Callable[[Tensor, Layout], Tensor]:
        return lambda x, layout: x.unflatten(1, layout.state[stage])

    grid = grids(classifier.size)[-1]
    return Plan(
        embed=embedded,
        blocks=[
            {
                "module": block,
                "call": partial(call, index, block, block is blocks[-1]),
                "spatial": spatial(index),
            }
            for index, (_, blocks, _) in enumerate(stages)
            for block in blocks
        ],
        head=head,
        grid=grid,
        prefix=0,
        kind="transformers SegformerForSemanticSegmentation",
        removable=False,
        global_attention=False,
        mixed=True,
        reads_layers=True,
        spatial=spatial(-1),
        **_common(classifier, grid, model.config.num_channels),
    )


def _stages(body: Any) -> list[tuple[Any, Any, Any]]:
    """(patch embedding, blocks, norm) of every stage; older transformers keep them in three lists."""
    if hasattr(body, "stages"):
        return [(stage.patch_embeddings, stage.blocks, stage.layer_norm) for stage in body.stages]
    encoder = body.encoder
    return list(zip(encoder.patch_embeddings, encoder.block, encoder.layer_norm, strict=True))


def _convolved(convolution: Any, size: Size) -> Size:
    """The size of a convolution's output."""
    kernel, stride, padding = convolution.kernel_size, convolution.stride, convolution.padding
    height, width = ((size[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in range(2))
    return height, width


def _check_taps(states: tuple[Tensor, ...], expected: int) -> None:
    if len(states) != expected:
        raise BadInput(
            f"the head reads the outputs of {expected} layers, and these tokens remember {len(states)}. Use "
            "tokens that vit.embed or a block returned, not a copy of them"
        )


def _tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


register_built_in("region", matches=RegionClassifier, plan=plan)
