"""Models of open_clip: `open_clip:` and a name, such as ViT-B-32@openai, hf-hub:OWNER/NAME, local-dir:FOLDER.

What follows @ is a tag of published weights; without one, give a checkpoint.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.loading.checkpoint import fit, hub
from steadygaze.loading.loaded import LoadedModel, ModelOptions

PREFIX = "open_clip:"
LOCAL = "local-dir:"


def build_open_clip_model(name: str, options: ModelOptions) -> LoadedModel:
    """Build a model of open_clip, see `build_model`; name: without the prefix."""
    weights = options.weights
    try:
        import open_clip
    except ImportError as error:
        raise InputError("models of open_clip need it installed: pip install 'steadygaze[clip]'") from error
    architecture, _, tag = name.partition("@")
    known = open_clip.list_models()
    has_source = ":" in architecture
    if not has_source and architecture not in known:
        raise UnknownNameError("open_clip model", architecture, known)
    if not has_source and not tag and weights is None:
        tags = open_clip.list_pretrained_tags_by_model(architecture)
        raise InputError(
            f"open_clip:{name} has no weights: give a checkpoint, or a tag of published weights behind @"
            + (f", such as {PREFIX}{architecture}@{tags[0]}" if tags else ""),
            option="checkpoint",
        )
    with hub(name, local=architecture.startswith(LOCAL)):
        model = open_clip.create_model(
            architecture, pretrained=tag or None, load_weights=weights is None, pretrained_text=False
        )
        tokenizer = open_clip.get_tokenizer(architecture)
    if weights is not None:
        fit(model, weights, options.origin)
    return LoadedModel(model, PREFIX + name, _preprocess_of(model), source="open_clip", tokenizer=tokenizer)


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
