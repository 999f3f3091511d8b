"""The command line, run in this process."""

import ast
import html
import inspect
import json
import re
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import typer.main
from PIL import Image
from typer.testing import CliRunner

import steadygaze as sg
import steadygaze.cli as cli
import steadygaze.cli.explain as command
from steadygaze.cli import app
from steadygaze.cli.options import split_methods
from steadygaze.errors import BrokenMapError, InputError
from steadygaze.loading.load import load_model
from steadygaze.methods.explain import explain
from steadygaze.runs.request import StressRequest, VerifyRequest, options_of

DEMO = Path(command.__file__).parents[1] / "assets" / "demo"


def run(*words: object, code: int = 0):
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def manifest(folder: Path) -> dict:
    return json.loads((folder / "manifest.json").read_text())


def test_explain_writes_everything(tmp_path):
    result = run(
        "explain",
        DEMO / "ship.png",
        DEMO / "cat.png",
        "--model",
        "embedded",
        "--method",
        "gae,gaze",
        "--out",
        tmp_path / "out",
    )
    out = tmp_path / "out"
    names = {file.name for file in out.iterdir()}
    overlays = {f"{image}.{method}.png" for image in ("ship", "cat") for method in ("gae", "gaze")}
    assert names == overlays | {"grid.png", "scores.npz", "manifest.json"}
    assert "grid.png" in result.output and "ship" in result.output
    facts = manifest(out)
    assert facts["model"]["name"] == "embedded" and len(facts["model"]["weights_hash"]) == 16
    assert facts["methods"] == [{"name": "gae", "score": "logit"}, {"name": "gaze", "score": "log_odds"}]
    assert facts["preprocessing"]["mean"] and facts["versions"]["torch"] and facts["grid"] == [8, 8]
    assert {
        name for row in facts["images"] for files in row["overlays"].values() for name in files
    } == overlays
    assert facts["images"][0]["targets"][0] == facts["images"][0]["predictions"][0]
    assert len(facts["images"][0]["predictions"]) == 3
    assert Image.open(out / "ship.gae.png").size == (224, 224), "small images are enlarged"


