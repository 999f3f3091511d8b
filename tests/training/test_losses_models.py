"""The losses on every make of model: attention is found wherever tokens look at tokens, and gradients pass
whatever the head is."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import steadygaze as sg
from benchmarks import zoo
from helpers.losses import small
from steadygaze.modules import CB, TAP, insert
from steadygaze.training import losses
from steadygaze.training.losses.adl import AdlOptions
from steadygaze.training.objective import Objective

MAKES = {  # attentions between tokens; class attention, pooling and FAN's attention over channels are none
    "rvt_tiny": 3,
    "rvt_tiny_plus": 3,
    "rvt_base_plus": 2,
    "fan_tiny_12_p16_224": 2,
    "fan_tiny_8_p4_hybrid": 2,
    "pvt_tiny": 5,
    "localvit_tiny_mlp4_act3_r192": 2,
    "CaiT": 3,
    "PVT v2": 6,
    "Swin": 6,
    "transformers ViT, eager": 3,
    "transformers SigLIP": 3,
}


@cache
def model_of(name: str) -> nn.Module:
    made = {
        "CaiT": lambda: zoo.plain("cait_xxs24_224")[0],
        "PVT v2": lambda: zoo.hierarchical("pvt_v2_b0", "pvt_v2")[0],
        "Swin": lambda: zoo.hierarchical("swin_tiny_patch4_window7_224", "swin_transformer")[0],
        "transformers ViT, eager": lambda: zoo.transformers_model("ViTForImageClassification", "eager")[0],
        "transformers SigLIP": lambda: zoo.transformers_model("SiglipForImageClassification", "sdpa")[0],
    }
    return made[name]() if name in made else small(name)


def batch(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    images = zoo.image_of(model, sg.adapt(model).plan.input_size, batch=2)
    masks = torch.zeros(2, *images.shape[2:], dtype=torch.uint8)
    masks[0, 4:20, 4:24] = masks[1, 8:30, 2:20] = 255
    return images, masks, torch.tensor([0, 1])


DEFAULT = ("Swin", "transformers SigLIP", "transformers ViT, eager", "rvt_tiny_plus")  # of the default tier


class Written(TorchFunctionMode):
    """Attention written out by hand, and every map of several queries kept."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: list[Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            q, k, v, *rest = args
            mask, scale = kwargs.get("attn_mask", rest[0] if rest else None), kwargs.get("scale")
            logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
            a = (logits if mask is None else logits + mask).exp()
            a = a / a.sum(-1, keepdim=True)
            self.maps += [a] if a.shape[-2] > 1 else []
            return a @ v
        y = func(*args, **kwargs)
        over_keys = (
            getattr(func, "__name__", "") == "softmax" and y.dim() == 4 and kwargs.get("dim", args[-1]) == -1
        )
        self.maps += [y] if over_keys and y.shape[-2] > 1 else []
        return y


@pytest.mark.parametrize("modules", [False, True], ids=["plain", "with TAP and CB"])
@pytest.mark.parametrize(
    "name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.full) for n in MAKES]
)
def test_adl_finds_the_attention_between_tokens(name, modules):
    torch.manual_seed(0)
    model = model_of(name)
    model = insert(model, tap=TAP(branches=2), cb=CB()).eval() if modules else model
    images, _, labels = batch(model)
    with Written() as written:
        model(images)
    assert len(written.maps) == MAKES[name]
    weights = [p for p in model.parameters() if p.requires_grad]
    for form in ("paper", "per_head"):
        wanted = losses.adl.adl(written.maps, tau=0.5, form=form)
        total, terms, _ = Objective(model, {"adl": AdlOptions(form=form, tau=0.5, weight=2.0)})(
            images, labels
        )
        assert terms["adl"].item() == pytest.approx(wanted.item(), rel=1e-6) and 0.01 < wanted.item() < 1
        assert total.item() == pytest.approx(2 * wanted.item(), rel=1e-6)
        got, expected = (
            torch.autograd.grad(y, weights, allow_unused=True, retain_graph=True)
            for y in (terms["adl"], wanted)
        )
        largest = max(float(g.abs().max()) for g in expected if g is not None)
        assert largest > 1e-6
        for a, b in zip(got, expected, strict=True):
            a, b = (torch.zeros(()) if t is None else t for t in (a, b))
            assert float((a - b).abs().max()) <= 1e-5 * largest  # transformers takes its softmax in float32


@pytest.mark.parametrize("name", ["CaiT", "fan_tiny_12_p16_224", "transformers SigLIP"])
@pytest.mark.parametrize("method", ["gae", "raw_attention"])
def test_relevance_through_heads_that_attend(name, method):
    """Class attention and attention pooling are part of the map, and of its gradient: against finite
    differences."""
    model = model_of(name)
    images, masks, labels = batch(model)

    def value() -> Tensor:
        return losses.relevance.relevance_terms(
            model, images, masks, labels, method=method, second_order=True
        )["background"]

    weights = [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(0)
    direction = [torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in weights]
    slopes = torch.autograd.grad(value(), weights, allow_unused=True)
    found = sum(float((g * d).sum()) for g, d in zip(slopes, direction, strict=True) if g is not None)
    ends, step = [], 1e-6
    with torch.no_grad():
        for times in (step, -2 * step, step):
            for p, d in zip(weights, direction, strict=True):
                p.add_(times * d)
            with torch.enable_grad():
                ends.append(value().item())
    assert found == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4)


@pytest.mark.parametrize("name", ["transformers SigLIP", "localvit_tiny_mlp4_act3_r192"])
def test_input_gradients_reach_the_weights(name):
    """Attention pooling by nn.MultiheadAttention runs as it is, and a hard sigmoid is differentiated
    twice."""
    model = model_of(name)
    for function in (losses.input_gradient.gradmask_terms, losses.input_gradient.rrr_terms):
        background = function(model, *batch(model))["background"]
        grads = torch.autograd.grad(
            background, [p for p in model.parameters() if p.requires_grad], allow_unused=True
        )
        assert any(g is not None and float(g.abs().max()) > 0 for g in grads)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("attn_grad", "second_order=True"),
        ("vanilla_grad", "second_order=True"),
        ("globenc", "no graph"),
        ("transatt", "no graph"),
    ],
)
def test_a_map_that_cannot_be_trained_is_refused(method, words):
    """Otherwise the terms of the map would be numbers, and only the confidence would be trained."""
    model = zoo.plain("vit_tiny_patch16_224")[0]
    with pytest.raises(sg.MethodUnavailableError, match=f"{method} cannot be trained: .*{words}"):
        losses.relevance.relevance_terms(model, *batch(model), method=method)
    if "second" in words:
        assert losses.relevance.relevance_terms(model, *batch(model), method=method, second_order=True)[
            "background"
        ].requires_grad
