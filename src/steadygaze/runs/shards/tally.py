"""How many images and rows of its part a process has, counted while jobs come in and are done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from steadygaze.runs.rows import Row, RowKey, row_key
from steadygaze.runs.shards.progress_files import Counts
from steadygaze.runs.store import Done


class Tally:
    """Counts of the jobs of one process. An image is done when no job with rows of it is left.

    done: what was there before
    complete: whether all jobs are known, so that totals are
    """

    def __init__(self, done: Done) -> None:
        self.done = done
        self.complete = False
        self._open: dict[str, int] = {}  # image -> jobs that are not done
        self._images = self._rows = self._rows_total = 0

    def add_jobs(self, jobs: Iterable[tuple[Sequence[str], tuple[RowKey, ...], bool]]) -> None:
        """Jobs that this process owns: (images, keys of the rows of each, whether rows are missing)."""
        for images, keys, pending in jobs:
            if not keys:
                continue
            self._rows_total += len(images) * len(keys)
            for image in images:
                self._rows += self.done.count(image, keys)
                self._images -= self._open.get(image) == 0
                self._open[image] = self._open.get(image, 0) + 1
            if not pending:
                self.finish_job(images, keys)

    def add_rows(self, rows: Iterable[Row]) -> None:
        """Rows that were written."""
        for row in rows:
            if "unreadable" in row:
                continue
            self._rows += 1
            if row.get("flag"):
                self.done.flagged.add((row["image"], *row_key(row)[:2]))

    def finish_job(self, images: Sequence[str], keys: Sequence[object]) -> None:
        """A job that is done, or was done before."""
        for image in images if keys else ():
            self._open[image] -= 1
            self._images += self._open[image] == 0

    def counts(self) -> Counts:
        """What there is now."""
        unreadable = sum(image in self._open for image in self.done.unreadable)
        return Counts(
            self._images,
            len(self._open) if self.complete else None,
            self._rows,
            self._rows_total if self.complete else None,
            unreadable,
            sum(image in self._open for image, _, _ in self.done.flagged),
        )
