"""A teacher sees the student's images as it is used to: in its own normalization; one that cannot is
refused before the first step."""

import pytest
import torch

import steadygaze as sg
from helpers.training import content
from steadygaze.training.loop import TrainingRun
from steadygaze.training.losses.distillation import Teacher
from steadygaze.training.model import build_recipe_model
from steadygaze.training.recipe import make_recipe


def student(data, teacher, **shown):
    given = content(
        data,
        epochs=1,
        losses={"cross_entropy": {}, "distillation": {"teacher": str(teacher), "form": "soft"}},
    )
    given["data"] |= shown
    return make_recipe(given)


@pytest.fixture(scope="module")
def teacher(data, tmp_path_factory):
    return sg.train(make_recipe(content(data)), tmp_path_factory.mktemp("teacher")).folder


def test_it_sees_images_in_its_own_normalization(data, teacher, tmp_path):
    """timm's 0.5/0.5 for the teacher; the student is trained with ImageNet's."""
    loaded = sg.load_model(str(teacher))
    pixels = torch.rand(2, 3, *loaded.size)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    assert loaded.mean != mean
    run = TrainingRun(student(data, teacher, mean=list(mean), std=list(std)), tmp_path)
    seen = (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    own = (pixels - torch.tensor(loaded.mean).view(3, 1, 1)) / torch.tensor(loaded.std).view(3, 1, 1)
    with torch.no_grad():
        assert torch.allclose(
            run.objective.losses["distillation"].teacher(seen), loaded.model(own), atol=1e-5
        )
        assert not torch.allclose(loaded.model(seen), loaded.model(own), atol=1e-3), (
            "the difference is too small to be seen"
        )
    run.close()


def test_the_same_normalization_changes_no_number(data, teacher):
    shape = build_recipe_model(student(data, teacher)).preprocess
    loaded = sg.load_model(str(teacher))
    images = torch.randn(2, 3, *loaded.size)
    assert torch.equal(Teacher(loaded, shape)(images), loaded.model(images))


def test_another_size_and_other_classes_are_refused(data, teacher, tmp_path):
    with pytest.raises(
        sg.InputError,
        match=r"embedded does not accept the student's images of 16x16 .* Use a teacher of that size",
    ):
        sg.train(student(data, "embedded"), tmp_path / "a")
    three = content(
        data,
        epochs=1,
        model={"name": "vit_tiny_patch16_224", "arguments": {"img_size": 32, "depth": 1, "embed_dim": 12}},
    )
    three["losses"] = {"distillation": {"teacher": "embedded"}}
    with pytest.raises(sg.InputError, match="expected the student's 2 classes, embedded has 10"):
        sg.train(make_recipe(three), tmp_path / "b")
