"""`steadygaze export` and `Rows.to_parquet`: what is written is what was measured."""

import gzip
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import steadygaze as sg
from benchmarks import rows as benchmark
from helpers.runs import made_up
from steadygaze.cli import app
from steadygaze.runs import export
from steadygaze.runs import rows as blocks
from steadygaze.runs.rows import Rows

PAGE = Path(__file__).parents[2] / "docs" / "rows.md"


def verify_run(folder: Path) -> Path:
    """A verify run that nobody ran, on disk."""
    settings = {
        "kind": "verify",
        "model": "m",
        "weights": "w",
        "data": "d",
        "seed": 0,
        "versions": {"steadygaze": "0.2.0"},
    }
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"settings": settings, "about": {"command": "verify"}}))
    lines = [{"image": "broken.png", "unreadable": "broken.png: no image"}]
    for number in range(6):
        for method in ("gaze", "rollout", "attixg+plus:freeze=0.75"):
            for metric in ("insertion_accuracy", "deletion_accuracy"):
                row = {
                    "model": "m",
                    "weights": "w",
                    "method": method,
                    "score": "logit",
                    "metric": metric,
                    "image": f"é/{number}.png",
                    "value": None if number == 5 else number + len(method) / 7,
                    "seed": 0,
                    "content": f"{number:04x}",
                }
                curve = {"detail": [number, None, 0.1]} if metric == "insertion_accuracy" else {}
                lines.append({**row, **curve, **({"flag": "zero map"} if number == 4 else {})})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "rows-00000.jsonl").write_text(text)
    return folder


def command(*words, code=0):
    done = CliRunner().invoke(app, ["export", *map(str, words)])
    assert done.exit_code == code, (done.exit_code, done.output, done.exception)
    return done.output


def test_a_parquet_file_holds_the_rows(tmp_path, monkeypatch):
    import pyarrow.parquet as pq

    monkeypatch.setattr("steadygaze.untrusted.BLOCK", 2000)  # several blocks
    run = verify_run(tmp_path / "run")
    assert "wrote" in command(run, "--to", tmp_path / "new" / "rows.parquet")
    table = pq.read_table(tmp_path / "new" / "rows.parquet")
    assert {name: str(table.schema.field(name).type) for name in ("value", "detail", "seed", "method")} == {
        "value": "double",
        "detail": "list<element: double>",
        "seed": "int64",
        "method": "dictionary<values=string, indices=int32, ordered=0>",
    }
    rows = list(Rows.read(run))
    for got, row in zip(table.to_pylist(), rows, strict=True):
        assert {name: got[name] for name in row} == row
        assert got["setting"] is None and got["versions"] == "steadygaze 0.2.0" and got["run"] == str(run)
    metadata = pq.read_metadata(tmp_path / "new" / "rows.parquet").metadata
    about = json.loads(metadata[b"steadygaze"])
    assert about["format"] == 1 and about["runs"][0]["settings"]["model"] == "m"
    assert json.loads(metadata[b"steadygaze.unreadable"]) == {"broken.png": "broken.png: no image"}


