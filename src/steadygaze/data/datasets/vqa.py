"""VQAv2: questions about COCO images, each with the answers of ten people (Goyal et al. 2017).

FOLDER/*questions*.json      {"questions": [{"question_id", "image_id", "question"}, ...]}
FOLDER/*annotations*.json    {"annotations": [{"question_id", "answers": [{"answer"}, ...]}, ...]}
FOLDER/**/COCO_val2014_000000262148.jpg    images: the digits at the end of the name are the image_id
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steadygaze.data.images import images_in
from steadygaze.errors import InputError

IMAGE_ID = re.compile(r"(\d+)$")


@dataclass(frozen=True)
class VisualQuestionItem:
    """A question about an image, and what people answered."""

    question_id: int
    image: Path
    question: str
    answers: tuple[str, ...]


def read_vqa(folder: Path) -> tuple[list[VisualQuestionItem], list[int]]:
    """The questions in the order of their file, and the ids of those whose image is missing."""
    questions = _records(folder, "questions", ("question_id", "image_id", "question"))
    annotations = _records(folder, "annotations", ("question_id", "answers"))
    answers = {
        record["question_id"]: tuple(str(one["answer"]) for one in record["answers"])
        for record in annotations
    }
    images = _by_id(images_in(folder))
    items, missing = [], []
    for record in questions:
        number = int(record["question_id"])
        if number not in answers:
            raise InputError(f"{folder}: question {number} has no annotation. Give the files of one split.")
        image = images.get(int(record["image_id"]))
        if image is None:
            missing.append(number)
        else:
            items.append(VisualQuestionItem(number, image, str(record["question"]), answers[number]))
    if not items:
        raise InputError(
            f"{folder}: expected images whose names end in their id, such as COCO_val2014_000000262148.jpg; "
            f"none of the {len(questions)} questions has one"
        )
    return items, missing


def _by_id(paths: Iterable[Path]) -> dict[int, Path]:
    found = ((IMAGE_ID.search(path.stem), path) for path in paths)
    return {int(match[1]): path for match, path in found if match}


def _records(folder: Path, kind: str, keys: tuple[str, ...]) -> list[dict[str, Any]]:
    """The records of the one file of this kind, checked."""
    if not folder.is_dir():
        raise InputError(f"expected a folder with questions, annotations and images, got {folder}")
    files = sorted(path for path in folder.glob("*.json") if kind in path.name.lower())
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "none"
        raise InputError(f"{folder}: expected one file *{kind}*.json, got {names}")
    try:
        content = json.loads(files[0].read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{files[0]}: expected JSON ({error})") from error
    records = content.get(kind) if isinstance(content, dict) else None
    if not isinstance(records, list) or not records:
        raise InputError(f"{files[0]}: expected a list under {kind!r}")
    for record in records:
        if not isinstance(record, dict) or any(key not in record for key in keys):
            raise InputError(f"{files[0]}: expected {', '.join(keys)} in every record, got {record!r:.120}")
    return records
