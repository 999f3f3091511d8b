"""What a call made is gone when it returns: no reference cycle keeps a graph alive until the collector
comes round.
"""

import gc
import warnings

import pytest
import timm
import torch
from transformers import ViTConfig, ViTForImageClassification

import steadygaze as sg
from helpers.tiers import tiered
from steadygaze.trace.capture import forward
from steadygaze.trace.record import Want
from steadygaze.trace.rules import frozen


def tensors() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at every object wakes deprecated names of torch
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("attention", tiered(["eager", "sdpa"], ["eager"]))
def test_nothing_stays_alive(attention: str) -> None:
    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
        num_labels=3,
        attn_implementation=attention,
    )
    vit = sg.adapt(ViTForImageClassification(config).eval())
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    names = [
        "gae",
        "fullgrad:implicit=true",
        "gaze",
        "transatt",
        "full_lrp",
        "alti",
        "attnlrp",
        "decompx:bias=absdot",
        "gaze_twice",
        "gaze_halves",
    ]
    sg.explain(vit, images, method=names)
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        sg.explain(vit, images, method=names)
        assert tensors() <= before
    finally:
        gc.enable()


def test_gaze_removal_keeps_no_attention_matrix() -> None:
    """Memory does not grow with depth x N²: nothing of N x N is saved for the backward pass."""
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=48, patch_size=8, depth=2, num_classes=3
    ).eval()
    images = torch.randn(1, 3, 48, 48, generator=torch.Generator().manual_seed(0))
    vit, saved = sg.adapt(model), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        sg.explain(vit, images, 1, "gaze_removal")
        assert saved and not [shape for shape in saved if shape[-2:] == (37, 37)]
        sg.explain(vit, images, 1, "gae")  # which needs them
        assert [shape for shape in saved if shape[-2:] == (37, 37)]


@pytest.mark.parametrize("freeze", tiered([0.0, 0.75, 1.0], [0.75]))
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "beit_base_patch16_224"])
def test_key_effects_do_not_depend_on_how_attention_runs(name: str, freeze: float) -> None:
    """BEiT's relative positions are a mask of the fused kernel."""
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=32, patch_size=8, depth=2, num_classes=3).double().eval()
    vit = sg.adapt(model)
    tokens = vit.embed(torch.randn(2, 3, 32, 32, dtype=torch.double)).detach()
    effects = []
    for want in (Want(keys=True), Want(attention=True)):
        run = forward(vit, tokens, rules=frozen(freeze), want=want)
        trace = run.trace(run.logits[:, 1])
        effects.append([torch.stack([trace.key_effects(l), trace.tokens(l)[1].sum(-1)]) for l in range(2)])
    for fused, written_out in zip(*effects, strict=True):
        torch.testing.assert_close(fused, written_out, rtol=1e-10, atol=1e-12)
