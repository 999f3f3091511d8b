"""Attribution maps as files: written by `Attribution.save_maps` and `verify`, measured by `verify(maps=...)`.

A file holds the maps of one batch, and its name depends on its images only: a killed run leaves whole files,
a resumed one writes the same file again, and processes never write the same file. A folder of maps may come
from a stranger: nothing in it is executed, and every size is checked before memory is used. docs/maps.md
describes the format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from steadygaze.errors import InputError, RowsNotWrittenError
from steadygaze.files import write_atomic
from steadygaze.target import SCORES_OF, at_least_float32

GIVEN = "given"  # the score of a map that states none
SCALE = "#scale"  # ends the name of the factors of a tensor
NAMED_SCORES = {"callable", *(score for scores in SCORES_OF.values() for score in scores)}
SUFFIX = ".safetensors"


@dataclass(frozen=True, order=True)
class MapName:
    """The maps of one method: `NAME` or `NAME@SCORE` as the name of a tensor.

    Examples:
        >>> MapName.parse("saliency"), MapName.parse("gae@logit").score
        (MapName(method='saliency', score='given'), 'logit')
    """

    method: str
    score: str = GIVEN

    @classmethod
    def parse(cls, text: str) -> MapName:
        """Read the name of a tensor."""
        method, at, score = text.rpartition("@")
        return cls(method, score) if at and method and score in NAMED_SCORES else cls(text)

    def __str__(self) -> str:
        return self.method if self.score == GIVEN else f"{self.method}@{self.score}"

    @property
    def in_rows(self) -> str:
        """The method in rows: the prefix tells it from a built-in method of the same name."""
        return f"maps:{self.method}"


def rounded(maps: Float[Tensor, "n h w"]) -> tuple[Float[Tensor, "n h w"], Float[Tensor, " n"]]:
    """Each map divided by its largest magnitude, in float16, and these magnitudes.

    Nothing overflows. Two scores become equal if they differ by less than about 1/2048 of their size; scores
    below 3e-8 of the largest one become zero.
    """
    wide = at_least_float32(maps.detach().cpu())
    largest = wide.abs().amax(dim=(1, 2))
    divisor = torch.where(largest > 0, largest, torch.ones_like(largest))
    return (wide / divisor[:, None, None]).half(), largest


def restored(values: Float[Tensor, "n h w"], scale: Float[Tensor, " n"] | None) -> Float[Tensor, "n h w"]:
    """Maps in float32 or wider, as they were before `rounded`."""
    wide = values.to(torch.promote_types(values.dtype, torch.float32 if scale is None else scale.dtype))
    return wide if scale is None else wide * scale[:, None, None].to(wide.dtype)


MIB = 2**20
MAX_OPEN = 16  # files that stay open
MAX_HEADER = 64 * MIB  # names, shapes and keys of one file
FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
HELP = "docs/maps.md describes the format."
KEYS = TypeAdapter(Annotated[list[str], Field(min_length=1)])
INDICES = TypeAdapter(list[int])
POSITIONS = TypeAdapter(dict[str, list[int]])


@dataclass(frozen=True)
class MapFile:
    """What one file holds, without the maps themselves.

    Attributes:
        names: The methods.
        scaled: Those whose values are multiplied by a factor for each map.
        targets: The explained class of each image; None if the file does not state it.
        broken: Positions of maps that were not finite, by name.
    """

    path: Path
    images: tuple[str, ...]
    names: frozenset[MapName]
    scaled: frozenset[MapName]
    targets: tuple[int, ...] | None
    broken: dict[MapName, frozenset[int]]

    @classmethod
    def read(cls, path: Path) -> MapFile:
        """Check a file and read its header."""
        if not path.is_file():
            raise InputError(f"{path}: expected a file, got a folder or a special file")
        with path.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
        if size > MAX_HEADER:
            raise InputError(
                f"{path}: expected a {SUFFIX} file with a header of at most {MAX_HEADER // MIB} MiB, got "
                f"{size} bytes. If it is a map file, split it. {HELP}"
            )
        file = _open(path)
        metadata: dict[str, str] = file.metadata() or {}
        if "images" not in metadata:
            raise InputError(
                f"{path}: expected metadata 'images', a list of image keys as JSON, got none. Write it with "
                f"save_file(tensors, path, metadata={{'images': json.dumps(keys)}}). {HELP}"
            )
        images = _metadata(path, metadata, "images", KEYS, "a list of image keys, all texts")
        count = len(images)
        tensors = set(file.keys())
        for text in tensors:
            _check_tensor(path, text, file.get_slice(text), tensors, count)
        names = {MapName.parse(text) for text in tensors if not text.endswith(SCALE)}
        scaled = {MapName.parse(text.removesuffix(SCALE)) for text in tensors if text.endswith(SCALE)}
        if not names:
            raise InputError(f"{path}: expected at least one tensor of maps, got none. {HELP}")
        targets, broken = None, {}
        if "targets" in metadata:
            expected = f"{count} class indices, one for each image"
            targets = tuple(_metadata(path, metadata, "targets", INDICES, expected, count))
        if "broken" in metadata:
            expected = f"positions below {count} by tensor"
            positions = _metadata(path, metadata, "broken", POSITIONS, expected)
            broken = {MapName.parse(text): frozenset(where) for text, where in positions.items()}
            if not broken.keys() <= names or not all(
                0 <= i < count for which in broken.values() for i in which
            ):
                raise InputError(f"{path}: metadata 'broken': expected {expected}, got {str(positions)[:80]}")
        return cls(path, tuple(images), frozenset(names), frozenset(scaled), targets, broken)

    def digest(self) -> str:
        """The SHA-256 of what the file holds; the order of its header is not fixed."""
        broken = {str(name): sorted(positions) for name, positions in self.broken.items()}
        hashed = hashlib.sha256(json.dumps([self.images, self.targets, broken], sort_keys=True).encode())
        file = _open(self.path)
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            hashed.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            hashed.update(tensor.flatten().view(torch.uint8).numpy().data)
        return hashed.hexdigest()


def _open(path: Path) -> Any:
    """`safe_open`, with its errors as `InputError`."""
    from safetensors import safe_open

    try:
        return safe_open(path, framework="pt")
    except Exception as error:  # safetensors raises its own kinds
        raise InputError(
            f"{path}: expected a {SUFFIX} file, got one that cannot be read ({str(error)[:200]}). It is "
            "damaged or incomplete: write it again."
        ) from error


def _metadata(
    path: Path,
    metadata: dict[str, str],
    key: str,
    kind: TypeAdapter[Any],
    expected: str,
    count: int | None = None,
) -> Any:
    """A value of the metadata; InputError unless it is JSON of this kind, with `count` entries."""
    try:
        value = kind.validate_json(metadata[key], strict=True)
        if count is None or len(value) == count:
            return value
    except ValidationError:
        pass
    raise InputError(
        f"{path}: metadata {key!r}: expected {expected}, as JSON, got {metadata[key][:80]!r}. {HELP}"
    )


def _check_tensor(path: Path, name: str, part: Any, tensors: set[str], count: int) -> None:
    """Raise `InputError` unless a tensor has the shape and type of maps, or of their factors."""
    shape, dtype = tuple(part.get_shape()), part.get_dtype()
    if name.endswith(SCALE):
        maps = name.removesuffix(SCALE)
        if maps not in tensors or shape != (count,) or dtype not in ("F32", "F64"):
            raise InputError(
                f"{path}: {name}: expected {count} factors in float32, of a tensor {maps!r} in the same "
                f"file, got {dtype} {shape}"
            )
        return
    if len(shape) != 3 or shape[0] != count or 0 in shape:
        hint = " Sum over the channels first." if len(shape) == 4 else ""
        raise InputError(
            f"{path}: {name}: expected shape ({count}, rows, columns), one map for each of {count} keys in "
            f"metadata 'images', got {shape}.{hint} {HELP}"
        )
    if dtype not in FLOATS:
        raise InputError(f"{path}: {name}: expected {', '.join(FLOATS.values())}, got {dtype}")


class MapFolder:
    """The maps of a folder, or of the folder `maps` in a run folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            kind = "a file" if self.folder.exists() else "no such folder"
            raise InputError(f"maps: expected a folder of {SUFFIX} files, got {folder}: {kind}. {HELP}")
        paths = sorted(self.folder.glob(f"*{SUFFIX}")) or sorted(self.folder.glob(f"maps/*{SUFFIX}"))
        if not paths:
            raise InputError(f"maps: expected {SUFFIX} files in {folder}, got none. {HELP}")
        self.files = [MapFile.read(path) for path in paths]
        self._open: dict[Path, Any] = {}  # the files that were read last
        self._places: dict[str, list[tuple[int, int]]] = {}  # image -> files and positions
        for number, file in enumerate(self.files):
            for position, image in enumerate(file.images):
                self._places.setdefault(image, []).append((number, position))

    @cached_property
    def names(self) -> tuple[MapName, ...]:
        """The methods, in order of their names."""
        return tuple(sorted({name for file in self.files for name in file.names}))

    @property
    def images(self) -> set[str]:
        """Every key."""
        return set(self._places)

    @cached_property
    def digest(self) -> str:
        """Equal for folders whose files hold the same, whatever they are called."""
        return hashlib.sha256("\n".join(sorted(f.digest() for f in self.files)).encode()).hexdigest()[:16]

    def has(self, name: MapName, image: str) -> bool:
        """Whether there is a map of this method for the image."""
        return any(name in self.files[number].names for number, _ in self._places.get(image, ()))

    def check(self, name: MapName, image: str, target: int) -> tuple[MapFile, int]:
        """The file and position of a map; an error if there is none, or if there are different ones."""
        places = [
            (self.files[number], position)
            for number, position in self._places.get(image, ())
            if name in self.files[number].names
        ]
        if not places:
            raise InputError(missing_message(name, [image], 1, set()))
        fitting = [(file, at) for file, at in places if file.targets is None or file.targets[at] == target]
        if not fitting:
            explained = sorted({file.targets[at] for file, at in places if file.targets is not None})
            raise InputError(
                f"maps: the map {name} of {image!r} explains class {', '.join(map(str, explained))}, but the "
                f"run measures class {target}. Use target='predicted' for maps of the predicted class, or "
                "make the maps for the label.",
                option="target",
            )
        (first, at), *copies = fitting
        for file, position in copies:  # a map that is stored twice must have the same values
            if not torch.equal(self._map_at(first, name, at), self._map_at(file, name, position)):
                raise InputError(
                    f"maps: expected one map {name} of {image!r}, got two that differ, in {first.path} and "
                    f"{file.path}. Delete one of the files."
                )
        return first, at

    def read(self, name: MapName, image: str, target: int) -> tuple[Float[Tensor, "h w"], bool, str]:
        """A map, whether it is broken, and where it is stored (for errors)."""
        file, position = self.check(name, image, target)
        return self._map_at(file, name, position), position in file.broken.get(name, ()), str(file.path)

    def _map_at(self, file: MapFile, name: MapName, position: int) -> Float[Tensor, "h w"]:
        """One map in float32 or wider."""
        if file.path not in self._open:
            if len(self._open) >= MAX_OPEN:
                del self._open[next(iter(self._open))]
            self._open[file.path] = _open(file.path)
        tensors, row = self._open[file.path], slice(position, position + 1)
        scale = tensors.get_slice(f"{name}{SCALE}")[row] if name in file.scaled else None
        if scale is not None and not torch.isfinite(scale).all():
            raise InputError(f"{file.path}: {name}{SCALE} is not finite for image {file.images[position]!r}")
        return restored(tensors.get_slice(str(name))[row], scale)[0]


