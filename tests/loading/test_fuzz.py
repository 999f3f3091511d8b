"""Hostile checkpoints, made by mutating good ones: each is refused in words, or loads. None hangs.

The mutations are listed below or drawn with a fixed seed. They cover truncated and damaged files, wrong types
and shapes, unusual tensors, and hostile metadata.
"""

import json
import random
import resource
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import steadygaze as sg
from steadygaze.errors import CheckpointError, InputError, SteadygazeError
from steadygaze.loading.checkpoint import match_names, read_weights
from steadygaze.loading.loaded import ModelOptions
from steadygaze.loading.run_folder import check_arguments, parse_description, rebuild
from steadygaze.modules import TAP, insert

NAME = "vit_tiny_patch16_224"
ARGUMENTS = {"embed_dim": 24, "depth": 2, "num_heads": 3, "img_size": 32, "patch_size": 8}
DESCRIPTION: dict[str, Any] = {
    "model": NAME,
    "arguments": ARGUMENTS,
    "num_classes": 5,
    "classes": list("abcde"),
    "size": [32, 32],
    "mean": [0.5, 0.5, 0.5],
    "std": [0.5, 0.5, 0.5],
    "interpolation": "bicubic",
    "crop": 0.9,
    "modules": {"tap": None, "cb": None},
}
SECONDS = 60  # for one case; a hang never ends, a busy machine is slow
MEGABYTES = 600  # by which all cases together may raise the peak of memory
HEAD, WEIGHT, STATE = "head.weight", "blocks.0.attn.qkv.weight", "blocks.0.tap._extra_state"

Weights = dict[Any, Any]


