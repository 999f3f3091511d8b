"""The layout of `--help`, the options that several commands share, and the parsing of their values.

Help is plain text of at most 80 columns: typer's rich layout cuts long words and takes longer to import. An
option names its group with `rich_help_panel`, and lines `Example: ...` at the end of a command's docstring
become the examples below the options. A short option has the same meaning in every command.
"""

from __future__ import annotations

import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from steadygaze.errors import InputError
from steadygaze.methods.registry import DEFAULT

if TYPE_CHECKING:
    from steadygaze.questions.regions import Region
    from steadygaze.questions.text import TextClasses

# groups of options, used as rich_help_panel
ARGUMENTS = "Arguments"
RECIPE = "Recipe"
MODEL = "Model"
CLASSES = "Text and class names"
DATA = "Data"
METHODS = "Methods and metrics"
SUITES = "Suites"
TRAINING = "Training"
RUNNING = "Execution"
OUTPUT = "Output"
SERVER = "Server"
LIMITS = "Limits"
OTHER = "Options"
ORDER = [ARGUMENTS, RECIPE, MODEL, CLASSES, DATA, METHODS, SUITES, TRAINING, OUTPUT, RUNNING, SERVER, LIMITS]

EXAMPLE = re.compile(r"^Example: *(.*(?:\n(?!Example:).+)*)", re.MULTILINE)


