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
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from steadygaze.errors import BadInput, UnknownName
from steadygaze.methods.learnt.diffmask import HardConcrete, Shape

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
                raise UnknownName(name, str(getattr(self, name)), choices)
        if self.definition not in (1, 2):
            raise BadInput(f"definition: expected 1 or 2, got {self.definition!r}")
        if self.target is not None and self.kl != "class":
            raise BadInput(f"target={self.target} is for masks of one class: set kl='class' too")
        for name in ("gate_rate", "baseline_rate", "dual_rate"):
            if not getattr(self, name) >= 0:
                raise BadInput(f"{name}: expected a rate of at least 0, got {getattr(self, name)}")
        if not self.left < 0 < self.right or not self.temperature > 0:
            raise BadInput(
                "expected left < 0 < right and temperature > 0, "
                f"got {self.left}, {self.right}, {self.temperature}"
            )

    @classmethod
    def of(cls, *presets: str, **options: Any) -> Settings:
        """Presets in order ("cifar10", "imagenet", "reference"), then the options that are not None."""
        values: dict[str, Any] = {}
        for name in presets:
            if name not in PRESETS:
                raise UnknownName("preset", name, PRESETS)
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
            raise UnknownName("way to restart", how, ("seed", "stretch"))
        wider = self.stretch + (5.0 if how == "stretch" else 0.0)
        return replace(self, seed=self.seed + 1, stretch=wider)

    @property
    def grace_steps(self) -> int:
        """Steps after which masks that are all on have had time to close: Adam moves a gate by about its rate
        per step."""
        closing = 0.4 / max(self.gate_rate, 1e-9) if self.begin == "open" else 0.0
        return round(max(2 * self.warmup + closing, 1000))
