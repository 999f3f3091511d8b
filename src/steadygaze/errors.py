"""All errors of steadygaze. A message states what was expected, what was given, and what to do.

SteadygazeError
├── UnsupportedModelError (TypeError)        adapt() cannot view this model
├── MethodUnavailableError (ValueError)      the method cannot explain this model
├── UnknownNameError (ValueError)            an unknown method, aggregator, score, model, class, ...
├── InputError (ValueError)               invalid images, targets or options
├── ImageError (ValueError)               an image file that cannot be decoded
├── CheckpointError (ValueError)          weights that do not fit the model, or that contain code
├── BrokenMapError (ArithmeticError)         a map with NaN or infinite values
├── ModelChangedError (RuntimeError)         another thread changed the model during a call
└── RowsNotWrittenError (OSError)            a run or report that cannot be written
DegenerateMapWarning (UserWarning)             a map that is zero everywhere
PartialMapWarning (UserWarning)                an interrupted search: the map uses the runs that were done
ImagesOutOfRangeWarning (UserWarning)          images far outside of what the model's normalization gives
DamagedDataWarning (UserWarning)               a shard or data set that could not be read to its end
MemoryUseWarning (UserWarning)                 a request that takes more than 1 GiB of memory
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

SUGGESTED = 5  # names that are suggested for an unknown one
SHORTEST_PART = 3  # letters; shorter words are contained in too many names


class SteadygazeError(Exception):
    """Base class of all errors of steadygaze.

    Attributes:
        option: The Python argument to change, such as "masks". The message itself names no command line
            flags; the command line adds `(--masks)` if the command has that option.
    """

    def __init__(self, *args: object, option: str | None = None) -> None:
        super().__init__(*args)
        self.option = option


class UnsupportedModelError(SteadygazeError, TypeError):
    """No adapter knows the model, or its view does not reproduce the model's logits."""


class MethodUnavailableError(SteadygazeError, ValueError):
    """The method exists, but cannot explain this model.

    Examples:
        >>> import steadygaze as sg, torch
        >>> try:
        ...     sg.explain(sg.load_model("embedded"), torch.zeros(1, 3, 32, 32), method="diffmask")
        ... except sg.MethodUnavailableError as error:
        ...     print(str(error).partition(".")[0])
        diffmask: it needs gates that are trained for the model
    """


class UnknownNameError(SteadygazeError, ValueError):
    """An unknown name; the message suggests known ones (see `suggestions`).

    Attributes:
        elsewhere: Names that other packages use, each with the name it has here.
    """

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
        near = suggestions(name, known, elsewhere)
        guess = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        shown = f"Known: {', '.join(known)}" if len(known) <= 40 else f"{len(known)} are known"
        message = f"unknown {kind} {name!r}.{guess} {shown}.{' ' + hint if hint else ''}"
        super().__init__(message, option=option)


def suggestions(
    name: str, known: Iterable[str], elsewhere: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Known names that an unknown name may stand for, best first; case, hyphens and underscores do not count.

    Names that contain the given one come first, as a whole word before a part of a word, short before long;
    if there are none, the one whose spelling is nearest.

    Examples:
        >>> suggestions("deit-tiny", ["rdnet_tiny", "deit_tiny_patch16_224"])
        ['deit_tiny_patch16_224']
        >>> suggestions("dog", ["dough", "Eskimo dog", "dogsled"])
        ['Eskimo dog', 'dogsled']
        >>> suggestions("gazze", ["gae", "gaze"])
        ['gaze']
    """
    wanted = _normalized(name)
    names = {_normalized(word): word for word in known} | {_normalized(a): b for a, b in elsewhere.items()}
    if wanted in names:
        return [names[wanted]]
    if len(wanted) >= SHORTEST_PART:
        containing = [word for word in names if wanted in word]
        whole_word = re.compile(rf"\b{re.escape(wanted)}\b")
        containing.sort(key=lambda word: (not whole_word.search(word), len(word), word))
        if containing:
            return list(dict.fromkeys(names[word] for word in containing))[:SUGGESTED]
    return [names[word] for word in get_close_matches(wanted, names, n=1, cutoff=0.5)]


def _normalized(name: str) -> str:
    """Lower case, with spaces for hyphens and underscores."""
    return re.sub(r"[-_\s]+", " ", name.lower()).strip()


class InputError(SteadygazeError, ValueError):
    """Invalid images, targets or options."""


class ImageError(SteadygazeError, ValueError):
    """An image file that cannot be read.

    Examples:
        >>> from steadygaze.data.images import read_image
        >>> try:
        ...     read_image("missing.png")
        ... except ImageError as error:
        ...     print(error)
        missing.png: no such file
    """


class CheckpointError(SteadygazeError, ValueError):
    """A checkpoint that does not fit the model, or that contains code.

    Examples:
        >>> import steadygaze as sg
        >>> try:
        ...     sg.load_model("vit_tiny_patch16_224", checkpoint="missing.pth")
        ... except CheckpointError as error:
        ...     print(error)
        expected a checkpoint file (.safetensors, .pth, .pt, .bin), got missing.pth: no such file
    """


class BrokenMapError(SteadygazeError, ArithmeticError):
    """A map with NaN or infinite values."""


class ModelChangedError(SteadygazeError, RuntimeError):
    """Two threads need one model in different states: one trains it while another explains or measures it."""


class RowsNotWrittenError(SteadygazeError, OSError):
    """The disk is full or read-only; all rows that were reported as written are kept."""


class DegenerateMapWarning(UserWarning):
    """A map that is zero everywhere explains nothing.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", DegenerateMapWarning)  # calls in this block raise it
    """


class PartialMapWarning(UserWarning):
    """A search was interrupted (Ctrl-C, stop button of a notebook): the map uses the runs that were done.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", PartialMapWarning)  # calls in this block raise it
    """


class ImagesOutOfRangeWarning(UserWarning):
    """The values of images are far outside of what the model's normalization gives.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", ImagesOutOfRangeWarning)  # they are meant to be so
    """


class DamagedDataWarning(UserWarning):
    """A shard or a data set could not be read to its end. The images before the damage were used.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", DamagedDataWarning)  # a damaged shard ends the run
    """


class MemoryUseWarning(UserWarning):
    """A request takes more than 1 GiB of memory. It is issued before the memory is allocated.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", MemoryUseWarning)  # large requests in this block raise it
    """
