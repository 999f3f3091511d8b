"""`steadygaze diffmask train`, and `--diffmask FILE` in explain, verify and report: progress, exact resume,
divergence, warm start."""

import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.cli import app
from steadygaze.methods.diffmask import read_file
from steadygaze.training import diffmask as diffmask_training
from steadygaze.training.diffmask import DivergenceMonitor, Settings, Trainer
from steadygaze.training.explainers import ExplainerRequest, ExplainerRun

FAST = {"batch": 2, "warmup": 1, "gate_rate": 1e-3}
WORDS = ("--model", "embedded", "--steps", "2")
WORDS = (*WORDS, "--set", "batch=2", "--set", "warmup=1", "--set", "gate_rate=1e-3")


def cli(*words, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, (done.exit_code, done.output, done.exception)
    return done.output


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Five images of two classes."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for number in range(5):
        place = folder / ("cat", "ship")[number % 2]
        place.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(place / f"{number}.png")
    return folder


@pytest.fixture(scope="module")
def loaded():
    return sg.load_model("embedded")


@pytest.fixture(scope="module")
def gates(data, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("gates") / "m.safetensors"
    told = cli("diffmask", "train", *WORDS, "--data", data, "--out", out)
    assert (
        "m.safetensors: 2 steps; all gates together keep" in told.replace("\n", "")
        and "5 images, 2 steps of 2" in told
    )
    return out


def run(data, out, loaded, **more) -> ExplainerRun:
    options = FAST | more.pop("options", {})
    request = ExplainerRequest(model="embedded", data=[data], out=out, options=options, **more)
    return ExplainerRun(Trainer, request, loaded)


def same(one: Path, two: Path) -> None:
    (_, facts, state), (_, others, again) = read_file(one), read_file(two)
    assert facts == others and set(state) == set(again)
    assert all(torch.equal(state[name], again[name]) for name in state)
    assert all(
        torch.equal(a, b)
        for a, b in zip(read_file(one)[0].parameters(), read_file(two)[0].parameters(), strict=True)
    )


def test_resume_is_exact(data, tmp_path, loaded, monkeypatch) -> None:
    """Stopped by hand in the middle, and killed between two saves: the file is that of an unbroken run, bit
    for bit."""
    whole, cut, killed = (tmp_path / name for name in ("whole", "cut", "killed"))
    run(data, whole, loaded, steps=9, save_every=4).execute()
    real = Trainer.step

    def stops(at: int, how: type[BaseException]):
        def step(self, images):
            if self.steps == at:
                raise how
            return real(self, images)

        return step

    for out, how in ((cut, KeyboardInterrupt), (killed, SystemExit)):
        monkeypatch.setattr(Trainer, "step", stops(6, how))
        with pytest.raises(how):
            run(data, out, loaded, steps=9, save_every=4).execute()
        monkeypatch.setattr(Trainer, "step", real)
        begun = run(data, out, loaded, steps=9, save_every=4)
        assert begun.trainer.steps == (6 if how is KeyboardInterrupt else 4)
        begun.execute()
        same(whole, out)
    count = []
    run(data, cut, loaded, steps=9).execute(lambda progress: count.append((progress.done, progress.resumed)))
    assert count == [(9, 9)], "nothing is left to do"
    run(data, cut, loaded, steps=10).execute()
    assert read_file(cut)[1]["steps"] == 10, "more steps can be asked for"
    with pytest.raises(
        sg.InputError, match=r"holds a mask of another training: margin was 0\.1, is now 0\.3"
    ):
        run(data, cut, loaded, steps=12, options={"margin": 0.3})


def test_resume_is_exact_after_ctrl_c_in_the_middle_of_a_step(data, tmp_path, loaded, monkeypatch) -> None:
    """By then numbers are drawn and gates have not moved: the step is done before anything is written."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(data, whole, loaded, steps=9, save_every=4).execute()
    real = Trainer._measure

    def measure(self, images, layer):
        found = real(self, images, layer)
        if self.steps == 5:
            signal.raise_signal(signal.SIGINT)
        return found

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Trainer, "_measure", measure)
    with pytest.raises(KeyboardInterrupt):
        run(data, cut, loaded, steps=9, save_every=4).execute()
    monkeypatch.setattr(Trainer, "_measure", real)
    begun = run(data, cut, loaded, steps=9, save_every=4)
    assert begun.trainer.steps == 6 and signal.getsignal(signal.SIGINT) is handler
    begun.execute()
    same(whole, cut)


def test_images_are_all_seen(data, tmp_path, loaded) -> None:
    made = run(data, tmp_path / "m", loaded, steps=2)
    assert made.total_steps == 2 and run(data, tmp_path / "m", loaded, epochs=3).total_steps == 6
    files = made.images.files
    orders = [[made.images.batch(step, 1, 0)[0] for step in range(5)] for _ in range(2)]
    images = [made.images.load([file])[0] for file in files]
    places = [
        [next(i for i, image in enumerate(images) if torch.equal(image, seen)) for seen in order]
        for order in orders
    ]
    assert sorted(places[0]) == list(range(5)) and places[0] == places[1]
    assert not torch.equal(made.images.batch(0, 5, 0), made.images.batch(1, 5, 0)), (
        "another order in another epoch"
    )


def test_warm_start(data, tmp_path, loaded, gates) -> None:
    begun = run(data, tmp_path / "m", loaded, steps=2, options={"stretch": 20.0, "warm_start": str(gates)})
    for (name, a), b in zip(
        begun.trainer.learned.named_parameters(), read_file(gates)[0].parameters(), strict=True
    ):
        assert torch.equal(a, b), name
    assert begun.trainer.learned.shape.stretch == 20 and begun.trainer.steps == 0
    begun.execute()
    with pytest.raises(sg.InputError, match="warm_start was"):
        run(data, tmp_path / "m", loaded, steps=4, options={"stretch": 20.0})
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=10
    ).eval()
    small = sg.load_model("embedded")
    object.__setattr__(small, "model", model)
    with pytest.raises(
        sg.CheckpointError, match=r"expected a mask for 4 states of widths 16.*has 8 of widths 128"
    ):
        run(data, tmp_path / "other", small, options={"warm_start": str(gates)})


@pytest.mark.full
@pytest.mark.parametrize(("shift", "state"), [(-60.0, "off"), (60.0, "on")])
def test_divergence_is_seen_and_said(data, tmp_path, loaded, monkeypatch, caplog, shift, state) -> None:
    monkeypatch.setattr(diffmask_training, "DivergenceMonitor", lambda grace: DivergenceMonitor(0, 3))
    out, done = tmp_path / "m", []
    ended = run(data, out, loaded, steps=20, options={"shift": shift}).execute()
    assert (
        ended.problem == f"the masks have been all {state} for 3 steps"
        and ended.steps == 3
        and ended.attempt == 0
    )
    assert read_file(out)[1]["diverged"] == ended.problem
    restarts = {"restarts": 2, "restart_with": "stretch"}
    again = run(data, out, loaded, steps=20, options={"shift": shift, **restarts})
    ended = again.execute(lambda progress: done.append(progress.done))
    assert ended.attempt == 2 and again.trainer.settings.seed == 2 and again.trainer.settings.stretch == 25
    assert [
        f"all {state} for 3 steps. Restarting with seed {n}" in text
        for n, text in zip((1, 2), caplog.messages, strict=True)
    ] == [True] * 2
    assert done == [3, 0, 1, 2, 3, 0, 1, 2, 3], "progress starts again with each attempt"
    monkeypatch.undo()
    words = ("diffmask", "train", *WORDS, "--data", data, "--out", tmp_path / "c", "--set", f"shift={shift}")
    told = cli(*words, code=1)
    assert f"diverged: the masks are all {state}. Try --set restarts" in told.replace("\n", " ")
    cli(*words, "--set", "restarts=1", code=1)
    assert read_file(tmp_path / "c")[1]["attempt"] == 1, (
        "a run that ends with all on or all off begins anew as well"
    )
    with pytest.warns(UserWarning, match="diverged in training"):
        sg.explain(
            loaded.model, torch.zeros(1, 3, 32, 32), method=sg.method("diffmask", file=str(tmp_path / "c"))
        )


@pytest.mark.full
def test_what_was_before_training_is_said(data, tmp_path, loaded) -> None:
    """Gates keep some share of the patches before they have learned anything: the share at the end means
    little without it."""
    out = tmp_path / "m"
    words = ("diffmask", "train", *WORDS, "--data", data, "--out", out)
    told = cli(*words).replace("\n", " ")
    fresh = run(data, tmp_path / "n", loaded, steps=2)
    first = fresh.trainer.evaluate(fresh.images.load(fresh.images.files))
    line = f"(before training: {100 * first.l0:.1f} %, {first.kl:.3f}, {100 * first.accuracy:.1f} %)"
    assert line in told and 0.2 < first.l0 < 0.9
    assert line in cli(*words, "--steps", 4).replace("\n", " "), "also after a resume"


@pytest.mark.full
def test_too_short_a_training_of_open_gates_is_no_success(data, tmp_path, loaded) -> None:
    """Until some have closed, the mask says nothing; that is no divergence, and another seed would not
    help."""
    out = tmp_path / "m"
    words = ("diffmask", "train", *WORDS, "--set", "begin=open", "--data", data, "--out", out)
    told = cli(*words, "--set", "restarts=2", code=1).replace("\n", " ")
    assert (
        "not trained yet: the masks are still all on. Continue with more --steps" in told
        and "diverged" not in told
    )
    facts = read_file(out)[1]
    assert facts["attempt"] == 0 and facts["steps"] == 2 and facts["early"] and not facts["stopped"]
    with pytest.warns(
        UserWarning, match="m is not trained yet: the masks are still all on. It explains nothing"
    ):
        sg.explain(loaded.model, torch.zeros(1, 3, 32, 32), method=sg.method("diffmask", file=str(out)))
    cli(*words, "--steps", 3, code=1)
    assert read_file(out)[1]["steps"] == 3, "it goes on"
    slow, fast = (Settings(gate_rate=rate, warmup=100, begin="open").grace_steps for rate in (2e-5, 1e-2))
    assert (slow, fast) == (20_200, 1000), "slow gates have more time to close before all on is a divergence"


def test_unreadable_images(data, tmp_path) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    (folder / "broken.png").write_bytes(b"no image")
    told = cli(
        "diffmask",
        "train",
        *WORDS,
        "--data",
        data,
        "--data",
        folder,
        "--out",
        tmp_path / "m",
        "--steps",
        6,
        code=1,
    )
    assert "broken.png: does not decode" in told.replace("\n", "") and "6 images" in told
    told = cli("diffmask", "train", *WORDS, "--data", folder, "--out", tmp_path / "n", code=2)
    assert "none of 1 images could be read" in told.replace("\n", " ")


def test_wrong_words(data, tmp_path) -> None:
    def refused(message: str, *words) -> None:
        assert message in cli(
            "diffmask", "train", *WORDS, "--data", data, "--out", tmp_path / "m", *words, code=2
        ).replace("\n", " ")

    refused("unknown preset 'mnist'", "--set", "preset=mnist")
    refused("unknown l0 'l1'", "--set", "l0=l1")
    refused("unknown class 'dragon'", "--set", "target=dragon")
    refused("no such file", "--set", f"warm_start={tmp_path / 'none'}")
    refused("gate_rate: expected a number of at least 0, got -1", "--set", "gate_rate=-1")
    refused("Did you mean 'gate_rate'", "--set", "gate_rat=1")
    (tmp_path / "folder").mkdir()
    refused("folder, a folder", "--out", tmp_path / "folder")
    (tmp_path / "file").write_text("")
    assert cli("diffmask", "train", *WORDS, "--data", data, "--out", tmp_path / "file" / "m", code=3)


@pytest.mark.full
def test_one_class(data, tmp_path) -> None:
    out = tmp_path / "cat.safetensors"
    cli(
        "diffmask",
        "train",
        *WORDS,
        "--data",
        data,
        "--out",
        out,
        *("--set", "target=cat", "--set", "preset=imagenet,reference", "--set", "gate_rate=1e-5"),
    )
    kept = read_file(out)[1]["settings"]
    assert (kept["kl"], kept["target"], kept["stretch"], kept["dual"], kept["batch"]) == (
        "class",
        3,
        20.0,
        "reference",
        2,
    )
    words = ("explain", data, "--model", "embedded", "--diffmask", out, "--out", tmp_path / "x", "--target")
    assert "class 3 alone" in cli(*words, "ship", code=2)
    cli(*words, "cat")


@pytest.mark.full
def test_explain_draws_patches_and_smooth(data, tmp_path, gates) -> None:
    out = tmp_path / "out"
    cli("explain", data, "--model", "embedded", "--diffmask", gates, "--method", "gaze", "--out", out)
    manifest = json.loads((out / "manifest.json").read_text())
    assert [m["name"] for m in manifest["methods"]] == ["gaze", "diffmask"] and manifest[
        "diffmask"
    ] == "m.safetensors"
    hard, soft = (
        np.asarray(Image.open(out / f"0.diffmask{tail}.png")).astype(int) for tail in ("-patches", "")
    )
    assert hard.shape == soft.shape and (hard != soft).any()
    scores = np.load(out / "scores.npz")["diffmask"]
    assert scores.shape == (5, 8, 8) and scores.min() >= 0 and scores.max() <= 1
    assert not (out / "0.gaze-patches.png").exists()
    cli("explain", data, "--model", "embedded", "--method", "gaze", "--patches", "--out", tmp_path / "p")
    assert (tmp_path / "p" / "0.gaze-patches.png").exists()


@pytest.mark.full
def test_verify_measures_it(data, tmp_path, gates) -> None:
    out = tmp_path / "rows"
    words = (
        "verify",
        "--model",
        "embedded",
        "--data",
        data,
        "--out",
        out,
        "--methods",
        "rollout,diffmask",
        "--ratios",
        "0.5",
    )
    told = cli(*words, "--diffmask", gates)
    assert "diffmask" in told and "rollout" in told
    about = json.loads((out / "run.json").read_text())
    assert about["about"]["given"]["diffmask"] == str(gates) and len(about["settings"]["diffmask"]) == 16
    told = cli("report", out)
    assert "left out" not in (out / "report.html").read_text(), "images are drawn with the gates"
    other = tmp_path / "other.safetensors"
    cli("diffmask", "train", *WORDS, "--data", data, "--out", other, "--set", "seed=4")
    assert "diffmask was" in cli(*words, "--diffmask", other, code=2)
    assert "needs gates" in cli(
        "verify",
        "--model",
        "embedded",
        "--data",
        data,
        "--out",
        tmp_path / "n",
        "--methods",
        "diffmask",
        code=2,
    )
    assert "no such file" in cli(*words, "--diffmask", tmp_path / "none", code=2).replace("\n", " ")
