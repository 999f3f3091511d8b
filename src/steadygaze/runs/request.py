"""What `verify` and `stress` are given: every option is declared here once, with its help.

The command line and the signature and docstring of the Python functions are made from these declarations.
Nothing heavy is imported before a run is prepared: `steadygaze verify --help` reads this module.
"""

# ruff: noqa: RUF009  (`option` and `shared` make fields of dataclasses)

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from steadygaze.errors import InputError, UnknownNameError
from steadygaze.methods.registry import DEFAULT, Method

if TYPE_CHECKING:
    from torch import Tensor, nn

    from steadygaze.data.memory import Data
    from steadygaze.data.stream_spec import StreamSpec
    from steadygaze.loading.loaded import LoadedModel
    from steadygaze.questions.features import FeatureTarget
    from steadygaze.questions.text import TextClasses
    from steadygaze.results.map_files import Given
    from steadygaze.runs.shards import Shard, World
    from steadygaze.vit.view import ViT

    Model = str | nn.Module | ViT | LoadedModel
    Target = int | str | Sequence[int] | Tensor | None

METHODS, SUITES, OUTPUT = "Methods and metrics", "Suites", "Output"  # groups of options in --help
CHANCE = "random"  # the method whose numbers are the chance level
CEILING, SEARCHED = "ceiling", "greedy"  # the line of the best values of searched orders; their method
DEFAULT_METRICS = ("insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc")
VERIFY_SUITES = ("ground_truth", "mosaics", "funnybirds")
TOO_LARGE = 2**63  # generators of torch take seeds of 64 bits


@dataclass(frozen=True)
class Option:
    """How an option is documented, and how the command line reads it.

    Attributes:
        help: For both, where `python` is empty; {NAME} stands for a text of `cli.options`.
        python: Docstring of the Python argument, where it accepts more than the command.
        alias: The declaration in `cli.options` that the command takes instead, for options of many commands.
        command: Whether the command has it too; False: only Python.
        required: Whether the command needs it; the function may not.
        type: Of the value on the command line.
        split: How the command's text becomes a list.
    """

    help: str = ""
    python: str = ""
    alias: str = ""
    command: bool = True
    required: bool = False
    type: Any = str | None
    panel: str = METHODS
    flags: tuple[str, ...] = ()
    metavar: str | None = None
    split: Literal["", "names", "methods", "numbers"] = ""


def option(default: Any = MISSING, help: str = "", **more: Any) -> Any:
    """A field of a request that users give; `more` as in `Option`."""
    return field(default=default, metadata={"option": Option(help, **more)})


def shared(alias: str, default: Any, python: str, **more: Any) -> Any:
    """A field whose option many commands have: `cli.options` declares it."""
    return option(default, python=python, alias=alias, **more)


def options_of(request: type[Request]) -> Iterator[tuple[Field[Any], Option]]:
    """The fields of a request that users give, with their options."""
    return ((entry, entry.metadata["option"]) for entry in fields(request) if "option" in entry.metadata)


Function = TypeVar("Function", bound=Callable[..., Any])


def folder_of(path: Path) -> Path:
    """The folder of images, or the CSV file that lists them; `InputError` if the path is neither."""
    if path.name == "index.csv" and path.is_file():
        return path.absolute().parent  # the file stands for its folder: the same run either way
    if not path.is_dir() and not (path.suffix == ".csv" and path.is_file()):
        kind = "a file" if path.exists() else "no such folder"
        raise InputError(f"data: expected a folder of images, got {path}: {kind}")
    return path


