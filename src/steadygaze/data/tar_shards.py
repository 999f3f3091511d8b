"""WebDataset shards: tar archives; consecutive members of one name and several extensions are a sample.

Local, uncompressed archives are read by seeking: a sample holds the place of its image, which is read when it
is needed, by any process, in any order. Pipes, URLs and compressed archives are read from front to back.

Archives may be untrusted: nothing in them is unpickled or executed. Images are decoded by
`read_image`, labels are text. Only regular members are read, of at most 512 MiB. An archive that is truncated
or damaged is reported in `damaged`, with the last key that was read; Python's tarfile alone would end without
an error at a damaged header.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal
from urllib.parse import urlparse
from urllib.request import url2pathname

from steadygaze.data.datasets.tree import abbreviated
from steadygaze.data.decoding import first_line
from steadygaze.data.images import SUFFIXES, names_hash
from steadygaze.data.stream_spec import MAX_BYTES, MAX_LABEL, FilePart, ImageBytes, Sample, StreamSpec
from steadygaze.errors import InputError
from steadygaze.untrusted import MAX_RATIO, MIB, unpacked_limit

PIPE = "pipe:"  # in front of a shell command, whose output is the archive
LABEL = "cls"  # the usual extension of class indices
IMAGES = tuple(suffix.removeprefix(".") for suffix in sorted(SUFFIXES))
COUNTED_BYTES = 16 * 2**30  # archives of more bytes in total are not counted before a run
COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstd
EXTENSIONS = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
MAX_HEADER = 2**20  # bytes of one of them
LEAST_UNPACKED = 64 * 2**20  # bytes that any compressed archive may unpack to
DRAINED = 2**20  # bytes that are read at a time after the end of an archive


class DamagedShardError(Exception):
    """An archive that cannot be read further."""


UNREADABLE = (DamagedShardError, OSError, EOFError, tarfile.TarError, ImportError, ValueError)


@dataclass(frozen=True)
class Shard:
    """One archive. path: of a local file, None for pipes and URLs."""

    url: str
    path: Path | None

    @classmethod
    def at(cls, url: str) -> Shard:
        parts = urlparse(url)
        if parts.scheme == "file":
            return cls(url, Path(url2pathname(parts.path)))
        return cls(url, None if url.startswith(PIPE) or "://" in url else Path(url).expanduser())

    @property
    def name(self) -> str:
        """The file's name, without the folder or bucket that holds it."""
        return self.url if self.url.startswith(PIPE) else self.url.rstrip("/").rpartition("/")[2]

    def open(self) -> IO[bytes]:
        if self.path is not None:
            return self.path.open("rb")
        if self.url.startswith(PIPE):
            from webdataset.gopen import gopen_pipe

            return gopen_pipe(self.url, "rb", 2**16)
        import fsspec

        return fsspec.open(self.url, "rb").open()


