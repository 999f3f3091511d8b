"""`--help` of every command: at most 80 columns, nothing cut, options in groups, examples at the end."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.cli import app

ROOT = typer.main.get_command(app)


def commands(command=ROOT, path=()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def find(path):
    command = ROOT
    for name in path:
        command = command.commands[name]
    return command


def help_of(path, flag="-h"):
    result = CliRunner().invoke(app, [*path, flag], env={"COLUMNS": "80"}, prog_name="steadygaze")
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("path", list(commands()), ids=" ".join)
def test_help_is_complete_and_fits_80_columns(path):
    text = help_of(path)
    assert text == help_of(path, "--help")
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text and "<bool>" not in text and "None" not in text
    words = " ".join(text.split())
    for param in find(path).params:
        if not getattr(param, "hidden", False):
            assert param.help, f"{param.name} has no help"
            assert " ".join(param.help.split()) in words, "a text is shown whole"
            flag = param.opts[0]
            if param.param_type_name == "option":
                assert re.search(rf"(^|[ ,]){re.escape(flag)}\b", text, re.MULTILINE)


@pytest.mark.parametrize("path", [p for p in commands() if not hasattr(find(p), "commands")], ids=" ".join)
def test_examples_end_the_help_and_use_options_that_exist(path):
    text = help_of(path)
    examples = text.partition("\n  Examples:\n")[2]
    assert examples, "every command has examples, and they come last"
    lines = examples.replace("\\\n", "").strip().splitlines()
    assert all(line.split()[0] == "steadygaze" for line in lines)
    for words in (line.split() for line in lines):
        command = find(words[1:3] if words[1] in ("diffmask", "shapley") else words[1:2])
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        used = {word for word in words if re.fullmatch(r"-[a-zA-Z]|--[a-z-]+", word)}
        assert used <= known


def test_a_short_option_means_the_same_everywhere():
    meanings: dict[str, set[str]] = {}
    for path in commands():
        for param in find(path).params:
            for option in param.opts:
                if re.fullmatch(r"-[^-]", option):
                    meanings.setdefault(option, set()).add(
                        param.opts[0].removesuffix("s")
                    )  # --method of explain
    assert {"-m", "-d", "-o", "-n", "-b", "-t", "-s", "-M", "-c", "-w"} <= meanings.keys()
    assert {option: names for option, names in meanings.items() if len(names) > 1} == {}


def test_options_are_listed_by_group():
    text = help_of(["verify"])
    titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert titles == [
        "Model",
        "Text and class names",
        "Data",
        "Methods and metrics",
        "Output",
        "Execution",
        "Options",
    ]
    assert re.search(r"^  --dry-run  +Check", text, re.MULTILINE), "a flag has no value"


def test_a_short_option_is_accepted():
    result = CliRunner().invoke(app, ["verify", "-m", "embedded", "-d", "missing", "-o", "out"])
    assert result.exit_code == 2 and "missing" in result.output


CHECKOUT = Path(__file__).parents[2]
FOLDERS = (CHECKOUT, CHECKOUT / "docs", CHECKOUT / "docs" / "howto")
DOCUMENTS = [document for folder in FOLDERS for document in sorted(folder.glob("*.md"))]
DOCUMENTS.remove(CHECKOUT / "CHANGELOG.md")  # it names what is gone
OPTION = r"(?<![\w-])--[a-z][\w-]*\w"
ACCELERATE = {"--multi_gpu", "--num_processes"}


def options_of(path):
    parameters = find(path).params
    return {"--debug", "--help"}.union(*({*p.opts, *p.secondary_opts} for p in parameters))


def test_documents_use_options_that_exist():
    known = ACCELERATE.union({"--version", "--plugin"}, *(options_of(path) for path in commands()))
    for script in sorted((CHECKOUT / "benchmarks").glob("*.py")):
        known |= set(re.findall(OPTION, script.read_text(encoding="utf-8")))
    wrong = set()
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8").replace("\\\n", " ")
        wrong |= {(document.name, word) for word in re.findall(OPTION, text) if word not in known}
        for name, words in re.findall(r"\bsteadygaze ([a-z-]+)( [^`\n|;]*)", text):
            if name in ROOT.commands and not hasattr(find([name]), "commands") and name != "stress":
                used = set(re.findall(OPTION, words)) - options_of([name]) - {"--plugin"}
                wrong |= {(document.name, f"{name} {word}") for word in used}
    assert not wrong


def test_the_help_of_stress_lists_every_suite():
    text = " ".join(help_of(["stress"]).split())
    listed = text.partition("--suites SUITES")[2].partition("[required]")[0]
    assert not [info.name for info in sg.list_suites() if not re.search(rf"\b{info.name}\b", listed)]


@pytest.mark.parametrize("info", sg.list_losses(), ids=lambda info: info.name)
def test_no_summary_of_a_loss_is_cut(info):
    assert not info.summary.endswith("al.") and info.summary.count("(") == info.summary.count(")")


def test_a_summary_of_two_lines_is_whole():
    from steadygaze.training.losses.registry import LOSSES, Loss

    @sg.register_loss("two_lines")
    class TwoLines(Loss):
        """Penalizes what lies outside of the object, as Ross et al.
        (2017) do."""

    try:
        (info,) = (info for info in sg.list_losses() if info.name == "two_lines")
        assert info.summary.endswith("as Ross et al. (2017) do.")
    finally:
        LOSSES.remove("two_lines")
