"""Two processes and one run folder: a second writer is refused, only the writer changes its file."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import steadygaze as sg
from steadygaze.files import FileLock, lock_folder, remove_leftovers
from steadygaze.runs.loop import Run
from steadygaze.runs.rows import Rows
from steadygaze.runs.store import Store, prepare

SETTINGS = {"data": "d", "seed": 0, "versions": {"steadygaze": "0.2.0"}}
ROW = {"model": "m", "weights": "w", "method": "gaze", "score": "logit", "metric": "insertion_accuracy"}
LINE = json.dumps({**ROW, "image": "b", "value": 2.0, "seed": 0}).encode() + b"\n"
WRITER = """
import os, sys
from pathlib import Path
from steadygaze.files import FileLock, lock_folder, remove_leftovers
from steadygaze.runs.store import Store

folder, line = Path(sys.argv[1]), sys.argv[2].encode() + b"\\n"
with lock_folder(folder), Store(folder) as store:
    os.write(store._file, line[:20])  # the writer is in the middle of a row
    print("half", flush=True)
    sys.stdin.readline()
    os.write(store._file, line[20:])
    print("whole", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    prepare(tmp_path, SETTINGS, {})
    with Store(tmp_path) as store:
        store.append([{**ROW, "image": "a", "value": 1.0, "seed": 0}])
    return tmp_path


@pytest.fixture
def writer(folder: Path):
    source = str(Path(sg.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), LINE.decode().strip()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": source, "PATH": ""},
    )
    assert process.stdout.readline() == "half\n"
    yield process
    process.kill()
    process.communicate()


def proceed(writer: subprocess.Popen) -> str:
    writer.stdin.write("\n")
    writer.stdin.flush()
    return writer.stdout.readline()


def test_a_row_that_is_being_written_is_not_cut_off(folder: Path, writer: subprocess.Popen) -> None:
    path = folder / "rows-00000.jsonl"
    before = path.read_bytes()
    assert not before.endswith(b"\n"), "the writer is in the middle of a row"
    assert [row["image"] for row in Rows.read(folder)] == ["a"]
    with pytest.raises(sg.InputError, match="another process"):
        Run(folder, SETTINGS, {}, task="verify").__enter__()
    with pytest.raises(sg.InputError, match="another process"):
        Store(folder)
    assert path.read_bytes() == before
    assert proceed(writer) == "whole\n"
    assert [row["image"] for row in Rows.read(folder)] == ["a", "b"]


def test_a_second_run_does_not_replace_the_settings_of_the_first(tmp_path: Path) -> None:
    """Both start in an empty folder; the one that is refused has written nothing."""
    with lock_folder(tmp_path):
        with pytest.raises(sg.InputError, match="another process"):
            Run(tmp_path, SETTINGS, {}, task="verify").__enter__()
        assert not (tmp_path / "run.json").exists()


def test_a_run_that_cannot_start_gives_the_lock_back(folder: Path) -> None:
    with pytest.raises(sg.InputError, match="seed was 0, is now 1"):
        Run(folder, {**SETTINGS, "seed": 1}, {}, task="verify").__enter__()
    with Run(folder, SETTINGS, {}, task="verify"):
        pass


def test_the_lock_of_a_killed_writer_is_free(folder: Path, writer: subprocess.Popen) -> None:
    writer.kill()
    writer.wait()
    with Run(folder, SETTINGS, {}, task="verify"):
        assert (folder / "rows-00000.jsonl").read_bytes().endswith(b"\n"), "half a row is removed"
    assert [row["image"] for row in Rows.read(folder)] == ["a"]


@pytest.mark.parametrize(
    "name", ["rows-00000.jsonl", ".lock", "samples", "run.json", "maps/maps-0.safetensors"]
)
def test_a_run_does_not_write_through_a_link(tmp_path: Path, name: str) -> None:
    out, outside = tmp_path / "out", tmp_path / "outside"
    if name == "samples":
        outside.mkdir()
    else:
        outside.write_bytes(b"a line\nand another without its end")
    (out / name).parent.mkdir(parents=True)
    (out / name).symlink_to(outside)
    with pytest.raises(sg.InputError, match=r"is a link to .*, out of its folder"):
        Run(out, SETTINGS, {}, task="verify").__enter__()
    assert sorted(out.rglob("*")) == sorted({out / name, *((out / "maps",) if "/" in name else ())})
    assert name == "samples" or outside.read_bytes().endswith(b"without its end")


def test_a_row_file_is_not_opened_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_bytes(b"without its end")
    (tmp_path / "rows-00000.jsonl").symlink_to(tmp_path / "outside")
    with pytest.raises(sg.RowsNotWrittenError):
        Store(tmp_path)
    assert (tmp_path / "outside").read_bytes() == b"without its end"


def test_a_folder_that_is_removed_is_noticed_at_the_next_write(tmp_path: Path) -> None:
    with Store(tmp_path) as store:
        store.append([{"image": "a"}])
        store.path.unlink()
        with pytest.raises(sg.RowsNotWrittenError, match="was removed while the run was writing it"):
            store.append([{"image": "b"}])


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    left, young, locked = (tmp_path / f".{name}.png.x.part" for name in ("left", "young", "locked"))
    for file in (left, young, locked, tmp_path / "image.png"):
        file.touch()
    for file in (left, locked):
        os.utime(file, (0, time.time() - 60))
    with FileLock(locked):
        os.utime(locked, (0, time.time() - 60))
        remove_leftovers(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([young, locked, tmp_path / "image.png"])
