"""Searched methods against naive loops and captum; sufficient subsets.

budgets, stopping, progress, hiding, bad input.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import steadygaze as sg
from helpers import tiny_models
from helpers.tiers import tiered
from oracles import search
from oracles.models import KINDS, random_images, tiny
from steadygaze.methods import atman, channel_masks
from steadygaze.methods import search as runs
from steadygaze.methods.channel_masks import cluster_means, complete_linkage
from steadygaze.methods.explain import explain_batch
from steadygaze.methods.sufficient import subsets
from steadygaze.progress import OnProgress, Progress
from steadygaze.vit.clean_forward import CleanForward

TARGET = torch.tensor([1, 3])
NAMES = (
    "occlusion",
    "rise",
    "lime",
    "kernel_shap",
    "pami",
    "hsic",
    "scorecam",
    "vit_cx",
    "tis",
    "atman",
    "sufficient",
)
PRESENCE: dict[str, list[dict[str, Any]]] = {
    "occlusion": [{}, {"hide": "fill"}, {"hide": "mask"}],
    "rise": [{"budget": 20}, {"budget": 6, "seed": 3, "hide": "fill"}],
    "lime": [{"budget": 20}, {"budget": 6, "seed": 3, "hide": "fill"}],
    "kernel_shap": [{"budget": 61}, {"budget": 60, "seed": 3, "hide": "fill"}],
    "pami": [{}, {"hide": "fill"}],
    "tis": [{"clusters": 9}, {"clusters": 7, "seed": 3, "keep": 0.3, "budget": 5, "hide": "fill"}],
    "hsic": [{"budget": 12}, {"budget": 7, "seed": 3, "output": "class", "hide": "fill"}],
}


@lru_cache
def case(kind: str) -> tuple[Any, Tensor]:
    model = tiny(kind)
    return model, random_images(model)


def explained(kind: str, method: Any, **more: Any) -> Tensor:
    model, images = case(kind)
    return sg.explain(model, images, target=TARGET, method=method, **more).scores.flatten(1)


def close(got: Tensor, wanted: Tensor, what: str, tolerance: float = 1e-9) -> None:
    error, size = float((got - wanted).abs().max()), float(wanted.abs().max())
    assert got.shape == wanted.shape and error <= tolerance * size + 1e-12, (
        f"{what}: differs by {error:.1e}, size {size:.1e}"
    )


# -- each name against its oracle ------------------------------------------------------------------


@pytest.mark.parametrize("kind", tiered(KINDS, ["registers"]))
@pytest.mark.parametrize("name", PRESENCE)
def test_presence_methods(kind: str, name: str) -> None:
    model, images = case(kind)
    for options in PRESENCE[name] if kind in ("class", "average") else PRESENCE[name][:1]:
        told = {k: "remove" if v == "mask" else v for k, v in options.items()}  # for a plain ViT the same
        wanted = [getattr(search, name)(model, images[b], int(TARGET[b]), **told) for b in range(2)]
        close(
            explained(kind, sg.method(name, **options)),
            torch.stack(wanted),
            f"{kind}, {name} {options}",
            1e-7,
        )


@pytest.mark.parametrize("kind", tiered(["class", "registers", "average"], ["registers"]))
def test_soft_methods(kind: str) -> None:
    model, images = case(kind)
    cases: list[tuple[str, dict[str, Any]]] = [
        ("scorecam", {}),
        ("scorecam", {"softmax": False}),
        ("scorecam", {"budget": 5}),
        ("atman", {}),
        ("atman", {"suppress": 0.5, "similar": 0.1}),
    ]
    for name, options in cases:
        wanted = [getattr(search, name)(model, images[b], int(TARGET[b]), **options) for b in range(2)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", sg.DegenerateMapWarning)
            close(
                explained(kind, sg.method(name, **options)),
                torch.stack(wanted),
                f"{kind}, {name} {options}",
                1e-7,
            )


@pytest.mark.parametrize("kind", ["class", "average"])
def test_vit_cx(kind: str) -> None:
    """Clusters by scipy."""
    from scipy.cluster.hierarchy import fcluster, linkage

    model, images = case(kind)
    for options in ({}, {"noise": 0.5, "seed": 4}):
        wanted = []
        for b in range(2):
            a = search.channels(model, images[b])
            ones = torch.stack([search.to_one(k) for k in a.T])
            labels = fcluster(linkage(ones.numpy(), "complete", "cosine"), 0.1, "distance")
            clusters = [[k for k in range(len(labels)) if labels[k] == one] for one in sorted(set(labels))]
            assert 1 < len(clusters) < len(labels)
            wanted.append(search.vit_cx(model, images[b], int(TARGET[b]), clusters, **options))
        close(
            explained(kind, sg.method("vit_cx", **options)), torch.stack(wanted), f"{kind}, vit_cx {options}"
        )


def test_clusters_are_scipys_and_the_largest_comes_first() -> None:
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    points = torch.rand(30, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    distance = torch.cdist(points, points)
    labels = fcluster(linkage(squareform(distance.numpy(), checks=False), "complete"), 0.4, "distance")
    wanted = sorted([i for i in range(30) if labels[i] == one] for one in set(labels))
    assert sorted(complete_linkage(distance, 0.4)) == wanted
    alike = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 0.9]]])
    assert cluster_means(alike).flatten(1).tolist() == [[0.0, pytest.approx(0.95)], [1.0, 0.0]]


def test_other_scores_and_callables() -> None:
    """Occlusion of the logit is the drop of the logit; a callable is the whole quantity.

    K classes are K calls.
    """
    model, images = case("class")
    whole, everything = model(images).detach(), list(range(16))
    rows = []
    for b, c in enumerate(TARGET.tolist()):
        without = [search.logits(model, images[b], [k for k in everything if k != j])[c] for j in everything]
        rows.append(whole[b, c] - torch.stack(without))
    wanted = torch.stack(rows)
    close(explained("class", "occlusion", score="logit"), wanted, "logit")
    for target in (lambda y: y[:, 2], lambda y: y[torch.arange(2), torch.tensor([2, 2])]):
        own = sg.explain(model, images, target=target, method="occlusion").scores
        close(own, sg.explain(model, images, target=2, method="occlusion", score="logit").scores, "callable")
    assert sg.explain(model, images, method="rise:budget=4").score == "prob"
    assert sg.explain(model, images, method="atman").score == "logit"


def test_shapley_values_add_up_and_are_near_the_exact_ones() -> None:
    model, images = case("pre_norm")  # 9 patches
    got = explained("pre_norm", "kernel_shap:hide=fill,budget=1000")
    exact = torch.stack([search.exact_shapley(model, images[b], int(TARGET[b])) for b in range(2)])
    close(got.sum(1), exact.sum(1), "efficiency")
    close(
        explained("pre_norm", "kernel_shap:hide=fill,budget=7").sum(1),
        exact.sum(1),
        "efficiency, of very few runs",
    )
    assert (got - exact).abs().max() < 0.05 * exact.abs().max()


# -- captum ----------------------------------------------------------------------------------------


def captum_parts(kind: str) -> tuple[Any, Tensor, Tensor]:
    """(model as probabilities, images, which patch each pixel belongs to)."""
    model, images = case(kind)
    side, (rows, columns) = model.patch_embed.patch_size[0], model.patch_embed.grid_size
    mask = (
        torch.arange(rows * columns)
        .view(1, 1, rows, columns)
        .repeat_interleave(side, 2)
        .repeat_interleave(side, 3)
    )
    return lambda x: model(x).softmax(-1), images, mask


def per_patch(kind: str, attribution: Tensor) -> Tensor:
    side = case(kind)[0].patch_embed.patch_size[0]
    return attribution[:, 0, ::side, ::side].flatten(1)


def test_captum_agrees() -> None:
    """captum fills patches with mean gray. Occlusion: equal. KernelSHAP draws other samples: near the exact
    values as ours are. LIME: equal on our samples."""
    from captum._utils.models.linear_model import SkLearnRidge
    from captum.attr import FeatureAblation, KernelShap, LimeBase

    kind = "pre_norm"
    forward, images, mask = captum_parts(kind)
    ablation = FeatureAblation(forward).attribute(images, target=TARGET, feature_mask=mask)
    close(explained(kind, "occlusion:hide=fill"), per_patch(kind, ablation), "FeatureAblation")
    torch.manual_seed(0)
    peer = per_patch(
        kind,
        KernelShap(forward).attribute(
            images[:1], target=1, feature_mask=mask, n_samples=300, perturbations_per_eval=60
        ),
    )
    exact = search.exact_shapley(case(kind)[0], images[0], 1)
    ours = explained(kind, "kernel_shap:hide=fill,budget=300")[0]
    size = exact.abs().max()
    assert (peer[0] - exact).abs().max() < 0.15 * size and (ours - exact).abs().max() < 0.15 * size
    sets = [list(range(9)), *search.halves(case(kind)[0], images[0], 40, 0)[1:]]

    def samples(*args: Any, **kwargs: Any) -> Any:
        for keep in sets:
            yield torch.tensor([[float(j in keep) for j in range(9)]], dtype=torch.float64)

    def similarity(original: Tensor, perturbed: Tensor, z: Tensor, **kwargs: Any) -> Tensor:
        return (-((1 - z.mean().sqrt()) ** 2) / 0.25**2).exp()

    peer_lime = LimeBase(
        forward,
        SkLearnRidge(alpha=1.0),
        similarity,
        samples,
        True,
        lambda z, x, **_: x * z[0][mask],
        lambda *_, **__: None,
    )
    found = peer_lime.attribute(images[:1], target=1, n_samples=40)
    close(explained(kind, "lime:hide=fill,budget=40")[:1], found.double().view(1, -1), "LimeBase", 1e-5)


# -- sufficient subsets ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", tiered(["class", "registers", "average", "average_with_class"], ["registers"])
)
@pytest.mark.parametrize(
    ("threshold", "minimal", "steps"), [(0.5, True, 49), (0.4, False, 4), (0.999, True, 49)]
)
def test_sufficient_patches(kind: str, threshold: float, minimal: bool, steps: int) -> None:
    model, images = case(kind)
    found = subsets(model, images, TARGET, threshold=threshold, minimal=minimal, budget=2 * steps)
    k = -(-16 // min(steps, 16))
    for b in range(2):
        confidence, subset, history = search.sufficient(
            model, images[b], int(TARGET[b]), k, threshold, minimal
        )
        close(found.confidence[b], torch.tensor(confidence, dtype=torch.float64), "confidence at each step")
        assert found.subset[b].flatten().nonzero()[:, 0].tolist() == sorted(subset)
        assert found.left.tolist() == [len(left) for left in history]
        close(
            found.subset_confidence[b],
            torch.tensor(search.f(model, images[b], subset, int(TARGET[b])), dtype=torch.float64),
            "sure",
        )
        assert bool(found.reached[b]) == (float(found.subset_confidence[b]) >= threshold)
        for i, left in enumerate(history):
            assert (found.step[b].flatten() >= i).nonzero()[:, 0].tolist() == left
        if minimal and len(subset) > 1:
            assert all(
                search.f(model, images[b], [i for i in subset if i != j], int(TARGET[b]))
                < found.subset_confidence[b]
                for j in subset
            )


@pytest.mark.full
def test_sufficient_as_a_map_and_of_pixels() -> None:
    model, images = case("class")
    maps = explained("class", "sufficient:threshold=0.5")
    found = subsets(model, images, TARGET, threshold=0.5)
    assert torch.equal(maps > 0, found.subset.flatten(1)) and maps.abs().max() <= 1
    assert (subsets(model, images).target == model(images).argmax(1)).all()
    pixels = subsets(model, images, TARGET, threshold=0.4, space="pixels", budget=24)
    assert pixels.subset.shape == (2, 12, 12) and pixels.left[:3].tolist() == [144, 132, 120]
    for b in range(2):  # the confidence is that of the image with only those pixels
        for i in (0, 5, 11):
            seen = images[b] * (pixels.step[b] >= i)
            close(pixels.confidence[b, i], model(seen[None]).softmax(1)[0, TARGET[b]].detach(), "pixels")
    x = images.clone().requires_grad_()
    (g,) = torch.autograd.grad(model(x).softmax(1).gather(1, TARGET[:, None]).sum(), x)
    first = (-(x * g).sum(1)).flatten(1).topk(12).indices.sort(1).values
    assert torch.equal((pixels.step.flatten(1) == 0).nonzero()[:, 1].view(2, 12), first)
    assert explained("class", "sufficient:space=pixels,threshold=0.4,budget=24").shape == (2, 16)


@pytest.mark.parametrize("threshold", [0.3, 0.999])
def test_sufficient_pixels_by_gradients_added_up(threshold: float) -> None:
    model, images = case("class")
    found = subsets(model, images, TARGET, threshold=threshold, space="pixels", summed=True, budget=24)
    for b in range(2):
        confidence, subset, history = search.summed(model, images[b], int(TARGET[b]), 12, threshold)
        close(found.confidence[b], torch.tensor(confidence, dtype=torch.float64), "confidence at each step")
        assert found.subset[b].flatten().nonzero()[:, 0].tolist() == subset
        assert found.left.tolist() == [len(left) for left in history]
        assert bool(found.reached[b]) == (max(confidence) >= threshold)
        for i, left in enumerate(history):
            assert (found.step[b].flatten() >= i).nonzero()[:, 0].tolist() == left
        alone = model((images[b] * found.subset[b])[None]).softmax(1)[0, TARGET[b]].detach()
        close(found.subset_confidence[b], alone, "sure")
    maps = explained("class", f"sufficient:space=pixels,summed=true,budget=24,threshold={threshold}")
    assert maps.shape == (2, 16) and maps.isfinite().all()
    plain = subsets(model, images, TARGET, threshold=threshold, space="pixels", budget=24)
    assert not torch.equal(plain.step, found.step)


def test_sufficient_patches_by_gradients_added_up() -> None:
    """No step is spent on a set that was seen already; the first step is the plain walk's."""
    model, images = case("class")
    found = subsets(model, images, TARGET, threshold=0.4, minimal=False, summed=True)
    assert found.left.tolist() == list(range(16, 0, -1))
    plain = subsets(model, images, TARGET, threshold=0.4, minimal=False)
    assert torch.equal(found.step == 0, plain.step == 0) and not torch.equal(found.step, plain.step)
    for b in range(2):
        for i in (1, 8, 15):
            left = (found.step[b].flatten() >= i).nonzero()[:, 0].tolist()
            assert len(left) == 16 - i
            close(
                found.confidence[b, i],
                torch.tensor(search.f(model, images[b], left, int(TARGET[b])), dtype=torch.float64),
                "confidence",
            )


