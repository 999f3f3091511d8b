"""Maps as files: what is kept is measured again, and maps of others are measured or refused in words."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, safe_open, save_file
from timm.models.vision_transformer import VisionTransformer
from typer.testing import CliRunner

import steadygaze as sg
from helpers.runs import image_folder
from steadygaze.cli import app
from steadygaze.results.map_files import MapFolder, MapName, restored, rounded
from steadygaze.runs.rows import Rows

GRID, SIZE = (4, 4), (16, 16)
RANKS = ["insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc"]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=2, num_classes=5)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval()


def batches(count=2, size=3):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, 3, *SIZE, generator=generator), torch.randint(0, 5, (size,), generator=generator))
        for _ in range(count)
    ]


def maps_of_six(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(6, *shape, generator=torch.Generator().manual_seed(seed))


def write(folder: Path, tensors, name="a", **metadata) -> Path:
    folder.mkdir(exist_ok=True)
    metadata = {"images": [str(n) for n in range(6)]} | metadata
    texts = {key: json.dumps(value) for key, value in metadata.items() if value is not None}
    save_file(tensors, folder / f"{name}.safetensors", texts)
    return folder


def values(rows: Rows) -> dict[tuple[str, ...], float | None]:
    return {(r["method"], r["score"], r["metric"], r["image"]): r["value"] for r in rows}


def test_kept_maps_give_the_rows_of_their_methods(model, tmp_path):
    """Equal wherever rounding to float16 leaves the order of the patches as it was."""
    methods = ["gae", "ixg", "gaze", "rollout"]
    direct = values(
        sg.verify(model, batches(), methods=methods, metrics=RANKS, out=tmp_path / "run", keep_maps=True)
    )
    again = values(sg.verify(model, batches(), metrics=RANKS, maps=tmp_path / "run"))
    assert {("maps:" + m, *rest) for m, *rest in direct} == set(again)
    images = torch.cat([images for images, _ in batches()])
    labels = torch.cat([labels for _, labels in batches()])
    for method in methods:
        exact = sg.explain(model, images, target=labels, method=method).scores
        order = exact.flatten(1).argsort(dim=1, descending=True, stable=True)
        kept = restored(*rounded(exact)).flatten(1).argsort(dim=1, descending=True, stable=True)
        same = (order == kept).all(1)
        assert same.any()
        for (name, score, metric, image), value in direct.items():
            if name == method and same[int(image)]:
                assert again["maps:" + name, score, metric, image] == pytest.approx(value, abs=1e-4)


def test_float16_overflows_nowhere_and_keeps_the_scale():
    maps = torch.stack([maps_of_six(4, 4)[0] * scale for scale in (1e-30, 1.0, 1e30)] + [torch.zeros(4, 4)])
    half, scale = rounded(maps)
    assert half.dtype == torch.float16 and scale.dtype == torch.float32 and half.isfinite().all()
    assert torch.allclose(restored(half, scale), maps, rtol=1e-3, atol=0)
    double = maps[:1].double() * 1e-200
    assert torch.allclose(restored(*rounded(double)), double, rtol=1e-3, atol=0)


@pytest.mark.full
def test_a_killed_run_has_every_map_of_its_rows_and_none_twice(model, tmp_path, monkeypatch):
    from steadygaze.runs import store

    real, calls = store.Store.append, []

    def killed(self, rows):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, rows)

    monkeypatch.setattr(store.Store, "append", killed)
    asked = {"methods": ["gae", "ixg"], "out": tmp_path / "run", "keep_maps": True}
    with pytest.raises(KeyboardInterrupt):
        sg.verify(model, batches(3), **asked)
    monkeypatch.undo()
    sg.verify(model, batches(3), **asked)
    keys: dict[str, list[str]] = {"gae@logit": [], "ixg@logit": []}
    for file in (tmp_path / "run" / "maps").iterdir():
        with safe_open(file, "pt") as opened:
            for name in keys.keys() & set(opened.keys()):
                keys[name] += json.loads(opened.metadata()["images"])
                assert opened.get_slice(name).get_dtype() == "F16"
    assert [sorted(images) for images in keys.values()] == [[str(n) for n in range(9)]] * 2


@pytest.mark.full
def test_shards_keep_the_maps_of_one_run(model, tmp_path):
    asked = {"methods": ["gae", "ixg"], "metrics": RANKS[3], "keep_maps": True}
    sg.verify(model, batches(3), **asked, out=tmp_path / "one")
    for shard in ("1/2", "0/2"):
        sg.verify(model, batches(3), **asked, out=tmp_path / "two", shard=shard)
    one, two = (MapFolder(tmp_path / run) for run in ("one", "two"))
    assert [file.path.name for file in one.files] == [file.path.name for file in two.files]
    assert one.digest == two.digest and len(one.files) >= 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_pixels_are_pooled_by_their_mean(model, tmp_path, dtype):
    pixels = maps_of_six(*SIZE).to(dtype)
    patches = pixels.double().unflatten(2, (4, 4)).unflatten(1, (4, 4)).mean((2, 4))
    folder = write(tmp_path / "maps", {"pixels": pixels, "patches@logit": patches})
    found = values(sg.verify(model, batches(), maps=folder, metrics=RANKS))
    in_memory = values(
        sg.verify(
            model,
            batches(),
            maps={"pixels": pixels, "patches": {str(n): one.numpy() for n, one in enumerate(patches)}},
            metrics=RANKS,
        )
    )
    for (method, _, metric, image), value in found.items():
        assert (
            value
            == found["maps:patches", "logit", metric, image]
            == in_memory[method, "given", metric, image]
        )


@pytest.mark.full
def test_the_lines_of_the_page_write_maps_that_are_measured(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "maps.md").read_text()
    (code,) = re.findall(r"```python\n(import json.*?)```", page, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    room: dict = {}
    exec(code, room)
    data = image_folder(tmp_path / "data")
    loaded = sg.load_model("embedded")
    files = [data / "cat" / "0.png", data / "truck" / "0.png", data / "airplane" / "0.png"]
    classes = torch.tensor([loaded.class_index(file.parent.name) for file in files])
    images = torch.stack([loaded.preprocess(sg.data.images.read_image(file)) for file in files])
    (tmp_path / "maps").mkdir()
    keys = [file.relative_to(data).as_posix() for file in files]
    room["write_saliency"](loaded.model, [(keys, images, classes)], tmp_path / "maps")
    asked = ["verify", "--model", "embedded", "--data", data, "--limit", 3, "--maps", tmp_path / "maps"]
    asked += [
        "--no-random",
        "--methods",
        "vanilla_grad",
        "--metrics",
        "deletion_aopc",
        "--out",
        tmp_path / "run",
    ]
    done = CliRunner().invoke(app, list(map(str, asked)))
    assert done.exit_code == 0, (done.output, done.exception)
    assert "maps:saliency" in done.output and "vanilla_grad" in done.output
    rows = Rows.read(tmp_path / "run")
    assert {(r["method"], r["score"]) for r in rows} == {
        ("maps:saliency", "given"),
        ("vanilla_grad", "logit"),
    }
    assert (tmp_path / "run" / "samples").is_dir(), "the report has no images of given maps"


@pytest.mark.full
def test_maps_of_explain_are_measured(tmp_path):
    data = image_folder(tmp_path / "data")
    words = ["explain", data, "--model", "embedded", "--method", "gae", "--out", tmp_path / "out"]
    done = CliRunner().invoke(app, list(map(str, [*words, "--maps", tmp_path / "maps", "--top", 2])))
    assert done.exit_code == 0, (done.output, done.exception)
    words = ["explain", data / "cat" / "0.png", data / "truck" / "0.png", "--model", "embedded"]
    same = CliRunner().invoke(app, list(map(str, [*words, "--maps", tmp_path / "same"])))
    assert same.exit_code == 2 and "different keys" in same.output and not (tmp_path / "same").exists()
    loaded = sg.load_model("embedded")
    rows = values(sg.verify(loaded, data, maps=tmp_path / "maps", metrics=RANKS[3], target="predicted"))
    direct = values(sg.verify(loaded, data, methods="gae", metrics=RANKS[3], target="predicted"))
    assert {("maps:gae", "logit", metric, image) for _, _, metric, image in direct} == set(rows)
    close = [abs(rows["maps:" + m, *rest] - value) < 0.2 for (m, *rest), value in direct.items()]
    assert np.mean(close) > 0.8
    with pytest.raises(sg.InputError, match=r"explains class .* measures class .*predicted"):
        sg.verify(loaded, data, maps=tmp_path / "maps", target=9, out=tmp_path / "run")
    assert not (tmp_path / "run").exists(), "an error that is known before the run left a folder"


def test_attributions_save_their_maps(model, tmp_path):
    images, labels = batches(1)[0]
    attribution = sg.explain(model, images, target=labels, method="ixg")
    file = attribution.save_maps(tmp_path / "maps")
    tensors = load_file(file)
    assert set(tensors) == {"ixg@logit", "ixg@logit#scale"}
    kept = restored(tensors["ixg@logit"], tensors["ixg@logit#scale"])
    assert torch.allclose(kept, attribution.scores, rtol=1e-3, atol=1e-6)
    assert len(sg.verify(model, batches(1), maps=tmp_path / "maps", metrics="deletion_aopc")) == 3


def _refused(model, folder, words: str, **more):
    with pytest.raises(sg.InputError, match=words):
        sg.verify(model, batches(), maps=folder, **more)


def test_maps_that_cannot_be_measured_are_refused_in_words(model, tmp_path):
    good = maps_of_six(*GRID)
    broken = good.clone()
    broken[4, 1, 1] = float("nan")
    folders = iter(tmp_path / f"{n}" for n in range(100))
    _refused(model, tmp_path / "none", "no such folder.*docs/maps.md")
    empty = next(folders)
    empty.mkdir()
    _refused(model, empty, "expected .safetensors files")
    _refused(model, write(next(folders), {"m": good}, images=None), "expected metadata 'images'.*json.dumps")
    _refused(model, write(next(folders), {"m": good}, images=["a"]), r"expected shape \(1, rows, columns\)")
    _refused(model, write(next(folders), {"m": good}, images=list(range(6))), "all texts")
    _refused(model, write(next(folders), {"m": good.long()}), "float16.*got I64")
    _refused(model, write(next(folders), {"m": good[:, None].repeat(1, 3, 1, 1)}), "Sum over the channels")
    _refused(model, write(next(folders), {"m": broken}), "m of '4': expected finite scores")
    _refused(
        model, write(next(folders), {"m": maps_of_six(5, 4)}), r"expected \(4, 4\), the model's patch grid"
    )
    _refused(model, write(next(folders), {"m": good}, images=[f"x{n}" for n in range(6)]), "got none for 1")
    _refused(model, write(next(folders), {"m": good}, targets=[0]), "6 class indices")
    _refused(model, write(next(folders), {"m": good, "m#scale": good[:, 0, 0].half()}), "factors in float32")
    twice = write(next(folders), {"m": good})
    write(twice, {"m": good}, "b")
    assert len(sg.verify(model, batches(), maps=twice, metrics="deletion_aopc")) == 6
    write(twice, {"m": -good}, "b")
    _refused(model, twice, "two that differ.*Delete one")
    damaged = write(next(folders), {"m": good})
    file = damaged / "a.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-10])
    _refused(model, damaged, "damaged or incomplete")
    file.write_bytes((2**40).to_bytes(8, "little") + content[8:])
    _refused(model, damaged, "header of at most 64 MiB")
    sanity = next(m.name for m in sg.list_metrics() if m.needs_explain)
    _refused(model, write(next(folders), {"m": good}), "run again", metrics=sanity)
    _refused(model, {}, "expected a folder, or a dict")
    _refused(model, {"m": good[0]}, r"expected \(N, rows, columns\)")


def test_a_folder_with_missing_maps_is_refused_before_anything_is_written(tmp_path):
    data = image_folder(tmp_path / "data")
    maps = write(tmp_path / "maps", {"m": maps_of_six(*GRID)}, images=["cat/0.png", *"abcde"])
    with pytest.raises(sg.InputError, match=r"got none for 23 of 24: .*5 keys match no image: 'a', 'b'"):
        sg.verify(sg.load_model("embedded"), data, maps=maps, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_maps_that_were_not_kept_are_reported(model, tmp_path):
    asked = {"methods": "gae", "metrics": RANKS[3], "out": tmp_path / "run"}
    sg.verify(model, batches(), **asked)
    with pytest.warns(UserWarning, match="has no maps of 6 images"):
        sg.verify(model, batches(), **asked, keep_maps=True)


@pytest.mark.full
def test_reports_do_not_mix_given_maps_of_one_name(model, tmp_path):
    for seed in (1, 2):
        maps = {"mine": maps_of_six(*GRID, seed=seed)}
        sg.verify(model, batches(), maps=maps, metrics=RANKS[3], out=tmp_path / f"{seed}")
    with pytest.raises(sg.InputError, match="other settings: maps was"):
        sg.verify(model, batches(), maps=maps, metrics=RANKS[3], out=tmp_path / "1")
    sections = Rows.read(tmp_path / "1", tmp_path / "2").table(repeats=10).sections
    assert len(sections) == 2 and all("maps" in section.variant for section in sections)


def test_names_state_a_score_only_if_it_is_one():
    assert MapName.parse("me@home") == MapName("me@home")
    assert str(MapName.parse("a@b@prob")) == "a@b@prob"
    assert MapName.parse("@logit").method == "@logit"
