"""Sentences that tables, pages and the command line share."""

from __future__ import annotations

import re
from html import escape

ENOUGH = 20  # images; a bootstrap interval of 12 images covers the truth in 91 % of cases, one of 4 in 80 %


def plural(count: int, noun: str, plural_noun: str = "") -> str:
    """A number of things.

    >>> plural(1, "image"), plural(2, "image"), plural(2, "class", "classes")
    ('1 image', '2 images', '2 classes')
    """
    return f"{count} {noun if count == 1 else plural_noun or noun + 's'}"


INTERVALS = (
    "95 % intervals: Wilson's for accuracies, bootstrap (±) for other numbers; none where all images have "
    "the same value"
)


def markdown_text(text: str) -> str:
    """A name as the text of one Markdown cell: no markup, no HTML, no end of a cell or line.

    >>> print(markdown_text("a|b <i> `c`"))
    a\\|b &lt;i&gt; \\`c\\`
    """
    one_line = " ".join(text.split())
    return re.sub(r"([\\`*|\[\]])", r"\\\1", escape(one_line, quote=False))


def small_sample_note(images: int) -> str:
    """A caution about intervals from few images; "" if there are enough."""
    if images >= ENOUGH:
        return ""
    if images == 1:
        return "One image gives no interval: nothing can be concluded about other images."
    return (
        f"{images} images are few: bootstrap intervals (±) are too narrow. Use {ENOUGH} or more before "
        "relying on a difference."
    )
