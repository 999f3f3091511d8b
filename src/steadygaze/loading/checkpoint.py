"""Weights from files: read without executing code, loaded strictly into a model, and hashed."""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import socket
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from steadygaze.data.decoding import first_line
from steadygaze.errors import CheckpointError, SteadygazeError
from steadygaze.loading.paths import check_checkpoint_path
from steadygaze.untrusted import check_torch_file

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
    "teacher",
)
PREFIXES = ("module.", "_orig_mod.", "model.", "net.", "backbone.", "encoder.")
MAX_EXPANDED = 2**24  # bytes up to which a tensor may repeat its data, as `expand` does
COUNTER = ".num_batches_tracked"  # of batch norms: only training reads it, and files of old versions lack it
MAX_CLASSES = 100_000  # of a classifier whose width is read from a file
SHOWN = 5  # names that an error lists
MAX_NAME = 200  # characters of each


def read_weights(path: str | Path) -> Weights:
    """Names and tensors of a .safetensors, .pth, .pt or .bin file. Pickled code is never executed."""
    path = Path(path)
    check_checkpoint_path(path)
    try:
        check_checkpoint(path)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            content: Any = load_file(path)
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as that of a TorchScript file, before our error
                content = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} contains more than tensors: reading it would execute code from the file, which "
            "steadygaze never does. If you trust it, save its state_dict, preferably as .safetensors."
        ) from error
    except Exception as error:  # safetensors, zipfile and torch each raise their own kinds
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise CheckpointError(f"{path} is not a readable checkpoint ({reason})") from error
    weights = _unwrap(content, path)
    size = path.stat().st_size
    for name, value in weights.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{path}: expected names of tensors, got {name!r:.80}")
        kind = _unusual_kind(value)
        if not kind and value.untyped_storage().nbytes() > size:
            kind = f"larger than the file: {tuple(value.shape)}"
        if kind:
            raise CheckpointError(
                f"{path}: expected dense tensors of real numbers, but {name:.200} is {kind}"
            )
    return weights


def check_checkpoint(path: str | Path) -> None:
    """`CheckpointError` for a torch file that takes much more memory than its size, before it is read."""
    path = Path(path)
    if path.suffix == ".safetensors":
        return  # its header gives every tensor a place of its own in the file
    try:
        check_torch_file(path)
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is not a readable checkpoint ({first_line(error)})") from error


def _unusual_kind(value: Tensor) -> str | None:
    """What a tensor is that no model can load, or that is larger than the file; None for any other."""
    if value.is_quantized:
        return "quantized"
    if value.layout != torch.strided:
        return f"sparse ({value.layout})"
    if value.is_meta:
        return "without data (a meta tensor)"
    if value.is_complex():
        return f"complex ({value.dtype})"
    if value.numel() * value.element_size() > max(value.untyped_storage().nbytes(), MAX_EXPANDED):
        return f"larger than its data: {tuple(value.shape)} expanded"
    return None


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
    raise CheckpointError(
        f"expected a state dict in {path}, by itself or under one of {', '.join(WRAPPERS)}, "
        "but it contains no tensors"
    )


def match_names(weights: Weights, model: nn.Module) -> Weights:
    """Strip prefixes such as "module." that every name in the file has and the model's own names do not."""
    wanted = set(model.state_dict())
    while weights and not wanted & set(weights):
        prefix = next((p for p in PREFIXES if all(name.startswith(p) for name in weights)), None)
        if prefix is None:
            break
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    return weights


def fit(model: nn.Module, weights: Weights, source: str) -> None:
    """Load the weights strictly; `CheckpointError` lists what is missing, unexpected or of another shape."""
    expected = model.state_dict()
    counters = {name: value for name, value in expected.items() if name.endswith(COUNTER)}
    weights = counters | match_names(weights, model)
    missing = sorted(set(expected) - set(weights))
    unexpected = sorted(set(weights) - set(expected))
    mismatched = [
        f"{name}: model {tuple(expected[name].shape)}, file {tuple(weights[name].shape)}"
        for name in expected
        if name in weights and expected[name].shape != weights[name].shape
    ]
    mistyped = [
        f"{name}: model {expected[name].dtype}, file {weights[name].dtype}"
        for name in expected
        if name in weights and _number_kind(expected[name]) != _number_kind(weights[name])
    ]
    if missing or unexpected or mismatched or mistyped:
        groups = (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", mismatched),
            ("of another type", mistyped),
        )
        differences = "; ".join(f"{len(names)} {kind} ({_first(names)})" for kind, names in groups if names)
        raise CheckpointError(
            f"{source} does not fit {type(model).__name__}, which expects {len(expected)} tensors: "
            f"{differences}. Give the model name that these weights were trained with."
        )
    _check_finite(model, weights, source)
    model.load_state_dict(weights)


