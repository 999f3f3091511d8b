"""Recipes: everything that defines a training run, as dataclasses. `reading` makes them of TOML."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from steadygaze.errors import BadInput


@dataclass(frozen=True)
class Model:
    """name: as for `load_model`; of timm's also untrained, with `arguments` of timm.create_model (img_size, embed_dim, depth, ...)."""

    name: str
    checkpoint: str | None = None  # a file of weights to begin with
    pretrained: bool = False  # begin with the weights of the hub
    num_classes: int | None = None
    new_head: bool = False  # the classifier begins anew, whatever the weights have
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Modules:
    """What `sg.modules.insert` puts into the model: the options of TAP and CB; None: not put in."""

    tap: dict[str, Any] | None = None
    cb: dict[str, Any] | None = None


@dataclass(frozen=True)
class Data:
    """Pictures: FOLDER/<class>/ or index.csv, as for `verify`. Relative paths are taken from where the command is given."""

    train: str = ""
    test: str | None = None
    masks: str | None = None  # a folder as for `verify`; "tokencut": found without labels by the model itself
    test_masks: str | None = None
    cut_by: str | None = (
        None  # the model whose keys TokenCut takes, and its weights; None: the one that is trained, as it begins
    )
    cut_checkpoint: str | None = None
    cut_centred: bool = (
        False  # without each picture's mean key: needed for models that were trained with labels
    )
    cut_edges: Literal["patches", "bilateral"] = (
        "patches"  # bilateral: drawn to the picture's edges by the authors' solver
    )
    only: list[str] | None = None  # these classes: indices, synsets or names
    test_only: list[str] | None = None
    classes: list[int] | None = (
        None  # of the classes that are there, in order, those from the first number up to, not with, the second
    )
    test_classes: list[int] | None = None
    pictures: list[int] | None = None  # of each class those from the first number up to, not with, the second
    test_pictures: list[int] | None = None
    size: int | None = None  # the next five: None is the model's own
    mean: list[float] | None = None
    std: list[float] | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] | None = None
    crop: float | None = None  # share of the picture that a test crop keeps
    workers: int = 0


@dataclass(frozen=True)
class Augment:
    """crop: "resized" (random area and ratio), "resize" (to `resize` squared, then a random crop), "pad" (by `pad`, then a random
    crop), "none" (as in testing)."""

    crop: Literal["resized", "resize", "pad", "none"] = "resized"
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    ratio: list[float] = field(default_factory=lambda: [0.75, 4 / 3])
    resize: int = 256
    pad: int = 4
    flip: float = 0.5
    color_jitter: float = 0.0
    rand_augment: str | None = None  # timm's words, such as rand-m9-mstd0.5-inc1
    erase: float = 0.0
    mixup: float = 0.0  # alpha; 0: not used
    cutmix: float = 0.0
    mix_probability: float = 1.0
    switch: float = 0.5


@dataclass(frozen=True)
class Optimiser:
    """name and the rest: of timm.optim. lr is that of `lr_batch` pictures a step, scaled in proportion; None: not scaled."""

    name: str = "adamw"
    lr: float = 1e-3
    lr_batch: int | None = None
    weight_decay: float = 0.05
    momentum: float = 0.9
    betas: list[float] | None = None
    eps: float | None = None
    decay_all: bool = False  # also biases and norms
    layer_decay: float | None = None
    clip: float | None = None  # of the gradient's norm


@dataclass(frozen=True)
class Schedule:
    """name: timm's (cosine, linear, step, ...); step: lr · rate^⌊epoch / every⌋; none: constant. Each step has its own rate, except of
    `step`."""

    name: Literal["cosine", "linear", "step", "none"] = "cosine"
    warmup_epochs: float = 0.0
    warmup_lr: float = 1e-6
    min_lr: float = 1e-6
    every: int = 2
    rate: float = 0.85


@dataclass(frozen=True)
class Ema:
    decay: float = 0.0  # 0: no average of the weights
    warmup: bool = False


@dataclass(frozen=True)
class CrossEntropy:
    weight: float = 1.0
    smoothing: float = 0.0


@dataclass(frozen=True)
class Relevance:
    """weight · (relevance · (background · L_bg + foreground · L_fg) + confidence · L_cls); see `losses.relevance`."""

    weight: float = 1.0
    relevance: float = 0.8
    confidence: float = 0.2
    background: float = 2.0
    foreground: float = 0.3
    method: str = "gae"
    explained: Literal["label", "predicted"] = "label"
    confident_of: Literal["predicted", "label"] = "predicted"
    second_order: bool = False
    temperature: float = 1.0
    reverse: Literal["complement", "reference"] = "reference"


