"""Files for contributors and CI: they parse, name what exists, and agree with pyproject.toml."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import steadygaze as sg

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
YAML_FILES = [*WORKFLOWS, *sorted((ROOT / ".github").rglob("ISSUE_TEMPLATE/*.yml"))]
YAML_FILES += [ROOT / ".github" / "dependabot.yml", ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff"]

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="an unpacked release has no .github folder")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def lowest_of(requirement: str) -> tuple[str, str]:
    """(name, lower bound) of a requirement such as "torch>=2.6" """
    match = re.match(r"^([\w-]+)(?:\[\w+\])?>=([\d.]+)", requirement)
    assert match, f"expected a lower bound, got {requirement!r}"
    return match[1], match[2]


@pytest.mark.parametrize("path", YAML_FILES, ids=lambda path: path.name)
def test_yaml_files_parse(path: Path) -> None:
    assert read(path)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(path: Path) -> None:
    workflow = read(path)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"]
        chosen = job.get("strategy", {}).get("matrix", {}).get("target", [])
        commands = " \n".join(step.get("run", "") for step in job["steps"])
        called = {*re.findall(r"\bmake ([\w-]+)", commands), *chosen}
        assert called <= targets, called - targets


def test_the_matrix_of_systems_and_versions() -> None:
    matrix = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    assert {name.split("-")[0] for name in matrix["os"]} == {"ubuntu", "macos", "windows"}
    assert matrix["python"] == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == ">=" + matrix["python"][0]


def test_releases_publish_without_a_password() -> None:
    publish = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert "secrets." not in (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")


def test_the_lowest_versions_are_those_of_pyproject() -> None:
    lines = (ROOT / "constraints" / "lowest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    bounds = dict(lowest_of(requirement) for group in groups for requirement in group)
    assert {name: bounds.get(name) for name in pinned} == pinned
    extras = [PROJECT["optional-dependencies"][name] for name in ("hf", "clip", "app", "data")]
    tested = [requirement for group in (PROJECT["dependencies"], *extras) for requirement in group]
    assert {lowest_of(requirement)[0] for requirement in tested} <= set(pinned)


def test_the_citation_has_the_version_and_the_papers() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert citation["version"] == sg.__version__
    titles = " ".join(reference["title"] for reference in citation["references"])
    for paper in ("SkipPLUS", "Relevance Maps", "DiffMask", "Token Attention", "Uniform Attention"):
        assert paper in titles


def test_the_changelog_has_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (\S+)", changelog, flags=re.MULTILINE)
    assert headings[0] == sg.__version__


def test_links_of_the_description_on_pypi_are_absolute_and_lead_to_files() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert [fragment["path"] for fragment in hook["fragments"]] == ["README.md"]
    for substitution in hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 80 and not [link for link in links if not link.startswith(("https://", "#"))]
    source = PROJECT["urls"]["Source"]
    raw = source.replace("github.com", "raw.githubusercontent.com")
    files = [
        link.removeprefix(f"{home}/main/")
        for home in (raw, f"{source}/blob")
        for link in links
        if home in link
    ]
    assert len(files) > 60 and not [file for file in files if not (ROOT / file.partition("#")[0]).exists()]


@pytest.mark.parametrize("path", [ROOT / "CONTRIBUTING.md", ROOT / "README.md"], ids=lambda path: path.name)
def test_the_paths_that_a_page_names_exist(path: Path) -> None:
    """In code, as links, and as places inside src/steadygaze; patterns and names in <> are not files."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    quoted = re.findall(r"`((?:[\w.-]+/)+[\w.-]*|[\w-]+\.py)(?:::\w+)?`", text)
    linked = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?://|#)([^)\s]+)\)", text)]
    commands = re.findall(r"(?:python|pytest) ((?:[\w-]+/)+[\w.-]+)", path.read_text(encoding="utf-8"))
    made = {"site/"}
    homes = [ROOT, ROOT / "src" / "steadygaze", ROOT / "tests" / "methods"]
    named = {*quoted, *linked, *commands} - made
    assert len(named) > 10
    assert not [name for name in named if not any((home / name).exists() for home in homes)]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_and_keep_no_credentials(path: Path) -> None:
    steps = [step for job in read(path)["jobs"].values() for step in job.get("steps", [])]
    for step in steps:
        if "uses" in step:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]), step
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False
