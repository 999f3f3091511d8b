"""Dependencies point one way, between rooms and inside them. Every import is counted: at the top of a file,
inside a function, for type checkers only, and by the name in a string.

    errors <- registry, progress, files, seeding, quantity, notebook, untrusted <- target
    <- results, data <- models <- vit <- questions <- modules <- loading <- trace <- methods <- look
    <- faithfulness, robustness, training <- losses, callbacks <- runs <- report <- app <- cli

A room may import itself and rooms of lower levels. Rooms of one level do not import one another, and the
modules of a room do not import one another in a circle.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "steadygaze"
LEVELS = (
    ("errors",),
    ("registry", "progress", "files", "seeding", "quantity", "notebook", "untrusted"),
    ("target",),
    ("results", "data"),
    ("models",),
    ("vit",),
    ("questions",),
    ("modules",),
    ("loading",),
    ("trace",),
    ("methods",),
    ("look",),
    ("faithfulness", "robustness", "training"),
    ("losses", "callbacks"),
    ("runs",),
    ("report",),
    ("app",),
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}

MODEL_ROOMS = ("vit.adapters", "models", "loading")  # the only rooms that know the model code of libraries
ALLOWED = {
    "timm": MODEL_ROOMS,
    "transformers": MODEL_ROOMS,
    "torchvision": MODEL_ROOMS,
    "open_clip": MODEL_ROOMS,
    "gradio": ("app",),
}
NO_MODEL_CODE = (  # transforms and lists of classes; optimizers, schedules and averages; tokenizers
    "timm.data",
    "timm.optim",
    "timm.scheduler",
    "timm.utils",
    "torchvision.transforms",
    "torchvision.tv_tensors",
    "torchvision.io",
    "transformers.AutoProcessor",
    "transformers.AutoTokenizer",
    "transformers.dynamic_module_utils",
    "open_clip.tokenizer",
)


@cache
def sources() -> dict[str, str]:
    """Module name below steadygaze -> its source."""
    modules = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name or "__init__"] = path.read_text(encoding="utf-8")
    return modules


@cache
def imports(source: str, *, by_string: bool = True) -> tuple[str, ...]:
    """Dotted names that a source imports; `from a import b` gives a.b."""
    return tuple(imports_of(nodes(source), by_string))


@cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imports_of(nodes: list[ast.AST], by_string: bool) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif by_string and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from imported_by_string(node.value)
        elif isinstance(node, ast.Call) and called(node.func) in ("import_module", "__import__"):
            # other packages; names of this package are found as strings, wherever they stand
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from (name for name in names if isinstance(name, str) and not name.startswith("steadygaze"))


def called(function: ast.expr) -> str:
    """The last name of what is called.

    >>> called(ast.parse("importlib.import_module('os')").body[0].value.func)
    'import_module'
    """
    return getattr(function, "attr", getattr(function, "id", ""))


def imported_by_string(text: str) -> list[str]:
    """A string that names a module of this package, or begins such a name, counts as an import of it.

    >>> imported_by_string("steadygaze.training.loop"), imported_by_string("steadygaze.robustness.")
    (['steadygaze.training.loop'], ['steadygaze.robustness'])
    """
    named = re.fullmatch(r"steadygaze\.(\w+)(\.\w+)*\.?", text)
    return [text.rstrip(".")] if named and named[1] in LEVEL else []


def wrong_imports(modules: dict[str, str]) -> list[str]:
    """Imports of a part of the same or a higher level."""
    wrong = []
    for module, source in sorted(modules.items()):
        part = module.partition(".")[0]
        if part == "__init__":
            continue  # the public names, all lazy
        for name in imports(source):
            root, _, rest = name.partition(".")
            if root != "steadygaze" or rest == "__version__":
                continue
            other = rest.partition(".")[0]
            unknown = part if part not in LEVEL else other if other not in LEVEL else None
            if unknown is not None:
                wrong.append(f"{module} -> {name}: {unknown or 'steadygaze'} has no level")
            elif other != part and LEVEL[other] >= LEVEL[part]:
                wrong.append(f"{module} -> {name}")
    return wrong


def misplaced_libraries(modules: dict[str, str]) -> list[str]:
    """Imports of model code, and of gradio, outside the rooms that may have them."""
    wrong = []
    for module, source in sorted(modules.items()):
        for name in imports(source):
            library = name.partition(".")[0]
            if library not in ALLOWED or f"{name}.".startswith(tuple(f"{free}." for free in NO_MODEL_CODE)):
                continue
            if not any(f"{module}.".startswith(f"{room}.") for room in ALLOWED[library]):
                wrong.append(f"{module} imports {name}")
    return wrong


def test_dependencies_point_one_way() -> None:
    assert wrong_imports(sources()) == []


def test_model_code_stays_in_its_rooms() -> None:
    assert misplaced_libraries(sources()) == []


def import_graph(modules: dict[str, str]) -> dict[str, set[str]]:
    """Module -> the modules of this package that it imports. What a registry loads when it is read
    does not count: those modules register themselves with it, so they import it."""
    graph: dict[str, set[str]] = {}
    for module, source in modules.items():
        names = [
            name.removeprefix("steadygaze.")
            for name in imports(source, by_string=False)
            if name.startswith("steadygaze.")
        ]
        imported = {name if name in modules else name.rpartition(".")[0] for name in names}
        graph[module] = {name for name in imported if name in modules and name != module}
    return graph


def test_no_import_cycles() -> None:
    modules = sources()
    try:
        order = list(TopologicalSorter(import_graph(modules)).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' <- '.join(error.args[1])}")
    assert len(order) == len(modules) > 50


def test_every_part_has_a_level() -> None:
    parts = {name.partition(".")[0] for name in sources()} - {"__init__"}
    assert parts <= set(LEVEL)
    assert {"vit", "trace", "methods", "results", "runs", "cli"} <= parts


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("vit.view", "from steadygaze.trace.seam import Seam", "vit.view -> steadygaze.trace.seam.Seam"),
        ("vit.view", "def f():\n    from steadygaze import methods", "vit.view -> steadygaze.methods"),
        (
            "training.loop",
            "from steadygaze.faithfulness import evaluate",
            "training.loop -> steadygaze.faithfulness.evaluate",
        ),
        ("runs.loop", "from steadygaze.cli import main", "runs.loop -> steadygaze.cli.main"),
        ("runs.loop", 'import_module("steadygaze.cli")', "runs.loop -> steadygaze.cli"),
        ("vit.view", '__import__("steadygaze.modules")', "vit.view -> steadygaze.modules"),
        (
            "vit.view",
            'HOME = {"insert": "steadygaze.modules.insert"}',
            "vit.view -> steadygaze.modules.insert",
        ),
        ("vit.view", 'import_module(f"steadygaze.modules.{name}")', "vit.view -> steadygaze.modules"),
        (
            "vit.view",
            "if TYPE_CHECKING:\n    from steadygaze.modules import base",
            "vit.view -> steadygaze.modules.base",
        ),
        ("results", "import steadygaze as sg", "results -> steadygaze: steadygaze has no level"),
        ("new.part", "from steadygaze.vit import ViT", "new.part -> steadygaze.vit.ViT: new has no level"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str, message: str) -> None:
    assert wrong_imports({module: source}) == [message]


def test_a_right_import_is_left_alone() -> None:
    modules = {
        "vit.view": "from steadygaze.vit.intercept import Interception",
        "runs.loop": "from steadygaze.faithfulness import evaluate",
        "registry": 'GROUP = "steadygaze.plugins"',
    }
    assert wrong_imports(modules) == []


def test_a_misplaced_library_is_found() -> None:
    modules = {
        "methods.cam": "def f():\n    import timm",
        "methods.gradient": 'importlib.import_module("open_clip")',
        "runs.loop": "import gradio as gr",
        "data.masks": "import timm.data",
        "vit.adapters.timm": "import timm.models",
    }
    assert misplaced_libraries(modules) == [
        "methods.cam imports timm",
        "methods.gradient imports open_clip",
        "runs.loop imports gradio",
    ]
