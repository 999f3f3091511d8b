"""ViTs with hand-set weights do what their closed form says, and the suite finds what methods miss."""

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import steadygaze as sg
from steadygaze.cli import app
from steadygaze.faithfulness.evaluate import evaluate
from steadygaze.faithfulness.ground_truth import NAMES, TASKS, hand_set_vit, shapley_by_kind
from steadygaze.faithfulness.inputs import Batch
from steadygaze.runs.ground_truth import POOLS, summary
from tests.oracles import shapley as oracle

MODELS = [(task, pool) for task in TASKS for pool in POOLS]


def drawn(task, count, grid=4, seed=0):
    return TASKS[task].draw(count, torch.Generator().manual_seed(seed), grid)


def subset_logits(vit, images, keep):
    with torch.no_grad():
        tokens = vit.embed(images)
        return torch.cat(
            [vit.logits(vit.select(tokens[i : i + 1], k.nonzero().T)) for i, k in enumerate(keep)]
        )


@pytest.mark.parametrize(("task", "pool"), MODELS)
def test_the_logits_are_the_closed_form_also_without_patches(task, pool):
    model = hand_set_vit(task, pool)
    images = drawn(task, 12)
    with torch.no_grad():
        torch.testing.assert_close(
            model(images).double(), model.ground_truth.logits(images), atol=5e-5, rtol=0
        )
    keep = torch.rand(12, 16, generator=torch.Generator().manual_seed(1)) < 0.5
    keep[:, 0] = True  # mean pooling of no patch is not defined
    removed = subset_logits(sg.adapt(model), images, keep).double()
    torch.testing.assert_close(removed, model.ground_truth.logits(images, keep), atol=5e-5, rtol=0)
    assert len(removed[:, 1].round(decimals=2).unique()) > 1, "the subsets change the answer"


@pytest.mark.parametrize(("task", "pool"), MODELS)
def test_true_importance_is_the_shapley_value_of_removing_tokens(task, pool):
    model, image = hand_set_vit(task, pool, grid=3), drawn(task, 3, grid=3)[2:]
    vit = sg.adapt(model)
    patches = range(9)
    subsets = torch.tensor([[number >> p & 1 for p in patches] for number in range(1, 512)]).bool()
    logits = {0: 0.0}  # `vit.removal`: a head that has nothing to read gives zeros, as "no" does
    for size in range(1, 10):
        rows = (subsets.sum(1) == size).nonzero()[:, 0]
        keep = torch.stack([subsets[row].nonzero()[:, 0] for row in rows])
        with torch.no_grad():
            tokens = vit.embed(image).expand(len(rows), -1, -1)
            values = vit.logits(vit.select(tokens, keep)).double()[:, 1]
        logits |= dict(zip((rows + 1).tolist(), values.tolist(), strict=True))
    expected = oracle.shapley_values(patches, lambda s: logits[sum(1 << p for p in s)])
    got = model.ground_truth.importance(image).flatten().tolist()
    np.testing.assert_allclose(got, [expected[p] for p in patches], atol=5e-5)
    assert got.count(0.0) >= 2, "patches that change nothing have exactly no importance"
    assert sum(got) == pytest.approx(logits[511], abs=5e-5)


def test_shapley_by_kind_is_the_definition():
    kinds = {0: "a", 1: "a", 2: "b", 3: "b", 4: "b", 5: "c"}

    def value(counts):
        return counts["a"] ** 1.5 * (1 + counts["b"]) - 2 * counts["c"] * (counts["b"] > 1)

    def of_set(players):
        return value({kind: sum(kinds[p] == kind for p in players) for kind in "abc"})

    expected = oracle.shapley_values(list(kinds), of_set)
    got = shapley_by_kind(value, {"a": 2, "b": 3, "c": 1})
    for player, kind in kinds.items():
        assert got[kind] == pytest.approx(expected[player], abs=1e-12)


