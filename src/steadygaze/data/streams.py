"""Labeled images that are streamed from WebDataset shards, datasets of Hugging Face or Parquet files.

A stream is read in its order and never listed whole in memory. Every image has a key that does not depend on
how the data is divided into shards. An image that cannot be used (no label, a label that the model does not
know, a key that came before) is part of the stream like one that cannot be decoded: its `Item` states the
reason when it is read, and the other images are served.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from steadygaze.data.folders import ClassLookup, Item, Unlabeled
from steadygaze.data.images import find_images, names_hash
from steadygaze.data.masks import Decode, decode_object_mask
from steadygaze.data.stream_spec import ImageBytes, Sample, StreamSpec, Unusable, is_stream
from steadygaze.data.tables import TableRows
from steadygaze.data.tar_shards import TarShards
from steadygaze.errors import InputError, SteadygazeError

T = TypeVar("T")

LOOKED_AT = 16  # samples at the start: if none of them can be used, the options are wrong

READ_AHEAD = 64  # samples that are read before they are needed
MAX_AHEAD = 256 * 2**20  # bytes of them


class LabelLookup:
    """Finds the class of the model that a label of the data stands for.

    An integer is the model's own class where it can be: if there are no names, if the names are those of the
    model, or if the data declares as many names as the model has classes.

    Attributes:
        names: Names of integer labels, from a file that the user gave.
        own_names: Names that the data itself declares.
    """

    def __init__(
        self, classes: ClassLookup, names: Sequence[str] | None, own_names: Sequence[str] | None = None
    ) -> None:
        self.classes = classes
        if names is None:
            same = own_names is None or len(own_names) == classes.count
        else:
            same = len(names) == classes.count and classes.names in (None, names)
        self.names = None if same else names or own_names
        self._classes: dict[str, int] = {}  # by label

    def index(self, label: str) -> int:
        """The class; `InputError` if there is none."""
        if label not in self._classes:
            name = label
            if self.names is not None and label.isdecimal():
                if int(label) >= len(self.names):
                    raise InputError(
                        f"label {label} is out of range: label_names has {len(self.names)} names, from 0"
                    )
                name = self.names[int(label)]
            self._classes[label] = self.classes.index(name)
        return self._classes[label]


@dataclass
class ImageStream:
    """Labeled images as they come.

    Attributes:
        labels: Finds the class of a label; None if labels are not used.
        labels_needed: Whether an image without a label is unusable.
        limit: At most this many images.
    """

    spec: StreamSpec
    reader: TarShards | TableRows
    labels: LabelLookup | None
    labels_needed: bool = True
    limit: int | None = None
    _positions: dict[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of the data, for display."""
        return self.reader.name

    @property
    def layout(self) -> str:
        """The kind of data, for display."""
        return self.reader.layout

    @property
    def damaged(self) -> list[str]:
        """What could not be read whole so far."""
        return list(self.reader.damaged.values())

    @property
    def decode(self) -> Decode | None:
        """How its masks are read; None without masks."""
        return decode_object_mask if "mask" in self.spec.options else None

    def count(self) -> int | None:
        """The number of images; None if it is not known before they are read."""
        return self.reader.count(self.limit)

    def __iter__(self) -> Iterator[Item]:
        """Every image, from the start."""
        seen: dict[str, int] = {}
        self._positions = seen
        for position, sample in enumerate(islice(self.reader.samples(), self.limit)):
            item = self._item(sample)
            if sample.key in seen:
                reason = f"its key came before, at position {seen[sample.key]}: keys must be unique"
                item = _unusable(sample, reason, name=f"{sample.key} (at {position})")
            seen[item.name] = position
            yield item

    def _item(self, sample: Sample) -> Item:
        if sample.problem or sample.image is None:
            return _unusable(sample, sample.problem or "no image")
        if self.decode is not None and sample.mask is None:
            return _unusable(sample, f"no mask: expected {self.spec.options['mask']}")
        label = None
        if self.labels is not None and sample.label is not None:
            try:
                label = self.labels.index(sample.label)
            except SteadygazeError as error:
                if self.labels_needed:
                    return _unusable(sample, f"label {sample.label[:40]!r}: {error}")
        if self.labels_needed and label is None:
            return _unusable(
                sample, f"no label: expected {self.spec.options.get('label', 'one')}. Give label=NAME."
            )
        place = Path(sample.holder)
        return Item(sample.key, place, label, sample.mask, group=sample.group, encoded=sample.image)

    def first(self) -> list[Item]:
        """Images at the start; an error if there are none, or none of them can be used."""
        items = list(islice(self, LOOKED_AT))
        if not items:
            reason = next(iter(self.damaged), "it is empty")
            raise InputError(f"data: expected images in {self.spec}, found none: {reason}")
        unusable = [item.encoded for item in items if isinstance(item.encoded, Unusable)]
        if len(unusable) == len(items):
            raise InputError(f"data: none of the first {len(items)} images can be used. {unusable[0].reason}")
        return items

    def facts(self, first: Sequence[Item]) -> dict[str, Any]:
        """What identifies the data and its labels, for the settings of a run. first: what `first` gave.

        Of the images only the first one counts: those after it change when a damaged shard is repaired. Each
        row has the content hash of its image besides.
        """
        options = {name: text for name, text in self.spec.options.items() if name != "label_names"}
        names = None if self.labels is None else self.labels.names
        return {
            "data": self.name,
            "limit": self.limit,
            "images": None,
            "images_hash": names_hash(f"{item.name}\t{item.label}" for item in first[:1]),
            "layout": self.layout,
            "stream": {
                **self.reader.facts(),
                **options,
                **({} if names is None else {"label_names": names_hash(names)}),
            },
        }

    def position(self, name: str) -> int:
        """The position of an image that was read."""
        return self._positions[name]

    def find(self, names: Sequence[str]) -> Iterator[Item]:
        """The images of these names, read again; none if the data is not on this machine."""
        if not self.reader.local:
            return
        wanted, items = set(names), {}
        for item in self:
            if item.name in wanted:
                items[item.name] = item
                if len(items) == len(wanted):
                    break
        yield from (items[name] for name in names if name in items)


