"""The charts of a report as files: SVG with colors written out, and PDF, both vector graphics for a paper.

A chart of a page is styled by the page (`style.html`). Here it is read once into shapes with explicit colors,
a title and a legend are added, and the shapes are written in either format. The PDF has one page of the size
of the chart; its text is Helvetica, one of the fonts that every reader has.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path

from steadygaze.files import write_atomic
from steadygaze.report.charts import LETTER

INK, SOFT, LINE, REST, PAPER = "#1f1e1c", "#6b6862", "#e6e2db", "#c9c4bb", "#ffffff"
COLORS = ("#b4432b", "#1f5fa8", "#2f7d57", "#8a5fb0", "#c08a12", "#2a8f9e", "#a83f77", "#6b6f2a")
MARGIN, TITLE, ROW, SIZE = 10.0, 24.0, 15.0, 11.0
# widths of Helvetica's letters from the space to the tilde, in 1/1000 of the size
WIDTHS = """
278 278 355 556 556 889 667 191 333 333 389 584 278 333 278 278 556 556 556 556 556 556 556 556 556 556 278
278 584 584 584 556 1015 667 667 722 722 667 611 778 722 278 500 667 556 833 722 778 667 778 722 667 611
722 667 944 667 667 611 278 278 278 469 556 333 556 556 500 556 556 278 556 556 222 222 500 222 833 556
556 556 556 333 500 278 556 500 722 500 500 500 334 260 334 584
"""
HELVETICA = {chr(32 + i): int(width) for i, width in enumerate(WIDTHS.split())}
REPLACED = str.maketrans(
    {"−": "-", "↑": "(higher is better)", "↓": "(lower is better)", "→": "->", "ε": "epsilon"}
)


@dataclass(frozen=True)
class Shape:
    """A path of points, a circle (one point and a radius) or a text (one point)."""

    points: tuple[tuple[float, float], ...]
    stroke: str = ""
    fill: str = ""
    width: float = 1.0
    opacity: float = 1.0
    radius: float = 0.0
    text: str = ""
    anchor: str = "start"
    turned: bool = False
    bold: bool = False


def write_figures(figures: Iterable[tuple[str, str, str]], folder: Path) -> list[Path]:
    """Write figures (title, note, chart) of a page as SVG and PDF files, named by their titles."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    used: dict[str, int] = {}
    for title, note, chart in figures:
        stem = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_") or "figure"
        used[stem] = used.get(stem, 0) + 1
        stem = stem if used[stem] == 1 else f"{stem}_{used[stem]}"
        width, height, shapes = read_chart(title, note, chart)
        for suffix, content in (
            (".svg", svg_file(width, height, shapes)),
            (".pdf", pdf_file(width, height, shapes)),
        ):
            path = folder / f"{stem}{suffix}"
            write_atomic(path, content)
            written.append(path)
    return written


def read_chart(title: str, note: str, chart: str) -> tuple[float, float, list[Shape]]:
    """(width, height, shapes) of a chart with its title above and its legend below."""
    root = ET.fromstring(chart)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    shapes = [Shape(((MARGIN, 16.0),), fill=INK, text=title, bold=True)]
    shapes += [_moved(shape, 0.0, TITLE) for element in root for shape in _read(element)]
    x, y = MARGIN, TITLE + height + ROW
    for color, name in _legend(root, note):
        room = 14 + LETTER * len(name) + 12
        if x + room > width and x > MARGIN:
            x, y = MARGIN, y + ROW
        shapes.append(Shape(((x + 4, y - 4),), fill=color, radius=4))
        shapes.append(Shape(((x + 12, y),), fill=SOFT, text=name))
        x += room
    return width, y + MARGIN, shapes


