"""Attention diversification from fused attention is `adl_loss` of the maps, in value and in every
gradient."""

import pytest
import torch
import torch.nn.functional as F

import steadygaze as sg
from helpers.losses import tiny
from helpers.tiers import tiered
from steadygaze.trace import Seam, Want
from steadygaze.training.losses import adl as adl_loss
from steadygaze.training.losses import adl as fused_adl
from steadygaze.training.losses.adl import DiversitySeam, seam_loss

FORMS = ("paper", "code", "per_head")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("stored", [True, False])
def test_fused_is_the_same_as_kept(form, size, stored, monkeypatch):
    model = tiny(noise=0.8, depth=3)
    # two images at a time: 5 images are three slices
    monkeypatch.setattr(fused_adl, "CACHE_SIZE", 2 * 2 * 17**2)
    monkeypatch.setattr(fused_adl, "_stores_maps", lambda q, k: stored)
    images = torch.randn(size, 3, 16, 16, dtype=torch.float64)
    weights = list(model.parameters())
    with DiversitySeam(form=form) as seam:
        logits = model(images)
    assert len(seam.similarities) == 3 and not seam.record.attention, "no map may be kept"
    kept = Seam(want=Want(hidden=False, attention=True))
    with kept:
        plain = model(images)
    wanted = adl_loss.adl([a.a for a in kept.record.attention], form=form)
    assert seam_loss(seam).item() == pytest.approx(wanted.item(), rel=1e-10) and wanted.item() > 0
    assert torch.allclose(logits, plain, rtol=1e-10)
    both = [
        torch.autograd.grad(y.square().sum() + 7 * loss, weights)
        for y, loss in ((logits, seam_loss(seam)), (plain, wanted))
    ]
    assert all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in zip(*both, strict=True))


def test_eager_attention_is_read_from_its_softmax():
    model, images = tiny(noise=0.8, depth=3), torch.randn(2, 3, 16, 16, dtype=torch.float64)
    with DiversitySeam() as fused:
        model(images)
    for block in model.blocks:
        block.attn.fused_attn = False
    with DiversitySeam() as eager:
        model(images)
    assert len(eager.record.attention) == 3 and not eager.similarities
    assert seam_loss(eager).item() == pytest.approx(seam_loss(fused).item(), rel=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stored", tiered([True, False], [True]))
def test_masks_and_single_queries(form, stored, monkeypatch):
    monkeypatch.setattr(fused_adl, "_stores_maps", lambda q, k: stored)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (3 * torch.randn(2, 2, 4, 3, dtype=torch.float64, generator=generator) for _ in range(3))
    bias = torch.randn(2, 1, 4, 4, dtype=torch.float64, generator=generator)

    def both(q, k, v):
        with DiversitySeam(form=form) as seam:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            F.scaled_dot_product_attention(q[:, :, :1], k, v)  # class attention: left out
        assert len(seam.similarities) == 1
        return out, seam_loss(seam)

    assert torch.allclose(both(q, k, v)[0], F.scaled_dot_product_attention(q, k, v, attn_mask=bias))
    assert torch.autograd.gradcheck(both, [t.requires_grad_() for t in (q, k, v)])


def test_a_model_without_attention_is_refused():
    with DiversitySeam() as seam:
        torch.nn.Linear(2, 2)(torch.ones(1, 2))
    with pytest.raises(sg.MethodUnavailableError, match="no attention"):
        seam_loss(seam)
