"""Recipes: everything that defines a training run, as pydantic models read from TOML.

The recipes that ship with the package are in `recipes/`; each states its command, its cost and the measured
result. A recipe may come from a stranger: sizes are bounded before anything is built from them, and errors
name the full key and the nearest known one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from steadygaze import modules
from steadygaze.data.stream_spec import StreamSpec, is_stream
from steadygaze.data.tar_shards import runs_command
from steadygaze.errors import InputError, SteadygazeError, UnknownNameError
from steadygaze.loading.checkpoint import MAX_CLASSES
from steadygaze.training.losses import LOSSES, LossOptions
from steadygaze.training.recipe_files import parse_toml, recipe_text

MAX_DEPTH = 8  # tables and lists inside one another
MAX_LENGTH = 10_000  # of a text, list or table
MAX_INTEGER = 2**63 - 1
MAX_SIDE = 4096  # of images, in pixels
MAX_EPOCHS = 1_000_000
DEFAULT_LOSS = "cross_entropy"  # of a recipe that lists none
MODULES = {"tap": modules.TAP, "cb": modules.CB}


# -- bounds and errors -----------------------------------------------------------------------------


def check_plain(value: Any, key: str = "", depth: int = 0) -> None:
    """Raise `InputError` for text with null characters, numbers that are not finite, and large values.

    Types are left to the recipe's tables.
    """
    expected = ""
    if depth > MAX_DEPTH:
        expected = f"at most {MAX_DEPTH} nested levels"
    elif isinstance(value, (str, Mapping, list, tuple)) and len(value) > MAX_LENGTH:
        expected = f"at most {MAX_LENGTH:,} characters or entries"
    elif isinstance(value, str) and "\0" in value:
        expected = "text without null characters"
    elif isinstance(value, int) and abs(value) > MAX_INTEGER:
        expected = "an integer of at most 64 bits"
    elif isinstance(value, float) and not math.isfinite(value):
        expected = f"a finite number, got {value!r}"
    elif isinstance(value, Mapping) and not all(isinstance(name, str) for name in value):
        expected = "names as keys"
    if expected:
        raise InputError(f"{key[:80] or 'recipe'}: expected {expected}")
    if isinstance(value, Mapping):
        for name, entry in value.items():
            check_plain(name, key, depth)
            check_plain(entry, f"{key}.{name}" if key else name, depth + 1)
    elif isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            check_plain(entry, f"{key}[{number}]", depth + 1)


EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
BOUNDS = {
    ("ge", 0): "a number of at least 0",
    ("gt", 0): "a number above 0",
    ("le", 1): "a share between 0 and 1",
    ("lt", 1): "a share between 0 and 1",
}


def explain_validation_error(
    error: ValidationError, model: type[BaseModel], prefix: str = ""
) -> SteadygazeError:
    """The first problem that pydantic found, as an error of this package.

    Args:
        model: The class that was validated.
        prefix: Full name of its table in the recipe.
    """
    first = error.errors()[0]
    location, kind, value, context = first["loc"], first["type"], first["input"], first.get("ctx", {})
    key = full_key(location, prefix)
    if isinstance(context.get("error"), SteadygazeError):  # raised by a check of ours
        return context["error"]
    if kind == "extra_forbidden":
        table: Any = model
        for part in location[:-1]:
            table = table.model_fields[str(part)].annotation
        return UnknownNameError(
            "key", key, [full_key((*location[:-1], name), prefix) for name in table.model_fields]
        )
    if kind == "missing":
        return InputError(f"{key}: missing from the recipe")
    if kind == "literal_error":  # context: "'a', 'b' or 'c'"
        choices = context["expected"].replace(" or ", ", ").split(", ")
        return UnknownNameError(key, str(value), [name.strip("' ") for name in choices])
    expected = EXPECTED.get(kind) or next((BOUNDS[b] for b in context.items() if b in BOUNDS), "")
    if not expected and "le" in context:
        expected = f"a number of at most {context['le']:,}"
    return InputError(f"{key}: {f'expected {expected}' if expected else first['msg']}, got {value!r}")


def full_key(location: Sequence[str | int], prefix: str = "") -> str:
    """The name of a key as `--set` takes it.

    Examples:
        >>> full_key(("data", "std", 1))
        'data.std[1]'
    """
    key = prefix
    for part in location:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            key += f".{part}" if key else part
    return key


# -- types of values -------------------------------------------------------------------------------


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str))


def _plain_options(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if not _is_plain(value):
            kind = type(value).__name__
            raise InputError(
                f"{name}: expected a number, a string, true, false or a list of them, got {kind}"
            )
    return options


def _range(values: list[float]) -> list[float]:
    if len(values) != 2 or not 0 < values[0] <= values[1]:
        raise PydanticCustomError("expected", "expected [least, most], both above 0")
    return values


def _span(values: list[int]) -> list[int]:
    if len(values) != 2 or not 0 <= values[0] < values[1]:
        raise PydanticCustomError("expected", "expected [first, stop], for example [0, 3]")
    return values


def _color(values: list[float]) -> list[float]:
    if len(values) != 3:
        raise PydanticCustomError("expected", "expected three numbers, of red, green and blue")
    return values


PositiveInt = Annotated[int, Field(gt=0)]
CountFromZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Pair = Annotated[list[float], Field(min_length=2, max_length=2)]
Range = Annotated[list[float], AfterValidator(_range)]
Span = Annotated[list[int], AfterValidator(_span)]
Side = Annotated[int, Field(gt=0, le=MAX_SIDE)]
Options = Annotated[dict[str, Any], AfterValidator(_plain_options)]
Color = Annotated[list[float], AfterValidator(_color)]
PositiveColor = Annotated[list[Positive], AfterValidator(_color)]


# -- tables ----------------------------------------------------------------------------------------


class Table(BaseModel):
    """A table of a recipe. Unknown keys, and values of another type or out of range, are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Model(Table):
    """The model, by a name as for `load_model`; timm models may be untrained, and take arguments."""

    name: str
    checkpoint: str | None = None  # file with initial weights
    pretrained: bool = False  # start from the pretrained weights of the hub
    num_classes: Annotated[int, Field(gt=0, le=MAX_CLASSES)] | None = None
    new_head: bool = False  # a new classifier, whatever the weights have
    decoder: Literal["linear", "segformer"] | None = (
        None  # of task segmentation; None: the weights', or linear
    )
    arguments: Options = Field(default_factory=dict)


