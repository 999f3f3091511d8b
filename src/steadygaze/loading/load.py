"""From a name to a model that is ready to use, with the preprocessing and the class names that belong to it.

| name | model |
| --- | --- |
| `embedded` | the small CIFAR-10 ViT inside this package |
| `deit_tiny_patch16_224` | timm, pretrained from the hub, or with the weights of `checkpoint` |
| `torchvision:vit_b_16` | torchvision |
| `resnet18`, `torchvision:resnet18` | a CNN of either: for `stress`, which needs attention for a few suites alone |
| a folder that `steadygaze train` wrote | what was trained there, with its modules |
| a folder with config.json, or `owner/name` | transformers, `AutoModelForImageClassification`, or `...SemanticSegmentation` |
| `torchvision:deeplabv3_resnet50` | a segmenter of torchvision: for `stress --suite segmentation` alone |
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from steadygaze.errors import BadCheckpoint, BadInput, UnknownName
from steadygaze.loading.checkpoint import Weights, fit, read_weights, weights_hash
from steadygaze.loading.hub import hub
from steadygaze.loading.run_folder import register, remade, run_weights, told_by, with_modules
from steadygaze.loading.torchvision_segmenters import segmenter_names, torchvision_segmenter

Preprocess = Callable[[Image.Image], Tensor]


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model with what is needed to feed it and to read its answer.

    preprocess: RGB picture -> (3, H, W), normalised; mean, std, size (H, W): what it ends in
    recipe: the preprocessing in words, for a record       weights_hash: see `checkpoint.weights_hash`
    """

    model: nn.Module
    name: str
    preprocess: Preprocess
    classes: tuple[str, ...] | None
    weights_hash: str
    source: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    size: tuple[int, int]
    recipe: dict[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None

    @property
    def identity(self) -> dict[str, str]:
        """What a row says of the model: its name, and the hash of its weights."""
        return {"model": self.name, "weights": self.weights_hash}

    def picture(self, image: Tensor) -> Image.Image:
        """The picture that the model sees: a preprocessed image (3, H, W) with the normalisation undone."""
        from steadygaze.drawing import as_picture

        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return as_picture((image.detach().cpu().float() * std + mean).clamp(0, 1))

    def class_index(self, name: str) -> int:
        """The class of that name or number; names are compared without case, also by each part between commas."""
        if name.isdecimal():
            return int(name)
        if self.classes is None:
            raise BadInput(f"expected a class number, got {name!r}: the classes of {self.name} have no names")
        wanted = name.strip().lower()
        for split in (lambda text: [text], lambda text: text.split(",")):
            found = [
                index
                for index, label in enumerate(self.classes)
                if wanted in [part.strip() for part in split(label.lower())]
            ]
            if len(found) > 1:
                which = ", ".join(f"{index} ({self.classes[index]})" for index in found)
                raise BadInput(
                    f"{name!r} is the name of {len(found)} classes of {self.name}: {which}. Give the number of one."
                )
            if found:
                return found[0]
        raise UnknownName(
            "class", name, {part.strip() for label in self.classes for part in label.split(",")}
        )


def load_model(
    name: str,
    checkpoint: str | Path | None = None,
    *,
    num_classes: int | None = None,
    device: torch.device | str = "cpu",
) -> Loaded:
    """The model of that name in evaluation mode; see the table above. The classifier's width is taken from the
    checkpoint unless `num_classes` says otherwise."""
    run = run_weights(name) if checkpoint is None else None
    checkpoint = run or checkpoint
    about = None if checkpoint is None else told_by(checkpoint)
    weights = None if checkpoint is None else read_weights(checkpoint)
    origin = None if checkpoint is None else str(checkpoint)
    with torch.random.fork_rng(devices=[]):  # a new model draws weights before it gets its own
        if about is not None and weights is not None and (run is not None or about["model"] == name):
            made = remade(about, weights, str(origin), num_classes, _made)
        else:
            made = _made(name, weights, origin, num_classes)
    model = made.pop("model").eval()
    try:
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise BadInput(f"device {str(device)!r} cannot be used here ({error}); 'cpu' always can") from error
    return Loaded(model=model, name=name, checkpoint=origin, weights_hash=weights_hash(model), **made)


def _made(name: str, weights: Weights | None, origin: str | None, num_classes: int | None) -> dict[str, Any]:
    if name == "embedded":
        return _embedded(weights, origin)
    if name.startswith("torchvision:"):
        return _torchvision(name.removeprefix("torchvision:"), weights, origin, num_classes)
    if _is_folder(name) or ("/" in name and not name.startswith(("hf-hub:", "hf_hub:", "timm/"))):
        return _transformers(name, weights, origin, num_classes)
    return _timm(name.removeprefix("timm:").removeprefix("timm/"), weights, origin, num_classes)


def _is_folder(name: str) -> bool:
    """Whether the name is a transformers folder; one without config.json that happens to bear a timm name is none."""
    import timm

    return (Path(name) / "config.json").is_file() or (Path(name).is_dir() and not timm.is_model(name))


def _timm(name: str, weights: Weights | None, origin: str | None, num_classes: int | None) -> dict[str, Any]:
    import timm
    from timm.data import ImageNetInfo, create_transform, infer_imagenet_subset, resolve_data_config

    register()
    if not name.startswith(("hf-hub:", "hf_hub:")) and not timm.is_model(name.split(".")[0]):
        known = [*timm.list_models(), "embedded", *(f"torchvision:{other}" for other in torchvision_names())]
        raise UnknownName("model", name, known, "List them with: steadygaze models PATTERN")
    if weights is None:
        with hub(name):
            model = timm.create_model(name, pretrained=True, **_width(num_classes))
    else:
        if num_classes is None:
            heads = timm.get_pretrained_cfg_value(name, "classifier") or "head"
            num_classes = head_width(weights, [heads] if isinstance(heads, str) else heads)
        model = with_modules(timm.create_model(name, pretrained=False, **_width(num_classes)), weights)
        fit(model, weights, origin or "")
    config = resolve_data_config(model.pretrained_cfg, model=model)
    subset = infer_imagenet_subset(model)
    info = ImageNetInfo(subset) if subset else None
    return {
        "model": model,
        "preprocess": create_transform(**config, is_training=False),
        "classes": tuple(info.index_to_description(i) for i in range(info.num_classes())) if info else None,
        "source": "timm",
        "mean": tuple(config["mean"]),
        "std": tuple(config["std"]),
        "size": tuple(config["input_size"][1:]),
        "recipe": config,
    }


def _embedded(weights: Weights | None, origin: str | None) -> dict[str, Any]:
    from timm.models.vision_transformer import VisionTransformer

    assets = files("steadygaze") / "assets"
    about = json.loads((assets / "embedded.json").read_text(encoding="utf-8"))
    model = with_modules(VisionTransformer(**about["arguments"]), weights or {})
    fit(
        model,
        read_weights(str(assets / "embedded.safetensors")) if weights is None else weights,
        origin or "embedded",
    )
    side = about["image_size"]
    recipe = {"resize": side, "crop": [side, side], "interpolation": about["interpolation"]}
    return {
        "model": model,
        "preprocess": transform(recipe, about["mean"], about["std"]),
        "classes": tuple(about["classes"]),
        "source": "embedded",
        "mean": tuple(about["mean"]),
        "std": tuple(about["std"]),
        "size": (side, side),
        "recipe": recipe | {"mean": about["mean"], "std": about["std"]},
    }


def torchvision_names() -> list[str]:
    """The classifiers of torchvision that `adapt` views."""
    return [name for name in _torchvision_classifiers() if name.startswith("vit_")]


def _torchvision_classifiers() -> list[str]:
    """All of them, CNNs too."""
    from torchvision import models

    return models.list_models(module=models)


def _torchvision(
    name: str, weights: Weights | None, origin: str | None, num_classes: int | None
) -> dict[str, Any]:
    from torchvision.models import get_model, get_model_weights

    if name in segmenter_names():
        return torchvision_segmenter(name, weights, origin, num_classes)
    if name not in _torchvision_classifiers():
        raise UnknownName("torchvision model", name, [*_torchvision_classifiers(), *segmenter_names()])
    default = get_model_weights(name).DEFAULT
    if weights is None:
        with hub(name):
            model = get_model(name, weights=default)
    else:
        with torch.device("meta"):
            head, _ = _last(get_model(name, weights=None))
        num_classes = num_classes or head_width(weights, [head])
        model = with_modules(get_model(name, weights=None, **_width(num_classes)), weights)
        fit(model, {_torchvision_name(key): value for key, value in weights.items()}, origin or "")
    preset, names = default.transforms(), default.meta["categories"]
    recipe = {"resize": preset.resize_size[0], "crop": preset.crop_size * 2}
    recipe |= {"interpolation": preset.interpolation.value, "mean": preset.mean, "std": preset.std}
    return {
        "model": model,
        "preprocess": preset,
        "classes": tuple(names) if _last(model)[1] == len(names) else None,
        "source": "torchvision",
        "mean": tuple(preset.mean),
        "std": tuple(preset.std),
        "size": (preset.crop_size[0], preset.crop_size[0]),
        "recipe": recipe,
    }


def _last(model: nn.Module) -> tuple[str, int]:
    """Name and width of the layer that gives the logits: of torchvision's models the last linear map or convolution."""
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    return layers[-1][0], len(layers[-1][1].weight)


def _torchvision_name(key: str) -> str:
    """The files that torchvision publishes call the two layers of an MLP linear_1 and linear_2, its modules 0 and 3; and the
    first layers of a DenseNet's block norm.1 and so on, its modules norm1."""
    key = key.replace(".mlp.linear_1.", ".mlp.0.").replace(".mlp.linear_2.", ".mlp.3.")
    return re.sub(r"(denselayer\d+\.(?:norm|conv))\.([12])\.", r"\1\2.", key)


def _transformers(
    name: str, weights: Weights | None, origin: str | None, num_classes: int | None
) -> dict[str, Any]:
    try:
        from transformers import (
            AutoConfig,
            AutoImageProcessor,
            AutoModelForImageClassification,
            AutoModelForSemanticSegmentation,
        )
    except ImportError as error:
        raise BadInput("models of transformers need it installed: pip install 'steadygaze[hf]'") from error
    local = Path(name).is_dir()
    with hub(name, local):
        try:
            processor = AutoImageProcessor.from_pretrained(name)
        except OSError as error:
            if local and (Path(name) / "config.json").is_file():
                raise BadCheckpoint(
                    f"{name} has no preprocessor_config.json: how its pictures are made is not known. Save the image processor "
                    "into it too, for example ViTImageProcessor(size=..., image_mean=..., image_std=...).save_pretrained(FOLDER)"
                ) from error
            raise
        kinds = AutoConfig.from_pretrained(name).architectures or ()
        segments = any(kind.endswith("ForSemanticSegmentation") for kind in kinds)
        auto = AutoModelForSemanticSegmentation if segments else AutoModelForImageClassification
        if weights is None:
            model, report = auto.from_pretrained(name, output_loading_info=True)
            absent = sorted(report["missing_keys"])
            if local and any(
                key.endswith("_extra_state") for key in report["unexpected_keys"]
            ):  # modules, which transformers leaves out
                stored = {
                    _tail(key): value for key, value in read_weights(Path(name) / "model.safetensors").items()
                }
                theirs = {key: stored[_tail(key)] for key in report["unexpected_keys"]}
                model = with_modules(model, theirs)
                model.load_state_dict(theirs, strict=False)
        else:
            num_classes = num_classes or head_width(weights, ["classifier"])
            extra = {} if num_classes is None else {"num_labels": num_classes}
            model = auto.from_config(AutoConfig.from_pretrained(name, **extra))
            absent = []
            model = _filled(with_modules(model, weights), weights, origin or "")
    if absent:
        kind = "segmenter" if segments else "classifier"
        raise BadCheckpoint(
            f"the weights of {name} lack {', '.join(absent[:5])}: it is no finished image {kind}"
        )
    recipe = _processor_recipe(processor)
    names = model.config.id2label
    return {
        "model": model,
        "preprocess": transform(recipe, recipe["mean"], recipe["std"]),
        "classes": None if names.get(0) == "LABEL_0" else tuple(names[i] for i in range(len(names))),
        "source": "transformers",
        "mean": tuple(recipe["mean"]),
        "std": tuple(recipe["std"]),
        "size": tuple(recipe["crop"] or recipe["resize"]),
        "recipe": recipe,
    }


def _tail(key: str) -> str:
    """The part of a name from the block's number on: files keep the names of older versions before it."""
    return re.sub(r"^.*?(?=\d+\.)", "", key)


def _filled(model: Any, weights: Weights, origin: str) -> Any:
    """The model with these weights. Files keep the names of older versions, which `from_pretrained` translates."""
    try:
        fit(model, weights, origin)
    except BadCheckpoint:
        try:
            model, report = type(model).from_pretrained(
                None, config=model.config, state_dict=weights, output_loading_info=True
            )
        except (RuntimeError, ValueError, OSError):
            report = {"error_msgs": ["of another shape"]}
        if any(report.values()):
            raise
    return model


def _processor_recipe(processor: Any) -> dict[str, Any]:
    """Resize, crop and normalisation of a transformers image processor."""
    size, crop = dict(processor.size or {}), getattr(processor, "crop_size", None)
    shares = getattr(processor, "crop_pct", None)
    resize: int | list[int]
    if "shortest_edge" in size:
        resize, crop_to = size["shortest_edge"], [size["shortest_edge"]] * 2
        if shares:  # resize to size / crop_pct, then crop to size
            resize = int(resize / shares)
        elif getattr(processor, "do_center_crop", False) and crop:
            crop_to = [crop["height"], crop["width"]]
    else:
        resize, crop_to = [size["height"], size["width"]], []
        if getattr(processor, "do_center_crop", False) and crop:
            crop_to = [crop["height"], crop["width"]]
    plain = not getattr(processor, "do_normalize", True)
    return {
        "resize": resize,
        "crop": crop_to,
        "interpolation": Image.Resampling(int(processor.resample)).name.lower(),
        "mean": [0.0] * 3 if plain else list(processor.image_mean),
        "std": [1.0] * 3 if plain else list(processor.image_std),
    }


def transform(recipe: dict[str, Any], mean: Sequence[float], std: Sequence[float]) -> Preprocess:
    """Resize (one number: the shorter side), centre crop, [0, 1], normalise."""
    from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

    steps = [Resize(recipe["resize"], InterpolationMode(recipe["interpolation"]))]
    steps += [CenterCrop(recipe["crop"])] if recipe["crop"] else []
    return Compose([*steps, ToTensor(), Normalize(list(mean), list(std))])


def _width(num_classes: int | None) -> dict[str, int]:
    return {} if num_classes is None else {"num_classes": num_classes}


def head_width(weights: Weights, heads: Sequence[str]) -> int | None:
    """Rows of the classifier in a checkpoint, whatever prefix its names carry; None where there is no such head."""
    for head in heads:
        for name, value in weights.items():
            if value.ndim in (2, 4) and (name == f"{head}.weight" or name.endswith(f".{head}.weight")):
                return value.shape[0]
    return None
