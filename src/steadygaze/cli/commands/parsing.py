"""From the text of options to values."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from steadygaze.errors import BadInput


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


def command_line() -> str:
    """The command as the user typed it, for the records of a run."""
    return shlex.join(["steadygaze", *sys.argv[1:]])
