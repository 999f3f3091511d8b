"""`steadygaze methods` and `steadygaze models`."""

from __future__ import annotations

import json as json_module
import re
from dataclasses import asdict
from fnmatch import fnmatch

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from steadygaze.errors import UnknownName

# timm modules whose models the adapters support
PLAIN = (
    "vision_transformer",
    "deit",
    "eva",
    "beit",
    "cait",
    "vision_transformer_relpos",
    "vision_transformer_hybrid",
)
STAGED = (
    "swin_transformer",
    "swin_transformer_v2",
    "swin_transformer_v2_cr",
    "pvt_v2",
    "pit",
    "mvitv2",
    "hiera",
    "twins",
    "xcit",
)


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


def named_models() -> list[dict[str, str]]:
    """Every model that can be loaded by name alone: its name, library, and the kind of its view."""
    import timm

    from steadygaze import models
    from steadygaze.loading.load import torchvision_names

    rows = [{"name": "embedded", "library": "steadygaze", "view": "plain"}]
    for view, own in (("plain", models.PLAIN), ("staged", models.STAGED)):
        rows += [
            {"name": name, "library": "steadygaze", "view": view}
            for module in own
            for name in timm.list_models(module=module)
        ]
    for view, modules in (("plain", PLAIN), ("staged", STAGED)):
        names = sorted({name for module in modules for name in timm.list_models(module=module)})
        rows += [{"name": name, "library": "timm", "view": view} for name in names]
    return rows + [
        {"name": f"torchvision:{name}", "library": "torchvision", "view": "plain"}
        for name in torchvision_names()
    ]


def print_models(pattern: str, json: bool, console: Console | None = None) -> None:
    """Print the models whose name matches the pattern."""
    rows = named_models()
    wanted = pattern.lower() if any(sign in pattern for sign in "*?[") else f"*{pattern.lower()}*"
    chosen = [row for row in rows if fnmatch(row["name"].lower(), wanted)]
    if not chosen:
        raise UnknownName("model", pattern, [row["name"] for row in rows])
    if json:
        print(json_module.dumps(chosen, indent=2))
        return
    table = Table("name", "library", "view", title=f"{len(chosen)} models", title_justify="left", box=SIMPLE)
    for row in chosen:
        table.add_row(row["name"], row["library"], row["view"])
    console = console or Console()
    console.print(table)
    console.print(
        "plain: one patch grid in all layers; supports nearly every method. staged: hierarchical (or XCiT's "
        "channel attention); no method that needs global attention.\nAlso accepted: a transformers folder or "
        "owner/name of ViT, DeiT, BEiT, Data2Vec, DINOv2, DINOv3, CLIP, MetaCLIP 2, SigLIP, I-JEPA or MSN, "
        "and a folder written by `steadygaze train`.",
        highlight=False,
    )
