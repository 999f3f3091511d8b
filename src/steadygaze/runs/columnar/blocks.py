"""Row files as blocks of columns.

A block of some MiB is parsed and checked at once by pyarrow, if it is installed (extra `data`). A block that
holds anything but plain rows is read line by line: that reader defines what is accepted, and names the line
that is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from steadygaze.runs.columnar.columns import ABSENT, CODED, TEXTS, Columns, Vocabularies, Vocabulary
from steadygaze.runs.rows import every_file, read_line, replacements, row_files
from steadygaze.runs.untrusted.json_files import raw_blocks
from steadygaze.runs.untrusted.schema import LARGEST, MATCHING, MAX_DETAIL, check_row

if TYPE_CHECKING:
    import pyarrow as pa

PARSED = 2 * 2**20  # bytes that one thread of pyarrow parses at a time


def run_blocks(
    folder: Path,
    settings: Mapping[str, Any],
    names: Vocabularies,
    run: int = 0,
    *,
    wanted: Callable[[Path], bool] = every_file,
    details: bool = True,
) -> Iterator[Columns]:
    """The rows of a run folder, without those of image files that were replaced since.

    wanted: which files of rows are read
    details: False leaves them out
    """
    replaced = {image: content for image, (_, content) in replacements(folder).items()}
    for path in filter(wanted, row_files(folder)):
        line = 1
        for data in raw_blocks(path):
            block = _parsed(data, settings, names, run, details)
            if block is None:
                block = _line_by_line(path, line, data, settings, names, run)
            line += data.count(b"\n")
            yield _current(block, replaced) if replaced else block


def _line_by_line(
    path: Path, first: int, data: bytes, settings: Mapping[str, Any], names: Vocabularies, run: int
) -> Columns:
    check = partial(check_row, settings=settings)
    lines = enumerate(data.split(b"\n")[:-1], first)
    return Columns.of(((run, read_line(path, number, line, check)) for number, line in lines), names)


def _current(block: Columns, replaced: Mapping[str, str]) -> Columns:
    """Without the rows of an earlier content of an image."""
    images, contents = block.names["image"], block.names["content"]
    expected = np.full(len(images) + 1, -2, dtype=np.int64)  # -2: any content counts
    for image, content in replaced.items():
        if image in images:
            expected[images[image]] = contents[content]
    wanted = expected[block.codes["image"]]
    stale = (wanted != -2) & (wanted != block.codes["content"])
    return block.take(~stale) if stale.any() else block


# -- the fast way ----------------------------------------------------------------------------------


def _parsed(
    data: bytes, settings: Mapping[str, Any], names: Vocabularies, run: int, details: bool
) -> Columns | None:
    """The block, if all of its lines are plain rows of this run; None: it has to be read line by line."""
    lines = data.count(b"\n")
    one_object_a_line = (
        data.startswith(b"{") and data.endswith(b"}\n") and data.count(b"}\n{") == lines - 1
    )  # together with flat values: no object spans lines, no line holds two
    if not one_object_a_line:
        return None
    table = _arrow_table(data)
    if table is None or len(table) != lines:
        return None
    nulls = data.count(b"null")
    unreadable, table = _unreadable(table, run)
    if unreadable is None:
        return None
    coded = {name: _coded(table[name], names[name]) for name in CODED}
    block = Columns(
        names,
        coded,
        np.full(len(table), run, dtype=np.int16),
        _numbers(table["value"]),
        *_detail_arrays(table["detail"]),
        unreadable,
    )
    written = table["value"].null_count + _null_numbers(table["detail"])
    if nulls != written or not _holds(block, table, settings):
        return None
    return block if details else _without_details(block)


def _arrow_table(data: bytes) -> pa.Table | None:
    try:
        import pyarrow as pa
        from pyarrow import json
    except ImportError:
        return None
    schema = pa.schema(
        [
            *((name, pa.string()) for name in (*TEXTS, "unreadable")),
            ("seed", pa.int64()),
            ("value", pa.float64()),
            ("detail", pa.list_(pa.float64())),
        ]
    )
    try:
        data.decode("utf-8")
        table = json.read_json(
            pa.BufferReader(data),
            read_options=json.ReadOptions(block_size=PARSED),
            parse_options=json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer"),
        )
    except (pa.ArrowException, UnicodeDecodeError):
        return None
    plain = all(_is_plain(table[name]) for name in set(table.column_names) - set(schema.names))
    return table.combine_chunks() if plain else None


def _is_plain(column: pa.ChunkedArray) -> bool:
    """Whether a column that rows need not have holds nothing that the reader of lines would refuse."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_floating(column.type):
        return bool(pc.all(pc.is_finite(column)).as_py())
    return not pa.types.is_nested(column.type)


def _unreadable(table: pa.Table, run: int) -> tuple[list[tuple[int, str, str]] | None, pa.Table]:
    """The lines about unreadable images, and the table without them; None if one has no image."""
    import pyarrow.compute as pc

    column = table["unreadable"]
    if column.null_count == len(column):
        return [], table
    given = pc.is_valid(column)
    lines = table.select(["image", "unreadable"]).filter(given)
    if lines["image"].null_count:
        return None, table
    pairs = zip(lines["image"].to_pylist(), lines["unreadable"].to_pylist(), strict=True)
    return [(run, image, reason) for image, reason in pairs], table.filter(pc.invert(given)).combine_chunks()


def _coded(column: pa.ChunkedArray, names: Vocabulary) -> np.ndarray:
    encoded = column.combine_chunks().dictionary_encode()
    codes = encoded.indices.fill_null(ABSENT).to_numpy(zero_copy_only=False)
    known = np.append(names.codes(encoded.dictionary.to_pylist()), np.int32(ABSENT))
    return known[codes]


def _numbers(column: pa.ChunkedArray | pa.Array) -> np.ndarray:
    return np.array(column.to_numpy() if hasattr(column, "chunks") else column.to_numpy(False), np.float64)


def _detail_arrays(column: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow.compute as pc

    lists = column.combine_chunks()
    lengths = pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    return lengths.astype(np.int32), _numbers(lists.flatten())


def _null_numbers(column: pa.ChunkedArray) -> int:
    return int(column.combine_chunks().flatten().null_count)


def _holds(block: Columns, table: pa.Table, settings: Mapping[str, Any]) -> bool:
    """The result of `check_row` for every row."""
    own = ("setting",) if settings.get("kind") == "stress" else ("method", "score")
    required = ("image", "metric", *(own if settings else ()))
    if any((block.codes[name] == ABSENT).any() for name in required):
        return False
    for name in MATCHING:
        if name in settings:
            expected = block.names[name].get(settings[name], ABSENT)
            codes = block.codes[name]
            if not ((codes == expected) | (codes == ABSENT)).all():
                return False
    undefined = np.isnan(block.value).sum(), np.isnan(block.numbers).sum()
    if undefined != (table["value"].null_count, _null_numbers(table["detail"])):
        return False  # NaN, which is no number of JSON
    bounded = all(np.nanmax(np.abs(x), initial=0) <= LARGEST for x in (block.value, block.numbers))
    return bounded and block.lengths.max(initial=0) <= MAX_DETAIL


def _without_details(block: Columns) -> Columns:
    none = np.zeros(len(block), dtype=np.int32)
    return Columns(block.names, block.codes, block.run, block.value, none, np.empty(0), block.unreadable)
