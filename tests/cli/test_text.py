"""--text, --class-names and --template: a model that compares images with text on the command line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import steadygaze as sg
from benchmarks import text_zoo
from steadygaze.app.viewer import Viewer
from steadygaze.cli import app

DEMO = Path(sg.__file__).parent / "assets" / "demo"
NAMES = ("cat", "dog", "bird")


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import CLIPImageProcessor

    folder = tmp_path_factory.mktemp("clip")
    text_zoo.clip().float().save_pretrained(folder)
    text_zoo.tokenizer().save_pretrained(folder)
    size = {"height": 32, "width": 32}
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=size).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images of each class, in a folder of its name."""
    folder = tmp_path_factory.mktemp("photos")
    generator = torch.Generator().manual_seed(0)
    for name in NAMES:
        (folder / name).mkdir()
        for number in range(2):
            pixels = torch.randint(0, 255, (40, 40, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / name / f"{number}.png")
    (folder / "names.txt").write_text("\n".join(NAMES) + "\n")
    return folder


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text())


def test_explain_compares_with_texts(clip: Path, tmp_path: Path) -> None:
    out, image = tmp_path / "out", DEMO / "cat.png"
    run(
        "explain",
        image,
        "--model",
        clip,
        "--text",
        "a cat",
        "--text",
        "a dog",
        "--method",
        "ixg",
        "--out",
        out,
    )
    loaded = sg.load_model(str(clip))
    tensor = loaded.preprocess(Image.open(image).convert("RGB"))[None]
    predicted = sg.explain(sg.zero_shot(loaded, ["a cat", "a dog"], "none"), tensor, method="ixg")
    (entry,) = manifest(out)["images"]
    assert {found["name"] for found in entry["predictions"]} == {"a cat", "a dog"}
    assert predicted.target is not None and entry["targets"][0]["class"] == predicted.target.item()
    one = tmp_path / "one"
    run("explain", image, "--model", clip, "--text", "a cat", "--method", "ixg", "--out", one)
    assert manifest(one)["methods"] == [{"name": "ixg", "score": "value"}]


@pytest.mark.full
def test_verify_and_stress_take_class_names(clip: Path, photos: Path, tmp_path: Path) -> None:
    words = ["--model", clip, "--data", photos, "--class-names", photos / "names.txt", "--template", "a {}"]
    verified = run("verify", *words, "--methods", "ixg,legrad", "--out", tmp_path / "verify")
    assert "legrad" in verified
    run(
        "stress",
        *words,
        "--suites",
        "corruptions",
        "--corruptions",
        "fog",
        "--severities",
        "1",
        "--out",
        tmp_path / "s",
    )
    rows = sg.Rows.read(tmp_path / "verify")
    expected = sg.zero_shot(sg.load_model(str(clip)), NAMES, "a {}").weights_hash
    assert {row["weights"] for row in rows} == {expected}


def test_words_that_are_missing_or_wrong_are_named(clip: Path, photos: Path, tmp_path: Path) -> None:
    image, out = DEMO / "cat.png", ("--out", tmp_path / "out")
    assert "--class-names" in run("explain", image, "--model", clip, *out, code=2)
    assert "--class-names" in run("verify", "--model", clip, "--data", photos, *out, code=2)
    text = ("--text", "a cat")
    both = run("explain", image, "--model", clip, *text, "--class-names", photos / "names.txt", *out, code=2)
    assert "not both" in both
    assert "no text tower" not in run("explain", image, "--model", clip, *text, "--method", "ixg", *out)
    assert "text tower" in run("explain", image, "--model", "embedded", *text, *out, code=2)
    assert "used unchanged" in run("explain", image, "--model", clip, *text, "--template", "{}", *out, code=2)
    missing = run("explain", image, "--model", clip, "--class-names", tmp_path / "no.txt", *out, code=2)
    assert "expected a file of class names" in " ".join(missing.split())


@contextmanager
def served(viewer: Viewer) -> Iterator[Any]:
    from gradio_client import Client

    from steadygaze.app import page

    blocks = page(viewer.loaded)
    _, address, _ = blocks.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
    try:
        yield Client(address, verbose=False)
    finally:
        blocks.close(verbose=False)


@pytest.mark.full
def test_the_page_has_a_box_for_prompts(clip: Path) -> None:
    pytest.importorskip("gradio")
    from gradio_client import handle_file

    viewer = Viewer(sg.load_model(str(clip)))
    image, prompts = DEMO / "cat.png", "a cat\na dog\ntwo bird"
    with served(viewer) as client:
        shown, *_ = client.predict(handle_file(image), prompts, api_name="/load")
        assert {entry["label"] for entry in shown["confidences"]} == {"a cat", "a dog", "two bird"}
        _, gallery = client.predict(
            handle_file(image), prompts, ["ixg"], "a dog", "default of the method", False, api_name="/explain"
        )
        assert len(gallery) >= 1
        _, _, caption, *_ = client.predict(
            handle_file(image), "Attention", 0, True, 0, "", api_name="/look"
        )  # needs no prompts
        assert "layer 0" in caption
        with pytest.raises(Exception, match="2 to 100 different texts"):
            client.predict(handle_file(image), "a cat", api_name="/load")
