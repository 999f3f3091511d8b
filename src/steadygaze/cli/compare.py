"""Commands that compare two models: `compare-models` reads two stress runs, `card` measures both models.

Each prints what changed and writes an HTML file, with a table beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steadygaze.cli import options
from steadygaze.cli.options import (
    METHODS,
    OUTPUT,
    SUITES,
    command_line,
    declare,
    declare_out,
    model_options,
    split_methods,
    split_names,
    takes,
)
from steadygaze.cli.output import STYLE, Column, guarded, print_line, print_table, progress_bar, stderr, wide
from steadygaze.cli.paths import check_paths
from steadygaze.cli.verify import print_masked_models
from steadygaze.methods.registry import DEFAULT
from steadygaze.quantity import plural
from steadygaze.runs.request import SUITE_OPTIONS

if TYPE_CHECKING:
    from rich.console import Console

    from steadygaze.robustness.by_class import ClassChange, Spread
    from steadygaze.runs.before_after import CardRequest, FaithfulnessChange
    from steadygaze.runs.card import Change
    from steadygaze.runs.compare import Comparison
    from steadygaze.runs.shards import World

COLUMNS = ("before", "after", "difference", "95 % interval")
CLASSES = 8  # that lost most, and that gained most
TURNED = {"wrong": "newly wrong", "right": "newly correct"}


def compare_models(
    *,
    before: Annotated[
        str,
        typer.Argument(
            help="Folder written by `steadygaze stress`, or the folder of a model of `steadygaze sweep`; "
            "several seeds: A0,A1,A2."
        ),
    ],
    after: Annotated[str, typer.Argument(help="The same for the other model, on the same images.")],
    setting: Annotated[
        str, typer.Option(help="Setting in which classes and individual images are compared.")
    ] = "clean",
    seen: Annotated[
        str | None,
        typer.Option(
            metavar="CLASSES",
            help="Classes that were trained on: a file with one per line, or a comma-separated list, each "
            "an index, a synset or a name. Their accuracy is compared separately from that of the other "
            "classes.",
        ),
    ] = None,
    by_class: Annotated[bool, typer.Option("--by-class", help="Print every class.")] = False,
    show: Annotated[
        int, declare(OUTPUT, "Number of newly wrong and newly correct images to show.", metavar="N", min=0)
    ] = 8,
    images: options.ExampleImages = True,
    out: Annotated[
        Path | None, declare_out("FILE", "HTML file to write. Default: compare.html in the current folder.")
    ] = None,
) -> None:
    """Compare two stress runs: paired differences of all metrics, changes by class and by image.

    Example: steadygaze compare-models run-before run-after
    Example: steadygaze compare-models before0,before1,before2 after0,after1,after2 -o compare.html
    """
    from steadygaze.runs.rows import read_run

    folders = [_folders(before), _folders(after)]
    for folder in (folder for side in folders for folder in side):
        read_run(folder)  # before the models' code is imported
    from steadygaze.report.comparison import write_comparison
    from steadygaze.report.pages import records_csv, write_all
    from steadygaze.runs.compare import compare
    from steadygaze.runs.statistics import told_apart

    console = wide()
    with progress_bar(stderr()) as on_progress:
        comparison = compare(folders[0], folders[1], setting=setting, on_progress=on_progress)
    one, two = comparison.before[0], comparison.after[0]
    seeds = len(comparison.before), len(comparison.after)
    names = told_apart([one.run, two.run], [one.folder, two.folder])
    models = f"before: {names[0]}; after: {names[1]}"
    data = f"{plural(one.image_count, 'image')} of {one.data}"
    repeated = f"; {seeds[0]} and {seeds[1]} seeds" if max(seeds) > 1 else ""
    print_line(console, f"{models}; {data}{repeated}", "bold")
    _print_changes(comparison, console)
    records = _print_groups(comparison, seen, console) if seen is not None else []
    if comparison.turned:
        if by_class:
            _print_every_class(comparison, seen, console)
        else:
            _print_classes(comparison, console)
        _print_turned(comparison, show, console)
    if one.caution:
        print_line(console, one.caution, "yellow")
    for note in comparison.notes:
        print_line(console, f"note: {note}", "yellow")
    path = out or Path("compare.html")
    files = write_comparison(comparison, path, show=show, images=images)
    if records:
        files += write_all({path.with_name(f"{path.stem}-classes.csv"): records_csv(records)})
    for file in files:
        print_line(console, f"wrote {file}")


def _folders(text: str) -> list[Path]:
    """The stress runs; a folder of `train` or `sweep` stands for the one inside it."""
    folders = [Path(piece.strip()) for piece in text.split(",") if piece.strip()]
    return [folder / "stress" if (folder / "stress" / "run.json").is_file() else folder for folder in folders]


def _print_groups(comparison: Comparison, seen: str, console: Console) -> list[dict[str, Any]]:
    """Print seen against unseen classes; returns the numbers."""
    from steadygaze.runs.compare import group_changes, read_seen

    changes = group_changes(comparison, read_seen(seen, comparison.class_names))
    rows: list[tuple[list[str], str]] = []
    for change in changes:
        ends = [f"{100 * value:.1f}" for value in (change.before, change.after)]
        gap, low, high = (f"{100 * value:+.1f}" for value in (change.difference, change.low, change.high))
        cells = [change.setting, change.group, str(change.classes), str(change.images), *ends, gap]
        rows.append(([*cells, f"{low} to {high}"], STYLE.get(change.verdict, "")))
    names = [Column(name, "name") for name in ("setting", "classes")]
    numbers = [Column(name) for name in ("number", "images", "before", "after", "difference", "interval")]
    title = "top1, %, of seen and unseen classes, 95 % interval over images and seeds"
    print_table(console, [*names, *numbers], rows, title=title, keys=2)
    return [change.record() for change in changes]


def _print_every_class(comparison: Comparison, seen: str | None, console: Console) -> None:
    """Every class, those that lost most first."""
    from steadygaze.runs.compare import SEEN, UNSEEN, read_seen

    listed = None if seen is None else read_seen(seen, comparison.class_names)
    rows: list[tuple[list[str], str]] = []
    for change in comparison.classes:
        name = comparison.class_names.get(change.label, "").split(",")[0]
        group = "-" if listed is None else SEEN if change.label in listed else UNSEEN
        ends, _, rest = _class_text(change).partition(", ")
        rows.append(([f"{change.label} {name}".rstrip(), group, ends, rest], ""))
    columns = [Column("class", "text"), Column("seen", "name"), Column("before to after", "name")]
    title = f"accuracy by class ({comparison.setting}), first run of each side, Newcombe's interval"
    print_table(console, [*columns, Column("difference", "text")], rows, title=title)


def _print_changes(comparison: Comparison, console: Console) -> None:
    from steadygaze.report.comparison import only_few, short_list

    names = [Column(name, "name") for name in ("setting", "metric")]
    numbers = [Column(name) for name in ("before", "after", "difference", "interval", "p")]
    rows = []
    for change in short_list(comparison.changes):
        digits = len(change.quantity.text(0).partition(".")[2])
        differences = (change.difference, change.low, change.high)
        gap, low, high = (f"{change.scale * value:+.{digits}f}" for value in differences)
        cells = [
            change.setting.label,
            change.quantity.title,
            _side(change.before, change),
            _side(change.after, change),
            gap,
            f"{low} to {high}",
            "-" if change.p is None else f"{change.p:.3f}",
            f"{change.verdict}{only_few(change.images)}" if change.verdict else "unclear",
        ]
        rows.append((cells, STYLE.get(change.verdict, "")))
    title = "after minus before, 95 % interval over the same images"
    print_table(console, [*names, *numbers, Column("verdict", "name")], rows, title=title, keys=2)


def _side(spread: Spread, change: Change) -> str:
    if isnan(spread.mean):
        return "no number"
    text = change.quantity.text(spread.mean)
    return f"{text} ±{change.quantity.text(spread.deviation)}" if spread.seeds > 1 else text


def _print_classes(comparison: Comparison, console: Console) -> None:
    lost = [c for c in comparison.classes if c.difference < 0][:CLASSES]
    gained = [c for c in comparison.classes[::-1] if c.difference > 0][:CLASSES]
    for words, classes in (("lost", lost), ("gained", gained)):
        if not classes:
            print_line(console, f"no class {words} accuracy ({comparison.setting})")
            continue
        print_line(console, f"classes that {words} most ({comparison.setting}):")
        for change in classes:
            name = comparison.class_names.get(change.label, "").split(",")[0]
            print_line(console, f"  {change.label} {name}: {_class_text(change)}")


def _class_text(change: ClassChange) -> str:

    ends = f"{100 * change.before.value:.0f} % to {100 * change.after.value:.0f} %"
    span = f"[{100 * change.low:+.0f}, {100 * change.high:+.0f}]"
    verdict = "" if change.verdict == "unclear" else f", {change.verdict}"
    return f"{ends}, {span}, {plural(change.count, 'image')}{verdict}"


def _print_turned(comparison: Comparison, show: int, console: Console) -> None:
    for way, names in comparison.turned.items():
        listed = ", ".join(names[:show])
        more = f", and {len(names) - show} more" if len(names) > show else ""
        colon = ": " if names and show else ""
        text = f"{TURNED[way]} ({comparison.setting}): {len(names)}{colon}{listed}{more}"
        print_line(console, text)


@takes(SUITE_OPTIONS)
def card(
    *,
    before: Annotated[
        str,
        typer.Argument(
            help="First model: a name, NAME@WEIGHTS, or a folder written by `steadygaze train`; or the "
            "folder OUT/before of an earlier card."
        ),
    ],
    after: Annotated[str, typer.Argument(help="Second model, in the same forms.")],
    data: options.OptionalData = None,
    masks: options.Masks = None,
    methods: Annotated[list[str] | None, declare(METHODS, options.METHODS_HELP, "--methods", "-M")] = None,
    metrics: options.Metrics = None,
    suites: Annotated[
        list[str] | None,
        declare(
            SUITES,
            "Suites, as for stress. Default: corruptions, attacks, occlusion, attention.",
            "--suites",
            "-s",
        ),
    ] = None,
    groups: Annotated[
        list[str] | None,
        declare(
            SUITES,
            "Columns of the data whose values define groups, as for stress: accuracy of each and of the "
            "worst.",
            metavar="COLUMNS",
        ),
    ] = None,
    limit: options.Limit = None,
    seed: options.Seed = 0,
    batch_size: options.BatchSize = 16,
    class_names: options.ClassNames = None,
    image_size: options.ImageSize = None,
    mean: options.Mean = None,
    std: options.Std = None,
    model_kwargs: options.ModelKwargs = None,
    show: Annotated[int, declare(OUTPUT, "Number of example images.", metavar="N", min=0)] = 6,
    images: options.ExampleImages = True,
    with_model_card: Annotated[
        bool,
        declare(
            OUTPUT,
            "Also write model-card.md: a block with metadata for a Hugging Face model card.",
            "--model-card",
        ),
    ] = False,
    device: options.Device = "auto",
    out: Annotated[
        Path | None,
        declare_out(
            "FOLDER",
            "Output folder. Repeat the command to resume. Default: the folder card inside the second "
            "model's folder, or steadygaze-card.",
        ),
    ] = None,
    **suite_options: Any,
) -> None:
    """Compare two models on one page: accuracy, robustness, attention, faithfulness, maps, classes.

    Measures both models on the same images, prints the differences and writes card.html.

    Example: steadygaze card deit_tiny_patch16_224 run -d imagenet/val -n 500
    Example: steadygaze card vit_tiny@a.safetensors vit_tiny@b.safetensors -d photos -o card
    """
    for side in (before, after):
        model, _, file = side.partition("@")
        if not Path(side).exists():
            check_paths({"model": model, "checkpoint": file or None})
        if not (Path(side) / "stress" / "run.json").is_file():  # not measured yet
            check_paths({"data": data, "masks": masks})
    from steadygaze.runs.before_after import SUITES as DEFAULT_SUITES
    from steadygaze.runs.before_after import CardRequest, measure_sides

    folder = Path(after) / "card" if Path(after).is_dir() else Path("steadygaze-card")
    request = CardRequest(
        data=data,
        out=out or folder,
        suites=split_names(suites) or DEFAULT_SUITES,
        methods=split_methods(methods or [DEFAULT]),
        metrics=split_names(metrics),
        masks=masks,
        groups=groups,
        options={name: value or None for name, value in suite_options.items()},
        model_options=model_options(class_names, image_size, mean, std, model_kwargs),
        limit=limit,
        seed=seed,
        batch_size=batch_size,
        device=device,
        command=command_line(),
    )

    def work(world: World, notes: Console) -> int:
        with progress_bar(notes, visible=not world.rank) as on_progress:
            folders = measure_sides(before, after, request, world, on_progress)
        world.wait()
        if not world.rank:
            write_card_page(folders, request, show, images, with_model_card)
        return 0

    raise typer.Exit(guarded(request.out, work))


def write_card_page(
    folders: Sequence[Path], request: CardRequest, show: int, images: bool, with_model_card: bool
) -> None:
    """Compare the runs in the folders of both sides, print the differences and write the page."""
    from steadygaze.report.comparison import sentence, short_list, write_card
    from steadygaze.report.model_card import model_card
    from steadygaze.report.pages import write_all
    from steadygaze.runs.before_after import faithfulness_changes
    from steadygaze.runs.compare import compare
    from steadygaze.runs.ranking import masked_models
    from steadygaze.runs.rows import Rows, read_run

    console = wide()
    comparison = compare([folders[0] / "stress"], [folders[1] / "stress"])
    faithfulness = faithfulness_changes(folders[0] / "verify", folders[1] / "verify")
    print_line(console, sentence(comparison), "bold")
    _print_card_changes(short_list(comparison.changes), console)
    _print_faithfulness(faithfulness, console)
    if caution := comparison.before[0].caution:
        print_line(console, caution, "yellow")
    for note in comparison.notes:
        print_line(console, f"note: {note}", "yellow")
    sections = [Rows.read(folder / "verify").table().sections for folder in folders]
    print_masked_models([section for side in sections for section in side], console)
    files = write_card(
        comparison,
        faithfulness,
        request.out / "card.html",
        [read_run(folder / kind) for folder in folders for kind in ("stress", "verify")],
        show=show,
        images=images,
        masked=[bool(masked_models(side)) for side in sections],
    )
    if with_model_card:
        text = model_card(comparison, faithfulness)
        files += write_all({request.out / "model-card.md": text})
    for file in files:
        print_line(console, f"wrote {file}")


def _print_card_changes(changes: Sequence[Change], console: Console) -> None:
    rows: list[tuple[list[str], str]] = []
    for change in changes:
        scale = change.scale
        cells = [
            change.setting.label,
            change.quantity.title,
            f"{scale * change.before.mean:.4g}",
            f"{scale * change.after.mean:.4g}",
            f"{scale * change.difference:+.3g}",
            f"{scale * change.low:+.3g} to {scale * change.high:+.3g}",
        ]
        rows.append((cells, STYLE.get(change.verdict, "")))
    columns = [Column("setting", "name"), Column("metric", "name"), *map(Column, COLUMNS)]
    print_table(console, columns, rows, title="accuracy, robustness, attention", keys=2)


def _print_faithfulness(changes: Sequence[FaithfulnessChange], console: Console) -> None:
    rows: list[tuple[list[str], str]] = []
    for change in changes:
        cells = [
            change.method,
            change.quantity.title,
            change.quantity.text(change.before),
            change.quantity.text(change.after),
            f"{change.difference:+.3g}",
            f"{change.low:+.3g} to {change.high:+.3g}",
        ]
        rows.append((cells, STYLE.get(change.verdict, "")))
    columns = [Column("method", "name"), Column("metric", "name"), *map(Column, COLUMNS)]
    print_table(console, columns, rows, title="faithfulness", keys=2)
