"""Greedy searches, SMDL and CAAP against naive loops; the ceiling of verify."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import steadygaze as sg
from oracles import search
from oracles.models import random_images, tiny
from steadygaze.errors import PartialMapWarning
from steadygaze.progress import Progress

TARGET = torch.tensor([1, 3])


@pytest.fixture(params=["registers", "average"], scope="module")
def case(request: pytest.FixtureRequest) -> tuple[Any, Tensor]:
    model = tiny(request.param, img_size=9)  # 3 x 3 patches
    return model, random_images(model)


def scores(model: Any, images: Tensor, method: str, **options: Any) -> Tensor:
    return sg.explain(model, images, target=TARGET, method=sg.method(method, **options)).scores.flatten(1)


@pytest.mark.parametrize("by", ["insertion", "deletion", "joint"])
def test_greedy_orders(case: tuple[Any, Tensor], by: str) -> None:
    model, images = case
    passes = 2 if by == "joint" else 1
    # 9 + 8 + ... + 2 candidates one at a time; 9 + 7 + 5 + 3 candidates two at a time
    for budget, at_once in ((44 * passes, 1), (43 * passes, 2), (24 * passes, 2)):
        wanted = [search.greedy_order(model, images[b], int(TARGET[b]), by, at_once) for b in range(2)]
        found = scores(model, images, "greedy", by=by, budget=budget, swaps=0.0)
        assert torch.equal(found, torch.stack([search.ranks(order) for order in wanted])), (by, budget)


def test_both_is_the_mean_of_the_ranks(case: tuple[Any, Tensor]) -> None:
    model, images = case
    one, two = (scores(model, images, "greedy", by=by, swaps=0.0) for by in ("insertion", "deletion"))
    assert torch.equal(scores(model, images, "greedy", by="both", swaps=0.0), (one + two) / 2)


@pytest.mark.parametrize("by", ["insertion", "deletion", "joint"])
def test_swaps_end_where_no_exchange_helps(by: str) -> None:
    """On 2 x 3 patches every size is a limit of tenths, and the best order is known by enumeration."""
    model = tiny("class", img_size=(6, 9))
    images = random_images(model)
    found = [scores(model, images, "greedy", by=by, swaps=swaps) for swaps in (0.0, 0.8)]
    for b in range(2):
        c = int(TARGET[b])
        first, last = (row[b].argsort(descending=True).tolist() for row in found)

        def gains(order: list[int], b: int = b, c: int = c) -> list[float]:
            return [search.gain(model, images[b], order[:k], c, by) for k in range(1, 6)]

        best, order = search.best_order(model, images[b], c, by)
        assert sum(gains(order)) == pytest.approx(best)
        assert sum(gains(first)) - 1e-12 <= sum(gains(last)) <= best + 1e-12
        for k in range(1, 6):
            exchanged = [*last[: k - 1], last[k], last[k - 1], *last[k + 1 :]]
            assert gains(exchanged)[k - 1] <= gains(last)[k - 1] + 1e-12


def test_batches_and_budgets(case: tuple[Any, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch has the maps of its images; a search makes as many passes as its budget allows."""
    import steadygaze.methods.greedy as greedy

    model, images = case
    together = scores(model, images, "greedy", budget=200)
    for b in range(2):
        alone = sg.explain(model, images[b : b + 1], target=int(TARGET[b]), method="greedy:budget=200").scores
        assert torch.equal(together[b], alone[0].flatten())
    counted = []
    plain = greedy.subset_logits
    monkeypatch.setattr(
        greedy, "subset_logits", lambda *given: (counted.append(len(given[3])), plain(*given))[1]
    )
    for by in ("joint", "insertion", "both"):
        counted.clear()
        scores(model, images, "greedy", by=by, budget=200)
        assert 190 <= sum(counted) / len(images) <= 200, by


def test_an_interrupted_search_keeps_what_it_found(case: tuple[Any, Tensor]) -> None:
    model, images = case

    def stop(progress: Progress) -> None:
        if progress.done > 20:
            raise KeyboardInterrupt

    with pytest.warns(PartialMapWarning, match="greedy insertion: interrupted"):
        found = sg.explain(
            model,
            images,
            target=TARGET,
            method="greedy:by=insertion,budget=44,swaps=0",
            on_progress=stop,
        ).scores.flatten(1)
    whole = scores(model, images, "greedy", by="insertion", budget=44, swaps=0.0)
    first = [row.argsort(descending=True)[:3].tolist() for row in found]
    assert first == [row.argsort(descending=True)[:3].tolist() for row in whole]
    assert all(sorted(row.tolist()) == list(range(1, 10)) for row in found)


