"""What a call made is gone when it returns: no reference cycle keeps a graph alive until the collector
comes round.
"""

import gc
import warnings

import pytest
import torch
from transformers import ViTConfig, ViTForImageClassification

import steadygaze as sg


def tensors() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at every object wakes deprecated names of torch
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
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
