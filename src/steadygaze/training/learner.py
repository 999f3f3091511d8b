"""One step's losses: a module, so that parallel training sees one forward pass from pictures to the total."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import BadInput, UnknownName
from steadygaze.explainer import rules_of
from steadygaze.methods import parse
from steadygaze.trace import PLAIN
from steadygaze.training.differentiable_maps import joined
from steadygaze.training.losses import losses as L
from steadygaze.training.losses.diversification import DiverseSeam
from steadygaze.training.recipe import CrossEntropy, Losses, PictureGradient
from steadygaze.vit import ViT, adapt


class Learner(nn.Module):
    """pictures, labels (or label maps), soft targets (mixup) and masks -> the total and its terms by name, weighted as the recipe says.

    Every loss is taken of one forward pass, except that GradMask, RRR and maps under rules of their own need theirs. pieces: into how
    many parts, of processes and of accumulation, a step is cut: the mean over them of a sum (RRR) is as many times too small.
    """

    def __init__(
        self, model: nn.Module, losses: Losses, teacher: nn.Module | None = None, pieces: int = 1
    ) -> None:
        super().__init__()
        self.model = model
        self.pieces = pieces
        empty = losses == Losses()
        self.losses = Losses(cross_entropy=CrossEntropy()) if empty else losses
        self.teachers = (
            [teacher.eval().requires_grad_(False)] if teacher is not None else []
        )  # a list: no part of what is trained
        self.vit: ViT | None = None
        if self.losses.relevance is not None:
            self.vit = adapt(model)
        if teacher is not None and hasattr(model, "set_distilled_training"):
            model.set_distilled_training(True)  # type: ignore[operator]

    @property
    def names(self) -> list[str]:
        """The terms, in order."""
        parts = {
            "cross_entropy": [""], "relevance": ["background", "foreground", "confidence"], "gradmask": ["background", "classification"],
            "rrr": ["background", "classification"], "adl": [""], "distillation": [""],
        }  # fmt: skip
        return [
            f"{k}.{p}" if p else k
            for k, ps in parts.items()
            if getattr(self.losses, k) is not None
            for p in ps
        ]

    def forward(self, images: Tensor, labels: Tensor, targets: Tensor | None = None,
                masks: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor], Tensor]:  # fmt: skip
        """(total, terms without their weights, logits)."""
        asked, total = self.losses, images.new_zeros(())
        terms: dict[str, Tensor] = {}
        if asked.need_masks and (masks is None or not masks.numel()):
            raise BadInput(f"{', '.join(asked.need_masks)}: expected masks, got none")
        seam = DiverseSeam(asked.adl.tau, asked.adl.form) if asked.adl is not None else None
        if seam is not None:
            seam.lenient = True  # attention pooling is no attention between tokens
        logits: Any = None
        if asked.relevance is not None:
            found, logits = self._relevance(images, labels, masks, seam)
            r = asked.relevance
            weights = {
                "background": r.relevance * r.background,
                "foreground": r.relevance * r.foreground,
                "confidence": r.confidence,
            }
            total = total + _add(terms, "relevance", found, weights, r.weight)
        for name, part in (("gradmask", asked.gradmask), ("rrr", asked.rrr)):
            if part is not None:
                assert masks is not None
                found, own = L.picture_gradient(
                    name, self.model, images, masks, labels, part.form, part.reverse
                )
                if name == "rrr":
                    found["background"] = self.pieces * found["background"]
                logits = own if logits is None else logits
                total = total + _add(terms, name, found, preset_weights(name, part), part.weight)
        if logits is None or (seam is not None and not (seam.similarities or seam.record.attention)):
            logits = self._run(images, seam)
        if asked.cross_entropy is not None:
            y = logits if isinstance(logits, Tensor) else logits[0]
            smoothing = (
                0.0 if targets is not None else asked.cross_entropy.smoothing
            )  # mixup smooths by itself
            terms["cross_entropy"] = L.cross_entropy(
                y, labels if targets is None else targets, smoothing=smoothing
            )
            total = total + asked.cross_entropy.weight * terms["cross_entropy"]
        if asked.distillation is not None:
            d = asked.distillation
            with torch.no_grad():
                taught = joined(L.outputs_of(self.teachers[0](images)))
            terms["distillation"] = L.distillation(logits, taught, form=d.form, temperature=d.temperature)
            total = total + d.weight * terms["distillation"]
        if seam is not None and asked.adl is not None:
            terms["adl"] = seam.loss()
            total = total + asked.adl.weight * terms["adl"]
        return total, terms, joined(logits)

    def _run(self, images: Tensor, seam: DiverseSeam | None) -> Any:
        if seam is None:
            return L.outputs_of(self.model(images))
        with seam:
            return L.outputs_of(self.model(images))

    def _relevance(
        self, images: Tensor, labels: Tensor, masks: Any, seam: DiverseSeam | None
    ) -> tuple[dict[str, Tensor], Any]:
        r = self.losses.relevance
        assert r is not None and self.vit is not None
        options: dict[str, Any] = {
            "method": r.method, "explained": r.explained, "confidence": r.confident_of, "second_order": r.second_order,
            "temperature": r.temperature, "reverse": r.reverse,
        }  # fmt: skip
        m = parse(r.method)
        if seam is None or (m.base.gradient and rules_of(m) != PLAIN):
            return L.relevance_pass(self.vit, images, masks, labels, **options)
        with seam:  # the attention that the map keeps serves both
            return L.relevance_pass(self.vit, images, masks, labels, **options)


def preset_weights(name: str, part: PictureGradient) -> dict[str, float]:
    """The weights of GradMask or RRR: the published ones for a model, or those of the recipe."""
    if part.preset is None:
        return {"background": part.background, "classification": part.classification}
    known = L.GRADMASK if name == "gradmask" else L.RRR
    if part.preset not in known:
        raise UnknownName(f"losses.{name}.preset", part.preset, known)
    return {"background": known[part.preset].background, "classification": known[part.preset].classification}


def _add(
    terms: dict[str, Tensor], name: str, found: dict[str, Tensor], weights: dict[str, float], weight: float
) -> Tensor:
    for part, value in found.items():
        terms[f"{name}.{part}"] = value
    return weight * sum(weights[part] * value for part, value in found.items())  # type: ignore[return-value]
