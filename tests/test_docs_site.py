"""The site: its navigation is complete, everything registered has a page, and links lead somewhere."""

import doctest
import inspect
import re
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from PIL import Image

import steadygaze as sg
from steadygaze.training.recipe_files import shipped_recipes
from tools.docs_site import api, commands
from tools.docs_site.docstrings import to_markdown
from tools.docs_site.entries import TRAINED, UNDRAWN, Entry, all_entries
from tools.docs_site.equations import WITHOUT
from tools.docs_site.examples import EXAMPLES, SETUP
from tools.method_sheet import FOLDER, SHEET

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
ROOT_PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md")
PAGES = sorted([*DOCS.rglob("*.md"), *(ROOT / name for name in ROOT_PAGES)])


class _Loader(yaml.SafeLoader):
    """mkdocs.yml names a Python function, which a test of its text need not call."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: None)


def nav_pages() -> list[str]:
    def leaves(item: Any) -> list[str]:
        if isinstance(item, str):
            return [item]
        return [leaf for part in (item.values() if isinstance(item, dict) else item) for leaf in leaves(part)]

    settings = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    pages = leaves(settings["nav"])
    evidence = [path.relative_to(DOCS).as_posix() for path in (DOCS / "evidence").glob("*.md")]
    return [*pages, *evidence] if "evidence/*" in pages else pages


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return all_entries()


def test_the_navigation_names_pages_that_exist() -> None:
    written = [page for page in nav_pages() if not page.startswith(("reference/", "project/", "evidence/*"))]
    assert not [page for page in written if not (DOCS / page).is_file()]


def test_every_page_is_in_the_navigation() -> None:
    pages = {
        path.relative_to(DOCS).as_posix() for kind in ("md", "ipynb") for path in DOCS.rglob(f"*.{kind}")
    }
    assert not sorted(page for page in pages - set(nav_pages()) if ".ipynb_checkpoints" not in page)


def test_everything_registered_has_a_page(entries: list[Entry]) -> None:
    pages = {(entry.kind, entry.name) for entry in entries}
    listed = {("methods", info.name) for info in sg.list_methods()}
    listed |= {("metrics", info.name) for info in sg.list_metrics()}
    listed |= {("suites", info.name) for info in sg.list_suites()}
    listed |= {("losses", info.name) for info in sg.list_losses()}
    listed |= {("recipes", name) for name in shipped_recipes()}
    assert pages == listed
    assert {f"reference/{kind}/*" for kind, _ in pages} <= set(nav_pages())


def test_a_page_has_a_use_and_an_equation(entries: list[Entry]) -> None:
    for entry in entries:
        assert entry.body.startswith(f"# `{entry.name}`") and "## Use" in entry.body
    without = {entry.name for entry in entries if entry.kind != "recipes" and "## Equation" not in entry.body}
    assert without == set(WITHOUT)


def test_the_committed_images_are_of_the_methods_that_exist(entries: list[Entry]) -> None:
    """`python tools/method_sheet.py --methods NAME` draws a new or renamed one."""
    drawn = {path.stem for path in FOLDER.glob("*.jpg")} - {"photographs"}
    assert drawn == {info.name for info in sg.list_methods()} - {*TRAINED, *UNDRAWN}
    with Image.open(SHEET) as sheet:
        assert set(sheet.info["comment"].decode().split()) == drawn
    assert sum(path.stat().st_size for path in (SHEET, *FOLDER.iterdir())) < 2_000_000
    for page in (entry for entry in entries if entry.kind == "methods" and entry.name not in UNDRAWN):
        shown = re.findall(r"!\[[^]]*\]\(\.\./\.\./([^)]+)\)", page.body)
        assert shown and all((DOCS / path).is_file() for path in shown), page.name


def test_every_public_name_and_command_has_a_page() -> None:
    names = [name for _, _, names in api.groups().values() for name in names]
    assert len(names) == len(set(names)) and {*names, *api.PACKAGES, "__version__"} == set(sg.__all__)
    expected = {f"reference/commands/{name.replace(' ', '-')}.md" for name, _ in commands.commands()}
    pages = commands.pages()
    assert expected < set(pages)
    for name, command in commands.commands():
        assert (
            command.examples
            and command.examples[0] in pages[f"reference/commands/{name.replace(' ', '-')}.md"]
        )


def test_every_public_module_has_a_page_of_the_interface() -> None:
    pages = api.pages()
    modules = {name for name in sg.__all__ if inspect.ismodule(getattr(sg, name))}
    assert {f"reference/api/{name}.md" for name in modules} <= set(pages)
    assert "others" not in api.groups(), f"sort these into a group of PAGES: {api.groups()['others'][2]}"
    for text in pages.values():
        written = [line.removeprefix("::: ") for line in text.splitlines() if line.startswith("::: ")]
        for home, _, name in (path.rpartition(".") for path in written):
            assert hasattr(import_module(home), name), f"{home}.{name}"


def test_nothing_is_loaded_from_the_network(entries: list[Entry]) -> None:
    """Pages open offline: images are in the repository. README.md may have badges, which the site drops."""
    written = [path for path in (*PAGES, *DOCS.rglob("*.ipynb")) if path.name != "README.md"]
    texts = {path.name: path.read_text(encoding="utf-8") for path in written}
    texts |= {entry.path: entry.body for entry in entries} | api.pages()
    external = re.compile(
        r"!\[[^]]*\]\(\s*<?(?:https?:)?//|<(?:img|script|iframe)\b[^>]*\bsrc=\\?[\"']?(?:https?:)?//"
    )
    assert not [name for name, text in texts.items() if external.search(text)]


def test_functions_and_classes_have_an_example() -> None:
    for page, (_, _, names) in api.PAGES.items():
        for name in names:
            text = getattr(sg, name).__doc__ or ""
            shown = name in EXAMPLES or ">>> " in text or "@sg.register" in text
            assert shown or page == "exceptions", name


def test_the_examples_run() -> None:
    text = SETUP + "".join(EXAMPLES[name] for name in EXAMPLES)
    test = doctest.DocTestParser().get_doctest(text, {}, "examples", "tools/docs_site/examples.py", 0)
    result = doctest.DocTestRunner().run(test)
    assert result.attempted > 20 and result.failed == 0


def test_docstrings_become_markdown() -> None:
    text = (
        "Head.\n\nArgs:\n    images: (B, 3, H, W)\n        normalized\n    k: number\n\n"
        "Returns:\n    A map.\n\nExamples:\n    >>> f(1)\n    2"
    )
    arguments = "- `images`: (B, 3, H, W) normalized\n- `k`: number"
    expected = f"Head.\n\n{arguments}\n\nReturns: A map.\n\n```pycon\n>>> f(1)\n2\n```"
    assert to_markdown(text) == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    """On GitHub; `mkdocs build --strict` checks them again in the site."""
    broken = []
    for target, anchor in links(page):
        path = (page.parent / unquote(target)).resolve() if target else page
        if not path.exists():
            broken.append(target)
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            broken.append(f"{target}#{anchor}")
    assert not broken


def links(page: Path) -> list[tuple[str, str]]:
    """(file, anchor) of every relative link outside of code."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))
    found += re.findall(r'<img src="([^"]+)"', text)
    return [
        (link.partition("#")[0], link.partition("#")[2]) for link in found if not re.match(r"^\w+:", link)
    ]


@lru_cache
def anchors(page: Path) -> set[str]:
    """Anchors that GitHub gives the page."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    result = set(re.findall(r'<a id="([^"]+)"', text))
    for heading in re.findall(r"^#+ +(.*?)\s*$", text, flags=re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        repeated = sum(
            one == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", one) is not None for one in result
        )
        result.add(f"{slug}-{repeated}" if slug in result else slug)
    return result
