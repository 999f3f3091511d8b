"""FullGrad where tokens are moved inside a block: Swin, Swin V2, PVT v2, PiT, MViT v2, Hiera, Twins, XCiT."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import zoo
from benchmarks.oracles import unfused
from helpers import tiny_models
from helpers.tiers import tiered
from oracles import hierarchical as oracle
from steadygaze.trace import PLAIN, Rules, Trace, Want, forward, frozen
from steadygaze.trace.completeness import resize_map
from steadygaze.vit.contexts import evaluation_mode
from steadygaze.vit.view import ViT

TARGET = 1
MODELS = {
    "Swin": ("swin_tiny_patch4_window7_224", "swin_transformer"),
    "Swin V2": ("swinv2_tiny_window8_256", "swin_transformer_v2"),
    "Swin V2 CR": ("swinv2_cr_tiny_224", "swin_transformer_v2_cr"),
    "PVT v2": ("pvt_v2_b0", "pvt_v2"),
    "PVT v2, linear": ("pvt_v2_b2_li", "pvt_v2"),
    "PiT": ("pit_ti_distilled_224", "pit"),
    "MViT v2": ("mvitv2_tiny", "mvitv2"),
    "MViT v2, class token": ("mvitv2_small_cls", "mvitv2"),
    "Hiera": ("hiera_tiny_224", "hiera"),
    "Twins": ("twins_svt_small", "twins"),
    "LeViT": ("levit_128s", "levit"),
    "XCiT": ("xcit_nano_12_p16_224", "xcit"),
}


@lru_cache
def make(name: str) -> tuple[nn.Module, Tensor]:
    model = zoo.hierarchical(*MODELS[name])[0]
    return model, tiny_models.images_of(model, batch=1)


def traced(vit: ViT, images: Tensor, rules: Rules, *, implicit: bool) -> Trace:
    with evaluation_mode(vit.model):
        with torch.no_grad():
            tokens = vit.embed(images)
        run = forward(vit, tokens, rules=rules, want=Want(bias=True, implicit=implicit))
        return run.trace(run.logits[:, TARGET], retain=True)


def offsets(trace: Trace, implicit: bool) -> list[Tensor]:
    """(B,) for each block and the head: all bias terms of all tokens."""
    both = [
        (trace.bias_terms(l, implicit=implicit), trace.bias_rest(l, implicit=implicit))
        for l in range(trace.depth + 1)
    ]
    return [(at_input.sum(1) + at_output.sum(1)).detach() for at_input, at_output in both]


def class_token_share(model: nn.Module, trace: Trace) -> Tensor | float:
    """<c, dy/dc> of a class token c that joins behind the blocks: no token of any x^l, no bias."""
    if type(model).__name__ != "Xcit":
        return 0.0
    from steadygaze.trace.seam import Seam

    with evaluation_mode(model), Seam(trace.run.rules):
        model.cls_token.requires_grad_()
        logit = trace.vit.head(trace.run.hidden[-1].detach())[:, TARGET].sum()
        (g,) = torch.autograd.grad(logit, model.cls_token)
    return (model.cls_token * g).sum().detach()


@pytest.mark.parametrize("name", tiered(MODELS, ["Swin", "Hiera", "LeViT"]))
def test_tokens_and_offsets_add_up_to_the_logit(name: str) -> None:
    """From every layer: with implicit terms always.

    without, where everything is frozen, and not under the ordinary gradient.
    """
    model, images = make(name)
    for rules, implicit in ((PLAIN, True), (frozen(1.0), False), (frozen(0.5, "tangent"), True))[
        : 3 if name in ("PiT", "XCiT") else 2
    ]:
        trace = traced(sg.adapt(model), images, rules, implicit=implicit)
        logit, terms, outside = (
            trace.logits.detach()[:, TARGET],
            offsets(trace, implicit),
            class_token_share(model, trace),
        )
        for l in range(trace.depth):
            x, g = trace.tokens(l)
            total = (x * g).sum((1, 2)) + torch.stack(terms[l:]).sum(0) + outside
            assert (total - logit).abs().max() < 1e-10, f"{name} from layer {l} under {rules}"
        if rules is PLAIN:
            x, g = trace.tokens(0)
            without = (x * g).sum((1, 2)) + torch.stack(offsets(trace, False)).sum(0) + outside
            assert (without - logit).abs().max() > 1e-4, (
                "the ordinary gradient is not complete without implicit terms"
            )


@pytest.mark.parametrize("name", tiered(["PVT v2", "Hiera", "Twins"], ["Hiera"]))
def test_the_map_of_an_averaged_head_is_complete(name: str) -> None:
    """No prefix: resized and summed over the patches, the map is the logit, from any start."""
    model, images = make(name)
    names = ["fullgrad:implicit=true", "fullgrad:implicit=true,start=3"]
    for key, attribution in sg.explain(model, images, target=TARGET, method=names).items():
        error = attribution.scores.sum((1, 2)) - attribution.logits[:, TARGET]
        assert error.abs().max() < 1e-10, f"{name}, {key}"
        assert attribution.scores.std() > 1e-3


@pytest.mark.parametrize("name", tiered(MODELS, ["Swin", "Hiera", "LeViT"]))
def test_explicit_terms_are_bias_times_gradient(name: str) -> None:
    """Block by block, against autograd at the parameters themselves."""
    model, images = make(name)
    vit = sg.adapt(model)
    got = offsets(traced(vit, images, PLAIN, implicit=False), False)
    tokens = vit.embed(images).detach()
    value = vit.logits(tokens.requires_grad_())[0, TARGET]
    everything = oracle.bias_total(value, [model])
    blocks = [oracle.bias_total(value, [block.module]) for block in vit.blocks]
    assert abs(float(torch.stack(got).sum()) - float(everything)) < 1e-10
    between = [float((g - b).abs()) for g, b in zip(got, blocks, strict=False)]
    changes = [
        a.shape != b.shape for a, b in zip(vit_states(vit, tokens), vit_states(vit, tokens)[1:], strict=False)
    ]
    for l, (difference, changed) in enumerate(zip(between, changes, strict=True)):
        if not changed and name != "Twins":  # Twins: a convolution for positions stands behind a block
            assert difference < 1e-10, f"{name}, block {l}"


def vit_states(vit: ViT, x: Tensor) -> list[Tensor]:
    found = [x]
    with torch.no_grad():
        for block in vit.blocks:
            found.append(block(found[-1]))
    return found


def test_swin_against_the_oracle_token_by_token() -> None:
    model, images = make("Swin")
    with unfused(model):
        wanted = oracle.swin_terms(model, images, TARGET)
    trace = traced(sg.adapt(model), images, PLAIN, implicit=False)
    for l, (at_input, at_output) in enumerate(wanted):
        assert (trace.bias_terms(l) - at_input).abs().max() < 1e-12, f"block {l}, placed"
        assert (trace.bias_rest(l) - at_output).abs().max() < 1e-12, f"block {l}, rest"
        assert at_input.std() > 1e-6
    maps = sg.explain(model, images, target=TARGET, method=["ixg", "fullgrad"])
    head = float((model.norm.bias @ model.head.fc.weight[TARGET] + model.head.fc.bias[TARGET]).detach())
    grids, last = trace.run.layout.state, trace.run.layout.grid
    total = maps["ixg"].scores + head / (last[0] * last[1])
    for l, pieces in enumerate(wanted):
        total = total + sum(resize_map(p.unflatten(1, grids[l + k]), last) for k, p in enumerate(pieces))
    assert (maps["fullgrad"].scores - total).abs().max() < 1e-12


@pytest.mark.parametrize(
    "name", tiered(["class", "average", "relative positions", "EVA-02 tiny (rotary, SwiGLU)"], ["class"])
)
def test_on_a_plain_vit_it_is_the_plain_way(name: str) -> None:
    """The same models, taken for ones that move their tokens: every term stands at the same token."""
    model = tiny_models.ALL[name]()
    vit, images = sg.adapt(model), tiny_models.images_of(model)
    moved = ViT(model, replace(vit.plan, global_attention=False))
    for rules in (PLAIN, frozen(0.5, "tangent"), frozen(1.0)):
        plain, other = (traced(v, images, rules, implicit=True) for v in (vit, moved))
        for implicit in (False, True):
            for l in range(plain.depth + 1):
                got = other.bias_terms(l, implicit=implicit) + other.bias_rest(l, implicit=implicit)
                assert (got - plain.bias_terms(l, implicit=implicit)).abs().max() < 1e-10, (
                    f"{name}, block {l}, {rules}"
                )


def test_norms_of_queries_and_keys_stand_at_the_query() -> None:
    """The one difference on a plain ViT: a bias between the projection and A is no longer at its key, but
    where it arrives.
    """
    model = tiny_models._changed(qk_norm=True)
    vit, images = sg.adapt(model), tiny_models.images_of(model)
    moved = ViT(model, replace(vit.plan, global_attention=False))
    plain, other = (traced(v, images, PLAIN, implicit=True) for v in (vit, moved))
    for l in range(plain.depth):
        got, wanted = other.bias_terms(l) + other.bias_rest(l), plain.bias_terms(l)
        assert (got.sum(1) - wanted.sum(1)).abs().max() < 1e-10
        assert (got - wanted).abs().max() > 1e-6


@pytest.mark.parametrize("name", tiered(["PiT", "Hiera"], ["Hiera"]))
def test_each_bias_counts_once_under_every_aggregator(name: str) -> None:
    model, images = make(name)
    depth = len(sg.adapt(model).blocks)
    half = -(-depth // 2)
    names = [
        "cat",
        "fullgrad_plus",
        "ixg",
        "fullgrad",
        "ixg+skipplus",
        "fullgrad+skipplus",
        f"ixg:start={half}",
        f"fullgrad:start={half}",
        "ixg+last",
        "fullgrad+last",
        f"fullgrad:start={depth - 1}",
    ]
    m = {k: a.scores for k, a in sg.explain(model, images, method=names).items()}
    assert (m["fullgrad_plus"] - m["cat"] - (m["fullgrad"] - m["ixg"])).abs().max() < 1e-12
    wanted = m[f"fullgrad:start={half}"] - m[f"ixg:start={half}"]
    assert (m["fullgrad+skipplus"] - m["ixg+skipplus"] - wanted).abs().max() < 1e-12
    assert torch.equal(m["fullgrad+last"], m[f"fullgrad:start={depth - 1}"])
    assert (m["fullgrad"] - m["fullgrad_plus"]).abs().max() > 1e-3
