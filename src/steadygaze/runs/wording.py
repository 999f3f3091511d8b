"""Numbers and metrics in words, for tables, pages and the command line."""

from steadygaze.faithfulness.metric import METRICS

OVERALL = "removal_mean"  # mean of an image's removal scores; the ranking is by it
ENOUGH = 20  # pictures; with fewer, a bootstrap's interval is clearly too narrow: of 12 it holds the truth in 91 % of cases, of 4 in 80 %


def better(metric: str) -> str:
    return METRICS[metric].better if metric in METRICS else "higher"


def arrow(metric: str) -> str:
    """The direction that is better."""
    return {"higher": " ↑", "lower": " ↓"}.get(better(metric), "")


def unit(metric: str) -> str:
    return METRICS[metric].unit if metric in METRICS else "%"


def label(metric: str) -> str:
    """A metric's name for people."""
    return "mean of removal scores" if metric == OVERALL else metric.replace("_", " ")


def number(value: float, metric: str) -> str:
    """As many digits as can mean something: one for percent, three otherwise."""
    return f"{value:.1f}" if unit(metric) == "%" else f"{value:.3f}"


def counted(count: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "picture"), counted(2, "picture")
    ('1 picture', '2 pictures')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def caution(pictures: int) -> str:
    """What is to be said of intervals from so few pictures; "" if they are enough."""
    if pictures >= ENOUGH:
        return ""
    if pictures == 1:
        return "One picture says nothing of others: its intervals have no width."
    return f"{pictures} pictures are few: their intervals come out too narrow. Take {ENOUGH} or more before you believe a difference."
