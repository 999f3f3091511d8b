"""docs/equations.md and the source agree on citations, anchors, links, module paths and variable names."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "steadygaze"
DOCUMENT = (ROOT / "docs" / "equations.md").read_text(encoding="utf-8")
ANCHORS = re.findall(r'<a id="([^"]+)"></a>', DOCUMENT)
CITATION = re.compile(r"equations\.md#([\w-]+)")
CODE = ("src", "tests", "benchmarks", "tools", "examples")


def tracked(*folders: str) -> list[Path]:
    """Files under version control; every file of the folders where there is no git (an unpacked release)."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *folders]
    try:
        listing = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        roots = [ROOT / folder for folder in folders or (*CODE, "docs")]
        return [path for root in roots for path in root.rglob("*") if path.is_file()]
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def texts(
    *folders: str, suffixes: tuple[str, ...] = (".py", ".md", ".toml", ".yml", ".yaml")
) -> dict[Path, str]:
    found = (path for path in tracked(*folders) if path.suffix in suffixes)
    return {path: path.read_text(encoding="utf-8") for path in found}


def sections() -> dict[str, str]:
    """Anchor -> text of its section, up to the next anchor that begins a line."""
    parts = re.split(r'^<a id="([^"]+)"></a>$', DOCUMENT, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def modules(section: str) -> list[str]:
    """Module paths that a section names as its implementation."""
    return re.findall(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)`", section)


def names_in_code(section: str) -> set[str]:
    """Names in the last column of the section's symbol table."""
    rows = re.findall(r"^\|(.*)\|$", section, flags=re.MULTILINE)
    columns = [row.rsplit("|", 1)[-1] for row in rows]
    return {name for column in columns for name in re.findall(r"`(\w+)`", column)}


def test_anchors_are_unique() -> None:
    repeated = sorted({anchor for anchor in ANCHORS if ANCHORS.count(anchor) > 1})
    assert not repeated


def test_every_citation_in_the_code_has_its_anchor() -> None:
    cited = {
        (path.relative_to(ROOT).as_posix(), anchor)
        for path, text in texts(*CODE).items()
        for anchor in CITATION.findall(text)
    }
    assert len({path for path, _ in cited if path.startswith("src/")}) >= 20
    unknown = sorted(citation for citation in cited if citation[1] not in ANCHORS)
    assert not unknown


def test_every_link_to_an_anchor_leads_somewhere() -> None:
    links = set(re.findall(r"\]\(#([^)]+)\)", DOCUMENT))
    links |= {anchor for text in texts("docs", "README.md").values() for anchor in CITATION.findall(text)}
    assert not sorted(links - set(ANCHORS))


def test_every_reference_of_the_bibliography_is_cited() -> None:
    references = {anchor for anchor in ANCHORS if anchor.startswith("ref-")}
    assert not sorted(references - set(re.findall(r"\]\(#([^)]+)\)", DOCUMENT)))


def test_no_citation_of_documents_outside_the_repository() -> None:
    word = "NUMER" + "ICS"
    assert not [path.relative_to(ROOT).as_posix() for path, text in texts().items() if word in text]


@pytest.mark.parametrize("anchor", [anchor for anchor, text in sections().items() if modules(text)])
def test_section_names_modules_and_variables_that_exist(anchor: str) -> None:
    section = sections()[anchor]
    paths = [PACKAGE / name for name in modules(section)]
    assert not [path.relative_to(PACKAGE).as_posix() for path in paths if not path.is_file()]
    source = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    assert not sorted(name for name in names_in_code(section) if not re.search(rf"\b{name}\b", source))
