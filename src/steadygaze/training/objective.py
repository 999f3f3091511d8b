"""The training objective: a module, so that parallel training sees one pass from images to the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor, nn

from steadygaze.errors import InputError
from steadygaze.training.losses import LOSSES, Loss, LossBatch, LossOptions, LossSetup


class Objective(nn.Module):
    """The weighted sum of losses, for one batch.

    Attributes:
        losses: Options by name of a registered loss; all of them share one forward pass where they can.
        setup: What the losses prepare themselves with; its model is replaced by `model`.
    """

    def __init__(
        self, model: nn.Module, losses: Mapping[str, LossOptions], setup: LossSetup | None = None
    ) -> None:
        super().__init__()
        self.model = model
        setup = LossSetup(model) if setup is None else replace(setup, model=model)
        classes = {name: LOSSES[name] for name in losses}
        in_order = sorted(losses, key=list(LOSSES).index)
        self.losses: dict[str, Loss] = {name: classes[name](losses[name], setup) for name in in_order}

    @property
    def term_names(self) -> list[str]:
        """The terms of all losses, in the order they are logged."""
        return [
            f"{name}.{term}" if term else name
            for name, loss in self.losses.items()
            for term in loss.terms or ("",)
        ]

    @property
    def needs_masks(self) -> bool:
        return any(loss.needs_masks for loss in self.losses.values())

    @property
    def needs_gradients(self) -> bool:
        """Whether the value of a loss is made of gradients, also outside training."""
        return any(loss.runs_model for loss in self.losses.values())

    @property
    def label_smoothing(self) -> float:
        """Smoothing of the soft targets of mixup and cutmix."""
        return max((loss.label_smoothing for loss in self.losses.values()), default=0.0)

    def forward(
        self,
        images: Tensor,
        labels: Tensor,
        soft_targets: Tensor | None = None,
        masks: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """(total, terms by name without their weights, logits); see `LossBatch` for the arguments."""
        has_masks = masks is not None and masks.numel() > 0
        if self.needs_masks and not has_masks:
            names = [name for name, loss in self.losses.items() if loss.needs_masks]
            raise InputError(f"{', '.join(names)}: expected masks, got none")
        observers = {name: loss.observer() for name, loss in self.losses.items()}
        active = {name: observer for name, observer in observers.items() if observer is not None}
        batch = LossBatch(self.model, images, labels, soft_targets, masks if has_masks else None, active)
        total = images.new_zeros(())
        terms: dict[str, Tensor] = {}
        for name, loss in sorted(self.losses.items(), key=lambda item: not item[1].runs_model):
            value = loss(batch)
            if isinstance(value, Tensor):
                terms[name] = value
            else:
                terms |= {f"{name}.{term}": value[term] for term in value}
            total = total + loss.total(value)
        return total, terms, batch.logits