# -- budgets, stopping, progress -------------------------------------------------------------------


def interrupt_after(calls: int) -> OnProgress:
    """A callback that raises what Ctrl-C raises, at that call."""
    reported: list[Progress] = []

    def on_progress(progress: Progress) -> None:
        reported.append(progress)
        if len(reported) == calls:
            raise KeyboardInterrupt

    return on_progress


def step_by_two(patch: pytest.MonkeyPatch) -> None:
    """Two runs between two reports of progress."""
    patch.setattr(runs, "runs_per_step", lambda query: 2)
    for module in (channel_masks, atman):
        patch.setattr(module, "full_runs_per_step", lambda query: 2)


@pytest.mark.parametrize("name", tiered(NAMES, 4))
def test_a_stopped_search_is_the_map_of_a_smaller_budget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"budget": 12} if name in ("rise", "lime", "kernel_shap", "hsic") else {}
    options |= {"minimal": False} if name == "sufficient" else {}
    method = sg.method(name, **options)

    with monkeypatch.context() as patch:
        step_by_two(patch)
        with pytest.warns(
            sg.PartialMapWarning, match=f"{name}: interrupted after [36] of [0-9]+ runs; the map uses those"
        ):
            partial = explained("class", method, on_progress=interrupt_after(3))
        with warnings.catch_warnings(), pytest.raises(KeyboardInterrupt):
            warnings.simplefilter("error", sg.PartialMapWarning)
            explained("class", method, on_progress=interrupt_after(3))
        with pytest.raises(KeyboardInterrupt):
            model, images = case("class")
            clean = CleanForward.of(sg.adapt(model), images)
            explain_batch(clean, TARGET, [method], None, interrupt_after(3), allow_partial=False)
        if name != "sufficient":
            with pytest.raises(KeyboardInterrupt):  # nothing was done yet
                for module in (runs, channel_masks, atman):
                    patch.setattr(module, "explained_values", lambda *_: exec("raise KeyboardInterrupt"))
                explained("class", "rise:budget=4" if name == "hsic" else name)
    if name == "sufficient":  # of three steps as the whole walk takes them; none is sure, so the surest
        found = subsets(*case("class"), TARGET, minimal=False)
        surest = found.confidence[:, :3].argmax(1)
        assert not found.reached.any() and torch.equal(partial > 0, found.step.flatten(1) >= surest[:, None])
    else:
        assert torch.allclose(partial, explained("class", sg.method(name, budget=6)), atol=1e-12)


