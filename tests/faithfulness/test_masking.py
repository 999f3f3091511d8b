"""Attention masking: exact where it can be compared, and hidden patches have no influence on the output."""

import pytest
import timm
import torch

import benchmarks.zoo as zoo
import steadygaze as sg
from helpers.tiers import tiered
from oracles import faithfulness as oracle
from oracles.models import random_images, tiny
from steadygaze.faithfulness import Batch, evaluate, removal
from steadygaze.vit.masking import at, masked_logits
from steadygaze.vit.view import remember

HIERARCHICAL = [
    ("swin_transformer", "swin_tiny_patch4_window7_224"),
    ("swin_transformer_v2", "swinv2_tiny_window8_256"),
    ("swin_transformer_v2_cr", "swinv2_cr_tiny_224"),
    ("pvt_v2", "pvt_v2_b0"),
    ("pvt_v2", "pvt_v2_b2_li"),
    ("pit", "pit_ti_distilled_224"),
    ("mvitv2", "mvitv2_tiny"),
    ("hiera", "hiera_tiny_224"),
    ("twins", "twins_svt_small"),
    ("xcit", "xcit_nano_12_p16_224"),
]


def keeps(grid, seed: int, share: float = 0.5) -> torch.Tensor:
    keep = torch.rand(2, *grid, generator=torch.Generator().manual_seed(seed)) < share
    keep[:, 0, 0] = True
    return keep


@pytest.mark.parametrize("kind", ["class", "registers", "average", "pre_norm"])
def test_on_a_plain_vit_masking_is_removal(kind):
    model = tiny(kind)
    vit, images = sg.adapt(model), random_images(model)
    keep = keeps(vit.grid, 3)
    with torch.no_grad():
        results = masked_logits(vit, vit.embed(images), keep)
        for b in range(2):
            expected = oracle.kept_logits(model, images[b], keep[b].flatten().nonzero()[:, 0].tolist())
            torch.testing.assert_close(results[b], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("window", [2, 4])
def test_a_swin_of_one_stage_token_by_token(window, fused):
    model = timm.models.swin_transformer.SwinTransformer(
        img_size=16,
        patch_size=4,
        window_size=window,
        embed_dim=8,
        depths=(2,),
        num_heads=(2,),
        num_classes=5,
        mlp_ratio=2,
    )
    model = zoo.randomize(model).double().eval()
    for block in model.layers[0].blocks:
        block.attn.fused_attn = fused
    if window == 2:
        assert model.layers[0].blocks[1].shift_size[0] == 1
    vit = sg.adapt(model)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for share in (1.1, 0.6, 0.2):
        keep = keeps(vit.grid, 1, share)
        with torch.no_grad():
            results = masked_logits(vit, vit.embed(images), keep)
            for b in range(2):
                torch.testing.assert_close(
                    results[b], oracle.swin_masked(model, images[b], keep[b]), rtol=0, atol=1e-9
                )


@pytest.mark.parametrize(
    ("module", "name"),
    tiered(
        HIERARCHICAL,
        [
            ("swin_transformer", "swin_tiny_patch4_window7_224"),
            ("hiera", "hiera_tiny_224"),
            ("pvt_v2", "pvt_v2_b0"),
        ],
    ),
)
def test_hierarchical_models(module, name):
    model, _ = zoo.hierarchical(name, module)
    vit = sg.adapt(model)
    images = zoo.image_of(model, vit.plan.input_size, 2)
    with torch.no_grad():
        tokens = vit.embed(images)
        everything = masked_logits(vit, tokens, torch.ones(2, *vit.grid, dtype=torch.bool))
        torch.testing.assert_close(everything, vit.logits(tokens), rtol=0, atol=1e-9)
        index = torch.arange(tokens.shape[1], dtype=torch.float64)[None, :, None]
        where = vit.blocks[0].patches(index, vit.layout(tokens))[0, :, :, 0].long()
        for seed, share in enumerate((0.7, 0.2)):
            keep = keeps(vit.grid, seed, share)
            hidden = ~at(keep, tuple(where.shape))
            other = tokens.clone()
            for b in range(2):
                other[b, where[hidden[b]]] = 100.0
            results = masked_logits(vit, tokens, keep)
            assert torch.isfinite(results).all()
            assert torch.equal(results, masked_logits(vit, remember(other, vit.layout(tokens)), keep))
            assert hidden.any() and not torch.allclose(results, everything, atol=1e-6)


def test_scores_of_a_swin_say_attention_masking():
    model, _ = zoo.hierarchical("swin_tiny_patch4_window7_224", "swin_transformer")
    vit = sg.adapt(model)
    images = zoo.image_of(model, vit.plan.input_size, 2)
    maps = torch.randn(2, 2, *vit.grid, dtype=torch.float64)
    results, notes = evaluate(
        model, Batch(images, torch.tensor([1, 2])), maps, list(removal.NAMES), ratios=[0.2, 0.7]
    )
    assert set(notes.values()) == {"attention masking"}

    def logits(image, keep):
        there = torch.zeros(vit.grid[0] * vit.grid[1], dtype=torch.bool)
        there[keep] = True
        return masked_logits(vit, vit.embed(image[None]), there.view(1, *vit.grid))[0]

    with torch.no_grad():
        expected = oracle.removal(logits, images[1], maps[1, 1], 2, [0.2, 0.7])
    for name, (value, _) in expected.items():
        assert results[name].value[1, 1] == pytest.approx(value, abs=1e-8)
