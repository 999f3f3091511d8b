"""Settings of ViT-Shapley training (docs/equations.md#vit-shapley).

| option    | values       | meaning                                                                         |
| --------- | ------------ | ------------------------------------------------------------------------------- |
| surrogate | model, train | v(S) is the prediction of the model itself, or of a copy fine-tuned on images   |
|           |              | with removed patches, as in the paper                                           |
| trunk     | model, train | the explainer reads hidden states of the model itself, or of a copy that is     |
|           |              | fine-tuned with it, as in the paper                                             |

With surrogate="model" the explanation is of the model that is used and measured; the paper fine-tunes a copy
since a model may never have seen images with removed patches. With trunk="model" a step costs no backward
pass through the model, and the map shares its forward pass with other methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from steadygaze.errors import BadInput, UnknownName

CHOICES = {"surrogate": ("model", "train"), "trunk": ("model", "train")}
POSITIVE = ("batch", "pairs", "warmup", "surrogate_steps")
RATES = ("rate", "trunk_rate", "surrogate_rate")


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on apart from the model and the images.

    batch: images per step; pairs: of subsets (S and its complement) for each image of a step
    rate, trunk_rate, surrogate_rate: learning rates of explainer, trunk and surrogate
    warmup: steps until they are reached; then they fall as 1/√step
    surrogate_steps: steps of the surrogate, before those of the explainer; with surrogate="train" only
    """

    seed: int = 0
    batch: int = 32
    pairs: int = 2
    rate: float = 1e-3
    trunk_rate: float = 1e-4
    surrogate_rate: float = 1e-4
    warmup: int = 200
    surrogate: str = "model"
    trunk: str = "model"
    surrogate_steps: int = 1000

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise UnknownName(name, str(getattr(self, name)), choices)
        for name in POSITIVE:
            if not getattr(self, name) >= 1:
                raise BadInput(f"{name}: expected a number of at least 1, got {getattr(self, name)}")
        for name in RATES:
            if not 0 < getattr(self, name) < float("inf"):
                raise BadInput(f"{name}: expected a rate above 0, got {getattr(self, name)}")

    @classmethod
    def of(cls, **options: Any) -> Settings:
        """The options that are not None; the others have their defaults."""
        return cls(**{key: value for key, value in options.items() if value is not None})

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Settings:
        """Settings from a file; values that this version does not have are ignored."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    @property
    def first_steps(self) -> int:
        """Steps before those of the explainer."""
        return self.surrogate_steps if self.surrogate == "train" else 0

    def schedule(self, step: int) -> float:
        """Factor of the learning rates in a step of a stage, counted from 0.

        Independent of the number of steps, so that a run can be continued with more of them.
        """
        return min((step + 1) / self.warmup, (self.warmup / (step + 1)) ** 0.5)
