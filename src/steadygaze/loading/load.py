"""From a name to a model that is ready to use, with the preprocessing and the class names that belong to it.

| name | model |
| --- | --- |
| `embedded` | the small CIFAR-10 ViT inside this package |
| `deit_tiny_patch16_224` | timm, pretrained from the hub, or with the weights of `checkpoint` |
| `torchvision:vit_b_16` | torchvision |
| `resnet18`, `torchvision:resnet18` | a CNN of either, for `stress`, most of whose suites need no attention |
| a folder that `steadygaze train` wrote | the trained model, with its modules |
| `open_clip:ViT-B-32@openai` | open_clip, with published weights, or those of `checkpoint` |
| a folder with config.json, or `owner/name` | a classifier, segmenter, CLIP, YOLOS, ... of transformers |
| `torchvision:deeplabv3_resnet50` | a segmenter of torchvision, for the stress suite `segmentation` only |
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import steadygaze.models as own_models
from steadygaze.data.decoding import first_line
from steadygaze.data.preprocess import Preprocess
from steadygaze.data.transforms import OwnPreprocess, Transform, own_preprocess
from steadygaze.errors import CheckpointError, InputError, SteadygazeError
from steadygaze.loading.build import EMBEDDED, build_model
from steadygaze.loading.checkpoint import fit, read_weights, weights_hash
from steadygaze.loading.loaded import LoadedModel, ModelOptions
from steadygaze.loading.options import (
    ClassNames,
    ImageSize,
    constructor_options,
    image_size_pair,
    overridden,
    read_class_names,
    stated_preprocess,
)
from steadygaze.loading.run_folder import read_description, rebuild, run_weights
from steadygaze.loading.timm import imagenet_class_names
from steadygaze.loading.torchvision import PREFIX, vit_names
from steadygaze.loading.transformers import config_class_names, read_preprocess
from steadygaze.notebook import Listing
from steadygaze.registry import matches
from steadygaze.target import check_class_names, outputs_of_task, own_task, task_of_outputs
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.outputs import logits_of
from steadygaze.vit.wrapped import CustomForward

# modules of timm whose models the adapters support
TIMM_PLAIN = (
    "vision_transformer",
    "deit",
    "eva",
    "beit",
    "cait",
    "vision_transformer_relpos",
    "vision_transformer_hybrid",
    "naflexvit",
)

TIMM_STAGED = (
    "swin_transformer",
    "swin_transformer_v2",
    "swin_transformer_v2_cr",
    "pvt_v2",
    "pit",
    "mvitv2",
    "hiera",
    "twins",
    "levit",
    "xcit",
)


@dataclass(frozen=True)
class ModelInfo:
    """A model that can be loaded by name.

    Attributes:
        view: "plain" (one patch grid for all blocks) or "staged" (the grid shrinks between stages).
    """

    name: str
    library: str
    view: str


def list_models(pattern: str = "") -> Listing[ModelInfo]:
    """Describe the models that `load_model` takes by name: vision transformers of timm, torchvision and ours.

    Args:
        pattern: Part of the name, where a hyphen stands for an underscore; or with *, ? and [] a pattern for
            the whole name.

    Returns:
        A list of `ModelInfo` that shows itself as a table.

    Examples:
        >>> [info.name for info in list_models("embed")]
        ['embedded']
    """
    infos = [ModelInfo(EMBEDDED, "steadygaze", "plain")]
    infos += [ModelInfo(name, "steadygaze", "plain") for name in _timm_names(own_models.PLAIN)]
    infos += [ModelInfo(name, "steadygaze", "staged") for name in _timm_names(own_models.STAGED)]
    infos += [ModelInfo(name, "timm", "plain") for name in sorted(set(_timm_names(TIMM_PLAIN)))]
    infos += [ModelInfo(name, "timm", "staged") for name in sorted(set(_timm_names(TIMM_STAGED)))]
    infos += [
        ModelInfo(PREFIX + name, "torchvision", "staged" if "swin" in name else "plain")
        for name in vit_names()
    ]
    chosen = [info for info in infos if matches(info.name, pattern)]
    return Listing(chosen, "models", ("name", "library", "view"))


def _timm_names(modules: Sequence[str]) -> list[str]:
    """The names that these modules register with timm."""
    import timm

    return [name for module in modules for name in timm.list_models(module=module)]


def load_model(
    model: str | nn.Module | LoadedModel,
    checkpoint: str | Path | None = None,
    *,
    num_classes: int | None = None,
    device: torch.device | str | None = None,
    preprocess: Preprocess | Transform | None = None,
    class_names: ClassNames | None = None,
    image_size: ImageSize | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    forward: Callable[[Any, Tensor], Any] | None = None,
    task: str | None = None,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Load a model in evaluation mode, with its preprocessing and class names.

    Args:
        model: A name or folder (see the table of this module), a module of timm, transformers or any other
            library, or an object of `transformers.pipeline`. A module is not copied and keeps its mode.
        checkpoint: Weights to be loaded, a .safetensors, .pth, .pt or .bin file.
        num_classes: Width of the classifier; by default that of the checkpoint, or the model's own.
        device: By default the CPU, and for a module the device it is on.
        preprocess: A callable from an RGB image of PIL to a tensor (3, H, W): a `Compose` of torchvision, a
            transform of timm, an image processor of transformers, or `sg.Preprocess`. By default the one that
            the model's library describes; needed for a module of no known library, unless `image_size`,
            `mean` and `std` are given.
        class_names: Names, or a file with one name a line or a JSON list or dict; by default those of the
            model's library or checkpoint, where there are any.
        image_size: Side or (height, width) of the preprocessed images, in place of the library's value. The
            library's resize rule is kept: the shorter side is resized to image_size / crop_pct, bicubic for
            most models, then the center is cropped. Where no library describes one, the shorter side is
            resized to image_size itself (bicubic), then the center is cropped; a model that was evaluated
            with another rule, such as 256 -> 224, predicts differently: give `preprocess` instead. A timm
            model is also built for this image size, if it takes one.
        mean: Mean of the normalization for each channel, in place of the library's value.
        std: Standard deviation of the normalization for each channel, in place of the library's value.
        model_kwargs: Arguments of timm's constructor, such as {"img_size": 320}.
        forward: For a module that is not called by model(images); see `adapt`.
        task: What the outputs mean: "classification", "multilabel" (independent labels) or "regression"
            (values). By default what the configuration of a transformers model states, or classification.
        trust_remote_code: Execute Python code that a transformers folder or repository contains. Without it,
            such a model is a `CheckpointError`.

    Returns:
        A `LoadedModel`, accepted wherever a model is.

    Raises:
        UnknownNameError: If no library has a model of this name.
        CheckpointError: If the weights cannot be read, or do not fit the model.
        InputError: If another argument is wrong.

    Examples:
        >>> loaded = load_model("embedded")
        >>> loaded.size, loaded.class_names[:2], loaded.class_index("cat")
        ((32, 32), ('airplane', 'automobile'), 3)
    """
    given = None if preprocess is None else _given_preprocess(preprocess, image_size, mean, std)
    if isinstance(model, LoadedModel):
        loaded = model if checkpoint is None else _from_module(model.model, checkpoint, model)
    elif is_pipeline(model):
        held = from_pipeline(model)
        loaded = _from_module(held.model, checkpoint, held)
    elif isinstance(model, nn.Module):
        if model_kwargs:
            raise InputError(
                "model_kwargs: expected none for a module, which is built already", option="model_kwargs"
            )
        loaded = _from_module(model, checkpoint, given, lambda: stated_preprocess(image_size, mean, std))
    else:
        complete = None not in (image_size, mean, std)
        options = ModelOptions(
            num_classes=num_classes,
            arguments=constructor_options(model, model_kwargs, image_size),
            trust_remote_code=trust_remote_code,
            fallback=given or (stated_preprocess(image_size, mean, std) if complete else None),
        )
        loaded = _from_name(model, checkpoint, options)
    if device is not None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a driver, before our error
                loaded = replace(loaded, model=loaded.model.to(device))
        except (RuntimeError, AssertionError) as error:
            reason = f"cannot be used here ({error}); 'cpu' always can"
            raise InputError(f"device {str(device)!r} {reason}", option="device") from error
    stated = overridden(given or loaded.preprocess, image_size, mean, std)
    assert stated is not None
    if stated != loaded.preprocess:
        loaded = replace(loaded, preprocess=stated)
    if class_names is not None:
        names = read_class_names(class_names)
        check_class_names(names, loaded.model)
        loaded = replace(loaded, class_names=names)
    if forward is not None:
        loaded = replace(loaded, model=CustomForward(loaded.model, forward))
    if class_names is not None:
        _check_number_of_names(loaded)
    stated_task = None if task is None else task_of_outputs(outputs_of_task(task))
    task = stated_task or loaded.task or own_task(loaded.model)
    return loaded if task == loaded.task else replace(loaded, task=task)


