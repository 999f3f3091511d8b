"""Ctrl-C during searches: the first press ends one search, a second one within two seconds ends the command.

An interrupted search gives a map of the runs that were done and a `PartialMap` warning. Where that warning
is an error, the search raises the interrupt instead (`methods.search.warn_partial`): this is how the second
press gets out of all of them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console

from steadygaze.cli.running import print_line
from steadygaze.errors import DegenerateMap, PartialMap
from steadygaze.method_registry import Method
from steadygaze.methods import parse_method

SECONDS = 2.0  # between two presses that end everything


class Interruptions:
    """Prints what an interrupt has ended and what follows, at the moment of the interrupt.

    methods: of one call of `explain`, in order; several_classes: whether each search runs once for each class
    """

    def __init__(
        self, console: Console, methods: Sequence[str | Method], *, several_classes: bool = False
    ) -> None:
        parsed = [parse_method(method) if isinstance(method, str) else method for method in methods]
        self.searches = [method for method in parsed if method.base.kind == "model"]
        self.console, self.several_classes = console, several_classes
        self.messages: list[str] = []
        self.pressed = -SECONDS

    @contextmanager
    def announced(self) -> Iterator[None]:
        """Handle the warnings of a call of `explain`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DegenerateMap)  # reported at the end, with the image's name
            warnings.simplefilter("always", PartialMap)
            show = warnings.showwarning

            def showwarning(
                message: Warning | str,
                category: type[Warning],
                filename: str,
                lineno: int,
                file: TextIO | None = None,
                line: str | None = None,
            ) -> None:
                if isinstance(message, PartialMap):
                    self.add(message)
                else:
                    show(message, category, filename, lineno, file, line)

            warnings.showwarning = showwarning
            yield

    def add(self, warning: PartialMap) -> None:
        """Print what happens; raises the warning if it is the second within two seconds."""
        now = time.monotonic()
        if now - self.pressed < SECONDS:
            raise warning
        self.pressed = now
        text = str(warning)
        self.messages.append(text)
        following = self.following(text)
        if following:
            text += f" Continuing with {following}; press Ctrl-C again within {SECONDS:g} seconds to stop."
        print_line(self.console, text, "yellow")

    def following(self, message: str) -> str:
        """The searches after the one that a message is about; "" if it was the last."""
        stem = message.partition(":")[0].partition(",")[0]
        names = [search.name for search in self.searches]
        position = next((i for i, search in enumerate(self.searches) if search.stem == stem), len(names))
        rest = names[position + 1 :]
        return ", ".join(["the other classes", *rest] if self.several_classes else rest)

    def take(self) -> list[str]:
        """The messages since the last call."""
        messages, self.messages = self.messages, []
        return messages
