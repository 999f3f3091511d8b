"""One tiny random float64 model of each kind.

The view reproduces its logits, removal equals key masking, DecompX in one pass equals the N-vector
decomposition, and nothing is left behind. `python -m benchmarks.coverage` checks the same for every model
name.
"""

from functools import cache, partial
from importlib import import_module
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import checks, oracles, text_zoo, zoo
from helpers.tiers import tiered
from oracles.models import tiny
from steadygaze.errors import InputError, MethodUnavailableError, UnsupportedModelError
from steadygaze.trace import PLAIN, Want, forward, frozen
from steadygaze.vit.outputs import logits_of
from steadygaze.vit.view import ViT

TIMM = {
    "class token": "vit_tiny_patch16_224",
    "registers, mean": "vit_medium_patch16_reg4_gap_256",
    "mean of a model with a class token": "eva_large_patch14_196",
    "attention pool": "vit_base_patch16_siglip_224",
    "LayerScale and registers": "vit_base_patch14_reg4_dinov2",
    "norm_pre, QuickGELU": "vit_base_patch16_clip_quickgelu_224",
    "qk-norm, parallel scaling": "vit_base_patch16_xp_224",
    "parallel things": "vit_small_patch16_18x2_224",
    "residual post-norm": "vit_base_patch16_rpn_224",
    "differential attention": "vit_dlittle_patch16_reg1_gap_256",
    "RMS norm, SwiGLU": "aimv2_large_patch14_224",
    "distilled": "deit_tiny_distilled_patch16_224",
    "no class position": "deit3_small_patch16_224",
    "rotary, sub-norms": "eva02_tiny_patch14_224",
    "rotary for each layer and head": "vit_small_patch16_rope_mixed_ape_224",
    "post-norm EVA": "eva02_enormous_patch14_clip_224",
    "rotary, pool": "vit_pe_core_tiny_patch16_384",
    "DINOv3": "vit_small_patch16_dinov3",
    "grouped queries": "vit_large_patch16_sapiens2",
    "relative bias in each layer": "beit_base_patch16_224",
    "relative bias": "vit_relpos_base_patch16_clsgap_224",
    "shared relative bias": "vit_srelpos_small_patch16_224",
    "talking heads, class attention": "cait_xxs24_224",
    "hybrid": "vit_tiny_r_s16_p8_224",
}
HIERARCHICAL = {
    "swin_tiny_patch4_window7_224": "swin_transformer",
    "swinv2_tiny_window8_256": "swin_transformer_v2",
    "swinv2_cr_tiny_ns_224": "swin_transformer_v2_cr",
    "pvt_v2_b0": "pvt_v2",
    "pit_ti_distilled_224": "pit",
    "mvitv2_tiny": "mvitv2",
    "mvitv2_small_cls": "mvitv2",
    "hiera_tiny_224": "hiera",
    "twins_svt_small": "twins",
    "levit_128s": "levit",
    "levit_conv_128s": "levit",
    "xcit_nano_12_p16_224": "xcit",
}
BUILDERS: dict[str, Any] = {kind: partial(zoo.plain, name) for kind, name in TIMM.items()}
BUILDERS |= {
    f"{kind} (sdpa)": partial(zoo.transformers_model, kind, "sdpa") for kind in zoo.transformers_kinds()
}
for _stem in ("ViT", "Beit", "Data2VecVision", "Dinov2WithRegisters"):
    _kind = f"{_stem}ForImageClassification"
    BUILDERS[f"{_kind} (eager)"] = partial(zoo.transformers_model, _kind, "eager")
BUILDERS |= {f"{kind} and text": partial(text_zoo.classifier, kind) for kind in text_zoo.KINDS}
BUILDERS["torchvision"] = partial(zoo.torchvision_model, "vit_b_16")
for _name in ("naflexvit_base_patch16_par_gap", "naflexvit_base_patch16_map"):
    BUILDERS[_name] = partial(zoo.naflex, _name)
