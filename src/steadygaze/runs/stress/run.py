"""`stress`: how does the model hold up? Corruptions, sequences, shifts, attacks, occlusion, and what attention does
meanwhile; in memory, or into a folder of rows that can be gone on with."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from steadygaze.data.confusion import IGNORED
from steadygaze.errors import BadInput, UnsupportedModel
from steadygaze.loading.checkpoint import weights_hash
from steadygaze.loading.load import Loaded
from steadygaze.method_registry import DEFAULT
from steadygaze.robustness.attacks import pixels_of
from steadygaze.runs.asked import fingerprint, outputs
from steadygaze.runs.levels import fits
from steadygaze.runs.loop import Told
from steadygaze.runs.rows import Row, Rows
from steadygaze.runs.store import Done, Store, prepare
from steadygaze.runs.stress_data import Maker, Picture
from steadygaze.runs.stress_loop import Batch, carry_out
from steadygaze.runs.stress_measure import Judge
from steadygaze.runs.stress_request import (
    Request,
    check_counts,
    prepare_stress,
    settings_of,
    square_side,
    stress_run,
    view,
)
from steadygaze.runs.stress_segmentation import segment_outputs, segmentation_plan
from steadygaze.runs.stress_suite import Options, Suite, make_plan, parse_suite
from steadygaze.runs.verify import IMAGENET, about
from steadygaze.vit import ViT

Data = Iterable[tuple[Tensor, Tensor]]


def stress(
    model: nn.Module | ViT | Loaded,
    data: Data | str | Path | None,
    suite: str | Sequence[str] = ("corruptions",),
    *,
    corruptions: str | Sequence[str] | None = None,
    severities: str | int | Sequence[int] | None = None,
    epsilons: str | float | Sequence[float] | None = None,
    pgd_steps: int = 10,
    salient: str = DEFAULT,
    limit: int | None = None,
    seed: int = 0,
    batch: int = 16,
    bank: int | None = None,
    masks: str | Path | None = None,
    backgrounds: str | Path | None = None,
    partial: bool = False,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    workers: int = 0,
    out: str | Path | None = None,
    told: Told = lambda finished, computed: None,
) -> Rows:
    """How does this classifier, or segmenter, hold up? `.cards()` of what comes back has the scores.

    model: any classifier; a CNN serves all but attention and the dropping of tokens. For the suite segmentation a segmenter: it gives
        (B, C, h, w), an output of transformers with `.logits`, or torchvision's dict with "out"
    data: batches (images, labels): images (B, 3, H, W) normalised as the model wants them, labels (B,), or for a segmenter label maps
        (B, H, W) with 255 where nothing counts; or a folder, and then the model must come from `sg.load_model`, which knows how to
        read pictures for it; None: shift and neighbours alone
    suite: corruptions, sequences, attacks, occlusion, attention, synthetic, shift:NAME=FOLDER, neighbours:NAME=FOLDER (with
        train/ and test/, or a published set), neighbours:NAME=TRAIN=TEST; the last three want the model and data as for a folder.
        segmentation, alone: clean and corrupted pictures
    corruptions: "all15" (the default), "all19", or names       severities: some of 1..5       epsilons: such as 8/255
    corruptions, severities: of corruptions, attention and segmentation
    salient: the method by which `salient_drop` drops tokens
    masks: a folder, for `synthetic` and `segmentation`         backgrounds: a folder, for `synthetic`
    partial: take shifts and sets that are downloaded in part
    bank: so many pictures that neighbours are looked for among, spread evenly over the classes
    mean, std: the normalisation of images in memory; known of timm's models, otherwise ImageNet's is taken, with a warning where the
        images do not bear it out
    workers: processes that make pictures ahead                 out: a folder for the rows; the same call goes on there
    """
    options = Options.of(
        corruptions=corruptions,
        severities=severities,
        epsilons=epsilons,
        pgd_steps=pgd_steps,
        salient=salient,
    )
    wanted = parse_suite(suite)
    check_counts(limit=limit, batch=batch, workers=workers, seed=seed, bank=bank)
    if not isinstance(data, (str, Path, type(None))):
        return _in_memory(model, data, wanted, options, limit, seed, batch, mean, std, workers, out, told)
    if not isinstance(model, Loaded):
        raise BadInput(
            "data: a folder needs a model that knows how its pictures are read: model = sg.load_model(name, checkpoint)"
        )
    ask = Request(model.name, None if data is None else Path(data), Path(out or ""), [suite] if isinstance(suite, str) else suite,
                  masks=Path(masks) if masks else None, backgrounds=Path(backgrounds) if backgrounds else None, limit=limit, seed=seed,
                  batch=batch, workers=workers, partial=partial, bank=bank, options=options)  # fmt: skip
    ready = prepare_stress(ask, loaded=model)
    if out is not None:
        return stress_run(ask, told=told, prepared=ready)
    gathered: list[Row] = []
    carry_out(
        ready.batches,
        ready.maker,
        ready.judge,
        model.identity,
        gathered.extend,
        Done(None),
        told,
        ready.workers,
    )
    return Rows([{"settings": ready.settings, "about": about("")}], gathered)


def _in_memory(model: Any, data: Any, suite: Suite, options: Options, limit: int | None, seed: int, size: int, mean: Any, std: Any,
               workers: int, out: Any, told: Told) -> Rows:  # fmt: skip
    for name in ("shift", "synthetic", "neighbours"):
        if name in suite:
            raise BadInput(
                f"{name}: expected data in a folder, got batches. Give the folder and a model of sg.load_model."
            )
    origin = model if isinstance(model, Loaded) else None
    module = origin.model if origin else model.model if isinstance(model, ViT) else model
    if not isinstance(module, nn.Module):
        raise UnsupportedModel(f"expected a classifier, a torch.nn.Module, got {type(module).__name__}")
    vit = view(module, suite)
    named = origin.name if origin else type(module).__name__
    identity = origin.identity if origin else {"model": named, "weights": weights_hash(module)}
    mean, std, known = _normalisation(module, origin, mean, std)
    judge: Judge | None = None
    folder, gathered = None if out is None else Path(out), []  # type: ignore[var-annotated]
    settings: dict[str, Any] = {}
    store: Store | None = None
    before, segments = 0, "segmentation" in suite
    try:
        for number, (images, labels) in enumerate(_checked(data, segments)):
            kept = len(images) if limit is None else min(len(images), limit - before)
            if kept <= 0:
                break
            images, labels = images[:kept], labels[:kept]
            if judge is None:
                classes = (segment_outputs if segments else outputs)(
                    module, (images.shape[2], images.shape[3])
                )
                side = square_side((images.shape[2], images.shape[3]), suite)
                if segments:
                    plan = segmentation_plan(options, classes, seed, max(size, kept))
                else:
                    plan = make_plan(
                        suite, options, vit, named, classes, side, seed=seed, batch=max(size, kept)
                    )
                judge = Judge(module, vit, plan, mean, std)
            levels = (pixels_of(images, mean, std)[0] * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
            if not settings:
                notes = [*judge.plan.notes, *_doubt(images, (mean, std), known, named)]
                facts: dict[str, Any] = {
                    "data": "in memory",
                    "limit": limit,
                    "pictures_hash": fingerprint((levels, labels)),
                }
                facts |= {"segments": list(range(classes))} if segments else {}
                settings = settings_of(judge.plan, suite, identity, [], notes, facts)
                if folder is not None:
                    prepare(folder, settings, about(""))
                    store = Store(folder)
                    done = Done(folder)
                else:
                    done = Done(None)
            told_of = labels[labels != IGNORED] if segments else labels
            if told_of.numel() and (int(told_of.min()) < 0 or int(told_of.max()) >= classes):
                got = f"{int(told_of.min())}..{int(told_of.max())}"
                raise BadInput(f"labels: expected classes 0..{classes - 1}, got {got} in batch {number}")
            pictures = tuple(
                Picture(str(before + i), (0 if segments else int(label),)) for i, label in enumerate(labels)
            )
            maps = (
                {p.name: one.cpu().numpy() for p, one in zip(pictures, labels, strict=True)}
                if segments
                else {}
            )
            memory = {
                p.name: np.ascontiguousarray(pixels)
                for p, pixels in zip(pictures, levels.numpy(), strict=True)
            }
            given = {p.name: image for p, image in zip(pictures, images, strict=True)}
            maker, one = Maker(seed, memory=memory, labels=maps), [Batch(pictures, judge.plan.conditions)]
            append = gathered.extend if store is None else store.append
            carry_out(one, maker, judge, identity, append, done, told, workers, given=given)
            before += kept
    finally:
        if store is not None:
            store.close()
    if judge is None:
        raise BadInput("data: expected at least one batch, got none (an iterator that was used up?)")
    return (
        Rows([{"settings": settings, "about": about("")}], gathered) if folder is None else Rows.read(folder)
    )


def _checked(data: Any, segments: bool) -> Iterable[tuple[Tensor, Tensor]]:
    for number, given in enumerate(data):
        if (
            not isinstance(given, (tuple, list))
            or len(given) < 2
            or not all(isinstance(x, Tensor) for x in given[:2])
        ):
            kinds = (
                [type(x).__name__ for x in given]
                if isinstance(given, (tuple, list))
                else type(given).__name__
            )
            raise BadInput(
                f"data: expected batches (images, labels) of tensors, got {kinds} as batch {number}"
            )
        images, labels = given[0], given[1]
        if images.dim() != 4 or images.shape[1] != 3 or not images.is_floating_point() or not len(images):
            raise BadInput(
                f"images: expected (B, 3, H, W), floating point and normalised, got {images.dtype} {tuple(images.shape)}"
            )
        wanted = (len(images), *images.shape[2:]) if segments else (len(images),)
        if labels.is_floating_point() or labels.dtype == torch.bool or labels.shape != wanted:
            expected = f"label maps {wanted} of integers" if segments else f"{len(images)} integers"
            raise BadInput(
                f"labels: expected {expected}, got {labels.dtype} of shape {tuple(labels.shape)} in batch {number}"
            )
        yield images, labels


def _normalisation(
    module: nn.Module, origin: Loaded | None, mean: Any, std: Any
) -> tuple[Sequence[float], Sequence[float], bool]:
    """Mean and std, given or of the model, and whether they are known: otherwise they are ImageNet's."""
    if mean is not None and std is not None:
        return tuple(mean), tuple(std), True
    if mean is not None or std is not None:
        raise BadInput("mean, std: expected both or none")
    if origin is not None:
        return origin.mean, origin.std, True
    told = getattr(module, "pretrained_cfg", None) or {}
    return (told["mean"], told["std"], True) if "mean" in told and "std" in told else (*IMAGENET, False)


def _doubt(
    images: Tensor, normal: tuple[Sequence[float], Sequence[float]], known: bool, model: str
) -> list[str]:
    """What is said of a normalisation that is neither known nor seen in the images; a wrong one is an error."""
    pixels_of(images, *normal)
    if fits(images, normal) or known:
        return []
    note = f"{model} does not say how its images are normalised: ImageNet's mean and std are taken. Give mean= and std= if they are others"
    warnings.warn(note, stacklevel=4)
    return [note]
