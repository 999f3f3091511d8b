"""The options that commands share, each declared once: same name, same help, everywhere.

Frequent options have a short name, which means the same in every command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steadygaze.cli.commands.help_text import CLASSES, DATA, METHODS, MODEL, OUTPUT, RUNNING, SUITES
from steadygaze.method_registry import DEFAULT

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
        help="Mean of the normalisation, if it differs from the model's own: 0.5,0.5,0.5.",
        rich_help_panel=MODEL,
    ),
]
Std = Annotated[
    str | None,
    typer.Option(
        metavar="R,G,B",
        help="Standard deviation of the normalisation, if it differs from the model's own.",
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
Region = Annotated[
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
    "Labelled images: FOLDER/<synset, class index or class name>/, index.csv, WebDataset shards "
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
