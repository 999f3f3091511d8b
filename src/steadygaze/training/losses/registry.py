"""The registry of training losses: what a recipe may list under `[losses.NAME]`.

A loss is one class. It owns its options (what the recipe may hold), says what it needs (object masks,
attention seen during the forward pass, a pass of its own) and computes its terms of a batch. The training
loop knows `Loss` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, TypeVar

from jaxtyping import Float
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError
from steadygaze.notebook import Listing
from steadygaze.registry import Registry
from steadygaze.vit.outputs import logits_of


def model_outputs(output: Any) -> Any:
    """The logits in a model's output: a tensor, or a pair if a distillation token is trained."""
    is_pair = isinstance(output, tuple) and all(isinstance(logits, Tensor) for logits in output)
    return output if is_pair else logits_of(output)


def class_logits(outputs: Any) -> Float[Tensor, "b classes ..."]:
    """The logits predictions are made from: of a class and a distillation token, their mean."""
    return outputs if isinstance(outputs, Tensor) else sum(outputs) / len(outputs)


NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class LossOptions(BaseModel):
    """Options of a loss in a recipe. Subclasses add fields; unknown keys and wrong types are errors.

    Examples:
        >>> LossOptions(weight=0.5).weight
        0.5
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    weight: NonNegative = 1.0

    @property
    def term_weights(self) -> Mapping[str, float]:
        """Weights of the terms inside the loss, multiplied by `weight`; 1 for a term that is not listed."""
        return {}


@dataclass(frozen=True)
class LossSetup:
    """What a loss may prepare itself with, once, before the first step.

    Attributes:
        model: The model that is trained.
        pieces: Number of parts (processes times accumulated micro-batches) a step is divided into. The
            gradients of the parts are averaged, so a loss that is a sum over the step multiplies by it.
        num_classes: Number of outputs of the model; None outside a training run.
        preprocess: Preprocessing of the model; None outside a training run.
        trust_remote_code: As for `load_model`, for losses that load another model.
    """

    model: nn.Module
    pieces: int = 1
    num_classes: int | None = None
    preprocess: Preprocess | None = None
    trust_remote_code: bool = False


@dataclass
class LossBatch:
    """One batch, as every loss of the recipe sees it.

    Attributes:
        model: The model that is trained.
        images: (B, 3, H, W), normalized.
        labels: (B,) class indices; label maps (B, H, W) in segmentation.
        soft_targets: (B, C) class shares of mixup or cutmix, None without them.
        masks: (B, H, W) object masks, or (B, K, H, W) whose union is the object; None if no loss needs them.
        observers: By loss name, what `Loss.observer` returned for this batch.

    Examples:
        >>> import torch
        >>> batch = LossBatch(torch.nn.Linear(4, 2), torch.zeros(3, 4), torch.zeros(3, dtype=torch.long))
        >>> batch.logits.shape
        torch.Size([3, 2])
    """

    model: nn.Module
    images: Tensor
    labels: Tensor
    soft_targets: Tensor | None = None
    masks: Tensor | None = None
    observers: Mapping[str, AbstractContextManager[Any]] = field(default_factory=dict)
    _outputs: Any = None
    _observed: bool = False

    @property
    def outputs(self) -> Any:
        """The model's logits in the graph: (B, C), or a pair if a distillation token is trained.

        The forward pass runs once, with all observers active, and is shared by the losses. A pass that a loss
        shared before (`share`) is used instead, unless there are observers that did not see it.
        """
        if self._outputs is None or (self.observers and not self._observed):
            with self.observed():
                self._outputs = model_outputs(self.model(self.images))
        return self._outputs

    @property
    def logits(self) -> Float[Tensor, "b classes ..."]:
        """The logits predictions are made from: the mean of both heads if a distillation token is trained."""
        return class_logits(self.outputs)

    def share(self, outputs: Any) -> None:
        """Offer the outputs of a pass that a loss ran itself; the first one is used by the other losses."""
        if self._outputs is None:
            self._outputs = outputs

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Activate the observers of all losses for a forward pass."""
        self._observed = True
        with ExitStack() as stack:
            for observer in self.observers.values():
                stack.enter_context(observer)
            yield


