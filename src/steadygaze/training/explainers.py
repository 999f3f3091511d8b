"""Preprocessed images for training, in an order that depends on the seed and the step alone.

The state of an Adam optimizer as named tensors, to write it to a file and read it back.

Training of a learned method: one output file, resumed exactly where it stopped, one writer at a time.

The file is replaced atomically and is usable from the first save on. The images of a step depend on the seed
and the step alone. `DiffMaskRun` and `ShapleyRun` say what is trained.
"""

from __future__ import annotations

import hashlib
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from steadygaze.data.images import find_images, read_image
from steadygaze.errors import ImageError, InputError, RowsNotWrittenError
from steadygaze.files import FileLock
from steadygaze.loading.load import load_model
from steadygaze.loading.loaded import LoadedModel
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.vit.adapt import adapt

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MEMORY = 1 << 30  # bytes of preprocessed images that are kept in memory


class ImageCache:
    """Preprocessed images in an order that depends on the seed alone; kept in memory if they fit."""

    def __init__(self, files: list[Path], loaded: LoadedModel) -> None:
        self.files, self.loaded = files, loaded
        self.unreadable: dict[Path, str] = {}
        self._images: dict[Path, Tensor] = {}
        height, width = loaded.size
        self._keep = len(files) * 12 * height * width <= MEMORY  # 3 channels of float32

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        """The images of a step, (b, 3, H, W), without unreadable ones."""
        steps_per_epoch = max(
            1, len(self.files) // size
        )  # images that fill no batch are left to the next order
        epoch, step_in_epoch = divmod(step, steps_per_epoch)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = torch.randperm(len(self.files), generator=generator)
        chosen = order[step_in_epoch * size : (step_in_epoch + 1) * size]
        return self.load([self.files[int(index)] for index in chosen])

    def load(self, files: list[Path]) -> Tensor:
        """These images, stacked; unreadable ones are left out and recorded."""
        images = [image for file in files if (image := self._image(file)) is not None]
        if not images:
            raise ImageError(
                f"none of {len(files)} images could be read; the first because: {self.unreadable[files[0]]}"
            )
        return torch.stack(images)

    def _image(self, file: Path) -> Tensor | None:
        if file in self.unreadable:
            return None
        if file in self._images:
            return self._images[file]
        try:
            image = self.loaded.preprocess(read_image(file))
        except ImageError as error:
            self.unreadable[file] = str(error)
            return None
        if self._keep:
            self._images[file] = image
        return image


MOMENTS = ("exp_avg", "exp_avg_sq")


def moments(name: str, parameter: Tensor, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What the optimizer remembers of a parameter; empty if it has not moved it yet."""
    return {f"adam.{key}.{name}": value for key, value in optimizer.state.get(parameter, {}).items()}


def restore_moments(
    name: str, parameter: Tensor, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Give the optimizer what `moments` returned."""
    if f"adam.step.{name}" not in tensors:
        return
    saved = {key: tensors[f"adam.{key}.{name}"].to(parameter).clone() for key in MOMENTS}
    optimizer.state[parameter] = {"step": tensors[f"adam.step.{name}"].clone(), **saved}


EVALUATED = 64  # images that the result is evaluated on


@dataclass(frozen=True)
class LearnedRequest:
    """What to train.

    data: folders of images, at any depth; labels are not needed
    options: values of the settings
    steps: in all; None: `epochs` passes over the images
    """

    model: str
    data: list[Path]
    out: Path
    checkpoint: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    epochs: int = 5
    save_every: int = 200
    num_classes: int | None = None
    device: str = "auto"
    trust_remote_code: bool = False

    def load(self) -> LoadedModel:
        """The model, on the requested device."""
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return load_model(
            self.model,
            self.checkpoint,
            num_classes=self.num_classes,
            device=device,
            trust_remote_code=self.trust_remote_code,
        )


class Settings(Protocol):
    """What a run needs to know of the settings of a method."""

    @property
    def batch(self) -> int: ...

    @property
    def seed(self) -> int: ...


class Trainer(Protocol):
    """One step after the other; `state` holds everything that the next one depends on."""

    steps: int

    @property
    def settings(self) -> Settings: ...

    def step(self, images: Tensor) -> object: ...

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]: ...


@dataclass(frozen=True)
class LearnedResult:
    """How training ended.

    attempt: number of restarts; report: what was learned, measured on some of the images
    problem: what is wrong with it, empty if nothing is; too_early: because it was not trained for long enough
    initial: the report before the first step, None if the file does not say
    """

    steps: int
    attempt: int
    report: Any
    problem: str
    too_early: bool
    initial: Any = None
    unreadable: tuple[str, ...] = ()


R = TypeVar("R", bound=LearnedRequest)
T = TypeVar("T", bound=Trainer)


