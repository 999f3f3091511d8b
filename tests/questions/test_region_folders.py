"""Folders of segmenters and of a detector, loaded with `load_model` and asked about a region."""

from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image

import steadygaze as sg
from benchmarks import region_zoo
from steadygaze.data.preprocess import Preprocess
from steadygaze.errors import UnknownNameError

NAMES = {0: "road", 1: "sky", 2: "traffic light", 3: "tree, plant", 4: "person"}
PROCESSORS = {
    "DPTForSemanticSegmentation": lambda: transformers.DPTImageProcessor(size={"height": 32, "width": 32}),
    "SegformerForSemanticSegmentation": lambda: transformers.SegformerImageProcessor(
        size={"height": 64, "width": 64}
    ),
    "YolosForObjectDetection": lambda: transformers.YolosImageProcessor(
        size={"shortest_edge": 32, "longest_edge": 64}
    ),
}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_folder_loads_and_knows_names_and_size(kind: str, tmp_path: Path) -> None:
    model = region_zoo.KINDS[kind]().float()
    model.config.id2label = NAMES
    model.save_pretrained(tmp_path)
    PROCESSORS[kind]().save_pretrained(tmp_path)
    loaded = sg.load_model(str(tmp_path))
    assert type(loaded.model).__name__ == kind and loaded.class_names == tuple(NAMES.values())
    image = loaded.preprocess(Image.new("RGB", (90, 50), "red"))[None]
    assert image.shape[-2:] == loaded.size
    target = sg.Detection if "Yolos" in kind else sg.Region
    found = sg.explain(loaded, image, target("traffic light", box=(4, 8, 20, 28)), "ixg")
    own = sg.explain(model, image, target(2, box=(4, 8, 20, 28)), "ixg")
    torch.testing.assert_close(found.scores, own.scores)
    asked = sg.ask(loaded, region=target("person", box=(4, 8, 20, 28)), image=image)
    assert isinstance(asked, sg.LoadedModel) and asked.class_names[:5] == tuple(NAMES.values())
    other = sg.ask(loaded, region=target("road", box=(0, 0, 20, 20)), image=image)
    assert len({asked.weights_hash, loaded.weights_hash}) == 2
    if target is sg.Region:
        assert other.weights_hash != asked.weights_hash
        assert sg.explain(loaded, image, sg.Region("tree", point=(1, 2)), "ixg").target.tolist() == [3]
    with pytest.raises(UnknownNameError):
        sg.explain(loaded, image, target("bicycle", box=(4, 8, 20, 28)))


def test_detectors_crop_nothing() -> None:
    processor = transformers.YolosImageProcessor(size={"shortest_edge": 32, "longest_edge": 64})
    preprocess = Preprocess.from_transformers(processor)
    assert preprocess.size == (32, 32) and not preprocess.config["crop"]
