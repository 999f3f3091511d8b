"""A full disk or a folder that cannot be written: every command prints the file and the reason."""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import steadygaze.files as files
from helpers.runs import image_folder, rows_of
from helpers.tiers import tiered
from helpers.training import content
from helpers.training import image_folder as training_images
from steadygaze.cli import app, file_error
from steadygaze.training.run_files import LOG

MODEL = ("--model", "embedded")
STRESS = ("--suites", "corruptions", "--corruptions", "fog", "--severities", "1", "--limit", "3")
VERIFY = ("--methods", "rollout", "--metrics", "deletion_accuracy", "--limit", "3")
SMALL = 64  # bytes; a stand-in for a full disk that needs no file system of its own


def run(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> Path:
    """Images, two stress runs, one verify run and the log of a training run."""
    folder = tmp_path_factory.mktemp("given")
    data = image_folder(folder / "data")
    for name in ("before", "after"):
        out = ("--num-workers", 0, "--out", folder / name)
        assert run("stress", *MODEL, "--data", data, *STRESS, *out).exit_code == 0
    assert run("verify", *MODEL, "--data", data, *VERIFY, "--out", folder / "verify").exit_code == 0
    (folder / "training").mkdir()
    (folder / "training" / LOG).write_text("step,epoch,loss\n1,0.5,0.7\n2,1.0,0.6\n")
    training_images(folder / "bright-and-dark")
    return folder


def command(name: str, given: Path, out: Path) -> list[object]:
    """The command with `out` below the folder that cannot be written."""
    data = ("--data", given / "data")
    recipe = given / "recipe.toml"
    recipe.write_text(toml(content(given / "bright-and-dark")))
    return {
        "explain": ["explain", given / "data" / "cat" / "0.png", *MODEL, "--method", "gae", "--out", out],
        "demo": ["demo", "--out", out],
        "verify": ["verify", *MODEL, *data, *VERIFY, "--out", out],
        "stress": ["stress", *MODEL, *data, *STRESS, "--num-workers", 0, "--out", out],
        "report of stress": ["report", given / "before", "--out", out / "report.html"],
        "report of verify": ["report", given / "verify", "--out", out / "report.html"],
        "compare-models": ["compare-models", given / "before", given / "after", "--out", out / "page.html"],
        "card": ["card", "embedded", "embedded", *data, *STRESS, "--methods", "rollout", "--out", out],
        "train": ["train", recipe, "--out", out],
        "curves": ["curves", given / "training", "--out", out / "curves.svg"],
        "diffmask train": [
            *("diffmask", "train", *MODEL, *data, "--steps", 1, "--set", "batch=2", "--out", out / "m"),
        ],
        "shapley train": [
            *("shapley", "train", *MODEL, *data, "--steps", 1, "--set", "batch=2", "--out", out / "m"),
        ],
    }[name]


def toml(values: dict) -> str:
    """Nested tables of texts, numbers, booleans and dicts."""

    def value(one) -> str:
        if isinstance(one, dict):
            return "{" + ", ".join(f"{key} = {value(inner)}" for key, inner in one.items()) + "}"
        return str(one).lower() if isinstance(one, bool) else repr(one)

    return "\n".join(f"{key} = {value(one)}" for key, one in values.items())


COMMANDS = [
    *("explain", "demo", "verify", "stress", "report of stress", "report of verify", "compare-models"),
    *("card", "train", "curves", "diffmask train", "shapley train"),
]
# exit code 3 once the run has begun
RESUMABLE = {"verify", "stress", "card", "train", "diffmask train", "shapley train"}


def check(name: str, result, out: Path, reason: str) -> None:
    assert result.exit_code in ((2, 3) if name in RESUMABLE else (2,)), result.output
    assert isinstance(result.exception, SystemExit), f"a traceback: {result.exception!r}"
    assert "error: " in result.output and reason in result.output and out.name in result.output


@pytest.mark.parametrize(
    "name", tiered(COMMANDS, ["explain", "verify", "stress", "train", "report of verify"])
)
def test_a_folder_below_a_file(given, tmp_path, name):
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    result = run(*command(name, given, out))
    check(name, result, out, "Not a directory")


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing more than this to a file fails, as on a full disk: EFBIG of the operating system."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    "name", tiered(COMMANDS, ["explain", "verify", "stress", "train", "report of verify"])
)
def test_a_write_that_fails_halfway_leaves_no_file(given, tmp_path, name):
    out = tmp_path / "out"
    words = command(name, given, out)
    with file_size_limit(SMALL):
        result = run(*words)
    check(name, result, out, "File too large")
    files_left = [file for file in out.rglob("*") if file.is_file()]
    assert not [file for file in files_left if file.stat().st_size], f"half a file: {files_left}"


@pytest.mark.parametrize(
    "name", tiered(COMMANDS, ["explain", "verify", "stress", "train", "report of verify"])
)
def test_a_full_disk(given, tmp_path, monkeypatch, name):
    def mkstemp(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/some/temporary/file")

    monkeypatch.setattr(files.tempfile, "mkstemp", mkstemp)
    out = tmp_path / "out"
    result = run(*command(name, given, out))
    check(name, result, out, "No space left on device")
    assert "/some/temporary/file" not in result.output, "the file that the user knows is named"


@pytest.mark.full
def test_a_disk_that_fills_up_during_a_shard_loses_nothing(given, tmp_path):
    """Half of the rows fit. The error names the file, the rows before are whole, and the command resumes."""
    words = ["verify", *MODEL, "--data", given / "data", *VERIFY[:4], "--batch-size", 4]
    assert run(*words, "--out", tmp_path / "whole").exit_code == 0
    wanted = rows_of(tmp_path / "whole")
    out = tmp_path / "out"
    shards = [[*words, "--out", out, "--shard", f"{index}/2"] for index in (0, 1)]
    with file_size_limit(len("".join(wanted)) // 3):
        failed = run(*shards[0])
    assert failed.exit_code == 3 and "rows-00000of00002-00000.jsonl could not be written" in failed.output
    assert "free some space and run the same command again" in failed.output
    before = rows_of(out)
    assert before and set(before) < set(wanted), "rows that were written before are intact"
    assert "failed" in run("status", out).output
    for shard in shards:
        assert run(*shard).exit_code == 0
    assert rows_of(out) == wanted


def test_a_file_that_was_there_is_kept(given, tmp_path):
    page = tmp_path / "report.html"
    page.write_text("before")
    with file_size_limit(SMALL):
        result = run("report", given / "before", "--out", page)
    check("report", result, page, "File too large")
    assert page.read_text() == "before" and {file.name for file in tmp_path.iterdir()} == {"report.html"}


def test_the_message_of_an_error_without_a_file_name():
    assert file_error(OSError(errno.ENOSPC, "No space left on device")).startswith("the output: No space")
    assert file_error(OSError("cannot write mode P")) == "the output: cannot write mode P"
