"""mkdocs hook: adds generated pages, fills the navigation, keeps links to files outside docs/ working.

mkdocs.yml names generated sections as `reference/KIND/*`. Pages are readable on GitHub as they are, so their
links to files such as ../examples/own_model.py stay, and are turned here into copies inside the site.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tools.docs_site import api, commands, entries  # noqa: E402
from tools.docs_site.images import all_images  # noqa: E402

OUTSIDE = {  # pages of the repository's root -> where they are in the site
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CODE_OF_CONDUCT.md": "project/code_of_conduct.md",
    "SECURITY.md": "project/security.md",
    "src/steadygaze/assets/embedded.md": "project/embedded_model.md",
}
SHIM = "https://unpkg.com/iframe-worker/shim"  # what the offline plugin loads from the network
LOCAL_SHIM = "assets/search_from_disk.js"
EXTERNAL = re.compile(r"<(?:script|link|img)\b[^>]*\b(?:src|href)=[\"']?(https?://[^\"'\s>]+)")
BADGE = re.compile(r"^\[!\[[^\]]*\]\(https://[^)]*\)\]\([^)]*\)$")  # images of other servers
LOG = logging.getLogger("mkdocs.hooks.steadygaze")
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(#[^)\s]*)?(?=\))")
_generated: dict[str, str | bytes] = {}


def on_config(config: Any) -> Any:
    _generated.clear()
    _generated.update(generated_pages())
    config["nav"] = _filled(config["nav"])
    return config


def on_files(files: Any, config: Any) -> Any:
    for path, content in _generated.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links that leave docs/ lead to a copy in the site, which is added when it is linked."""
    home = {site: source for source, site in OUTSIDE.items()}.get(page.file.src_uri)
    here = PurePosixPath(home) if home else PurePosixPath("docs") / page.file.src_uri
    lines = [line for line in markdown.split("\n") if not BADGE.match(line)]
    fenced = False
    for i, line in enumerate(lines):
        fenced ^= line.lstrip().startswith("```")
        if not fenced:
            lines[i] = LINK.sub(lambda match: _link(match, here, page.file.src_uri, config, files), line)
    return "\n".join(lines)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Nothing is loaded from the network; `--strict` turns the warning into an error."""
    output = output.replace(SHIM, relpath(LOCAL_SHIM, str(PurePosixPath(page.url).parent)))
    for address in sorted(set(EXTERNAL.findall(output))):
        if not (config["site_url"] and address.startswith(config["site_url"])):
            LOG.warning("%s loads %s from the network", page.file.src_uri, address)
    return output


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    """The same for the page of a wrong address."""
    return output_content.replace(SHIM, LOCAL_SHIM)


def generated_pages() -> dict[str, str | bytes]:
    """Path in the site -> content, of everything that is not in docs/."""
    every = entries.all_entries()
    images = all_images(ROOT / ".cache" / "docs_site")
    drawn = {f"reference/images/{path}" for path in images}
    result: dict[str, str | bytes] = {entry.path: _without_missing(entry.body, drawn) for entry in every}
    for kind in entries.KINDS:
        result[f"reference/{kind}/index.md"] = entries.index(kind, every)
    result |= api.pages()
    result |= commands.pages()
    for source, path in OUTSIDE.items():
        result[path] = (ROOT / source).read_text(encoding="utf-8")
    result |= {f"reference/images/{path}": content for path, content in images.items()}
    result[LOCAL_SHIM] = Path(__file__).with_name("search_from_disk.js").read_bytes()
    result["assets/site.css"] = Path(__file__).with_name("site.css").read_bytes()
    return result


def _without_missing(body: str, drawn: set[str]) -> str:
    """The page without images that could not be drawn, such as of metrics for other tasks."""

    def keep(match: re.Match[str]) -> str:
        return match[0] if match[1] in drawn else ""

    return re.sub(r"!\[[^]]*\]\(\.\./\.\./(reference/images/[^)]+)\)(?:\n\n\*[^*\n]+\*)?", keep, body)


def _filled(nav: Any) -> Any:
    """The navigation with `FOLDER/*` replaced by the pages of that folder, the index first.

    In a list beside pages of that folder it stands for the others.
    """
    if isinstance(nav, list):
        named = str(nav)
        filled = [_filled(item) for item in nav]
        rest = [
            page for item in filled if isinstance(item, list) for page in item if f"'{page}'" not in named
        ]
        return [item for item in filled if not isinstance(item, list)] + rest
    if isinstance(nav, dict):
        return {title: _filled(item) for title, item in nav.items()}
    if isinstance(nav, str) and nav.endswith("/*"):
        folder = nav.removesuffix("*")
        pages = [path for path in _generated if path.startswith(folder) and path.endswith(".md")]
        pages += [
            path.relative_to(ROOT / "docs").as_posix()
            for path in sorted((ROOT / "docs" / folder).glob("*.md"))
        ]
        return sorted(pages, key=lambda path: not path.endswith("index.md"))
    return nav


def _link(match: re.Match[str], here: PurePosixPath, page: str, config: Any, files: Any) -> str:
    target, anchor = match[1], match[2] or ""
    if re.match(r"^[a-z]+:", target):
        return match[0]
    path = normpath(f"{here.parent}/{target}")
    if path in OUTSIDE:
        return relpath(OUTSIDE[path], str(PurePosixPath(page).parent)) + anchor
    if path.startswith("docs/"):
        inside = path.removeprefix("docs/")
        if (ROOT / path).is_dir():
            return _copied_listing(path, page, config, files)
        return relpath(inside, str(PurePosixPath(page).parent)) + anchor
    if (ROOT / path).is_file():
        copy = f"files/{path}" + (".txt" if not path.endswith((".png", ".svg")) else "")
        if files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, content=(ROOT / path).read_bytes()))
        return relpath(copy, str(PurePosixPath(page).parent))
    if (ROOT / path).is_dir():
        return _copied_listing(path, page, config, files)
    return match[0]


def _copied_listing(folder: str, page: str, config: Any, files: Any) -> str:
    """A link to a folder leads to a list of its files."""
    copy = f"files/{folder}/listing.txt"
    if files.get_file_from_path(copy) is None:
        names = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).iterdir())
        files.append(File.generated(config, copy, content="\n".join(names) + "\n"))
    return relpath(copy, str(PurePosixPath(page).parent))