def test_smdl(case: tuple[Any, Tensor]) -> None:
    model, images = case
    for options in ({}, {"confidence": 0.7, "effectiveness": 2.0}):
        wanted = [search.smdl(model, images[b], int(TARGET[b]), **options) for b in range(2)]
        assert torch.equal(scores(model, images, "smdl", **options), torch.stack(wanted))
    coarse = sg.explain(model, images, target=TARGET, method="smdl:regions=4").scores
    assert torch.equal(coarse[:, 0, 0], coarse[:, 1, 1])  # squares of 2 x 2 patches, cut at the border
    assert len(coarse[0].unique()) == 4


def test_caap(case: tuple[Any, Tensor]) -> None:
    model, images = case
    for options in ({}, {"first": 0, "last": 0}, {"first": 2, "last": 2}):
        wanted = torch.stack([search.caap(model, images[b], int(TARGET[b]), **options) for b in range(2)])
        found = scores(model, images, "caap", **options)
        assert (found - wanted).abs().max() <= 1e-9 * wanted.abs().max()


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("greedy:by=all", "by"),
        ("greedy:swaps=1.5", "share of the budget"),
        ("greedy:budget=0", "budget"),
        ("caap:first=2,last=1", "first <= last"),
        ("beyond_intuition:form=row", "form"),
        ("beyond_intuition:steps=0", "steps >= 1"),
    ],
)
def test_bad_options(case: tuple[Any, Tensor], method: str, message: str) -> None:
    with pytest.raises(sg.SteadygazeError, match=message):
        sg.explain(*case, target=TARGET, method=method)


# -- the ceiling of verify


def ceiling_table(**options: Any) -> Any:
    model = tiny("class", img_size=9)
    images = random_images(model, 3)
    batch = images.float(), torch.tensor([0, 1, 2])
    return sg.verify(model.float(), [batch], methods=["gae"], random=True, **options).table()


def test_the_ceiling_is_the_best_of_the_searched_orders() -> None:
    (section,) = ceiling_table(ceiling=60).sections
    assert section.ceiling == ("ceiling", "prob") and len(section.searched) == 3
    metrics = section.removal
    assert len(metrics) == 4
    means = []
    for line in section.searched:
        means.append(torch.tensor([section.array(metric, line).tolist() for metric in metrics]).mean(0))
    for metric in metrics:
        searched = [section.array(metric, line).tolist() for line in section.searched]
        assert section.array(metric, section.ceiling).tolist() == [
            max(of) for of in zip(*searched, strict=True)
        ]
    overall = torch.tensor(section.array("removal_mean", section.ceiling).tolist())
    assert torch.allclose(overall, torch.stack(means).amax(0))
    assert section.ceiling in section.lines and section.best("removal_mean") != section.ceiling
    assert section.share("removal_mean", section.ceiling) == 1
    assert section.share("removal_mean", ("random", "logit")) == 0
    curve = section.detail("insertion_accuracy", section.ceiling)
    assert curve is not None and curve.shape == (3, 9)


def test_tables_show_ceiling_and_share() -> None:
    table = ceiling_table(ceiling=60)
    head, *lines = [line for line in str(table).splitlines() if line.startswith("|")]
    assert head.endswith("| share of the ceiling |")
    (line,) = [line for line in lines if line.startswith("| ceiling | prob |")]
    assert line.endswith("| 100 % |")
    frame = table.to_pandas()
    assert set(frame[frame.method == "ceiling"].metric) == set(frame.metric)
    plain = ceiling_table()
    assert plain.sections[0].ceiling is None and "share" not in str(plain)
    assert "share" not in plain.to_pandas()


def test_a_ceiling_needs_a_budget() -> None:
    with pytest.raises(sg.SteadygazeError, match="ceiling: budget is a number of forward passes"):
        ceiling_table(ceiling=0)


def test_step_sizes_decrease() -> None:
    from steadygaze.methods.greedy import step_counts

    for budget in (10, 100, 1000, 10000):
        counts = step_counts(64, budget, 1)
        assert counts[0] == 64 and all(a > b for a, b in pairwise(counts))
        assert sum(counts) <= max(budget, 64)
