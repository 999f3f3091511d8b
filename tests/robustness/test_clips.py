"""ImageNet-P in its published layout: films by kind and synset."""

import numpy as np
import pytest

import steadygaze as sg
from helpers.runs import thousand
from steadygaze.data.datasets.imagenet import PERTURBATIONS, imagenet_synsets
from steadygaze.errors import ImageError, InputError
from steadygaze.robustness import flip_probability, read_clip, read_shift
from steadygaze.runs.evaluator import Evaluator

cv2 = pytest.importorskip("cv2")


def film(path, frames: int, seed: int) -> np.ndarray:
    """A film of big colored squares, which survive compression."""
    path.parent.mkdir(parents=True, exist_ok=True)
    squares = np.random.default_rng(seed).integers(0, 256, (frames, 4, 4, 3), dtype=np.uint8)
    pixels = squares.repeat(8, 1).repeat(8, 2)
    out = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 10, (32, 32))
    for frame in pixels:
        out.write(np.ascontiguousarray(frame[..., ::-1]))
    out.release()
    return pixels


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("p")
    for i, kind in enumerate((*PERTURBATIONS, "gaussian_noise_2")):
        for j, synset in enumerate(imagenet_synsets()[:2]):
            film(folder / kind / synset / "ILSVRC2012_val_00000001.mp4", 4 + i % 2 + j, 10 * i + j)
    return folder


def test_frames_are_read_in_order_and_in_rgb(tmp_path):
    pixels = film(tmp_path / "a.mp4", 5, 0)
    read = read_clip(tmp_path / "a.mp4")
    assert read.shape == (5, 32, 32, 3) and read.dtype == np.uint8
    apart = np.abs(read[:, None].astype(float) - pixels[None]).mean((2, 3, 4))
    assert (apart.argmin(1) == np.arange(5)).all()
    assert (
        np.abs(read.astype(float) - pixels).mean() < np.abs(read[..., ::-1].astype(float) - pixels).mean() / 2
    )


def test_the_published_tree(root, tmp_path):
    found = read_shift("imagenet-p", root)
    assert (
        len(found.items) == 20
        and found.left_out == {"no kind of mFR": ("gaussian_noise_2",)}
        and not found.notes
    )
    assert {item.group for item in found.items} == set(PERTURBATIONS) and {
        item.right for item in found.items
    } == {(0,), (1,)}
    with pytest.raises(InputError, match="does not exist"):
        read_shift("imagenet-p", tmp_path / "nowhere")
    film(tmp_path / "tilt" / imagenet_synsets()[0] / "a.mp4", 3, 0)
    with pytest.raises(InputError, match="lacks 9 of 10 kinds"):
        read_shift("imagenet-p", tmp_path)
    assert read_shift("imagenet-p", tmp_path, partial=True).notes == ("1 of 10 kinds",)
    (tmp_path / "tilt" / "cat").mkdir()
    with pytest.raises(InputError, match="not synsets of ImageNet: cat"):
        read_shift("imagenet-p", tmp_path, partial=True)
    (tmp_path / "tilt" / "cat").rmdir()
    (tmp_path / "fog").mkdir()
    with pytest.raises(InputError, match="match no class: fog"):
        read_shift("imagenet-p", tmp_path, partial=True)


def test_broken_films(tmp_path):
    film(tmp_path / "one.mp4", 1, 0)
    (tmp_path / "none.mp4").write_bytes(b"nothing")
    for name in ("one.mp4", "none.mp4", "missing.mp4"):
        with pytest.raises(ImageError, match=name):
            read_clip(tmp_path / name)


def test_flips_of_films(root, tmp_path):
    loaded = thousand()
    rows = sg.stress(loaded, None, suites=f"shift:imagenet-p={root}", out=tmp_path / "run")
    assert len(rows) == 10 * 2 * 2 and {r["setting"] for r in rows} == {
        f"imagenet-p/{kind}" for kind in PERTURBATIONS
    }
    evaluator = Evaluator(loaded.model, loaded.preprocess)
    for kind in ("tilt", "shot_noise"):
        name = f"{kind}/{imagenet_synsets()[1]}/ILSVRC2012_val_00000001.mp4"
        frames = evaluator.normalize(as_tensor(read_clip(root / name)))
        wanted = flip_probability(evaluator.logits(frames).argmax(1)[None].numpy(), kind)
        (row,) = [r for r in rows if r["image"] == f"imagenet-p:{name}" and r["metric"] == "flips"]
        assert row["value"] == pytest.approx(wanted)
    scores = rows.cards(repeats=20)[0].scores
    assert "published videos" in scores["imagenet-p", "mfr"].note and scores["imagenet-p", "mfr"].images == 2
    again = sg.stress(loaded, None, suites=f"shift:imagenet-p={root}", out=tmp_path / "run")
    assert sorted(map(str, again)) == sorted(map(str, rows))


def as_tensor(frames: np.ndarray):
    import torch

    return torch.from_numpy(frames).permute(0, 3, 1, 2)
