"""The panel and the leaderboard: rows of a method that a user adds become a place on the page."""

import re
import shutil
from itertools import permutations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch

import steadygaze as sg
from benchmarks import exact, leaderboard, text_zoo
from benchmarks.panel import PanelModel, panel
from benchmarks.panel import __main__ as panel_command
from benchmarks.panel.columns import FOUR, REMOVAL_MEAN
from benchmarks.panel.figure import draw
from benchmarks.panel.measure import measure
from benchmarks.panel.methods import expand, white_box
from benchmarks.panel.ranking import ranked, shares, with_ceiling
from benchmarks.panel.truth import measure_truth
from steadygaze.methods.registry import METHODS
from steadygaze.results.drawing import to_pil_image

CLASSES = ("cat", "ship")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two images of each of two classes of CIFAR-10."""
    root = tmp_path_factory.mktemp("test")
    generator = torch.Generator().manual_seed(0)
    for name in CLASSES:
        (root / name).mkdir()
        for index in range(2):
            pixels = torch.rand(3, 32, 32, generator=generator)
            to_pil_image(pixels).save(root / name / f"{index}.png")
    return root


@pytest.mark.full
def test_own_method_is_ranked(images: Path, tmp_path: Path) -> None:
    """The lines of the page, run."""
    (code,) = re.findall(r"```python\n(.*?)```", leaderboard.OWN_METHOD, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    models = {"embedded": panel()["embedded"]}
    rows = tmp_path / "rows"
    try:
        exec(code, {})
        loaded = models["embedded"].load(None)
        measure(
            models["embedded"],
            loaded,
            images,
            ["mine", "gaze_removal", "random"],
            ["removal"],
            rows / "embedded",
        )
    finally:
        METHODS.remove("mine")
    board = leaderboard.read_board(rows, models)
    assert {entry.method for entry in board.ranks[REMOVAL_MEAN]} == {"mine", "gaze_removal", "random"}
    page = leaderboard.markdown(board)
    assert re.search(r"\| \d \| `mine` \| yours \| \? \| [\d.]+ \[", page)
    assert "| `embedded` | 77.4 | removed | 3 methods: 4 |" in page
    draw(board.ranks, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_rows_resume_and_methods_are_added(images: Path, tmp_path: Path) -> None:
    model = panel()["cifar10-registers"]
    loaded, out = model.load(None), tmp_path / model.name
    measure(model, loaded, images, ["gae"], ["saco"], out)
    measure(model, loaded, images, ["gae", "ixg"], ["saco"], out)
    runs = sorted(out.glob("*/run.json"))
    assert len(runs) == 2
    methods = [row["method"] for row in sg.Rows.read(*(run.parent for run in runs))]
    assert sorted(methods) == ["gae"] * 4 + ["ixg"] * 4


@pytest.mark.full
def test_swin_is_reported_apart(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its patches are hidden from attention; methods that need attention over all tokens are left out."""
    embedded = panel()["embedded"]
    models = {"embedded": embedded, "tiny-swin": PanelModel("tiny-swin", "cifar10", removable=False)}
    loaded = {"embedded": embedded.load(None)}
    arguments = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8}
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", num_classes=10, depths=(2, 2), num_heads=(2, 2), **arguments
    )
    names = loaded["embedded"].class_names
    loaded["tiny-swin"] = sg.load_model(swin.eval(), class_names=names, image_size=32)
    for name, model in models.items():
        measure(model, loaded[name], images, ["gaze", "gae"], ["removal"], tmp_path / name)
    assert "not available for tiny-swin: gae" in capsys.readouterr().err
    notes = {name: {row["note"] for row in sg.Rows.read(*(tmp_path / name).iterdir())} for name in models}
    assert notes == {"embedded": {"removal"}, "tiny-swin": {"attention masking"}}
    board = leaderboard.read_board(tmp_path, {"embedded": embedded})
    assert list(board.columns[REMOVAL_MEAN]) == ["embedded"] and not board.apart
    board = leaderboard.read_board(tmp_path, models)
    assert list(board.columns[REMOVAL_MEAN]) == ["embedded"] and list(board.apart) == ["tiny-swin"]
    assert leaderboard.apart_section(board).startswith("## Apart: `tiny-swin`")


