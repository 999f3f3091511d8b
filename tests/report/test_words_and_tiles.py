"""Pages of stress runs: a tile of each suite, once; labels in words; cautions where images are few."""

import html
import json
import re
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import steadygaze as sg
from helpers.browser import chromium
from steadygaze.cli import app
from steadygaze.cli.results import draw_curves
from steadygaze.report.charts import scatter
from steadygaze.report.comparison import sentence, write_comparison
from steadygaze.report.pages import write_stress
from steadygaze.runs.compare import Comparison, compare
from steadygaze.runs.rows import Rows
from steadygaze.runs.settings import CLEAN, Line, LineChart, Setting, quantity_record
from steadygaze.runs.suites.attention import CLEAN_METRICS, STABILITY
from steadygaze.runs.suites.ood import ENERGY, PROBABILITY

Measured = dict[Setting, tuple[str, ...]]  # the metrics of each setting

ATTACKS = {
    Setting("attacks", "fgsm", 1.0): ("top1",),
    Setting("attacks", "pgd", 8.0): ("top1",),
    Setting("occlusion", "center_square", 0.5): ("top1",),
    **{
        Setting("autoattack", f"after_{name}_linf", 8.0, minor=True): ("top1",)
        for name in ("apgd-ce", "apgd-t", "fab-t")
    },
    Setting("autoattack", "autoattack_linf", 8.0): ("top1",),
    Setting("patchfool", "patchfool", "attention"): ("top1",),
}
ATTENTION = {
    CLEAN: ("top1", CLEAN_METRICS[0].name),
    Setting("corruptions", "gaussian_noise", 3, minor=True): (CLEAN_METRICS[0].name, STABILITY.name),
}
NINE = {
    Setting("backgrounds_challenge", name, source=f"in9-{name}", label=f"in9/{name}"): ("top1",)
    for name in ("mixed_same", "mixed_rand", "only_bg_t")
}
OUTSIDE = {
    Setting("ood", "in_distribution"): (PROBABILITY.name, ENERGY.name),
    Setting("ood", "streets", source="streets", label="ood/streets"): (PROBABILITY.name, ENERGY.name),
}


