"""The normalization of images that are given in memory: given, known of the model, or ImageNet's.

Images have whole gray levels of 0..255. Undone with another mean and standard deviation than they were
normalized with, they do not. Most wrong guesses leave the pixels within [0, 1], so the range alone would find
few of them.

What both `verify` and `stress` are given: the model, the data, where the rows go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from steadygaze.data.folders import SYNSET
from steadygaze.data.images import names_hash
from steadygaze.data.memory import Data, is_folder
from steadygaze.data.preprocess import IMAGENET_MEAN, IMAGENET_STD
from steadygaze.data.stream_spec import StreamSpec, parse_data
from steadygaze.errors import InputError, UnsupportedModelError
from steadygaze.loading.checkpoint import weights_hash
from steadygaze.loading.load import load_model
from steadygaze.loading.loaded import LoadedModel
from steadygaze.loading.options import read_class_names
from steadygaze.questions.text import TextClasses, as_classifier
from steadygaze.questions.vqa import answers_questions
from steadygaze.runs.shards import WHOLE, Shard, World
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
                "images have "
                f"whole gray levels with mean {mean} and std {std}: give mean={mean}, std={std} if that is "
                "how they "
                "were made, or normalize them as expected"
            )
    return False


TOO_LARGE = 2**63  # generators of torch take seeds of 64 bits
Model = str | nn.Module | ViT | LoadedModel


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `verify` and `stress` are both given.

    model: a name for `load_model`, the result of `load_model`, or a module or view if the data is in memory
    data: a folder of images, a CSV file that lists them, a stream (`wds:...`, `hf:...`), or batches in memory
    out: the folder for the rows; None keeps them in memory
    model_options: further arguments of `load_model`: class_names, image_size, mean, std, model_kwargs
    command: the command line, for the record
    words: texts or class names for a model that compares images with text
    shard: the part of the run that is computed
    """

    model: Model
    data: Data | None
    out: Path | None = None
    checkpoint: Path | None = None
    masks: Path | None = None
    limit: int | None = None
    seed: int = 0
    batch_size: int = 16
    num_workers: int | None = None
    num_classes: int | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    task: str | None = None
    trust_remote_code: bool = False
    words: TextClasses | None = None
    device: str = "auto"
    command: str = ""
    shard: Shard = WHOLE

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", parse_data(self.data))
        if not isinstance(self.model, str) and self.words is None:
            as_classifier(self.model, None)  # raises an error if its classes are not known
        check_counts(
            limit=self.limit, batch_size=self.batch_size, num_workers=self.num_workers, seed=self.seed
        )

    @property
    def in_memory(self) -> bool:
        """Whether the data is batches rather than a folder."""
        return self.data is not None and not is_folder(self.data)

    @property
    def place(self) -> Path | StreamSpec:
        """Where the images are: a folder, a CSV file that lists them, or a stream; an error if it is none."""
        if isinstance(self.data, StreamSpec):
            return self.data
        if self.data is None:
            raise InputError("data: expected a folder of images, got none")
        if not isinstance(self.data, (str, Path)):
            raise InputError(f"data: expected a folder of images, got {type(self.data).__name__}")
        path = Path(self.data)
        if path.name == "index.csv" and path.is_file():
            return path.absolute().parent  # the file stands for its folder: the same run either way
        if not path.is_dir() and not (path.suffix == ".csv" and path.is_file()):
            kind = "a file" if path.exists() else "no such folder"
            raise InputError(f"data: expected a folder of images, got {path}: {kind}")
        return path

    def refuse_masks(self, place: StreamSpec) -> None:
        """Masks of a stream are part of it."""
        if self.masks is not None:
            raise InputError(
                f"masks: expected none beside {place}, got {self.masks}. Masks of a stream are members or a "
                "column of it: add ?mask=NAME to the data.",
                option="masks",
            )

    def load(self, world: World) -> LoadedModel:
        """The model, on its device: the requested one, this process's own, or a GPU if there is one."""
        if isinstance(self.model, LoadedModel):
            return as_classifier(self.model, self.words)
        if not isinstance(self.model, str):
            raise InputError(
                "data: reading a folder needs a model whose preprocessing is known, got "
                f"{type(self.model).__name__}. "
                "Load it with sg.load_model(name_or_module, ...)."
            )
        device: Any = self.device
        if device == "auto":
            device = world.device or ("cuda" if torch.cuda.is_available() else "cpu")
        loaded = load_model(
            self.model,
            self.checkpoint,
            num_classes=self.num_classes,
            device=device,
            **self.model_options,
            task=self.task,
            trust_remote_code=self.trust_remote_code,
        )
        return as_classifier(loaded, self.words)

    def settings(self, loaded: LoadedModel) -> dict[str, Any]:
        """What defines the numbers of any run over files, for run.json."""
        place = None if self.data is None else self.place
        return {
            "checkpoint": None if self.checkpoint is None else self.checkpoint.name,
            "preprocessing": loaded.preprocess.describe(),
            "data": place.resolve().name if isinstance(place, Path) else "",
            "limit": self.limit,
            **({"model_options": self.described_options} if self.model_options else {}),
        }

    @property
    def described_options(self) -> dict[str, str]:
        """The options of the model as text, class names by their content."""
        given = dict(self.model_options)
        if "class_names" in given:
            given["class_names"] = names_hash(read_class_names(given["class_names"]))
        return {name: str(value) for name, value in sorted(given.items())}

    def origin(self, loaded: LoadedModel) -> dict[str, Any]:
        """Where the model and the data are, for the record in run.json."""
        paths = {"data": self.data, "masks": self.masks, "checkpoint": self.checkpoint}
        return {
            "model": self.model if isinstance(self.model, str) else loaded.name,
            "num_classes": self.num_classes,
            **{name: str(value) for name, value in self.model_options.items()},
            **{name: None if path is None else str(path) for name, path in paths.items()},
        }


def task_setting(outputs: Outputs) -> dict[str, str]:
    """The task, for run.json; classification is not stated."""
    task = task_of_outputs(outputs)
    return {} if task is None or task == "classification" else {"task": task}


def check_counts(**counts: int | None) -> None:
    """Whole numbers: num_workers and seed of 0 or more, the others of 1 or more; None is accepted."""
    for name, value in counts.items():
        least = 0 if name in ("num_workers", "seed") else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise InputError(f"{name}: expected a whole number of {least} or more, got {value!r}")
        if value is not None and value >= TOO_LARGE:
            raise InputError(f"{name}: expected a whole number below 2**63, got {value}")


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
