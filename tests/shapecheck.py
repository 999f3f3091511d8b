"""Runtime checks of annotations under pytest, by beartype; an int is accepted for a float, as in mypy.

In the packages of `EVERYTHING` all annotations are checked. Elsewhere only those of arrays are, except in the
functions of `SELF_CHECKING`: these are public and validate their arguments themselves, as other
tests show.
"""

from collections.abc import Callable
from typing import Any, get_args

from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray

EVERYTHING = ("trace", "methods", "results")
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
    """`function` with checks of its annotations."""
    if f"{function.__module__}.{function.__qualname__}" in SELF_CHECKING:
        return function
    part = function.__module__.split(".")[1]
    if part not in EVERYTHING:
        hints = function.__annotations__.items()
        function.__annotations__ = {name: hint for name, hint in hints if names_array(hint)}
    return _beartype(function)


def names_array(hint: Any) -> bool:
    """Whether an annotation says anything about the shape of an array.

    >>> from jaxtyping import Float; from torch import Tensor
    >>> names_array(dict[str, Float[Tensor, "b n"]]), names_array(int | None)
    (True, False)
    """
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    return any(names_array(argument) for argument in get_args(hint))