def test_scores_are_those_of_explain(tmp_path):
    run("explain", DEMO, "--model", "embedded", "--method", "gae", "--batch-size", 4, "--out", tmp_path)
    loaded = load_model("embedded")
    files = sorted(DEMO.glob("*.png"))
    images = torch.stack([loaded.preprocess(Image.open(file).convert("RGB")) for file in files])
    expected = explain(loaded.model, images, method="gae")
    with np.load(tmp_path / "scores.npz") as stored:
        assert stored["names"].tolist() == [file.stem for file in files]
        np.testing.assert_allclose(stored["gae"], expected.scores.numpy(), rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(stored["target"], expected.target.numpy())
        np.testing.assert_allclose(stored["logits"], expected.logits.numpy(), rtol=1e-4, atol=1e-4)


def test_top_explains_several_classes(tmp_path):
    run(
        "explain", DEMO / "ship.png", "--model", "embedded", "--top", 3, "--method", "gaze", "--out", tmp_path
    )
    row = manifest(tmp_path)["images"][0]
    assert row["targets"] == row["predictions"] and len(row["overlays"]["gaze"]) == 3
    with np.load(tmp_path / "scores.npz") as stored:
        assert stored["gaze"].shape == (1, 3, 8, 8) and stored["target"].shape == (1, 3)


@pytest.mark.parametrize("target", ["frog", "6"])
def test_a_target_by_name_or_number(tmp_path, target):
    run("explain", DEMO / "ship.png", "--model", "embedded", "--target", target, "--out", tmp_path)
    assert manifest(tmp_path)["images"][0]["targets"][0]["name"] == "frog"


def test_options_and_score(tmp_path):
    run(
        "explain",
        DEMO / "ship.png",
        "--model",
        "embedded",
        "--method",
        "attixg+plus:pairing=next,freeze=0.75,gae",
        "--score",
        "contrast",
        "--signed",
        "--out",
        tmp_path,
    )
    methods = manifest(tmp_path)["methods"]
    assert len(methods) == 2 and {method["score"] for method in methods} == {"contrast"}
    assert methods[0]["name"].startswith("attixg+plus:") and "pairing=next" in methods[0]["name"]


def test_unreadable_files_are_listed_and_the_others_explained(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "broken.png").write_bytes(b"no image")
    Image.open(DEMO / "cat.png").save(tmp_path / "in" / "fine.png")
    given = tmp_path / "in", tmp_path / "absent.jpg"
    result = run("explain", *given, "--model", "embedded", "--out", tmp_path / "out", code=1)
    assert "broken.png" in result.output and "absent.jpg" in result.output
    facts = manifest(tmp_path / "out")
    assert [row["name"] for row in facts["images"]] == ["fine"] and len(facts["unreadable"]) == 2


def test_nothing_readable(tmp_path):
    result = run("explain", tmp_path / "absent.jpg", "--model", "embedded", "--out", tmp_path / "out", code=1)
    assert "no such file" in result.output


def test_a_broken_map_does_not_stop_the_others(tmp_path, monkeypatch):
    def fragile(vit, images, **other):
        if (images[:, 0].mean((1, 2)) > 0.9).any():
            raise BrokenMapError("not finite")
        return explain(vit, images, **other)

    monkeypatch.setattr("steadygaze.methods.explain.explain", fragile)
    Image.new("RGB", (32, 32), "white").save(tmp_path / "white.png")
    given = tmp_path / "white.png", DEMO / "cat.png"
    result = run("explain", *given, "--model", "embedded", "--out", tmp_path / "out", code=1)
    assert "not explained" in result.output and "white.png" in result.output
    facts = manifest(tmp_path / "out")
    assert [row["name"] for row in facts["images"]] == ["cat"] and len(facts["not_explained"]) == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--model", "embeded"], "embedded"),
        (["--model", "embedded", "--method", "gazee"], "gaze"),
        (["--model", "embedded", "--target", "shipp"], "ship"),
        (["--model", "embedded", "--target", "10"], "10"),
        (["--model", "embedded", "--target", "ship", "--top", "2"], "--top"),
        (["--model", "embedded", "--checkpoint", "none.pth"], "none.pth"),
        (["--model", "embedded", "--score", "logits"], "logit"),
    ],
)
def test_errors_are_one_message_without_traceback(tmp_path, words, expected):
    result = run("explain", DEMO / "cat.png", *words, "--out", tmp_path, code=2)
    assert result.output.startswith("error: ") and expected in result.output
    assert "Traceback" not in result.output


def test_out_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    result = run("explain", DEMO / "cat.png", "--model", "embedded", "--out", tmp_path / "file", code=2)
    assert result.output.startswith("error: --out: expected a folder")


