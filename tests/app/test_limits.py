"""What the page allows its visitors, over HTTP: a page that is served, and requests as anybody could send."""

import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import httpx
import pytest
import timm
from PIL import Image

import steadygaze as sg
from benchmarks.page_client import DEFAULT_SCORE, PREDICTED, Visitor, as_input
from helpers.page import served
from helpers.tiers import tiered
from steadygaze.app import Limits
from steadygaze.cli.serve import serve
from steadygaze.loading.loaded import LoadedModel
from steadygaze.methods.registry import forward_passes

pytest.importorskip("gradio")
IMAGE_FILE = sorted((Path(sg.__file__).parent / "assets" / "demo").glob("*.png"))[0]
LONG = "rise:budget=500000"  # minutes
PATIENT = {"max_budget": 10**6, "max_cost": 10**7}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return sg.load_model("embedded")


@pytest.fixture(scope="module")
def address(loaded: LoadedModel) -> Iterator[str]:
    with served(loaded) as address:
        yield address


@pytest.fixture(scope="module")
def hasty(loaded: LoadedModel) -> Iterator[str]:
    """A page whose calls may cost much, but not take long."""
    with served(loaded, limits=Limits(**PATIENT, max_seconds=1, max_upload_mb=0.1)) as address:
        yield address


@pytest.fixture
def visitor(address: str) -> Visitor:
    return Visitor(address)


def captions(gallery: list[dict]) -> list[str]:
    return [entry["caption"].split(":")[0] for entry in gallery]


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (["rise:budget=100000"], "expected at most 2,000 forward passes for one method, got 100,000"),
        (["integrated_gradients:steps=5000"], "got 10,000"),
        ([f"rise:seed={seed}" for seed in range(6)], "at most 5,000 forward passes in one call, got 6,000"),
        ([f"random:seed={seed}" for seed in range(13)], "at most 12 methods in one call, got 13"),
        (["diffmask:file=/etc/hostname"], "does not read files that are named in options"),
        ("gae", "expected a list of names"),
    ],
)
def test_a_request_that_is_too_large_gets_words(visitor: Visitor, methods: list[str], words: str) -> None:
    image = visitor.upload(IMAGE_FILE)
    answer = visitor.call("explain", image, methods, PREDICTED, DEFAULT_SCORE, False, True)
    assert answer.error is not None and words in answer.error


def test_one_bad_method_does_not_wipe_the_others(visitor: Visitor) -> None:
    image = visitor.upload(IMAGE_FILE)
    answer = visitor.explain(image, "gae", "gradcamm", "rise:budget=100000", "rise:budget=8,hide=away", "ixg")
    assert answer.error is None and captions(answer.data[1]) == ["gae", "ixg"]
    assert len(answer.warnings) == 3
    for word, warning in zip(("gradcam", "2,000", "away"), answer.warnings, strict=True):
        assert word in warning
    verified = visitor.call("verify", image, ["gae", "nothing"], PREDICTED, DEFAULT_SCORE)
    assert [row[0] for row in verified.data[-1]["data"]] == ["gae", "random"]


@pytest.mark.parametrize("method", tiered([LONG, "integrated_gradients:steps=100000"], [LONG]))
def test_a_call_that_takes_too_long_is_cancelled(hasty: str, visitor: Visitor, method: str) -> None:
    """The call after it is made on another page: one second may be too short for it on a busy machine."""
    slow = Visitor(hasty)
    answer = slow.explain(slow.upload(IMAGE_FILE), method)
    assert answer.error is not None and "cancelled" in answer.error
    assert visitor.explain(visitor.upload(IMAGE_FILE), "rollout").error is None


def test_a_client_that_leaves_cancels_its_calls(loaded: LoadedModel) -> None:
    with served(loaded, limits=Limits(**PATIENT, max_seconds=100_000)) as address:
        leaving, staying = Visitor(address), Visitor(address)
        image = leaving.upload(IMAGE_FILE)
        for _ in range(2):  # one that runs and one that waits
            leaving.start("explain", image, [LONG], PREDICTED, DEFAULT_SCORE, False, True)
        with leaving.messages() as messages:
            assert next(m for m in messages if m["msg"] == "progress")
        # unless they are cancelled, the calls of the other take hours, and this one is not answered
        assert staying.explain(staying.upload(IMAGE_FILE), "gae").error is None


