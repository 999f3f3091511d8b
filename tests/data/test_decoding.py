"""Image files that take too long or too much memory get an error, and everything else is served."""

import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from helpers.page import served
from steadygaze import load_model
from steadygaze.cli import app
from steadygaze.data import decoding
from steadygaze.data.images import image_size, read_image, read_stored
from steadygaze.errors import ImageError

pytestmark = pytest.mark.skipif(not decoding.TIMED, reason="no timer of processor time")
PIXELS = np.random.default_rng(0).integers(0, 256, (24, 32, 4), dtype=np.uint8)


def gif_with_comment() -> bytes:
    """PIL joins the blocks of its comment in quadratic time."""
    buffer = io.BytesIO()
    Image.new("P", (8, 8)).save(buffer, "GIF")
    data = buffer.getvalue()
    start = 13 + 3 * 2 ** ((data[10] & 7) + 1)
    return data[:start] + b"\x21\xfe" + (b"\xff" + b"x" * 255) * 80_000 + b"\0" + data[start:]


def ppm_with_comment() -> bytes:
    return b"P6\n#" + b"x" * 20_000_000 + b"\n8 8\n255\n" + b"\0" * 192


def jpeg_with_scans(scans: int, side: int = 1000) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * scans + b"\xff\xd9"


HOSTILE = {"a.gif": gif_with_comment, "a.ppm": ppm_with_comment, "a.jpg": lambda: jpeg_with_scans(3_000)}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "SECONDS", 0.3)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_slow_file_is_stopped_and_the_next_one_is_read(impatient, tmp_path, name):
    path = tmp_path / name
    path.write_bytes(HOSTILE[name]())
    Image.fromarray(PIXELS).save(tmp_path / "good.webp", lossless=True)
    for source in (path, path.read_bytes()):
        with pytest.raises(ImageError, match="stopped"):
            read_image(source)
    assert read_image(tmp_path / "good.webp").size == (32, 24)


def test_the_size_and_a_mask_are_read_in_the_same_way(impatient):
    for read in (image_size, lambda data: read_stored(data, "mask")):
        with pytest.raises(ImageError, match="stopped"):
            read(gif_with_comment())


def test_memory_is_limited(monkeypatch):
    monkeypatch.setattr(decoding, "_idle", [])
    monkeypatch.setattr(decoding, "MAX_MEMORY", 600 * 2**20)
    buffer = io.BytesIO()
    Image.new("RGB", (9_000, 9_000)).save(buffer, "PNG")
    with pytest.raises(ImageError, match="emory"):
        read_image(buffer.getvalue(), apart=True)
    decoding.end_decoding()


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGB", "RGBA", "I;16", "I", "F", "CMYK"])
def test_a_child_gives_the_pixels_of_this_process(tmp_path, mode):
    path = tmp_path / "a.tiff"
    image = Image.fromarray(PIXELS).convert("RGB")
    if mode == "I;16":
        image = Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257)
    elif mode == "F":
        image = Image.fromarray(PIXELS[..., 0].astype(np.float32) / 255)
    elif mode == "P":
        image = image.quantize(16)
    else:
        image = image.convert(mode)
    image.save(path)
    for want in ("rgb", "stored", "size"):
        here = decoding.decode(str(path), want, "a")
        apart = decoding.decode_apart(str(path), want, "a")
        assert (here.mode, here.size) == (apart.mode, apart.size) and here.tobytes() == apart.tobytes()
        assert here.convert("RGB").tobytes() == apart.convert("RGB").tobytes()


def test_photographs_are_decoded_in_this_process(monkeypatch):
    def refuse(*args: object) -> None:
        raise AssertionError("a child was asked")

    monkeypatch.setattr("steadygaze.data.images.decode_apart", refuse)
    for options in ({"format": "PNG"}, {"format": "JPEG"}, {"format": "JPEG", "progressive": True}):
        buffer = io.BytesIO()
        Image.fromarray(PIXELS).convert("RGB").save(buffer, **options)
        assert read_image(buffer.getvalue()).size == (32, 24)
    with pytest.raises(AssertionError):
        read_image(jpeg_with_scans(30, 8))


def test_threads_and_forked_processes_have_children_of_their_own(tmp_path):
    path = tmp_path / "a.bmp"
    Image.fromarray(PIXELS[..., :3]).save(path)
    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(read_image, [path] * 40))
    assert all(np.array_equal(image, PIXELS[..., :3]) for image in images)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if np.array_equal(read_image(path), PIXELS[..., :3]) else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert np.array_equal(read_image(path), PIXELS[..., :3])


def test_no_child_outlives_its_parent(tmp_path):
    path = tmp_path / "a.bmp"
    Image.fromarray(PIXELS[..., :3]).save(path)
    code = (
        "import os, signal; from steadygaze.data import decoding;"
        "from steadygaze.data.images import read_image;"
        f"read_image({str(path)!r}); print(decoding._idle[0].process.pid, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        subprocess.run(["sleep", "0.05"], check=True)
    raise AssertionError("it still runs")


def test_explain_serves_the_other_files(impatient, tmp_path):
    (tmp_path / "a.gif").write_bytes(gif_with_comment())
    Image.fromarray(PIXELS[..., :3]).save(tmp_path / "good.png")
    out = ["--model", "embedded", "--method", "ixg", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, ["explain", str(tmp_path), *out], env={"COLUMNS": "400"})
    assert done.exit_code == 1 and "a.gif: decoding was stopped" in done.output
    assert any("good" in file.name for file in (tmp_path / "out").iterdir())


def test_the_page_answers_and_serves_the_next_visitor(impatient, tmp_path):
    pytest.importorskip("gradio")
    from benchmarks.page_client import Visitor

    (tmp_path / "a.gif").write_bytes(gif_with_comment()[:19_000_000])
    Image.fromarray(PIXELS[..., :3]).save(tmp_path / "good.png")
    with served(load_model("embedded")) as address:
        visitor = Visitor(address)
        answer = visitor.explain(visitor.upload(tmp_path / "a.gif"), "ixg")
        assert answer.error is not None and "stopped" in answer.error
        assert visitor.explain(visitor.upload(tmp_path / "good.png"), "ixg").error is None
