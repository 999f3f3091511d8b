"""Models of transformers, from classifiers to detectors: a folder with config.json, or `owner/name`.

Code that a folder or repository contains is executed only with `trust_remote_code=True`. Every call of
transformers gets this setting explicitly: by default it would prompt on standard input.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import CheckpointError, InputError
from steadygaze.loading.checkpoint import Weights, agreed_width, fit, hub, read_weights
from steadygaze.loading.loaded import LoadedModel, ModelOptions
from steadygaze.loading.options import MAX_REPEATS
from steadygaze.loading.timm import SPARE_ELEMENTS
from steadygaze.modules import restore
from steadygaze.questions.text import is_empty, without_prompts
from steadygaze.untrusted import MAX_FILE, MIB, inside, read_json

SHOWN = 5  # names of tensors that an error lists
MAX_SIZE = 1_000_000  # of any integer in a config.json
TEXT_IMAGE_MODELS = ("CLIPModel", "MetaClip2Model", "SiglipModel", "Siglip2Model")
TEXT_IMAGE, ANSWERS, GENERATES, BACKBONE = (
    "model of images and text",
    "model that answers questions",
    "model that writes",
    "backbone",
)
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def build_transformers_model(name: str, options: ModelOptions) -> LoadedModel:
    """Build a model of transformers, see `build_model`."""
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise InputError("models of transformers need it installed: pip install 'steadygaze[hf]'") from error
    weights, trust = options.weights, {"trust_remote_code": options.trust_remote_code}
    local = Path(name).is_dir()
    if local:
        check_folder(Path(name))
    with hub(name, local=local), custom_code(name), without_progress_bar():
        preprocess = read_preprocess(name, fallback=options.fallback, **trust)
        config = AutoConfig.from_pretrained(name, **trust)
        # an implementation of attention on the hub ("owner/kernel") is compiled code
        kernel = getattr(config, "_attn_implementation", None)
        if not options.trust_remote_code and isinstance(kernel, str) and "/" in kernel:
            raise needs_code(name, f"its config requires the compiled code of {kernel}")
        if kernel == "flex_attention":
            raise CheckpointError(f"{name}: config.json: expected attention eager or sdpa, got {kernel}")
        if getattr(config, "return_dict", True) is False:
            raise CheckpointError(f"{name}: config.json: expected return_dict true, got false")
        auto, kind = _auto_class(config)
        _check_sizes(config, auto, name, trust)
        if weights is None:
            model, missing = _pretrained(auto, name, trust)
            if kind == BACKBONE and missing and all(key.startswith("pooler.") for key in missing):
                model, missing = _pretrained(auto, name, {**trust, "add_pooling_layer": False})
        else:
            num_classes = agreed_width(options.num_classes, weights, ["classifier"], options.origin)
            labels = {} if num_classes is None else {"num_labels": num_classes}
            config = AutoConfig.from_pretrained(name, **labels, **trust)
            model = auto.from_config(config, **trust)
            model, missing = _fit(restore(model, weights), weights, options.origin), []
    if missing:
        raise CheckpointError(
            f"the weights of {name} lack {', '.join(missing[:SHOWN])}: it is not a complete {kind}"
        )
    class_names = None if kind in (TEXT_IMAGE, GENERATES, BACKBONE) else config_class_names(model)
    tokenizer = None
    if kind in (TEXT_IMAGE, ANSWERS, GENERATES):
        with hub(name, local=local), without_prompts():
            tokenizer = _read_tokenizer(name, kind, trust)
    return LoadedModel(model, name, preprocess, class_names, source="transformers", tokenizer=tokenizer)


def _auto_class(config: Any) -> tuple[Any, str]:
    """The class of transformers that builds a model of this config, and what kind of model it is."""
    from transformers import (
        AutoModel,
        AutoModelForImageClassification,
        AutoModelForImageTextToText,
        AutoModelForObjectDetection,
        AutoModelForSemanticSegmentation,
        AutoModelForVisualQuestionAnswering,
    )

    kinds = config.architectures or ()
    if any(kind in TEXT_IMAGE_MODELS for kind in kinds):
        return AutoModel, TEXT_IMAGE
    if "ViltForQuestionAnswering" in kinds:
        return AutoModelForVisualQuestionAnswering, ANSWERS
    if any(kind.endswith("ForConditionalGeneration") for kind in kinds):
        return AutoModelForImageTextToText, GENERATES
    if any(kind.endswith("ForSemanticSegmentation") for kind in kinds):
        return AutoModelForSemanticSegmentation, "image segmenter"
    if "YolosForObjectDetection" in kinds:
        return AutoModelForObjectDetection, "object detector"
    if kinds and all(_is_backbone(kind) for kind in kinds):
        return AutoModel, BACKBONE
    return AutoModelForImageClassification, "image classifier"


def _is_backbone(architecture: str) -> bool:
    """Whether a class has no classifier: Dinov2Model, or a backbone with the head of its pretraining."""
    return architecture.endswith(("Model", "ForPreTraining", "ForMaskedImageModeling"))


def _read_tokenizer(name: str, kind: str, trust: dict[str, bool]) -> Any:
    """The tokenizer, or the processor of a model that generates text, of a folder or repository.

    None if there is none, which matters once a text is given.
    """
    from transformers import AutoProcessor, AutoTokenizer

    try:
        if kind == GENERATES:
            processor = AutoProcessor.from_pretrained(name, **trust)
            return processor if hasattr(processor, "image_processor") else None
        tokenizer = AutoTokenizer.from_pretrained(name, **trust)
    except (OSError, ValueError, ImportError, KeyError):
        return None
    return None if is_empty(tokenizer) else tokenizer


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Hide transformers' progress bar while it reads weights; downloads from the hub keep theirs."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )
    from transformers.utils import logging

    bar, hub_bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()

    def set_hub_bars() -> None:  # transformers' two functions change them too
        if hub_bars == are_progress_bars_disabled():
            enable_progress_bars() if hub_bars else disable_progress_bars()

    logging.disable_progress_bar()
    set_hub_bars()
    try:
        yield
    finally:
        if bar:
            logging.enable_progress_bar()
            set_hub_bars()


@contextmanager
def custom_code(name: str) -> Iterator[None]:
    """Turn transformers' refusal to execute code of a model into a `CheckpointError`."""
    try:
        with without_prompts():
            yield
    except ValueError as error:
        if isinstance(error, CheckpointError) or "trust_remote_code" not in str(error):
            raise
        raise needs_code(name, "it brings its own Python code") from error


