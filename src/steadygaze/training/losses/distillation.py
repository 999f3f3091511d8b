"""Knowledge distillation, soft (Hinton et al. 2015) or hard, into a distillation token if there is one.

Equations: docs/equations.md#distillation.

    soft:  T² KL(softmax(teacher / T) ‖ softmax(student / T)), mean over the batch
    hard:  cross-entropy of the student with the class the teacher predicts
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError
from torch import Tensor, nn

from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError, UnknownNameError
from steadygaze.loading.load import load_model
from steadygaze.loading.loaded import LoadedModel
from steadygaze.training.losses.registry import (
    Loss,
    LossBatch,
    LossOptions,
    LossSetup,
    NonNegative,
    Positive,
    class_logits,
    model_outputs,
    register_loss,
)


def distillation(
    student: Tensor | tuple[Tensor, Tensor],
    teacher: Float[Tensor, "b c"],
    *,
    form: str = "hard",
    temperature: float = 3.0,
) -> Float[Tensor, ""]:
    """How far the student is from the teacher's logits; at least 0.

    Args:
        student: Logits, or the pair (class, distillation): then the distillation token is trained, and the
            class token is left to the labels.

    Examples:
        >>> y = torch.tensor([[1.0, 2.0]]); distillation(y, y, form="soft").item()
        0.0
    """
    if form not in ("soft", "hard"):
        raise UnknownNameError("form", str(form), ("soft", "hard"))
    if not temperature > 0:
        raise InputError(f"distillation: temperature must be above 0, got {temperature}")
    logits = student if isinstance(student, Tensor) else student[-1]
    if logits.shape != teacher.shape:
        raise InputError(
            f"distillation: expected the same classes, got logits {tuple(logits.shape)} of the student "
            f"and {tuple(teacher.shape)} of the teacher"
        )
    teacher = teacher.detach()
    if form == "hard":
        return F.cross_entropy(logits, teacher.argmax(-1))
    t = temperature
    log_q, log_p = (logits / t).log_softmax(-1), (teacher / t).log_softmax(-1)
    return t * t * F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


class Teacher(nn.Module):
    """Maps images as the student receives them (B, 3, H, W) to the teacher's outputs.

    The teacher has its own normalization: the image is x σ + μ, and (x σ + μ − μ') / σ' = x · scale + shift.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, loaded: LoadedModel, student: Preprocess) -> None:
        super().__init__()
        self.model = loaded.model
        mean, std, own_mean, own_std = (
            torch.tensor(values).view(3, 1, 1)
            for values in (student.mean, student.std, loaded.mean, loaded.std)
        )
        same_mean, same_std = (
            tuple(student.mean) == tuple(loaded.mean),
            tuple(student.std) == tuple(loaded.std),
        )
        self.same_normalization = same_mean and same_std
        self.register_buffer("scale", std / own_std)
        self.register_buffer("shift", (mean - own_mean) / own_std)

    def forward(self, images: Tensor) -> Any:
        if not self.same_normalization:
            images = images * self.scale.to(images) + self.shift.to(images)
        return self.model(images)


def load_teacher(
    name: str,
    checkpoint: str | None,
    student: Preprocess,
    num_classes: int,
    device: Any,
    *,
    trust_remote_code: bool = False,
) -> Teacher:
    """The teacher a recipe names, tried on one image of the student's size before the first step."""
    loaded = load_model(name, checkpoint, device=device, trust_remote_code=trust_remote_code)
    teacher = Teacher(loaded, student).to(device).eval().requires_grad_(False)
    height, width = student.size
    try:
        with torch.no_grad():
            outputs = model_outputs(teacher(torch.zeros(1, 3, height, width, device=device)))
    except (AssertionError, RuntimeError, ValueError) as error:  # timm, torch and transformers differ here
        raise InputError(
            f"losses.distillation.teacher: {name} does not accept the student's images of {height}x{width} "
            f"({error}). Use a teacher of that size."
        ) from error
    classes = class_logits(outputs).shape[-1]
    if classes != num_classes:
        raise InputError(
            f"losses.distillation.teacher: expected the student's {num_classes} classes, {name} has {classes}"
        )
    return teacher


def _named(teacher: str) -> str:
    if not teacher:
        raise PydanticCustomError("expected", "expected the name of a teacher model")
    return teacher


class DistillationOptions(LossOptions):
    """Options of [losses.distillation].

    Attributes:
        teacher: A name as for `load_model`.
        checkpoint: Its weights.
        form: "soft" or "hard".
        temperature: Of the soft form.
    """

    weight: NonNegative = 0.5
    teacher: Annotated[str, AfterValidator(_named), Field(validate_default=True)] = ""
    checkpoint: str | None = None
    form: Literal["soft", "hard"] = "hard"
    temperature: Positive = 3.0


@register_loss("distillation", options=DistillationOptions)
class Distillation(Loss):
    """Distills a teacher's predictions, into the distillation token if the model has one (DeiT)."""

    tasks = ("classification",)
    options: DistillationOptions

    def __init__(self, options: DistillationOptions, setup: LossSetup) -> None:
        super().__init__(options, setup)
        if setup.preprocess is None or setup.num_classes is None:
            raise InputError("distillation: expected a LossSetup with num_classes and preprocess")
        device = next(setup.model.parameters()).device
        self.teacher = load_teacher(
            options.teacher,
            options.checkpoint,
            setup.preprocess,
            setup.num_classes,
            device,
            trust_remote_code=setup.trust_remote_code,
        )
        if hasattr(setup.model, "set_distilled_training"):
            setup.model.set_distilled_training(True)  # type: ignore[operator]

    def __call__(self, batch: LossBatch) -> Tensor:
        with torch.no_grad():
            taught = class_logits(model_outputs(self.teacher(batch.images)))
        form, temperature = self.options.form, self.options.temperature
        return distillation(batch.outputs, taught, form=form, temperature=temperature)
