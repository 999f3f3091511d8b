"""Pages of the reference for the public names of `steadygaze`, rendered by mkdocstrings."""

from __future__ import annotations

import inspect
from typing import Any

import steadygaze as sg
from tools.docs_site.examples import EXAMPLES

PACKAGES = tuple(name for name in sg.__all__ if inspect.ismodule(getattr(sg, name)))
PAGES = {  # page -> title, what it says, public names
    "explain": (
        "Explain",
        "Attribution maps of a model's predictions.",
        [
            "explain", "Attribution", "Attributions", "RemovalCheck", "method", "list_methods", "calibrate",
            "Calibration", "ask", "zero_shot", "similar_to", "component", "feature_norm", "Region",
            "Detection",
        ],
    ),
    "look": (
        "Look at attention and features",
        "What heads attend to, and what the features of patches hold.",
        [
            "attention", "Attention", "features", "Features", "lens", "Lens", "outliers", "Outliers",
            "find_registers",
        ],
    ),
    "loading": (
        "Loading models",
        "From a name, a checkpoint or a module to a model that every function accepts.",
        ["load_model", "LoadedModel", "Preprocess", "list_models", "adapt", "ViT", "list_adapters"],
    ),
    "runs": (
        "Verify, stress, train",
        "Measurements and training, with progress and rows.",
        ["verify", "list_metrics", "stress", "list_suites", "train", "list_losses", "Rows", "Progress"],
    ),
    "registries": (
        "Registries",
        "How to add a method, an adapter, a metric, a suite or a loss.",
        ["register_method", "register_adapter", "register_metric", "register_suite", "register_loss"],
    ),
    "exceptions": (
        "Errors and warnings",
        "Everything that steadygaze raises or warns of.",
        [
            "SteadygazeError", "UnsupportedModelError", "MethodUnavailableError", "UnknownNameError",
            "InputError", "ImageError",
            "CheckpointError", "BrokenMapError", "RowsNotWrittenError", "ModelChangedError",
            "DamagedDataWarning", "DegenerateMapWarning",
            "PartialMapWarning", "ImagesOutOfRangeWarning", "MemoryUseWarning",
        ],
    ),
}  # fmt: skip


def pages() -> dict[str, str]:
    """Path -> Markdown of every page of the interface; each public name is on exactly one."""
    result = {"reference/api/index.md": overview()}
    for page, (title, words, names) in groups().items():
        parts = [f"# {title}", words, *(entry(name) for name in names)]
        result[f"reference/api/{page}.md"] = "\n\n".join(parts) + "\n"
    for package in PACKAGES:
        result[f"reference/api/{package}.md"] = package_page(package)
    return result


def groups() -> dict[str, tuple[str, str, list[str]]]:
    """`PAGES`, and a page for public names that are on none of them."""
    shown = {name for _, _, names in PAGES.values() for name in names}
    others = [name for name in sg.__all__ if name not in {*shown, *PACKAGES, "__version__"}]
    return {**PAGES, "others": ("Other names", "", others)} if others else PAGES


def entry(name: str) -> str:
    """mkdocstrings' directive for a public name, and an example if its docstring has none."""
    home = getattr(sg, name).__module__
    parts = [f"## `sg.{name}` {{ #steadygaze.{name} }}", f"::: {home}.{name}"]
    if name in EXAMPLES:
        parts += ["**Example**", f"```pycon\n{EXAMPLES[name].strip()}\n```"]
    return "\n\n".join(parts)


def package_page(package: str) -> str:
    """The names that a package offers: functions and classes with signatures, modules by their first line."""
    module = getattr(sg, package)
    names = [name for name in getattr(module, "__all__", dir(module)) if not name.startswith("_")]
    parts = [f"# `sg.{package}`", first_paragraph(module)]
    elsewhere = {id(getattr(sg, name)): (page, name) for page, group in groups().items() for name in group[2]}
    linked = []
    for name in sorted(names):
        value = getattr(module, name)
        if id(value) in elsewhere:  # described once: two headings with one anchor confuse links
            page, public = elsewhere[id(value)]
            linked.append(f"[`sg.{public}`]({page}.md#steadygaze.{public})")
        elif documented(value):
            parts.append(f"::: {value.__module__}.{value.__qualname__}\n    options:\n      heading_level: 2")
    if linked:
        parts.insert(2, f"On other pages: {', '.join(linked)}.")
    if package in EXAMPLES:
        parts += ["## Example", f"```pycon\n{EXAMPLES[package].strip()}\n```"]
    return "\n\n".join(parts) + "\n"


def documented(value: Any) -> bool:
    """Whether it is a function or class of this package with a docstring."""
    own = str(getattr(value, "__module__", "")).startswith("steadygaze")
    return own and (inspect.isfunction(value) or inspect.isclass(value)) and bool(value.__doc__)


def overview() -> str:
    """A table of every public name with the first line of its docstring."""
    lines = ["# Python interface", "", "`import steadygaze as sg` gives these names.", ""]
    for page, (title, _, names) in groups().items():
        lines += [f"## [{title}]({page}.md)", "", "| name | what it is |", "| --- | --- |"]
        for name in names:
            summary = first_paragraph(getattr(sg, name)).replace("|", "\\|").replace("\n", " ")
            lines.append(f"| [`sg.{name}`]({page}.md#steadygaze.{name}) | {summary} |")
        lines.append("")
    lines += ["## Packages", "", "| name | what it is |", "| --- | --- |"]
    for package in PACKAGES:
        summary = first_paragraph(getattr(sg, package)).replace("\n", " ")
        lines.append(f"| [`sg.{package}`]({package}.md) | {summary} |")
    return "\n".join(lines) + "\n"


def first_paragraph(value: object) -> str:
    return (inspect.getdoc(value) or "").partition("\n\n")[0]