def _given_preprocess(
    preprocess: Any,
    image_size: ImageSize | None,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> Preprocess:
    """What the user gave as `preprocess`; mean and std may state a normalization, not change it."""
    size = None if image_size is None else image_size_pair(image_size)
    given = own_preprocess(preprocess, size)
    for name, values in (("mean", mean), ("std", std)):
        own = list(given.config.get(name, ()))
        if isinstance(given, OwnPreprocess) and own and values is not None and list(values) != own:
            raise InputError(
                f"preprocess normalizes with {name} {own}, got {list(values)}: change its Normalize, "
                f"or leave out {name}",
                option=name,
            )
    return given


def _from_name(name: str, checkpoint: str | Path | None, options: ModelOptions) -> LoadedModel:
    run = run_weights(name) if checkpoint is None else None
    checkpoint = run or checkpoint
    with torch.random.fork_rng(devices=[]):  # a new model draws its initial weights, which are then replaced
        if checkpoint is None:
            built = build_model(name, options)
        else:
            try:
                built = _with_weights(name, checkpoint, options, from_run=run is not None)
            except SteadygazeError:
                raise
            except Exception as error:  # whatever the libraries raise about an unchecked file
                reason = f"{type(error).__name__}: {first_line(error)}"
                raise CheckpointError(f"{checkpoint} cannot be loaded as {name} ({reason})") from error
    module = built.model.eval()
    origin = None if checkpoint is None else str(checkpoint)
    return replace(built, name=name, weights_hash=weights_hash(module), checkpoint=origin)


def _with_weights(name: str, checkpoint: str | Path, options: ModelOptions, from_run: bool) -> LoadedModel:
    """The model with the weights of a file, which may describe how it was built."""
    description = read_description(checkpoint)
    options = replace(options, weights=read_weights(checkpoint), origin=str(checkpoint))
    if description is None or not (from_run or description["model"] == name):
        return build_model(name, options)
    if options.arguments:
        raise InputError(
            f"{name}: the file describes how its model was built, got {dict(options.arguments)}",
            option="model_kwargs",
        )
    return rebuild(description, options)


def _check_number_of_names(loaded: LoadedModel) -> None:
    """Raise `InputError` unless there are as many names as outputs; nothing if the model cannot run."""
    parameter = next(loaded.model.parameters(), torch.zeros(0))
    image = torch.zeros(1, 3, *loaded.size, device=parameter.device, dtype=parameter.dtype)
    try:
        with torch.no_grad(), evaluation_mode(loaded.model):
            outputs = logits_of(loaded.model(image))
    except Exception:  # such as a model that needs text beside the image
        return
    if outputs.dim() == 2 and loaded.class_names and outputs.shape[1] != len(loaded.class_names):
        raise InputError(
            f"expected {outputs.shape[1]} class names, as many as {type(loaded.model).__name__} has outputs, "
            f"got {len(loaded.class_names)}",
            option="class_names",
        )


def _from_module(
    module: nn.Module,
    checkpoint: str | Path | None,
    given: LoadedModel | Preprocess | None,
    stated: Callable[[], Preprocess | None] = lambda: None,
) -> LoadedModel:
    """The module with the weights of the checkpoint, its preprocessing and class names.

    Args:
        given: The loaded model, or the preprocessing, that the user gave.
        stated: Makes the preprocessing of the values that the user states, called if nothing else gives one.
    """
    if checkpoint is not None:
        fit(module, read_weights(checkpoint), str(checkpoint))
    if isinstance(given, LoadedModel):
        loaded = given
    else:
        name, source, class_names = identify(module)
        preprocess = given or declared_preprocess(module) or stated()
        if preprocess is None:
            raise InputError(
                f"the preprocessing of {type(module).__name__} is not known: it has neither a pretrained_cfg "
                "(timm) nor an image processor (transformers). "
                "Give image_size=, mean= and std=, or preprocess=: a Compose of torchvision, or "
                "sg.Preprocess.resize_and_crop((224, 224), resize=256, mean=..., std=...)",
                option="preprocess",
            )
        loaded = LoadedModel(module, name, preprocess, class_names, source=source)
    origin = loaded.checkpoint if checkpoint is None else str(checkpoint)
    return replace(loaded, weights_hash=weights_hash(module), checkpoint=origin)


def identify(module: nn.Module) -> tuple[str, str, tuple[str, ...] | None]:
    """Name, library and class names of a module, as far as it carries them."""
    timm_config: Any = getattr(module, "pretrained_cfg", None)
    if timm_config:
        name = str(timm_config.get("architecture") or type(module).__name__)
        return name, "timm", imagenet_class_names(module)
    config: Any = getattr(module, "config", None)
    if hasattr(config, "id2label"):
        path = str(getattr(config, "_name_or_path", "") or "")
        return path or type(module).__name__, "transformers", config_class_names(module)
    return type(module).__name__, type(module).__module__.partition(".")[0], None


def declared_preprocess(module: nn.Module) -> Preprocess | None:
    """The preprocessing that a module declares; None if it declares none.

    A module of timm has a `pretrained_cfg`; one of transformers has an image processor beside its weights.
    """
    if getattr(module, "pretrained_cfg", None):
        return Preprocess.from_timm_model(module)
    config: Any = getattr(module, "config", None)
    path = str(getattr(config, "_name_or_path", "") or "")
    if hasattr(config, "id2label") and path:
        with suppress(OSError, ValueError):  # no image processor there
            return read_preprocess(path)
    return None


def is_pipeline(model: Any) -> bool:
    """Whether it is an object of `transformers.pipeline` for images, known by what it holds."""
    module, processor = getattr(model, "model", None), getattr(model, "image_processor", None)
    return isinstance(module, nn.Module) and processor is not None and not isinstance(model, nn.Module)


def from_pipeline(pipeline: Any) -> LoadedModel:
    """The model of a pipeline with its image processor and class names; the weights are not hashed."""
    name, source, class_names = identify(pipeline.model)
    return LoadedModel(
        pipeline.model,
        name,
        own_preprocess(pipeline.image_processor),
        class_names,
        source=source,
        task=own_task(pipeline.model),
        tokenizer=getattr(pipeline, "tokenizer", None),
    )
