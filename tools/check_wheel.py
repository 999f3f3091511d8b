"""Install the wheel into an empty environment and run it there: python tools/check_wheel.py dist

Neither the checkout nor this interpreter's packages are visible to it. The wheel's size is printed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_MEGABYTES = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dist", type=Path)
    parser.add_argument("--python", default=sys.executable, help="Interpreter of the empty environment.")
    options = parser.parse_args()
    (wheel,) = options.dist.resolve().glob("*.whl")
    (sdist,) = options.dist.resolve().glob("*.tar.gz")
    for file in (sdist, wheel):
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
    if wheel.stat().st_size > MAX_MEGABYTES * 1e6:
        sys.exit(f"expected a wheel of at most {MAX_MEGABYTES} MB")
    with tempfile.TemporaryDirectory() as folder:
        check(wheel, Path(folder), options.python)


def check(wheel: Path, folder: Path, interpreter: str) -> None:
    """Demo, explain, verify and report, as a user runs them after `pip install`."""
    environment = folder / "environment"
    subprocess.run([interpreter, "-m", "venv", environment], check=True)
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    run([programs / "python", "-m", "pip", "install", "--quiet", wheel], folder)
    command = programs / "steadygaze"
    find = "import pathlib, steadygaze; print(pathlib.Path(steadygaze.__file__).parent)"
    package = Path(run([programs / "python", "-c", find], folder).strip())
    assert environment in package.parents, f"expected the installed package, got {package}"
    photos = folder / "photos"
    for image in sorted((package / "assets" / "demo").glob("*.png")):
        (photos / image.stem).mkdir(parents=True)
        (photos / image.stem / image.name).write_bytes(image.read_bytes())
    run([command, "demo", "--out", "demo"], folder)
    methods = ["--model", "embedded", "--methods", "gae,gaze_outline,random"]
    run([command, "explain", "photos", *methods, "--out", "seen"], folder)
    run([command, "verify", *methods, "--data", "photos", "--out", "run"], folder)
    run([command, "report", "run"], folder)
    for name in ("demo/grid.png", "seen/grid.png", "seen/manifest.json", "run/report.html"):
        assert (folder / name).stat().st_size > 1000, f"{name} was not written"
    print("demo, explain, verify and report run from the wheel alone")


def run(command: list[Path | str], folder: Path) -> str:
    """The output of a command in that folder, without the caller's Python paths."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"}
    print("$", *(Path(part).name if isinstance(part, Path) else part for part in command), flush=True)
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\n{done.stderr}\nexit code {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    main()
