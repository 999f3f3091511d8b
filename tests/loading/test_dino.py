"""Weights of DINO and DINOv2 as their authors publish them: outputs are those of timm's model with them."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor

import steadygaze as sg

SMALL: dict[str, Any] = {"depth": 2, "embed_dim": 24, "num_heads": 3}
MODELS = {  # name: (arguments, side of the images)
    "vit_small_patch16_224.dino": (SMALL, 224),
    "vit_small_patch14_dinov2.lvd142m": ({**SMALL, "img_size": 42}, 42),
    "vit_small_patch14_reg4_dinov2.lvd142m": ({**SMALL, "img_size": 42}, 42),
    "vit_giant_patch14_reg4_dinov2.lvd142m": ({**SMALL, "img_size": 42}, 42),
}


def authors_file(name: str, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """A state dict with the names and shapes of facebookresearch/dino or facebookresearch/dinov2."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=0, **arguments)
    weights = {key: torch.randn_like(value) / 5 for key, value in model.state_dict().items()}
    if name.endswith(".dino"):
        return weights
    weights["mask_token"] = torch.zeros(1, SMALL["embed_dim"])
    if "reg_token" in weights:
        weights["register_tokens"] = weights.pop("reg_token")
        weights["pos_embed"] = torch.cat([torch.randn(1, 1, SMALL["embed_dim"]), weights["pos_embed"]], 1)
    if "giant" in name:
        pairs = (("mlp.fc1", "mlp.w12"), ("mlp.fc2", "mlp.w3"))
        for ours, theirs in pairs:
            weights = {key.replace(ours, theirs): value for key, value in weights.items()}
    return weights


def timm_outputs(name: str, arguments: dict[str, Any], weights: dict[str, Tensor], images: Tensor) -> Tensor:
    model = timm.create_model(name, num_classes=0, **arguments).eval()
    model.load_state_dict(checkpoint_filter_fn(dict(weights), model))
    with torch.no_grad():
        return model(images)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("form", ["file", "safetensors", "teacher"])
def test_the_authors_file_gives_timms_outputs(name, form, tmp_path: Path):
    arguments, side = MODELS[name]
    weights = authors_file(name, arguments)
    file = tmp_path / ("weights.safetensors" if form == "safetensors" else "weights.pth")
    if form == "safetensors":
        save_file(weights, file)
    elif form == "file":
        torch.save(weights, file)
    else:
        backbone = {f"backbone.{key}": value for key, value in weights.items()}
        torch.save({"teacher": {**backbone, "dino_head.mlp.0.weight": torch.zeros(2, 2)}}, file)
    images = torch.randn(2, 3, side, side)
    loaded = sg.load_model(name, file, model_kwargs=arguments)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(images), timm_outputs(name, arguments, weights, images))
    assert len(loaded.model.state_dict()) == len(
        timm.create_model(name, num_classes=0, **arguments).state_dict()
    )


def test_a_recipe_puts_a_new_head_on_them(tmp_path: Path):
    from helpers.training import content, image_folder
    from steadygaze.training.recipe import make_recipe

    name = "vit_small_patch14_reg4_dinov2.lvd142m"
    arguments, side = MODELS[name]
    weights = authors_file(name, arguments)
    torch.save(weights, tmp_path / "dinov2.pth")
    model = {
        "name": name,
        "checkpoint": str(tmp_path / "dinov2.pth"),
        "arguments": arguments,
        "new_head": True,
    }
    data = image_folder(tmp_path / "images")
    asked = make_recipe(
        content(data, model=model, train="head", augment={"crop": "none", "flip": 0.0}, epochs=1)
    )
    got = sg.load_model(str(sg.train(asked, tmp_path / "run").folder))
    assert got.model.num_classes == 2 and got.class_names == ("bright", "dark")
    images = torch.randn(2, 3, side, side)
    with torch.no_grad():
        features = got.model.forward_head(got.model.forward_features(images), pre_logits=True)
    torch.testing.assert_close(features, timm_outputs(name, arguments, weights, images))


def test_weights_of_another_patch_size_are_refused(tmp_path: Path):
    name = "vit_small_patch14_dinov2.lvd142m"
    torch.save(authors_file(name, MODELS[name][0]), tmp_path / "weights.pth")
    with pytest.raises(sg.CheckpointError, match=r"patch_embed\.proj\.weight: model"):
        sg.load_model(
            name, tmp_path / "weights.pth", model_kwargs={**SMALL, "img_size": 56, "patch_size": 28}
        )


def test_weights_are_loaded_at_another_image_size(tmp_path: Path):
    name = "vit_small_patch14_dinov2.lvd142m"
    torch.save(authors_file(name, MODELS[name][0]), tmp_path / "weights.pth")
    loaded = sg.load_model(name, tmp_path / "weights.pth", model_kwargs={**SMALL, "img_size": 56})
    assert loaded.model.pos_embed.shape[1] == 1 + 4 * 4
