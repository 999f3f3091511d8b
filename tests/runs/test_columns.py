"""Rows as columns: the fast reader accepts what the reader of lines accepts, and nothing else."""

import json

import numpy as np
import pytest

import steadygaze as sg
from helpers.runs import made_up
from steadygaze.runs import rows as blocks
from steadygaze.runs.rows import CODED, Columns, Groups, Rows
from steadygaze.runs.statistics import bootstrap, difference, mean_differences
from steadygaze.runs.suite import resampled_ece

SETTINGS = {"kind": "verify", "model": "m", "weights": "w", "data": "d", "seed": 0, "versions": {}}
ROW = {
    "model": "m",
    "weights": "w",
    "method": "gaze",
    "score": "logit",
    "metric": "aopc",
    "image": "a",
    "value": 1,
    "detail": [1, 2.5],
    "seed": 0,
}


def run_of(folder, *lines, settings=SETTINGS):
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(json.dumps({"settings": settings, "about": {}}))
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    (folder / "rows-00000.jsonl").write_bytes(text.encode("utf-8", "surrogatepass"))
    return folder


def outcome(folder):
    """The columns of a run as plain values, or the error."""
    try:
        columns = Rows.read(folder).columns()
    except sg.InputError as error:
        return str(error)
    texts = {name: columns.text(name).tolist() for name in CODED}
    return texts, columns.value.tolist(), list(columns.detail_lists()), list(columns.unreadable)


LINES = {
    "plain": ROW,
    "spaces": '  {"image" : "a", "unreadable" : "why"} ',
    "null value": {**ROW, "value": None},
    "null in detail": {**ROW, "detail": [None, 1]},
    "null detail": {**ROW, "detail": None},
    "no detail": {**ROW, "detail": []},
    "flag and note": {**ROW, "flag": "zero map", "note": "removal", "content": "c0ffee"},
    "null note": {**ROW, "note": None},
    "no value": {k: v for k, v in ROW.items() if k != "value"},
    "no method": {k: v for k, v in ROW.items() if k != "method"},
    "no image": {k: v for k, v in ROW.items() if k != "image"},
    "no model": {k: v for k, v in ROW.items() if k != "model"},
    "other model": {**ROW, "model": "another"},
    "other seed": {**ROW, "seed": 1},
    "text value": {**ROW, "value": "1"},
    "true value": {**ROW, "value": True},
    "large value": {**ROW, "value": 1e16},
    "infinite value": json.dumps({**ROW, "value": float("inf")}),
    "overflow": json.dumps(ROW).replace('"value": 1', '"value": 1e999'),
    "nan value": json.dumps({**ROW, "value": float("nan")}),
    "nan in detail": json.dumps({**ROW, "detail": [float("nan")]}),
    "large number in detail": {**ROW, "detail": [1e300]},
    "text in detail": {**ROW, "detail": ["x"]},
    "list in detail": {**ROW, "detail": [[1]]},
    "number as image": {**ROW, "image": 7},
    "unknown key": {**ROW, "shard": 3, "worker": "b"},
    "unknown list": {**ROW, "more": [{"x": [1]}]},
    "unknown nan": json.dumps({**ROW, "more": float("nan")}),
    "deep": json.dumps({**ROW, "more": 0}).replace("0}", "[" * 40 + "]" * 40 + "}"),
    "twice the same key": json.dumps(ROW).replace('"value": 1', '"value": 1, "value": 2'),
    "lone surrogate": json.dumps({**ROW, "image": "\ud800"}),
    "invalid utf-8": json.dumps({**ROW, "image": "X"}, ensure_ascii=False).replace("X", "\udcff"),
    "word null": {**ROW, "image": "null/null.png"},
    "unreadable": {"image": "b", "unreadable": "no image"},
    "readable again": {"image": "b", "unreadable": ""},
    "unreadable without image": {"unreadable": "no image"},
    "null reason": {"image": "b", "unreadable": None},
    "a list": "[1, 2]",
    "empty": "",
    "not json": "{oops",
    "two objects": json.dumps(ROW) + json.dumps(ROW),
    "two objects with comma": json.dumps(ROW) + "," + json.dumps(ROW),
    "nothing": "null",
}


@pytest.mark.parametrize("name", LINES)
def test_blocks_are_read_as_lines_are(tmp_path, monkeypatch, name):
    folder = run_of(tmp_path / "run", {**ROW, "image": "first"}, LINES[name], {**ROW, "image": "last"})
    fast = outcome(folder)
    monkeypatch.setattr(blocks, "_plain_rows", lambda data, settings: None)
    slow = outcome(folder)
    assert repr(fast) == repr(slow)
    try:
        listed = list(Rows.read(folder))
    except sg.InputError as error:
        assert str(error) == slow and "line 2" in slow
    else:
        assert [row["image"] for row in listed] == slow[0]["image"]


