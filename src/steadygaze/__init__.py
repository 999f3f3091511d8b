"""steadygaze: explain vision transformers, verify the explanations, measure robustness and improve it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for editors and type checkers; a test compares it with what runs
    from steadygaze import errors as errors
    from steadygaze import faithfulness as faithfulness
    from steadygaze import methods as methods
    from steadygaze import models as models
    from steadygaze import modules as modules
    from steadygaze import robustness as robustness
    from steadygaze import training as training
    from steadygaze.errors import BadCheckpoint as BadCheckpoint
    from steadygaze.errors import BadImage as BadImage
    from steadygaze.errors import BadInput as BadInput
    from steadygaze.errors import BrokenMap as BrokenMap
    from steadygaze.errors import DamagedData as DamagedData
    from steadygaze.errors import DegenerateMap as DegenerateMap
    from steadygaze.errors import ImagesOutOfRange as ImagesOutOfRange
    from steadygaze.errors import MethodUnavailable as MethodUnavailable
    from steadygaze.errors import ModelChanged as ModelChanged
    from steadygaze.errors import PartialMap as PartialMap
    from steadygaze.errors import RowsNotWritten as RowsNotWritten
    from steadygaze.errors import SteadygazeError as SteadygazeError
    from steadygaze.errors import UnknownName as UnknownName
    from steadygaze.errors import UnsupportedModel as UnsupportedModel
    from steadygaze.explainer import explain as explain
    from steadygaze.faithfulness.metric import list_metrics as list_metrics
    from steadygaze.faithfulness.metric import register_metric as register_metric
    from steadygaze.heatmap import Attribution as Attribution
    from steadygaze.heatmap import Attributions as Attributions
    from steadygaze.loading.load import load_model as load_model
    from steadygaze.loading.loaded import LoadedModel as LoadedModel
    from steadygaze.loading.model_names import list_models as list_models
    from steadygaze.methods import list_methods as list_methods
    from steadygaze.methods import method as method
    from steadygaze.methods import register_method as register_method
    from steadygaze.progress import Progress as Progress
    from steadygaze.questions.ask import ask as ask
    from steadygaze.questions.detections import Detection as Detection
    from steadygaze.questions.regions import Region as Region
    from steadygaze.questions.text import zero_shot as zero_shot
    from steadygaze.runs.rows import Rows as Rows
    from steadygaze.runs.stress import list_suites as list_suites
    from steadygaze.runs.stress import register_suite as register_suite
    from steadygaze.runs.stress import stress as stress
    from steadygaze.runs.verify.api import verify as verify
    from steadygaze.training.loop import train as train
    from steadygaze.training.losses import list_losses as list_losses
    from steadygaze.training.losses import register_loss as register_loss
    from steadygaze.vit import ViT as ViT
    from steadygaze.vit import adapt as adapt
    from steadygaze.vit.adapter_registry import register_adapter as register_adapter

__version__ = "0.2.0"

_PACKAGES = ("errors", "faithfulness", "methods", "models", "modules", "robustness", "training")
_HOME = {  # public name -> the module that defines it, imported on first use: `import steadygaze` stays quick
    "adapt": "steadygaze.vit",
    "ViT": "steadygaze.vit",
    "load_model": "steadygaze.loading.load",
    "LoadedModel": "steadygaze.loading.loaded",
    "explain": "steadygaze.explainer",
    "ask": "steadygaze.questions.ask",
    "zero_shot": "steadygaze.questions.text",
    "Region": "steadygaze.questions.regions",
    "Detection": "steadygaze.questions.detections",
    "method": "steadygaze.methods",
    "Attribution": "steadygaze.heatmap",
    "Attributions": "steadygaze.heatmap",
    "verify": "steadygaze.runs.verify.api",
    "register_metric": "steadygaze.faithfulness.metric",
    "list_metrics": "steadygaze.faithfulness.metric",
    "stress": "steadygaze.runs.stress",
    "register_suite": "steadygaze.runs.stress",
    "list_suites": "steadygaze.runs.stress",
    "Rows": "steadygaze.runs.rows",
    "train": "steadygaze.training.loop",
    "register_loss": "steadygaze.training.losses",
    "list_losses": "steadygaze.training.losses",
    "Progress": "steadygaze.progress",
    "register_method": "steadygaze.methods",  # with all methods registered, so that no name is taken twice
    "register_adapter": "steadygaze.vit.adapter_registry",
    "list_methods": "steadygaze.methods",
    "list_models": "steadygaze.loading.model_names",
    "SteadygazeError": "steadygaze.errors",
    "UnsupportedModel": "steadygaze.errors",
    "MethodUnavailable": "steadygaze.errors",
    "UnknownName": "steadygaze.errors",
    "BadInput": "steadygaze.errors",
    "BadImage": "steadygaze.errors",
    "BadCheckpoint": "steadygaze.errors",
    "BrokenMap": "steadygaze.errors",
    "RowsNotWritten": "steadygaze.errors",
    "DegenerateMap": "steadygaze.errors",
    "PartialMap": "steadygaze.errors",
    "ModelChanged": "steadygaze.errors",
    "ImagesOutOfRange": "steadygaze.errors",
    "DamagedData": "steadygaze.errors",
}
__all__ = [*_HOME, *_PACKAGES, "__version__"]


if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return import_module(f"steadygaze.{name}")
        if name not in _HOME:
            raise AttributeError(f"module 'steadygaze' has no attribute {name!r}")
        return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
