"""Plant one fault at a time and see whether the default tier of the tests finds it.

    python tools/plant_faults.py [WORD ...] [--whole]

Each fault changes one line of a copy of the checkout. The tests that should find it are run; with `--whole`,
a fault that they miss is looked for by the whole default tier. A test that finds a fault is run again without
it. Exits 1 if fewer than 28 of 30 faults are found.
"""

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "benchmarks", "tools", "pyproject.toml")
SHARE = 28 / 30
DEFAULT_TIER = ("-m", "not full and not browser")
HEAVY = (  # imported once, before the process is forked for each fault
    *(
        "torch",
        "torchvision",
        "timm",
        "transformers",
        "captum.attr",
        "pytorch_grad_cam",
        "pandas",
        "pydantic",
    ),
    *("scipy.stats", "sklearn", "skimage", "typer", "hypothesis", "beartype", "jaxtyping", "safetensors"),
)


@dataclass(frozen=True)
class Fault:
    """Replaces `old`, which stands once in `file`, by `new`; `tests` should notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str

    @property
    def room(self) -> str:
        return self.file.partition("/")[0]


FAULTS = (
    Fault(
        "hidden tokens count in a mean",
        "vit/masking.py",
        "return torch.nanmean(x, *args, **kwargs)",
        "return torch.nan_to_num(x).mean(*args, **kwargs)",
        "tests/faithfulness/test_masking.py",
    ),
    Fault(
        "removal takes the wrong patches",
        "vit/removal.py",
        "group.keep + vit.prefix",
        "group.keep",
        "tests/faithfulness/test_removal.py",
    ),
    Fault(
        "a view is not compared with its model",
        "vit/view.py",
        "    if not error <= min(200 * torch.finfo(expected.dtype).eps ** 0.75, 0.1):",
        "    if False:",
        "tests/vit/test_adapter_registry.py",
    ),
    Fault(
        "held norms forget the mean",
        "trace/rules.py",
        "return (g - g.mean(ctx.axes, keepdim=True)) * rstd, None",
        "return g * rstd, None",
        "tests/methods/test_methods.py::test_freezing",
    ),
    Fault(
        "freezing is turned round",
        "trace/rules.py",
        "attention=1.0 - freeze",
        "attention=freeze",
        "tests/methods/test_methods.py::test_freezing",
    ),
    Fault(
        "the effect of a token on itself is added",
        "trace/capture.py",
        "mean, a) - own",
        "mean, a) + own",
        "tests/trace/test_memory.py tests/methods/test_methods.py::test_bare_names",
    ),
    Fault(
        "gates are not held",
        "trace/seam.py",
        "return func(x.detach(), y) if gate_x else func(x, y.detach())",
        "return func(x, y)",
        "tests/methods/test_properties.py::test_tokens_and_offsets_add_up_to_the_logit",
    ),
    Fault(
        "biases are shared out with their sign",
        "trace/replay.py",
        "weight = (sources * b).sum(-1).abs()",
        "weight = (sources * b).sum(-1)",
        "tests/methods/test_methods.py::test_options",
    ),
    Fault(
        "skipplus begins a layer off",
        "methods/aggregate.py",
        "else -(-depth // 2)",
        "else depth // 2",
        "tests/methods/test_methods.py::test_aggregators",
    ),
    Fault(
        "rollout multiplies in the wrong order",
        "methods/aggregate.py",
        "for l in reversed(span):",
        "for l in span:",
        "tests/methods/test_methods.py::test_bare_names",
    ),
    Fault(
        "the residual of rollout counts twice",
        "methods/attention.py",
        "return 0.5 * m + 0.5 * identity_like(m)",
        "return 0.5 * m + identity_like(m)",
        "tests/methods/test_methods.py::test_bare_names",
    ),
    Fault(
        "Grad-CAM takes the largest gradient for the mean",
        "methods/cam.py",
        "return _weighted(a, g.mean(1))",
        "return _weighted(a, g.amax(1))",
        "tests/methods/test_peers.py",
    ),
    Fault(
        "attention that is sent for attention that is received",
        "methods/gradient.py",
        "received = trace.weights(layer).mean((1, 2))",
        "received = trace.weights(layer).mean((1, 3))",
        "tests/methods/test_methods.py::test_bare_names",
    ),
    Fault(
        "ALTI is normalized along the wrong axis",
        "methods/decomposition.py",
        "total = c.sum(-1, keepdim=True)",
        "total = c.sum(-2, keepdim=True)",
        "tests/methods/test_methods.py::test_bare_names",
    ),
    Fault(
        "Shapley values do not sum to the difference",
        "methods/perturbation.py",
        "centered = z - z.mean(2, keepdim=True)",
        "centered = z",
        "tests/methods/test_search.py",
    ),
    Fault(
        "patches are ranked the other way round",
        "faithfulness/removal.py",
        "return maps.flatten(-2).argsort(dim=-1, descending=True, stable=True)",
        "return maps.flatten(-2).argsort(dim=-1, descending=False, stable=True)",
        "tests/faithfulness/test_removal.py",
    ),
    Fault(
        "one patch more at each ratio",
        "faithfulness/removal.py",
        "k = int(ratio * p)",
        "k = int(ratio * p) + 1",
        "tests/faithfulness/test_removal.py",
    ),
    Fault(
        "AUROC by an off-by-one of its ranks",
        "faithfulness/localization.py",
        "p * (p + 1) / 2",
        "p * (p - 1) / 2",
        "tests/faithfulness/test_sanity.py",
    ),
    Fault(
        "the divergence has the wrong sign",
        "faithfulness/perturbation.py",
        "(log_p[:, :1] - log_p)",
        "(log_p - log_p[:, :1])",
        "tests/faithfulness/test_perturbation.py",
    ),
    Fault(
        "a reversed map counts as another map",
        "faithfulness/sanity.py",
        "Values((1 - detail.abs()).mean(-1)",
        "Values((1 - detail).mean(-1)",
        "tests/faithfulness/test_sanity.py",
    ),
    Fault(
        "errors of calibration cancel out",
        "robustness/calibration.py",
        "gap = (total_right - total_sure).abs().sum()",
        "gap = (total_right - total_sure).sum().abs()",
        "tests/robustness/test_calibration.py",
    ),
    Fault(
        "the attack helps the model",
        "robustness/attacks.py",
        "x + alpha * slope.sign()",
        "x - alpha * slope.sign()",
        "tests/robustness/test_attacks.py",
    ),
    Fault(
        "Gini coefficient off by one",
        "robustness/attention.py",
        "(2 * rank - n - 1)",
        "(2 * rank - n)",
        "tests/robustness/test_attention_measures.py",
    ),
    Fault(
        "relative mCE without the clean error",
        "robustness/scores.py",
        "(ours[name] - clean).sum()",
        "ours[name].sum()",
        "tests/robustness/test_scores.py",
    ),
    Fault(
        "normalization in the wrong order",
        "data/preprocess.py",
        ".div(255).sub(mean).div(std)",
        ".div(255).div(std).sub(mean)",
        "tests/data/test_preprocess.py",
    ),
    Fault(
        "images are not turned upright",
        "data/images.py",
        "rgb = to_rgb(ImageOps.exif_transpose(image))",
        "rgb = to_rgb(image)",
        "tests/data",
    ),
    Fault(
        "context is broadcast with half its weight",
        "modules/cb.py",
        "return torch.lerp(x, x.mean(axes, keepdim=True), 0.5)",
        "return torch.lerp(x, x.mean(axes, keepdim=True), 0.25)",
        "tests/modules/test_modules.py",
    ),
    Fault(
        "relevance is pushed out of the object",
        "training/losses/relevance.py",
        "(r * s - s).pow(2)",
        "(r * s + s).pow(2)",
        "tests/training/test_losses.py",
    ),
    Fault(
        "temperature once instead of twice",
        "training/losses/distillation.py",
        "return t * t * F.kl_div",
        "return t * F.kl_div",
        "tests/training/test_losses.py",
    ),
    Fault(
        "a half line stays in a file of rows",
        "runs/store.py",
        "    if end < size:\n",
        "    if False:\n",
        "tests/runs/test_rows.py tests/runs/test_kill.py",
    ),
    Fault(
        "rows are not flushed to the disk",
        "runs/store.py",
        "            os.fsync(self._file)",
        "            pass",
        "tests/runs/test_rows.py",
    ),
    Fault(
        "files are not flushed before they are renamed",
        "files.py",
        "            os.fsync(file.fileno())",
        "            pass",
        "tests/methods/test_diffmask.py tests/training/test_kill.py",
    ),
    Fault(
        "tensors of a checkpoint are not checked",
        "loading/checkpoint.py",
        "    _check_tensors(weights, path)\n    return weights",
        "    return weights",
        "tests/loading/test_fuzz.py",
    ),
    Fault(
        "compressed checkpoints are read",
        "loading/checkpoint.py",
        "entry.compress_type != zipfile.ZIP_STORED",
        "entry.compress_type == -1",
        "tests/loading",
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="Only faults whose file or name contains one of these.")
    parser.add_argument("--whole", action="store_true", help="Also run the whole default tier.")
    options = parser.parse_args()
    words = options.words or [""]
    chosen = [fault for fault in FAULTS if any(word in f"{fault.file} {fault.name}" for word in words)]
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    for library in HEAVY:
        with suppress(ImportError):
            importlib.import_module(library)
    found = 0
    print("| fault | room | found by | seconds |\n| --- | --- | --- | ---: |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = copied(Path(folder) / "checkout")
        for number, fault in enumerate(chosen, 1):
            begin = time.monotonic()
            test = found_by(copy, fault, number, whole=options.whole)
            found += test is not None
            seconds = time.monotonic() - begin
            print(f"| {fault.name} | {fault.room} | {test or '**missed**'} | {seconds:.0f} |", flush=True)
    print(f"\n{found} of {len(chosen)} found")
    sys.exit(found < SHARE * len(chosen))


def found_by(copy: Path, fault: Fault, number: int, *, whole: bool) -> str | None:
    """The test that fails with the fault and passes without it; None if there is none."""
    path = copy / "src" / "steadygaze" / fault.file
    source = path.read_text(encoding="utf-8")
    count = source.count(fault.old)
    if count != 1:
        sys.exit(
            f"{fault.file}: expected {fault.old!r} once, got it {count} times. Mend the table of faults."
        )
    write(path, source.replace(fault.old, fault.new), number)
    test = first_failure(copy, fault.tests.split())
    if test is None and whole:
        test = first_failure(copy, ["tests"])
    write(path, source, number)
    if test is not None and first_failure(copy, [test]) is not None:
        sys.exit(f"{test} fails without the fault too")
    return test


def copied(folder: Path) -> Path:
    """A copy of what is tested; the rest of the checkout is linked."""
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name not in COPIED:
            (folder / path.name).symlink_to(path)
        elif path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(path, folder / path.name)
    return folder


def write(path: Path, source: str, number: int) -> None:
    """Write a source file with a time of its own, so that no older bytecode is taken for it."""
    later = max(time.time(), path.stat().st_mtime) + number
    path.write_text(source, encoding="utf-8")
    os.utime(path, (later, later))


def first_failure(copy: Path, tests: Sequence[str]) -> str | None:
    """The first test that fails, of the default tier; None if all pass."""
    report = copy / "report.txt"
    report.unlink(missing_ok=True)
    arguments = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *DEFAULT_TIER, *tests]
    child = os.fork() if hasattr(os, "fork") else None
    if child == 0:
        code = 3
        try:
            os.chdir(copy)
            output = os.open(report, os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.path[:0] = [str(copy / "src"), str(copy / "tests"), str(copy)]
            import pytest

            code = int(pytest.main(arguments))
        finally:
            sys.stdout.flush()
            os._exit(code)
    if child is not None:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        text = report.read_text(encoding="utf-8", errors="replace")
    else:
        command = [sys.executable, "-m", "pytest", *arguments]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
        code, text = done.returncode, done.stdout
    if code == 0:
        return None
    failed = [line for line in text.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    if not failed:
        sys.exit(f"the tests did not run:\n{text[-2000:]}")
    return failed[0].split(" - ")[0].split(maxsplit=1)[1]


if __name__ == "__main__":
    main()
