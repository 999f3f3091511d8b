"""Images for the benchmarks of loading: the same ones as a folder and as WebDataset shards."""

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES, SHARDS = 10, 4


def jpegs(count: int) -> Iterator[bytes]:
    """JPEG files of 500 x 375 pixels, as those of ImageNet are on average."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        opened = io.BytesIO()
        small.resize((500, 375), Image.Resampling.BICUBIC).save(opened, "JPEG", quality=92)
        yield opened.getvalue()


def generated(root: Path, count: int) -> dict[str, str]:
    """The data argument of each kind of data."""
    folder, shards = root / "folder", root / "shards"
    shards.mkdir(parents=True)
    for number, image in enumerate(jpegs(count)):
        label = str(number % CLASSES)
        (folder / label).mkdir(parents=True, exist_ok=True)
        (folder / label / f"{number}.jpg").write_bytes(image)
        with tarfile.open(shards / f"{number * SHARDS // count:04d}.tar", "a") as archive:
            for extension, data in (("jpg", image), ("cls", label.encode())):
                info = tarfile.TarInfo(f"{number:06d}.{extension}")
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    return {"folder": str(folder), "WebDataset": f"wds:{shards}/{{0000..{SHARDS - 1:04d}}}.tar"}
