"""`sg.stress` and `steadygaze stress`: what they compute, what they go on with, what they refuse."""

import os
import random
import signal
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import steadygaze as sg
from helpers.runs import ask, cli, image_folder, rows_of, thousand
from helpers.tiers import tiered
from steadygaze.data.datasets.imagenet import CORRUPTIONS, PERTURBATIONS, imagenet_synsets
from steadygaze.data.images import read_image
from steadygaze.data.preprocess import Preprocess
from steadygaze.robustness import (
    attention_measures,
    attention_stability,
    corrupt,
    fgsm,
    flip_probability,
    random_drop,
    sequence,
)
from steadygaze.runs.evaluator import Evaluator
from steadygaze.runs.loop import Pace
from steadygaze.runs.rows import Rows
from steadygaze.runs.shards import World
from steadygaze.runs.stress import parse_options, parse_suites, prepare_stress, run_stress
from steadygaze.runs.suites.attacks import parse_epsilons
from steadygaze.runs.suites.corruptions import parse_severities
from steadygaze.seeding import image_seed

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("stress") / "data")


@pytest.fixture(scope="module")
def loaded():
    return sg.load_model("embedded")


def value(rows: Rows, setting, metric, image):
    (row,) = [r for r in rows if (r["setting"], r["metric"], r["image"]) == (setting, metric, image)]
    return row


# -- what is computed ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(data, loaded, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    return run_stress(ask(data, out, "corruptions,attacks,occlusion,attention"), prepared=None)


def test_every_row_of_every_image_is_there_once(run):
    frame = run.to_pandas()
    assert "setting" in frame and "method" not in frame
    assert not frame.duplicated(["image", "setting", "metric"]).any()
    settings = [one["label"] for one in run.runs[0]["settings"]["conditions"]]
    assert settings == [
        "clean",
        "fog/1",
        "fog/3",
        "jpeg_compression/1",
        "jpeg_compression/3",
        "fgsm/8",
        "pgd/8",
        "center_square/0.5",
        "random_drop",
        "salient_drop",
    ]
    assert set(frame["setting"]) == set(settings) and (frame.groupby(["setting", "metric"]).size() == 4).all()
    assert frame["value"].notna().all()


def test_answers_are_those_of_the_model_on_the_corrupted_pixels(run, data, loaded):
    name = "cat/0.png"
    clean = loaded.preprocess.pixels(read_image(data / name))
    for setting, pixels in (("clean", clean), ("fog/3", corrupt(clean, "fog", 3, seed=image_seed(0, name)))):
        image = loaded.preprocess(Image.fromarray(pixels))[None]
        with torch.no_grad():
            logits = loaded.model(image)[0]
        found = value(run, setting, "top1", name)
        assert found["detail"] == [3, int(logits.argmax())] and found["value"] == (logits.argmax() == 3)
        assert value(run, setting, "top5", name)["value"] == (3 in logits.topk(5).indices)
        assert value(run, setting, "confidence", name)["value"] == pytest.approx(
            float(logits.softmax(0).max()), abs=1e-5
        )


def test_attacks_drops_and_attention_are_the_measures_themselves(run, data, loaded):
    names = [r["image"] for r in run if (r["setting"], r["metric"]) == ("clean", "top1")][
        :3
    ]  # the first batch
    labels = torch.tensor([value(run, "clean", "top1", n)["detail"][0] for n in names])
    pixels = [loaded.preprocess.pixels(read_image(data / n)) for n in names]
    clean = torch.stack([loaded.preprocess(Image.fromarray(p)) for p in pixels])
    foggy = [corrupt(p, "fog", 3, seed=image_seed(0, n)) for p, n in zip(pixels, names, strict=True)]
    fog = torch.stack([loaded.preprocess(Image.fromarray(p)) for p in foggy])
    attacked = fgsm(loaded.model, clean, labels, epsilon=8 / 255, mean=loaded.mean, std=loaded.std)
    curve = random_drop(
        loaded.model,
        clean,
        labels,
        generator=[torch.Generator().manual_seed(image_seed(0, f"drop {n}")) for n in names],
    )
    entropy, stability = (
        attention_measures(loaded.model, clean).entropy.mean(2),
        attention_stability(loaded.model, clean, fog).mean(2),
    )
    with torch.no_grad():
        sure = loaded.model(attacked).softmax(1).amax(1)
    for b, name in enumerate(names):
        assert value(run, "fgsm/8", "confidence", name)["value"] == pytest.approx(float(sure[b]), abs=1e-5)
        assert value(run, "random_drop", "drop_probability", name)["detail"] == pytest.approx(
            curve.probability[b].tolist(), abs=1e-5
        )
        found = value(run, "clean", "attention_entropy", name)
        assert found["detail"] == pytest.approx(entropy[b].tolist(), abs=1e-4) and found[
            "value"
        ] == pytest.approx(float(entropy[b].mean()))
        assert value(run, "fog/3", "attention_stability", name)["detail"] == pytest.approx(
            stability[b].tolist(), abs=1e-4
        )


