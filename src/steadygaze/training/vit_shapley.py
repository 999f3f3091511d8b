"""Training of ViT-Shapley (docs/equations.md#vit-shapley).

    surrogate   min E_S KL(model(all) ‖ surrogate(S))      |S| uniform in 0..P, then S uniform
    explainer   min E_S ‖v(S) − v(∅) − Σ_{j∈S} φ_j‖²       S and its complement, by the Shapley kernel

| option    | values       | meaning                                                                         |
| --------- | ------------ | ------------------------------------------------------------------------------- |
| surrogate | model, train | v(S) is the prediction of the model itself, or of a copy fine-tuned on images   |
|           |              | with removed patches, as in the paper                                           |
| trunk     | model, train | the explainer reads hidden states of the model itself, or of a copy that is     |
|           |              | fine-tuned with it, as in the paper                                             |

With surrogate="model" the explanation is of the model that is used and measured; the paper fine-tunes a copy
since a model may never have seen images with removed patches. With trunk="model" a step costs no backward
pass through the model, and the map shares its forward pass with other methods.

The model itself never changes. A step of the explainer costs one forward pass of the whole images and about
one for each pair of subsets, since patches are removed. The draws of a step depend on the seed and the step
alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from steadygaze.errors import MethodUnavailableError
from steadygaze.methods.learned import take_prefix, with_prefix
from steadygaze.methods.perturbation import shapley_pairs
from steadygaze.methods.vit_shapley import (
    Explainer,
    efficient,
    kernel_shap_loss,
    prefix_of,
    read_file,
    shape_of,
    states_read,
    trunk_hidden,
    value_of_nothing,
    values,
    wide,
    write,
)
from steadygaze.target import Outputs, predictions
from steadygaze.training import explainers
from steadygaze.training.recipe import Positive, PositiveInt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.removal import available_hiding, subset_logits
from steadygaze.vit.view import ViT, blank_image


class Settings(explainers.Settings):
    """Settings of a training of an explainer.

    Attributes:
        pairs: Pairs of subsets (S and its complement) for each image of a step.
        rate: Learning rate of the explainer.
        trunk_rate: Learning rate of the trunk.
        surrogate_rate: Learning rate of the surrogate.
        warmup: Steps until the learning rates are reached; then they fall as 1/√step.
        surrogate_steps: Steps of the surrogate, before those of the explainer; with surrogate="train" only.
    """

    batch: PositiveInt = 32
    pairs: PositiveInt = 2
    rate: Positive = 1e-3
    trunk_rate: Positive = 1e-4
    surrogate_rate: Positive = 1e-4
    warmup: PositiveInt = 200
    surrogate: Literal["model", "train"] = "model"
    trunk: Literal["model", "train"] = "model"
    surrogate_steps: PositiveInt = 1000

    @property
    def first_steps(self) -> int:
        """Steps before those of the explainer."""
        return self.surrogate_steps if self.surrogate == "train" else 0

    def schedule(self, step: int) -> float:
        """Factor of the learning rates in a step of a stage, counted from 0.

        Independent of the number of steps, so that a run can be continued with more of them.
        """
        return min((step + 1) / self.warmup, (self.warmup / (step + 1)) ** 0.5)


CLIP = 1.0  # largest norm of a gradient, as in the authors' code
EVALUATED_PAIRS = 4  # pairs of subsets for each image of an evaluation


@dataclass(frozen=True)
class StepReport:
    """What a step, or an evaluation, measured.

    Attributes:
        loss: Loss of the explainer, or the surrogate's divergence from the model.
        even: The explainer's loss if every patch had an equal share; None in steps of the surrogate.
    """

    loss: float
    even: float | None = None

    @property
    def explained(self) -> float:
        """Share of the variation of v over subsets that the values explain: 0 for equal shares, at most 1."""
        return 1 - self.loss / max(self.even or 0.0, 1e-30)

    def __str__(self) -> str:
        if self.even is None:
            return f"surrogate: KL {self.loss:.4f}"
        return f"loss {self.loss:.5f}, {100 * self.explained:.0f} % of the variation explained"


def divergence(
    outputs: Outputs, model: Float[Tensor, "b c"], surrogate: Float[Tensor, "b c"]
) -> Float[Tensor, ""]:
    """KL divergence of two predictions from their logits; of values the squared difference."""
    if outputs == "values":
        return (model - surrogate).square().sum(-1).mean()
    if outputs == "labels" or model.shape[-1] == 1:  # each output against its absence
        model, surrogate = (torch.stack([y, torch.zeros_like(y)], -1) for y in (model, surrogate))
    log_p, log_q = model.log_softmax(-1), surrogate.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).flatten(1).sum(-1).mean()


def uniform_sizes(draws: Float[Tensor, "b p1"]) -> Bool[Tensor, "b p"]:
    """A subset for each row, its size uniform in 0..P."""
    patches = draws.shape[1] - 1
    size = (draws[:, :1] * (patches + 1)).long().clamp_max(patches)
    return draws[:, 1:].argsort(1).argsort(1) < size


class Trainer(explainers.Trainer):
    """An explainer in training, with its surrogate and trunk."""

    what = "an explainer"
    stage = "train explainer"
    too_early_advice = "Continue with more --steps, or start again with another rate"
    diverged_advice = "Try a lower rate, with a new --out"
    settings_class = Settings
    learned: Explainer
    read, write = staticmethod(read_file), staticmethod(write)

    def __init__(self, vit: ViT, settings: Settings) -> None:
        super().__init__(vit, settings)
        parameter = next(vit.model.parameters())
        self.dtype = wide(parameter.dtype)
        self.blank = blank_image(vit)
        with torch.no_grad(), evaluation_mode(vit.model):
            tokens = vit.embed(self.blank)
            self.mode = available_hiding(vit, tokens)
            rows, columns = vit.layout(tokens).grid
        self.patches = rows * columns
        if self.patches < 2:
            raise MethodUnavailableError("vit_shapley: expected a model with at least two patches, got one")
        if settings.surrogate == "train" and self.mode != "remove":
            raise MethodUnavailableError(
                f"surrogate='train' needs patches that can be removed, and those of a {vit.plan.kind} "
                "cannot. Use surrogate='model'.",
                option="surrogate",
            )
        self.learned = Explainer(shape_of(vit), settings.seed).to(parameter.device, self.dtype)
        self.surrogate = _trainable_copy(vit) if settings.surrogate == "train" else vit
        self.trunk = _trainable_copy(vit) if settings.trunk == "train" else vit
        self.copies = {"surrogate": self.surrogate, "trunk": self.trunk}
        self.copies = {name: view for name, view in self.copies.items() if view is not vit}
        self.groups = {"explainer": dict(self.learned.named_parameters())}
        self.groups |= {name: dict(view.model.named_parameters()) for name, view in self.copies.items()}
        self.rates = {
            "explainer": settings.rate,
            "trunk": settings.trunk_rate,
            "surrogate": settings.surrogate_rate,
        }
        # one optimizer for each group: the surrogate is trained at another time
        self.optimizers = {
            name: torch.optim.Adam(list(group.values()), lr=self.rates[name])
            for name, group in self.groups.items()
        }
        self._null: Tensor | None = None

    @property
    def explainer_steps(self) -> int:
        return max(0, self.steps - self.settings.first_steps)

    def step(self, images: Float[Tensor, "b c h w"]) -> StepReport:
        """One step on a batch. Nothing moves if the loss is not finite."""
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + self.steps)
        if self.steps < self.settings.first_steps:
            loss, report = self._surrogate_loss(images, generator)
            self._move(loss, ("surrogate",), self.steps)
        else:
            if self.steps == self.settings.first_steps and len(self.copies) == 2:
                self.trunk.model.load_state_dict(self.surrogate.model.state_dict())  # as in the paper
            loss, report = self._explainer_loss(images, generator, self.settings.pairs)
            self._move(loss, tuple(name for name in self.groups if name != "surrogate"), self.explainer_steps)
        self.steps += 1
        return report

    def _move(self, loss: Tensor, names: tuple[str, ...], step: int) -> None:
        if not isfinite(float(loss.detach())):
            return
        for name in names:
            self.optimizers[name].zero_grad(set_to_none=True)
        loss.backward()
        for name in names:
            parameters = self.groups[name].values()
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            for group in self.optimizers[name].param_groups:
                group["lr"] = self.rates[name] * self.settings.schedule(step)
            self.optimizers[name].step()

    def _surrogate_loss(self, images: Tensor, generator: torch.Generator) -> tuple[Tensor, StepReport]:
        draws = torch.rand(len(images), self.patches + 1, generator=generator)
        keep = uniform_sizes(draws).to(images.device)
        with torch.no_grad(), evaluation_mode(self.vit.model):
            model = self.vit(images)
        with torch.enable_grad():
            tokens = self.surrogate.embed(images)
            image = torch.arange(len(images), device=images.device)
            logits = subset_logits(self.surrogate, images, tokens, keep, image, self.mode)
            loss = divergence(self.vit.plan.outputs, model, logits)
        return loss, StepReport(float(loss.detach()))

    def _explainer_loss(
        self, images: Tensor, generator: torch.Generator, pairs: int
    ) -> tuple[Tensor, StepReport]:
        draws = torch.rand(len(images), pairs, self.patches + 1, generator=generator, dtype=torch.float64)
        keep = shapley_pairs(draws).to(images.device)
        null = self.null
        with torch.no_grad(), evaluation_mode(self.vit.model):
            hidden = trunk_hidden(self.surrogate, images)
            whole = predictions(self.vit.plan.outputs, self.surrogate.head(hidden[-1]).to(self.dtype))
            value = values(self.surrogate, images, hidden[0], keep, self.mode)
            if self.trunk is self.vit and self.surrogate is not self.vit:
                hidden = trunk_hidden(self.vit, images)
        if self.trunk is not self.vit:
            hidden = trunk_hidden(self.trunk, images)
        states = states_read(self.trunk, hidden, self.dtype)
        phi = efficient(self.learned(states, prefix_of(self.vit)), whole, null)
        loss = kernel_shap_loss(phi, keep, value, null)
        even = kernel_shap_loss(efficient(torch.zeros_like(phi), whole, null), keep, value, null)
        return loss, StepReport(float(loss.detach()), float(even.detach()))

    @property
    def null(self) -> Float[Tensor, " c"]:
        """v(∅). Kept once the surrogate does not change any more."""
        if self._null is not None:
            return self._null
        with torch.no_grad(), evaluation_mode(self.surrogate.model):
            null = value_of_nothing(self.surrogate, self.blank, self.surrogate.embed(self.blank), self.mode)
        if self.steps >= self.settings.first_steps:
            self._null = null
        return null

    @torch.no_grad()
    def evaluate(self, images: Tensor) -> StepReport:
        """The loss on these images, with subsets that are the same at every call."""
        generator = torch.Generator().manual_seed(self.settings.seed)
        return self._explainer_loss(images, generator, EVALUATED_PAIRS)[1]

    def summary(self, report: StepReport) -> str:
        return (
            f"loss {report.loss:.5f}, {100 * report.explained:.1f} % of the variation of the prediction over "
            f"patch subsets explained (equal shares: 0 %, loss {report.even:.5f})"
        )

    def check_step(self, report: StepReport) -> str:
        return "" if isfinite(report.loss) else "the loss is not finite"

    def check_result(self, report: StepReport) -> tuple[str, bool]:
        if report.explained > 0:
            return "", False
        return "it explains no more than equal shares of all patches", True

    def optimized(self) -> Iterator[tuple[str, Tensor, torch.optim.Optimizer]]:
        for name, group in self.groups.items():
            for key, parameter in group.items():
                yield f"{name}.{key}", parameter, self.optimizers[name]

    def own_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors = {"null": self.null}
        for name, view in self.copies.items():
            tensors |= with_prefix(f"{name}.", view.model)
        return {"explainer_steps": self.explainer_steps}, tensors

    def restore_own(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self._null = None
        for name, view in self.copies.items():
            view.model.load_state_dict(take_prefix(f"{name}.", dict(tensors)))


def _trainable_copy(vit: ViT) -> ViT:
    """A view of a copy of the model whose weights can be trained; dropout and batch statistics stay off."""
    copied = copy.deepcopy(vit)
    copied.model.eval()
    for parameter in copied.model.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)
    return copied
