"""`steadygaze card --model-card`: what was measured, as a block for a Hugging Face model card.

The YAML head is the hub's metadata: library, tags, and in `model-index` the headline numbers of the second
model, so that they appear beside it. The schema has no field for intervals, so these are in the Markdown
table below it, with everything else that was measured, before and after, and how to repeat it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from steadygaze.report.comparison import short_list
from steadygaze.runs.before_after import FaithfulnessChange
from steadygaze.runs.card import Change
from steadygaze.runs.compare import Comparison
from steadygaze.runs.request import CHANCE
from steadygaze.runs.settings import CLEAN, TOP1
from steadygaze.runs.statistics import markdown_text, told_apart

HOME = "https://github.com/steadygaze/steadygaze"
LIBRARIES = ("open_clip", "timm", "transformers")  # the names of the hub are those of `LoadedModel.source`
TAGS = ("image-classification", "robustness", "explainability", "steadygaze")
CORRUPTION_SCORES = ("mce", "mean_error")  # the first one that was measured
ATTACKS = ("autoattack", "attacks")  # suites; the second only where the first did not run


def model_card(comparison: Comparison, faithfulness: Sequence[FaithfulnessChange]) -> str:
    """The block as one text."""
    before, after = comparison.before[0], comparison.after[0]
    name = told_apart([before.run, after.run], [before.folder, after.folder])[1]
    changes = short_list(comparison.changes)
    methods = [row for row in faithfulness if row.method.partition("/")[0] != CHANCE]
    facts = after.run["settings"]
    versions = ", ".join(f"{library} {version}" for library, version in facts["versions"].items())
    command = after.run.get("about", {}).get("command", "")
    library = after.run.get("about", {}).get("library", "")
    metrics = [
        *(
            _metric(f"{c.setting.words}: {c.quantity.words}", c.quantity.name, c.scale * c.after.mean)
            for c in headlines(comparison.changes)
        ),
        *(
            _metric(f"{row.method}: {row.quantity.words}", row.metric, row.after)
            for row in methods
            if row.metric == "removal_mean"
        ),
    ]
    lines = [
        "---",
        "# license: apache-2.0  # of your weights: choose one and remove the first #",
        *([f"library_name: {library}"] if library in LIBRARIES else []),
        "tags:",
        *(f"- {tag}" for tag in TAGS),
        "model-index:",
        f"- name: {_quoted(name)}",
        "  results:",
        "  - task:",
        "      type: image-classification",
        "    dataset:",
        f"      name: {_quoted(after.data)}",
        f"      type: {_quoted(after.data)}",
        "    metrics:",
        *metrics,
        "---",
        "",
        "## Robustness and explanations",
        "",
        f"Measured with [steadygaze]({HOME}) on {after.image_count} images of {markdown_text(after.data)}, "
        "before and after on the same images, with 95 % intervals. "
        f"{after.caution}".rstrip(),
        "",
        "| measure | before | after | difference |",
        "| --- | ---: | ---: | ---: |",
        *(
            _row(c.setting.words, c, c.before.mean, c.after.mean, c.scale, _interval(after, c))
            for c in changes
        ),
        *(
            _row(row.method, row, row.before, row.after, 1.0, (row.after_low, row.after_high))
            for row in methods
        ),
        "",
        "↑: higher is better; ↓: lower is better. Removal scores: how the prediction changes when patches "
        "are removed in the order of a map.",
        "",
        f"Versions: {versions}.",
    ]
    if command:
        lines += ["", "```sh", command, "```"]
    return "\n".join(lines) + "\n"


def headlines(changes: Sequence[Change]) -> Iterator[Change]:
    """Accuracy, one number of all corruptions, and accuracy under the strongest attacks that were run."""
    known = {change.key: change for change in changes}
    if (CLEAN.label, TOP1.name) in known:
        yield known[CLEAN.label, TOP1.name]
    elif changes:
        yield changes[0]  # a segmenter's mIoU
    for score in CORRUPTION_SCORES:
        if ("corruptions", score) in known:
            yield known["corruptions", score]
            break
    for suite in ATTACKS:
        under = [c for c in changes if c.setting.suite == suite and c.quantity.name == TOP1.name]
        if suite == "autoattack":
            # its attacks run one after the other: what is left after all of them is the robust accuracy
            under = [c for c in under if c.setting.name.startswith("autoattack_")]
        else:
            # of each attack the last level, the largest epsilon
            under = list({c.setting.name: c for c in under}.values())
        yield from under
        if under:
            break


def _interval(card: Any, change: Change) -> tuple[float, float]:
    """Of the number after, over images; with several seeds the table has their mean, and no interval."""
    number = card.numbers.get(change.key)
    return (math.nan, math.nan) if number is None or change.after.seeds > 1 else (number.low, number.high)


def _metric(name: str, kind: str, value: float) -> str:
    return f"    - type: {_quoted(kind)}\n      value: {value:.6g}\n      name: {_quoted(name)}"


def _quoted(text: str) -> str:
    """A string of YAML; JSON's are also YAML's."""
    return json.dumps(text, ensure_ascii=False)


def _row(
    name: str, change: Any, before: float, after: float, scale: float, interval: tuple[float, float]
) -> str:
    quantity = change.quantity
    gap, low, high = (scale * value for value in (change.difference, change.low, change.high))
    spread = "" if math.isnan(interval[0]) else " [{}, {}]".format(*map(quantity.text, interval))
    cells = [quantity.text(before), quantity.text(after) + spread, f"{gap:+.3g} [{low:+.3g}, {high:+.3g}]"]
    words = markdown_text(f"{name}: {quantity.words}{quantity.arrow}")
    return f"| {words} | {' | '.join(cells)} |"