@dataclass(frozen=True)
class PictureGradient:
    """GradMask or RRR: weight · (background · L_bg + classification · L_cls); preset: the published weights for a model."""

    weight: float = 1.0
    background: float = 1.0
    classification: float = 1.0
    form: Literal["formula", "code"] = "formula"
    preset: str | None = None
    reverse: Literal["complement", "reference"] = "reference"


@dataclass(frozen=True)
class Adl:
    weight: float = 1.0
    tau: float = 2.0
    form: Literal["paper", "code", "per_head"] = "paper"


@dataclass(frozen=True)
class Distillation:
    """weight · L_distil; the cross-entropy with the labels has its own weight. A distillation token is taught if the model has one."""

    weight: float = 0.5
    teacher: str = ""
    checkpoint: str | None = None
    form: Literal["soft", "hard"] = "hard"
    temperature: float = 3.0


@dataclass(frozen=True)
class Losses:
    """The total is the sum of what is listed; nothing listed: cross-entropy."""

    cross_entropy: CrossEntropy | None = None
    relevance: Relevance | None = None
    gradmask: PictureGradient | None = None
    rrr: PictureGradient | None = None
    adl: Adl | None = None
    distillation: Distillation | None = None

    @property
    def need_masks(self) -> list[str]:
        return [name for name in ("relevance", "gradmask", "rrr") if getattr(self, name) is not None]


@dataclass(frozen=True)
class Recipe:
    """A training run. batch: pictures a step, over all processes and accumulated pieces together.

    task: "segmentation" puts `sg.modules.segmenter` around the model, with the classes that the masks of the data tell apart, and
    trains by cross-entropy over pixels; pixels whose class is not known (border) count for nothing.
    """

    model: Model
    data: Data = field(default_factory=Data)
    modules: Modules = field(default_factory=Modules)
    losses: Losses = field(default_factory=Losses)
    augment: Augment = field(default_factory=Augment)
    optimiser: Optimiser = field(default_factory=Optimiser)
    schedule: Schedule = field(default_factory=Schedule)
    ema: Ema = field(default_factory=Ema)
    task: Literal["classification", "segmentation"] = "classification"
    epochs: int = 10
    batch: int = 128
    accumulate: int = 1
    precision: Literal["float32", "fp16", "bf16"] = "float32"
    seed: int = 0
    keep: Literal["last", "best"] = "last"  # best: of all epochs, by the loss on the test pictures
    log_every: int = 20
    save_every: int = 200
    test_every: int = 1  # epochs; 0: only after the last
    tensorboard: bool = True
    about: str = ""
    command: str = ""
    cost: str = ""
    result: str = "not measured yet"

    def __post_init__(self) -> None:
        check(self)

    @property
    def settings(self) -> dict[str, Any]:
        """What defines the weights that come out."""
        told = asdict(self)
        for key in ("log_every", "save_every", "tensorboard", "about", "command", "cost", "result"):
            del told[key]
        del told["data"]["workers"]
        return told