PLAIN_KINDS = list(BUILDERS)
BUILDERS |= {name: partial(zoo.hierarchical, name, module) for name, module in HIERARCHICAL.items()}
REPRESENTATIVE = [  # of the default tier
    "class token",
    "LayerScale and registers",
    "mean of a model with a class token",
    "attention pool",
    "norm_pre, QuickGELU",
    "rotary, sub-norms",
    "relative bias",
    "talking heads, class attention",
    "DINOv3ViTModel and a head (sdpa)",
    "ViTForImageClassification (eager)",
    "SiglipModel and text",
    "torchvision",
    "naflexvit_base_patch16_map",
    "swin_tiny_patch4_window7_224",
    "hiera_tiny_224",
]


@cache
def model_of(kind: str) -> nn.Module:
    return BUILDERS[kind]()[0]


def view_of(kind: str) -> ViT:
    return sg.adapt(model_of(kind))


@pytest.mark.parametrize("kind", tiered(BUILDERS, REPRESENTATIVE))
def test_view_gives_the_logits_removal_is_masking_and_one_pass_is_the_decomposition(kind: str) -> None:
    found = checks.check(model_of(kind))
    assert not isinstance(found["logits"], str) and found["logits"] <= 1e-12, found
    assert found["removal"] == "not removable" or float(found["removal"]) <= 1e-10, found
    assert (found["removal"] == "not removable") == (kind in HIERARCHICAL)
    assert not isinstance(found["decompx"], str) and found["decompx"] <= 1e-10, found


