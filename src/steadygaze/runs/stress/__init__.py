"""Robustness runs: the protocol of a suite, the suites, and what reads their rows."""

from steadygaze.runs.stress import suites as _suites  # noqa: F401  # registers them
from steadygaze.runs.stress.api import stress
from steadygaze.runs.stress.evaluator import Batch, Evaluator, Measurement
from steadygaze.runs.stress.images import ImageView, RunImage
from steadygaze.runs.stress.setting import CLEAN, Setting
from steadygaze.runs.stress.suite import (
    SUITES,
    Condition,
    ImageSet,
    Option,
    Score,
    Suite,
    SuiteInfo,
    list_suites,
    register_suite,
)

__all__ = [
    "CLEAN",
    "SUITES",
    "Batch",
    "Condition",
    "Evaluator",
    "ImageSet",
    "ImageView",
    "Measurement",
    "Option",
    "RunImage",
    "Score",
    "Setting",
    "Suite",
    "SuiteInfo",
    "list_suites",
    "register_suite",
    "stress",
]
