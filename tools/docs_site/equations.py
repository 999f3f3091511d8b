"""Sections of docs/equations.md, and which of them belongs to a registered entry."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

DOCUMENT = Path(__file__).parents[2] / "docs" / "equations.md"
ANCHOR = re.compile(r'^<a id="([^"]+)"></a>$', re.MULTILINE)
CITATION = re.compile(r"equations\.md#([\w-]+)")

# entries whose section has another name than they have; all others are found by name or by citation
SECTIONS = {
    "genatt": "gae",
    "gradsam": "gae",
    "vanilla_grad_norm": "vanilla-grad",
    "attixg": "cat-attcat",
    "cat": "cat-attcat",
    "attcat": "cat-attcat",
    "fullgrad_plus": "fullgrad",
    "occlusion": "leave-one-out",
    "sufficient": "sis",
    "positive_kl": "diffmask-perturbation",
    "negative_kl": "diffmask-perturbation",
    "positive_accuracy": "diffmask-perturbation",
    "negative_accuracy": "diffmask-perturbation",
    "sensitivity_n": "subset-metrics",
    "faithfulness_correlation": "subset-metrics",
    "infidelity": "subset-metrics",
    "efficient_randomization": "mprt",
    "smooth_randomization": "mprt",
    "max_sensitivity": "stability",
    "avg_sensitivity": "stability",
    "sparseness": "concentration",
    "complexity": "concentration",
    "relevance": "relevance-losses",
    "synthetic": "shift-accuracy",
}
WITHOUT = ("random", "cross_entropy")  # a random map, and a loss of every textbook


@lru_cache
def sections() -> dict[str, str]:
    """Anchor -> its section, from the heading to the next anchor."""
    parts = ANCHOR.split(DOCUMENT.read_text(encoding="utf-8"))[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def anchors_of(name: str, module: str, own_text: str = "", *, kind: str = "method") -> list[str]:
    """The sections that define an entry, the most specific ones only.

    name: of the entry; module: where it is defined; own_text: its docstring, which may cite sections
    """
    if name in WITHOUT:
        return []
    known = sections()
    if kind == "suite":  # a suite computes several quantities, and its file cites them
        cited = [anchor for anchor in _cited(_source(module)) if anchor in known]
        return cited or ([SECTIONS[name]] if name in SECTIONS else [])
    if name in SECTIONS:
        return [SECTIONS[name]]
    if name.startswith("libra_"):
        return ["libra"]
    same = name.replace("_", "-")
    if same in known:
        return [same]
    stem = re.sub(r"-code$", "", same)
    if stem.replace("-", "_") in SECTIONS:
        return [SECTIONS[stem.replace("-", "_")]]
    cited = [anchor for anchor in _cited(own_text) if anchor in known]
    if cited:
        return cited
    return [anchor for anchor in _cited(sys.modules[module].__doc__ or "") if anchor in known][:1]


def section(anchor: str, up: str) -> str:
    """A section for another page: headings smaller, links to this and other pages from there.

    up: the way from that page to the folder docs, such as "../../"
    """
    text = sections()[anchor].strip()
    text = re.sub(r"^#+ (.*)$", r"**\1**", text, flags=re.MULTILINE)
    text = re.sub(r"\]\(#", f"]({up}equations.md#", text)
    return re.sub(r"\]\((?!https?:|\.\./|#)", f"]({up}", text)


def _cited(text: str) -> list[str]:
    return list(dict.fromkeys(CITATION.findall(text)))


def _source(module: str) -> str:
    loaded: ModuleType = sys.modules[module]
    return Path(loaded.__file__ or "").read_text(encoding="utf-8")