@pytest.mark.parametrize(
    "kind",
    tiered(
        ["class token", "registers, mean", "RMS norm, SwiGLU", "swinv2_tiny_window8_256"],
        ["class token", "swinv2_tiny_window8_256"],
    ),
)
def test_the_decomposition_oracle_tells_other_rules_apart(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [PLAIN, frozen(0.9)]
    if kind != "RMS norm, SwiGLU":  # its one activation is a gate, which is held whatever the slope
        others.append(frozen(1.0, slope="tangent"))
    for rules in others:
        monkeypatch.setattr(checks, "frozen", lambda share, rules=rules: rules)
        assert checks.decompx_error(view_of(kind)) > 1e-4


def test_the_masking_oracle_tells_other_patches_apart() -> None:
    vit = view_of("class token")
    images = zoo.image_of(vit.model, vit.plan.input_size)
    one, other = (
        oracles.masked_run(vit.model, vit.blocks[-1].module, images, torch.tensor([r]), 20)[0]
        for r in ([3], [4])
    )
    assert checks.relative(one, other) > 1e-4


@pytest.mark.parametrize("kind", tiered(PLAIN_KINDS, [k for k in REPRESENTATIVE if k in PLAIN_KINDS]))
def test_removing_one_patch_few_patches_or_none(kind: str) -> None:
    """Sizes where a table over patches is as large as one over the tokens that are left must not be mixed
    up.
    """
    vit = view_of(kind)
    count = vit.grid[0] * vit.grid[1]
    images = zoo.image_of(vit.model, vit.plan.input_size)
    with torch.no_grad(), oracles.WideSoftmax():
        tokens = vit.embed(images)
        for gone in {1, vit.prefix, 2 * vit.prefix} - {0}:
            removed, keep = torch.arange(gone)[None], torch.arange(gone, count).flip(0)[None]
            _, last = oracles.masked_run(vit.model, vit.blocks[-1].module, images, removed, count)
            x = vit.select(tokens, keep)
            for block in vit.blocks:
                x = block(x)
            assert checks.relative(x[:, vit.prefix :].flip(1), last[:, vit.prefix + gone :]) <= 1e-10
        everything = vit.select(tokens, torch.arange(count).flip(0)[None])
        assert checks.relative(vit.logits(everything), vit.logits(tokens)) <= 1e-12


@pytest.mark.parametrize(
    "kind",
    [
        "DINOv3",
        "grouped queries",
        "BeitForImageClassification (sdpa)",
        "BeitForImageClassification (eager)",
        "Dinov2WithRegistersForImageClassification (sdpa)",
        "DINOv3ViTModel and a head (sdpa)",
        "pvt_v2_b0",
    ],
)
def test_models_of_any_image_size(kind: str) -> None:
    vit = view_of(kind)
    channels, height, width = vit.plan.input_size
    rows, columns = height // vit.grid[0], width // vit.grid[1]
    images = zoo.image_of(vit.model, (channels, height + rows, width + 2 * columns))
    with torch.no_grad():
        assert checks.relative(vit(images), logits_of(vit.model(images))) <= 1e-12
        tokens = vit.embed(images)
        grid = vit.layout(tokens).grid
        assert grid == (vit.grid[0] + 1, vit.grid[1] + 2)
        if vit.plan.removable:
            _, last = oracles.masked_run(
                vit.model, vit.blocks[-1].module, images, torch.arange(5)[None], grid[0] * grid[1]
            )
            with oracles.WideSoftmax():
                x = vit.select(tokens, torch.arange(5, grid[0] * grid[1])[None])
                for block in vit.blocks:
                    x = block(x)
            assert checks.relative(x[:, vit.prefix :], last[:, vit.prefix + 5 :]) <= 1e-10


def test_a_patch_cannot_be_kept_twice() -> None:
    vit = view_of("class token")
    with pytest.raises(InputError, match="twice"):
        vit.select(vit.embed(zoo.image_of(vit.model, vit.plan.input_size)), torch.tensor([[1, 2, 1]]))


@pytest.mark.parametrize(
    "kind", tiered([*TIMM, *HIERARCHICAL], [k for k in REPRESENTATIVE if k in {*TIMM, *HIERARCHICAL}])
)
def test_fused_and_eager_attention_agree(kind: str) -> None:
    vit = view_of(kind)
    images = zoo.image_of(vit.model, vit.plan.input_size)

    def result(want: Want, rules: Any) -> list[Tensor]:
        run = forward(vit, vit.embed(images).detach(), rules=rules, want=want)
        trace = run.trace(run.logits[:, 0])
        attention = [t for l in range(trace.depth) for t in trace.attention(l)] if want.attention else []
        return [trace.tokens(0)[1], *attention]

    kept = Want(attention=vit.plan.global_attention and kind != "differential attention")
    for rules in (PLAIN, frozen(0.75)):
        fused, recorded = result(Want(), rules), result(kept, rules)
        with oracles.unfused(vit.model) as switched:
            eager = result(kept, rules)
        assert checks.relative(fused[0], recorded[0]) <= 1e-10
        assert switched or checks.relative(eager[0], recorded[0]) == 0
        for a, b in zip(eager, recorded, strict=True):
            assert torch.allclose(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "kind",
    tiered(
        [k for k in PLAIN_KINDS if "(eager)" not in k],
        [k for k in REPRESENTATIVE if k in PLAIN_KINDS and "(eager)" not in k],
    ),
)
def test_parts_are_the_attention_branch(kind: str) -> None:
    """x + s·O·(A·v) + bias is what the second norm is given; at x = 0 the value is nothing but its offset."""
    vit = view_of(kind)
    x = vit.embed(zoo.image_of(vit.model, vit.plan.input_size)).detach()
    served = 0
    for l, block in enumerate(vit.blocks):
        if block.parts is None:
            continue
        served += 1
        parts, seen = block.parts(), []
        names = ("norm2", "layernorm_after", "layer_norm2", "ln_2")
        norm = next(m for m in (getattr(block.module, n, None) for n in names) if m is not None)
        handle = norm.register_forward_hook(lambda m, given, out, seen=seen: seen.append(given[0]))
        try:
            run = forward(vit, x, want=Want(attention=True, value=True))
            at_zero = (
                forward(vit, _zeros_like(vit, x), want=Want(value=True), grad=False)
                if l == 0 and parts.before is None
                else None
            )
        finally:
            handle.remove()
        trace = run.trace(None)
        mixed = trace.mixing(l).out.transpose(1, 2).flatten(2)
        if parts.inner_norm is not None:
            eps, centered = parts.inner_norm
            spread = mixed - mixed.mean(-1, keepdim=True) if centered else mixed
            mixed = mixed / (spread.square().mean(-1, keepdim=True) + eps).sqrt()
        given = trace.tokens(l)[0]
        given = given if parts.before is None else parts.before(given)
        expected = given + mixed @ parts.output.T + (0 if parts.output_bias is None else parts.output_bias)
        assert checks.relative(expected, seen[0]) <= 1e-12
        if at_zero is not None:
            value = at_zero.records[0].attention[0].v
            value = value.transpose(1, 2).flatten(2)[0, 0]
            assert (
                checks.relative(value, parts.value_offset) <= 1e-12
                or float(parts.value_offset.abs().max()) == 0
            )
    other_make = {
        "qk-norm, parallel scaling",
        "parallel things",
        "residual post-norm",
        "differential attention",
        "post-norm EVA",
        "talking heads, class attention",
    }
    assert served == (0 if kind in other_make else len(vit.blocks))


def _zeros_like(vit: ViT, x: Tensor) -> Tensor:
    zeros = torch.zeros_like(x)
    zeros.layout_ = vit.layout(x)  # type: ignore[attr-defined]
    return zeros


def test_a_head_that_reads_class_token_and_patches_is_read_half_and_half() -> None:
    vit = view_of("Dinov2WithRegistersForImageClassification (sdpa)")
    run = forward(vit, vit.embed(zoo.image_of(vit.model, vit.plan.input_size)).detach())
    row = run.trace(None).readout_row()
    assert (
        row[0, 0] == 0.5
        and row[0, 1:3].sum() == 0
        and torch.allclose(row[0, 3:], torch.full_like(row[0, 3:], 0.5 / 16))
    )


@pytest.mark.parametrize("kind", ["hiera_tiny_224", "mvitv2_tiny", "mvitv2_small_cls"])
def test_layers_of_a_hierarchical_model_lie_on_their_grid(kind: str) -> None:
    """The input of a stage's first block is timm's own feature map of the stage before."""
    vit = view_of(kind)
    images = zoo.image_of(vit.model, vit.plan.input_size)
    with torch.no_grad():
        maps = vit.model.forward_intermediates(images, intermediates_only=True)
        hidden = forward(vit, vit.embed(images), grad=False).hidden
        layout = vit.layout(hidden[0])
    for layer, feature in zip((1, 3, 4), maps, strict=False):  # depths (1, 2, 1, 2)
        assert torch.equal(vit.blocks[layer].patches(hidden[layer], layout).permute(0, 3, 1, 2), feature)


@pytest.mark.parametrize("kind", tiered(HIERARCHICAL, ["swin_tiny_patch4_window7_224", "hiera_tiny_224"]))
def test_patches_of_the_first_layer_lie_where_the_image_has_them(kind: str) -> None:
    vit = view_of(kind)
    images = zoo.image_of(vit.model, vit.plan.input_size)
    height, width = images.shape[-2:]
    changed = images.clone()
    changed[..., height // 8 : height // 4, width * 6 // 8 : width * 7 // 8] += 5
    with torch.no_grad():
        x, y = vit.embed(images), vit.embed(changed)
        moved = (
            (vit.blocks[0].patches(y, vit.layout(y)) - vit.blocks[0].patches(x, vit.layout(x)))
            .abs()
            .sum(-1)[0]
        )
    row, column = divmod(int(moved.argmax()), moved.shape[1])
    assert (
        moved.shape[0] / 8 - 1 <= row <= moved.shape[0] / 4
        and moved.shape[1] * 6 / 8 - 1 <= column <= moved.shape[1] * 7 / 8
    )


@pytest.mark.parametrize("kind", tiered(HIERARCHICAL, ["swin_tiny_patch4_window7_224", "hiera_tiny_224"]))
def test_hierarchical_models_serve_gradient_methods_and_refuse_attention_methods(kind: str) -> None:
    vit = view_of(kind)
    images = zoo.image_of(vit.model, vit.plan.input_size, batch=2)
    for name, found in sg.explain(vit, images, method=["gaze", "cat", "gradcam"]).items():
        assert found.scores.shape == (2, *vit.grid), name
    with pytest.raises(MethodUnavailableError):
        sg.explain(vit, images, method="rollout")


@pytest.mark.parametrize(
    "kind",
    [
        "class token",
        "hybrid",
        "pvt_v2_b0",
        "xcit_nano_12_p16_224",
        "torchvision",
        "DINOv3ViTModel and a head (sdpa)",
        "BeitForImageClassification (eager)",
    ],
)
def test_nothing_is_left_on_the_model_also_after_an_error(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = BUILDERS[kind]()[0]
    model.train()
    next(model.modules()).training = True
    for i, (parameter, module) in enumerate(zip(model.parameters(), model.modules(), strict=False)):
        parameter.requires_grad_(i % 2 == 0)
        module.training = i % 3 != 0
    before = _state(model)
    vit = sg.adapt(model)
    images = zoo.image_of(model, vit.plan.input_size)
    sg.explain(model, images, method=["gaze", "cat"])
    _assert_same(before, _state(model))

    def broken(*args: Any, **kwargs: Any) -> None:
        raise FloatingPointError("broken on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(vit.blocks[-1].module, "forward", broken)
        with pytest.raises(FloatingPointError):
            sg.explain(model, images, method="gaze")
        patch.setattr(model, "forward", broken)
        del_known(model)
        with pytest.raises(FloatingPointError):
            sg.adapt(model)
    _assert_same(before, _state(model))


def del_known(model: nn.Module) -> None:
    """Let adapt check the model again."""
    vit = import_module("steadygaze.vit.adapt")  # the package has a function of this name
    vit._CHECKED.pop(model, None)
    vit._VIEWS.pop(id(model), None)


def _state(model: nn.Module) -> dict[str, Any]:
    hooks = [
        k
        for m in model.modules()
        for k, v in vars(m).items()
        if "hook" in k and isinstance(v, dict) and len(v)
    ]
    return {
        "tensors": {n: t.clone() for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "grad": [p.grad for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "hooks": hooks,
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "random": torch.get_rng_state(),
    }


def _assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before["tensors"].keys() == after["tensors"].keys()
    assert all(torch.equal(t, after["tensors"][n]) for n, t in before["tensors"].items())
    assert torch.equal(before["random"], after["random"])
    for name in ("grad", "requires_grad", "training", "hooks", "attributes"):
        assert before[name] == after[name], name


def test_a_view_is_made_once_and_again_when_the_model_changes() -> None:
    model, _ = zoo.plain("vit_tiny_patch16_224")
    first = sg.adapt(model)
    assert sg.adapt(model) is first and sg.adapt(first) is first
    model.head = zoo.randomize(nn.Linear(model.embed_dim, 3))
    assert sg.adapt(model)(zoo.image_of(model, first.plan.input_size)).shape == (1, 3)


def _plain_vit(**options: Any) -> nn.Module:
    return timm.create_model(
        "vit_tiny_patch16_224", depth=1, img_size=32, embed_dim=24, num_heads=2, **options
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: timm.create_model("resnet10t"), "ResNet is a CNN, not a vision transformer"),
        (lambda: nn.Linear(3, 2), "Linear is not a vision transformer"),
        (lambda: "vit_tiny_patch16_224", "got the name .* sg.load_model"),
        (lambda: _plain_vit(num_classes=0, global_pool=""), "global_pool='': no pooled head"),
        (
            lambda: timm.create_model(
                "swin_tiny_patch4_window7_224", depths=(1, 1, 1, 1), num_classes=0, global_pool=""
            ),
            "no pooled head",
        ),
    ],
)
def test_models_that_cannot_be_viewed(make: Any, says: str) -> None:
    with pytest.raises(UnsupportedModelError, match=says):
        sg.adapt(make())


def test_timm_models_wrapped_by_transformers_are_viewed() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.TimmWrapperConfig(
        architecture="vit_tiny_patch16_224",
        num_labels=3,
        pretrained=False,
        model_args={"depth": 1, "img_size": 32, "embed_dim": 24, "num_heads": 2},
    )
    model = zoo.randomize(transformers.TimmWrapperForImageClassification(config))
    assert checks.check(model)["decompx"] <= 1e-10


def test_another_image_size_is_another_view() -> None:
    model = tiny()
    first = sg.adapt(model)
    model.set_input_size((15, 18))
    assert first.grid == (4, 4) and sg.adapt(model).grid == (5, 6)
    assert sg.explain(model, torch.zeros(1, 3, 15, 18).double()).scores.shape == (1, 5, 6)
