"""Data that is streamed: WebDataset shards, Hugging Face datasets and Parquet folders."""

import builtins
import gzip
import tarfile
import threading
import time
from pathlib import Path

import pytest

import steadygaze as sg
from helpers.shards import parquet, png, samples, shards, write_tar
from steadygaze.data.folders import ClassLookup, Item, Unlabeled
from steadygaze.data.images import read_image
from steadygaze.data.stream_spec import ImageBytes, StreamSpec, parse_data
from steadygaze.data.streams import ImageStream, open_stream, read_ahead


def opened(text: str, classes: int = 3, names: tuple[str, ...] | None = None, **more) -> ImageStream:
    return open_stream(StreamSpec.parse(text), ClassLookup(names, classes), **more)


def reasons(stream: ImageStream) -> dict[str, str]:
    """Why images cannot be read, by name."""
    found = {}
    for item in stream:
        try:
            read_image(item.source)
        except sg.ImageError as error:
            found[item.name] = str(error)
    return found


# -- specifications


def test_specifications():
    spec = StreamSpec.parse("wds:s3://bucket/{0..3}.tar?label=cls,label_names=a/b.txt")
    assert (spec.kind, spec.location) == ("wds", "s3://bucket/{0..3}.tar")
    assert spec.options == {"label": "cls", "label_names": "a/b.txt"}
    assert StreamSpec.parse(str(spec)) == spec
    assert StreamSpec.parse("wds:https://host/a.tar?X-Signature=1").options == {}  # the URL's own
    assert parse_data("photos/hf").name == "hf" and parse_data(None) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wds:", "expected wds: and a location"),
        ("wds:a.tar?lable=cls", "unknown option of wds: data 'lable'. Did you mean 'label'"),
        ("hf:a/b?split=", "expected split=VALUE"),
        ("wds:a.tar?split=test", "unknown option of wds: data 'split'"),
    ],
)
def test_bad_specifications(text, message):
    with pytest.raises(sg.SteadygazeError, match=message):
        StreamSpec.parse(text)


# -- WebDataset


def test_shards_give_keys_labels_and_pixels(tmp_path):
    stream = opened(shards(tmp_path))
    items = list(stream)
    assert [item.name for item in items] == [f"k{n}" for n in range(9)]
    assert [item.label for item in items] == [n % 3 for n in range(9)]
    assert [item.source.read() for item in items] == [png(n) for n in range(9)]
    assert stream.count() == 9 and stream.position("k4") == 4
    assert [item.name for item in stream.find(["k7", "k1"])] == ["k7", "k1"]
    assert [item.name for item in opened(shards(tmp_path), limit=4)] == ["k0", "k1", "k2", "k3"]
    assert opened(shards(tmp_path), limit=4).count() == 4


def test_every_way_to_open_a_shard_gives_the_same(tmp_path):
    import fsspec

    shards(tmp_path, count=2)
    expected = [(item.name, item.label, item.source.read()) for item in opened(f"wds:{tmp_path}/*.tar")]
    assert len(expected) == 6
    for name in ("0000", "0001"):
        data = (tmp_path / f"{name}.tar").read_bytes()
        (tmp_path / f"{name}.tar.gz").write_bytes(gzip.compress(data))
        with fsspec.open(f"memory://shards/{name}.tar", "wb") as file:
            file.write(data)
    for location in (
        f"file://{tmp_path}/{{0000..0001}}.tar",
        f"pipe:cat {tmp_path}/{{0000..0001}}.tar",
        "memory://shards/{0000..0001}.tar",
        f"{tmp_path}/{{0000..0001}}.tar.gz",
        f"{tmp_path}/0000.tar::{tmp_path}/0001.tar",
    ):
        stream = opened(f"wds:{location}")
        assert [(i.name, i.label, i.source.read()) for i in stream] == expected, location
        assert stream.damaged == []
    assert not list(opened("wds:memory://shards/0000.tar").find(["k0"])), "not read a second time"


