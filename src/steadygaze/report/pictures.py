"""Names of the first version, until the pages of stress runs read stored images."""

from __future__ import annotations

import base64
import io

from PIL import Image

from steadygaze.runs.samples import thumbnail as enlarged

__all__ = ["address", "enlarged", "word"]


def word(classes: tuple[str, ...] | None, index: int) -> str:
    return classes[index].split(",")[0] if classes else f"class {index}"


def address(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=86)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
