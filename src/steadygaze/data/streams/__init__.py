"""Data that is streamed: WebDataset shards, datasets of Hugging Face, Parquet files.

| file | subject |
| --- | --- |
| `spec.py` | `wds:...` and `hf:...`, as users write them |
| `tar_shards.py` | reads WebDataset shards |
| `tables.py` | reads datasets of Hugging Face and folders of Parquet files |
| `stream.py` | keys, labels and order of the images, whatever they are read from |
| `sample.py` | what readers give |
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from steadygaze.data.folders import ClassLookup, Item, Unlabelled
from steadygaze.data.images import find_images
from steadygaze.data.streams.sample import SampleReader
from steadygaze.data.streams.spec import StreamSpec, is_stream
from steadygaze.data.streams.stream import ImageStream, LabelLookup


def open_stream(
    spec: StreamSpec, classes: ClassLookup, *, labels_needed: bool = True, limit: int | None = None
) -> ImageStream:
    """The images that a specification names."""
    reader = open_reader(spec)
    labels = None
    if not isinstance(classes, Unlabelled):
        labels = LabelLookup(classes, spec.label_names, reader.label_names)
    return ImageStream(spec, reader, labels, labels_needed and labels is not None, limit)


def open_reader(spec: StreamSpec) -> SampleReader:
    """The reader for this kind of data."""
    if spec.kind == "wds":
        from steadygaze.data.streams.tar_shards import TarShards

        return TarShards.open(spec)
    from steadygaze.data.streams.tables import TableRows

    return TableRows.open(spec)


def list_images(given: Iterable[str | Path], limit: int | None = None) -> tuple[list[Path | Item], list[str]]:
    """The files given, every image below the folders given, and the images of streams; labels are not read.
    Then what of the streams could not be read whole, with reasons.

    limit: at most this many images
    """
    found: dict[Path | Item, None] = {}
    damaged: list[str] = []
    for one in given:
        if is_stream(one):
            stream = open_stream(StreamSpec.parse(str(one)), Unlabelled(), limit=limit)
            stream.first()  # wrong options are an error
            found.update(dict.fromkeys(stream))
            damaged += stream.damaged
        else:
            found.update(dict.fromkeys(find_images([one])))
    return list(islice(found, limit)), damaged