def documented(request: type[Request]) -> Callable[[Function], Function]:
    """Give a function with `**options` the options of a request: in its signature, and as Args of its
    docstring, in place of {options}."""

    def decorate(function: Any) -> Any:
        own = inspect.signature(function).parameters
        rest = [p for p in own.values() if p.kind is p.VAR_KEYWORD]
        named = [p for p in own.values() if p not in rest]
        keywords, lines = [], []
        for one, about in options_of(request):
            lines.append(
                textwrap.fill(f"{one.name}: {about.python or about.help}", 98, subsequent_indent="    ")
            )
            if one.name not in own:
                kind = inspect.Parameter.KEYWORD_ONLY
                keywords.append(inspect.Parameter(one.name, kind, default=one.default, annotation=one.type))
        rest = [p for p in rest if p.name != "options"]
        function.__signature__ = inspect.Signature(
            [*named, *keywords, *rest], return_annotation=function.__annotations__["return"]
        )
        text = textwrap.indent("\n".join(lines), 8 * " ").lstrip()
        function.__doc__ = (function.__doc__ or "").replace("{options}", text)
        return function

    return decorate


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `verify` and `stress` are both given.

    Attributes:
        model_options: Further arguments of `load_model`: class_names, image_size, mean, std, model_kwargs.
        words: Texts or class names for a model that compares images with text, or a quantity of features.
        command: The command line, for the record.
    """

    model: Model = shared(
        "Model",
        MISSING,
        "A model, a view, the result of `load_model`, or a name for it; a folder needs one of the last two, "
        "which know how images are preprocessed.",
        required=True,
    )
    checkpoint: Path | None = shared("Checkpoint", None, "Local weights, for a model that is given by name.")
    data: Data | None = shared(
        "Data",
        MISSING,
        'A folder of labeled images or its index.csv; a stream "wds:..." or "hf:..." (see docs/data.md); or '
        "batches (images, labels) or (images, labels, masks), a `DataLoader` of such batches, or a "
        "`Dataset`: images (B, 3, H, W) normalized for the model, labels (B,), masks (B, H, W) with 255 "
        'object, 128 border, 0 background, or booleans. Images in memory are called "0", "1", ... in order.',
        required=True,
    )
    masks: Path | None = shared("Masks", None, "A folder of masks, for a folder of images.")
    limit: int | None = shared(
        "Limit",
        None,
        "Use at most this many images; of a folder, spread evenly over the classes; of a stream, the first "
        "ones.",
    )
    seed: int = shared("Seed", 0, "Random seed.")
    batch_size: int = shared("BatchSize", 16, "Number of images per batch, for files or a `Dataset`.")
    num_workers: int | None = shared(
        "NumWorkers", None, "Number of workers that load images. Default: for files, by the number of cores."
    )
    num_classes: int | None = shared(
        "NumClasses",
        None,
        "Number of classes of a model that is given by name, if it differs from the checkpoint's.",
    )
    task: str | None = shared(
        "Task", None, "Meaning of the model's outputs, for a model that is given by name."
    )
    trust_remote_code: bool = shared(
        "TrustRemoteCode", False, "Execute Python code that is part of a transformers repository."
    )
    device: str = shared(
        "Device", "auto", "Device of a model that is given by name: auto, cpu, cuda, cuda:1 or mps."
    )
    mean: Sequence[float] | None = option(
        None,
        python="Mean of the normalization of images in memory; known for loaded and timm models.",
        command=False,
    )
    std: Sequence[float] | None = option(
        None, python="Standard deviation of the normalization of images in memory.", command=False
    )
    shard: Shard = shared(
        "Shard",
        None,
        '"I/N" or (I, N): compute part I (from 0) of a run that is split over N independent jobs, which may '
        "share one output folder; the result is this part.",
    )
    out: Path | None = shared(
        "Out",
        None,
        "Output folder; rows are written as they are computed, and the same call resumes an interrupted run.",
        required=True,
    )
    model_options: Mapping[str, Any] = field(default_factory=dict)
    words: TextClasses | FeatureTarget | None = None
    command: str = ""

    def __post_init__(self) -> None:
        from steadygaze.data.stream_spec import parse_data
        from steadygaze.loading.ask import as_classifier
        from steadygaze.runs.shards import parse_shard

        self._set(data=parse_data(self.data), shard=parse_shard(self.shard))
        paths = {name: getattr(self, name) for name in ("out", "masks", "checkpoint")}
        self._set(**{name: Path(path) for name, path in paths.items() if path is not None})
        if self.model is not None and not isinstance(self.model, str) and self.words is None:
            as_classifier(self.model, None)  # raises an error if its classes are not known
        check_counts(
            limit=self.limit, batch_size=self.batch_size, num_workers=self.num_workers, seed=self.seed
        )

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def in_memory(self) -> bool:
        """Whether the data is batches rather than a folder."""
        from steadygaze.data.memory import is_folder

        return self.data is not None and not is_folder(self.data)

    @property
    def place(self) -> Path | StreamSpec:
        """Where the images are: a folder, a CSV file that lists them, or a stream; an error if it is none."""
        from steadygaze.data.stream_spec import StreamSpec

        if isinstance(self.data, StreamSpec):
            return self.data
        if self.data is None:
            raise InputError("data: expected a folder of images, got none")
        if not isinstance(self.data, (str, Path)):
            raise InputError(f"data: expected a folder of images, got {type(self.data).__name__}")
        return folder_of(Path(self.data))

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
        import torch

        from steadygaze.loading.ask import as_classifier
        from steadygaze.loading.load import load_model
        from steadygaze.loading.loaded import LoadedModel

        if isinstance(self.model, LoadedModel):
            return as_classifier(self.model, self.words)
        if not isinstance(self.model, str):
            raise InputError(
                "data: reading a folder needs a model whose preprocessing is known, got "
                f"{type(self.model).__name__}. Load it with sg.load_model(name_or_module, ...)."
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
        from steadygaze.data.images import names_hash
        from steadygaze.loading.options import read_class_names

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


@dataclass(frozen=True, kw_only=True)
class VerifyRequest(Request):
    """What `verify` is given; after it is made, `methods`, `metrics` and `score` are lists or None.

    A suite has models and images of its own.
    """

    model: Model = shared(
        "OptionalModel",
        None,
        "A model, a view, the result of `load_model`, or a name for it; a folder needs one of the last two, "
        "which know how images are preprocessed.",
    )
    data: Data | None = shared(
        "OptionalData",
        None,
        'A folder of labeled images or its index.csv; a stream "wds:..." or "hf:..." (see docs/data.md); or '
        "batches (images, labels) or (images, labels, masks), a `DataLoader` of such batches, or a "
        "`Dataset`: images (B, 3, H, W) normalized for the model, labels (B,), masks (B, H, W) with 255 "
        'object, 128 border, 0 background, or booleans. Images in memory are called "0", "1", ... in order.',
    )
    suite: str | None = option(
        None,
        "ground_truth, instead of a model and data: small ViTs with hand-set weights whose true patch "
        "importance is known exactly; takes seconds. mosaics: do maps find the class among four images of "
        "the data folder? funnybirds: do maps name the parts that the model uses? The data is a folder in "
        "the layout of FunnyBirds. An output folder is optional.",
        python='"ground_truth", instead of `model` and `data`: small ViTs with hand-set weights whose true '
        'patch importance is known exactly (docs/evidence/ground_truth.md). "mosaics": mosaics of images '
        "of the folder `data` that the model classifies correctly, measured by focus and grid_pointing. "
        '"funnybirds": the protocol of FunnyBirds on the folder `data` in its layout, whose images lack '
        "parts one by one. `limit` is the number of images of each task, of mosaics of each kind, or of test "
        "images.",
        metavar="NAME",
    )
    out: Path | None = shared(
        "OptionalOut",
        None,
        "Output folder; rows are written as they are computed, and the same call resumes an interrupted run.",
    )
    methods: Sequence[str | Method] = option(
        None,
        "Attribution methods, {METHOD_SYNTAX}. all: every method the model supports; quick: all but the "
        "search methods. Default: {DEFAULT}.",
        python='Names or `sg.method(...)`; "all" is every method that supports the model, "quick" all but '
        "searches. By default the method of `explain`, or none if `maps` are given.",
        type=list[str] | None,
        flags=("--methods", "-M"),
        split="methods",
    )
    random: bool = option(
        None,
        "Also measure the method random, the chance level. Default: yes, unless a run without it is resumed.",
        python="Also measure the method `random`, the chance level that a report shows. None: if `out` is "
        "given, unless a run without it is resumed there.",
        type=bool | None,
        flags=("--random/--no-random",),
    )
    ceiling: int | None = option(
        None,
        "Also search for orders of the patches with high removal scores: the row ceiling. Three searches "
        "(greedy) of this many forward passes each for every image; 2000 is usual. Default: no search.",
        python="Also search for orders of the patches with high removal scores, whose best values are the "
        "row `ceiling` of the table: three searches (method `greedy`) of this many forward passes each for "
        "every image. None: no search.",
        type=int | None,
        metavar="PASSES",
    )
    metrics: Sequence[str] = shared(
        "Metrics", DEFAULT_METRICS, "Names of `sg.list_metrics()`.", split="names"
    )
    score: Sequence[str] | None = option(
        None,
        "Quantities to explain, comma-separated: logit, log_prob, log_odds, contrast, prob. Default: each "
        "method's own.",
        python="The quantity that is explained, or several of them; None is each method's own.",
        type=list[str] | None,
        split="names",
    )
    target: Target = option(
        None,
        "Class to explain: label, predicted, a class index or a class name. Default: label.",
        python='The class that is explained and scored: None is the label, "predicted", one class, or one '
        "for each image.",
        flags=("--target", "-t"),
    )
    start_layers: str | None = option(
        None,
        "Also measure each method with +plus, starting at these layers: all, or 0,3,6.",
        metavar="LAYERS",
    )
    ratios: Sequence[float] | None = option(
        None,
        "Fractions of patches to remove or keep. Default: 0.1,0.2,...,0.9.",
        python="Shares of the patches that are kept or removed; None is 0.1, 0.2, ..., 0.9.",
        metavar="LIST",
        split="numbers",
    )
    fill: str = option(
        "zero",
        "Pixel values of hidden patches in positive_perturbation, negative_perturbation and --hide paint: "
        "zero (black), mean, blur or noise.",
        type=str,
    )
    hide: str = option(
        "remove",
        "How metrics of token removal hide patches: remove their tokens, or paint their pixels with --fill.",
        python='How metrics of token removal hide patches: "remove" their tokens, or "paint" their pixels '
        "with `fill`.",
        type=str,
    )
    calibration: Path | None = shared(
        "CalibrationFile", None, "Calibration of the method calibrated, a file."
    )
    diffmask: Path | None = shared("DiffMask", None, "Gates of the method diffmask, a file.")
    maps: Given | None = option(
        None,
        "Stored maps to measure, written by `explain --maps` or another program (docs/maps.md). Without "
        "--methods, only these are measured.",
        python="Maps to measure that were made before, by this package or by another: a folder of map files "
        "(docs/maps.md), or a dict from the name of a method to an array (N, rows, columns), or to a dict "
        "from the name of an image to an array (rows, columns). A map has one score for each patch, or for "
        "each pixel of the model's input (then the mean over each patch is measured). In rows, the method "
        "NAME is called maps:NAME.",
        type=Path | None,
        metavar="FOLDER",
    )
    shapley: Path | None = shared("Shapley", None, "Explainer of the method vit_shapley, a file.")
    keep_maps: Path | None = option(
        False,
        "Store the maps in float16, in OUT/maps.",
        python="Store the maps of `methods` in float16, in this folder; True is the folder `maps` in `out`.",
        type=bool,
        flags=("--keep-maps",),
        panel=OUTPUT,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.suite is not None and self.suite not in VERIFY_SUITES:
            raise UnknownNameError("suite of verify", self.suite, VERIFY_SUITES)
        has_own = self.suite == "ground_truth"
        for name, value in (("model", self.model), ("data", self.data)):
            if (value is None) != has_own:
                wanted = "none beside this suite" if has_own else "one, or suite='ground_truth'"
                raise InputError(f"{name}: expected {wanted}, got {'none' if value is None else value!r}")
        methods: Any = self.methods
        if methods is None:
            methods = () if self.maps is not None else (DEFAULT,)
        metrics: Any = self.metrics
        score: Any = self.score
        keep_maps: Any = self.keep_maps
        if keep_maps is True and self.out is None:
            raise InputError("keep_maps: expected a folder, or True with out=, got True without out=")
        if isinstance(keep_maps, bool):
            keep_maps = self.out / "maps" if keep_maps and self.out is not None else None
        self._set(
            methods=[methods] if isinstance(methods, (str, Method)) else list(methods),
            metrics=[metrics] if isinstance(metrics, str) else list(metrics),
            score=[score] if isinstance(score, str) else score,
            random=self._measures_chance() if self.random is None else self.random,
            keep_maps=None if keep_maps is None else Path(keep_maps),
            calibration=None if self.calibration is None else Path(self.calibration),
        )

    def _measures_chance(self) -> bool:
        """Whether the chance level is added by default: to a new folder, and to a resumed run that has it."""
        from steadygaze.runs.rows import read_run

        if self.suite is not None:
            return True
        if self.out is None:
            return False
        if not (self.out / "run.json").is_file():
            return True
        columns = read_run(self.out)["settings"].get("columns", [])
        return any(method == CHANCE for method, *_ in columns)

    @property
    def learned(self) -> dict[str, Path | None]:
        """The files of learned methods, by the method's name."""
        return {"calibrated": self.calibration, "diffmask": self.diffmask, "vit_shapley": self.shapley}


