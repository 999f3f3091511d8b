"""HTML and messages of the page.

Names come from model files, uploads and visitors: every one is escaped here, before it becomes HTML. gradio
shows messages as HTML too.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files

from steadygaze.drawing import legend_bar, legend_words

LEGEND_STOPS = 33  # colours of the gradient
CSS = (files(__package__) / "page.css").read_text(encoding="utf-8")


def text(words: str) -> str:
    """Words as HTML that shows exactly these words.

    >>> text("<b>cat</b>")
    '&lt;b&gt;cat&lt;/b&gt;'
    """
    return escape(words, quote=False)


def heading(model: str) -> str:
    """The title of the page and what it is for."""
    return (
        f'<div class="sg-heading"><h1>steadygaze</h1><p>{text(model)}<span class="sg-purpose">: see which '
        "patches a prediction depends on, verify the explanation, and remove patches yourself.</span></p>"
        "</div>"
    )


def legend(signed: bool, noun: str) -> str:
    """The colours of the maps and what they mean; noun: what the evidence is for."""
    kind = "signed" if signed else "positive"
    low, high = legend_words(kind, noun)[0]
    bar = legend_bar(kind, (LEGEND_STOPS, 1))
    colours = [f"rgb{bar.getpixel((x, 0))}" for x in range(LEGEND_STOPS)]
    gradient = f"background: linear-gradient(to right, {', '.join(colours)})"
    return f'<div class="sg-legend"><span>{low}</span><i style="{gradient}"></i><span>{high}</span></div>'
