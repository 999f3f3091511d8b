"""The oracles against timm, against one another, and against identities that the formulas must obey."""

import pytest
import torch
from torch import Tensor

from tests.oracles import attention, decompx, gaze, gradient, vit
from tests.oracles.models import KINDS, pictures, tiny

torch.set_num_threads(1)
TARGET = torch.tensor([1, 3])


@pytest.fixture(params=list(KINDS))
def case(request: pytest.FixtureRequest) -> tuple[vit.Model, Tensor]:
    model = tiny(request.param)
    return model, pictures(model)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


def test_forward_equals_timm(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    state = vit.run(model, vit.embed(model, images))
    with torch.no_grad():
        close(state.logits, model(images))
        x = model.patch_drop(model._pos_embed(model.patch_embed(images)))
        close(state.x[0], x)
        x = model.norm_pre(x)
        for layer, block in enumerate(model.blocks):
            x = block(x)
            close(state.x[layer + 1], x)
    for layer in range(len(model.blocks)):
        close(vit.run(model, state.x[layer], start=layer).logits, state.logits)
        close(state.at(layer).A.sum(-1), torch.ones(()).double().expand(state.at(layer).A.shape[:-1]))


@pytest.mark.parametrize(
    "how", [vit.rule(0.75), vit.rule(1.0, "tangent"), vit.Rule(norm=True, slope="origin", halve=True)]
)
def test_rules_leave_the_values_alone(case: tuple[vit.Model, Tensor], how: vit.Rule) -> None:
    model, images = case
    close(vit.run(model, vit.embed(model, images), how=how).logits, model(images).detach())


@pytest.mark.parametrize("score", ["logit", "log_prob", "log_odds", "contrast"])
def test_scores(score: str) -> None:
    logits = torch.tensor([[1.0, 2.0, -1.0], [0.0, 0.5, 3.0]], dtype=torch.float64)
    p = logits.softmax(-1)[torch.arange(2), torch.tensor([1, 0])]
    expected = {
        "logit": torch.tensor([2.0, 0.0], dtype=torch.float64),
        "log_prob": p.log(),
        "log_odds": (p / (1 - p)).log(),
        "contrast": torch.tensor([1.0, -3.0], dtype=torch.float64),
    }
    close(vit.quantity(logits, torch.tensor([1, 0]), score), expected[score])


@pytest.mark.parametrize("slope", ["origin", "tangent"])
@pytest.mark.parametrize("score", ["logit", "log_odds"])
def test_decompx_is_input_times_frozen_gradient(case: tuple[vit.Model, Tensor], slope: str, score: str) -> None:
    model, images = case
    full = decompx.decompx_layers(model, images, TARGET, slope=slope, score=score)
    fast = gaze.gaze_layers(model, images, TARGET, freeze=1.0, slope=slope, score=score)
    for a, b in zip(full, fast, strict=True):
        close(a, b)
    assert full[0].abs().max() > 1e-3


@pytest.mark.parametrize("slope", ["origin", "tangent"])
@pytest.mark.parametrize("bias", ["token", "absdot", "norm", "equal", "cls"])
def test_decompx_is_complete(case: tuple[vit.Model, Tensor], bias: str, slope: str) -> None:
    model, images = case
    if bias == "cls" and model.cls_token is None:
        with pytest.raises(ValueError, match="class token"):
            decompx.decompx(model, images, TARGET, bias=bias)
        return
    for layer in range(len(model.blocks)):
        sources = decompx.decompx_sources(model, images, TARGET, layer=layer, bias=bias, slope=slope)
        logit = model(images).detach()[torch.arange(2), TARGET]
        close(sources.sum(-1), logit, 1e-10)
        assert (sources[:, -1].abs().max() > 1e-3) == (bias == "token")


def test_bias_token_changes_no_patch_and_distribution_does(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    free = decompx.decompx(model, images, TARGET)
    close(decompx.decompx(model, images, TARGET, bias="token"), free)
    for bias in ("absdot", "norm", "equal"):
        assert (decompx.decompx(model, images, TARGET, bias=bias) - free).abs().max() > 1e-3


def test_gaze_is_the_sum_and_alpha_mixes_linearly_in_one_block() -> None:
    model = tiny("registers", depth=1)
    images = pictures(model)
    maps = {a: gaze.gaze(model, images, TARGET, freeze=a) for a in (0.0, 0.75, 1.0)}
    close(maps[0.75], 0.25 * maps[0.0] + 0.75 * maps[1.0])
    assert (maps[0.0] - maps[1.0]).abs().max() > 1e-3


def test_fullgrad_with_implicit_terms_is_complete(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    for options in ({"implicit": True}, {"freeze": 1.0}, {"freeze": 0.5, "implicit": True, "slope": "tangent"}):
        products, biases, logits = gradient.fullgrad_tokens(model, images, TARGET, **options)
        for layer, product in enumerate(products):
            total = product.sum(-1) + torch.stack(biases[layer:]).sum(dim=(0, 2))
            close(total, logits[torch.arange(2), TARGET], 1e-11)
    products, biases, logits = gradient.fullgrad_tokens(model, images, TARGET)
    missing = logits[torch.arange(2), TARGET] - products[0].sum(-1) - torch.stack(biases).sum(dim=(0, 2))
    assert missing.abs().max() > 1e-3


def test_fullgrad_plus_counts_each_bias_once(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    ixg = gradient.ixg_layers(model, images, TARGET)
    first = gradient.fullgrad(model, images, TARGET)
    close(gradient.fullgrad_plus(model, images, TARGET), first + sum(ixg[1:]))
    close(gradient.fullgrad_plus(model, images, TARGET, start=2), gradient.fullgrad_layers(model, images, TARGET)[2])


def test_integrated_gradients_on_pixels_is_complete() -> None:
    model = tiny()
    images = pictures(model)
    total = gradient.integrated_gradients(model, images, TARGET, space="pixels", steps=200).sum(-1)
    with torch.no_grad():
        difference = model(images) - model(torch.zeros_like(images))
    close(total, difference[torch.arange(2), TARGET], 2e-4)


def test_gradient_of_the_hidden_states_by_finite_difference(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    x = vit.embed(model, images).detach()
    derivative = gradient.ixg(model, images, TARGET)
    for patch in (0, 5):
        nudged = []
        for step in (1e-5, -1e-5):
            moved = x.clone()
            moved[:, model.num_prefix_tokens + patch] *= 1 + step
            nudged.append(vit.run(model, moved).logits[torch.arange(2), TARGET])
        close((nudged[0] - nudged[1]) / 2e-5, derivative[:, patch], 1e-7)


def test_attention_maps(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    for matrix in attention.rollout_matrices(model, images, TARGET):
        close(matrix.sum(-1), torch.ones(matrix.shape[:-1], dtype=torch.float64))
    relevance = attention.genatt(model, images, TARGET)
    assert (relevance >= 0).all() and relevance.max() > 0
    raw, last = (
        attention.raw_attention(model, images, TARGET),
        attention.raw_attention_layers(model, images, TARGET)[-1],
    )
    close(raw, last)
    assert ((raw > 0) & (raw < 1)).all()


def test_average_heads_never_read_the_class_row() -> None:
    model = tiny("average_with_class")
    _, G = attention.attentions(model, pictures(model), TARGET)
    assert G[-1][:, :, 0].abs().max() == 0
    assert vit.reads(model) == list(range(1, 17))


ALL = {
    **{
        n: getattr(gradient, n)
        for n in ("vanilla_grad", "vanilla_grad_norm", "ixg", "attixg", "fullgrad", "fullgrad_plus")
    },
    "integrated_gradients": gradient.integrated_gradients,
    **{n: getattr(attention, n) for n in ("raw_attention", "rollout", "attn_grad", "attcam", "genatt", "gradsam")},
    "decompx": decompx.decompx,
    "gaze": gaze.gaze,
}


def test_batch_equals_singles_and_maps_differ(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    maps = {name: method(model, images, TARGET) for name, method in ALL.items()}
    patches = model.patch_embed.num_patches
    for name, scores in maps.items():
        assert scores.shape == (2, patches) and scores.isfinite().all(), name
        close(ALL[name](model, images[1:], TARGET[1:]), scores[1:], 1e-11)
        for other in maps:
            if model.patch_embed.proj.bias is None and {name, other} <= {"ixg", "attixg", "vanilla_grad"}:
                continue  # all vanish before norm_pre: see the test below
            assert other <= name or (scores - maps[other]).abs().max() > 1e-6, (name, other)


def test_norm_pre_erases_the_ordinary_gradient_along_the_input() -> None:
    """LayerNorm knows neither the scale nor the mean of x^0: IxG there is O(eps), the gradient sums to zero."""
    model = tiny("pre_norm")
    images = pictures(model)
    assert gradient.ixg(model, images, TARGET).abs().max() < 1e-5
    assert gradient.vanilla_grad(model, images, TARGET).abs().max() < 1e-12
    assert gradient.vanilla_grad_norm(model, images, TARGET).min() > 1e-3
    assert gradient.ixg(model, images, TARGET, freeze=1.0).abs().max() > 1e-2