class Modules(Table):
    """Modules that `sg.modules.insert` puts into the model: options of TAP and CB, None to leave one out."""

    tap: Options | None = None
    cb: Options | None = None

    @model_validator(mode="after")
    def _known_options(self) -> Self:
        for name, options in self.model_dump().items():
            if options is not None:
                module_spec(name, options)
        return self


class Data(Table):
    """Images: FOLDER/<class>/, index.csv or local shards (wds:...), as for `verify`.

    Relative paths start at the working directory.
    """

    train: str = ""
    test: str | None = None
    masks: str | None = None  # a folder as for `verify`, or "tokencut": made without labels
    test_masks: str | None = None
    cut_by: str | None = None  # the model whose keys TokenCut uses; None: the initial weights of this one
    cut_checkpoint: str | None = None  # weights of `cut_by`
    cut_centered: bool = False  # subtract each image's mean key: needed for models trained with labels
    cut_edges: Literal["patches", "bilateral"] = "patches"  # bilateral: refined by the bilateral solver
    only: list[str] | None = None  # these classes: indices, synsets or names
    test_only: list[str] | None = None
    classes: Span | None = None  # [first, stop) of the classes in the folder, in order
    test_classes: Span | None = None
    images: Span | None = None  # [first, stop) of the images of each class
    test_images: Span | None = None
    size: Side | None = None  # this and the next four: None uses the model's own
    mean: Color | None = None
    std: PositiveColor | None = None
    interpolation: Literal["nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] | None = None
    crop: Annotated[float, Field(gt=0, le=1)] | None = None  # share of the image kept by the center crop
    workers: Annotated[int, Field(ge=0, le=1024)] = 0  # worker processes that load images


class Augment(Table):
    """Augmentation.

    Attributes:
        crop: "resized" (random area and aspect ratio), "resize" (to `resize` x `resize`, then a random
            crop), "pad" (by `pad` pixels, then a random crop), "none" (as in testing).
        interpolation: For the crop and RandAugment; "random" draws bilinear or bicubic for each image;
            None: the model's for the crop, random for RandAugment.
        repeats: Repeated augmentation (Hoffer et al. 2020): an epoch has this many augmented copies of each
            of 1 / `repeats` of the images.
    """

    crop: Literal["resized", "resize", "pad", "none"] = "resized"
    scale: Range = Field(default_factory=lambda: [0.08, 1.0])
    ratio: Range = Field(default_factory=lambda: [0.75, 4 / 3])
    resize: Side = 256
    pad: Annotated[int, Field(ge=0, le=MAX_SIDE)] = 4
    interpolation: Literal["random", "nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] | None = (
        None
    )
    flip: Share = 0.5
    color_jitter: Annotated[float, Field(ge=0, le=100)] = 0.0
    rand_augment: str | None = None  # in timm's notation, such as rand-m9-mstd0.5-inc1
    erase: Share = 0.0
    mixup: Annotated[float, Field(ge=0, le=1000)] = 0.0  # alpha; 0: off
    cutmix: Annotated[float, Field(ge=0, le=1000)] = 0.0
    mix_probability: Share = 1.0
    switch: Share = 0.5
    repeats: PositiveInt = 1


class Optimizer(Table):
    """Optimizer of timm.optim; `lr` is for `lr_batch` images per step and scaled in proportion, if given.

    Attributes:
        module_factor: Learning rate of inserted modules (TAP, CB) as a multiple of `lr`. A gate that starts
            at 0 moves by about one learning rate per step of Adam, too little in a short fine-tuning.
    """

    name: str = "adamw"
    lr: Positive = 1e-3
    lr_batch: CountFromZero | None = None
    weight_decay: NonNegative = 0.05
    momentum: float = 0.9
    betas: Pair | None = None
    eps: float | None = None
    decay_all: bool = False  # weight decay also of biases and norms
    layer_decay: float | None = None
    module_factor: Positive = 1.0
    clip: Positive | None = None  # largest gradient norm


class Schedule(Table):
    """Learning rate schedule of timm; step: lr · rate^⌊epoch / every⌋; none: constant. Updated every step.

    Attributes:
        cooldown_epochs: The last epochs, at `min_lr`; cosine and linear reach it before them.
    """

    name: Literal["cosine", "linear", "step", "none"] = "cosine"
    warmup_epochs: Annotated[float, Field(ge=0, le=MAX_EPOCHS)] = 0.0
    warmup_lr: NonNegative = 1e-6
    min_lr: NonNegative = 1e-6
    cooldown_epochs: CountFromZero = 0
    every: PositiveInt = 2
    rate: Annotated[float, Field(gt=0, le=1)] = 0.85


class Ema(Table):
    """Exponential moving average of the weights, which is tested and written in their place."""

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.0  # 0: off
    warmup: bool = False


class Measure(Table):
    """How `steadygaze sweep` measures the trained model: a run of `steadygaze stress`.

    Attributes:
        suites: Names of the suites; by default corruptions, or segmentation for task = "segmentation".
        data: As for `stress`; by default data.test of the recipe.
        masks: As for `stress`; without `data`, data.test_masks of the recipe.
        options: Options of the suites, such as { severities = [3], corruptions = "all15" }.
        show: Numbers in the table, as SETTING/METRIC of the run's table.csv, such as clean/top1; None: the
            summary numbers of a report.
    """

    suites: list[str] | None = None
    data: str | None = None
    masks: str | None = None
    limit: PositiveInt | None = None  # images
    seed: CountFromZero = 0  # of the corruptions and the like, the same for every model
    batch: PositiveInt = 16
    options: Options = Field(default_factory=dict)
    show: list[str] | None = None


class Document(Table):
    """A table that is not part of another one: what is wrong with it is an error of this package."""

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain_validation_error(error, type(self)) from None


class Recipe(Document):
    """A training run.

    Attributes:
        train: "all" weights, or the "head" alone: the last linear layer, on features of each image's center
            view that are computed once, without random augmentation (a linear probe).
        measure: How a sweep measures the result; it does not change the weights.
        losses: Options by name of a registered loss (`sg.list_losses()`); the total is their sum. Without
            any: cross-entropy.
        batch: Images per step, over all processes and accumulated micro-batches.
        task: "segmentation" wraps the model in `sg.modules.segmenter`, with the classes of the masks, and
            trains by cross-entropy over pixels; pixels without a class (border) are ignored.
        keep: Which weights are written: of the last epoch, or of the one with the lowest test loss.

    Examples:
        >>> from steadygaze.training import read_recipe
        >>> recipe = read_recipe("cifar10-tap", {"data.train": "cifar10/train", "seed": 1})
        >>> recipe.seed, recipe.batch
        (1, 128)
    """

    model: Model
    data: Data = Data()
    modules: Modules = Modules()
    losses: dict[str, SerializeAsAny[LossOptions]] = Field(default_factory=dict)
    augment: Augment = Augment()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    ema: Ema = Ema()
    measure: Measure = Measure()
    train: Literal["all", "head"] = "all"
    task: Literal["classification", "segmentation"] = "classification"
    epochs: Annotated[int, Field(gt=0, le=MAX_EPOCHS)] = 10
    batch: PositiveInt = 128
    accumulate: PositiveInt = 1
    precision: Literal["float32", "fp16", "bf16"] = "float32"
    seed: CountFromZero = 0
    keep: Literal["last", "best"] = "last"
    log_every: PositiveInt = 20  # steps
    save_every: PositiveInt = 200  # steps
    test_every: CountFromZero = 1  # epochs; 0: only after the last
    tensorboard: bool = True
    about: str = ""
    command: str = ""
    cost: str = ""
    result: str = "not measured yet"

    @field_validator("losses", mode="before")
    @classmethod
    def _registered(cls, losses: Any) -> Any:
        """Validate each table by the options of its loss."""
        if not isinstance(losses, Mapping):
            return losses
        tables = dict(losses)
        for name, table in losses.items():
            options = LOSSES[name].Options
            try:
                tables[name] = table if isinstance(table, LossOptions) else options.model_validate(table)
            except ValidationError as error:
                raise explain_validation_error(error, options, f"losses.{name}") from None
        return tables

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.batch % self.accumulate:
            raise InputError(
                f"batch = {self.batch} cannot be divided into accumulate = {self.accumulate} equal parts: "
                "use a multiple"
            )
        if self.schedule.cooldown_epochs >= self.epochs:
            raise InputError(
                f"schedule.cooldown_epochs: expected fewer than epochs = {self.epochs}, "
                f"got {self.schedule.cooldown_epochs}"
            )
        if self.task == "segmentation":
            _check_segmentation(self)
        elif self.model.decoder is not None:
            raise InputError("model.decoder: it is of task = 'segmentation'. Leave it out, or set the task.")
        if self.task != "segmentation" and self.losses_with_masks:
            _check_masks(self)
        if self.train == "head":
            _check_probe(self)
        return self

    @property
    def is_measured(self) -> bool:
        """Whether `result` states a measurement of this project."""
        return not self.result.startswith("not measured")

    @property
    def active_losses(self) -> dict[str, LossOptions]:
        """The losses that are trained: cross-entropy if none is listed."""
        return dict(self.losses) or {DEFAULT_LOSS: LOSSES[DEFAULT_LOSS].Options()}

    @property
    def losses_with_masks(self) -> list[str]:
        """Names of the losses that need object masks."""
        return [name for name in self.losses if LOSSES[name].needs_masks]

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that determines the resulting weights."""
        settings = self.model_dump()
        records = ("log_every", "save_every", "tensorboard", "about", "command", "cost", "result", "measure")
        for key in records:
            del settings[key]
        del settings["data"]["workers"]
        return settings


def _check_segmentation(recipe: Recipe) -> None:
    able = [name for name, loss in LOSSES.items() if "segmentation" in loss.tasks]
    for name in recipe.losses:
        if name not in able:
            raise InputError(
                f"losses.{name}: it is defined for classifiers. Segmentation supports {', '.join(able)}."
            )
    for key in ("only", "test_only", "classes", "test_classes", "cut_by"):
        if getattr(recipe.data, key) is not None:
            raise InputError(
                f"data.{key}: images for segmentation have no class of their own. "
                "Select by data.images and data.test_images."
            )
    if "tokencut" in (recipe.data.masks, recipe.data.test_masks):
        raise InputError("data.masks: expected a folder of ground truth for segmentation, got 'tokencut'")
    if recipe.model.new_head:
        raise InputError("model.new_head: a segmenter always has a new head. Leave it out.")
    _check_augmentation("task segmentation", recipe.augment)


def _check_probe(recipe: Recipe) -> None:
    if recipe.task != "classification":
        raise InputError(
            f"train: 'head' is for classification, got task = {recipe.task!r}. Use train = 'all'."
        )
    able = [name for name, loss in LOSSES.items() if loss.on_features]
    for name in recipe.losses:
        if name not in able:
            raise InputError(
                f"losses.{name}: it needs the whole model, and train = 'head' trains its last layer on "
                f"cached features. Use {', '.join(able)}, or train = 'all'."
            )
    for name, options in recipe.modules.model_dump().items():
        if options is not None:
            raise InputError(f"modules.{name}: train = 'head' does not train it. Leave it out.")


def _check_masks(recipe: Recipe) -> None:
    names = ", ".join(recipe.losses_with_masks)
    if recipe.data.masks is None and recipe.data.train:  # shipped recipes leave both to the user
        raise InputError(f"losses.{names}: expected masks. Give data.masks, a folder or 'tokencut'.")
    if recipe.data.cut_checkpoint and not recipe.data.cut_by:
        raise InputError("data.cut_checkpoint: expected data.cut_by too, the model these weights belong to")
    _check_augmentation(f"losses.{names}", recipe.augment)


def _check_augmentation(who: str, augment: Augment) -> None:
    used = [key for key in ("mixup", "cutmix", "erase", "rand_augment") if getattr(augment, key)]
    if used:
        keys = ", ".join(f"augment.{key}" for key in used)
        raise InputError(f"{who}: masks cannot follow {keys}. Leave these out.")


# -- reading ---------------------------------------------------------------------------------------


def read_recipe(
    source: str | Path, changes: Mapping[str, Any] | None = None, *, allow_pipe: bool = False
) -> Recipe:
    """The recipe in a TOML file, or a shipped one by name.

    Args:
        source: Path of the file, or the name of a shipped recipe.
        changes: Values by full key, such as {"data.train": "FOLDER", "seed": 1}; None removes a key.
        allow_pipe: Accept data in the file that runs a shell command (`wds:pipe:...`). In `changes` it is
            always accepted.

    Returns:
        The recipe, checked.

    Raises:
        InputError: A value is not valid; the message names the key.
        UnknownNameError: A key or name is not known; the message suggests the nearest one.

    Examples:
        >>> read_recipe("cifar10-tap", {"data.train": "cifar10/train", "epochs": 2}).epochs
        2
    """
    content = parse_toml(recipe_text(source), source)
    if not allow_pipe:
        check_plain(content)
        refuse_commands(content, changes or {})
    return make_recipe(content, changes)


def refuse_commands(content: Any, given: Collection[str] = (), key: str = "") -> None:
    """`InputError` if a text in a file names data that is the output of a shell command.

    Args:
        given: Full keys whose values do not come from the file.
        key: Of the content.
    """
    if key in given:
        return
    if isinstance(content, Mapping):
        for name, value in content.items():
            refuse_commands(value, given, f"{key}.{name}" if key else name)
    elif isinstance(content, list):
        for value in content:
            refuse_commands(value, given, key)
    elif is_stream(content) and runs_command(StreamSpec.parse(content)):
        raise InputError(
            f"{key}: {content} would run a shell command, which a file may not. If you trust the file, add "
            f"--allow-pipe (in Python, allow_pipe=True); or give the value by --set {key}=..."
        )


def make_recipe(content: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of nested tables, with changes as for `read_recipe`."""
    if not isinstance(content, Mapping):
        raise InputError(f"recipe: expected tables by name, got {type(content).__name__}")
    check_plain(content)
    check_plain(changes or {})
    recipe = copy.deepcopy(dict(content))
    for key, value in (changes or {}).items():
        *parents, last = key.split(".")
        table = recipe
        for parent in parents:
            table = table.setdefault(parent, {})
            if not isinstance(table, dict):
                raise InputError(f"{key}: {parent} is not a table")
        if value is None:
            table.pop(last, None)
        else:
            table[last] = value
    return Recipe(**recipe)


def module_spec(name: str, options: Mapping[str, Any]) -> Any:
    """TAP or CB with the options of a recipe."""
    option_names = [f.name for f in fields(MODULES[name])]
    for key in options:
        if key not in option_names:
            raise UnknownNameError(f"option of modules.{name}", key, option_names)
    try:
        return MODULES[name](
            **{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        )
    except TypeError as error:
        raise InputError(f"modules.{name}: {error}") from error
