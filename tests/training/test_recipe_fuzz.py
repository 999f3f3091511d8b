"""Hostile recipes: whatever they hold, what comes out is a SteadygazeError or success.

Every case is a file or a dict that somebody could hand to `sg.train`; the model is built, no step is taken.
"""

import copy
import datetime
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import steadygaze as sg
from helpers.training import attempt, content
from steadygaze.cli import app
from steadygaze.training import loop
from steadygaze.training.recipe import make_recipe, read_recipe
from steadygaze.training.recipe_files import shipped_recipes

VALUES: list[Any] = [
    None,
    True,
    "",
    "text",
    "a\0b",
    "x" * 20_000,
    "../../etc",
    -1,
    0,
    3,
    10**9,
    10**30,
    -(10**30),
    10**4400,
    0.0,
    -0.5,
    1e-300,
    1e308,
    float("nan"),
    float("inf"),
    [],
    [1, 2, 3],
    [-1, -5],
    [0.0, 0.0],
    ["a"],
    [[1, 2], [3]],
    [10**9] * 2,
    {},
    {"a": 1},
    {"name": {"name": {}}},
    datetime.date(2020, 1, 1),
    b"bytes",
]
FULL: dict[str, Any] = {
    "modules": {"tap": {"branches": 2, "temperature": 1.0}, "cb": {"variant": "plain", "init": 0.0}},
    "losses": {
        "cross_entropy": {"weight": 1.0, "smoothing": 0.1},
        "adl": {"weight": 1.0, "tau": 2.0, "form": "code"},
        "patch_augmentation": {
            "patch": 8,
            "scale": [0.8, 1.0],
            "crop": 0.1,
            "noise": 0.1,
            "crop_draw": "batch",
        },
    },
    "augment": {
        "crop": "pad",
        "scale": [0.5, 1.0],
        "ratio": [0.9, 1.1],
        "resize": 16,
        "pad": 2,
        "interpolation": "random",
        "flip": 0.5,
        "color_jitter": 0.1,
        "rand_augment": "rand-m9-mstd0.5-inc1",
        "erase": 0.1,
        "mixup": 0.8,
        "cutmix": 1.0,
        "mix_probability": 1.0,
        "switch": 0.5,
        "repeats": 2,
    },
    "optimizer": {
        "name": "adamw",
        "lr": 0.01,
        "lr_batch": 4,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "betas": [0.9, 0.99],
        "eps": 1e-8,
        "decay_all": False,
        "layer_decay": 0.9,
        "module_factor": 10.0,
        "clip": 1.0,
    },
    "schedule": {
        "name": "cosine",
        "warmup_epochs": 1.0,
        "warmup_lr": 1e-6,
        "min_lr": 1e-6,
        "cooldown_epochs": 1,
        "every": 2,
        "rate": 0.5,
    },
    "ema": {"decay": 0.9, "warmup": True},
    "measure": {
        "suites": ["corruptions"],
        "data": "folder",
        "masks": "folder",
        "limit": 5,
        "seed": 0,
        "batch": 4,
        "options": {"severities": [3]},
        "show": ["clean/top1"],
    },
    "train": "all",
    "task": "classification",
    "accumulate": 1,
    "precision": "float32",
    "seed": 0,
    "keep": "last",
    "test_every": 1,
    "about": "",
    "command": "",
    "cost": "",
    "result": "",
}
DATA_KEYS = [
    "masks",
    "test_masks",
    "cut_by",
    "cut_checkpoint",
    "cut_centered",
    "cut_edges",
    "only",
    "test_only",
    "classes",
    "test_classes",
    "images",
    "test_images",
    "size",
    "mean",
    "std",
    "interpolation",
    "crop",
    "workers",
]
ARGUMENTS: list[dict[str, Any]] = [
    {"embed_dim": 10**9},
    {"embed_dim": 65_536, "depth": 6, "num_heads": 1},
    {"depth": 10**9},
    {"depth": -3},
    {"img_size": 10**6},
    {"img_size": [16, 10**7]},
    {"img_size": "large"},
    {"patch_size": 0},
    {"patch_size": [1, 1], "img_size": 4096, "embed_dim": 65_536},
    {"num_heads": 0},
    {"num_heads": 7},
    {"mlp_ratio": 1e300},
    {"mlp_ratio": -1.0},
    {"drop_path_rate": 5.0},
    {"class_token": "maybe"},
    {"global_pool": "nothing"},
    {"norm_layer": "os.system"},
    {"act_layer": 3},
    {"block_fn": "exec"},
    {"checkpoint_path": "/etc/passwd"},
    {"pretrained_cfg": {"url": "file:///etc/passwd"}},
    {"pretrained_cfg_overlay": "x"},
    {"cache_dir": "/tmp"},
    {"scriptable": True},
    {"self": 1},
    {"name": "x"},
    {"model_name": "x"},
    {"pretrained": True},
    {"": 1},
    {"reg_tokens": 10**8},
    {"num_classes": 10**9},
    {"in_chans": 10**9},
    {"in_chans": 1},
    {"weight_init": "nowhere"},
]


@pytest.fixture
def no_steps(monkeypatch):
    """Training ends when everything is built."""
    monkeypatch.setattr(loop.TrainingRun, "execute", lambda self, stop_after=None: None)


def keys_of(table: dict, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*prefix, key))


def changed(table: dict, path: tuple[str, ...], value: Any) -> dict:
    copied = copy.deepcopy(table)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        inner.pop(path[-1], None)
    else:
        inner[path[-1]] = value
    return copied


def full(data: Path) -> dict:
    return content(data, epochs=3) | copy.deepcopy(FULL)