def missing_message(name: MapName, missing: list[str], total: int, unknown: set[str]) -> str:
    """What to do if images have no map; unknown: keys of maps that are not those of an image."""

    def shown(keys: list[str]) -> str:
        return ", ".join(map(repr, keys[:3])) + (", ..." if len(keys) > 3 else "")

    strange = f" {len(unknown)} keys match no image: {shown(sorted(unknown))}." if unknown else ""
    return (
        f"maps: expected a map {name} for each image, got none for {len(missing)} of {total}: "
        f"{shown(missing)}.{strange} A key is the name of the image in rows: its path in the data folder, "
        "its key in streamed data, or 0, 1, ... for images in memory. Add the missing maps, or use "
        "fewer images."
    )


class MapArrays:
    """Arrays in memory. An array (N, rows, columns) is for the images "0", "1", ... in order."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._maps = {MapName.parse(name): _by_image(name, maps) for name, maps in arrays.items()}

    @property
    def names(self) -> tuple[MapName, ...]:
        """The methods."""
        return tuple(self._maps)

    @property
    def images(self) -> set[str]:
        """Every key."""
        return {image for maps in self._maps.values() for image in maps}

    @cached_property
    def digest(self) -> str:
        """Equal for equal arrays."""
        hashed = hashlib.sha256()
        for name, maps in self._maps.items():
            for image, scores in maps.items():
                hashed.update(f"{name}\n{image}\n{scores.dtype} {tuple(scores.shape)}\n".encode())
                hashed.update(scores.contiguous().view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()[:16]

    def has(self, name: MapName, image: str) -> bool:
        """Whether there is a map of this method for the image."""
        return image in self._maps[name]

    def check(self, name: MapName, image: str, target: int) -> None:
        """Accept every class: arrays do not state one."""

    def read(self, name: MapName, image: str, target: int) -> tuple[Float[Tensor, "h w"], bool, str]:
        """A map, that it is not broken, and where it comes from."""
        if not self.has(name, image):
            raise InputError(missing_message(name, [image], 1, set()))
        scores = self._maps[name][image]
        return at_least_float32(scores), False, "maps"


def _by_image(name: str, maps: Any) -> dict[str, Tensor]:
    if not isinstance(maps, Mapping):
        stacked = _tensor(name, maps)
        if stacked.dim() != 3:
            raise InputError(
                f"maps: {name}: expected (N, rows, columns), one map for each image in order, or a dict by "
                f"image key; got {tuple(stacked.shape)}",
                option="maps",
            )
        return {str(number): scores for number, scores in enumerate(stacked)}
    by_image = {str(image): _tensor(f"{name} of {image!r}", scores) for image, scores in maps.items()}
    for image, scores in by_image.items():
        if scores.dim() != 2:
            raise InputError(
                f"maps: {name} of {image!r}: expected (rows, columns), got {tuple(scores.shape)}",
                option="maps",
            )
    return by_image


def _tensor(what: str, values: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"maps: {what}: expected an array of floats, got {str(values)[:80]}") from error
    if not tensor.is_floating_point():
        raise InputError(f"maps: {what}: expected an array of floats, got {tensor.dtype}", option="maps")
    return tensor


Given = str | Path | Mapping[str, Any]  # a folder, or arrays by method: (N, h, w), or by image key
MapSource = MapFolder | MapArrays


class MapWriter:
    """Writes maps in float16 into a folder, which is made if there is none.

    Attributes:
        about: Further metadata of every file, as texts.
    """

    def __init__(self, folder: str | Path, about: Mapping[str, str] | None = None) -> None:
        self.folder, self.about = Path(folder), dict(about or {})

    def write(
        self,
        images: Sequence[str],
        maps: Mapping[MapName, Float[Tensor, "n h w"]],
        targets: Sequence[int] | None = None,
        broken: Mapping[MapName, Sequence[int]] | None = None,
    ) -> Path:
        """Write one file; returns its path.

        Args:
            images: The key of each of the N images.
            targets: The class that each map explains.
            broken: Positions of maps that are not finite; their values count as zero.
        """
        from safetensors.torch import save

        tensors: dict[str, Tensor] = {}
        for name, scores in maps.items():
            tensors[str(name)], tensors[f"{name}{SCALE}"] = rounded(scores)
        metadata: dict[str, Any] = {"images": list(images)}
        if targets is not None:
            metadata["targets"] = [int(target) for target in targets]
        if broken:
            metadata["broken"] = {str(name): list(positions) for name, positions in broken.items()}
        identity = [[str(name) for name in maps], list(images), None if targets is None else list(targets)]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
        path = self.folder / f"maps-{digest}{SUFFIX}"
        content = save(tensors, {**self.about, **{key: json.dumps(v) for key, v in metadata.items()}})
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, content)
        except FileExistsError as error:
            raise InputError(f"maps: expected a folder to write to, got a file, {self.folder}") from error
        except OSError as error:
            raise RowsNotWrittenError(
                f"{path} could not be written: {error.strerror}. The maps before are intact; free some space "
                "and run the same command again to resume."
            ) from error
        return path


@dataclass(frozen=True)
class StoredMethod:
    """A method whose maps are read, not computed."""

    maps: MapName
    source: MapSource = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """As written to rows."""
        return self.maps.in_rows

    def batch(
        self, images: Sequence[str], target: Sequence[int], grid: tuple[int, int], size: tuple[int, int]
    ) -> tuple[Float[Tensor, "b gh gw"], list[int]]:
        """The maps of these images on the patch grid, and positions of broken ones, which are zero.

        Args:
            size: Height and width of the images as the model takes them.
        """
        maps, broken = [], []
        for position, (image, explained) in enumerate(zip(images, target, strict=True)):
            scores, is_broken, where = self.source.read(self.maps, image, explained)
            context = f"{where}: {self.maps} of {image!r}"
            maps.append(on_grid(scores, grid, size, context))
            if is_broken:
                broken.append(position)
                maps[-1] = torch.zeros_like(maps[-1])
            elif not torch.isfinite(scores).all():
                raise InputError(
                    f"{context}: expected finite scores, got NaN or infinite ones. Check the method that "
                    "made the map, or leave the image out."
                )
        widest = max((m.dtype for m in maps), key=lambda dtype: torch.finfo(dtype).bits)
        return torch.stack([m.to(widest) for m in maps]), broken


def on_grid(
    scores: Float[Tensor, "h w"], grid: tuple[int, int], size: tuple[int, int], context: str
) -> Float[Tensor, "gh gw"]:
    """A map on the patch grid: as it is, or the mean over the pixels of each patch."""
    shape = tuple(scores.shape)
    if shape == grid:
        return scores
    if shape == size:
        return F.adaptive_avg_pool2d(scores[None], grid)[0]
    raise InputError(
        f"{context}: expected {grid}, the model's patch grid, or {size}, the pixels of its input, got "
        f"{shape}. Make the map of the image as the model takes it, after resizing and cropping."
    )


def open_maps(maps: Given) -> MapSource:
    """The maps of a folder, or of arrays by method."""
    if isinstance(maps, (str, Path)):
        return MapFolder(maps)
    if not isinstance(maps, Mapping) or not maps:
        raise InputError(
            "maps: expected a folder, or a dict from the name of a method to its maps: (N, rows, columns), "
            f"or a dict by image key; got {str(maps)[:80]}",
            option="maps",
        )
    return MapArrays(maps)
