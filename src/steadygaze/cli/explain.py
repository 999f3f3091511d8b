"""`steadygaze explain` and `steadygaze demo`: image files in; overlays, a comparison grid, scores.npz and
manifest.json out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steadygaze.cli import options
from steadygaze.cli.options import DATA, METHODS, OUTPUT, declare, declare_out, split_methods, takes
from steadygaze.cli.output import Interruptions, print_line, progress_bar, stderr, stdout
from steadygaze.cli.paths import check_images, check_paths
from steadygaze.errors import BrokenMapError, ImageError, InputError
from steadygaze.methods.registry import DEFAULT, Method, parse_method
from steadygaze.progress import OnProgress, Progress
from steadygaze.quantity import plural

if TYPE_CHECKING:
    import numpy as np
    from PIL import Image
    from rich.console import Console
    from torch import Tensor

    from steadygaze.data.folders import Item
    from steadygaze.data.images import EncodedImage
    from steadygaze.loading.loaded import LoadedModel
    from steadygaze.questions.regions import Region
    from steadygaze.results.attribution import Attribution
    from steadygaze.runs.shards import Shard
    from steadygaze.target import Outputs
    from steadygaze.vit.view import ViT

    ImageFile = Path | Item  # an item is an image of a stream

GRID_IMAGES, GRID_ROWS, GRID_COLUMNS = 12, 36, 24  # most images, rows and methods in grid.png
TABLE_ROWS = 20  # images in the printed table, and printed checks
NO_BREAK = "\N{NO-BREAK SPACE}"
TEXT_WIDTH = 80  # columns of a printed sentence
MIN_OVERLAY_SIZE = 224  # smaller images are enlarged before the overlay is drawn
MAX_TOP = 100  # classes that are explained of each image
DEMO_METHODS = ("rollout", "gradcam", "gae", "attcat", "decompx+skipplus", DEFAULT)


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(options.ModelOptions):
    """The images and the options of `steadygaze explain`."""

    images: Sequence[str | Path]
    method: Annotated[list[str] | None, declare(METHODS, options.METHODS_HELP, "--method", "-M")] = None
    target: Annotated[
        str,
        declare(
            METHODS,
            "Class to explain: auto (the predicted class, the most probable label), an index or a name.",
            "--target",
            "-t",
        ),
    ] = "auto"
    top: Annotated[
        int,
        declare(
            METHODS,
            "Explain the K most probable classes or labels of each image; at most 100.",
            metavar="K",
            min=1,
        ),
    ] = 1
    score: Annotated[
        str | None,
        declare(
            METHODS,
            "Quantity to explain: logit (why this class: lights the whole object), log_odds (why this class "
            "and no other: lights what sets it apart), log_prob, contrast, prob. Default: the method's own.",
        ),
    ] = None
    check: Annotated[
        bool,
        declare(
            METHODS,
            "Also measure each map: remove its patches, compare with random orders, and print what happens; "
            "about ten forward passes for the first method, five for each further one.",
            "--check",
        ),
    ] = False
    signed: Annotated[
        bool, declare(OUTPUT, "Also draw negative attributions: evidence against the class.", "--signed")
    ] = False
    patches: Annotated[
        bool, declare(OUTPUT, "Also write overlays without interpolation between patches.", "--patches")
    ] = False
    calibration: options.CalibrationFile = None
    diffmask: options.DiffMask = None
    maps: Annotated[
        Path | None,
        declare(
            OUTPUT,
            "Also store the maps in this folder, in float16, for `verify --maps`. Keys are paths "
            "relative to the given folders, or file names.",
            metavar="FOLDER",
        ),
    ] = None
    limit: Annotated[
        int | None, declare(DATA, "Explain at most N images.", "--limit", "-n", metavar="N", min=1)
    ] = None
    shapley: options.Shapley = None
    batch_size: options.BatchSize = 8
    region: Annotated[
        str | None,
        declare(
            METHODS,
            "For segmenters: the pixels whose class is explained, point=X,Y or box=LEFT,TOP,RIGHT,BOTTOM, "
            "in pixels of the preprocessed image.",
        ),
    ] = None
    device: options.Device = "auto"
    shard: options.Shard = None
    out: Annotated[
        Path, declare_out("FOLDER", "Output folder. Overlays that an earlier run wrote into it are removed.")
    ] = Path("steadygaze-out")

    @cached_property
    def part(self) -> Shard:
        """The part of the images that this command explains."""
        from steadygaze.runs.shards import parse_shard

        return parse_shard(self.shard)

    def file(self, stem: str, ending: str) -> Path:
        """The path of a file of results: STEM.ENDING, or that of this shard, STEM-IofN.ENDING."""
        return self.out / f"{'-'.join(filter(None, (stem, self.part.label)))}.{ending}"

    @property
    def learned(self) -> dict[str, Path | None]:
        """The files of learned methods, by the method's name."""
        return {"calibrated": self.calibration, "diffmask": self.diffmask, "vit_shapley": self.shapley}


