"""Shared by tests."""

import pickle
from pathlib import Path

import numpy as np
from PIL import Image

SPECIES = ("00000_Animalia_Annelida_a_b", "00001_Animalia_Annelida_a_c")


def plant(root: Path, folders: list[str], each: int = 2) -> Path:
    for number, name in enumerate(folders):
        (root / name).mkdir(parents=True)
        for i in range(each):
            Image.new("L", (4, 3), 10 * number + i).save(root / name / f"{i}.jpeg")
    return root


def cifar(root: Path) -> tuple[np.ndarray, Path, Path]:
    """The same five images in both editions."""
    data = np.random.default_rng(0).integers(0, 256, (5, 3072), dtype=np.uint8)
    fine, coarse = [1, 0, 2, 2, 1], [0, 1, 1, 0, 1]
    one, two = root / "a" / "cifar-100-python", root / "b" / "cifar-100-binary"
    for place in (one, two):
        place.mkdir(parents=True)
    for name, rows in (("train", slice(0, 3)), ("test", slice(3, 5))):
        entry = {
            b"data": data[rows],
            b"fine_labels": fine[rows],
            b"coarse_labels": coarse[rows],
            b"filenames": [b"x.png"],
        }
        (one / name).write_bytes(pickle.dumps(entry, protocol=2))
        raw = np.concatenate([np.array([coarse[rows], fine[rows]], dtype=np.uint8).T, data[rows]], 1)
        (two / f"{name}.bin").write_bytes(raw.tobytes())
    meta = {b"fine_label_names": [b"apple", b"baby", b"bear"], b"coarse_label_names": [b"fruit", b"people"]}
    (one / "meta").write_bytes(pickle.dumps(meta, protocol=2))
    (two / "fine_label_names.txt").write_text("apple\nbaby\nbear\n")
    (two / "coarse_label_names.txt").write_text("fruit\npeople\n")
    return data, one, two