@pytest.mark.full
def test_known_truth(tmp_path: Path) -> None:
    measure_truth(["gae", "random"], tmp_path, images=20, steps=20)
    for task in ("counting", "shortcut"):
        rows = sg.Rows.read(*(tmp_path / "known-truth" / task).iterdir())
        values = [row["value"] for row in rows]
        assert len(values) >= 20 and all(0 <= value <= 1 for value in values)


def test_ranks() -> None:
    """A difference in every image is real, one within the noise is not; missing images are allowed for."""
    noise = np.random.default_rng(1).normal(size=(40, 3))
    base = 10 * np.arange(40.0)  # images differ far more than methods
    scores = {"best": base + 5 + 0.1 * noise[:, 0], "same": base + noise[:, 1], "level": base + noise[:, 2]}
    scores["worst"] = np.where(np.arange(40) < 20, base - 5, np.nan)  # only images with low scores
    entries = {entry.method: entry for entry in ranked([scores, scores], "best")}
    assert entries["best"].rank == (1, 1) and entries["best"].level_with == (1, 1)
    assert entries["worst"].rank == (4, 4) and entries["worst"].level_with == (4, 4)
    assert entries["same"].level_with == entries["level"].level_with == (2, 3)
    assert entries["worst"].value == pytest.approx(base.mean() - 5, abs=0.3)
    assert entries["best"].low < entries["best"].value < entries["best"].high


def test_method_sets() -> None:
    """Every listed method is on the leaderboard or has a reason not to be."""
    listed = {info.name for info in sg.list_methods()}
    shown = {name.partition(":")[0] for name in expand(["all"])}
    assert listed - shown == set(leaderboard.LEFT_OUT)
    assert len(white_box()) == len(set(white_box()))


def test_a_model_of_the_user_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`python -m benchmarks.panel --models NAME`: here the folder of a model."""
    mine = tmp_path / "mine"
    shutil.copytree(Path(panel_command.__file__).parent / "cifar10-rotary", mine)
    demo = Path(sg.__file__).parent / "assets" / "demo"
    for name in ("ship", "horse"):
        (tmp_path / "val" / name).mkdir(parents=True)
        shutil.copy(demo / f"{name}.png", tmp_path / "val" / name)
    words = ["--rows", tmp_path / "rows", "--imagenet", tmp_path / "val", "--models", mine]
    monkeypatch.setattr(
        "sys.argv",
        ["panel", *map(str, words), "--methods", "gaze_outline,gaze_removal:keys=0.5,limit=4,random"],
    )
    panel_command.main()
    printed = capsys.readouterr().out
    assert f"### {mine}: 2 images" in printed and "| gaze_outline |" in printed
    assert "| gaze_removal:keys=0.5,limit=4" in printed, "commas of options do not end a method"
    assert [folder.name for folder in (tmp_path / "rows").iterdir()] == ["mine"]


def test_a_model_of_timm_with_local_weights(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--models NAME --checkpoint FILE`, and its rows as a table of the page."""
    torch.manual_seed(0)
    weights, rows = tmp_path / "weights.pth", tmp_path / "rows"
    torch.save(timm.create_model("test_vit").state_dict(), weights)
    for file, synset in zip(sorted(images.rglob("0.png")), ("n02085620", "n02094433"), strict=True):
        (tmp_path / "val" / synset).mkdir(parents=True)
        shutil.copy(file, tmp_path / "val" / synset)
    words = ["--rows", rows, "--imagenet", tmp_path / "val", "--models", "test_vit", "--checkpoint", weights]
    monkeypatch.setattr("sys.argv", ["panel", *map(str, words), "--methods", "gae,random"])
    panel_command.main()
    assert "### test_vit: 2 images" in capsys.readouterr().out
    embedded = panel()["embedded"]
    measure(embedded, embedded.load(None), images, ["gae", "random"], ["removal"], rows / "embedded")
    board = leaderboard.read_board(rows, {"embedded": embedded})
    assert list(board.added) == ["test_vit"] and set(board.added["test_vit"]) == {"gae", "random"}
    page = leaderboard.markdown(board)
    assert "### `test_vit`, 2 images" in page and "over 1 models" in page
    assert {"test_vit", "embedded"} <= {line["model"] for line in leaderboard.records(board)}


