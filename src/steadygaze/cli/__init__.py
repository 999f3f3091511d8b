"""The command line. This module only declares it: torch and the like are imported inside the commands, so that
`steadygaze --help` answers at once."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from steadygaze import __version__
from steadygaze.cli.diffmask import diffmask as diffmask_commands
from steadygaze.errors import SteadygazeError
from steadygaze.method_registry import DEFAULT

__all__ = ["app", "main"]

METRIC_NAMES = (
    "Removal: insertion_accuracy, deletion_accuracy, insertion_aopc, deletion_aopc. Pixels: positive_perturbation, negative_perturbation, "
    "and DiffMask's positive_kl, positive_accuracy, negative_kl, negative_accuracy, each also with _code. With masks: average_precision, "
    "pixel_accuracy, miou, map_chefer, pointing_game, mask_share, truth_auroc, truth_precision. Sanity: randomisation, class_sensitivity, "
    "agreement."
)


class Commands(TyperGroup):
    """Prints steadygaze's own errors as one message with exit code 2; `--debug`, anywhere, asks for the traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["debug"] = "--debug" in args
        return super().parse_args(ctx, [word for word in args if word != "--debug"])

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SteadygazeError as error:
            if ctx.meta["debug"]:
                raise
            typer.secho(f"error: {error}{self.flag(ctx, error)}", fg=typer.colors.RED, err=True)
            raise typer.Exit(2) from error

    def flag(self, ctx: Any, error: SteadygazeError) -> str:
        """The command's option that the error is about, such as " (--masks)"; "" if there is none."""
        command = self.commands.get(ctx.invoked_subcommand or "")
        while isinstance(command, TyperGroup) and len(command.commands) == 1:  # diffmask has one command: train
            command = next(iter(command.commands.values()))
        for parameter in command.params if command else ():
            if parameter.name == error.option and parameter.opts[0] not in str(error):
                return f" ({parameter.opts[0]})"
        return ""


