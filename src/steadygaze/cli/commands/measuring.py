"""Commands that measure: verify, stress, card. Options of verify and stress are those of their requests."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from steadygaze.cli import options
from steadygaze.cli.options import (
    OUTPUT,
    SUITES,
    command_line,
    model_options,
    parse_shards,
    split_methods,
    split_names,
    split_numbers,
    text_classes,
)
from steadygaze.methods.registry import DEFAULT
from steadygaze.runs.request import (
    SUITE_OPTIONS,
    Option,
    Request,
    StressRequest,
    VerifyRequest,
    options_of,
)

LOADING: dict[str, Any] = {  # options of `load_model` that are not fields of a request
    "image_size": options.ImageSize,
    "mean": options.Mean,
    "std": options.Std,
    "model_kwargs": options.ModelKwargs,
    "text": options.Text,
    "class_names": options.ClassNames,
    "template": options.Template,
}
DRY_RUN: dict[str, Any] = {"dry_run": options.DryRun, "shards": options.Shards, "json": options.DryRunJson}
SPLIT: dict[str, Callable[[Any, str], Any]] = {
    "": lambda value, name: value,
    "names": lambda value, name: split_names(value),
    "methods": lambda value, name: split_methods(value),
    "numbers": split_numbers,
}
Command = TypeVar("Command", bound=Callable[..., None])


def takes(request: type[Request], more: Mapping[str, Option]) -> Callable[[Command], Command]:
    """Give a command the options of a request, and `more`, as its signature."""

    def decorate(command: Any) -> Any:
        own = [p for p in inspect.signature(command).parameters.values() if p.kind is not p.VAR_KEYWORD]
        parameters = [p.replace(annotation=typer.Context) for p in own] + list(_parameters(request, more))
        command.__signature__ = inspect.Signature(parameters)
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _parameters(request: type[Request], more: Mapping[str, Option]) -> Iterator[inspect.Parameter]:
    """Parameters as typer reads them. Required ones have no default."""
    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    for field, about in options_of(request):
        if about.command:
            single = isinstance(field.default, str | int | None)  # the default of a list is told by its help
            default = empty if about.required else field.default if single else None
            yield inspect.Parameter(field.name, kind, default=default, annotation=_annotation(about))
    for name, about in more.items():
        default = False if about.type is bool else None
        yield inspect.Parameter(name, kind, default=default, annotation=_annotation(about))
    for name, annotation in {**LOADING, **DRY_RUN}.items():
        default = False if name in ("dry_run", "json") else None
        yield inspect.Parameter(name, kind, default=default, annotation=annotation)


def _annotation(about: Option) -> Any:
    if about.alias:
        return getattr(options, about.alias)
    text = about.help.format_map(vars(options))
    minimum = 1 if about.type == int | None else None
    return Annotated[
        about.type,
        typer.Option(
            *about.flags, help=text, metavar=about.metavar, min=minimum, rich_help_panel=about.panel
        ),
    ]


def _request(request: type[Request], values: Mapping[str, Any], **more: Any) -> Any:
    """The request of a command's values; an option that was not given has the default of its field."""
    fields = {
        field.name: SPLIT[about.split](values[field.name], field.name)
        for field, about in options_of(request)
        if about.command and values[field.name] is not None
    }
    loading = [values[name] for name in ("image_size", "mean", "std", "model_kwargs")]
    return request(
        **{"data": None, **fields},
        model_options=model_options(None, *loading),
        words=text_classes(values["text"], values["class_names"], values["template"]),
        command=command_line(),
        **more,
    )


@takes(VerifyRequest, {})
def verify(**values: Any) -> None:
    """Measure the faithfulness of attribution methods on your model and data.

    Prints a ranking of the methods and writes one row per image, method and metric; `steadygaze report`
    turns the rows into a page.

    Example: steadygaze verify -m embedded -d photos --methods gae,gaze -o run
    Example: steadygaze verify -m deit_small_patch16_224 -d imagenet/val -n 500 --methods quick -o run
    Example: steadygaze verify -m deit_small_patch16_224 -d imagenet/val --methods all --dry-run -o run
    """
    from steadygaze.cli.verify import estimate, run

    shards = parse_shards(values["dry_run"], values["shards"], values["json"])
    request = _request(VerifyRequest, values)
    raise typer.Exit(estimate(request, shards, values["json"]) if values["dry_run"] else run(request))


