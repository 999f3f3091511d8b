"""The files of a training run, what it reports and returns, and its random numbers.

| file              | content                                                                        |
| ----------------- | ------------------------------------------------------------------------------ |
| train.json        | the recipe's settings, `start` of new modules, the command, library versions   |
| log.csv           | one row for every `log_every` steps and every test                             |
| state.pt          | the last checkpoint: weights, optimizer, step, averages                        |
| model.safetensors | the resulting weights, for `load_model`                                        |
| tensorboard/      | the curves of log.csv                                                          |

A run may be killed at any moment: files are replaced atomically, and read without running code. Random
numbers follow from numbers such as (seed, step), so that a resumed run draws what an unbroken one draws.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, get_args

import numpy as np
import torch
from torch import Tensor, nn

from steadygaze.data.decoding import first_line
from steadygaze.errors import CheckpointError, InputError, SteadygazeError
from steadygaze.files import write_atomic
from steadygaze.modules.base import Start
from steadygaze.progress import Progress
from steadygaze.seeding import combined_seed
from steadygaze.training.recipe import Recipe
from steadygaze.untrusted import check_torch_file, read_text, refuse_links


@contextmanager
def seeded(*numbers: int, devices: bool = True) -> Iterator[None]:
    """Seed python, numpy and torch from `numbers` inside the block, and restore their states after it.

    Args:
        devices: Seed GPUs too. Not for single images: torch records a stack trace for each such call until a
            GPU is used.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - timm uses this one
    seed = combined_seed(*numbers)
    gpus = range(torch.cuda.device_count()) if devices and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=gpus):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        (torch.manual_seed if devices else torch.default_generator.manual_seed)(seed)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)  # noqa: NPY002


STATE, WEIGHTS, LOG, SETTINGS = "state.pt", "model.safetensors", "log.csv", "train.json"


class TrainingStoppedError(SteadygazeError, RuntimeError):
    """A run that cannot continue: a loss that is not finite, or a full disk.

    The last good checkpoint is kept.

    Examples:
        ```python
        try:
            sg.train("mine.toml", "runs/mine")
        except sg.training.TrainingStoppedError as stopped:
            print(stopped)  # lower the learning rate and run it again
        ```
    """


def write_file(path: Path, content: bytes | str | Callable[[BinaryIO], object]) -> None:
    """Write atomically; a full or read-only disk stops the run, with the previous file in place."""
    try:
        write_atomic(path, content)
    except (OSError, RuntimeError, ValueError) as error:  # torch reports a full disk in its own ways
        system = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = getattr(system, "strerror", None) or first_line(system)
        kept = f"; the previous one is untouched: {path}" if path.exists() else ""
        raise TrainingStoppedError(
            f"{path.name} could not be written to {path.parent} ({reason}){kept}. "
            "Free some space, then resume."
        ) from error


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint of tensors, numbers, strings, lists and dicts, read without running code."""
    write_file(path, lambda file: torch.save(dict(state), file))


def load_state(path: Path) -> dict[str, Any]:
    try:
        check_torch_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:  # torch raises many kinds for files that are not checkpoints
        reason = first_line(error)
        if isinstance(error, pickle.UnpicklingError):  # torch's own message advises to run the file's code
            reason = "not a file of torch.save, or it holds more than tensors and numbers"
        raise CheckpointError(
            f"{path} is not a readable checkpoint ({reason}). Remove it to start again."
        ) from error


def save_weights(path: Path, weights: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    from safetensors.torch import save

    plain = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    write_file(path, save(plain, dict(metadata)))


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"the folder {folder} cannot be created ({error.strerror}): choose another output folder"
        ) from error
    refuse_links(folder)


def prepare_folder(
    folder: Path,
    settings: Mapping[str, Any],
    about: Mapping[str, Any],
    module_start: Start,
    checkpoint: str | None = None,
) -> None:
    """Begin a run in a locked folder, or check that the run in it has the same settings.

    Args:
        checkpoint: File of the initial weights, whose content is recorded.
    """
    digest = file_hash(Path(checkpoint)) if checkpoint is not None and Path(checkpoint).is_file() else None
    for leftover in folder.glob(".*.part"):  # of a write that was killed
        with suppress(OSError):
            leftover.unlink()
    if holds_run(folder, settings):
        before = json.loads(read_text(folder / SETTINGS)).get("checkpoint_sha256")
        if digest is not None and before is not None and before != digest:
            raise InputError(
                f"{folder} holds a run that began with other weights: {checkpoint} has changed "
                "since. Restore "
                "the file to resume the run, or use another output folder."
            )
    else:
        content = {
            "settings": settings,
            "module_start": module_start,
            "checkpoint_sha256": digest,
            "about": about,
        }
        write_file(folder / SETTINGS, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def file_hash(path: Path) -> str:
    """sha256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def holds_run(folder: Path, settings: Mapping[str, Any]) -> bool:
    """Whether the folder holds a run with these settings; one with others is refused. Writes nothing."""
    path, now = folder / SETTINGS, json.loads(json.dumps(settings))
    if not path.exists():
        return False
    try:
        before = json.loads(read_text(path))["settings"]
        if not isinstance(before, dict):
            raise ValueError("its settings are not a table")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path} cannot be read ({error}): choose another output folder") from error
    changed = differences(before, now)
    if changed:
        raise InputError(
            f"{folder} holds a run of another recipe: {'; '.join(changed[:6])}. "
            "Use the same recipe to resume it, or another output folder."
        )
    return True


