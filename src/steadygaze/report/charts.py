"""Charts as SVG text. Colors are CSS variables of the page (`--c0`, `--c1`, ...), for dark mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from steadygaze.runs.settings import FADED, BarChart, Figure, Heatmap, Line, LineChart

CELLS = 24  # methods of the agreement matrix
LABELED = 5  # points of a scatter that are named beside their dot
STRONG = 0.6  # cells of the matrix as strong as this have light numbers
WIDTH, HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 40
LETTER = 6.2  # pixels; enough to keep labels apart


def color(group: int) -> str:
    """Return the CSS class of a group of lines or bars."""
    return f"c{group}" if group < FADED else "rest"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers from low to high.

    Examples:
        >>> ticks(0, 100)
        [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]
    """
    span = high - low
    if span <= 0 or not math.isfinite(span):
        return [low]
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 10) + 0.0 for i in range(first, math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class Frame:
    """The drawing area and what its edges mean."""

    x: tuple[float, float]
    y: tuple[float, float]

    @classmethod
    def around(cls, series: Sequence[Line], pad: float = 0.06, *, from_zero: bool = False) -> Frame:
        """from_zero: the vertical axis begins at 0, if no value is below it."""
        xs = [v for s in series for v in (*s.x, *(w for pair in s.x_limits or () for w in pair))]
        ys = [v for s in series for v in (*s.y, *(w for pair in s.limits or () for w in pair))]
        low, high = _padded(ys, pad)
        return cls(_padded(xs, pad), (0.0 if from_zero and min(ys, default=0.0) >= 0 else low, high))

    def px(self, value: float) -> float:
        low, high = self.x
        return LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def py(self, value: float) -> float:
        low, high = self.y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)


def _padded(values: Sequence[float], pad: float) -> tuple[float, float]:
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    room = (high - low) * pad or 1.0
    return low - room, high + room


def draw(chart: Figure) -> str:
    """Draw a declared chart."""
    if isinstance(chart, BarChart):
        return bars(chart)
    return lines(chart) if isinstance(chart, LineChart) else grid(chart)


def lines(chart: LineChart) -> str:
    """Draw lines with dots and whiskers, gray ones below; if the vertical axis is cut, it says so."""
    frame = Frame.around(chart.lines, 0.04, from_zero=chart.y_label.endswith("%"))
    parts = [_axes(frame, chart.x_label, chart.y_label, chart.integers)]
    if frame.y[0] > 0:
        parts.append(_begins("the vertical axis does not begin at 0"))
    for line in sorted(chart.lines, key=lambda line: -line.group):
        points = [(frame.px(x), frame.py(y)) for x, y in zip(line.x, line.y, strict=True) if math.isfinite(y)]
        for x, (low, high) in zip(line.x, line.limits or (), strict=False):
            parts.append(_whisker(frame.px(x), frame.py(low), frame.px(x), frame.py(high), line))
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        tooltip = f"<title>{escape(line.name)}</title>"
        parts.append(f'<polyline class="line {color(line.group)}" points="{path}">{tooltip}</polyline>')
        if line.group < FADED:
            parts += [_dot(x, y, 2.4, line, tooltip) for x, y in points]
    return _svg(parts, chart.title)


def scatter(chart: LineChart) -> str:
    """Draw the first point of each line with whiskers; the first ones are labeled."""
    frame = Frame.around(chart.lines)
    parts, dots = [_axes(frame, chart.x_label, chart.y_label, False)], []
    cut = [name for name, (low, _) in (("horizontal", frame.x), ("vertical", frame.y)) if low > 0]
    if cut:
        which = "axes do" if len(cut) == 2 else f"{cut[0]} axis does"
        parts.append(_begins(f"the {which} not begin at 0"))
    for line in sorted(chart.lines, key=lambda line: -line.group):
        x, y = frame.px(line.x[0]), frame.py(line.y[0])
        for low, high in line.x_limits or ():
            parts.append(_whisker(frame.px(low), y, frame.px(high), y, line))
        for low, high in line.limits or ():
            parts.append(_whisker(x, frame.py(low), x, frame.py(high), line))
        tooltip = f"<title>{escape(line.name)}: {line.x[0]:.1f}, {line.y[0]:.1f}</title>"
        dots.append(_dot(x, y, 4, line, tooltip))
    parts += _labels(frame, [line for line in chart.lines if line.group < LABELED])
    return _svg([*parts, *dots], chart.title)


