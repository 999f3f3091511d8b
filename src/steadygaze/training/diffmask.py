"""Training of Vision DiffMask (docs/equations.md#diffmask-training).

    min over gates and b, max over λ ≥ 0:   L0 + λ_l · (KL(p ‖ p̂) − m)
    l is drawn anew for each batch, and the gates 0..l are active

p is the model's prediction, p̂ its prediction for x̂ (`methods/diffmask.py`). The model itself never changes.
A step costs two forward passes of the model and one backward pass to its tokens. The defaults are the paper's
for CIFAR-10. Options where the paper and its code differ, the paper's first:

| option | values            | meaning                                                                    |
| ------ | ----------------- | -------------------------------------------------------------------------- |
| dual   | ascent, reference | λ rises while KL > m; with the code's sign it falls                        |
| l0     | norm, log         | mean over tokens of Π P(z ≠ 0), or of Σ ln P(z ≠ 0)                        |
| tokens | patches, all      | tokens of that mean; "all" includes prefix tokens, which are never masked  |
| layers | uniform, weighted | how l is drawn; weighted: 0.1 for layers with accuracy > 0.75 and L0 < 0.1 |
| slow   | start, first_sync | where Lookahead's slow weights start; "first_sync": from the first sync    |
| kl     | all, class        | over all classes, or of one (`target` or the predicted) against the rest   |
| begin  | drawn, open       | random initial weights, or all gates at u = β: all patches kept            |

Random initial weights close patches by chance if hidden states are large (a third of DeiT-Tiny's), and where
z is 0 the divergence has no gradient: compare the share of patches kept at the end with the share before
training. Open gates take longer until the first one closes. Training that diverges, as the paper warns it
may, is detected, and restarted if `restarts` allows it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from steadygaze.errors import CheckpointError, InputError, UnknownNameError
from steadygaze.methods.diffmask import (
    DiffMask,
    HardConcrete,
    Shape,
    blank,
    masked,
    prefix_tokens,
    read_file,
    states,
    write,
)
from steadygaze.trace.capture import forward
from steadygaze.training import explainers
from steadygaze.training.recipe import CountFromZero, NonNegative, Positive, PositiveInt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.view import ViT, blank_image

PRESETS: dict[str, dict[str, Any]] = {
    "cifar10": {},
    "imagenet": {"stretch": 20.0, "gate_rate": 1e-5, "baseline_rate": 5e-3, "dual_rate": 0.15, "batch": 128},
    "reference": {"dual": "reference", "l0": "log", "tokens": "all", "slow": "first_sync"},
}


class Settings(explainers.Settings):
    """Settings of a training of gates.

    `preset` names one or more of `PRESETS`, comma-separated; other values are on top of them.

    Attributes:
        stretch: α of the gates.
        shift: β of the gates.
        temperature: τ of the hard concrete distribution.
        left: ℓ, where the stretched distribution begins.
        right: r, where the stretched distribution ends.
        margin: m, the permitted change of the prediction.
        dual_start: Initial λ.
        dual_limit: Largest λ.
        gate_rate: Learning rate of the gates.
        baseline_rate: Learning rate of b.
        dual_rate: Learning rate of λ.
        warmup: Number of steps until the learning rates are reached.
        sync_every: Steps between two syncs of Lookahead.
        sync_share: Step of Lookahead towards the fast weights.
        target: The class of kl="class"; None: the one that the model predicts.
        warm_start: A file of gates for hidden states of the same widths to start from.
        restarts: Number of new attempts if the masks become all on or all off.
        restart_with: Change for a new attempt: the next seed; "stretch" also α + 5, as in the paper's
            ImageNet run.
    """

    not_compared: ClassVar[frozenset[str]] = frozenset({"warm_start", "restarts", "restart_with"})

    stretch: float = 15.0
    shift: float = 8.0
    temperature: Positive = 0.2
    left: Annotated[float, Field(lt=0)] = -0.2
    right: Positive = 1.0
    margin: float = 0.1
    dual_start: NonNegative = 20.0
    dual_limit: float = 200.0
    gate_rate: NonNegative = 2e-5
    baseline_rate: NonNegative = 1e-3
    dual_rate: NonNegative = 0.3
    warmup: CountFromZero = 1200
    sync_every: PositiveInt = 6
    sync_share: float = 0.5
    batch: PositiveInt = 16
    dual: Literal["ascent", "reference"] = "ascent"
    l0: Literal["norm", "log"] = "norm"
    tokens: Literal["patches", "all"] = "patches"
    layers: Literal["uniform", "weighted"] = "uniform"
    slow: Literal["start", "first_sync"] = "start"
    kl: Literal["all", "class"] = "all"
    begin: Literal["drawn", "open"] = "drawn"
    target: CountFromZero | None = None
    warm_start: str | None = None
    restarts: CountFromZero = 0
    restart_with: Literal["seed", "stretch"] = "seed"

    @model_validator(mode="before")
    @classmethod
    def _with_presets(cls, values: dict[str, Any]) -> dict[str, Any]:
        settings = dict(values)
        chosen: dict[str, Any] = {}
        for name in filter(None, map(str.strip, str(settings.pop("preset", "")).split(","))):
            if name not in PRESETS:
                raise UnknownNameError("preset", name, PRESETS)
            chosen |= PRESETS[name]
        if settings.get("target") is not None:
            chosen["kl"] = "class"
        return chosen | settings

    @model_validator(mode="after")
    def _target_needs_class(self) -> Self:
        if self.target is not None and self.kl != "class":
            raise InputError(f"target={self.target} is for masks of one class: set kl='class' too")
        return self

    @property
    def grace_steps(self) -> int:
        """Steps that masks which are all on need to close: Adam moves a gate by about its rate per step."""
        closing = 0.4 / max(self.gate_rate, 1e-9) if self.begin == "open" else 0.0
        return round(max(2 * self.warmup + closing, 1000))


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

    Attributes:
        layer: l, the last active gate.
        l0: Share of patches kept.
        dual: λ_l.
        accuracy: Share of images whose predicted class does not change.
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


class Trainer(explainers.Trainer):
    """Gates in training, with λ and Lookahead's slow weights."""

    what = "a mask"
    stage = "train gates"
    too_early_advice = "Continue with more --steps, or start again with a higher gate_rate"
    diverged_advice = (
        "Try --set restarts=3, restart_with=stretch, another seed or other rates (with a new --out)"
    )
    settings_class = Settings
    learned: DiffMask
    read, write = staticmethod(read_file), staticmethod(write)

    def __init__(self, vit: ViT, settings: Settings) -> None:
        super().__init__(vit, settings)
        parameter = next(vit.model.parameters())
        widths = hidden_widths(vit)
        concrete = HardConcrete(settings.temperature, settings.left, settings.right)
        mask = self.learned = DiffMask(
            Shape(widths, settings.stretch, settings.shift, concrete), settings.seed
        )
        self.identity = {"warm_start": None}
        if settings.warm_start is not None:
            start = _read_warm_start(settings.warm_start, widths)
            self.identity = {"warm_start": _digest(start)}
            mask.load_state_dict(start.state_dict())
        elif settings.begin == "open":
            for gate in mask.gates:
                gate.open()  # type: ignore[operator]
        mask.to(parameter.device, parameter.dtype)
        initial = torch.tensor(settings.dual_start, dtype=parameter.dtype, device=parameter.device)
        self.duals = [initial.clone().requires_grad_() for _ in widths]
        gates = [p for name, p in mask.named_parameters() if name != "baseline"]
        groups = [
            {"params": gates, "lr": settings.gate_rate},
            {"params": [mask.baseline], "lr": settings.baseline_rate},
        ]
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.999))
        self.dual_optimizer = torch.optim.Adam(self.duals, lr=settings.dual_rate, betas=(0.9, 0.999))
        named_duals = {f"dual.{i}": p for i, p in enumerate(self.duals)}
        self.parameters = {**dict(mask.named_parameters()), **named_duals}
        self.slow: dict[str, Tensor] = {}  # Lookahead's slow weights
        if settings.slow == "start":
            self.slow = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.generator = torch.Generator().manual_seed(settings.seed)
        # running accuracy and L0 of each layer, and how often it was drawn
        self.layer_means = torch.ones(len(widths), 2, dtype=torch.float64)
        self.layer_steps = torch.zeros(len(widths), dtype=torch.long)
        self.monitor = DivergenceMonitor(settings.grace_steps)
        self.initial: StepReport | None = None  # before the first step

    def step(self, images: Float[Tensor, "b c h w"]) -> StepReport:
        """One step of gates, baseline and λ on a batch."""
        with torch.enable_grad(), evaluation_mode(self.vit.model):
            layer = self._draw_layer()
            kl, l0, kept, kept_counted, accuracy = self._measure(images, layer)
            dual = self.duals[layer]
            loss = dual.detach() * (kl - self.settings.margin) + l0
            self.optimizer.zero_grad(set_to_none=True)
            self.dual_optimizer.zero_grad(set_to_none=True)
            loss.backward()
        violation = (kl - self.settings.margin).detach()
        dual.grad = -violation if self.settings.dual == "ascent" else violation  # the optimizer descends
        warmup = min(1.0, (self.steps + 1) / max(1, self.settings.warmup))
        rates = (self.settings.gate_rate, self.settings.baseline_rate)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * warmup
        self.optimizer.step()
        self.dual_optimizer.step()
        self.steps += 1
        self._sync_slow_weights()
        with torch.no_grad():
            for p in self.duals:
                p.clamp_(0.0, self.settings.dual_limit)
        report = StepReport(layer, float(kl.detach()), float(kept), float(dual.detach()), float(accuracy))
        means = torch.tensor([report.accuracy, float(kept_counted)], dtype=torch.float64)
        self.layer_means[layer] = RUNNING_MEAN * self.layer_means[layer] + (1 - RUNNING_MEAN) * means
        self.layer_steps[layer] += 1
        return report

    def _measure(self, images: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Measure a batch with the gates 0..layer sampled.

        Returns:
            KL, the L0 term, the share kept of patches and of the tokens of L0, and the share of unchanged
            predictions.
        """
        with torch.no_grad():
            run = forward(self.vit, self.vit.embed(images), grad=False)
            empty = blank(self.vit, images)
            prefix_content = prefix_tokens(self.vit, empty) if self.vit.plan.global_attention else None
            hidden = states(self.vit, empty, run.hidden, prefix_content)
        mask, prefix = self.learned, self.vit.prefix if self.vit.plan.global_attention else 0
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
            often = self.layer_steps > WEIGHTED_AFTER
            weights[(accuracy > ACCURATE) & (l0 < SPARSE) & often] = RARE
        return int(torch.multinomial(weights, 1, generator=self.generator))

    def _sync_slow_weights(self) -> None:
        """Lookahead: every k steps slow ← slow + share · (fast − slow), and fast ← slow.

        Parameters that had no gradient in this step stay.
        """
        if self.steps % self.settings.sync_every:
            return
        with torch.no_grad():
            for name, p in self.parameters.items():
                if p.grad is None:
                    continue
                slow = self.slow.setdefault(name, p.detach().clone())
                slow.lerp_(p, self.settings.sync_share)
                p.copy_(slow)

    @torch.no_grad()
    def evaluate(self, images: Tensor) -> StepReport:
        """Measure all gates together on these images. Changes nothing, not even the next random numbers."""
        random_state = self.generator.get_state()
        with evaluation_mode(self.vit.model):
            kl, _, kept, _, accuracy = self._measure(images, len(self.duals) - 1)
        self.generator.set_state(random_state)
        return StepReport(len(self.duals) - 1, float(kl), float(kept), float(self.duals[-1]), float(accuracy))

    def summary(self, report: StepReport) -> str:
        text = (
            f"all gates together keep {100 * report.l0:.1f} % of the patches, "
            f"KL {report.kl:.3f}, same prediction for {100 * report.accuracy:.1f} %"
        )
        if self.initial is None:
            return text
        first = self.initial
        return (
            text + f" (before training: {100 * first.l0:.1f} %, {first.kl:.3f}, {100 * first.accuracy:.1f} %)"
        )

    def begin(self, images: Tensor) -> None:
        self.initial = self.evaluate(images)

    def check_step(self, report: StepReport) -> str:
        return self.monitor(report, self.steps)

    def check_result(self, report: StepReport) -> tuple[str, bool]:
        state = "off" if report.l0 < ALL_OFF else "on" if report.l0 > ALL_ON else ""
        if not state:
            return "", False
        too_early = state == "on" and self.settings.begin == "open" and self.steps <= self.monitor.grace
        return f"the masks are {'still ' if too_early else ''}all {state}", too_early

    def restarted(self, attempt: int) -> Settings | None:
        if attempt >= self.settings.restarts:
            return None
        wider = 5.0 if self.settings.restart_with == "stretch" else 0.0
        changes = {"seed": self.settings.seed + 1, "stretch": self.settings.stretch + wider}
        return self.settings.model_copy(update=changes)

    def optimized(self) -> Iterator[tuple[str, Tensor, torch.optim.Optimizer]]:
        for name, parameter in self.parameters.items():
            yield name, parameter, self.dual_optimizer if name.startswith("dual.") else self.optimizer

    def own_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        tensors = {"random": self.generator.get_state(), "seen": self.layer_means}
        tensors["layer_steps"] = self.layer_steps
        tensors |= {f"dual.{i}": p for i, p in enumerate(self.duals)}
        tensors |= {f"slow.{name}": value for name, value in self.slow.items()}
        watch = [self.monitor.kind, self.monitor.count]
        return {"watch": watch, "began": list(astuple(self.initial)) if self.initial else None}, tensors

    def restore_own(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.monitor.kind, self.monitor.count = facts["watch"]
        self.initial = StepReport(*facts["began"]) if facts["began"] else None
        self.generator.set_state(tensors["random"].cpu())
        self.layer_means, self.layer_steps = tensors["seen"].clone(), tensors["layer_steps"].clone()
        saved = {name: tensors.get(f"slow.{name}") for name in self.parameters}
        self.slow = {name: slow.to(self.parameters[name]) for name, slow in saved.items() if slow is not None}
        with torch.no_grad():
            for i, p in enumerate(self.duals):
                p.copy_(tensors[f"dual.{i}"])


def hidden_widths(vit: ViT) -> tuple[int, ...]:
    """Widths of the model's hidden states, from one forward pass."""
    image = blank_image(vit)
    with torch.no_grad(), evaluation_mode(vit.model):
        run = forward(vit, vit.embed(image), grad=False)
        return tuple(h.shape[-1] for h in states(vit, blank(vit, image), run.hidden))


def _read_warm_start(path: str, widths: tuple[int, ...]) -> DiffMask:
    mask = read_file(path)[0]
    if mask.shape.widths != widths:
        raise CheckpointError(
            f"warm start: expected a mask for {len(widths)} states of widths {_widths_text(widths)}, as this "
            f"model has; {path} has {len(mask.shape.widths)} of widths {_widths_text(mask.shape.widths)}"
        )
    return mask


def _widths_text(widths: tuple[int, ...]) -> str:
    return str(widths[0]) if len(set(widths)) == 1 else ", ".join(map(str, widths))


def _digest(mask: DiffMask) -> str:
    tensors = (p.detach().cpu().contiguous().view(-1).view(torch.uint8) for p in mask.parameters())
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()[:16]


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
