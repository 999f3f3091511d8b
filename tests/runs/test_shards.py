"""N independent jobs make one run: nothing twice, nothing missing, the rows of one job."""

import json
import multiprocessing
from pathlib import Path

import pytest
import torch

import steadygaze as sg
from helpers.runs import image_folder, rows_of
from helpers.tiers import tiered
from steadygaze.runs.loop import Run
from steadygaze.runs.request import StressRequest, VerifyRequest
from steadygaze.runs.rows import Rows
from steadygaze.runs.shards import Shard, World, parse_shard
from steadygaze.runs.store import prepare
from steadygaze.runs.stress import run_stress
from steadygaze.runs.verify import run_verify

SETTINGS = {"data": "d", "seed": 0, "versions": {}}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = image_folder(tmp_path_factory.mktemp("shards") / "data")
    (folder / "cat" / "broken.png").write_bytes(b"no image")
    return folder


@pytest.fixture(scope="module")
def model() -> sg.LoadedModel:
    return sg.load_model("embedded")


def verify(model, data, out: Path | None, shard: str | None = None, **more) -> Rows:
    given = {"methods": ["ixg", "rollout"], "ratios": [0.5], "batch_size": 3, "out": out, **more}
    return sg.verify(model, data, shard=shard, **given)


def stress(model, data, out: Path | None, shard: str | None = None, **more) -> Rows:
    given = {"suites": "corruptions", "corruptions": "fog", "severities": "1,3", "batch_size": 3, **more}
    return sg.stress(model, data, out=out, shard=shard, **given)


@pytest.fixture(scope="module")
def whole(model, data, tmp_path_factory) -> dict[str, Path]:
    """A run of each kind by one job."""
    folder = tmp_path_factory.mktemp("whole")
    for kind, measure in (("verify", verify), ("stress", stress)):
        measure(model, data, folder / kind)
    return {kind: folder / kind for kind in ("verify", "stress")}


@pytest.mark.parametrize("kind", tiered(["verify", "stress"], ["verify"]))
def test_three_shards_in_one_folder(model, data, tmp_path, whole, kind):
    measure = {"verify": verify, "stress": stress}[kind]
    parts = [measure(model, data, tmp_path / "run", f"{index}/3") for index in (2, 0, 1)]
    assert rows_of(tmp_path / "run") == rows_of(whole[kind])
    names = sorted(path.name for path in (tmp_path / "run").glob("rows*"))
    assert names == [f"rows-{index:05d}of00003-00000.jsonl" for index in range(3)]
    images = [{row["image"] for row in part} for part in parts]
    assert all(images) and sum(map(len, images)) == len(set.union(*images)) == 24
    assert parts[0].shard == Shard(2, 3)
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["settings"] == json.loads((whole[kind] / "run.json").read_text())["settings"]


@pytest.mark.parametrize("kind", tiered(["verify", "stress"], ["stress"]))
def test_three_folders_are_one_run(model, data, tmp_path, whole, kind):
    measure = {"verify": verify, "stress": stress}[kind]
    folders = [tmp_path / f"part{index}" for index in range(3)]
    for index, folder in enumerate(folders):
        measure(model, data, folder, f"{index}/3")
    together, alone = Rows.read(*folders), Rows.read(whole[kind])
    assert len(together.runs) == 1 and together.folders == folders[:1]
    assert sorted(map(json.dumps, together)) == sorted(map(json.dumps, alone))
    assert sorted(map(json.dumps, Rows.read(*folders, folders[1]))) == sorted(map(json.dumps, alone))
    if kind == "verify":
        assert together.table(repeats=20).csv() == alone.table(repeats=20).csv()
    else:
        (card,), (expected,) = together.cards(repeats=20), alone.cards(repeats=20)
        assert list(card.records()) == list(expected.records())


@pytest.mark.full
def test_two_whole_runs_with_equal_settings_stay_two(model, data, tmp_path, whole):
    stress(model, data, tmp_path / "again")
    assert len(Rows.read(whole["stress"], tmp_path / "again").runs) == 2


@pytest.mark.full
def test_another_number_of_shards_resumes(model, data, tmp_path, whole):
    """Some rows by 1 of 4, then the rest by 2 shards, then everything by a whole run: each row once."""
    out = tmp_path / "run"
    verify(model, data, out, "1/4")
    before = rows_of(out)
    for index in (0, 1):
        part = verify(model, data, out, f"{index}/2")
        assert len({row["image"] for row in part}) == 12
    assert rows_of(out) == rows_of(whole["verify"]) and set(before) < set(rows_of(out))
    verify(model, data, out)
    assert rows_of(out) == rows_of(whole["verify"])


@pytest.mark.full
def test_a_repeated_row_counts_once(model, data, tmp_path, whole):
    """Two folders of the same shard, and a folder in which an older N wrote the same rows."""
    for folder in ("one", "two"):
        stress(model, data, tmp_path / folder, "0/2")
    stress(model, data, tmp_path / "two", "1/2")
    merged = Rows.read(tmp_path / "one", tmp_path / "two")
    assert sorted(map(json.dumps, merged)) == sorted(map(json.dumps, Rows.read(whole["stress"])))