@dataclass
class TarShards:
    """The samples of WebDataset shards.

    Attributes:
        damaged: What could not be read whole, by shard; filled while samples are read.
        label_names: None, since shards declare no names of integer labels.
    """

    spec: StreamSpec
    shards: tuple[Shard, ...]
    damaged: dict[str, str] = field(default_factory=dict)
    label_names: tuple[str, ...] | None = None

    @classmethod
    def open(cls, spec: StreamSpec) -> TarShards:
        """The shards that the pattern names; local ones that do not exist are an error."""
        shards = tuple(map(Shard.at, _expand(spec.location)))
        missing = [shard.url for shard in shards if shard.path is not None and not shard.path.is_file()]
        if missing:
            raise InputError(
                f"data: {len(missing)} of {len(shards)} shards of {spec} do not exist: "
                f"{abbreviated(missing)}. Correct the pattern, or complete the download."
            )
        if not shards:
            raise InputError(f"data: expected tar archives, found none that match {spec.location}")
        return cls(spec, shards)

    layout = "WebDataset"  # for display

    @property
    def name(self) -> str:
        """The patterns, without the folders or buckets that hold them."""
        return "::".join(part.rpartition("/")[2] or part for part in self.spec.location.split("::"))

    @property
    def local(self) -> bool:
        """Whether reading the data again costs little."""
        return all(shard.path is not None for shard in self.shards)

    def facts(self) -> dict[str, Any]:
        """What identifies the data, for the settings of a run."""
        return {"shards": len(self.shards), "shards_hash": names_hash(shard.name for shard in self.shards)}

    def count(self, limit: int | None) -> int | None:
        """The number of samples, at most `limit`; None if it is not known without reading everything."""
        sizes = [shard.path.stat().st_size for shard in self.shards if shard.path is not None]
        if len(sizes) < len(self.shards) or (limit is None and sum(sizes) > COUNTED_BYTES):
            return None
        groups = (group for shard in self.shards for group in self._groups(shard))
        return sum(1 for _ in islice(groups, limit))

    def samples(self) -> Iterator[Sample]:
        """Every sample, from the start."""
        for shard in self.shards:
            for group in self._groups(shard):
                yield self._sample(shard, group)

    def _groups(self, shard: Shard) -> Iterator[list[Member]]:
        """Consecutive members with one key. What follows a damaged place is left out, and noted."""
        self.damaged.pop(shard.url, None)
        try:
            archive = _open(shard)
        except UNREADABLE as error:
            self._note(shard, error, "")
            return
        group: list[Member] = []
        with closing(archive):
            for member in self._members(shard, archive):
                if group and group[0].key != member.key:
                    yield group
                    group = []
                group.append(member)
            extensions = {member.extension for member in group}
            complete = self._label in extensions and not extensions.isdisjoint(self._images)
            if group and (shard.url not in self.damaged or complete):
                yield group

    def _members(self, shard: Shard, archive: Archive) -> Iterator[Member]:
        """The members that belong to samples, as far as they can be read."""
        from webdataset.tariterators import base_plus_ext

        last, held = "", 0  # bytes of the sample
        try:
            for member in archive.members():
                key, extension = base_plus_ext(member.info.name)
                if key is None or key.startswith("__"):
                    continue
                member.key, member.extension = key, extension.lower()
                wanted = (*self._images, self._label, self.spec.options.get("mask"))
                held = 0 if key != last else held
                if member.extension in wanted and not archive.seekable:
                    held += member.info.size
                    if held <= MAX_BYTES:
                        member.data = archive.read(member.info)  # it cannot be read later
                last = key
                yield member
            archive.finish()
        except UNREADABLE as error:
            self._note(shard, error, last)

    def _note(self, shard: Shard, error: Exception, last: str) -> None:
        after = f" after the key {_printable(last)}" if last else ""
        self.damaged[shard.url] = (
            f"{shard.url}: cannot be read further{after} ({first_line(error)}). "
            "Its other images are left out: repair it and repeat the command to add them."
        )

    @property
    def _label(self) -> str:
        return self.spec.options.get("label", LABEL)

    @property
    def _images(self) -> tuple[str, ...]:
        named = self.spec.options.get("image")
        return IMAGES if named is None else tuple(named.split("|"))

    def _sample(self, shard: Shard, group: list[Member]) -> Sample:
        members: dict[str, Member] = {}
        key = _printable(group[0].key)
        for member in group:
            if member.extension in members:
                return Sample(key, shard.url, problem=f"has two members .{member.extension}")
            members[member.extension] = member
        options = self.spec.options
        mask_extension = options.get("mask")
        image = next((members[e] for e in members if e in self._images and e != mask_extension), None)
        if image is None:
            expected = f".{options['image']}" if "image" in options else "an image such as .jpg"
            found = abbreviated(f".{extension}" for extension in members)
            return Sample(key, shard.url, problem=f"expected {expected}, found {found}")
        label = members.get(self._label)
        mask = members.get(mask_extension) if mask_extension else None
        large = next((m for m in (image, mask) if m is not None and not m.fits), None)
        if large is not None or (label is not None and not label.is_label):
            return Sample(key, shard.url, problem=f"{(large or label).info.name} is too large")  # type: ignore[union-attr]
        return Sample(
            key,
            shard.url,
            image.encoded(shard),
            None if label is None else label.text(),
            None if mask is None else mask.encoded(shard),
        )


def _expand(pattern: str) -> list[str]:
    """Braces, `::` between several patterns, and * in local paths."""
    try:
        from webdataset.shardlists import expand_urls
    except ImportError as error:
        raise InputError("wds: data needs webdataset: pip install 'steadygaze[data]'") from error
    try:
        expanded = expand_urls(pattern)
    except (ValueError, AssertionError) as error:  # braces that do not match, ${NAME} that is not set
        raise InputError(f"data: the pattern {pattern} cannot be expanded ({first_line(error)})") from error
    urls: list[str] = []
    for url in expanded:
        is_glob = "*" in url and not url.startswith(PIPE) and "://" not in url
        path = Path(url).expanduser()
        urls += sorted(map(str, path.parent.glob(path.name))) if is_glob else [url]
    return urls


def runs_command(spec: StreamSpec) -> bool:
    """Whether a shard is the output of a shell command."""
    return spec.kind == "wds" and any(url.lstrip().startswith(PIPE) for url in _expand(spec.location))


def _printable(key: str) -> str:
    """The key as text that can be written: bytes of a name that are not UTF-8 are escaped."""
    return key.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


# -- archives --------------------------------------------------------------------------------------


