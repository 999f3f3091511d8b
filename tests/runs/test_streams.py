"""`verify` and `stress` on streams: the rows of folders, resumed, split, and with damaged data."""

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import steadygaze as sg
from helpers.runs import thousand
from helpers.shards import parquet, png, samples, shards, write_tar
from helpers.tiers import tiered
from steadygaze.cli import app
from steadygaze.runs.request import StressRequest, VerifyRequest
from steadygaze.runs.shards import World
from steadygaze.runs.stress import run_stress
from steadygaze.runs.verify import run_verify


def verify_request(data, out=None, **more) -> VerifyRequest:
    given = {"model": thousand(), "methods": ["ixg"], "ratios": [0.5], "batch_size": 2, **more}
    return VerifyRequest(random=False, data=data, out=out, **given)


def stress_request(data, out=None, **more) -> StressRequest:
    options = {"corruptions": "fog", "severities": "1,3"}
    given = {"model": thousand(), "suites": ["corruptions"], "options": options, "batch_size": 2, **more}
    return StressRequest(data=data, out=out, num_workers=1, **given)


RUNS = {"verify": (verify_request, run_verify), "stress": (stress_request, run_stress)}


def lines(out: Path) -> list[str]:
    found = [line for file in out.glob("rows*.jsonl") for line in file.read_text().splitlines()]
    assert len(found) == len(set(found))
    return sorted(found)


def settings(out: Path) -> dict:
    return json.loads((out / "run.json").read_text())["settings"]


def unpacked(folder: Path, out: Path) -> Path:
    """The images of shards as files that an index.csv lists."""
    rows = ["image,label"]
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for name in tar.getnames():
                data = tar.extractfile(name).read()
                if name.endswith(".cls"):
                    rows.append(f"{Path(name).stem},{data.decode()}")
                else:
                    out.mkdir(exist_ok=True)
                    (out / Path(name).stem).write_bytes(data)
    (out / "index.csv").write_text("\n".join(rows) + "\n")
    return out


@pytest.mark.parametrize("kind", tiered(RUNS, ["verify"]))
def test_rows_are_those_of_files_however_the_data_is_divided(tmp_path, kind):
    request, run = RUNS[kind]
    runs = {
        "three": shards(tmp_path / "three", classes=2),  # in the order of files, which alternate
        "one": shards(tmp_path / "one", count=1, each=9, classes=2),
        "pipe": f"wds:pipe:cat {tmp_path}/three/{{0000..0002}}.tar",
    }
    for name, data in runs.items():
        run(request(data, tmp_path / f"{name}.run"))
    expected = lines(tmp_path / "three.run")
    assert {json.loads(line)["image"] for line in expected} == {f"k{n}" for n in range(9)}
    assert lines(tmp_path / "one.run") == lines(tmp_path / "pipe.run") == expected
    folder = unpacked(tmp_path / "three", tmp_path / "files")
    run(request(folder / "index.csv", tmp_path / "files.run"))
    run(request(folder, tmp_path / "files.run"))  # the same run: nothing is added
    assert lines(tmp_path / "files.run") == expected
    assert settings(tmp_path / "one.run")["layout"] == "WebDataset"


@pytest.mark.parametrize("kind", tiered(RUNS, ["verify"]))
def test_an_interrupted_run_is_resumed(tmp_path, kind):
    request, run = RUNS[kind]
    data = shards(tmp_path / "data")
    run(request(data, tmp_path / "whole"))

    def interrupt(progress):
        if progress.done >= 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(request(data, tmp_path / "cut"), on_progress=interrupt)
    assert 0 < len(lines(tmp_path / "cut")) < len(lines(tmp_path / "whole"))
    seen = []
    run(request(data, tmp_path / "cut"), on_progress=seen.append)
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert seen[-1].done == seen[-1].total and seen[-1].resumed > 0


@pytest.mark.full
@pytest.mark.parametrize("kind", RUNS)
def test_two_processes_share_a_stream(tmp_path, kind):
    request, run = RUNS[kind]
    data = shards(tmp_path / "data")
    run(request(data, tmp_path / "one"))
    done = []
    for rank in range(2):
        seen = []
        world = World(rank, 2, local_main=rank == 0)
        run(request(data, tmp_path / "two"), world, on_progress=seen.append)
        done.append((seen[-1].done, seen[-1].total))
    assert lines(tmp_path / "two") == lines(tmp_path / "one")
    assert all(count == total for count, total in done)
    views = {"verify": 1, "stress": 3}[kind]
    assert [total for _, total in done] == [5 * views, 4 * views]


