"""Checkpoints that would take much more memory than their size are refused before they are read."""

import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch

import steadygaze as sg
from steadygaze.loading.checkpoint import read_weights
from steadygaze.training.run_files import load_state

# the opcodes of {"a": bytearray(6_000_000_000)}
HUGE = b"\x80\x02}U\x01acbuiltins\nbytearray\n\x8a\x05" + struct.pack("<q", 6 * 10**9)[:5] + b"\x85Rs."
READERS = (read_weights, load_state)


def archive(path: Path, content: bytes, *, kind: int = zipfile.ZIP_STORED) -> Path:
    """A file of torch.save with another pickle, or its tensors compressed."""
    torch.save({"a": torch.zeros(100_000)}, path)
    with zipfile.ZipFile(path) as before:
        entries = {name: before.read(name) for name in before.namelist()}
    with zipfile.ZipFile(path, "w", kind) as after:
        for name, data in entries.items():
            after.writestr(name, content if content and name.endswith("data.pkl") else data)
    return path


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_asks_for_memory(tmp_path, read, zipped):
    path = tmp_path / "w.pt"
    if zipped:
        archive(path, HUGE)
    else:
        first = [pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
        path.write_bytes(b"".join(first) + HUGE + pickle.dumps([], 2))
    with pytest.raises(sg.CheckpointError, match="expected tensors, got a bytearray"):
        read(path)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("end", [b"", b"PK\x05\x06", b"PK\x05\x06" + bytes(18), b"x"])
def test_a_compressed_file_whatever_follows_it(tmp_path, read, end):
    path = archive(tmp_path / "w.pt", b"", kind=zipfile.ZIP_DEFLATED)
    path.write_bytes(path.read_bytes() + end)
    with pytest.raises(sg.CheckpointError, match=r"as torch\.save writes it|not a readable checkpoint"):
        read(path)


@pytest.mark.parametrize("read", READERS)
def test_entries_that_share_their_bytes(tmp_path, read):
    path = tmp_path / "w.pt"
    torch.save({"a": torch.zeros(10_000)}, path)
    with zipfile.ZipFile(path, "a") as file:
        data = next(entry for entry in file.infolist() if entry.filename.endswith("data/0"))
        for number in range(200):
            shared = zipfile.ZipInfo(data.filename[:-1] + str(number + 1))
            shared.header_offset, shared.file_size = data.header_offset, data.file_size
            shared.compress_size, shared.CRC = data.compress_size, data.CRC
            file.filelist.append(shared)
        file._didModify = True
    with pytest.raises(sg.CheckpointError, match="entries that are larger than the file"):
        read(path)


@pytest.mark.parametrize("new", [True, False])
def test_what_torch_writes_is_read(tmp_path, new):
    weights = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(3, dtype=torch.long)}
    torch.save(
        {"state_dict": weights, "epoch": 10**12}, tmp_path / "w.pt", _use_new_zipfile_serialization=new
    )
    assert torch.equal(read_weights(tmp_path / "w.pt")["a"], weights["a"])
    assert load_state(tmp_path / "w.pt")["epoch"] == 10**12


def test_a_tensor_that_is_larger_than_its_file(tmp_path):
    path = archive(tmp_path / "w.pt", b"")
    with zipfile.ZipFile(path) as file:
        content = next(file.read(name) for name in file.namelist() if name.endswith("data.pkl"))
    size = b"J" + struct.pack("<i", 100_000)
    assert content.count(size) == 2  # of the storage, and of the tensor
    first, second, last = content.split(size)
    archive(path, first + size + second + b"J" + struct.pack("<i", 2 * 10**9) + last)
    with pytest.raises(sg.CheckpointError, match=r"larger than|not a readable checkpoint"):
        read_weights(path)
