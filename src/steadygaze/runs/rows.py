"""The rows of a run, read back from its folder or held in memory.

A folder RUN holds

| file | content |
| --- | --- |
| `run.json` | `settings`, everything that defines the numbers, and `about`: command, versions, when it began |
| `rows-00000.jsonl` | one line a row, one file for each worker; `.jsonl.gz` is read too |

A row is one number: model, weights, method, score, metric, image, value, seed; and where there is something to say,
detail (the curve or the sums behind the value), note (how it was measured), flag (the map was empty or broken). A run of
`stress` has a setting (`clean`, `fog/3`, `fgsm/8`, ...) instead of method and score. A line with `unreadable` says why a
picture could not be used.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadygaze.errors import BadInput

if TYPE_CHECKING:
    import pandas as pd

    from steadygaze.runs.stress_card import Card
    from steadygaze.runs.table import Table

Row = dict[str, Any]
COLUMNS = (
    "model",
    "weights",
    "method",
    "score",
    "metric",
    "image",
    "value",
    "detail",
    "note",
    "flag",
    "seed",
)
STRESS = "stress"  # the kind of run whose rows have a setting instead of method and score


def row_files(folder: Path) -> list[Path]:
    """The files of rows in a run's folder, by worker."""
    return sorted([*folder.glob("rows-*.jsonl"), *folder.glob("rows-*.jsonl.gz")])


def read_run(folder: Path) -> dict[str, Any]:
    """The run.json of a folder."""
    path = folder / "run.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise BadInput(
            f"{folder} is no run: no run.json in it. Make one with: steadygaze verify (or stress) ... --out {folder}"
        ) from error
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read ({error})") from error


def lines(path: Path) -> Iterator[Row]:
    """The lines of one file of rows; a last line that was not finished is left out, whatever else is broken is an
    error."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise BadInput(
                    f"{path}, line {number}, is no row ({error}). Delete that line; its batch is computed again."
                ) from error


class Rows:
    """The rows of one run or of several. Iterating gives dicts; folders are read as they are walked through, not
    kept."""

    def __init__(
        self, runs: list[dict[str, Any]], rows: list[Row] | None = None, folders: list[Path] | None = None
    ) -> None:
        self.runs = runs
        self.folders = folders or []
        self._rows = rows or []

    @classmethod
    def read(cls, *folders: str | Path) -> Rows:
        """The rows of these run folders."""
        if not folders:
            raise BadInput("expected at least one run folder, got none")
        paths = [Path(folder) for folder in folders]
        return cls([read_run(path) for path in paths], folders=paths)

    def everything(self) -> Iterator[tuple[int, Row]]:
        """(which run, line), the lines about unreadable pictures too."""
        for row in self._rows:
            yield 0, row
        for number, folder in enumerate(self.folders):
            for path in row_files(folder):
                for row in lines(path):
                    yield number, row

    def __iter__(self) -> Iterator[Row]:
        return (row for _, row in self.everything() if "unreadable" not in row)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"Rows({len(self)} rows of {len(self.runs)} run{'s' if len(self.runs) > 1 else ''})"

    @property
    def kinds(self) -> set[str]:
        """What was run: "verify", "stress"."""
        return {run["settings"].get("kind", "verify") for run in self.runs}

    @property
    def _absent(self) -> tuple[str, ...]:
        return {frozenset({STRESS}): ("method", "score"), frozenset({"verify"}): ("setting",)}.get(
            frozenset(self.kinds), ()
        )

    @property
    def unreadable(self) -> dict[str, str]:
        """Pictures that could not be used, and why."""
        found: dict[str, str] = {}
        for _, row in self.everything():
            if "unreadable" in row:
                found[row["image"]] = row["unreadable"]
        return {image: why for image, why in found.items() if why}

    @property
    def flagged(self) -> dict[tuple[str, str], int]:
        """(method or setting, flag) -> how many maps were empty or broken."""
        maps: set[tuple[str, ...]] = set()
        for row in self:
            if row.get("flag"):
                maps.add(
                    (row.get("method") or row["setting"], row["flag"], row.get("score", ""), row["image"])
                )
        counts: dict[tuple[str, str], int] = {}
        for method, flag, _, _ in sorted(maps):
            counts[method, flag] = counts.get((method, flag), 0) + 1
        return counts

    def to_pandas(self) -> pd.DataFrame:
        """One line a row: model, weights, method, score (or setting), metric, image, value, detail, note, flag, seed,
        versions."""
        import pandas as pd

        columns = tuple(name for name in ("setting", *COLUMNS) if name not in self._absent)
        versions = [_in_words(run["settings"]["versions"]) for run in self.runs]
        data = [
            [row.get(name) for name in columns] + [versions[number]]
            for number, row in self.everything()
            if "unreadable" not in row
        ]
        frame = pd.DataFrame(data, columns=[*columns, "versions"])
        frame["value"] = frame["value"].astype(float)
        return frame.fillna({"note": "", "flag": ""})

    def table(self, *, repeats: int = 2000, seed: int = 0) -> Table:
        """The ranking: one value with its 95 % interval for each method, score and metric."""
        from steadygaze.runs.table import Table

        if STRESS in self.kinds:
            raise BadInput("expected rows of verify, got rows of a stress run: their numbers are in cards()")
        return Table.of(self, repeats=repeats, seed=seed)

    def cards(self, *, repeats: int = 2000, seed: int = 0) -> list[Card]:
        """What each stress run found: one value with its 95 % interval for each setting and metric, and the scores."""
        from steadygaze.runs.stress_card import Card

        return Card.of(self, repeats=repeats, seed=seed)


def _in_words(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