def test_extensions_masks_and_unlabeled_images(tmp_path):
    members = [("a/x.in.png", png(0)), ("a/x.seg.png", png(1)), ("a/x.json", b"{}"), ("a/x.txt", b"cat")]
    write_tar(tmp_path / "0.tar", [("__meta__.json", b"{}"), *members])
    names = ("dog", "cat", "bird")
    (item,) = opened(f"wds:{tmp_path}/0.tar?image=in.png,label=txt,mask=seg.png", names=names)
    assert (item.name, item.label, item.mask.read()) == ("a/x", 1, png(1))
    (item,) = opened(f"wds:{tmp_path}/0.tar?image=in.png", labels_needed=False)
    assert item.label is None and read_image(item.source).size == (32, 32)
    (reason,) = reasons(opened(f"wds:{tmp_path}/0.tar?image=in.png")).values()
    assert "0.tar: a/x: no label" in reason


def test_label_names_map_integers_to_the_classes_of_the_model(tmp_path):
    data = shards(tmp_path)
    (tmp_path / "synsets.txt").write_text("n01443537\nn01629819\nn01641577\n")
    named = f"{data}?label_names={tmp_path}/synsets.txt"
    assert [item.label for item in opened(named, classes=1000)][:3] == [1, 25, 30]  # of ImageNet
    assert [item.label for item in opened(named, classes=3)][:3] == [0, 1, 2]  # the model's own classes
    own = ("n01641577", "n01629819", "n01443537")
    assert [item.label for item in opened(named, classes=3, names=own)][:3] == [2, 1, 0]
    (tmp_path / "synsets.txt").write_text("n01443537\nn01629819\n")
    stream = opened(named, classes=1000)
    assert "0000.tar: k2: label '2': label 2 is out of range" in reasons(stream)["k2"]
    with pytest.raises(sg.InputError, match=r"label_names: .*expected a file, got no such file"):
        opened(f"{data}?label_names={tmp_path}/none.txt")


def test_one_bad_image_is_named_and_the_others_are_served(tmp_path):
    members = samples(range(4))
    members[2] = ("k1.png", b"no image")
    members[5] = ("k2.cls", b"7")
    write_tar(tmp_path / "0.tar", [*members, ("k5.txt", b"x"), ("k6.png", png(6)), ("k6.png", png(6))])
    stream = opened(f"wds:{tmp_path}/0.tar")
    found = reasons(stream)
    assert list(found) == ["k1", "k2", "k5", "k6"]
    assert "0.tar: k1.png: does not decode as an image" in found["k1"]
    assert "0.tar: k2: label '7': class 7 is out of range: the model has classes 0..2" in found["k2"]
    assert "0.tar: k5: expected an image such as .jpg, found .txt" in found["k5"]
    assert "0.tar: k6: has two members .png" in found["k6"]


def test_a_key_that_comes_twice_is_named(tmp_path):
    write_tar(tmp_path / "0.tar", [*samples(range(2)), *samples(range(1))])
    write_tar(tmp_path / "1.tar", samples(range(1, 3)))
    stream = opened(f"wds:{tmp_path}/{{0,1}}.tar")
    assert [item.name for item in stream] == ["k0", "k1", "k0 (at 2)", "k1 (at 3)", "k2"]
    found = reasons(stream)
    assert list(found) == ["k0 (at 2)", "k1 (at 3)"]
    assert "1.tar: k1: its key came before, at position 1" in found["k1 (at 3)"]


@pytest.mark.parametrize("pipe", ["", "pipe:cat "])
@pytest.mark.parametrize("damage", ["truncated", "header", "cut between members", "not a tar", "empty"])
def test_a_damaged_shard_is_named_and_the_others_are_served(tmp_path, damage, pipe):
    shards(tmp_path)
    file = tmp_path / "0001.tar"
    data = bytearray(file.read_bytes())
    second = data.index(b"k4.png") // 512 * 512
    if damage == "header":
        data[second + 100 : second + 200] = bytes(100)
    elif damage == "truncated":
        data = data[: second + 600]
    elif damage == "cut between members":
        data = data[:second]
    else:
        data = bytearray(b"x" * 2000 if damage == "not a tar" else b"")
    file.write_bytes(data)
    stream = opened(f"wds:{pipe}{tmp_path}/{{0000..0002}}.tar")
    names = [item.name for item in stream]
    before = [] if damage in ("not a tar", "empty") else ["k3"]
    assert names == ["k0", "k1", "k2", *before, "k6", "k7", "k8"]
    (message,) = stream.damaged
    assert "0001.tar: cannot be read further" in message and "repeat the command" in message


