"""Hierarchical models of transformers and torchvision: their logits, their maps, and those of timm's Swin."""

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import steadygaze as sg
from benchmarks import zoo
from benchmarks.checks import check
from helpers.tiers import tiered
from steadygaze.errors import MethodUnavailableError
from steadygaze.vit.masking import masked_logits, token_indices
from steadygaze.vit.view import remember

BUILDERS: dict[str, Any] = {
    kind: partial(zoo.transformers_hierarchical, kind) for kind in zoo.TRANSFORMERS_HIERARCHICAL
}
BUILDERS |= {f"torchvision {name}": partial(zoo.torchvision_swin, name) for name in ("swin_t", "swin_v2_t")}
METHODS = ["gaze", "fullgrad", "fullgrad:implicit=true", "gradcam", "decompx"]


@cache
def model_of(kind: str) -> nn.Module:
    return BUILDERS[kind]()[0]


@pytest.mark.parametrize(
    "kind", tiered(BUILDERS, ["SwinForImageClassification (sdpa)", "PvtV2ForImageClassification"])
)
def test_the_view_gives_the_logits_and_one_pass_is_the_decomposition(kind: str) -> None:
    found = check(model_of(kind))
    assert found["removal"] == "not removable"
    assert found["logits"] <= 1e-9 and found["decompx"] <= 1e-9