class Loss:
    """Base class of losses; see `register_loss` for a whole example.

    Attributes:
        terms: Names of the terms if there are several, logged as NAME.term; empty for a single one.
        needs_masks: Object masks must be given (data.masks), and augmentations that would misplace them are
            refused.
        runs_model: The loss runs the model itself, before the others; it may offer the logits with
            `batch.share`.
        tasks: What it can train.
        on_features: It reads the logits alone, so that a head on cached features can be trained with it.
        label_smoothing: Applied to the soft targets of mixup and cutmix.

    Examples:
        >>> Loss.needs_masks, Loss.terms
        (False, ())
    """

    terms: ClassVar[tuple[str, ...]] = ()
    needs_masks: ClassVar[bool] = False
    runs_model: ClassVar[bool] = False
    tasks: ClassVar[tuple[str, ...]] = ("classification", "segmentation")
    on_features: ClassVar[bool] = False
    Options: ClassVar[type[LossOptions]] = LossOptions
    name: ClassVar[str] = ""
    label_smoothing: float = 0.0

    def __init__(self, options: LossOptions, setup: LossSetup) -> None:
        self.options, self.setup = options, setup

    def observer(self) -> AbstractContextManager[Any] | None:
        """A new context manager for the forward pass of one batch, kept in `batch.observers[self.name]`."""
        return None

    def __call__(self, batch: LossBatch) -> Tensor | dict[str, Tensor]:
        """The loss, a scalar; or its terms by name, without their weights."""
        raise NotImplementedError

    def total(self, value: Tensor | dict[str, Tensor]) -> Tensor:
        """What this loss adds to the objective: the weighted sum of its terms."""
        if isinstance(value, Tensor):
            return self.options.weight * value
        weights = self.options.term_weights
        first, *others = (weights.get(term, 1.0) * value[term] for term in value)
        return self.options.weight * sum(others, first)


@dataclass(frozen=True)
class LossInfo:
    """The public description of a loss, as `list_losses` gives it."""

    name: str
    summary: str
    terms: tuple[str, ...]
    options: Mapping[str, Any]
    needs_masks: bool
    tasks: tuple[str, ...]


LOSSES: Registry[type[Loss]] = Registry(
    "loss",
    built_in=[  # losses are computed, summed and logged in this order
        f"steadygaze.training.losses.{file}"
        for file in (
            "cross_entropy",
            "relevance",
            "cft",
            "input_gradient",
            "distillation",
            "adl",
            "patch_augmentation",
        )
    ],
    hint="sg.list_losses() lists them.",
)
LossClass = TypeVar("LossClass", bound=type[Loss])


def register_loss(
    name: str, *, options: type[LossOptions] = LossOptions, replace: bool = False
) -> Callable[[LossClass], LossClass]:
    """Class decorator that makes a loss available to recipes as `[losses.NAME]`.

    `steadygaze train` finds losses of installed packages through the entry point group `steadygaze.plugins`
    (see `steadygaze.registry`).

    Args:
        name: What recipes, logs and `list_losses` call it.
        options: A subclass of `LossOptions`, validated when a recipe is read.
        replace: Allow a name that is registered already.

    Returns:
        The decorator.

    Raises:
        InputError: The name is taken, or the class is not a `Loss`.

    Examples:
        A whole example, a penalty on logits far from zero:

        >>> from steadygaze.training.losses import LOSSES, Loss, LossBatch, LossOptions
        >>> class LogitNormOptions(LossOptions):
        ...     target: float = 0.0
        >>> @register_loss("logit_norm", options=LogitNormOptions)
        ... class LogitNorm(Loss):
        ...     "Mean squared distance of the logits from `target`."
        ...
        ...     options: LogitNormOptions
        ...
        ...     def __call__(self, batch: LossBatch) -> Tensor:
        ...         return (batch.logits - self.options.target).square().mean()

        A recipe then lists it beside the others, and its value is a column of log.csv:

            [losses.cross_entropy]
            [losses.logit_norm]
            weight = 0.01

        >>> [info.options for info in list_losses() if info.name == "logit_norm"]
        [{'weight': 1.0, 'target': 0.0}]
        >>> LOSSES.remove("logit_norm")
    """

    def decorate(loss: LossClass) -> LossClass:
        if not (isinstance(loss, type) and issubclass(loss, Loss)):
            raise InputError(f"register_loss({name!r}): expected a subclass of Loss, got {loss!r}")
        if not (isinstance(options, type) and issubclass(options, LossOptions)):
            raise InputError(
                f"register_loss({name!r}): expected options= a subclass of LossOptions, got {options!r}"
            )
        loss.name, loss.Options = name, options
        LOSSES.add(name, loss, origin=loss.__module__, replace=replace)
        return loss

    return decorate


def list_losses() -> Listing[LossInfo]:
    """Every loss that a recipe can list, in order of registration; a list that shows itself as a table."""
    infos = [
        LossInfo(
            name=name,
            summary=" ".join((loss.__doc__ or "").strip().partition("\n\n")[0].split()),
            terms=loss.terms,
            options={
                key: ("required" if option.is_required() else option.get_default(call_default_factory=True))
                for key, option in loss.Options.model_fields.items()
            },
            needs_masks=loss.needs_masks,
            tasks=loss.tasks,
        )
        for name, loss in LOSSES.items()
    ]
    return Listing(infos, "losses", ("name", "needs_masks", "summary", "options"))