def test_sequences_are_flips_of_the_frames(data, loaded):
    rows = sg.stress(loaded, data, suites="sequences", limit=1)
    name = next(iter(rows))["image"]
    whole = np.ascontiguousarray(loaded.preprocess.pixels(read_image(data / name), crop=False))
    frames = sequence(whole, "tilt", seed=image_seed(0, name), size=32)
    with torch.no_grad():
        predicted = loaded.model(torch.stack([loaded.preprocess(Image.fromarray(f)) for f in frames])).argmax(
            1
        )
    assert value(rows, "sequence/tilt", "flips", name)["value"] == pytest.approx(
        flip_probability(predicted[None].numpy(), "tilt")
    )
    assert {r["setting"] for r in rows if r["metric"] == "top5_distance"} == {
        f"sequence/{kind}" for kind in PERTURBATIONS
    }


@pytest.mark.parametrize("size", [(40, 30), (20, 50), (32, 32), (3, 3)])
def test_the_lens_is_the_models_own_preprocessing(size):
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    from torchvision.transforms._presets import ImageClassification

    one = thousand()
    preset = ImageClassification(crop_size=32, resize_size=40, mean=MEAN, std=STD)
    two = replace(one, preprocess=Preprocess.from_torchvision(preset))
    timm_config = {"input_size": (3, 32, 32), "mean": MEAN, "std": STD, "crop_pct": 0.9}
    three = replace(one, preprocess=Preprocess.from_timm(timm_config | {"interpolation": "bicubic"}))

    for model in (one, two, three):
        pixels = model.preprocess.pixels(photo)
        evaluator = Evaluator(model.model, model.preprocess)
        seen = evaluator.normalize(torch.from_numpy(pixels.copy()).permute(2, 0, 1))
        assert pixels.dtype == np.uint8 and torch.allclose(seen, model.preprocess(photo), atol=1e-6)


def test_a_images_corruption_depends_on_its_name_alone(data, loaded, run):
    again = sg.stress(loaded, data, corruptions="fog", severities=[3], limit=12, batch_size=5)
    for row in run:
        if (row["setting"], row["metric"]) == ("fog/3", "confidence"):
            assert value(again, "fog/3", "confidence", row["image"])["value"] == pytest.approx(
                row["value"], abs=1e-5
            )
    other = sg.stress(loaded, data, corruptions="fog", severities=[3], limit=1, seed=1)
    name = next(iter(other))["image"]
    assert (
        value(other, "fog/3", "confidence", name)["value"]
        != value(again, "fog/3", "confidence", name)["value"]
    )


# -- going on --------------------------------------------------------------------------------------


@pytest.mark.full
def test_workers_and_processes_give_the_rows_of_one(data, tmp_path):
    wanted = rows_of_run(ask(data, tmp_path / "one"))
    request = ask(data, tmp_path / "two", num_workers=2)
    ready, pace, state = prepare_stress(request), Pace(), torch.get_rng_state()
    run_stress(request, prepared=ready, pace=pace)
    assert torch.equal(torch.get_rng_state(), state)
    assert rows_of(tmp_path / "two") == wanted and pace.model > 0
    for rank in (1, 0):
        run_stress(ask(data, tmp_path / "three"), World(rank, 2))
    assert rows_of(tmp_path / "three") == wanted
    assert all(file.stat().st_size for file in (tmp_path / "three").glob("rows-*.jsonl"))


def rows_of_run(request) -> list[str]:
    run_stress(request)
    return rows_of(request.out)


