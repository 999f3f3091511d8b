"""`explain(check=True)`: removal curves of each map against random orders, in numbers, words and figures."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import benchmarks.zoo as zoo
import steadygaze as sg
from benchmarks import text_zoo
from oracles import faithfulness as oracle
from oracles.models import random_images, tiny
from steadygaze.faithfulness import Batch, evaluate
from steadygaze.results.attribution import concatenate
from steadygaze.results.check import axis_limits, draw_check

NUMBERS = ("whole", "insertion", "deletion", "chance", "versus_chance", "spread")


def made(gain: float, spread: float = 0.05, **changes) -> sg.RemovalCheck:
    """A check of one map with flat curves around 0.4."""
    values = {
        "ratios": (0.1, 0.5, 0.9),
        "patches": 196,
        "whole": torch.tensor([0.6]),
        "insertion": torch.full((1, 3), 0.4 + gain),
        "deletion": torch.full((1, 3), 0.4 - gain),
        "chance": torch.full((1, 3), 0.4),
        "spread": torch.tensor([spread]),
    }
    return sg.RemovalCheck(**values | changes)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny("class")


@pytest.fixture(scope="module")
def att(model: nn.Module) -> sg.Attribution:
    return sg.explain(model, random_images(model), target=[[0, 3], [2, 1]], method="gae", check=True)


# -- numbers


@pytest.mark.parametrize("kind", ["class", "average", "registers"])
def test_the_numbers_are_those_of_naive_loops(kind: str) -> None:
    model = tiny(kind)
    images = random_images(model)
    check = sg.explain(model, images, target=[1, 4], method="gae", check=True).check
    scores = sg.explain(model, images, target=[1, 4], method="gae").scores
    generator = torch.Generator().manual_seed(0)
    random = [torch.randperm(check.patches, generator=generator).tolist() for _ in range(2)]
    for i, target in enumerate((1, 4)):
        with torch.no_grad():
            expected = oracle.removal_check(
                lambda image, keep: oracle.kept_logits(model, image, keep),
                images[i],
                scores[i],
                target,
                random,
            )
        for name in NUMBERS:
            assert getattr(check, name)[i].tolist() == pytest.approx(expected[name], abs=1e-9), name


def test_the_curves_are_those_of_verify(model: nn.Module) -> None:
    images, labels = random_images(model), torch.tensor([1, 4])
    maps = sg.explain(model, images, target=labels, method=["gae", "ixg"], check=True)
    stacked = torch.stack([att.scores for att in maps.values()])
    names = ["insertion_aopc", "deletion_aopc"]
    check = maps["gae"].check
    found = evaluate(model, Batch(images, labels), stacked, names, ratios=check.ratios).values
    for row, att in enumerate(maps.values()):
        for kind in ("insertion", "deletion"):
            lost = 100 * (att.check.whole[:, None] - getattr(att.check, kind))
            torch.testing.assert_close(lost, found[f"{kind}_aopc"].detail[row])
        torch.testing.assert_close(
            100 * att.check.versus_chance,
            (found["insertion_aopc"].value[row] + found["deletion_aopc"].value[row] - 100) / 2,
        )


def test_several_targets_and_images_are_as_if_alone(model: nn.Module, att: sg.Attribution) -> None:
    assert att.check.insertion.shape == (2, 2, len(att.check.ratios)) and att.check.whole.shape == (2, 2)
    alone = sg.explain(model, random_images(model)[1:], target=2, method="gae", check=True).check
    for name in NUMBERS:
        torch.testing.assert_close(getattr(att.check, name)[1, :1], getattr(alone, name))
    one = att[1].to("cpu")
    assert torch.equal(one.check.chance, att.check.chance[1:])
    joined = concatenate([att[0], att[1]])
    assert torch.equal(joined.check.deletion, att.check.deletion)


def test_chance_is_reproducible_and_shared_by_methods(model: nn.Module) -> None:
    images = random_images(model)
    torch.manual_seed(1)
    first = sg.explain(model, images, method=["gae", "rollout"], check=True)
    torch.manual_seed(2)
    again = sg.explain(model, images, method=["ixg"], check=True)
    assert torch.equal(first["gae"].check.chance, first["rollout"].check.chance)
    assert torch.equal(first["gae"].check.chance, again["ixg"].check.chance)
    assert torch.equal(first["gae"].check.spread, again["ixg"].check.spread)
    state = torch.get_rng_state()
    sg.explain(model, images, check=True)
    assert torch.equal(state, torch.get_rng_state())


def test_the_model_is_left_as_it_was(model: nn.Module) -> None:
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sg.explain(model, random_images(model), check=True)
    assert model.training and all(torch.equal(before[n], v) for n, v in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model.eval()


# -- what is explained


def test_a_callable_gives_its_own_quantity_even_if_it_counts_images(model: nn.Module) -> None:
    images = random_images(model)
    sign = torch.tensor([1.0, -1.0], dtype=images.dtype)
    att = sg.explain(model, images, target=lambda y: sign * (y[:, 1] - y[:, 2]), method="ixg", check=True)
    logits = att.logits
    torch.testing.assert_close(att.check.whole, sign * (logits[:, 1] - logits[:, 2]))
    alone = sg.explain(model, images[1:], target=lambda y: y[:, 2] - y[:, 1], method="ixg", check=True)
    torch.testing.assert_close(att.check.deletion[1:], alone.check.deletion)
    assert "the target from" in att.check_text(0) and "%" not in att.check_text(0)


def test_a_model_whose_patches_are_needed_hides_them() -> None:
    model = zoo.hierarchical("swin_tiny_patch4_window7_224", "swin_transformer")[0]
    images = torch.randn(1, *sg.adapt(model).plan.input_size, dtype=torch.float64)
    att = sg.explain(model, images, method="ixg", check=True)
    assert att.check.hiding == "mask"
    assert att.check_text().startswith("Hiding the ") and " from attention " in att.check_text()


def test_features_have_a_value_and_need_a_target() -> None:
    model = tiny("class", num_classes=0)
    images = random_images(model)
    att = sg.explain(model, images[:1], target=sg.similar_to(images[1]), method="ixg", check=True)
    assert " similarity " in att.check_text() and "%" not in att.check_text()
    torch.testing.assert_close(att.check.whole, att.logits[:, 0])
    with pytest.raises(sg.InputError, match="check: no quantity of the features"):
        sg.explain(model, images, method="rollout", check=True)


def test_prompts_are_named() -> None:
    asked, _ = text_zoo.classifier("CLIPModel")
    vit = sg.adapt(asked)
    images = torch.randn(1, *vit.plan.input_size, dtype=next(asked.parameters()).dtype)
    att = sg.explain(asked, images, method="ixg", check=True)
    assert asked.class_names[int(att.target[0])] in att.check_text() and " %" in att.check_text()


def test_one_patch_cannot_be_checked() -> None:
    model = tiny("class", img_size=8, patch_size=8)
    with pytest.raises(sg.InputError, match="at least 2 patches"):
        sg.explain(model, random_images(model), check=True)


# -- words


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (made(0.3), "Removing the 19 brightest patches lowers cat from 60 % to 10 %; 19 random ones: 40 %."),
        (
            made(-0.3),
            "Removing the 19 brightest patches raises cat from 60 % to 70 %; 19 random ones: 40 %. "
            "On the whole, the map does worse than chance.",
        ),
        (
            made(0.07),
            "Removing the 19 brightest patches lowers cat from 60 % to 33 %; 19 random ones: 40 %. "
            "On the whole, the map does no better than chance.",
        ),
        (
            made(0.3, whole=torch.tensor([0.1])),
            "Removing the 19 brightest patches leaves cat at 10 %; 19 random ones: 40 %.",
        ),
        (
            made(0.3, hiding="mask", outputs="labels"),
            "Hiding the 19 brightest patches from attention lowers cat from 0.60 to 0.10; 19 random ones: "
            "0.40.",
        ),
        (
            made(0.3, hiding="fill", outputs="values", patches=12),
            "Painting the brightest patch in the mean color lowers cat from 0.6 to 0.1; a random one: 0.4.",
        ),
    ],
)
def test_the_sentence(check: sg.RemovalCheck, words: str) -> None:
    assert check.sentence(0, "cat") == words


def test_small_probabilities_keep_a_digit() -> None:
    small = made(0.0002, 1e-5, whole=torch.tensor([4e-5]), chance=torch.full((1, 3), 3e-6))
    assert "from 0.004 % to 40 %; 19 random ones: under 0.001 %." in small.sentence()


# -- figures and files


def test_figures_show_curves_and_words(att: sg.Attribution, model: nn.Module) -> None:
    plain = sg.explain(model, random_images(model), target=[[0, 3], [2, 1]], method="gae")
    assert plain.check is None and plain.check_text() == "" and plain.check_entries(0) == []
    assert att.figure().height > plain.figure().height and att.figure().width == plain.figure().width
    assert "brightest" in att._repr_html_() and "brightest" not in plain._repr_html_()
    both = sg.explain(model, random_images(model), method=["gae", "ixg"], check=True)
    assert both._repr_html_().count("brightest") == 4


def test_the_curves_are_drawn_where_they_are() -> None:
    """Deletion falls at once: its color is at the bottom left, and that of insertion is at the top."""
    steep = made(0, deletion=torch.zeros(1, 3), insertion=torch.full((1, 3), 0.6))
    image = draw_check(steep, width=300)
    columns = [image.getpixel((150, y)) for y in range(180)]  # above the words
    red = [y for y, (r, g, b) in enumerate(columns) if r > 150 and g < 110 and b < 80]
    blue = [y for y, (r, g, b) in enumerate(columns) if b > 120 and r < 90]
    assert blue and red and max(blue) < min(red)


def test_the_maps_of_one_image_share_an_axis() -> None:
    high, low = made(0.3), made(0.0, whole=torch.tensor([0.4]))
    assert axis_limits([low])[1] < axis_limits([high])[1]
    assert axis_limits([high]) == axis_limits([low, high]) == axis_limits([high, low])
    shared = draw_check(low, width=300, limits=axis_limits([low, high]))
    assert shared.tobytes() != draw_check(low, width=300).tobytes()


def test_a_folder_keeps_the_checks(att: sg.Attribution, model: nn.Module, tmp_path: Path) -> None:
    att.save(tmp_path / "one")
    images = json.loads((tmp_path / "one" / "manifest.json").read_text())["images"]
    assert images[0]["checks"]["gae"][1]["text"] == att.check_text((0, 1))
    read = sg.RemovalCheck.load(tmp_path / "one")["gae"]
    for name in NUMBERS:
        expected = getattr(att.check, name).float()
        torch.testing.assert_close(getattr(read, name).float(), expected, rtol=1e-4, atol=1e-6)
    assert (read.ratios, read.patches, read.hiding) == (att.check.ratios, att.check.patches, "remove")
    assert [read.verdict((0, k)) for k in (0, 1)] == [att.check.verdict((0, k)) for k in (0, 1)]
    sg.explain(model, random_images(model), method=["gae", "ixg"], check=True).save(tmp_path / "two")
    assert list(sg.RemovalCheck.load(tmp_path / "two")) == ["gae", "ixg"]
    sg.explain(model, random_images(model), method="gae").save(tmp_path / "none")
    assert sg.RemovalCheck.load(tmp_path / "none") == {}


@pytest.mark.parametrize("content", ["{", "[]", '{"images": [{"checks": {"gae": [{"ratios": []}]}}]}'])
def test_damaged_checks_are_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(sg.InputError, match=r"expected a folder with manifest\.json"):
        sg.RemovalCheck.load(tmp_path)
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(sg.InputError, match=r"manifest\.json"):
        sg.RemovalCheck.load(tmp_path)


def test_a_check_prints_its_gain() -> None:
    assert repr(made(0.3)) == "RemovalCheck(versus chance +0.300; ratios 0.1, 0.5, 0.9)"
