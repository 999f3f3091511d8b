"""Model folders from strangers: no code, no other files, no network, and bounded memory."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import steadygaze as sg
from steadygaze.errors import CheckpointError
from steadygaze.questions.text import find_processor, find_tokenizer

transformers = pytest.importorskip("transformers")

CODE = """
from pathlib import Path
from transformers import BertTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor
Path({marker!r}).touch()
class Strange(BertTokenizer):
    pass
class StrangeConfig(CLIPConfig):
    model_type = "strange"
class StrangeModel(CLIPModel):
    config_class = StrangeConfig
class StrangeProcessor(CLIPImageProcessor):
    pass
class StrangeBoth(CLIPProcessor):
    pass
"""
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "cat", "dog"]
VISION = {"image_size": 16, "patch_size": 8, "width": 24, "layers": 1, "head_width": 12}
TEXT = {"context_length": 8, "vocab_size": 49408, "width": 8, "heads": 2, "layers": 1}


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """A tiny CLIP as transformers saves it, with the vocabulary of a tokenizer."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    text = {**sizes, "vocab_size": len(WORDS), "max_position_embeddings": 8, "eos_token_id": 3}
    vision = {**sizes, "image_size": 16, "patch_size": 8}
    folder = tmp_path / "clip"
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    transformers.CLIPModel(config).save_pretrained(folder)
    side = {"height": 16, "width": 16}
    transformers.CLIPImageProcessor(size=side, crop_size=side).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    write(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", do_lower_case=True)
    return folder


@pytest.fixture
def open_clip_folder(tmp_path: Path) -> Path:
    """A tiny CLIP as open_clip saves it."""
    open_clip = pytest.importorskip("open_clip", exc_type=ImportError)
    folder = tmp_path / "open_clip"
    folder.mkdir()
    torch.save(open_clip.model.CLIP(12, VISION, TEXT).state_dict(), folder / "open_clip_pytorch_model.bin")
    describe(folder)
    return folder


def describe(folder: Path, text: object = None, vision: object = None, **changes: object) -> None:
    text = TEXT | text if isinstance(text, dict) else text or TEXT
    vision = VISION | vision if isinstance(vision, dict) else vision or VISION
    model = {"embed_dim": 12, "vision_cfg": vision, "text_cfg": text} | changes
    write(folder / "open_clip_config.json", model_cfg=model, preprocess_cfg={"mean": [0.5] * 3})


def write(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | changes))


def plant(folder: Path, marker: Path, part: str) -> None:
    """Code in a folder, named by one of the files that libraries follow."""
    (folder / "strange.py").write_text(CODE.format(marker=str(marker)))
    if part == "model":
        classes = {"AutoConfig": "strange.StrangeConfig", "AutoModel": "strange.StrangeModel"}
        write(folder / "config.json", model_type="strange", auto_map=classes)
    elif part == "image processor":
        classes = {"AutoImageProcessor": "strange.StrangeProcessor"}
        write(
            folder / "preprocessor_config.json",
            auto_map=classes,
            image_processor_type="StrangeProcessor",
        )
    elif part == "processor":
        classes = {"AutoProcessor": "strange.StrangeBoth"}
        write(folder / "processor_config.json", auto_map=classes, processor_class="StrangeBoth")
    else:
        classes = {"AutoTokenizer": ["strange.Strange", None]}
        write(folder / "tokenizer_config.json", auto_map=classes, tokenizer_class="Strange")


@pytest.mark.parametrize("part", ["model", "image processor", "processor", "tokenizer"])
def test_no_loader_of_transformers_executes_code(clip, marker, part):
    plant(clip, marker, part)
    calls = (
        lambda: sg.ask(sg.load_model(str(clip)), text=["a cat"]),
        lambda: sg.load_model(str(clip), clip / "model.safetensors"),
        lambda: find_tokenizer(None, str(clip)),
        lambda: find_processor(None, str(clip)),
    )
    for call in calls:
        with suppress(sg.InputError, CheckpointError):
            call()
        assert not marker.exists()


@pytest.mark.parametrize("arguments", [{"trust_remote_code": True}, {}], ids=["asks for trust", "is silent"])
def test_the_tokenizer_of_an_open_clip_folder_executes_no_code(open_clip_folder, marker, arguments):
    plant(open_clip_folder, marker, "tokenizer")
    (open_clip_folder / "vocab.txt").write_text("\n".join(WORDS))
    describe(open_clip_folder, {"hf_tokenizer_name": "anything", "tokenizer_kwargs": arguments})
    name = f"open_clip:local-dir:{open_clip_folder}"
    with pytest.raises(CheckpointError, match="would execute code that is part of the model") as caught:
        sg.load_model(name)
    assert caught.value.option == "trust_remote_code" and not marker.exists()
    sg.load_model(name, trust_remote_code=True)
    assert marker.exists()


def test_the_text_tower_of_an_open_clip_folder_executes_no_code(open_clip_folder, clip, marker):
    plant(clip, marker, "model")
    describe(open_clip_folder, {"hf_model_name": str(clip), "hf_proj_type": "linear"})
    with pytest.raises(CheckpointError, match="would execute code"):
        sg.load_model(f"open_clip:local-dir:{open_clip_folder}")
    assert not marker.exists()