class HelpfulCommand(TyperCommand):
    """A command whose help has groups of options, and examples at the end."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        _prepare_help(self)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self.get_params(ctx), ctx, formatter)


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
        _write_parameters(self.get_params(ctx), ctx, formatter)


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


def _write_parameters(parameters: Sequence[Any], ctx: Any, formatter: Any) -> None:
    """Write arguments, then options by group; options without a group come last."""
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
    for title in sorted(groups, key=lambda title: ORDER.index(title) if title in ORDER else len(ORDER)):
        with formatter.section(title):
            formatter.write_dl(groups[title], col_max=26)


MODEL_SOURCES = (
    "a timm name, torchvision:NAME, open_clip:NAME@TAG, a transformers folder or owner/name, a folder "
    "written by `steadygaze train`, or 'embedded'"
)
METHOD_SYNTAX = "comma-separated, or repeat the option; method options as in attixg+plus:pairing=next"

Model = Annotated[str, typer.Option("--model", "-m", help=f"Model: {MODEL_SOURCES}.", rich_help_panel=MODEL)]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        "-c",
        metavar="FILE",
        help="Local weights: .safetensors, .pth, .pt or .bin.",
        rich_help_panel=MODEL,
    ),
]
NumClasses = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Number of classes, if it differs from that of the checkpoint.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
ImageSize = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Image size, if it differs from the model's own: 320, or 256,320 (height, width).",
        rich_help_panel=MODEL,
    ),
]
Mean = Annotated[
    str | None,
    typer.Option(
        metavar="R,G,B",
        help="Mean of the normalization, if it differs from the model's own: 0.5,0.5,0.5.",
        rich_help_panel=MODEL,
    ),
]
Std = Annotated[
    str | None,
    typer.Option(
        metavar="R,G,B",
        help="Standard deviation of the normalization, if it differs from the model's own.",
        rich_help_panel=MODEL,
    ),
]
ModelKwargs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="Argument of timm's constructor, such as img_size=320. Repeat the option for more.",
        rich_help_panel=MODEL,
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        help="Meaning of the model's outputs: classification (classes), multilabel (independent labels) or "
        "regression (values). Default: the task in its configuration, or classification.",
        show_default=False,
        rich_help_panel=MODEL,
    ),
]
Text = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="For CLIP, SigLIP and open_clip models: a text to compare the image with. If the option is "
        "repeated, the texts are classes, and the most similar one is predicted.",
        rich_help_panel=CLASSES,
    ),
]
ClassNames = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Class names: a text file with one name per line, or a JSON list or dict. For CLIP, SigLIP and "
        "open_clip models, these are the classes.",
        rich_help_panel=CLASSES,
    ),
]
Template = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        help="Text made from each class name: 'a photo of a {}.' (default), photo, seven or none. Repeat the "
        "option to average over several.",
        rich_help_panel=CLASSES,
    ),
]
RegionText = Annotated[
    str | None,
    typer.Option(
        help="For segmenters: the pixels whose class is explained, point=X,Y or box=LEFT,TOP,RIGHT,BOTTOM, "
        "in pixels of the preprocessed image.",
        rich_help_panel=METHODS,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Execute Python code that is part of a transformers folder or repository.",
        rich_help_panel=MODEL,
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.", rich_help_panel=RUNNING)]

DATA_SOURCES = (
    "Labeled images: FOLDER/<synset, class index or class name>/, index.csv, WebDataset shards "
    "'wds:PATH/{0000..0015}.tar', or a Hugging Face dataset or Parquet folder: 'hf:owner/name?split=test', "
    "'hf:./folder'. Options follow a question mark: 'wds:a.tar?label=cls,label_names=synsets.txt'."
)
Data = Annotated[str, typer.Option("--data", "-d", help=DATA_SOURCES, rich_help_panel=DATA)]
OptionalData = Annotated[str | None, typer.Option("--data", "-d", help=DATA_SOURCES, rich_help_panel=DATA)]
Masks = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Object masks: index.csv, the same relative paths as the images, ImageNet-S or Pascal VOC. "
        "Required by metrics and suites that compare with masks.",
        rich_help_panel=DATA,
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        "--limit",
        "-n",
        metavar="N",
        min=1,
        help="Use at most N images, spread evenly over the classes; of a stream, the first N.",
        rich_help_panel=DATA,
    ),
]

ExplainMethod = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        "-M",
        help=f"Attribution methods, {METHOD_SYNTAX}. Default: {DEFAULT}.",
        rich_help_panel=METHODS,
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        "-M",
        help=f"Attribution methods, {METHOD_SYNTAX}. Default: {DEFAULT}.",
        rich_help_panel=METHODS,
    ),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics",
        help="Metrics, comma-separated; `steadygaze metrics` lists them. Default: insertion_accuracy, "
        "deletion_accuracy, insertion_aopc and deletion_aopc.",
        rich_help_panel=METHODS,
    ),
]
DiffMask = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Gates trained by `steadygaze diffmask train`; required by the method diffmask.",
        rich_help_panel=METHODS,
    ),
]
Shapley = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Explainer trained by `steadygaze shapley train`; required by the method vit_shapley.",
        rich_help_panel=METHODS,
    ),
]

Corruptions = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAMES",
        help="Corruptions: all15, all19, or names. Also selects those of shift:imagenet-c. Default: all15.",
        rich_help_panel=SUITES,
    ),
]
Severities = Annotated[
    str | None,
    typer.Option(metavar="LIST", help="Corruption severities. Default: 1,2,3,4,5.", rich_help_panel=SUITES),
]
Epsilons = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Attack radii, as fractions of the pixel range. Default: 1/255,2/255,8/255.",
        rich_help_panel=SUITES,
    ),
]

Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Random seed.", rich_help_panel=RUNNING)]
BatchSize = Annotated[
    int,
    typer.Option(
        "--batch-size",
        "-b",
        metavar="N",
        min=1,
        help="Number of images per batch.",
        rich_help_panel=RUNNING,
    ),
]
NumWorkers = Annotated[
    int | None,
    typer.Option(
        "--num-workers",
        "-w",
        metavar="N",
        min=0,
        help="Number of workers that load images. Default: depends on the number of free cores.",
        rich_help_panel=RUNNING,
    ),
]

Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="FOLDER",
        help="Output folder. Repeat the command to resume an interrupted run.",
        rich_help_panel=OUTPUT,
    ),
]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="Compute part I (0 to N-1) of a run that is split over N independent jobs. All jobs may share "
        "one output folder. If a job fails, repeat its command.",
        show_default=False,
        rich_help_panel=RUNNING,
    ),
]
ExampleImages = Annotated[
    bool,
    typer.Option(
        "--images/--no-images",
        help="Include example images with their maps.",
        rich_help_panel=OUTPUT,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check the request, time a few images, print the estimated cost, and write nothing.",
        rich_help_panel=RUNNING,
    ),
]
Shards = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="With --dry-run: numbers of shards to estimate the time for. Default: 1,8,64.",
        show_default=False,
        rich_help_panel=RUNNING,
    ),
]
DryRunJson = Annotated[
    bool, typer.Option("--json", help="With --dry-run: print JSON.", rich_help_panel=RUNNING)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
StressRun = Annotated[
    str,
    typer.Argument(
        help="Folder written by `steadygaze stress`, or the folder of a model of `steadygaze sweep`; several "
        "seeds: A0,A1,A2."
    ),
]
Seen = Annotated[
    str | None,
    typer.Option(
        metavar="CLASSES",
        help="Classes that were trained on: a file with one per line, or a comma-separated list, each an "
        "index, a synset or a name. Their accuracy is compared separately from that of the other classes.",
    ),
]
ByClass = Annotated[bool, typer.Option("--by-class", help="Print every class.")]


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


def parse_region(text: str | None) -> Region | None:
    """Parse a region of a segmentation; None stays None.

    Examples:
        >>> parse_region("point=120,80").point
        (120.0, 80.0)
    """
    if text is None:
        return None
    from steadygaze.questions.regions import Region

    kind, _, numbers = text.partition("=")
    try:
        values = tuple(float(number) for number in numbers.split(","))
    except ValueError:
        values = ()
    if kind == "point" and len(values) == 2:
        return Region(point=values)
    if kind == "box" and len(values) == 4:
        return Region(box=values)
    raise InputError(f"expected point=X,Y or box=LEFT,TOP,RIGHT,BOTTOM, got {text!r}", option="region")


def model_options(
    class_names: Path | None,
    image_size: str | None,
    mean: str | None,
    std: str | None,
    model_kwargs: Sequence[str] | None,
) -> dict[str, Any]:
    """Return the arguments of `load_model` that the user gave."""
    from steadygaze.loading.options import parse_model_kwargs

    sides = split_numbers(image_size, "image_size")
    given = {
        "class_names": class_names,
        "image_size": None
        if sides is None
        else [int(side) for side in sides * (2 if len(sides) == 1 else 1)],
        "mean": split_numbers(mean, "mean"),
        "std": split_numbers(std, "std"),
        "model_kwargs": parse_model_kwargs(split_names(model_kwargs)) or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def parse_shards(dry_run: bool, shards: str | None, json: bool) -> list[int]:
    """Parse the numbers of shards of a dry run; an error without --dry-run.

    Examples:
        >>> parse_shards(True, "1,100", False)
        [1, 100]
    """
    if not dry_run and (shards is not None or json):
        raise InputError(
            f"expected --dry-run beside {'--shards' if shards is not None else '--json'}. Add it, or leave "
            f"the option out."
        )
    try:
        return [int(number) for number in (shards or "1,8,64").split(",")]
    except ValueError as error:
        raise InputError(
            f"expected whole numbers of 1 or more, such as 1,8,64, got {shards!r}", option="shards"
        ) from error


def command_line() -> str:
    """Return the command as the user typed it, for the records of a run."""
    return shlex.join(["steadygaze", *sys.argv[1:]])


def text_classes(
    texts: Sequence[str] | None, class_names: Path | None, templates: Sequence[str] | None
) -> TextClasses | None:
    """Return the classes of --text, --class-names and --template; None without these options."""
    if not texts and class_names is None:
        if templates:
            raise InputError("expected class names to fill the template with, got none", option="class_names")
        return None
    from steadygaze.loading.options import read_class_names
    from steadygaze.questions.text import TEMPLATES, TextClasses, parse_templates

    if texts and class_names is not None:
        raise InputError("give either texts or a file of class names, not both", option="text")
    if texts:
        if templates:
            raise InputError("a template applies to class names; texts are used unchanged", option="template")
        return TextClasses(texts=tuple(texts))
    assert class_names is not None
    names = read_class_names(class_names)
    one = templates[0] if templates and len(templates) == 1 else None
    chosen = parse_templates(one if one is not None else templates or TEMPLATES["photo"])
    return TextClasses(class_names=names, templates=chosen)