def test_an_object_over_two_lines_is_no_row(tmp_path):
    text = json.dumps(ROW)
    half = text.index(', "metric"')
    folder = run_of(tmp_path / "run", ROW, text[:half] + ",", text[half + 1 :])
    with pytest.raises(sg.InputError, match="line 2"):
        len(Rows.read(folder))


def test_plain_rows_take_the_fast_way(tmp_path, monkeypatch):

    def forbidden(*_):
        raise AssertionError("read line by line")

    monkeypatch.setattr(blocks, "_line_by_line", forbidden)
    plain = (
        "plain",
        "null value",
        "null in detail",
        "flag and note",
        "unreadable",
        "unknown key",
        "no model",
    )
    for number, name in enumerate(plain):
        assert len(Rows.read(run_of(tmp_path / str(number), ROW, LINES[name]))) > 0, name


def test_a_broken_line_far_down_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("steadygaze.untrusted.BLOCK", 1000)
    rows = [{**ROW, "image": str(i)} for i in range(200)]
    folder = run_of(tmp_path / "run", *rows)
    assert len(Rows.read(folder)) == 200
    path = folder / "rows-00000.jsonl"
    path.write_text(path.read_text().replace('"image": "150"', '"image": 150'))
    with pytest.raises(sg.InputError, match=r"line 151, is not a row \(image"):
        Rows.read(folder).table()


def test_columns_are_kept_until_the_files_change(tmp_path):
    folder = run_of(tmp_path / "run", ROW)
    rows = Rows.read(folder)
    assert rows.columns() is rows.columns()
    with (folder / "rows-00000.jsonl").open("a") as file:
        file.write(json.dumps({**ROW, "image": "b"}) + "\n")
    assert rows.columns().text("image").tolist() == ["a", "b"] and len(rows) == 2


def test_a_run_of_unreadable_images_alone(tmp_path):
    folder = run_of(tmp_path / "run", LINES["unreadable"])
    assert Rows.read(folder).unreadable == {"b": "no image"} and len(Rows.read(folder)) == 0


def test_groups_come_in_order_of_arrival():
    codes = [np.array([3, 1, 3, -1, 1]), np.array([0, 0, 0, 1, 2])]
    groups = Groups.of(codes)
    assert groups.first.tolist() == [0, 1, 3, 4] and groups.of_row.tolist() == [0, 1, 0, 2, 3]
    assert groups.rows(0).tolist() == [0, 2]


def test_details_of_chosen_rows():
    lines = [{**ROW, "detail": detail} for detail in ([1], None, [2, 3], [4])]
    columns = Columns.of((0, line) for line in lines)
    assert columns.details(np.array([3, 1, 2])).tolist() == [4, 2, 3]
    assert columns.detail_lists() == [[1], None, [2, 3], [4]]


def test_differences_that_share_draws():
    rng = np.random.default_rng(0)
    values, base = rng.normal(size=(4, 30)), rng.normal(size=30)
    values[1, 3] = values[2, :] = np.nan
    together = mean_differences(values, base, repeats=200, seed=3)
    for own, got in zip(values, together, strict=True):
        alone = difference(np.stack([own, base]), repeats=200, seed=3)
        assert np.allclose(got, alone, rtol=1e-12, atol=0, equal_nan=True)


def test_calibration_of_several_settings_shares_draws():
    rng = np.random.default_rng(0)
    pairs = [(rng.integers(0, 2, 40).astype(float), rng.random(40)) for _ in range(3)]
    pairs[1][1][5] = np.nan
    together = resampled_ece(pairs, 50, 1)
    for pair, got in zip(pairs, together, strict=True):
        (alone,) = resampled_ece([pair], 50, 1)
        assert np.allclose(got, alone, rtol=1e-12) and got.shape == (51,)


def test_the_interval_of_a_calibration_error_contains_it():
    """Plain percentiles of the resampled values would lie above it."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        confidence = rng.random(60)
        correct = (rng.random(60) < confidence).astype(float)
        ((value, *resampled),) = resampled_ece([(correct, confidence)], 400, 1)
        low, high = np.percentile(resampled, [2.5, 97.5])
        assert low < value < high and min(resampled) >= 0


def test_many_columns_are_resampled_as_one_is():
    values = np.random.default_rng(0).normal(size=(5, 40))
    values[2, :7] = np.nan
    _, together = bootstrap(values, repeats=100, seed=2)
    for k in range(5):
        assert np.allclose(together[:, k], bootstrap(values[k : k + 1], repeats=100, seed=2)[1][:, 0])


def test_rows_in_memory_have_columns_too():
    rows = made_up(names=("fog",), severities=(1,), images=3)
    assert len(rows.columns()) == len(list(rows)) == 12
    assert set(rows.columns().text("setting")) == {"clean", "fog/1"}
