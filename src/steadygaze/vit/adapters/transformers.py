"""Adapter for transformers: ViT, DeiT, BEiT, Data2Vec, DINOv2 and v3, I-JEPA, MSN, MAE, CLIP, SigLIP.

The head of a bare backbone gives its features (`vit.outputs.backbone_features`). A model that compares images
with text (CLIPModel, SiglipModel, Siglip2Model) is viewed as its image tower: the head gives the image
embedding.

DINOv3 has no classifier class in transformers: `Classifier` is one. A module of one's own around a backbone
is viewed by `steadygaze.vit.wrapped`.
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import UnsupportedModelError
from steadygaze.vit.outputs import MASKED_AUTOENCODER, compares_text, pixel_inputs
from steadygaze.vit.parts import first, linear, linear_parts
from steadygaze.vit.registry import find_plan, register_adapter
from steadygaze.vit.view import Layout, Parts, Plan

BACKBONES = (
    "ViTModel",
    "DeiTModel",
    "BeitModel",
    "Data2VecVisionModel",
    "Dinov2Model",
    "Dinov2WithRegistersModel",
    "DINOv3ViTModel",
    "IJepaModel",
    "ViTMSNModel",
    "ViTMAEModel",
    "CLIPVisionModel",
    "MetaClip2VisionModel",
    "SiglipVisionModel",
    "Siglip2VisionModel",
)
NO_PREFIX = ("SiglipVisionModel", "Siglip2VisionModel", "IJepaModel")
ANY_SIZE = ("BeitModel", "Dinov2Model", "Dinov2WithRegistersModel", "DINOv3ViTModel", "Siglip2VisionModel")


class Classifier(nn.Module):
    """A backbone of transformers and a head on its class token: the missing classifier for DINOv3."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, classes) of images (B, 3, H, W)."""
        return self.head(self.backbone(images).last_hidden_state[:, 0])


TIMM_WRAPPERS = ("TimmWrapperForImageClassification", "TimmWrapperModel")
DETECTOR = "YolosForObjectDetection"


def matches(model: nn.Module) -> bool:
    """Whether a model is a backbone of transformers, or a classifier of it with one as a child."""
    if type(model).__name__ in TIMM_WRAPPERS or _is_backbone(model):
        return True
    ours = isinstance(model, Classifier) or type(model).__module__.startswith("transformers.")
    return ours and len(_backbones(model)) == 1


@register_adapter("transformers", matches=matches)
def plan(model: Any) -> Plan | None:
    """The view of a classifier or a bare backbone of transformers."""
    if type(model).__name__ in TIMM_WRAPPERS:  # the plan of the timm model that it wraps
        return find_plan(model.timm_model)
    if _is_backbone(model):
        return _view(model, model)
    return _view(model, _backbones(model)[0])


def _backbones(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.children() if _is_backbone(m)]


def _is_backbone(module: nn.Module) -> bool:
    return _name(module) in BACKBONES and type(module).__module__.startswith("transformers.")


def _name(body: nn.Module) -> str:
    """The backbone's class; older transformers have CLIP's and SigLIP's one level further in."""
    return type(body).__name__.replace("VisionTransformer", "VisionModel")


