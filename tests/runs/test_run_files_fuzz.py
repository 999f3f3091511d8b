"""Damaged and hostile run folders: every command either works or explains what is wrong, and none hangs.

One file of a small run is changed, at random with a fixed seed, and a command that reads it is called.
"""

import dataclasses
import gzip
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import steadygaze as sg
from helpers.runs import image_folder
from helpers.tiers import tiered
from steadygaze.cli import app
from steadygaze.runs.request import StressRequest, VerifyRequest
from steadygaze.runs.stress import prepare_stress, run_stress
from steadygaze.runs.verify import prepare_verify, run_verify

SECRET = "a secret outside of the folder"
CASES = 300
SECONDS = 20  # a case that takes longer hangs
NUMBERS: list[Any] = [-1, 0, 7, 1e308, -1e308, 10**30, float("nan"), float("inf"), True]
TEXTS: list[Any] = [
    "",
    "x",
    "[/red]",
    "../../secret",
    "/etc/passwd",
    "\x00",
    "é\u2028",
    "a|b\n`c`",
    "9" * 400,
]
NESTED: list[Any] = [None, [], [1], ["x"], [None], {}, {"x": 1}, [[[[]]]], "<script>alert(1)</script>"]
VALUES = NUMBERS + TEXTS + NESTED
FILES = {
    "verify": ["run.json", "rows-00000.jsonl", "samples/samples.json", "samples/image0.jpg"],
    "stress": ["run.json", "rows-00000.jsonl", "samples/samples.json", "samples/image0.jpg"],
}
COMMANDS = {
    "verify": ["report", "card", "resume"],
    "stress": ["report", "compare-models", "card", "resume"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A verify and a stress run, as `card` writes them, and what resumes them."""
    folder = tmp_path_factory.mktemp("fuzz")
    data = image_folder(folder / "data")
    common = {"model": "embedded", "data": data, "limit": 3, "batch_size": 3}
    verify = VerifyRequest(
        random=False, **common, out=folder / "side" / "verify", methods=["ixg", "rollout"], ratios=[0.5, 0.9]
    )
    options = {"corruptions": "fog", "severities": "1", "epsilons": "8/255", "pgd_steps": 1}
    stress = StressRequest(
        **common,
        out=folder / "side" / "stress",
        suites=["corruptions", "occlusion"],
        options=options,
        num_workers=0,
        map_method="ixg",
    )
    prepared = {"verify": (verify, prepare_verify(verify)), "stress": (stress, prepare_stress(stress))}
    run_verify(verify, prepared=prepared["verify"][1])
    run_stress(stress, prepared=prepared["stress"][1])
    return folder / "side", prepared


@pytest.fixture
def side(runs, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(runs[0], tmp_path / "side"))


def places(value: Any, place: tuple = ()) -> list[tuple]:
    """Every path into a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place, *(deeper for key, one in inner for deeper in places(one, (*place, key)))]


def changed(value: Any, chance: random.Random) -> Any:
    """The value with one part replaced, deleted or wrapped."""
    *outer, last = chance.choice(places(value)[1:])
    parent = value
    for key in outer:
        parent = parent[key]
    kind = chance.choice(["replace", "replace", "replace", "delete", "wrap", "rename"])
    if kind == "delete":
        del parent[last]
    elif kind == "rename" and isinstance(parent, dict):
        parent[chance.choice(["", "x", "unreadable", "é"])] = parent.pop(last)
    elif kind == "wrap":
        parent[last] = [parent[last]]
    else:
        parent[last] = chance.choice(VALUES)
    return value


def change_json(path: Path, chance: random.Random) -> None:
    if path.suffix == ".jsonl":
        lines = path.read_text().splitlines()
        which = chance.randrange(len(lines))
        lines[which] = json.dumps(changed(json.loads(lines[which]), chance))
        path.write_text("\n".join(lines) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(changed(json.loads(path.read_text()), chance)))
    else:
        change_bytes(path, chance)


def change_bytes(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    cut = chance.randrange(len(content))
    noise = chance.randbytes(20)
    path.write_bytes(
        chance.choice(
            [
                b"",
                content[:cut],
                content[:cut] + noise + content[cut:],
                content[:cut] + noise + b"\n" + content[cut:],
                chance.randbytes(500),
                b"\xef\xbb\xbf" + content,
                content.decode("latin-1").encode("utf-16"),
                b"\x00" * 100 + b"\n",
                b"[" * 200_000 + b"\n",
                b"[" * 40 + b"]" * 40 + b"\n",
                b'{"settings": ' * 900 + b"1" + b"}" * 900 + b"\n",
                b"9" * 5000 + b"\n",
                b"null\n",
                b'"text"\n',
                b"[]\n",
                b"{}\n",
            ]
        )
    )


def change_file(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    outside = path.parents[3] / "outside"
    outside.write_text(SECRET)
    kind = chance.choice(
        ["gone", "folder", "outside", "itself", "nowhere", "pipe", "copy", "gzip", "duplicates"]
    )
    if kind == "duplicates":
        path.write_bytes(content + content)
        return
    if kind == "copy":
        (path.parent / f"rows-0000{chance.randrange(1, 9)}.jsonl").write_bytes(content)
        return
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "gzip":
        packed = gzip.compress(chance.choice([content, content[:99], b'{"image": 1}\n' * 200_000]))
        path.with_name(path.name + ".gz").write_bytes(packed[: chance.choice([None, 30])])
    elif kind != "gone":
        path.symlink_to({"outside": outside, "itself": path.name, "nowhere": "nowhere"}[kind])


def run_command(command: str, kind: str, side: Path, runs: Any) -> None:
    """Run it; anything but success, an error in words, or a note on unreadable images fails."""
    whole, prepared = runs
    if command == "resume":
        request, ready = prepared[kind]
        again = dataclasses.replace(request, out=side / kind)
        try:
            if kind == "verify":
                run_verify(again, prepared=ready).table(repeats=10).csv()
            else:
                [list(card.records()) for card in run_stress(again, prepared=ready).cards(repeats=10)]
        except sg.SteadygazeError as error:
            assert str(error)
        return
    words = {
        "report": ["report", side / kind],
        "compare-models": [
            "compare-models",
            whole / "stress",
            side / "stress",
            "--out",
            side / "compare.html",
        ],
        "card": ["card", side, whole, "--out", side / "card"],
    }[command]
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 2, 3), result.output
    assert not result.exit_code or "error: " in result.output
    if "card is a model" in result.output:
        pytest.fail("the command took the folder for a model's name")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", tiered(range(CASES), 20))
def test_a_changed_file_is_read_or_refused_in_words(number, runs, side, monkeypatch):
    chance = random.Random(number)
    kind = ("verify", "stress")[number % 2]
    file = chance.choice(FILES[kind][: 3 if number % 5 else 4])
    change = chance.choice([change_json, change_json, change_json, change_bytes, change_file])
    change(side / kind / file, chance)
    command = chance.choice(COMMANDS[kind])
    if command != "resume":
        monkeypatch.setattr("steadygaze.loading.load.load_model", forbidden)

    def hang(*_):
        raise AssertionError(f"{command} hangs: {change.__name__} of {file}")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(SECONDS)
    try:
        run_command(command, kind, side, runs)
    finally:
        signal.alarm(0)
    for page in side.rglob("*.html"):
        text = page.read_text()
        assert SECRET not in text and "<script>alert(1)" not in text


def forbidden(*_: Any, **__: Any) -> None:
    raise AssertionError("a report loads no model")