def read_module_start(folder: Path) -> Start | None:
    """How the new modules of the run in this folder began; None if there is no run yet."""
    try:
        content = json.loads(read_text(folder / SETTINGS))
    except (OSError, ValueError, RecursionError):  # `prepare_folder` reports what is wrong with it
        return None
    start = content.get("module_start") if isinstance(content, dict) else None
    return start if start in get_args(Start) else None


def differences(before: Any, now: Any, key: str = "") -> list[str]:
    """What changed between two nested tables, by full key."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        return [] if before == now else [f"{key} was {before!r}, is now {now!r}"]
    changed = []
    for name in sorted({*before, *now}):
        changed += differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    return changed


class Log:
    """log.csv, and TensorBoard if it is installed.

    Rows that a killed run wrote after its last checkpoint are removed.

    Attributes:
        note: Why there is no TensorBoard although the recipe wants it.
    """

    def __init__(self, folder: Path, columns: Sequence[str], step: int, tensorboard: bool) -> None:
        self.path, self.columns = folder / LOG, list(columns)
        resumed = self.path.exists() and step > 0
        rows = read_log(folder) if resumed else []
        try:
            rows = [row for row in rows if int(row["step"]) <= step]
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self.path} is not a readable log (a row without its step). Remove it."
            ) from error
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, restval="", extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_file(self.path, text.getvalue())
        self.file = self.path.open("a", encoding="utf-8", newline="")
        self.writer = csv.DictWriter(self.file, self.columns, restval="", lineterminator="\n")
        self.board: Any = None
        self.note = ""
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                install = "pip install tensorboard"
                self.note = f"TensorBoard is not installed: the curves are in log.csv only ({install})"
            else:
                purge = step + 1 if step else None
                self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def add(self, row: Mapping[str, Any]) -> None:
        try:
            if not os.fstat(self.file.fileno()).st_nlink:
                raise TrainingStoppedError(
                    f"{self.path} was removed while the run was writing it. Run the same command "
                    "again to start "
                    "over."
                )
            self.writer.writerow({k: f"{v:.9g}" if isinstance(v, float) else v for k, v in row.items()})
            self.file.flush()
        except OSError as error:
            raise TrainingStoppedError(
                f"{self.path} could not be written ({error.strerror}): free some space, then resume."
            ) from error
        if self.board is not None:
            for key, value in row.items():
                if isinstance(value, float) and key != "epoch":
                    self.board.add_scalar(key, value, int(row["step"]))

    def close(self) -> None:
        self.file.close()
        if self.board is not None:
            self.board.close()


def read_log(folder: Path) -> list[dict[str, str]]:
    """The rows of log.csv, without a last row that a kill cut off."""
    path = folder / LOG
    if not path.is_file():
        raise InputError(f"expected the folder of a training run, got {folder}: it has no log.csv")
    try:
        text = path.read_text(encoding="utf-8")
        return list(csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1])))
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{path} is not a readable log ({error}). Remove it.") from error


@dataclass(frozen=True)
class TrainingProgress(Progress):
    """The progress of training, reported after every logged step and every test.

    Attributes:
        epoch: The current one, from 1.
        epochs: Number of epochs in all.
        lr: Learning rate.
        values: The loss and its terms, averaged since the previous row; after a test also test_loss and
            test_top1 (or test_miou).
        seconds: Time that training took so far, over all resumed parts.

    Examples:
        >>> progress = TrainingProgress("train", 20, 100, "steps", epoch=1, values={"loss": 2.3})
        >>> progress.done, progress.values["loss"]
        (20, 2.3)
    """

    epoch: int = 0
    epochs: int = 0
    lr: float = 0.0
    values: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """The result of `train`.

    Attributes:
        folder: Folder of the run; `load_model` accepts it as a name.
        weights: The file of the weights, for `load_model(name, checkpoint=...)`.
        model: The model with these weights, in eval mode.
        recipe: The recipe.
        log: The rows of log.csv.
        notes: What the user should know, also logged as warnings.
        steps: Number of steps that this call took; 0 if the run had finished before.
        unreadable: Files of images that were skipped because they do not decode.

    Examples:
        ```python
        result = sg.train("cifar10-tap", "runs/tap")
        loaded = sg.load_model(result.folder)
        ```
    """

    folder: Path
    weights: Path
    model: nn.Module
    recipe: Recipe
    log: list[dict[str, str]]
    notes: list[str] = field(default_factory=list)
    steps: int = 0
    unreadable: list[str] = field(default_factory=list)

    @property
    def top1(self) -> float | None:
        """Top-1 accuracy on the test images, of the weights that were kept, 0..1; None if not tested."""
        return self._of_kept_weights("test_top1")

    @property
    def miou(self) -> float | None:
        """The same for segmentation: mean intersection over union, 0..1."""
        return self._of_kept_weights("test_miou")

    def _of_kept_weights(self, column: str) -> float | None:
        rows = [row for row in self.log if row.get(column)]
        if not rows:
            return None
        if self.recipe.keep == "best":
            return float(min(rows, key=lambda row: float(row["test_loss"]))[column])
        return float(rows[-1][column])
