"""`verify`: how faithful are the maps of these methods, on this model and this data?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from steadygaze.data.sources import Data
from steadygaze.loading.loaded import LoadedModel
from steadygaze.method_registry import DEFAULT, Method
from steadygaze.progress import OnProgress, ignore_progress
from steadygaze.runs.rows import Rows, read_run
from steadygaze.runs.shards.shard import parse_shard
from steadygaze.runs.verify.given_maps import maps_folder
from steadygaze.runs.verify.plan import DEFAULT_METRICS
from steadygaze.runs.verify.request import VerifyRequest, run_verify
from steadygaze.runs.verify.summary import CHANCE
from steadygaze.vit import ViT


def verify(
    model: nn.Module | ViT | LoadedModel | str,
    data: Data,
    methods: str | Method | Sequence[str | Method] | None = None,
    metrics: str | Sequence[str] = DEFAULT_METRICS,
    target: int | str | Sequence[int] | Tensor | None = None,
    score: str | Sequence[str] | None = None,
    seed: int = 0,
    *,
    method: str | Method | None = None,
    metric: str | None = None,
    ratios: Sequence[float] | None = None,
    fill: str = "zero",
    masks: str | Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
    num_workers: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    maps: str | Path | Mapping[str, Any] | None = None,
    keep_maps: bool | str | Path = False,
    out: str | Path | None = None,
    shard: str | tuple[int, int] | None = None,
    random: bool | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Rows:
    """Measure how faithful the maps of attribution methods are. `.table()` of the result is the ranking.

    model: a model, a view, the result of `load_model`, or a name for it; a folder needs one of the last two,
        which know how images are preprocessed
    data: a folder of labelled images or its index.csv; a stream "wds:..." or "hf:..." (see docs/data.md); or
        batches (images, labels) or (images, labels, masks), a `DataLoader` of such batches, or a `Dataset`:
        images (B, 3, H, W) normalised for the model, labels (B,), masks (B, H, W) with 255 object, 128
        border, 0 background, or booleans. Images in memory are called "0", "1", ... in order
    methods, method: names or `sg.method(...)`; "all" is every method that supports the model, "quick" all but
        searches. By default the method of `explain`, or none if `maps` are given
    metrics, metric: names of `sg.list_metrics()`
    target: the class that is explained and scored: None is the label, "predicted", one class, or one for each
        image
    score: the quantity that is explained, or several of them; None is each method's own
    ratios: shares of the patches that are kept or removed; None is 0.1, 0.2, ..., 0.9
    fill: what positive_perturbation and negative_perturbation paint: "zero" (black), "mean", "blur" or
        "noise"
    masks: a folder of masks, for a folder of images
    limit: at most this many images; of a folder, spread evenly over the classes; of a stream, the first ones
    batch_size: for files or a `Dataset`
    num_workers: threads that read images ahead of the model; None: for files, by the number of cores
    mean, std: the normalisation of images in memory, for metrics that paint pixels; known for loaded and timm
        models
    maps: maps to measure that were made before, by this package or by another: a folder of map files
        (docs/maps.md), or a dict from the name of a method to an array (N, rows, columns), or to a dict from
        the name of an image to an array (rows, columns). A map has one score for each patch, or for each
        pixel of the model's input (then the mean over each patch is measured). In rows, the method NAME is
        called maps:NAME
    keep_maps: store the maps of `methods` in float16, in this folder; True is the folder `maps` in `out`
    out: output folder; rows are written as they are computed, and the same call resumes an interrupted run
    shard: "I/N" or (I, N): compute part I (from 0) of a run that is split over N independent jobs, which may
        share one output folder; the result is this part
    random: also measure the method `random`, the chance level that a report shows. None: if `out` is given,
        unless a run without it is resumed there

    >>> import torch
    >>> from steadygaze import load_model
    >>> batch = torch.rand(2, 3, 32, 32), torch.tensor([3, 5])  # images and labels
    >>> rows = verify(load_model("embedded"), [batch], methods=["gae", "random"], metrics="deletion_aopc")
    >>> sorted((row["method"], row["image"]) for row in rows)
    [('gae', '0'), ('gae', '1'), ('random', '0'), ('random', '1')]
    """
    chosen = method if method is not None else methods
    if chosen is None:
        chosen = () if maps is not None else DEFAULT
    measured = metric if metric is not None else metrics
    request = VerifyRequest(
        model=model,
        data=data,
        out=None if out is None else Path(out),
        masks=None if masks is None else Path(masks),
        limit=limit,
        seed=seed,
        batch_size=batch_size,
        num_workers=num_workers,
        methods=[chosen] if isinstance(chosen, (str, Method)) else list(chosen),
        metrics=[measured] if isinstance(measured, str) else list(measured),
        scores=[score] if isinstance(score, str) else score,
        ratios=ratios,
        fill=fill,
        target=target,
        mean=mean,
        std=std,
        shard=parse_shard(shard),
        maps=maps,
        keep_maps=maps_folder(keep_maps, out),
        random=_measures_chance(out) if random is None else random,
    )
    return run_verify(request, on_progress=on_progress)


def _measures_chance(out: str | Path | None) -> bool:
    """Whether the chance level is added by default: to a new folder, and to a resumed run that has it."""
    if out is None:
        return False
    if not (Path(out) / "run.json").is_file():
        return True
    columns = read_run(Path(out))["settings"].get("columns", [])
    return any(method == CHANCE for method, *_ in columns)
