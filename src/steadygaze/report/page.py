"""What pages of stress runs are made of: sections, cells of tables, and how a run was made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from steadygaze.report.html import Figure


@dataclass(frozen=True)
class Cell:
    """A cell of a table: words, what it is sorted by, a look, and small print."""

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


def how(run: dict[str, Any]) -> list[tuple[str, str]]:
    """How a stress run was made, line by line."""
    settings, about = run["settings"], run.get("about", {})
    pictures = f", {settings['pictures']} pictures ({settings.get('layout', '')})" if settings.get("pictures") else ""
    limit = f", at most {settings['limit']}, spread evenly over the classes" if settings.get("limit") else ""
    shifts = "; ".join(f"{s['name']}: {s['pictures']} pictures, {s['hash']}" for s in settings.get("shifts", ()))
    epsilons = ", ".join(f"{255 * e:g}/255" for e in settings.get("epsilons", ()))
    shown = [
        ("command", about.get("command", "")),
        ("model", ", ".join(filter(None, (settings["model"], settings.get("checkpoint"))))),
        ("weights", settings["weights"]),
        ("data", f"{settings.get('data', '')}{pictures}{limit}"),
        ("pictures' hash", settings.get("pictures_hash") or ""),
        ("preprocessing", ", ".join(f"{k} {v}" for k, v in settings.get("preprocessing", {}).items())),
        ("suite", ", ".join(settings["suite"])),
        ("shifts", shifts),
        ("corruptions", ", ".join(settings["corruptions"])),
        ("severities", ", ".join(map(str, settings["severities"]))),
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