def made(
    settings: Measured, folder: Path, *, images: int = 24, groups: bool = False, right: float = 0.6
) -> Path:
    """A run that nobody ran: half of its classes, and of its groups, have two images."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    rows = []
    for setting, metrics in settings.items():
        for i in range(images):
            label = 0 if i < images - 2 else 1
            name = f"{setting.source}:{i}" if setting.source else f"{label}/{i:02d}"
            facts = {"model": "m", "weights": folder.name, "setting": setting.label, "image": name, "seed": 0}
            facts |= {"content": name}
            if groups and not setting.source:
                facts["note"] = "place=water" if label else "place=land"
            for metric in metrics:
                hit = int(rng.random() < right)
                value = hit if metric == "top1" else round(float(rng.random()), 4)
                detail = {"top1": [label, label if hit else 9]}.get(metric, [value, value])
                rows.append({**facts, "metric": metric, "value": value, "detail": detail})
    known = {q.name: q for q in (*CLEAN_METRICS, STABILITY, PROBABILITY, ENERGY)}
    used = {metric for metrics in settings.values() for metric in metrics}
    facts = {
        "kind": "stress",
        "model": "m",
        "weights": folder.name,
        "data": "made up",
        "classes": 10,
        "seed": 0,
    }
    facts |= {"versions": {}, "suite": [], "conditions": [setting.record() for setting in settings]}
    facts |= {"quantities": [quantity_record(q) for name, q in known.items() if name in used]}
    if groups:
        facts["groups"] = {"columns": ["place"]}
    run = {"settings": facts, "about": {"classes": {"0": "cat", "1": "dog"}}}
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "rows-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def page_of(folder: Path) -> str:
    path = write_stress(Rows.read(folder), folder / "report.html", repeats=20)[0]
    return html.unescape(path.read_text()).replace("<wbr>", "")


def tiles(page: str) -> list[tuple[str, str]]:
    """Heading and small print of each tile."""
    parts = re.findall(
        r'<div class="tile card"><span[^>]*>(.*?)</span><b>.*?</b><span[^>]*>(.*?)</span>', page
    )
    return [(heading, note) for heading, note in parts]


def test_groups_do_not_replace_the_tiles_of_attacks(tmp_path: Path) -> None:
    page = page_of(made({CLEAN: ("top1",), **ATTACKS}, tmp_path / "run", groups=True))
    headings = [heading for heading, _ in tiles(page)]
    assert headings == [
        "clean: top-1 ↑",
        "clean: worst-group accuracy ↑",
        "FGSM, 1/255: top-1 ↑",
        "PGD, 8/255: top-1 ↑",
        "AutoAttack, L∞ 8/255: top-1 ↑",
        "Patch-Fool, most attended patch: top-1 ↑",
        "center square covered: top-1 ↑",
    ]
    assert "2 groups: " not in page, "each row's images are of all groups"
    assert "FGSM, 1/255 (place: water)" in page


@pytest.mark.parametrize(
    ("settings", "words"), [(ATTENTION, "attention stability"), (NINE, "background_gap")]
)
def test_a_tile_is_shown_once(tmp_path: Path, settings: Measured, words: str) -> None:
    shown = [heading for heading, _ in tiles(page_of(made(settings, tmp_path / "run")))]
    assert sum(words.replace("_", " ") in heading for heading in shown) == 1
    assert len(set(shown)) == len(shown)
    assert not any("Gaussian" in heading or "entropy" in heading for heading in shown)


def test_out_of_distribution_tiles_have_both_measures(tmp_path: Path) -> None:
    page = page_of(made({CLEAN: ("top1",), **OUTSIDE}, tmp_path / "run"))
    headings = [heading for heading, _ in tiles(page) if "streets" in heading]
    assert headings == [
        "out-of-distribution images, streets: AUROC of maximum probability ↑",
        "out-of-distribution images, streets: FPR95 of maximum probability ↓",
        "out-of-distribution images, streets: AUROC of energy ↑",
        "out-of-distribution images, streets: FPR95 of energy ↓",
    ]
    assert "streets, maximum probability" in page, "the bars of the chart"


def test_charts_have_labels_in_words(tmp_path: Path) -> None:
    page = page_of(made(ATTENTION, tmp_path / "attention"))
    text = re.sub(r'data-value="[^"]*"', "", page)
    assert "attention entropy, nats" in text and "<title>Gaussian noise, severity 3</title>" in text
    assert "attention_entropy" not in text and "gaussian_noise" not in text
    page = page_of(made(NINE, tmp_path / "nine"))
    assert "ImageNet-9, background alone" in page and "top-1 accuracy; whiskers" in page
    gap = "ImageNet-9, background of the same class minus ImageNet-9, background of a random class"
    assert gap in page and "only bg" not in page


def test_few_images_of_a_suites_own_are_cautioned(tmp_path: Path) -> None:
    folder = made(NINE, tmp_path / "run", images=6)
    caution = Rows.read(folder).cards()[0].caution
    assert caution.startswith("ImageNet-9, ") and "6 images are few" in caution and caution in page_of(folder)
    assert not Rows.read(made(NINE, tmp_path / "enough", images=20)).cards()[0].caution
    data = Rows.read(made({CLEAN: ("top1",), **NINE}, tmp_path / "data", images=5)).cards()[0]
    assert data.caution.startswith("5 images are few")
    words = [str(folder), str(folder), "--setting", "in9/mixed_same", "-o", str(tmp_path / "c.html")]
    done = CliRunner().invoke(app, ["compare-models", *words])
    told = " ".join(done.output.split())
    assert "6 images are few" in told and "6 images are few" in (tmp_path / "c.html").read_text()


@pytest.fixture
def improved(tmp_path: Path) -> Comparison:
    """All images are wrong before, and right after."""
    folders = [
        made({CLEAN: ("top1",)}, tmp_path / name, groups=True, right=right)
        for name, right in (("before", 0.0), ("after", 1.0))
    ]
    return compare(folders[:1], folders[1:], repeats=50)


def test_a_verdict_on_few_images_says_so(improved: Comparison, tmp_path: Path) -> None:
    assert "dog (only 2 images), cat gained significantly" in sentence(improved)
    page = html.unescape(write_comparison(improved, tmp_path / "c.html")[0].read_text())
    (row,) = re.findall(r"<tr>(?:(?!<tr>).)*clean \(place: water\).*?</tr>", page)[:1]
    assert "only 2 images" in row
    (row,) = re.findall(r"<tr>(?:(?!<tr>).)*clean \(place: land\).*?</tr>", page)[:1]
    assert "only" not in row


def test_one_group_is_not_the_worst_of_one(tmp_path: Path) -> None:
    folder = made({CLEAN: ("top1",)}, tmp_path / "run", images=2, groups=True)
    assert Rows.read(folder).cards()[0].numbers["clean", "worst_group"].note == "place=water, the only group"


def test_axes_that_do_not_begin_at_0_say_so() -> None:
    def drawn(*points: tuple[float, float]) -> str:
        return scatter(LineChart("", [Line("a", [x], [y]) for x, y in points], "x", "y"))

    assert "the axes do not begin at 0" in drawn((50, 60), (52, 63))
    assert "the vertical axis does not begin at 0" in drawn((0, 60), (10, 63))
    assert "the horizontal axis does not begin at 0" in drawn((50, 0), (52, 10))
    assert "begin at 0" not in drawn((0, 0), (10, 10))
    log = [{"epoch": str(epoch), "test_top1": str(90 + epoch), "loss": str(1 / epoch)} for epoch in (1, 2, 3)]
    curves = draw_curves({"run": log}, ["test_top1"])
    assert "the vertical axis does not begin at 0" in curves
    assert "begin at 0" not in draw_curves({"run": [{**row, "loss": "0"} for row in log]}, ["loss"])


def test_parquet_as_data_is_told_how_to_be_given(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").write_bytes(b"")
    with pytest.raises(sg.InputError, match=r"got .*test\.parquet: a file.*hf:FOLDER"):
        sg.stress("embedded", tmp_path / "test.parquet", suites="occlusion")


@pytest.mark.browser
def test_pages_fit_the_window(tmp_path: Path) -> None:
    """No column of a comparison is cut off at 1200 pixels; no long name is wider than a phone."""
    settings = {CLEAN: ("top1",), **ATTACKS, **NINE}
    long = "a_checkpoint_with_a_long_name_and_no_space"
    folders = [made(settings, tmp_path / f"{long}_{name}", groups=True) for name in ("before", "after")]
    write_comparison(compare(folders[:1], folders[1:], repeats=20), tmp_path / "compare.html")
    write_stress(Rows.read(*folders), tmp_path / "report.html", repeats=20)
    with chromium() as browser:
        for name in ("compare", "report"):
            for width in (1200, 390):
                page = browser.new_page(viewport={"width": width, "height": 800})
                page.goto((tmp_path / f"{name}.html").as_uri())
                wide = page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, (name, width)
                if width == 1200:
                    tables = (
                        "[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)"
                    )
                    assert page.evaluate(tables), name
                page.close()