def _number_kind(value: Tensor) -> str:
    return "float" if value.is_floating_point() else "bool" if value.dtype == torch.bool else "integer"


def _check_finite(model: nn.Module, weights: Weights, source: str) -> None:
    """Raise `CheckpointError` for parameters that are not finite in the model's type. Buffers may be."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        value = weights[name].to(parameter.dtype)
        if not torch.isfinite(value).all():
            raise CheckpointError(
                f"{source}: {name} has NaN or infinite values as {parameter.dtype}. The training that wrote "
                "it may have diverged: use an earlier checkpoint."
            )


def agreed_width(num_classes: int | None, weights: Weights, heads: Sequence[str], origin: str) -> int | None:
    """The requested number of classes, or else that of the checkpoint; CheckpointError if they disagree."""
    width = head_width(weights, heads)
    if num_classes is not None and width not in (None, num_classes):
        raise CheckpointError(
            f"{origin} does not fit num_classes={num_classes}: its classifier has {width:,} classes. Leave "
            f"it out, or give weights that were trained with {num_classes} classes.",
            option="num_classes",
        )
    return width if num_classes is None else num_classes  # 0: no classifier


def head_width(weights: Weights, heads: Sequence[str]) -> int | None:
    """Number of classes of the classifier in a checkpoint, whatever prefix its names have, or None."""
    for head in heads:
        for name, value in weights.items():
            if value.ndim in (2, 4) and (name == f"{head}.weight" or name.endswith(f".{head}.weight")):
                if value.shape[0] > MAX_CLASSES:
                    raise CheckpointError(
                        f"{name}: expected a classifier of at most {MAX_CLASSES:,} classes, got "
                        f"{value.shape[0]:,}. Give num_classes if that is meant.",
                        option="num_classes",
                    )
                return int(value.shape[0])
    for head in heads:
        layers = [name for name in weights if re.search(rf"(^|\.){re.escape(head)}\.\d+\.weight$", name)]
        if layers:
            raise CheckpointError(
                f"the classifier of these weights has several layers ({_first(layers)}), and what lies "
                f"between them is not stated. Build the module with that head in Python, and give it with "
                f"the file: load_model(module, checkpoint)."
            )
    return None


def weights_hash(model: nn.Module) -> str:
    """First 16 hex digits of the sha256 over all names and bytes of the state dict, in order of name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _first(names: list[str]) -> str:
    return ", ".join(name[:MAX_NAME] for name in names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


# -- the hub ------------------------------------------------------------


@contextmanager
def hub(name: str, local: bool = False) -> Iterator[None]:
    """Turn the hub's errors into `CheckpointError`. Without a network, search the local cache only.

    Args:
        local: The name is a folder or a file: what it names on the hub is not contacted either.
    """
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    proxied = any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"))
    online = not (local or before) and (proxied or _resolves(urlsplit(constants.ENDPOINT).hostname))
    constants.HF_HUB_OFFLINE = not online
    try:
        yield
    except SteadygazeError:
        raise
    except Exception as error:
        if not local and not isinstance(error, OSError | RuntimeError | ValueError | pickle.UnpicklingError):
            raise  # no fault of the hub; of a folder, everything is the folder's
        reason = shorten(first_line(error), 200 if local else 120)
        if local:
            raise CheckpointError(f"{name} cannot be read as the files of a model ({reason})") from error
        raise CheckpointError(
            f"the weights of {name} are not on this machine and could not be downloaded "
            f"({reason}). Give a local file as checkpoint, or use the model 'embedded'."
        ) from error
    finally:
        constants.HF_HUB_OFFLINE = before


def _resolves(host: str | None) -> bool:
    try:
        return bool(host and socket.getaddrinfo(host, 443))
    except OSError:
        return False
