"""The store, its repair and its refusals; bootstrap against slow, obvious versions of itself."""

import errno
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

import steadygaze as sg
from steadygaze.errors import RowsNotWrittenError
from steadygaze.faithfulness.metric import METRICS
from steadygaze.quantity import mean, pooled
from steadygaze.runs import store as store_module
from steadygaze.runs.rows import Rows
from steadygaze.runs.statistics import bootstrap, difference, draws, interval
from steadygaze.runs.store import Done, Store, prepare

SETTINGS = {"data": "d", "ratios": [0.1, 0.9], "seed": 0, "versions": {"steadygaze": "0.1.0", "torch": "2.6"}}


def row(image="a", method="gaze", metric="insertion_accuracy", value=1.0, **more):
    fixed = {
        "model": "m",
        "weights": "w",
        "method": method,
        "score": "logit",
        "metric": metric,
        "image": image,
    }
    return {**fixed, "value": value, **more, "seed": 0}


def filled(folder: Path, rows) -> Path:
    prepare(folder, SETTINGS, {})
    with Store(folder) as store:
        store.append(rows)
    return folder


def test_rows_come_back(tmp_path):
    rows = [
        row("a", detail=[1, 2.5]),
        row("b", value=None, flag="broken map"),
        {"image": "c", "unreadable": "c: no"},
    ]
    read = Rows.read(filled(tmp_path, rows))
    assert list(read) == rows[:2] and len(read) == 2
    assert read.unreadable == {"c": "c: no"}
    assert read.flagged == {("gaze", "broken map"): 1}
    frame = read.to_pandas()
    assert {"model", "weights", "method", "score", "metric", "image", "value", "seed", "versions"} <= set(
        frame.columns
    )
    assert frame["value"].isna().tolist() == [False, True]
    assert frame["versions"][0] == "steadygaze 0.1.0, torch 2.6"


