"""From a `Region` or a `Detection` to a classifier of images and its class: what `ask` and `explain` do."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import BadInput, UnsupportedModel
from steadygaze.heatmap import SHOWN_IN_NOTEBOOK, Attribution, Attributions
from steadygaze.questions.detections import Detection, QueryClassifier, detection_query, detects
from steadygaze.questions.regions import (
    Region,
    RegionClassifier,
    Size,
    label_index,
    own_class_names,
    scores_of,
)
from steadygaze.questions.segmenters import is_own
from steadygaze.vit import ViT, adapt, unwrapped
from steadygaze.vit.evaluation_mode import evaluation_mode, without_autocast
from steadygaze.vit.image_features import compares_text


def is_region(target: Any) -> bool:
    """Whether a target is a region or a detection, or several of them."""
    several = target if isinstance(target, (list, tuple)) else [target]
    return any(isinstance(one, (Region, Detection)) for one in several)


def region_question(
    model: Any, images: Any, target: Any
) -> tuple[RegionClassifier | QueryClassifier, int | None]:
    """The classifier of the region, and the class of its label; None: the predicted one."""
    module = model.model if isinstance(model, ViT) else unwrapped(model)
    names = getattr(model, "class_names", None)
    if isinstance(target, Detection):
        if not isinstance(images, Tensor) or images.dim() != 4 or len(images) != 1:
            got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
            raise BadInput(f"Detection: expected the image it is in, a tensor (1, 3, H, W), got {got}")
        return detection_query(module, images, target, names)
    if not isinstance(target, Region):
        raise BadInput(f"region: expected a steadygaze.Region or Detection, got {target!r:.80}")
    if detects(module):
        raise UnsupportedModel(
            f"Region: {type(module).__name__} is a detector. Use steadygaze.Detection(label, box)"
        )
    mask = target.pixels(_size(model, module, images, target))
    classifier = RegionClassifier(module, mask, names or own_class_names(module))
    classes = _check_segmenter(classifier)
    if target.label is None:
        return classifier, None
    by_name = isinstance(target.label, str) and names is not None and hasattr(model, "class_index")
    index = (
        model.class_index(target.label)  # of `load_model`, which knows parts of names
        if by_name
        else label_index(target.label, classifier.class_names, type(module).__name__)
    )
    if not 0 <= index < classes:
        raise BadInput(f"Region: class {index} is out of range; the model has classes 0..{classes - 1}")
    return classifier, index


def segments(model: Any) -> bool:
    """Whether a loaded model is a segmenter: known by its class, or by its output for a blank image."""
    module = unwrapped(model)
    if is_own(module) or type(module).__name__.endswith("ForSemanticSegmentation"):
        return True
    if isinstance(module, (RegionClassifier, QueryClassifier)) or detects(module) or compares_text(module):
        return False
    parameter = next(module.parameters())
    blank = torch.zeros(1, 3, *model.size, device=parameter.device, dtype=parameter.dtype)
    try:
        with torch.no_grad(), without_autocast(module), evaluation_mode(module):
            return scores_of(module(blank)).dim() == 4
    except Exception:  # whatever a model raises that takes more than images
        return False


def identity(classifier: RegionClassifier | QueryClassifier) -> list[str]:
    """Texts that tell one question from another, for hashes."""
    if isinstance(classifier, RegionClassifier):
        pixels = classifier.mask.cpu().numpy()
        return [f"region {pixels.shape}", hashlib.sha256(pixels.tobytes()).hexdigest()]
    return [f"query {classifier.query}"]


def _check_segmenter(classifier: RegionClassifier) -> int:
    """The number of classes; an error if the model is no segmenter."""
    model = classifier.model
    parameter = next(model.parameters())
    channels = getattr(getattr(model, "config", None), "num_channels", 3)
    blank = torch.zeros(1, channels, *classifier.size, device=parameter.device, dtype=parameter.dtype)
    with torch.no_grad(), without_autocast(model), evaluation_mode(model):
        try:
            return scores_of(model(blank)).shape[1]
        except UnsupportedModel as error:
            raise UnsupportedModel(f"Region: {type(model).__name__}: {error}") from None


def _size(model: Any, module: nn.Module, images: Any, region: Region) -> Size:
    """(H, W) of the image that a region is in: of the given images, or what the model takes."""
    if isinstance(images, Tensor):
        return images.shape[-2], images.shape[-1]
    if region.mask is not None and getattr(region.mask, "ndim", 0) == 2:
        return region.mask.shape
    size: Any = getattr(model, "size", None)  # of `load_model`
    if size is None and is_own(module):
        size = adapt(module.backbone).plan.input_size[1:]
    if size is None:
        size = getattr(getattr(module, "config", None), "image_size", None)
    if isinstance(size, int):
        size = (size, size)
    if size is None:
        raise BadInput(
            f"region: the image size of this {type(module).__name__} is not known. Give image=, a tensor "
            "(1, 3, H, W) as the model takes it",
            option="image",
        )
    return int(size[0]), int(size[1])


def needs_each(target: Any, images: Any) -> bool:
    """Whether every image has a question of its own: a list of regions, or a detection in several images."""
    several = isinstance(images, Tensor) and images.dim() == 4 and len(images) > 1
    return is_region(target) and (
        isinstance(target, (list, tuple)) or (isinstance(target, Detection) and several)
    )


def explain_each(explain: Callable[[Tensor, Any], Any], images: Any, target: Any) -> Any:
    """What `explain` gives for each image with its own region, put together."""
    if not isinstance(images, Tensor) or images.dim() != 4:
        raise BadInput(f"images: expected a tensor (B, 3, H, W), got {type(images).__name__}")
    targets = list(target) if isinstance(target, (list, tuple)) else [target] * len(images)
    if len(targets) != len(images):
        raise BadInput(
            f"target: expected one Region or Detection for all images, or {len(images)}, one for each, got "
            f"{len(targets)}"
        )
    results = [explain(images[i : i + 1], one) for i, one in enumerate(targets)]
    if isinstance(results[0], dict):
        return Attributions({name: _together([result[name] for result in results]) for name in results[0]})
    return _together(results)


def _together(parts: list[Attribution]) -> Attribution:
    """One attribution of several images."""
    first = parts[0]
    targets = [part.target for part in parts if part.target is not None]
    rests = [part.unattributed for part in parts if part.unattributed is not None]
    shares = [part.parts for part in parts if part.parts is not None]
    pixels = [part.pixels for part in parts if part.pixels is not None][:SHOWN_IN_NOTEBOOK]
    return replace(
        first,
        scores=torch.cat([part.scores for part in parts]),
        target=torch.cat(targets),
        logits=torch.cat([part.logits for part in parts]),
        unattributed=torch.cat(rests) if rests else None,
        pixels=torch.cat(pixels) if pixels else None,
        parts={name: torch.cat([one[name] for one in shares]) for name in shares[0]} if shares else None,
    )
