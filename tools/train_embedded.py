"""Train the small ViT that ships inside the package, on CIFAR-10, on a CPU.

    python tools/train_embedded.py --data FOLDER --out src/steadygaze/assets --epochs 28 --threads 1

FOLDER holds train/<class>/*.png and test/<class>/*.png, 32 x 32 pixels. The model is a plain vision
transformer: class token, learned position embedding, pre-norm, GELU. Patch dropout of one half in the first
half of training halves its cost; the last epochs use every patch.

The run can be killed at any time. The same command resumes it from the last checkpoint in --work and, with
one thread, ends with exactly the weights of an uninterrupted run. Every epoch exports the model. Cost: about
an hour on one CPU core. Result: 77.4 % top-1 accuracy on the test images, which were not used to select
anything.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_weight_decay
from torch import Tensor

ARGUMENTS: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 4,
    "num_classes": 10,
    "embed_dim": 128,
    "depth": 6,
    "num_heads": 4,
    "mlp_ratio": 2.0,
    "qkv_bias": True,
    "class_token": True,
    "global_pool": "token",
}
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
PATCH_DROP = 0.5  # patch dropout in the first half of training
CUTMIX = 0.3  # probability per batch
LEARNING_RATE, WEIGHT_DECAY, SEED = 1.5e-3, 0.05, 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with train/<class>/ and test/<class>/"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for embedded.safetensors, .json and .md"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/embedded"), help="folder for cache and checkpoint"
    )
    parser.add_argument("--epochs", type=int, default=28)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--save-every", type=int, default=200, metavar="STEPS", help="steps between checkpoints"
    )
    return parser.parse_args()


def save_atomic(content: object, path: Path) -> None:
    """Write to a temporary file, then rename it: a kill leaves the old file or the new one, never a part."""
    beside = path.with_name(path.name + ".part")
    torch.save(content, beside)
    beside.replace(path)


def load_images(folder: Path, cache: Path) -> tuple[Tensor, Tensor, list[str]]:
    """All images as one uint8 tensor (N, 3, H, W), their labels, and the class names in order."""
    files = sorted(folder.glob("*/*.png"))
    names = [file.relative_to(folder).as_posix() for file in files]
    classes = sorted({file.parent.name for file in files})
    if len(classes) != ARGUMENTS["num_classes"]:
        raise SystemExit(f"{folder}: expected {ARGUMENTS['num_classes']} classes, got {len(classes)}")
    if cache.exists() and (stored := torch.load(cache, weights_only=True))["names"] == names:
        return stored["images"], stored["labels"], classes
    images = torch.empty(len(files), 3, 32, 32, dtype=torch.uint8)
    for index, file in enumerate(files):
        with Image.open(file) as image:
            images[index] = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
    labels = torch.tensor([classes.index(file.parent.name) for file in files])
    save_atomic({"names": names, "images": images, "labels": labels}, cache)
    return images, labels, classes


def normalize(images: Tensor) -> Tensor:
    return (images / 255 - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)


def augment(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Random crop (padding 4), flip, brightness, contrast, and CutMix for some batches; labels become
    shares."""
    count, padded = len(images), F.pad(normalize(images), (4, 4, 4, 4))
    rows, columns = (torch.arange(32) + torch.randint(0, 9, (count, 1)) for _ in range(2))
    columns = torch.where(torch.rand(count, 1) < 0.5, columns, columns.flip(1))
    mixed = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(
        0, 3, 1, 2
    )
    mixed = (mixed * (1 + 0.2 * torch.randn(count, 1, 1, 1)) + 0.2 * torch.randn(count, 1, 1, 1)).contiguous()
    shares = F.one_hot(labels, ARGUMENTS["num_classes"]).float()
    if torch.rand(()) < CUTMIX:
        side = round(32 * math.sqrt(torch.rand(()).item()))
        top, left = torch.randint(0, 33 - side, ()).item(), torch.randint(0, 33 - side, ()).item()
        square = ..., slice(top, top + side), slice(left, left + side)
        mixed[square] = mixed.flip(0)[square]
        kept = 1 - (side / 32) ** 2
        shares = kept * shares + (1 - kept) * shares.flip(0)
    return mixed, shares


def patch_drop(epoch: int, epochs: int) -> float:
    """Patch dropout: constant in the first half, then decreasing to zero at 85 % of training."""
    return PATCH_DROP * min(1.0, max(0.0, (0.85 - epoch / epochs) / 0.35))


