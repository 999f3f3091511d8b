"""Training of a DiffMask file for a model and folders of images, resumed exactly where it stopped.

The file is replaced atomically and is a usable mask from the first save on. The images of a step depend on
the seed and the step alone. Training that diverges, as the paper warns it may, is detected and restarted if
`restarts` allows it.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygaze.data.images import find_images, read_image
from steadygaze.errors import BadCheckpoint, BadImage, BadInput, RowsNotWritten
from steadygaze.files import FileLock
from steadygaze.loading.load import load_model
from steadygaze.loading.loaded import LoadedModel
from steadygaze.methods.diffmask import DiffMask, read_file, write
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.training.diffmask.settings import Settings
from steadygaze.training.diffmask.trainer import (
    ALL_OFF,
    ALL_ON,
    DivergenceMonitor,
    StepReport,
    Trainer,
    hidden_widths,
)
from steadygaze.vit import adapt

log = logging.getLogger(__name__)
MEMORY = 1 << 30  # bytes of preprocessed images that are kept in memory
EVALUATED = 64  # images that the mask is evaluated on


@dataclass(frozen=True)
class DiffMaskRequest:
    """What to train.

    data: folders of images, at any depth; labels are not needed
    options: values of `Settings`, on top of the presets
    target: class name or index of a mask for one class
    steps: in all; None: `epochs` passes over the images
    warm_start: a mask of the same widths to start from
    restarts: number of new attempts after a divergence; restart_with: see `Settings.restarted`
    """

    model: str
    data: list[Path]
    out: Path
    checkpoint: Path | None = None
    presets: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    target: str | None = None
    steps: int | None = None
    epochs: int = 5
    warm_start: Path | None = None
    restarts: int = 0
    restart_with: str = "seed"
    save_every: int = 200
    num_classes: int | None = None
    device: str = "auto"
    trust_remote_code: bool = False


@dataclass(frozen=True)
class DiffMaskResult:
    """How training ended.

    report: the effect of all gates together on some of the images; initial: the same before the first step,
        None if the file does not say
    problem: what is wrong with the masks, empty if nothing is; too_early: because no gate has closed yet
    """

    steps: int
    attempt: int
    report: StepReport
    problem: str
    too_early: bool
    initial: StepReport | None
    unreadable: tuple[str, ...] = ()


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
            raise BadImage(
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
        except BadImage as error:
            self.unreadable[file] = str(error)
            return None
        if self._keep:
            self._images[file] = image
        return image


class DiffMaskRun:
    """A checked request: the model is loaded, the images are found, and an earlier state is restored if there
    is one."""

    def __init__(self, request: DiffMaskRequest, loaded: LoadedModel | None = None) -> None:
        self.request = request
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
        target = None if request.target is None else self.loaded.class_index(request.target)
        self.settings = Settings.of(*request.presets, **request.options, target=target)
        self.images = ImageCache(find_images(request.data), self.loaded)
        files = self.images.files
        self.total_steps = request.steps or request.epochs * max(1, len(files) // self.settings.batch)
        self.like = next(self.vit.model.parameters())  # device and dtype of the images
        readable = self.images.load(files[:8])[:1]
        self.widths = hidden_widths(self.vit, readable.to(self.like))
        self.warm_start = None if request.warm_start is None else self._read_warm_start(request.warm_start)
        self.identity = self._identity()
        self.attempt = self.resumed = 0
        self.initial: StepReport | None = None
        self.problem = ""  # of training that diverged
        self._start(self.settings)
        self.version: tuple[int, int] | None = None  # of the file that was read
        if request.out.exists():
            self._resume()

    def _start(self, settings: Settings) -> None:
        self.trainer = Trainer(self.vit, settings, self.widths, self.warm_start)
        self.monitor = DivergenceMonitor(settings.grace_steps)
        self.problem = ""

    def _read_warm_start(self, path: Path) -> DiffMask:
        mask = read_file(path)[0]
        if mask.shape.widths != self.widths:
            raise BadCheckpoint(
                f"warm start: expected a mask for {len(self.widths)} states of widths "
                f"{_widths_text(self.widths)}, as this model has; {path} has {len(mask.shape.widths)} "
                f"of widths {_widths_text(mask.shape.widths)}"
            )
        return mask

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to be resumed, by the names that its file uses."""
        names = "\n".join(file.name for file in self.images.files)
        warm_start = None
        if self.warm_start is not None:
            content = b"".join(_bytes(parameter) for parameter in self.warm_start.parameters())
            warm_start = hashlib.sha256(content).hexdigest()[:16]
        return {
            "model": self.loaded.name,
            "weights": self.loaded.weights_hash,
            "pictures": len(self.images.files),
            "pictures_hash": hashlib.sha256(names.encode()).hexdigest()[:16],
            "warm_start": warm_start,
            "asked": asdict(self.settings),
        }

    def _resume(self) -> None:
        out = self.request.out
        self.version = _version(out)
        mask, facts, tensors = read_file(out)
        identity = facts.get("identity", {})
        before = {**identity, **identity.get("asked", {})}
        now = {**self.identity, **self.identity["asked"]}
        # options that the version which wrote the file did not have: the file decides (`Settings.read`)
        ignored = {"asked"} | {"begin", "definition"} - before.keys()
        changed = [key for key in now if key not in ignored and before.get(key) != now[key]]
        if changed:
            listing = "; ".join(f"{key} was {before.get(key)}, is now {now[key]}" for key in changed)
            raise BadInput(
                f"{out} holds a mask of another training: {listing}. "
                "Use the same settings to resume it, or another output file."
            )
        self.attempt = int(facts["attempt"])
        self._start(Settings.read(facts["settings"]))
        self.trainer.restore(mask, facts, tensors)
        self.monitor.kind, self.monitor.count = facts["watch"]
        self.problem = facts["diverged"] if facts.get("stopped") else ""
        self.initial = StepReport(*facts["began"]) if facts.get("began") else None
        self.resumed = self.trainer.steps

    def save(self, problem: str = "", too_early: bool = False) -> None:
        """Write mask and state. `stopped` is true if training diverged on the way; otherwise it may be
        continued."""
        facts, tensors = self.trainer.state()
        facts |= {
            "identity": self.identity,
            "attempt": self.attempt,
            "watch": [self.monitor.kind, self.monitor.count],
            "began": list(astuple(self.initial)) if self.initial else None,
            "diverged": problem,
            "early": too_early,
            "stopped": bool(self.problem),
        }
        try:
            write(self.request.out, self.trainer.mask, facts, tensors)
        except OSError as error:
            raise RowsNotWritten(
                f"{self.request.out} could not be written ({error.strerror}): choose another output file"
            ) from error

    def execute(self, on_progress: OnProgress = ignore_progress) -> DiffMaskResult:
        """Train to the end. Masks that end all on or all off are restarted too, if that is allowed."""
        self.on_progress = on_progress
        with self._locked():
            if self.request.out.exists() and _version(self.request.out) != self.version:
                self._resume()  # another process wrote it since this one read it
            return self._execute()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only process that trains this file."""
        out = self.request.out
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RowsNotWritten(
                f"{out} could not be written ({error.strerror}): choose another output file"
            ) from error
        try:
            lock = FileLock(out.with_name(f".{out.name}.lock"))
        except BadInput as error:
            raise BadInput(
                f"{out}: another process is training this file. Wait for it, or choose another output file."
            ) from error
        with lock:
            yield

    def _execute(self) -> DiffMaskResult:
        self._report()
        files = self.images.files
        sample = self.images.load(files[:: max(1, len(files) // EVALUATED)][:EVALUATED]).to(self.like)
        while True:
            self._train(sample)
            report = self.trainer.evaluate(sample)
            state = "off" if report.l0 < ALL_OFF else "on" if report.l0 > ALL_ON else ""
            opening = self.trainer.settings.begin == "open" and self.trainer.steps <= self.monitor.grace
            too_early = not self.problem and state == "on" and opening
            at_end = f"the masks are {'still ' if too_early else ''}all {state}" if state else ""
            problem = self.problem or at_end
            if self.problem or not problem or too_early or self.attempt >= self.request.restarts:
                break
            self.problem = problem
        self.save(problem, too_early)
        unreadable = tuple(self.images.unreadable.values())
        return DiffMaskResult(
            self.trainer.steps, self.attempt, report, problem, too_early, self.initial, unreadable
        )

    def _train(self, sample: Tensor) -> None:
        """The steps that are left, with new attempts after a divergence. An interrupt saves first."""
        try:
            while self.trainer.steps < self.total_steps or self.problem:
                if self.problem and not self._restart():
                    break
                if not self.trainer.steps:
                    self.initial = self.trainer.evaluate(sample)
                with interrupts_deferred():
                    settings = self.trainer.settings
                    batch = self.images.batch(self.trainer.steps, settings.batch, settings.seed)
                    report = self.trainer.step(batch.to(self.like))
                    self.problem = self.monitor(report, self.trainer.steps)
                self._report(str(report))
                is_due = self.trainer.steps % self.request.save_every == 0
                if is_due and self.trainer.steps < self.total_steps and not self.problem:
                    self.save()
        except KeyboardInterrupt:
            self.save(self.problem)
            raise

    def _restart(self) -> bool:
        """Start again after a divergence, if another attempt is allowed."""
        if self.attempt >= self.request.restarts:
            return False
        self.attempt += 1
        settings = self.trainer.settings.restarted(self.request.restart_with)
        log.warning(
            "step %d: %s. Restarting with seed %d, stretch %g",
            self.trainer.steps,
            self.problem,
            settings.seed,
            settings.stretch,
        )
        self._start(settings)
        self.resumed = 0
        self._report()
        return True

    def _report(self, detail: str = "") -> None:
        done = min(self.trainer.steps, self.total_steps)
        resumed = min(self.resumed, done)
        self.on_progress(Progress("train gates", done, self.total_steps, "steps", resumed, detail))


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


def _version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _widths_text(widths: tuple[int, ...]) -> str:
    return str(widths[0]) if len(set(widths)) == 1 else ", ".join(map(str, widths))


def _bytes(parameter: Tensor) -> bytes:
    return parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