def _begins(words: str) -> str:
    return _text("axis", WIDTH - RIGHT, TOP + 8, words, "end")


def _labels(frame: Frame, points: Sequence[Line]) -> list[str]:
    """Write names beside their points, moved apart where they would lie on one another."""
    placed: list[tuple[float, float, float]] = []  # begin, end, height
    parts = []
    for line in sorted(points, key=lambda line: line.group):
        x, y = frame.px(line.x[0]), frame.py(line.y[0])
        width = LETTER * len(line.name)
        left = x + width + 8 > WIDTH - RIGHT
        begin = x - 8 - width if left else x + 8
        choices = [
            y + 3.5 + step for step in (0, -12, 12, -24, 24, -36, 36) if TOP < y + step < HEIGHT - BOTTOM
        ]
        free = (
            h
            for h in choices
            if all(abs(h - o) >= 11 or begin > e or begin + width < b for b, e, o in placed)
        )
        height = next(free, y + 3.5)
        placed.append((begin, begin + width, height))
        anchor = f'x="{x - 8:.1f}" text-anchor="end"' if left else f'x="{x + 8:.1f}"'
        parts.append(
            f'<text class="name {color(line.group)}" {anchor} y="{height:.1f}">{escape(line.name)}</text>'
        )
    return parts


def matrix(names: Sequence[str], values: Sequence[Sequence[float]]) -> str:
    """Draw pairwise values in −1..1: opacity is the absolute value, negative values have the second color."""
    left = 14 + LETTER * max(map(len, names))
    side = (WIDTH - left - RIGHT) / len(names)
    parts = []
    for i, (name, row) in enumerate(zip(names, values, strict=True)):
        y = TOP + i * side
        parts.append(_text("tick", left - 7, y + side / 2 + 3.5, name, "end"))
        for j, value in enumerate(row):
            if not math.isfinite(value):
                continue
            tooltip = f"<title>{escape(name)} and {escape(names[j])}: {value:.2f}</title>"
            color = "var(--c0)" if value >= 0 else "var(--c1)"
            cell = f'x="{left + j * side:.1f}" y="{y:.1f}" width="{side:.1f}" height="{side:.1f}"'
            parts.append(f'<rect {cell} style="fill:{color};fill-opacity:{abs(value):.2f}">{tooltip}</rect>')
            if side >= 24:
                kind = "tick strong" if abs(value) > STRONG else "tick"
                parts.append(_text(kind, left + (j + 0.5) * side, y + side / 2 + 3.5, f"{value:.2f}"))
    height = TOP + len(names) * side + 6
    body = "".join(parts)
    box = f'viewBox="0 0 {WIDTH} {height:.0f}"'
    return f'<svg class="chart" {box} role="img" aria-label="agreement between methods">{body}</svg>'


def bar(value: float, low: float, high: float, span: tuple[float, float]) -> str:
    """Draw a dot on a whisker: where a value and its interval lie in the span of a table's column."""
    room = span[1] - span[0] or 1.0
    at = [f"{3 + 90 * (v - span[0]) / room:.1f}" for v in (low, value, high)]
    line = f'<line x1="{at[0]}" x2="{at[2]}" y1="5" y2="5"/>'
    circle = f'<circle cx="{at[1]}" cy="5" r="2.6"/>'
    return f'<svg class="bar" viewBox="0 0 96 10" aria-hidden="true">{line}{circle}</svg>'


