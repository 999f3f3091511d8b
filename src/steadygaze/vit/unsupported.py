"""What a model is that cannot be viewed as a vision transformer, and what to use for it instead.

Models are recognized by class names and by the layers they have; no library is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from steadygaze.vit.outputs import FORWARD

GENERAL = (
    "Supported are ViTs of timm, transformers and torchvision, listed in docs/models.md, and models around "
    "them; register_adapter adds support for a custom class."
)


@dataclass(frozen=True)
class Kind:
    """A kind of model: how it is recognized, and what serves it."""

    name: str
    matches: Callable[[nn.Module], bool]
    advice: str


def refusal(model: nn.Module) -> str:
    """The text of `UnsupportedModelError` for a model without a known vision transformer inside."""
    name = f"{type(model).__module__}.{type(model).__name__}"
    kind = next((kind for kind in KINDS if kind.matches(model)), None)
    if kind is None:
        return f"{name} is not a vision transformer that steadygaze supports. {GENERAL}"
    return f"{name} is {kind.name}, not a vision transformer that steadygaze knows. {kind.advice}"


def _named(pattern: str) -> Callable[[nn.Module], bool]:
    """Whether the class or its Python module has a name that matches."""
    compiled = re.compile(pattern)
    return lambda model: any(
        compiled.search(f"{kind.__module__}.{kind.__name__}") is not None for kind in type(model).__mro__
    )


def _has(model: nn.Module, *layers: type[nn.Module]) -> bool:
    return any(isinstance(module, layers) for module in model.modules())


def _attends(model: nn.Module) -> bool:
    """Whether a module is an attention, by its class or by its name in the model."""
    return _has(model, nn.MultiheadAttention) or any(
        re.search("attn|attention", f"{name} {type(module).__name__}", re.IGNORECASE) is not None
        for name, module in model.named_modules()
    )


def _input(*names: str) -> Callable[[nn.Module], bool]:
    """Whether a model of transformers is given its input by one of these names."""
    return lambda model: getattr(model, "main_input_name", "") in names


def _is_video(model: nn.Module) -> bool:
    return _has(model, nn.Conv3d) or VIDEO(model)


def _is_text(model: nn.Module) -> bool:
    return TEXT(model) or (_has(model, nn.Embedding) and not _has(model, nn.Conv1d, nn.Conv2d, nn.Conv3d))


def _is_cnn(model: nn.Module) -> bool:
    return _has(model, nn.Conv2d) and not _attends(model)


def _is_mixer(model: nn.Module) -> bool:
    return MIXER(model) and not _attends(model)


VIDEO = _named(r"(?i)video|timesformer|vivit")
TEXT = _input("input_ids")
MIXER = _named(r"(?i)mixer|resmlp|gmlp")

KINDS = (
    Kind(
        "an object detector",
        _named(r"ForObjectDetection|models\.detection\.|(?i:detr\b|yolo|rcnn|retinanet|fcos)"),
        "It gives boxes, not logits of classes. With a ViT as its backbone, explain one of its scores: "
        f"{FORWARD}; for other backbones use D-RISE or the detection examples of pytorch-grad-cam.",
    ),
    Kind(
        "a segmenter",
        _named(r"Segmentation|models\.segmentation\.|(?i:segformer|maskformer|deeplab)"),
        "It gives a class for each pixel. `steadygaze stress` measures it with the suite segmentation; with "
        "a ViT as its backbone, explain a region: target=sg.Region(label, point=(x, y)).",
    ),
    Kind(
        "a video model",
        _is_video,
        "It takes clips, not images. Use captum, or explain an image classifier on single frames.",
    ),
    Kind(
        "a text model",
        _is_text,
        "It takes no images. Use captum, inseq (generation) or ferret (classification).",
    ),
    Kind(
        "an audio model",
        _input("input_values", "input_features"),
        "It takes no images. Use captum.",
    ),
    Kind(
        "an MLP model without attention",
        _is_mixer,
        "Use captum or pytorch-grad-cam; `steadygaze stress` serves it, in suites that need no attention.",
    ),
    Kind(
        "a CNN",
        _is_cnn,
        "Use pytorch-grad-cam or captum; `steadygaze stress` serves it, in suites that need no attention.",
    ),
    Kind(
        "a model with attention of another architecture",
        lambda model: _has(model, nn.Conv2d) and _attends(model),
        "Describe it with register_adapter (its docstring has an example), or use captum. " + GENERAL,
    ),
)
