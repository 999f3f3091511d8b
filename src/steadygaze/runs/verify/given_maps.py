"""Maps that a `verify` run is given or keeps: where they are, and whether there is one for each image."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from steadygaze.data.streams import ImageStream
from steadygaze.errors import BadInput
from steadygaze.maps.names import SUFFIX
from steadygaze.maps.reader import MapFolder, missing_message
from steadygaze.runs.verify.images import FilesJob, FilesSource
from steadygaze.runs.verify.plan import Plan

if TYPE_CHECKING:
    from steadygaze.runs.rows import Rows


def maps_folder(keep: bool | str | Path, out: str | Path | None) -> Path | None:
    """The folder for maps that are kept."""
    if isinstance(keep, bool):
        if keep and out is None:
            raise BadInput("keep_maps: expected a folder, or True with out=, got True without out=")
        return Path(out) / "maps" if keep and out is not None else None
    return Path(keep)


def warn_of_missing_maps(folder: Path, rows: Rows) -> None:
    """Rows of an earlier run into the same folder may have been computed without keeping their maps."""
    stored = MapFolder(folder).images if any(folder.glob(f"*{SUFFIX}")) else set()
    missing = {row["image"] for row in rows} - stored
    if missing:
        warnings.warn(
            f"{folder} has no maps of {len(missing)} images: their rows were computed before, without "
            "keep_maps. Use another output folder to store all maps.",
            stacklevel=3,
        )


def check_complete(plan: Plan, source: FilesSource, target: object) -> None:
    """BadInput if an image of a folder has no map, or one of another class; images that cannot be read need
    none. The images of a stream are not known before they are read.

    target: "label", a class, or anything else for classes that are not known yet
    """
    if isinstance(source.images, ImageStream):
        return
    images = {item.name: item for item in source.images}
    for method in plan.stored:
        missing = [image for image in images if not method.source.has(method.maps, image)]
        if any(source.readable(FilesJob((one,), (), items=(images[one],)), one) for one in missing):
            unknown = method.source.images - set(images)
            raise BadInput(missing_message(method.maps, missing, len(images), unknown))
        unread = set(missing)
        for image in (name for name in images if name not in unread):
            explained = images[image].label if target == "label" else target
            if isinstance(explained, int):
                method.source.check(method.maps, image, explained)
