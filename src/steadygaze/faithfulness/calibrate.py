"""`calibrate`: choose by true removal what suits one model, from a few unlabeled images.

The family is that of `gaze_outline` (docs/equations.md#gaze-outline, docs/equations.md#calibrate): the limit
of a layer's weight, the first layer, the share of frozen attention, the weight of q, how much patches that
look alike share, and the halves of `gaze_halves`. One setting is changed after the other, from the default
on, and a change is kept only if its mean gain over the images exceeds twice its standard error. Half of the
images choose, the others report.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from steadygaze.data.transforms import Transform
from steadygaze.errors import InputError
from steadygaze.faithfulness.inputs import CachedForward
from steadygaze.faithfulness.removal import NAMES, removal
from steadygaze.loading.checkpoint import weights_hash
from steadygaze.loading.inputs import Images, prepare_inputs
from steadygaze.methods.calibrated import Calibration
from steadygaze.methods.explain import Model, explain_batch
from steadygaze.methods.gaze import LIMIT
from steadygaze.methods.registry import DEFAULT, join_name, parse_method, unavailable
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.vit.adapt import adapt
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.view import ViT

FAST_RATIOS = (0.1, 0.3, 0.5, 0.7, 0.9)
COMPARED = ("gae", "decompx+skipplus", "random")
FEWEST, BATCH, RESAMPLES = 8, 8, 2000
HALVES = "gaze_halves"


class _Search:
    """Settings, and their removal scores on the images that choose."""

    def __init__(self, vit: ViT, images: Tensor, on_progress: OnProgress, total: int) -> None:
        self.vit, self.images, self.on_progress, self.total = vit, images, on_progress, total
        self.scores: dict[str, Float[np.ndarray, " b"]] = {}

    def measure(self, names: Sequence[str]) -> None:
        """Measure the methods that were not measured yet."""
        new = [name for name in dict.fromkeys(names) if name not in self.scores]
        if new:
            self.scores |= removal_scores(self.vit, self.images, new)
            self.on_progress(Progress("calibrate", min(len(self.scores), self.total), self.total, "settings"))

    def better(self, current: str, others: Sequence[str]) -> str:
        """The best of the others if it gains more than twice the standard error, else the current one."""
        self.measure([current, *others])
        best = max(others, key=lambda name: float(self.scores[name].mean()))
        gain = self.scores[best] - self.scores[current]
        return best if gain.mean() > 2 * gain.std(ddof=1) / len(gain) ** 0.5 else current


def calibrate(
    model: Model,
    images: Images,
    *,
    halves: bool = False,
    transform: Transform | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Calibration:
    """Choose the method of the family of the default that suits this model, by removing patches.

    No labels are needed: the predicted class of each image is explained. Every second image chooses, the
    others report. Takes about 110 forward passes for each image that chooses, and 35 for each that reports.

    Args:
        model: As for `explain`; its patches can be removed.
        images: A few dozen images, as for `explain`; at least 8.
        halves: Whether `gaze_halves`, which costs five passes for a map instead of two, may be chosen.
        transform: As for `explain`.
        on_progress: Called with a `Progress` after each group of settings.

    Returns:
        A `Calibration`: print it, save it, and give it to `explain`, `verify` or the page.

    Raises:
        InputError: If there are too few images, or the model has no classes.
        MethodUnavailableError: If the methods do not support the model.

    Examples:
        >>> images = torch.randn(8, 3, 32, 32)
        >>> found = calibrate("embedded", images)
        >>> found.chosen_on, found.method.base.name
        (4, 'gaze_outline')

        ```python
        found = sg.calibrate(model, "photos/")
        found.save("calibration.json")
        sg.explain(model, "cat.jpg", method="calibrated", calibration=found)  # or the file
        ```
    """
    inputs = prepare_inputs(model, images, transform)
    count = len(inputs.images)
    if count < FEWEST:
        raise InputError(
            f"images: expected at least {FEWEST} images, half of them to choose and half to report, better a "
            f"few dozen; got {count}",
            option="images",
        )
    vit = adapt(inputs.model)
    if vit.plan.outputs != "classes" or not vit.plan.removable:
        what = "classes" if vit.plan.outputs != "classes" else "patches that can be removed"
        raise InputError(f"model: expected a classifier with {what}, got a {vit.plan.kind}", option="model")
    depth = len(vit.blocks)
    firsts = sorted({depth // 4, depth // 2, 2 * depth // 3} - {0})
    search = _Search(vit, inputs.images[::2], on_progress, total=11 + len(firsts) + halves)

    def named(**changed: Any) -> str:
        return join_name(DEFAULT, {**chosen, **changed})

    chosen: dict[str, Any] = {}
    for changes in (
        [{"limit": limit} for limit in (3.0, 20.0, 1000.0)],
        [{"first": first} for first in firsts],
        [{"freeze": freeze} for freeze in (0.5, 1.0)],
        [{"keys": keys} for keys in (0.0, 0.5, 2.0)],
        [{"share": share} for share in (0.0, 0.75)],
    ):
        by_name = {named(**change): change for change in changes}
        chosen |= by_name.get(search.better(named(), list(by_name)), {})
    best = named()
    if halves:
        kept = {key: value for key, value in chosen.items() if key in ("limit", "keys", "freeze")}
        best = search.better(best, [join_name(HALVES, {"limit": LIMIT, **kept})])
    reported = inputs.images[1::2]
    others = [name for name in COMPARED if not unavailable(parse_method(name), vit)]
    scores = removal_scores(vit, reported, [*dict.fromkeys([best, DEFAULT, *others])])
    gain = scores[best] - scores[DEFAULT]
    draws = np.random.default_rng(0).choice(gain, (RESAMPLES, len(gain))).mean(1)
    low, high = np.percentile(draws, [2.5, 97.5])
    return Calibration(
        name=best,
        model=str(getattr(inputs.model, "name", type(vit.model).__name__)),
        weights=weights_hash(vit.model),
        chosen_on=len(search.images),
        reported_on=len(reported),
        scores={name: round(float(values.mean()), 3) for name, values in scores.items()},
        gain=(round(float(gain.mean()), 3), round(float(low), 3), round(float(high), 3)),
    )


def removal_scores(vit: ViT, images: Tensor, names: Sequence[str]) -> dict[str, Float[np.ndarray, " b"]]:
    """Mean of the four removal scores of each image for its predicted class, by method."""
    methods = [parse_method(name) for name in names]
    found: list[Tensor] = []
    for some in images.split(BATCH):
        clean = CachedForward.of(vit, some)
        target = clean.logits.argmax(1)
        explained = explain_batch(clean, target, methods, None)
        maps = torch.stack([explained[method.name].scores for method in methods])
        with torch.no_grad(), evaluation_mode(vit.model):
            values = removal(clean, maps, target, FAST_RATIOS)
        found.append(torch.stack([values[name].value for name in NAMES]).mean(0))
    scores = torch.cat(found, 1).cpu().numpy()
    return dict(zip(names, scores, strict=True))
