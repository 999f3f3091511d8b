"""One step of Vision DiffMask training, exactly resumable (docs/equations.md#diffmask-training).

    min over gates and b, max over λ ≥ 0:   L0 + λ_l · (KL(p ‖ p̂) − m)
    l is drawn anew for each batch, and the gates 0..l are active

p is the model's prediction, p̂ its prediction for x̂ (`methods/learnt/diffmask.py`). The model itself never
changes. A step costs two forward passes of the model and one backward pass to its tokens. `settings.py`
explains the options.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.methods.learnt.diffmask import DiffMask, blank, masked, prefix_tokens, states
from steadygaze.trace.capture import forward
from steadygaze.training.diffmask.settings import Settings
from steadygaze.training.learnt.adam import moments, restore_moments
from steadygaze.vit import ViT
from steadygaze.vit.view import evaluation_mode

# of layers="weighted": a layer above this accuracy and below this L0 is drawn with the weight RARE, after
# WEIGHTED_AFTER steps of its own
ACCURATE, SPARSE, RARE, WEIGHTED_AFTER, RUNNING_MEAN = 0.75, 0.1, 0.1, 100, 0.9
ALL_OFF, ALL_ON = 0.02, 0.98  # share of patches kept below and above which masks explain nothing


def divergence(
    p: Float[Tensor, "b classes"], q: Float[Tensor, "b classes"], classes: Tensor | None = None
) -> Float[Tensor, " b"]:
    """KL(p ‖ q) of logits p and q; with `classes` (B,) of that class against the rest."""
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    if classes is not None:
        log_p, log_q = _one_against_rest(log_p, classes), _one_against_rest(log_q, classes)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def _one_against_rest(log_p: Tensor, classes: Tensor) -> Float[Tensor, "b 2"]:
    """ln p of a class, and of all others together."""
    index = classes[:, None]
    rest = log_p.scatter(1, index, float("-inf")).logsumexp(1, keepdim=True)
    return torch.cat([log_p.gather(1, index), rest], 1)


@dataclass(frozen=True)
class StepReport:
    """Means over a batch.

    layer: l, the last active gate
    l0: share of patches kept
    dual: λ_l
    accuracy: share of images whose predicted class does not change
    """

    layer: int
    kl: float
    l0: float
    dual: float
    accuracy: float

    def __str__(self) -> str:
        return (
            f"gates 0..{self.layer}: KL {self.kl:.3f}, {100 * self.l0:.0f} % kept, "
            f"same prediction {100 * self.accuracy:.0f} %, λ {self.dual:.1f}"
        )


class Trainer:
    """A mask in training. `state` and `restore` hold everything the next step depends on."""

    def __init__(
        self, vit: ViT, settings: Settings, widths: tuple[int, ...], warm_start: DiffMask | None = None
    ) -> None:
        parameter = next(vit.model.parameters())
        self.vit, self.settings, self.steps = vit, settings, 0
        self.mask = DiffMask(settings.shape(widths), settings.seed)
        if warm_start is not None:
            self.mask.load_state_dict(warm_start.state_dict())
        elif settings.begin == "open":
            for gate in self.mask.gates:
                gate.open()  # type: ignore[operator]
        self.mask.to(parameter.device, parameter.dtype)
        start = torch.tensor(settings.dual_start, dtype=parameter.dtype, device=parameter.device)
        self.duals = [start.clone().requires_grad_() for _ in widths]
        gates = [p for name, p in self.mask.named_parameters() if name != "baseline"]
        groups = [
            {"params": gates, "lr": settings.gate_rate},
            {"params": [self.mask.baseline], "lr": settings.baseline_rate},
        ]
        self.rates = [settings.gate_rate, settings.baseline_rate]
        self.optimiser = torch.optim.Adam(groups, betas=(0.9, 0.999))
        self.dual_optimiser = torch.optim.Adam(self.duals, lr=settings.dual_rate, betas=(0.9, 0.999))
        named_duals = {f"dual.{i}": p for i, p in enumerate(self.duals)}
        self.parameters = {**dict(self.mask.named_parameters()), **named_duals}
        self.slow: dict[str, Tensor] = {}  # Lookahead's slow weights
        if settings.slow == "start":
            self.slow = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.generator = torch.Generator().manual_seed(settings.seed)
        # running accuracy and L0 of each layer, and how often it was drawn
        first = [0.0 if settings.definition == 1 else 1.0, 1.0]
        self.layer_means = torch.tensor([first] * len(widths), dtype=torch.float64)
        self.layer_steps = torch.zeros(len(widths), dtype=torch.long)

    def step(self, images: Float[Tensor, "b c h w"]) -> StepReport:
        """One step of gates, baseline and λ on a batch."""
        with torch.enable_grad(), evaluation_mode(self.vit.model):
            layer = self._draw_layer()
            kl, l0, kept, kept_counted, accuracy = self._measure(images, layer)
            dual = self.duals[layer]
            loss = dual.detach() * (kl - self.settings.margin) + l0
            self.optimiser.zero_grad(set_to_none=True)
            self.dual_optimiser.zero_grad(set_to_none=True)
            loss.backward()
        violation = (kl - self.settings.margin).detach()
        dual.grad = -violation if self.settings.dual == "ascent" else violation  # the optimiser descends
        warmup = min(1.0, (self.steps + 1) / max(1, self.settings.warmup))
        for group, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            group["lr"] = rate * warmup
        self.optimiser.step()
        self.dual_optimiser.step()
        self.steps += 1
        self._sync_slow_weights()
        with torch.no_grad():
            for p in self.duals:
                p.clamp_(0.0, self.settings.dual_limit)
        report = StepReport(layer, float(kl.detach()), float(kept), float(dual.detach()), float(accuracy))
        sparsity = report.l0 if self.settings.definition == 1 else float(kept_counted)
        means = torch.tensor([report.accuracy, sparsity], dtype=torch.float64)
        self.layer_means[layer] = RUNNING_MEAN * self.layer_means[layer] + (1 - RUNNING_MEAN) * means
        self.layer_steps[layer] += 1
        return report

    def _measure(self, images: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """KL, the L0 term, the share kept of patches and of the tokens of L0, and the share of predictions
        unchanged, with the gates 0..layer sampled."""
        with torch.no_grad():
            run = forward(self.vit, self.vit.embed(images), grad=False)
            empty = blank(self.vit, images)
            with_prefix = self.settings.definition > 1 and self.vit.plan.global_attention
            prefix_content = prefix_tokens(self.vit, empty) if with_prefix else None
            hidden = states(self.vit, empty, run.hidden, prefix_content)
        mask, prefix = self.mask, self.vit.prefix if self.vit.plan.global_attention else 0
        u = mask.logits(hidden, layer)
        uniform = torch.rand(u.shape, generator=self.generator, dtype=torch.float32).to(u)
        z = mask.concrete.sample(u, uniform).prod(-1)
        logits = self.vit.logits(masked(self.vit, run.hidden[0], empty, z, mask.baseline))
        predicted = run.logits.argmax(-1)
        classes = None
        if self.settings.kl == "class":
            target = self.settings.target
            classes = predicted if target is None else torch.full_like(predicted, target)
        kl = divergence(run.logits, logits, classes).mean()
        log_kept = mask.concrete.log_probability(u).sum(-1)
        counted = log_kept[:, prefix:] if self.settings.tokens == "patches" else log_kept
        l0 = counted.exp().mean() if self.settings.l0 == "norm" else counted.mean()
        unchanged = (logits.argmax(-1) == predicted).double().mean()
        kept, kept_counted = (log.detach().exp().mean() for log in (log_kept[:, prefix:], counted))
        return kl, l0, kept, kept_counted, unchanged

    def _draw_layer(self) -> int:
        """The last gate that is active in this step."""
        weights = torch.ones(len(self.duals), dtype=torch.float64)
        if self.settings.layers == "weighted":
            accuracy, l0 = self.layer_means.unbind(1)
            steps = torch.tensor(self.steps) if self.settings.definition == 1 else self.layer_steps
            weights[(accuracy > ACCURATE) & (l0 < SPARSE) & (steps > WEIGHTED_AFTER)] = RARE
        return int(torch.multinomial(weights, 1, generator=self.generator))

    def _sync_slow_weights(self) -> None:
        """Lookahead: every k steps slow ← slow + share · (fast − slow), and the fast weights become the slow
        ones. Parameters that had no gradient in this step stay."""
        if self.steps % self.settings.sync_every:
            return
        with torch.no_grad():
            for name, p in self.parameters.items():
                if p.grad is None and self.settings.definition > 1:
                    continue
                slow = self.slow.setdefault(name, p.detach().clone())
                slow.lerp_(p, self.settings.sync_share)
                p.copy_(slow)

    @torch.no_grad()
    def evaluate(self, images: Tensor) -> StepReport:
        """The effect of all gates together on these images. Changes nothing, not even the next random
        numbers."""
        random_state = self.generator.get_state()
        with evaluation_mode(self.vit.model):
            kl, _, kept, _, accuracy = self._measure(images, len(self.duals) - 1)
        self.generator.set_state(random_state)
        return StepReport(len(self.duals) - 1, float(kl), float(kept), float(self.duals[-1]), float(accuracy))

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(facts, tensors) for `restore`."""
        tensors = {"random": self.generator.get_state(), "seen": self.layer_means}
        tensors["layer_steps"] = self.layer_steps
        tensors |= {f"dual.{i}": p for i, p in enumerate(self.duals)}
        tensors |= {f"slow.{name}": value for name, value in self.slow.items()}
        for name, p in self.parameters.items():
            tensors |= moments(name, p, self._optimiser_of(name))
        facts = {"steps": self.steps, "settings": asdict(self.settings)}
        return facts, {key: value.detach().clone() for key, value in tensors.items()}

    def restore(self, mask: DiffMask, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue where the trainer was that returned this state."""
        self.steps = int(facts["steps"])
        self.mask.load_state_dict(mask.state_dict())
        self.generator.set_state(tensors["random"].cpu())
        self.layer_means = tensors["seen"].clone()
        self.layer_steps = tensors.get("layer_steps", self.layer_steps).clone()  # 0.1 did not count them
        saved = {name: tensors.get(f"slow.{name}") for name in self.parameters}
        self.slow = {name: slow.to(self.parameters[name]) for name, slow in saved.items() if slow is not None}
        with torch.no_grad():
            for i, p in enumerate(self.duals):
                p.copy_(tensors[f"dual.{i}"])
        for name, p in self.parameters.items():
            restore_moments(name, p, self._optimiser_of(name), tensors)

    def _optimiser_of(self, name: str) -> torch.optim.Optimizer:
        return self.dual_optimiser if name.startswith("dual.") else self.optimiser


def hidden_widths(vit: ViT, images: Tensor) -> tuple[int, ...]:
    """Widths of the model's hidden states, from one forward pass."""
    with torch.no_grad(), evaluation_mode(vit.model):
        run = forward(vit, vit.embed(images), grad=False)
        return tuple(h.shape[-1] for h in states(vit, blank(vit, images), run.hidden))


class DivergenceMonitor:
    """Detects masks that are all on, all off or not finite for `patience` consecutive steps.

    "all on" counts only after `grace` steps, since masks may start that way.
    """

    def __init__(self, grace: int, patience: int = 500) -> None:
        self.grace, self.patience, self.kind, self.count = grace, patience, "", 0

    def __call__(self, report: StepReport, step: int) -> str:
        """What is wrong; empty if nothing is."""
        if not (isfinite(report.kl) and isfinite(report.l0)):
            return "the divergence is not finite"
        all_on = report.l0 > ALL_ON and step > self.grace
        kind = "off" if report.l0 < ALL_OFF else "on" if all_on else ""
        self.count = self.count + 1 if kind and kind == self.kind else int(bool(kind))
        self.kind = kind
        if self.count < self.patience:
            return ""
        return f"the masks have been all {kind} for {self.count} steps"
