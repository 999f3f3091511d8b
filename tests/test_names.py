"""The public names: each resolves, none is missing, and the command line has its verbs."""

import importlib
import inspect
import pkgutil

import pytest
import typer.main

import steadygaze as sg
from steadygaze.cli import app

PUBLIC = (
    "adapt ViT load_model LoadedModel Preprocess explain ask Region Detection zero_shot method "
    "Attribution Attributions RemovalCheck calibrate Calibration attention Attention features Features "
    "lens Lens Outliers outliers find_registers component feature_norm similar_to "
    "verify stress train Rows Progress "
    "register_method register_adapter register_metric register_suite register_loss "
    "list_methods list_models list_adapters list_metrics list_suites list_losses "
    "SteadygazeError UnsupportedModelError MethodUnavailableError UnknownNameError InputError ImageError "
    "CheckpointError "
    "BrokenMapError RowsNotWrittenError DegenerateMapWarning PartialMapWarning ModelChangedError "
    "ImagesOutOfRangeWarning DamagedDataWarning MemoryUseWarning "
    "callbacks errors faithfulness losses methods models modules robustness training __version__"
)


def test_the_list_of_public_names():
    assert set(sg.__all__) == set(PUBLIC.split())
    assert len(sg.__all__) == len(set(sg.__all__))
    assert {*dir(sg), "__version__"} == set(sg.__all__)


@pytest.mark.parametrize("name", sorted(set(sg.__all__) - {"__version__"}))
def test_each_name_resolves(name):
    value = getattr(sg, name)
    assert (callable(value) or inspect.ismodule(value)) and value.__doc__
    assert value.__name__.rpartition(".")[2] == name


def test_verbs_are_functions_and_packages_are_packages():
    for name in ("explain", "verify", "stress", "train", "adapt", "load_model", "list_methods"):
        importlib.import_module("steadygaze.training")  # no package may hide a function
        assert inspect.isfunction(getattr(sg, name)), name
    for name in ("faithfulness", "losses", "methods", "models", "modules", "robustness", "training"):
        assert inspect.ismodule(getattr(sg, name)), name


def test_other_names_raise():
    with pytest.raises(AttributeError, match="explian"):
        _ = sg.explian


@pytest.mark.parametrize(
    "error",
    ["UnsupportedModelError", "MethodUnavailableError", "UnknownNameError", "InputError", "ImageError"],
)
def test_errors_have_one_root_and_a_built_in(error):
    kind = getattr(sg, error)
    assert issubclass(kind, sg.SteadygazeError)
    assert issubclass(kind, (ValueError, TypeError))


def test_commands():
    assert {"explain", "verify", "stress", "train", "app", "methods", "models", "demo"} <= set(
        typer.main.get_command(app).commands
    )


def test_no_module_of_the_command_line_hides_what_the_package_offers():
    import steadygaze.cli as cli

    assert not {found.name for found in pkgutil.iter_modules(cli.__path__)} & set(cli.__all__)
