"""The layout of `--help`, the options that several commands share, and the parsing of their values.

Help is plain text of at most 80 columns: typer's rich layout cuts long words and takes longer to import. An
option names its group with `rich_help_panel`, and lines `Example: ...` at the end of a command's docstring
become the examples below the options. A short option has the same meaning in every command.
"""

from __future__ import annotations

import inspect
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from steadygaze.errors import InputError
from steadygaze.methods.registry import DEFAULT
from steadygaze.runs.request import METHODS, OUTPUT, SUITES, Option, Request, options_of

if TYPE_CHECKING:
    from steadygaze.loading.loaded import LoadedModel
    from steadygaze.questions.features import SimilarTo
    from steadygaze.questions.text import TextClasses

# groups of options, used as rich_help_panel
ARGUMENTS = "Arguments"
RECIPE = "Recipe"
MODEL = "Model"
CLASSES = "Text and class names"
DATA = "Data"
TRAINING = "Training"
RUNNING = "Execution"
SERVER = "Server"
LIMITS = "Limits"
OTHER = "Options"
ORDER = [ARGUMENTS, RECIPE, MODEL, CLASSES, DATA, METHODS, SUITES, TRAINING, OUTPUT, RUNNING, SERVER, LIMITS]

EXAMPLE = re.compile(r"^Example: *(.*(?:\n(?!Example:).+)*)", re.MULTILINE)


PLUGIN = ("--plugin FILE", "Run a Python file first, which registers methods or the like. Repeatable.")


class HelpfulCommand(TyperCommand):
    """A command whose help has groups of options, and examples at the end."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        _prepare_help(self)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self.get_params(ctx), ctx, formatter, [PLUGIN])


class HelpfulGroup(TyperGroup):
    """A command with subcommands, which are listed by their `rich_help_panel`."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        _prepare_help(self)

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False  # typer imports pydantic to convert None, which takes 0.1 s
        return option

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        widest = max(map(len, self.commands))
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None)
            title = panel if isinstance(panel, str) else "Commands"
            summary = " ".join((command.help or "").partition("\n\n")[0].split())
            panels.setdefault(title, []).append((name.ljust(widest), summary))
        for title, rows in panels.items():
            with formatter.section(title):
                formatter.write_dl(rows)
        _write_parameters(self.get_params(ctx), ctx, formatter, [PLUGIN])


def _prepare_help(command: Any) -> None:
    """Move the examples of the docstring to the end, and show MODEL where typer shows <str>."""
    text = command.help or ""
    examples = [" ".join(match[1].split()) for match in EXAMPLE.finditer(text)]
    command.help, command.examples = EXAMPLE.sub("", text).rstrip(), examples
    if examples:
        lines = [line for example in examples for line in _shell_lines(example)]
        command.epilog = "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in lines)])
    for param in command.params:
        if param.metavar is None and param.param_type_name == "option":
            param.metavar = param.name.upper()