def test_missing_shards_are_named_before_anything_is_read(tmp_path):
    shards(tmp_path)
    (tmp_path / "0001.tar").unlink()
    with pytest.raises(sg.InputError, match=r"1 of 3 shards of .* do not exist: .*0001\.tar"):
        opened(f"wds:{tmp_path}/{{0000..0002}}.tar")
    with pytest.raises(sg.InputError, match=r"pattern \$\{NOT_SET\}\.tar cannot be expanded"):
        opened("wds:${NOT_SET}.tar")
    with pytest.raises(sg.InputError, match="found none that match"):
        opened(f"wds:{tmp_path}/x*.tar")
    with pytest.raises(sg.InputError, match=r"found none: pipe:false.*exit 1"):
        opened("wds:pipe:false").first()


def test_a_link_out_of_an_archive_is_not_followed(tmp_path):
    import tarfile

    (tmp_path / "secret.png").write_bytes(png(1))
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        link = tarfile.TarInfo("k0.png")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.png")
        tar.addfile(link)
    with pytest.raises(sg.InputError, match="found none"):
        opened(f"wds:{tmp_path}/0.tar").first()


def test_wrong_options_are_reported_at_once(tmp_path):
    data = shards(tmp_path)
    with pytest.raises(
        sg.InputError, match=r"none of the first 9 images .* expected \.jpg, found \.png, \.cls"
    ):
        opened(f"{data}?image=jpg").first()
    with pytest.raises(sg.InputError, match="no label: expected index"):
        opened(f"{data}?label=index").first()


# -- tables


def test_a_parquet_folder(tmp_path):
    pytest.importorskip("datasets")
    folder = parquet(tmp_path / "set", "test-00000-of-00002.parquet", range(3))
    parquet(folder, "test-00001-of-00002.parquet", range(3, 5))
    stream = opened(f"hf:{folder}")
    items = list(stream)
    assert [item.name for item in items] == [f"test/{n:08d}" for n in range(5)]
    assert [(item.label, item.source.read()) for item in items] == [(n % 3, png(n)) for n in range(5)]
    assert [item.name for item in stream.find(["test/00000003"])] == ["test/00000003"]
    (folder / "test-00000-of-00002.parquet").unlink()
    with pytest.raises(sg.InputError, match=r"1 files .*test-00000-of-00002\.parquet.*Complete the download"):
        opened(f"hf:{folder}")


def test_columns_and_splits_of_a_table(tmp_path):
    pytest.importorskip("datasets")
    folder = parquet(tmp_path / "set", "train.parquet", range(2), id=["a", "b"], raw=[png(7), png(8)])
    (item, _) = opened(f"hf:{folder}?key=id,image=raw")
    assert (item.name, item.source.read()) == ("a", png(7))
    with pytest.raises(sg.InputError, match=r"expected images in the column label of .*, got int64"):
        opened(f"hf:{folder}?image=label")
    with pytest.raises(sg.UnknownNameError, match=r"unknown column 'labels'. Did you mean 'label'"):
        opened(f"hf:{folder}?label=labels")
    parquet(folder, "test.parquet", range(2), id=["a", "b"], raw=[png(7), png(8)])
    with pytest.raises(sg.InputError, match=r"has the splits train, test: choose one, as in \?split=test"):
        opened(f"hf:{folder}")
    assert next(iter(opened(f"hf:{folder}?split=test"))).name == "test/00000000"
    with pytest.raises(sg.UnknownNameError, match="unknown split 'tset'"):
        opened(f"hf:{folder}?split=tset")


