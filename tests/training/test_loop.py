"""Training by recipes: it learns, it logs, it resumes, it shares steps among processes and pieces, and it
refuses bad input."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import steadygaze as sg
from helpers.training import CLASSES, MODEL, SIDE, content, image_folder, masks_of, recipe, same, weights
from steadygaze.data.masks import LabeledImages
from steadygaze.data.preprocess import Preprocess
from steadygaze.training import loop
from steadygaze.training import run_files as files
from steadygaze.training.images import TrainingImages, select_images
from steadygaze.training.model import build_recipe_model
from steadygaze.training.recipe import Augment, make_recipe, read_recipe
from steadygaze.training.recipe_files import shipped_recipes
from steadygaze.training.run_files import TrainingStoppedError, seeded
from steadygaze.training.sampling import StepSampler


@pytest.fixture(scope="module")
def masked(tmp_path_factory) -> Path:
    folder = image_folder(tmp_path_factory.mktemp("masked"), masks=True)
    (folder / "masks").rename(folder.parent / f"{folder.name}-masks")
    return folder


def logged(folder: Path) -> list[dict[str, str]]:
    return [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in csv.DictReader((folder / "log.csv").open())
    ]


# -- it trains -------------------------------------------------------------------------------------


def test_it_learns_and_can_be_used(data, tmp_path):
    reported = []
    before = torch.get_rng_state()
    got = sg.train(recipe(data, epochs=6, ema={"decay": 0.5}), tmp_path / "run", on_progress=reported.append)
    assert torch.equal(before, torch.get_rng_state()), "the caller's random state is left alone"
    assert got.top1 == 1.0 and got.weights.is_file()
    rows = logged(tmp_path / "run")
    assert [int(row["step"]) for row in rows] == list(range(1, 19))
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert rows[-1]["test_top1"] == "1" and rows[0]["test_top1"] == ""
    assert reported[-1].done == reported[-1].total == 18 and set(reported[-1].values) == {
        "loss",
        "cross_entropy",
        "test_loss",
        "test_top1",
    }
    assert math.isclose(float(rows[0]["lr"]), 0.01) and float(rows[-1]["lr"]) < 0.002
    out = got.model(torch.zeros(1, 3, SIDE, SIDE))
    assert out.shape == (1, 2) and not got.model.training
    assert same(weights(tmp_path / "run"), got.model.state_dict())
    for loaded in (sg.load_model(str(tmp_path / "run")), sg.load_model("vit_tiny_patch16_224", got.weights)):
        assert loaded.class_names == CLASSES and loaded.size == (SIDE, SIDE)
        images = torch.stack([loaded.preprocess(Image.open(data / name / "0.png")) for name in CLASSES])
        assert loaded.model(images).argmax(-1).tolist() == [0, 1]


def test_tensorboard_has_the_curves_of_the_log(data, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    sg.train(recipe(data, tensorboard=True, epochs=1), tmp_path / "run")
    sg.train(recipe(data, tensorboard=True, epochs=1), tmp_path / "run")  # ended: nothing is added
    board = events.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    rows = logged(tmp_path / "run")
    for key in ("loss", "lr", "cross_entropy", "test_top1"):
        expected = [(int(row["step"]), float(row[key])) for row in rows if row[key]]
        assert [(e.step, e.value) for e in board.Scalars(key)] == [
            (s, pytest.approx(v, rel=1e-6)) for s, v in expected
        ], key


@pytest.mark.parametrize(
    "losses",
    [
        {"cross_entropy": {"smoothing": 0.1}, "adl": {"form": "paper"}},
        {"relevance": {}},
        {"relevance": {"second_order": True, "method": "gaze", "confident_of": "label"}, "adl": {}},
        {"relevance": {"method": "rollout"}, "adl": {}, "cross_entropy": {}},
        {"gradmask": {"preset": "DeiT-S"}, "rrr": {"form": "code"}},
    ],
    ids=["adl", "relevance", "second order gaze and adl", "rollout and adl", "gradmask and rrr"],
)
def test_every_loss_trains(masked, tmp_path, losses):
    given = content(masked, losses=losses, epochs=1)
    given["data"] |= {"masks": masks_of(masked), "test_masks": masks_of(masked)}
    got = sg.train(make_recipe(given), tmp_path)
    names = set(got.log[-1])
    assert {name for name in names if name.split(".")[0] in losses} != set()
    for row in got.log:
        assert all(math.isfinite(float(value)) for value in row.values() if value)
    assert got.log[-1]["test_loss"]


def test_adl_beside_relevance_is_adl_alone(masked):
    """The maps that relevance keeps serve both; their number is that of a pass of its own."""
    from steadygaze.training.losses.adl import AdlOptions
    from steadygaze.training.losses.relevance import RelevanceOptions
    from steadygaze.training.objective import Objective

    torch.manual_seed(0)
    model = build_recipe_model(recipe(masked, seed=3)).model.eval()
    images, labels = torch.randn(2, 3, SIDE, SIDE), torch.tensor([0, 1])
    masks = torch.zeros(2, SIDE, SIDE, dtype=torch.uint8)
    masks[:, :8] = 1
    alone = Objective(model, {"adl": AdlOptions(tau=1.0)})(images, labels)[1]["adl"]
    for method in ("gae", "gaze"):
        both = Objective(model, {"adl": AdlOptions(tau=1.0), "relevance": RelevanceOptions(method=method)})(
            images, labels, None, masks
        )[1]["adl"]
        assert both.item() == pytest.approx(alone.item(), rel=1e-5) and alone.item() > 0


def test_distillation_token_is_taught(data, tmp_path):
    teacher = sg.train(recipe(data, epochs=1), tmp_path / "teacher")
    losses = {"cross_entropy": {"weight": 0.5}, "distillation": {"teacher": str(teacher.folder)}}
    given = content(data, epochs=1, losses=losses)
    given["model"] = {"name": "deit_tiny_distilled_patch16_224", "arguments": MODEL}
    asked = make_recipe(given)
    got = sg.train(asked, tmp_path / "student")
    assert float(got.log[-1]["distillation"]) > 0
    moved = build_recipe_model(asked).model.head_dist.weight
    assert not torch.equal(moved, got.model.head_dist.weight)


@pytest.mark.parametrize(
    "modules", [{"cb": {"variant": "scaled"}}, {"tap": {"branches": 2}, "cb": {}}], ids=["cb", "tap and cb"]
)
def test_modules_are_trained_and_loaded_again(data, tmp_path, modules):
    inserted = pytest.importorskip("steadygaze.modules").inserted
    asked = recipe(
        data, modules=modules, epochs=1, losses={"cross_entropy": {}, "adl": {}}, ema={"decay": 0.5}
    )
    got = sg.train(asked, tmp_path / "a")
    loaded = sg.load_model(str(tmp_path / "a"))
    assert set(inserted(loaded.model)) == set(inserted(got.model)) != set()
    images = torch.randn(2, 3, SIDE, SIDE)
    assert torch.equal(loaded.model(images), got.model(images))
    for stop in (2, None):
        sg.train(asked, tmp_path / "b", stop_after=stop)
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b")), "resumed"
    with pytest.raises(sg.SteadygazeError, match="varant"):
        sg.train(recipe(data, modules={"cb": {"varant": "plain"}}), tmp_path / "c")


def test_mixing_and_erasing_train(data, tmp_path):
    augment = {
        "crop": "resized",
        "mixup": 0.8,
        "cutmix": 1.0,
        "erase": 0.5,
        "rand_augment": "rand-m9-mstd0.5-inc1",
        "color_jitter": 0.3,
    }
    got = sg.train(recipe(data, augment=augment, epochs=1), tmp_path / "a")
    again = sg.train(recipe(data, augment=augment, epochs=1), tmp_path / "b")
    assert same(weights(tmp_path / "a"), weights(tmp_path / "b")), "what is random follows from the seed"
    other = sg.train(recipe(data, augment=augment, epochs=1, seed=1), tmp_path / "c")
    assert not same(got.model.state_dict(), other.model.state_dict()) and again.log


def test_accumulated_pieces_are_train_step(data, tmp_path):
    for pieces in (1, 2, 4):
        sg.train(
            recipe(data, accumulate=pieces, optimizer={"name": "sgd", "lr": 0.1}), tmp_path / str(pieces)
        )
    one = weights(tmp_path / "1")
    for pieces in (2, 4):
        assert all(torch.allclose(one[k], v, atol=1e-6) for k, v in weights(tmp_path / str(pieces)).items())


def test_the_step_schedule_is_the_papers(data, tmp_path):
    """lr · 0.85^⌊epoch / 2⌋."""
    got = sg.train(recipe(data, epochs=5, schedule={"name": "step"}), tmp_path)
    rates = {int(float(row["epoch"]) - 1e-9): float(row["lr"]) for row in got.log}
    assert rates == pytest.approx({e: 0.01 * 0.85 ** (e // 2) for e in range(5)})


def test_the_best_epoch_is_kept(data, tmp_path):
    got = sg.train(recipe(data, keep="best", epochs=3, optimizer={"lr": 0.3}), tmp_path)
    losses = [float(row["test_loss"]) for row in got.log if row["test_loss"]]
    model = build_recipe_model(recipe(data)).model.eval()
    model.load_state_dict(weights(tmp_path))
    built = build_recipe_model(recipe(data))
    test = TrainingImages(
        select_images(recipe(data).data, "test", built.classes, None),
        built.preprocess,
        recipe(data).augment,
        0,
    )
    images, labels, _ = zip(*(test[None, i] for i in range(len(test))), strict=True)
    found = torch.nn.functional.cross_entropy(model(torch.stack(images)), torch.tensor(labels)).item()
    assert found == pytest.approx(min(losses), rel=1e-4)
    assert losses.index(min(losses)) < len(losses) - 1, (
        "the last epoch is the best one: the test proves nothing"
    )
    assert same(weights(tmp_path), got.model.state_dict()), (
        "the model that is given back is the one that was kept"
    )
    assert got.top1 == float(
        [row["test_top1"] for row in got.log if row["test_loss"]][losses.index(min(losses))]
    )


def test_the_best_of_nothing_is_said_to_be_the_last(data, tmp_path):
    given = content(data, keep="best", epochs=1)
    del given["data"]["test"]
    got = sg.train(make_recipe(given), tmp_path / "a")
    assert (
        any("data.test is not given: the last weights are kept" in note for note in got.notes)
        and got.top1 is None
    )


def test_what_is_to_be_noted_is_said_before_the_first_step(data, tmp_path, caplog):
    said = []
    got = sg.train(
        recipe(data, epochs=1, schedule={"warmup_epochs": 5}),
        tmp_path,
        on_progress=lambda progress: said.append(list(caplog.messages)),
    )
    note = (
        "epochs = 1 ends within schedule.warmup_epochs = 5: the learning rate of the recipe is never reached"
    )
    assert got.notes == [note] and f"note: {note}" in said[0]


def test_a_run_that_had_ended_says_so(data, tmp_path):
    from typer.testing import CliRunner

    from steadygaze.cli import app

    first = sg.train(recipe(data, epochs=1), tmp_path / "run")
    before = (tmp_path / "run/model.safetensors").read_bytes()
    assert first.steps == 3 and sg.train(recipe(data, epochs=1), tmp_path / "run").steps == 0
    lines = [
        "epochs = 1",
        "batch = 4",
        "log_every = 1",
        "tensorboard = false",
        "[model]",
        'name = "vit_tiny_patch16_224"',
    ]
    lines += [
        f"arguments = {{ {', '.join(f'{k} = {v}' for k, v in MODEL.items())} }}",
        "[data]",
        f'train = "{data}"',
        f'test = "{data}"',
    ]
    lines += ["[augment]", 'crop = "pad"', "pad = 2", "[optimizer]", "lr = 0.01"]
    (tmp_path / "r.toml").write_text("\n".join(lines))
    done = CliRunner().invoke(app, ["train", str(tmp_path / "r.toml"), "--out", str(tmp_path / "run")])
    assert done.exit_code == 0 and "the run had finished before" in done.output and "wrote" not in done.output
    assert (tmp_path / "run/model.safetensors").read_bytes() == before


# -- data ------------------------------------------------------------------------------------------


def test_masks_move_with_their_images(tmp_path):
    """An image that is its own mask stays so under every crop and flip."""
    pixels = np.zeros((40, 30), np.uint8)
    pixels[10:30, 3:12] = 255
    for name in ("p/a", "m/a"):
        (tmp_path / name).mkdir(parents=True)
    Image.fromarray(np.stack([pixels] * 3, -1)).save(tmp_path / "p/a/x.png")
    Image.fromarray(pixels).save(tmp_path / "m/a/x.png")
    classes = build_recipe_model(recipe(tmp_path / "p")).classes
    found = select_images(recipe(tmp_path / "p").data, "train", classes, str(tmp_path / "m"))
    for crop in ("resized", "resize", "pad", "none"):
        asked = recipe(tmp_path / "p", augment={"crop": crop, "resize": 24, "scale": [0.3, 1.0]})
        own = build_recipe_model(asked).preprocess
        shape = own.override(interpolation="nearest", mean=(0.0,) * 3, std=(1.0,) * 3)
        seen = TrainingImages(found, shape, asked.augment, 0)
        views = [seen[epoch, 0] for epoch in range(8)]
        assert all(
            torch.equal(image[0] > 0.5, mask == 255) and (mask == 255).any() for image, _, mask in views
        )
        if crop != "none":
            assert len({tuple(mask.flatten().tolist()) for *_, mask in views}) > 2, (
                "crops differ from epoch to epoch"
            )


@pytest.mark.parametrize("size", [(32, 32), (16, 48), (48, 33)])
def test_test_images_are_what_the_loaded_model_will_see(size):
    """Also those of models that are not square: nothing is padded."""
    from timm.data import create_transform

    shape = Preprocess.from_timm(
        {
            "input_size": (3, *size),
            "mean": (0.5,) * 3,
            "std": (0.25,) * 3,
            "interpolation": "bicubic",
            "crop_pct": 0.9,
        }
    )
    own = create_transform(
        (3, *size), is_training=False, interpolation="bicubic", mean=shape.mean, std=shape.std, crop_pct=0.9
    )
    for width, height in ((50, 50), (80, 40), (31, 77)):
        pixels = np.random.default_rng(0).integers(60, 255, (height, width, 3), dtype=np.uint8)
        mask = Image.fromarray(np.where(pixels[..., 0] > 128, 255, 0).astype(np.uint8))
        found = TrainingImages(LabeledImages([]), shape, Augment(), 0).for_testing(
            Image.fromarray(pixels), mask
        )
        assert torch.equal(found[0], own(Image.fromarray(pixels)))
        assert set(found[1].unique().tolist()) == {0, 255}, "a mask is never mixed"


def test_a_step_is_the_same_images_for_any_number_of_processes():
    def of(world: int, pieces: int) -> list[set]:
        turns = [StepSampler(23, 8, pieces, seed=5, rank=rank, world_size=world) for rank in range(world)]
        return [{key for t in turns for piece in t.micro_batches(step) for key in piece} for step in range(4)]

    assert of(1, 1) == of(2, 1) == of(2, 2) == of(1, 4)
    assert all(len(step) == 8 for step in of(2, 2))
    with pytest.raises(sg.InputError, match="cannot be divided among 3"):
        StepSampler(23, 8, 1, seed=0, world_size=3)


def test_random_numbers_are_left_alone():
    import random

    state = random.random(), torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    with seeded(1, 2):
        first = random.random(), torch.rand(1).item(), np.random.rand()  # noqa: NPY002
    assert torch.equal(state[1], torch.get_rng_state()) and (state[2] == np.random.get_state()[1]).all()  # noqa: NPY002
    with seeded(1, 2):
        assert first == (random.random(), torch.rand(1).item(), np.random.rand())  # noqa: NPY002


def test_some_classes_and_some_images(data):
    def names(**more) -> set[str]:
        asked = make_recipe(content(data) | {"data": {"train": str(data), **more}})
        return {
            item.name
            for item in select_images(asked.data, "train", build_recipe_model(asked).classes, None).items
        }

    assert names(images=[1, 3]) == {f"{c}/{i}.png" for c in CLASSES for i in (1, 2)}
    assert names(classes=[1, 2]) == names(only=["dark"]) == {f"dark/{i}.png" for i in range(6)}
    with pytest.raises(sg.InputError, match=r"data.images: expected \[first, stop\]"):
        names(images=[3, 1])
    with pytest.raises(sg.InputError, match="selects no image of"):
        names(images=[50, 60])


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {"learning_rate": 1.0}}, r"unknown key 'optimizer.learning_rate'"),
        ({"epoch": 3}, r"unknown key 'epoch'. Did you mean 'epochs'"),
        (
            {"losses": {"adl": {"weight": -0.5}}},
            r"losses.adl.weight: expected a number of at least 0, got -0.5",
        ),
        (
            {"losses": {"relevance": {"background": -1}}, "data": {"masks": "m"}},
            r"losses.relevance.background: .* got -1",
        ),
        ({"losses": {"relevance": {}}, "data": {"train": "d"}}, r"losses.relevance: expected masks"),
        (
            {"losses": {"relevance": {}}, "data": {"masks": "m"}, "augment": {"mixup": 0.8}},
            r"masks cannot follow augment.mixup",
        ),
        ({"batch": "many"}, r"batch: expected an integer, got 'many'"),
        ({"batch": 4, "accumulate": 3}, r"cannot be divided into accumulate = 3"),
        ({"schedule": {"name": "cosin"}}, r"unknown schedule.name 'cosin'. Did you mean 'cosine'"),
        ({"losses": {"distillation": {}}}, r"expected the name of a teacher model"),
        ({"model": {}}, r"model.name: missing"),
        ({"ema": {"decay": 1.5}}, r"ema.decay: expected a share"),
    ],
)
def test_recipes_are_checked(change, message):
    with pytest.raises(sg.SteadygazeError, match=message):
        make_recipe({"model": {"name": "vit_tiny_patch16_224"}} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer": {"clip": -1.0}}, r"optimizer.clip: expected a number above 0, got -1.0"),
        ({"optimizer": {"betas": [0.9]}}, r"optimizer.betas: .*2 items.*got \[0.9\]"),
        ({"data": {"crop": 0.0}}, r"data.crop: expected a number above 0"),
        ({"data": {"size": -8}}, r"data.size: expected a number above 0"),
        ({"data": {"size": SIDE + 1}}, r"data.size: the model does not accept images of 17x17"),
        ({"data": {"interpolation": "bicubi"}}, r"bicubic"),
        (
            {"augment": {"rand_augment": "strong"}},
            r"augment.rand_augment: expected timm's notation, .* got 'strong'",
        ),
        (
            {"modules": {"tap": {"branch": 3}}},
            r"unknown option of modules.tap 'branch'. Did you mean 'branches'",
        ),
        ({"data": {"crop": 2.0}}, r"data.crop: expected a share between 0 and 1, got 2.0"),
        (
            {"data": {"mean": [0.5]}},
            r"data.mean: expected three numbers, of red, green and blue, got \[0.5\]",
        ),
        ({"data": {"std": [0.2, 0.0, 0.2]}}, r"data.std\[1\]: expected a number above 0, got 0.0"),
        ({"augment": {"pad": -3}}, r"augment.pad: expected a number of at least 0, got -3"),
        (
            {"augment": {"crop": "resize", "resize": SIDE - 1}},
            r"augment.resize: expected at least the size of the images, 16, got 15",
        ),
        (
            {"augment": {"scale": [1.0, 0.5]}},
            r"augment.scale: expected \[least, most\], both above 0, got \[1.0, 0.5\]",
        ),
        ({"augment": {"mix_probability": 3.0}}, r"augment.mix_probability: expected a share"),
        ({"schedule": {"name": "step", "every": 0}}, r"schedule.every: expected a number above 0"),
        ({"model": {"num_classes": 0}}, r"model.num_classes: expected a number above 0"),
        ({"model": {"num_classes": 5}}, r"got 'bright': the 5 classes of this model have no names"),
        (
            {"model": {"arguments": MODEL | {"depth": -1}}},
            r"model.arguments: vit_tiny_patch16_224 cannot be built with .*-1",
        ),
        (
            {"model": {"name": "vit_tiny_patch16_22"}},
            r"is not a timm model \(did you mean 'vit_tiny_patch16_224'\?\)",
        ),
    ],
)
def test_values_that_only_fail_later_are_refused_by_name(change, message, data, tmp_path):
    given = content(data)
    for key, value in change.items():
        given[key] = given.get(key, {}) | value
    with pytest.raises(sg.SteadygazeError, match=message):
        sg.train(make_recipe(given), tmp_path / "run")


def test_another_device_is_refused(data, tmp_path):
    with pytest.raises(sg.InputError, match="device: expected auto or cpu, got 'cuda:7'"):
        sg.train(recipe(data), tmp_path / "run", device="cuda:7")


def test_recipes_are_read_from_files(tmp_path):
    (tmp_path / "a.toml").write_text("epochs = 3\n[model]\nname = 'x'\n[losses.adl]\nweight = 2\n")
    got = read_recipe(tmp_path / "a.toml", {"data.train": "here", "seed": 4, "losses.adl.tau": 1.5})
    assert (got.epochs, got.seed, got.data.train, got.losses["adl"].weight, got.losses["adl"].tau) == (
        3,
        4,
        "here",
        2.0,
        1.5,
    )
    (tmp_path / "b.toml").write_text("epochs = ")
    with pytest.raises(sg.InputError, match="not a readable TOML"):
        read_recipe(tmp_path / "b.toml")
    with pytest.raises(sg.UnknownNameError, match="unknown recipe"):
        read_recipe("nothing-like-that")


def test_a_recipe_in_another_encoding_is_refused(tmp_path):
    (tmp_path / "latin.toml").write_bytes("about = 'caf\xe9'".encode("latin-1"))
    with pytest.raises(sg.InputError, match=r"latin.toml is not a readable TOML file"):
        read_recipe(tmp_path / "latin.toml")


def test_masks_without_images_and_without_objects(masked, tmp_path):
    given = content(masked, losses={"relevance": {}})
    given["data"]["masks"] = str(tmp_path / "m")
    import shutil

    shutil.copytree(masks_of(masked), tmp_path / "m")
    shutil.copy(tmp_path / "m/bright/0.png", tmp_path / "m/bright/lonely.png")
    with pytest.raises(sg.InputError, match=r"lonely.png is a mask without an image"):
        sg.train(make_recipe(given), tmp_path / "run")
    (tmp_path / "m/bright/lonely.png").unlink()
    for i in range(6):
        Image.new("L", (SIDE, SIDE)).save(tmp_path / f"m/dark/{i}.png")
    with pytest.raises(sg.ImageError, match=r"dark/\d.png is background everywhere"):
        sg.train(make_recipe(given), tmp_path / "run2")
    listed = tmp_path / "listed"
    listed.mkdir()
    (listed / "index.csv").write_text("image,mask,index\nnot-there.png,m.png,0\n")
    given["data"] = {"train": str(listed), "masks": str(listed)}
    given["model"]["num_classes"] = 2
    with pytest.raises(sg.InputError, match=r"not-there.png is listed, with a mask, but does not exist"):
        sg.train(make_recipe(given), tmp_path / "run3")


def test_a_checkpoint_of_another_model(data, tmp_path):
    sg.train(recipe(data, epochs=1), tmp_path / "a")
    with pytest.raises(sg.InputError, match=r"run of another recipe: seed was 0, is now 1"):
        sg.train(recipe(data, epochs=1, seed=1), tmp_path / "a")
    other = content(data, epochs=1)
    other["model"] = {"name": "vit_tiny_patch16_224", "arguments": MODEL | {"embed_dim": 16}}
    sg.train(make_recipe(other), tmp_path / "b", stop_after=1)
    (tmp_path / "a" / "state.pt").rename(tmp_path / "b" / "state.pt")
    with pytest.raises(sg.CheckpointError, match="of another shape"):
        sg.train(make_recipe(other), tmp_path / "b")
    (tmp_path / "b" / "state.pt").write_bytes(b"no checkpoint")
    with pytest.raises(sg.CheckpointError, match="not a readable checkpoint"):
        sg.train(make_recipe(other), tmp_path / "b")
    begun = content(data)
    begun["model"] |= {
        "checkpoint": str(tmp_path / "a" / "model.safetensors"),
        "arguments": MODEL | {"depth": 3},
    }
    with pytest.raises(sg.CheckpointError, match="missing"):
        sg.train(make_recipe(begun), tmp_path / "c")


def test_a_loss_that_is_not_finite_stops_with_the_last_good_checkpoint(data, tmp_path, monkeypatch):
    real = loop.TrainingRun.train_step

    def broken(self, pieces):
        if self.step == 4:
            pieces = [(images * float("nan"), labels, masks) for images, labels, masks in pieces]
        return real(self, pieces)

    monkeypatch.setattr(loop.TrainingRun, "train_step", broken)
    with pytest.raises(
        TrainingStoppedError, match=r"not finite at step 5 .*loss nan.*last good checkpoint, of step 4"
    ):
        sg.train(recipe(data), tmp_path / "run")
    state = files.load_state(tmp_path / "run" / "state.pt")
    assert state["step"] == 4 and all(torch.isfinite(v).all() for v in state["model"].values())
    monkeypatch.setattr(loop.TrainingRun, "train_step", real)
    sg.train(recipe(data), tmp_path / "run")
    sg.train(recipe(data), tmp_path / "unbroken")
    assert same(weights(tmp_path / "run"), weights(tmp_path / "unbroken"))


def test_shipped_recipes_can_be_read():
    for name in shipped_recipes():
        got = read_recipe(name)
        assert got.about and got.command and got.cost and got.result, (
            f"{name} must say what it is and what it costs"
        )