def check_folder(folder: Path) -> None:
    """`InputError` if a file of a model folder is a link out of it, or an index names files outside of it.

    The hub's own cache is such a folder of links: those to its `blobs` are allowed.
    """
    blobs = [folder.resolve().parent.parent / "blobs"] if folder.resolve().parent.name == "snapshots" else []
    for path in sorted(folder.iterdir()):
        if path.suffix in (*WEIGHT_SUFFIXES, ".json", ".txt", ".model", ".jinja", ".py"):
            inside(folder, path.name, *blobs)
        if path.suffix == ".json" and path.stat().st_size > MAX_FILE:
            raise CheckpointError(f"{path}: expected at most {MAX_FILE // MIB} MiB, got more")
        if path.name.endswith(".index.json"):
            index = read_json(folder, path.name, also=blobs)
            names = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
                raise CheckpointError(f"{path}: expected a table weight_map of file names")
            for name in sorted(set(names.values())):
                try:
                    inside(folder, name, *blobs)
                except FileNotFoundError as error:
                    raise CheckpointError(f"{path}: {name[:200]} does not exist") from error


def _check_sizes(config: Any, auto: Any, name: str, options: dict[str, Any]) -> None:
    """Raise `CheckpointError` if a folder's config describes a model much larger than its weights."""
    folder = Path(name)
    if not folder.is_dir():
        return
    check_numbers(_numbers(config.to_dict()), f"{name}: config.json")
    try:
        with torch.device("meta"):
            model = auto.from_config(config, **options)
    except (NotImplementedError, RuntimeError) as error:
        if "meta" in str(error):
            return  # its constructor computes with tensors
        raise
    needed = sum(tensor.numel() for tensor in model.state_dict().values())
    files = [file for suffix in WEIGHT_SUFFIXES for file in folder.glob(f"*{suffix}") if file.is_file()]
    available = sum(file.stat().st_size for file in files)
    if needed > 2 * available + SPARE_ELEMENTS:
        raise CheckpointError(
            f"{name}: config.json describes a model of {needed:,} elements, "
            f"the weights have {available:,} bytes"
        )


