"""What a recipe may hold, whoever wrote it: names, and numbers, text and lists of limited size.

Errors about a recipe, from pydantic's: by the full name of the key, with the nearest known one.

Recipes: everything that defines a training run, as pydantic models. `recipe_files` reads them from
TOML.

Recipes from TOML files and from the package.

The recipes that ship with the package are in `recipes/`; each states its command, its cost and the measured
result.

TAP and CB of a recipe, inserted into its model.

A module whose `start` the recipe leaves open begins as the identity in trained weights, which it then does
not harm, and as in its paper in new weights.
"""

from __future__ import annotations

import copy
import logging
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.resources import files
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
from pydantic_core import ErrorDetails, PydanticCustomError
from torch import nn

from steadygaze.errors import InputError, SteadygazeError, UnknownNameError
from steadygaze.loading.checkpoint import MAX_CLASSES
from steadygaze.modules.base import Start
from steadygaze.training.losses import LOSSES, LossOptions

MAX_DEPTH = 8  # tables and lists inside one another
MAX_TEXT = 10_000  # characters
MAX_LENGTH = 10_000  # of a list or table
MAX_INTEGER = 2**63 - 1


def check_plain(value: Any, key: str = "", depth: int = 0) -> None:
    """`InputError` for text with null characters, numbers that are not finite, and values that are too large.

    Types are left to the recipe's tables.
    """
    name = key or "recipe"
    if depth > MAX_DEPTH:
        raise InputError(f"{name[:80]}: nested too deeply, expected at most {MAX_DEPTH} levels")
    if isinstance(value, str):
        if "\0" in value or len(value) > MAX_TEXT:
            reason = "a null character" if "\0" in value else f"{len(value):,} characters"
            raise InputError(f"{name}: expected text of at most {MAX_TEXT:,} characters, got {reason}")
    elif isinstance(value, bool):
        return
    elif isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise InputError(
                f"{name}: expected an integer of at most 64 bits, got one of {value.bit_length()}"
            )
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise InputError(f"{name}: expected a finite number, got {value!r}")
    elif isinstance(value, (Mapping, list, tuple)):
        _check_entries(value, key, depth)


def _check_entries(value: Mapping[Any, Any] | list[Any] | tuple[Any, ...], key: str, depth: int) -> None:
    if len(value) > MAX_LENGTH:
        raise InputError(f"{key or 'recipe'}: expected at most {MAX_LENGTH:,} entries, got {len(value):,}")
    if not isinstance(value, Mapping):
        for number, entry in enumerate(value):
            check_plain(entry, f"{key}[{number}]", depth + 1)
        return
    for name, entry in value.items():
        if not isinstance(name, str):
            raise InputError(f"{key or 'recipe'}: expected names as keys, got {name!r}")
        check_plain(name, key, depth)
        check_plain(entry, f"{key}.{name}" if key else name, depth + 1)


def plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options, if their values are numbers, strings, booleans, or lists of them; else `InputError`."""
    for name, value in options.items():
        rest = [value]
        while rest:
            entry = rest.pop()
            if isinstance(entry, (list, tuple)):
                rest.extend(entry)
            elif not isinstance(entry, (bool, int, float, str)):
                raise InputError(
                    f"{name}: expected a number, a string, true, false or a list of them, "
                    f"got {type(entry).__name__}"
                )
    return options


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

    model: the class that was validated; prefix: full name of its table in the recipe
    """
    first = error.errors()[0]
    key = full_key(first["loc"], prefix)
    kind, value = first["type"], first["input"]
    context = first.get("ctx", {})
    if isinstance(context.get("error"), SteadygazeError):  # raised by a check of ours
        return context["error"]
    if kind == "extra_forbidden":
        parents = first["loc"][:-1]
        known = [full_key((*parents, name), prefix) for name in _fields_at(model, parents)]
        return UnknownNameError("key", key, known)
    if kind == "missing":
        return InputError(f"{key}: missing from the recipe")
    if kind == "literal_error":
        return UnknownNameError(key, str(value), _literals(context["expected"]))
    return InputError(f"{key}: {_expectation(first, kind)}, got {value!r}")


