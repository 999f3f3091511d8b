"""Options that several commands share, each declared once: same name, same help, everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from steadygaze.method_registry import DEFAULT

MODEL_SOURCES = (
    "a timm name, torchvision:NAME, open_clip:NAME@TAG, a transformers folder or owner/name, a folder "
    "written by `steadygaze train`, or 'embedded'"
)
METHOD_SYNTAX = "comma-separated, or repeat the option; method options as in attixg+plus:pairing=next"

Model = Annotated[str, typer.Option(help=f"Model: {MODEL_SOURCES}.")]
Checkpoint = Annotated[Path | None, typer.Option(help="Local weights: .safetensors, .pth, .pt or .bin.")]
NumClasses = Annotated[
    int | None, typer.Option(help="Number of classes, if it is not the checkpoint's.", show_default=False)
]
ImageSize = Annotated[
    str | None,
    typer.Option(help="Image size, if it is not the model's own: 320, or 256,320 (height, width)."),
]
Mean = Annotated[
    str | None, typer.Option(help="Mean of the normalisation, if not the model's own: 0.5,0.5,0.5.")
]
Std = Annotated[
    str | None,
    typer.Option(help="Standard deviation of the normalisation, if not the model's own: 0.5,0.5,0.5."),
]
ModelKwargs = Annotated[
    list[str] | None,
    typer.Option(
        help="Arguments of timm's constructor, KEY=VALUE: img_size=320; repeat the option for more."
    ),
]
Task = Annotated[
    str | None,
    typer.Option(
        help="What the model's outputs are: classification (classes), multilabel (independent labels) or "
        "regression (values). Default: what its configuration states, or classification.",
        show_default=False,
    ),
]
Text = Annotated[
    list[str] | None,
    typer.Option(
        "--text",
        help="For CLIP, SigLIP and open_clip models: a text to compare the image with. Repeat the option: "
        "then the texts are classes, and the most similar one is predicted.",
    ),
]
ClassNames = Annotated[
    Path | None,
    typer.Option(
        help="Class names: a text file with one name a line, or a JSON list or dict. For CLIP, SigLIP and "
        "open_clip models, the classes themselves."
    ),
]
Template = Annotated[
    list[str] | None,
    typer.Option(
        "--template",
        help="How --class-names become texts: 'a photo of a {}.' (default), photo, seven or none. Repeat the "
        "option to average over several.",
    ),
]
Region = Annotated[
    str | None,
    typer.Option(
        help="For segmenters: the pixels whose class is explained, point=X,Y or box=LEFT,TOP,RIGHT,BOTTOM, "
        "in pixels of the image as the model sees it."
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Execute Python code that a transformers folder or repository brings along.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")]

DATA = (
    "Labelled images: FOLDER/<synset, class index or class name>/, index.csv, WebDataset shards "
    "'wds:PATH/{0000..0015}.tar', or a Hugging Face dataset or Parquet folder: 'hf:owner/name?split=test', "
    "'hf:./folder'. Options follow a question mark: 'wds:a.tar?label=cls,label_names=synsets.txt'."
)
Data = Annotated[str, typer.Option(help=DATA)]
OptionalData = Annotated[str | None, typer.Option(help=DATA)]
Masks = Annotated[
    Path | None,
    typer.Option(
        help="Object masks: index.csv, the same relative paths as the images, ImageNet-S or Pascal VOC. "
        "Required by metrics and suites that compare with masks."
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Use at most this many images, spread evenly over the classes; of a stream, the first ones.",
    ),
]

Methods = Annotated[
    list[str] | None,
    typer.Option("--methods", "--method", help=f"Attribution methods, {METHOD_SYNTAX}. Default: {DEFAULT}."),
]
Method = Annotated[str, typer.Option("--method", "--methods", help="Method of the attribution maps.")]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics",
        "--metric",
        help="Metrics, comma-separated; `steadygaze metrics` lists them. Default: insertion_accuracy, "
        "deletion_accuracy, insertion_aopc and deletion_aopc.",
    ),
]
DiffMask = Annotated[
    Path | None,
    typer.Option(help="Gates trained by `steadygaze diffmask train`; required by the method diffmask."),
]
Shapley = Annotated[
    Path | None,
    typer.Option(help="Explainer trained by `steadygaze shapley train`; required by the method vit_shapley."),
]

Corruptions = Annotated[
    list[str] | None,
    typer.Option(
        help="Corruptions: all15, all19, or names. Also selects those of shift:imagenet-c. Default: all15."
    ),
]
Severities = Annotated[str | None, typer.Option(help="Corruption severities. Default: 1,2,3,4,5.")]
Epsilons = Annotated[
    str | None,
    typer.Option(help="Attack radii, as fractions of the pixel range. Default: 1/255,2/255,8/255."),
]

Seed = Annotated[int, typer.Option(min=0, help="Random seed.")]
BatchSize = Annotated[int, typer.Option("--batch-size", "--batch", min=1, help="Number of images per batch.")]
NumWorkers = Annotated[
    int | None,
    typer.Option(
        "--num-workers",
        "--workers",
        min=0,
        help="Number of workers that load images. Default: from the number of free cores.",
    ),
]

Out = Annotated[Path, typer.Option(help="Output folder. Repeat the command to resume an interrupted run.")]
Shard = Annotated[
    str | None,
    typer.Option(
        metavar="I/N",
        help="Compute part I (0 to N-1) of a run that is split over N independent jobs. All may share one "
        "output folder; repeat the command of a job that died.",
        show_default=False,
    ),
]
Html = Annotated[Path | None, typer.Option(help="HTML file to write.")]
ExampleImages = Annotated[
    bool,
    typer.Option(
        "--images/--no-images", "--pictures/--no-pictures", help="Include example images with their maps."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check everything, time a few images, print what the run will cost, and write nothing.",
    ),
]
Shards = Annotated[
    str | None,
    typer.Option(
        help="With --dry-run: numbers of shards to estimate the time for. Default: 1,8,64.",
        show_default=False,
    ),
]
DryRunJson = Annotated[bool, typer.Option("--json", help="With --dry-run: print JSON.")]
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
        help="Classes that were trained on: a file with one a line, or a list between commas, each an index, "
        "a synset or a name. Their accuracy is compared, and that of the other classes."
    ),
]
ByClass = Annotated[bool, typer.Option("--by-class", help="Print every class.")]