def _legend(root: ET.Element, note: str) -> list[tuple[str, str]]:
    """Colors and names: those of the note of a page, else of the lines."""
    keys = re.findall(r'<span class="key (\w+)"></span>([^<]*)', note)
    if not keys and not any(text.get("class", "").startswith("name") for text in root.iter("text")):
        lines = [
            (line.get("class", "").split()[-1], line.findtext("title") or "")
            for line in root.iter("polyline")
        ]
        keys = sorted(dict.fromkeys(pair for pair in lines if pair[0] != "rest"))
    return [(_color(group), unescape(name)) for group, name in keys]


def _color(group: str) -> str:
    return COLORS[int(group[1:])] if re.fullmatch(r"c[0-7]", group) else REST


def _read(element: ET.Element) -> Iterator[Shape]:
    """The shapes of one element, with the colors that the page gives it."""
    get = element.attrib.get
    classes = get("class", "").split()
    group = next((_color(name) for name in classes if re.fullmatch(r"c\d|rest", name)), "")
    opacity = float(get("opacity", 1.0))
    if element.tag == "line":
        ends = tuple((float(get(f"x{i}", 0)), float(get(f"y{i}", 0))) for i in (1, 2))
        if "grid" in classes:
            yield Shape(ends, stroke=LINE)
        elif "over" in classes:
            yield Shape(ends, stroke=INK, width=1.4, opacity=0.55)
        else:
            yield Shape(ends, stroke=group or REST, width=1.2, opacity=0.35)
    elif element.tag == "polyline":
        pairs = [pair.split(",") for pair in get("points", "").split()]
        points = tuple((float(x), float(y)) for x, y in pairs)
        if points:
            yield Shape(points, stroke=group, width=1.0 if group == REST else 2.0)
    elif element.tag == "circle":
        yield Shape(
            ((float(get("cx", 0)), float(get("cy", 0))),), fill=group or INK, radius=float(get("r", 1))
        )
    elif element.tag == "rect":
        style = dict(part.split(":") for part in get("style", "").split(";") if ":" in part)
        named = re.search(r"--(c\d)", style.get("fill", ""))
        x, y, w, h = (float(get(name, 0)) for name in ("x", "y", "width", "height"))
        corners = ((x, y), (x + w, y), (x + w, y + h), (x, y + h))
        fill = _color(named[1]) if named else group
        yield Shape(corners, fill=fill, opacity=float(style.get("fill-opacity", opacity)))
    elif element.tag == "text":
        turned = re.search(r"translate\(([\d.]+) ([\d.]+)\)", get("transform", ""))
        x, y = (float(turned[1]), float(turned[2])) if turned else (float(get("x", 0)), float(get("y", 0)))
        fill = PAPER if "strong" in classes else INK if "over" in classes else group or SOFT
        yield Shape(
            ((x, y),),
            fill=fill,
            text=element.text or "",
            anchor=get("text-anchor", "start"),
            turned=bool(turned),
        )


def _moved(shape: Shape, right: float, down: float) -> Shape:
    points = tuple((x + right, y + down) for x, y in shape.points)
    return Shape(points, *(getattr(shape, name) for name in list(Shape.__dataclass_fields__)[1:]))