def test_a_wrong_method_is_reported_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("steadygaze.loading.load.load_model", None)
    run(
        "explain",
        DEMO / "cat.png",
        "--model",
        "embedded",
        "--method",
        "gazee",
        "--out",
        tmp_path / "out",
        code=2,
    )
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_traceback(tmp_path):
    words = ["explain", str(tmp_path), "--model", "embedded", "--debug"]
    with pytest.raises(InputError, match="found none"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_warnings_are_one_line(monkeypatch, capsys):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # restored after the test

    def warned(prog_name):
        sys.stderr.write(warnings.formatwarning("the mask diverged", UserWarning, __file__, 7, "code()"))

    monkeypatch.setattr(cli, "app", warned)
    cli.main()
    assert capsys.readouterr().err == "warning: the mask diverged\n"


def test_model_is_required():
    assert "--model" in run("explain", DEMO / "cat.png", code=2).output


def test_methods_lists_every_method():
    listed = {info["name"] for info in json.loads(run("methods", "--json").output)}
    assert {"gaze", "gae", "decompx", "rollout", "gradcam"} <= listed
    shown = run("methods").output
    assert all(name in shown for name in listed)


def test_metrics_lists_every_metric():
    listed = {info["name"] for info in json.loads(run("metrics", "--json").output)}
    assert listed == {info.name for info in sg.list_metrics()} and "insertion_aopc" in listed
    shown = run("metrics").output
    assert all(name in shown for name in listed)


def test_suites_lists_every_suite():
    listed = {info["name"] for info in json.loads(run("suites", "--json").output)}
    assert listed == {info.name for info in sg.list_suites()} and {"corruptions", "shift"} <= listed
    assert all(name in run("suites").output for name in listed)


def test_losses_lists_every_loss():
    listed = {info["name"] for info in json.loads(run("losses", "--json").output)}
    assert listed == {info.name for info in sg.list_losses()} and "gradmask" in listed
    assert all(name in run("losses").output for name in listed)


def test_models_by_pattern():
    rows = json.loads(run("models", "deit_tiny", "--json").output)
    assert {"name": "deit_tiny_patch16_224", "library": "timm", "view": "plain"} in rows
    assert all("deit_tiny" in row["name"] for row in rows)
    assert "torchvision:vit_b_16" in run("models", "*vit_b_16").output
    for name in ("pit_ti_224", "swinv2_cr_tiny_224", "twins_svt_small", "xcit_nano_12_p16_224"):
        assert json.loads(run("models", name, "--json").output) == [
            {"name": name, "library": "timm", "view": "staged"}
        ]
    assert "deit_tiny_patch16_224" in run("models", "deit_tinny_patch16_224", code=2).output


def test_demo(tmp_path):
    result = run("demo", "--out", tmp_path)
    images = len(list(DEMO.glob("*.png")))
    assert len(list(tmp_path.glob("*.*.png"))) == 6 * images
    assert str(tmp_path / "grid.png") in result.output
    assert len(manifest(tmp_path)["methods"]) == 6
    page = (tmp_path / "index.html").read_text()
    shown = re.findall(r'<img src="([^"]+)"', page)
    assert len(shown) == 8 and all((tmp_path / name).is_file() for name in shown)
    chances = [
        float(number) for number in re.findall(r"<figcaption>(?:clean|severity \d): cat ([\d.]+) %", page)
    ]
    assert chances[0] > max(chances[1:], default=0), "the corruption harms"
    for line in re.findall(r"<pre[^>]*>(sg\..*)</pre>", page):
        ast.parse(html.unescape(line))
    assert "http" not in page, "it opens offline"


@pytest.mark.parametrize(("name", "request_type"), [("verify", VerifyRequest), ("stress", StressRequest)])
def test_options_of_a_request_are_those_of_command_signature_and_docstring(name, request_type):
    function = getattr(sg, name)
    declared = dict(options_of(request_type))
    names = {field.name for field in declared}
    assert names <= set(inspect.signature(function).parameters)
    assert all(f"        {name}: " in function.__doc__ for name in names)
    parameters = {
        parameter.name: parameter for parameter in typer.main.get_command(app).commands[name].params
    }
    for field, about in declared.items():
        assert (field.name in parameters) == (about.command or field.name in ("mean", "std"))
        assert not about.required or parameters[field.name].required
        if about.command and not about.alias and field.type == "int | None":
            words = [name, "--model", "embedded", "--data", "none", parameters[field.name].opts[0], "many"]
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 2 and "integer" in result.output, field.name


def test_every_option_has_one_spelling():
    """`explain` takes --method, as the function does; runs take --methods, --metrics and --suites."""
    for name, entry in typer.main.get_command(app).commands.items():
        flags = {flag for parameter in entry.params for flag in parameter.opts}
        assert flags.isdisjoint({"--batch", "--workers", "--metric", "--scores"}), name
        assert "--suite" not in flags or name == "verify", name  # it takes one, `stress` several
        assert ("--method" in flags) == (name == "explain"), name
        long = [[f for f in p.opts if f.startswith("--")] for p in entry.params]
        assert all(len(spellings) <= 1 for spellings in long), (name, long)


def test_the_flag_of_an_argument_is_added_to_an_error(tmp_path, monkeypatch):
    def fail(option):
        def explain(*args, **options):
            raise InputError("expected something else", option=option)

        return explain

    words = ("explain", DEMO / "ship.png", "--model", "embedded", "--out", tmp_path)
    monkeypatch.setattr("steadygaze.methods.explain.explain", fail("num_classes"))
    assert run(*words, code=2).output == "error: expected something else (--num-classes)\n"
    monkeypatch.setattr("steadygaze.methods.explain.explain", fail("no_option_of_this_command"))
    assert run(*words, code=2).output == "error: expected something else\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["gae,cat"], ["gae", "cat"]),
        (["gae", "cat,gae"], ["gae", "cat"]),
        (["a:x=1,y=2,b"], ["a:x=1,y=2", "b"]),
        (["a:x=1,b:y=2, z=3"], ["a:x=1", "b:y=2,z=3"]),
    ],
)
def test_methods_between_commas(given, expected):
    assert split_methods(given) == expected


