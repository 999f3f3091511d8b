"""Cost and faithfulness of DiffMask: python -m benchmarks.diffmask speed | counting [--out FOLDER --steps N]

speed      cost of a training step relative to plain forward and backward passes of the same model on the same
           batch (at most 2.5)
counting   the paper's counting-patches task: a ViT trained to 100 %, DiffMask trained on it, compared with
           every white-box method. Prints the table of docs/evidence/diffmask.md and writes counting.png;
           model and mask are kept in --out and reused
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn

import steadygaze as sg
from steadygaze.faithfulness.inputs import Batch
from steadygaze.faithfulness.truth import Task, counting, score, train
from steadygaze.methods.diffmask import read_file, write
from steadygaze.methods.registry import unavailable
from steadygaze.models.layers import small_vit
from steadygaze.results.attribution import Attribution
from steadygaze.results.drawing import Row, tile, to_pil_image
from steadygaze.training.diffmask import Settings, Trainer

SETTINGS = Settings(
    gate_rate=1e-3, baseline_rate=1e-2, warmup=50, batch=32, dual_start=5.0, dual_rate=0.1
)  # a small model learns faster
WHITE = ("attention", "gradient", "cam", "propagation", "decomposition", "baseline")
SHOWN = ("gaze", "gae", "rollout", "gradcam", "decompx", "attnlrp", "integrated_gradients")
TESTED = 300


def speed(rounds: int) -> None:
    """The price of one training step, in plain forward and backward passes."""
    print(
        "| model | batch | forward and backward, ms of CPU | DiffMask step, ms of CPU | ratio |\n"
        "| --- | ---: | ---: | ---: | ---: |"
    )
    cases = {
        "embedded (32x32, d 128, 6 blocks)": (sg.load_model("embedded").model, 16, 32),
        "DeiT-Tiny (224x224, d 192, 12 blocks), random weights": (_deit(), 2, 224),
    }
    for name, (model, batch, side) in cases.items():
        images = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0))
        labels, vit = torch.zeros(batch, dtype=torch.long), sg.adapt(model)
        trainer = Trainer(vit, Settings())

        def plain(
            model: nn.Module = model, images: torch.Tensor = images, labels: torch.Tensor = labels
        ) -> None:
            F.cross_entropy(model(images), labels).backward()
            model.zero_grad()

        once, step = [], []
        for _ in range(rounds + 1):  # the first warms up
            once.append(_cpu(plain))
            step.append(_cpu(lambda trainer=trainer, images=images: trainer.step(images)))
        part = statistics.median(b / a for a, b in zip(once[1:], step[1:], strict=True))
        both = (1000 * statistics.median(times[1:]) for times in (once, step))
        print(f"| {name} | {batch} | {next(both):.0f} | {next(both):.0f} | {part:.2f} |", flush=True)


def _cpu(run: Callable[[], Any]) -> float:
    """Seconds of this one thread, whatever else the machine does."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def _deit() -> nn.Module:
    import timm

    return timm.create_model("deit_tiny_patch16_224").eval()


