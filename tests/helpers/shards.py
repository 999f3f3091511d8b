"""WebDataset shards and Parquet files for tests."""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image


def png(seed: int, side: int = 32) -> bytes:
    """An image file; the same seed gives the same bytes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    opened = io.BytesIO()
    Image.fromarray(pixels).save(opened, "PNG")
    return opened.getvalue()


def write_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    """A tar archive of these members, in this order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def samples(numbers: range, classes: int = 3) -> list[tuple[str, bytes]]:
    """Members of samples: k0.png with the label 0 in k0.cls, and so on; labels are 0, 1, 2, 0, 1, 2, ..."""
    members = []
    for number in numbers:
        members += [(f"k{number}.png", png(number)), (f"k{number}.cls", str(number % classes).encode())]
    return members


def shards(folder: Path, count: int = 3, each: int = 3, classes: int = 3) -> str:
    """The shards `0000.tar` and so on; returns the data argument."""
    for number in range(count):
        numbers = range(number * each, (number + 1) * each)
        write_tar(folder / f"{number:04d}.tar", samples(numbers, classes))
    return f"wds:{folder}/{{0000..{count - 1:04d}}}.tar"


def parquet(folder: Path, name: str, numbers: range, **columns: list) -> Path:
    """A Parquet file with the columns image (bytes and path) and label."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    folder.mkdir(parents=True, exist_ok=True)
    table = {
        "image": [{"bytes": png(number), "path": None} for number in numbers],
        "label": [number % 3 for number in numbers],
        **columns,
    }
    write_table(pa.table(table), folder / name, row_group_size=2)
    return folder