@pytest.mark.parametrize("cut", tiered([0, 1, 500, 2222, 5000, -40, -1], [-40, 500]))
def test_a_run_that_was_cut_off_goes_on(data, tmp_path, cut):
    whole, broken = ask(data, tmp_path / "whole"), ask(data, tmp_path / "broken")
    wanted = rows_of_run(whole)
    broken.out.mkdir()
    (broken.out / "run.json").write_text((whole.out / "run.json").read_text())
    text = (whole.out / "rows-00000.jsonl").read_bytes()
    (broken.out / "rows-00000.jsonl").write_bytes(text[:cut])
    shown = []
    run_stress(broken, on_progress=shown.append)
    assert rows_of(broken.out) == wanted
    assert shown[-1].done == shown[-1].total == 4 * 5
    if cut > 1000:
        assert shown[-1].resumed > 0, "what was there was computed again"
    run_stress(broken, on_progress=shown.append)
    assert shown[-1].done == shown[-1].resumed == 20 and rows_of(broken.out) == wanted


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")
def test_killed_for_real(data, tmp_path):
    """SIGKILL at any moment, workers or not; what goes on gives the rows of an unbroken run."""
    wanted = rows_of_run(ask(data, tmp_path / "whole"))
    ready = prepare_stress(ask(data, tmp_path / "whole"))
    chance, killed, struck = random.Random(0), 0, 0
    for workers in (0, 1):
        request = replace(ask(data, tmp_path / f"broken{workers}"), num_workers=workers)
        while True:
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    run_stress(
                        request,
                        on_progress=lambda progress: time.sleep(0.03),
                        prepared=ready,
                    )
                    code = 0
                finally:
                    os._exit(code)
            if killed < 4 * (workers + 1):
                time.sleep(chance.uniform(0.02, 0.2))
                os.kill(child, signal.SIGKILL)
                killed += 1
            _, status = os.waitpid(child, 0)
            struck += os.WIFSIGNALED(status)
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
        assert rows_of(request.out) == wanted
    assert struck >= 4, "no kill struck a run: the test proves less than it says"


def test_other_settings_are_refused(data, tmp_path):
    run_stress(ask(data, tmp_path / "run"))
    with pytest.raises(sg.InputError, match="severities was"):
        run_stress(
            ask(data, tmp_path / "run", options={"corruptions": "fog,jpeg_compression", "severities": "2"})
        )


# -- images of all kinds -------------------------------------------------------------------------


def test_images_of_every_kind_and_broken_ones(tmp_path):
    folder = tmp_path / "data" / "cat"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    base = Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8))
    kinds = {
        "gray": base.convert("L"),
        "rgba": base.convert("RGBA"),
        "palette": base.convert("P"),
        "tiny": base.resize((2, 1)),
    }
    for name, photo in kinds.items():
        photo.save(folder / f"{name}.png")
    (folder / "broken.png").write_bytes(b"no image")
    words = (
        "--model",
        "embedded",
        "--data",
        tmp_path / "data",
        "--suites",
        "corruptions",
        "--corruptions",
        "fog",
        "--severities",
        "2",
    )
    out = cli(*words, "--out", tmp_path / "run", "--num-workers", "0", code=1)
    assert "broken.png" in out and "clean" in out and "mean_error" in out
    rows = Rows.read(tmp_path / "run")
    assert {r["image"] for r in rows} == {f"cat/{name}.png" for name in kinds} and list(rows.unreadable) == [
        "cat/broken.png"
    ]
    lines = len(rows_of(tmp_path / "run"))
    assert (
        cli(*words, "--out", tmp_path / "run", "--num-workers", "0", code=1)
        and len(rows_of(tmp_path / "run")) == lines
    )
    base.save(folder / "broken.png")
    cli(*words, "--out", tmp_path / "run", "--num-workers", "0")
    rows = Rows.read(tmp_path / "run")
    assert not rows.unreadable and sum(r["image"] == "cat/broken.png" for r in rows) == 6


def test_synthetic_images(tmp_path, loaded):
    root = tmp_path / "data"
    rng = np.random.default_rng(0)
    for name in ("images", "masks", "behind"):
        (root / name).mkdir(parents=True)
    lines = ["image,label,mask"]
    for i in range(2):
        mask = np.zeros((32, 32), np.uint8)
        mask[8:24, 10:20] = 255
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(root / f"images/{i}.png")
        Image.fromarray(mask).save(root / f"masks/{i}.png")
        Image.fromarray(rng.integers(0, 256, (50, 40, 3), dtype=np.uint8)).save(root / f"behind/{i}.png")
        lines.append(f"images/{i}.png,cat,masks/{i}.png")
    (root / "index.csv").write_text("\n".join(lines))
    rows = sg.stress(loaded, root, suites="synthetic", backgrounds=root / "behind")
    settings = {r["setting"] for r in rows}
    assert (
        len(settings) == 1 + 25 + 18 + 8 + 2
        and {"location/0.1,0.9", "rotation/21", "size/0.05", "background/swapped"} <= settings
    )
    card = rows.cards(repeats=20)[0]
    sizes = [card.numbers[s, "top1"].value for s in settings if s.startswith("size/")]
    assert card.scores["size", "top1"].value == pytest.approx(np.mean(sizes))
    plain = sg.stress(loaded, root, suites="synthetic", limit=1)
    assert (
        "background/swapped" not in {r["setting"] for r in plain}
        and "gray" in plain.runs[0]["settings"]["notes"][0]
    )
    with pytest.raises(sg.InputError, match="masks"):
        sg.stress(loaded, image_folder(tmp_path / "plain"), suites="synthetic")


