"""What `verify` and `stress` prepare alike: normalization of images in memory, class names, records.

Images have whole gray levels of 0..255. Undone with another mean and standard deviation than they were
normalized with, they do not. Most wrong guesses leave the pixels within [0, 1], so the range alone would find
few of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.data.folders import SYNSET
from steadygaze.data.preprocess import IMAGENET_MEAN, IMAGENET_STD
from steadygaze.data.stream_spec import StreamSpec
from steadygaze.errors import InputError, UnsupportedModelError
from steadygaze.loading.checkpoint import weights_hash
from steadygaze.loading.loaded import LoadedModel
from steadygaze.questions.vqa import answers_questions
from steadygaze.runs.request import Request
from steadygaze.target import Outputs, task_of_outputs
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.outputs import logits_of, run_model
from steadygaze.vit.view import ViT

IMAGENET = (IMAGENET_MEAN, IMAGENET_STD)
USUAL = (
    IMAGENET,
    ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),  # CLIP
    ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
)
TOLERANCE = 0.02  # of a gray level; float32 comes to about 0.0001
FEWEST_LEVELS = 8  # gray levels that images have at least: fewer may fit any normalization


class Normalization(NamedTuple):
    """Mean and standard deviation by channel; known: given or declared by the model, not assumed."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    known: bool = True


def normalization_of(
    model: nn.Module,
    loaded: LoadedModel | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Normalization:
    """The given mean and std, else the model's own, else ImageNet's."""
    if mean is not None and std is not None:
        return Normalization(tuple(map(float, mean)), tuple(map(float, std)))
    if mean is not None or std is not None:
        raise InputError("mean, std: expected both or none")
    if loaded is not None:
        return Normalization(tuple(loaded.mean), tuple(loaded.std))
    config = getattr(model, "pretrained_cfg", None) or {}
    if "mean" in config and "std" in config:
        return Normalization(tuple(config["mean"]), tuple(config["std"]))
    return Normalization(*IMAGENET, known=False)


Statistics = tuple[Sequence[float], Sequence[float]]  # mean, std


def has_whole_levels(images: Float[Tensor, "b 3 h w"], statistics: Statistics) -> bool:
    """Whether the images, with this normalization undone, have gray levels of 0..255 and nothing between."""
    mean, std = (
        torch.tensor(list(v), dtype=torch.float64, device=images.device).view(1, -1, 1, 1) for v in statistics
    )
    levels = 255 * (images.detach().double() * std + mean)
    nearest = levels.round()
    whole = (levels - nearest).abs().max() < TOLERANCE and nearest.min() >= 0 and nearest.max() <= 255
    return bool(whole) and len(nearest.unique()) >= FEWEST_LEVELS


def check_levels(images: Float[Tensor, "b 3 h w"], statistics: Statistics) -> bool:
    """True: the images bear this normalization out. False: unknown (resized as floating point, half
    precision).

    Raises `InputError` if the images have whole gray levels under another of the usual normalizations.
    """
    if images.dtype not in (torch.float32, torch.float64):
        return False
    if has_whole_levels(images, statistics):
        return True
    for usual in USUAL:
        if has_whole_levels(images, usual):
            expected_mean, expected_std = (list(v) for v in statistics)
            mean, std = (list(v) for v in usual)
            raise InputError(
                f"images: expected normalization with mean {expected_mean} and std {expected_std}, but the "
                f"images have whole gray levels with mean {mean} and std {std}: give mean={mean}, std={std} "
                "if that is how they were made, or normalize them as expected"
            )
    return False


def task_setting(outputs: Outputs) -> dict[str, str]:
    """The task, for run.json; classification is not stated."""
    task = task_of_outputs(outputs)
    return {} if task is None or task == "classification" else {"task": task}


def identity_of(model: nn.Module, loaded: LoadedModel | None) -> dict[str, str]:
    """The model in a row: its name, and the hash of its weights."""
    return loaded.identity if loaded else {"model": type(model).__name__, "weights": weights_hash(model)}


def about_run(request: Request) -> dict[str, Any]:
    """What run.json records besides the settings: it does not change the numbers."""
    shards = {"shards": request.shard.count} if request.shard else {}
    return {"command": request.command, "began": datetime.now(UTC).isoformat(timespec="seconds"), **shards}


def named_by_data(loaded: LoadedModel, place: Path | StreamSpec, classes: int) -> LoadedModel:
    """The model with the folders of the data, in alphabetical order, or the names of labels that a stream is
    given, as names of its classes.

    Only for a model without names, and only if there are as many names as classes; folders named by index
    or synset need no names.
    """
    if loaded.class_names is not None:
        return loaded
    if isinstance(place, StreamSpec):
        given = place.label_names
        return loaded if given is None or len(given) != classes else replace(loaded, class_names=given)
    folder = place
    if not folder.is_dir() or (folder / "index.csv").exists():
        return loaded
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(names) != classes or any(name.isdecimal() or SYNSET.fullmatch(name) for name in names):
        return loaded
    return replace(loaded, class_names=tuple(names))


def check_quantity(vit: ViT) -> None:
    """InputError for a model that gives features, of which nothing can be measured before one is chosen."""
    if vit.plan.outputs == "features":
        raise InputError(
            f"this {vit.plan.kind} has no classifier: it gives features, and maps are measured by a quantity "
            "of them. Give one, such as the similarity to an image: similar_to=FILE on the command line, "
            "sg.ask(model, feature=sg.similar_to(image)) in Python",
            option="model",
        )


def number_of_classes(model: nn.Module, size: tuple[int, int]) -> int:
    """The number of classes of a classifier, or of answers of a model that answers questions."""
    if answers_questions(model):
        return int(model.config.num_labels)  # type: ignore[union-attr, arg-type]
    parameter = next(iter(model.parameters()), torch.zeros(0))
    with torch.no_grad(), evaluation_mode(model):
        images = torch.zeros(1, 3, *size, device=parameter.device, dtype=parameter.dtype)
        output = run_model(model, images)
    logits = logits_of(output)
    if logits.dim() != 2:
        raise UnsupportedModelError(
            f"{type(model).__name__}: expected a classifier that gives logits (B, classes), got "
            f"{tuple(logits.shape)}. For a segmenter, use the stress suite segmentation."
        )
    return logits.shape[1]