@takes(ExplainOptions)
def explain(
    images: Annotated[
        list[str],
        typer.Argument(help="Image files, folders of images, or streamed data: 'wds:a.tar', 'hf:./folder'."),
    ],
    **values: Any,
) -> None:
    """Explain predictions: which patches is a prediction based on?

    Writes an overlay for each image and method, a grid that compares the methods, scores.npz and
    manifest.json. Unreadable files are skipped and listed at the end, and the exit code is 1. Ctrl-C ends the
    current search and keeps its map so far; a second one within two seconds ends the command.

    Example: steadygaze explain cat.jpg -m deit_tiny_patch16_224
    Example: steadygaze explain cat.jpg -m deit_tiny_patch16_224 --target laptop --check
    Example: steadygaze explain photos -m deit_tiny_patch16_224 --method gae,gaze --top 3 -o maps
    Example: steadygaze explain cat.jpg -m openai/clip-vit-base-patch32 --text "a cat" --text "a dog"
    Example: steadygaze explain cat.jpg -m facebook/dinov2-base --similar-to other.jpg
    Example: steadygaze explain street.jpg -m ./segformer --region point=120,80 --target road
    """
    check_paths(values)
    check_images(images, skipped=True)
    raise typer.Exit(run(ExplainOptions(images=images, **values)))


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FOLDER", help="Output folder.")] = Path(
        "steadygaze-demo"
    ),
) -> None:
    """Look, explain, check and corrupt with the embedded model and bundled images. Needs no network.

    Writes index.html, a page that opens offline, and the images of it.

    Example: steadygaze demo
    """
    from importlib.resources import as_file, files

    from steadygaze.report.demo import write_demo

    with as_file(files("steadygaze") / "assets" / "demo") as folder:
        request = ExplainOptions(images=[folder], model="embedded", method=list(DEMO_METHODS), out=out)
        code = run(request)
        if not code:
            images = sorted(folder.glob("*.png"))
            page = write_demo(request.load(request.device), images, DEMO_METHODS, out)
            print_line(stdout(), f"the whole thought on one page: {page}", "bold")
    raise typer.Exit(code)