def full_key(location: Sequence[str | int], prefix: str = "") -> str:
    """The name of a key as `--set` takes it.

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


def _expectation(details: ErrorDetails, kind: str) -> str:
    if kind == "expected":  # raised by a validator of ours
        return details["msg"]
    if kind in EXPECTED:
        return f"expected {EXPECTED[kind]}"
    for bound in details.get("ctx", {}).items():
        if bound in BOUNDS:
            return f"expected {BOUNDS[bound]}"
        if bound[0] == "le":
            return f"expected a number of at most {bound[1]:,}"
    return details["msg"]


def _fields_at(model: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    """Keys of the table at a location."""
    table: Any = model
    for part in location:
        table = table.model_fields[str(part)].annotation
    return list(table.model_fields)


def _literals(expected: str) -> list[str]:
    """'a', 'b' or 'c' -> [a, b, c]."""
    return [part.strip("' ") for part in expected.replace(" or ", ", ").split(", ")]


MAX_SIDE = 4096  # of images, in pixels
MAX_EPOCHS = 1_000_000
DEFAULT_LOSS = "cross_entropy"  # of a recipe that lists none


def _two_numbers(values: list[float]) -> list[float]:
    if len(values) != 2:
        raise PydanticCustomError("expected", "expected two numbers")
    return values


def _range(values: list[float]) -> list[float]:
    if not 0 < _two_numbers(values)[0] <= values[1]:
        raise PydanticCustomError("expected", "expected [least, most], both above 0")
    return values


def _span(values: list[int]) -> list[int]:
    if len(values) != 2 or not 0 <= values[0] < values[1]:
        raise PydanticCustomError("expected", "expected [first, stop], for example [0, 3]")
    return values


def _three_numbers(values: list[float]) -> list[float]:
    if len(values) != 3:
        raise PydanticCustomError("expected", "expected three numbers, of red, green and blue")
    return values


PositiveInt = Annotated[int, Field(gt=0)]
CountFromZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Pair = Annotated[list[float], AfterValidator(_two_numbers)]
Range = Annotated[list[float], AfterValidator(_range)]
Span = Annotated[list[int], AfterValidator(_span)]
Side = Annotated[int, Field(gt=0, le=MAX_SIDE)]
Options = Annotated[dict[str, Any], AfterValidator(plain_options)]
Color = Annotated[list[float], AfterValidator(_three_numbers)]
PositiveColor = Annotated[list[Positive], AfterValidator(_three_numbers)]


class Table(BaseModel):
    """A table of a recipe. Unknown keys, and values of another type or out of range, are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Model(Table):
    """The model, by a name as for `load_model`; timm models may be untrained, with arguments of
    timm.create_model."""

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


class Data(Table):
    """Images: FOLDER/<class>/, index.csv or local shards (wds:...), as for `verify`. Relative paths start at
    the working directory."""

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

    crop: "resized" (random area and aspect ratio), "resize" (to `resize` x `resize`, then a random crop),
        "pad" (by `pad` pixels, then a random crop), "none" (as in testing)
    interpolation: of the crop and of RandAugment, "random" draws bilinear or bicubic for each image; None:
        the model's for the crop, random for RandAugment
    repeats: repeated augmentation (Hoffer et al. 2020): an epoch has this many augmented copies of each of
        1 / `repeats` of the images
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
    """Optimizer of timm.optim. `lr` is for `lr_batch` images per step and scaled in proportion; None: not
    scaled.

    module_factor: learning rate of inserted modules (TAP, CB) as a multiple of `lr`. A gate that starts at 0
        moves by about one learning rate per step of Adam, too little in a short fine-tuning
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

    cooldown_epochs: the last epochs, at `min_lr`; cosine and linear reach it before them
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

    suites: None: corruptions, or segmentation for task = "segmentation"
    data, masks: as for `stress`; without `data` both are those of the test, data.test and data.test_masks
    options: of the suites, such as { severities = [3], corruptions = "all15" }
    show: numbers in the table, as SETTING/METRIC of the run's table.csv, such as clean/top1; None: the
        summary numbers of a report
    """

    suites: list[str] | None = None
    data: str | None = None
    masks: str | None = None
    limit: PositiveInt | None = None  # images
    seed: CountFromZero = 0  # of the corruptions and the like, the same for every model
    batch: PositiveInt = 16
    options: Options = Field(default_factory=dict)
    show: list[str] | None = None