app = typer.Typer(cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.add_typer(diffmask_commands, name="diffmask")


def _version(asked: bool) -> bool:
    if asked:
        typer.echo(f"steadygaze {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """See what a vision transformer looks at, test whether that explanation is true, and steady its gaze."""


@app.command()
def explain(
    images: Annotated[list[Path], typer.Argument(help="Picture files, or folders of them.")],
    model: Annotated[
        str,
        typer.Option(
            help="timm name, torchvision:NAME, transformers folder or owner/name, a folder of `train`, or 'embedded'."
        ),
    ],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Local weights: .safetensors, .pth, .pt, .bin.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Methods, separated by commas; options as in attixg+plus:pairing=next. Default: {DEFAULT}."
        ),
    ] = None,
    target: Annotated[
        str, typer.Option(help="auto (the predicted class), a class number, or a class name.")
    ] = "auto",
    top: Annotated[
        int, typer.Option(min=1, help="Explain each of the most probable classes, this many.")
    ] = 1,
    score: Annotated[
        str | None,
        typer.Option(help="logit, log_prob, log_odds, contrast or prob. Default: the method's own."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 8,
    signed: Annotated[bool, typer.Option("--signed", help="Draw evidence against the class too.")] = False,
    patches: Annotated[bool, typer.Option("--patches", help="Draw patches with hard edges, too.")] = False,
    diffmask: Annotated[
        Path | None, typer.Option(help="Gates of `steadygaze diffmask train`, for the method diffmask.")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="Width of the classifier, if not the checkpoint's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("steadygaze-out"),
) -> None:
    """Which patches made my model say this? Writes overlays, a comparing grid, scores.npz and manifest.json."""
    from steadygaze.cli.explain import Request, run

    request = Request(
        images=images, model=model, checkpoint=checkpoint, methods=split_methods(method or [DEFAULT]), target=target,
        top=top, score=score, batch=batch, signed=signed, num_classes=num_classes, device=device, out=out,
        diffmask=diffmask, patches=patches,
    )  # fmt: skip
    raise typer.Exit(run(request))


@app.command()
def verify(
    model: Annotated[
        str,
        typer.Option(
            help="timm name, torchvision:NAME, transformers folder or owner/name, a folder of `train`, or 'embedded'."
        ),
    ],
    data: Annotated[
        Path, typer.Option(help="Labelled pictures: FOLDER/<synset, index or class name>/, or index.csv.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the rows; the same command goes on where it stopped.")
    ],
    checkpoint: Annotated[
        Path | None, typer.Option(help="Local weights: .safetensors, .pth, .pt, .bin.")
    ] = None,
    masks: Annotated[
        Path | None,
        typer.Option(help="Masks: index.csv, the same paths as the pictures, ImageNet-S, Pascal VOC."),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Methods between commas; all: every one the model serves; quick: all but the searches. Default: {DEFAULT}."
        ),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(help=f"Metrics, separated by commas. Default: the four removal scores. {METRIC_NAMES}"),
    ] = None,
    score: Annotated[
        list[str] | None,
        typer.Option(
            help="logit, log_prob, log_odds, contrast, prob, or several. Default: each method's own."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="So many pictures, spread evenly over the classes.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn at random.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 16,
    start_layers: Annotated[
        str | None,
        typer.Option(help="all, or 0,3,6: score each method with PLUS begun at each of these layers."),
    ] = None,
    ratios: Annotated[
        str | None, typer.Option(help="Shares of the patches. Default: 0.1,0.2,...,0.9.")
    ] = None,
    fill: Annotated[
        str,
        typer.Option(
            help="What positive_ and negative_perturbation paint: zero (black), mean, blur or noise."
        ),
    ] = "zero",
    target: Annotated[
        str, typer.Option(help="Class explained: label, predicted, a number or a name.")
    ] = "label",
    workers: Annotated[int, typer.Option(min=0, help="Threads that read pictures ahead.")] = 0,
    diffmask: Annotated[
        Path | None, typer.Option(help="Gates of `steadygaze diffmask train`, for the method diffmask.")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="Width of the classifier, if not the checkpoint's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
) -> None:
    """Is the explanation true? Ranks methods by faithfulness and localisation on your model and data."""
    from steadygaze.cli.verify import run
    from steadygaze.runs.request import Request, command_line, numbers, words

    request = Request(
        model=model, data=data, out=out, checkpoint=checkpoint, masks=masks, methods=split_methods(methods or [DEFAULT]),
        metrics=words(metrics), scores=words(score) or None, limit=limit, seed=seed, batch=batch,
        start_layers=start_layers, ratios=numbers(ratios), fill=fill, target=target, workers=workers, num_classes=num_classes,
        device=device, command=command_line(), diffmask=diffmask,
    )  # fmt: skip
    raise typer.Exit(run(request))


@app.command()
def stress(
    model: Annotated[
        str,
        typer.Option(
            help="timm name or torchvision:NAME (CNNs too), transformers folder or owner/name, a folder of `train`, 'embedded'."
        ),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the rows; the same command goes on where it stopped.")
    ],
    suite: Annotated[
        list[str],
        typer.Option(
            help="corruptions, sequences, attacks, occlusion, attention, synthetic, shift:NAME=FOLDER, "
            "neighbours:NAME=FOLDER (with train/ and test/, or a published set), neighbours:NAME=TRAIN=TEST. "
            "Of a segmenter: segmentation, alone."
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            help="Labelled pictures: FOLDER/<synset, index or class name>/, or index.csv. Only shift and neighbours do without."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Local weights: .safetensors, .pth, .pt, .bin.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="So many pictures of each set, spread evenly over the classes.")
    ] = None,
    corruptions: Annotated[
        list[str] | None, typer.Option(help="all15 (the default), all19, or names; of shift:imagenet-c too.")
    ] = None,
    severities: Annotated[str | None, typer.Option(help="Of the corruptions. Default: 1,2,3,4,5.")] = None,
    epsilons: Annotated[
        str | None, typer.Option(help="Of the attacks, shares of the full scale. Default: 1/255,2/255,8/255.")
    ] = None,
    pgd_steps: Annotated[int, typer.Option(min=1, help="Steps of PGD.")] = 10,
    salient: Annotated[
        str, typer.Option(help="Method by which the most salient tokens are dropped.")
    ] = DEFAULT,
    masks: Annotated[
        Path | None, typer.Option(help="For synthetic, segmentation: masks, as for verify.")
    ] = None,
    backgrounds: Annotated[Path | None, typer.Option(help="For synthetic: a folder of pictures.")] = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Take shifts and sets of neighbours that are downloaded in part."),
    ] = False,
    bank: Annotated[
        int | None,
        typer.Option(min=1, help="For neighbours: so many training pictures, spread evenly. Default: all."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn at random.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 16,
    workers: Annotated[
        int | None,
        typer.Option(min=0, help="Processes that make pictures ahead. Default: by the free cores."),
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="Width of the classifier, if not the checkpoint's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
) -> None:
    """How does the model hold up? Its card under corruption, shift, attack and occlusion, and what attention does."""
    from steadygaze.cli.stress import run
    from steadygaze.runs.request import command_line
    from steadygaze.runs.stress_request import Request
    from steadygaze.runs.stress_suite import Options

    options = Options.of(
        corruptions=corruptions,
        severities=severities,
        epsilons=epsilons,
        pgd_steps=pgd_steps,
        salient=salient,
    )
    request = Request(
        model=model, data=data, out=out, suite=suite, checkpoint=checkpoint, masks=masks, backgrounds=backgrounds,
        limit=limit, seed=seed, batch=batch, workers=workers, partial=partial, bank=bank, options=options,
        num_classes=num_classes, device=device, command=command_line(),
    )  # fmt: skip
    raise typer.Exit(run(request))


@app.command("compare-models")
def compare_models(
    before: Annotated[
        str, typer.Argument(help="A folder that `steadygaze stress` wrote; several seeds: A0,A1,A2.")
    ],
    after: Annotated[str, typer.Argument(help="The same of the other model, on the same pictures.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file. Default: compare.html in the second folder.")
    ] = None,
    setting: Annotated[
        str, typer.Option(help="The setting whose classes and pictures are compared.")
    ] = "clean",
    method: Annotated[str, typer.Option(help="The method of the maps.")] = DEFAULT,
    show: Annotated[int, typer.Option(min=0, help="So many pictures that turned wrong, and right.")] = 8,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Show them with their maps.")
    ] = True,
) -> None:
    """Before and after: every metric's paired difference, classes gained and lost, pictures turned wrong or right."""
    from steadygaze.cli.compare import run

    raise typer.Exit(run(before, after, out, setting, method, show, pictures))


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `steadygaze verify` or `stress` wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="The HTML file. Default: report.html in the first folder.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="Compare every method with this one. Default: the best.")
    ] = None,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Show best and worst pictures.")
    ] = True,
) -> None:
    """One HTML file that works offline: numbers, curves, pictures, how it was run; table.csv and table.md beside it."""
    from steadygaze.cli.report import run

    raise typer.Exit(run(runs, out, baseline, pictures))


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Argument(help="A TOML file, or the name of a shipped recipe (--list).")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the run; the same command goes on where it stopped. Default: steadygaze-train/RECIPE."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change the recipe: data.train=FOLDER, seed=1, epochs=3, ..."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="auto or cpu; several GPUs or processes: accelerate launch.")
    ] = "auto",
    listed: Annotated[
        bool, typer.Option("--list", help="The shipped recipes: what, cost, measured result.")
    ] = False,
    show: Annotated[
        bool,
        typer.Option("--show", help="Print the recipe as it is shipped or written, instead of running it."),
    ] = False,
) -> None:
    """Make it hold up: train or finetune by a recipe, with losses and modules that steady the model's gaze."""
    from steadygaze.cli.train import list_recipes, run, show_recipe
    from steadygaze.runs.request import command_line

    if listed:
        raise typer.Exit(list_recipes())
    if recipe is None:
        raise typer.BadParameter("expected a recipe: a TOML file, or a name of `steadygaze train --list`")
    if show and settings:
        raise typer.BadParameter(
            "--show prints the recipe as it is: expected no --set beside it; leave one of the two out"
        )
    if show:
        raise typer.Exit(show_recipe(recipe))
    where = out or Path("steadygaze-train") / Path(recipe).stem
    raise typer.Exit(run(recipe, where, settings or [], device, command_line()))


