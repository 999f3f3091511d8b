"""Time and memory of everything that reads the rows of a large run.

    python -m benchmarks.rows [--rows 5000000] [--folder DIR] [--only report,compare]

Makes synthetic runs in a temporary folder (kept if --folder is given): a verify run of 40 methods and 9
metrics, and stress runs of 15 corruptions at 5 severities, each with `--rows` rows; `compare` compares two of
half the rows. Each job runs in a new process. Prints a Markdown table: wall time, CPU time of all threads
(what counts on a busy machine), and the peak of resident memory, beside a plain pandas read of the same rows
as Parquet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

METHODS = [f"method{number}+plus" for number in range(40)]
CURVES = ["insertion_accuracy", "deletion_accuracy", "insertion_aopc", "deletion_aopc"]
METRICS = [
    *CURVES,
    "positive_perturbation",
    "negative_perturbation",
    "average_precision",
    "gini",
    "rank_stability",
]
RATIOS = [round(0.1 * step, 1) for step in range(1, 10)]
CORRUPTIONS = ["gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur"]
CORRUPTIONS += [
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
]
CORRUPTIONS += ["jpeg_compression"]  # not imported: jobs that need no torch should not load it
SETTINGS = ["clean", *(f"{name}/{severity}" for name in CORRUPTIONS for severity in range(1, 6))]
STRESS_METRICS = ["top1", "top5", "confidence"]
PIECE = 20_000  # rows that are written at a time

JOBS = {
    "export": ("export to Parquet", "verify"),
    "pandas": ("plain pandas read of the Parquet file", "verify"),
    "read": ("columns of the rows", "verify"),
    "table": ("table of the verify run (`Rows.table`)", "verify"),
    "report": ("report of the verify run", "verify"),
    "cards": ("card of the stress run (`Rows.cards`)", "stress"),
    "stress-report": ("report of the stress run", "stress"),
    "compare": ("comparison of two stress runs", "before"),
    "resume": ("reading rows to resume a run (`Done`)", "verify"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--folder", type=Path, help="where the runs are made; they are kept and used again")
    parser.add_argument("--only", default=",".join(JOBS), help=f"jobs, of {', '.join(JOBS)}")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.job:
        run_job(chosen.job, chosen.folder)
        return
    if chosen.folder:
        measure(chosen.folder, chosen.rows, chosen.only.split(","))
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), chosen.rows, chosen.only.split(","))


def measure(folder: Path, rows: int, jobs: list[str]) -> None:
    """Make the runs that the jobs need, run each job, and print the table."""
    make = {
        "verify": lambda out: write_verify(out, rows),
        "stress": lambda out: write_stress(out, rows, 0),
        "before": lambda out: write_stress(out, rows // 2, 0),
        "after": lambda out: write_stress(out, rows // 2, 1),
    }
    needed = dict.fromkeys([JOBS[job][1] for job in jobs] + ["after"] * ("compare" in jobs))
    for name in needed:
        if not (folder / name / "run.json").exists():
            print(f"making {name}", file=sys.stderr, flush=True)
            make[name](folder / name)
    print("| job | rows | time, s | CPU time, s | peak memory, MiB |\n| --- | ---: | ---: | ---: | ---: |")
    for job in jobs:
        seconds, busy, memory = child(job, folder)
        print(f"| {JOBS[job][0]} | {rows:,} | {seconds:.1f} | {busy:.1f} | {memory:.0f} |", flush=True)


def child(job: str, folder: Path) -> tuple[float, float, float]:
    """Wall time, CPU time and peak memory of a job in a process of its own."""
    began = time.perf_counter()
    words = [sys.executable, "-m", "benchmarks.rows", "--job", job, "--folder", str(folder)]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{job} failed")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def run_job(job: str, folder: Path) -> None:
    """One job; called in a new process."""
    if job == "pandas":
        import pandas as pd

        pd.read_parquet(folder / "rows.parquet")
        return
    from steadygaze.runs.rows import Rows

    if job == "read":
        Rows.read(folder / "verify").columns()
    elif job == "table":
        Rows.read(folder / "verify").table().csv()
    elif job == "cards":
        [list(card.records()) for card in Rows.read(folder / "stress").cards()]
    elif job == "resume":
        from steadygaze.runs.store import Done

        Done(folder / "verify")
    elif job == "export":
        Rows.read(folder / "verify").to_parquet(folder / "rows.parquet")
    else:
        from steadygaze.cli import app

        to = ["--out", str(folder / "after" / "compare.html")]
        words = {
            "report": ["report", str(folder / "verify")],
            "stress-report": ["report", str(folder / "stress")],
            "compare": ["compare-models", *(str(folder / name) for name in ("before", "after")), *to],
        }
        app(words[job])


# -- synthetic runs --------------------------------------------------------------------------------


def write_verify(folder: Path, rows: int) -> None:
    """A verify run of `rows` rows, image by image."""
    settings = {
        "kind": "verify",
        "data": "synthetic",
        "ratios": RATIOS,
        "columns": [[method, "logit"] for method in METHODS],
        "metrics": METRICS,
    }
    images = max(1, rows // (len(METHODS) * len(METRICS)))
    write_run(folder, {**settings, "images": images}, verify_lines(images))


def verify_lines(images: int) -> Iterator[str]:
    rng = np.random.default_rng(0)
    for image in range(images):
        values = rng.normal(50, 20, (len(METHODS), len(METRICS))).round(6).tolist()
        curves = rng.uniform(0, 100, (len(METHODS), len(CURVES), len(RATIOS))).round(5).tolist()
        for m, method in enumerate(METHODS):
            for k, metric in enumerate(METRICS):
                detail = (
                    f',"detail":{curves[m][k]},"note":"removal"'.replace(" ", "") if k < len(CURVES) else ""
                )
                yield (
                    f'{{"model":"synthetic","weights":"77ffc47b0deeac8b","method":"{method}","score":"logit",'
                    f'"metric":"{metric}","image":"{image_name(image)}","value":{values[m][k]}{detail},'
                    f'"seed":0,"content":"{7919 * image:016x}"}}\n'
                )


def write_stress(folder: Path, rows: int, model: int) -> None:
    """A stress run of `rows` rows, setting by setting in batches of 64 images."""
    from steadygaze.runs.settings import CLEAN, Setting

    settings = {
        "kind": "stress",
        "data": "synthetic",
        "classes": 1000,
        "suite": ["corruptions"],
        "corruptions": CORRUPTIONS,
        "severities": [1, 2, 3, 4, 5],
        "conditions": [
            CLEAN.record(),
            *(
                Setting("corruptions", name, severity, minor=True).record()
                for name in CORRUPTIONS
                for severity in (1, 2, 3, 4, 5)
            ),
        ],
    }
    images = max(1, rows // (len(SETTINGS) * len(STRESS_METRICS)))
    write_run(folder, {**settings, "images": images}, stress_lines(images, model), f"synthetic{model}")


def stress_lines(images: int, model: int) -> Iterator[str]:
    rng = np.random.default_rng(model)
    for first in range(0, images, 64):
        batch = range(first, min(first + 64, images))
        for number, setting in enumerate(SETTINGS):
            correct = rng.random((len(batch), 2)) < 0.8 - 0.1 * (number % 6)
            confidence = rng.random(len(batch)).round(6).tolist()
            for k, image in enumerate(batch):
                label = image % 1000
                top1, top5 = int(correct[k, 0]), int(correct[k].any())
                numbers = (f'{top1},"detail":[{label},{label if top1 else 7}]', top5, confidence[k])
                for metric, value in zip(STRESS_METRICS, numbers, strict=True):
                    yield (
                        f'{{"model":"synthetic{model}","weights":"77ffc47b0deeac8b","setting":"{setting}",'
                        f'"metric":"{metric}","image":"{image_name(image)}","value":{value},"seed":0,'
                        f'"content":"{7919 * image:016x}"}}\n'
                    )


def image_name(image: int) -> str:
    return f"n{image % 1000:08d}/ILSVRC2012_val_{image:08d}.JPEG"


def write_run(folder: Path, settings: dict, lines: Iterator[str], model: str = "synthetic") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"model": model, "weights": "77ffc47b0deeac8b", "seed": 0, "versions": {}, **settings}
    with (folder / "rows-00000.jsonl").open("w") as file:
        piece: list[str] = []
        for line in lines:
            piece.append(line)
            if len(piece) == PIECE:
                file.write("".join(piece))
                piece.clear()
        file.write("".join(piece))
    (folder / "run.json").write_text(json.dumps({"settings": facts, "about": {}}))


if __name__ == "__main__":
    main()