@pytest.mark.full
def test_values_of_every_key(data, tmp_path, no_steps):
    """Each key of a recipe, with values drawn from the hostile ones."""
    given = full(data)
    assert attempt(given, tmp_path / "run"), "the recipe itself is sound"
    paths = [*keys_of(given), *(("data", key) for key in DATA_KEYS), ("unknown",), ("model", "unknown")]
    draw = random.Random(0)
    refused = 0
    for path in paths:
        for value in draw.sample(VALUES, 3):
            refused += not attempt(changed(given, path, value), tmp_path / "run")
    assert len(paths) * 3 >= 250 and refused > 150


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=repr)
def test_arguments_of_the_model(arguments, data, tmp_path, no_steps):
    given = content(data)
    given["model"]["arguments"] = given["model"]["arguments"] | arguments
    harmless = ({"drop_path_rate": 5.0}, {"class_token": "maybe"})
    accepted = attempt(given, tmp_path / "run")
    assert not accepted or arguments in harmless


def test_sizes_are_refused_before_memory_is_allocated(data, tmp_path, monkeypatch):
    """timm's constructor runs without memory for weights (on the meta device) or not at all."""
    import timm

    real, devices = timm.create_model, []

    def create(*given, **options):
        devices.append(torch.empty(0).device.type)
        return real(*given, **options)

    monkeypatch.setattr(timm, "create_model", create)
    for arguments in ARGUMENTS[:3]:
        given = content(data)
        given["model"]["arguments"] = given["model"]["arguments"] | arguments
        with pytest.raises(sg.InputError, match=r"model.arguments: .*(at most|this machine has)"):
            sg.train(given, tmp_path / "run")
    assert set(devices) <= {"meta"} and not (tmp_path / "run").exists()


def mutated_texts() -> Iterator[bytes]:
    """Files that are no recipes, and shipped recipes with bytes changed, removed and repeated."""
    yield from (
        b"",
        b"\0" * 50,
        b"\xff\xfe\x00",
        bytes(range(256)) * 8,
        b"\xef\xbb\xbfepochs = 1",
        b"[" * 20_000,
    )
    yield from (b"a = " + b"[" * 5000, b"a = " + b"{a=" * 3000, b"x = 1\nx = 2", b"[model]\n[model]")
    yield from (
        b"epochs = " + b"9" * 5000,
        b"epochs = 1979-05-27",
        b"model = 3",
        b"[model]\nname = '\\u0000'",
    )
    yield from (
        b'[model]\nname = "\\u0000"',
        b"[[model]]",
        b"self = 1",
        b"[model]\nname = 'x'\n[losses]\nadl = 3",
    )
    yield from (b"losses = 3\n[model]\nname = 'x'", b"[model.name]\na = 1", b"a" + b".a" * 2000 + b" = 1")
    texts = [text.encode() for text in shipped_recipes().values()]
    draw = random.Random(1)
    for number in range(100):
        text = bytearray(draw.choice(texts))
        place = draw.randrange(len(text))
        if number % 4 == 0:
            del text[place:]
        elif number % 4 == 1:
            text[place] = draw.randrange(256)
        elif number % 4 == 2:
            line = text.splitlines(keepends=True)
            text += draw.choice(line)  # a key or table twice
        else:
            text[place:place] = draw.choice([b"=", b"[", b"'", b"\n", b"nan", b"{", b"\0", b"-1e999"])
        yield bytes(text)


def test_files(tmp_path):
    """Read as `steadygaze train FILE` reads them."""
    texts = [*mutated_texts()]
    refused = 0
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.toml"
        path.write_bytes(text)
        try:
            read_recipe(path)
        except sg.SteadygazeError:
            refused += 1
    assert len(texts) > 115 and refused > 40
    for source in (tmp_path, "x" * 5000, "a\0b", "", "/dev/null", tmp_path / "none" / "x.toml"):
        with pytest.raises(sg.SteadygazeError):
            read_recipe(source)
    big = tmp_path / "big.toml"
    with big.open("wb") as file:
        file.truncate(3 * 10**9)
    with pytest.raises(sg.InputError, match="expected at most 1,000,000 bytes"):
        read_recipe(big)


@pytest.mark.parametrize(
    "text",
    [
        "model.name.x=1",
        "a..b=1",
        ".=1",
        "x" * 3000 + "=1",
        "epochs=" + "9" * 5000,
        "epochs=" + "[" * 5000,
        "losses.adl=nan",
        "data.train=\0",
        "=",
        "seed",
        "self=1",
        "model.arguments={depth=1979-05-27}",
        "modules.tap={branches=1979-05-27}",
        "modules.cb={position=[1,2]}",
        "modules.tap={branches=1000000000}",
        "optimizer.name=fusedlamb",
        "augment.rand_augment=rand-n99999999",
    ],
    ids=lambda text: text[:40],
)
def test_changes_on_the_command_line(text, data, tmp_path, no_steps):
    toml = tmp_path / "r.toml"
    toml.write_text("[model]\nname = 'vit_tiny_patch16_224'\n[model.arguments]\nembed_dim = 12\ndepth = 1\n")
    words = ["train", str(toml), "--set", f"data.train={data}", "--out", str(tmp_path / "run"), "--set", text]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2 and "Traceback" not in done.output, (done.output, done.exception)


def test_contents_that_are_no_tables(tmp_path):
    deep: dict = {}
    for _ in range(2000):
        deep = {"a": deep}
    for given in ({1: 2}, {"model": deep}, {"model": {"name": "x", "arguments": {3: 4}}}, {"self": 1}):
        with pytest.raises(sg.SteadygazeError):
            make_recipe(given)