def learning_rate(step: int, steps: int) -> float:
    """Factor of the learning rate: linear warm-up over 5 % of the steps, then half a cosine down to zero."""
    warm_up = max(1, steps // 20)
    return min(
        (step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * max(0, step - warm_up) / (steps - warm_up))
    )


def export(out: Path, weights: dict[str, Tensor], classes: list[str], facts: dict[str, Any]) -> None:
    """Write the weights, their description and the model card."""
    out.mkdir(parents=True, exist_ok=True)
    beside = out / "embedded.safetensors.part"
    metadata = {"format": "pt", "dataset": "CIFAR-10", "license": "Apache-2.0", "top1": str(facts["top1"])}
    beside.write_bytes(save(weights, metadata))
    beside.replace(out / "embedded.safetensors")
    description = {
        "architecture": "timm.models.vision_transformer.VisionTransformer",
        "arguments": ARGUMENTS,
        "classes": classes,
        "image_size": 32,
        "interpolation": "bicubic",
        "mean": MEAN,
        "std": STD,
        "training": facts,
    }
    (out / "embedded.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
    card = Path(__file__).with_name("embedded_card.md").read_text(encoding="utf-8")
    (out / "embedded.md").write_text(card.format(**facts), encoding="utf-8")


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    args.work.mkdir(parents=True, exist_ok=True)
    images, labels, classes = load_images(args.data / "train", args.work / "train.pt")
    test_images, test_labels, _ = load_images(args.data / "test", args.work / "test.pt")

    model = VisionTransformer(**ARGUMENTS, patch_drop_rate=PATCH_DROP)
    shipped = VisionTransformer(**ARGUMENTS).eval()  # gets the weights after rounding to float16
    per_epoch = len(images) // args.batch
    steps = args.epochs * per_epoch
    groups = param_groups_weight_decay(model, WEIGHT_DECAY, no_weight_decay_list=model.no_weight_decay())
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, steps))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    settings = {
        "arguments": ARGUMENTS,
        "epochs": args.epochs,
        "batch": args.batch,
        "lr": LEARNING_RATE,
        "seed": SEED,
    }
    checkpoint = args.work / "checkpoint.pt"
    step, losses, seconds = 0, 0.0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["settings"] != settings:
            raise SystemExit(f"{checkpoint} is of a run with other settings; remove it or change --work")
        for name, part in parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["rng"])
        step, losses, seconds = state["step"], state["losses"], state["seconds"]
        print(f"resuming at step {step} of {steps}", flush=True)

    def report(epoch: int) -> None:
        """Evaluate the exported weights (before the last epoch on every tenth test image), export and
        print."""
        weights = {name: value.half() for name, value in model.state_dict().items()}
        shipped.load_state_dict({name: value.float() for name, value in weights.items()})
        every = 1 if epoch == args.epochs else 10
        with torch.no_grad():
            batches = test_images[::every].split(250)
            predictions = torch.cat([shipped(normalize(batch)).argmax(1) for batch in batches])
        top1 = (predictions == test_labels[::every]).double().mean().item()
        minutes = (time.monotonic() - begin) / 60
        facts = {"epochs": args.epochs, "epochs_done": epoch, "batch": args.batch, "threads": args.threads}
        facts |= {"minutes": round(minutes), "test_pictures": len(predictions), "top1": round(top1, 4)}
        facts |= {"parameters": sum(p.numel() for p in model.parameters()), "train_pictures": len(images)}
        export(args.out, weights, classes, facts)
        costs = [1 - patch_drop(other, args.epochs) for other in range(args.epochs)]
        times = f"{minutes:.1f} min, about {minutes * sum(costs[epoch:]) / sum(costs[:epoch]):.0f} left"
        measured = f"loss {losses / per_epoch:.3f}  top-1 {top1:.2%} of {len(predictions)}"
        print(f"epoch {epoch}/{args.epochs}  {measured}  {times}", flush=True)

    begin = time.monotonic() - seconds
    while True:
        epoch, batch_index = divmod(step, per_epoch)
        if batch_index == 0 and step > 0:
            report(epoch)
            losses = 0.0
        if step == steps:
            break
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(1000 * SEED + epoch))
        model.patch_drop.prob = patch_drop(epoch, args.epochs)
        for chosen in order.split(args.batch)[batch_index:per_epoch]:
            batch, shares = augment(images[chosen], labels[chosen])
            loss = F.cross_entropy(model(batch), shares, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            step, losses = step + 1, losses + loss.item()
            if step % args.save_every == 0 or step % per_epoch == 0:
                state = {name: part.state_dict() for name, part in parts.items()}
                state |= {"settings": settings, "rng": torch.get_rng_state(), "step": step, "losses": losses}
                save_atomic(state | {"seconds": time.monotonic() - begin}, checkpoint)


if __name__ == "__main__":
    main()
