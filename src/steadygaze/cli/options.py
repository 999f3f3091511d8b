"""How `--help` looks: options in groups, flags without a value, examples at the end, at most 80 columns.

Plain text, so that help needs no import of rich. An option names its group with `rich_help_panel`, as in any
typer program, and its value with `metavar`. Lines `Example: ...` at the end of a command's docstring become
the examples.

The options that commands share, each declared once: same name, same help, everywhere.

Frequent options have a short name, which means the same in every command.

From the text of options to values.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from steadygaze.errors import InputError
from steadygaze.methods.registry import DEFAULT

if TYPE_CHECKING:
    from steadygaze.questions.regions import Region
    from steadygaze.questions.text import TextClasses

# groups of options, used as rich_help_panel; help lists them in this order, and groups of other names after
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
OTHER = "Other options"
ORDER = [ARGUMENTS, RECIPE, MODEL, CLASSES, DATA, METHODS, SUITES, TRAINING, OUTPUT, RUNNING, SERVER, LIMITS]

WIDTH = 78  # columns of a line of an example; the help is indented by two
COLUMN = 24  # widest left column: longer names stand on a line of their own
EXAMPLE = re.compile(r"^Example: *(.*(?:\n(?!Example:).+)*)", re.MULTILINE)


class HelpfulCommand(TyperCommand):
    """A command whose help shows required options in the usage line, groups of options, and examples."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.help, self.examples = split_examples(self.help or "")
        self.short_help = self.short_help or one_line(self.help)
        self.epilog = "\n".join(f"Example: {example}" for example in self.examples)  # for other readers

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [usage_name(param) for param in self.params if param.param_type_name == "argument"]
        required = [
            f"{param.opts[0]} {value_name(param)}"
            for param in self.params
            if param.param_type_name == "option" and param.required
        ]
        return [*arguments, *required, "[OPTIONS]"]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        write_parameters(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.examples, formatter)


class HelpfulGroup(TyperGroup):
    """A group of commands, listed by subject."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.help, self.examples = split_examples(self.help or "")

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False  # typer imports pydantic to convert None, which takes 0.1 s
        return option

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                title = panel if isinstance(panel, str) else "Commands"
                groups.setdefault(title, []).append((name, one_line(command.short_help or command.help)))
        widest = max((len(name) for rows in groups.values() for name, _ in rows), default=0)
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), text) for name, text in rows])
        write_parameters(self.get_params(ctx), ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.examples, formatter)


def split_examples(text: str) -> tuple[str, list[str]]:
    """The text of a help without its lines `Example: ...`, and the commands that they show.

    >>> split_examples("List methods.\\n\\nExample: steadygaze methods\\nExample: steadygaze methods --json")
    ('List methods.', ['steadygaze methods', 'steadygaze methods --json'])
    """
    examples = [one_line(match[1]) for match in EXAMPLE.finditer(text)]
    return EXAMPLE.sub("", text).rstrip(), examples


def one_line(text: str | None) -> str:
    """The first paragraph in one line."""
    return " ".join((text or "").partition("\n\n")[0].split())


def write_parameters(parameters: Sequence[Any], ctx: Any, formatter: Any) -> None:
    """Arguments, then options by group; those without a group come last."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for param in parameters:
        if getattr(param, "hidden", False):
            continue
        is_argument = param.param_type_name == "argument"
        title = ARGUMENTS if is_argument else getattr(param, "rich_help_panel", None) or OTHER
        name = usage_name(param).strip("[]") if is_argument else option_name(param)
        groups.setdefault(title, []).append((name, description(param, ctx)))
    others = groups.pop(OTHER, [])
    ordered = {title: groups.pop(title) for title in ORDER if title in groups} | groups
    if others:
        ordered[OTHER if ordered.keys() - {ARGUMENTS} else "Options"] = others
    for title, rows in ordered.items():
        with formatter.section(title):
            widest = min(COLUMN, max((len(name) for name, _ in rows), default=0))
            formatter.write_dl([(name.ljust(widest), text) for name, text in rows], col_max=COLUMN)


def option_name(param: Any) -> str:
    """`-m, --model MODEL`, `--json` or `--images/--no-images`; aliases of the long name are not shown."""
    names = sorted(param.opts, key=lambda name: name.startswith("--"))  # -m first; the sort is stable
    long = next((name for name in names if name.startswith("--")), names[0])
    short = [name for name in names if not name.startswith("--")][:1]
    text = ", ".join(dict.fromkeys([*short, long]))
    if param.secondary_opts:
        return f"{text}/{param.secondary_opts[0]}"
    return text if is_flag(param) else f"{text} {value_name(param)}"


