"""The oracles against timm, against one another, and against identities that the formulas must obey."""

import pytest
import torch
from torch import Tensor

import steadygaze as sg
from helpers.tiers import tiered
from oracles import METHODS, attention, cam, decompx, gaze, gradient, lrp, mixing, vit
from oracles.models import DEFAULT_KINDS, KINDS, random_images, tiny

torch.set_num_threads(1)
TARGET = torch.tensor([1, 3])


@pytest.fixture(params=tiered(KINDS, DEFAULT_KINDS), scope="module")
def case(request: pytest.FixtureRequest) -> tuple[vit.Model, Tensor]:
    model = tiny(request.param)
    return model, random_images(model)


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
def test_decompx_is_input_times_frozen_gradient(
    case: tuple[vit.Model, Tensor], slope: str, score: str
) -> None:
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
    images = random_images(model)
    maps = {a: gaze.gaze(model, images, TARGET, freeze=a) for a in (0.0, 0.75, 1.0)}
    close(maps[0.75], 0.25 * maps[0.0] + 0.75 * maps[1.0])
    assert (maps[0.0] - maps[1.0]).abs().max() > 1e-3


def test_fullgrad_with_implicit_terms_is_complete(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    for options in (
        {"implicit": True},
        {"freeze": 1.0},
        {"freeze": 0.5, "implicit": True, "slope": "tangent"},
    ):
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
    close(
        gradient.fullgrad_plus(model, images, TARGET, start=2),
        gradient.fullgrad_layers(model, images, TARGET)[2],
    )


def test_integrated_gradients_on_pixels_is_complete() -> None:
    model = tiny()
    images = random_images(model)
    total = gradient.integrated_gradients(model, images, TARGET, space="pixels", steps=60).sum(-1)
    with torch.no_grad():
        difference = model(images) - model(torch.zeros_like(images))
    close(total, difference[torch.arange(2), TARGET], 2e-3)


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
    _, G = attention.attentions(model, random_images(model), TARGET)
    assert G[-1][:, :, 0].abs().max() == 0
    assert vit.reads(model) == list(range(1, 17))


@pytest.mark.parametrize("at", ["input", "norm1"])
def test_cams(case: tuple[vit.Model, Tensor], at: str) -> None:
    model, images = case
    hires = cam.hirescam_layers(model, images, TARGET, at=at)
    layer, elementwise = (
        cam.layercam(model, images, TARGET, at=at),
        cam.elementwise_gradcam(model, images, TARGET, at=at),
    )
    for a, g in cam.pairs(model, images, TARGET, at)[-1:]:
        negative = (g.clamp(max=0) * a).sum(-1)
        close(hires[-1], layer + negative)
        close(hires[-1], elementwise + (g * a).clamp(max=0).sum(-1))
        grad_cam = cam.gradcam(model, images, TARGET, at=at)
        for p in (0, 4):  # by its double sum over patches and channels
            terms = [
                g[:, q, k] * a[:, p, k] / a.shape[1] for q in range(a.shape[1]) for k in range(a.shape[2])
            ]
            close(grad_cam[:, p], torch.stack(terms).sum(0))
        xgrad = cam.xgradcam_plus_map(a.abs(), g)
        close(xgrad, cam.xgradcam_map(a.abs(), g))
        close(xgrad.sum(-1), (g * a.abs()).sum(dim=(1, 2)), 1e-5)  # sensitivity axiom of XGradCAM
    if at == "input":
        for x, y in zip(hires, gradient.ixg_layers(model, images, TARGET), strict=True):
            close(x, y)
    tops = [m.amax(1) for m in cam.layercam_layers(model, images, TARGET, at=at, normalize=True)]
    assert all(((top - 1).abs() < 1e-12).logical_or(top <= 0).all() for top in tops)


def test_transatt_conserves_relevance(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    relevance, products = lrp.relevances(model, images, TARGET)
    for R in relevance:
        close(R.sum(dim=(1, 2)), torch.ones(2, dtype=torch.float64), 1e-4)
    assert all(R.abs().max() > 1e-3 for R in products)
    whole, late = lrp.transatt(model, images, TARGET), lrp.transatt(model, images, TARGET, start_layer=1)
    assert (whole - late).abs().max() > 1e-6
    assert all((M >= 0).all() for M in lrp.transatt_matrices(model, images, TARGET))


def test_full_lrp_conserves_relevance(case: tuple[vit.Model, Tensor]) -> None:
    """What the pixels, the prefix tokens and the positions receive is what x^0 has."""
    model, images = case
    relevance, _ = lrp.relevances(model, images, TARGET)
    tokens, positions = lrp.position_relevance(model, images, relevance[0])
    prefix, patches = tokens[:, : model.num_prefix_tokens], vit.patches_of(model, tokens)
    assert positions.abs().max() > 1e-3
    close(lrp.full_lrp(model, images, TARGET), patches.sum(-1), 1e-6)
    whole = patches.sum(dim=(1, 2)) + prefix.sum(dim=(1, 2)) + positions.sum(dim=(1, 2))
    close(whole, relevance[0].sum(dim=(1, 2)), 1e-6)
    pixels = lrp.full_lrp_pixels(model, images, TARGET)
    close(vit.patches_of(model, tokens).sum(dim=(1, 2)), pixels.sum(dim=(1, 2, 3)), 1e-6)


def test_lrp_rules_by_loops() -> None:
    generator = torch.Generator().manual_seed(3)
    x, W, R = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((1, 4), (3, 4), (1, 3))
    )
    expected = torch.zeros(1, 4, dtype=torch.float64)
    for o in range(3):
        kept = [
            x[0, i] * W[o, i] if x[0, i] * W[o, i] > 0 else x[0, i] * 0 for i in range(4)
        ]  # alpha 1, beta 0
        for i in range(4):
            expected[0, i] += kept[i] / (sum(kept) + 1e-9) * R[0, o]
    close(lrp.linear_rule(x, W, R), expected)
    X, Y, R = (
        torch.randn(1, *shape, generator=generator, dtype=torch.float64) for shape in ((2, 3), (3, 2), (2, 2))
    )
    a, b = lrp.product_rule(X, Y, R)
    share = torch.zeros(1, 2, 3, 2, dtype=torch.float64)
    for i in range(2):
        for k in range(3):
            for j in range(2):
                share[:, i, k, j] = X[:, i, k] * Y[:, k, j] / ((X @ Y)[:, i, j] + 1e-9) * R[:, i, j]
    close(a, share.sum(3) / 2)
    close(b, share.sum(1) / 2)


@pytest.mark.parametrize("kind", ["class", "registers"])
def test_attnlrp_is_the_divided_relevance(kind: str) -> None:
    model = tiny(kind)
    images = random_images(model)
    close(lrp.attnlrp(model, images, TARGET), lrp.attnlrp_divided(model, images, TARGET), 1e-9)


def test_mixing_vectors_add_up(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    state = mixing.states(model, images)
    for block, s in zip(model.blocks, state.blocks, strict=True):
        d = s.x.shape[-1]
        W_o, W_v = vit.weight(block.attn.proj.weight), vit.weight(block.attn.qkv.weight)[2 * d :]
        b = W_o @ (W_v @ s.norm1.bias + vit.bias(block.attn.qkv)[2 * d :]) + vit.bias(block.attn.proj)
        T = mixing.mixing_vectors(block, s)
        close(T.sum(2) + vit.gain(block.ls1, d) * b, s.x_mid)
        after = mixing.after_mlp_residual(block, s, T + 0)
        bias = (vit.gain(block.ls1, d) * b).expand_as(s.x_mid)
        whole = after.sum(2) + mixing.after_mlp_residual(block, s, bias[:, :, None])[:, :, 0]
        close(whole, s.x_mid + vit.gain(block.ls2, d) * (s.norm2.out - s.norm2.bias))


def test_mixing_matrices(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    for against in ("attn", "block"):
        for M in mixing.alti_matrices(model, images, TARGET, against=against):
            total = M.sum(-1)
            assert ((total - 1).abs() < 1e-12).logical_or(total == 0).all() and (M >= 0).all()
    maps = [mixing.alti(model, images, TARGET, against=a) for a in ("attn", "block")]
    maps += [mixing.attin(model, images, TARGET, form=f) for f in ("n", "n_res")]
    assert all((a - b).abs().max() > 1e-6 for i, a in enumerate(maps) for b in maps[:i])
    zero = mixing.rows_to_one(torch.tensor([[[0.0, 0.0], [1.0, 3.0]]]).double())
    assert zero.tolist() == [[[0.0, 0.0], [0.25, 0.75]]]


@pytest.mark.full
def test_batch_equals_singles_and_maps_differ(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    maps = {name: method(model, images, TARGET) for name, method in METHODS.items()}
    patches = model.patch_embed.num_patches
    for name, scores in maps.items():
        assert scores.shape == (2, patches) and scores.isfinite().all(), name
        close(METHODS[name](model, images[1:], TARGET[1:]), scores[1:], 1e-11)
    vanished = {name for name, scores in maps.items() if scores.abs().max() < 1e-6}
    assert vanished == expected_to_vanish(model)
    for name in maps.keys() - vanished:
        for other in maps.keys() - vanished - {name}:
            assert (maps[name] - maps[other]).abs().max() > 1e-6, (name, other)


def expected_to_vanish(model: vit.Model) -> set[str]:
    """LayerNorm ignores the mean and the scale of its input, so gradients along them are 0 or O(eps).

    The mean of a token reaches nothing but norms: the channel sum of the gradient is zero in every layer.
    The patches of the last block reach a class-token head through norm1 alone: x . gradient is O(eps)
    there. With norm_pre, also at x^0.
    """
    return (
        {"vanilla_grad"}
        | ({"hirescam"} if model.global_pool == "token" else set())
        | ({"ixg", "attixg"} if isinstance(model.norm_pre, torch.nn.LayerNorm) else set())
    )


def test_vanishing_maps_by_layer(case: tuple[vit.Model, Tensor]) -> None:
    model, images = case
    for freeze in (None, 1.0):
        for scores in gradient.vanilla_grad_layers(model, images, TARGET, freeze=freeze):
            assert scores.abs().max() < 1e-12
    for scores in gradient.vanilla_grad_layers(model, images, TARGET, reduce="abs"):
        assert scores.min() > 1e-4
    ordinary, frozen = cam.hirescam(model, images, TARGET), cam.hirescam(model, images, TARGET, freeze=1.0)
    assert (ordinary.abs().max() < 1e-6) == (model.global_pool == "token")
    assert frozen.abs().max() > 1e-2
    assert cam.hirescam(model, images, TARGET, at="norm1").abs().max() > 1e-2


@pytest.mark.parametrize("target", [None, 1, [1, 4]])
def test_the_default_runs_the_model_once(target: object) -> None:
    """One forward pass with a graph gives the logits, the class and the map; targets share it."""
    model = tiny("class")
    view = sg.adapt(model)  # which checks the model by runs of its own
    runs = []
    handle = model.blocks[0].register_forward_hook(lambda *_: runs.append(1))
    options = (
        {} if target is None else {"target": torch.tensor([target, target]) if target == [1, 4] else target}
    )
    sg.explain(view, random_images(model), **options)
    handle.remove()
    assert len(runs) == 1
