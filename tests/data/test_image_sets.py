"""Image sets for k-NN in their published layouts, whole and broken."""

from pathlib import Path

import numpy as np
import pytest

from helpers.benchmark_trees import SPECIES, cifar, plant
from steadygaze.data.datasets.image_sets import cifar100, inaturalist_mini, pneumonia
from steadygaze.data.datasets.imagenet import imagenet_names, imagenet_synsets
from steadygaze.errors import InputError


def test_the_lists_of_imagenet() -> None:
    assert len(imagenet_synsets()) == len(imagenet_names()) == 1000 and imagenet_synsets()[281] == "n02123045"
    assert imagenet_names()[281].startswith("tabby")
    for subset in ("a", "r"):
        assert len(imagenet_synsets(subset)) == 200 and set(imagenet_synsets(subset)) < set(
            imagenet_synsets()
        )


def test_inaturalist(tmp_path: Path) -> None:
    plant(tmp_path, [f"{split}/{name}" for split in ("train_mini", "val") for name in SPECIES])
    with pytest.raises(InputError, match=r"expected 10000 species .* found 2"):
        inaturalist_mini(tmp_path)
    found = inaturalist_mini(tmp_path, partial=True)
    assert found.classes == SPECIES and found.notes == ("2 of 10000 species",)
    assert found.train.labels.tolist() == [0, 0, 1, 1] and len(found.test) == 4
    assert found.train[2].mode == "RGB" and np.asarray(found.train[2])[0, 0, 0] == pytest.approx(10, abs=2)
    (tmp_path / "val" / SPECIES[0]).rename(tmp_path / "gone")
    with pytest.raises(InputError, match="lacks 1 of 2 species folders: 00000"):
        inaturalist_mini(tmp_path)
    found = inaturalist_mini(tmp_path, partial=True)
    assert found.classes == SPECIES[1:] and found.train.labels.tolist() == [0, 0]
    with pytest.raises(InputError, match=r"val.* does not exist"):
        (tmp_path / "val").rename(tmp_path / "validation")
        inaturalist_mini(tmp_path)


def test_pneumonia(tmp_path: Path) -> None:
    plant(
        tmp_path / "chest_xray",
        [f"{s}/{c}" for s in ("train", "val", "test") for c in ("NORMAL", "PNEUMONIA")],
    )
    with pytest.raises(InputError, match="expected 5216 images"):
        pneumonia(tmp_path)
    found = pneumonia(tmp_path, partial=True)
    assert found.classes == ("NORMAL", "PNEUMONIA") and found.test.labels.tolist() == [0, 0, 1, 1]
    assert found.notes == ("4 of 5216 images", "4 of 624 images")
    assert "val" in str(pneumonia(tmp_path / "chest_xray", validation=True, partial=True).test.sources[0])
    (tmp_path / "chest_xray" / "test" / "NORMAL").rename(tmp_path / "away")
    with pytest.raises(InputError, match="lacks 1 of 2 class folders: NORMAL"):
        pneumonia(tmp_path, partial=True)


def test_both_editions_of_cifar_100_are_the_same_images(tmp_path: Path) -> None:
    data, one, two = cifar(tmp_path)
    for place in (one, one.parent, two, two.parent):
        found = cifar100(place)
        assert found.classes == ("apple", "baby", "bear") and found.name == "cifar-100"
        assert (found.train.labels.tolist(), found.test.labels.tolist()) == ([1, 0, 2], [2, 1])
        pixels = np.asarray(found.test[0])
        assert pixels.shape == (32, 32, 3) and pixels[5, 7].tolist() == [
            int(data[3, c * 1024 + 5 * 32 + 7]) for c in range(3)
        ]
        assert cifar100(place, coarse=True).train.labels.tolist() == [0, 1, 1]


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    _, one, _ = cifar(tmp_path)
    (one / "train").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "owned").encode() + b"'\ntR.")
    with pytest.raises(InputError, match="does not belong into a file of images"):
        cifar100(one)
    assert not (tmp_path / "owned").exists()


def test_broken_cifar_100(tmp_path: Path) -> None:
    _, one, two = cifar(tmp_path)
    (two / "test.bin").write_bytes((two / "test.bin").read_bytes()[:-9])
    with pytest.raises(InputError, match="3074 bytes"):
        cifar100(two)
    (two / "test.bin").unlink()
    with pytest.raises(InputError, match=r"lacks test\.bin"):
        cifar100(two)
    (one / "test").write_bytes((one / "test").read_bytes()[:100])
    with pytest.raises(InputError, match="truncated"):
        cifar100(one)
    (one / "meta").unlink()
    with pytest.raises(InputError, match="lacks meta"):
        cifar100(one)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="found nothing"):
        cifar100(tmp_path / "empty")
