"""Training of Vision DiffMask (methods/masking.py): one step, exactly resumable (docs/equations.md#diffmask-training).

    min over gates and b, max over λ ≥ 0:   L0 + λ_l · (KL(p ‖ p̂) − m),   l drawn anew for each batch, gates 0..l at work

p is the model's answer, p̂ its answer to x̂. The model itself never changes. Each step costs two forward passes of the model and one backward
pass to its tokens alone. Options where paper and code differ, the paper's first:

| option | values                 | meaning                                                                                       |
| dual   | ascent, reference      | λ rises while KL > m; with the code's sign it falls                                           |
| l0     | norm, log              | mean over tokens of Π P(z ≠ 0), or of Σ ln P(z ≠ 0)                                           |
| tokens | patches, all           | what that mean is over; "all" has the prefix tokens in, whose gates are never applied         |
| layers | uniform, weighted      | how l is drawn; weighted: 0.1 for layers that are right (> 0.75) and sparse (L0 < 0.1) by now |
| slow   | start, first_sync      | where Lookahead's slow weights come from; "first_sync" makes the first sync do nothing        |
| kl     | all, class             | over the whole distribution, or of one class against the rest: `target`, or the predicted one |
| begin  | drawn, open            | the layers' own first weights, or every gate at u = β: all patches kept                       |

Drawn weights close patches by chance where hidden states are large (a third of DeiT-Tiny's), and where z is 0 the divergence has no
gradient: compare what is kept at the end with what was at the beginning. Open gates take longer until the first one closes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.errors import BadInput, UnknownName
from steadygaze.methods.diffmask import DiffMask, HardConcrete, Shape, blank, masked, states
from steadygaze.trace.capture import forward
from steadygaze.vit import ViT
from steadygaze.vit.view import evaluation_mode

CHOICES = {"dual": ("ascent", "reference"), "l0": ("norm", "log"), "tokens": ("patches", "all"), "layers": ("uniform", "weighted"),
           "slow": ("start", "first_sync"), "kl": ("all", "class"), "begin": ("drawn", "open")}  # fmt: skip
SETTLED, AFTER, RARELY, MEMORY = (
    (0.75, 0.1),
    100,
    0.1,
    0.9,
)  # of layers="weighted": accuracy and L0, steps, weight, running mean
MINIMUM = (0.02, 0.98)  # masks that keep less are all off, more: all on
PRESETS: dict[str, dict[str, Any]] = {
    "cifar10": {},
    "imagenet": {"stretch": 20.0, "gate_rate": 1e-5, "baseline_rate": 5e-3, "dual_rate": 0.15, "batch": 128},
    "reference": {"dual": "reference", "l0": "log", "tokens": "all", "slow": "first_sync"},
}


@dataclass(frozen=True)
class Settings:
    """Everything that a run depends on beside the model and the pictures; the defaults are the paper's for CIFAR-10."""

    seed: int = 0
    stretch: float = 15.0
    shift: float = 8.0
    temperature: float = 0.2
    left: float = -0.2
    right: float = 1.0
    margin: float = 0.1  # m
    dual_start: float = 20.0
    dual_limit: float = 200.0
    gate_rate: float = 2e-5
    baseline_rate: float = 1e-3
    dual_rate: float = 0.3
    warmup: int = 1200
    sync_every: int = 6  # Lookahead
    sync_share: float = 0.5
    batch: int = 16
    dual: str = "ascent"
    l0: str = "norm"
    tokens: str = "patches"
    layers: str = "uniform"
    slow: str = "start"
    kl: str = "all"
    begin: str = "drawn"
    target: int | None = None  # of kl="class"; None: the class that the model says

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UnknownName(name, str(getattr(self, name)), known)
        if self.target is not None and self.kl != "class":
            raise BadInput(
                f"target={self.target} belongs to a mask for one class: give kl='class' (--kl class) too"
            )
        for name in ("gate_rate", "baseline_rate", "dual_rate"):
            if not getattr(self, name) >= 0:
                raise BadInput(f"{name}: expected a rate of 0 or more, got {getattr(self, name)}")
        if not self.left < 0 < self.right or not self.temperature > 0:
            raise BadInput(
                f"expected left < 0 < right and temperature > 0, got {self.left}, {self.right}, {self.temperature}"
            )

    @classmethod
    def of(cls, *presets: str, **chosen: Any) -> "Settings":
        """Presets one after the other ("cifar10", "imagenet", "reference"), then single values."""
        values: dict[str, Any] = {}
        for name in presets:
            if name not in PRESETS:
                raise UnknownName("preset", name, PRESETS)
            values |= PRESETS[name]
        return cls(**(values | {key: value for key, value in chosen.items() if value is not None}))

    def shape(self, widths: tuple[int, ...]) -> Shape:
        return Shape(widths, self.stretch, self.shift, HardConcrete(self.temperature, self.left, self.right))