def test_files_with_the_same_stem_get_different_names():
    files = [Path("a/1.png"), Path("b/1.png"), Path("b/1.jpg"), Path("/x/b/1.gif"), Path("2 3.png")]
    names = command.unique_names(files)
    assert len(set(names.values())) == 5
    assert [names[file] for file in files[:2]] == ["1", "b-1"] and names[files[-1]] == "2-3"
    assert set(command.unique_names([Path("x/cat.jpg"), Path("x/CAT.JPG")]).values()) == {
        "cat",
        "x-CAT",
    }  # one file on some file systems


def test_long_image_names_are_printed_in_full_on_a_narrow_terminal(tmp_path):
    names = [f"ILSVRC2012_val_0000{number}" for number in (1112, 1123)]
    for name in names:
        Image.open(DEMO / "ship.png").save(tmp_path / f"{name}.png")
    words = [
        "explain",
        str(tmp_path),
        "--model",
        "embedded",
        "--method",
        "raw_attention",
        "--out",
        str(tmp_path / "out"),
    ]
    output = CliRunner().invoke(app, words, env={"COLUMNS": "50"}).output
    lines = output[: output.index("wrote 2 overlays")].splitlines()
    width = next(line.index("1st") for line in lines if "1st" in line)
    first = "".join(line[:width].strip() for line in lines)
    assert all(name in first for name in names), output


def test_one_overlay_is_singular(tmp_path):
    output = run(
        "explain", DEMO / "ship.png", "--model", "embedded", "--method", "raw_attention", "--out", tmp_path
    ).output
    assert "wrote 1 overlay to" in output


def test_show_prints_the_recipe_unchanged():
    assert 'name = "vit_tiny_patch16_224"' in run("train", "cifar10-tap", "--show").output
    assert "expected no --set" in run("train", "cifar10-tap", "--show", "--set", "seed=1", code=2).output


def test_many_known_names_are_counted_in_one_sentence():
    output = run("explain", DEMO / "ship.png", "--model", "embedded", "--method", "zzz", code=2).output
    count = len(sg.list_methods())
    assert f"unknown method 'zzz'. {count} are known." in " ".join(output.split())


def test_check_prints_a_sentence_for_each_map(tmp_path):
    files = [DEMO / "ship.png", DEMO / "cat.png"]
    result = run(
        "explain", *files, "--model", "embedded", "--method", "gaze,random", "--check", "-o", tmp_path / "out"
    )
    lines = result.output[result.output.index("ship, gaze:") :].partition("wrote")[0].splitlines()
    assert all(len(line) <= 80 for line in lines)
    text = " ".join(line.strip() for line in lines)
    for row in manifest(tmp_path / "out")["images"]:
        for method, (check,) in row["checks"].items():
            assert f"{row['name']}, {method}: {check['text']}" in text
            assert check["text"].startswith("Removing the 6 brightest patches ")
    assert "gaze: better than chance on 2 of 2 maps, worse on 0" in text
    assert sg.RemovalCheck.load(tmp_path / "out")["random"].insertion.shape == (2, 5)
