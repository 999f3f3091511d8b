"""The runs of a search: many forward passes with something hidden, counted, shown and stoppable.

A search is a list of runs in a fixed order, and a formula over those that were done. `budget` is their number for one image and
one class; the whole image counts as a run where a formula needs it. Stopped by Ctrl-C (or a notebook's stop button), `searched`
gives what was done, with a `PartialMap` warning that says how much: the map is the one that this smaller budget gives. Inside a
run that writes rows (`manner(partial=False)`), or where the warning is made an error, the interrupt goes on as what it is.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from typing import Any
from zlib import crc32

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from steadygaze.errors import BadInput, MethodUnavailable, PartialMap, UnknownName
from steadygaze.target import quantity
from steadygaze.vit.subsets import can_mask, chunk_of, subset_logits

HIDE = ("auto", "remove", "mask", "fill")
PATIENCE = 2.0  # seconds before a search shows how far it is
ROWS = 64  # runs between two looks at the clock, on a CPU


@dataclass(frozen=True)
class Manner:
    """How searches behave: whom they tell (name, done, total), and whether stopping one gives a partial map."""

    told: Callable[[str, int, int], None] | None = None
    partial: bool = True


_USUAL = Manner()
_MANNER: ContextVar[Manner] = ContextVar("manner", default=_USUAL)


@contextmanager
def manner(told: Callable[[str, int, int], None] | None = None, *, partial: bool = True) -> Iterator[None]:
    """Searches inside tell `told` how far they are (None: a bar on the terminal), and give partial maps or not."""
    token = _MANNER.set(Manner(told, partial))
    try:
        yield
    finally:
        _MANNER.reset(token)


def listener() -> Callable[[str, int, int], None]:
    """Whom searches tell how far they are at the moment; nobody, if nobody asked."""
    return _MANNER.get().told or (lambda name, done, total: None)


class _Bar:
    """A bar on the terminal, from two seconds on."""

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.began, self.bar, self.task = name, total, monotonic(), None, None

    def __call__(self, name: str, done: int, total: int) -> None:
        if self.bar is None and monotonic() - self.began > PATIENCE and done < total:
            self.start()
        if self.bar is not None:
            self.bar.update(self.task, completed=done)

    def start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        console = Console(stderr=True)
        if not (console.is_terminal or console.is_jupyter):
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        bar: Any = Progress(*columns, console=console, transient=True)
        self.task = bar.add_task(self.name, total=self.total)
        bar.start()
        self.bar = bar

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()


def searched(
    name: str, total: int, size: int, run: Callable[[slice], Tensor | None], least: int = 1
) -> Float[Tensor, "*any"]:
    """run(0:size), run(size:2·size), ... side by side along axis 1, (b, done, ...); fewer if stopped, but at least `least` runs.

    A run that gives None ends the search before its time.
    """
    how, bar, done = _MANNER.get(), _Bar(name, total), 0
    parts: list[Tensor] = []
    told = how.told or bar
    try:
        with torch.no_grad():
            for start in range(0, total, size):
                part = slice(start, min(start + size, total))
                found = run(part)
                if found is None:
                    break
                parts.append(found)
                done = part.stop
                told(name, done, total)
    except KeyboardInterrupt:
        if not how.partial or done < least:
            raise
        bar.close()
        stopped(name, done, total)
    finally:
        bar.close()
    return torch.cat(parts, 1) if parts else torch.empty(0)


def stopped(name: str, done: int, total: int) -> None:
    """Say that a map is of a part of its budget; where that warning is an error, go on with the interrupt instead."""
    try:
        warnings.warn(
            f"{name}: stopped after {done} of {total} runs; the map is of those.", PartialMap, stacklevel=4
        )
    except PartialMap:
        raise KeyboardInterrupt from None


def budget_of(name: str, budget: Any, least: int = 1, default: int | None = None) -> int:
    """The budget, checked; None is `default`, and more than `default` runs are not needed."""
    if budget is None and default is not None:
        return default
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < least:
        raise BadInput(
            f"{name}: budget is a number of forward passes, an integer from {least} on, got {budget!r}"
        )
    return budget if default is None else min(budget, default)


def way(ask: Any, name: str, hide: str) -> str:
    """How patches are hidden: as asked, or the best that the model allows, which is said if it is not removal."""
    if hide not in HIDE:
        raise UnknownName("hide", str(hide), HIDE)
    vit = ask.vit
    if hide == "remove" and not vit.plan.removable:
        raise MethodUnavailable(
            f"{name}: patches of a {vit.plan.kind} cannot be removed. Use hide='mask' or hide='fill'."
        )
    if hide != "auto" or vit.plan.removable:
        return "remove" if hide == "auto" else hide
    how = "mask" if can_mask(vit, ask.tokens) else "fill"
    said = {
        "mask": "hidden from attention (hide='mask')",
        "fill": "painted in the mean colour (hide='fill')",
    }[how]
    warnings.warn(
        f"{name}: patches of a {vit.plan.kind} cannot be removed, so they are {said}.", stacklevel=4
    )
    return how


def rounds(ask: Any) -> int:
    """Runs of each image that go through the model between two looks at the clock."""
    rows = max(ROWS, 16 * chunk_of(ask.tokens) // ask.tokens.shape[1])
    return max(1, rows // len(ask.images))


def whole_rounds(ask: Any) -> int:
    """The same where every run has all tokens, and goes through the model as it is."""
    return max(1, chunk_of(ask.tokens) // ask.tokens.shape[1] // len(ask.images))


def measured(ask: Any, name: str, keep: Bool[Tensor, "b r p"], hide: str = "auto", *, least: int = 1,
             of: Callable[[Any, Tensor], Tensor] | None = None) -> Float[Tensor, "b done *more"]:  # fmt: skip
    """f(z) of every presence vector: the quantity that is explained, or `of`(ask, logits); fewer if stopped."""
    how, batch = way(ask, name, hide), len(ask.images)
    read = of or values

    def run(part: slice) -> Tensor:
        some = keep[:, part].to(ask.images.device)
        image = torch.arange(batch, device=some.device).repeat_interleave(some.shape[1])
        logits = subset_logits(ask.vit, ask.images, ask.tokens, some.flatten(0, 1), image, how)
        return read(ask, logits.unflatten(0, (batch, -1)))

    return searched(name, keep.shape[1], rounds(ask), run, least)


def values(ask: Any, logits: Float[Tensor, "b r c"]) -> Float[Tensor, "b r"]:
    """The quantity that is explained, at least in float32."""
    if callable(ask.target):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            return torch.stack([ask.value(leaf[:, r]) for r in range(leaf.shape[1])], 1).detach()
    flat = logits.flatten(0, 1)
    wide = flat.float() if flat.dtype.itemsize < 4 else flat
    return quantity(ask.score, wide, ask.target.repeat_interleave(logits.shape[1])).unflatten(
        0, logits.shape[:2]
    )


def generators(ask: Any, seed: int) -> list[torch.Generator]:
    """One for each image, of its pixels and the seed: a batch draws what its images draw alone."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise BadInput(f"seed: expected an integer, got {seed!r}")
    keys = (
        crc32(str(seed).encode() + image.detach().cpu().double().numpy().tobytes()) for image in ask.images
    )
    return [torch.Generator().manual_seed(key) for key in keys]


def uniform(ask: Any, seed: int, *shape: int) -> Float[Tensor, "b *shape"]:
    """Uniform draws for each image, on the CPU; the first rows do not depend on how many follow."""
    return torch.stack([torch.rand(shape, generator=g, dtype=torch.float64) for g in generators(ask, seed)])