def is_flag(param: Any) -> bool:
    """Whether an option takes no value."""
    return bool(getattr(param, "is_flag", False) or getattr(param, "count", False))


def value_name(param: Any) -> str:
    """What stands for the value of an option: its metavar, or its name in capitals."""
    return param.metavar or str(param.name).upper()


def usage_name(param: Any) -> str:
    """An argument in the usage line, such as `IMAGES...` or `[RECIPE]`."""
    name = value_name(param) + ("..." if param.nargs == -1 else "")
    return name if param.required else f"[{name}]"


def description(param: Any, ctx: Any) -> str:
    """The help of a parameter with its default value, or with "required"."""
    text = param.help or ""
    if param.required and param.param_type_name == "option":
        return f"{text} [required]".strip()
    default = param.get_default(ctx, call=False) if param.show_default else None
    if is_flag(param):
        default = "yes" if default and param.secondary_opts else None
    is_value = isinstance(default, str | int | float | PurePath)  # not a list, nor click's mark for none
    return f"{text} [default: {default}]".strip() if is_value and default != "" else text


def write_examples(examples: Sequence[str], formatter: Any) -> None:
    """The examples, each continued with a backslash where it is longer than a line."""
    if not examples:
        return
    with formatter.section("Examples"):
        for example in examples:
            for line in continued(example):
                formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def continued(command: str) -> list[str]:
    """The lines of a command, as a shell continues them.

    >>> continued("steadygaze methods")
    ['steadygaze methods']
    """
    pieces = re.split(r" (?=-)", command)  # an option stays with its value
    lines = [pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + 1 + len(piece) <= WIDTH - 4:
            lines[-1] += f" {piece}"
        else:
            lines.append(f"    {piece}")
    wrapper = TextWrapper(WIDTH - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    whole = [line for long in lines for line in wrapper.wrap(long)]
    return [f"{line} \\" for line in whole[:-1]] + whole[-1:]


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

Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--methods",
        "--method",
        "-M",
        help=f"Attribution methods, {METHOD_SYNTAX}. Default: {DEFAULT}.",
        rich_help_panel=METHODS,
    ),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics",
        "--metric",
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
        "--batch",
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
        "--workers",
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
        "--pictures/--no-pictures",
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
    """Comma-separated names.

    >>> split_names(["corruptions,attacks", "occlusion"])
    ['corruptions', 'attacks', 'occlusion']
    """
    pieces = [piece.strip() for text in texts or () for piece in text.split(",")]
    return [piece for piece in pieces if piece]


def split_methods(texts: Sequence[str]) -> list[str]:
    """Comma-separated methods; a comma before `key=value` continues the options of the preceding method.

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
    """Comma-separated numbers; None stays None.

    >>> split_numbers("0.1,0.5", "ratios")
    [0.1, 0.5]
    """
    try:
        return None if text is None else [float(piece) for piece in text.split(",")]
    except ValueError as error:
        raise InputError(f"expected numbers such as 0.1,0.5,0.9; got {text!r}", option=option) from error


def parse_region(text: str | None) -> Region | None:
    """A region of a segmentation; None stays None.

    >>> parse_region("point=120,80").point
    (120.0, 80.0)
    """
    if text is None:
        return None
    from steadygaze.questions.regions import Region

    kind, _, numbers = text.partition("=")
    try:
        given = tuple(float(number) for number in numbers.split(","))
    except ValueError:
        given = ()
    if kind == "point" and len(given) == 2:
        return Region(point=given)
    if kind == "box" and len(given) == 4:
        return Region(box=given)
    raise InputError(f"expected point=X,Y or box=LEFT,TOP,RIGHT,BOTTOM, got {text!r}", option="region")


def model_options(
    class_names: Path | None,
    image_size: str | None,
    mean: str | None,
    std: str | None,
    model_kwargs: Sequence[str] | None,
) -> dict[str, Any]:
    """The arguments of `load_model` that were given."""
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
    """The numbers of shards of a dry run; an error if there is none.

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
    """The command as the user typed it, for the records of a run."""
    return shlex.join(["steadygaze", *sys.argv[1:]])


def text_classes(
    texts: Sequence[str] | None, class_names: Path | None, templates: Sequence[str] | None
) -> TextClasses | None:
    """The classes given by --text, --class-names and --template; None if none of them is given."""
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