def test_a_partitioned_folder_holds_the_rows(tmp_path):
    import pyarrow.dataset as ds

    run = verify_run(tmp_path / "run")
    command(run, "--to", tmp_path / "by_method", "--partition", "method")
    files = sorted(path.parent.name for path in (tmp_path / "by_method").rglob("*.parquet"))
    assert files == ["method=attixg%2Bplus%3Afreeze%3D0.75", "method=gaze", "method=rollout"]
    table = ds.dataset(tmp_path / "by_method", partitioning="hive", exclude_invalid_files=True).to_table()
    got = {(r["method"], r["metric"], r["image"]): r["value"] for r in table.to_pylist()}
    assert got == {(r["method"], r["metric"], r["image"]): r["value"] for r in Rows.read(run)}
    about = json.loads((tmp_path / "by_method" / "_runs.json").read_text())
    assert about["unreadable"] and about["runs"][0]["about"] == {"command": "verify"}
    assert "exists" in command(run, "--to", tmp_path / "by_method", "--partition", "method", code=2)
    assert "rows without one" in command(run, "--to", tmp_path / "x", "--partition", "setting", code=2)
    assert "got image" in command(run, "--to", tmp_path / "x", "--partition", "image", code=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["by_method", "run"], (
        "nothing half-written is left"
    )


def test_stress_runs_and_rows_in_memory(tmp_path):
    import pyarrow.parquet as pq

    rows = made_up(names=("fog",), severities=(1, 2), images=3)
    table = pq.read_table(rows.to_parquet(tmp_path / "rows.parquet"))
    assert table.column("setting").to_pylist() == [row["setting"] for row in rows]
    assert table.column("value").to_pylist() == [row["value"] for row in rows]
    assert set(table.column("method").to_pylist()) == {None}
    rows.to_parquet(tmp_path / "by_setting", partition="setting")
    assert (tmp_path / "by_setting" / "setting=fog%2F1" / "part-0.parquet").is_file()


def test_text_files(tmp_path):
    import pandas as pd

    run = verify_run(tmp_path / "run")
    command(run, "--to", tmp_path / "rows.csv")
    frame, whole = pd.read_csv(tmp_path / "rows.csv"), Rows.read(run).to_pandas()
    assert frame["value"].equals(whole["value"]) and json.loads(frame["detail"][0])[0] == 0
    command(run, "--to", tmp_path / "rows.jsonl.gz")
    lines = gzip.decompress((tmp_path / "rows.jsonl.gz").read_bytes()).splitlines()
    assert [json.loads(line) for line in lines][1:] == list(Rows.read(run))
    assert ".parquet, .csv, .jsonl.gz, got rows.xlsx" in command(run, "--to", tmp_path / "rows.xlsx", code=2)
    with pytest.raises(sg.InputError, match=r"ends in \.parquet"):
        Rows.read(run).to_parquet(tmp_path / "rows.csv")


def test_a_failed_export_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    run = verify_run(tmp_path / "run")
    (tmp_path / "rows.parquet").write_text("mine")
    with (run / "rows-00000.jsonl").open("a") as file:
        file.write("{oops\n")
    assert "line 38" in command(run, "--to", tmp_path / "rows.parquet", code=2)
    assert (tmp_path / "rows.parquet").read_text() == "mine"

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export, "write_atomic", full)
    with pytest.raises(sg.SteadygazeError, match="No space left"):
        Rows.read(run).to_parquet(tmp_path / "rows.parquet")


def test_the_queries_of_the_page_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("duckdb")
    run = verify_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    command(run, "--to", "rows.parquet")
    command(run, "--to", "by_method", "--partition", "method")
    queries = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(queries) >= 6
    names: dict = {}
    for query in queries:
        exec(compile(query, str(PAGE), "exec"), names)
        printed = capsys.readouterr().out
        assert printed and "0 rows" not in printed, query


@pytest.mark.full
def test_the_benchmark_measures_runs_like_real_ones(tmp_path, monkeypatch):
    """Its synthetic rows are read the fast way, and every job that it times works on them."""
    monkeypatch.setattr(blocks, "_line_by_line", None)
    benchmark.write_verify(tmp_path / "verify", 2 * 360)
    for side, model in (("stress", 0), ("before", 0), ("after", 1)):
        benchmark.write_stress(tmp_path / side, 3 * 228, model)
    for job in benchmark.JOBS:
        if job in ("report", "stress-report", "compare"):
            with pytest.raises(SystemExit) as ended:
                benchmark.run_job(job, tmp_path)
            assert ended.value.code == 0, job
        else:
            benchmark.run_job(job, tmp_path)
    assert len(Rows.read(tmp_path / "verify")) == 2 * 360 and len(Rows.read(tmp_path / "stress")) == 3 * 228
    assert (tmp_path / "verify" / "report.html").exists() and (tmp_path / "after" / "compare.html").exists()