@contextmanager
def long_call(address: str) -> Iterator[dict]:
    """A call that runs or waits as long as the context lasts; gives its image."""
    visitor = Visitor(address)
    image = visitor.upload(IMAGE_FILE)
    visitor.start("explain", image, [LONG], PREDICTED, DEFAULT_SCORE, False, True)
    with visitor.messages() as messages:
        assert next(m for m in messages if m["msg"] == "process_starts")
        time.sleep(1)  # gradio sends this just before it calls the page
        yield image


def test_a_full_queue_refuses_calls(loaded: LoadedModel) -> None:
    limits = Limits(**PATIENT, max_seconds=300, max_calls=1)
    with served(loaded, limits=limits) as address, long_call(address) as image:
        Visitor(address).start("explain", image, ["gae"], PREDICTED, DEFAULT_SCORE, False, True)  # waits
        with pytest.raises(httpx.HTTPStatusError, match="503"):
            Visitor(address).start("explain", image, ["gae"], PREDICTED, DEFAULT_SCORE, False, True)


def test_large_requests_are_refused(hasty: str) -> None:
    visitor = Visitor(hasty)
    large = b"\0" * 300_000
    answer = visitor.http.post("upload", files={"files": ("large.png", large)})
    assert answer.status_code == 413
    # the same without a Content-Length
    parts = (large[start : start + 50_000] for start in range(0, len(large), 50_000))
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    head = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    answer = visitor.http.post("upload", content=(part for part in (head, *parts)), headers=form)
    assert answer.status_code == 413
    answer = visitor.http.post("queue/join", json={"data": ["x" * 2_000_000], "session_hash": "s"})
    assert answer.status_code == 413 and "1.1 MB" in answer.text


def test_links_are_not_downloaded(visitor: Visitor) -> None:
    link = as_input("https://example.com/cat.png")
    for inputs in ((link, ["gae"]), (visitor.upload(IMAGE_FILE), [link])):
        answer = visitor.call("explain", *inputs, PREDICTED, DEFAULT_SCORE, False, True)
        assert answer.error is not None and "got a link" in answer.error


def test_the_queue_cannot_be_bypassed(visitor: Visitor) -> None:
    answer = visitor.http.post("run/restore_all", json={"data": [visitor.upload(IMAGE_FILE)]})
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:1234", 200), ("127.0.0.1", 200), ("[::1]:80", 200), ("evil.example", 400), ("", 400)],
)
def test_other_host_names_are_refused(visitor: Visitor, address: str, host: str, status: int) -> None:
    for path in (f"{address}config", "startup-events"):
        answer = visitor.http.get(path, headers={"Host": host})
        assert answer.status_code == status


@pytest.mark.full
def test_a_page_with_a_host_serves_other_names(loaded: LoadedModel) -> None:
    with served(loaded, launch={"server_name": "127.0.0.1"}) as address:
        headers = {"Host": "demo.example"}
        assert Visitor(address).http.get(f"{address}config", headers=headers).status_code == 200


