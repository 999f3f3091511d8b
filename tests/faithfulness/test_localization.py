"""Localization against scikit-learn, torchmetrics and naive upsampling; borders; values of a data set."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torchmetrics.functional import jaccard_index
from torchmetrics.functional.classification import binary_accuracy, binary_average_precision

from oracles import faithfulness as oracle
from steadygaze.faithfulness import METRICS
from steadygaze.faithfulness.localization import NAMES, localization, upsample


def problem(seed: int, ties: bool = False, size: tuple[int, int] = (20, 15)):
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    kinds = torch.tensor([0, 128, 255], dtype=torch.uint8)
    masks = kinds[torch.randint(3, (3, *size), generator=generator)]
    return (maps * 2).round() if ties else maps, masks


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_by_the_libraries(seed, ties):
    maps, masks = problem(seed, ties)
    results = localization(maps, masks)
    for m in range(2):
        for b in range(3):
            labeled = (masks[b] != 128).flatten()
            inside = (masks[b] == 255).flatten()[labeled]
            nearest = maps[m, b].repeat_interleave(5, 0).repeat_interleave(3, 1).flatten()[labeled]
            got = {name: float(results[name].value[m, b]) for name in NAMES}
            assert got["average_precision"] == pytest.approx(
                100 * average_precision_score(inside, nearest), abs=1e-9
            )
            other = binary_average_precision(
                (nearest - nearest.min()) / 100, inside.long()
            )  # it takes 0..1 only
            assert got["average_precision"] == pytest.approx(100 * float(other), abs=1e-3)
            smooth = upsample(
                maps[m, b], (20, 15)
            ).flatten()  # not the naive one: its last bits order equal pixels otherwise
            assert np.allclose(
                smooth, np.array(oracle.bilinear(maps[m, b], 20, 15)).flatten(), rtol=0, atol=1e-12
            )
            scaled = (smooth - smooth.min()) / (smooth.max() - smooth.min())
            chosen = (scaled > scaled.mean())[labeled].long()
            scaled, smooth = scaled[labeled], smooth[labeled]
            assert got["pixel_accuracy"] == pytest.approx(
                100 * float(binary_accuracy(chosen, inside.long())), abs=1e-3
            )
            both = jaccard_index(chosen, inside.long(), task="multiclass", num_classes=2)
            assert got["miou"] == pytest.approx(100 * float(both), abs=1e-3)
            two = average_precision_score(np.r_[~inside, inside], np.r_[1 - scaled, scaled])
            assert got["map_chefer"] == pytest.approx(100 * two, abs=1e-9)
            assert got["pointing_game"] == 100.0 * bool(inside[int(smooth.numpy().argmax())])
            positive = smooth.clamp_min(0)
            assert got["mask_share"] == pytest.approx(
                float(100 * positive[inside].sum() / positive.sum()), abs=1e-9
            )
            for name, value in got.items():
                assert METRICS[name].low <= value <= METRICS[name].high


def test_the_data_sets_numbers_have_summed_counts():
    maps, masks = problem(7)
    results = localization(maps, masks, ["miou", "pixel_accuracy"])
    chosen, truth = [], []
    for b in range(3):
        smooth = torch.tensor(oracle.bilinear(maps[0, b], 20, 15), dtype=torch.float64)
        labeled = masks[b] != 128
        chosen.append((smooth > smooth.mean())[labeled].long())
        truth.append((masks[b] == 255)[labeled].long())
    chosen, truth = torch.cat(chosen), torch.cat(truth)
    details = {name: results[name].detail[0].tolist() for name in results}
    miou = METRICS["miou"].combine(results["miou"].value[0].tolist(), details["miou"])
    assert miou == pytest.approx(
        100 * float(jaccard_index(chosen, truth, task="multiclass", num_classes=2)), abs=1e-3
    )
    accuracy = METRICS["pixel_accuracy"].combine(
        results["pixel_accuracy"].value[0].tolist(), details["pixel_accuracy"]
    )
    assert accuracy == pytest.approx(100 * float(binary_accuracy(chosen, truth)), abs=1e-3)
    assert set(results) == {"miou", "pixel_accuracy"}


def test_border_pixels_do_not_matter():
    maps, masks = problem(2)
    maps[:, :, 0, :] = 50.0  # the whole top row of cells is border, and has the maximum
    masks[:, :8] = 128
    results = localization(maps, masks)
    object_there = localization(maps, masks.clone().index_fill(1, torch.arange(8), 255))
    assert float(object_there["pointing_game"].value.min()) == 100
    for b in range(3):
        below = torch.tensor(oracle.bilinear(maps[0, b], 20, 15)).double()
        below[masks[b] == 128] = -1e9
        assert results["pointing_game"].value[0, b] == 100.0 * bool(
            masks[b].flatten()[int(below.argmax())] == 255
        )


def test_a_perfect_map_and_undefined_ones():
    mask = torch.zeros(1, 16, 16, dtype=torch.uint8)
    mask[0, 4:8, 8:12] = 255
    maps = torch.zeros(2, 1, 4, 4)
    maps[0, 0, 1, 2] = 1.0
    results = localization(maps, mask)
    assert results["average_precision"].value[0, 0] == 100 and results["pointing_game"].value[0, 0] == 100
    assert results["average_precision"].value[1, 0] == pytest.approx(
        100 * 16 / 256
    )  # a constant map: the object's share
    assert results["mask_share"].value[1, 0].isnan() and results["miou"].value[1, 0] == pytest.approx(
        100 * (240 / 256) / 2
    )
    empty = localization(maps, torch.zeros(1, 16, 16, dtype=torch.uint8))
    for name in ("average_precision", "pointing_game", "mask_share"):
        assert empty[name].value.isnan().all()
