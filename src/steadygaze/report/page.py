"""The parts of pages: figures with legends, sections, table cells, and the settings of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from steadygaze.report import svg


@dataclass(frozen=True)
class Figure:
    """A chart with its heading and a remark. note, chart: HTML, in which names from files are escaped."""

    title: str
    note: str
    chart: str


@dataclass(frozen=True)
class Cell:
    """A cell of a table: text, sort key, CSS class, and small print."""

    text: str
    sort: Any = ""
    look: str = ""
    small: str = ""


@dataclass(frozen=True)
class Part:
    """One section of a page."""

    title: str
    id: str = ""
    nav: str = ""
    text: str = ""
    tiles: list[tuple[str, str, str]] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    samples: list[tuple[str, str]] = field(default_factory=list)
    sheets: list[tuple[str, str]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    texts: int = 2
    rows: list[list[Cell]] = field(default_factory=list)
    folded: str = ""
    shots: list[Any] = field(default_factory=list)
    after: str = ""
    empty: str = ""


def legend(series: Sequence[svg.Series]) -> str:
    """The legend of a chart."""
    keys = [
        f'<span><span class="key {one.colour}"></span>{escape(one.name)}</span>'
        for one in series
        if one.rank < svg.COLOURS
    ]
    return f'<span class="legend">{"".join(keys)}</span>'


def how(run: dict[str, Any]) -> list[tuple[str, str]]:
    """The settings of a run of either kind, line by line; settings that it does not have are left out."""
    settings, about = run["settings"], run.get("about", {})
    count = (
        f", {settings['pictures']} images ({settings.get('layout', '')})" if settings.get("pictures") else ""
    )
    chosen = "the first ones" if settings.get("stream") else "spread evenly over the classes"
    limit = f", at most {settings['limit']}, {chosen}" if settings.get("limit") else ""
    shifts = "; ".join(
        f"{s['name']}: {s['pictures']} images, {s['hash']}" for s in settings.get("shifts", ())
    )
    near = "; ".join(
        f"{s['name']}: {s['pictures']} images, bank of {s['bank']}, {s['hash']}"
        for s in settings.get("neighbours", ())
    )
    epsilons = ", ".join(f"{255 * e:g}/255" for e in settings.get("epsilons", ()))
    shown = [
        ("command", about.get("command", "")),
        ("model", ", ".join(filter(None, (settings["model"], settings.get("checkpoint"))))),
        ("weights", settings["weights"]),
        ("data", f"{settings.get('data', '')}{count}{limit}"),
        ("hash of the images", settings.get("pictures_hash") or ""),
        ("preprocessing", ", ".join(f"{k} {v}" for k, v in settings.get("preprocessing", {}).items())),
        ("explained class", settings.get("target", "")),
        ("metrics", ", ".join(settings.get("metrics", ()))),
        ("ratios", ", ".join(f"{ratio:g}" for ratio in settings.get("ratios", ()))),
        ("fill", settings.get("fill", "")),
        ("suite", ", ".join(settings.get("suite", ()))),
        ("shifts", shifts),
        ("neighbours", near),
        ("corruptions", ", ".join(settings.get("corruptions", ()))),
        ("severities", ", ".join(map(str, settings.get("severities", ())))),
        ("epsilons", f"{epsilons}; {settings['pgd_steps']} steps of PGD" if epsilons else ""),
        ("salient first", settings.get("salient") or ""),
        ("notes", "; ".join(settings.get("notes", ()))),
        ("seed", str(settings["seed"])),
        ("batch", str(settings.get("batch", ""))),
        ("device", settings.get("device", "")),
        ("versions", ", ".join(f"{name} {version}" for name, version in settings["versions"].items())),
        ("began", about.get("began", "")),
    ]
    return [(name, text) for name, text in shown if text]
