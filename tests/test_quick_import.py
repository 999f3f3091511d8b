"""Importing steadygaze and asking for help must not import anything heavy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

import steadygaze as sg

HEAVY = ("torch", "torchvision", "timm", "transformers", "numpy", "PIL", "matplotlib", "einops", "jaxtyping")
HEAVY += ("pydantic", "rich")  # 0.1 s each
SECONDS = ("torch", "torchvision", "timm", "transformers")  # import for seconds


@pytest.mark.parametrize(
    "code",
    [
        "import steadygaze; dir(steadygaze)",
        "from steadygaze.cli import app; app(['--help'], standalone_mode=False)",
        "from steadygaze.cli import app; app(['explain', '--help'], standalone_mode=False)",
        "from steadygaze.cli import app; app(['stress', '--help'], standalone_mode=False)",
        "from steadygaze.cli import app; app(['diffmask', 'train', '--help'], standalone_mode=False)",
        "from steadygaze.cli import app; app(['shapley', 'train', '--help'], standalone_mode=False)",
        "import steadygaze; steadygaze.UnknownNameError",
    ],
)
def test_nothing_heavy_is_imported(code):
    report = "import json, sys; print(); print(json.dumps([name for name in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    loaded = set(json.loads(done.stdout.strip().splitlines()[-1]))
    assert "steadygaze" in loaded
    assert not loaded & set(HEAVY)


def test_python_m_steadygaze_answers():
    command = [sys.executable, "-m", "steadygaze", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("steadygaze ")


@pytest.mark.parametrize("words", [["suites"], ["losses"], ["methods"], ["metrics"], ["train", "--list"]])
def test_listings_do_not_import_torch(words):
    code = f"from steadygaze.cli import app; app({words!r}, standalone_mode=False)"
    report = "import sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, check=True)


RUN_COMMANDS = """
import json, sys
from steadygaze.cli import app
commands, heavy = json.loads(sys.argv[1])
done = []
for words in commands:
    code = app(words, standalone_mode=False)
    done.append([code or 0, [name for name in heavy if name in sys.modules]])
print()
print(json.dumps(done))
"""


def run_commands(lines: list[str], folder: Path) -> list[tuple[int, list[str]]]:
    """Run commands in one process; the exit code of each, and the libraries that were imported by then."""
    asked = json.dumps([[line.split() for line in lines], SECONDS])
    command = [sys.executable, "-c", RUN_COMMANDS, asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    return [(code, loaded) for code, loaded in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with data of two images, and the folders run/verify and run/stress of runs on it."""
    folder = tmp_path_factory.mktemp("runs")
    for label, color in enumerate(("red", "blue")):
        (folder / "data" / str(label)).mkdir(parents=True)
        Image.new("RGB", (32, 32), color).save(folder / "data" / str(label) / "image.png")
    model, data, out = sg.load_model("embedded"), folder / "data", folder / "run"
    sg.verify(
        model,
        data,
        methods=["gae", "attixg+plus:start=2", "attixg+plus:start=3"],
        metrics=["insertion_aopc", "deletion_aopc", "agreement", "saco"],
        out=out / "verify",
    )
    sg.stress(
        model,
        data,
        suites=["corruptions", "attention", "occlusion"],
        corruptions="fog",
        severities="3",
        out=out / "stress",
    )
    return folder


def test_what_reads_runs_does_not_import_torch(runs):
    lines = [
        "report run/verify --figures figures",
        "report run/stress",
        "compare-models run/stress run/stress",
        "card run run -o card --model-card",
        "status run/verify run/stress",
        "export run/verify --to rows.csv",
        "cite run/stress",
    ]
    assert run_commands(lines, runs) == [(0, [])] * len(lines)
    assert (runs / "run" / "verify" / "report.html").is_file() and (runs / "card" / "card.html").is_file()


def test_a_mistyped_path_does_not_import_torch(runs):
    model = "-m embedded"
    lines = {
        f"explain nosuch.jpg {model}": 1,  # skips images that cannot be read
        f"attention nosuch.jpg {model}": 1,
        f"lens nosuch.jpg {model}": 1,
        f"features nosuch.jpg {model}": 2,
        f"outliers nosuch.jpg {model}": 2,
        f"calibrate nosuch.jpg {model}": 2,
        "explain data -m ./nosuch": 2,
        f"explain data {model} -c nosuch.pth": 2,
        f"explain data {model} -M calibrated --calibration nosuch.json": 2,
        f"verify {model} -d nosuch -o out": 2,
        f"verify {model} -d data --masks nosuch -o out": 2,
        f"stress {model} -d nosuch -s corruptions -o out": 2,
        "card embedded embedded -d nosuch -o out": 2,
        "card embedded embedded@nosuch.pth -d data -o out": 2,
        "app -m ./nosuch": 2,
        "compare-models run/stress nosuch": 2,
        "train nosuch": 2,
        "sweep nosuch": 2,
        "report nosuch": 2,
        "status nosuch": 2,
        "export nosuch --to rows.csv": 2,
    }
    assert dict(zip(lines, run_commands(list(lines), runs), strict=True)) == {
        line: (code, []) for line, code in lines.items()
    }
    assert not (runs / "out").exists()


def test_the_catalog_of_listings_is_what_is_registered():
    tool = Path(__file__).parents[1] / "tools" / "catalog.py"
    done = subprocess.run([sys.executable, tool, "--check"], check=False)
    assert done.returncode == 0, "run python tools/catalog.py"
