"""Weights from files: read without running code, fitted to a model with every clash named, and hashed."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from steadygaze.errors import BadCheckpoint

Weights = dict[str, Tensor]
WRAPPERS = (
    "state_dict",
    "model_state_dict",
    "model",
    "state_dict_ema",
    "model_ema",
    "net",
    "module",
    "weights",
)
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "backbone.", "encoder.")
COUNTER = ".num_batches_tracked"  # of batch norms: training alone reads it, and files of old versions lack it
SHOWN = 5  # clashing names that an error lists


def read_weights(path: str | Path) -> Weights:
    """Names and tensors of a .safetensors, .pth, .pt or .bin file, on the CPU. Pickled code is never executed."""
    path = Path(path)
    if not path.is_file():
        raise BadCheckpoint(
            f"expected a checkpoint file (.safetensors, .pth, .pt, .bin), got {path}: no such file"
        )
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadCheckpoint(
            f"{path} holds more than tensors: reading it would execute code of the file, which steadygaze never does. "
            "Where you trust it, save its state_dict, best as .safetensors."
        ) from error
    except Exception as error:  # safetensors, zip and torch each have their own
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise BadCheckpoint(f"{path} is no readable checkpoint ({reason})") from error
    return _unwrap(content, path)


def _unwrap(content: Any, path: Path) -> Weights:
    """The dict of tensors inside common wrappers, such as {"model": ..., "epoch": ...}."""
    for _ in range(3):
        if not isinstance(content, Mapping):
            break
        tensors = {name: value for name, value in content.items() if isinstance(value, Tensor)}
        inner = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if inner is None and tensors:
            return tensors
        content = inner
    raise BadCheckpoint(
        f"expected a state dict in {path}, by itself or under one of {', '.join(WRAPPERS)}, but found no tensors"
    )


def match_names(weights: Weights, model: nn.Module) -> Weights:
    """Strip prefixes such as "module." that every name carries and the model's own do not."""
    wanted = set(model.state_dict())
    while not wanted & set(weights):
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in weights)), None)
        if prefix is None:
            break
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def fit(model: nn.Module, weights: Weights, source: str) -> None:
    """Load the weights strictly; `BadCheckpoint` names what is missing, unexpected or of another shape."""
    weights, wanted = match_names(weights, model), model.state_dict()
    weights = {name: value for name, value in wanted.items() if name.endswith(COUNTER)} | weights
    missing = sorted(set(wanted) - set(weights))
    unexpected = sorted(set(weights) - set(wanted))
    clashes = [
        f"{name}: model {tuple(wanted[name].shape)}, file {tuple(weights[name].shape)}"
        for name in wanted
        if name in weights and wanted[name].shape != weights[name].shape
    ]
    if missing or unexpected or clashes:
        groups = (("missing", missing), ("unexpected", unexpected), ("of another shape", clashes))
        told = "; ".join(f"{len(names)} {kind} ({_some(names)})" for kind, names in groups if names)
        raise BadCheckpoint(
            f"{source} does not fit {type(model).__name__}, which expects {len(wanted)} tensors: {told}. "
            "Give the model name these weights were trained with."
        )
    model.load_state_dict(weights)


def weights_hash(model: nn.Module) -> str:
    """First 16 hex digits of the sha256 over all names and bytes of the state dict, in order of name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no details").splitlines()[0]
