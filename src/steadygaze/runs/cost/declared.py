"""The forward passes that a method declares, known without running it."""

from __future__ import annotations

from steadygaze.methods.registry import Method

RUN_OPTIONS = ("budget", "steps", "samples")  # options that are a number of runs of the model


def forward_passes(method: Method) -> float:
    """The approximate number of forward passes of a method with its options, for one image."""
    for option in RUN_OPTIONS:
        runs, usual = method.option(option), method.base.options.get(option)
        if runs is not None:
            return float(runs if usual is None else runs * method.base.cost / usual)
    return method.base.cost
