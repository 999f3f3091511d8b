"""Commands that train: `train` from a recipe, `sweep` over a grid of recipes, and `diffmask train` and
`shapley train`, which train an explanation method for a model.

Exit codes: 0, success; 1, success without the images that could not be read, or an explanation method that
diverged or was trained too shortly; 2, invalid input; 3, a run could not continue (a loss that is not finite,
a full disk); 130, interrupted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steadygaze.cli import options
from steadygaze.cli.options import (
    DATA,
    RECIPE,
    RUNNING,
    TRAINING,
    DryRun,
    HelpfulCommand,
    command_line,
    declare,
    declare_out,
    takes,
)
from steadygaze.cli.output import (
    STYLE,
    WIDTH,
    Column,
    dry_run,
    duration,
    print_line,
    print_table,
    progress_bar,
    stderr,
    stdout,
    wide,
)
from steadygaze.errors import InputError, RowsNotWrittenError
from steadygaze.progress import OnProgress
from steadygaze.quantity import plural

if TYPE_CHECKING:
    from rich.console import Console

    from steadygaze.runs.sweep import SweepRun, SweepTable
    from steadygaze.training.sweep import Sweep

LISTED = 20  # unreadable images that are listed at the end

ListFlag = Annotated[
    bool, declare(RECIPE, "List the shipped ones with their cost and measured results.", "--list")
]
ListAll = Annotated[bool, declare(RECIPE, "With --list: also recipes that were not measured here.", "--all")]
Show = Annotated[bool, declare(RECIPE, "Print the TOML text instead of running it.", "--show")]


@takes(DryRun)
def train(
    *,
    recipe: Annotated[
        str | None, typer.Argument(help="TOML file, or the name of a shipped recipe (see --list).")
    ] = None,
    settings: Annotated[
        list[str] | None,
        declare(
            RECIPE,
            "Override a value of the recipe: data.train=FOLDER, seed=1, epochs=3. May be repeated.",
            "--set",
            metavar="KEY=VALUE",
        ),
    ] = None,
    list_recipes: ListFlag = False,
    list_all: ListAll = False,
    show: Show = False,
    device: Annotated[
        str, declare(RUNNING, "auto or cpu. For several GPUs or processes, use accelerate launch.")
    ] = "auto",
    out: Annotated[
        Path | None,
        declare_out(
            "FOLDER", "Output folder. Repeat the command to resume. Default: steadygaze-train/RECIPE."
        ),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    allow_pipe: options.AllowPipe = False,
    **values: Any,
) -> None:
    """Train or fine-tune from a recipe, with losses and modules that improve robustness and attributions.

    Example: steadygaze train --list
    Example: steadygaze train cifar10-tap --set data.train=cifar10/train -o run
    Example: steadygaze train my.toml --set seed=1 --dry-run
    """
    if list_recipes:
        print_recipes(list_all)
        return
    from steadygaze.training.recipe_files import recipe_text

    numbers = DryRun(**values).numbers
    if list_all:
        raise typer.BadParameter("--all: expected --list beside it")
    if recipe is None:
        raise typer.BadParameter("expected a recipe: a TOML file, or a name from `steadygaze train --list`")
    _check_show(show, settings)
    text = recipe_text(recipe)  # an unknown name is an error before torch is imported
    from steadygaze.training.loop import train as train_recipe
    from steadygaze.training.recipe import read_recipe

    if show:
        read_recipe(recipe, allow_pipe=True)  # an error if it is not valid
        print(text, end="")
        return
    changes = parse_settings(settings or [])
    if not values["dry_run"]:
        changes["command"] = command_line()
    chosen = read_recipe(recipe, changes, allow_pipe=allow_pipe)
    if not chosen.data.train:
        raise InputError("data.train: expected a folder of images. Add --set data.train=FOLDER.")
    folder = out or Path("steadygaze-train") / Path(recipe).stem
    if values["dry_run"]:
        from steadygaze.runs.estimate import estimate_train

        estimate = partial(estimate_train, chosen, folder, device=device, trust_remote_code=trust_remote_code)
        raise typer.Exit(dry_run(estimate, numbers, values["json"]))
    is_main = os.environ.get("RANK", "0") == "0"
    with supervised(folder, visible=is_main) as on_progress:
        result = train_recipe(
            chosen, folder, on_progress=on_progress, device=device, trust_remote_code=trust_remote_code
        )
    if is_main:
        console = wide()
        for title, score in (("top-1 accuracy", result.top1), ("mIoU", result.miou)):
            if score is not None:
                print_line(console, f"{title} on the test images: {100 * score:.2f} %", "bold")
        text = "wrote" if result.steps else "the run had finished before; its weights are"
        print_line(console, f"{text} {result.weights}")
        print_list(console, "skipped, unreadable", result.unreadable)
    raise typer.Exit(1 if result.unreadable else 0)


def _check_show(show: bool, settings: list[str] | None) -> None:
    if show and settings:
        raise typer.BadParameter(
            "--show prints the file without changes: expected no --set beside it. Remove one of the two."
        )


def print_recipes(list_all: bool) -> None:
    """Print the shipped recipes with their cost and measured results, or only the measured ones."""
    from steadygaze.registry import catalog

    recipes = catalog()["recipes"]
    shown = [recipe for recipe in recipes if list_all or recipe["is_measured"]]
    rows: list[tuple[list[str], str]] = []
    for recipe in shown:
        facts = [f"{title}: {recipe[title]}" for title in ("cost", "result") if recipe[title]]
        rows.append(([recipe["name"], "\n".join([recipe["about"], *facts, ""])], ""))
    columns = [Column("recipe", "name"), Column("description, cost, measured result", "text")]
    print_table(wide(), columns, rows, title=f"{len(rows)} recipes")
    if len(shown) < len(recipes):
        print_line(
            wide(), f"{len(recipes) - len(shown)} more were not measured here: steadygaze train --list --all"
        )


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Changes of a recipe from key=value. Values are TOML; a word without quotes is a string.

    Examples:
        >>> parse_settings(["seed=1", "data.train=some/folder", "optimizer.betas=[0.9, 0.95]"])
        {'seed': 1, 'data.train': 'some/folder', 'optimizer.betas': [0.9, 0.95]}
    """
    from steadygaze.training.recipe_files import parse_value

    changes: dict[str, Any] = {}
    for text in settings:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InputError(f"--set: expected KEY=VALUE, for example data.train=FOLDER, got {text!r}")
        changes[key.strip()] = parse_value(value)
    return changes


