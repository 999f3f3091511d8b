"""Lists of what can be named: `steadygaze methods`, `metrics`, `suites`, `losses`, `models`."""

from __future__ import annotations

import json as json_module
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from steadygaze.cli.lists.index import Entries, listed
from steadygaze.cli.tables import Column, print_table
from steadygaze.errors import UnknownName
from steadygaze.registry import matches

MODEL_NOTES = (
    "plain: one patch grid in all layers; supports nearly every method. staged: hierarchical (or XCiT's "
    "channel attention); no method that needs global attention.",
    "Also accepted: a transformers folder or owner/name of ViT, DeiT, BEiT, Data2Vec, DINOv2, DINOv3, "
    "I-JEPA, MSN, Swin, Swin V2, PVT and PVT v2; of CLIP, MetaCLIP 2, SigLIP and SigLIP 2, also with "
    "text; of SegFormer, DPT and YOLOS, with a region; of ViLT, LLaVA, Qwen2.5-VL, Idefics 3 and SmolVLM in "
    "Python, with a question or prompt; open_clip:NAME@TAG; and a folder written by `steadygaze train`.",
)
METHOD_NOTES = (
    "cost: number of forward passes; a backward pass counts as one. class: the map depends on the target "
    "class. layers: can be combined with +last, +plus, +skipplus, and +rollout if each layer gives a matrix. "
    "Method options: see --json.",
)


def print_methods(json: bool, console: Console | None = None) -> None:
    """Print every method with its family, its cost in forward passes, and a summary."""
    methods = listed("methods", _methods)
    if json:
        _print_json(methods)
        return
    rows: list[tuple[list[str], str]] = []
    for family in dict.fromkeys(info["family"] for info in methods):
        rows.append(([family, "", "", "", ""], "bold"))
        for info in (info for info in methods if info["family"] == family):
            marks = ["yes" if info[flag] else "-" for flag in ("class_specific", "layers")]
            summary = re.sub(
                r"\s*\([^()]*[=:][^()]*\)", "", info["summary"]
            )  # without options: --json has them
            rows.append(([f"  {info['name']}", f"{info['cost']:g}", *marks, summary], ""))
        rows.append(([""] * 5, ""))
    columns = [
        Column("name", "name"),
        Column("cost"),
        Column("class"),
        Column("layers"),
        Column("summary", "text"),
    ]
    console = console or Console()
    print_table(console, columns, rows[:-1], title=f"{len(methods)} methods")
    _print_notes(console, METHOD_NOTES)


def print_metrics(json: bool, console: Console | None = None) -> None:
    """Print every faithfulness metric with its direction and a summary."""
    metrics = listed("metrics", _metrics)
    if json:
        _print_json(metrics)
        return
    rows = [
        ([info["name"], str(info["better"]), "required" if info["needs_masks"] else "-", info["summary"]], "")
        for info in metrics
    ]
    columns = [
        Column("name", "name"),
        Column("better", "name"),
        Column("masks", "name"),
        Column("summary", "text"),
    ]
    print_table(console or Console(), columns, rows, title=f"{len(metrics)} metrics")


def print_suites(json: bool, console: Console | None = None) -> None:
    """Print every stress suite with its argument and a summary."""
    suites = listed("suites", _suites)
    if json:
        _print_json(suites)
        return
    rows = []
    for info in suites:
        name = f"{info['name']}:{info['argument']}" if info["argument"] else info["name"]
        rows.append(([name, info["summary"], ", ".join(info["options"])], ""))
    columns = [Column("name", "name"), Column("summary", "text"), Column("options", "text")]
    print_table(console or Console(), columns, rows, title=f"{len(suites)} suites")


def print_losses(json: bool, console: Console | None = None) -> None:
    """Print every training loss with its options and a summary."""
    losses = listed("losses", _losses)
    if json:
        _print_json(losses)
        return
    rows = []
    for info in losses:
        options = ", ".join(f"{name}={default}" for name, default in info["options"].items())
        needs_masks = "required" if info["needs_masks"] else "-"
        rows.append(([info["name"], needs_masks, info["summary"], options], ""))
    columns = [
        Column("name", "name"),
        Column("masks", "name"),
        Column("summary", "text"),
        Column("options", "text"),
    ]
    print_table(console or Console(), columns, rows, title=f"{len(losses)} losses")


def print_models(pattern: str, json: bool, console: Console | None = None) -> None:
    """Print the models whose name matches the pattern."""
    every = listed("models", _models, ("timm", "torchvision"))
    models = [model for model in every if matches(model["name"], pattern)]
    if not models:
        raise UnknownName("model", pattern, [model["name"] for model in every])
    if json:
        _print_json(models)
        return
    rows = [([model["name"], model["library"], model["view"]], "") for model in models]
    columns = [Column("name", "name"), Column("library", "name"), Column("view", "name")]
    console = console or Console()
    print_table(console, columns, rows, title=f"{len(models)} models")
    _print_notes(console, MODEL_NOTES)


def _print_json(entries: Entries) -> None:
    print(json_module.dumps(entries, indent=2))


def _print_notes(console: Console, notes: Sequence[str]) -> None:
    for note in notes:
        console.print(note, highlight=False, markup=False)


def _methods() -> Sequence[Any]:
    from steadygaze.methods import list_methods

    return list_methods()


def _metrics() -> Sequence[Any]:
    from steadygaze.faithfulness.metric import list_metrics

    return list_metrics()


def _suites() -> Sequence[Any]:
    from steadygaze.runs.stress.suite import list_suites

    return list_suites()


def _losses() -> Sequence[Any]:
    from steadygaze.training.losses.registry import list_losses

    return list_losses()


def _models() -> Sequence[Any]:
    from steadygaze.loading.model_names import model_infos

    return model_infos()