class LearnedRun(ABC, Generic[R, T]):
    """A checked request: the model is loaded, the images are found, and an earlier state is restored if there
    is one.

    what: is trained, for error messages; stage: name of the progress bar
    """

    what: ClassVar[str]
    stage: ClassVar[str]
    trainer: T
    total_steps: int
    identity: dict[str, Any]

    def __init__(self, request: R, loaded: LoadedModel | None = None) -> None:
        self.request = request
        self.loaded = loaded or request.load()
        self.vit = adapt(self.loaded)
        self.images = ImageCache(find_images(request.data), self.loaded)
        self.like = next(self.vit.model.parameters())  # device and dtype of the images
        self.attempt = self.resumed = 0
        self.problem = ""  # of training that cannot be continued
        self.version: tuple[int, int] | None = None  # of the file that was read
        self.on_progress: OnProgress = ignore_progress
        self.prepare()
        if request.out.exists():
            self._resume()

    # -- what a method says ----------------------------------------------------------------------------

    @abstractmethod
    def prepare(self) -> None:
        """Set `trainer`, `total_steps` and `identity`."""

    @abstractmethod
    def read(self) -> tuple[Mapping[str, Any], Any]:
        """(facts, the rest) of the output file."""

    @abstractmethod
    def restore(self, facts: Mapping[str, Any], rest: Any) -> None:
        """Continue where the trainer was that wrote this file."""

    @abstractmethod
    def write(self, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Write the output file."""

    @abstractmethod
    def check_step(self, report: Any) -> str:
        """Why training cannot be continued after this step; empty if it can."""

    @abstractmethod
    def finish(self, sample: Tensor) -> LearnedResult:
        """Train to the end with `train_steps`, save, and report."""

    def before_first_step(self, sample: Tensor) -> None:
        """Called once for each attempt."""

    def restart(self) -> bool:
        """Start again after a problem, if that is allowed."""
        return False

    def facts(self) -> dict[str, Any]:
        """Facts for the file besides those that every run writes."""
        return {}

    # -- what every run does ---------------------------------------------------------------------------

    def steps_for(self, batch: int) -> int:
        """The requested number of steps."""
        request = self.request
        return request.steps or request.epochs * max(1, len(self.images.files) // batch)

    def describe(self, settings: DataclassInstance, **more: Any) -> dict[str, Any]:
        """What must be the same for a run to be resumed, by the names that its file uses."""
        names = "\n".join(file.name for file in self.images.files)
        return {
            "model": self.loaded.name,
            "weights": self.loaded.weights_hash,
            "pictures": len(self.images.files),
            "pictures_hash": hashlib.sha256(names.encode()).hexdigest()[:16],
            **more,
            "asked": asdict(settings),
        }

    # options that the version which wrote a file may not have had: the file decides
    newer_options: ClassVar[frozenset[str]] = frozenset()

    def _resume(self) -> None:
        out = self.request.out
        self.version = version_of(out)
        facts, rest = self.read()
        identity = facts.get("identity", {})
        before = {**identity, **identity.get("asked", {})}
        now = {**self.identity, **self.identity["asked"]}
        ignored = {"asked"} | self.newer_options - before.keys()
        changed = [key for key in now if key not in ignored and before.get(key) != now[key]]
        if changed:
            listing = "; ".join(f"{key} was {before.get(key)}, is now {now[key]}" for key in changed)
            raise InputError(
                f"{out} holds {self.what} of another training: {listing}. "
                "Use the same settings to resume it, or another output file."
            )
        self.attempt = int(facts["attempt"])
        self.restore(facts, rest)
        self.problem = facts["diverged"] if facts.get("stopped") else ""
        self.resumed = self.trainer.steps

    def save(self, problem: str = "", too_early: bool = False) -> None:
        """Write what was learned and the state. `stopped` is true if training had to end; otherwise it may be
        continued."""
        facts, tensors = self.trainer.state()
        facts |= {
            "identity": self.identity,
            "attempt": self.attempt,
            "diverged": problem,
            "early": too_early,
            "stopped": bool(self.problem),
            **self.facts(),
        }
        try:
            self.write(facts, tensors)
        except OSError as error:
            raise RowsNotWrittenError(
                f"{self.request.out} could not be written ({error.strerror}): choose another output file"
            ) from error

    def execute(self, on_progress: OnProgress = ignore_progress) -> LearnedResult:
        """Train to the end, as the only process that writes the file."""
        self.on_progress = on_progress
        with self._locked():
            if self.request.out.exists() and version_of(self.request.out) != self.version:
                self._resume()  # another process wrote it since this one read it
            self.report_progress()
            files = self.images.files
            sample = self.images.load(files[:: max(1, len(files) // EVALUATED)][:EVALUATED]).to(self.like)
            return self.finish(sample)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only process that trains this file."""
        out = self.request.out
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RowsNotWrittenError(
                f"{out} could not be written ({error.strerror}): choose another output file"
            ) from error
        try:
            lock = FileLock(out.with_name(f".{out.name}.lock"))
        except InputError as error:
            raise InputError(
                f"{out}: another process is training this file. Wait for it, or choose another output file."
            ) from error
        with lock:
            yield

    def train_steps(self, sample: Tensor) -> None:
        """The steps that are left, with new attempts if `restart` allows it. An interrupt saves first."""
        try:
            while self.trainer.steps < self.total_steps or self.problem:
                if self.problem and not self.restart():
                    break
                if not self.trainer.steps:
                    self.before_first_step(sample)
                with interrupts_deferred():
                    settings = self.trainer.settings
                    batch = self.images.batch(self.trainer.steps, settings.batch, settings.seed)
                    report = self.trainer.step(batch.to(self.like))
                    self.problem = self.check_step(report)
                self.report_progress(str(report))
                is_due = self.trainer.steps % self.request.save_every == 0
                if is_due and self.trainer.steps < self.total_steps and not self.problem:
                    self.save()
        except KeyboardInterrupt:
            self.save(self.problem)
            raise

    def result(self, report: object, problem: str, too_early: bool, initial: object = None) -> LearnedResult:
        """How training ended."""
        unreadable = tuple(self.images.unreadable.values())
        return LearnedResult(
            self.trainer.steps, self.attempt, report, problem, too_early, initial, unreadable
        )

    def report_progress(self, detail: str = "") -> None:
        done = min(self.trainer.steps, self.total_steps)
        resumed = min(self.resumed, done)
        self.on_progress(Progress(self.stage, done, self.total_steps, "steps", resumed, detail))


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Ctrl-C takes effect after the block: half a step, with numbers drawn and nothing moved, could not be
    resumed exactly."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread is interrupted
        yield
        return
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        raise KeyboardInterrupt


def version_of(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
