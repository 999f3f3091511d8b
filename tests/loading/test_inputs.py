"""Images as people have them: every kind gives the same map, and the result keeps what the model saw."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn
from torchvision.transforms import Compose, Normalize, Resize, ToTensor

import steadygaze as sg
from benchmarks import region_zoo
from benchmarks.vision_language import ANSWER, PROMPT, llava
from steadygaze.errors import ImageError, InputError, UnsupportedModelError
from steadygaze.loading import inputs as loading_inputs
from steadygaze.loading.inputs import prepare_inputs

RNG = np.random.default_rng(0)
PIXELS = np.kron(RNG.integers(0, 256, (8, 10, 3)), np.ones((5, 5, 1))).astype(np.uint8)


@pytest.fixture
def photo() -> Image.Image:
    return Image.fromarray(PIXELS)


@pytest.fixture
def file(tmp_path: Path, photo: Image.Image) -> Path:
    (tmp_path / "photos").mkdir()
    photo.save(tmp_path / "photos" / "cat.png")
    return tmp_path / "photos" / "cat.png"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier of transformers on disk."""
    import transformers

    path = tmp_path_factory.mktemp("model") / "hf"
    labels = {"id2label": {0: "ant", 1: "bee", 2: "cow"}, "label2id": {"ant": 0, "bee": 1, "cow": 2}}
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.ViTConfig(**sizes, image_size=32, patch_size=8, **labels)
    transformers.ViTForImageClassification(config).save_pretrained(path)
    size = {"height": 32, "width": 32}
    processor = transformers.ViTImageProcessor(size=size, image_mean=[0.4] * 3, image_std=[0.2] * 3)
    processor.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def loaded() -> sg.LoadedModel:
    return sg.load_model("embedded")


def tiny() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1, num_classes=5).eval()


