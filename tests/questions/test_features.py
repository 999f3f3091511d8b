"""Quantities of features as targets: similarity to an image, a principal component, the norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.cli import app
from steadygaze.questions.features import FeatureValue

NAME, SIZE = "vit_tiny_patch16_224", 64
TINY = {"depth": 2, "embed_dim": 24, "num_heads": 2, "img_size": SIZE}


def backbone(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(NAME, **{"num_classes": 0, **TINY, **options}).double().eval()


def dinov2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=SIZE, patch_size=16
    )
    return transformers.Dinov2Model(config).double().eval()


def images(count: int) -> torch.Tensor:
    return torch.randn(count, 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def features_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output = model(x)
    return output if isinstance(output, torch.Tensor) else output.pooler_output


@pytest.mark.parametrize("make", [backbone, dinov2])
def test_the_explained_values(make: Any) -> None:
    model, x = make(), images(5)
    f = features_of(model, x)
    values = {
        "similarity": (sg.similar_to(x[4]), F.cosine_similarity(f, f[4:], dim=-1)),
        "feature norm": (sg.feature_norm(), f.norm(dim=-1)),
    }
    for name, (target, expected) in values.items():
        result = sg.explain(model, x, target=target, method="ixg")
        assert torch.allclose(result.logits[:, 0], expected) and result.classes == (name,)
        assert result.outputs == "values" and result.scores.shape == (5, 4, 4)
    centered = f - f.mean(0)
    _, axes = torch.linalg.eigh(centered.T @ centered)
    for k in range(2):
        result = sg.explain(model, x, target=sg.component(k, x), method="ixg")
        axis = axes[:, -1 - k]
        axis = axis * axis[axis.abs().argmax()].sign()
        assert torch.allclose(result.logits[:, 0], centered @ axis, atol=1e-8)


def test_similarity_is_that_of_a_callable_and_complete_with_a_frozen_norm() -> None:
    model, x = backbone(), images(2)
    embedding = F.normalize(features_of(model, x[1:])[0], dim=0)
    target = lambda f: F.normalize(f, dim=-1) @ embedding  # noqa: E731
    asked, by_hand = (sg.explain(model, x, t, method="gae") for t in (sg.similar_to(embedding), target))
    assert torch.allclose(asked.scores, by_hand.scores)
    result = sg.explain(model, x, sg.similar_to(x[1]), method="decompx")
    assert result.unattributed is not None
    assert torch.allclose(result.scores.sum((1, 2)) + result.unattributed, result.logits[:, 0])
    first = sg.explain(model, x[:1], sg.similar_to(x[1:]))
    second = sg.explain(model, x[1:], sg.similar_to(x[:1]))
    assert torch.allclose(first.logits, second.logits)


def test_ask_gives_a_model_that_verify_measures() -> None:
    model, x = backbone(), images(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    asked = sg.ask(model, feature=sg.similar_to(x[2]))
    assert isinstance(asked, FeatureValue) and sg.adapt(asked).plan.outputs == "values"
    rows = sg.verify(asked, [(x, torch.zeros(3, dtype=torch.long))], methods=["gae", "norms", "random"])
    assert {row["metric"] for row in rows} == {"insertion_value", "deletion_value"}
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_images_of_every_kind_are_the_same_image(tmp_path: Path) -> None:
    loaded = sg.load_model(backbone().float(), image_size=SIZE)
    pixels = np.random.default_rng(0).integers(0, 256, (80, 70, 3), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "other.png")
    prepared = loaded.preprocess(picture)
    x = images(1).float()
    kinds: list[Any] = [tmp_path / "other.png", str(tmp_path / "other.png"), picture, pixels, prepared]
    values = [sg.explain(loaded, x, sg.similar_to(kind), method="ixg").logits for kind in kinds]
    assert all(torch.equal(values[0], value) for value in values)
    named = sg.ask(loaded, feature=sg.similar_to(kinds[0]))
    assert named.class_names == ("similarity to other.png",)
    others = [sg.ask(loaded, feature=t) for t in (sg.similar_to(x), sg.feature_norm())]
    assert len({loaded.weights_hash, named.weights_hash, *(o.weights_hash for o in others)}) == 4
    two = sg.explain(loaded, x, sg.component(0, [picture, kinds[0], x[0].numpy().T.astype(np.uint8)]))
    assert two.classes == ("component 0",)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (sg.similar_to(images(2)), "one image"),
        (sg.similar_to(torch.zeros(7)), "width 24"),
        (sg.similar_to(torch.full((24,), float("nan"))), "finite"),
        (sg.similar_to(3), "similar_to: images: expected a path"),
        (sg.similar_to([]), "similar_to: images: expected at least one"),
        (sg.component(4, images(5)), r"0\.\.3"),
        (sg.component(-1, images(5)), r"0\.\.3"),
        (sg.component(0, images(1)), "two images"),
    ],
)
def test_what_is_wrong_with_a_target_is_said(target: Any, says: str) -> None:
    with pytest.raises(sg.InputError, match=says):
        sg.explain(backbone(), images(1), target)


def test_images_of_a_target_are_preprocessed_like_the_explained_ones(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 70, 80, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    model, file = backbone().float(), tmp_path / "0.png"
    loaded = sg.load_model(model)
    x = torch.stack([loaded.preprocess(Image.fromarray(image)) for image in pixels])
    expected = sg.explain(model, x[1:2], sg.similar_to(x[:1]), "ixg").scores
    for held in (model, loaded, sg.adapt(model)):
        for other in (file, str(file), Image.open(file), pixels[0]):
            assert torch.equal(sg.explain(held, pixels[1], sg.similar_to(other), "ixg").scores, expected)
    asked = sg.ask(model, feature=sg.similar_to(file))
    assert torch.equal(sg.explain(asked, x[1:2], method="ixg").scores, expected)
    component = sg.explain(model, x[1:2], sg.component(0, x), "ixg").scores
    assert torch.equal(sg.explain(model, pixels[1], sg.component(0, tmp_path), "ixg").scores, component)

    bare = dinov2().float()
    with pytest.raises(sg.InputError, match="similar_to: transform: how Dinov2Model preprocesses"):
        sg.explain(bare, x[:1], sg.similar_to(file))
    transform = loaded.preprocess
    found = sg.explain(bare, pixels[1], sg.similar_to(file), "ixg", transform=transform)
    assert torch.equal(found.scores, sg.explain(bare, x[1:2], sg.similar_to(x[0]), "ixg").scores)
    asked = sg.ask(bare, feature=sg.similar_to(file), transform=transform)
    assert torch.equal(sg.explain(asked, x[1:2], method="ixg").scores, found.scores)


def test_classifiers_have_no_features_and_ask_wants_a_quantity() -> None:
    with pytest.raises(sg.InputError, match="num_classes=0"):
        sg.explain(backbone(num_classes=3), images(1), sg.similar_to(images(1)))
    with pytest.raises(sg.InputError, match="similar_to"):
        sg.ask(backbone(), feature=images(1))  # type: ignore[arg-type]


def test_a_bare_backbone_is_refused_by_verify() -> None:
    with pytest.raises(sg.InputError, match="similar_to"):
        sg.verify(backbone(), [(images(1), torch.tensor([0]))], methods="gae")


def test_the_command_line(tmp_path: Path) -> None:
    from safetensors.torch import save_model

    save_model(backbone().float(), str(tmp_path / "weights.safetensors"))
    for name, seed in (("a", 0), ("b", 1)):
        pixels = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / "data" / name / f"{name}.png")
    a, b = (str(tmp_path / "data" / name / f"{name}.png") for name in "ab")
    sizes = [f"{key}={value}" for key, value in TINY.items() if key != "img_size"]
    model = ["-m", NAME, "--checkpoint", str(tmp_path / "weights.safetensors"), "--num-classes", "0"]
    model += ["--image-size", str(SIZE), *(word for size in sizes for word in ("--model-kwargs", size))]

    def run(*words: str) -> Any:
        return CliRunner().invoke(app, list(words))

    free = run("explain", a, b, *model, "--method", "rollout,norms,pca", "-o", str(tmp_path / "free"))
    assert free.exit_code == 0 and "24 features" in free.output
    with np.load(tmp_path / "free" / "scores.npz") as scores:
        assert scores["pca"].shape == (2, 4, 4) and "target" not in scores
    pair = run("explain", a, *model, "--similar-to", b, "--method", "gae", "-o", str(tmp_path / "pair"))
    assert pair.exit_code == 0 and "similarity to b.png" in pair.output
    verify = ["verify", *model, "-d", str(tmp_path / "data"), "--methods", "gae", "-o", str(tmp_path / "run")]
    assert run(*verify, "--similar-to", b).exit_code == 0
    for words in (
        ("explain", a, *model),
        ("explain", a, *model, "--method", "rollout", "--top", "2"),
        ("explain", a, *model, "--similar-to", str(tmp_path / "none.png")),
        ("explain", a, *model, "--similar-to", b, "--text", "a cat"),
        tuple(verify),
    ):
        folder = () if "-o" in words else ("-o", str(tmp_path / "refused"))
        result = run(*words, *folder)
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit)
