"""`steadygaze attention` and `steadygaze features`: image files in; figures and numbers out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from steadygaze.cli import options
from steadygaze.cli.options import DATA, METHODS, OUTPUT, declare, declare_out, takes
from steadygaze.cli.output import print_line, stderr, stdout
from steadygaze.errors import ImageError, InputError
from steadygaze.files import write_png


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(options.ModelOptions):
    """The images and the options of `steadygaze attention`."""

    images: Sequence[str]
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
    limit: Annotated[
        int | None, declare(DATA, "Use at most N images.", "--limit", "-n", metavar="N", min=1)
    ] = None
    device: options.Device = "auto"
    out: Annotated[Path, declare_out("FOLDER", "Output folder.")] = Path("steadygaze-attention")


@takes(AttentionOptions)
def attention(
    images: Annotated[list[str], typer.Argument(help="Image files, or folders of images.")],
    **values: Any,
) -> None:
    """Show what the heads of a layer attend to.

    Writes NAME.attention.png and NAME.attention.npz (the maps) for each image. Unreadable files are skipped
    and listed at the end, and the exit code is 1.

    Example: steadygaze attention cat.jpg -m deit_tiny_patch16_224 --layer -1 --heads all --query class -o out
    Example: steadygaze attention photos -m deit_tiny_patch16_224 --layer 8 --heads 2 --query 6,7 --gif
    """
    raise typer.Exit(run(AttentionOptions(images=images, **values)))


def run(request: AttentionOptions) -> int:
    """Draw the attention of each image; returns the exit code."""
    from rich.markup import escape

    from steadygaze.data.images import find_images
    from steadygaze.look.attention import attention as read_attention

    console, live = stdout(), stderr()
    layer, heads, query = parse_layer(request.layer), parse_heads(request.heads), parse_query(request.query)
    files = find_images(request.images)[: request.limit]
    if layer is None and heads != "all":
        raise InputError("expected a layer beside heads, got all", option="layer")
    with live.status(f"loading {escape(request.model)}") if live.is_terminal else nullcontext():
        loaded = request.load(request.device)
    request.out.mkdir(parents=True, exist_ok=True)
    unreadable: list[str] = []
    taken: set[str] = set()
    for file in files:
        try:
            seen = read_attention(loaded, file)
        except ImageError as error:
            unreadable.append(str(error))
            continue
        stem = seen.names[0]
        name = stem if stem.lower() not in taken else f"{stem}-{len(taken)}"
        taken.add(name.lower())
        written = [seen.save(request.out / f"{name}.attention.png", layer, heads, query)]
        if query != "pool":
            written.append(seen.save(request.out / f"{name}.attention.npz", layer, query=query))
        if request.gif:
            joined: Any = heads if isinstance(heads, int) or heads in ("mean", "max", "min") else "mean"
            written.append(seen.animate(request.out / f"{name}.attention.gif", joined, query))
        print_line(console, f"{file.name}: {', '.join(str(path) for path in written)}")
    for message in unreadable:
        print_line(console, f"not read: {message}", "red")
    return 1 if unreadable else 0


@dataclass(frozen=True, kw_only=True)
class FeatureOptions(options.ModelOptions):
    """The images and the options of `steadygaze features`."""

    images: Sequence[str]
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
    limit: Annotated[
        int | None, declare(DATA, "Use at most N images.", "--limit", "-n", metavar="N", min=1)
    ] = None
    device: options.Device = "auto"
    out: Annotated[Path, declare_out("FOLDER", "Output folder.")] = Path("steadygaze-features")


@takes(FeatureOptions)
def features(
    images: Annotated[list[str], typer.Argument(help="Image files, or folders of images.")],
    **values: Any,
) -> None:
    """Show the features of the patches: principal components, or similarity to one patch.

    All images are read together: equal colors are equal features across images. Writes features.png and
    features.npz (the numbers).

    Example: steadygaze features cat.jpg dog.jpg -m deit_tiny_patch16_224 -o out
    Example: steadygaze features photos -m deit_tiny_patch16_224 --point 6,7 -o out
    """
    request = FeatureOptions(images=images, **values)
    from rich.markup import escape

    from steadygaze.data.images import find_images
    from steadygaze.look.features import features as read_features

    point = parse_query(request.point)
    if point is not None and not isinstance(point, tuple):
        raise InputError(f"expected ROW,COLUMN such as 6,7, got {request.point!r}", option="point")
    files = find_images(request.images)[: request.limit]
    live = stderr()
    with live.status(f"loading {escape(request.model)}") if live.is_terminal else nullcontext():
        loaded = request.load(request.device)
    seen = read_features(loaded, files, request.layer, request.part)  # type: ignore[arg-type]
    kind = "pca" if point is None else "similarity"
    figure = seen.figure(kind, point=point, foreground=request.foreground)  # type: ignore[arg-type]
    request.out.mkdir(parents=True, exist_ok=True)
    written = [write_png(request.out / "features.png", figure), seen.save(request.out / "features.npz")]
    print_line(stdout(), ", ".join(str(path) for path in written))


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