def test_the_hidden_facts_of_the_tasks():
    both = hand_set_vit("both").ground_truth.importance(drawn("both", 1))
    assert sorted(both.flatten().tolist())[-3:] == [0, 2, 2], "an interaction: half of 4 each"
    larger = hand_set_vit("largest").ground_truth.importance(drawn("largest", 3)[2:])  # values 2 and 3
    assert sorted(larger.flatten().tolist())[-2:] == pytest.approx([4 / 3 * 1, 4 / 3 * 2])
    place = drawn("place", 1)
    glyphs = hand_set_vit("place").ground_truth.glyphs(place)[0]
    importance = hand_set_vit("place").ground_truth.importance(place).flatten().tolist()
    assert glyphs.count("A") == 3 and importance == [4.0 * (patch == 5) for patch in range(16)]


def test_metrics_agree_with_their_oracle():
    images = drawn("count", 4)
    model = hand_set_vit("count")
    maps = torch.randn(3, 4, 4, 4, generator=torch.Generator().manual_seed(0)).round(decimals=1)  # with ties
    maps[2] = 1 + 1e-5 * maps[0]  # rounding
    found = evaluate(model, Batch(images, torch.ones(4, dtype=torch.long)), maps, list(NAMES)).values
    true = model.ground_truth.importance(images)
    for m in range(3):
        for b in range(4):
            pair = (maps[m, b] * (m < 2)).numpy(), true[b].numpy()
            value = {name: float(found[name].value[m, b]) for name in NAMES}
            assert value["importance_correlation"] == pytest.approx(oracle.correlation(*pair), abs=1e-12)
            assert value["importance_rank"] == pytest.approx(oracle.rank_of_the_most_important(*pair))
            assert np.isnan(value["distractor_share"]), "no distractor in this task"


def test_the_suite_tells_methods_that_attend_from_methods_that_explain():
    rows = sg.verify(suite="ground_truth", methods=["gaze_removal", "raw_attention", "occlusion"], limit=1)
    correlation, share = summary(rows), summary(rows, "distractor_share")
    for pool in POOLS.values():
        assert share.loc[(pool, "gaze_removal"), "distractor"] < 0.1
        assert share.loc[(pool, "raw_attention"), "distractor"] > 30
        assert correlation.loc[(pool, "gaze_removal"), "carried"] > 0.99
        assert correlation.loc[(pool, "raw_attention"), "carried"] < 0.8, "it sees the courier only"
        assert correlation.loc[(pool, "occlusion"), "either"] == 0, "one of two marks is enough"
    assert "random" in {row["method"] for row in rows}
    assert len(rows.table(repeats=10).sections) == 2 * len(TASKS)


def test_searched_shapley_values_are_the_true_ones():
    for task in TASKS:
        model = hand_set_vit(task)
        images = drawn(task, 1)
        found = sg.explain(model, images, target=1, method="kernel_shap:budget=150", score="logit").scores
        torch.testing.assert_close(found.double(), model.ground_truth.importance(images), atol=0.3, rtol=0)


def test_a_suite_in_a_folder_is_resumed(tmp_path):
    rows = sg.verify(suite="ground_truth", methods=["random"], limit=1, out=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {f"{task}-{pool}" for task, pool in MODELS}
    again = sg.verify(suite="ground_truth", methods=["random"], limit=1, out=tmp_path)
    assert sorted(map(str, again)) == sorted(map(str, rows))


def test_the_command_prints_methods_by_tasks(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    command = ["verify", "--suite", "ground_truth", "--methods", "raw_attention", "-n", "1"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    for word in ("raw_attention", "random", "class token", "mean pooling", "share ↓", *TASKS):
        assert word in result.output


def test_what_does_not_fit_is_told():
    data = [(torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.long))]
    with pytest.raises(sg.InputError, match="model: expected none"):
        sg.verify("embedded", suite="ground_truth")
    with pytest.raises(sg.InputError, match="data: expected one"):
        sg.verify("embedded")
    with pytest.raises(sg.UnknownNameError, match="ground_truth"):
        sg.verify(suite="truth")
    with pytest.raises(sg.InputError, match="true patch importance"):
        sg.verify(sg.load_model("embedded"), data, metrics="importance_rank")
    with pytest.raises(sg.UnknownNameError, match="both"):
        hand_set_vit("bot")
    with pytest.raises(sg.InputError, match="shard"):
        sg.verify(suite="ground_truth", shard="0/2")
