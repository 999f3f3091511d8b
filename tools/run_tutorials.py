"""Execute the notebooks of docs/tutorials and store their outputs; needs no Jupyter.

    python tools/run_tutorials.py [NAME ...]

Each notebook runs in a namespace of its own, in its folder. As in Jupyter, the value of a cell's last
expression is its result. An image is stored as PNG alone: its HTML would hold the same image again.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "docs" / "tutorials"


def execute(notebook: dict[str, Any], folder: Path = FOLDER) -> dict[str, Any]:
    """The notebook with the outputs of its cells; a cell that raises an error ends it."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    with _inside(folder):
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                outputs = _run("".join(cell["source"]), namespace, count)
                cell = {**cell, "execution_count": count, "outputs": outputs}
            cells.append(cell)
    return {**notebook, "cells": cells}


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _run(source: str, namespace: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The outputs of one cell: what it printed, and the value of its last expression."""
    tree = ast.parse(source, f"<cell {count}>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        exec(compile(tree, f"<cell {count}>", "exec"), namespace)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"<cell {count}>", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        outputs.append(
            {"data": shown(value), "execution_count": count, "metadata": {}, "output_type": "execute_result"}
        )
    return outputs


def shown(value: Any) -> dict[str, Any]:
    """The forms in which a notebook keeps a value."""
    forms: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
    png = value._repr_png_() if hasattr(value, "_repr_png_") else None
    if png:
        return {"image/png": base64.b64encode(png).decode(), "text/plain": [f"<{type(value).__name__}>"]}
    if hasattr(value, "_repr_html_"):
        forms = {"text/html": value._repr_html_().splitlines(keepends=True), **forms}
    return forms


def read(path: Path) -> dict[str, Any]:
    """A notebook file."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return notebook


def main(names: list[str]) -> None:
    """Execute the named notebooks, or all, and write their outputs."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        began = time.process_time()
        done = execute(read(path))
        path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        size = path.stat().st_size / 1024
        print(f"{path.stem}: {time.process_time() - began:.1f} s of CPU, {size:.0f} KiB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
