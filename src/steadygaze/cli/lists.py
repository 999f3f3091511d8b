"""An index of what can be named, so that listing it does not import torch and timm each time.

A JSON file for each list, in the cache folder of the user (`STEADYGAZE_CACHE`, or the platform's). It is
valid for one state of the installed packages; a file that is missing, damaged, of another state or cannot be
written is ignored, and the list is made anew. With plugins installed, nothing is read or written.

Lists of what can be named: `steadygaze methods`, `metrics`, `suites`, `losses`, `models`.
"""

from __future__ import annotations

import json
import json as json_module
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

from rich.console import Console

from steadygaze import __version__
from steadygaze.cli.output import Column, print_table
from steadygaze.errors import UnknownNameError
from steadygaze.files import write_atomic
from steadygaze.registry import GROUP, matches

FOLDER = "STEADYGAZE_CACHE"  # environment variable; empty: no cache
SOURCE = Path(__file__).parents[2]  # the package
Entries = list[dict[str, Any]]


def listed(name: str, make: Callable[[], Sequence[Any]], packages: Sequence[str] = ()) -> Entries:
    """The entries of a list as they are printed with --json.

    name: of the list, such as "methods"
    make: gives the entries, as dataclasses; called unless the index has them
    packages: that the list depends on, besides steadygaze
    """
    folder = cache_folder()
    file = None if folder is None else folder / f"{name}.json"
    state = "" if file is None else _state(packages)
    if file is not None and state:
        with suppress(OSError, ValueError, TypeError, KeyError):  # missing or damaged
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["state"] == state and _is_valid(content["entries"]):
                return list(content["entries"])
    entries: Entries = json.loads(json.dumps([asdict(entry) for entry in make()], default=str))
    if file is not None and state:
        with suppress(OSError):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(file, json.dumps({"state": state, "entries": entries}))
    return entries


def cache_folder() -> Path | None:
    """The folder of the index; None if there is none."""
    given = os.environ.get(FOLDER)
    if given is not None:
        return Path(given) if given else None
    with suppress(RuntimeError):  # no home folder
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "steadygaze"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "steadygaze"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steadygaze"
    return None


def _state(packages: Sequence[str]) -> str:
    """What the entries depend on; "" if that is unknown, as with plugins, whose code may change."""
    if entry_points(group=GROUP):
        return ""
    versions = []
    for package in packages:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            return ""
    stats = [file.stat() for file in sorted(SOURCE.rglob("*.py"))]  # an editable installation changes
    stamp = f"{len(stats)} files, {sum(s.st_size for s in stats)} bytes, {max(s.st_mtime_ns for s in stats)}"
    python = ".".join(map(str, sys.version_info[:2]))
    return "; ".join([f"steadygaze {__version__} in {SOURCE}", stamp, f"python {python}", *versions])


def _is_valid(entries: Any) -> bool:
    return isinstance(entries, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries
    )


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
        raise UnknownNameError("model", pattern, [model["name"] for model in every])
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
    from steadygaze.methods.registry import list_methods

    return list_methods()


def _metrics() -> Sequence[Any]:
    from steadygaze.faithfulness.metric import list_metrics

    return list_metrics()


def _suites() -> Sequence[Any]:
    from steadygaze.runs.suite import list_suites

    return list_suites()


def _losses() -> Sequence[Any]:
    from steadygaze.training.losses.registry import list_losses

    return list_losses()


def _models() -> Sequence[Any]:
    from steadygaze.loading.load import list_models

    return list_models()
