"""The class names that a model carries."""

from typing import Any

from torch import nn

from steadygaze.vit import ViT

PLACEHOLDER = "LABEL_0"  # what transformers calls a class without a name


def display_names(model: Any, count: int) -> tuple[str, ...] | None:
    """The names of `count` classes, if the model says them; None otherwise."""
    if isinstance(model, ViT):
        model = model.model
    names = getattr(model, "class_names", None)
    if names is None and isinstance(model, nn.Module):
        labels = getattr(getattr(model, "config", None), "id2label", None) or {}
        names = [labels[index] for index in sorted(labels)]
    if not names or len(names) != count or names[0] == PLACEHOLDER:
        return None
    return tuple(map(str, names))