def check(recipe: Recipe) -> None:
    """Values that no type can hold back."""
    losses = recipe.losses
    for name, loss in ((f.name, getattr(losses, f.name)) for f in fields(losses)):
        for f in fields(loss) if loss is not None else ():
            value = getattr(loss, f.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and not value >= 0:
                raise BadInput(f"losses.{name}.{f.name}: expected a weight of at least 0, got {value}")
    above: dict[str, Any] = {"epochs": recipe.epochs, "batch": recipe.batch, "accumulate": recipe.accumulate}
    above |= {
        "log_every": recipe.log_every,
        "save_every": recipe.save_every,
        "optimiser.lr": recipe.optimiser.lr,
    }
    above |= {
        "schedule.every": recipe.schedule.every,
        "schedule.rate": recipe.schedule.rate,
        "augment.resize": recipe.augment.resize,
    }
    given = {
        "optimiser.clip": recipe.optimiser.clip,
        "data.size": recipe.data.size,
        "data.crop": recipe.data.crop,
    }
    given |= {"model.num_classes": recipe.model.num_classes}
    given |= {f"data.std[{i}]": value for i, value in enumerate(recipe.data.std or ())}
    above |= {key: value for key, value in given.items() if value is not None}
    for key, value in above.items():
        if not value > 0:
            raise BadInput(f"{key}: expected a number above 0, got {value}")
    least: dict[str, Any] = {
        "optimiser.weight_decay": recipe.optimiser.weight_decay,
        "data.workers": recipe.data.workers,
    }
    least |= {"seed": recipe.seed, "test_every": recipe.test_every, "augment.mixup": recipe.augment.mixup}
    least |= {
        "augment.cutmix": recipe.augment.cutmix,
        "schedule.warmup_epochs": recipe.schedule.warmup_epochs,
    }
    least |= {"augment.pad": recipe.augment.pad, "augment.color_jitter": recipe.augment.color_jitter}
    for key, value in least.items():
        if not value >= 0:
            raise BadInput(f"{key}: expected a number of at least 0, got {value}")
    shares = {
        "augment.flip": recipe.augment.flip,
        "augment.erase": recipe.augment.erase,
        "ema.decay": recipe.ema.decay,
    }
    shares |= {
        "augment.mix_probability": recipe.augment.mix_probability,
        "augment.switch": recipe.augment.switch,
    }
    shares |= {} if recipe.data.crop is None else {"data.crop": recipe.data.crop}
    if losses.cross_entropy is not None:
        shares["losses.cross_entropy.smoothing"] = losses.cross_entropy.smoothing
    for key, value in shares.items():
        if not 0 <= value < 1 + key.startswith(("augment", "data")) * 1e-9:
            raise BadInput(f"{key}: expected a share between 0 and 1, got {value}")
    pairs = {
        "optimiser.betas": recipe.optimiser.betas,
        "augment.scale": recipe.augment.scale,
        "augment.ratio": recipe.augment.ratio,
    }
    for key, pair in pairs.items():
        if pair is not None and len(pair) != 2:
            raise BadInput(f"{key}: expected two numbers, got {pair}")
        if pair is not None and key.startswith("augment") and not 0 < pair[0] <= pair[1]:
            raise BadInput(f"{key}: expected [least, most], both above 0, got {pair}")
    for key, colours in (("data.mean", recipe.data.mean), ("data.std", recipe.data.std)):
        if colours is not None and len(colours) != 3:
            raise BadInput(f"{key}: expected three numbers, of red, green and blue, got {colours}")
    if recipe.batch % recipe.accumulate:
        raise BadInput(
            f"batch {recipe.batch} cannot be done in accumulate = {recipe.accumulate} equal pieces: give a multiple"
        )
    if recipe.task == "segmentation":
        _check_segmentation(recipe)
    elif losses.need_masks:
        _check_masked(recipe)
    if losses.distillation is not None and not losses.distillation.teacher:
        raise BadInput("losses.distillation.teacher: expected the name of a model that teaches, got none")


def _check_segmentation(recipe: Recipe) -> None:
    for name in ("relevance", "gradmask", "rrr", "distillation"):
        if getattr(recipe.losses, name) is not None:
            raise BadInput(
                f"losses.{name}: it is of a classifier's answer. A segmentation takes cross_entropy and adl."
            )
    for key in ("only", "test_only", "classes", "test_classes", "cut_by"):
        if getattr(recipe.data, key) is not None:
            raise BadInput(
                f"data.{key}: a picture of a segmentation has no class of its own. Choose by data.pictures, data.test_pictures."
            )
    if "tokencut" in (recipe.data.masks, recipe.data.test_masks):
        raise BadInput(
            "data.masks: expected a folder for a segmentation, whose masks are the truth; got 'tokencut'"
        )
    if recipe.model.new_head:
        raise BadInput("model.new_head: the head of a segmenter is new anyway. Leave it out.")
    _check_moved("task segmentation", recipe.augment)


def _check_masked(recipe: Recipe) -> None:
    who = ", ".join(recipe.losses.need_masks)
    if recipe.data.masks is None and recipe.data.train:  # a shipped recipe leaves both to the user
        raise BadInput(f"losses.{who}: expected masks. Give data.masks, a folder or 'tokencut'.")
    if recipe.data.cut_checkpoint and not recipe.data.cut_by:
        raise BadInput(
            "data.cut_checkpoint: expected data.cut_by, too: the name of the model that these weights belong to"
        )
    _check_moved(f"losses.{who}", recipe.augment)


def _check_moved(who: str, augment: Augment) -> None:
    moved = [name for name in ("mixup", "cutmix", "erase") if getattr(augment, name)]
    moved += ["rand_augment"] if augment.rand_augment else []
    if moved:
        raise BadInput(
            f"{who}: a mask does not go along with augment.{', augment.'.join(moved)}. Leave these out."
        )