class Hang(BaseException):
    """Not an Exception: the code under test catches those."""


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang(f"not finished after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def good() -> dict[str, Tensor]:
    """The weights of a tiny model with a module in its first block."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: nn.Module = timm.create_model(NAME, num_classes=5, **ARGUMENTS)
        return dict(insert(model, tap=TAP(branches=3, allocation=(0,))).state_dict())


def write_run(folder: Path, weights: dict[str, Tensor], description: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "train.json").write_text("{}")
    text = description if isinstance(description, str) else json.dumps(description)
    tensors = {name: value.contiguous() for name, value in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"steadygaze": text})
    return folder


def refused_or_loaded(*arguments: Any) -> str:
    """The error's message, or "" for a model that works."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        loaded = sg.load_model(*arguments)
        with torch.no_grad():
            loaded.model(torch.zeros(1, 3, *loaded.size))
        message = ""
    except SteadygazeError as error:
        message = str(error)
        assert message and len(message) < 3000
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert growth < MEGABYTES, f"{growth:.0f} MB"
    return message


def test_the_good_checkpoint_loads(good, tmp_path):
    assert refused_or_loaded(str(write_run(tmp_path / "run", good, DESCRIPTION))) == ""


def test_no_weights_match_no_names():
    assert match_names({}, nn.Linear(2, 2)) == {}


# -- tensors ---------------------------------------------------------------------------------------------


def spec(text: str | bytes) -> Tensor:
    return torch.frombuffer(bytearray(text if isinstance(text, bytes) else text.encode()), dtype=torch.uint8)


TENSORS: dict[str, tuple[str, Callable[[Tensor], Any], str]] = {  # case: name, change, expected words
    "integer": (WEIGHT, lambda w: w.int(), "of another type.*float32, file torch.int32"),
    "boolean": (WEIGHT, lambda w: w > 0, "of another type.*bool"),
    "complex": (WEIGHT, lambda w: w.to(torch.complex64), "complex"),
    "sparse": (WEIGHT, lambda w: w.to_sparse(), "sparse"),
    "sparse rows": (WEIGHT, lambda w: w.to_sparse_csr(), "sparse"),
    "quantized": (WEIGHT, lambda w: torch.quantize_per_tensor(w, 0.1, 0, torch.qint8), "quantized"),
    "meta": (WEIGHT, lambda w: w.to("meta"), "meta tensor"),
    "NaN": (WEIGHT, lambda w: w * torch.nan, "NaN or infinite"),
    "infinite": (HEAD, lambda w: w + torch.inf, "NaN or infinite"),
    "too large for float32": (HEAD, lambda w: w.double() + 1e300, "NaN or infinite"),
    "expanded": (HEAD, lambda w: torch.zeros(1, 1).expand(10**9, 24), "expanded"),
    "a billion classes": (HEAD, lambda w: torch.zeros(10**9, 0), "does not fit|classes"),
    "no classes": (HEAD, lambda w: torch.zeros(0, 24), "does not fit"),
    "scalar": (HEAD, lambda w: torch.tensor(1.0), "another shape"),
    "transposed": (WEIGHT, lambda w: w.T, "another shape"),
    "half": (WEIGHT, lambda w: w.half(), ""),
    "bfloat16": (WEIGHT, lambda w: w.bfloat16(), ""),
    "double": (WEIGHT, lambda w: w.double(), ""),
    "not a tensor": (WEIGHT, lambda w: w.tolist(), "missing"),
    "state: floats": (STATE, lambda s: s.float(), "row of bytes"),
    "state: matrix": (STATE, lambda s: s[None], "row of bytes"),
    "state: empty": (STATE, lambda s: s[:0], "JSON"),
    "state: no JSON": (STATE, lambda s: s[:-3], "JSON"),
    "state: no ASCII": (STATE, lambda s: s + 128, "JSON"),
    "state: long": (STATE, lambda s: s.repeat(1000), "bytes"),
    "state: a list": (STATE, lambda s: spec("[]"), "one of TAP"),
    "state: nested": (STATE, lambda s: spec("[" * 4000), "JSON"),
    "state: unknown kind": (STATE, lambda s: spec('{"module": "os"}'), "one of TAP"),
    "state: kind is a list": (STATE, lambda s: spec('{"module": ["TAP"]}'), "one of TAP"),
    "state: other kind": (STATE, lambda s: spec('{"module": "CB"}'), "another kind"),
    "state: branches": (STATE, lambda s: spec('{"module": "TAP", "branches": 1000000000}'), "at most 64"),
    "state: text": (STATE, lambda s: spec('{"module": "TAP", "branches": "3"}'), "no option branches"),
    "state: temperature": (STATE, lambda s: spec('{"module": "TAP", "temperature": NaN}'), "temperature"),
    "state: extra option": (STATE, lambda s: spec('{"module": "TAP", "allocation": "all"}'), "no option"),
}


@pytest.mark.parametrize("case", TENSORS)
@pytest.mark.filterwarnings("ignore")
def test_unusual_tensors_are_refused_in_words(good, tmp_path, case):
    name, change, words = TENSORS[case]
    torch.save(good | {name: change(good[name])}, tmp_path / "w.pth")
    if not words:
        rebuild(DESCRIPTION, ModelOptions(read_weights(tmp_path / "w.pth"), "w.pth"))
        return
    with pytest.raises(SteadygazeError, match=words):
        rebuild(DESCRIPTION, ModelOptions(read_weights(tmp_path / "w.pth"), "w.pth"))


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {},
        3,
        "text",
        {"model": {}},
        {"model": {"state_dict": {"net": {"module": {}}}}},
        {1: torch.zeros(2)},
        {("a", "b"): torch.zeros(2)},
        {"": torch.zeros(2)},
        {"module.": torch.zeros(2)},
        {"model": [torch.zeros(2)]},
        torch.zeros(3),
        {"x" * 10_000: torch.zeros(2)},
    ],
    ids=lambda content: str(content)[:40],
)
def test_files_that_hold_something_else(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    assert refused_or_loaded("embedded", tmp_path / "w.pth")


# -- bytes -----------------------------------------------------------------------------------------------


def damaged(data: bytes, seed: int) -> bytes:
    rng = random.Random(seed)
    changed = bytearray(data)
    kind = seed % 4
    if kind == 0:
        return bytes(changed[: rng.randrange(len(changed))])
    if kind == 1:  # in the header
        for _ in range(3):
            changed[rng.randrange(min(2000, len(changed)))] = rng.randrange(256)
    elif kind == 2:
        for _ in range(30):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    else:
        start = rng.randrange(len(changed))
        changed[start : start + rng.randrange(1, 500)] = rng.randbytes(rng.randrange(1, 500))
    return bytes(changed)


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.filterwarnings("ignore")
def test_damaged_files(good, tmp_path, suffix, seed):
    run = write_run(tmp_path / "run", good, DESCRIPTION)
    if suffix == "pth":
        torch.save(good, tmp_path / "w.pth")
        data = (tmp_path / "w.pth").read_bytes()
        (tmp_path / "w.pth").write_bytes(damaged(data, seed))
        refused_or_loaded(timm.create_model(NAME, num_classes=5, **ARGUMENTS), tmp_path / "w.pth")
    else:
        file = run / "model.safetensors"
        file.write_bytes(damaged(file.read_bytes(), seed))
        refused_or_loaded(str(run))


def test_a_header_that_claims_a_huge_length(tmp_path):
    (tmp_path / "w.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "not a readable checkpoint" in refused_or_loaded("embedded", tmp_path / "w.safetensors")


def test_a_compressed_file_is_not_expanded(good, tmp_path):
    torch.save({"weight": torch.zeros(1000)}, tmp_path / "w.pth")
    with (
        zipfile.ZipFile(tmp_path / "w.pth") as plain,
        zipfile.ZipFile(tmp_path / "z.pth", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in plain.infolist():
            packed.writestr(entry.filename, plain.read(entry))
    assert "compressed entries" in refused_or_loaded("embedded", tmp_path / "z.pth")


# -- metadata --------------------------------------------------------------------------------------------

METADATA: dict[str, Any] = {
    "empty": "",
    "no JSON": "{",
    "null": "null",
    "a list": "[]",
    "a number": "1e999",
    "nested": "[" * 100_000,
    "no keys": {},
    "NaN": json.dumps(DESCRIPTION).replace("0.9", "NaN"),
    **{
        f"without {key}": {k: v for k, v in DESCRIPTION.items() if k != key}
        for key in ("model", "num_classes", "classes", "size", "mean", "std", "interpolation", "crop")
    },
}
CHANGES: dict[str, list[Any]] = {
    "model": ["", "no_such_model", "resnet50", "embedded", 3, None, ["vit"], "x" * 5000, "../../etc", "timm"],
    "num_classes": [0, -1, 10**9, "5", 5.5, True, None, 4],
    "classes": [["a"], [1, 2, 3, 4, 5], "abcde", {"a": 1}, 3],
    "size": [[32], [0, 32], [10**6, 10**6], ["32", "32"], 32, None, [32, 32, 3], [48, 48]],
    "mean": [[0.5], ["a", "b", "c"], None, [1e300, 0, 0]],
    "std": [[0, 0, 0], [-1, 1, 1], None],
    "interpolation": ["evil", 3, None, "random"],
    "crop": [0, -1, 1e-9, "0.9", None],
    "segments": [0, 10**9, "3", 3],
    "library": [3, "torchvision", "transformers", "embedded", "os"],
    "arguments": [
        3,
        [],
        "depth",
        {"depth": 10**9},
        {"embed_dim": 10**9},
        {"img_size": 10**9},
        {"patch_size": 0},
        {"patch_size": -8},
        {"mlp_ratio": 1e9},
        {"mlp_ratio": -1.0},
        {"num_heads": 0},
        {"num_heads": 7},
        {"checkpoint_path": "/etc/passwd"},
        {"pretrained": True},
        {"pretrained_cfg": {"file": "/etc/passwd"}},
        {"cache_dir": "/tmp/x"},
        {"block_fn": "os.system"},
        {"norm_layer": "os"},
        {"depth": "2"},
        {"self": 1},
        {"depth": [[[2]]]},
        {"depth": None},
        {"embed_dim": 20_000, "depth": 30},
        {"__class__": 1},
        {"a b": 1},
    ],
}


@pytest.mark.parametrize("case", METADATA)
def test_hostile_descriptions(case):
    text = METADATA[case] if isinstance(METADATA[case], str) else json.dumps(METADATA[case])
    with pytest.raises(CheckpointError, match="its description of the model"):
        parse_description(text, "file")


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in CHANGES.items() for v in values])
def test_hostile_values(good, tmp_path, key, value):
    description = DESCRIPTION | {key: value}
    if key == "arguments" and isinstance(value, dict):
        description["arguments"] = ARGUMENTS | value
    assert refused_or_loaded(str(write_run(tmp_path / "run", good, description)))


@pytest.mark.parametrize("name", ["checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"])
def test_arguments_of_timm_that_read_files_never_reach_it(good, name, monkeypatch):
    description = DESCRIPTION | {"arguments": {name: "x"}}
    with pytest.raises(CheckpointError, match=f"takes no argument {name}"):
        check_arguments(description, good, "file")


def test_a_user_may_ask_for_many_branches_but_not_for_all_memory():
    with pytest.raises(InputError, match="at most 64"):
        TAP(branches=10**9)