def test_shifts_in_their_published_layouts(tmp_path, data):
    synsets = imagenet_synsets("r")
    for i, synset in enumerate(synsets[:3]):
        (tmp_path / "r" / synset).mkdir(parents=True)
        for n in range(2):
            Image.fromarray(np.full((40, 40, 3), 40 * i + n, np.uint8)).save(
                tmp_path / "r" / synset / f"{('art', 'toy')[i % 2]}_{n}.jpg"
            )
    for severity in range(1, 6):
        for i, synset in enumerate(imagenet_synsets()[:2]):
            folder = tmp_path / "c" / "weather" / "fog" / str(severity) / synset
            folder.mkdir(parents=True)
            Image.fromarray(np.full((32, 32, 3), 20 * severity + i, np.uint8)).save(folder / "x.JPEG")
    clean = tmp_path / "clean" / synsets[0]
    clean.mkdir(parents=True)
    Image.fromarray(np.full((32, 32, 3), 9, np.uint8)).save(clean / "x.png")
    suite = [f"shift:imagenet-r={tmp_path / 'r'}", f"shift:imagenet-c={tmp_path / 'c'}"]
    with pytest.raises(sg.InputError, match=r"lacks 197 of 200 class folders.*.*partial=True"):
        sg.stress(thousand(), tmp_path / "clean", suites=suite)
    rows = sg.stress(thousand(), tmp_path / "clean", suites=suite, partial=True)
    frame = rows.to_pandas()
    assert {"top1_of_200", "top5_of_200"} <= set(frame[frame["setting"] == "imagenet-r"]["metric"])
    assert set(frame[frame["setting"] == "imagenet-r"]["note"]) == {"art", "toy"}
    assert set(frame["setting"]) == {"clean", "imagenet-r", *(f"imagenet-c/fog/{s}" for s in range(1, 6))}
    assert (frame[frame["setting"] == "imagenet-c/fog/3"].groupby("metric").size() == 2).all()
    card = rows.cards(repeats=20)[0]
    assert (
        card.numbers["imagenet-r", "top1"].images == 6
        and "published" in card.scores["imagenet-c", "mean_error"].note
    )
    assert card.numbers["imagenet-r", "top1"].note == "2 groups: art, toy"
    assert any("3 of 200" in note for note in rows.runs[0]["settings"]["notes"])
    few = sg.stress(thousand(), None, suites=suite[1:], corruptions="fog", severities="2,4", partial=True)
    assert {row["setting"] for row in few} == {"imagenet-c/fog/2", "imagenet-c/fog/4"}
    with pytest.raises(sg.InputError, match="they do not map"):
        sg.stress(sg.load_model("embedded"), data, suites=suite, partial=True)


# -- any classifier, in memory ---------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self, classes=7):
        super().__init__()
        first = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.body = nn.Sequential(*first, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, classes))

    def forward(self, x):
        return self.body(x)


def batches(count=2, size=3):
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        pixels = torch.rand(size, 3, 24, 24, generator=generator)
        yield (pixels - 0.5) / 0.25, torch.randint(0, 7, (size,), generator=generator)