class Recipe(Table):
    """A training run.

    train: "all" weights, or the "head" alone: the last linear layer, on features of each image's center view
        that are computed once, without random augmentation (a linear probe)
    measure: how a sweep measures the result; it does not change the weights
    losses: options by name of a registered loss (`sg.list_losses()`); the total is their sum. None:
        cross-entropy
    batch: images per step, over all processes and accumulated micro-batches
    task: "segmentation" wraps the model in `sg.modules.segmenter`, with the classes of the masks, and trains
        by cross-entropy over pixels; pixels without a class (border) are ignored
    keep: which weights are written: of the last epoch, or of the one with the lowest test loss

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

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise explain_validation_error(error, type(self)) from None

    @field_validator("losses", mode="before")
    @classmethod
    def _registered(cls, losses: Any) -> Any:
        """Validate each table by the options of its loss; None (as older versions wrote) leaves a loss
        out."""
        if not isinstance(losses, Mapping):
            return losses
        listed = {name: table for name, table in losses.items() if table is not None}
        return {
            name: table if isinstance(table, LossOptions) else _loss_options(name, table)
            for name, table in listed.items()
        }

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


def _loss_options(name: str, table: Any) -> LossOptions:
    options = LOSSES[name].Options
    try:
        return options.model_validate(table)
    except ValidationError as error:
        raise explain_validation_error(error, options, f"losses.{name}") from None


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


RENAMED = {
    "data.pictures": "data.images",
    "data.test_pictures": "data.test_images",
}  # keys of the first version
MAX_BYTES = 1_000_000  # of a recipe


def read_recipe(source: str | Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe in a TOML file, or a shipped one by name.

    changes: values by full key, such as {"data.train": "FOLDER", "seed": 1}; None removes a key

    >>> read_recipe("cifar10-tap", {"data.train": "cifar10/train", "epochs": 2}).epochs
    2
    """
    text = recipe_text(source)
    try:
        content = tomllib.loads(text)
    except ValueError as error:  # also of integers with too many digits
        raise InputError(f"{source} is not a readable TOML file ({error})") from error
    except RecursionError as error:
        raise InputError(f"{source} is not a readable TOML file (nested too deeply)") from error
    return make_recipe(content, changes)


def recipe_text(source: str | Path) -> str:
    """The text of a recipe file, or of a shipped recipe."""
    path = Path(source)
    try:
        is_file = path.is_file()
        size = path.stat().st_size if is_file else 0
    except OSError as error:  # such as a name that is too long
        raise InputError(f"{str(source)[:80]} is not a readable TOML file ({error.strerror})") from error
    if size > MAX_BYTES:
        raise InputError(f"{source} is not a recipe: expected at most {MAX_BYTES:,} bytes, got {size:,}")
    if not is_file:
        shipped = shipped_recipes()
        if str(source) not in shipped:
            hint = "Expected a TOML file or the name of a shipped recipe."
            raise UnknownNameError("recipe", str(source), shipped, hint)
        return shipped[str(source)]
    try:
        return path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise InputError(f"{source} is not a readable TOML file ({error})") from error


