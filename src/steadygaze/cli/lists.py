"""Tables of what can be named: `steadygaze methods`, `metrics`, `suites`, `losses`, `models`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from steadygaze.cli.output import Column, Row, print_table
from steadygaze.errors import UnknownNameError

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


def print_methods(as_json: bool) -> None:
    """Print every method with its family, its cost in forward passes, and a summary."""
    from steadygaze.methods.registry import list_methods

    methods = list_methods()
    rows: list[Row] = []
    for family in dict.fromkeys(info.family for info in methods):
        rows += [([""] * 5, "")] if rows else []
        rows.append(([family, "", "", "", ""], "bold"))
        for info in (info for info in methods if info.family == family):
            marks = ["yes" if flag else "-" for flag in (info.class_specific, info.layers)]
            summary = re.sub(r"\s*\([^()]*[=:][^()]*\)", "", info.summary)  # options are shown by --json
            rows.append(([f"  {info.name}", f"{info.cost:g}", *marks, summary], ""))
    columns = [Column("name", "name"), Column("cost"), Column("class"), Column("layers")]
    _print("methods", methods, [*columns, Column("summary", "text")], rows, as_json, METHOD_NOTES)


def print_metrics(as_json: bool) -> None:
    """Print every faithfulness metric with its direction and a summary."""
    from steadygaze.faithfulness.metric import list_metrics

    metrics = list_metrics()
    rows = [
        ([info.name, str(info.better), "required" if info.needs_masks else "-", info.summary], "")
        for info in metrics
    ]
    names = [Column(heading, "name") for heading in ("name", "better", "masks")]
    _print("metrics", metrics, [*names, Column("summary", "text")], rows, as_json)


def print_suites(as_json: bool) -> None:
    """Print every stress suite with its argument and a summary."""
    from steadygaze.runs.suite import list_suites

    suites = list_suites()
    rows = [
        (
            [f"{info.name}:{info.argument}".rstrip(":"), info.summary, ", ".join(info.options)],
            "",
        )
        for info in suites
    ]
    columns = [Column("name", "name"), Column("summary", "text"), Column("options", "text")]
    _print("suites", suites, columns, rows, as_json)


def print_losses(as_json: bool) -> None:
    """Print every training loss with its options and a summary."""
    from steadygaze.training.losses.registry import list_losses

    losses = list_losses()
    rows = []
    for info in losses:
        options = ", ".join(f"{name}={default}" for name, default in info.options.items())
        rows.append(([info.name, "required" if info.needs_masks else "-", info.summary, options], ""))
    columns = [Column("name", "name"), Column("masks", "name")]
    _print("losses", losses, [*columns, Column("summary", "text"), Column("options", "text")], rows, as_json)


def print_models(pattern: str, as_json: bool) -> None:
    """Print the models whose name matches the pattern."""
    from steadygaze.loading.load import list_models

    models = list_models(pattern)
    if not models:
        raise UnknownNameError("model", pattern, [model.name for model in list_models()])
    rows = [([model.name, model.library, model.view], "") for model in models]
    columns = [Column(heading, "name") for heading in ("name", "library", "view")]
    _print("models", models, columns, rows, as_json, MODEL_NOTES)


def _print(
    what: str,
    infos: Sequence[Any],
    columns: Sequence[Column],
    rows: Sequence[Row],
    as_json: bool,
    notes: Sequence[str] = (),
) -> None:
    """Print dataclasses as JSON, or as a table with notes below."""
    if as_json:
        print(json.dumps([asdict(info) for info in infos], indent=2, default=str))
        return
    console = Console()
    print_table(console, columns, rows, title=f"{len(infos)} {what}")
    for note in notes:
        console.print(note, highlight=False, markup=False)