@contextmanager
def supervised(out: Path, *, visible: bool = True) -> Iterator[OnProgress]:
    """Show progress and log; exit with code 3 if the run cannot continue, 130 if it is interrupted."""
    from steadygaze.training.run_files import TrainingStoppedError

    notes = stderr()
    try:
        with progress_bar(notes, visible=visible) as on_progress, printed_log(notes, visible=visible):
            yield on_progress
    except (TrainingStoppedError, RowsNotWrittenError) as error:
        print_line(notes, f"error: {error}", "red")
        raise typer.Exit(3) from error
    except KeyboardInterrupt:
        if visible:
            print_line(notes, f"interrupted; repeat the command to resume ({out})")
        raise typer.Exit(130) from None


@contextmanager
def printed_log(console: Console, *, visible: bool = True) -> Iterator[None]:
    """Print what the package logs: notes about a run, and which blocks `modules.insert` changes."""
    import logging

    class ConsoleHandler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            style = "yellow" if record.levelno >= logging.WARNING else None
            print_line(console, record.getMessage(), style)

    logger, handler = logging.getLogger("steadygaze"), ConsoleHandler()
    level = logger.level
    if visible:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def print_list(console: Console, title: str, lines: Sequence[str]) -> None:
    """Print the first lines, each after the title, and how many more there are."""
    for line in lines[:LISTED]:
        print_line(console, f"{title}: {line}", "red")
    if len(lines) > LISTED:
        print_line(console, f"... and {len(lines) - LISTED} more", "red")