def test_a_cnn_in_memory(tmp_path):
    torch.manual_seed(0)
    model = Small().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    how = {
        "suites": ["corruptions", "attacks", "occlusion"],
        "corruptions": "fog",
        "severities": [5],
        "epsilons": [8 / 255],
        "mean": MEAN,
        "std": STD,
        "pgd_steps": 1,
    }
    rows = sg.stress(model, batches(), **how)
    assert model.training and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert "not a vision transformer" in rows.runs[0]["settings"]["notes"][0]
    assert {r["setting"] for r in rows} == {"clean", "fog/5", "fgsm/8", "pgd/8", "center_square/0.5"}
    images, labels = next(batches(1))
    with torch.no_grad():
        wanted = (model.eval()(images).argmax(1) == labels).tolist()
    assert [value(rows, "clean", "top1", str(i))["value"] for i in range(3)] == wanted
    for _ in range(2):
        kept = sg.stress(model, batches(), **how, out=tmp_path / "run")
        assert sorted(map(str, kept)) == sorted(map(str, rows))
    assert len(rows_of(tmp_path / "run")) == len(rows)
    with pytest.raises(sg.InputError, match="other images"):
        sg.stress(
            model, [(images.flip(-1), labels) for images, labels in batches()], **how, out=tmp_path / "run"
        )
    assert (
        len(
            {
                r["image"]
                for r in sg.stress(
                    model, batches(), limit=4, corruptions="fog", severities=[1], mean=MEAN, std=STD
                )
            }
        )
        == 4
    )
    with pytest.raises(sg.MethodUnavailableError, match="Leave the suite attention out"):
        sg.stress(model, batches(), suites="attention")


def test_few_classes_say_what_is_left_out():
    torch.manual_seed(0)
    data = [((torch.rand(2, 3, 16, 16) - 0.5) / 0.25, torch.tensor([0, 3]))]
    rows = sg.stress(Small(4), data, suites="sequences", mean=MEAN, std=STD)
    assert {r["metric"] for r in rows} == {"top1", "confidence", "flips"}
    assert len(rows.runs[0]["settings"]["notes"]) == 2


def test_a_broken_model_is_flagged():
    class Broken(Small):
        def forward(self, x):
            out = super().forward(x)
            return torch.where(x.mean((1, 2, 3))[:, None] > 1.5, out * float("nan"), out)

    images = torch.full((2, 3, 16, 16), 0.5)
    images[0] = 1.9
    rows = sg.stress(
        Broken(),
        [(images, torch.tensor([0, 1]))],
        corruptions="jpeg_compression",
        severities=[1],
        mean=MEAN,
        std=STD,
    )
    assert (
        value(rows, "clean", "top1", "0")["value"] is None
        and value(rows, "clean", "top1", "1")["value"] is not None
    )
    assert rows.flagged == {("clean", "broken logits"): 1, ("jpeg_compression/1", "broken logits"): 1}
    assert rows.cards(repeats=10)[0].numbers["clean", "top1"].images == 1


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suite", "says"),
    [
        ("corruption", "'corruptions'"),
        ("shift", "NAME=FOLDER"),
        ("shift:imagenet-b=x", "imagenet-a"),
        ("", "at least one"),
        ("attacks:8", "nothing after a colon"),
        ("shift:imagenet-a=x,shift:imagenet-a=y", "twice"),
    ],
)
def test_bad_suites(suite, says):
    with pytest.raises((sg.InputError, sg.UnknownNameError), match=says):
        parse_suites(suite)


def test_bad_strengths():
    for bad in ("0", "6", "1,7", [2.5], [True], "three", []):
        with pytest.raises(sg.InputError, match="severit"):
            parse_severities(bad)
    for bad, says in (
        ("8", "8/255"),
        ([8], "8/255"),
        ("8/0", "fractions"),
        ("x", "fractions"),
        ("0", "above 0"),
        ("-1/255", "0 to 1"),
    ):
        with pytest.raises(sg.InputError, match=says):
            parse_epsilons(bad)
    assert (
        parse_epsilons([8 / 255, 0.0313725, "8/255"]) == parse_epsilons(8 / 255) == (8 / 255,)
    )  # all are fgsm/8
    assert parse_severities(3) == (3,)
    with pytest.raises(sg.UnknownNameError, match="gaussian_noise"):
        parse_options({"corruptions": "gausian_noise"})
    assert parse_options({"corruptions": "all19"})["corruptions"] == CORRUPTIONS
    assert parse_options({"corruptions": "fog,snow"})["corruptions"] == ("snow", "fog")


def test_bad_data_in_memory():
    good = next(batches(1))
    for data, more, says in (
        ([], {}, "at least one batch"),
        ([good[0]], {}, "expected batches"),
        ([(good[0], good[1].float())], {}, "integers"),
        ([(good[0], good[1] + 7)], {}, "0..6"),
        ([(good[0].to(torch.uint8), good[1])], {}, "floating point"),
        ([(good[0] * 9, good[1])], {}, r"pixels in"),
        ([good], {"suites": "synthetic"}, "folder"),
        ([good], {"mean": None}, "both or none"),
        ([good], {"limit": 0}, "limit"),
        ("nowhere", {}, "load_model"),
    ):
        with pytest.raises(sg.InputError, match=says):
            sg.stress(
                Small(),
                data,
                **{"suites": "corruptions", "corruptions": "fog", "mean": MEAN, "std": STD, **more},
            )