@pytest.mark.parametrize(
    "method", ["rise:budget=2", "pami:budget=1", "vit_cx:budget=1", "occlusion:budget=2"]
)
def test_a_patch_that_no_run_has_held_yet_is_neither_for_nor_against(method: str) -> None:
    """It has what the runs say on average, so a small budget does not rank it last.

    And a batch is still its images.
    """
    model, images = case("class")
    got = explained("class", method)
    assert got.shape == (2, 16) and (method.startswith("occlusion") or got.min() > 0)
    for b in range(2):
        alone = sg.explain(model, images[b : b + 1], target=TARGET[b : b + 1], method=method).scores.flatten(
            1
        )
        close(got[b : b + 1], alone, method)
    if method == "rise:budget=2":
        sets = search.halves(model, images[0], 2, 0)
        never = [j for j in range(16) if not any(j in keep for keep in sets)]
        mean = sum(search.f(model, images[0], keep, int(TARGET[0])) for keep in sets) / 2
        assert never and torch.allclose(got[0, never], torch.tensor(mean, dtype=torch.float64), atol=1e-9)


def test_searches_report_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[Progress] = []
    monkeypatch.setattr(runs, "runs_per_step", lambda query: 4)
    explained("class", "rise:budget=10", on_progress=reported.append)
    assert reported == [Progress("rise", done, 10, "forward passes") for done in (4, 8, 10)]


