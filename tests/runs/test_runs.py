"""`sg.verify` and `steadygaze verify`: what they compute, skip, flag and refuse."""

import json
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from typer.testing import CliRunner

import steadygaze as sg
from helpers.runs import image_folder
from steadygaze.cli import app
from steadygaze.faithfulness.evaluate import evaluate
from steadygaze.faithfulness.inputs import Batch
from steadygaze.faithfulness.sanity import agreement
from steadygaze.report.pages import write_report
from steadygaze.runs import maps, store
from steadygaze.runs import verify as request
from steadygaze.runs.plan import choose, make_plan, with_start_layers
from steadygaze.runs.rows import Rows


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=4, num_heads=2, num_classes=5)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def batches(count=2, size=3, masks=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        images = torch.randn(size, 3, 16, 16, generator=generator)
        labels = torch.randint(0, 5, (size,), generator=generator)
        yield (
            (images, labels, torch.rand(size, 16, 16, generator=generator) > 0.5)
            if masks
            else (images, labels)
        )


def cli(*words: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["verify", "--no-random", *words])
    assert done.exit_code == code, (done.exit_code, done.output, done.exception)
    return done.output


def rows_of(out: Path) -> list[str]:
    return sorted(line for file in sorted(out.glob("rows-*.jsonl")) for line in file.read_text().splitlines())


@pytest.fixture
def data(tmp_path):
    return image_folder(tmp_path / "data")


WHOLE = next(info.name for info in sg.list_methods() if not info.layers and not info.alias_of)
FAST = ("--model", "embedded", "--ratios", "0.3,0.7", "--batch-size", "4")


def test_verify_is_explain_and_evaluate(model):
    metrics = ["insertion_accuracy", "deletion_aopc", "average_precision", "miou"]
    frame = sg.verify(model, batches(masks=True), methods=["gaze", "rollout"], metrics=metrics).to_pandas()
    assert {"method", "score", "metric", "image", "value"} <= set(frame.columns)
    assert len(frame) == 2 * 4 * 6 and frame["image"].unique().tolist() == [str(i) for i in range(6)]
    assert dict(zip(frame["method"], frame["score"], strict=True)) == {"gaze": "log_odds", "rollout": "logit"}
    for number, (images, labels, masks) in enumerate(batches(masks=True)):
        batch = Batch(images, labels, masks.to(torch.uint8) * 255)
        for method in ("gaze", "rollout"):
            maps = sg.explain(model, images, target=labels, method=method).scores[None]
            for metric, values in evaluate(model, batch, maps, metrics).values.items():
                got = frame[(frame["method"] == method) & (frame["metric"] == metric)]["value"].tolist()
                assert np.allclose(
                    got[3 * number : 3 * number + 3], values.value[0], atol=1e-4, equal_nan=True
                )


def test_scores_and_aliases_share_maps(model, monkeypatch):
    seen, real = [], maps.explain_batch

    def spy(clean, target, methods, score, **options):
        seen.append([m.name for m in methods])
        return real(clean, target, methods, score, **options)

    monkeypatch.setattr(maps, "explain_batch", spy)
    methods = ["gae", "genatt", "rollout", "ixg"]
    frame = sg.verify(model, batches(1), methods=methods, score=["logit", "log_odds"]).to_pandas()
    assert seen == [["gae", "rollout", "ixg"], ["gae", "ixg"]], "an alias or an attention map was made twice"
    assert len(frame) == 3 * 2 * 4 * 3, "aliases are one row"
    same = frame.pivot_table(index=["image", "metric"], columns=["method", "score"], values="value")
    assert (same["rollout", "logit"] == same["rollout", "log_odds"]).all()


def test_images_are_embedded_once_for_all_maps_and_metrics(model):
    embedded = []
    model.patch_embed.register_forward_hook(lambda module, given, output: embedded.append(len(output)))
    try:
        vit = sg.adapt(model)  # runs the model once, to check the view
        embedded.clear()
        methods = ["gae", "ixg", "gaze", "occlusion:budget=3"]
        sg.verify(vit, batches(2), methods=methods, score=["logit", "log_odds"], target="predicted")
    finally:
        model.patch_embed._forward_hooks.clear()
    assert embedded == [3, 3], "one batch was embedded more than once"


def test_all_is_what_the_model_serves(model):
    vit = sg.adapt(model)
    names = {m.name for m in choose(vit, ["all"])}
    assert {"gaze", "rollout", "decompx"} <= names <= {info.name for info in sg.list_methods()}
    assert {"ixg+plus", "rollout"} <= {m.name for m in choose(vit, ["all+plus", "rollout"])}
    with pytest.raises(sg.UnknownNameError, match="aggregator"):
        choose(vit, ["all+minus"])


def test_targets(model):
    def value(target):
        return sg.verify(model, batches(1), methods=["ixg"], target=target).to_pandas()["value"].tolist()

    images, labels = next(batches(1))
    assert value(None) == value(labels) == value(labels.tolist()) == value(labels.numpy()) != value(2)
    assert value(2) == value(np.int64(2)) == value(torch.tensor(2))
    with torch.no_grad():
        assert value("predicted") == value(model(images).argmax(-1))
    for bad in ("best", [0], 9, torch.zeros(3, 2)):
        with pytest.raises(sg.InputError):
            value(bad)


@pytest.mark.parametrize(
    ("data", "metrics", "says"),
    [
        ([], ["insertion_accuracy"], "at least one batch"),
        ([torch.zeros(1)], ["insertion_accuracy"], "expected batches"),
        ((torch.zeros(1, 3, 16, 16), torch.tensor([1])), ["insertion_accuracy"], r"\[\(images, labels\)\]"),
        ([(torch.zeros(3, 16, 16), 1)], ["insertion_accuracy"], "DataLoader"),
        ([(torch.zeros(1, 3, 16, 16), ["cat"])], ["insertion_accuracy"], "'list'"),
        (".", ["insertion_accuracy"], "sg.load_model"),
        ([(torch.zeros(1, 3, 16, 16), torch.zeros(1))], ["insertion_accuracy"], "integers"),
        ([(torch.zeros(1, 3, 16, 16), torch.zeros(2).long())], ["insertion_accuracy"], "integers"),
        ([(torch.zeros(1, 3, 16, 16), torch.tensor([5]))], ["insertion_accuracy"], "0..4"),
        ([(torch.zeros(1, 3, 16, 16), torch.tensor([1]))], ["average_precision"], "masks"),
        ([(torch.zeros(1, 3, 16, 16), torch.tensor([1]), torch.zeros(1, 8, 8))], ["miou"], r"\(1, 16, 16\)"),
        ([(torch.zeros(1, 3, 16, 16), torch.tensor([1]), torch.full((1, 16, 16), 7))], ["miou"], r"\[7\]"),
        ([(torch.zeros(1, 3, 16, 16).int(), torch.tensor([1]))], ["insertion_accuracy"], "float"),
        ([], [], "metrics"),
        ([], ["accuracy"], "unknown metric"),
    ],
)
def test_bad_data(model, data, metrics, says):
    with pytest.raises((sg.InputError, sg.UnknownNameError), match=says):
        sg.verify(model, data, methods=["ixg"], metrics=metrics)


def test_arrays_and_lists_are_data_too(model):
    images, labels, masks = next(batches(1, masks=True))
    given = {"methods": ["ixg"], "metrics": ["insertion_aopc", "miou"]}
    wanted = sg.verify(model, [(images, labels, masks)], **given).to_pandas()
    for data in ((images, labels.tolist(), masks), (images.numpy(), labels.numpy(), masks.numpy())):
        assert sg.verify(model, [data], **given).to_pandas().equals(wanted)


def test_bad_names(model):
    for methods, score, says in (
        (["gazze"], None, "gaze"),
        ([], None, "at least one"),
        (["gaze"], "odds", "log_odds"),
    ):
        with pytest.raises((sg.InputError, sg.UnknownNameError), match=says):
            sg.verify(model, batches(1), methods=methods, score=score)


def test_broken_and_zero_maps_are_flagged_and_the_run_goes_on(model, monkeypatch):
    real = maps.explain_batch

    def some_broken(clean, target, methods, score, **options):
        many = real(clean, target, methods, score, **options)
        for name, attribution in many.items():
            hit = clean.images[:, 0, 0, 0] > 0.5
            if name == "ixg" and hit.any():
                raise sg.BrokenMapError("NaN")
            if name == "rollout":
                attribution.scores[hit] = 0
        return many

    monkeypatch.setattr(maps, "explain_batch", some_broken)
    given = list(batches(2, 4))
    rows = sg.verify(model, given, methods=["ixg", "rollout", "gae"])
    hit = {
        str(i) for i, image in enumerate(torch.cat([images for images, _ in given])) if image[0, 0, 0] > 0.5
    }
    assert 0 < len(hit) < 8
    frame = rows.to_pandas()
    assert len(frame) == 3 * 4 * 8
    assert set(frame[frame["flag"] == "broken map"]["image"]) == hit
    assert set(frame[frame["flag"] == "broken map"]["method"]) == {"ixg"}
    assert frame[frame["flag"] == "broken map"]["value"].isna().all()
    assert set(frame[frame["flag"] == "zero map"]["image"]) == hit
    assert frame[frame["flag"] != "broken map"]["value"].notna().all()
    assert rows.flagged == {("ixg", "broken map"): len(hit), ("rollout", "zero map"): len(hit)}
    whole = sg.verify(model, given, methods=["gae"]).to_pandas()
    assert np.allclose(frame[frame["method"] == "gae"]["value"], whole["value"], atol=1e-4)


def test_out_goes_on_where_it_stopped(model, tmp_path, monkeypatch):
    kwargs = {"methods": ["ixg"], "out": tmp_path / "run", "random": False}
    whole = sg.verify(model, batches(3), methods=["ixg"]).to_pandas()

    def stopped():
        for number, batch in enumerate(batches(3)):
            if number == 2:
                raise RuntimeError("power cut")
            yield batch

    with pytest.raises(RuntimeError):
        sg.verify(model, stopped(), **kwargs)
    computed = []
    real = request.compute_rows
    monkeypatch.setattr(request, "compute_rows", lambda *a: computed.append(a[1].names) or real(*a))
    frame = sg.verify(model, batches(3), **kwargs).to_pandas()
    assert computed == [("6", "7", "8")]
    assert frame.equals(whole)
    with pytest.raises(sg.InputError, match="other settings"):
        sg.verify(model, batches(3), methods=["ixg"], out=tmp_path / "run", seed=1)


def test_out_is_not_gone_on_with_by_other_data(model, tmp_path):
    kwargs = {
        "methods": ["ixg"],
        "metrics": ["insertion_aopc", "positive_perturbation"],
        "out": tmp_path / "run",
    }
    normal = {"mean": [0.5] * 3, "std": [0.5] * 3}
    before = sg.verify(model, batches(2), **kwargs, **normal).to_pandas()
    (images, labels), *rest = batches(2)
    for other in (list(batches(2, seed=1)), list(batches(2, size=2)), [(images, (labels + 1) % 5), *rest]):
        with pytest.raises(sg.InputError, match="other images"):
            sg.verify(model, other, **kwargs, **normal)
    with pytest.raises(sg.InputError, match="mean was"):
        sg.verify(model, batches(2), **kwargs, mean=[0.4] * 3, std=[0.5] * 3)
    assert Rows.read(tmp_path / "run").to_pandas().equals(before)


def test_a_row_that_is_missing_within_a_batch_comes_back_alone(data, tmp_path):
    words = (*FAST, "--data", str(data), "--methods", "ixg,rollout", "--limit", "8", "--out")
    cli(*words, str(tmp_path / "whole"))
    cli(*words, str(tmp_path / "cut"))
    file = tmp_path / "cut" / "rows-00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:37]) + lines[37][:25])
    cli(*words, str(tmp_path / "cut"))
    assert file.read_text().splitlines(keepends=True)[:37] == lines[:37]
    assert rows_of(tmp_path / "cut") == rows_of(tmp_path / "whole")


@pytest.mark.full
def test_rows_do_not_depend_on_threads_that_read(data, tmp_path):
    words = (*FAST, "--data", str(data), "--methods", "ixg", "--limit", "9")
    cli(*words, "--out", str(tmp_path / "a"))
    cli(*words, "--num-workers", "3", "--out", str(tmp_path / "b"))
    assert (tmp_path / "a" / "rows-00000.jsonl").read_text() == (
        tmp_path / "b" / "rows-00000.jsonl"
    ).read_text()


def test_an_unknown_option_is_named():
    with pytest.raises(sg.UnknownNameError, match="methods"):
        sg.verify("embedded", [], method="gae")


def test_the_command(data, tmp_path):
    out = tmp_path / "run"
    text = cli(
        *FAST,
        "--data",
        str(data),
        "--methods",
        "gaze,rollout",
        "--score",
        "logit,log_odds",
        "--limit",
        "6",
        "--seed",
        "3",
        "--out",
        str(out),
    )
    assert "gaze" in text and "6 images" in text and "removal_" in text
    run = json.loads((out / "run.json").read_text())
    assert (
        run["settings"]["seed"] == 3
        and run["settings"]["limit"] == 6
        and len(run["settings"]["weights"]) == 16
    )
    frame = Rows.read(out).to_pandas()
    assert (
        len(frame) == 6 * 2 * 2 * 4
        and set(frame["score"]) == {"logit", "log_odds"}
        and set(frame["seed"]) == {3}
    )
    assert {name.split("/")[0] for name in frame["image"]} == {"airplane", "cat", "truck"}
    assert "24 images" not in text
    cli(*FAST, "--data", str(data), "--methods", "gaze,rollout", "--limit", "7", "--out", str(out), code=2)


@pytest.mark.full
def test_what_is_painted_can_be_chosen(data, tmp_path):
    """The row says what was painted, and a report keeps apart what differs in it."""
    names = ["positive_perturbation", "negative_perturbation"]
    loaded = sg.load_model("embedded")
    demo = sorted((Path(sg.__file__).parent / "assets" / "demo").glob("*.png"))
    images, labels = (
        torch.stack([loaded.preprocess(Image.open(file)) for file in demo]),
        torch.tensor([0, 3, 7, 8]),
    )
    maps = sg.explain(loaded.model, images, target=labels, method="ixg").scores[None]
    batch = Batch(
        images, labels, mean=torch.tensor(loaded.mean), std=torch.tensor(loaded.std), names=tuple("0123")
    )
    values = {}
    for fill in ("zero", "mean", "blur", "noise"):
        rows = sg.verify(loaded, [(images, labels)], methods=["ixg"], metrics=names, fill=fill).to_pandas()
        wanted = evaluate(loaded.model, batch, maps, names, fill=fill).values
        values[fill] = rows["value"].tolist()
        assert set(rows["note"]) == {fill}
        assert values[fill] == pytest.approx([float(wanted[n].value[0, i]) for i in range(4) for n in names])
    assert len({tuple(v) for v in values.values()}) == 4
    words = (*FAST, "--data", str(data), "--limit", "2", "--methods", "ixg", "--metrics", names[0], "--out")
    cli(*words, str(tmp_path / "black"))
    cli(*words, str(tmp_path / "blur"), "--fill", "blur")
    assert "fill" not in json.loads((tmp_path / "black" / "run.json").read_text())["settings"], (
        "older runs can be gone on with"
    )
    assert [s.variant for s in Rows.read(tmp_path / "black", tmp_path / "blur").table().sections] == [
        "fill default",
        "fill blur",
    ]
    assert "noise" in cli(*words, str(tmp_path / "bad"), "--fill", "red", code=2)


def test_one_is_one_and_few_are_few(data, tmp_path):
    words = (*FAST, "--data", str(data), "--metrics", "insertion_accuracy,agreement", "--methods")
    one = cli(*words, "ixg", "--limit", "1", "--out", str(tmp_path / "one"))
    assert "1 image, 1 method, 2 metrics" in one and "One image gives no interval" in one
    assert "nan" not in one, "one method alone agrees with nobody"
    few = cli(
        *words, "ixg,rollout", "--score", "logit,log_odds", "--limit", "3", "--out", str(tmp_path / "few")
    )
    assert "3 images, 2 methods, 2 scores each (3 different maps), 2 metrics" in few and "too narrow" in few
    page = write_report([tmp_path / "few"], images=False)[0].read_text()
    assert (
        "2 attribution methods (4 with their scores)" in page
        and "too narrow" in page
        and "too narrow" in (tmp_path / "few" / "table.md").read_text()
    )


def test_masks_on_the_command_line(data, tmp_path):
    for path in data.rglob("*.png"):
        target = tmp_path / "masks" / path.relative_to(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        size = (30, 32) if path.name == "0.png" and path.parent.name == "cat" else (32, 32)
        Image.new("L", size, 0).save(target)
        with Image.open(target) as opened:
            opened.paste(255, (0, 0, 16, 16))
            opened.save(target)
    words = (
        *FAST,
        "--data",
        str(data),
        "--methods",
        "ixg",
        "--metrics",
        "pointing_game,miou",
        "--limit",
        "6",
    )
    assert "expected masks" in cli(*words, "--out", str(tmp_path / "no"), code=2)
    text = cli(*words, "--masks", str(tmp_path / "masks"), "--out", str(tmp_path / "run"), code=1)
    assert "30x32" in text and "32x32" in text, "a mask of another size is named"
    frame = Rows.read(tmp_path / "run").to_pandas()
    assert len(frame) == 5 * 2 and frame["value"].between(0, 100).all()


def test_unreadable_images_are_named_and_may_be_mended(data, tmp_path, monkeypatch):
    broken = data / "cat" / "0.png"
    good = broken.read_bytes()
    broken.write_bytes(good[:100])
    words = (*FAST, "--data", str(data), "--methods", "ixg", "--out", str(tmp_path / "run"))
    assert "cat/0.png: does not decode" in cli(*words, code=1)
    before = (tmp_path / "run" / "rows-00000.jsonl").read_text()
    assert len(Rows.read(tmp_path / "run")) == 23 * 4
    computed = []
    real = request.compute_rows
    monkeypatch.setattr(request, "compute_rows", lambda *a: computed.append(a[1].names) or real(*a))
    assert "cat/0.png" in cli(*words, code=1) and not computed
    assert (tmp_path / "run" / "rows-00000.jsonl").read_text() == before
    broken.write_bytes(good)
    cli(*words)
    after = Rows.read(tmp_path / "run")
    assert len(computed) == 1 and len(after) == 24 * 4 and not after.unreadable


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--methods", "nothing"), "unknown method"),
        (("--metrics", "nothing"), "unknown metric"),
        (("--score", "nothing"), "unknown score"),
        (("--ratios", "a,b"), "expected numbers"),
        (("--ratios", "0.9,0.1"), "increasing"),
        (("--start-layers", "99"), "layers 0.."),
        (("--start-layers", "all", "--methods", WHOLE), "no layers"),
        (("--target", "elephant"), "unknown class"),
        (("--target", "99"), "out of range"),
        (("--masks", "nowhere"), "no such folder"),
    ],
)
def test_wrong_words_stop_before_anything_is_written(data, tmp_path, words, says):
    text = cli(*FAST, "--data", str(data), "--out", str(tmp_path / "run"), *words, code=2)
    assert says in text
    assert not (tmp_path / "run").exists()