@dataclass(frozen=True, kw_only=True)
class StressRequest(Request):
    """What `stress` is given; data may be None if every suite has images of its own.

    Attributes:
        options: Of the suites, by name, as the user gave them.
        map_method: Attribution method of the maps that are stored with the run, for reports.
    """

    model: Model = option(
        MISSING,
        "Model, also a CNN or a segmenter: {MODEL_SOURCES}.",
        python="Any classifier; a CNN serves all suites but attention, and no tokens are dropped. For the "
        "suite segmentation a segmenter: its output is (B, C, h, w), an output of transformers with "
        '`.logits`, or torchvision\'s dict with "out". Files need the result of `load_model`, or a name '
        "for it.",
        type=str,
        flags=("--model", "-m"),
        panel="Model",
        required=True,
    )
    data: Data | None = option(
        MISSING,
        "{DATA_SOURCES} Not needed by shift and neighbors.",
        python='A folder of labeled images or its index.csv, a stream "wds:..." or "hf:..." (see '
        "docs/data.md), or batches (images, labels): a list, a Dataset or a DataLoader; images (B, 3, H, W) "
        "normalized for the model, labels (B,), or of a segmenter label maps (B, H, W) with 255 where "
        "nothing counts. None: for suites with images of their own.",
        flags=("--data", "-d"),
        panel="Data",
    )
    suites: str | Sequence[str] = option(
        ("corruptions",),
        "Suites, comma-separated; `steadygaze suites` lists them: corruptions, sequences, attacks, "
        "autoattack:THREAT, patchfool or patchfool:PLACE, "
        "occlusion, attention, synthetic, backgrounds, backgrounds_challenge:FOLDER, ood:NAME=FOLDER, "
        "shift:NAME=FOLDER, cue_conflict:FOLDER, neighbors:NAME=FOLDER "
        "(with train/ and test/, or a published dataset), neighbors:NAME=TRAIN=TEST. For segmenters: "
        "segmentation; for models that answer questions: vqa:FOLDER.",
        python="Names of `sg.list_suites()`, such as corruptions, attacks, shift:NAME=FOLDER.",
        type=list[str],
        flags=("--suites", "-s"),
        panel=SUITES,
        required=True,
    )
    groups: Sequence[str] | None = option(
        None,
        "Also measure the accuracy of each group of images, and of the worst: columns of the data "
        "(index.csv, metadata.csv or hf: data) whose values define the groups, such as y,place.",
        python="Columns of the data (index.csv, metadata.csv of Waterbirds and WILDS, or of hf: data) whose "
        "values define groups of images: accuracy is also measured for each group, and for the worst one.",
        type=list[str] | None,
        panel=SUITES,
        metavar="COLUMNS",
        split="names",
    )
    options: Mapping[str, Any] = field(default_factory=dict)
    map_method: str = DEFAULT

    def __post_init__(self) -> None:
        super().__post_init__()
        groups: Any = self.groups
        names = [groups] if isinstance(groups, str) else list(groups or ())
        self._set(groups=[name.strip() for text in names for name in text.split(",") if name.strip()])