def check_numbers(settings: Iterable[tuple[str, Any]], where: str) -> None:
    """`CheckpointError` for an integer that is out of range for any model; where: the file, for the error."""
    for key, value in settings:
        limit = MAX_REPEATS if any(word in key for word in ("layers", "depth")) else MAX_SIZE
        sizes = value if isinstance(value, list | tuple) else [value]
        if any(isinstance(size, int) and size > limit for size in sizes):
            raise CheckpointError(f"{where}: expected {key} of at most {limit:,}, got {value!r:.80}")


def _numbers(settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values of a config, with those of its towers."""
    for key, value in settings.items():
        if isinstance(value, dict) and key.endswith("_config"):
            yield from _numbers(value)
        else:
            yield key, value


def needs_code(name: str, reason: str) -> CheckpointError:
    return CheckpointError(
        f"{name} would execute code that is part of the model: {reason}. If you trust its author, load it "
        "with trust_remote_code=True",
        option="trust_remote_code",
    )


def read_preprocess(
    name: str, *, trust_remote_code: bool = False, fallback: Preprocess | None = None
) -> Preprocess:
    """Read the preprocessing from the image processor of a folder or of a repository on the hub.

    Args:
        fallback: For a folder without an image processor.
    """
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
        return Preprocess.from_transformers(processor)
    except OSError as error:
        if not (Path(name) / "config.json").is_file():
            raise
        if fallback is not None:
            return fallback
        raise CheckpointError(
            f"{name} has no preprocessor_config.json: how its images are preprocessed is not known. "
            "Give image_size, mean and std, or save the image processor into it too, for example "
            "ViTImageProcessor(size=..., image_mean=..., image_std=...).save_pretrained(FOLDER)"
        ) from error


def config_class_names(model: Any) -> tuple[str, ...] | None:
    """The class names of a model's config; None for transformers' placeholders LABEL_0, LABEL_1, ..."""
    names = model.config.id2label
    return None if names.get(0) == "LABEL_0" else tuple(names[i] for i in range(len(names)))


def _pretrained(auto: Any, name: str, options: dict[str, Any]) -> tuple[nn.Module, list[str]]:
    """The model with its own weights, and the names of tensors that they lack."""
    model, report = auto.from_pretrained(name, output_loading_info=True, **options)
    unexpected = report["unexpected_keys"]
    if Path(name).is_dir() and any(key.endswith("_extra_state") for key in unexpected):
        # modules that were inserted before the model was saved: transformers leaves their tensors out
        stored = read_weights(Path(name) / "model.safetensors")
        by_tail = {_tail(key): value for key, value in stored.items()}
        inserted = {key: by_tail[_tail(key)] for key in unexpected}
        model = restore(model, inserted)
        model.load_state_dict(inserted, strict=False)
    return model, sorted(report["missing_keys"])


def _tail(key: str) -> str:
    """The part of a name from the block's number on: files keep the names of older versions before it."""
    return re.sub(r"^.*?(?=\d+\.)", "", key)


def _fit(model: Any, weights: Weights, origin: str) -> Any:
    """The model with these weights. Files keep older names, which `from_pretrained` translates."""
    try:
        fit(model, weights, origin)
    except CheckpointError:
        try:
            model, report = type(model).from_pretrained(
                None, config=model.config, state_dict=weights, output_loading_info=True
            )
        except (RuntimeError, ValueError, OSError):
            report = {"error_msgs": ["of another shape"]}
        if any(report.values()):
            raise
    return model