def test_the_tokenizer_of_open_clip_reads_no_other_file(open_clip_folder, tmp_path):
    describe(open_clip_folder, {"tokenizer_kwargs": {"bpe_path": str(tmp_path / "other.gz")}})
    with pytest.raises(CheckpointError, match=r"tokenizer_kwargs: expected clean.*got bpe_path"):
        sg.load_model(f"open_clip:local-dir:{open_clip_folder}")


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer_config.json"])
def test_links_out_of_a_model_folder_are_refused(clip, tmp_path, file):
    (clip / file).rename(tmp_path / "outside")
    (clip / file).symlink_to(tmp_path / "outside")
    with pytest.raises(sg.InputError, match="leads out of its folder"):
        sg.load_model(str(clip))


def test_a_snapshot_of_the_hub_links_to_its_blobs(clip, tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(clip.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    assert sg.load_model(str(snapshot)).size == (16, 16)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "missing.safetensors", 3])
def test_an_index_of_weights_names_files_of_its_folder(clip, tmp_path, name):
    (clip / "model.safetensors").rename(tmp_path / "outside.safetensors")
    write(clip / "model.safetensors.index.json", metadata={}, weight_map={"logit_scale": name})
    with pytest.raises((sg.InputError, CheckpointError), match=r"leads out|does not exist|weight_map"):
        sg.load_model(str(clip))


@pytest.mark.parametrize("file", ["config.json", "preprocessor_config.json"])
def test_a_special_file_is_not_read(clip, file):
    (clip / file).unlink()
    os.mkfifo(clip / file)
    with pytest.raises(sg.InputError, match="expected a file, got a folder or a special file"):
        sg.load_model(str(clip))


def test_an_open_clip_folder_without_weights_is_refused(open_clip_folder):
    (open_clip_folder / "open_clip_pytorch_model.bin").rename(open_clip_folder.parent / "w.bin")
    name = f"open_clip:local-dir:{open_clip_folder}"
    with pytest.raises(CheckpointError, match=r"has no weights .* would be random"):
        sg.load_model(name)
    assert sg.load_model(name, open_clip_folder.parent / "w.bin").size == (16, 16)


@pytest.mark.parametrize(
    ("text", "vision"),
    [({"layers": 10**6}, {}), ({}, {"layers": 10**6}), ({}, {"image_size": 10**7}), ({"width": 8192}, {}),
     ({}, {"width": 9600}), ({}, {"timm_model_name": "vit_giant_patch14_224", "timm_pool": "token"}),
     ("text", {}), ({"tokenizer_kwargs": 3}, {})],
    ids=str,
)  # fmt: skip
def test_sizes_of_an_open_clip_folder_are_compared_with_its_weights(open_clip_folder, text, vision):
    describe(open_clip_folder, text, vision)
    with pytest.raises(CheckpointError, match=r"expected|elements, the weights have"):
        sg.load_model(f"open_clip:local-dir:{open_clip_folder}")


@pytest.mark.parametrize("weights", ["folder", "file"])
def test_a_hostile_pickle_of_open_clip_is_refused_in_words(open_clip_folder, tmp_path, weights):
    file = open_clip_folder / "open_clip_pytorch_model.bin" if weights == "folder" else tmp_path / "w.bin"
    torch.save({"a": Path("x")}, file)
    name = f"local-dir:{open_clip_folder}" if weights == "folder" else f"ViT-B-32@{file}"
    with pytest.raises(CheckpointError):
        sg.load_model(f"open_clip:{name}")


def test_a_folder_does_not_contact_the_hub(open_clip_folder, clip, monkeypatch):
    import socket

    def forbidden(*_, **__):
        raise AssertionError("a folder names a model of the hub, and it was contacted")

    monkeypatch.setattr(socket, "getaddrinfo", forbidden)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    describe(open_clip_folder, {"hf_model_name": "owner/name", "hf_proj_type": "linear"})
    with pytest.raises(CheckpointError, match="cannot be read as the files of a model"):
        sg.load_model(f"open_clip:local-dir:{open_clip_folder}")
    (clip / "vocab.txt").unlink()
    assert sg.load_model(str(clip)).tokenizer is None


@pytest.mark.parametrize("size", [{"height": 20_000, "width": 20_000}, {"shortest_edge": 20_000}])
def test_the_size_of_images_is_bounded(clip, size):
    write(clip / "preprocessor_config.json", size=size, crop_size={"height": 16, "width": 16})
    with pytest.raises(CheckpointError, match="expected images of at most 4096 pixels a side"):
        sg.load_model(str(clip))


def test_class_names_are_read_from_regular_files_of_bounded_depth(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "deep.json").write_text("[" * 10**6)
    for name in (tmp_path / "pipe.txt", "/dev/zero", tmp_path / "deep.json"):
        with pytest.raises(sg.InputError, match="expected a file of class names"):
            sg.load_model("embedded", class_names=name)


@pytest.mark.parametrize(
    ("model", "library"), [("hf-hub:owner/name", "timm"), ("owner/name", "transformers")]
)
def test_a_description_in_a_file_does_not_contact_the_hub(tmp_path, monkeypatch, model, library):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("the hub was contacted"))
    description = {"model": model, "library": library, "num_classes": 2, "classes": None, "size": [16, 16]}
    description |= {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "crop": 1.0}
    metadata = {"steadygaze": json.dumps(description)}
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors", metadata)
    (tmp_path / "train.json").write_text("{}")
    with pytest.raises(CheckpointError):
        sg.load_model(str(tmp_path))


@pytest.mark.parametrize(
    "changes", [{"return_dict": False}, {"_attn_implementation": "flex_attention"}], ids=str
)
def test_outputs_and_attention_that_are_not_supported_are_refused_in_words(clip, changes):
    write(clip / "config.json", **changes)
    with pytest.raises(CheckpointError, match=r"config\.json: expected"):
        sg.load_model(str(clip))