@pytest.mark.parametrize("kind", tiered(RUNS, ["verify"]))
def test_a_damaged_shard_loses_nothing_that_can_be_measured(tmp_path, kind):
    request, run = RUNS[kind]
    data = shards(tmp_path / "data")
    file = tmp_path / "data" / "0001.tar"
    whole = file.read_bytes()
    file.write_bytes(whole[: whole.index(b"k4.png") + 700])
    with pytest.warns(sg.DamagedDataWarning, match=r"0001\.tar: cannot be read further"):
        rows = run(request(data, tmp_path / "run"))
    measured = set(rows.to_pandas()["image"])
    assert measured == {"k0", "k1", "k2", "k3", "k6", "k7", "k8"}
    before = lines(tmp_path / "run")
    file.write_bytes(whole)
    run(request(data, tmp_path / "run"))
    assert set(lines(tmp_path / "run")) > set(before)
    images = {json.loads(line)["image"] for line in lines(tmp_path / "run")}
    assert images == {f"k{n}" for n in range(9)}


@pytest.mark.parametrize("kind", RUNS)
def test_images_that_cannot_be_used_are_named_and_tried_again(tmp_path, kind):
    request, run = RUNS[kind]
    members = samples(range(5))
    members[2] = ("k1.png", b"no image")
    write_tar(tmp_path / "0.tar", [*members, *samples(range(1))])
    data = f"wds:{tmp_path}/0.tar"
    rows = run(request(data, tmp_path / "run"))
    assert set(rows.unreadable) == {"k1", "k0 (at 5)"}
    assert "0.tar: k1.png: does not decode" in rows.unreadable["k1"]
    assert set(rows.to_pandas()["image"]) == {"k0", "k2", "k3", "k4"}
    members[2] = ("k1.png", png(1))
    write_tar(tmp_path / "0.tar", [*members, *samples(range(1))])
    rows = run(request(data, tmp_path / "run"))
    assert set(rows.unreadable) == {"k0 (at 5)"} and "k1" in set(rows.to_pandas()["image"])


def test_a_replaced_image_is_computed_again(tmp_path):
    data = shards(tmp_path / "data", count=1)
    run_verify(verify_request(data, tmp_path / "run"))
    members = samples(range(3))
    members[2] = ("k1.png", png(77))
    write_tar(tmp_path / "data" / "0000.tar", members)
    with pytest.warns(UserWarning, match="1 image changed .*: k1"):
        rows = run_verify(verify_request(data, tmp_path / "run"))
    assert rows.to_pandas()["image"].value_counts().nunique() == 1


def test_other_data_is_refused(tmp_path):
    data = shards(tmp_path / "data")
    run_verify(verify_request(data, tmp_path / "run", limit=4))
    assert len({json.loads(line)["image"] for line in lines(tmp_path / "run")}) == 4
    for other in (
        verify_request(data, tmp_path / "run"),
        verify_request(shards(tmp_path / "data", count=2), tmp_path / "run", limit=4),
        verify_request(f"{data}?image=png", tmp_path / "run", limit=4),
    ):
        with pytest.raises(sg.InputError, match="contains a run with other settings"):
            run_verify(other)


def test_moved_shards_are_the_same_data(tmp_path):
    run_verify(verify_request(shards(tmp_path / "here"), tmp_path / "run"))
    (tmp_path / "here").rename(tmp_path / "there")
    before = lines(tmp_path / "run")
    run_verify(verify_request(f"wds:{tmp_path}/there/{{0000..0002}}.tar", tmp_path / "run"))
    assert lines(tmp_path / "run") == before


