"""Every error that steadygaze raises on purpose. Each message says what was expected, what came, and what to do.

SteadygazeError
├── UnsupportedModel (TypeError)        adapt() cannot view this model
├── MethodUnavailable (ValueError)      this model cannot serve this method
├── UnknownName (ValueError)            a method, aggregator, score, model or class nobody knows
├── BadInput (ValueError)               images, targets or options of the wrong kind
├── BadImage (ValueError)               a picture file that does not decode
├── BadCheckpoint (ValueError)          weights that do not fit the model, or that would run code
├── BrokenMap (ArithmeticError)         a map with NaN or infinite values
└── RowsNotWritten (OSError)            a run or a report that the disk does not take
DegenerateMap (UserWarning)             a map that is zero everywhere
PartialMap (UserWarning)                a search that was stopped: the map is of what was done until then
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType


class SteadygazeError(Exception):
    """Base class of all errors of steadygaze.

    option: the Python argument to change, such as "masks". The message itself names no command line flags;
        the command line adds `(--masks)` if the command has that option.
    """

    def __init__(self, *args: object, option: str | None = None) -> None:
        super().__init__(*args)
        self.option = option


class UnsupportedModel(SteadygazeError, TypeError):
    """The model is no vision transformer that an adapter knows, or its view does not give the model's own logits."""


class MethodUnavailable(SteadygazeError, ValueError):
    """The method is defined, but not for this model."""


class UnknownName(SteadygazeError, ValueError):
    """A name that nobody knows; the message offers the nearest one. elsewhere: names that others use -> the known ones."""

    def __init__(
        self,
        kind: str,
        name: str,
        known: Iterable[str],
        hint: str = "",
        elsewhere: Mapping[str, str] = MappingProxyType({}),
        option: str | None = None,
    ) -> None:
        known = sorted(known)
        lower = {**{word.lower(): word for word in known}, **elsewhere}
        near = get_close_matches(name.lower(), lower, n=1, cutoff=0.5)
        guess = f" Did you mean {lower[near[0]]!r}?" if near else ""
        shown = f"Known: {', '.join(known)}" if len(known) <= 40 else f"{len(known)} are known"
        message = f"unknown {kind} {name!r}.{guess} {shown}.{' ' + hint if hint else ''}"
        super().__init__(message, option=option)


class BadInput(SteadygazeError, ValueError):
    """Images, targets or options that cannot be meant."""


class BadImage(SteadygazeError, ValueError):
    """A picture file that cannot be read."""


class BadCheckpoint(SteadygazeError, ValueError):
    """A checkpoint that does not fit, or that would have to execute code to be read."""


class BrokenMap(SteadygazeError, ArithmeticError):
    """A map with NaN or infinite values."""


class RowsNotWritten(SteadygazeError, OSError):
    """The disk is full, or cannot be written; every row that was reported is still there."""


class DegenerateMap(UserWarning):
    """A map that is zero everywhere explains nothing."""


class PartialMap(UserWarning):
    """A search was stopped (Ctrl-C, the stop button of a notebook): the map is of the runs that were done until then."""
