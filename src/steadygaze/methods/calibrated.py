"""`calibrated`: the method that was chosen for one model by `sg.calibrate`, read from its file.

Which layers and which parts of a gradient describe the effect of removing a patch differs between models
(docs/evidence/default.md). `calibrate` measures some settings on images of the user and writes the best one
to a small JSON file, with the hash of the model's weights. The file is used only where it is named. What is
tried: docs/equations.md#calibrate.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import InputError
from steadygaze.files import write_atomic
from steadygaze.loading.checkpoint import weights_hash
from steadygaze.methods.aggregate import aggregate
from steadygaze.methods.explain import plan_passes
from steadygaze.methods.learned import changed_at
from steadygaze.methods.registry import Method, ModelMethod, parse_method, register_method, rules_of
from steadygaze.trace.query import Query
from steadygaze.untrusted import parse_json, read_record, read_text
from steadygaze.vit.view import ViT

_HASHES: WeakKeyDictionary[nn.Module, tuple[int, str]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Calibration:
    """The method that suits one model, with what was measured. Prints itself.

    Attributes:
        name: The method with its options, such as "gaze_outline:first=6,limit=3.0".
        model: Name of the model.
        weights: First 16 hex digits of the SHA-256 of its weights.
        chosen_on: Number of images that the method was chosen on.
        reported_on: Number of other images that the scores below are of.
        scores: Mean of the four removal scores by method, on those other images, points; higher is better.
        gain: The method minus the default, on those other images: mean, and the ends of its 95 % interval.

    Examples:
        >>> Calibration("gaze_outline:first=2", model="mine").method.option("first")
        2
    """

    name: str
    model: str = ""
    weights: str = ""
    chosen_on: int = 0
    reported_on: int = 0
    scores: dict[str, float] = field(default_factory=dict)
    gain: tuple[float, float, float] = (0.0, 0.0, 0.0)

    @property
    def method(self) -> Method:
        """The method itself, accepted wherever a method is; `calibrated` also checks the model."""
        return parse_method(self.name)

    def save(self, path: str | Path) -> None:
        """Write the calibration to a JSON file."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"calibration": asdict(self)}, indent=1).encode())

    @classmethod
    def read(cls, path: str | Path) -> Calibration:
        """Read a file that `save` wrote.

        Raises:
            InputError: If it is not such a file.
        """
        try:
            content = parse_json(read_text(path, "calibration").encode())
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path} cannot be read as JSON ({error})", option="calibration") from error
        if not isinstance(content, dict) or "calibration" not in content:
            raise InputError(
                f"{path}: expected a file of `steadygaze calibrate`, got other JSON", option="calibration"
            )
        calibration = read_record(cls, content["calibration"], str(path))
        if calibration.method.base.name == "calibrated":
            raise InputError(f"{path}: a calibration cannot name another one", option="calibration")
        return calibration

    def misfit(self, model: nn.Module) -> str:
        """Why the calibration is not for this model; empty if it is."""
        found = _hash(model)
        if found == self.weights:
            return ""
        return (
            f"the calibration is for {self.model or 'a model'} with weights {self.weights[:12]}; this model "
            f"has weights {found[:12]}. Calibrate it: sg.calibrate(model, images), or `steadygaze calibrate`."
        )

    def __str__(self) -> str:
        mean, low, high = self.gain
        lines = [
            f"{self.model}: {self.name}, chosen on {self.chosen_on} images",
            f"removal score on {self.reported_on} other images, points:",
            *(f"  {name:<24} {score:5.1f}" for name, score in _best_first(self.scores)),
            f"against the default: {mean:+.1f} [{low:+.1f}, {high:+.1f}]",
        ]
        return "\n".join(lines)


def _best_first(scores: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(scores.items(), key=lambda entry: -entry[1])


def _hash(model: nn.Module) -> str:
    """The hash of the weights, computed again only after they changed."""
    version = sum(parameter._version for parameter in model.parameters())
    known = _HASHES.get(model)
    if known is None or known[0] != version:
        known = _HASHES[model] = version, weights_hash(model)
    return known[1]


@lru_cache(maxsize=8)
def _read(path: str, changed: int) -> Calibration:
    return Calibration.read(path)


def _given(file: Calibration | str | Path) -> Calibration:
    return file if isinstance(file, Calibration) else _read(str(file), changed_at(file))


def _misfit(vit: ViT, file: Any = None) -> str:
    if file is None:
        return (
            "it needs the calibration of the model. Make one with sg.calibrate(model, images) or `steadygaze "
            "calibrate`, and give calibration=FILE."
        )
    return _given(file).misfit(vit.model)


@register_method("calibrated", "model", family="learned", score="log_odds", cost=5.0, unsupported=_misfit)
def calibrated(query: Query, *, file: Any = None) -> Float[Tensor, "b h w"]:
    """The method that `steadygaze calibrate` chose for this model, with its options."""
    chosen = _given(file).method
    if isinstance(chosen.base, ModelMethod):
        rules, options = rules_of(chosen), chosen.function_options
        own_pass = chosen.base.recorded and chosen.base.recorded(query.vit, query.tokens, rules, **options)
        scores: Tensor = chosen.base.function(replace(query, rules=rules, run=own_pass), **options)
        return scores
    ((rules, one_pass),) = plan_passes([chosen], len(query.vit.blocks)).items()
    run = one_pass.run(query.vit, query.tokens, rules)
    classes = query.target if isinstance(query.target, Tensor) else None
    return aggregate(run.trace(query.value(run.logits), classes), chosen)
