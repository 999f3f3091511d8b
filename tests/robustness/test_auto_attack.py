"""AutoAttack against obvious loops, against the authors' code, and against what its pieces must do."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

import steadygaze as sg
from helpers.runs import image_folder
from oracles import auto_attack as oracle
from oracles import published_auto_attack as published
from steadygaze.errors import InputError
from steadygaze.robustness import autoattack
from steadygaze.robustness.auto_attack import ATTACKS, _Attacker, dlr_targeted
from steadygaze.runs.estimate import estimate_run
from steadygaze.runs.request import StressRequest
from steadygaze.runs.stress import run_stress

MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
EPSILON = {"linf": 0.008, "l2": 0.06}
OPTIONS: dict[str, Any] = {"mean": MEAN, "std": STD, "steps": 8, "queries": 12}


def cnn(classes: int = 10) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(128, classes)
    return nn.Sequential(*layers).eval()


def batch(model: nn.Module, count: int = 6) -> tuple[Tensor, Tensor]:
    """Normalized images, and the classes that the model predicts."""
    pixels = torch.rand(count, 3, 10, 10, generator=torch.Generator().manual_seed(1))
    images = (pixels - 0.5) / 0.25
    with torch.no_grad():
        return images, model(images).argmax(1)


@pytest.mark.parametrize("norm", EPSILON)
def test_each_attack_takes_what_survived_and_stays_in_the_ball(norm: Any) -> None:
    model = cnn()
    images, labels = batch(model)
    labels[0] = (labels[0] + 1) % 10  # wrong from the start: counts as not robust, and is not attacked
    found = autoattack(model, images, labels, norm=norm, epsilon=EPSILON[norm], **OPTIONS)
    stages = [found.robust(name) for name in ("clean", *ATTACKS)]
    assert all((after <= before).all() for before, after in pairwise(stages))
    assert stages[0].tolist() == [False] + [True] * 5 and 0 < stages[-1].sum() < 5
    change = (found.images - images).flatten(1) * 0.25
    size = change.abs().amax(1) if norm == "linf" else change.norm(dim=1)
    assert (size <= EPSILON[norm] + 1e-6).all() and found.images.abs().max() <= 2 + 1e-5
    assert torch.equal(size > 0, stages[0] & ~stages[-1])  # clean where no attack succeeded
    with torch.no_grad():
        assert torch.equal(model(found.images).argmax(1), found.predicted["square"])


@pytest.mark.parametrize("norm", EPSILON)
@pytest.mark.parametrize("attack", ATTACKS)
def test_an_image_does_not_depend_on_its_neighbors(attack: str, norm: Any) -> None:
    model = cnn().double()
    images, labels = batch(cnn(), 3)
    pixels = (images * 0.25 + 0.5).double()
    attacker = _Attacker(lambda x: model((x - 0.5) / 0.25), norm, EPSILON[norm], 6, 10)

    def run(places: list[int]) -> Tensor:
        draws = [torch.Generator().manual_seed(place) for place in places]
        targets = model(images[places].double()).argsort(1, descending=True)[:, 1:4]
        call = getattr(attacker, f"_{attack.replace('-', '_')}")
        return call(pixels[places], labels[places], targets, draws)

    whole = run([0, 1, 2])
    assert torch.allclose(whole[[2, 0]], run([2, 0]), atol=1e-9)


@pytest.mark.parametrize("norm", EPSILON)
def test_each_attack_is_the_loop_of_its_paper(norm: Any) -> None:
    network = cnn().double()
    images, labels = batch(cnn(), 2)
    pixels, queries = (images * 0.25 + 0.5).double(), 60
    radius = {name: EPSILON[norm] * (1 if name == "square" else 6) for name in ATTACKS}  # so that it succeeds

    def model(x: Tensor) -> Tensor:
        return network((x[None] - 0.5) / 0.25)[0]

    def generators() -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in (3, 4)]

    targets = network(images.double()).argsort(1, descending=True)[:, 1:2]
    got = {}
    for name in ATTACKS:
        steps = 12 if name == "fab-t" else 100
        attacker = _Attacker(lambda x: network((x - 0.5) / 0.25), norm, radius[name], steps, queries)
        attack = getattr(attacker, f"_{name.replace('-', '_')}")
        got[name] = attack(pixels, labels, targets, generators())
    for i, draw in enumerate(generators()):
        x, y, target = pixels[i], int(labels[i]), int(targets[i, 0])
        shape = x.shape
        noise = (
            torch.randn(shape, generator=draw) if norm == "l2" else 2 * torch.rand(shape, generator=draw) - 1
        )
        losses = {
            "apgd-ce": lambda z, y=y: -model(z).log_softmax(0)[y],
            "apgd-t": lambda z, y=y, t=target: dlr_targeted(
                model(z)[None], torch.tensor([y]), torch.tensor([t])
            )[0],
        }
        for name, loss in losses.items():
            expected = oracle.apgd(model, loss, x, y, noise.double(), norm, radius[name])
            assert int(model(expected).argmax()) != y and torch.allclose(got[name][i], expected, atol=1e-7)
        expected = oracle.fab(model, x, y, target, norm, 12)
        assert 0 < oracle.size_of(expected - x, norm) <= radius["fab-t"]
        assert torch.allclose(got["fab-t"][i], expected, atol=1e-6)
        draw.manual_seed(3 + i)
        first, numbers = square_draws((10, 10), queries, norm, draw)
        expected = oracle.square(model, x, y, first, numbers, norm, radius["square"])
        assert torch.allclose(got["square"][i], expected, atol=1e-12)


def test_projection_is_the_smallest_change_to_the_hyperplane() -> None:
    generator = torch.Generator().manual_seed(0)
    x, normal = (
        torch.rand(4, 1, 2, 3, generator=generator).double(),
        torch.randn(4, 1, 2, 3, generator=generator),
    )
    normal, gap = normal.double(), torch.tensor([0.4, -0.7, 0.05, 0.0]).double()
    for norm in ("linf", "l2"):
        change = _Attacker(lambda x: x, norm, 1.0, 1, 1)._to_hyperplane(x, normal, gap)  # type: ignore[arg-type]
        moved = x + change
        assert moved.min() >= -1e-12 and moved.max() <= 1 + 1e-12
        assert torch.allclose((normal * change).flatten(1).sum(1), -gap, atol=1e-12)
        if norm == "l2":  # no other point of the hyperplane in the box is shorter
            for _ in range(200):
                other = change + 0.05 * torch.randn(change.shape, generator=generator).double()
                other -= (
                    normal
                    * ((normal * other).flatten(1).sum(1) + gap)[:, None, None, None]
                    / (normal.square().flatten(1).sum(1)[:, None, None, None])
                )
                inside = ((x + other).flatten(1).clamp(0, 1) == (x + other).flatten(1)).all(1)
                assert (other.flatten(1).norm(dim=1) >= change.flatten(1).norm(dim=1) - 1e-12)[inside].all()
            continue
        for i in range(len(x)):  # L∞ by linear programming: minimize t with |d| <= t
            w, p = normal[i].flatten().tolist(), x[i].flatten().tolist()
            rows = [[s * (k == j) for j in range(6)] + [-1.0] for k in range(6) for s in (1.0, -1.0)]
            limits = [(-value, 1 - value) for value in p] + [(0, None)]
            best = linprog([0] * 6 + [1], rows, [0] * 12, [[*w, 0.0]], [-float(gap[i])], bounds=limits)
            assert float(change[i].abs().max()) == pytest.approx(best.fun, abs=1e-9)


def test_a_hyperplane_out_of_reach_moves_every_pixel_to_its_limit() -> None:
    x = torch.full((1, 1, 1, 3), 0.25)
    normal = torch.tensor([1.0, -1.0, 0.0]).view(1, 1, 1, 3)
    change = _Attacker(lambda x: x, "linf", 1.0, 1, 1)._to_hyperplane(x, normal, torch.tensor([9.0]))
    assert change.flatten().tolist() == [-0.25, 0.75, 0.0]


def test_the_targeted_loss_is_the_formula() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.0, -1.0]])
    value = dlr_targeted(logits, torch.tensor([0]), torch.tensor([1]))
    assert float(value) == pytest.approx(-(3 - 1) / (3 - (1 + 0) / 2))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"norm": "l1"}, "linf or l2"),
        ({"epsilon": 8}, "pass 8/255"),
        ({"norm": "l2", "epsilon": -1}, "0 or more"),
        ({"steps": 0}, "steps"),
        ({"seeds": [1]}, "one for each of 6"),
        ({"labels": torch.full((6,), 10)}, r"classes 0\.\.9"),
        ({"model": cnn(3), "labels": torch.zeros(6, dtype=torch.long)}, "4 classes or more"),
    ],
)
def test_bad_input(changes: dict[str, Any], says: str) -> None:
    model = cnn()
    images, labels = batch(model)
    given = {"model": model, "images": images, "labels": labels, "norm": "linf", "epsilon": 0.1, **OPTIONS}
    with pytest.raises(InputError, match=says):
        autoattack(**given | changes)


TOLERANCE = 1e-9  # float64; measured: 2e-15


@pytest.mark.parametrize(("shape", "norm", "attack"), list(published.runs()))
def test_adversarial_images_are_those_of_the_authors_code(shape: str, norm: Any, attack: str) -> None:
    model, images, outcomes = published.recorded()
    x, expected = images[shape], outcomes[shape, norm, attack]
    order = model(x).argsort(1, descending=True)
    attacker = _Attacker(model, norm, published.EPSILON[norm], 100, published.QUERIES)
    draws = [torch.Generator().manual_seed(seed) for seed in range(len(x))]
    got = getattr(attacker, f"_{attack.replace('-', '_')}")(x, order[:, 0], order[:, 1:], draws)
    fooled = model(got).argmax(1) != order[:, 0]
    assert torch.equal(fooled, expected.fooled) and fooled.any()
    assert float((got[fooled] - expected.images).abs().max()) < TOLERANCE


@pytest.mark.parametrize("norm", published.EPSILON)
def test_each_image_falls_to_the_same_attack_as_in_the_authors_code(norm: Any) -> None:
    model, images, outcomes = published.recorded()
    pixels = images["square"]
    adversarial, standing = pixels.clone(), torch.ones(len(pixels), dtype=torch.bool)
    options: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1), "queries": published.QUERIES}
    got = autoattack(
        model,
        pixels,
        model(pixels).argmax(1),
        norm=norm,
        epsilon=published.EPSILON[norm],
        seeds=range(len(pixels)),
        **options,
    )
    for attack in ATTACKS:
        outcome = outcomes["square", norm, attack]
        fell = standing & outcome.fooled
        adversarial[fell] = outcome.images[fell[outcome.fooled]]
        standing &= ~outcome.fooled
        assert torch.equal(got.robust(attack), standing)
    assert float((got.images - adversarial).abs().max()) < TOLERANCE


@pytest.mark.parametrize("norm", EPSILON)
@pytest.mark.parametrize("size", [(12, 10), (10, 23), (4, 4), (7, 2)])
def test_square_attacks_images_of_any_shape(size: tuple[int, int], norm: Any) -> None:
    queries, radius = 30, {"linf": 0.05, "l2": 0.3}[norm]
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, *size, generator=generator).double()
    weights = torch.randn(10, x[0].numel(), generator=generator).double()
    labels = (x.flatten(1) @ weights.T).argmax(1)
    attacker = _Attacker(lambda z: z.flatten(1) @ weights.T, norm, radius, 1, queries)
    draws = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    got = attacker._square(x, labels, labels[:, None], draws)
    for i, seed in enumerate((3, 4)):
        first, numbers = square_draws(size, queries, norm, torch.Generator().manual_seed(seed))
        expected = oracle.square(
            lambda z: weights @ z.flatten(), x[i], int(labels[i]), first, numbers, norm, radius
        )
        assert torch.allclose(got[i], expected, atol=1e-12)
        assert 0 < oracle.size_of(got[i] - x[i], norm) <= radius + 1e-12


def square_draws(
    size: tuple[int, int], queries: int, norm: str, draw: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random numbers of Square for an image with three channels: of the start, and of each query."""
    height, width = size
    if norm == "linf":
        return torch.rand(3, 1, width, generator=draw).double(), torch.rand(
            queries, 5, generator=draw
        ).double()
    side = max(height // 5, 1)
    first = torch.rand((height // side) * (width // side), 4, generator=draw)
    return first.double(), torch.rand(queries, 8, generator=draw).double()


# -- the suite -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_folder(tmp_path_factory.mktemp("autoattack") / "data")


def request(data: Path, **changes: Any) -> StressRequest:
    given: dict[str, Any] = {
        "model": "embedded",
        "data": data,
        "limit": 5,
        "options": {"attack_steps": 2, "square_queries": 3},
        "suites": "autoattack:linf=1/2550,autoattack:l2=0.02",
        "batch_size": 4,
        "num_workers": 0,
    }
    return StressRequest(**given | changes)


def top1(rows: Any) -> dict[tuple[str, str], float]:
    return {(row["setting"], row["image"]): row["value"] for row in rows if row["metric"] == "top1"}


def test_the_suite_resumes_and_counts_the_worst_over_attacks(data: Path, tmp_path: Path) -> None:
    rows = run_stress(request(data, out=tmp_path / "run"))
    stages = [f"after_{name}_linf/0.1" for name in ATTACKS[:-1]] + ["autoattack_linf/0.1"]
    value = top1(rows)
    for image in {image for _, image in value}:
        fall = [value["clean", image], *(value[stage, image] for stage in stages)]
        assert fall == sorted(fall, reverse=True)
    card = rows.cards(repeats=10)[0]
    assert ("autoattack_l2/0.02", "top1") in card.numbers
    assert any("not the published AutoAttack" in note for note in card.run["settings"]["notes"])
    file = tmp_path / "run" / "rows-00000.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[: len(lines) // 2]))  # as if killed in the middle
    again = run_stress(request(data, out=tmp_path / "run"))
    assert value == top1(again)
    single = run_stress(request(data, batch_size=1))
    assert value == top1(single)


def test_a_dry_run_estimates_the_published_budget_without_spending_it(data: Path) -> None:
    small, whole = (estimate_run(request(data, options=options)) for options in ({"attack_steps": 1}, {}))
    assert whole.rows == whole.rows_left == 5 * (3 + 2 * 4)
    assert whole.seconds > small.seconds
    assert any("survive every attack" in note for note in whole.notes)


@pytest.mark.parametrize(
    ("suite", "says"),
    [
        ("autoattack", "robustbench-cifar10-linf"),
        ("autoattack:linf=8", "pass 8/255"),
        ("autoattack:l1=3", "linf=8/255"),
        ("autoattack:l2=0.5,autoattack:robustbench-cifar10-l2", "twice"),
    ],
)
def test_a_wrong_threat_is_named(suite: str, says: str, data: Path) -> None:
    with pytest.raises(InputError, match=says):
        sg.stress("embedded", data, suites=suite)