def test_a_saved_dataset_and_its_class_names(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        image=datasets.Image(), target=datasets.ClassLabel(names=["cat", "dog", "bird"])
    )
    rows = {"image": [{"bytes": png(n), "path": None} for n in range(3)], "target": [0, 1, 2]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    stream = opened(f"hf:{tmp_path}/saved", classes=4, names=("bird", "cat", "dog", "fish"))
    assert [item.label for item in stream] == [1, 2, 0]  # by name
    assert [item.label for item in opened(f"hf:{tmp_path}/saved", classes=3)] == [0, 1, 2]
    assert stream.count() == 3


def test_damage_in_a_table_is_named_and_the_rows_before_it_are_served(tmp_path):
    pytest.importorskip("datasets")
    folder = parquet(tmp_path / "set", "test-00000-of-00002.parquet", range(3))
    (folder / "test-00001-of-00002.parquet").write_bytes(b"PAR1 no parquet")
    stream = opened(f"hf:{folder}")
    assert [item.name for item in stream] == [f"test/{n:08d}" for n in range(3)]
    (message,) = stream.damaged
    assert "split test: reading stopped before row 3" in message


def test_rows_that_are_no_images_are_named(tmp_path):
    pytest.importorskip("datasets")
    images = [{"bytes": png(0), "path": None}, {"bytes": None, "path": "/etc/hostname"}]
    folder = parquet(tmp_path / "set", "test.parquet", range(2), image=images)
    found = reasons(opened(f"hf:{folder}"))
    assert list(found) == ["test/00000001"]
    assert "column image: expected the bytes of an image, got NoneType" in found["test/00000001"]


def test_places_that_do_not_exist(tmp_path):
    with pytest.raises(sg.InputError, match="no such folder"):
        opened(f"hf:{tmp_path}/none")


@pytest.mark.parametrize(("text", "library"), [("wds:a.tar", "webdataset"), ("hf:.", "datasets")])
def test_a_missing_library_is_named_with_the_command(monkeypatch, text, library):
    real = builtins.__import__

    def without(name, *args, **more):
        if name.partition(".")[0] == library:
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(sg.InputError, match=rf"{library}: pip install 'steadygaze\[data\]'"):
        opened(text)


# -- reading ahead


def test_reading_ahead_keeps_order_errors_and_its_distance():
    taken = []

    def numbers():
        for number in range(10):
            taken.append(number)
            yield number
        raise OSError("lost")

    ahead = read_ahead(numbers(), size=3)
    assert next(ahead) == 0
    deadline = time.monotonic() + 120
    while len(taken) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert len(taken) == 5  # one used, three waiting, one in hand
    with pytest.raises(OSError, match="lost"):
        list(ahead)
    ahead = read_ahead(iter(range(100)), size=1)
    next(ahead)
    ahead.close()
    for thread in threading.enumerate():
        if thread.name == "steadygaze-read-ahead":
            thread.join(600)
            assert not thread.is_alive()


def listed(data: str) -> tuple[list, list[str]]:
    stream = open_stream(StreamSpec.parse(data), Unlabeled())
    return list(stream), stream.damaged


def test_an_archive_that_unpacks_to_much_more_than_its_size_is_not_read(tmp_path):
    blank = bytes(20 * 2**20)
    members = [member for n in range(4) for member in ((f"k{n}.png", blank), (f"k{n}.cls", b"0"))]
    file = write_tar(tmp_path / "a.tar.gz", members, "w:gz")
    assert file.stat().st_size < 200_000
    items, damaged = listed(f"wds:{file}")
    assert len(items) == 3 and "it unpacks to more than 64 MiB" in damaged[0]


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("layout", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_long_name_is_bounded(tmp_path, mode, layout):
    file = tmp_path / "a.tar.gz"
    with tarfile.open(file, mode, format=layout) as tar:
        tar.addfile(tarfile.TarInfo("a" * 10 * 2**20 + ".png"))
    items, damaged = listed(f"wds:{file}")
    assert not items and "cannot be read further" in damaged[0]


def test_the_members_of_one_sample_are_bounded_together(tmp_path, monkeypatch):
    monkeypatch.setattr("steadygaze.data.tar_shards.MAX_BYTES", 3000)
    members = [("k.png", bytes(2000)), ("k.jpg", bytes(2000)), ("k.cls", b"0"), ("l.png", bytes(2000))]
    items, _ = listed(f"wds:{write_tar(tmp_path / 'a.tar.gz', members, 'w:gz')}?image=jpg|png")
    assert [item.name for item in items] == ["k", "l"]
    monkeypatch.setattr("steadygaze.data.tar_shards.MAX_BYTES", 1000)
    items, _ = listed(f"wds:{tmp_path}/a.tar.gz")
    assert all("is too large" in item.encoded.reason for item in items)


def test_reading_ahead_is_bounded_in_bytes(monkeypatch):
    monkeypatch.setattr("steadygaze.data.streams.MAX_AHEAD", 10)
    made = []

    def items():
        for number in range(20):
            made.append(number)
            yield Item(str(number), Path(), None, encoded=ImageBytes("x", bytes(4)))

    ahead = read_ahead(items())
    assert next(ahead).name == "0"
    time.sleep(0.3)
    assert len(made) <= 5
    assert [item.name for item in ahead] == [str(number) for number in range(1, 20)]


def test_a_parquet_file_that_unpacks_to_much_more_than_its_size_is_not_read(tmp_path):
    pytest.importorskip("datasets")
    import pyarrow as pa
    from pyarrow.parquet import write_table

    folder = parquet(tmp_path / "set", "test.parquet", range(2))
    assert len(listed(f"hf:{folder}")[0]) == 2
    table = pa.table({"image": [{"bytes": bytes(100 * 2**20), "path": None}], "label": [0]})
    write_table(table, folder / "test.parquet", compression="zstd")
    assert (folder / "test.parquet").stat().st_size < 100_000
    with pytest.raises(sg.InputError, match=r"and unpacks to .* for one column of one row group"):
        listed(f"hf:{folder}")


def test_a_parquet_file_of_the_hub_is_checked_before_its_rows(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    import pyarrow as pa
    from pyarrow.parquet import write_table

    from steadygaze.data import tables

    folder = parquet(tmp_path / "set", "test-00000-of-00002.parquet", range(2))
    last = pa.table({"image": [{"bytes": b"\0" * 100 * 2**20, "path": None}], "label": [0]})
    write_table(last, folder / "test-00001-of-00002.parquet", compression="zstd", use_dictionary=False)
    monkeypatch.setattr(tables, "_local_folder", lambda spec: None)  # as if its files were far away
    reader = tables.TableRows.open(StreamSpec.parse(f"hf:{folder}"))
    assert len(list(reader.samples())) == 2
    assert "unpacks to" in str(reader.damaged)


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_compressed_arrow_file_is_not_read(tmp_path, kind, compression):
    pytest.importorskip("datasets")
    import pyarrow as pa

    folder = tmp_path / "set"
    folder.mkdir()
    table = pa.table({"image": [{"bytes": png(1), "path": None}] * 3, "label": [0, 1, 0]})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with make(folder / "test.arrow", table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=2)
    spec = StreamSpec.parse(f"hf:{folder}?image=image")
    if compression is None:
        from steadygaze.data.tables import TableRows

        assert len(list(TableRows.open(spec).samples())) == 3
    else:
        with pytest.raises(sg.InputError, match="compressed"):
            open_stream(spec, Unlabeled())


@pytest.mark.parametrize("extension", ["jpg", "skipped"])
@pytest.mark.parametrize("place", ["pipe:cat", "memory://"])
def test_a_stream_that_unpacks_to_much_more_than_it_has_is_not_read_further(
    tmp_path, monkeypatch, place, extension
):
    import fsspec

    monkeypatch.setattr("steadygaze.data.tar_shards.LEAST_UNPACKED", 2**20)
    members = [(f"{number}.{extension}", bytes(5 * 2**20)) for number in range(4)]
    file = write_tar(tmp_path / "a.tar.gz", [*members, ("last.png", png(1)), ("last.cls", b"0")], "w:gz")
    with fsspec.open("memory://a.tar.gz", "wb") as copy:
        copy.write(file.read_bytes())
    items, damaged = listed(f"wds:pipe:cat {file}" if place == "pipe:cat" else "wds:memory://a.tar.gz")
    assert "last" not in [item.name for item in items] and "times its size" in damaged[0]
    rest, damaged = listed(f"wds:pipe:zcat {file}")  # not compressed: it has what it unpacks to
    assert "last" in [item.name for item in rest] and not damaged
