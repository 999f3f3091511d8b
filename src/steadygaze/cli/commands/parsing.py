"""From the text of options to values."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygaze.errors import BadInput

if TYPE_CHECKING:
    from steadygaze.questions.regions import Region
    from steadygaze.questions.text import TextClasses


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
        raise BadInput(f"expected numbers such as 0.1,0.5,0.9; got {text!r}", option=option) from error


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
    raise BadInput(f"expected point=X,Y or box=LEFT,TOP,RIGHT,BOTTOM, got {text!r}", option="region")


def model_options(
    class_names: Path | None,
    image_size: str | None,
    mean: str | None,
    std: str | None,
    model_kwargs: Sequence[str] | None,
) -> dict[str, Any]:
    """The arguments of `load_model` that were given."""
    from steadygaze.loading.model_options import parse_model_kwargs

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
        raise BadInput(
            f"expected --dry-run beside {'--shards' if shards is not None else '--json'}. Add it, or leave "
            f"the option out."
        )
    try:
        return [int(number) for number in (shards or "1,8,64").split(",")]
    except ValueError as error:
        raise BadInput(
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
            raise BadInput("expected class names to fill the template with, got none", option="class_names")
        return None
    from steadygaze.loading.model_options import read_class_names
    from steadygaze.questions.text import TEMPLATES, TextClasses, parse_templates

    if texts and class_names is not None:
        raise BadInput("give either texts or a file of class names, not both", option="text")
    if texts:
        if templates:
            raise BadInput("a template applies to class names; texts are used unchanged", option="template")
        return TextClasses(texts=tuple(texts))
    assert class_names is not None
    names = read_class_names(class_names)
    one = templates[0] if templates and len(templates) == 1 else None
    chosen = parse_templates(one if one is not None else templates or TEMPLATES["photo"])
    return TextClasses(class_names=names, templates=chosen)
