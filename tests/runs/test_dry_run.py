"""What a run will cost, before it starts: images and rows are counted, a few batches are timed."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import steadygaze as sg
from helpers.runs import image_folder
from helpers.training import content
from helpers.training import image_folder as training_image_folder
from steadygaze.cli import app
from steadygaze.runs.estimate import estimate_run, estimate_train
from steadygaze.runs.request import DEFAULT_METRICS, StressRequest, VerifyRequest
from steadygaze.runs.stress import run_stress
from steadygaze.runs.verify import run_verify
from steadygaze.training.recipe import make_recipe


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("dry") / "data")


def run(*arguments: Any, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


def estimated(*arguments: Any) -> dict[str, Any]:
    found = CliRunner().invoke(app, [*map(str, arguments), "--dry-run", "--json"])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


VERIFY: dict[str, tuple[list[str], list[str]]] = {
    "default": (["gaze_removal"], list(DEFAULT_METRICS)),
    "shared passes and searches": (
        ["gae", "cat", "gaze", "rollout", "occlusion:budget=9", "pami:budget=20"],
        ["insertion_accuracy"],
    ),
    "metrics that explain again": (["gae", "gaze"], ["class_sensitivity", "agreement", "randomization"]),
    "painted pixels": (["gae"], ["positive_perturbation", "negative_kl"]),
}


@pytest.mark.parametrize(("methods", "metrics"), VERIFY.values(), ids=VERIFY)
def test_verify_costs_what_was_estimated(
    methods: list[str], metrics: list[str], data: Path, tmp_path: Path
) -> None:
    found = estimated(
        "verify",
        *("--model", "embedded", "--data", data, "--limit", "7", "--batch-size", "4"),
        *("--methods", ",".join(methods), "--metrics", ",".join(metrics), "--no-random"),
        *("--out", tmp_path / "run"),
    )
    assert not any(tmp_path.iterdir())
    request = VerifyRequest(
        random=False, model="embedded", data=data, limit=7, batch_size=4, methods=methods, metrics=metrics
    )
    rows = run_verify(request)
    assert (found["task"], found["images"], found["images_left"]) == ("verify", 7, 7)
    assert found["rows"] == found["rows_left"] == len(rows)
    assert found["seconds"] > 0 and found["startup"] > 0
    assert list(found["shards"]) == ["1", "8", "64"]
    assert found["shards"]["1"] > found["shards"]["8"] == found["shards"]["64"] > found["startup"]


STRESS: dict[str, tuple[str, dict[str, str]]] = {
    "corruptions": ("corruptions", {"corruptions": "fog,jpeg_compression", "severities": "1,3"}),
    "attacks, tokens, attention": (
        "attacks,occlusion,attention",
        {"epsilons": "8/255", "pgd_steps": "2", "corruptions": "fog", "severities": "3"},
    ),
}


@pytest.mark.parametrize(("suites", "options"), STRESS.values(), ids=STRESS)
def test_stress_costs_what_was_estimated(
    suites: str, options: dict[str, str], data: Path, tmp_path: Path
) -> None:
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
    found = estimated(
        "stress",
        *("--model", "embedded", "--data", data, "--limit", "7", "--batch-size", "4"),
        *("--suites", suites, *flags, "--out", tmp_path / "run"),
    )
    assert not any(tmp_path.iterdir())
    request = StressRequest(
        model="embedded",
        data=data,
        limit=7,
        batch_size=4,
        suites=suites,
        options=options,
        num_workers=0,
    )
    rows = run_stress(request)
    assert (found["task"], found["images"], found["images_left"]) == ("stress", 7, 7)
    assert found["rows"] == found["rows_left"] == len(rows)
    assert found["seconds"] > 0


def test_a_dry_run_of_a_shard_is_of_that_shard(data: Path, tmp_path: Path) -> None:
    command = ["verify", "--model", "embedded", "--data", data, "--limit", "7", "--batch-size", "2"]
    command += ["--methods", "gae", "--out", tmp_path / "run"]
    parts = [estimated(*command, "--shard", f"{index}/3") for index in range(3)]
    assert [part["images"] for part in parts] == [3, 2, 2]
    assert parts[0]["shards"] == {} and "shard 0/3 only" in parts[0]["notes"][0]
    assert sum(part["rows"] for part in parts) == estimated(*command)["rows"]


def test_a_dry_run_counts_what_is_left(data: Path, tmp_path: Path) -> None:
    command = ["verify", "--model", "embedded", "--data", data, "--limit", "7", "--batch-size", "4"]
    command += ["--methods", "gae", "--no-random", "--out", tmp_path]
    run(*command)
    rows = tmp_path / "rows-00000.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    names = [json.loads(line)["image"] for line in lines]
    first_batch = set(list(dict.fromkeys(names))[:4])
    rows.write_text("".join(line for line, name in zip(lines, names, strict=True) if name in first_batch))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    found = estimated(*command)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert (found["images"], found["images_left"]) == (7, 3)
    assert (found["rows"], found["rows_left"]) == (28, 12)
    run(*command)
    finished = estimated(*command)
    assert finished["images_left"] == finished["rows_left"] == finished["seconds"] == 0


def test_a_training_costs_what_was_estimated(tmp_path: Path) -> None:
    data = training_image_folder(tmp_path / "data")
    recipe = make_recipe(content(data))
    out = tmp_path / "run"
    found = estimate_train(recipe, out, device="cpu")
    assert not out.exists()
    steps = 2 * 3  # epochs x steps of 4 of the 12 images
    assert (found.images, found.rows, found.rows_left) == (12, steps, steps)
    assert found.seconds > 0
    sg.train(recipe, out, device="cpu", stop_after=4)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    rest = estimate_train(recipe, out, device="cpu")
    assert rest.rows_left == 2 and rest.seconds > 0
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*")}


def test_a_dry_run_keeps_no_maps(data: Path, tmp_path: Path) -> None:
    estimated(
        *("verify", "--model", "embedded", "--data", data, "--limit", "2", "--methods", "gae"),
        *("--keep-maps", "--out", tmp_path / "run"),
    )
    assert not any(tmp_path.iterdir())


def test_the_table_fits_a_terminal(data: Path, tmp_path: Path) -> None:
    text = run(
        *("verify", "--model", "embedded", "--data", data, "--limit", "2", "--methods", "rise:budget=4"),
        *("--dry-run", "--shards", "1,100", "--out", tmp_path / "run"),
    )
    assert "nothing is written" in text
    assert max(map(len, text.splitlines())) <= 80
    for word in ("images", "rows", "time", "100"):
        assert word in text


WRONG = {
    "an unknown method": (["--methods", "gaee", "--dry-run"], "gaee"),
    "shards without a dry run": (["--shards", "4"], "--dry-run"),
    "JSON without a dry run": (["--json"], "--dry-run"),
    "no number of shards": (["--dry-run", "--shards", "0"], "1 or more"),
    "a word as shards": (["--dry-run", "--shards", "many"], "1 or more"),
}


@pytest.mark.parametrize(("options", "said"), WRONG.values(), ids=WRONG)
def test_a_wrong_request_is_named(options: list[str], said: str, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    text = run("verify", "--model", "embedded", "--data", data, *options, "--out", out, code=2)
    assert said in text and not out.exists()


def test_another_run_in_the_folder_is_refused(data: Path, tmp_path: Path) -> None:
    command = ["verify", "--model", "embedded", "--data", data, "--limit", "2", "--out", tmp_path]
    run(*command, "--methods", "gae")
    assert "other settings" in run(*command, "--methods", "rollout", "--dry-run", code=2)
    with pytest.raises(sg.InputError, match="expected data in a folder"):
        estimate_run(VerifyRequest(random=False, model="embedded", data=[]))
