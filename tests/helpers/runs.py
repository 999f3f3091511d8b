"""Shared by tests."""

from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from typer.testing import CliRunner

from steadygaze.cli import app
from steadygaze.data.datasets.imagenet import COMMON
from steadygaze.data.preprocess import Preprocess
from steadygaze.loading.loaded import LoadedModel
from steadygaze.runs.request import StressRequest
from steadygaze.runs.rows import Rows
from steadygaze.runs.settings import CLEAN, Setting


def image_folder(folder: Path) -> Path:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("airplane", "cat", "truck"):
        (folder / name).mkdir(parents=True)
        for number in range(8):
            pixels = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


class Page(HTMLParser):
    """Tags that are left open, addresses that lead outside, and the words."""

    VOID = frozenset({"meta", "link", "img", "br", "input", "wbr"})

    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.words, self.ids, self.rows = [], [], "", set(), 0
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        facts = dict(attrs)
        self.addresses += [facts[key] for key in ("src", "href") if key in facts]
        self.ids.add(facts.get("id"))
        self.rows += tag == "tr"
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.words += data


def made_up(names=COMMON, images=9, classes=1000, seed=0, severities=(1, 2, 3, 4, 5), model="a"):
    """Rows of a run that nobody ran."""
    rng = np.random.default_rng(seed)
    rows = []
    settings = [CLEAN, *(Setting("corruptions", n, s, minor=True) for n in names for s in severities)]
    for setting in settings:
        for i in range(images):
            facts = {
                "model": model,
                "weights": "w" + model,
                "setting": setting.label,
                "image": f"c{i % 3}/{i}",
                "seed": seed,
            }
            right, sure = int(rng.random() < 0.6), round(float(rng.random()), 4)
            rows.append({**facts, "metric": "top1", "value": right, "detail": [i % 3, i % 3 if right else 9]})
            rows.append({**facts, "metric": "confidence", "value": sure})
    facts = {
        "kind": "stress",
        "model": model,
        "weights": "w" + model,
        "data": "made up",
        "classes": classes,
        "seed": seed,
        "versions": {},
        "suite": ["corruptions"],
        "corruptions": list(names),
        "severities": list(severities),
        "conditions": [setting.record() for setting in settings],
    }
    return Rows([{"settings": facts, "about": {}}], rows)


MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
FEW = {"corruptions": "fog,jpeg_compression", "severities": "1,3", "epsilons": "8/255", "pgd_steps": 1}


def thousand() -> LoadedModel:
    """An untrained model of ImageNet's 1,000 classes on images of 32 pixels."""
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=1000
    ).eval()
    preprocess = Preprocess.resize_and_crop((32, 32), resize=36, interpolation="bilinear", mean=MEAN, std=STD)
    return LoadedModel(model, "thousand", preprocess, None, "none", "made")


def ask(data, out, suite="corruptions", options=None, bank=None, **more):
    given = {"limit": 4, "batch_size": 3, "num_workers": 0, **more}
    chosen = {**(FEW if options is None else options), "bank": bank}
    return StressRequest(model="embedded", data=data, out=out, suites=[suite], options=chosen, **given)


def rows_of(out: Path) -> list[str]:
    return sorted(line for file in sorted(out.glob("rows-*.jsonl")) for line in file.read_text().splitlines())


def cli(*words, code=0):
    done = CliRunner().invoke(app, ["stress", *map(str, words)])
    assert done.exit_code == code, (done.exit_code, done.output, done.exception)
    return done.output