@pytest.mark.full
def test_uploads_are_deleted_after_a_while(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Image.new("RGB", (32, 32), "red").save(tmp_path / "red.png")  # the examples of the page are kept
    monkeypatch.setattr("steadygaze.app.layout.CLEAN_EVERY", 1)
    monkeypatch.setattr("steadygaze.app.layout.KEEP_FILES", 1)
    with served(loaded) as address:
        file = Path(Visitor(address).upload(tmp_path / "red.png")["path"])
        assert file.is_file()
        end = time.monotonic() + 120
        while file.exists() and time.monotonic() < end:
            time.sleep(0.5)
        assert not file.exists()


@contextmanager
def served_by_command(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Visitor]]:
    """`steadygaze app` and a visitor of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "steadygaze", "app", "--port", str(port)]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None and "serving at" in process.stdout.readline()
        yield process, Visitor(f"http://127.0.0.1:{port}/")


@pytest.mark.full
def test_the_page_ends_while_an_image_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "a.ppm").write_bytes(b"P6\n#" + b"x" * 19_000_000 + b"\n8 8\n255\n" + b"\0" * 192)
    with served_by_command(tmp_path) as (process, visitor):
        image = visitor.upload(tmp_path / "a.ppm")
        visitor.start("explain", image, ["gae"], PREDICTED, DEFAULT_SCORE, False, True)
        with visitor.messages() as messages:
            assert next(m for m in messages if m["msg"] == "process_starts")
            time.sleep(1)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [tmp_path / "a.ppm"]


@pytest.mark.full
def test_uploads_are_deleted_at_the_end(tmp_path: Path) -> None:
    with served_by_command(tmp_path) as (process, visitor):
        image = visitor.upload(IMAGE_FILE)
        assert visitor.explain(image, "gae").error is None
        assert tmp_path in Path(image["path"]).parents
        with visitor.http.stream("GET", f"heartbeat/{visitor.session}"):  # an open page in a browser
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


@pytest.mark.full
def test_a_module_can_be_served() -> None:
    with served(timm.create_model("test_vit", num_classes=3).eval()) as address:
        visitor = Visitor(address)
        answer = visitor.explain(visitor.upload(IMAGE_FILE), "gae")
        assert answer.error is None and captions(answer.data[1]) == ["gae"]


def test_the_command_has_the_same_limits() -> None:
    parameters = inspect.signature(serve).parameters
    assert {name: parameters[name].default for name in asdict(Limits())} == asdict(Limits())


def test_limits_are_checked() -> None:
    for wrong in ({"max_seconds": 0}, {"max_methods": "many"}, {"max_calls": True}):
        with pytest.raises(sg.InputError, match=re.escape(next(iter(wrong)))):
            Limits(**wrong)


@pytest.mark.parametrize(
    ("name", "cost"),
    [
        ("rise", 1000),
        ("rise:budget=7", 7),
        ("occlusion:budget=9", 9),
        ("smoothgrad:samples=5", 10),
        ("gae", 2),
    ],
)
def test_the_cost_of_a_method_follows_its_options(name: str, cost: float) -> None:
    assert forward_passes(sg.method(name)) == cost


@pytest.mark.parametrize(
    ("origin", "status"),
    [(None, 200), ("own", 200), ("http://evil.example", 403), ("http://127.0.0.1:1", 403), ("null", 403)],
)
def test_other_web_sites_are_refused(visitor: Visitor, address: str, origin: str | None, status: int) -> None:
    own = address.rstrip("/")
    headers = {} if origin is None else {"Origin": own if origin == "own" else origin}
    assert visitor.http.get(f"{address}config", headers=headers).status_code == status
    answer = visitor.http.post("upload", files={"files": ("a.png", b"x")}, headers=headers)
    assert answer.status_code == status
    if origin == "http://evil.example":  # as behind a proxy
        forwarded = {**headers, "X-Forwarded-Host": "evil.example"}
        assert visitor.http.get(f"{address}config", headers=forwarded).status_code == 200


def test_an_unknown_function_gets_words(visitor: Visitor, capfd: pytest.CaptureFixture[str]) -> None:
    body = {"data": [], "session_hash": visitor.session}
    for answer in (
        visitor.http.post("queue/join", json={**body, "fn_index": 10**6}),
        visitor.http.post("call/nothing", json={"data": []}),
        visitor.http.post("call/v2/nothing", json={}),
    ):
        assert answer.status_code == 404 and "no such function" in answer.text
    assert "Traceback" not in capfd.readouterr().err


def test_all_uploads_together_are_bounded(loaded: LoadedModel) -> None:
    """Also those whose form has another field, which gradio forgets, and those that are broken off."""
    with served(loaded, limits=Limits(max_upload_mb=0.5, max_stored_mb=3)) as address:
        visitor = Visitor(address)
        paths = []
        for number in range(8):
            content = bytes([number]) * 400_000
            answer = visitor.http.post("upload", files={"files": ("a.png", content)}).raise_for_status()
            visitor.http.post("upload", files={"other": ("a.png", content)})
            head = b'--b\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
            form = {"Content-Type": "multipart/form-data; boundary=b"}
            visitor.http.post("upload", content=head + content * 4, headers=form)
            paths.append(Path(answer.json()[0]))
        assert not paths[0].exists() and paths[-1].exists()
        stored = sum(file.stat().st_size for file in paths[-1].parents[1].rglob("*") if file.is_file())
        assert stored <= 3_500_000
        answer = visitor.explain(visitor.upload(IMAGE_FILE), "ixg")
        assert answer.error is None
        shown = answer.data[1][0]["image"]["path"]
        assert visitor.http.get(f"file={shown}").status_code == 200