KINDS = {
    "path": lambda file: file,
    "text": str,
    "folder": lambda file: file.parent,
    "PIL": Image.open,
    "PIL with alpha": lambda file: Image.open(file).convert("RGBA"),
    "array": lambda file: PIXELS,
    "arrays": lambda file: PIXELS[None],
    "list": lambda file: [file],
    "tuple": lambda file: (Image.open(file),),
    "list of arrays": lambda file: [PIXELS],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_gives_the_map_of_the_preprocessed_tensor(
    kind: str, file: Path, loaded: Any, photo: Image.Image
) -> None:
    tensor = loaded.preprocess(photo)[None]
    expected = sg.explain(loaded, tensor, target="cat", method="ixg")
    found = sg.explain(loaded, KINDS[kind](file), target="cat", method="ixg")
    assert torch.equal(found.scores, expected.scores) and found.title() == expected.title()
    assert found.images[0].tobytes() == expected.images[0].tobytes() == loaded.to_image(tensor[0]).tobytes()
    assert found.names == (("0",) if "array" in kind or "alpha" in kind else ("cat",))
    assert expected.names == ("0",)


def test_mixed_images_have_names_of_their_own(file: Path, loaded: Any, photo: Image.Image) -> None:
    (file.parent / "more").mkdir()
    photo.save(file.parent / "more" / "cat.png")
    inputs = prepare_inputs(loaded, [file.parent, photo, PIXELS, file])
    assert inputs.images.shape == (5, 3, 32, 32) and inputs.model is loaded
    assert inputs.names[:4] == ("cat", "more-cat", "2", "3") and len(set(inputs.names)) == 5


def test_an_upright_image_in_memory_and_in_a_file_are_the_same(tmp_path: Path, loaded: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(PIXELS).save(tmp_path / "rotated.png", exif=exif)
    images = [tmp_path / "rotated.png", Image.open(tmp_path / "rotated.png")]
    first, second = prepare_inputs(loaded, images).images
    assert torch.equal(first, second)
    assert not torch.equal(first, loaded.preprocess(Image.fromarray(PIXELS)))


def test_a_tensor_is_passed_on_as_it_is(loaded: Any) -> None:
    images = torch.rand(2, 3, 32, 32)
    inputs = prepare_inputs(loaded, images)
    assert inputs.images is images and len(inputs.shown) == 2
    assert prepare_inputs(loaded, torch.rand(1, 4, 32, 32)).shown is None
    with pytest.raises(InputError, match="transform"):
        prepare_inputs(loaded, images, ToTensor())


# -- models ------------------------------------------------------------------------------------------------


def test_one_line_with_a_name_loads_it_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def load(name: str) -> sg.LoadedModel:
        calls.append(name)
        return sg.load_model(name)

    monkeypatch.setattr(loading_inputs, "load_model", load)
    loading_inputs._by_name.cache_clear()
    found = [sg.explain("embedded", file, "cat", "ixg") for _ in range(2)]
    assert torch.equal(found[0].scores, found[1].scores) and found[0].title().startswith("cat")
    assert calls == ["embedded"]
    with pytest.raises(sg.UnknownNameError):
        sg.explain("embeded", file)
    with pytest.raises(ImageError, match="no such file"):
        sg.explain("not even loaded", file.with_name("dog.png"))


def test_a_folder_a_module_and_a_pipeline_of_transformers(folder: Path, file: Path) -> None:
    import transformers

    expected = sg.explain(sg.load_model(str(folder)), file, "bee")
    module = transformers.AutoModelForImageClassification.from_pretrained(folder)
    pipeline = transformers.pipeline("image-classification", model=str(folder))
    for model in (folder, str(folder), module, sg.adapt(module), pipeline):
        found = sg.explain(model, file, "bee")
        assert torch.equal(found.scores, expected.scores) and found.title() == expected.title()
        assert found.images[0].tobytes() == expected.images[0].tobytes()
    assert sg.load_model(pipeline).class_names == ("ant", "bee", "cow")
    assert sg.load_model(pipeline).weights_hash == sg.load_model(str(folder)).weights_hash


def test_a_module_of_timm_declares_its_preprocessing(file: Path, photo: Image.Image) -> None:
    model = tiny()
    config = timm.data.resolve_data_config({**model.pretrained_cfg, "input_size": (3, 32, 32)}, model=model)
    expected = timm.data.create_transform(**config)
    for given in (model, sg.adapt(model), torch.compile(model)):
        assert torch.allclose(prepare_inputs(given, file).images[0], expected(photo), atol=1e-6)


def test_a_transform_takes_precedence(file: Path, photo: Image.Image) -> None:
    transform = Compose([Resize((32, 32)), ToTensor(), Normalize((0.5,) * 3, (0.25,) * 3)])
    model = tiny()
    del model.pretrained_cfg
    with pytest.raises(InputError, match="transform="):
        sg.explain(model, file)
    found = sg.explain(model, file, 1, transform=transform)
    assert torch.equal(found.scores, sg.explain(model, transform(photo)[None], 1).scores)
    seen = np.asarray(Resize((32, 32))(photo), int)
    assert np.abs(np.asarray(found.images[0], int) - seen).max() <= 1, "the normalization is undone"
    hidden = sg.explain(model, file, 1, transform=lambda image: transform(image) * 2)
    assert hidden.images[0].size == (32, 32), "stretched, where the normalization is not known"


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (3, "callable"),
        (lambda image: np.asarray(image), "end it with ToTensor"),
        (lambda image: 1 / 0, "ZeroDivisionError"),
        (ToTensor(), "one size"),
    ],
)
def test_transforms_that_do_not_fit(transform: Any, message: str, photo: Image.Image) -> None:
    with pytest.raises(InputError, match=f"transform.*{message}"):
        prepare_inputs(tiny(), [photo, photo.crop((0, 0, 32, 32))], transform)


def test_a_transform_may_leave_the_size_as_it_is(photo: Image.Image) -> None:
    inputs = prepare_inputs(tiny(), photo.crop((0, 0, 32, 32)), ToTensor())
    assert inputs.images.shape == (1, 3, 32, 32)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (PIXELS.transpose(2, 0, 1), "channels are first"),
        (PIXELS / 255, "uint8"),
        (PIXELS[..., :2], "RGB"),
        (PIXELS[0, 0], "shape"),
        ([PIXELS[None]], None),
        (range(3), "range"),
        ({"image": PIXELS}, "dict"),
        (["cat.png", 3], "int"),
    ],
)
def test_images_of_other_kinds(images: Any, message: str | None, loaded: Any) -> None:
    if message is None:
        assert len(prepare_inputs(loaded, images).images) == 1
        return
    with pytest.raises(InputError, match=message):
        prepare_inputs(loaded, images)


def test_missing_files_and_empty_folders(tmp_path: Path, loaded: Any) -> None:
    with pytest.raises(ImageError, match="no such file"):
        sg.explain(loaded, tmp_path / "cat.jpg")
    with pytest.raises(InputError, match="found none"):
        sg.explain(loaded, tmp_path)
    (tmp_path / "cat.jpg").write_text("no image")
    with pytest.raises(ImageError, match=r"cat\.jpg"):
        sg.explain(loaded, [tmp_path / "cat.jpg"])
    with pytest.raises(UnsupportedModelError, match="NoneType"):
        sg.explain(None, PIXELS)


