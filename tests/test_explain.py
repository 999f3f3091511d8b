"""How `explain` is called: names as given, aliases with aggregators, wrapped models, callable targets."""

import pytest
import torch
from torch import nn

import steadygaze as sg
from oracles.models import random_images, tiny


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny("class")


def test_results_stand_under_the_text_that_was_asked(model: nn.Module) -> None:
    asked = ["attixg+plus:pairing=next,freeze=.75", "gae", sg.method("cat", start=1)]
    many = sg.explain(model, random_images(model), method=asked)
    assert list(many) == ["attixg+plus:pairing=next,freeze=.75", "gae", "cat:start=1"]
    assert many["attixg+plus:pairing=next,freeze=.75"].method == "attixg+plus:freeze=0.75,pairing=next"


def test_another_name_of_a_base_method_takes_an_aggregator(model: nn.Module) -> None:
    images = random_images(model)
    gae, genatt = (sg.explain(model, images, method=f"{name}+plus") for name in ("gae", "genatt"))
    assert torch.equal(gae.scores, genatt.scores)
    assert gae.method == "gae+plus"
    with pytest.raises(sg.InputError, match=r"alias of 'ixg\+plus'"):
        sg.method("cat+plus")


@pytest.mark.full
def test_wrapped_models_are_unwrapped(model: nn.Module) -> None:
    images = random_images(model)
    plain = sg.explain(model, images).scores
    assert torch.equal(plain, sg.explain(nn.DataParallel(model), images).scores)
    assert torch.equal(
        plain, sg.explain(torch.compile(model), images).scores
    )  # the modules themselves run, not the compiled graph


def test_a_callable_target_is_the_whole_quantity(model: nn.Module) -> None:
    images = random_images(model)
    att = sg.explain(model, images, target=lambda y: y[:, 1] - y[:, 2])
    assert att.target is None and att.score == "callable"
    with pytest.raises(sg.InputError, match="whole quantity"):
        sg.explain(model, images, target=lambda y: y[:, 1], score="logit")
