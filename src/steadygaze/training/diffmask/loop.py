"""`steadygaze diffmask train`: a mask for a model and a folder of pictures, in one file that goes on exactly where it stopped.

The file is whole at every moment (written beside, renamed) and a usable mask from the first save on. The pictures of step s depend on the
seed and s alone. Training that diverges, as the paper warns it may, is seen (`Watch`), said, and begun anew if `restarts` allows it.
"""

import hashlib
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steadygaze.data.images import find_images, read_image
from steadygaze.errors import BadCheckpoint, BadImage, BadInput, RowsNotWritten
from steadygaze.loading.load import Loaded, load_model
from steadygaze.methods.diffmask import DiffMask, read_file, write
from steadygaze.training.diffmask.objective import (
    MINIMUM,
    Report,
    Settings,
    Trainer,
    Watch,
    restarted,
    settings_from,
    widths_of,
)
from steadygaze.vit import adapt

KEPT = 1 << 30  # bytes of preprocessed pictures that stay in memory
JUDGED = 64  # pictures that the finished mask is held against
Told = Callable[[int, int], None]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What the user asked for; `chosen` are values of `Settings` on top of the presets."""

    model: str
    data: list[Path]
    out: Path
    checkpoint: Path | None = None
    presets: tuple[str, ...] = ()
    chosen: dict[str, Any] = field(default_factory=dict)
    target: str | None = None
    steps: int | None = None  # None: `epochs` times through the pictures
    epochs: int = 5
    warm_start: Path | None = None
    restarts: int = 0
    restart_with: str = "seed"
    save_every: int = 200
    num_classes: int | None = None
    device: str = "auto"


@dataclass(frozen=True)
class Outcome:
    """How it ended: what all gates together do to some of the pictures, and what is wrong with the masks, if anything."""

    steps: int
    attempt: int
    found: Report
    wrong: str
    early: bool  # wrong, because no gate has closed yet
    began: Report | None  # the same of the gates before the first step; None: the file does not say
    unreadable: tuple[str, ...] = ()


class Album:
    """Preprocessed pictures in an order that depends on the seed alone; kept in memory if they fit."""

    def __init__(self, files: list[Path], loaded: Loaded) -> None:
        self.files, self.loaded = files, loaded
        self.unreadable: dict[Path, str] = {}
        self._kept: dict[Path, Tensor] = {}
        self._keep = len(files) * 12 * loaded.size[0] * loaded.size[1] <= KEPT

    def batch(self, step: int, size: int, seed: int) -> Tensor:
        """The pictures of this step, (b, 3, H, W); those that do not decode are left out, and remembered."""
        each = max(1, len(self.files) // size)  # a rest that fills no batch waits for the next order
        epoch, place = divmod(step, each)
        order = torch.randperm(
            len(self.files), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        )
        return self.take([self.files[int(i)] for i in order[place * size : (place + 1) * size]])

    def take(self, files: list[Path]) -> Tensor:
        images = [image for file in files if (image := self._image(file)) is not None]
        if not images:
            raise BadImage(
                f"none of {len(files)} pictures could be read, the first because: {self.unreadable[files[0]]}"
            )
        return torch.stack(images)

    def _image(self, file: Path) -> Tensor | None:
        if file in self.unreadable:
            return None
        if file not in self._kept:
            try:
                image = self.loaded.preprocess(read_image(file))
            except BadImage as error:
                self.unreadable[file] = str(error)
                return None
            if not self._keep:
                return image
            self._kept[file] = image
        return self._kept[file]


class Run:
    """A request, checked: the model is loaded, the pictures are found, and an earlier state, if there is one, is taken up."""

    def __init__(self, request: Request, loaded: Loaded | None = None) -> None:
        self.request = request
        device = (
            ("cuda" if torch.cuda.is_available() else "cpu") if request.device == "auto" else request.device
        )
        self.loaded = loaded or load_model(
            request.model, request.checkpoint, num_classes=request.num_classes, device=device
        )
        self.vit = adapt(self.loaded.model)
        target = None if request.target is None else self.loaded.class_index(request.target)
        self.asked = Settings.of(*request.presets, **request.chosen, target=target)
        self.album = Album(find_images(request.data), self.loaded)
        self.steps = request.steps or request.epochs * max(1, len(self.album.files) // self.asked.batch)
        self.device = next(self.vit.model.parameters())
        first = self.album.take(self.album.files[:1] if len(self.album.files) == 1 else self.album.files[:8])[
            :1
        ]
        self.widths = widths_of(self.vit, first.to(self.device))
        self.warm = None if request.warm_start is None else self._warm(request.warm_start)
        self.identity = self._identity()
        self.attempt = 0
        self.began: Report | None = None
        self.trainer, self.watch, self.wrong = self._begun(self.asked)
        if request.out.exists():
            self._resume()

    def _begun(self, settings: Settings) -> tuple[Trainer, Watch, str]:
        return Trainer(self.vit, settings, self.widths, self.warm), Watch(grace(settings)), ""

    def _warm(self, path: Path) -> DiffMask:
        mask = read_file(path)[0]
        if mask.shape.widths != self.widths:
            raise BadCheckpoint(
                f"--warm-start: expected a mask for {len(self.widths)} states of widths {_short(self.widths)}, as this model has; "
                f"{path} has {len(mask.shape.widths)} of widths {_short(mask.shape.widths)}"
            )
        return mask

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        names = "\n".join(str(file.name) for file in self.album.files)
        warm = (
            None
            if self.warm is None
            else hashlib.sha256(b"".join(_bytes(p) for p in self.warm.parameters())).hexdigest()[:16]
        )
        facts = {
            "pictures": len(self.album.files),
            "pictures_hash": hashlib.sha256(names.encode()).hexdigest()[:16],
            "warm_start": warm,
        }
        return {
            "model": self.loaded.name,
            "weights": self.loaded.weights_hash,
            **facts,
            "asked": asdict(self.asked),
        }

    def _resume(self) -> None:
        out = self.request.out
        mask, facts, tensors = read_file(out)
        before = facts.get("identity", {})
        flat = {**before, **before.get("asked", {})}, {**self.identity, **self.identity["asked"]}
        later = {"begin"} - set(
            flat[0]
        )  # an option that the version which began the run did not have; it is of the first step alone
        changed = [
            key for key in flat[1] if key != "asked" and key not in later and flat[0].get(key) != flat[1][key]
        ]
        if changed:
            told = "; ".join(f"{key} was {flat[0].get(key)}, is now {flat[1][key]}" for key in changed)
            raise BadInput(
                f"{out} holds a mask of another training: {told}. Give the same to go on with it, or another --out."
            )
        self.attempt = int(facts["attempt"])
        self.trainer, self.watch, _ = self._begun(settings_from(facts["settings"]))
        self.trainer.restore(mask, facts, tensors)
        self.watch.kind, self.watch.count = facts["watch"]
        self.wrong = facts["diverged"] if facts.get("stopped") else ""
        self.began = Report(*facts["began"]) if facts.get("began") else None

    def save(self, wrong: str = "", early: bool = False) -> None:
        """Write mask and state."""
        facts, tensors = self.trainer.state()
        facts |= {
            "identity": self.identity,
            "attempt": self.attempt,
            "watch": [self.watch.kind, self.watch.count],
        }
        facts["began"] = list(astuple(self.began)) if self.began else None
        facts |= {"diverged": wrong, "early": early}
        facts["stopped"] = bool(self.wrong)  # it diverged on the way; at the end it may still go on
        try:
            write(self.request.out, self.trainer.mask, facts, tensors)
        except OSError as error:
            raise RowsNotWritten(
                f"{self.request.out} could not be written ({error.strerror}): choose another --out"
            ) from error

    def go(self, told: Told = lambda finished, computed: None, say: Say = lambda text: None) -> Outcome:
        """Train to the end; gives how it ended. Masks that are all on or all off at the end begin anew, too, if that is allowed."""
        told(min(self.trainer.steps, self.steps), 0)
        judged = self.album.take(self.album.files[:: max(1, len(self.album.files) // JUDGED)][:JUDGED]).to(
            self.device
        )
        while True:
            self._train(told, say, judged)
            found = self.trainer.judge(judged)
            state = "off" if found.l0 < MINIMUM[0] else "on" if found.l0 > MINIMUM[1] else ""
            early = (
                not self.wrong
                and state == "on"
                and self.trainer.settings.begin == "open"
                and self.trainer.steps <= self.watch.grace
            )
            wrong = self.wrong or (f"the masks are {'still ' * early}all {state}" if state else "")
            if self.wrong or not wrong or early or self.attempt >= self.request.restarts:
                break
            self.wrong = wrong
        self.save(wrong, early)
        return Outcome(
            self.trainer.steps,
            self.attempt,
            found,
            wrong,
            early,
            self.began,
            tuple(self.album.unreadable.values()),
        )

    def _train(self, told: Told, say: Say, judged: Tensor) -> None:
        """The steps that are left, and new tries after a divergence. Stopped by hand, it saves first."""
        try:
            while self.trainer.steps < self.steps or self.wrong:
                if self.wrong and not self._another(told, say):
                    break
                if not self.trainer.steps:
                    self.began = self.trainer.judge(judged)
                with unbroken():
                    report = self._step()
                    self.wrong = self.watch(report, self.trainer.steps)
                told(1, 1)
                if (
                    self.trainer.steps % self.request.save_every == 0
                    and self.trainer.steps < self.steps
                    and not self.wrong
                ):
                    self.save()
                    say(f"step {self.trainer.steps}: {_words(report)}")
        except KeyboardInterrupt:
            self.save(self.wrong)
            raise

    def _step(self) -> Report:
        settings = self.trainer.settings
        return self.trainer.step(
            self.album.batch(self.trainer.steps, settings.batch, settings.seed).to(self.device)
        )

    def _another(self, told: Told, say: Say) -> bool:
        """Begin anew after a divergence, if the user allows one more."""
        done = self.trainer.steps
        if self.attempt >= self.request.restarts:
            return False
        self.attempt += 1
        settings = restarted(self.trainer.settings, self.request.restart_with)
        say(
            f"step {done}: {self.wrong}. Beginning anew with seed {settings.seed}, stretch {settings.stretch:g}"
        )
        self.trainer, self.watch, self.wrong = self._begun(settings)
        told(-done, 0)
        return True


def grace(settings: Settings) -> int:
    """Steps after which masks that are all on have had time enough to close: Adam moves a gate by about its rate a step."""
    slow = 0.4 / max(settings.gate_rate, 1e-9) if settings.begin == "open" else 0.0
    return round(max(2 * settings.warmup + slow, 1000))


@contextmanager
def unbroken() -> Iterator[None]:
    """Ctrl-C waits until this is done: half of a step, with numbers drawn and nothing moved, could not be gone on from exactly."""
    if threading.current_thread() is not threading.main_thread():  # interrupts go to the main thread
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _words(report: Report) -> str:
    answers = f"same answer {100 * report.accuracy:.0f} %"
    return f"gates 0..{report.layer}: KL {report.kl:.3f}, {100 * report.l0:.0f} % kept, {answers}, λ {report.dual:.1f}"


def _short(widths: tuple[int, ...]) -> str:
    return str(widths[0]) if len(set(widths)) == 1 else ", ".join(map(str, widths))


def _bytes(p: Tensor) -> bytes:
    return p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