def svg_file(width: float, height: float, shapes: Sequence[Shape]) -> str:
    """The shapes as an SVG file without style sheets, which drawing programs and browsers read alike."""
    box = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="Helvetica, Arial, sans-serif">']
    lines.append(f'<rect width="{width:g}" height="{height:g}" fill="{PAPER}"/>')
    for s in shapes:
        x, y = s.points[0]
        look = f'fill="{s.fill or "none"}"' + (
            f' stroke="{s.stroke}" stroke-width="{s.width:g}"' if s.stroke else ""
        )
        look += f' opacity="{s.opacity:g}"' if s.opacity < 1 else ""
        if s.text:
            turn = f' transform="translate({x:g} {y:g}) rotate(-90)"' if s.turned else f' x="{x:g}" y="{y:g}"'
            weight = ' font-weight="bold"' if s.bold else ""
            where = f'{turn} text-anchor="{s.anchor}" font-size="{SIZE:g}"{weight}'
            lines.append(f"<text{where} {look}>{escape(s.text)}</text>")
        elif s.radius:
            lines.append(f'<circle cx="{x:g}" cy="{y:g}" r="{s.radius:g}" {look}/>')
        else:
            kind = "polygon" if s.fill else "polyline"
            points = " ".join(f"{a:g},{b:g}" for a, b in s.points)
            lines.append(f'<{kind} points="{points}" {look}/>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def pdf_file(width: float, height: float, shapes: Sequence[Shape]) -> bytes:
    """The shapes as a PDF of one page."""
    levels = sorted({s.opacity for s in shapes})
    stream = [f"1 0 0 -1 0 {height:g} cm", "1 J 1 j"]  # down is positive, as in SVG
    for s in shapes:
        stream.append(f"/O{levels.index(s.opacity)} gs")
        if s.fill:
            stream.append(f"{_numbers(s.fill)} rg")
        if s.stroke:
            stream.append(f"{_numbers(s.stroke)} RG {s.width:g} w")
        stream += _text_operators(s) if s.text else _path_operators(s)
    data = zlib.compress("\n".join(stream).encode("cp1252", "replace"))
    states = " ".join(f"/O{i} << /ca {level:g} /CA {level:g} >>" for i, level in enumerate(levels))
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica{} /Encoding /WinAnsiEncoding >>"
    fonts = f"<< /F {font.format('')} /B {font.format('-Bold')} >>"
    page = f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 {width:g} {height:g}] /Contents 4 0 R"
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        f"{page} /Resources << /Font {fonts} /ExtGState << {states} >> >> >>".encode(),
        f"<< /Length {len(data)} /Filter /FlateDecode >>\nstream\n".encode() + data + b"\nendstream",
    ]
    out, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n".encode() + content + b"\nendobj\n"
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(objects) + 1
    trailer = f"trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{len(out)}\n%%EOF\n"
    return out + f"xref\n0 {size}\n0000000000 65535 f \n{table}{trailer}".encode()


def _numbers(color: str) -> str:
    return " ".join(f"{int(color[i : i + 2], 16) / 255:.3f}" for i in (1, 3, 5))


def _path_operators(s: Shape) -> list[str]:
    paint = "B" if s.fill and s.stroke else "f" if s.fill else "S"
    if not s.radius:
        path = [f"{x:.2f} {y:.2f} {'l' if i else 'm'}" for i, (x, y) in enumerate(s.points)]
        return [*path, f"h {paint}" if s.fill else paint]
    (x, y), r = s.points[0], s.radius
    k = 0.5523 * r  # four Bezier curves that are nearly a circle
    curves = [f"{x + r:.2f} {y:.2f} m"]
    for a, b in ((1, 0), (0, 1), (-1, 0), (0, -1)):
        c, d = -b, a  # a quarter turn further
        ends = (
            x + r * a + k * c,
            y + r * b + k * d,
            x + r * c + k * a,
            y + r * d + k * b,
            x + r * c,
            y + r * d,
        )
        curves.append(" ".join(f"{v:.2f}" for v in ends) + " c")
    return [*curves, paint]


def _text_operators(s: Shape) -> list[str]:
    text = s.text.translate(REPLACED)
    wide = sum(HELVETICA.get(letter, 556) for letter in text) * SIZE / 1000
    back = {"middle": wide / 2, "end": wide}.get(s.anchor, 0.0)
    x, y = s.points[0]
    matrix = f"0 -1 -1 0 {x:.2f} {y + back:.2f}" if s.turned else f"1 0 0 -1 {x - back:.2f} {y:.2f}"
    escaped = re.sub(r"([\\()])", r"\\\1", text)
    return [f"BT /{'B' if s.bold else 'F'} {SIZE:g} Tf {matrix} Tm ({escaped}) Tj ET"]