def _shell_lines(command: str) -> list[str]:
    """Break a long command as a shell continues it."""
    lines = textwrap.wrap(
        command, 72, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def _write_parameters(
    parameters: Sequence[Any], ctx: Any, formatter: Any, others: Sequence[tuple[str, str]] = ()
) -> None:
    """Write arguments, then options by group; options without a group come last.

    others: names and texts of options that the group of commands takes.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for param in parameters:
        record = param.get_help_record(ctx)
        if record is None:  # hidden
            continue
        if param.param_type_name == "argument":
            title, record = ARGUMENTS, (param.metavar or param.name.upper(), record[1])
        else:
            title = getattr(param, "rich_help_panel", None) or OTHER
        groups.setdefault(title, []).append(record)
    groups.setdefault(OTHER, [])[:0] = others
    for title in sorted(groups, key=lambda title: ORDER.index(title) if title in ORDER else len(ORDER)):
        with formatter.section(title):
            formatter.write_dl(groups[title], col_max=26)


def declare(panel: str, text: str, *flags: str, **settings: Any) -> Any:
    """Declare an option with its group and help; `settings` as in `typer.Option`."""
    return typer.Option(*flags, help=text, rich_help_panel=panel, **settings)


def declare_out(metavar: str, text: str) -> Any:
    """Declare the option --out of a command."""
    return declare(OUTPUT, text, "--out", "-o", metavar=metavar)


MODEL_SOURCES = (
    "a timm name, torchvision:NAME, open_clip:NAME@TAG, a transformers folder or owner/name, a folder "
    "written by `steadygaze train`, or 'embedded'"
)
METHOD_SYNTAX = "comma-separated, or repeat the option; method options as in attixg+plus:pairing=next"
METHODS_HELP = f"Attribution methods, {METHOD_SYNTAX}. Default: {DEFAULT}."
DATA_SOURCES = (
    "Labeled images: FOLDER/<synset, class index or class name>/, index.csv, WebDataset shards "
    "'wds:PATH/{0000..0015}.tar', or a Hugging Face dataset or Parquet folder: 'hf:owner/name?split=test', "
    "'hf:./folder'. Options follow a question mark: 'wds:a.tar?label=cls,label_names=synsets.txt'."
)

Model = Annotated[str, declare(MODEL, f"Model: {MODEL_SOURCES}.", "--model", "-m")]
OptionalModel = Annotated[str | None, declare(MODEL, f"Model: {MODEL_SOURCES}.", "--model", "-m")]
Checkpoint = Annotated[
    Path | None,
    declare(MODEL, "Local weights: .safetensors, .pth, .pt or .bin.", "--checkpoint", "-c", metavar="FILE"),
]
NumClasses = Annotated[
    int | None,
    declare(
        MODEL,
        "Number of classes, if it differs from that of the checkpoint.",
        metavar="N",
        show_default=False,
    ),
]
ImageSize = Annotated[
    str | None,
    declare(
        MODEL,
        "Image size, if it differs from the model's own: 320, or 256,320 (height, width).",
        metavar="SIZE",
    ),
]
Mean = Annotated[
    str | None,
    declare(
        MODEL, "Mean of the normalization, if it differs from the model's own: 0.5,0.5,0.5.", metavar="R,G,B"
    ),
]
Std = Annotated[
    str | None,
    declare(
        MODEL, "Standard deviation of the normalization, if it differs from the model's own.", metavar="R,G,B"
    ),
]
ModelKwargs = Annotated[
    list[str] | None,
    declare(
        MODEL,
        "Argument of timm's constructor, such as img_size=320. Repeat the option for more.",
        metavar="KEY=VALUE",
    ),
]
Task = Annotated[
    str | None,
    declare(
        MODEL,
        "Meaning of the model's outputs: classification (classes), multilabel (independent labels) or "
        "regression (values). Default: the task in its configuration, or classification.",
        show_default=False,
    ),
]
ClassNames = Annotated[
    Path | None,
    declare(
        CLASSES,
        "Class names: a text file with one name per line, or a JSON list or dict. For CLIP, SigLIP and "
        "open_clip models, these are the classes.",
        metavar="FILE",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    declare(
        MODEL,
        "Execute Python code that is part of a transformers folder or repository.",
        "--trust-remote-code",
    ),
]
AllowPipe = Annotated[
    bool,
    declare(
        RECIPE,
        "Accept data in the recipe file that runs a shell command (wds:pipe:COMMAND); in --set it is always "
        "accepted.",
        "--allow-pipe",
    ),
]
Device = Annotated[str, declare(RUNNING, "auto, cpu, cuda, cuda:1 or mps.")]

Data = Annotated[str, declare(DATA, DATA_SOURCES, "--data", "-d")]
OptionalData = Annotated[str | None, declare(DATA, DATA_SOURCES, "--data", "-d")]
Masks = Annotated[
    Path | None,
    declare(
        DATA,
        "Object masks: index.csv, the same relative paths as the images, ImageNet-S or Pascal VOC. "
        "Required by metrics and suites that compare with masks.",
        metavar="FOLDER",
    ),
]
Limit = Annotated[
    int | None,
    declare(
        DATA,
        "Use at most N images, spread evenly over the classes; of a stream, the first N.",
        "--limit",
        "-n",
        metavar="N",
        min=1,
    ),
]
Metrics = Annotated[
    list[str] | None,
    declare(
        METHODS,
        "Metrics, comma-separated; `steadygaze metrics` lists them. Default: insertion_accuracy, "
        "deletion_accuracy, insertion_aopc and deletion_aopc.",
        "--metrics",
    ),
]
CalibrationFile = Annotated[
    Path | None,
    declare(
        METHODS,
        "Calibration made by `steadygaze calibrate`; required by the method calibrated.",
        "--calibration",
        metavar="FILE",
    ),
]
DiffMask = Annotated[
    Path | None,
    declare(
        METHODS,
        "Gates trained by `steadygaze diffmask train`; required by the method diffmask.",
        metavar="FILE",
    ),
]
Shapley = Annotated[
    Path | None,
    declare(
        METHODS,
        "Explainer trained by `steadygaze shapley train`; required by the method vit_shapley.",
        metavar="FILE",
    ),
]
Seed = Annotated[int, declare(RUNNING, "Random seed.", metavar="N", min=0)]
BatchSize = Annotated[
    int, declare(RUNNING, "Number of images per batch.", "--batch-size", "-b", metavar="N", min=1)
]
NumWorkers = Annotated[
    int | None,
    declare(
        RUNNING,
        "Number of workers that load images. Default: depends on the number of free cores.",
        "--num-workers",
        "-w",
        metavar="N",
        min=0,
    ),
]
Shard = Annotated[
    str | None,
    declare(
        RUNNING,
        "Compute part I (0 to N-1) of a run that is split over N independent jobs. All jobs may share "
        "one output folder. If a job fails, repeat its command.",
        metavar="I/N",
        show_default=False,
    ),
]
Out = Annotated[
    Path, declare_out("FOLDER", "Output folder. Repeat the command to resume an interrupted run.")
]
OptionalOut = Annotated[
    Path | None, declare_out("FOLDER", "Output folder. Repeat the command to resume an interrupted run.")
]
ExampleImages = Annotated[
    bool, declare(OUTPUT, "Include example images with their maps.", "--images/--no-images")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The options that choose a model and its classes."""

    model: Model
    checkpoint: Checkpoint = None
    num_classes: NumClasses = None
    image_size: ImageSize = None
    mean: Mean = None
    std: Std = None
    model_kwargs: ModelKwargs = None
    task: Task = None
    text: Annotated[
        list[str] | None,
        declare(
            CLASSES,
            "For CLIP, SigLIP and open_clip models: a text to compare the image with. If the option is "
            "repeated, the texts are classes, and the most similar one is predicted.",
            "--text",
        ),
    ] = None
    similar_to: Annotated[
        Path | None,
        declare(
            CLASSES,
            "For backbones without a classifier (DINOv2, num_classes=0): an image to compare with. The "
            "cosine similarity of the features is explained.",
            "--similar-to",
            metavar="FILE",
        ),
    ] = None
    class_names: ClassNames = None
    template: Annotated[
        list[str] | None,
        declare(
            CLASSES,
            "Text made from each class name: 'a photo of a {}.' (default), photo, seven or none. Repeat the "
            "option to average over several.",
            "--template",
        ),
    ] = None
    trust_remote_code: TrustRemoteCode = False

    @cached_property
    def model_options(self) -> dict[str, Any]:
        """The further arguments of `load_model` that the user gave."""
        return model_options(None, self.image_size, self.mean, self.std, self.model_kwargs)

    @cached_property
    def words(self) -> TextClasses | SimilarTo | None:
        """The question of --text, --class-names and --template, or --similar-to; None without these."""
        if self.similar_to is not None:
            from steadygaze.questions.features import similar_to

            if self.text or self.class_names is not None or self.template:
                raise InputError("give either an image to compare with, or texts", option="similar_to")
            return similar_to(self.similar_to)
        if not self.text and self.class_names is None:
            if self.template:
                raise InputError(
                    "expected class names to fill the template with, got none", option="class_names"
                )
            return None
        from steadygaze.loading.options import read_class_names
        from steadygaze.questions.text import TEMPLATES, TextClasses, parse_templates

        if self.text:
            if self.class_names is not None:
                raise InputError("give either texts or a file of class names, not both", option="text")
            if self.template:
                raise InputError(
                    "a template applies to class names; texts are used unchanged", option="template"
                )
            return TextClasses(texts=tuple(self.text))
        assert self.class_names is not None
        names = read_class_names(self.class_names)
        one = self.template[0] if self.template and len(self.template) == 1 else None
        templates = parse_templates(one if one is not None else self.template or TEMPLATES["photo"])
        return TextClasses(class_names=names, templates=templates)

    def load(self, device: str) -> LoadedModel:
        """Load the model, with its own classes; "auto" is a GPU if there is one."""
        import torch

        from steadygaze.loading.load import load_model

        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return load_model(
            self.model,
            self.checkpoint,
            num_classes=self.num_classes,
            device=device,
            **self.model_options,
            task=self.task,
            trust_remote_code=self.trust_remote_code,
        )


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The options of commands that can estimate their cost."""

    dry_run: Annotated[
        bool,
        declare(
            RUNNING,
            "Check the request, time a few images, print the estimated cost, and write nothing.",
            "--dry-run",
        ),
    ] = False
    shards: Annotated[
        str | None,
        declare(
            RUNNING,
            "With --dry-run: numbers of shards to estimate the time for. Default: 1,8,64.",
            metavar="LIST",
            show_default=False,
        ),
    ] = None
    json: Annotated[bool, declare(RUNNING, "With --dry-run: print JSON.", "--json")] = False

    @property
    def numbers(self) -> list[int]:
        """The numbers of shards; an error if they are given without --dry-run.

        Examples:
            >>> DryRun(dry_run=True, shards="1,100").numbers
            [1, 100]
        """
        if not self.dry_run and (self.shards is not None or self.json):
            raise InputError(
                f"expected --dry-run beside {'--json' if self.shards is None else '--shards'}. Add it, or "
                f"leave the option out."
            )
        try:
            return [int(number) for number in (self.shards or "1,8,64").split(",")]
        except ValueError as error:
            raise InputError(
                f"expected whole numbers of 1 or more, such as 1,8,64, got {self.shards!r}", option="shards"
            ) from error


Command = TypeVar("Command", bound=Callable[..., None])
Declared = TypeVar("Declared", bound="ModelOptions | DryRun")
Requested = TypeVar("Requested", bound=Request)
Source = type[Request] | type[ModelOptions] | type[DryRun] | Mapping[str, Option]


def takes(*sources: Source) -> Callable[[Command], Command]:
    """Give a command with `**values` the options that `sources` declare, after its own parameters.

    An option that several declare is that of the first.
    """

    def decorate(command: Any) -> Any:
        hints = get_type_hints(command, include_extras=True)
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters = {p.name: p.replace(annotation=hints[p.name]) for p in own}
        for source in sources:
            for name, default, annotation in _declarations(source):
                kind = inspect.Parameter.KEYWORD_ONLY
                parameter = inspect.Parameter(name, kind, default=default, annotation=annotation)
                parameters.setdefault(name, parameter)
        command.__signature__ = inspect.Signature(list(parameters.values()))
        command.__annotations__ = {name: p.annotation for name, p in parameters.items()}
        return command

    return decorate


def _declarations(source: Source) -> Iterator[tuple[str, Any, Any]]:
    """Name, default and typer's annotation of each option. Required ones have no default."""
    empty = inspect.Parameter.empty
    if isinstance(source, Mapping):
        for name, about in source.items():
            yield name, False if about.type is bool else None, _annotation(about)
    elif issubclass(source, Request):
        for field, about in options_of(source):
            if about.command:
                single = isinstance(field.default, str | int | None)  # a list's default is in its help
                default = empty if about.required else field.default if single else None
                yield field.name, default, _annotation(about)
    else:
        hints = get_type_hints(source, include_extras=True)
        for field in fields(source):
            yield field.name, empty if field.default is MISSING else field.default, hints[field.name]


def _annotation(about: Option) -> Any:
    if about.alias:
        return globals()[about.alias]
    text = about.help.format_map(globals())
    minimum = 1 if about.type == int | None else None
    return Annotated[about.type, declare(about.panel, text, *about.flags, metavar=about.metavar, min=minimum)]


def read(declared: type[Declared], values: Mapping[str, Any]) -> Declared:
    """Return the options of `declared` among the values of a command."""
    return declared(**{field.name: values[field.name] for field in fields(declared)})


def read_request(request: type[Requested], values: Mapping[str, Any], **more: Any) -> Requested:
    """Return the request of a command's values; an option that was not given has the default of its field."""
    split: dict[str, Callable[[Any, str], Any]] = {
        "": lambda value, name: value,
        "names": lambda value, name: split_names(value),
        "methods": lambda value, name: split_methods(value),
        "numbers": split_numbers,
    }
    given = {
        field.name: split[about.split](values[field.name], field.name)
        for field, about in options_of(request)
        if about.command and values[field.name] is not None
    }
    model = read(ModelOptions, values)
    return request(
        **{"data": None, **given},
        model_options=model.model_options,
        words=model.words,
        command=command_line(),
        **more,
    )


def split_names(texts: Sequence[str] | None) -> list[str]:
    """Split comma-separated names.

    Examples:
        >>> split_names(["corruptions,attacks", "occlusion"])
        ['corruptions', 'attacks', 'occlusion']
    """
    pieces = [piece.strip() for text in texts or () for piece in text.split(",")]
    return [piece for piece in pieces if piece]


def split_methods(texts: Sequence[str]) -> list[str]:
    """Split comma-separated methods; a comma before `key=value` continues the options of a method.

    Examples:
        >>> split_methods(["gae,attixg+plus:pairing=next,freeze=0.75,cat"])
        ['gae', 'attixg+plus:pairing=next,freeze=0.75', 'cat']
    """
    names: list[str] = []
    for piece in split_names(texts):
        if names and "=" in piece and ":" not in piece:
            names[-1] += "," + piece
        else:
            names.append(piece)
    return list(dict.fromkeys(names))


def split_numbers(text: str | None, option: str) -> list[float] | None:
    """Parse comma-separated numbers; None stays None.

    Examples:
        >>> split_numbers("0.1,0.5", "ratios")
        [0.1, 0.5]
    """
    try:
        return None if text is None else [float(piece) for piece in text.split(",")]
    except ValueError as error:
        raise InputError(f"expected numbers such as 0.1,0.5,0.9; got {text!r}", option=option) from error


def model_options(
    class_names: Path | None,
    image_size: str | None,
    mean: str | None,
    std: str | None,
    model_kwargs: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the arguments of `load_model` that the user gave."""
    arguments = None
    if model_kwargs:
        from steadygaze.loading.options import parse_model_kwargs

        arguments = parse_model_kwargs(split_names(model_kwargs)) or None
    sides = split_numbers(image_size, "image_size")
    given = {
        "class_names": class_names,
        "image_size": None
        if sides is None
        else [int(side) for side in sides * (2 if len(sides) == 1 else 1)],
        "mean": split_numbers(mean, "mean"),
        "std": split_numbers(std, "std"),
        "model_kwargs": arguments,
    }
    return {name: value for name, value in given.items() if value is not None}


def command_line() -> str:
    """Return the command as the user typed it, for the records of a run."""
    return shlex.join(["steadygaze", *sys.argv[1:]])
