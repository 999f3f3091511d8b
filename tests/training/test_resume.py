"""A run may begin with what another one wrote, or with any model that `load_model` knows; what comes out is
loaded by its folder alone."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import steadygaze as sg
from benchmarks import zoo
from helpers.tiers import tiered
from helpers.training import MODEL, content, image_folder, masks_of, same, weights
from steadygaze.cli import app
from steadygaze.modules import inserted
from steadygaze.training.recipe import make_recipe

WITH = {"tap": {"branches": 3}, "cb": {"variant": "scaled"}}


@pytest.fixture(scope="module")
def masked(tmp_path_factory) -> Path:
    folder = image_folder(tmp_path_factory.mktemp("masked"), masks=True)
    (folder / "masks").rename(folder.parent / f"{folder.name}-masks")
    return folder


@pytest.fixture(scope="module")
def before(masked, tmp_path_factory) -> Path:
    return sg.train(
        make_recipe(content(masked, epochs=1, modules=WITH)), tmp_path_factory.mktemp("before")
    ).folder


def onward(masked: Path, model: dict, **more):
    given = content(masked, epochs=1, model=model, losses={"relevance": {}}, **more)
    given["data"]["masks"] = masks_of(masked)
    return make_recipe(given)


def loads_again(trained, names: tuple[str, ...] | None):
    loaded = sg.load_model(str(trained.folder))
    images = torch.randn(2, 3, *loaded.size)
    with torch.no_grad():
        got, wanted = (m.eval()(images) for m in (loaded.model, trained.model))
    assert torch.equal(getattr(got, "logits", got), getattr(wanted, "logits", wanted))
    assert loaded.class_names == names
    return loaded


@pytest.mark.parametrize(
    "by", tiered(["folder", "file", "file, with the same modules", "file, with other arguments"], 1)
)
def test_from_the_weights_of_a_run_with_modules(by, masked, before, tmp_path):
    file = {"name": "vit_tiny_patch16_224", "checkpoint": str(before / "model.safetensors")}
    model = {"name": str(before)} if by == "folder" else file
    model |= {"arguments": MODEL | {"proj_drop_rate": 0.1}} if "arguments" in by else {}
    more = {"modules": WITH} if "modules" in by else {}
    trained = sg.train(onward(masked, model, **more), tmp_path / "after")
    loaded = loads_again(trained, ("bright", "dark"))
    assert (
        list(inserted(loaded.model)) == list(inserted(sg.load_model(str(before)).model))
        and len(inserted(loaded.model)) == 4
    )
    assert not same(weights(before), weights(tmp_path / "after"))
    third = sg.train(onward(masked, {"name": str(tmp_path / "after")}), tmp_path / "third")
    loads_again(third, ("bright", "dark"))


def test_other_modules_than_the_weights_have(masked, before, tmp_path):
    with pytest.raises(
        sg.InputError,
        match=r"modules.tap: the weights contain it already, .*branches=3.*got .*branches=4",
    ):
        sg.train(onward(masked, {"name": str(before)}, modules={"tap": {"branches": 4}}), tmp_path / "run")


@pytest.mark.full
def test_from_models_that_are_not_of_timm(masked, tmp_path):
    from transformers import ViTImageProcessor

    zoo.transformers_model("ViTForImageClassification", "sdpa")[0].float().save_pretrained(tmp_path / "hf")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "hf")
    for name, number in (("bright", 0), ("dark", 1)):
        for folder in (masked, Path(masks_of(masked))):
            (tmp_path / folder.name).mkdir(exist_ok=True)
            (tmp_path / folder.name / str(number)).symlink_to(folder / name)
    data = tmp_path / masked.name
    trained = sg.train(onward(data, {"name": str(tmp_path / "hf")}, modules={"cb": {}}), tmp_path / "after")
    assert loads_again(trained, None).source == "transformers"
    begun = sg.load_model("embedded")
    assert (
        loads_again(sg.train(onward(data, {"name": "embedded"}), tmp_path / "ours"), begun.class_names).source
        == "embedded"
    )


@pytest.mark.full
def test_verify_and_card_say_that_patches_were_hidden(masked, before, tmp_path):
    def call(*words) -> str:
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code == 0, done.output
        return done.output

    said = (
        f"patches of {before} cannot be removed: they were hidden from attention instead (attention masking)"
    )
    asked = ("--data", masked, "--methods", "ixg", "--metrics", "deletion_aopc", "--limit", "4")
    assert said in call("verify", "--model", before, *asked, "--out", tmp_path / "run")
    plain = sg.train(make_recipe(content(masked, epochs=1)), tmp_path / "plain").folder
    text = call(
        "card", plain, before, *asked, "--suites", "occlusion", "--out", tmp_path / "card", "--no-images"
    )
    assert said in text and text.count("cannot be removed") == 1
    page = (tmp_path / "card" / "card.html").read_text(encoding="utf-8")
    assert (
        "Patches of the model after cannot be removed" in page
        and "the two are not measured with the same settings" in page
    )


@pytest.mark.full
def test_rrr_is_a_sum_over_the_whole_step(masked, tmp_path):
    """In two pieces the step is the same one: the mean over pieces of their sums would be half as large."""
    for pieces in (1, 2):
        given = content(masked, losses={"rrr": {}}, accumulate=pieces, optimizer={"name": "sgd", "lr": 0.05})
        given["data"] = {"train": str(masked), "masks": masks_of(masked)}
        sg.train(make_recipe(given), tmp_path / str(pieces))
    one, two = (weights(tmp_path / str(pieces)) for pieces in (1, 2))
    assert all(torch.allclose(one[key], two[key], rtol=1e-4, atol=1e-6) for key in one)


def test_images_without_a_mask_are_counted(masked, tmp_path):
    lacking = tmp_path / "lacking-masks"
    for name in ("bright", "dark"):
        (lacking / name).mkdir(parents=True)
        for mask in sorted((Path(masks_of(masked)) / name).glob("*.png"))[1:]:
            (lacking / name / mask.name).write_bytes(mask.read_bytes())
    given = onward(masked, {"name": "vit_tiny_patch16_224", "arguments": MODEL})
    given.data.__dict__["masks"] = str(lacking)
    assert "data.train: 2 images without a mask are left out" in sg.train(given, tmp_path / "run").notes


def test_the_command_says_what_the_modules_add(masked, tmp_path):
    settings = (f"data.train={masked}", "epochs=1", "batch=4", "tensorboard=false")
    words = [
        "train",
        "cifar10-tap",
        "--out",
        str(tmp_path / "run"),
        *(w for setting in settings for w in ("--set", setting)),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    told = " ".join(done.output.split())
    assert "TAP" in told and "in 4 of 4 blocks" in told and "parameters (" in told and "GFLOP" in told
