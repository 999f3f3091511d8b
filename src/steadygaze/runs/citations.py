"""`steadygaze cite`: BibTeX entries of everything that runs used: methods, metrics, suites and models.

The entries are those of the bibliography of docs/equations.md (tools/references.py writes them into the
package), so that nothing has to be typed twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from steadygaze import __version__
from steadygaze.runs.rows import Rows
from steadygaze.runs.statistics import latex_text

JOURNALS = re.compile(r"Transactions|Journal|Pattern Recognition|TMLR|Statistics|Psychometrika|Medicine|IEEE")
SOFTWARE = f"""@software{{steadygaze,
  author = {{{{The steadygaze authors}}}},
  title = {{{{steadygaze: explain vision transformers, verify the explanations, measure robustness}}}},
  version = {{{__version__}}},
  year = {{2026}},
  url = {{https://github.com/steadygaze/steadygaze}},
}}"""


@cache
def _table() -> dict[str, Any]:
    text = (files("steadygaze") / "assets" / "references.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def used(rows: Rows) -> dict[str, list[str]]:
    """What the runs of these rows used, by name, with the keys of its references; own names have none."""
    table = _table()
    found: dict[str, list[str]] = {}
    for run in rows.runs:
        facts = run["settings"]
        model = str(facts.get("model", ""))
        for part, keys in table["models"].items():
            if part in model:
                found.setdefault(model, keys)
                break
        for name in (*_methods(facts), *facts.get("metrics", ())):
            found.setdefault(name, table["names"].get(name, []))
        for suite in dict.fromkeys(record["suite"] for record in facts.get("conditions", ())):
            found.setdefault(suite, table["suites"].get(suite, []))
    return found


def _methods(facts: dict[str, Any]) -> Iterator[str]:
    """Base methods and aggregators, such as gae and +plus of "gae+plus:freeze=0.5"."""
    for name, _ in facts.get("columns", ()):
        base, _, aggregator = str(name).partition(":")[0].partition("+")
        yield base
        if aggregator:
            yield f"+{aggregator}"


def bibtex(rows: Rows) -> str:
    """The entries, steadygaze first; a comment names what each is cited for, and what has no entry."""
    names: dict[str, list[str]] = {}  # key -> what it is cited for
    found = used(rows)
    for name, keys in found.items():
        for key in keys:
            names.setdefault(key, []).append(name)
    entries = [f"% {', '.join(cited)}\n{_entry(key)}" for key, cited in names.items()]
    without = [name for name, keys in found.items() if not keys]
    last = [f"% defined by steadygaze, or without a paper: {', '.join(without)}"] if without else []
    return "\n\n".join([SOFTWARE, *entries, *last]) + "\n"


def _entry(key: str) -> str:
    """
    >>> print(_entry("rollout"))
    @inproceedings{rollout2020,
      author = {S. Abnar and W. Zuidema},
      title = {{Quantifying Attention Flow in Transformers}},
      booktitle = {ACL},
      year = {2020},
      url = {https://arxiv.org/abs/2005.00928},
    }
    """
    entry = _table()["references"][key]
    venue, year = entry["venue"], entry["year"]
    kind, place = ("article", "journal") if JOURNALS.search(venue) else ("inproceedings", "booktitle")
    kind = kind if venue else "misc"
    fields = {"author": " and ".join(_authors(entry["author"])), "title": f"{{{latex_text(entry['title'])}}}"}
    fields |= {place: venue} if venue else {}
    fields |= {"year": year} | ({"url": entry["url"]} if "url" in entry else {})
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items()]
    return "\n".join([f"@{kind}{{{key.replace('-', '_')}{year},", *lines, "}"])


def _authors(text: str) -> Iterable[str]:
    return ["others" if name.startswith("et al") else name for name in text.split(", ")]