@pytest.mark.full
def test_processes_inside_a_shard(model, data, tmp_path, whole):
    request = {"methods": ["ixg", "rollout"], "ratios": [0.5], "batch_size": 3, "random": True}
    for index in (0, 1):
        for rank in (0, 1):
            asked = VerifyRequest(
                model=model, data=data, out=tmp_path / "run", shard=Shard(index, 2), **request
            )
            run_verify(asked, World(rank, 2, rank == 0))
    files = sorted((tmp_path / "run").glob("rows*"))
    assert [file.name for file in files] == [
        f"rows-{index:05d}of00002-{rank:05d}.jsonl" for index in (0, 1) for rank in (0, 1)
    ]
    assert all(file.stat().st_size for file in files) and rows_of(tmp_path / "run") == rows_of(
        whole["verify"]
    )


@pytest.mark.parametrize("measure", [verify, stress])
def test_batches_in_memory(model, measure):
    images = torch.rand(10, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    batches = [(images[i : i + 2], torch.zeros(2, dtype=torch.long)) for i in range(0, 10, 2)]
    whole = sorted(map(json.dumps, measure(model, batches, None)))
    parts = [measure(model, batches, None, (index, 3)) for index in range(3)]
    assert sorted(json.dumps(row) for part in parts for row in part) == whole and all(map(len, parts))


@pytest.mark.full
def test_a_replaced_image_is_computed_again_by_its_shard(model, data, tmp_path):
    import shutil

    copy = shutil.copytree(data, tmp_path / "data")
    for index in (0, 1):
        verify(model, copy, tmp_path / "run", f"{index}/2")
    shutil.copy(copy / "truck" / "0.png", copy / "airplane" / "0.png")
    with pytest.warns(UserWarning, match="1 image changed"):
        verify(model, copy, tmp_path / "run", "0/2")
    verify(model, copy, tmp_path / "run", "1/2")
    assert [path.name for path in (tmp_path / "run").glob("replaced*")] == [
        "replaced-00000of00002-00000.jsonl"
    ]
    verify(model, copy, tmp_path / "fresh")
    now = sorted(map(json.dumps, Rows.read(tmp_path / "run")))
    assert now == sorted(map(json.dumps, Rows.read(tmp_path / "fresh")))


# -- who may write


def locked(folder: Path, shard: Shard) -> Run:
    return Run(folder, SETTINGS, {}, task="verify", world=World(shard=shard))


def test_other_shards_write_at_the_same_time_the_same_one_does_not(tmp_path):
    with locked(tmp_path, Shard(0, 4)), locked(tmp_path, Shard(1, 4)):
        for shard in (Shard(1, 4), Shard()):
            with pytest.raises(sg.InputError, match="another process is writing"):
                locked(tmp_path, shard).__enter__()
        with pytest.raises(sg.InputError, match=r"0/3 splits the run differently\. Wait for the 4 shards"):
            locked(tmp_path, Shard(0, 3)).__enter__()
    with locked(tmp_path, Shard(0, 3)):
        pass
    with locked(tmp_path, Shard()), pytest.raises(sg.InputError, match="another process is writing"):
        locked(tmp_path, Shard(0, 3)).__enter__()


def begin(folder: Path, number: int, barrier, results) -> None:
    barrier.wait()
    try:
        prepare(folder, {**SETTINGS, "seed": number % 2}, {"number": number})
        results.put((number % 2, ""))
    except sg.InputError as error:
        results.put((number % 2, str(error)))


@pytest.mark.parametrize("links", [True, False])
def test_shards_that_begin_in_the_same_instant_agree_on_the_settings(tmp_path, monkeypatch, links):
    """Also where the file system has no hard links. Half of the processes have another seed."""
    if not links:

        def link(*_: object) -> None:
            raise OSError(95, "Operation not supported")

        monkeypatch.setattr("steadygaze.files.os.link", link)
    context = multiprocessing.get_context("fork")
    for attempt in range(5):
        folder = tmp_path / str(attempt)
        barrier, results = context.Barrier(6), context.Queue()
        jobs = [context.Process(target=begin, args=(folder, n, barrier, results)) for n in range(6)]
        for job in jobs:
            job.start()
        outcomes = [results.get(timeout=1800) for _ in jobs]
        for job in jobs:
            job.join()
        winner = json.loads((folder / "run.json").read_text())["settings"]["seed"]
        assert all(("seed was" in error) == (seed != winner) for seed, error in outcomes), outcomes
        assert sorted(path.name for path in folder.iterdir()) == ["run.json"]


@pytest.mark.parametrize("text", ["4/4", "-1/4", "1", "a/b", "1/2/3", "", "0/0", "0/100000", (1, 2, 3), 3])
def test_a_shard_that_is_none(text):
    with pytest.raises(sg.InputError, match="shard: expected I/N with I from 0 to N-1"):
        parse_shard(text)


def test_the_requests_of_both_kinds_have_a_shard(model, data, tmp_path):
    asked = StressRequest(
        model=model, data=data, out=tmp_path, shard=Shard(0, 9), options={"corruptions": "fog"}, limit=3
    )
    assert len({row["image"] for row in run_stress(asked)}) == 3
