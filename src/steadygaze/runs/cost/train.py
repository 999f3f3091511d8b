"""The cost of a training run: its steps, its tests, and the images that they read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import default_collate

from steadygaze.errors import UnsupportedModelError
from steadygaze.progress import OnProgress, Progress, ignore_progress
from steadygaze.runs.cost.counting import PassCounter
from steadygaze.runs.cost.estimate import SHARDS, Estimate, Part, Speed
from steadygaze.runs.cost.timing import Cost, Meter, held, mean_seconds
from steadygaze.training.images import TrainingImages, cache_features
from steadygaze.training.loop import MicroBatch, TrainingRun, evaluate
from steadygaze.training.recipe import Recipe
from steadygaze.training.run_files import STATE, holds_run, load_state
from steadygaze.vit.adapt import adapt
from steadygaze.vit.view import ViT

TESTED = 64  # test images that are timed, at most
ALLOWED = 20.0  # seconds for the steps, and for the test, about
LOG_LINE = 120  # bytes of a line of log.csv, about


def estimate_train(
    recipe: Recipe,
    out: Path,
    *,
    device: str = "auto",
    shards: Sequence[int] = SHARDS,
    on_progress: OnProgress = ignore_progress,
    trust_remote_code: bool = False,
) -> Estimate:
    """What `train` will cost. Prepares the run as `train` does, and writes nothing.

    A shard is a process of `accelerate launch` here; what they send to one another is not counted.
    """
    began = time.perf_counter()
    run = TrainingRun(recipe, out, device, on_progress, trust_remote_code=trust_remote_code)
    startup = time.perf_counter() - began
    try:
        return _Training(run, startup, on_progress).estimate(shards)
    finally:
        run.close()


class _Training:
    """A prepared run, and the step that it continues from."""

    def __init__(self, run: TrainingRun, startup: float, on_progress: OnProgress) -> None:
        self.run, self.startup, self.on_progress = run, startup, on_progress
        resumed = holds_run(run.out, run.recipe.settings) and (run.out / STATE).exists()
        self.first_step = int(load_state(run.out / STATE)["step"]) if resumed else 0
        self.device = run.accelerator.device
        self.meter = Meter(PassCounter(run.model, self._view(), run.built.preprocess.size), self.device)

    def _view(self) -> ViT | None:
        try:
            return adapt(self.run.model)
        except UnsupportedModelError:
            return None

    def estimate(self, shards: Sequence[int]) -> Estimate:
        if self.run.head_name is not None:
            return self._estimate_probe(shards)
        run, sampler = self.run, self.run.sampler
        steps = range(self.first_step + 1, run.total_steps + 1)
        tests = sum(self._tested(step) for step in steps)
        test_images = 0 if run.test_images is None else len(run.test_images)
        names = ["steps", "test"] if tests else ["steps"]
        costs = {}
        for number, name in enumerate(names if steps else []):
            self.on_progress(Progress("dry run", number, len(names), "pieces", detail=name))
            costs[name] = self._step() if name == "steps" else self._test()
        self.on_progress(Progress("dry run", len(names), len(names), "pieces"))
        step, test = costs.get("steps", Cost()), costs.get("test", Cost())
        shown = len(steps) * sampler.step_size
        loading = shown * self._loading() if steps else 0.0
        seconds = Speed(run.recipe.data.workers, self.device).together(shown * step.seconds, loading)
        test_seconds = tests * test_images * test.seconds
        parts = [
            Part("steps", shown * step.passes, shown * step.seconds),
            Part("loading training images", 0.0, loading),
            Part("tests, with loading", tests * test_images * test.passes, test_seconds),
        ]
        return self._result(parts, seconds + test_seconds, max(step.memory, test.memory), shards)

    def _estimate_probe(self, shards: Sequence[int]) -> Estimate:
        """Of a linear probe: the features of all images, once. Its steps take next to no time."""
        run = self.run
        left = self.first_step < run.total_steps
        cost = self._features() if left else Cost()
        sets = {"features of training images": run.images, "features of test images": run.test_images}
        counts = {name: len(images) for name, images in sets.items() if images is not None}
        parts = [Part(name, n * cost.passes, n * cost.seconds) for name, n in counts.items()]
        return self._result(parts, sum(part.seconds for part in parts), cost.memory, shards)

    def _result(
        self, parts: Sequence[Part], seconds: float, memory: float, shards: Sequence[int]
    ) -> Estimate:
        run, every = self.run, self.run.sampler.steps_per_epoch
        left = self.first_step < run.total_steps
        is_logged = [
            s for s in range(1, run.total_steps + 1) if not s % run.recipe.log_every or not s % every
        ]
        lines_left = sum(s > self.first_step for s in is_logged)
        return Estimate(
            "train",
            run.recipe.model.name,
            str(self.device),
            len(run.images),
            len(run.images) if left else 0,
            len(is_logged),
            lines_left,
            sum(part.passes for part in parts),
            seconds,
            self.startup,
            self._bytes() + lines_left * LOG_LINE if left else 0.0,
            held(self.device) + memory,
            {number: self.startup + seconds / number for number in shards},
            parts if left else (),
            run.notes,
        )

    def _tested(self, step: int) -> bool:
        epoch, rest = divmod(step, self.run.sampler.steps_per_epoch)
        if rest or self.run.test_images is None:
            return False
        every = self.run.recipe.test_every
        return step == self.run.total_steps or (every > 0 and epoch % every == 0)

    def _micro_batches(self, step: int, images: int) -> list[MicroBatch]:
        """The first images of each micro-batch of a step, as the loader gives them."""
        parts: list[Any] = []
        for keys in self.run.sampler.micro_batches(step):
            parts.append(default_collate([self.run.images[key] for key in keys[:images]]))
        return parts

    def _step(self) -> Cost:
        """Cost of an image of a step. Steps with fewer images stand for those that would take too long."""
        run, micro_batch = self.run, self.run.sampler.micro_batch_size
        few = min(2, micro_batch)  # mixup needs pairs
        run.parallel_objective.train()

        def sample(step: int, images: int) -> Any:
            batches = self._micro_batches(step, images)
            return self.meter.sample(lambda: run.train_step(batches))

        sample(0, few)
        one = sample(0, few)
        images = micro_batch
        if one.seconds * micro_batch / few > ALLOWED:
            images = max(few, int(ALLOWED * few / one.seconds) // 2 * 2)
        timed = [sample(step, images) for step in (0, 1 % run.total_steps)]
        shown = images * run.recipe.accumulate
        return Cost(
            0.0,
            timed[-1].passes / shown,
            sum(one.seconds for one in timed) / len(timed) / shown,
            max(one.memory for one in timed) * micro_batch / images,
        )

    def _loading(self) -> float:
        """Seconds to read and augment an image."""
        keys = self.run.sampler.micro_batches(0)[0]
        some = [keys[0], keys[len(keys) // 2], keys[-1]]
        return mean_seconds([partial(self.run.images.__getitem__, key) for key in some])

    def _test(self) -> Cost:
        """Cost of a test image, reading included."""
        run = self.run
        assert run.test_images is not None
        batch_size = max(1, run.sampler.micro_batch_size)

        def inputs(number: int, images: int) -> TrainingImages:
            assert isinstance(run.test_images, TrainingImages)
            return run.test_images.first(images)

        def test(images: TrainingImages) -> None:
            seed = (run.recipe.seed, 4, 0)
            evaluate(run.kept_model, run.objective, images, run.accelerator, batch_size, seed)

        return self.meter.cost(inputs, test, min(TESTED, len(run.test_images)), batches=1)

    def _features(self) -> Cost:
        """Cost of the features of an image, reading included."""
        run, head = self.run, self.run.trained_part(self.run.model)
        assert isinstance(head, nn.Linear)
        batch_size = max(1, run.sampler.micro_batch_size)

        def inputs(number: int, images: int) -> TrainingImages:
            assert isinstance(run.images, TrainingImages)
            return run.images.first(images)

        def compute(images: TrainingImages) -> None:
            cache_features(run.model, head, images, run.accelerator, batch_size=batch_size)

        return self.meter.cost(inputs, compute, min(TESTED, len(run.images)), batches=1)

    def _bytes(self) -> float:
        """The checkpoint, and the weights that are kept."""
        run = self.run
        state = [run.model.state_dict(), run.optimizer.state_dict(), run.kept_model.state_dict()]
        if run.average is not None:
            state.append(run.average.module.state_dict())
        return float(sum(map(_tensor_bytes, state)))


def _tensor_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(_tensor_bytes, value.values()))
    return sum(map(_tensor_bytes, value)) if isinstance(value, (list, tuple)) else 0