def test_a_method_that_the_model_cannot_serve(tmp_path, data, monkeypatch):
    monkeypatch.setattr(
        "steadygaze.runs.plan.unavailable",
        lambda m, vit: "it has windows" if m.name == "rollout" else "",
    )
    text = cli(
        *FAST, "--data", str(data), "--methods", "gaze,rollout", "--out", str(tmp_path / "run"), code=2
    )
    assert "rollout: it has windows" in text and not (tmp_path / "run").exists()


def test_a_folder_without_images(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "found none" in cli(
        *FAST, "--data", str(tmp_path / "empty"), "--out", str(tmp_path / "run"), code=2
    )


@pytest.mark.full
def test_a_full_disk_tells(data, tmp_path, monkeypatch):
    words = (*FAST, "--data", str(data), "--methods", "ixg", "--out", str(tmp_path / "run"))
    real, calls = store.Store.append, []

    def full(self, rows):
        calls.append(1)
        if len(calls) == 3:
            monkeypatch.setattr(store.os, "write", _no_space)
        real(self, rows)

    monkeypatch.setattr(store.Store, "append", full)
    text = cli(*words, code=3)
    assert "No space left" in text and "intact" in text
    assert len(Rows.read(tmp_path / "run")) == 2 * 4 * 4
    monkeypatch.undo()
    cli(*words)
    assert len(Rows.read(tmp_path / "run")) == 24 * 4


def _no_space(*_):
    raise OSError(28, "No space left on device")


@pytest.mark.full
def test_start_layers(data, tmp_path):
    out = tmp_path / "run"
    cli(
        *FAST,
        "--data",
        str(data),
        "--methods",
        "ixg",
        "--start-layers",
        "all",
        "--limit",
        "4",
        "--out",
        str(out),
    )
    names = Rows.read(out).to_pandas()["method"].unique().tolist()
    assert names == [f"ixg+plus:start={layer}" for layer in range(6)]
    assert [m.name for m in with_start_layers(sg.method("cat"), [2])] == ["cat:start=2"]
    assert [m.name for m in with_start_layers(sg.method("decompx+skipplus", cut="floor"), [1])] == [
        "decompx+plus:start=1"
    ]
    started = with_start_layers(sg.method("gaze"), [0, 1])
    assert len({m.name for m in started}) == 2 and all(m.base == sg.method("gaze").base for m in started)


@pytest.mark.full
def test_memory_does_not_grow_with_the_number_of_images(model, tmp_path):
    """What a run into a folder keeps of 40 batches is little more than of 4: no rows, no maps, no images."""

    def peak(count):
        list_of = (batch for batch in batches(count, 2))
        tracemalloc.start()
        sg.verify(model, list_of, methods=["raw_attention"], ratios=[0.5], out=tmp_path / str(count))
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(1)
    few, many = peak(4), peak(40)
    assert many < 1.2 * few + 20_000


def test_the_model_is_left_alone(model):
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    sg.verify(
        model,
        batches(1),
        methods=["gaze"],
        metrics=["insertion_accuracy", "positive_perturbation"],
        target="predicted",
    )
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_sanity_measures_run_the_methods_again(model):
    frame = sg.verify(
        model, batches(1), methods=["gaze", "rollout"], metrics=["class_sensitivity", "randomization"]
    ).to_pandas()
    values = frame.set_index(["metric", "method"])["value"]
    assert np.allclose(values["class_sensitivity", "rollout"], 1), "attention does not look at the class"
    assert (values["class_sensitivity", "gaze"] < 1).all()
    assert values.between(-1, 1).all()


def test_agreement_is_a_matrix_over_the_columns(model, tmp_path):
    asked = ["gaze", "rollout", "ixg"]
    rows = sg.verify(
        model,
        batches(1),
        methods=asked,
        metrics=["agreement"],
        score=["logit", "log_odds"],
        out=tmp_path / "run",
        random=False,
    )
    frame = rows.to_pandas()
    columns = [(method, score) for score in ("logit", "log_odds") for method in asked]
    images, labels = next(iter(batches(1)))
    maps = {s: sg.explain(model, images, target=labels, method=asked, score=s) for s in ("logit", "log_odds")}
    expected = agreement(torch.stack([maps[score][method].scores for method, score in columns]))
    matrix = np.array(
        [np.mean(list(frame[(frame.method == m) & (frame.score == s)].detail), axis=0) for m, s in columns]
    )
    np.testing.assert_allclose(matrix, expected.numpy(), atol=1e-6)
    assert matrix[1, 4] == 1, "rollout does not look at the score: one map, two columns"
    page = write_report([tmp_path / "run"])[0].read_text()
    assert "Which methods agree" in page and page.count("<rect") >= 36
    assert page.count('class="tick strong"') >= 6 and "text.strong {" in page, (
        "numbers on strong colors are light"
    )
    assert "agreement ↑" not in rows.table().markdown() and "agreement ↓" not in rows.table().markdown()


def test_normalization_is_asked_for(model):
    with pytest.warns(UserWarning, match="mean="):
        sg.verify(model, batches(1), methods=["ixg"], metrics=["positive_perturbation"])
    with warnings.catch_warnings():  # noise is drawn after the normalization
        warnings.simplefilter("error")
        sg.verify(model, batches(1), methods=["ixg"], metrics=["positive_kl"])
    with pytest.raises(sg.InputError, match="both or none"):
        sg.verify(model, batches(1), methods=["ixg"], mean=[0.5] * 3)


def test_plan_says_what_a_run_is(model):
    plan = make_plan(sg.adapt(model), ["gaze"], ["miou", "miou"], None, None, 0)
    assert plan.metrics == ("miou",) and plan.needs_masks == ["miou"] and len(plan.keys) == 1


def test_a_replaced_image_is_computed_again(data, tmp_path):
    words = (*FAST, "--data", str(data), "--methods", "ixg", "--limit", "6", "--out")
    cli(*words, str(tmp_path / "run"))
    before = {row["image"]: row for row in Rows.read(tmp_path / "run")}
    changed = sorted(before)[0]
    other = next(path for path in sorted(data.rglob("*.png")) if path != data / changed)
    (data / changed).write_bytes(other.read_bytes())
    with pytest.warns(UserWarning, match=f"1 image changed.*{changed}"):
        cli(*words, str(tmp_path / "run"))
    cli(*words, str(tmp_path / "fresh"))
    resumed, fresh = (
        sorted(json.dumps(row) for row in Rows.read(tmp_path / name)) for name in ("run", "fresh")
    )
    assert resumed == fresh and len(fresh) == 6 * 4
    with warnings.catch_warnings():  # noticed once
        warnings.simplefilter("error")
        cli(*words, str(tmp_path / "run"))
