"""No two names give one map, unless one is declared an alias of the other."""

import itertools
import warnings

import pytest
import torch
from torch import Tensor

import steadygaze as sg
from helpers import tiny_models
from helpers.tiers import tiered
from steadygaze.methods.registry import parse_method, rules_of

TARGET = torch.tensor([1, 3])
MODELS = ["class", "average", "attention pool (SigLIP)", "SwiGLU (DINOv2)"]


def identity(name: str) -> tuple[object, ...]:
    """What a name stands for; equal for an alias and its target."""
    method = parse_method(name)
    return method.base.name, method.aggregator, method.options, rules_of(method), method.score


def direction(scores: Tensor) -> Tensor:
    """The maps without their size: two that differ by a positive factor are one map."""
    flat = scores.double().flatten(1)
    return flat / flat.norm(dim=1, keepdim=True).clamp_min(1e-300)


@pytest.mark.parametrize("name", tiered(MODELS, ["average"]))
def test_names_give_maps_of_their_own(name: str) -> None:
    model = tiny_models.PLAIN[name]()
    images = tiny_models.images_of(model)
    names = [n for n in tiny_models.served(model) if n != "diffmask"]  # needs a file of gates
    asked = [tiny_models.SEARCHES.get(n, n) for n in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = sg.explain(model, images, target=TARGET, method=asked)
    maps = {n: direction(found[text].scores) for n, text in zip(names, asked, strict=True)}
    equal = [
        {a, b}
        for a, b in itertools.combinations(names, 2)
        if float((maps[a] - maps[b]).abs().max()) < 1e-9 and float(maps[a].abs().max()) > 0
    ]
    # no layer of a random model exceeds the limit; test_methods compares them with a lower one
    equal = [pair for pair in equal if pair != {"gaze_removal", "gaze_weighted"}]
    undeclared = [pair for pair in equal if len({identity(n) for n in pair}) > 1]
    assert undeclared == [], undeclared
    assert {"gae", "genatt"} in equal, "a test that finds no pair at all compares nothing"