def _number(value: float) -> str:
    """Write a number beside an axis within the room there is: 7.5e-4 rather than 0.00075."""
    text = f"{value:g}"
    if len(text) <= (LEFT - 7) // LETTER:
        return text
    digits, _, power = f"{value:.3e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def _axes(frame: Frame, x_label: str, y_label: str, whole: bool) -> str:
    parts = []
    for value in ticks(*frame.y):
        y = frame.py(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(_text("tick", LEFT - 7, y + 3.5, _number(value), "end"))
    across = ticks(*frame.x)
    if whole:
        low, high = math.ceil(frame.x[0]), math.floor(frame.x[1])
        across = [float(i) for i in range(low, high + 1) if high - low <= 14 or i % 2 == 0]
    parts += [_text("tick", frame.px(value), HEIGHT - BOTTOM + 16, f"{value:g}") for value in across]
    parts.append(_text("axis", (LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label))
    turned = f'transform="translate(11 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle"'
    parts.append(f'<text class="axis" {turned}>{escape(y_label)}</text>')
    return "".join(parts)


def _text(kind: str, x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _dot(x: float, y: float, radius: float, line: Line, tooltip: str) -> str:
    return (
        f'<circle class="dot {color(line.group)}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{tooltip}</circle>'
    )


def _whisker(x1: float, y1: float, x2: float, y2: float, line: Line) -> str:
    return (
        f'<line class="whisker {color(line.group)}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
    )


def _svg(parts: Sequence[str], title: str) -> str:
    body = "".join(parts)
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
    return f"{head}{body}</svg>"


ROW = 19  # pixels from one bar to the next
ROOM = 34  # below the bars, for the axis


def bars(chart: BarChart) -> str:
    """Draw horizontal bars from zero, with whiskers and the number at the end."""
    rows = chart.bars
    finite = [bar for bar in rows if math.isfinite(bar.value)]
    left = 12 + LETTER * max((len(bar.label) for bar in rows), default=0)
    right = 48.0
    top = chart.highest or max((max(bar.high, bar.value) for bar in finite), default=1.0) or 1.0
    height = ROW * len(rows) + ROOM

    def at(value: float) -> float:
        return left + max(0.0, min(value, top)) / top * (WIDTH - left - right)

    parts = []
    for value in ticks(0, top):
        x = at(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - ROOM}"/>')
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - ROOM + 15}" text-anchor="middle">{value:g}</text>'
        )
    middle = f'x="{(left + WIDTH - right) / 2:.1f}" y="{height - 4}" text-anchor="middle"'
    parts.append(f'<text class="axis" {middle}>{escape(chart.x_label)}</text>')
    for i, bar in enumerate(rows):
        y = ROW * i + ROW / 2
        at_name = f'x="{left - 7:.1f}" y="{y + 3.5:.1f}" text-anchor="end"'
        parts.append(f'<text class="tick" {at_name}>{escape(bar.label)}</text>')
        if not math.isfinite(bar.value):
            continue
        box = f'x="{left:.1f}" y="{y - 6:.1f}" width="{at(bar.value) - left:.1f}" height="12" rx="2"'
        tooltip = f"{bar.label}: {bar.value:.1f} ({bar.low:.1f} to {bar.high:.1f})"
        tooltip = f"<title>{escape(tooltip)}</title>"
        parts.append(f'<rect class="dot {color(bar.group)}" opacity=".78" {box}>{tooltip}</rect>')
        parts.append(
            f'<line class="over" x1="{at(bar.low):.1f}" x2="{at(bar.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        end = max(at(bar.high), at(bar.value)) + 6
        parts.append(f'<text class="tick" x="{end:.1f}" y="{y + 3.5:.1f}">{bar.value:.1f}</text>')
    head = f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(chart.title)}">'
    return f"{head}{''.join(parts)}</svg>"


def grid(chart: Heatmap) -> str:
    """Draw a small map of percentages: the darker, the higher."""
    side, values = 44, chart.values
    rows, columns = len(values), max(len(row) for row in values)
    width, height = side * columns + 30, side * rows + 26
    parts = []
    for r, row in enumerate(values):
        for c, value in enumerate(row):
            if not math.isfinite(value):
                continue
            x, y = 26 + side * c, side * r
            shade = 0.12 + 0.75 * max(0.0, min(value, 100.0)) / 100
            cell = f'x="{x}" y="{y}" width="{side - 3}" height="{side - 3}" rx="3"'
            parts.append(f'<rect class="dot c1" opacity="{shade:.2f}" {cell}/>')
            center = f'x="{x + side / 2 - 1:.1f}" y="{y + side / 2 + 3:.1f}" text-anchor="middle"'
            parts.append(f'<text class="over" {center}>{value:.0f}</text>')
    below = f'x="{26 + side * columns / 2:.0f}" y="{height - 8}" text-anchor="middle"'
    parts.append(f'<text class="axis" {below}>{escape(chart.x_label)}</text>')
    middle = side * rows / 2
    turned = f'transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle"'
    parts.append(f'<text class="axis" {turned}>{escape(chart.y_label)}</text>')
    return (
        f'<svg class="chart" style="max-width:{width * 1.3:.0f}px" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(chart.title)}">{"".join(parts)}</svg>'
    )
