"""`verify`: is the explanation true? Scores methods on data, in memory or into a folder of rows that can be gone on
with."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze import __version__
from steadygaze.data.masks import BORDER, OBJECT
from steadygaze.errors import BadInput
from steadygaze.faithfulness.metric import Batch
from steadygaze.heatmap import versions
from steadygaze.loading.checkpoint import weights_hash
from steadygaze.loading.load import Loaded
from steadygaze.method_registry import DEFAULT, Method
from steadygaze.runs.asked import digest, fingerprint
from steadygaze.runs.loop import Chunk, Told, run
from steadygaze.runs.plan import DEFAULT_METRICS, Plan, make_plan
from steadygaze.runs.rows import Row, Rows
from steadygaze.runs.store import Done, Store, prepare
from steadygaze.vit import ViT, adapt
from steadygaze.vit.view import evaluation_mode

Data = Iterable[tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]]
Normal = tuple[Tensor, Tensor]  # mean, std
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def verify(
    model: nn.Module | ViT | Loaded,
    data: Data,
    methods: Sequence[str | Method] = (DEFAULT,),
    metrics: Sequence[str] = DEFAULT_METRICS,
    target: int | str | Sequence[int] | Tensor | None = None,
    score: str | Sequence[str] | None = None,
    seed: int = 0,
    *,
    ratios: Sequence[float] | None = None,
    fill: str = "zero",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    out: str | Path | None = None,
    told: Told = lambda finished, computed: None,
) -> Rows:
    """How true are these methods' maps, on this model and data?

    data: batches (images, labels) or (images, labels, masks), tensors or arrays: images (B, 3, H, W) as the model wants them,
        labels (B,), also a list, masks (B, H, W), 255 object, 128 border, 0 background, or booleans. Pictures are called
        "0", "1", ... in order.
    methods: names or `sg.method(...)`; "all" is every method the model serves, "quick" all of them but the searches
    metrics: names of `steadygaze.faithfulness.metric.METRICS`
    target: the class that is explained and scored: None is the label, "predicted", one class, or one for each picture
    score: which quantity is explained, or several of them; None is each method's own
    ratios: shares of the patches that are kept or removed; None is 0.1, 0.2, ..., 0.9
    fill: what positive_perturbation and negative_perturbation paint: "zero" (black), "mean", "blur" or "noise"
    mean, std: the normalisation of the images, for measures that paint pixels; known of timm's models
    out: a folder; rows are then written there as they come, and the same call with the same data goes on where it stopped
    """
    origin = model if isinstance(model, Loaded) else None
    vit = adapt(origin.model if origin else model)
    scores = [score] if isinstance(score, str) else score
    wanted = [methods] if isinstance(methods, (str, Method)) else methods
    plan = make_plan(
        vit, wanted, [metrics] if isinstance(metrics, str) else metrics, scores, ratios, seed, fill=fill
    )
    where = next(vit.model.parameters())
    normal = _normalisation(vit, origin, mean, std, plan)
    named = origin.name if origin else type(vit.model).__name__
    identity = origin.identity if origin else {"model": named, "weights": weights_hash(vit.model)}
    pick = picker(vit, target)
    given = _batches(data, plan)
    first = next(given)
    more = {"data": "in memory", "pictures_hash": fingerprint(first), "target": _target_in_words(target)}
    settings = settings_of(plan, identity, {**more, **_painting(plan, normal)})
    chunks = _chunks(chain([first], given), where, normal)
    if out is None:
        gathered: list[Row] = []
        run(vit, chunks, plan, pick, identity, gathered.extend, Done(None), told)
        return Rows([{"settings": settings, "about": about("")}], gathered)
    folder = Path(out)
    prepare(folder, settings, about(""))
    with Store(folder) as store:
        run(vit, chunks, plan, pick, identity, store.append, Done(folder), told)
    return Rows.read(folder)


def settings_of(plan: Plan, identity: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Everything that defines the numbers of a run."""
    return {
        **identity,
        **more,
        "columns": [[column.method.name, column.score] for column in plan.columns],
        "metrics": list(plan.metrics),
        "ratios": list(plan.ratios),
        "seed": plan.seed,
        **({} if plan.fill == "zero" else {"fill": plan.fill}),
        "versions": {"steadygaze": __version__, **versions()},
    }


def about(command: str) -> dict[str, Any]:
    """What does not change the numbers, but is good to know."""
    return {"command": command, "began": datetime.now(UTC).isoformat(timespec="seconds")}


def picker(vit: ViT, target: int | str | Sequence[int] | Tensor | None) -> Callable[[Batch], Tensor]:
    """From a batch to the classes that are explained, (B,)."""
    if target is None:
        return lambda batch: batch.labels
    if isinstance(target, str):
        if target not in ("label", "predicted"):
            raise BadInput(
                f"target: expected label, predicted, a class, or one class for each picture, got {target!r}"
            )
        return lambda batch: batch.labels if target == "label" else _predicted(vit, batch.images)
    classes = torch.as_tensor(target, dtype=torch.long)
    if classes.dim() == 0:
        return lambda batch: torch.full_like(batch.labels, int(classes))
    if classes.dim() != 1:
        raise BadInput(
            f"target: expected one class for each picture of the data, got shape {tuple(classes.shape)}"
        )

    def of(batch: Batch) -> Tensor:
        places = [int(name) for name in batch.names]
        if places[-1] >= len(classes):
            raise BadInput(
                f"target: expected one class for each picture, got {len(classes)} for more than {places[-1]} pictures"
            )
        return classes[places].to(batch.labels.device)

    return of


