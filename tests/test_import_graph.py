"""Dependencies point one way (DESIGN.md). Every import is counted, also those inside functions and for type checkers.

    errors, types <- registry, target, drawing <- heatmap, data <- models <- vit <- trace <- methods, aggregate <- explainer
    <- faithfulness, robustness, modules, train <- runs <- report <- app <- cli

Where the files stand that DESIGN.md's arrow does not name:
    target      which class and which quantity: tensors and errors, no model
    drawing     colours and pictures from arrays; heatmap is the result that draws itself with it. Neither knows a model
    data        files to tensors; knows no model either
    explainer   joins a view, traces, methods and aggregators into `explain`: above all of them, below all that use it
    models      architectures that timm lacks: code of models as timm's own, which views are made of
    modules     what is built into a model: upon views, beside the verbs, and for train to use. `load_model` rebuilds what a
                checkpoint names through vit.trained, by name
A part may import parts of lower levels and itself; parts of one level leave each other alone, except as ALSO says.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "steadygaze"
LEVELS = (
    ("errors", "types"),
    ("registry", "progress", "files", "seeding"),
    ("target", "drawing"),
    ("heatmap", "data"),
    ("models",),
    ("vit",),
    ("trace",),
    ("method_registry",),  # names views and rules in its types; imports neither when it runs
    ("method_names",),
    ("methods", "aggregate"),
    ("explainer",),
    ("modules",),
    ("loading",),
    ("faithfulness", "robustness", "training"),
    ("runs",),
    ("report",),
    ("app",),
    ("cli",),
    ("__main__",),
)
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
ALSO: set[tuple[str, str]] = set()
TORCH_ONLY = ("trace.intercept",)  # imports nothing of this package, so that every part may use it

MODEL_CODE = ("timm", "transformers", "torchvision", "torchattacks", "gradio")
NO_MODELS = (  # pictures and lists of classes; optimisers, schedules and averages
    "timm.data", "timm.optim", "timm.scheduler", "timm.utils", "torchvision.transforms", "torchvision.tv_tensors", "torchvision.io",
)  # fmt: skip
WHERE = {
    "timm": (
        "vit.adapters.timm",
        "vit.adapters.timm_hierarchical",
        "loading.build",
        "loading.embedded",
        "loading.model_names",
        "loading.timm_models",
        "models",
        "models.",
        "training.build",
    ),
    "transformers": ("vit.adapters.transformers", "loading.transformers_models", "models."),
    "torchvision": ("vit.adapters.torchvision", "loading.torchvision_models", "models."),
    "torchattacks": ("robustness.attacks",),
    "gradio": ("app", "app."),
}


def sources() -> dict[str, str]:
    """Module name below steadygaze -> its source."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name or "__init__"] = path.read_text(encoding="utf-8")
    return found


def imports(source: str, *, top_only: bool = False) -> Iterator[str]:
    """Dotted names that a source imports; `from a import b` gives a.b."""
    tree = ast.parse(source)
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where an arrow points"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def wrong_arrows(modules: dict[str, str]) -> list[str]:
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
            if any(f"{rest}.".startswith(f"{free}.") for free in TORCH_ONLY) and module not in TORCH_ONLY:
                continue
            if module in TORCH_ONLY:
                wrong.append(f"{module} -> {name}: it may import torch only")
                continue
            other = rest.partition(".")[0]
            if part not in LEVEL or other not in LEVEL:
                wrong.append(
                    f"{module} -> {name}: {part if part not in LEVEL else other or 'steadygaze'} has no place here"
                )
            elif other != part and LEVEL[other] >= LEVEL[part] and (part, other) not in ALSO:
                wrong.append(f"{module} -> {name}")
    return wrong


def misplaced_libraries(modules: dict[str, str]) -> list[str]:
    """Imports of model code (and of gradio) outside the files that may have them."""
    wrong = []
    for module, source in sorted(modules.items()):
        for name in imports(source):
            library = name.partition(".")[0]
            if library not in MODEL_CODE or name.startswith(NO_MODELS):
                continue
            if not any(module == w or (w.endswith(".") and module.startswith(w)) for w in WHERE[library]):
                wrong.append(f"{module} imports {name}")
    return wrong


def test_arrows_point_one_way() -> None:
    assert wrong_arrows(sources()) == []


def test_model_code_is_imported_only_by_adapters() -> None:
    assert misplaced_libraries(sources()) == []


def test_no_circles_between_modules() -> None:
    """Among the imports at the top of files, where a circle would depend on who comes first."""
    modules = sources()
    graph: dict[str, set[str]] = {}
    for module, source in modules.items():
        names = [
            n.removeprefix("steadygaze.")
            for n in imports(source, top_only=True)
            if n.startswith("steadygaze.")
        ]
        found = {n if n in modules else n.rpartition(".")[0] for n in names}
        graph[module] = {n for n in found if n in modules and n != module}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {error.args[1]}")
    assert len(order) == len(modules) > 50


def test_every_part_has_its_place() -> None:
    parts = {name.partition(".")[0] for name in sources()} - {"__init__"}
    assert parts <= set(LEVEL)
    assert {"vit", "trace", "methods", "aggregate", "explainer", "cli"} <= parts


@pytest.mark.parametrize(
    ("module", "source", "message"),
    [
        ("vit.view", "from steadygaze.trace.seam import Seam", "vit.view -> steadygaze.trace.seam.Seam"),
        ("vit.view", "def f():\n    from steadygaze import methods", "vit.view -> steadygaze.methods"),
        ("methods.cam", "import steadygaze.aggregate", "methods.cam -> steadygaze.aggregate"),
        (
            "training.loop",
            "from steadygaze.faithfulness import evaluate",
            "training.loop -> steadygaze.faithfulness.evaluate",
        ),
        ("runs.loop", "from steadygaze.cli import main", "runs.loop -> steadygaze.cli.main"),
        (
            "trace.intercept",
            "from steadygaze.errors import BadInput",
            "trace.intercept -> steadygaze.errors.BadInput: it may import torch only",
        ),
        ("heatmap", "import steadygaze as sg", "heatmap -> steadygaze: steadygaze has no place here"),
        (
            "new.part",
            "from steadygaze.vit import ViT",
            "new.part -> steadygaze.vit.ViT: new has no place here",
        ),
    ],
)
def test_a_turned_arrow_is_found(module: str, source: str, message: str) -> None:
    assert wrong_arrows({module: source}) == [message]


def test_a_misplaced_library_is_found() -> None:
    made_up = {
        "methods.cam": "def f():\n    import timm",
        "runs.loop": "import gradio as gr",
        "data.masks": "import timm.data",
    }
    assert misplaced_libraries(made_up) == ["methods.cam imports timm", "runs.loop imports gradio"]