# -- many images -------------------------------------------------------------------------------------------


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two images run together."""
    monkeypatch.setattr(loading_inputs, "PIXELS_AT_ONCE", 2 * 32 * 32 + 5)


@pytest.mark.parametrize("target", [None, "cat", ["cat", "dog"], [4, 3, 2, 1, 0], torch.eye(5, 2, dtype=int)])
@pytest.mark.usefixtures("pieces")
def test_a_list_runs_in_batches_and_a_tensor_in_one(target: Any, loaded: Any) -> None:
    pixels = RNG.integers(0, 256, (5, 40, 36, 3)).astype(np.uint8)
    tensor = torch.stack([loaded.preprocess(Image.fromarray(image)) for image in pixels])
    reports: list[sg.Progress] = []
    methods = ["gaze_removal", "random"]
    found = sg.explain(loaded, list(pixels), target, method=methods, on_progress=reports.append)
    assert [(p.task, p.done, p.total) for p in reports] == [("explain", n, 5) for n in (0, 2, 4, 5)]
    reports.clear()
    expected = sg.explain(loaded, tensor, target, method=methods, on_progress=reports.append)
    assert not reports
    for name in methods:
        torch.testing.assert_close(found[name].scores, expected[name].scores, rtol=1e-4, atol=1e-6)
        assert torch.equal(found[name].target, expected[name].target)
        assert found[name].names == ("0", "1", "2", "3", "4") and len(found[name].images) == 5
    with pytest.raises(InputError, match="5 classes"):
        sg.explain(loaded, list(pixels), [3, 2])


@pytest.mark.usefixtures("pieces")
def test_a_callable_target_gets_all_images_at_once(loaded: Any) -> None:
    sizes = []
    sg.explain(loaded, [PIXELS] * 3, lambda logits: sizes.append(len(logits)) or logits[:, 0], "ixg")
    assert set(sizes) == {3}


@pytest.mark.usefixtures("pieces")
def test_features_and_attention_of_many_images_run_in_pieces(
    loaded: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    images = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    reports: list[sg.Progress] = []
    sizes: list[int] = []
    block = loaded.model.blocks[0]
    handle = block.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))

    def look() -> dict[str, Any]:
        features = sg.features(loaded, images, on_progress=reports.append)
        a = sg.attention(loaded, images)
        maps = sg.attention(loaded, images, grad=True).map(0, [0, 2], (3, 4))
        a.save(tmp_path / "maps.npz")
        found = {"layer": a[1], "layers": a[-2:, 1], "each": torch.stack(list(a)), "map": a.map(-1)}
        found |= {"rollout": a.rollout(), "in the graph": maps.detach(), "features": features.values}
        found |= {"file": torch.from_numpy(np.load(tmp_path / "maps.npz")["maps"])}
        assert maps.requires_grad
        table = [(m.entropy, m.distance, m.overfocus) for m in a.table()]
        tops = [m.top_tokens for m in a.table()]
        drawn = [a.figure(image=3), a.figure(2, image=4), a.overlay(1, 0, (2, 2), image=2)]
        return found | {"table": torch.tensor(table), "tops": tops, "drawn": drawn, "text": repr(a)}

    try:
        pieces = look()
        assert max(sizes) == 2 and [p.done for p in reports] == [0, 2, 4, 5]
        monkeypatch.setattr(loading_inputs, "PIXELS_AT_ONCE", 2**30)
        sizes.clear()
        whole = look()
        assert max(sizes) == 5
    finally:
        handle.remove()
    for name, value in whole.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(pieces[name], value, rtol=1e-4, atol=1e-6)
    assert pieces["tops"] == whole["tops"] and pieces["text"] == whole["text"]
    for ours, theirs in zip(pieces["drawn"], whole["drawn"], strict=True):
        assert np.abs(np.asarray(ours, int) - np.asarray(theirs, int)).max() <= 1


def test_the_memory_of_many_images_is_stated_first(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_inputs, "LARGE", 3 * 3 * 32 * 32 * 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_inputs(loaded, [PIXELS] * 3)
    with pytest.warns(sg.MemoryUseWarning, match="preprocessing 4 images takes"):
        prepare_inputs(loaded, [PIXELS] * 4)
    monkeypatch.setattr(loading_inputs, "LARGE", 2 * 64 * 128 * 4 - 1)
    with pytest.warns(sg.MemoryUseWarning, match="features of 2 images"):
        sg.features(loaded, torch.zeros(2, 3, 32, 32))


# -- questions ---------------------------------------------------------------------------------------------


def test_a_question_takes_the_name_of_a_model(tmp_path: Path, file: Path, photo: Image.Image) -> None:
    import transformers

    from benchmarks import text_zoo

    model = text_zoo.clip().float()
    model.save_pretrained(tmp_path / "clip")
    text_zoo.tokenizer().save_pretrained(tmp_path / "clip")
    side = model.config.vision_config.image_size
    transformers.CLIPImageProcessor(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    ).save_pretrained(tmp_path / "clip")
    loaded = sg.load_model(str(tmp_path / "clip"))
    for make in (
        lambda held: sg.ask(held, text=["a cat", "a dog"]),
        lambda held: sg.zero_shot(held, ["cat", "dog"]),
    ):
        expected = sg.explain(make(loaded), photo, target=1)
        for name in (str(tmp_path / "clip"), tmp_path / "clip"):
            found = sg.explain(make(name), file, target=1)
            assert torch.equal(found.scores, expected.scores) and found.classes == expected.classes
    with pytest.raises(sg.UnknownNameError):
        sg.ask("embeded", text="a cat")
    with pytest.raises(InputError, match="text tower"):
        sg.zero_shot("embedded", ["cat"])


def test_regions_and_detections_of_files(file: Path, photo: Image.Image) -> None:
    yolos = region_zoo.yolos(True).float()
    preprocess = sg.Preprocess.resize_and_crop((32, 40), resize=(32, 40))
    detector = sg.load_model(yolos, preprocess=preprocess)
    detection = sg.Detection(2, (4, 8, 20, 28))
    expected = sg.explain(detector, preprocess(photo)[None], detection, "ixg")
    assert torch.equal(sg.explain(detector, file, detection, "ixg").scores, expected.scores)
    both = sg.explain(detector, [file, photo], [detection, sg.Detection(1, (4, 8, 20, 28))], "ixg")
    assert torch.equal(both.scores[:1], expected.scores) and both.names == ("cat", "1")
    assert len(both.images) == 2
    asked = sg.ask(detector, region=detection, image=file)
    assert torch.equal(sg.explain(asked, photo, target=2, method="ixg").scores, expected.scores)


def test_a_prompt_about_a_file(file: Path, photo: Image.Image) -> None:
    model, processor = llava()
    options = {"prompt": PROMPT, "answer": ANSWER, "processor": processor}
    asked = sg.ask(model, image=file, **options)
    assert torch.equal(asked.prepared, sg.ask(model, image=photo, **options).prepared)
    other = sg.Preprocess.resize_and_crop((28, 28))
    with pytest.raises(InputError, match="prepared"):
        sg.explain(asked, photo, transform=other)


# -- results -----------------------------------------------------------------------------------------------


def test_a_result_draws_and_saves_itself_without_arguments(file: Path, loaded: Any, tmp_path: Path) -> None:
    found = sg.explain(loaded, [file, PIXELS], "cat", "ixg")
    assert found.overlay(index=1).tobytes() == found.overlay(found.images[1], 1).tobytes()
    assert found[1].overlay().tobytes() == found.overlay(index=1).tobytes()
    [written] = found.save(tmp_path / "new" / "map.png")
    assert Image.open(written).size == found.figure().size
    assert [path.name for path in found.save(tmp_path / "maps")][:2] == ["cat.ixg.png", "1.ixg.png"]
    for suffix in ("jpg", "webp", "pdf"):
        assert found.save(tmp_path / f"map.{suffix}") == [tmp_path / f"map.{suffix}"]
    with pytest.raises(InputError, match="suffixes"):
        found.save(tmp_path / "map.svg")
    many = sg.explain(loaded, [PIXELS] * 65, "cat", "ixg")
    with pytest.raises(InputError, match="65"):
        many.figure()
    assert len(many[:2].names) == len(many[:2].images) == 2


def test_several_methods_save_one_figure_or_a_folder(file: Path, loaded: Any, tmp_path: Path) -> None:
    both = sg.explain(loaded, [file, PIXELS], "cat", method=["ixg", "gae"])
    [written] = both.save(tmp_path / "maps.png")
    width, height = Image.open(written).size
    assert width > both["ixg"].figure().width and height == both["ixg"].figure().height
    names = [path.name for path in both.save(tmp_path / "maps")]
    assert names[:4] == ["cat.ixg.png", "cat.gae.png", "1.ixg.png", "1.gae.png"]
    with np.load(tmp_path / "maps" / "scores.npz") as stored:
        assert np.array_equal(stored["gae"], both["gae"].scores.numpy())
        assert stored["names"].tolist() == ["cat", "1"] and stored["target"].tolist() == [3, 3]
    with pytest.raises(InputError, match="none"):
        sg.Attributions().save(tmp_path / "none.png")


def test_a_result_without_images_asks_for_one(loaded: Any) -> None:
    from dataclasses import replace

    found = replace(sg.explain(loaded, PIXELS, "cat", "ixg"), images=None)
    with pytest.raises(InputError, match="bare"):
        found.overlay()
    assert found.figure().width < found.with_images([PIXELS]).figure().width