def _predicted(vit: ViT, images: Tensor) -> Tensor:
    with torch.no_grad(), evaluation_mode(vit.model):
        return vit(images).argmax(-1)


def _target_in_words(target: Any) -> str:
    if target is None or isinstance(target, str):
        return target or "label"
    classes = torch.as_tensor(target).tolist()
    return f"given, {digest(map(str, classes))}" if isinstance(classes, list) else str(classes)


def _painting(plan: Plan, normal: Normal) -> dict[str, Any]:
    """The normalisation, of a run whose numbers depend on it."""
    return {"mean": normal[0].tolist(), "std": normal[1].tolist()} if _black(plan) else {}


def _black(plan: Plan) -> list[str]:
    """The measures that paint black, so that the normalisation must be known."""
    return [
        name
        for name in ("positive_perturbation", "negative_perturbation")
        if name in plan.metrics and plan.fill == "zero"
    ]


def _normalisation(vit: ViT, origin: Loaded | None, mean: Any, std: Any, plan: Plan) -> Normal:
    if (mean is None) != (std is None):
        raise BadInput("mean, std: expected both or none")
    if mean is None:
        known = getattr(vit.model, "pretrained_cfg", None) or {}
        if origin is not None:
            mean, std = origin.mean, origin.std
        elif "mean" in known and "std" in known:
            mean, std = known["mean"], known["std"]
        else:
            mean, std = IMAGENET
            if painting := _black(plan):
                warnings.warn(
                    f"{', '.join(painting)}: pixels are painted black before the normalisation, and the model does not say what it is: "
                    "taking ImageNet's mean and std. Give mean= and std= if they are others.",
                    stacklevel=3,
                )
    return torch.as_tensor(mean, dtype=torch.float32), torch.as_tensor(std, dtype=torch.float32)


Given = tuple[Tensor, Tensor, Tensor | None]  # images, labels, masks


def _batches(data: Any, plan: Plan) -> Iterator[Given]:
    """The batches of `data`, checked; there is at least one."""
    if isinstance(data, (str, Path)):
        raise BadInput(
            f"data: expected batches (images, labels), got {str(data)!r}. For a folder: steadygaze verify --data {data}"
        )
    number = -1
    for number, given in enumerate(data):
        images, labels, *rest = _tensors(given, number)
        if images.dim() != 4:
            raise BadInput(
                f"images: expected (B, 3, H, W), got {tuple(images.shape)} as batch {number}. A torch DataLoader makes batches."
            )
        if labels.is_floating_point() or labels.dim() != 1 or len(labels) != len(images):
            raise BadInput(
                f"labels: expected {len(images)} integers, got {labels.dtype} of shape {tuple(labels.shape)} in batch {number}"
            )
        masks = _as_masks(rest[0], images, number) if rest else None
        if masks is None and plan.needs_masks:
            raise BadInput(
                f"{', '.join(plan.needs_masks)}: expected masks, but batch {number} has none. Give (images, labels, masks)."
            )
        yield images, labels.long(), masks
    if number < 0:
        raise BadInput("data: expected at least one batch, got none (an iterator that was used up?)")


def _tensors(given: Any, number: int) -> list[Tensor]:
    kinds = [type(x).__name__ for x in given] if isinstance(given, (tuple, list)) else type(given).__name__
    wrong = f"data: expected batches (images, labels) or (images, labels, masks) of tensors, got {kinds} as batch {number}."
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        raise BadInput(f"{wrong} One batch alone goes into a list: [(images, labels)].")
    try:
        return [x if isinstance(x, Tensor) else torch.as_tensor(x) for x in given]
    except (TypeError, ValueError, RuntimeError) as error:
        raise BadInput(wrong) from error


def _chunks(given: Iterable[Given], where: Tensor, normal: Normal) -> Iterator[Chunk]:
    before = 0
    mean, std = (x.to(where.device) for x in normal)
    for images, labels, masks in given:
        images = images.to(where) if images.is_floating_point() else images  # integers get their own message
        names = tuple(str(before + i) for i in range(len(images)))
        before += len(images)
        batch = Batch(
            images,
            labels.to(where.device),
            None if masks is None else masks.to(where.device),
            mean,
            std,
            names,
        )
        yield Chunk(names, lambda batch=batch: (batch, {}))  # type: ignore[misc]


def _as_masks(masks: Tensor, images: Tensor, number: int) -> Tensor:
    if masks.dim() == 4 and masks.shape[1] == 1:
        masks = masks[:, 0]
    if tuple(masks.shape) != (len(images), *images.shape[-2:]):
        raise BadInput(
            f"masks: expected {(len(images), *images.shape[-2:])}, the size of the images, got {tuple(masks.shape)} in batch {number}"
        )
    values = set(masks.unique().tolist())
    if values <= {0, 1}:
        return masks.to(torch.uint8) * OBJECT
    if not values <= {0, BORDER, OBJECT}:
        raise BadInput(
            f"masks: expected 255 (object), 128 (border) and 0, or 1 and 0; got {sorted(values)[:8]} in batch {number}"
        )
    return masks.to(torch.uint8)
