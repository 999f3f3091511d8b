"""A method from outside the package works like a built-in one, and no two methods share a name."""

from collections.abc import Iterator

import pytest
import torch

import steadygaze as sg
from helpers import tiny_models
from steadygaze.methods.registry import METHODS, list_methods, parse_method, register_alias, register_method
from steadygaze.trace import Trace


@pytest.fixture
def grad_spread() -> Iterator[str]:
    @register_method("grad_spread", family="my lab", cost=2.0)
    def grad_spread(trace: Trace, layer: int, *, power: float = 1.0) -> torch.Tensor:
        """Standard deviation of the gradient over channels.

        More words.
        """
        return trace.patches(layer)[1].std(-1) ** power

    yield "grad_spread"
    METHODS.remove("grad_spread")


def test_a_method_from_outside_is_explained_aggregated_and_listed(grad_spread):
    model = tiny_models.PLAIN["class"]()
    images = tiny_models.images_of(model)
    maps = sg.explain(
        model, images, method=[grad_spread, "grad_spread+last", "grad_spread+plus:power=2,start=1"]
    )
    bare, last, plus = (attribution.scores for attribution in maps.values())
    assert bare.shape == (2, *sg.adapt(model).grid) and torch.equal(
        bare, last
    )  # the default is the last layer
    assert not torch.equal(bare, plus) and (plus >= 0).all()
    (info,) = [info for info in list_methods() if info.name == grad_spread]
    assert info.family == "my lab" and info.layers and info.class_specific and info.cost == 2
    assert info.summary == "Standard deviation of the gradient over channels."
    shared = {"start": None, "freeze": None, "slope": "origin", "gate": "held"}
    assert info.options == {"power": 1.0, **shared}
    with pytest.raises(sg.UnknownNameError, match="Did you mean 'grad_spread'"):
        parse_method("grad_spred")


def test_an_alias_from_outside(grad_spread):
    register_alias("spread", "grad_spread+plus:power=2", score="log_odds")
    try:
        method = parse_method("spread:start=1")
        assert method.base.name == grad_spread and method.aggregator == "plus" and method.score == "log_odds"
        assert method.option("power") == 2 and str(method) == "spread:start=1"
        assert [info.alias_of for info in list_methods() if info.name == "spread"] == [
            "grad_spread+plus:power=2"
        ]
    finally:
        METHODS.remove("spread")


def test_names_from_papers_can_be_registered():
    """ "saliency" is offered as vanilla_grad as long as nobody has registered it."""
    with pytest.raises(sg.UnknownNameError, match="Did you mean 'vanilla_grad'"):
        parse_method("saliency")
    register_method("saliency")(lambda trace, layer: trace.patches(layer)[1].sum(-1))
    try:
        assert parse_method("saliency").base.name == "saliency"
    finally:
        METHODS.remove("saliency")


@pytest.mark.parametrize("name", ["gaze", "gae", "ixg"])
def test_a_taken_name_is_an_error(name):
    entry = METHODS[name]
    with pytest.raises(sg.InputError, match="registered already"):
        register_method(name)(lambda trace, layer: None)
    with pytest.raises(sg.InputError, match="registered already"):
        register_alias(name, "ixg+plus")
    assert METHODS[name] is entry


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "a+b"}, sg.InputError, "without any of"),
        ({"kind": "vector"}, sg.UnknownNameError, "kind of method 'new'"),
        ({"aggregator": "rollout"}, sg.InputError, "kind='matrix'"),
        ({"kind": "model", "aggregator": "plus"}, sg.InputError, "aggregator"),
        ({"kind": "map", "rollout_step": None}, sg.InputError, "rollout_step"),
        ({"kind": "matrix", "reads_hidden": True}, sg.InputError, "reads_hidden"),
        ({"aggregator": "sum"}, sg.UnknownNameError, "unknown aggregator 'sum'"),
    ],
)
def test_a_wrong_declaration_is_an_error(arguments, error, message):
    with pytest.raises(error, match=message):
        register_method(**{"name": "new", **arguments})(lambda trace, layer: None)


def test_an_option_cannot_hide_one_of_the_aggregators():
    with pytest.raises(sg.InputError, match="option name 'start' is reserved"):

        @register_method("new")
        def new(trace, layer, *, start=0):
            return None

    assert "new" not in METHODS
