"""Settings of DiffMask training (docs/equations.md#diffmask-training). The defaults are the paper's for
CIFAR-10.

Options where the paper and its code differ, the paper's first:

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
training. Open gates take longer until the first one closes.

`definition` is 2. Files of version 0.1 do not record it, and continue with 1:

| subject             | 2, as the authors' code                     | 1                                  |
| ------------------- | ------------------------------------------- | ---------------------------------- |
| h̄⁰ of prefix tokens | the model's tokens without positions        | 0                                  |
| layers="weighted"   | a layer counts after 100 steps of its own   | after 100 steps of all             |
| its L0              | over the tokens of `tokens`                 | over patches                       |
| Lookahead           | parameters without a gradient stay in place | all parameters move                |

The first row matters for tokens="all" only. Masks are read in the same way whatever the definition.

One step of Vision DiffMask training, exactly resumable (docs/equations.md#diffmask-training).

    min over gates and b, max over λ ≥ 0:   L0 + λ_l · (KL(p ‖ p̂) − m)
    l is drawn anew for each batch, and the gates 0..l are active

p is the model's prediction, p̂ its prediction for x̂ (`methods/diffmask.py`). The model itself never
changes. A step costs two forward passes of the model and one backward pass to its tokens. `settings.py`
explains the options.

Training of a DiffMask file for a model and folders of images, resumed exactly where it stopped.

Training that diverges, as the paper warns it may, is detected and restarted if `restarts` allows it. What
every such run does is in `training/explainers.py`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, fields, replace
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float
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
from steadygaze.training.explainers import LearnedRequest, LearnedResult, LearnedRun, moments, restore_moments
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.view import ViT

CHOICES = {
    "dual": ("ascent", "reference"),
    "l0": ("norm", "log"),
    "tokens": ("patches", "all"),
    "layers": ("uniform", "weighted"),
    "slow": ("start", "first_sync"),
    "kl": ("all", "class"),
    "begin": ("drawn", "open"),
}
PRESETS: dict[str, dict[str, Any]] = {
    "cifar10": {},
    "imagenet": {"stretch": 20.0, "gate_rate": 1e-5, "baseline_rate": 5e-3, "dual_rate": 0.15, "batch": 128},
    "reference": {"dual": "reference", "l0": "log", "tokens": "all", "slow": "first_sync"},
}


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on apart from the model and the images.

    stretch, shift: α and β of the gates
    temperature, left, right: of the hard concrete distribution
    margin: m; dual_start, dual_limit: initial and largest λ
    gate_rate, baseline_rate, dual_rate: learning rates; warmup: steps until they are reached
    sync_every, sync_share: of Lookahead
    target: the class of kl="class"; None: the one that the model predicts
    definition: see above
    """

    seed: int = 0
    stretch: float = 15.0
    shift: float = 8.0
    temperature: float = 0.2
    left: float = -0.2
    right: float = 1.0
    margin: float = 0.1
    dual_start: float = 20.0
    dual_limit: float = 200.0
    gate_rate: float = 2e-5
    baseline_rate: float = 1e-3
    dual_rate: float = 0.3
    warmup: int = 1200
    sync_every: int = 6
    sync_share: float = 0.5
    batch: int = 16
    dual: str = "ascent"
    l0: str = "norm"
    tokens: str = "patches"
    layers: str = "uniform"
    slow: str = "start"
    kl: str = "all"
    begin: str = "drawn"
    target: int | None = None
    definition: int = 2

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UnknownNameError(name, str(getattr(self, name)), choices)
        if self.definition not in (1, 2):
            raise InputError(f"definition: expected 1 or 2, got {self.definition!r}")
        if self.target is not None and self.kl != "class":
            raise InputError(f"target={self.target} is for masks of one class: set kl='class' too")
        for name in ("gate_rate", "baseline_rate", "dual_rate"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name}: expected a rate of at least 0, got {getattr(self, name)}")
        if not self.left < 0 < self.right or not self.temperature > 0:
            raise InputError(
                "expected left < 0 < right and temperature > 0, "
                f"got {self.left}, {self.right}, {self.temperature}"
            )

    @classmethod
    def of(cls, *presets: str, **options: Any) -> Settings:
        """Presets in order ("cifar10", "imagenet", "reference"), then the options that are not None."""
        values: dict[str, Any] = {}
        for name in presets:
            if name not in PRESETS:
                raise UnknownNameError("preset", name, PRESETS)
            values |= PRESETS[name]
        return cls(**(values | {key: value for key, value in options.items() if value is not None}))

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from a file; values that this version does not have are ignored."""
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        return cls(**({"definition": 1} | known))

    def shape(self, widths: tuple[int, ...]) -> Shape:
        return Shape(widths, self.stretch, self.shift, HardConcrete(self.temperature, self.left, self.right))

    def restarted(self, how: str) -> Settings:
        """For another attempt after a divergence: the next seed; "stretch" also α + 5, as in the paper's
        ImageNet run."""
        if how not in ("seed", "stretch"):
            raise UnknownNameError("way to restart", how, ("seed", "stretch"))
        wider = self.stretch + (5.0 if how == "stretch" else 0.0)
        return replace(self, seed=self.seed + 1, stretch=wider)

    @property
    def grace_steps(self) -> int:
        """Steps after which masks that are all on have had time to close: Adam moves a gate by about its rate
        per step."""
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
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.999))
        self.dual_optimizer = torch.optim.Adam(self.duals, lr=settings.dual_rate, betas=(0.9, 0.999))
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
            self.optimizer.zero_grad(set_to_none=True)
            self.dual_optimizer.zero_grad(set_to_none=True)
            loss.backward()
        violation = (kl - self.settings.margin).detach()
        dual.grad = -violation if self.settings.dual == "ascent" else violation  # the optimizer descends
        warmup = min(1.0, (self.steps + 1) / max(1, self.settings.warmup))
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * warmup
        self.optimizer.step()
        self.dual_optimizer.step()
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
            tensors |= moments(name, p, self._optimizer_of(name))
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
            restore_moments(name, p, self._optimizer_of(name), tensors)

    def _optimizer_of(self, name: str) -> torch.optim.Optimizer:
        return self.dual_optimizer if name.startswith("dual.") else self.optimizer


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


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiffMaskRequest(LearnedRequest):
    """What to train. options: values of `Settings`, on top of the presets.

    target: class name or index of a mask for one class
    warm_start: a mask of the same widths to start from
    restarts: number of new attempts after a divergence; restart_with: see `Settings.restarted`
    """

    presets: tuple[str, ...] = ()
    target: str | None = None
    warm_start: Path | None = None
    restarts: int = 0
    restart_with: str = "seed"


class DiffMaskRun(LearnedRun[DiffMaskRequest, Trainer]):
    """A training of gates. Masks that end all on or all off are restarted too, if that is allowed."""

    what: ClassVar[str] = "a mask"
    stage: ClassVar[str] = "train gates"
    newer_options: ClassVar[frozenset[str]] = frozenset({"begin", "definition"})  # see `Settings.read`

    def prepare(self) -> None:
        request = self.request
        target = None if request.target is None else self.loaded.class_index(request.target)
        self.settings = Settings.of(*request.presets, **request.options, target=target)
        self.total_steps = self.steps_for(self.settings.batch)
        readable = self.images.load(self.images.files[:8])[:1]
        self.widths = hidden_widths(self.vit, readable.to(self.like))
        self.warm_start = None if request.warm_start is None else self._read_warm_start(request.warm_start)
        warm_start = None
        if self.warm_start is not None:
            content = b"".join(_bytes(parameter) for parameter in self.warm_start.parameters())
            warm_start = hashlib.sha256(content).hexdigest()[:16]
        self.identity = self.describe(self.settings, warm_start=warm_start)
        self.initial: StepReport | None = None
        self._start(self.settings)

    def _start(self, settings: Settings) -> None:
        self.trainer = Trainer(self.vit, settings, self.widths, self.warm_start)
        self.monitor = DivergenceMonitor(settings.grace_steps)
        self.problem = ""

    def _read_warm_start(self, path: Path) -> DiffMask:
        mask = read_file(path)[0]
        if mask.shape.widths != self.widths:
            raise CheckpointError(
                f"warm start: expected a mask for {len(self.widths)} states of widths "
                f"{_widths_text(self.widths)}, as this model has; {path} has {len(mask.shape.widths)} "
                f"of widths {_widths_text(mask.shape.widths)}"
            )
        return mask

    def read(self) -> tuple[Mapping[str, Any], tuple[DiffMask, dict[str, Tensor]]]:
        mask, facts, tensors = read_file(self.request.out)
        return facts, (mask, tensors)

    def restore(self, facts: Mapping[str, Any], rest: tuple[DiffMask, dict[str, Tensor]]) -> None:
        mask, tensors = rest
        self._start(Settings.read(facts["settings"]))
        self.trainer.restore(mask, facts, tensors)
        self.monitor.kind, self.monitor.count = facts["watch"]
        self.initial = StepReport(*facts["began"]) if facts.get("began") else None

    def facts(self) -> dict[str, Any]:
        return {
            "watch": [self.monitor.kind, self.monitor.count],
            "began": list(astuple(self.initial)) if self.initial else None,
        }

    def write(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        write(self.request.out, self.trainer.mask, facts, tensors)

    def before_first_step(self, sample: Tensor) -> None:
        self.initial = self.trainer.evaluate(sample)

    def check_step(self, report: StepReport) -> str:
        return self.monitor(report, self.trainer.steps)

    def finish(self, sample: Tensor) -> LearnedResult:
        while True:
            self.train_steps(sample)
            report = self.trainer.evaluate(sample)
            state = "off" if report.l0 < ALL_OFF else "on" if report.l0 > ALL_ON else ""
            opening = self.trainer.settings.begin == "open" and self.trainer.steps <= self.monitor.grace
            too_early = not self.problem and state == "on" and opening
            at_end = f"the masks are {'still ' if too_early else ''}all {state}" if state else ""
            problem = self.problem or at_end
            if self.problem or not problem or too_early or self.attempt >= self.request.restarts:
                break
            self.problem = problem
        self.save(problem, too_early)
        return self.result(report, problem, too_early, self.initial)

    def restart(self) -> bool:
        """Start again after a divergence, if another attempt is allowed."""
        if self.attempt >= self.request.restarts:
            return False
        self.attempt += 1
        settings = self.trainer.settings.restarted(self.request.restart_with)
        log.warning(
            "step %d: %s. Restarting with seed %d, stretch %g",
            self.trainer.steps,
            self.problem,
            settings.seed,
            settings.stretch,
        )
        self._start(settings)
        self.resumed = 0
        self.report_progress()
        return True


def _widths_text(widths: tuple[int, ...]) -> str:
    return str(widths[0]) if len(set(widths)) == 1 else ", ".join(map(str, widths))


def _bytes(parameter: Tensor) -> bytes:
    return parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