# Options of the suites that are in this package, which the command lists beside those of the request, and
# `list_suites` too. The suites themselves check them, and have the defaults.
SUITE_OPTIONS = {
    "corruptions": Option(
        "Corruptions: all15, all19, or names. Also selects those of shift:imagenet-c. Default: all15.",
        metavar="NAMES",
        type=list[str] | None,
        panel=SUITES,
    ),
    "severities": Option("Corruption severities. Default: 1,2,3,4,5.", metavar="LIST", panel=SUITES),
    "epsilons": Option(
        "Attack radii, as fractions of the pixel range. Default: 1/255,2/255,8/255.",
        metavar="LIST",
        panel=SUITES,
    ),
    "pgd_steps": Option("Number of PGD steps. Default: 10.", metavar="N", type=int | None, panel=SUITES),
    "attack_steps": Option(
        "Steps of APGD and FAB in autoattack. Default: 100, as published.",
        metavar="N",
        type=int | None,
        panel=SUITES,
    ),
    "square_queries": Option(
        "Queries of Square in autoattack. Default: 5000, as published.",
        metavar="N",
        type=int | None,
        panel=SUITES,
    ),
    "patch_steps": Option(
        "Steps of patchfool. Default: 250, as published.", metavar="N", type=int | None, panel=SUITES
    ),
    "salient": Option(
        f"Attribution method that ranks the tokens in the suite occlusion. Default: {DEFAULT}.",
        metavar="METHOD",
        panel=SUITES,
    ),
    "backgrounds": Option(
        "Background images, for the suite synthetic.", metavar="FOLDER", type=Path | None, panel=SUITES
    ),
    "in_to_in9": Option(
        "File in_to_in9.json of the backgrounds challenge, if it is not in its folder.",
        metavar="FILE",
        type=Path | None,
        panel=SUITES,
    ),
    "partial": Option(
        "Accept incomplete downloads of the datasets of shift and neighbors.",
        type=bool,
        flags=("--partial",),
        panel=SUITES,
    ),
    "bank": Option(
        "Use at most N training images for neighbors, spread evenly. Default: all.",
        metavar="N",
        type=int | None,
        panel=SUITES,
    ),
}


def check_counts(**counts: int | None) -> None:
    """Whole numbers: num_workers and seed of 0 or more, the others of 1 or more; None is accepted."""
    for name, value in counts.items():
        least = 0 if name in ("num_workers", "seed") else 1
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise InputError(f"{name}: expected a whole number of {least} or more, got {value!r}")
        if value is not None and value >= TOO_LARGE:
            raise InputError(f"{name}: expected a whole number below 2**63, got {value}")