@takes(StressRequest, SUITE_OPTIONS)
def stress(context: typer.Context, **values: Any) -> None:
    """Measure robustness: accuracy, calibration and attention under corruption, shift, attack and occlusion.

    Prints the scores of each suite and writes one row per image, setting and metric. Options of suites from
    other packages are accepted too: --NAME VALUE.

    Example: steadygaze stress -m embedded -d photos --suites corruptions,occlusion -o run
    Example: steadygaze stress -m resnet50 -d imagenet/val -n 500 --suites corruptions --severities 3 -o run
    Example: steadygaze stress -m deit_small_patch16_224 --suites shift:imagenet-a=imagenet-a -o run
    """
    from steadygaze.cli.stress import estimate, run, suite_options

    shards = parse_shards(values["dry_run"], values["shards"], values["json"])
    declared = {name: values[name] or None for name in SUITE_OPTIONS}
    request = _request(StressRequest, values, options={**declared, **suite_options(context.args)})
    raise typer.Exit(estimate(request, shards, values["json"]) if values["dry_run"] else run(request))


def card(
    *,
    before: Annotated[
        str,
        typer.Argument(
            help="First model: a name, NAME@WEIGHTS, or a folder written by `steadygaze train`; or the "
            "folder OUT/before of an earlier card.",
        ),
    ],
    after: Annotated[str, typer.Argument(help="Second model, in the same forms.")],
    data: options.OptionalData = None,
    masks: options.Masks = None,
    methods: options.Methods = None,
    metrics: options.Metrics = None,
    suites: Annotated[
        list[str] | None,
        typer.Option(
            "--suites",
            "-s",
            help="Suites, as for stress. Default: corruptions, attacks, occlusion, attention.",
            rich_help_panel=SUITES,
        ),
    ] = None,
    corruptions: options.Corruptions = None,
    severities: options.Severities = None,
    epsilons: options.Epsilons = None,
    limit: options.Limit = None,
    seed: options.Seed = 0,
    batch_size: options.BatchSize = 16,
    class_names: options.ClassNames = None,
    image_size: options.ImageSize = None,
    mean: options.Mean = None,
    std: options.Std = None,
    model_kwargs: options.ModelKwargs = None,
    show: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of example images.", rich_help_panel=OUTPUT)
    ] = 6,
    images: options.ExampleImages = True,
    device: options.Device = "auto",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Output folder. Repeat the command to resume. Default: the folder card inside the second "
            "model's folder, or steadygaze-card.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
) -> None:
    """Compare two models on one page: accuracy, robustness, attention, faithfulness, maps, classes.

    Measures both models on the same images, prints the differences and writes card.html.

    Example: steadygaze card deit_tiny_patch16_224 run -d imagenet/val -n 500
    Example: steadygaze card vit_tiny@a.safetensors vit_tiny@b.safetensors -d photos -o card
    """
    from steadygaze.cli.card import default_out, run
    from steadygaze.runs.before_after import SUITES as DEFAULT_SUITES
    from steadygaze.runs.before_after import CardRequest

    request = CardRequest(
        data=data,
        out=out or default_out(after),
        suites=split_names(suites) or DEFAULT_SUITES,
        methods=split_methods(methods or [DEFAULT]),
        metrics=split_names(metrics),
        masks=masks,
        options={"corruptions": corruptions, "severities": severities, "epsilons": epsilons},
        model_options=model_options(class_names, image_size, mean, std, model_kwargs),
        limit=limit,
        seed=seed,
        batch_size=batch_size,
        device=device,
        command=command_line(),
    )
    raise typer.Exit(run(before, after, request, show, images))
