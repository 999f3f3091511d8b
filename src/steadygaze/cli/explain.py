"""`steadygaze explain`: image files in; overlays, a comparison grid, scores.npz and manifest.json out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import Tensor

from steadygaze.cli.explain_results import (
    ExplainOptions,
    ImageFile,
    Results,
    add_results,
    print_results,
    source_of,
    unique_names,
    write_results,
)
from steadygaze.cli.interruptions import Interruptions
from steadygaze.cli.running import print_line, progress_bar
from steadygaze.data.folders import Item
from steadygaze.data.images import read_image
from steadygaze.data.streams import list_images
from steadygaze.errors import BadImage, BadInput, BrokenMap
from steadygaze.explainer import explain
from steadygaze.heatmap import store_maps
from steadygaze.loading.load import load_model
from steadygaze.loading.loaded import LoadedModel
from steadygaze.method_registry import DEFAULT, Method
from steadygaze.methods import parse_method
from steadygaze.methods.learnt.files import with_files
from steadygaze.progress import OnProgress, Progress
from steadygaze.questions.ask import ask
from steadygaze.questions.text import as_classifier
from steadygaze.runs.messages import plural
from steadygaze.vit import ViT, adapt

MAX_TOP = 100  # classes that are explained of each image
DEMO_METHODS = ("rollout", "gradcam", "gae", "attcat", "decompx+skipplus", DEFAULT)


def run_demo(out: Path) -> int:
    """`steadygaze demo`: explain the example images with six methods; returns the exit code."""
    with as_file(files("steadygaze") / "assets" / "demo") as folder:
        return run(ExplainOptions(images=[folder], model="embedded", methods=list(DEMO_METHODS), out=out))


def run(request: ExplainOptions, console: Console | None = None) -> int:
    """Explain the images and write the results; returns the exit code.

    0, success; 1, a file was not read or not explained; 130, stopped before all images were explained.
    """
    console, live = console or Console(), Console(stderr=True)
    if request.top > MAX_TOP:
        raise BadInput(
            f"--top {request.top}: expected at most {MAX_TOP} classes for each image: every class is one "
            "overlay for each image and method. Choose a smaller number, or call sg.explain with target=."
        )
    if request.top > 1 and request.target != "auto":
        raise BadInput(
            f"--top {request.top} explains the most probable classes, but --target is {request.target}: "
            "give only one of the two"
        )
    for method in request.methods:
        parse_method(method)  # a wrong name is reported before anything is loaded
    methods = with_files(request.methods, request.learnt)
    every_file, damaged = list_images(request.images, request.limit)
    names = unique_names(every_file)
    if request.maps is not None:
        check_map_keys(every_file, request.images)
    image_files = [
        file for number, file in enumerate(every_file) if request.shard.owns(number // request.batch_size)
    ]
    device = request.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with live.status(f"loading {escape(request.model)}") if live.is_terminal else nullcontext():
        loaded = load_model(
            request.model,
            request.checkpoint,
            num_classes=request.num_classes,
            device=device,
            **request.model_options,
            task=request.task,
            trust_remote_code=request.trust_remote_code,
        )
        loaded = as_classifier(loaded, request.words)
        loaded = loaded if request.region is None else ask(loaded, region=request.region)
        vit = adapt(loaded)
    try:
        request.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"--out: expected a folder that can be written, got {request.out} ({error.strerror})"
        ) from error
    results = explain_files(request, methods, loaded, vit, {file: names[file] for file in image_files}, live)
    results.unreadable += damaged
    if results.rows:
        write_results(request, loaded, results)
    print_results(request, loaded, results, console)
    left = len(image_files) - len(results.rows) - len(results.unreadable) - len(results.broken)
    if left > 0:
        print_line(console, f"stopped: {left} of {plural(len(image_files), 'image')} not explained", "yellow")
    return 130 if results.stopped else 1 if results.unreadable or results.broken else 0


def explain_files(
    request: ExplainOptions,
    methods: Sequence[str | Method],
    loaded: LoadedModel,
    vit: ViT,
    names: dict[ImageFile, str],
    console: Console,
) -> Results:
    """Explain the images batch by batch and write their overlays. names: of the files, in results."""
    image_files, results = list(names), Results()
    device = next(vit.model.parameters()).device
    interruptions = Interruptions(console, methods, several_classes=request.top > 1)
    # short lists end before a bar is read; in a file or pipe they need no line either
    with progress_bar(console, visible=console.is_terminal) as on_progress:
        on_progress(Progress("explain", 0, len(image_files), "images"))
        try:
            for batch_files, images in batches(image_files, loaded, request.batch_size, results.unreadable):
                batch_names = [names[file] for file in batch_files]
                explain_batch(
                    request,
                    methods,
                    loaded,
                    vit,
                    batch_names,
                    batch_files,
                    images.to(device),
                    results,
                    interruptions,
                    on_progress,
                )
                done = len(results.rows) + len(results.unreadable) + len(results.broken)
                on_progress(Progress("explain", done, len(image_files), "images"))
                if results.partial:  # what is finished is written, and no further batch is started
                    break
        except KeyboardInterrupt:
            results.stopped = True
    return results


def batches(
    image_files: list[ImageFile], loaded: LoadedModel, size: int, unreadable: list[str]
) -> Iterator[tuple[list[ImageFile], Tensor]]:
    """Readable files with their preprocessed images (b, 3, H, W); errors of the others go to `unreadable`.

    A batch is `size` files in a row, without those that cannot be read, so that shards have equal batches.
    """
    for start in range(0, len(image_files), size):
        images: dict[ImageFile, Tensor] = {}
        for file in image_files[start : start + size]:
            try:
                images[file] = loaded.preprocess(read_image(source_of(file)))
            except BadImage as error:
                unreadable.append(str(error))
        if images:
            yield list(images), torch.stack(list(images.values()))


def explain_batch(
    request: ExplainOptions,
    methods: Sequence[str | Method],
    loaded: LoadedModel,
    vit: ViT,
    names: list[str],
    image_files: list[ImageFile],
    images: Tensor,
    results: Results,
    interruptions: Interruptions,
    on_progress: OnProgress,
) -> None:
    """Explain one batch and add it to the results; an image whose map is not finite is left out."""
    target: Any = None if request.target == "auto" else loaded.class_index(request.target)
    if request.top > 1:
        if vit.plan.outputs == "values":
            raise BadInput(
                "--top explains the most probable classes, but this model gives values (regression). "
                "Use --target with the index or name of a value."
            )
        with torch.no_grad():
            logits = vit(images)
        target = logits.topk(min(request.top, logits.shape[-1])).indices
    try:
        with interruptions.announced():
            explained = explain(
                vit,
                images,
                target=target,
                methods=list(methods),
                score=request.score,
                on_progress=on_progress,
            )
    except BrokenMap as error:
        if len(image_files) == 1:
            results.broken.append(f"{source_of(image_files[0])}: {error}")
            return
        for index in range(len(image_files)):
            one = slice(index, index + 1)
            explain_batch(
                request,
                methods,
                loaded,
                vit,
                names[one],
                image_files[one],
                images[one],
                results,
                interruptions,
                on_progress,
            )
        return
    attributions = {name: attribution.to("cpu") for name, attribution in explained.items()}
    if request.maps is not None:
        store_maps(request.maps, [map_key(file, request.images) for file in image_files], attributions)
    results.partial += [f"{', '.join(names)}: {message}" for message in interruptions.take()]
    originals = [loaded.to_image(image) for image in images]
    add_results(request, loaded.class_names, names, image_files, originals, attributions, results)


def check_map_keys(image_files: Sequence[ImageFile], given: Sequence[str | Path]) -> None:
    """BadInput if two images would be stored under one key."""
    by_key: dict[str, ImageFile] = {}
    for file in image_files:
        first = by_key.setdefault(map_key(file, given), file)
        if first != file:
            raise BadInput(
                f"--maps: expected images with different keys, got {map_key(file, given)!r} for both "
                f"{source_of(first)} and {source_of(file)}. Give a folder that contains both: keys are paths "
                "below it."
            )


def map_key(file: ImageFile, given: Sequence[str | Path]) -> str:
    """The key of an image: its path below the folder that was given, as in rows of `verify`; or its name."""
    if isinstance(file, Item):
        return file.name
    for path in map(Path, given):
        if path.is_dir() and file.is_relative_to(path):
            return file.relative_to(path).as_posix()
    return file.name
