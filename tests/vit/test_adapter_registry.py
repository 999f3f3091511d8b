"""An adapter from outside the package works like a built-in one, and its view is checked like all others."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadygaze as sg
from steadygaze.methods.registry import list_methods
from steadygaze.vit.registry import ADAPTERS, register_adapter
from steadygaze.vit.view import Plan

IMAGES = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


class ToyViT(nn.Module):
    """Four patches, two blocks, the mean of the patches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project, self.classify = nn.Conv2d(3, 16, 16, 16), nn.Linear(16, 5)
        self.positions = nn.Parameter(torch.randn(1, 4, 16))
        layer = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(2))

    def embed(self, images: Tensor) -> Tensor:
        return self.project(images).flatten(2).transpose(1, 2) + self.positions

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for layer in self.layers:
            x = layer(x)
        return self.classify(x.mean(1))


def toy_plan(model: Any) -> Plan:
    return Plan(
        embed=lambda images: (model.embed(images), None, (2, 2)),
        blocks=[{"module": b, "call": lambda x, layout, b=b: b(x)} for b in model.layers],
        head=lambda x, layout: model.classify(x.mean(1)),
        input_size=(3, 32, 32),
        fixed_size=True,
        grid=(2, 2),
        prefix=0,
        readout="mean",
        readout_rows=(),
        kind="ToyViT",
    )


@pytest.fixture
def toy() -> Iterator[ToyViT]:
    register_adapter("toy", matches=ToyViT)(toy_plan)
    yield ToyViT().eval()
    ADAPTERS.remove("toy")


def test_an_unknown_class_is_refused_with_advice() -> None:
    with pytest.raises(sg.UnsupportedModelError, match="register_adapter adds support for a custom class"):
        sg.adapt(ToyViT())


def test_a_class_from_outside_is_viewed_and_explained(toy: ToyViT) -> None:
    vit = sg.adapt(toy)
    assert vit.grid == (2, 2) and torch.allclose(vit(IMAGES), toy(IMAGES), atol=1e-6)
    names = [
        info.name
        for info in list_methods()
        if info.family in ("gradient", "attention", "cam", "baseline")
        and info.name != "beyond_intuition_token"  # needs the parts of a pre-norm block
    ]
    maps = sg.explain(toy, IMAGES, method=names)
    assert list(maps) == names
    for name, attribution in maps.items():
        assert attribution.scores.shape == (2, 2, 2) and attribution.scores.isfinite().all(), name
    assert torch.allclose(maps["ixg"].scores, sg.explain(toy, IMAGES, method="ixg").scores)


def test_patches_can_be_removed(toy: ToyViT) -> None:
    scores = sg.explain(toy, IMAGES, method="occlusion").scores
    assert scores.shape == (2, 2, 2) and scores.abs().max() > 0


def test_a_view_with_other_logits_is_refused() -> None:
    def wrong(model: Any) -> Plan:
        return replace(toy_plan(model), head=lambda x, layout: model.classify(x[:, 0]))

    register_adapter("toy", matches=lambda model: type(model) is ToyViT)(wrong)
    try:
        with pytest.raises(sg.UnsupportedModelError, match="differ"):
            sg.adapt(ToyViT().eval())
    finally:
        ADAPTERS.remove("toy")


def test_an_adapter_from_outside_is_asked_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    import timm

    model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3).eval()
    plan = sg.adapt(model).plan
    register_adapter("mine", matches=type(model))(lambda model: replace(plan, kind="mine"))
    try:
        other = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3).eval()
        other.load_state_dict(model.state_dict())
        assert sg.adapt(other).plan.kind == "mine"
    finally:
        ADAPTERS.remove("mine")


def test_a_taken_name_is_an_error(toy: ToyViT) -> None:
    with pytest.raises(sg.InputError, match="registered already"):
        register_adapter("toy", matches=ToyViT)(toy_plan)


def test_adapters_are_listed() -> None:
    infos = {info.name: info for info in sg.list_adapters()}
    assert infos["timm"].built_in and "name" in repr(sg.list_adapters())