def test_labels_targets_and_masks(tmp_path):
    unlabeled = [(name, data) for name, data in samples(range(3)) if name.endswith(".png")]
    write_tar(tmp_path / "0.tar", unlabeled)
    data = f"wds:{tmp_path}/0.tar"
    with pytest.raises(sg.InputError, match="no label"):
        run_verify(verify_request(data))
    frame = run_verify(verify_request(data, target="predicted")).to_pandas()
    assert set(frame["image"]) == {"k0", "k1", "k2"}
    given = run_verify(verify_request(data, target=[5, 6, 7])).to_pandas()
    one = run_verify(verify_request(data, target=6)).to_pandas()
    pick = lambda table: table[table["image"] == "k1"]["value"].tolist()  # noqa: E731
    assert pick(given) == pick(one) != pick(frame)
    with pytest.raises(sg.InputError, match="Masks of a stream are members or a column"):
        run_verify(verify_request(data, masks=tmp_path, target="predicted"))
    masked = [*unlabeled[:1], ("k0.seg.png", _mask())]
    write_tar(tmp_path / "1.tar", masked)
    request = verify_request(f"wds:{tmp_path}/1.tar?mask=seg.png", target="predicted", metrics=["miou"])
    assert len(run_verify(request).to_pandas()) == 1


def _mask() -> bytes:
    from PIL import Image

    opened = io.BytesIO()
    Image.new("L", (32, 32), 0).save(opened, "PNG")
    image = Image.open(io.BytesIO(opened.getvalue()))
    image.paste(255, (4, 4, 20, 20))
    opened = io.BytesIO()
    image.save(opened, "PNG")
    return opened.getvalue()


def test_a_parquet_folder_is_measured(tmp_path):
    pytest.importorskip("datasets")
    folder = parquet(tmp_path / "set", "test.parquet", range(5))
    for kind, (request, run) in RUNS.items():
        rows = run(request(f"hf:{folder}", tmp_path / kind))
        assert set(rows.to_pandas()["image"]) == {f"test/{n:08d}" for n in range(5)}
    assert sg.Rows.read(tmp_path / "stress").cards()[0].image_count == 5


@pytest.mark.full
def test_the_command_line(tmp_path):
    data = shards(tmp_path / "data")
    file = tmp_path / "data" / "0002.tar"
    file.write_bytes(file.read_bytes()[:1000])
    (tmp_path / "names.txt").write_text("airplane\ncat\ntruck\n")
    words = ["--model", "embedded", "--data", f"{data}?label_names={tmp_path}/names.txt", "--limit", "6"]
    verify = ["verify", *words, "--methods", "ixg", "--ratios", "0.5", "--out", str(tmp_path / "v")]
    done = CliRunner().invoke(app, verify)
    assert done.exit_code == 0, done.output  # the limit is reached before the damage
    words[-1] = "9"
    out = str(tmp_path / "s")
    done = CliRunner().invoke(app, ["stress", *words, "--suites", "occlusion", "--out", out])
    assert done.exit_code == 1, done.output
    assert "not used: " in done.output and "0002.tar: cannot be read further" in done.output
    done = CliRunner().invoke(app, ["verify", *words[:2], "--data", "wds:none-{0..2}.tar", "--out", out])
    assert done.exit_code == 2 and "3 of 3 shards" in done.output
    done = CliRunner().invoke(app, ["report", str(tmp_path / "v"), "--out", str(tmp_path / "page")])
    assert done.exit_code == 0, done.output


def test_sg_verify_and_sg_stress_take_a_stream(tmp_path):
    data = shards(tmp_path / "data", count=1)
    model = replace(thousand(), class_names=None)
    assert len(sg.verify(model, data, methods="ixg", ratios=[0.5]).to_pandas()) == 3 * 4
    assert sg.stress(model, data, suites="occlusion").cards()[0].image_count == 3


def test_explain_takes_a_stream(tmp_path):
    data = shards(tmp_path / "data")
    file = tmp_path / "data" / "0002.tar"
    file.write_bytes(file.read_bytes()[:1000])
    words = ["explain", data, "--model", "embedded", "--method", "ixg", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*words, "--limit", "2"])
    assert done.exit_code == 0, done.output
    entries = json.loads((tmp_path / "out" / "manifest.json").read_text())["images"]
    assert [(entry["name"], entry["file"]) for entry in entries] == [
        ("k0", f"{tmp_path}/data/0000.tar: k0.png"),
        ("k1", f"{tmp_path}/data/0000.tar: k1.png"),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and "0002.tar: cannot be read further" in done.output
    assert len(json.loads((tmp_path / "out" / "manifest.json").read_text())["images"]) == 6
