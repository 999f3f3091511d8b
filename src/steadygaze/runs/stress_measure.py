"""One batch under one condition: from pixels to rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.errors import BadInput
from steadygaze.methods import parse
from steadygaze.robustness import attention as looks
from steadygaze.robustness.attacks import fgsm, pgd
from steadygaze.robustness.calibration import confidences
from steadygaze.robustness.neighbours import METRICS, features, knn_predict
from steadygaze.robustness.occlusion import centre_square, random_drop, salient_drop
from steadygaze.robustness.scores import flip_probability, top5_distance
from steadygaze.robustness.segmentation import confusion, label_map, miou, overlaps
from steadygaze.robustness.shifts import top_right
from steadygaze.runs.loop import BROKEN, ZERO, maps_of, short
from steadygaze.runs.rows import Row
from steadygaze.runs.stress_data import Job, Picture, seed_of
from steadygaze.runs.stress_neighbours import Bank
from steadygaze.runs.stress_segmentation import packed
from steadygaze.runs.stress_suite import ATTENTION, KS, Condition, Plan
from steadygaze.vit import ViT
from steadygaze.vit.view import evaluation_mode, logits_of

NO_ANSWER = "broken logits"  # NaN or infinite: the picture counts for nothing there


@dataclass(frozen=True)
class Found:
    """One metric of one setting for each picture of a batch: value (B,), detail (B, D), or B of any length, behind it, flag by place."""

    setting: str
    metric: str
    value: np.ndarray
    detail: np.ndarray | list[np.ndarray] | None = None
    flags: dict[int, str] = field(default_factory=dict)
    note: str = ""


class Judge:
    """The model and how it is asked. mean, std: of the normalisation; batch: pictures that it is shown at once."""

    def __init__(
        self, model: nn.Module, vit: ViT | None, plan: Plan, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self.model, self.vit, self.plan = model, vit, plan
        self.mean, self.std = tuple(map(float, mean)), tuple(map(float, std))
        parameter = next(iter(model.parameters()), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.dtype = torch.float32 if parameter is None else parameter.dtype
        self.banks: dict[int, Bank] = {}
        self._m, self._s = (
            torch.tensor(v, dtype=torch.float32, device=self.device).view(3, 1, 1)
            for v in (self.mean, self.std)
        )

    def normalised(self, images: Tensor) -> Tensor:
        """uint8 (..., 3, H, W) as the model takes it: the same numbers as its own preprocessing."""
        return (images.to(self.device).to(torch.float32).div(255) - self._m).div(self._s).to(self.dtype)

    def logits(self, images: Tensor) -> Float[Tensor, "b classes"]:
        with torch.no_grad(), evaluation_mode(self.model):
            parts = [logits_of(self.model(part)) for part in images.split(self.plan.batch)]
        wide = torch.promote_types(parts[0].dtype, torch.float32)
        return torch.cat(parts).to(wide)

    def rows(self, job: Job, places: Sequence[int], images: Tensor, identity: dict[str, Any],
             labels: Tensor | None = None) -> Iterator[Row]:  # fmt: skip
        """Every row of a job; images uint8 (B, V, 3, H, W), or floating point and normalised, of the pictures at `places`; labels: the
        class of every pixel, for a segmenter."""
        pictures = [job.pictures[place] for place in places]
        x = (images if images.is_floating_point() else self.normalised(images)).to(self.device, self.dtype)
        found = (
            self.measure(job.condition, pictures, x)
            if labels is None
            else [self.segmented(job.condition, x[:, 0], labels)]
        )
        for b, picture in enumerate(pictures):
            for one in found:
                flag = one.flags.get(b)
                hidden = flag in (BROKEN, NO_ANSWER)
                row: Row = {**identity, "setting": one.setting, "metric": one.metric, "image": picture.name}
                row["value"] = None if hidden else short(one.value[b])
                if one.detail is not None and not hidden:
                    row["detail"] = [short(x) for x in one.detail[b]]
                note = one.note or picture.group
                row |= {k: v for k, v in (("note", note), ("flag", flag)) if v}
                row["seed"] = self.plan.seed
                yield row

    def measure(
        self, condition: Condition, pictures: Sequence[Picture], x: Float[Tensor, "b v c h w"]
    ) -> list[Found]:
        """What the condition's rows hold."""
        right = [p.right for p in pictures]
        labels = torch.tensor([r[0] for r in right], device=x.device)
        match condition.kind:
            case "fgsm" | "pgd":
                return self.answers(condition, self.attacked(condition, pictures, x[:, 0], labels), right)
            case "centre_square":
                return self.answers(condition, centre_square(x[:, 0], share=condition.level), right)
            case "drop":
                return self.drop(condition, pictures, x[:, 0], labels)
            case "attention":
                return self.attention(condition, x)
            case "sequence" | "clip":
                return self.flips(condition, x)
            case "synthetic":
                settings = list(dict.fromkeys(setting for setting, _ in condition.rows))
                logits = self.logits(x.flatten(0, 1)).unflatten(0, x.shape[:2])
                return [
                    one
                    for v, setting in enumerate(settings)
                    for one in self.judged(setting, logits[:, v], right)
                ]
            case "neighbours":
                return self.neighbours(condition, pictures, x[:, 0], labels)
            case "shift":
                return self.shifted(condition, pictures, x[:, 0], right)
            case _:
                return self.answers(condition, x[:, 0], right)

    def answers(self, condition: Condition, images: Tensor, right: Sequence[tuple[int, ...]]) -> list[Found]:
        return self.judged(condition.rows[0][0], self.logits(images), right)

    def judged(
        self,
        setting: str,
        logits: Tensor,
        right: Sequence[tuple[int, ...]],
        classes: Sequence[int] | None = None,
    ) -> list[Found]:
        """top1 with [label, predicted], top5, confidence; of `classes` alone if given (then without confidence)."""
        broken = dict.fromkeys((~torch.isfinite(logits).all(1)).nonzero()[:, 0].tolist(), NO_ANSWER)
        logits = logits.nan_to_num(0.0, 0.0, 0.0) if broken else logits
        tail = "" if classes is None else f"_of_{len(classes)}"
        found = []
        for k, name in ((1, "top1"), (5, "top5")):
            if name not in self.plan.answer:
                continue
            hit = top_right(logits, right, k=k, classes=classes).double().cpu().numpy()
            detail = None
            if k == 1 and classes is None:
                detail = np.stack([[r[0] for r in right], logits.argmax(1).cpu().numpy()], 1)
            found.append(Found(setting, name + tail, hit, detail, broken))
        if classes is None:
            sure = confidences(logits).to(torch.float32).cpu().numpy()
            found.append(Found(setting, "confidence", sure, None, broken))
        return found

    def segmented(self, condition: Condition, images: Tensor, labels: Tensor) -> Found:
        """miou of each picture, with its counts."""
        said = torch.cat([label_map(self.model, part) for part in images.split(self.plan.batch)])
        broken = dict.fromkeys((said == -1).all((1, 2)).nonzero()[:, 0].tolist(), NO_ANSWER)
        counts = confusion(said.clamp_min(0), labels.to(said.device), self.plan.classes)
        values = miou(counts).double().cpu().numpy()
        return Found(*condition.rows[0], values, [packed(one) for one in overlaps(counts)], broken)

    def attacked(
        self, condition: Condition, pictures: Sequence[Picture], x: Tensor, labels: Tensor
    ) -> Tensor:
        how: dict[str, Any] = {"epsilon": condition.level, "mean": self.mean, "std": self.std}
        if condition.kind == "fgsm":
            return fgsm(self.model, x, labels, **how)
        return pgd(
            self.model,
            x,
            labels,
            steps=self.plan.options.pgd_steps,
            generator=self.draws("pgd", pictures),
            **how,
        )

    def draws(self, what: str, pictures: Sequence[Picture]) -> list[torch.Generator]:
        """A generator for each picture, by its name: the same draw in any order, batch and process."""
        return [torch.Generator().manual_seed(seed_of(self.plan.seed, f"{what} {p.name}")) for p in pictures]

    def drop(
        self, condition: Condition, pictures: Sequence[Picture], x: Tensor, labels: Tensor
    ) -> list[Found]:
        assert self.vit is not None
        flags: dict[int, str] = {}
        shares = self.plan.options.shares
        if condition.name == "random_drop":
            draws = self.draws("drop", pictures)
            curve, note = random_drop(self.vit, x, labels, generator=draws, shares=shares), ""
        else:
            predicted = self.logits(x).argmax(1)
            maps, broken = maps_of(self.vit, x, predicted, [parse(self.plan.options.salient)], None)[0]
            flags = dict.fromkeys(
                (maps.flatten(1) == 0).all(1).nonzero()[:, 0].tolist(), ZERO
            ) | dict.fromkeys(broken, BROKEN)
            curve, note = (
                salient_drop(self.vit, x, labels, maps, shares=shares),
                f"by {self.plan.options.salient}",
            )
        note = ", ".join(filter(None, (note, curve.means if curve.means != "removal" else "")))
        found = []
        for metric, points in (("drop_right", curve.right), ("drop_probability", curve.probability)):
            detail = points.float().cpu().numpy()
            found.append(Found(condition.name, metric, detail.mean(1), detail, flags, note))
        return found

    def attention(self, condition: Condition, x: Float[Tensor, "b v c h w"]) -> list[Found]:
        """By layer, mean over heads; the last of the pictures is measured, and compared with the first."""
        assert self.vit is not None
        setting, streams = condition.rows[0][0], list(x.unbind(1))
        far = looks.distances(self.vit, streams[0])
        by_layer: dict[str, list[Tensor]] = {metric: [] for _, metric in condition.rows}

        def see(layer: int, *maps: Tensor) -> None:
            a = maps[-1]
            top = min(looks.TOP, a.shape[-1])
            measures = (
                looks.entropy(a),
                looks.overfocus(a, top),
                looks.gini(a),
                looks.peak(a),
                looks.distance(a, far),
                looks.diversity(a),
            )
            for name, value in zip(ATTENTION, measures, strict=True):
                by_layer[f"attention_{name}"].append(value if value.dim() == 1 else value.mean(1))
            if len(maps) > 1:
                by_layer["attention_stability"].append(looks.stability(maps[0], a).mean(1))

        looks.walk(self.vit, streams, see)
        found = []
        for metric, values in by_layer.items():
            detail = torch.stack(values, 1).float().cpu().numpy()
            found.append(Found(setting, metric, detail.mean(1), detail))
        return found

    def flips(self, condition: Condition, x: Float[Tensor, "b v c h w"]) -> list[Found]:
        logits = self.logits(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        broken = dict.fromkeys(
            (~torch.isfinite(logits).flatten(1).all(1)).nonzero()[:, 0].tolist(), NO_ANSWER
        )
        given = logits.double().nan_to_num(0.0).cpu().numpy()
        setting, found = condition.rows[0][0], []
        for _, metric in condition.rows:
            if metric == "flips":
                values = [flip_probability(one[None].argmax(2), condition.name) for one in given]
            else:
                values = [top5_distance(one[None], condition.name) for one in given]
            found.append(Found(setting, metric, np.array(values), None, broken))
        return found

    def remember(self, job: Job, places: Sequence[int], images: Tensor) -> None:
        """Take pictures of a bank in; the neighbours of others are looked for among them."""
        pictures = [job.pictures[place] for place in places]
        found = features(self.model, self.normalised(images[:, 0]))
        self.banks.setdefault(pictures[0].shift, Bank()).add(
            found, torch.tensor([p.right[0] for p in pictures], device=found.device)
        )

    def neighbours(
        self, condition: Condition, pictures: Sequence[Picture], x: Tensor, labels: Tensor
    ) -> list[Found]:
        if pictures[0].shift not in self.banks:
            raise BadInput(f"neighbours: no picture of the bank of {condition.name} could be read")
        known, classes = self.banks[pictures[0].shift].whole
        asked = features(self.model, x)
        broken = dict.fromkeys((~torch.isfinite(asked).all(1)).nonzero()[:, 0].tolist(), NO_ANSWER)
        asked = asked.nan_to_num(0.0, 0.0, 0.0) if broken else asked
        ks = KS[: len(condition.rows) // len(METRICS)]
        found = []
        for (setting, name), (metric, k) in zip(condition.rows, product(METRICS, ks), strict=True):
            right = knn_predict(known, classes, asked, k=k, metric=metric) == labels
            found.append(
                Found(
                    setting,
                    name,
                    right.double().cpu().numpy(),
                    None,
                    broken,
                    f"bank of {len(known)} pictures",
                )
            )
        return found

    def shifted(
        self, condition: Condition, pictures: Sequence[Picture], x: Tensor, right: Sequence[tuple[int, ...]]
    ) -> list[Found]:
        """Of all classes, and of the official ones where the protocol restricts them."""
        classes = self.plan.shifts[pictures[0].shift].classes
        setting, logits = condition.rows[0][0], self.logits(x)
        return self.judged(setting, logits, right) + (
            [] if classes is None else self.judged(setting, logits, right, classes)
        )