def _unusable(sample: Sample, reason: str, name: str = "") -> Item:
    encoded = Unusable(sample.place, f"{sample.place}: {reason}")
    return Item(name or sample.key, Path(sample.holder), None, encoded=encoded)


def _bytes_of(item: Any) -> int:
    """Bytes of an item's image and mask that are in memory."""
    parts = (getattr(item, "encoded", None), getattr(item, "mask", None))
    return sum(len(part.data) for part in parts if isinstance(part, ImageBytes))


def read_ahead(items: Iterable[T], size: int = READ_AHEAD) -> Iterator[T]:
    """The items, read by a thread that is at most `size` of them, or `MAX_AHEAD` bytes, ahead.

    It starts with the first `next`.
    """
    waiting: queue.Queue[tuple[T | None, BaseException | None] | None] = queue.Queue(size)
    stopped = threading.Event()
    ahead, held = threading.Condition(), [0]  # bytes of the items that wait

    def put(entry: tuple[T | None, BaseException | None] | None) -> bool:
        size = 0 if entry is None else _bytes_of(entry[0])
        while not stopped.is_set():
            with ahead:
                if held[0] and not ahead.wait_for(lambda: held[0] + size <= MAX_AHEAD or not held[0], 0.2):
                    continue
                held[0] += size
            break
        while not stopped.is_set():
            try:
                waiting.put(entry, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
            put(None)
        except BaseException as error:  # raised again where the items are used
            put((None, error))

    threading.Thread(target=work, name="steadygaze-read-ahead", daemon=True).start()
    try:
        while (entry := waiting.get()) is not None:
            item, error = entry
            with ahead:
                held[0] -= _bytes_of(item)
                ahead.notify()
            if error is not None:
                raise error
            yield item  # type: ignore[misc]  # without an error there is an item
    finally:
        stopped.set()


def open_stream(
    spec: StreamSpec,
    classes: ClassLookup,
    *,
    labels_needed: bool = True,
    limit: int | None = None,
    groups: Sequence[str] = (),
) -> ImageStream:
    """The images that a specification names. groups: columns whose values name the group of an image."""
    if groups and spec.kind == "wds":
        raise InputError(
            f"groups: expected a table with the column {groups[0]}, got {spec}. Use a folder with index.csv, "
            "or hf: data.",
            option="groups",
        )
    reader = TarShards.open(spec) if spec.kind == "wds" else TableRows.open(spec, groups)
    labels = None
    if not isinstance(classes, Unlabeled):
        labels = LabelLookup(classes, spec.label_names, reader.label_names)
    return ImageStream(spec, reader, labels, labels_needed and labels is not None, limit)


def list_images(
    sources: Iterable[str | Path], limit: int | None = None
) -> tuple[list[Path | Item], list[str]]:
    """The files, every image below the folders, and the images of the streams; labels are not read.

    The second list names what of the streams could not be read whole, with reasons.

    Args:
        limit: At most this many images.
    """
    images: dict[Path | Item, None] = {}
    damaged: list[str] = []
    for source in sources:
        if is_stream(source):
            stream = open_stream(StreamSpec.parse(str(source)), Unlabeled(), limit=limit)
            stream.first()  # wrong options are an error
            images.update(dict.fromkeys(stream))
            damaged += stream.damaged
        else:
            images.update(dict.fromkeys(find_images([source])))
    return list(islice(images, limit)), damaged
