"""Quantities of features, for models without a classifier: similarity to an image, a component, the norm.

    similar_to     y = ⟨f / ‖f‖, e / ‖e‖⟩
    component      y = ⟨f − μ, v_k⟩
    feature_norm   y = ‖f‖

| symbol | meaning                                                                          | in the code   |
| f      | the features (B, D) that the model gives for the image                           | `features`    |
| e      | the features of the other image                                                  | `embedding`   |
| μ, v_k | mean, and k-th principal direction, of the features of some images; the entry of | `mean`, `v`   |
|        | v_k with the largest magnitude is positive                                       |               |

Formulas: docs/equations.md#feature-targets.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import InputError
from steadygaze.questions.text import with_module
from steadygaze.target import Outputs
from steadygaze.vit.adapt import adapt, unwrapped
from steadygaze.vit.contexts import evaluation_mode, without_autocast
from steadygaze.vit.outputs import model_output
from steadygaze.vit.registry import register_adapter
from steadygaze.vit.view import Layout, Plan, ViT

Prepare = Callable[[Any], Float[Tensor, "n c h w"]]  # images as people have them -> as the model takes them


class FeatureValue(nn.Module):
    """A model of one value, a quantity of another model's features: forward(images) gives (B, 1).

    Attributes:
        model: The model that gives the features.
        quantity: Features (B, D) -> (B, 1).
        class_names: What the value is called.
    """

    outputs: Outputs = "values"

    def __init__(self, model: nn.Module, quantity: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.quantity, self.class_names = model, quantity, (name,)

    def forward(self, images: Tensor) -> Tensor:
        """The value (B, 1) of images (B, 3, H, W)."""
        return self.quantity(model_output(self.model, images))


@register_adapter("feature", matches=FeatureValue)
def plan(asked: FeatureValue) -> Plan:
    """The view of a backbone, with a quantity of its features as the head."""
    backbone = adapt(asked.model).plan

    def head(x: Tensor, layout: Layout) -> Tensor:
        return asked.quantity(backbone.head(x, layout))

    return replace(backbone, head=head, outputs=asked.outputs, main_value=0, checked=True)


class _Linear(nn.Module):
    """⟨f, weight⟩ + bias; of f scaled to unit length with unit=True."""

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Float[Tensor, " d"], bias: float | Tensor = 0.0, *, unit: bool) -> None:
        super().__init__()
        self.unit = unit
        self.register_buffer("weight", weight[None])
        self.register_buffer("bias", weight.new_zeros(1) + bias)

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(F.normalize(features, dim=-1) if self.unit else features, self.weight, self.bias)


class _Norm(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features.norm(dim=-1, keepdim=True)


class FeatureTarget:
    """A quantity of features, as `similar_to`, `component` and `feature_norm` return it."""

    @abstractmethod
    def quantity(self, model: Any, prepare: Prepare) -> tuple[nn.Module, str]:
        """Features (B, D) -> (B, 1), and the name of the quantity."""

    def applied(self, model: Any, prepare: Prepare) -> Any:
        """The model of this value: a module, or for a result of `load_model` a copy of that."""
        module = model.model if isinstance(model, ViT) else unwrapped(model)
        view = adapt(model)
        if view.plan.outputs != "features":
            raise InputError(
                f"target: {type(self).__name__} is a quantity of features, but this {view.plan.kind} gives "
                f"{view.plan.outputs}. Use its backbone: sg.load_model(name, num_classes=0) of a timm model, "
                "or a class of transformers without a head, such as Dinov2Model.",
                option="target",
            )
        quantity, name = self.quantity(model, prepare)
        numbers = [tensor.double().cpu().numpy().tobytes() for tensor in quantity.buffers()]
        digest = hashlib.sha256(b"".join(numbers)).hexdigest()
        return with_module(model, FeatureValue(module, quantity, name), [type(self).__name__, digest])


@dataclass(frozen=True, eq=False)
class SimilarTo(FeatureTarget):
    """See `similar_to`."""

    other: Any

    def quantity(self, model: Any, prepare: Prepare) -> tuple[nn.Module, str]:
        embedding = features_of(model, self.other, "similar_to", prepare)
        if len(embedding) != 1:
            raise InputError(
                f"similar_to: expected one image or its features, got {len(embedding)}",
                option="similar_to",
            )
        file = isinstance(self.other, str | Path)
        name = f"similarity to {Path(self.other).name}" if file else "similarity"
        return _Linear(F.normalize(embedding[0], dim=0), unit=True), name


@dataclass(frozen=True, eq=False)
class Component(FeatureTarget):
    """See `component`."""

    k: int
    images: Any

    def quantity(self, model: Any, prepare: Prepare) -> tuple[nn.Module, str]:
        features = features_of(model, self.images, "component", prepare)
        known = min(len(features) - 1, features.shape[1])
        if not isinstance(self.k, int) or isinstance(self.k, bool) or not 0 <= self.k < known:
            raise InputError(
                f"component: {len(features)} images have principal components 0..{known - 1}, got {self.k!r}"
                if known > 0
                else "component: expected at least two images, whose features differ, got one"
            )
        mean = features.double().mean(0)
        _, _, directions = torch.linalg.svd(features.double() - mean, full_matrices=False)
        v = directions[self.k]
        v = v * v[v.abs().argmax()].sign()
        return _Linear(v.to(features), (-mean @ v).to(features), unit=False), f"component {self.k}"


@dataclass(frozen=True, eq=False)
class FeatureNorm(FeatureTarget):
    """See `feature_norm`."""

    def quantity(self, model: Any, prepare: Prepare) -> tuple[nn.Module, str]:
        return _Norm(), "feature norm"


def similar_to(other: Any) -> SimilarTo:
    """Explain why an image is similar to another one: the cosine similarity of their features.

    Args:
        other: The other image: a path, a PIL image or an array (H, W, 3), preprocessed as the images of
            `explain` are; or preprocessed, (3, H, W) or (1, 3, H, W); or its features, (D,) or (1, D).

    Returns:
        A target for `explain`, and for `ask(model, feature=...)`, whose result `verify` and the page take.
        The model must give features: a backbone without a classifier, or an image tower of CLIP.

    Examples:
        >>> import steadygaze as sg, timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
        >>> first, second = torch.rand(2, 1, 3, 224, 224)
        >>> a = sg.explain(model, first, target=sg.similar_to(second))  # and on the other image:
        >>> b = sg.explain(model, second, target=sg.similar_to(first))
        >>> a.scores.shape, torch.allclose(a.logits, b.logits)  # the similarity, of both the same
        (torch.Size([1, 14, 14]), True)
    """
    return SimilarTo(other)


def component(k: int, images: Any) -> Component:
    """Explain a principal component of features: where an image lies on the k-th axis of some images.

    Args:
        k: Number of the component, from 0, the one with the largest variance.
        images: The images whose features are analyzed, at least k + 2: a folder, a list of
            paths or PIL images, a preprocessed tensor (N, 3, H, W), or their features (N, D).

    Returns:
        A target, used as that of `similar_to`. The entry of the direction with the largest magnitude is
        positive.

    Examples:
        >>> import steadygaze as sg, timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
        >>> images = torch.rand(4, 3, 224, 224)
        >>> sg.explain(model, images[:1], target=sg.component(0, images)).classes
        ('component 0',)
    """
    return Component(k, images)


def feature_norm() -> FeatureNorm:
    """Explain the Euclidean norm of an image's features.

    Returns:
        A target, used as that of `similar_to`.

    Examples:
        >>> import steadygaze as sg, timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", num_classes=0)
        >>> sg.explain(model, torch.rand(1, 3, 224, 224), target=sg.feature_norm()).classes
        ('feature norm',)
    """
    return FeatureNorm()


@torch.no_grad()
def features_of(model: Any, images: Any, option: str, prepare: Prepare) -> Float[Tensor, "n d"]:
    """Features (N, D) of images, or features that are given.

    Args:
        option: What is being computed, for errors.
    """
    module = model.model if isinstance(model, ViT) else unwrapped(model)
    vit = adapt(module)
    parameter = next(module.parameters())
    given = torch.as_tensor(images) if isinstance(images, np.ndarray) and images.ndim < 3 else images
    is_features = isinstance(given, Tensor) and given.dim() in (1, 2)
    if is_features:
        pixels = torch.zeros(1, *vit.plan.input_size)
    else:
        pixels = _prepared(given, option, prepare)
        vit.check(pixels)
    with without_autocast(module), evaluation_mode(module):
        features = model_output(module, pixels.to(parameter.device, parameter.dtype))
    if not is_features:
        return features
    width, found = features.shape[1], given.reshape(-1, given.shape[-1])
    if not found.is_floating_point() or found.shape[1] != width or not bool(torch.isfinite(found).all()):
        raise InputError(
            f"{option}: expected an image, or finite features of width {width} as this {vit.plan.kind} has, "
            f"got {given.dtype} of shape {tuple(given.shape)}",
            option=option,
        )
    return found.to(parameter.device, parameter.dtype)


def _prepared(images: Any, option: str, prepare: Prepare) -> Float[Tensor, "n c h w"]:
    """Images as the model takes them."""
    if isinstance(images, Tensor):
        return images[None] if images.dim() == 3 else images
    if isinstance(images, list | tuple) and images and all(isinstance(image, Tensor) for image in images):
        return torch.stack([image[0] if image.dim() == 4 else image for image in images])
    try:
        return prepare(images)
    except InputError as error:
        raise InputError(f"{option}: {error}", option=option) from error