def counted(out: Path, steps: int, seed: int) -> None:
    """The table and the image of the counting task."""
    task = counting()
    model, accuracy = _model(task, out / "counting_vit.safetensors", seed)
    file = out / "counting_mask.safetensors"
    trained = _mask(task, model, file, steps, seed)
    data = task.draw(TESTED, torch.Generator().manual_seed(seed + 99))
    assert data.masks is not None
    vit = sg.adapt(model)
    names = [
        m.name for m in sg.list_methods() if m.family in WHITE and not unavailable(sg.method(m.name), vit)
    ]
    methods = [
        sg.method("diffmask", file=str(file)),
        sg.method("diffmask", file=str(file), read="probability"),
        *map(sg.method, names),
    ]
    maps = {
        m.name.replace(f"file={file}", "").rstrip(":,"): sg.explain(
            vit, data.images, target=data.labels, method=m
        )
        for m in methods
    }
    maps = {name.replace(":,", ":"): att for name, att in maps.items()}
    values, side = score(task, torch.stack([att.scores for att in maps.values()]), data.masks)
    means = {metric: found.value.nanmean(1).tolist() for metric, found in values.items()}
    meant = {"marked": "the red cells", "others": "all other cells"}[side]
    print(
        f"ViT: {100 * accuracy:.1f} % of 1000 held-out images; ground truth: {meant}; DiffMask: {trained}\n"
    )
    print("| method | AUROC | top-n correct, % | faithful? |\n| --- | ---: | ---: | --- |")
    lines = sorted(
        zip(maps, means["truth_auroc"], means["truth_precision"], strict=True), key=lambda line: -line[1]
    )
    for name, area, top in lines:
        faithful = "yes" if area > 0.95 else "partly" if area > 0.75 else "no"
        print(f"| {name} | {area:.3f} | {top:.1f} | {faithful} |")
    _figure(data, maps, out / "counting.png")


def _model(task: Task, file: Path, seed: int) -> tuple[nn.Module, float]:
    from safetensors.torch import load_file, save_file

    if file.exists():
        model = small_vit(task.size, task.cell, task.classes, seed=seed)
        model.load_state_dict(load_file(file))
        unseen = task.draw(1000, torch.Generator().manual_seed(seed + 1_000_000_007))
        with torch.no_grad():
            return model.eval(), float(
                (model.eval()(unseen.images).argmax(1) == unseen.labels).double().mean()
            )
    model, accuracy = train(task, seed=seed, target_accuracy=1.0)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, file)
    return model, accuracy


def _mask(task: Task, model: nn.Module, file: Path, steps: int, seed: int) -> str:
    """Train the mask, or take it up where it stands."""
    vit, generator = sg.adapt(model), torch.Generator()
    trainer = Trainer(vit, SETTINGS)
    if file.exists():
        trainer.restore(*read_file(file))
    began = time.process_time()
    while trainer.steps < steps:
        generator.manual_seed(seed * 1_000_003 + trainer.steps + 1)
        report = trainer.step(task.draw(SETTINGS.batch, generator).images)
        if trainer.steps % 50 == 0 or trainer.steps == steps:
            write(file, trainer.learned, *trainer.state())
            print(f"step {trainer.steps}: {report} {time.process_time() - began:.0f} s of CPU", flush=True)
    found = trainer.evaluate(task.draw(256, generator.manual_seed(seed + 7)).images)
    kept = f"{trainer.steps} steps, keeps {100 * found.l0:.1f} % of the patches"
    return f"{kept}, KL {found.kl:.3f}, same answer {100 * found.accuracy:.1f} %"


def _figure(data: Batch, maps: dict[str, Attribution], file: Path) -> None:
    """One image a row, one method a column, patches with hard edges; DiffMask interpolated, too."""
    rows = []
    for n in (1, 2, 4, 6, 8):
        i = int((data.labels == n).nonzero()[0])
        image = to_pil_image((data.images[i] * 0.5 + 0.5).clamp(0, 1)).resize(
            (240, 240), Image.Resampling.NEAREST
        )
        black = Image.new("RGB", image.size)
        drawn = [
            maps[name].overlay(black, i, mode="nearest", percentile=100, opacity=1.0)
            for name in ("diffmask", *SHOWN)
        ]
        drawn.insert(1, maps["diffmask"].overlay(black, i, mode="bilinear", percentile=100, opacity=1.0))
        rows.append(Row([image, *drawn], f"{n} red"))
    tile(rows, ["image", "diffmask", "interpolated", *SHOWN], cell=120, legend="positive").save(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("speed", "counting"))
    parser.add_argument("--out", type=Path, default=Path("diffmask-counting"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    if chosen.what == "speed":
        return speed(chosen.rounds)
    chosen.out.mkdir(parents=True, exist_ok=True)
    return counted(chosen.out, chosen.steps, chosen.seed)


if __name__ == "__main__":
    main()
