"""What a run writes, so that it can be killed at any moment: beside, then renamed; and read again without running code."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from steadygaze.errors import BadCheckpoint, BadInput, SteadygazeError
from steadygaze.training.recipe_files import make_recipe

STATE = "state.pt"


class TrainingStopped(SteadygazeError, RuntimeError):
    """A run that cannot go on: a loss that is not finite, a disk that is full. The last good checkpoint is there."""


def write_beside(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` make the file beside `path`, then rename it: a kill, or a full disk, leaves the file that was there."""
    beside = path.with_name(f"{path.name}.part")
    try:
        beside.touch()
        mode = beside.stat().st_mode  # safetensors makes files that only their owner can read
        write(beside)
        beside.chmod(mode)
        with beside.open("rb+") as opened:
            os.fsync(opened.fileno())
        beside.replace(path)
    except (
        OSError,
        RuntimeError,
        ValueError,
        SafetensorError,
    ) as error:  # torch and safetensors tell a full disk in their own ways
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        kept = f"; the one before is untouched: {path}" if path.exists() else ""
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TrainingStopped(
            f"{path.name} could not be written to {path.parent} ({reason}){kept}. Make room, then go on."
        ) from error


def write_text(path: Path, text: str) -> None:
    def write(beside: Path) -> None:
        beside.write_text(text, encoding="utf-8")

    write_beside(path, write)


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Tensors, numbers, texts, lists and dicts of them; nothing that would have to be executed to be read."""

    def write(beside: Path) -> None:
        with beside.open("wb") as opened:
            torch.save(dict(state), opened)

    write_beside(path, write)


def load_state(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError):  # torch would advise to execute what the file holds
            reason = "it is no file of torch.save, or holds more than tensors and numbers"
        raise BadCheckpoint(
            f"{path} is no checkpoint that can be read ({reason}). Remove it to begin anew."
        ) from error


def save_weights(path: Path, weights: Mapping[str, Tensor], about: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    plain = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    write_beside(
        path, lambda beside: save_file(plain, beside, dict(about))
    )  # one entry: the order of several is not kept


def begin(folder: Path, settings: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Make the folder of a run, or check that the run in it is the same one."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"the folder {folder} cannot be made ({error.strerror}): choose another --out"
        ) from error
    path, now = folder / "train.json", json.loads(json.dumps(settings))
    if not path.exists():
        write_text(
            path, json.dumps({"settings": settings, "about": about}, indent=2, ensure_ascii=False) + "\n"
        )
        return
    try:
        before = _completed(json.loads(path.read_text(encoding="utf-8"))["settings"])
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{path} cannot be read ({error}): choose another --out") from error
    changed = differences(before, now)
    if changed:
        raise BadInput(
            f"{folder} holds a run of another recipe: {'; '.join(changed[:6])}. Give the same one to go on, or another --out."
        )


def _completed(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that an older version wrote, with the defaults of keys that it did not have."""
    try:
        return json.loads(json.dumps(make_recipe(settings).settings))
    except (
        SteadygazeError
    ):  # it had keys or values that this version has not: what differs is told as it stands there
        return settings


def differences(before: Any, now: Any, where: str = "") -> list[str]:
    """What changed, by full key."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [
            text
            for k in keys
            for text in differences(before.get(k), now.get(k), f"{where}.{k}" if where else k)
        ]
    return [] if before == now else [f"{where} was {before!r}, is now {now!r}"]


class Log:
    """log.csv: one row for every `log_every` steps and every test. What a killed run wrote after its last checkpoint is taken off."""

    def __init__(self, folder: Path, columns: Sequence[str], step: int, tensorboard: bool) -> None:
        self.path, self.columns = folder / "log.csv", list(columns)
        rows = (
            [row for row in read_log(folder) if int(row["step"]) <= step]
            if self.path.exists() and step
            else []
        )
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())
        self.file = self.path.open("a", encoding="utf-8", newline="")
        self.writer = csv.DictWriter(self.file, self.columns, restval="", lineterminator="\n")
        self.board: Any
        self.board, self.note = _board(folder, step) if tensorboard else (None, "")

    def add(self, row: Mapping[str, Any]) -> None:
        try:
            self.writer.writerow({k: f"{v:.9g}" if isinstance(v, float) else v for k, v in row.items()})
            self.file.flush()
        except OSError as error:
            raise TrainingStopped(
                f"{self.path} could not be written ({error.strerror}): make room there, then go on."
            ) from error
        if self.board is not None:
            for key, value in row.items():
                if isinstance(value, float) and key != "epoch":
                    self.board.add_scalar(key, value, int(row["step"]))

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def _board(folder: Path, step: int) -> tuple[Any, str]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None, "TensorBoard is not installed: the curves are in log.csv alone (pip install tensorboard)"
    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None), ""


def read_log(folder: Path) -> list[dict[str, str]]:
    """The rows of log.csv; a last row that a kill cut off is left out."""
    path = folder / "log.csv"
    if not path.is_file():
        raise BadInput(f"expected a folder that `steadygaze train` wrote, got {folder}: it has no log.csv")
    text = path.read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))
