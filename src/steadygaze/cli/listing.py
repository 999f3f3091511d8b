"""Lists of what can be named: `steadygaze methods`, `metrics`, `models`."""

from __future__ import annotations

import json as json_module
import re
from dataclasses import asdict

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steadygaze.errors import UnknownName


def print_methods(json: bool, console: Console | None = None) -> None:
    """Print every method with its family, its cost in forward passes, and a summary."""
    from steadygaze.methods import list_methods

    methods = list_methods()
    if json:
        print(json_module.dumps([asdict(info) for info in methods], indent=2, default=str))
        return
    table = Table(title=f"{len(methods)} methods", title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("name", no_wrap=True)
    table.add_column("cost", justify="right")
    table.add_column("class", justify="center")
    table.add_column("layers", justify="center")
    table.add_column("summary")
    for family in dict.fromkeys(info.family for info in methods):
        table.add_row(f"[bold]{family}[/bold]")
        for info in (info for info in methods if info.family == family):
            marks = ["yes" if flag else "-" for flag in (info.class_specific, info.layers)]
            summary = re.sub(r"\s*\([^()]*[=:][^()]*\)", "", info.summary)  # without options: --json has them
            table.add_row(f"  {info.name}", f"{info.cost:g}", *marks, escape(summary))
        table.add_section()
    console = console or Console()
    console.print(table)
    console.print(
        "cost: number of forward passes, a backward pass counts as one. class: the map depends on the target "
        "class.\nlayers: can be combined with +last, +plus, +skipplus, and +rollout if each layer gives a "
        "matrix. Method options: see --json.",
        highlight=False,
    )


def print_metrics(json: bool, console: Console | None = None) -> None:
    """Print every faithfulness metric with its direction and a summary."""
    from steadygaze.faithfulness.metric import list_metrics

    metrics = list_metrics()
    if json:
        print(json_module.dumps([asdict(info) for info in metrics], indent=2, default=str))
        return
    columns = ("name", "better", "masks", "summary")
    table = Table(*columns, title=f"{len(metrics)} metrics", title_justify="left", box=SIMPLE)
    table.columns[0].no_wrap = True
    for info in metrics:
        needs_masks = "required" if info.needs_masks else "-"
        table.add_row(info.name, str(info.better), needs_masks, escape(info.summary))
    (console or Console()).print(table)


def print_suites(json: bool, console: Console | None = None) -> None:
    """Print every stress suite with its argument and a summary."""
    from steadygaze.runs.stress.suite import list_suites

    suites = list_suites()
    if json:
        print(json_module.dumps([asdict(info) for info in suites], indent=2, default=str))
        return
    columns = ("name", "summary", "options")
    table = Table(*columns, title=f"{len(suites)} suites", title_justify="left", box=SIMPLE)
    for info in suites:
        name = f"{info.name}:{info.argument}" if info.argument else info.name
        table.add_row(escape(name), escape(info.summary), escape(", ".join(info.options)))
    (console or Console()).print(table)


def print_losses(json: bool, console: Console | None = None) -> None:
    """Print every training loss with its options and a summary."""
    from steadygaze.training.losses.registry import list_losses

    losses = list_losses()
    if json:
        print(json_module.dumps([asdict(info) for info in losses], indent=2, default=str))
        return
    columns = ("name", "masks", "summary", "options")
    table = Table(*columns, title=f"{len(losses)} losses", title_justify="left", box=SIMPLE)
    for info in losses:
        needs_masks = "required" if info.needs_masks else "-"
        options = ", ".join(f"{name}={default}" for name, default in info.options.items())
        table.add_row(info.name, needs_masks, escape(info.summary), escape(options))
    (console or Console()).print(table)


def print_models(pattern: str, json: bool, console: Console | None = None) -> None:
    """Print the models whose name matches the pattern."""
    from steadygaze.loading import model_names

    models = model_names.model_infos(pattern)
    if not models:
        raise UnknownName("model", pattern, model_names.list_models())
    if json:
        print(json_module.dumps([asdict(model) for model in models], indent=2))
        return
    table = Table("name", "library", "view", title=f"{len(models)} models", title_justify="left", box=SIMPLE)
    for model in models:
        table.add_row(model.name, model.library, model.view)
    console = console or Console()
    console.print(table)
    console.print(
        "plain: one patch grid in all layers; supports nearly every method. staged: hierarchical (or XCiT's "
        "channel attention); no method that needs global attention.\nAlso accepted: a transformers folder or "
        "owner/name of ViT, DeiT, BEiT, Data2Vec, DINOv2, DINOv3, I-JEPA, MSN, Swin, Swin V2, PVT and "
        "PVT v2; of CLIP, MetaCLIP 2, SigLIP and SigLIP 2, also with text; of SegFormer, DPT and YOLOS, with "
        "a region; "
        "of ViLT, LLaVA, Qwen2.5-VL, Idefics 3 and SmolVLM in Python, with a question or prompt; "
        "open_clip:NAME@TAG; and a folder written by `steadygaze train`.",
        highlight=False,
    )
