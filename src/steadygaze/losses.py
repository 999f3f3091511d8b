"""The losses of steadygaze for training loops of your own: plain PyTorch, Lightning, transformers.

    from steadygaze.losses import ADL, Relevance

    adl, relevance = ADL(tau=2.0), Relevance(method="rollout")
    with adl:
        logits = model(images)
    loss = F.cross_entropy(logits, labels) + 0.5 * adl.value + relevance(model, images, masks, labels)

Recipes train by the same losses (`[losses.adl]`, `[losses.relevance]`, ...; `PatchConsistency` is
`[losses.patch_augmentation]`): options, defaults and values are equal. Nothing is left on the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float
from pydantic import ValidationError
from torch import Tensor, nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError, UnsupportedModelError
from steadygaze.methods.registry import parse_method
from steadygaze.training.losses import LOSSES, Loss, LossBatch, LossOptions, LossSetup
from steadygaze.training.losses.adl import DiversitySeam, seam_loss
from steadygaze.training.losses.input_gradient import PresetName
from steadygaze.training.losses.registry import class_logits
from steadygaze.training.losses.relevance import checked_labels
from steadygaze.training.recipe import explain_validation_error
from steadygaze.vit.adapt import unwrapped

__all__ = ["ADL", "CFT", "RRR", "GradMask", "PatchConsistency", "Relevance"]


_OPEN: list[DiversitySeam] = []  # of ADL blocks that have not ended


@contextmanager
def _unseen() -> Iterator[None]:
    """Forward passes in this context do not count for an ADL block around it."""
    seen = [(seam, len(seam.similarities), len(seam.record.attention)) for seam in _OPEN]
    yield
    for seam, similarities, maps in seen:
        del seam.similarities[similarities:], seam.record.attention[maps:]


class _OwnLoop:
    """A registered loss with its options, outside a recipe."""

    loss: ClassVar[str]  # its name in recipes

    def __init__(self, **options: Any) -> None:
        kind = LOSSES[self.loss].Options
        try:
            self.options: LossOptions = kind(**options)
        except ValidationError as error:
            raise explain_validation_error(error, kind, type(self).__name__) from None
        if "method" in options:
            parse_method(options["method"])  # raises an error in words

    def __repr__(self) -> str:
        chosen = ", ".join(f"{key}={value!r}" for key, value in self.options if key != "weight")
        return f"{type(self).__name__}({chosen})"

    def __getstate__(self) -> dict[str, Any]:
        """Copies have the options, and nothing of the last batch: tensors in a graph cannot be copied."""
        return {key: value for key, value in self.__dict__.items() if not key.startswith("_")}


class ADL(_OwnLoop):
    """Attention diversification loss: queries of a layer should not attend to the same tokens (Guo 2023).

    The attention of every layer is read during a forward pass of your own, fused attention included. Compiled
    modules run uncompiled in the block. Gradient checkpointing is not supported.

    Args:
        tau: Attention below tau / number of tokens counts as 0.
        form: "paper", "code" (as the authors' code computes it) or "per_head".

    Examples:
        >>> import steadygaze as sg, torch
        >>> model, adl = sg.load_model("embedded").model, ADL(tau=2.0)
        >>> with adl:
        ...     logits = model(torch.zeros(2, 3, 32, 32))
        >>> 0 < adl.value.item() < 1, logits.shape
        (True, torch.Size([2, 10]))
    """

    loss = "adl"
    _seam: DiversitySeam | None = None
    _value: Tensor | None = None

    def __init__(self, *, tau: float = 2.0, form: Literal["paper", "code", "per_head"] = "paper") -> None:
        super().__init__(tau=tau, form=form)

    def __enter__(self) -> ADL:
        if self._seam is not None:
            raise InputError("ADL: this block is open already. Use another ADL object for a block inside it.")
        seam: Any = LOSSES[self.loss](self.options, LossSetup(nn.Identity())).observer()
        self._value, self._seam = None, seam.__enter__()
        _OPEN.append(seam)
        return self

    def __exit__(self, *exc: Any) -> None:
        assert self._seam is not None
        seam, self._seam = self._seam, None
        _OPEN.remove(seam)
        seam.__exit__(*exc)
        if exc[0] is None:
            self._value = seam_loss(seam)

    @property
    def value(self) -> Float[Tensor, ""]:
        """The loss of the last block, 0..1, in the graph; lower is more diverse.

        If the model ran more than once in the block, the mean over all layers that ran.

        Raises:
            InputError: No block has ended.
        """
        if self._value is None:
            raise InputError(
                "adl.value: expected a forward pass before. Run the model in a block, `with adl: logits = "
                "model(images)`, and read the value after the block."
            )
        return self._value


class _ByMasks(_OwnLoop):
    """A loss that runs the model itself, and compares what it finds with object masks."""

    _logits: Tensor | None = None
    _terms: dict[str, Tensor] | None = None

    def __call__(
        self, model: Any, images: Float[Tensor, "b c h w"], masks: Any, labels: Any = None
    ) -> Float[Tensor, ""]:
        """Run the model once and return the weighted sum of the terms.

        Args:
            model: The model that is trained: a module, or what `load_model` or `adapt` returns.
            images: (B, 3, H, W), normalized.
            masks: (B, H, W), or (B, K, H, W) for K parts or concepts whose union is the object: the object is
                1, 255 or True, the background 0 or False. Floats between are shares of the object; the value
                128 in masks of 0, 128 and 255 is border and not counted. Or a list of B masks: PIL images,
                arrays or tensors of the images' size.
            labels: (B,) classes.
        """
        name = type(self).__name__
        module = _module(model, name)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise InputError(
                f"{name}: expected the model itself, got it inside DistributedDataParallel, which exchanges "
                "the gradients of its own forward pass alone. Compute the loss in the forward pass of a "
                "module and wrap that module."
            )
        images = _tensor(images, name, "images")
        masks = _masks(masks, name).to(images.device)
        labels = None if labels is None else torch.as_tensor(labels, device=images.device)
        batch = LossBatch(unwrapped(module), images, labels, masks=masks)
        with _unseen():  # the check of a new view runs the model
            loss: Loss = LOSSES[self.loss](self.options, LossSetup(batch.model))
        terms = loss(batch)
        assert isinstance(terms, dict)
        self._terms = {term: value.detach() for term, value in terms.items()}
        self._logits = class_logits(batch.outputs)
        if labels is not None:
            checked_labels(labels, self._logits)
        return loss.total(terms)

    @property
    def terms(self) -> dict[str, Tensor]:
        """The terms of the last call by name, without their weights and without a graph, for logging."""
        return self._last(self._terms, "terms")

    @property
    def logits(self) -> Float[Tensor, "b classes"]:
        """The logits of the last call, in the graph: cross-entropy needs no second forward pass."""
        return self._last(self._logits, "logits")

    def _last(self, value: Any, name: str) -> Any:
        if value is None:
            call = f"{type(self).__name__.lower()}(model, images, masks, labels)"
            raise InputError(f"{type(self).__name__}.{name}: expected a call before: {call}")
        return value


class Relevance(_ByMasks):
    """Relevance loss: attribution maps on the object, and confident predictions (Chefer et al. 2022).

    Calling it with (model, images, masks, labels) runs the model once and returns

        relevance · (background · L_bg + foreground · L_fg) + confidence · L_cls

    Args:
        method: Method of the map, such as "gae" or "rollout".
        relevance: Weight of the terms of the map.
        confidence: Weight of the cross-entropy with `confident_of`.
        background: Weight of the map on the background.
        foreground: Weight of what the map misses on the object.
        explained: The class the map is of, "label" or "predicted".
        confident_of: The class made more certain, "predicted" (the paper) or "label".
        second_order: Differentiate the gradient inside the map too.
        temperature: Divides the logits of the confidence term.
        reverse: Background of shares between 0 and 1: "reference" as in the authors' code, or "complement".

    Examples:
        >>> import steadygaze as sg, torch
        >>> model, images = sg.load_model("embedded").model, torch.zeros(2, 3, 32, 32)
        >>> masks = torch.zeros(2, 32, 32, dtype=torch.bool)
        >>> masks[:, 8:24, 8:24] = True
        >>> relevance = Relevance(method="rollout")
        >>> relevance(model, images, masks, labels=[3, 5]).requires_grad, list(relevance.terms)
        (True, ['background', 'foreground', 'confidence'])
    """

    loss = "relevance"

    def __init__(
        self,
        *,
        method: str = "gae",
        relevance: float = 0.8,
        confidence: float = 0.2,
        background: float = 2.0,
        foreground: float = 0.3,
        explained: Literal["label", "predicted"] = "label",
        confident_of: Literal["predicted", "label"] = "predicted",
        second_order: bool = False,
        temperature: float = 1.0,
        reverse: Literal["complement", "reference"] = "reference",
    ) -> None:
        super().__init__(**_given(locals()))


class CFT(_ByMasks):
    """Concept-guided fine-tuning: attribution maps on the concepts of a class (Elisha et al. 2026).

    Calling it with (model, images, masks, labels) runs the model once and returns

        alignment · (context · L_ctx + concept · L_con) + accuracy · L_acc

    Masks are (B, K, H, W), one for each of K concepts ("beak", "wing"); a concept that an image lacks is 0
    everywhere. Their union is what the map should cover, so one mask of it, (B, H, W), is the same.

    Args:
        method: Method of the map. "gae" is what the authors' code computes; the paper names AttnLRP, which is
            "attnlrp" with `second_order=True`.
        alignment: Weight of the terms of the map.
        accuracy: Weight of the cross-entropy with `confident_of`.
        context: Weight of the map outside the concepts.
        concept: Weight of what the map misses on the concepts.
        explained: As for `Relevance`.
        confident_of: As for `Relevance`.
        second_order: As for `Relevance`.
        temperature: As for `Relevance`.
        reverse: As for `Relevance`.

    Examples:
        >>> import steadygaze as sg, torch
        >>> model, images = sg.load_model("embedded").model, torch.zeros(2, 3, 32, 32)
        >>> masks = torch.zeros(2, 3, 32, 32, dtype=torch.bool)  # three concepts
        >>> masks[:, 0, 8:12, 8:24] = masks[:, 1, 20:24, 8:24] = True
        >>> cft = CFT(method="rollout")
        >>> cft(model, images, masks, labels=[3, 5]).requires_grad, list(cft.terms)
        (True, ['context', 'concept', 'accuracy'])
    """

    loss = "cft"

    def __init__(
        self,
        *,
        method: str = "gae",
        alignment: float = 0.8,
        accuracy: float = 0.2,
        context: float = 1.2,
        concept: float = 0.5,
        explained: Literal["label", "predicted"] = "label",
        confident_of: Literal["predicted", "label"] = "predicted",
        second_order: bool = False,
        temperature: float = 1.0,
        reverse: Literal["complement", "reference"] = "reference",
    ) -> None:
        super().__init__(**_given(locals()))


class _ByInputGradient(_ByMasks):
    """GradMask or RRR: losses of the gradient of the image, with equal options."""

    def __init__(
        self,
        *,
        background: float = 1.0,
        classification: float = 1.0,
        form: Literal["formula", "code"] = "formula",
        preset: PresetName | None = None,
        reverse: Literal["complement", "reference"] = "reference",
    ) -> None:
        super().__init__(**_given(locals()))


class GradMask(_ByInputGradient):
    """GradMask: penalizes the gradient of the label's logit on background pixels (Simpson et al. 2019).

    Calling it with (model, images, masks, labels) runs the model once and returns
    background · L_bg + classification · L_cls, the second being cross-entropy with the labels.

    Args:
        background: Weight of the squared gradient on the background, a mean over pixels.
        classification: Weight of the cross-entropy.
        form: "formula" trains the weights by the gradient; in "code" it is a constant, as in the baseline
            that the authors of the relevance loss ran.
        preset: The weights published for a model, such as "DeiT-B", in place of these.
        reverse: As for `Relevance`.

    Examples:
        >>> GradMask(background=50.0).options.background
        50.0
    """

    loss = "gradmask"


class RRR(_ByInputGradient):
    """Right for the right reasons: penalizes gradients of log-probabilities on background (Ross et al. 2017).

    As `GradMask`, but of the summed log-probabilities, and a sum over all pixels and images of the batch.

    Args:
        background: Weight of the squared gradient on the background.
        classification: Weight of the cross-entropy.
        form: As for `GradMask`.
        preset: As for `GradMask`.
        reverse: As for `Relevance`.

    Examples:
        >>> RRR(preset="DeiT-B").options.preset
        'DeiT-B'
    """

    loss = "rrr"


class PatchConsistency(_OwnLoop):
    """Patch-wise augmentation: cross-entropy also of images with augmented patches (Mao et al. 2022).

    Calling it with (model, images, labels) augments the patches, runs the model and returns cross-entropy, or
    0 if the model is in eval mode. What is random comes from torch's global generator.

    Args:
        mean: Mean of the normalization of the images, one value for each channel.
        std: Standard deviation of the normalization.
        patch: Side of a patch in pixels.
        scale: Smallest and largest area of a crop, as a share of the patch.
        crop: Probability that a patch is cropped.
        crop_draw: Whether crops are drawn for each "patch", or once for all patches of a "batch".
        noise: Standard deviation of the noise, of normalized values.
        noisy: Probability that noise is added.
        flip: Probability that a patch is flipped.
        smoothing: Label smoothing.

    Examples:
        >>> import steadygaze as sg, torch
        >>> model = sg.load_model("embedded").model.train()
        >>> consistency = PatchConsistency(mean=(0.5,) * 3, std=(0.5,) * 3, patch=4)
        >>> consistency(model, torch.zeros(2, 3, 32, 32), labels=torch.tensor([3, 5])).requires_grad
        True
    """

    loss = "patch_augmentation"

    def __init__(
        self,
        *,
        mean: Sequence[float],
        std: Sequence[float],
        patch: int = 16,
        scale: Sequence[float] = (0.85, 1.0),
        crop: float = 0.1,
        crop_draw: Literal["patch", "batch"] = "patch",
        noise: float = 0.01,
        noisy: float = 0.1,
        flip: float = 0.1,
        smoothing: float = 0.0,
    ) -> None:
        options = _given(locals())
        del options["mean"], options["std"]
        super().__init__(**options | {"scale": list(scale)})
        self.mean, self.std = tuple(mean), tuple(std)

    def __call__(self, model: Any, images: Float[Tensor, "b c h w"], labels: Any) -> Float[Tensor, ""]:
        """Run the model on augmented images.

        Args:
            model: The model that is trained.
            images: (B, C, H, W), normalized by `mean` and `std`.
            labels: (B,) classes, or (B, classes) shares of mixup or cutmix.
        """
        name = type(self).__name__
        module, images = _module(model, name), _tensor(images, name, "images")
        if not len(self.mean) == len(self.std) == images.shape[1]:
            raise InputError(
                f"{name}: expected mean and std of {images.shape[1]} channels, got {len(self.mean)} and "
                f"{len(self.std)} values"
            )
        labels = torch.as_tensor(labels, device=images.device)
        soft = labels if labels.is_floating_point() else None
        size = (images.shape[-2], images.shape[-1])
        setup = LossSetup(
            module,
            preprocess=Preprocess.resize_and_crop(size=size, resize=min(size), mean=self.mean, std=self.std),
        )
        loss: Loss = LOSSES[self.loss](self.options, setup)
        return loss.total(loss(LossBatch(module, images, labels, soft_targets=soft)))


def _given(values: dict[str, Any]) -> dict[str, Any]:
    """The arguments in `locals()` of a constructor."""
    return {key: value for key, value in values.items() if key not in ("self", "__class__")}


def _module(model: Any, loss: str) -> nn.Module:
    """The module to run; that of a `LoadedModel` or view is inside."""
    module = model if isinstance(model, nn.Module) else unwrapped(model)
    if not isinstance(module, nn.Module):
        raise UnsupportedModelError(f"{loss}: expected a torch.nn.Module, got {type(model).__name__}")
    return module


def _masks(masks: Any, loss: str) -> Tensor:
    """Masks in any accepted form as a tensor."""
    try:
        if isinstance(masks, list | tuple):
            each = [mask if isinstance(mask, Tensor) else torch.as_tensor(np.array(mask)) for mask in masks]
            masks = torch.stack(each)
        masks = torch.as_tensor(masks)
    except (TypeError, ValueError, RuntimeError):
        got = type(masks).__name__
        if isinstance(masks, list | tuple):
            sizes = dict.fromkeys(str(tuple(np.shape(mask)) or type(mask).__name__) for mask in masks)
            got = f"a {got} of {len(masks)}: {', '.join(sizes)}"
        raise InputError(
            f"{loss}: expected masks as a tensor (B, H, W) or (B, K, H, W), or a list of B masks (PIL "
            f"images, arrays or tensors) of the images' size, got {got}"
        ) from None
    return masks


def _tensor(images: Any, loss: str, name: str) -> Tensor:
    if not isinstance(images, Tensor) or images.dim() != 4:
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise InputError(f"{loss}: expected {name} as a tensor (B, C, H, W), got {got}")
    return images