def make_recipe(content: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of nested tables, with changes as for `read_recipe`."""
    if not isinstance(content, Mapping):
        raise InputError(f"recipe: expected tables by name, got {type(content).__name__}")
    check_plain(content)
    check_plain(changes or {})
    recipe = copy.deepcopy(dict(content))
    for old, new in RENAMED.items():
        name, old_key = old.split(".")
        if isinstance(recipe.get(name), dict) and old_key in recipe[name]:
            recipe[name][new.split(".")[1]] = recipe[name].pop(old_key)
    for key, value in (changes or {}).items():
        *parents, last = RENAMED.get(key, key).split(".")
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


def shipped_recipes() -> dict[str, str]:
    """Name -> text of each recipe in the package."""
    folder = files("steadygaze") / "training" / "recipes"
    entries = [entry for entry in folder.iterdir() if entry.name.endswith(".toml")] if folder.is_dir() else []
    ordered = sorted(entries, key=lambda entry: entry.name)
    return {entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8") for entry in ordered}


log = logging.getLogger(__name__)
ModuleOptions = dict[str, dict[str, Any] | None]  # options of TAP and CB by name; None: without it


def insert_modules(
    model: nn.Module, recipe: Modules, default_start: Start, reason_for_default: str
) -> tuple[nn.Module, ModuleOptions]:
    """(the model with the recipe's modules, their options with `start`).

    Modules that the weights brought are kept, and must have the recipe's options.
    """
    from steadygaze import modules

    kinds = {"tap": (modules.TAP, modules.TokenPool), "cb": (modules.CB, modules.ContextBroadcast)}
    options: ModuleOptions = recipe.model_dump()
    new = {}
    for name, given in options.items():
        if given is None:
            continue
        spec_class, module_class = kinds[name]
        present = [m for m in modules.inserted(model).values() if isinstance(m, module_class)]
        if "start" in given:
            start, reason = given["start"], "set by the recipe"
        elif present:
            start, reason = present[0].spec.get("start", "paper"), "of the initial weights"
        elif given.get("init"):  # Λ of CB_S is not 0: the outputs change, whatever the weights
            start, reason = "paper", "modules.cb.init is set"
        else:
            start, reason = default_start, reason_for_default
        options[name] = {**given, "start": start}
        spec = _module_spec(name, spec_class, options[name] or {})
        if present:
            _check_same_module(model, name, spec)
        else:
            new[name] = spec
            log.info("modules.%s.start = %r: %s", name, start, reason)
    return (modules.insert(model, **new) if new else model), options


def check_module_options(recipe: Modules) -> None:
    """`InputError` or `UnknownNameError` for options that TAP and CB do not have, before a model is built."""
    from steadygaze import modules

    for name, spec_class in (("tap", modules.TAP), ("cb", modules.CB)):
        options = getattr(recipe, name)
        if options is not None:
            _module_spec(name, spec_class, options)


def _module_spec(name: str, spec: Any, options: Mapping[str, Any]) -> Any:
    """TAP or CB with the recipe's options."""
    known = [f.name for f in fields(spec)]
    for key in options:
        if key not in known:
            raise UnknownNameError(f"option of modules.{name}", key, known)
    try:
        return spec(
            **{key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
        )
    except TypeError as error:
        raise InputError(f"modules.{name}: {error}") from error


def _check_same_module(model: nn.Module, name: str, spec: Any) -> None:
    """`InputError` unless the module that the weights brought is the one of the recipe."""
    from steadygaze import modules

    requested = _module_texts(modules.insert(modules.remove(model), **{name: spec}), name)
    existing = _module_texts(model, name)
    if requested != existing:
        raise InputError(
            f"modules.{name}: the weights contain it already, with other options: expected "
            f"{sorted(existing.items())}, got {sorted(requested.items())}. "
            f"Leave modules.{name} out to keep theirs."
        )


def _module_texts(model: nn.Module, name: str) -> dict[str, str]:
    """Where a model has TAP or CB, and with which options."""
    from steadygaze import modules
    from steadygaze.modules.base import describe

    return {
        path: describe(module.spec)
        for path, module in modules.inserted(model).items()
        if path.rpartition(".")[2].startswith(name)
    }