@dataclass
class Member:
    """A regular member of an archive. data: its bytes, if the archive cannot be read again."""

    info: tarfile.TarInfo
    archive: Archive
    data: bytes | None = None
    key: str = ""
    extension: str = ""

    @property
    def fits(self) -> bool:
        """Whether it has at most `MAX_BYTES`, with what was read of its sample before."""
        return self.info.size <= MAX_BYTES and (self.data is not None or self.archive.seekable)

    @property
    def is_label(self) -> bool:
        return self.fits and self.info.size <= MAX_LABEL

    def text(self) -> str:
        data = self.archive.read(self.info) if self.data is None else self.data
        return data.decode("utf-8", "replace").strip()

    def encoded(self, shard: Shard) -> FilePart | ImageBytes:
        name = f"{shard.url}: {_printable(self.info.name)}"
        if self.data is not None:
            return ImageBytes(name, self.data)
        assert shard.path is not None
        return FilePart(name, shard.path, self.info.offset_data, self.info.size)


class _BoundedInfo(tarfile.TarInfo):
    """A header whose extensions, such as a long name, are read up to `MAX_HEADER` bytes."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in EXTENSIONS and self.size > MAX_HEADER:
            reason = f"a header of {self.size:,} bytes"
            raise tarfile.InvalidHeaderError(reason)  # type: ignore[attr-defined]
        return super()._proc_member(tar)  # type: ignore[misc]


class _Counted:
    """A file that counts the bytes which were read from it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.count = file, 0

    def read(self, size: int = -1) -> bytes:
        data = self.file.read(size)
        self.count += len(data)
        return data


class Archive:
    """A tar archive, read from front to back.

    Attributes:
        size: Of an archive that is read by seeking: members can be read again later.
        limit: Bytes that a compressed one may unpack to; None if its size is not known.
    """

    def __init__(self, file: IO[bytes], size: int | None, limit: int | None = None) -> None:
        self.file, self.size, self.limit = file, size, limit
        self.seekable = size is not None
        self.packed = _Counted(file)
        mode: Literal["r:", "r|*"] = "r:" if self.seekable else "r|*"
        opened: Any = file if self.seekable else self.packed  # of a stream, only `read` is used
        self.tar = tarfile.open(fileobj=opened, mode=mode, tarinfo=_BoundedInfo)  # noqa: SIM115  # closed by `close`

    def finish(self) -> None:
        """After the last member: a command whose exit code is not 0 is an error."""
        if not self.seekable:
            while self.file.read(DRAINED):
                pass
            self.file.close()

    def close(self) -> None:
        """Stop reading, at any member."""
        self.tar.close()
        with suppress(OSError):  # a command that is stopped early fails
            self.file.close()

    def members(self) -> Iterator[Member]:
        info = self.tar.firstmember  # type: ignore[attr-defined]
        while info is not None:
            end = info.offset_data + info.size
            if self.size is not None and end > self.size:
                raise DamagedShardError(f"{info.name} ends after the end of the archive: truncated")
            if self.limit is not None and end > self.limit:
                raise DamagedShardError(
                    f"it unpacks to more than {self.limit // MIB} MiB, which images never do. If it "
                    "is yours, unpack it"
                )
            if info.isreg() and not info.issparse():
                yield Member(info, self)
            self.tar.members = []  # type: ignore[attr-defined]  # it would remember all of them
            info = self._next()

    def _next(self) -> tarfile.TarInfo | None:
        """The next header; None at the end of the archive, and only there."""
        fileobj = self.tar.fileobj
        assert fileobj is not None
        try:
            if not self.seekable:
                self._skip(fileobj)
            fileobj.seek(self.tar.offset)
            return _BoundedInfo.fromtarfile(self.tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            return None
        except tarfile.HeaderError as error:
            raise DamagedShardError(f"damaged or truncated: {error}") from error

    def _skip(self, fileobj: Any) -> None:
        """Go to the next header, as long as what was unpacked is in proportion to what was read."""
        while True:
            unpacked, limit = fileobj.tell(), max(LEAST_UNPACKED, MAX_RATIO * self.packed.count)
            if unpacked > limit:
                raise DamagedShardError(
                    f"it unpacks to more than {MAX_RATIO} times its size, which images never do. If it is "
                    "yours, unpack it"
                )
            if unpacked >= self.tar.offset or not fileobj.read(min(DRAINED, self.tar.offset - unpacked)):
                return

    def read(self, info: tarfile.TarInfo) -> bytes:
        fileobj = self.tar.fileobj
        assert fileobj is not None
        fileobj.seek(info.offset_data)
        data = fileobj.read(info.size)
        if len(data) < info.size:
            raise DamagedShardError(f"{info.name} is truncated")
        return data


def _open(shard: Shard) -> Archive:
    file = shard.open()
    try:
        size = limit = None  # of an archive that is read by seeking: a local file that is not compressed
        if shard.path is not None:
            start = file.read(6)
            file.seek(0)
            if start.startswith(COMPRESSED):
                limit = unpacked_limit(shard.path, LEAST_UNPACKED)
            else:
                size = shard.path.stat().st_size
        return Archive(file, size, limit)
    except BaseException:
        file.close()
        raise
