"""Tables fit 80 columns: names and numbers are whole, and a table that is too wide continues below."""

import io
import re

import pytest
from rich.cells import cell_len
from rich.console import Console
from typer.testing import CliRunner

import steadygaze as sg
from helpers.runs import image_folder
from steadygaze.cli import app
from steadygaze.cli.output import Column, print_table

NARROW = 80


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": str(NARROW)})
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def table_lines(output: str) -> list[str]:
    """The lines of tables: everything but sentences, which the terminal wraps."""
    return [line for line in output.splitlines() if re.match(r"\s|.*─", line)]


def check(output: str, names: list[str]) -> None:
    lines = table_lines(output)
    assert lines and max(map(cell_len, lines)) <= NARROW
    assert "…" not in output
    cells = {cell for line in lines for cell in re.split(r"\s{2,}", line.strip())}
    assert not [name for name in names if name not in cells], "names are whole"


def printed(columns, rows, width=NARROW, **options) -> str:
    text = io.StringIO()
    print_table(Console(file=text, width=width), columns, rows, **options)
    return text.getvalue()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A verify run with many metrics, and two stress runs."""
    folder = tmp_path_factory.mktemp("tables")
    data = image_folder(folder / "data")
    common = ["--model", "embedded", "--data", data, "--limit", 3]
    method = "attixg+plus:pairing=next,freeze=0.75"
    metrics = "insertion_accuracy,deletion_accuracy,insertion_aopc,deletion_aopc,saco,srg"
    words = ["--methods", method, "--metrics", metrics, "--ratios", "0.5"]
    outputs = {"verify": run("verify", *common, *words, "--out", folder / "verify")}
    suites = ["--suites", "corruptions,occlusion", "--corruptions", "fog,gaussian_noise"]
    for name in ("before", "after"):
        options = [*suites, "--severities", "1,2,3,4,5", "--num-workers", 0, "--out", folder / name]
        outputs["stress"] = run("stress", *common, *options)
    outputs["compare"] = run("compare-models", folder / "before", folder / "after")
    outputs["status"] = run("status", folder / "verify")
    return folder, outputs


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("methods", sg.list_methods),
        ("metrics", sg.list_metrics),
        ("losses", sg.list_losses),
        ("models deit", lambda: sg.list_models("deit")),
    ],
    ids=["methods", "metrics", "losses", "models"],
)
def test_listings_fit(command, names):
    check(run(*command.split()), [getattr(one, "name", one) for one in names()])


def test_suites_and_recipes_fit():
    from steadygaze.training.recipe_files import shipped_recipes

    output = run("suites")
    check(output, [])
    words = set(output.split())
    assert all(info.name in output and words >= set(info.summary.split()) for info in sg.list_suites())
    check(run("train", "--list", "--all"), list(shipped_recipes()))


def test_recipes_that_were_not_measured_are_listed_on_request():
    from steadygaze.training.recipe import read_recipe
    from steadygaze.training.recipe_files import shipped_recipes

    unmeasured = [name for name in shipped_recipes() if read_recipe(name).result.startswith("not measured")]
    listed, everything = run("train", "--list"), run("train", "--list", "--all")
    assert "relevance-vit-b" in unmeasured and "cifar10-tap" not in unmeasured
    assert all(name in everything and name not in listed for name in unmeasured)
    assert "cifar10-tap" in listed and "more were not measured here" in listed
    assert "more were not measured here" not in everything


@pytest.mark.full
def test_result_tables_fit(runs):
    folder, outputs = runs
    methods = {row["method"] for row in sg.Rows.read(folder / "verify")}
    assert max(map(len, methods)) > 30
    check(outputs["verify"], sorted(methods))
    assert "continued" in outputs["verify"]
    check(outputs["stress"], ["clean", "gaussian_noise", "fog"])
    check(outputs["compare"], ["clean", "top1"])
    assert max(map(len, outputs["status"].splitlines())) <= NARROW


def test_numbers_of_a_narrow_table_are_whole(runs):
    folder, outputs = runs
    table = sg.Rows.read(folder / "verify").table()
    shown = " ".join(outputs["verify"].split())
    for record in table.records():
        assert f"{record['value']:.1f}" in shown or f"{record['value']:.3f}" in shown


def test_verify_measures_the_chance_level_unless_told_not_to(runs, tmp_path):
    folder, _ = runs
    assert {row["method"] for row in sg.Rows.read(folder / "verify")} > {"random"}
    words = ["--model", "embedded", "--data", folder / "data", "--limit", 2, "--ratios", "0.5"]
    words += ["--methods", "rollout", "--metrics", "deletion_aopc"]
    run("verify", *words, "--no-random", "--out", tmp_path / "run")
    assert {row["method"] for row in sg.Rows.read(tmp_path / "run")} == {"rollout"}


def test_a_wide_table_continues_below_with_its_keys():
    columns = [Column("method", "name"), *(Column(f"a_long_metric_{i} ↑") for i in range(12))]
    rows = [([name, *(f"{i}.25 ±0.12" for i in range(12))], "") for name in ("gaze_removal", "random")]
    text = printed(columns, rows)
    assert max(map(cell_len, text.splitlines())) <= NARROW
    parts = text.split("continued")
    assert len(parts) > 1 and all("gaze_removal" in part and "random" in part for part in parts)
    assert all(f"{i}.25" in text for i in range(12)) and text.count("±0.12") == 24
    assert "continued" not in printed(columns, rows, width=400)


def test_a_name_that_is_wider_than_the_table_is_folded_not_cut():
    name = "method:" + ",".join(f"option{i}=value{i}" for i in range(10))
    text = printed([Column("method", "name"), Column("value")], [([name, "1.0"], "")])
    assert max(map(cell_len, text.splitlines())) <= NARROW
    first = "".join(line.split()[0] for line in text.splitlines() if line.strip())
    assert name in first and "1.0" in text
