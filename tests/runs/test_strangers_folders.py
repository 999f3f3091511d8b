"""Run folders of strangers: what a report reads, how much it unpacks, and how names are written."""

import gzip
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

import steadygaze as sg
from helpers.runs import Page, made_up
from steadygaze import untrusted as json_files
from steadygaze.report.pages import write_report
from steadygaze.runs.compare import compare
from steadygaze.runs.export import export_rows
from steadygaze.runs.loop import Run
from steadygaze.runs.rows import Rows, key_of, row_key
from steadygaze.runs.samples import read_map_samples, save_image, write_index
from steadygaze.runs.store import Done

HOSTILE = "a|b\n<script>alert(1)</script> `x` [/red] *y*"
opened: list[Path] | None = None


def watch(event: str, details: tuple) -> None:
    if event == "open" and opened is not None and isinstance(details[0], (str, bytes)):
        opened.append(Path(str(details[0])))


sys.addaudithook(watch)


def stored(folder: Path, *, content: bool = True, **changes) -> Path:
    """A stress run that nobody ran, on disk."""
    rows = made_up(names=("fog",), severities=(1, 2), images=4, **changes)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(rows.runs[0]))
    more = {"content": "c0ffee"} if content else {}
    lines = [json.dumps({**row, **more}) for row in rows]
    (folder / "rows-00000.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def with_sample(folder: Path, file: str) -> Path:
    from PIL import Image

    save_image(folder, "image0", Image.fromarray(np.zeros((4, 4, 3), dtype=np.uint8)))
    condition = {"title": "clean", "file": file, "wide": False}
    write_index(
        folder,
        {
            "image": "a",
            "method": "gaze",
            "conditions": [condition],
            "images": [],
            "class_names": {},
            "note": "",
        },
    )
    return folder


def test_a_report_loads_no_model_and_opens_no_file_outside(tmp_path, monkeypatch):
    global opened

    def forbidden(*_, **__):
        raise AssertionError("a report loads no model")

    monkeypatch.setattr("steadygaze.loading.load.load_model", forbidden)
    folder = with_sample(stored(tmp_path / "run"), "image0.jpg")
    write_report([folder])  # imports modules and templates
    opened = []
    try:
        page = write_report([folder])[0]
        seen = [path.resolve() for path in opened if path.is_absolute() or path.exists()]
    finally:
        opened = None
    assert "data:image/jpeg" in page.read_text()
    assert [path for path in seen if not path.is_relative_to(folder.resolve())] == []
    assert folder / "samples" / "image0.jpg" in seen, "the watch sees what is read"


@pytest.mark.parametrize("file", ["../../secret.jpg", "/etc/passwd", "x/../../../secret.jpg", "..", ""])
def test_stored_names_that_lead_outside_are_refused(tmp_path, file):
    (tmp_path / "secret.jpg").write_text("secret")
    folder = with_sample(stored(tmp_path / "run"), file)
    with pytest.raises(sg.InputError, match=r"names of files|expected a file"):
        write_report([folder])


@pytest.mark.parametrize(
    "file", ["run.json", "rows-00000.jsonl", "samples/samples.json", "samples/image0.jpg"]
)
def test_links_that_lead_outside_are_refused(tmp_path, file):
    folder = with_sample(stored(tmp_path / "run"), "image0.jpg")
    outside = shutil.move(folder / file, tmp_path / "outside")
    (folder / file).symlink_to(outside)
    with pytest.raises(sg.InputError, match="leads out of its folder"):
        write_report([folder])


def test_a_linked_folder_and_links_inside_it_are_read(tmp_path):
    folder = with_sample(stored(tmp_path / "run"), "image0.jpg")
    (folder / "samples" / "kept.jpg").symlink_to("image0.jpg")
    (tmp_path / "latest").symlink_to(folder)
    assert write_report([tmp_path / "latest"])


def test_a_report_does_not_write_through_a_link(tmp_path):
    folder = stored(tmp_path / "run")
    (tmp_path / "mine").write_text("mine")
    for name in ("report.html", "table.csv", "table.md"):
        (folder / name).symlink_to(tmp_path / "mine")
    write_report([folder])
    assert (tmp_path / "mine").read_text() == "mine"


def test_unpacking_is_bounded(tmp_path, monkeypatch):
    folder = stored(tmp_path / "run")
    plain = folder / "rows-00000.jsonl"
    packed = folder / "rows-00000.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert len(Rows.read(folder)) > 0
    with gzip.open(packed, "wb") as file:
        for _ in range(300):
            file.write(b" " * 65535 + b"\n")  # 20 MB from about 20 kB
    with pytest.raises(sg.InputError, match="unpacks to more than"):
        list(json_files.raw_lines(packed))
    with gzip.open(packed, "wb") as file:
        file.write(b" " * (20 * 2**20))
    with pytest.raises(sg.InputError, match="rows of at most"):
        list(json_files.raw_lines(packed))


def test_names_are_escaped_in_tables_and_pages(tmp_path):
    folder = stored(tmp_path / "run", model=HOSTILE)
    for path in (folder / "rows-00000.jsonl", folder / "run.json"):
        text = path.read_text().replace('"fog/1"', json.dumps(HOSTILE))
        path.write_text(text.replace('"confidence"', json.dumps("m" + HOSTILE)))
    page, _, table = write_report([folder])
    check_escaped(page, table)


def test_names_of_methods_are_escaped(tmp_path):
    row = {
        "model": HOSTILE,
        "weights": HOSTILE,
        "method": HOSTILE,
        "score": HOSTILE,
        "metric": HOSTILE,
        "seed": 0,
    }
    settings = {
        "kind": "verify",
        "model": HOSTILE,
        "weights": HOSTILE,
        "data": HOSTILE,
        "seed": 0,
        "versions": {},
    }
    (tmp_path / "run.json").write_text(json.dumps({"settings": settings, "about": {"command": HOSTILE}}))
    rows = [{**row, "image": f"{i}{HOSTILE}", "value": float(i), "note": HOSTILE} for i in range(3)]
    (tmp_path / "rows-00000.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    page, _, table = write_report([tmp_path])
    check_escaped(page, table)


def check_escaped(page: Path, table: Path) -> None:
    html, markdown = page.read_text(), table.read_text()
    assert "<script>alert" not in html and "alert(1)" in Page(html).words
    assert "<script>" not in markdown and re.search(r"(?<!\\)`", markdown) is None
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    assert len(lines) > 2
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1, "every row has the same cells"


def test_rows_of_another_run_are_refused(tmp_path):
    folder, other = stored(tmp_path / "a"), stored(tmp_path / "b", model="b")
    shutil.copy(other / "rows-00000.jsonl", folder / "rows-00001.jsonl")
    with pytest.raises(sg.InputError, match="a row of another run"):
        list(Rows.read(folder))


def test_rows_twice_count_once_and_must_agree(tmp_path):
    folder = stored(tmp_path / "run")
    whole = Rows.read(folder).cards(repeats=10)[0]
    shutil.copy(folder / "rows-00000.jsonl", folder / "rows-00001.jsonl")
    twice = Rows.read(folder).cards(repeats=10)[0]
    assert twice.done == whole.done
    assert twice.numbers["clean", "top1"].value == whole.numbers["clean", "top1"].value
    path = folder / "rows-00001.jsonl"
    path.write_text(re.sub(r'"top1", "value": \d', '"top1", "value": 7', path.read_text()))
    with pytest.raises(sg.InputError, match="two rows with different values"):
        Rows.read(folder).cards(repeats=10)[0].numbers  # noqa: B018


def test_a_resumed_run_compares_keys_not_counts(tmp_path):
    """A row that is missing is missing, however often the others are there."""
    folder = stored(tmp_path / "run")
    path = folder / "rows-00000.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    first = json.loads(lines[0])
    path.write_text("".join(lines[1:]))
    shutil.copy(path, folder / "rows-00001.jsonl")
    path.write_text("".join([*lines[1:], *lines[1:]]))
    done = Done(folder)
    assert done.lacks(first["image"], [row_key(first)]) and not done.has(key_of(first))
    others = [json.loads(line) for line in lines[1:]]
    assert all(done.has(key_of(row)) for row in others)


def test_a_resumed_run_refuses_rows_of_another_run(tmp_path):
    folder, other = stored(tmp_path / "a"), stored(tmp_path / "b", model="b")
    shutil.copy(other / "rows-00000.jsonl", folder / "rows-00001.jsonl")
    settings = json.loads((folder / "run.json").read_text())["settings"]
    with pytest.raises(sg.InputError, match=r"rows-00001\.jsonl.*a row of another run"):
        Run(folder, settings, {}, task="stress").__enter__()


def test_the_same_images_are_those_of_equal_contents(tmp_path):
    before, after = stored(tmp_path / "a"), stored(tmp_path / "b", model="b")
    assert not compare([before], [after], repeats=10).notes
    with pytest.raises(sg.InputError, match="content"):
        compare([before], [stored(tmp_path / "c", content=False)], repeats=10)
    path = after / "rows-00000.jsonl"
    path.write_text(path.read_text().replace("c0ffee", "decaf", 1))
    with pytest.raises(sg.InputError, match="not the same image"):
        compare([before], [after], repeats=10)


@pytest.mark.parametrize("name", ["=HYPERLINK(1)", "+1", "-1+1", "@x"])
def test_tables_hold_no_formula(tmp_path, name):
    folder = stored(tmp_path / "run", model=name)
    write_report([folder])
    table = (folder / "table.csv").read_text()
    assert f"'{name}" in table and f",{name}" not in table and f"\n{name}" not in table
    export_rows(Rows.read(folder), tmp_path / "rows.csv")
    assert f"'{name}" in (tmp_path / "rows.csv").read_text()


def test_a_unit_is_no_link(tmp_path):
    folder = stored(tmp_path / "run")
    run = json.loads((folder / "run.json").read_text())
    unit = "[x](javascript:alert(1))"
    run["settings"]["quantities"] = [{"name": "top1", "unit": unit, "accuracy": True}]
    (folder / "run.json").write_text(json.dumps(run))
    write_report([folder])
    assert not re.search(r"(?<!\\)\]\(", (folder / "table.md").read_text())


def test_samples_without_values_are_refused_in_words(tmp_path):
    sample = {"name": "a", "title": "a", "values": [], "files": ["a.jpg", "b.jpg"]}
    record = {"methods": [["gaze", "logit"]], "metric": "x", "best": [sample], "worst": []}
    (tmp_path / "samples").mkdir()
    write_index(tmp_path, record)
    with pytest.raises(sg.InputError, match="expected 1 values and 2 files of 'a', got 0 and 2"):
        read_map_samples(tmp_path)


def test_a_log_without_epochs_is_refused_in_words():
    from steadygaze.cli.results import _panel

    with pytest.raises(sg.InputError, match=r"log\.csv: expected numbers in epoch and loss"):
        _panel("loss", {"run": [{"step": "1", "loss": "2"}]})


@pytest.mark.parametrize("shape", ["x", 3, None, {}, {"widths": 3}])
def test_gates_without_a_shape_are_refused_in_words(tmp_path, monkeypatch, shape):
    from steadygaze.methods import diffmask

    class File:
        def read(self, path):
            return {"shape": shape}, {}

    monkeypatch.setattr(diffmask, "FILE", File())
    with pytest.raises(sg.InputError, match="description of the gates cannot be used"):
        diffmask.read_file(tmp_path / "gates.safetensors")
