"""`report --figures`: the charts of a page as SVG and PDF files."""

import re
import xml.etree.ElementTree as ET
import zlib
from pathlib import Path

import pytest

from helpers.runs import made_up
from steadygaze.data.datasets.imagenet import COMMON
from steadygaze.report.figures import HELVETICA, pdf_file, read_chart, svg_file
from steadygaze.report.pages import draw, write_stress
from steadygaze.runs.settings import BarChart, Line, LineChart

CURVES = LineChart(
    "Curves", [Line("a (b) < c", [0, 1], [2, 3], 0), Line("d", [0, 1], [5, 4], 1)], "x", "y, %"
)


def test_every_chart_becomes_two_files(tmp_path: Path) -> None:
    rows = made_up(COMMON[:3])
    written = write_stress(rows, tmp_path / "r.html", repeats=20, figures=tmp_path / "figures")
    files = sorted(path.name for path in written if path.parent.name == "figures")
    assert files == sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert {"error_by_corruption.svg", "error_by_corruption.pdf"} <= set(files)
    assert len(files) % 2 == 0 and not any(path.name.startswith(".") for path in tmp_path.iterdir())


@pytest.mark.parametrize("chart", [CURVES, BarChart("Bars", [], "error, %")])
def test_svg_has_its_colors_written_out(chart: LineChart | BarChart) -> None:
    figure = draw(chart)
    root = ET.fromstring(svg_file(*read_chart(figure.title, figure.note, figure.chart)))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert figure.title in texts
    assert not any("class" in element.attrib or "var(" in str(element.attrib) for element in root.iter())
    if chart is CURVES:
        assert {"a (b) < c", "d", "x", "y, %"} <= set(texts), "names, legend and axes"
        lines = [
            e for e in root.iter() if e.tag.endswith("polyline") and len(e.get("points", "").split()) == 2
        ]
        assert {line.get("stroke") for line in lines} >= {"#b4432b", "#1f5fa8"}


def test_pdf_is_whole() -> None:
    figure = draw(CURVES)
    width, height, shapes = read_chart(figure.title, figure.note, figure.chart)
    data = pdf_file(width, height, shapes)
    assert data.startswith(b"%PDF-1.4") and data.endswith(b"%%EOF\n")
    place = int(re.search(rb"startxref\n(\d+)", data)[1])
    assert data[place:].startswith(b"xref\n0 5\n")
    for number, offset in enumerate(re.findall(rb"(\d{10}) 00000 n", data), 1):
        assert data[int(offset) :].startswith(f"{number} 0 obj".encode())
    packed = re.search(rb"/Length (\d+) /Filter /FlateDecode >>\nstream\n", data)
    stream = zlib.decompress(data[packed.end() : packed.end() + int(packed[1])]).decode("cp1252")
    assert r"(a \(b\) < c) Tj" in stream and "(Curves) Tj" in stream and stream.count(" c\n") >= 4 * 4
    assert f"/MediaBox [0 0 {width:g} {height:g}]".encode() in data
    assert HELVETICA["W"] == 944 and len(HELVETICA) == 95