@app.command()
def card(
    before: Annotated[
        str,
        typer.Argument(help="A model: a name, NAME@WEIGHTS, a folder of `train`; or OUT/before of a card."),
    ],
    after: Annotated[str, typer.Argument(help="The same of the other model.")],
    data: Annotated[
        Path | None, typer.Option(help="Labelled pictures: FOLDER/<class>/, or index.csv.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the card; the same command goes on where it stopped. Default: card in the second folder of `train`."
        ),
    ] = None,
    suite: Annotated[
        list[str] | None,
        typer.Option(help="As for stress. Default: corruptions, attacks, occlusion, attention."),
    ] = None,
    corruptions: Annotated[
        list[str] | None, typer.Option(help="all15 (the default), all19, or names.")
    ] = None,
    severities: Annotated[str | None, typer.Option(help="Of the corruptions. Default: 1,2,3,4,5.")] = None,
    epsilons: Annotated[str | None, typer.Option(help="Of the attacks. Default: 1/255,2/255,8/255.")] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help=f"Whose faithfulness is measured. Default: {DEFAULT}.")
    ] = None,
    metrics: Annotated[
        list[str] | None, typer.Option(help="As for verify. Default: the four removal scores.")
    ] = None,
    masks: Annotated[Path | None, typer.Option(help="For metrics of localisation, as for verify.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="So many pictures, spread evenly over the classes.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn at random.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Pictures at a time.")] = 16,
    show: Annotated[int, typer.Option(min=0, help="So many pictures with maps.")] = 6,
    pictures: Annotated[
        bool, typer.Option("--pictures/--no-pictures", help="Show pictures with maps.")
    ] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
) -> None:
    """Before and after training in one page: accuracy, robustness, attention, faithfulness, maps, classes."""
    from steadygaze.cli.card import default_out, run
    from steadygaze.runs.card import SUITE, Ask
    from steadygaze.runs.request import command_line, words
    from steadygaze.runs.stress_suite import Options

    chosen = split_methods(methods or [DEFAULT])
    options = Options.of(corruptions=corruptions, severities=severities, epsilons=epsilons)
    ask = Ask(
        data=data, out=out or default_out(after), suite=words(suite) or SUITE, methods=chosen, metrics=words(metrics), masks=masks,
        options=options, limit=limit, seed=seed, batch=batch, device=device, command=command_line(),
    )  # fmt: skip
    raise typer.Exit(run(before, after, ask, chosen[0], show, pictures))


@app.command()
def curves(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `steadygaze train` wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="The SVG file. Default: curves.svg in the first folder.")
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(help="Of log.csv, separated by commas. Default: all that have numbers."),
    ] = None,
) -> None:
    """The training curves of several runs in one picture."""
    from steadygaze.cli.curves import run
    from steadygaze.runs.request import words

    raise typer.Exit(run(runs, out, words(columns)))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("steadygaze-demo"),
) -> None:
    """Explain a few small pictures with six methods side by side, with the embedded model; needs no network."""
    from steadygaze.cli.demo import run

    raise typer.Exit(run(out))