def divergence(
    p: Float[Tensor, "b classes"], q: Float[Tensor, "b classes"], classes: Tensor | None = None
) -> Float[Tensor, " b"]:
    """KL(p ‖ q) of logits p and q; with `classes` (B,) only of that class against the rest."""
    a, b = p.log_softmax(-1), q.log_softmax(-1)
    if classes is not None:
        a, b = (_two(x, classes) for x in (a, b))
    return (a.exp() * (a - b)).sum(-1)


def _two(logs: Tensor, classes: Tensor) -> Tensor:
    """ln p of a class, and of all others together."""
    at = classes[:, None]
    rest = logs.scatter(1, at, float("-inf")).logsumexp(1, keepdim=True)
    return torch.cat([logs.gather(1, at), rest], 1)


@dataclass(frozen=True)
class Report:
    """What one step saw: means over the batch."""

    layer: int
    kl: float
    l0: float  # share of the patches that are kept
    dual: float
    accuracy: float  # how often the answer stays


class Trainer:
    """A mask in training. `step(images)` does one step; `state` and `restore` hold all that the next one depends on."""

    def __init__(
        self, vit: ViT, settings: Settings, widths: tuple[int, ...], warm: DiffMask | None = None
    ) -> None:
        parameter = next(vit.model.parameters())
        self.vit, self.settings, self.steps = vit, settings, 0
        self.mask = DiffMask(settings.shape(widths), settings.seed)
        if warm is not None:
            self.mask.load_state_dict(warm.state_dict())
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
        self.ascent = torch.optim.Adam(self.duals, lr=settings.dual_rate, betas=(0.9, 0.999))
        self.names = {
            **dict(self.mask.named_parameters()),
            **{f"dual.{i}": p for i, p in enumerate(self.duals)},
        }
        self.slow = (
            {name: p.detach().clone() for name, p in self.names.items()} if settings.slow == "start" else {}
        )
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.seen = torch.tensor(
            [[0.0, 1.0]] * len(widths), dtype=torch.float64
        )  # running accuracy and L0 of each layer

    def step(self, images: Float[Tensor, "b c h w"]) -> Report:
        """One step of gates, baseline and λ on a batch."""
        with torch.enable_grad(), evaluation_mode(self.vit.model):
            layer = self._draw()
            kl, l0, kept, accuracy = self._measure(images, layer)
            dual = self.duals[layer]
            loss = dual.detach() * (kl - self.settings.margin) + l0
            self.optimiser.zero_grad(set_to_none=True)
            self.ascent.zero_grad(set_to_none=True)
            loss.backward()
        violation = (kl - self.settings.margin).detach()
        dual.grad = -violation if self.settings.dual == "ascent" else violation  # the optimiser descends
        warm = min(1.0, (self.steps + 1) / max(1, self.settings.warmup))
        for group, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            group["lr"] = rate * warm
        self.optimiser.step()
        self.ascent.step()
        self.steps += 1
        self._sync()
        with torch.no_grad():
            for p in self.duals:
                p.clamp_(0.0, self.settings.dual_limit)
        report = Report(layer, float(kl.detach()), float(kept), float(dual.detach()), float(accuracy))
        now = torch.tensor([report.accuracy, report.l0], dtype=torch.float64)
        self.seen[layer] = MEMORY * self.seen[layer] + (1 - MEMORY) * now
        return report

    def _measure(self, images: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """KL, the L0 term, the share of patches kept and how often the answer stays, with the gates 0..layer sampled."""
        with torch.no_grad():
            run = forward(self.vit, self.vit.embed(images), grad=False)
            empty = blank(self.vit, images)
            seen = states(self.vit, empty, run.hidden)
        mask, prefix = self.mask, self.vit.prefix if self.vit.plan.global_attention else 0
        u = mask.logits(seen, layer)
        uniform = torch.rand(u.shape, generator=self.generator, dtype=torch.float32).to(u)
        z = mask.concrete.sample(u, uniform).prod(-1)
        logits = self.vit.logits(masked(self.vit, run.hidden[0], empty, z, mask.baseline))
        classes = None
        if self.settings.kl == "class":
            classes = run.logits.argmax(-1)
            classes = (
                classes if self.settings.target is None else torch.full_like(classes, self.settings.target)
            )
        kl = divergence(run.logits, logits, classes).mean()
        logs = mask.concrete.log_probability(u).sum(-1)
        counted = logs[:, prefix:] if self.settings.tokens == "patches" else logs
        l0 = counted.exp().mean() if self.settings.l0 == "norm" else counted.mean()
        same = (logits.argmax(-1) == run.logits.argmax(-1)).double().mean()
        return kl, l0, logs[:, prefix:].detach().exp().mean(), same

    def _draw(self) -> int:
        """The last gate at work in this step."""
        weights = torch.ones(len(self.duals), dtype=torch.float64)
        if self.settings.layers == "weighted" and self.steps > AFTER:
            weights[(self.seen[:, 0] > SETTLED[0]) & (self.seen[:, 1] < SETTLED[1])] = RARELY
        return int(torch.multinomial(weights, 1, generator=self.generator))

    def _sync(self) -> None:
        """Lookahead: every k steps slow ← slow + share · (fast − slow), and the fast weights go there."""
        if self.steps % self.settings.sync_every:
            return
        with torch.no_grad():
            for name, p in self.names.items():
                slow = self.slow.setdefault(name, p.detach().clone())
                slow.lerp_(p, self.settings.sync_share)
                p.copy_(slow)

    @torch.no_grad()
    def judge(self, images: Tensor) -> Report:
        """What all gates together do to these pictures; changes nothing, also not what is drawn next."""
        before = self.generator.get_state()
        with evaluation_mode(self.vit.model):
            kl, _, kept, accuracy = self._measure(images, len(self.duals) - 1)
        self.generator.set_state(before)
        return Report(len(self.duals) - 1, float(kl), float(kept), float(self.duals[-1]), float(accuracy))

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(facts, tensors) that `restore` takes."""
        tensors = {"random": self.generator.get_state(), "seen": self.seen}
        tensors |= {f"dual.{i}": p for i, p in enumerate(self.duals)} | {
            f"slow.{name}": value for name, value in self.slow.items()
        }
        for name, p in self.names.items():
            moments = (self.ascent if name.startswith("dual.") else self.optimiser).state.get(p, {})
            tensors |= {f"adam.{key}.{name}": value for key, value in moments.items()}
        return {"steps": self.steps, "settings": asdict(self.settings)}, {
            k: v.detach().clone() for k, v in tensors.items()
        }

    def restore(self, mask: DiffMask, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on where the trainer stood that gave this state."""
        self.steps = int(facts["steps"])
        self.mask.load_state_dict(mask.state_dict())
        self.generator.set_state(tensors["random"].cpu())
        self.seen = tensors["seen"].clone()
        self.slow = {
            name: tensors[f"slow.{name}"].to(p) for name, p in self.names.items() if f"slow.{name}" in tensors
        }
        with torch.no_grad():
            for i, p in enumerate(self.duals):
                p.copy_(tensors[f"dual.{i}"])
        for name, p in self.names.items():
            kept = {key: tensors.get(f"adam.{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            if kept["step"] is not None:
                optimiser = self.ascent if name.startswith("dual.") else self.optimiser
                optimiser.state[p] = {
                    k: v.clone() if k == "step" else v.to(p).clone() for k, v in kept.items() if v is not None
                }


def settings_from(values: Mapping[str, Any]) -> Settings:
    """Settings as a file holds them; values of later versions are left out."""
    return Settings(**{f.name: values[f.name] for f in fields(Settings) if f.name in values})


def widths_of(vit: ViT, images: Tensor) -> tuple[int, ...]:
    """Widths of the model's states, of one forward pass."""
    with torch.no_grad(), evaluation_mode(vit.model):
        run = forward(vit, vit.embed(images), grad=False)
        return tuple(h.shape[-1] for h in states(vit, blank(vit, images), run.hidden))


def restarted(settings: Settings, how: str) -> Settings:
    """Another try after a divergence: the next seed, or also a wider stretch, as the paper's ImageNet run has (15 → 20)."""
    if how not in ("seed", "stretch"):
        raise UnknownName("way to restart", how, ("seed", "stretch"))
    wider = settings.stretch + (5.0 if how == "stretch" else 0.0)
    return replace(settings, seed=settings.seed + 1, stretch=wider)


class Watch:
    """Sees masks that are all on, all off or not finite for `patience` steps on end; "all on" counts only after `grace` steps,
    since masks may begin so."""

    def __init__(self, grace: int, patience: int = 500) -> None:
        self.grace, self.patience, self.kind, self.count = grace, patience, "", 0

    def __call__(self, report: Report, step: int) -> str:
        """What is wrong, in words; empty if nothing is."""
        if not (isfinite(report.kl) and isfinite(report.l0)):
            return "the divergence is not finite"
        low, high = MINIMUM
        kind = "off" if report.l0 < low else "on" if report.l0 > high and step > self.grace else ""
        self.count = self.count + 1 if kind and kind == self.kind else int(bool(kind))
        self.kind = kind
        return f"the masks have been all {kind} for {self.count} steps" if self.count >= self.patience else ""