def test_class_names_make_a_classifier_of_clip(tmp_path: Path) -> None:
    from transformers import CLIPImageProcessor

    folder, names = tmp_path / "clip", tmp_path / "names.txt"
    text_zoo.build("CLIPModel").float().save_pretrained(folder)
    text_zoo.tokenizer().save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(
        folder
    )
    names.write_text("cat\nred bird\n")
    loaded = PanelModel(str(folder), "imagenet").load(None, class_names=names)
    assert loaded.class_names == ("cat", "red bird")
    assert loaded.model(torch.zeros(1, 3, 32, 32)).shape == (1, 2)


@pytest.mark.parametrize("goal", exact.GOALS)
def test_the_exact_best_order_is_that_of_all_permutations(goal: str) -> None:
    p = np.random.default_rng(3).random(2**5)
    orders = list(permutations(range(5)))
    gains = [exact.reached(p, order, goal, [1, 3, 4]) for order in orders]
    assert exact.best(p, goal, [1, 3, 4]) == pytest.approx(max(gains))
    order = orders[int(np.argmax(gains))]
    kept = [p[sum(1 << patch for patch in order[:k])] for k in (1, 3, 4)]
    removed = [p[sum(1 << patch for patch in order[k:])] for k in (1, 3, 4)]
    expected = {"insertion": sum(kept), "deletion": -sum(removed), "both": sum(kept) - sum(removed)}
    assert max(gains) == pytest.approx(expected[goal] / 3)


def test_few_images_have_no_place_and_shares_are_of_searched_images() -> None:
    """A method with few images is not ranked on a model; the ceiling is compared where it was searched."""
    noise = np.random.default_rng(0).normal(size=60)
    few = np.where(np.arange(60) < 8, 80.0, np.nan)
    searched = np.where(np.arange(60) < 10, 98.0, np.nan)
    column = {
        "gaze_outline": 90 + noise, "random": 50 + noise, "gradsam": few, "greedy": searched,
        "greedy:by=insertion": searched + 1,
    }  # fmt: skip
    column["gaze_outline"][10:] -= 40  # easier images were searched
    measures = {measure: {"embedded": column} for measure in (REMOVAL_MEAN, *FOUR)}
    placed = {name: values for name, values in column.items() if not name.startswith("greedy")}
    entries = {measure: ranked([placed], "gaze_outline") for measure in measures}
    tops = {measure: with_ceiling([column], "gaze_outline") for measure in measures}
    models = {"embedded": panel()["embedded"]}
    board = leaderboard.Board(models, measures, entries, {}, tops, {}, {}, Path("none"))
    page = leaderboard.markdown(board)
    (line,) = (line for line in page.splitlines() if line.startswith("| `gradsam` | ") and "few" in line)
    assert "(few)" in line
    share = (
        100 * (column["gaze_outline"] - column["random"])[:10].mean() / (99 - column["random"][:10].mean())
    )
    assert f"| share of the ceiling, `gaze_outline` | {share:.0f} % | |" in page
    assert shares(tops[REMOVAL_MEAN])["gaze_outline"] == pytest.approx(share)


def test_documents_quote_the_leaderboard() -> None:
    """The numbers of the README and of choosing.md are those of leaderboard.csv."""
    root = Path(__file__).parents[1]
    board = pd.read_csv(root / "docs" / "leaderboard.csv")
    board = board[board.model == "all"].set_index(["measure", "method"])["value"]
    readme = (root / "README.md").read_text(encoding="utf-8")
    choosing = (root / "docs" / "choosing.md").read_text(encoding="utf-8")
    (found,) = re.findall(
        r"removal scores: ([\d.]+) points, `attnlrp` ([\d.]+), `gae` ([\d.]+), chance level ([\d.]+)", readme
    )
    names = ("gaze_outline", "attnlrp", "gae", "random")
    assert [float(number) for number in found] == [round(board["removal", name], 1) for name in names]
    (row,) = re.findall(r"scores over seven models, points: (.*?);", choosing)
    quoted = dict(re.findall(r"`?(\w+)`? ([\d.]+)", row))
    assert len(quoted) == 8
    assert quoted == {name: f"{board['removal', name]:.1f}" for name in quoted}
    (row,) = re.findall(r"black, six models: (.*?), all level", choosing)
    assert all(f"{board['pixels', name]:.1f}" == n for name, n in re.findall(r"`(\w+)` ([\d.]+)", row))
