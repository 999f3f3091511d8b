"""A visitor of the page, over HTTP: uploads an image, calls a function of the page, and reads its answer.

visitor = Visitor("http://127.0.0.1:7860/")
answer = visitor.call("explain", visitor.upload("cat.jpg"), ["gae"], PREDICTED, DEFAULT_SCORE, False, True)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx

PREDICTED, DEFAULT_SCORE = "predicted class", "default of the method"


@dataclass
class Answer:
    """What the page answered: `data`, one entry for each output, or `error`; and its warnings."""

    data: list[Any] = field(default_factory=list)
    error: str | None = None
    warnings: list[str] = field(default_factory=list)


class Visitor:
    """One client with a session of its own. timeout: seconds to wait for the next message of the page."""

    def __init__(self, address: str, timeout: float = 120.0) -> None:
        self.http = httpx.Client(base_url=f"{address.rstrip('/')}/gradio_api/", timeout=timeout)
        self.session = uuid4().hex
        config = self.http.get(f"{address.rstrip('/')}/config").raise_for_status().json()
        self.functions = {entry["api_name"]: entry["id"] for entry in config["dependencies"]}

    def upload(self, file: str | Path) -> dict[str, Any]:
        """The file as an input of the page's functions."""
        content = {"files": (Path(file).name, Path(file).read_bytes())}
        (path,) = self.http.post("upload", files=content).raise_for_status().json()
        return as_input(path)

    def start(self, function: str, *inputs: Any) -> None:
        """Call a function of the page without waiting for its answer."""
        body = {"data": list(inputs), "fn_index": self.functions[function], "session_hash": self.session}
        self.http.post("queue/join", json=body).raise_for_status()

    @contextmanager
    def messages(self) -> Iterator[Iterator[dict[str, Any]]]:
        """The page's messages about the calls of this session. Leaving the context ends the connection."""
        with self.http.stream("GET", "queue/data", params={"session_hash": self.session}) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data:"))
            yield (json.loads(line.removeprefix("data:")) for line in lines)

    def answer(self) -> Answer:
        """Wait for the answer to the call that was started."""
        answer = Answer()
        with self.messages() as messages:
            for message in messages:
                if message["msg"] == "log":
                    answer.warnings.append(message["log"])
                elif message["msg"] == "process_completed":
                    if message["success"]:
                        answer.data = message["output"]["data"]
                    else:
                        answer.error = message["output"].get("error") or "error without a message"
                    return answer
        answer.error = "the connection ended without an answer"
        return answer

    def call(self, function: str, *inputs: Any) -> Answer:
        """Call a function of the page and wait for its answer."""
        self.start(function, *inputs)
        return self.answer()

    def explain(self, image: dict[str, Any], *methods: str) -> Answer:
        """Predictions and maps of these methods, with the page's default target and score."""
        return self.call("explain", image, list(methods), PREDICTED, DEFAULT_SCORE, False, True)


def as_input(path: str) -> dict[str, Any]:
    """A file on the server as an input of the page's functions."""
    return {"path": path, "meta": {"_type": "gradio.FileData"}}