def sweep(
    *,
    recipe: Annotated[
        str | None,
        typer.Argument(help="Recipe or sweep: a TOML file, or the name of a shipped one (see --list)."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        declare(
            RECIPE,
            "Values of the recipe; comma-separated values are swept: losses.adl.tau=1,2,3,5. A list is one "
            "value: data.images=[0,3],[0,6]. modules.tap=none omits a module or loss.",
            "--set",
            metavar="KEY=VALUES",
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        declare(
            RECIPE,
            "Number of seeds of each combination: 0, 1, ... Default: those of the sweep, or 1.",
            metavar="N",
            min=1,
        ),
    ] = None,
    list_sweeps: ListFlag = False,
    show: Show = False,
    device: Annotated[str, declare(RUNNING, "auto or cpu.")] = "auto",
    out: Annotated[
        Path | None,
        declare_out(
            "FOLDER", "Output folder. Repeat the command to resume. Default: steadygaze-sweep/RECIPE."
        ),
    ] = None,
    shard: options.Shard = None,
    dry_run: Annotated[
        bool,
        declare(RUNNING, "Check the request, list the runs and estimate their training time.", "--dry-run"),
    ] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    allow_pipe: options.AllowPipe = False,
) -> None:
    """Train a grid of recipes, measure each model with the stress run of its recipe, and compare them.

    Writes table.md, table.csv and sweep.svg, with intervals over seeds and images.

    Example: steadygaze sweep cifar10-tap-adl --set losses.adl.tau=1,2,3,5 --seeds 3 -o runs/tau
    """
    from steadygaze.report.pages import write_sweep
    from steadygaze.runs.shards import parse_shard
    from steadygaze.training.recipe_files import recipe_text

    part = parse_shard(shard)
    if list_sweeps:
        print_sweeps()
        return
    if recipe is None:
        raise typer.BadParameter("expected a recipe or sweep: a TOML file, or a name from --list")
    _check_show(show, settings)
    text = recipe_text(recipe, "sweep", "recipe")  # an unknown name is an error before torch is imported
    from steadygaze.runs.sweep import plan_runs, run_sweep, summarize
    from steadygaze.training.sweep import parse_grid, read_sweep

    if show:
        read_sweep(recipe, allow_pipe=True)  # an error if it is not valid
        print(text, end="")
        return
    folder = out or Path("steadygaze-sweep") / Path(recipe).stem
    console, notes = stdout(WIDTH), stderr()
    grid = read_sweep(recipe, parse_grid(settings or []), seeds, allow_pipe=allow_pipe)
    runs = plan_runs(grid, folder)
    if dry_run:
        print_sweep_estimate(grid, runs, device, trust_remote_code=trust_remote_code)
        return
    print_line(notes, f"{plural(len(runs), 'run')}: {_shape(grid)}{f', shard {part}' if part else ''}")
    with supervised(folder) as on_progress:
        result = run_sweep(
            runs,
            shard=part,
            device=device,
            command=command_line(),
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
    table = summarize(runs)
    if table.numbers:
        print_sweep(table, console)
        for file in write_sweep(table, folder, command_line()):
            print_line(console, f"wrote {file}")
    if table.missing:
        more = f" and {len(table.missing) - 3} more" if len(table.missing) > 3 else ""
        advice = "Run the other shards, then repeat the command without --shard." if part else ""
        listed = f"not finished: {'; '.join(table.missing[:3])}{more}."
        print_line(console, f"{listed} {advice or 'Repeat the command.'}", "yellow")
    for label, reason in result.failed.items():
        print_line(notes, f"stopped: {label}: {reason}", "red")
    if result.failed:
        raise typer.Exit(3)
    if result.unreadable:
        print_line(notes, f"{plural(result.unreadable, 'image')} could not be read and were skipped", "red")
        raise typer.Exit(1)


def _shape(sweep: Sweep) -> str:

    parts = [plural(len(values), f"value of {key}", f"values of {key}") for key, values in sweep.grid.items()]
    return " x ".join([*parts, plural(sweep.seeds, "seed")])


def print_sweep(table: SweepTable, console: Console) -> None:
    """One section for each number, in at most 80 columns."""
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Table

    from steadygaze.report.pages import SEED_INTERVALS
    from steadygaze.runs.statistics import small_sample_note

    rich = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    rich.add_column("", overflow="fold")
    rich.add_column("seeds", justify="right")
    for column in ("mean", "95 %", "to first", "95 %"):
        rich.add_column(column, justify="right", no_wrap=True)
    for title in table.titles:
        rich.add_row(f"[bold]{escape(title)}[/bold]")
        for number in table.of(title):
            quantity, gap = number.quantity, ["", ""]
            own = [
                quantity.text(number.value),
                f"[{quantity.text(number.low)}, {quantity.text(number.high)}]",
            ]
            if number.difference is not None:
                digits = len(quantity.text(0).partition(".")[2])
                value, low, high = (f"{quantity.scale * v:+.{digits}f}" for v in number.difference)
                gap = [value, f"[{low}, {high}]"]
            cells = [f"  {escape(number.cell)}", str(number.seeds), *map(escape, (*own, *gap))]
            rich.add_row(*cells, style=STYLE.get(number.verdict))
        rich.add_section()
    console.print(rich)
    print_line(console, SEED_INTERVALS)
    few = min(number.seeds for number in table.numbers)
    if few < 3:
        print_line(console, f"{plural(few, 'seed')}: an interval over seeds needs three or more", "yellow")
    if caution := small_sample_note(min(number.images for number in table.numbers)):
        print_line(console, caution, "yellow")


def print_sweep_estimate(
    sweep: Sweep, runs: Sequence[SweepRun], device: str, *, trust_remote_code: bool
) -> None:
    """Print the runs, and what the training of those that are left will take."""
    from steadygaze.runs.estimate import estimate_train

    console = wide()
    remaining = [run for run in runs if not run.is_done()]
    print_line(console, f"{plural(len(runs), 'run')}: {_shape(sweep)}; dry run, nothing is written", "bold")
    for run in runs:
        print_line(console, f"  {run.folder}{'' if run in remaining else ' (finished)'}")
    if not remaining:
        return
    with progress_bar(stderr()) as on_progress:
        first = remaining[0]
        cost = estimate_train(
            first.recipe,
            first.folder,
            device=device,
            on_progress=on_progress,
            trust_remote_code=trust_remote_code,
        )
    one_run = cost.startup + cost.seconds
    print_line(
        console,
        f"training: {duration(one_run)} for {first.label}; {plural(len(remaining), 'run')} left, about "
        f"{duration(one_run * len(remaining))}. Measuring is not included.",
    )


def print_sweeps() -> None:
    """Print the shipped sweeps."""
    from steadygaze.training.recipe_files import shipped_recipes
    from steadygaze.training.sweep import read_sweep

    rows: list[tuple[list[str], str]] = []
    for name in shipped_recipes("sweep"):
        sweep = read_sweep(name)
        runs = plural(len(sweep.cells()) * sweep.seeds, "run")
        result = [f"result: {sweep.result}"] if sweep.result else []
        rows.append(([name, "\n".join([sweep.about, f"{runs} of {sweep.recipe}", *result, ""])], ""))
    columns = [Column("sweep", "name"), Column("description, runs, measured result", "text")]
    print_table(wide(), columns, rows, title=plural(len(rows), "sweep"))


DIFFMASK = """Learn which patches the model needs for its prediction; the model itself is not changed.

Keys of --set, with the paper's values: batch=16, seed=0, gate_rate=2e-5, baseline_rate=1e-3, dual_rate=0.3,
dual_start=20, warmup=1200 (steps), margin=0.1 (permitted KL divergence), stretch=15, shift=8,
begin=drawn|open, kl=all|class, target=CLASS, layers=uniform|weighted, l0=norm|log, tokens=patches|all,
slow=start|first_sync, dual=ascent|reference, restarts=0, restart_with=seed|stretch, warm_start=FILE,
preset=cifar10|imagenet|reference (comma-separated; reference: the values of the authors' code).

Example: steadygaze diffmask train -m deit_tiny_patch16_224 -d photos -o gates.safetensors
Example: steadygaze diffmask train -m embedded -d photos -o gates.safetensors --set seed=1 --set batch=8
Example: steadygaze explain cat.jpg -m deit_tiny_patch16_224 -M diffmask --diffmask gates.safetensors
"""
SHAPLEY = """Learn to predict the Shapley values of an image's patches; the model itself is not changed.

Keys of --set: batch=32, seed=0, pairs=2 (of patch subsets for each image), rate=1e-3, warmup=200 (steps),
surrogate=model|train (explain the model itself with removed patches, or a copy that is fine-tuned on such
images first, for surrogate_steps=1000 with surrogate_rate=1e-4, as in the paper), trunk=model|train (read
hidden states of the model itself, or of a copy that is fine-tuned with trunk_rate=1e-4, as in the paper).

Example: steadygaze shapley train -m deit_tiny_patch16_224 -d photos -o shapley.safetensors --set batch=16
Example: steadygaze explain cat.jpg -m deit_tiny_patch16_224 -M vit_shapley --shapley shapley.safetensors
"""


def _group(method: str, title: str, help_text: str) -> typer.Typer:
    """The command group of a method, with the command `train`."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=title)
    group.callback()(lambda: None)  # keeps the name of a single command: `diffmask train`

    @group.command(cls=HelpfulCommand, help=help_text)
    def train(
        model: options.Model,
        data: Annotated[
            list[Path],
            declare(
                DATA,
                "Folder of images, searched recursively; labels are not needed. May be repeated.",
                "--data",
                "-d",
                metavar="FOLDER",
            ),
        ],
        out: Annotated[Path, declare_out("FILE", "Output file, .safetensors. Repeat the command to resume.")],
        checkpoint: options.Checkpoint = None,
        steps: Annotated[
            int | None,
            declare(
                TRAINING, "Number of training steps. Default: determined by --epochs.", metavar="N", min=1
            ),
        ] = None,
        epochs: Annotated[
            int, declare(TRAINING, "Number of passes over the images.", metavar="N", min=1)
        ] = 5,
        settings: Annotated[
            list[str] | None,
            declare(
                TRAINING, "A setting of the method. Repeat the option for more.", "--set", metavar="KEY=VALUE"
            ),
        ] = None,
        save_every: Annotated[
            int, declare(TRAINING, "Number of steps between saves.", metavar="N", min=1)
        ] = 200,
        num_classes: options.NumClasses = None,
        device: options.Device = "auto",
        trust_remote_code: options.TrustRemoteCode = False,
    ) -> None:
        from steadygaze.training.explainers import ExplainerRequest, ExplainerRun

        request = ExplainerRequest(
            model=model,
            data=data,
            out=out,
            checkpoint=checkpoint,
            options=parse_settings(settings or []),
            steps=steps,
            epochs=epochs,
            save_every=save_every,
            num_classes=num_classes,
            device=device,
            trust_remote_code=trust_remote_code,
        )
        trainer = import_module(f"steadygaze.training.{method}").Trainer
        training = ExplainerRun(trainer, request)
        begin = f", resumed after {training.resumed}" if training.resumed else ""
        batches = f"{training.total_steps} steps of {training.settings.batch}"
        print_line(stderr(), f"{model}: {len(training.images.files)} images, {batches}{begin}")
        with supervised(out) as on_progress:
            result = training.execute(on_progress)
        console = stdout()
        print_line(console, f"{out}: {result.steps} steps; {result.summary}")
        print_list(console, "not used", result.unreadable)
        if result.too_early:
            print_line(console, f"not trained yet: {result.problem}. {trainer.too_early_advice}", "red")
        elif result.problem:
            print_line(console, f"diverged: {result.problem}. {trainer.diverged_advice}", "red")
        raise typer.Exit(1 if result.problem or result.unreadable else 0)

    return group


diffmask = _group("diffmask", "Vision DiffMask: train the gates that --diffmask uses.", DIFFMASK)
shapley = _group("vit_shapley", "ViT-Shapley: train the explainer that --shapley uses.", SHAPLEY)