def _view(model: nn.Module, body: Any) -> Plan:
    name, config = _name(body), _vision_config(body)
    layers = first(body, "layers", "encoder.layer", "encoder.layers", "model.layer", "layer")
    patch = _pair(config.patch_size)
    if name == "Siglip2VisionModel":  # takes any size up to a number of patches; a square one is its own
        height, width = (round(config.num_patches**0.5) * side for side in patch)
    else:
        height, width = _pair(config.image_size)
    prefix = 0 if name in NO_PREFIX else 2 if name == "DeiTModel" else 1
    prefix += getattr(config, "num_register_tokens", 0) or 0
    norm_pre = getattr(body, "pre_layrnorm", None)
    extras = _extras(body, layers[0], patch)

    def embed(images: Tensor) -> tuple[Tensor, Any, tuple[int, int]]:
        grid = (images.shape[-2] // patch[0], images.shape[-1] // patch[1])
        rotary = body.rope_embeddings(images) if hasattr(body, "rope_embeddings") else None
        inputs = pixel_inputs(body, images)
        inputs.pop("pixel_attention_mask", None)  # for padding, of which there is none
        if name == MASKED_AUTOENCODER:
            return _unmasked(body.embeddings, images), rotary, grid
        tokens = body.embeddings(**inputs)
        return tokens[0] if isinstance(tokens, tuple) else tokens, rotary, grid

    def call(index: int, x: Tensor, layout: Layout) -> Tensor:
        if index == 0 and norm_pre is not None:
            x = norm_pre(x)
        output = layers[index](x, **extras(layout))
        return output if isinstance(output, Tensor) else output[0]

    readout, head = _head(model, body, prefix)
    return Plan(
        embed=embed,
        blocks=[
            {"module": b, "call": partial(call, i), "parts": layer_parts(b, norm_pre if i == 0 else None)}
            for i, b in enumerate(layers)
        ],
        head=head,
        input_size=(config.num_channels, height, width),
        fixed_size=name not in ANY_SIZE,
        grid=(height // patch[0], width // patch[1]),
        prefix=prefix,
        kind=f"transformers {type(model).__name__}",
        rotary=hasattr(body, "rope_embeddings"),
        **readout,
    )


def _unmasked(embeddings: Any, images: Tensor) -> Tensor:
    """Tokens of a masked autoencoder before its random masking."""
    positions = embeddings.position_embeddings
    patches = embeddings.patch_embeddings(images) + positions[:, 1:]
    token = (embeddings.cls_token + positions[:, :1]).expand(patches.shape[0], -1, -1)
    return torch.cat([token, patches], dim=1)


def _head(model: Any, body: Any, prefix: int) -> tuple[dict[str, Any], Callable[[Tensor, Layout], Tensor]]:
    """The readout, and tokens -> logits, as the classifier's own forward has them."""
    readout, head = _classifier(model, body, prefix)
    return readout, lambda x, layout: head(x)


def _classifier(model: Any, body: Any, prefix: int) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    """(readout, rows and share of the patches; tokens -> logits)."""
    name = type(model).__name__
    norm = first(body, "layernorm", "norm", "post_layernorm")
    if compares_text(model):
        return _embedding(model, body, norm)
    if model is body:
        return _features(body, norm)
    if not name.endswith(("ForImageClassification", "ForImageClassificationWithTeacher")):
        heads = [m for m in model.children() if m is not body]
        if len(heads) != 1:
            raise UnsupportedModelError(
                f"{name} has a backbone of transformers and {len(heads)} other children, where one is "
                "expected, the head. Use its ...ForImageClassification class; for CLIP with text, "
                "CLIPVisionModelWithProjection and a callable target."
            )
        (head,) = heads
        outputs = "features" if name.endswith("WithProjection") else "classes"
        return {"readout": "class", "outputs": outputs}, lambda x: head(norm(x)[:, 0])
    if name == "DeiTForImageClassificationWithTeacher":

        def teacher(x: Tensor) -> Tensor:
            x = norm(x)
            return (model.cls_classifier(x[:, 0]) + model.distillation_classifier(x[:, 1])) / 2

        return {"readout": "class", "readout_rows": (0, 1)}, teacher
    classify = model.classifier
    match _name(body):
        case (
            "Dinov2Model" | "Dinov2WithRegistersModel"
        ):  # one linear map of both the class token and the patches' mean

            def both(x: Tensor) -> Tensor:
                x = norm(x)
                return classify(torch.cat([x[:, 0], x[:, prefix:].mean(dim=1)], dim=1))

            return {"readout": "class", "readout_patches": 0.5}, both
        case "BeitModel" | "Data2VecVisionModel":
            mean = body.config.use_mean_pooling
            readout: dict[str, Any] = (
                {"readout": "mean", "readout_rows": ()} if mean else {"readout": "class"}
            )
            return readout, lambda x: classify(body.pooler(norm(x)))
        case (
            "CLIPVisionModel" | "MetaClip2VisionModel"
        ):  # post_layernorm belongs to the pooled output, which is not used
            return {"readout": "mean", "readout_rows": ()}, lambda x: classify(x[:, prefix:].mean(dim=1))
        case "SiglipVisionModel" | "Siglip2VisionModel" | "IJepaModel":
            return {"readout": "mean", "readout_rows": ()}, lambda x: classify(norm(x).mean(dim=1))
        case _:
            return {"readout": "class"}, lambda x: classify(norm(x)[:, 0])


def _features(body: Any, norm: nn.Module) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    """What a bare backbone gives: pooled as its own forward does, else the class token, else the mean."""
    mean: dict[str, Any] = {"readout": "mean", "readout_rows": (), "outputs": "features"}
    pooler = getattr(body, "pooler", None)
    if getattr(body, "use_head", False):
        return _embedding(body, body, norm)
    if pooler is not None:
        averages = _name(body) in ("BeitModel", "Data2VecVisionModel") and body.config.use_mean_pooling
        readout = mean if averages else {"readout": "class", "outputs": "features"}
        return readout, lambda x: pooler(norm(x))
    if _name(body) in NO_PREFIX:
        return mean, lambda x: norm(x).mean(dim=1)
    return {"readout": "class", "outputs": "features"}, lambda x: norm(x)[:, 0]


def _embedding(model: Any, body: Any, norm: nn.Module) -> tuple[dict[str, Any], Callable[[Tensor], Tensor]]:
    """The image embedding of a model that compares images with text: projected class token, or pooled."""
    project = getattr(model, "visual_projection", nn.Identity())
    if getattr(body, "use_head", False):  # SigLIP: attention pooling
        return {"readout": "pool", "readout_rows": (), "outputs": "features"}, lambda x: project(
            body.head(norm(x))
        )
    return {"readout": "class", "outputs": "features"}, lambda x: project(norm(x)[:, 0])


def _extras(body: Any, layer: nn.Module, patch: tuple[int, int]) -> Callable[[Layout], Mapping[str, Any]]:
    """Further arguments of a layer: rotary rows, or resolution and relative position biases, or none."""
    taken = signature(layer.forward).parameters  # these names differ between versions of transformers
    if hasattr(body, "rope_embeddings"):

        def rotary(layout: Layout) -> Mapping[str, Any]:
            rows, kept = layout.state, layout.kept
            return {
                "position_embeddings": rows if kept is None else tuple(r[kept].unsqueeze(1) for r in rows)
            }

        return rotary
    if _name(body) in ("BeitModel", "Data2VecVisionModel"):
        bias = "relative_position_bias" if "relative_position_bias" in taken else "attention_mask"
        shared = first(body, "shared_position_bias", "encoder.relative_position_bias")

        def relative(layout: Layout) -> Mapping[str, Any]:
            arguments = {
                bias: None if shared is None else shared(layout.grid),
                "resolution": (layout.grid[0] * patch[0], layout.grid[1] * patch[1]),
            }
            return {name: value for name, value in arguments.items() if name in taken}

        return relative
    needed = {"attention_mask": None} if "attention_mask" in taken else {}
    return lambda layout: needed


def layer_parts(block: Any, before: nn.Module | None) -> Callable[[], Parts] | None:
    """Linear parts of a pre-norm layer, whatever this model calls them."""
    attention = first(block, "attention", "self_attn")
    value, output = (
        first(attention, *names)
        for names in (("v_proj", "attention.value"), ("o_proj", "out_proj", "output.dense"))
    )
    if value is None or output is None:
        return None

    def parts() -> Parts:
        return linear_parts(
            norm1=first(block, "norm1", "layernorm_before", "layer_norm1"),
            value=linear(value),
            output=linear(output),
            norm2=first(block, "norm2", "layernorm_after", "layer_norm2"),
            scale1=_scale(block, 1),
            scale2=_scale(block, 2),
            before=before,
        )

    return parts


def _scale(block: Any, which: int) -> Tensor | None:
    scale = first(block, f"layer_scale{which}.lambda1", f"lambda_{which}")
    return scale if isinstance(scale, Tensor) else None


def _vision_config(body: Any) -> Any:
    return getattr(body.config, "vision_config", body.config)


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return int(height), int(width)


def needs_question(model: nn.Module) -> bool:
    """Whether a model answers a question, or a prompt, about an image."""
    return type(model).__name__ in ("ViltForQuestionAnswering",) or (
        hasattr(model, "generate") and hasattr(model, "lm_head") and hasattr(model, "get_image_features")
    )


@register_adapter("transformers_answers", matches=needs_question)
def refuse_without_question(model: nn.Module) -> Plan:
    """Raise an error that says how to ask."""
    name = type(model).__name__
    option = "question" if name == "ViltForQuestionAnswering" else "prompt"
    raise UnsupportedModelError(
        f"{name} answers a {option} about an image, and none was given. Use "
        f"steadygaze.ask(model, {option}='What is on the table?'), whose result is used like a model."
    )


def needs_region(model: nn.Module) -> bool:
    """Whether a model gives classes of pixels, or of boxes."""
    name = type(model).__name__
    return name == DETECTOR or name.endswith("ForSemanticSegmentation")


@register_adapter("transformers_regions", matches=needs_region)
def refuse_without_region(model: nn.Module) -> Plan:
    """Raise an error that says how to ask about a region."""
    name = type(model).__name__
    kind, target = (
        ("an object detector: it gives boxes", "Detection('dog', box=(left, top, right, bottom))")
        if name == DETECTOR
        else ("a segmenter: it gives a class for each pixel", "Region('road', point=(x, y))")
    )
    raise UnsupportedModelError(
        f"{name} is {kind}. Say which one is meant: steadygaze.explain(model, images, "
        f"target=steadygaze.{target}), or steadygaze.ask(model, region=...) for verify"
        f"{'' if name == DETECTOR else '; on the command line, --region point=X,Y'}."
    )
