"""Running a search: many forward passes with some patches hidden, counted, reported and interruptible.

A search is a list of runs in a fixed order, and a formula over those that were done. `budget` is the number
of runs for one image and one class; the whole image counts as a run where a formula needs it. Interrupted
by Ctrl-C (or the stop button of a notebook), `run_search` returns what was done, with a `PartialMapWarning`
warning: the map is the one of that smaller budget. Where the query does not allow partial maps, or the
warning is made an error, the interrupt is raised.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from steadygaze.errors import InputError, MethodUnavailableError, PartialMapWarning, UnknownNameError
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.seeding import image_seed
from steadygaze.target import class_score
from steadygaze.trace.query import Query
from steadygaze.vit.removal import HidingMode, available_hiding, chunk_of, subset_logits

HIDE = ("auto", "remove", "mask", "fill")
ROWS = 64  # runs between two reports of progress, on a CPU
_LISTENER: ContextVar[OnProgress] = ContextVar("listener", default=ignore_progress)


def run_search(
    query: Query, name: str, total: int, size: int, run: Callable[[slice], Tensor | None], least: int = 1
) -> Shaped[Tensor, "*any"]:
    """run(0:size), run(size:2·size), ... side by side along axis 1, (b, done, ...).

    `run` may return None, which ends the search early. Interrupted, the runs that were done are returned if
    they are at least `least`.
    """
    parts = [slice(start, min(start + size, total)) for start in range(0, total, size)]
    return run_parts(query, name, parts, run, least)


def run_parts(
    query: Query, name: str, wanted: Sequence[slice], run: Callable[[slice], Tensor | None], least: int = 1
) -> Shaped[Tensor, "*any"]:
    """The same for parts of different sizes, each a slice of the runs."""
    done, total = 0, wanted[-1].stop if wanted else 0
    parts: list[Tensor] = []
    try:
        with torch.no_grad():
            for part in wanted:
                values = run(part)
                if values is None:
                    break
                parts.append(values)
                done = part.stop
                progress = Progress(name, done, total, "forward passes")
                query.on_progress(progress)
                _LISTENER.get()(progress)
    except KeyboardInterrupt:
        if not query.allow_partial or done < least:
            raise
        warn_partial(name, done, total)
    return torch.cat(parts, 1) if parts else torch.empty(0)


def warn_partial(name: str, done: int, total: int) -> None:
    """Warn that a map uses only a part of its budget; where that warning is an error, raise the interrupt."""
    message = f"{name}: interrupted after {done} of {total} runs; the map uses those."
    try:
        warnings.warn(message, PartialMapWarning, stacklevel=4)
    except PartialMapWarning:
        raise KeyboardInterrupt from None


def check_budget(name: str, budget: int | None, least: int = 1, default: int | None = None) -> int:
    """The budget, checked; None means `default`, which also is the most that is useful."""
    if budget is None and default is not None:
        return default
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < least:
        raise InputError(
            f"{name}: budget is a number of forward passes, an integer >= {least}, got {budget!r}"
        )
    return budget if default is None else min(budget, default)


def hiding_mode(query: Query, name: str, hide: str) -> HidingMode:
    """How patches are hidden: as requested, or the best that the model allows; warns if not by removal."""
    if hide not in HIDE:
        raise UnknownNameError("hide", str(hide), HIDE)
    plan = query.vit.plan
    if hide == "remove" and not plan.removable:
        raise MethodUnavailableError(
            f"{name}: patches of a {plan.kind} cannot be removed. Use hide='mask' or hide='fill'."
        )
    if hide in ("remove", "mask", "fill"):
        return hide  # type: ignore[return-value]  # narrowed by the line above
    mode = available_hiding(query.vit, query.tokens)
    if mode == "remove":
        return mode
    instead = "hidden from attention" if mode == "mask" else "filled with the mean color"
    warnings.warn(
        f"{name}: patches of a {plan.kind} cannot be removed, so they are {instead} (hide={mode!r}).",
        stacklevel=4,
    )
    return mode


def runs_per_step(query: Query) -> int:
    """Runs of each image between two reports of progress."""
    rows = max(ROWS, 16 * chunk_of(query.tokens) // query.tokens.shape[1])
    return max(1, rows // len(query.images))


def full_runs_per_step(query: Query) -> int:
    """The same where every run has all tokens."""
    return max(1, chunk_of(query.tokens) // query.tokens.shape[1] // len(query.images))


def evaluate_subsets(
    query: Query,
    name: str,
    keep: Bool[Tensor, "b r p"],
    hide: str = "auto",
    *,
    least: int = 1,
    read: Callable[[Query, Tensor], Tensor] | None = None,
) -> Float[Tensor, "b done *more"]:
    """f(z) of every presence vector: the explained quantity, or `read` of the logits (b, runs, classes)."""
    mode, batch = hiding_mode(query, name, hide), len(query.images)
    value_of = read or explained_values

    def run(part: slice) -> Tensor:
        some = keep[:, part].to(query.images.device)
        image = torch.arange(batch, device=some.device).repeat_interleave(some.shape[1])
        logits = subset_logits(query.vit, query.images, query.tokens, some.flatten(0, 1), image, mode)
        return value_of(query, logits.unflatten(0, (batch, -1)))

    return run_search(query, name, keep.shape[1], runs_per_step(query), run, least)


def explained_values(query: Query, logits: Float[Tensor, "b r c"]) -> Float[Tensor, "b r"]:
    """The explained quantity of every run, in at least float32."""
    if not isinstance(query.target, Tensor):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            return torch.stack([query.value(leaf[:, r]) for r in range(leaf.shape[1])], 1).detach()
    flat = logits.flatten(0, 1)
    wide = flat.float() if flat.dtype.itemsize < 4 else flat
    target = query.target.repeat_interleave(logits.shape[1])
    values = class_score(query.score, wide, target, query.vit.plan.outputs)
    return values.unflatten(0, logits.shape[:2])


def image_generators(images: Float[Tensor, "b c h w"], seed: int) -> list[torch.Generator]:
    """One generator per image, seeded by its pixels and `seed`: a batch draws what its images draw alone."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise InputError(f"seed: expected an integer, got {seed!r}")
    pixels = (image.detach().cpu().double().numpy().tobytes() for image in images)
    return [torch.Generator().manual_seed(image_seed(seed, some)) for some in pixels]


def uniform_draws(query: Query, seed: int, *shape: int) -> Float[Tensor, "b *shape"]:
    """Uniform draws for each image, on the CPU; the first rows do not depend on how many follow."""
    generators = image_generators(query.images, seed)
    return torch.stack([torch.rand(shape, generator=g, dtype=torch.float64) for g in generators])


@contextmanager
def report_searches(on_progress: OnProgress) -> Iterator[None]:
    """Searches inside also report to `on_progress`, for code that calls `explain` only indirectly."""
    token = _LISTENER.set(on_progress)
    try:
        yield
    finally:
        _LISTENER.reset(token)
