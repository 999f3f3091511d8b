"""`steadygaze card --model-card`: what was measured, as a block for a Hugging Face model card.

The YAML head is the hub's `model-index` with the numbers of the second model, so that they appear beside it;
below it a Markdown table has them before and after, with intervals, and how to repeat them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from steadygaze.runs.before_after import FaithfulnessChange
from steadygaze.runs.card import Change
from steadygaze.runs.compare import Comparison
from steadygaze.runs.request import CHANCE
from steadygaze.runs.statistics import markdown_text, told_apart

HOME = "https://github.com/steadygaze/steadygaze"


def model_card(
    comparison: Comparison, faithfulness: Sequence[FaithfulnessChange], changes: Sequence[Change]
) -> str:
    """changes: the numbers of stress that are listed, with before and after."""
    before, after = comparison.before[0], comparison.after[0]
    name = told_apart([before.run, after.run], [before.folder, after.folder])[1]
    methods = [row for row in faithfulness if row.method.partition("/")[0] != CHANCE]
    entries = [
        *(
            _metric(f"{c.setting.words}: {c.quantity.words}", c.quantity.name, c.scale * c.after.mean)
            for c in changes
        ),
        *(_metric(f"{row.method}: {row.quantity.words}", row.metric, row.after) for row in methods),
    ]
    facts = after.run["settings"]
    versions = ", ".join(f"{library} {version}" for library, version in facts["versions"].items())
    command = after.run.get("about", {}).get("command", "")
    lines = [
        "---",
        "model-index:",
        f"- name: {_quoted(name)}",
        "  results:",
        "  - task:",
        "      type: image-classification",
        "    dataset:",
        f"      name: {_quoted(after.data)}",
        f"      type: {_quoted(after.data)}",
        "    metrics:",
        *entries,
        "---",
        "",
        "## Robustness and explanations",
        "",
        f"Measured with [steadygaze]({HOME}) on {after.image_count} images of {markdown_text(after.data)}, "
        "before and after on the same images; differences with 95 % intervals. "
        f"{after.caution}".rstrip(),
        "",
        "| measure | before | after | difference |",
        "| --- | ---: | ---: | ---: |",
        *(_row(c.setting.words, c, c.before.mean, c.after.mean, c.scale) for c in changes),
        *(_row(row.method, row, row.before, row.after, 1.0) for row in methods),
        "",
        "↑: higher is better; ↓: lower is better. Removal scores: how the prediction changes when patches "
        "are removed in the order of a map.",
        "",
        f"Versions: {versions}.",
    ]
    if command:
        lines += ["", "```sh", command, "```"]
    return "\n".join(lines) + "\n"


def _metric(name: str, kind: str, value: float) -> str:
    return f"    - type: {_quoted(kind)}\n      value: {value:.6g}\n      name: {_quoted(name)}"


def _quoted(text: str) -> str:
    """A string of YAML; JSON's are also YAML's."""
    return json.dumps(text, ensure_ascii=False)


def _row(name: str, change: Any, before: float, after: float, scale: float) -> str:
    quantity = change.quantity
    gap, low, high = (scale * value for value in (change.difference, change.low, change.high))
    cells = [quantity.text(before), quantity.text(after), f"{gap:+.3g} [{low:+.3g}, {high:+.3g}]"]
    words = markdown_text(f"{name}: {quantity.words}{quantity.arrow}")
    return f"| {words} | {' | '.join(cells)} |"