@pytest.mark.parametrize(
    "kind", tiered(BUILDERS, ["SwinForImageClassification (sdpa)", "PvtV2ForImageClassification"])
)
def test_a_batch_is_explained_as_its_images_and_the_model_stays_as_it_was(kind: str) -> None:
    model = model_of(kind)
    vit = sg.adapt(model)
    images = zoo.image_of(model, vit.plan.input_size, batch=2)
    before = copy.deepcopy(model.state_dict())
    together = sg.explain(model, images, 1, method=METHODS)
    for name, found in together.items():
        assert found.scores.shape == (2, *vit.grid) and found.scores.any(), name
        alone = sg.explain(model, images[1:], 1, method=name).scores
        torch.testing.assert_close(found.scores[1:], alone, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    with pytest.raises(MethodUnavailableError):
        sg.explain(vit, images, method="rollout")


@pytest.mark.parametrize(
    "kind", tiered(BUILDERS, ["SwinForImageClassification (sdpa)", "PvtV2ForImageClassification"])
)
@torch.no_grad()
def test_hidden_patches_do_not_reach_the_logits(kind: str) -> None:
    model = model_of(kind)
    vit = sg.adapt(model)
    images = zoo.image_of(model, vit.plan.input_size)
    tokens = vit.embed(images)
    rows, columns = vit.grid
    everything = torch.ones(1, rows, columns, dtype=torch.bool)
    torch.testing.assert_close(masked_logits(vit, tokens, everything), vit(images))
    keep = everything.clone()
    keep[0, 0, 1] = False
    cell = token_indices(vit, tokens)
    high, wide = cell.shape[0] // rows, cell.shape[1] // columns
    changed = tokens.clone()
    changed[:, cell[:high, wide : 2 * wide].flatten()] += 3
    changed = remember(changed, vit.layout(tokens))
    seen = masked_logits(vit, tokens, keep)
    assert torch.isfinite(seen).all() and not torch.allclose(seen, vit(images))
    torch.testing.assert_close(masked_logits(vit, changed, keep), seen)


@pytest.mark.parametrize(
    "kind",
    tiered([kind for kind in BUILDERS if not kind.startswith("Pvt")], ["SwinForImageClassification (sdpa)"]),
)
def test_fullgrad_adds_up_to_the_logit(kind: str) -> None:
    model = model_of(kind)
    images = zoo.image_of(model, sg.adapt(model).plan.input_size)
    found = sg.explain(model, images, 1, method="fullgrad:implicit=true", score="logit")
    tolerance = 1e-5 if "eager" in kind else 1e-9  # eager attention of Swin runs its softmax in float32
    assert float(found.scores.sum()) == pytest.approx(float(found.logits[0, 1]), rel=tolerance)


# -- one Swin in three libraries ---------------------------------------------------------------------


def timm_swin() -> nn.Module:
    import timm

    options = zoo.SMALL_SWIN | {"img_size": 128, "window_size": 4, "num_classes": zoo.CLASSES}
    return zoo.randomize(timm.create_model("swin_tiny_patch4_window7_224", **options))


def as_transformers(weights: dict[str, Tensor]) -> nn.Module:
    """transformers' Swin with the weights of timm's."""
    model = zoo.transformers_hierarchical("SwinForImageClassification (sdpa)")[0]
    body = {
        "patch_embed.proj": "embeddings.patch_embeddings.projection",
        "patch_embed.norm": "embeddings.norm",
    }
    block = {"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj"}
    renamed: dict[str, Tensor] = {}
    for key, value in weights.items():
        if key.startswith("head."):
            renamed[key.replace("head.fc", "classifier")] = value
        elif "relative_position_index" in key:
            continue
        elif key.startswith("layers."):
            _, stage, rest = key.split(".", 2)
            if rest.startswith("downsample"):  # timm's stages begin with it, those of transformers end
                renamed[f"swin.encoder.layers.{int(stage) - 1}.{rest}"] = value
                continue
            for old, new in block.items():
                rest = rest.replace(f".{old}.", f".{new}.")
            rest = rest.replace(
                "attn.relative_position_bias_table",
                "attention.relative_position_bias.relative_position_bias_table",
            )
            name = f"swin.encoder.layers.{stage}.{rest}"
            if ".attn.qkv." in name:
                for part, one in zip("qkv", value.chunk(3), strict=True):
                    renamed[name.replace("attn.qkv", f"attention.{part}_proj")] = one
            else:
                renamed[name] = value
        else:
            stem, _, leaf = key.rpartition(".")
            renamed[f"swin.{body.get(stem, 'layernorm')}.{leaf}"] = value
    model.load_state_dict(renamed)
    return model


def as_torchvision(weights: dict[str, Tensor]) -> nn.Module:
    """torchvision's Swin with the weights of timm's."""
    model = zoo.torchvision_swin("swin_t")[0]
    renamed: dict[str, Tensor] = {}
    for key, value in weights.items():
        if key.startswith("head."):
            renamed[key.replace("head.fc", "head")] = value
        elif key.startswith("patch_embed."):
            name = key.replace("patch_embed.proj", "features.0.0").replace("patch_embed.norm", "features.0.2")
            renamed[name] = value
        elif ".downsample." in key:
            stage = int(key.split(".")[1])
            renamed[f"features.{2 * stage}.{key.split('downsample.')[1]}"] = value
        else:
            renamed[_torchvision_block(key)] = value
    rest = model.load_state_dict(renamed, strict=False)
    assert not rest.unexpected_keys and all("relative_position_index" in key for key in rest.missing_keys)
    return model


def _torchvision_block(key: str) -> str:
    if not key.startswith("layers."):
        return key
    _, stage, _, block, rest = key.split(".", 4)
    rest = rest.replace("mlp.fc1", "mlp.0").replace("mlp.fc2", "mlp.3")
    return f"features.{2 * int(stage) + 1}.{block}.{rest}"


@pytest.mark.full
@pytest.mark.parametrize("convert", [as_transformers, as_torchvision])
def test_one_swin_has_one_map_in_three_libraries(convert: Any) -> None:
    first = timm_swin()
    second = convert(first.state_dict())
    images = zoo.image_of(first, (3, 128, 128), batch=2)
    with torch.no_grad():
        torch.testing.assert_close(sg.adapt(second)(images), first(images))
    methods = [*METHODS, "ixg+plus", "attnlrp", "hirescam"]
    expected, found = (sg.explain(model, images, 2, method=methods) for model in (first, second))
    for name in methods:
        assert expected[name].scores.any(), name
        torch.testing.assert_close(found[name].scores, expected[name].scores, rtol=1e-7, atol=1e-10, msg=name)
    keep = torch.rand(2, 4, 4, generator=torch.Generator().manual_seed(0)) > 0.4
    with torch.no_grad():
        masked = [masked_logits(vit, vit.embed(images), keep) for vit in map(sg.adapt, (first, second))]
    torch.testing.assert_close(masked[0], masked[1])
