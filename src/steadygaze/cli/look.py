"""`steadygaze attention`, `features`, `outliers` and `lens`: image files in; figures and numbers out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from steadygaze.cli import options
from steadygaze.cli.options import DATA, METHODS, OUTPUT, declare, declare_out, takes
from steadygaze.cli.output import print_line, progress_bar, stderr, stdout
from steadygaze.cli.paths import check_images, check_paths
from steadygaze.errors import ImageError, InputError
from steadygaze.files import write_atomic, write_png
from steadygaze.progress import Progress

Images = Annotated[list[str], typer.Argument(help="Image files, or folders of images.")]


@dataclass(frozen=True, kw_only=True)
class LookOptions(options.ModelOptions):
    """The images, and the options of every command here."""

    images: Sequence[str]
    limit: Annotated[
        int | None, declare(DATA, "Use at most N images.", "--limit", "-n", metavar="N", min=1)
    ] = None
    device: options.Device = "auto"

    @property
    def files(self) -> list[Path]:
        """The image files; an error if there are none."""
        from steadygaze.data.images import find_images

        return find_images(self.images)[: self.limit]

    def loaded(self) -> Any:
        """The model, with the classes that --text or --class-names give it."""
        from rich.markup import escape

        from steadygaze.loading.ask import as_classifier

        live = stderr()
        with live.status(f"loading {escape(self.model)}") if live.is_terminal else nullcontext():
            loaded = self.load(self.device)
            return loaded if self.words is None else as_classifier(loaded, self.words)

    def each(self, files: Sequence[Path], read: Callable[[Path], Any]) -> Iterator[tuple[str, Any]]:
        """(a name for its output files, what `read` gives) of each image.

        Raises:
            typer.Exit: At the end, if files could not be read; they are printed.
        """
        unreadable: list[str] = []
        taken: set[str] = set()
        with progress_bar(stderr(), visible=stderr().is_terminal) as on_progress:
            for number, file in enumerate(files):
                on_progress(Progress("look", number, len(files), "images"))
                try:
                    seen = read(file)
                except ImageError as error:
                    unreadable.append(str(error))
                    continue
                stem = seen.names[0]
                name = stem if stem.lower() not in taken else f"{stem}-{len(taken)}"
                taken.add(name.lower())
                yield name, seen
        for message in unreadable:
            print_line(stdout(), f"not read: {message}", "red")
        if unreadable:
            raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(LookOptions):
    """The images and the options of `steadygaze attention`."""

    layer: Annotated[
        str,
        declare(
            METHODS,
            "Layer, counted from 0, or from the end with -1, -2, ...; all: a thumbnail of every head of "
            "every layer.",
            "--layer",
            metavar="LAYER",
        ),
    ] = "-1"
    heads: Annotated[
        str,
        declare(
            METHODS,
            "all: the heads side by side with their mean; mean, max or min: one map; or heads such as 0,3,5, "
            "one of which is drawn large.",
            metavar="HEADS",
        ),
    ] = "all"
    query: Annotated[
        str | None,
        declare(
            METHODS,
            "Token whose attention is shown: class, mean (of all patches), ROW,COLUMN of a patch, another "
            "token's name or number, or pool. Default: class if there is a class token, else mean.",
            metavar="QUERY",
            show_default=False,
        ),
    ] = None
    gif: Annotated[bool, declare(OUTPUT, "Also write an animated GIF over the layers.", "--gif")] = False
    out: Annotated[Path, declare_out("FOLDER", "Output folder.")] = Path("steadygaze-attention")


@takes(AttentionOptions)
def attention(images: Images, **values: Any) -> None:
    """Show what the heads of a layer attend to.

    Writes NAME.attention.png and NAME.attention.npz (the maps) for each image. Unreadable files are skipped
    and listed at the end, and the exit code is 1.

    Example: steadygaze attention cat.jpg -m deit_tiny_patch16_224 --layer -1 --heads all --query class -o out
    Example: steadygaze attention photos -m deit_tiny_patch16_224 --layer 8 --heads 2 --query 6,7 --gif
    """
    check_paths(values)
    check_images(images, skipped=True)
    from steadygaze.look.attention import attention as read_attention

    request = AttentionOptions(images=images, **values)
    layer, heads, query = parse_layer(request.layer), parse_heads(request.heads), parse_query(request.query)
    files = request.files
    if layer is None and heads != "all":
        raise InputError("expected a layer beside heads, got all", option="layer")
    loaded = request.loaded()
    for name, seen in request.each(files, partial(read_attention, loaded)):
        request.out.mkdir(parents=True, exist_ok=True)
        written = [seen.save(request.out / f"{name}.attention.png", layer, heads, query)]
        if query != "pool":
            written.append(seen.save(request.out / f"{name}.attention.npz", layer, query=query))
        if request.gif:
            joined: Any = heads if isinstance(heads, int) or heads in ("mean", "max", "min") else "mean"
            written.append(seen.animate(request.out / f"{name}.attention.gif", joined, query))
        print_line(stdout(), f"{name}: {', '.join(map(str, written))}")


@dataclass(frozen=True, kw_only=True)
class FeatureOptions(LookOptions):
    """The images and the options of `steadygaze features`."""

    layer: Annotated[
        int,
        declare(METHODS, "Layer, counted from 0, or from the end with -1, -2, ...", "--layer", metavar="N"),
    ] = -1
    part: Annotated[
        str, declare(METHODS, "tokens, keys, queries or values of the layer.", "--part", metavar="PART")
    ] = "tokens"
    point: Annotated[
        str | None,
        declare(
            METHODS,
            "Patch of the first image, ROW,COLUMN: draw how similar every patch is to it, in place of "
            "principal components.",
            "--point",
            metavar="ROW,COLUMN",
            show_default=False,
        ),
    ] = None
    foreground: Annotated[
        bool,
        declare(METHODS, "Components of the foreground only, as in DINOv2's figure.", "--foreground"),
    ] = False
    out: Annotated[Path, declare_out("FOLDER", "Output folder.")] = Path("steadygaze-features")


@takes(FeatureOptions)
def features(images: Images, **values: Any) -> None:
    """Show the features of the patches: principal components, or similarity to one patch.

    All images are read together: equal colors are equal features across images. Writes features.png, with
    at most 32 images, and features.npz (the numbers of all).

    Example: steadygaze features cat.jpg dog.jpg -m deit_tiny_patch16_224 -o out
    Example: steadygaze features photos -m deit_tiny_patch16_224 --point 6,7 -o out
    """
    check_paths(values)
    check_images(images, skipped=False)
    from steadygaze.look.features import SHOWN
    from steadygaze.look.features import features as read_features

    request = FeatureOptions(images=images, **values)
    point = parse_query(request.point)
    if point is not None and not isinstance(point, tuple):
        raise InputError(f"expected ROW,COLUMN such as 6,7, got {request.point!r}", option="point")
    files = request.files
    loaded = request.loaded()
    with progress_bar(stderr(), visible=stderr().is_terminal) as on_progress:
        seen = read_features(loaded, files, request.layer, request.part, on_progress=on_progress)  # type: ignore[arg-type]
    kind = "pca" if point is None else "similarity"
    figure = seen.figure(kind, point=point, foreground=request.foreground, limit=SHOWN)  # type: ignore[arg-type]
    request.out.mkdir(parents=True, exist_ok=True)
    written = [write_png(request.out / "features.png", figure), seen.save(request.out / "features.npz")]
    print_line(stdout(), ", ".join(str(path) for path in written))


@dataclass(frozen=True, kw_only=True)
class OutlierOptions(LookOptions):
    """The images and the options of `steadygaze outliers`."""

    out: Annotated[Path, declare_out("FOLDER", "Output folder.")] = Path("steadygaze-outliers")


@takes(OutlierOptions)
def outliers(images: Images, **values: Any) -> None:
    """Find outlier tokens: patches of high norm that other tokens attend to.

    Prints one sentence: what was found, and what to do about it. Writes outliers.png (norms, outlier tokens
    and attention of at most 32 images) and outliers.npz (mask, norms and attention of all).

    Example: steadygaze outliers photos -m vit_small_patch14_dinov2 --num-classes 0 -o out
    """
    check_paths(values)
    check_images(images, skipped=False)
    from steadygaze.look.features import SHOWN
    from steadygaze.look.outliers import outliers as find_outliers

    request = OutlierOptions(images=images, **values)
    files = request.files
    loaded = request.loaded()
    with progress_bar(stderr(), visible=stderr().is_terminal) as on_progress:
        found = find_outliers(loaded, files, on_progress=on_progress)
    request.out.mkdir(parents=True, exist_ok=True)
    written = [
        write_png(request.out / "outliers.png", found.figure(limit=SHOWN)),
        found.save(request.out / "outliers.npz"),
    ]
    print_line(stdout(), found.advice)
    print_line(stdout(), ", ".join(map(str, written)))


@dataclass(frozen=True, kw_only=True)
class LensOptions(LookOptions):
    """The images and the options of `steadygaze lens`."""

    target: Annotated[
        str,
        declare(METHODS, "Class to read: auto (the predicted class), an index or a name.", "--target", "-t"),
    ] = "auto"
    out: Annotated[Path, declare_out("FOLDER", "Output folder.")] = Path("steadygaze-lens")


@takes(LensOptions)
def lens(images: Images, **values: Any) -> None:
    """Show which heads and layers write a class, and which patches say it after each layer.

    Writes NAME.lens.png (layers x heads) and NAME.patches.png (the logit of each patch after each layer) for
    each image, and lens.csv: what the embedding, each attention, head and MLP, and the bias add to the logit.
    Unreadable files are skipped and listed at the end, and the exit code is 1.

    Example: steadygaze lens cat.jpg -m deit_tiny_patch16_224 -o out
    Example: steadygaze lens photos -m deit_tiny_patch16_224 --target tabby -o out
    """
    check_paths(values)
    check_images(images, skipped=True)
    import pandas as pd

    from steadygaze.look.lens import lens as read_lens

    request = LensOptions(images=images, **values)
    files = request.files
    loaded = request.loaded()
    target = None if request.target == "auto" else loaded.class_index(request.target)
    tables = []
    try:
        for name, seen in request.each(files, partial(read_lens, loaded, target=target)):
            request.out.mkdir(parents=True, exist_ok=True)
            tables.append(seen.table().assign(image=name))
            written = [seen.save(request.out / f"{name}.lens.png")]
            written.append(write_png(request.out / f"{name}.patches.png", seen.patch_figure()))
            print_line(stdout(), f"{name}: {seen.title(0)}: {', '.join(map(str, written))}")
    finally:
        if tables:
            text = pd.concat(tables).to_csv(index=False, float_format="%.6g")
            write_atomic(request.out / "lens.csv", text)


def parse_layer(text: str) -> int | None:
    """A layer; None for all.

    Examples:
        >>> parse_layer("-1"), parse_layer("all")
        (-1, None)
    """
    if text == "all":
        return None
    if not re.fullmatch(r"-?\d{1,6}", text):
        raise InputError(f"expected a number such as -1, or all, got {text!r}", option="layer")
    return int(text)


def parse_heads(text: str) -> Any:
    """One head, several, or a word.

    Examples:
        >>> parse_heads("3"), parse_heads("0,3"), parse_heads("mean")
        (3, [0, 3], 'mean')
    """
    if text in ("all", "mean", "max", "min"):
        return text
    if not re.fullmatch(r"-?\d{1,6}(,-?\d{1,6})*", text):
        raise InputError(f"expected all, mean, max, min or heads such as 0,3,5, got {text!r}", option="heads")
    numbers = [int(number) for number in text.split(",")]
    return numbers[0] if len(numbers) == 1 else numbers


def parse_query(text: str | None) -> Any:
    """A token: name, number, or row and column.

    Examples:
        >>> parse_query("3,4"), parse_query("-1"), parse_query("register 0")
        ((3, 4), -1, 'register 0')
    """
    if text is None or not re.fullmatch(r"-?\d{1,6}(,-?\d{1,6})?", text):
        return text
    numbers = tuple(int(number) for number in text.split(","))
    return numbers if len(numbers) == 2 else numbers[0]