def test_bad_folders(tmp_path, data):
    words = ["--model", "embedded", "--suites", "corruptions", "--out", tmp_path / "run"]
    assert "no such folder" in cli(*words, "--data", tmp_path / "nowhere", code=2)
    (tmp_path / "data" / "zebra").mkdir(parents=True)
    Image.new("RGB", (32, 32)).save(tmp_path / "data" / "zebra" / "a.png")
    assert "unknown class 'zebra'" in cli(*words, "--data", tmp_path / "data", code=2)
    assert "1, 2, 3, 4 or 5" in cli(*words, "--data", data, "--severities", "9", code=2)
    assert "8/255" in cli(*words, "--data", data, "--epsilons", "8", code=2)
    assert "Did you mean 'corruptions'" in cli(
        "--model", "embedded", "--suites", "corruptoins", "--data", data, "--out", "x", code=2
    )
    with pytest.raises(sg.InputError, match="listed twice"):
        (tmp_path / "index.csv").write_text("image,label\ndata/zebra/a.png,cat\ndata/zebra/a.png,dog\n")
        prepare_stress(ask(tmp_path, tmp_path / "run"))
    missing = f"shift:imagenet-a={tmp_path / 'a'}"
    assert "does not exist" in cli(
        "--model", "embedded", "--suites", missing, "--data", data, "--out", "x", code=2
    )
    assert "backgrounds" in cli(*words, "--data", data, "--backgrounds", data, code=2)
    assert not (tmp_path / "run").exists(), "something was written before the input was checked"


def test_a_half_downloaded_folder_is_said(tmp_path):
    root = image_folder(tmp_path / "data")
    (root / "ship").mkdir()
    (root / "dog").mkdir()
    notes = prepare_stress(ask(root, tmp_path / "run")).notes
    assert len(notes) == 1 and "2 class folders" in notes[0] and "dog, ship" in notes[0]


def test_prepare_writes_nothing(data, tmp_path):
    ready = prepare_stress(ask(data, tmp_path / "run"))
    assert not (tmp_path / "run").exists() and ready.work(World()) == 4 * 5


def eight_bit(mean, std, dtype=torch.float32):
    pixels = torch.randint(0, 256, (3, 3, 24, 24), generator=torch.Generator().manual_seed(4)) / 255
    m, s = (torch.tensor(v).view(1, 3, 1, 1) for v in (mean, std))
    return [(((pixels - m) / s).to(dtype), torch.tensor([0, 1, 2]))]


def test_images_normalized_otherwise_are_found_out():
    """0.5 and 0.5 undone with ImageNet's mean and std stays within [0, 1]: only the gray levels tell."""
    torch.manual_seed(0)
    few = {"corruptions": "fog", "severities": [1]}
    half, imagenet = ((0.5,) * 3, (0.5,) * 3), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    with pytest.raises(sg.InputError, match=r"give mean=\[0.5, 0.5, 0.5\], std=\[0.5, 0.5, 0.5\]"):
        sg.stress(Small(), eight_bit(*half), **few)
    with pytest.raises(sg.InputError, match=r"mean=\[0.0, 0.0, 0.0\], std=\[1.0"):
        sg.stress(Small(), eight_bit((0.0,) * 3, (1.0,) * 3), **few)
    with pytest.raises(sg.InputError, match="normalize them as expected"):
        sg.stress(Small(), eight_bit(*half), mean=imagenet[0], std=imagenet[1], **few)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for normal in (half, imagenet):
            sg.stress(Small(), eight_bit(*normal), mean=normal[0], std=normal[1], **few)
        assert not sg.stress(Small(), eight_bit(*imagenet), **few).runs[0]["settings"]["notes"]
    with pytest.warns(
        UserWarning, match="ImageNet's mean and std are assumed"
    ):  # halfway between levels: nothing to be told from
        rows = sg.stress(Small(), [(x * 0.9, y) for x, y in eight_bit(*imagenet)], **few)
    assert "Small does not declare" in rows.runs[0]["settings"]["notes"][0]
