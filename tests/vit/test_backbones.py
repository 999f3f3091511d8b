"""Bare backbones, and the ViTs of further libraries: views, features, methods without a class."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import steadygaze as sg
from helpers.backbones import STAND_INS, MonaiViT
from steadygaze.vit.outputs import model_output

CLASS_FREE = ["raw_attention", "rollout", "attin", "globenc", "alti", "norms", "pca", "eigen"]


def images_of(model: nn.Module) -> Tensor:
    size, generator = sg.adapt(model).plan.input_size, torch.Generator().manual_seed(1)
    return torch.randn(2, *size, generator=generator, dtype=torch.float64)


def made(make: Any) -> nn.Module:
    torch.manual_seed(0)
    return make().double().eval()


@pytest.mark.parametrize("name", STAND_INS)
def test_the_view_gives_what_the_model_gives(name: str) -> None:
    model = made(STAND_INS[name])
    vit, images = sg.adapt(model), images_of(model)
    with torch.no_grad():
        assert torch.allclose(vit(images), model_output(model, images), atol=1e-12)
        own = model.encode_image(images) if name == "clip" else model(images)  # type: ignore[operator]
    own = own[0] if isinstance(own, tuple) else own
    if own.dim() == 2:
        assert torch.allclose(vit(images), own, atol=1e-12)
    assert vit.plan.outputs == ("classes" if "classifier" in name else "features")


@pytest.mark.parametrize("name", STAND_INS)
def test_methods_and_removal_of_stand_ins(name: str) -> None:
    model = made(STAND_INS[name])
    vit, images = sg.adapt(model), images_of(model)
    target: Any = 1 if "classifier" in name else lambda features: features[:, 1]
    found = sg.explain(model, images, target, method=["ixg", "decompx", "attnlrp", "gae", "fullgrad"])
    logits = found["decompx"].logits[:, 1]
    assert torch.isfinite(found["gae"].scores).all()
    complete = sg.explain(model, images, target, method="fullgrad:implicit=true", **_logit(target))
    if vit.readout == "mean":  # biases behind the blocks belong to patches too
        assert complete.scores.sum((1, 2)).shape == logits.shape
    tokens = vit.embed(images)
    everything = torch.arange(vit.grid[0] * vit.grid[1]).expand(2, -1)
    assert torch.allclose(vit.logits(vit.select(tokens, everything)), vit(images), atol=1e-12)
    assert sg.explain(model, images, target, method=CLASS_FREE)["alti"].scores.shape == (2, *vit.grid)


def _logit(target: Any) -> dict[str, str]:
    return {} if callable(target) else {"score": "logit"}


def test_value_rules_reach_attention_that_is_written_with_einsum() -> None:
    model = made(MonaiViT)
    images = images_of(model)
    attention = sg.explain(model, images, method="raw_attention").scores
    assert torch.allclose(attention.sum((1, 2)), torch.ones(2).double())  # there is no class token


def test_models_of_volumes_are_refused() -> None:
    model = MonaiViT()
    model.patch_embedding.patch_embeddings = nn.Conv3d(1, 16, 4, 4)
    with pytest.raises(sg.UnsupportedModelError, match="volumes"):
        sg.adapt(model)


def transformers_backbones() -> dict[str, Any]:
    library = pytest.importorskip("transformers")
    tiny = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 16,
        "patch_size": 4,
    }
    swin = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}
    pvt = {"image_size": 32, "depths": [1, 1, 1, 1]}

    def make(model: str, config: str, options: dict[str, Any], **more: Any) -> Any:
        return lambda: getattr(library, model)(getattr(library, config)(**options), **more)

    without_head = {**tiny, "vision_use_head": False}
    return {
        "ViTModel": make("ViTModel", "ViTConfig", tiny),
        "ViTModel, no pooler": make("ViTModel", "ViTConfig", tiny, add_pooling_layer=False),
        "DeiTModel": make("DeiTModel", "DeiTConfig", tiny),
        "BeitModel": make("BeitModel", "BeitConfig", tiny),
        "Dinov2Model": make("Dinov2Model", "Dinov2Config", tiny),
        "Dinov2WithRegistersModel": make("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", tiny),
        "DINOv3ViTModel": make("DINOv3ViTModel", "DINOv3ViTConfig", tiny),
        "ViTMSNModel": make("ViTMSNModel", "ViTMSNConfig", tiny),
        "IJepaModel": make("IJepaModel", "IJepaConfig", tiny),
        "ViTMAEModel": make("ViTMAEModel", "ViTMAEConfig", tiny),
        "CLIPVisionModel": make("CLIPVisionModel", "CLIPVisionConfig", tiny),
        "SiglipVisionModel": make("SiglipVisionModel", "SiglipVisionConfig", tiny),
        "SiglipVisionModel, no head": make("SiglipVisionModel", "SiglipVisionConfig", without_head),
        "SwinModel": make("SwinModel", "SwinConfig", {**swin, "window_size": 4}),
        "Swinv2Model": make("Swinv2Model", "Swinv2Config", {**swin, "window_size": 4}),
        "PvtModel": make("PvtModel", "PvtConfig", pvt),
        "PvtV2Model": make("PvtV2Model", "PvtV2Config", pvt),
    }


@pytest.mark.parametrize("name", transformers_backbones())
def test_backbones_of_transformers_give_their_features(name: str) -> None:
    model = made(transformers_backbones()[name])
    vit, images = sg.adapt(model), images_of(model)
    with torch.no_grad():
        own, got = model_output(model, images), vit(images)
    assert vit.plan.outputs == "features" and got.dim() == 2
    assert torch.allclose(own, got, atol=1e-10)
    pooled = None if "MAE" in name else getattr(model(images), "pooler_output", None)
    if pooled is not None:
        assert torch.allclose(pooled, got, atol=1e-10)
    assert sg.explain(model, images, method="norms").target is None


def test_a_masked_autoencoder_sees_all_patches_and_keeps_its_ratio() -> None:
    model: Any = made(transformers_backbones()["ViTMAEModel"])
    images, ratio = images_of(model), model.config.mask_ratio
    first, second = (sg.explain(model, images, method="rollout") for _ in range(2))
    assert torch.equal(first.scores, second.scores) and first.grid == (4, 4)
    assert model.config.mask_ratio == ratio > 0


def backbone() -> nn.Module:
    return made(
        lambda: timm.create_model(
            "vit_tiny_patch16_224", depth=2, img_size=64, embed_dim=24, num_heads=2, num_classes=0
        )
    )


@pytest.mark.parametrize("method", CLASS_FREE)
def test_methods_without_a_class_need_no_target(method: str) -> None:
    model = backbone()
    result = sg.explain(model, images_of(model), method=method)
    assert result.target is None and result.score == "none" and result.title() == ""
    assert repr(result).startswith(f"Attribution({method}, scores")
    with_class = timm.create_model(
        "vit_tiny_patch16_224", depth=2, img_size=64, embed_dim=24, num_heads=2, num_classes=3
    )
    with_class.double().eval().load_state_dict(model.state_dict(), strict=False)
    same = sg.explain(with_class, images_of(model), 1, method=method)
    assert torch.allclose(result.scores, same.scores)


def test_other_methods_and_class_numbers_are_refused_with_what_to_do() -> None:
    model = backbone()
    for arguments in ({"method": "gae"}, {"method": "rollout", "target": 3}, {"method": ["rollout", "gae"]}):
        with pytest.raises(sg.InputError, match="similar_to"):
            sg.explain(model, images_of(model), **arguments)


def test_layers_of_tokens_are_counted_from_both_ends() -> None:
    model = backbone()
    images = images_of(model)
    last, same, first = (sg.explain(model, images, method=f"norms:at={at}").scores for at in (-1, 2, -3))
    assert torch.equal(last, same) and not torch.equal(last, first)
    assert torch.allclose(first, sg.adapt(model).embed(images)[:, 1:].norm(dim=-1).unflatten(1, (4, 4)))
    with pytest.raises(sg.InputError, match=r"0\.\.2"):
        sg.explain(model, images, method="norms:at=3")


def test_the_sign_of_pca_is_negative_at_the_border() -> None:
    scores = sg.explain(backbone(), images_of(backbone()), method="pca").scores
    inside = scores[:, 1:-1, 1:-1].sum((1, 2))
    assert (inside > 0).all() and torch.allclose(scores.sum((1, 2)), torch.zeros(2).double(), atol=1e-9)
