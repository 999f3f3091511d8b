"""Models of open_clip: `open_clip:` and a name, such as ViT-B-32@openai, hf-hub:OWNER/NAME, local-dir:FOLDER.

What follows @ is a tag of published weights, or a file; without one, give a checkpoint.

open_clip_config.json may come from a stranger. open_clip hands `tokenizer_kwargs` on to transformers and
`bpe_path` to `open`, and takes sizes as they are: keys are known, numbers bounded, and the model is compared
with its weights before memory is allocated for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import CheckpointError, InputError, UnknownNameError
from steadygaze.loading.checkpoint import check_checkpoint, fit, hub
from steadygaze.loading.loaded import LoadedModel, ModelOptions
from steadygaze.loading.timm import SPARE_ELEMENTS
from steadygaze.loading.transformers import (
    WEIGHT_SUFFIXES,
    check_folder,
    check_numbers,
    custom_code,
    needs_code,
)
from steadygaze.untrusted import read_json

PREFIX = "open_clip:"
LOCAL, ON_HUB = "local-dir:", "hf-hub:"
CONFIG = "open_clip_config.json"
TOKENIZER_KEYS = ("clean", "strip_sep_token", "language", "additional_special_tokens", "reduction_mask")


def build_open_clip_model(name: str, options: ModelOptions) -> LoadedModel:
    """Build a model of open_clip, see `build_model`; name: without the prefix."""
    weights, trust = options.weights, options.trust_remote_code
    try:
        import open_clip
    except ImportError as error:
        raise InputError("models of open_clip need it installed: pip install 'steadygaze[clip]'") from error
    architecture, _, tag = name.partition("@")
    folder = Path(architecture.removeprefix(LOCAL)) if architecture.startswith(LOCAL) else None
    if folder is not None:
        architecture, tag = name, ""  # a folder's name may have an @
        folder = Path(name.removeprefix(LOCAL))
    known = open_clip.list_models()
    has_source = architecture.startswith((LOCAL, ON_HUB))
    if not has_source and architecture not in known:
        raise UnknownNameError("open_clip model", architecture, known)
    if not has_source and not tag and weights is None:
        tags = open_clip.list_pretrained_tags_by_model(architecture)
        raise InputError(
            f"open_clip:{name} has no weights: give a checkpoint, or a tag of published weights behind @"
            + (f", such as {PREFIX}{architecture}@{tags[0]}" if tags else ""),
            option="checkpoint",
        )
    file = Path(tag) if tag and Path(tag).is_file() else None
    if file is not None and weights is None:
        check_checkpoint(file)
    with hub(name, local=folder is not None or file is not None), custom_code(name):
        config = _read_config(architecture, folder)
        if has_source:
            _check_config(config, PREFIX + name, trust_remote_code=trust)
        if folder is not None:
            _check_weights(folder, name, needed=weights is None)
        model = open_clip.create_model(
            architecture,
            pretrained=tag or None,
            load_weights=weights is None,
            pretrained_text=False,
            require_pretrained=weights is None,
        )
        from_transformers = config.get("text_cfg", {}).get("hf_tokenizer_name")
        flag = {"trust_remote_code": trust} if from_transformers else {}
        tokenizer = open_clip.get_tokenizer(architecture, **flag)
    if weights is not None:
        fit(model, weights, options.origin)
    return LoadedModel(model, PREFIX + name, _preprocess_of(model), source="open_clip", tokenizer=tokenizer)


def _read_config(architecture: str, folder: Path | None) -> dict[str, Any]:
    """What open_clip reads as the description of the model; of a folder, a regular file of bounded size."""
    from open_clip.factory import get_model_config

    if folder is None:
        config: Any = get_model_config(architecture)
    else:
        check_folder(folder)
        try:
            content = read_json(folder, CONFIG)
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder} has no {CONFIG}: it is not a folder of open_clip") from error
        config = content.get("model_cfg") if isinstance(content, dict) else None
    parts = [config, *(config.get(key) for key in ("vision_cfg", "text_cfg"))] if config else [None]
    if not all(isinstance(part, dict) for part in parts):
        raise CheckpointError(
            f"{architecture}: expected a {CONFIG} with model_cfg, and vision_cfg and text_cfg in it"
        )
    assert isinstance(config, dict)
    return config


def _check_config(config: dict[str, Any], name: str, *, trust_remote_code: bool) -> None:
    """`CheckpointError` for keys that lead to code or other files, and for sizes out of range."""
    arguments = config["text_cfg"].get("tokenizer_kwargs", {})
    if not isinstance(arguments, dict):
        raise CheckpointError(
            f"{name}: {CONFIG}: expected a table as tokenizer_kwargs, got {arguments!r:.80}"
        )
    if arguments.get("trust_remote_code") and not trust_remote_code:
        raise needs_code(name, "its tokenizer brings its own Python code")
    unknown = sorted(set(arguments) - {*TOKENIZER_KEYS, "trust_remote_code"})
    if unknown:
        raise CheckpointError(
            f"{name}: {CONFIG}: tokenizer_kwargs: expected {', '.join(TOKENIZER_KEYS)}, got "
            f"{', '.join(unknown)[:200]}"
        )
    check_numbers(_numbers(config), f"{name}: {CONFIG}")


def _numbers(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values of the description, with those of its towers."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        else:
            yield key, value


def _check_weights(folder: Path, name: str, *, needed: bool) -> None:
    """`CheckpointError` if the folder has no weights, or describes a model much larger than them."""
    import open_clip
    from open_clip.factory import _find_checkpoint_in_dir

    found = _find_checkpoint_in_dir(folder)
    if found is None:
        if not needed:
            return
        raise CheckpointError(
            f"{folder} has no weights ({', '.join(WEIGHT_SUFFIXES)}): its model would be random. Complete "
            "the folder, or give a checkpoint.",
            option="checkpoint",
        )
    check_checkpoint(found)
    available = Path(found).stat().st_size
    with torch.device("meta"):  # open_clip's own `device` builds the model in memory first
        model = open_clip.create_model(
            LOCAL + str(folder), load_weights=False, pretrained_text=False, device="meta"
        )
    elements = sum(tensor.numel() for tensor in model.state_dict().values())
    if elements > 2 * available + SPARE_ELEMENTS:
        raise CheckpointError(
            f"{name}: {CONFIG} describes a model of {elements:,} elements, the weights have "
            f"{available:,} bytes"
        )


def _preprocess_of(model: nn.Module) -> Preprocess:
    """The preprocessing that open_clip notes on the image tower."""
    visual: Any = model.visual
    config = dict(visual.preprocess_cfg)
    size = config["size"]
    height, width = (size, size) if isinstance(size, int) else size
    return Preprocess.resize_and_crop(
        (height, width),
        resize=(height, width) if config["resize_mode"] == "squash" else None,
        interpolation=config["interpolation"],
        mean=config["mean"],
        std=config["std"],
    )
