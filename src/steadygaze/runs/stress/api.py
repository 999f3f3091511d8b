"""`stress`: how robust is a model to corruption, shift, attack and occlusion, and what does its attention
do?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from steadygaze.data.sources import Data
from steadygaze.loading.loaded import LoadedModel
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.runs.rows import Rows
from steadygaze.runs.shards.shard import parse_shard
from steadygaze.runs.stress.request import StressRequest, run_stress
from steadygaze.vit import ViT


def stress(
    model: nn.Module | ViT | LoadedModel | str,
    data: Data | None,
    suites: str | Sequence[str] = ("corruptions",),
    *,
    suite: str | Sequence[str] | None = None,
    masks: str | Path | None = None,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 16,
    num_workers: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    out: str | Path | None = None,
    shard: str | tuple[int, int] | None = None,
    on_progress: OnProgress = ignore_progress,
    **options: Any,
) -> Rows:
    """Measure the robustness of a classifier or a segmenter. `.cards()` of the result has the scores.

    model: any classifier; a CNN serves all suites but attention, and no tokens are dropped. For the suite
        segmentation a segmenter: its output is (B, C, h, w), an output of transformers with `.logits`, or
        torchvision's dict with "out"
    data: a folder of labelled images or its index.csv, a stream "wds:..." or "hf:..." (see docs/data.md), or
        batches (images, labels): a list, a Dataset or a DataLoader; images (B, 3, H, W) normalised for the
        model, labels (B,), or of a segmenter label maps (B, H, W) with 255 where nothing counts. Files need
        the result of `load_model`, or a name for it. None: for suites with images of their own
    suites, suite: names of `sg.list_suites()`; such as corruptions, attacks, shift:NAME=FOLDER
    masks: a folder of masks or label maps, for suites that need them
    limit: at most this many images of each set, spread evenly over the classes; of a stream, the first ones
    batch_size: number of images per batch            num_workers: processes that prepare images ahead
    mean, std: the normalisation of images in memory; known for loaded and timm models, otherwise ImageNet's
        is assumed, with a warning if the images do not confirm it
    out: output folder; rows are written as they are computed, and the same call resumes an interrupted run
    shard: "I/N" or (I, N): compute part I (from 0) of a run that is split over N independent jobs, which may
        share one output folder; the result is this part
    options: of the suites, as `sg.list_suites()` describes them: corruptions ("all15", "all19" or names),
        severities (some of 1..5): of corruptions, attention, segmentation and shift:imagenet-c; epsilons
        (such as 8/255), pgd_steps: of attacks; salient (a method): of occlusion; backgrounds (a folder): of
        synthetic; bank (number of training images): of neighbours; partial (accept incomplete downloads): of
        shift and neighbours

    >>> import torch
    >>> from steadygaze import load_model
    >>> batch = torch.rand(2, 3, 32, 32), torch.tensor([3, 5])  # images and labels
    >>> rows = stress(load_model("embedded"), [batch], corruptions="fog", severities=[1])
    >>> sorted({row["setting"] for row in rows})
    ['clean', 'fog/1']
    """
    if "batch" in options:
        batch_size = options.pop("batch")
    if "workers" in options:
        num_workers = options.pop("workers")
    request = StressRequest(
        model=model,
        data=data,
        out=None if out is None else Path(out),
        suites=suites if suite is None else suite,
        options=options,
        masks=None if masks is None else Path(masks),
        limit=limit,
        seed=seed,
        batch_size=batch_size,
        num_workers=num_workers,
        mean=mean,
        std=std,
        shard=parse_shard(shard),
    )
    return run_stress(request, on_progress=on_progress)