def run(request: ExplainOptions, console: Console | None = None) -> int:
    """Explain the images and write the results; returns the exit code.

    0, success; 1, a file was not read or not explained; 130, stopped before all images were explained.
    """
    from rich.markup import escape

    from steadygaze.data.streams import list_images
    from steadygaze.files import remove_leftovers
    from steadygaze.loading.ask import as_classifier, ask
    from steadygaze.methods.learned import with_files
    from steadygaze.vit.adapt import adapt

    console, live = console or stdout(), stderr()
    # wrong options are reported before anything is loaded
    method_names = split_methods(request.method or [DEFAULT])
    words, part = request.words, request.part
    region = None if request.region is None else parse_region(request.region)
    if request.top > MAX_TOP:
        raise InputError(
            f"--top {request.top}: expected at most {MAX_TOP} classes for each image: every class is one "
            "overlay for each image and method. Choose a smaller number, or call sg.explain with target=."
        )
    if request.top > 1 and request.target != "auto":
        raise InputError(
            f"--top {request.top} explains the most probable classes, but --target is {request.target}: "
            "give only one of the two"
        )
    for method in method_names:
        parse_method(method)
    methods = with_files(method_names, request.learned)
    every_file, damaged = list_images(request.images, request.limit)
    names = unique_names(every_file)
    if request.maps is not None:
        check_map_keys(every_file, request.images)
    image_files = [file for number, file in enumerate(every_file) if part.owns(number // request.batch_size)]
    with live.status(f"loading {escape(request.model)}") if live.is_terminal else nullcontext():
        loaded = as_classifier(request.load(request.device), words)
        loaded = loaded if region is None else ask(loaded, region=region)
        vit = adapt(loaded)
    try:
        request.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--out: expected a folder that can be written, got {request.out} ({error.strerror})"
        ) from error
    remove_leftovers(request.out)
    results = Results(request, loaded)
    explain_files(results, vit, methods, {file: names[file] for file in image_files}, live)
    results.unreadable += damaged
    if results.rows:
        write_results(results)
    print_results(results, console)
    remaining = len(image_files) - len(results.rows) - len(results.unreadable) - len(results.broken)
    if remaining > 0:
        images = plural(len(image_files), "image")
        print_line(console, f"stopped: {remaining} of {images} not explained", "yellow")
    return 130 if results.stopped else 1 if results.unreadable or results.broken else 0


def parse_region(text: str) -> Region:
    """Parse a region of a segmentation.

    Examples:
        >>> parse_region("point=120,80").point
        (120.0, 80.0)
    """
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


@dataclass
class Results:
    """What one command computed so far; scores, score_of and grid_maps by method."""

    request: ExplainOptions
    loaded: LoadedModel
    outputs: Outputs = "classes"
    rows: list[dict[str, Any]] = field(default_factory=list)  # entries of the manifest, one for each image
    scores: dict[str, list[np.ndarray]] = field(default_factory=dict)
    score_of: dict[str, str] = field(default_factory=dict)  # the quantity that the method explained
    logits: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    grid_images: list[Image.Image] = field(default_factory=list)
    grid_names: list[str] = field(default_factory=list)
    grid_maps: dict[str, list[Attribution]] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # images with a map that is not finite
    empty: list[str] = field(default_factory=list)  # maps that are zero everywhere
    partial: list[str] = field(default_factory=list)  # interrupted searches
    checks: list[str] = field(default_factory=list)  # what removal showed, by image, method and target
    stopped: bool = False  # the user ended the command before all images were explained
    removed: list[str] = field(default_factory=list)  # overlays of an earlier run into the same folder

    @property
    def class_count(self) -> int:
        """Number of classes of the model."""
        return self.logits[0].shape[-1]

    @property
    def targets_each(self) -> int:
        """Number of explained classes of each image."""
        return self.targets[0].shape[1] if self.targets and self.targets[0].ndim == 2 else 1

    @property
    def grid_extent(self) -> tuple[int, int, int]:
        """How many images, classes of each and methods grid.png shows."""
        classes = min(self.targets_each, GRID_ROWS)
        images = min(len(self.rows), GRID_IMAGES, GRID_ROWS // classes)
        return images, classes, min(len(self.scores), GRID_COLUMNS)


def add_results(
    results: Results,
    names: list[str],
    image_files: list[ImageFile],
    images: list[Image.Image],
    attributions: dict[str, Attribution],
) -> None:
    """Write the overlays of one batch and add its maps and manifest entries to `results`."""
    from steadygaze.results.manifest import image_entry

    for method, attribution in attributions.items():
        results.scores.setdefault(method, []).append(attribution.scores.float().numpy())
        results.score_of[method] = attribution.score
    first = next(iter(attributions.values()))
    results.outputs = first.outputs
    results.logits.append(first.logits.float().numpy())
    if first.target is not None:
        results.targets.append(first.target.numpy())
    for index, (name, file) in enumerate(zip(names, image_files, strict=True)):
        overlays = {
            method: write_overlays(results.request, name, images[index], attribution, index)
            for method, attribution in attributions.items()
        }
        target = None if first.target is None else first.target[index]
        entry = image_entry(
            name,
            first.logits[index],
            target,
            overlays,
            class_names=results.loaded.class_names,
            file=str(source_of(file)),
            outputs=first.outputs,
            checks={
                method: attribution.check_entries(index, results.loaded.class_names)
                for method, attribution in attributions.items()
            },
        )
        results.rows.append(entry)
        for method, checks in entry.get("checks", {}).items():
            results.checks += [f"{name}, {method}: {check['text']}" for check in checks]
        results.empty += [
            f"{method}, {source_of(file)}"
            for method, attribution in attributions.items()
            if not attribution.scores[index].any()
        ]
    if len(results.grid_images) < GRID_IMAGES:
        results.grid_images += images
        results.grid_names += names
        for method, attribution in attributions.items():
            results.grid_maps.setdefault(method, []).append(attribution)


def write_overlays(
    request: ExplainOptions, name: str, image: Image.Image, attribution: Attribution, row: int
) -> list[str]:
    """Write the overlays of one image, one for each target; returns the file names."""
    from PIL import Image

    from steadygaze.files import write_png
    from steadygaze.results.attribution import overlay_name

    factor = -(-MIN_OVERLAY_SIZE // max(image.size))
    if factor > 1:
        image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    # DiffMask's values are probabilities: a single kept patch is no outlier. Its paper shows both overlays.
    probabilities = attribution.method.startswith("diffmask")
    percentile = 100.0 if probabilities else 99.0
    written = []
    for index in attribution.indices():
        if (index if isinstance(index, int) else index[0]) != row:
            continue
        file = overlay_name(name, attribution.method, index)
        overlay = attribution.overlay(image, index, signed=request.signed, percentile=percentile)
        write_png(request.out / file, overlay)
        written.append(file)
        if request.patches or probabilities:
            file = file.removesuffix(".png") + "-patches.png"
            overlay = attribution.overlay(
                image, index, mode="nearest", signed=request.signed, percentile=percentile
            )
            write_png(request.out / file, overlay)
            written.append(file)
    return written


def write_results(results: Results) -> None:
    """Write grid.png, scores.npz and manifest.json, and remove overlays of an earlier run."""
    import numpy as np

    from steadygaze.files import write_npz, write_png
    from steadygaze.results.manifest import listed_overlays, remove_overlays, write_manifest
    from steadygaze.target import task_of_outputs

    request, loaded = results.request, results.loaded
    manifest = request.file("manifest", "json").name
    earlier = listed_overlays(request.out, manifest)
    write_png(request.file("grid", "png"), draw_grid(results))
    arrays: dict[str, Any] = {method: np.concatenate(parts) for method, parts in results.scores.items()}
    arrays["logits"] = np.concatenate(results.logits)
    if results.targets:
        arrays["target"] = np.concatenate(results.targets)
    arrays["names"] = np.array([row["name"] for row in results.rows])
    write_npz(request.file("scores", "npz"), arrays)
    model = {
        "name": loaded.name,
        "source": loaded.source,
        "checkpoint": loaded.checkpoint,
        "weights_hash": loaded.weights_hash,
        **{name: str(value) for name, value in request.model_options.items()},
    }
    files = {name: file.name for name, file in request.learned.items() if file is not None}
    partial = {"partial": results.partial} if results.partial else {}
    write_manifest(
        request.out,
        name=manifest,
        methods={method: results.score_of[method] for method in results.scores},
        grid=next(iter(results.grid_maps.values()))[0].grid,
        images=results.rows,
        task=task_of_outputs(results.outputs),
        before={
            "model": model,
            "preprocessing": dict(loaded.preprocess.config),
            "target": request.target if request.top == 1 else f"top {min(request.top, results.class_count)}",
            **files,
        },
        after={
            "unreadable": results.unreadable,
            **partial,
            "not_explained": results.broken,
            "zero_maps": results.empty,
        },
    )
    results.removed += remove_overlays(request.out, earlier - listed_overlays(request.out, manifest))


def draw_grid(results: Results) -> Image.Image:
    """The methods side by side, as far as `grid_extent` allows."""
    from steadygaze.results.attribution import comparison_grid, concatenate

    images, classes, methods = results.grid_extent
    attributions = {
        method: first_targets(concatenate(parts)[:images], classes)
        for method, parts in list(results.grid_maps.items())[:methods]
    }
    return comparison_grid(
        results.grid_images[:images],
        attributions,
        classes=short_names(results.loaded.class_names),
        notes=results.grid_names[:images],
        signed=results.request.signed,
    )


def first_targets(attribution: Attribution, count: int) -> Attribution:
    """The attribution of the first targets of each image."""
    if attribution.target is None or attribution.target.dim() == 1:
        return attribution
    return replace(attribution, scores=attribution.scores[:, :count], target=attribution.target[:, :count])


def short_names(class_names: tuple[str, ...] | None) -> list[str] | None:
    """Class names up to their first comma, for titles."""
    return None if class_names is None else [name.split(",")[0] for name in class_names]


def print_results(results: Results, console: Console) -> None:
    """Print the predictions, the files written, and everything that went wrong."""
    if results.rows:
        print_predictions(results, console)
        print_targets(results, console)
        print_checks(results, console)
        print_files(results, console)
    for messages, what, color in (
        (results.partial, "interrupted; the map is partial. ", "yellow"),
        (results.empty, "map is zero everywhere: ", "yellow"),
        (results.broken, "not explained: ", "red"),
        (results.unreadable, "not read: ", "red"),
    ):
        for message in messages:
            print_line(console, what + message, color)


def print_predictions(results: Results, console: Console) -> None:
    """Print the three most probable classes of each image, every label above 0.5, or the values."""
    import numpy as np
    import torch
    from rich.box import SIMPLE
    from rich.markup import escape
    from rich.table import Column, Table

    from steadygaze.quantity import percent
    from steadygaze.target import predictions, summarize

    if results.outputs == "features":
        print_line(console, f"no classifier: the model gives {results.class_count} features of each image")
        return
    names = short_names(results.loaded.class_names)
    several = results.outputs == "classes"
    headings = ("1st", "2nd", "3rd")[: results.class_count] if several else (results.outputs,)
    image = Column("image", overflow="fold")
    table = Table(image, *headings, title="predictions", title_justify="left", box=SIMPLE)
    logits = torch.from_numpy(np.concatenate(results.logits[:TABLE_ROWS])).double()
    numbers = predictions(results.outputs, logits)
    for row, one in zip(results.rows[:TABLE_ROWS], numbers.tolist(), strict=False):
        texts = [summarize(results.outputs, one, names)]
        if several:
            texts = [
                f"{(p['name'] or str(p['class'])).split(',')[0]} {percent(p['probability'])}"
                for p in row["predictions"]
            ]
        table.add_row(*(escape(text) for text in (row["name"], *texts)))
    console.print(table)
    if len(results.rows) > TABLE_ROWS:
        console.print(f"and {len(results.rows) - TABLE_ROWS} more in the manifest")


def print_targets(results: Results, console: Console) -> None:
    """Print which class was explained, if that is not the predicted one."""

    request = results.request
    if request.target != "auto":
        target = results.rows[0]["targets"][0]
        noun = next(noun for noun in ("class", "label", "output") if noun in target)
        index = f"{noun} {target[noun]}"
        print_line(
            console,
            f"explained {noun}: {target['name']} ({index})" if target["name"] else f"explained: {index}",
        )
    if request.top > results.class_count:
        print_line(
            console,
            f"--top {request.top}: the model has {plural(results.class_count, 'class', 'classes')}; "
            "all of them were explained",
            "yellow",
        )


def print_checks(results: Results, console: Console) -> None:
    """Print what removing the brightest patches of each map did."""
    for text in results.checks[:TABLE_ROWS]:
        words = text.replace(" %", f"{NO_BREAK}%")
        lines = wrap(words, TEXT_WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        print_line(console, "\n".join(lines).replace(NO_BREAK, " "))
    if len(results.checks) > TABLE_ROWS:
        print_line(console, f"and {len(results.checks) - TABLE_ROWS} more in the manifest")
    if len(results.rows) > 1:
        for method in results.scores:
            verdicts = [
                check["verdict"] for row in results.rows for check in row.get("checks", {}).get(method, ())
            ]
            if verdicts:
                count = (
                    f"{verdicts.count('better')} of {len(verdicts)} maps, worse on {verdicts.count('worse')}"
                )
                print_line(console, f"{method}: better than chance on {count}")


def print_files(results: Results, console: Console) -> None:
    """Print what was written where."""

    request = results.request
    overlays = sum(len(files) for row in results.rows for files in row["overlays"].values())
    print_line(console, f"wrote {plural(overlays, 'overlay')} to {request.out}, and")
    if request.maps is not None:
        print_line(console, f"  {request.maps}  the maps in float16, for steadygaze verify --maps")
    for file, content in (
        (request.file("grid", "png"), "the methods side by side" + omitted_from_grid(results)),
        (request.file("scores", "npz"), "the scores of every patch"),
        (request.file("manifest", "json"), "model, preprocessing, targets, versions"),
    ):
        print_line(console, f"  {file}  {content}")
    if request.part:
        print_line(console, f"shard {request.part}: this part of the images only")
    if results.removed:
        print_line(console, f"removed {plural(len(results.removed), 'overlay')} of an earlier run")


def omitted_from_grid(results: Results) -> str:
    """What grid.png leaves out; "" if it shows everything."""
    classes = results.targets_each
    totals = (len(results.rows), "images"), (classes, "classes"), (len(results.scores), "methods")
    return "".join(
        f", the first {shown} of {total} {noun}"
        for shown, (total, noun) in zip(results.grid_extent, totals, strict=True)
        if shown < total
    )


def source_of(file: ImageFile) -> Path | EncodedImage:
    """What `read_image` reads; as text, where the image is."""
    return file if isinstance(file, Path) else file.source


def unique_names(image_files: Sequence[ImageFile]) -> dict[ImageFile, str]:
    """A short name for each file: its stem or key, with folders or a number added where these are equal."""
    from steadygaze.data.images import unique_names as unique_image_names

    words = [
        (*file.parts[:-1], file.stem) if isinstance(file, Path) else tuple(file.name.split("/"))
        for file in image_files
    ]
    return dict(zip(image_files, unique_image_names(words), strict=True))


def explain_files(
    results: Results, vit: ViT, methods: Sequence[str | Method], names: dict[ImageFile, str], console: Console
) -> None:
    """Explain the images batch by batch and write their overlays. names: of the files, in results."""
    image_files, request = list(names), results.request
    device = next(vit.model.parameters()).device
    interruptions = Interruptions(console, methods, several_classes=request.top > 1)
    # short lists end before a bar is read; in a file or pipe they need no line either
    with progress_bar(console, visible=console.is_terminal) as on_progress:
        on_progress(Progress("explain", 0, len(image_files), "images"))
        try:
            for batch, images in batches(image_files, results):
                one_batch = partial(explain_batch, results, vit, methods, names, interruptions, on_progress)
                try:
                    one_batch(batch, images.to(device))
                except BrokenMapError:  # of some image: the others are explained one by one
                    for index, file in enumerate(batch):
                        try:
                            one_batch([file], images[index : index + 1].to(device))
                        except BrokenMapError as error:
                            results.broken.append(f"{source_of(file)}: {error}")
                done = len(results.rows) + len(results.unreadable) + len(results.broken)
                on_progress(Progress("explain", done, len(image_files), "images"))
                if results.partial:  # what is finished is written, and no further batch is started
                    break
        except KeyboardInterrupt:
            results.stopped = True


def batches(image_files: list[ImageFile], results: Results) -> Iterator[tuple[list[ImageFile], Tensor]]:
    """Readable files with their preprocessed images (b, 3, H, W); errors of the others go to the results.

    A batch is a fixed number of files in a row, without those that cannot be read, so that shards have equal
    batches.
    """
    import torch

    from steadygaze.data.images import read_image

    size = results.request.batch_size
    for start in range(0, len(image_files), size):
        images: dict[ImageFile, Tensor] = {}
        for file in image_files[start : start + size]:
            try:
                images[file] = results.loaded.preprocess(read_image(source_of(file), apart=True))
            except ImageError as error:
                results.unreadable.append(str(error))
        if images:
            yield list(images), torch.stack(list(images.values()))


def explain_batch(
    results: Results,
    vit: ViT,
    methods: Sequence[str | Method],
    names: Mapping[ImageFile, str],
    interruptions: Interruptions,
    on_progress: OnProgress,
    image_files: list[ImageFile],
    images: Tensor,
) -> None:
    """Explain one batch and add it to the results."""
    import torch

    from steadygaze.methods.explain import explain as explain_images
    from steadygaze.results.attribution import store_maps

    request, loaded = results.request, results.loaded
    target: Any = None if request.target == "auto" else loaded.class_index(request.target)
    if request.top > 1:
        if vit.plan.outputs in ("values", "features"):
            kind, instead = (
                ("values (regression)", "--target with the index or name of a value")
                if vit.plan.outputs == "values"
                else ("features", "--similar-to FILE, or methods that need no class")
            )
            raise InputError(
                f"--top explains the most probable classes, but this model gives {kind}. Use {instead}."
            )
        with torch.no_grad():
            logits = vit(images)
        target = logits.topk(min(request.top, logits.shape[-1])).indices
    with interruptions.announced():
        explained = explain_images(
            vit,
            images,
            target=target,
            method=list(methods),
            score=request.score,
            check=request.check,
            on_progress=on_progress,
        )
    attributions = {name: attribution.to("cpu") for name, attribution in explained.items()}
    if request.maps is not None:
        store_maps(request.maps, [map_key(file, request.images) for file in image_files], attributions)
    batch_names = [names[file] for file in image_files]
    results.partial += [f"{', '.join(batch_names)}: {message}" for message in interruptions.take()]
    originals = [loaded.to_image(image) for image in images]
    add_results(results, batch_names, image_files, originals, attributions)


def check_map_keys(image_files: Sequence[ImageFile], given: Sequence[str | Path]) -> None:
    """InputError if two images would be stored under one key."""
    by_key: dict[str, ImageFile] = {}
    for file in image_files:
        first = by_key.setdefault(map_key(file, given), file)
        if first != file:
            raise InputError(
                f"--maps: expected images with different keys, got {map_key(file, given)!r} for both "
                f"{source_of(first)} and {source_of(file)}. Give a folder that contains both: keys are paths "
                "below it."
            )


def map_key(file: ImageFile, given: Sequence[str | Path]) -> str:
    """The key of an image: its path below the folder that was given, as in rows of `verify`; or its name."""
    if not isinstance(file, Path):
        return file.name
    for path in map(Path, given):
        if path.is_dir() and file.is_relative_to(path):
            return file.relative_to(path).as_posix()
    return file.name
