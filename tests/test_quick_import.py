"""Importing steadygaze and asking for help must not import anything heavy."""

import json
import subprocess
import sys

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
