"""The single deletion score against scipy and one run of the model for each patch."""

import pytest
import torch
from scipy.stats import spearmanr

import steadygaze as sg
from steadygaze.faithfulness.evaluate import evaluate
from steadygaze.faithfulness.inputs import Batch
from steadygaze.models.layers import small_vit


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_it_is_the_rank_correlation_with_single_removals(pool):
    model = small_vit(12, 4, 3, width=16, depth=2, heads=2, pool=pool).double().eval()
    vit = sg.adapt(model)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, *vit.plan.input_size, generator=generator, dtype=torch.float64)
    rows, columns = vit.plan.grid
    maps = torch.randn(3, 2, rows, columns, generator=generator, dtype=torch.float64).round(decimals=1)
    target = torch.tensor([1, 2])
    found = evaluate(vit, Batch(images, target), maps, ["single_deletion"]).values["single_deletion"]
    with torch.no_grad():
        tokens, whole = vit.embed(images), vit(images)
        for b in range(2):
            effects = []
            for patch in range(rows * columns):
                keep = torch.tensor([[p for p in range(rows * columns) if p != patch]])
                without = vit.logits(vit.select(tokens[b : b + 1], keep))
                effects.append(float(whole[b, target[b]] - without[0, target[b]]))
            for m in range(3):
                expected = spearmanr(maps[m, b].flatten(), effects).statistic
                assert float(found.value[m, b]) == pytest.approx(expected, abs=1e-9)
    assert found.note == "removal"


def test_the_occlusion_of_logits_is_perfect():
    loaded = sg.load_model("embedded")
    data = [(torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 5]))]
    rows = sg.verify(loaded, data, methods=["occlusion", "random"], metrics="single_deletion", score="logit")
    values = {(row["method"], row["image"]): row["value"] for row in rows}
    assert all(values["occlusion", image] == pytest.approx(1, abs=1e-3) for image in "01")
    assert all(abs(values["random", image]) < 0.5 for image in "01")
