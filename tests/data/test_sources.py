"""Data in memory: batches, a Dataset and a DataLoader give the same stream of named batches."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from steadygaze.data.memory import InMemoryData, TensorBatch, is_folder
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import InputError

IMAGES = torch.randn(7, 3, 8, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(7)
MASKS = (torch.arange(7 * 64).view(7, 8, 8) % 3 == 0).to(torch.uint8) * 255


class Listed(Dataset):
    def __init__(self, samples: list) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        return self.samples[index]


class Streamed(IterableDataset):
    def __iter__(self):
        yield from zip(IMAGES, LABELS.tolist(), MASKS, strict=True)


def batches(size: int = 3) -> list:
    return list(zip(IMAGES.split(size), LABELS.split(size), MASKS.split(size), strict=True))


def joined(data: InMemoryData) -> TensorBatch:
    parts = list(data)
    masks = [part.masks for part in parts if part.masks is not None]
    return TensorBatch(
        tuple(name for part in parts for name in part.names),
        torch.cat([part.images for part in parts]),
        torch.cat([part.labels for part in parts]),
        torch.cat(masks) if masks else None,
    )


@pytest.mark.parametrize(
    ("data", "sizes"),
    [
        (batches(), [3, 3, 1]),
        ((batch for batch in batches()), [3, 3, 1]),
        (DataLoader(TensorDataset(IMAGES, LABELS, MASKS), batch_size=4), [4, 3]),
        (TensorDataset(IMAGES, LABELS, MASKS), [2, 2, 2, 1]),
        (Listed(list(zip(IMAGES.numpy(), LABELS.tolist(), MASKS.numpy() > 0, strict=True))), [2, 2, 2, 1]),
        (Streamed(), [2, 2, 2, 1]),
        ([(x.numpy(), y.tolist(), m[:, None].bool()) for x, y, m in batches()], [3, 3, 1]),
    ],
    ids=["list", "generator", "DataLoader", "TensorDataset", "Dataset", "IterableDataset", "arrays"],
)
def test_every_kind_gives_the_same_images(data, sizes):
    given = InMemoryData(data, batch_size=2)
    read = list(given)
    assert [len(batch) for batch in read] == sizes
    again = joined(InMemoryData(read and [(b.images, b.labels, b.masks) for b in read]))
    assert again.names == tuple("0123456") == tuple(name for batch in read for name in batch.names)
    assert torch.equal(again.images, IMAGES) and torch.equal(again.labels, LABELS)
    assert torch.equal(again.masks, MASKS)


@pytest.mark.parametrize("limit", [1, 3, 4, 7, 100])
def test_a_limit_cuts_the_last_batch(limit):
    for data in (batches(), TensorDataset(IMAGES, LABELS)):
        read = joined(InMemoryData(data, batch_size=3, limit=limit))
        assert len(read) == len(read.images) == min(limit, 7)
        assert InMemoryData(data, limit=limit).count == min(limit, 7)


def test_what_is_known_before_reading():
    assert InMemoryData(iter(batches())).count is None and not InMemoryData(iter(batches())).rereadable
    loader = DataLoader(TensorDataset(IMAGES, LABELS), batch_size=2)
    assert InMemoryData(loader).count == 7 and InMemoryData(loader).rereadable
    assert InMemoryData(batches()).rereadable and InMemoryData(Streamed()).count is None
    assert is_folder("images") and not is_folder(batches())


def test_a_dataset_of_pil_images_is_preprocessed():
    preprocess = Preprocess.resize_and_crop((8, 8), resize=10)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 4), np.uint8), "RGBA")
    mask = Image.fromarray((np.arange(600).reshape(20, 30) % 2 * 255).astype(np.uint8))
    (batch,) = InMemoryData(Listed([(image, 3, mask)]), preprocess=preprocess)
    white = Image.new("RGBA", image.size, "white")
    expected = preprocess(Image.alpha_composite(white, image).convert("RGB"))
    assert torch.equal(batch.images[0], expected) and torch.equal(batch.masks[0], preprocess.mask(mask))
    with pytest.raises(InputError, match="PIL images, and how this model preprocesses them is not known"):
        list(InMemoryData(Listed([(image, 3)])))


def test_label_maps():
    (batch,) = InMemoryData([(IMAGES, MASKS.long())], label_maps=True)
    assert batch.labels.shape == (7, 8, 8)
    with pytest.raises(InputError, match=r"label maps \(7, 8, 8\) of integers"):
        list(InMemoryData([(IMAGES, LABELS)], label_maps=True))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "at least one batch"),
        ([(IMAGES,)], r"got \['Tensor'\] as batch 0"),
        ((IMAGES, LABELS), "Put a single batch into a list"),
        ([(IMAGES[0], LABELS)], "A torch DataLoader makes batches"),
        ([((IMAGES * 9).to(torch.uint8), LABELS)], "expected floating point.*uint8 in batch 0"),
        ([(IMAGES, LABELS.float())], "expected 7 integers"),
        ([(IMAGES, LABELS[:6])], r"got torch.int64 of shape \(6,\) in batch 0"),
        ([(IMAGES, "labels")], r"got \['Tensor', 'str'\] as batch 0"),
        ([(IMAGES, LABELS, MASKS[:, :4])], r"masks: expected \(7, 8, 8\)"),
        ([(IMAGES, LABELS, MASKS // 2)], r"1 and 0; got \[0, 127\]"),
        (Listed([IMAGES[0]]), "expected a Dataset of .image, label.*got Tensor at index 0"),
        (Listed([(IMAGES[0], 0), (IMAGES[0, :, :4], 0)]), "samples 0 to 1 of the Dataset cannot be stacked"),
    ],
)
def test_wrong_data_is_refused(data, message):
    with pytest.raises(InputError, match=message):
        list(InMemoryData(data))


def test_other_kinds_are_refused():
    with pytest.raises(
        InputError, match="expected a folder, a list of batches, a Dataset or a DataLoader, got int"
    ):
        InMemoryData(3)
    with pytest.raises(InputError, match="got the path 'somewhere'"):
        InMemoryData("somewhere")
    with pytest.raises(InputError, match="insertion, miou: expected masks, but batch 0 has none"):
        list(InMemoryData([(IMAGES, LABELS)], masks_for=("insertion", "miou")))
