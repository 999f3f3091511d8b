"""Arrays are checked against their annotations while the tests run, by jaxtyping and beartype.

Only functions and data classes whose annotations name an array are checked: jaxtyping's own hook wraps all
others, and functions inside functions each time they are made, which took a quarter of the time of all tests.
Functions of `SELF_CHECKING` are public and validate their arguments themselves, as other tests show.
"""

import ast
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType
from typing import Any, get_args

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, jaxtyped

DEFAULT_ROOMS = ("vit", "trace", "methods", "faithfulness")
ALL_ROOMS = (
    *DEFAULT_ROOMS,
    "results",
    "robustness",
    "modules",
    "training",
    "runs",
    "data",
    "loading",
    "questions",
)
SELF_CHECKING = (
    "steadygaze.data.preprocess.Preprocess.normalize",
    "steadygaze.data.preprocess.Preprocess.undo",
    "steadygaze.faithfulness.evaluate.evaluate",
    "steadygaze.faithfulness.inputs.Batch.__init__",
    "steadygaze.robustness.attacks._attack",
    "steadygaze.robustness.attacks.fgsm",
    "steadygaze.robustness.attacks.pgd",
    "steadygaze.robustness.attacks.pixels_of",
    "steadygaze.robustness.attention.attention_figure",
    "steadygaze.robustness.attention.attention_stability",
    "steadygaze.robustness.calibration.confidences",
    "steadygaze.robustness.calibration.reliability",
    "steadygaze.robustness.neighbors.features",
    "steadygaze.robustness.neighbors.knn_predict",
    "steadygaze.robustness.synthetic.remove_background",
    "steadygaze.training.losses.adl.adl",
    "steadygaze.training.losses.input_gradient.input_gradient_pass",
    "steadygaze.training.losses.relevance.relevance_pass",
)
_beartype = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with checks of its annotations of arrays; an int is accepted for a float, as in mypy."""
    if f"{function.__module__}.{function.__qualname__}" in SELF_CHECKING:
        return function
    hints = function.__annotations__.items()
    function.__annotations__ = {name: hint for name, hint in hints if names_array(hint)}
    return _beartype(function)


checked = jaxtyped(typechecker=check)


def names_array(hint: Any) -> bool:
    """Whether an annotation says anything about the shape of an array.

    >>> from jaxtyping import Float; from torch import Tensor
    >>> names_array(dict[str, Float[Tensor, "b n"]]), names_array(int | None)
    (True, False)
    """
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(names_array(argument) for argument in get_args(hint))


def install(rooms: Sequence[str]) -> None:
    """Modules of these rooms that are imported from now on are checked."""
    sys.meta_path.insert(0, _Finder(rooms))


class _Finder(MetaPathFinder):
    def __init__(self, rooms: Sequence[str]) -> None:
        self.rooms = tuple(rooms)

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != "steadygaze" or rest.partition(".")[0] not in self.rooms:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        """The code with `checked` at each function and data class that names an array; never from a cache."""
        tree = ast.parse(self.get_data(self.path), self.path)
        found = [node for node in _outer(tree) if any(map(_names_shape, _annotations(node)))]
        for node in found:
            at = 0 if isinstance(node, ast.ClassDef) else len(node.decorator_list)
            decorator = ast.copy_location(ast.Name("__checked__", ast.Load()), node)
            node.decorator_list.insert(at, decorator)
        if found:
            line = ast.parse("from shapecheck import checked as __checked__").body[0]
            future = [isinstance(n, ast.ImportFrom) and n.module == "__future__" for n in tree.body]
            tree.body.insert(future.index(True) + 1 if True in future else 1, line)
        return compile(tree, self.path, "exec", dont_inherit=True)


def _outer(tree: ast.Module | ast.ClassDef) -> list[Any]:
    """Functions and classes of a module and of its classes; not those inside functions."""
    nodes: list[Any] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            nodes.append(node)
        elif isinstance(node, ast.ClassDef):
            nodes += [node, *_outer(node)]
    return nodes


def _annotations(node: ast.FunctionDef | ast.ClassDef) -> list[ast.expr]:
    if isinstance(node, ast.ClassDef):
        return [field.annotation for field in node.body if isinstance(field, ast.AnnAssign)]
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    hints = [*(argument.annotation for argument in arguments), node.returns]
    return [hint for hint in hints if hint is not None]


def _names_shape(hint: ast.expr) -> bool:
    """Whether an annotation may name an array: `Float[Tensor, "b n"]` has a string in brackets."""
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Tuple)
        and isinstance(node.slice.elts[-1], ast.Constant)
        and isinstance(node.slice.elts[-1].value, str)
        for node in ast.walk(hint)
    )
