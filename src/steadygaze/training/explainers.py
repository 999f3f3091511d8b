"""Training of an explanation method for a model: `steadygaze diffmask train`, `steadygaze shapley train`.

A method defines its settings and one step (`training/diffmask.py`, `training/vit_shapley.py`). `ExplainerRun`
does the rest: images, progress, restarts, and one output file, which is replaced atomically, is usable from
the first save on, has one writer at a time, and is resumed exactly where it stopped. The images of a step
depend on the seed and the step alone.

This is not the loop of recipes (`training/loop.py`): the model is not trained, the images have no labels,
each method updates several groups of weights at different times, and its state is part of the file that is
used.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from steadygaze.data.images import find_images, read_image
from steadygaze.errors import ImageError, InputError, RowsNotWrittenError
from steadygaze.files import FileLock
from steadygaze.loading.load import load_model
from steadygaze.loading.loaded import LoadedModel
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.training.recipe import CountFromZero, Document, PositiveInt
from steadygaze.vit.adapt import adapt
from steadygaze.vit.view import ViT

log = logging.getLogger(__name__)
MEMORY = 1 << 30  # bytes of preprocessed images that are kept in memory
EVALUATED = 64  # images that the result is evaluated on


# -- what a method defines -------------------------------------------------------------------------


class Settings(Document):
    """Everything that the result depends on apart from the model and the images, by the keys of `--set`.

    Attributes:
        seed: Random seed.
        batch: Number of images per step.
    """

    not_compared: ClassVar[frozenset[str]] = frozenset()  # keys that may change when a run is resumed

    seed: CountFromZero = 0
    batch: PositiveInt

    @property
    def first_steps(self) -> int:
        """Steps of a first stage, before those that are requested."""
        return 0

    @property
    def record(self) -> dict[str, Any]:
        """The values that must be the same for a run to be resumed."""
        return self.model_dump(exclude=set(self.not_compared))


class Trainer(ABC):
    """A method in training. `state` and `restore` hold everything that the next step depends on.

    Attributes:
        learned: The weights that are trained and written.
        steps: Number of steps taken.
        identity: What else must be the same for a run to be resumed.
    """

    what: ClassVar[str]  # is trained, for error messages
    stage: ClassVar[str]  # name of the progress bar
    too_early_advice: ClassVar[str]
    diverged_advice: ClassVar[str]
    settings_class: ClassVar[type[Settings]]
    # path -> learned, facts, tensors
    read: ClassVar[Callable[..., tuple[Any, dict[str, Any], dict[str, Tensor]]]]
    write: ClassVar[Callable[..., None]]  # path, learned, facts, tensors

    learned: nn.Module

    def __init__(self, vit: ViT, settings: Any) -> None:
        self.vit, self.settings, self.steps = vit, settings, 0
        self.identity: dict[str, Any] = {}

    @abstractmethod
    def step(self, images: Tensor) -> Any:
        """Take one step on a batch (B, 3, H, W) and report its loss."""

    @abstractmethod
    def evaluate(self, images: Tensor) -> Any:
        """Report what was learned, measured on these images. Changes nothing."""

    @abstractmethod
    def summary(self, report: Any) -> str:
        """Describe what was learned in one sentence."""

    @abstractmethod
    def check_step(self, report: Any) -> str:
        """Why training cannot be continued after this step; empty if it can."""

    @abstractmethod
    def check_result(self, report: Any) -> tuple[str, bool]:
        """What is wrong with the result (empty if nothing is), and whether more steps would mend it."""

    @abstractmethod
    def optimized(self) -> Iterator[tuple[str, Tensor, torch.optim.Optimizer]]:
        """Name and optimizer of every parameter that is trained."""

    @abstractmethod
    def own_state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(facts, tensors) that the next step depends on, besides weights and optimizers."""

    @abstractmethod
    def restore_own(self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over what `own_state` returned."""

    def begin(self, images: Tensor) -> None:  # noqa: B027 - most methods need nothing here
        """Called before the first step with the images that the result is evaluated on."""

    def restarted(self, attempt: int) -> Any:
        """Settings of another attempt after a problem; None if no more are allowed."""
        return None

    def state(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """(facts, tensors) for `restore` and for the method, without the learned weights."""
        facts, tensors = self.own_state()
        for name, parameter, optimizer in self.optimized():
            adam = optimizer.state.get(parameter, {})
            tensors |= {f"adam.{key}.{name}": value for key, value in adam.items()}
        facts = {"steps": self.steps, "settings": self.settings.record, **facts}
        return facts, {key: value.detach().clone() for key, value in tensors.items()}

    def restore(self, learned: nn.Module, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Continue where the trainer was that returned this state."""
        self.steps = int(facts["steps"])
        self.learned.load_state_dict(learned.state_dict())
        self.restore_own(facts, tensors)
        for name, parameter, optimizer in self.optimized():
            if f"adam.step.{name}" in tensors:
                optimizer.state[parameter] = {
                    "step": tensors[f"adam.step.{name}"].clone(),
                    "exp_avg": tensors[f"adam.exp_avg.{name}"].to(parameter).clone(),
                    "exp_avg_sq": tensors[f"adam.exp_avg_sq.{name}"].to(parameter).clone(),
                }


# -- what every run does ---------------------------------------------------------------------------


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
        # images that do not fill a batch are left to the next epoch, which has another order
        steps_per_epoch = max(1, len(self.files) // size)
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


@dataclass(frozen=True)
class ExplainerRequest:
    """What to train.

    Attributes:
        data: Folders of images, searched recursively; labels are not needed.
        options: Values of the method's settings.
        steps: Number of steps in all; None: `epochs` passes over the images.
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


@dataclass(frozen=True)
class ExplainerResult:
    """How training ended.

    Attributes:
        attempt: Number of restarts.
        report: What was learned, measured on some of the images; `summary` describes it.
        problem: What is wrong with it, empty if nothing is.
        too_early: Whether the problem is that it was not trained for long enough.
        unreadable: Why images were not used.
    """

    steps: int
    attempt: int
    report: Any
    summary: str
    problem: str
    too_early: bool
    unreadable: tuple[str, ...] = ()


class ExplainerRun:
    """A checked request: the model is loaded, the images are found, and an earlier state is restored."""

    def __init__(
        self, method: type[Trainer], request: ExplainerRequest, loaded: LoadedModel | None = None
    ) -> None:
        self.method, self.request = method, request
        device = request.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.loaded = loaded or load_model(
            request.model,
            request.checkpoint,
            num_classes=request.num_classes,
            device=device,
            trust_remote_code=request.trust_remote_code,
        )
        self.vit = adapt(self.loaded)
        self.images = ImageCache(find_images(request.data), self.loaded)
        self.like = next(self.vit.model.parameters())  # device and dtype of the images
        self.attempt = self.resumed = 0
        self.problem = ""  # of training that cannot be continued
        self.version: tuple[int, int] | None = None  # of the file that was read
        self.on_progress: OnProgress = ignore_progress
        options = dict(request.options)
        if options.get("target") is not None and "target" in method.settings_class.model_fields:
            options["target"] = self.loaded.class_index(str(options["target"]))
        self.settings = method.settings_class(**options)
        requested = request.steps or request.epochs * max(1, len(self.images.files) // self.settings.batch)
        self.total_steps = self.settings.first_steps + requested
        self.trainer = method(self.vit, self.settings)
        names = "\n".join(file.name for file in self.images.files)
        self.identity = {
            "model": self.loaded.name,
            "weights": self.loaded.weights_hash,
            "images": len(self.images.files),
            "images_hash": hashlib.sha256(names.encode()).hexdigest()[:16],
            **self.trainer.identity,
            **self.settings.record,
        }
        if request.out.exists():
            self._resume()

    def execute(self, on_progress: OnProgress = ignore_progress) -> ExplainerResult:
        """Train to the end, as the only process that writes the file."""
        self.on_progress = on_progress
        with self._locked():
            if self.request.out.exists() and _version(self.request.out) != self.version:
                self._resume()  # another process wrote it since this one read it
            self._report_progress()
            files = self.images.files
            sample = self.images.load(files[:: max(1, len(files) // EVALUATED)][:EVALUATED]).to(self.like)
            while True:
                self._train_steps(sample)
                report = self.trainer.evaluate(sample)
                if self.problem:
                    problem, too_early = self.problem, False
                    break
                problem, too_early = self.trainer.check_result(report)
                if not problem or too_early or self.trainer.restarted(self.attempt) is None:
                    break
                self.problem = problem
            self._save(problem, too_early)
        return ExplainerResult(
            self.trainer.steps,
            self.attempt,
            report,
            self.trainer.summary(report),
            problem,
            too_early,
            tuple(self.images.unreadable.values()),
        )

    def _train_steps(self, sample: Tensor) -> None:
        """Take the steps that are left, with new attempts where allowed. An interrupt saves first."""
        try:
            while self.trainer.steps < self.total_steps or self.problem:
                if self.problem and not self._restart():
                    break
                if not self.trainer.steps:
                    self.trainer.begin(sample)
                with interrupts_deferred():
                    settings = self.trainer.settings
                    batch = self.images.batch(self.trainer.steps, settings.batch, settings.seed)
                    report = self.trainer.step(batch.to(self.like))
                    self.problem = self.trainer.check_step(report)
                self._report_progress(str(report))
                is_due = self.trainer.steps % self.request.save_every == 0
                if is_due and self.trainer.steps < self.total_steps and not self.problem:
                    self._save()
        except KeyboardInterrupt:
            self._save(self.problem)
            raise

    def _restart(self) -> bool:
        """Start again after a problem, if another attempt is allowed."""
        settings = self.trainer.restarted(self.attempt)
        if settings is None:
            return False
        self.attempt += 1
        before = self.trainer.settings.record
        changed = ", ".join(
            f"{key} {value}" for key, value in settings.record.items() if value != before[key]
        )
        log.warning("step %d: %s. Restarting with %s", self.trainer.steps, self.problem, changed)
        self.trainer = self.method(self.vit, settings)
        self.problem, self.resumed = "", 0
        self._report_progress()
        return True

    def _report_progress(self, detail: str = "") -> None:
        done = min(self.trainer.steps, self.total_steps)
        progress = Progress(
            self.method.stage, done, self.total_steps, "steps", min(self.resumed, done), detail
        )
        self.on_progress(progress)

    # -- the output file ---------------------------------------------------------------------------

    def _resume(self) -> None:
        out = self.request.out
        self.version = _version(out)
        learned, facts, tensors = self.method.read(out)
        before, now = facts.get("identity", {}), self.identity
        changed = [
            f"{key} was {before.get(key)}, is now {now[key]}" for key in now if before.get(key) != now[key]
        ]
        if changed:
            raise InputError(
                f"{out} holds {self.method.what} of another training: {'; '.join(changed)}. "
                "Use the same settings to resume it, or another output file."
            )
        self.attempt = int(facts["attempt"])
        # after a restart they are not those of the request
        settings = {**self.settings.model_dump(), **facts["settings"]}
        self.trainer = self.method(self.vit, self.method.settings_class(**settings))
        self.trainer.restore(learned, facts, tensors)
        self.problem = facts["diverged"] if facts.get("stopped") else ""
        self.resumed = self.trainer.steps

    def _save(self, problem: str = "", too_early: bool = False) -> None:
        """Write what was learned, and the state.

        Args:
            stopped: Whether training had to end; otherwise it may be continued.
        """
        facts, tensors = self.trainer.state()
        facts |= {
            "identity": self.identity,
            "attempt": self.attempt,
            "diverged": problem,
            "early": too_early,
            "stopped": bool(self.problem),
        }
        with self._written():
            self.method.write(self.request.out, self.trainer.learned, facts, tensors)

    @contextmanager
    def _written(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RowsNotWrittenError(
                f"{self.request.out} could not be written ({error.strerror}): choose another output file"
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the file, so that no other process trains it."""
        out = self.request.out
        with self._written():
            out.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(out.with_name(f".{out.name}.lock"))
        except InputError as error:
            raise InputError(
                f"{out}: another process is training this file. Wait for it, or choose another output file."
            ) from error
        with lock:
            yield


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C take effect after the block: half a step could not be resumed exactly."""
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


def _version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