def test_seeds_belong_to_the_image() -> None:
    model, images = case("class")
    for name in ("rise:budget=8", "kernel_shap:budget=8", "vit_cx", "lime:budget=8,seed=3"):
        both = sg.explain(model, images, target=TARGET, method=name).scores
        alone = sg.explain(model, images[1:], target=TARGET[1:], method=name).scores
        close(both[1:], alone, name)
    a, b = (explained("class", f"rise:budget=8,seed={seed}") for seed in (0, 1))
    assert (a - b).abs().max() > 1e-6


# -- other models, bad input -----------------------------------------------------------------------


@pytest.mark.parametrize("name", tiered(tiny_models.HIERARCHICAL, ["Swin"]))
def test_models_that_need_their_grid_are_masked_and_it_is_said(name: str) -> None:
    model = tiny_models.ALL[name]()
    images = tiny_models.images_of(model, batch=1)
    with pytest.warns(UserWarning, match="cannot be removed, so they are hidden from attention"):
        got = sg.explain(model, images, target=1, method="occlusion:budget=3").scores
    assert got.shape == (1, *sg.adapt(model).grid) and got.abs().max() > 0
    with pytest.warns(UserWarning, match="cannot be removed, so they are filled with the mean color"):
        sg.explain(model, images, target=1, method="sufficient:budget=4,minimal=false")
    with pytest.raises(sg.MethodUnavailableError, match="hide='mask' or hide='fill'"):
        sg.explain(model, images, method="rise:budget=2,hide=remove")


