"""Tables of what can be named: `steadygaze methods`, `metrics`, `suites`, `losses`, `models`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from steadygaze.cli.options import Json
from steadygaze.cli.output import Column, Row, print_table, stdout
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


def listed(kind: str, read: Callable[[], Sequence[Any]]) -> list[Any]:
    """The entries of a listing: from a file of the package, so that torch is not imported; with plugins, what
    is registered."""
    from importlib.metadata import entry_points

    from steadygaze.registry import GROUP, PLUGIN_FILES, catalog

    if PLUGIN_FILES or entry_points(group=GROUP):
        return list(read())
    return [SimpleNamespace(**entry) for entry in catalog()[kind]]


def methods(*, as_json: Json = False) -> None:
    """List the attribution methods.

    Example: steadygaze methods
    Example: steadygaze methods --json
    """
    infos = listed("methods", lambda: import_module("steadygaze").list_methods())
    rows: list[Row] = []
    for family in dict.fromkeys(info.family for info in infos):
        rows += [([""] * 5, "")] if rows else []
        rows.append(([family, "", "", "", ""], "bold"))
        for info in (info for info in infos if info.family == family):
            marks = ["yes" if flag else "-" for flag in (info.class_specific, info.layers)]
            summary = re.sub(r"\s*\([^()]*[=:][^()]*\)", "", info.summary)  # options are shown by --json
            rows.append(([f"  {info.name}", f"{info.cost:g}", *marks, summary], ""))
    columns = [Column("name", "name"), Column("cost"), Column("class"), Column("layers")]
    _print("methods", infos, [*columns, Column("summary", "text")], rows, as_json, METHOD_NOTES)


def metrics(*, as_json: Json = False) -> None:
    """List the metrics of `steadygaze verify`.

    Example: steadygaze metrics
    Example: steadygaze metrics --json
    """
    infos = listed("metrics", lambda: import_module("steadygaze").list_metrics())
    rows = [
        ([info.name, str(info.better), "required" if info.needs_masks else "-", info.summary], "")
        for info in infos
    ]
    names = [Column(heading, "name") for heading in ("name", "better", "masks")]
    _print("metrics", infos, [*names, Column("summary", "text")], rows, as_json)


def suites(*, as_json: Json = False) -> None:
    """List the suites of `steadygaze stress`.

    Example: steadygaze suites
    Example: steadygaze suites --json
    """
    infos = listed("suites", lambda: import_module("steadygaze").list_suites())
    rows = [
        ([f"{info.name}:{info.argument}".rstrip(":"), info.summary, ", ".join(info.options)], "")
        for info in infos
    ]
    columns = [Column("name", "name"), Column("summary", "text"), Column("options", "text")]
    _print("suites", infos, columns, rows, as_json)


def losses(*, as_json: Json = False) -> None:
    """List the losses that training recipes can name.

    Example: steadygaze losses
    Example: steadygaze losses --json
    """
    infos = listed("losses", lambda: import_module("steadygaze").list_losses())
    rows = []
    for info in infos:
        options = ", ".join(f"{name}={default}" for name, default in info.options.items())
        rows.append(([info.name, "required" if info.needs_masks else "-", info.summary, options], ""))
    columns = [Column("name", "name"), Column("masks", "name")]
    _print("losses", infos, [*columns, Column("summary", "text"), Column("options", "text")], rows, as_json)


def models(
    *,
    pattern: Annotated[str, typer.Argument(help="Part of a name, or a pattern with * and ?.")] = "*",
    as_json: Json = False,
) -> None:
    """List the models that can be loaded by name.

    Example: steadygaze models deit
    Example: steadygaze models 'vit_*_384*' --json
    """
    from steadygaze.loading.load import list_models

    infos = list_models(pattern)
    if not infos:
        raise UnknownNameError("model", pattern, [model.name for model in list_models()])
    rows = [([model.name, model.library, model.view], "") for model in infos]
    columns = [Column(heading, "name") for heading in ("name", "library", "view")]
    _print("models", infos, columns, rows, as_json, MODEL_NOTES)


def _print(
    what: str,
    infos: Sequence[Any],
    columns: Sequence[Column],
    rows: Sequence[Row],
    as_json: bool,
    notes: Sequence[str] = (),
) -> None:
    """Print entries as JSON, or as a table with notes below."""
    if as_json:
        import json

        print(json.dumps([vars(info) for info in infos], indent=2, default=_plain))
        return
    console = stdout()
    print_table(console, columns, rows, title=f"{len(infos)} {what}")
    for note in notes:
        console.print(note, highlight=False, markup=False)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)