def test_compressed_rows_are_read(tmp_path):
    filled(tmp_path, [row(str(i), value=float(i)) for i in range(5)])
    before = Rows.read(tmp_path).table(repeats=20).csv()
    plain = tmp_path / "rows-00000.jsonl"
    (tmp_path / "rows-00000.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert Rows.read(tmp_path).table(repeats=20).csv() == before


@pytest.mark.parametrize("cut", [1, 7, 40, 10**6])
def test_half_a_line_is_dropped(tmp_path, cut):
    whole = json.dumps(row("a")) + "\n"
    path = tmp_path / "rows-00000.jsonl"
    long = json.dumps(row("b", note="x" * 200_000))
    path.write_text(whole + long[:cut])
    assert [r["image"] for r in Rows([{}], folders=[tmp_path])] == ["a"]
    Store(tmp_path).close()
    assert path.read_text() == whole


def test_rows_that_cannot_be_written_are_told(tmp_path, monkeypatch):
    """As in a folder that may only be read; root may write everywhere, so the calls are made to fail."""
    folder = filled(tmp_path, [row()])

    def refused(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "ftruncate", refused)
    Store(folder).close()  # nothing to cut off
    with (folder / "rows-00000.jsonl").open("ab") as file:
        file.write(b'{"half')
    with pytest.raises(RowsNotWrittenError, match="Permission denied"):
        Store(folder)
    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(RowsNotWrittenError, match="Permission denied"):
        Store(folder)


def test_a_file_of_half_a_line_becomes_empty(tmp_path):
    path = tmp_path / "rows-00000.jsonl"
    path.write_text("x" * 100_000)
    Store(tmp_path).close()
    assert path.read_bytes() == b""


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    filled(tmp_path, [row("a")])
    with (tmp_path / "rows-00000.jsonl").open("a") as file:
        file.write("{oops\n" + json.dumps(row("b")) + "\n")
    with pytest.raises(sg.InputError, match="line 2"):
        list(Rows.read(tmp_path))


def test_other_settings_are_refused_and_rows_stay(tmp_path):
    filled(tmp_path, [row("a")])
    before = (tmp_path / "rows-00000.jsonl").read_bytes()
    with pytest.raises(sg.InputError, match="seed was 0, is now 1"):
        prepare(tmp_path, {**SETTINGS, "seed": 1}, {})
    prepare(tmp_path, SETTINGS, {"command": "another"})
    assert (tmp_path / "rows-00000.jsonl").read_bytes() == before


def test_no_run(tmp_path):
    with pytest.raises(sg.InputError, match=r"no run\.json"):
        Rows.read(tmp_path)
    with pytest.raises(sg.InputError):
        Rows.read()


def test_one_writer_at_a_time(tmp_path):
    prepare(tmp_path, SETTINGS, {})
    with Store(tmp_path), pytest.raises(sg.InputError, match="another process"):
        Store(tmp_path)


def test_a_full_disk_leaves_the_rows_as_they_were(tmp_path, monkeypatch):
    filled(tmp_path, [row("a")])
    before = (tmp_path / "rows-00000.jsonl").read_bytes()
    real = os.write

    def full(file, data):
        if len(data) > 100:
            return real(file, data[:50])  # the disk takes some, then no more
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Store(tmp_path) as store:
        monkeypatch.setattr(store_module.os, "write", full)
        with pytest.raises(RowsNotWrittenError, match=r"No space left on device.*intact") as caught:
            store.append([row("b")])
        monkeypatch.undo()
        assert isinstance(caught.value, OSError) and isinstance(caught.value, sg.SteadygazeError)
        assert (tmp_path / "rows-00000.jsonl").read_bytes() == before
        store.append([row("b")])
    assert [r["image"] for r in Rows.read(tmp_path)] == ["a", "b"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_the_full_device(tmp_path, monkeypatch):
    def full(file, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    prepare(tmp_path, SETTINGS, {})
    with Store(tmp_path) as store, monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(RowsNotWrittenError, match="No space"):
            store.append([row("a")])


def test_rows_are_not_written_through_a_link(tmp_path):
    prepare(tmp_path, SETTINGS, {})
    (tmp_path / "rows-00000.jsonl").symlink_to(tmp_path.parent / "elsewhere")
    with pytest.raises(RowsNotWrittenError, match="links"):
        Store(tmp_path)
    assert not (tmp_path.parent / "elsewhere").exists()


def test_done_knows_rows_by_key(tmp_path):
    filled(tmp_path, [row("a"), row("a", method="cat"), row("b"), {"image": "c", "unreadable": "why"}])
    with Store(tmp_path, "00001") as store:
        store.append([{"image": "c", "unreadable": ""}, row("c", content="0123")])
    done = Done(tmp_path)
    keys = [("gaze", "logit", "insertion_accuracy"), ("cat", "logit", "insertion_accuracy")]
    assert [image for image in "abcd" if done.lacks(image, keys)] == ["b", "c", "d"]
    assert [image for image in "abcd" if done.lacks(image, keys[:1])] == ["d"]
    assert done.unreadable == {}, "what could be read later is no longer unreadable"
    assert done.has(("b", *keys[0])) and not done.has(("b", *keys[1]))
    assert done.content == {"c": "0123"}, "a row need not have a content"


def test_rows_of_a_replaced_image_no_longer_count(tmp_path):
    filled(tmp_path, [row("a", content="old"), row("b", content="old"), row("b", method="cat")])
    with Store(tmp_path, "00001") as store:
        store.replace({"b": "new"})
        store.append([row("b", value=2.0, content="new")])
    assert [(r["image"], r["content"]) for r in Rows.read(tmp_path)] == [("a", "old"), ("b", "new")]
    with Store(tmp_path) as store:  # the first file came back
        store.replace({"b": "old"})
    assert [(r["image"], r["content"]) for r in Rows.read(tmp_path)] == [("a", "old"), ("b", "old")]


def test_draws_are_draws():
    taken = np.concatenate(list(draws(7, 4000, seed=1)))
    assert taken.shape == (4000, 7) and (taken.sum(1) == 7).all()
    assert np.allclose(taken.mean(0), 1, atol=0.1)
    assert np.array_equal(taken, np.concatenate(list(draws(7, 4000, seed=1))))
    assert not np.array_equal(taken, np.concatenate(list(draws(7, 4000, seed=2))))


@pytest.mark.parametrize("kind", ["mean", "pooled", "median"])
def test_bootstrap_is_resampling_rows(kind):
    rng = np.random.default_rng(0)
    values, details = rng.normal(size=(3, 9)), rng.uniform(1, 5, (3, 9, 4))
    values[1, 4] = np.nan
    combine = {"mean": mean, "pooled": pooled, "median": lambda v, d: float(np.nanmedian(v))}[kind]
    point, samples = bootstrap(values, details, combine=combine, repeats=30, seed=5)
    taken = np.concatenate(list(draws(9, 30, seed=5))).astype(int)
    for k in range(3):
        assert np.isclose(point[k], combine(values[k], list(details[k])))
        for r in range(30):
            rows = np.repeat(np.arange(9), taken[r])
            assert np.isclose(samples[r, k], combine(values[k, rows], list(details[k, rows])))


def test_intervals_cover():
    """In about 95 of 100 data sets the interval holds the truth."""
    rng = np.random.default_rng(3)
    values = rng.exponential(size=(300, 60))
    _, samples = bootstrap(values, repeats=600, seed=0)
    low, high = interval(samples)
    assert 0.89 < ((low <= 1) & (high >= 1)).mean() < 0.98


def test_a_draw_without_a_defined_image_does_not_undo_the_interval():
    values = np.array([[np.nan, np.nan, np.nan, 1.0, 2.0], [np.nan] * 5])
    low, high = interval(bootstrap(values, repeats=2000, seed=0)[1])
    assert (low[0], high[0]) == (1, 2) and np.isnan([low[1], high[1]]).all()


def test_paired_differences_see_more():
    rng = np.random.default_rng(0)
    hard = rng.normal(0, 10, 80)
    values = np.stack([hard + 1 + rng.normal(0, 0.5, 80), hard])
    value, low, high = difference(values)
    assert np.isclose(value, (values[0] - values[1]).mean()) and 0 < low < value < high < 2
    _, samples = bootstrap(values)
    lows, highs = interval(samples)
    assert lows[0] < highs[1], "unpaired, the two could not be told apart"


def test_ranking(tmp_path):
    rng = np.random.default_rng(0)
    rows = []
    for method, level in (("poor", 10), ("good", 50), ("fair", 30)):
        for image in range(20):
            for metric in ("insertion_accuracy", "deletion_accuracy"):
                rows.append(row(str(image), method, metric, level + rng.normal(), detail=[level, level - 1]))
            rows.append(row(str(image), method, "positive_perturbation", 100 - level + rng.normal()))
    section = Rows.read(filled(tmp_path, rows)).table(repeats=200).sections[0]
    assert [method for method, _ in section.lines] == ["good", "fair", "poor"]
    assert section.best("positive_perturbation")[0] == "good", "lower is better there"
    cell = section.cells["removal_mean", ("good", "logit")]
    assert cell.low < cell.value < cell.high and abs(cell.value - 50) < 1 and cell.images == 20
    assert section.curve("insertion_accuracy", ("fair", "logit")).tolist() == [30, 29]
    gap = section.versus("good")["fair", "logit"]
    assert gap.high < -15 and abs(gap.value + 20) < 1
    with pytest.raises(sg.InputError, match="nobody"):
        section.versus("nobody")
    text = Rows.read(tmp_path).table(repeats=200).markdown()
    assert text.count("| good |") == 1 and "↓" in text and "**" in text


def test_each_metric_has_a_direction():
    of_the_model = {"agreement", "funnybirds_accuracy", "funnybirds_background"}  # or of no single method
    assert all(
        m.better in (("neither",) if m.name in of_the_model else ("higher", "lower")) and m.low < m.high
        for m in METRICS.values()
    )


def test_rows_are_flushed_to_the_disk(tmp_path, monkeypatch):
    flushed = []
    with Store(tmp_path) as store:
        monkeypatch.setattr(store_module.os, "fsync", lambda file: flushed.append(store.path.read_bytes()))
        store.append([row("a")])
    assert flushed == [store.path.read_bytes()] and flushed[0].endswith(b"\n")