@app.command("app")
def serve(
    model: Annotated[
        str,
        typer.Option(
            help="timm name, torchvision:NAME, transformers folder or owner/name, a folder of `train`, or 'embedded'."
        ),
    ] = "embedded",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Local weights: .safetensors, .pth, .pt, .bin.")
    ] = None,
    diffmask: Annotated[
        Path | None, typer.Option(help="Gates of `steadygaze diffmask train`, for the method diffmask.")
    ] = None,
    num_classes: Annotated[
        int | None, typer.Option(help="Width of the classifier, if not the checkpoint's.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    host: Annotated[
        str, typer.Option(help="Who may come: 127.0.0.1 is this machine alone, 0.0.0.0 everybody.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where the page is served.")] = 7860,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """A page to click in: explain a picture, test the explanation on it, take patches away (needs the extra: app)."""
    from steadygaze.cli.serving import run

    raise typer.Exit(run(model, checkpoint, num_classes, diffmask, device, host, port, show))


@app.command()
def methods(json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False) -> None:
    """List the explanation methods."""
    from steadygaze.cli.listing import list_methods

    list_methods(json)


@app.command()
def models(
    pattern: Annotated[str, typer.Argument(help="Part of a name, or a pattern with * and ?.")] = "*",
    json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """List the models that can be named, and how each is viewed."""
    from steadygaze.cli.listing import list_models

    list_models(pattern, json)


def split_methods(texts: list[str]) -> list[str]:
    """Names between commas; a comma before `key=value` continues the options of the method before it.

    >>> split_methods(["gae,attixg+plus:pairing=next,freeze=0.75,cat"])
    ['gae', 'attixg+plus:pairing=next,freeze=0.75', 'cat']
    """
    names: list[str] = []
    for piece in (piece.strip() for text in texts for piece in text.split(",")):
        if names and "=" in piece and ":" not in piece:
            names[-1] += "," + piece
        elif piece:
            names.append(piece)
    return list(dict.fromkeys(names))


def main() -> None:
    """Entry of the console script. Warnings are lines for the user there, without the place in the code."""
    warnings.formatwarning = lambda message, *where, **more: f"warning: {message}\n"
    app(prog_name="steadygaze")
