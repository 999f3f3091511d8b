"""Importing steadygaze and asking for help must not import anything heavy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "torchvision", "timm", "transformers", "numpy", "PIL", "matplotlib", "einops", "jaxtyping")
HEAVY += ("pydantic", "rich")  # 0.1 s each


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


def test_the_catalog_of_listings_is_what_is_registered():
    tool = Path(__file__).parents[1] / "tools" / "catalog.py"
    done = subprocess.run([sys.executable, tool, "--check"], check=False)
    assert done.returncode == 0, "run python tools/catalog.py"