def test_a_model_that_cannot_be_masked_is_painted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = case("class")
    monkeypatch.setattr("steadygaze.vit.removal.can_mask", lambda vit, tokens: False)
    vit = sg.adapt(model)
    grid_bound = replace(vit, plan=replace(vit.plan, removable=False))
    with pytest.warns(UserWarning, match="mean color"):
        got = sg.explain(grid_bound, images, target=TARGET, method="occlusion").scores.flatten(1)
    close(got, explained("class", "occlusion:hide=fill"), "painted")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("rise:budget=0", "budget is a number of forward passes, an integer >= 1, got 0"),
        ("occlusion:budget=1", ">= 2, got 1"),
        ("rise:hide=blur", "unknown hide 'blur'"),
        ("hsic:output=all", "unknown output"),
        ("atman:suppress=2", "suppress is a number in 0..1"),
        ("sufficient:threshold=0", "threshold is a confidence"),
        ("sufficient:space=cells", "unknown space"),
        ("rise+plus", "has no layers"),
    ],
)
def test_bad_options(method: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explained("class", method)


def test_sufficient_needs_a_class() -> None:
    model, images = case("class")
    with pytest.raises(sg.InputError, match="callable target has no confidence"):
        sg.explain(model, images, target=lambda y: y[:, 0], method="sufficient")
    with pytest.raises(sg.InputError, match="expected a class"):
        subsets(model, images, lambda y: y[:, 0])


# -- command line ----------------------------------------------------------------------------------


def test_the_command_line_writes_what_was_done_when_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a search: the map of what was done, the image's name and the runs in the output and the
    manifest; no further batch.
    """
    from typer.testing import CliRunner

    import steadygaze.cli.explain as command
    from steadygaze.cli import app

    @contextmanager
    def interrupting_bar(console: Any, *, visible: bool = True) -> Iterator[OnProgress]:
        def on_progress(progress: Progress) -> None:
            if progress.unit == "forward passes" and progress.done == 2:
                raise KeyboardInterrupt

        yield on_progress

    demo = Path(command.__file__).parents[1] / "assets" / "demo"
    words = [
        "explain",
        str(demo / "ship.png"),
        str(demo / "cat.png"),
        "--model",
        "embedded",
        "--batch-size",
        "1",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(command, "progress_bar", interrupting_bar)
    monkeypatch.setattr(runs, "runs_per_step", lambda query: 1)
    result = CliRunner().invoke(app, [*words, "--method", "rise:budget=4,gae"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "rise: interrupted after 2 of 4 runs; the map uses those" in result.output
    facts = json.loads((tmp_path / "manifest.json").read_text())
    assert len(facts["images"]) == 1
    assert facts["partial"] == [
        f"{facts['images'][0]['name']}: rise: interrupted after 2 of 4 runs; the map uses those."
    ]
    with np.load(tmp_path / "scores.npz") as stored:
        assert {"rise:budget=4", "gae"} <= set(stored.files)


def test_a_stopped_run_writes_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """verify goes on another time: Ctrl-C must not become a row of a smaller budget."""
    model, images = case("class")
    monkeypatch.setattr(runs, "runs_per_step", lambda query: 1)
    values, calls = runs.explained_values, iter(range(3))
    monkeypatch.setattr(
        runs,
        "explained_values",
        lambda *args: values(*args) if next(calls) < 2 else exec("raise KeyboardInterrupt"),
    )
    with pytest.raises(KeyboardInterrupt):
        sg.verify(model, [(images, TARGET)], ["rise:budget=4"], ["deletion_aopc"])
    monkeypatch.undo()
    rows = sg.verify(model, [(images, TARGET)], list(tiny_models.SEARCHES.values()), ["deletion_aopc"])
    assert len(rows) == 2 * len(tiny_models.SEARCHES)
