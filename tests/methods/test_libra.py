"""The Libra family against stop-gradients written out by hand, and the two rules that it adds."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import SwiGLU
from torch import Tensor, nn

import steadygaze as sg
from helpers import tiny_models
from oracles import libra
from oracles.models import random_images, tiny
from steadygaze.methods.registry import aliases
from steadygaze.trace.rules import Rules, frozen
from steadygaze.trace.seam import Seam

TARGET = torch.tensor([1, 3])
GATED = {"mlp_layer": SwiGLU, "act_layer": nn.SiLU}
FAMILY = [name for name in aliases() if name.startswith("libra_")]


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["class", "registers", "average", "pre_norm"])
def test_every_name_is_its_oracle(kind: str, gated: bool) -> None:
    changes = {"qk_norm": False} if kind == "registers" else {}
    changes |= GATED if gated else {}
    model = tiny(kind, **changes)
    images = random_images(model)
    found = sg.explain(model, images, target=TARGET, method=FAMILY)
    expected = libra.maps(model, images, TARGET)
    assert set(expected) == set(FAMILY)
    for name, wanted in expected.items():
        assert found[name].score == "log_prob"
        assert relative(found[name].scores.flatten(1), wanted) < 1e-10, name


def test_a_halved_gate_is_another_map_than_a_held_one() -> None:
    model = tiny("class", **GATED)
    images = random_images(model)
    half, held = (
        sg.explain(model, images, target=TARGET, method=f"ixg:freeze=1.0,gate={gate}").scores
        for gate in ("half", "held")
    )
    assert relative(half, held) > 1e-2
    plain = tiny("class")  # without a product of branches there is nothing to halve
    half, held = (
        sg.explain(plain, images, target=TARGET, method=f"ixg:freeze=1.0,gate={gate}").scores
        for gate in ("half", "held")
    )
    torch.testing.assert_close(half, held, rtol=0, atol=0)


@pytest.mark.parametrize("written_out", [False, True])
def test_the_length_of_unit_vectors_is_a_rule_of_its_own(written_out: bool) -> None:
    x = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    g = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    length = x.detach().norm(dim=-1, keepdim=True)
    for rules, held in (
        (Rules(unit=True), True),
        (Rules(norm=True), False),
        (frozen(1.0, gate="half"), True),
    ):
        with Seam(rules):
            y = x / x.norm(dim=-1, keepdim=True) if written_out else F.normalize(x, dim=-1)
        (got,) = torch.autograd.grad((y * g).sum(), x)
        u = x.detach() / length
        wanted = g / length if held else (g - u * (u * g).sum(-1, keepdim=True)) / length
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "name", ["class", "SwiGLU (DINOv2)", "transformers CLIP and text", "attention pool (SigLIP)"]
)
def test_libra_fullgrad_is_complete(name: str) -> None:
    """FullGrad-completeness, the property that the rules were made for."""
    model = tiny_models.PLAIN[name]()
    images = tiny_models.images_of(model)
    found = sg.explain(model, images, target=TARGET, method="libra_fullgrad", score="logit")
    logit = found.logits.gather(1, TARGET[:, None])[:, 0]
    assert found.unattributed is not None
    assert float((found.scores.sum((1, 2)) + found.unattributed - logit).abs().max()) < 1e-9
    ordinary = sg.explain(model, images, target=TARGET, method="fullgrad", score="logit")
    assert ordinary.unattributed is not None
    assert float((ordinary.scores.sum((1, 2)) + ordinary.unattributed - logit).abs().max()) > 1e-4


def test_an_unknown_gate_is_an_error() -> None:
    with pytest.raises(sg.UnknownNameError, match="half"):
        sg.method("ixg", freeze=1.0, gate="hlaf")
